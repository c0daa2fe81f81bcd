//! `egress-agent trace`: predicts the verdict for a packet of a pod of this node, with the reason, without sending one.

use std::net::IpAddr;
use std::path::PathBuf;

use clap::Args;
use egress_common::wire::{PROTO_ICMP, PROTO_ICMPV6, PROTO_TCP};

use crate::cmd::CliError;
use crate::cmd::page::{Output, PageArgs, names_or_warning};
use crate::cmd::values::{Destination, PodName, Protocol};
use egress_core::display_names::Names;
use egress_datapath::trace::report::TraceReport;
use egress_datapath::trace::test_packet::TestPacket;
use egress_datapath::trace::{TraceError, Tracer};
use egress_kube::admin::{self, PodError};
use egress_kube::client::{ClientError, connect_as_user};

#[derive(Args, Debug)]
pub(super) struct TraceArgs {
    /// Pod of this node that sends the packet
    #[arg(long, env = "EGRESS_AGENT_TRACE_POD", value_name = "NAMESPACE/NAME", required_unless_present = "pod_ip")]
    pod: Option<PodName>,
    /// Address of the pod, if neither the agent nor the API server knows it
    #[arg(long, env = "EGRESS_AGENT_TRACE_POD_IP", value_name = "ADDRESS", conflicts_with = "pod")]
    pod_ip: Option<IpAddr>,
    /// Destination of the packet; for IPv6 with a port, [ADDRESS]:PORT
    #[arg(long, env = "EGRESS_AGENT_TRACE_TO", value_name = "ADDRESS[:PORT]")]
    to: Destination,
    /// tcp, udp, icmp, sctp or a protocol's number [default: tcp with a port, else icmp]
    #[arg(long, env = "EGRESS_AGENT_TRACE_PROTO", value_name = "PROTOCOL")]
    proto: Option<Protocol>,
    /// The pod's port, or identifier of a ping, to trace an existing flow
    #[arg(long, env = "EGRESS_AGENT_TRACE_FROM_PORT", value_name = "PORT", default_value_t = 40_000)]
    from_port: u16,
    /// A packet in the middle of a connection, not its first one
    #[arg(long, env = "EGRESS_AGENT_TRACE_UNDER_WAY")]
    under_way: bool,
    /// Length of the packet (bytes, from the IP header on) [default: its headers]
    #[arg(
        long,
        env = "EGRESS_AGENT_TRACE_LENGTH",
        value_name = "BYTES",
        default_value_t = 0,
        hide_default_value = true
    )]
    length: u16,
    /// TTL or hop limit of the packet
    #[arg(long, env = "EGRESS_AGENT_TRACE_TTL", value_name = "HOPS", default_value_t = 64)]
    ttl: u8,
    /// Kubeconfig for the API server, if no agent answers [default: kubectl's rules, else that of a pod of the cluster]
    #[arg(long, env = "EGRESS_AGENT_KUBECONFIG", value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    #[command(flatten)]
    page: PageArgs,
}

/// Why there is no trace.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NoTrace {
    #[error("protocol {0} has ports: --to ADDRESS:PORT")]
    NeedsPort(u8),
    #[error("{0} has no ports: --to ADDRESS")]
    HasNoPort(&'static str),
    #[error(
        "{pod} has no address of the family of {to} on this node: a pod is traced on its own node, see \
         `kubectl get pod -o wide`"
    )]
    NoAddress { pod: PodName, to: IpAddr },
    #[error("{pod} is not on this node, whose agent is that of {node}: a pod is traced on its own node")]
    NotHere { pod: PodName, node: String },
    #[error("no agent answers at {}, and the API server does not return {pod}: {source}; give --pod-ip", .socket.display())]
    UnknownPod { pod: PodName, socket: PathBuf, source: PodError },
    #[error("no agent answers at {}, and {source}; give --pod-ip", .socket.display())]
    NoServer { socket: PathBuf, source: Box<ClientError> },
    #[error(transparent)]
    Trace(#[from] TraceError),
}

pub(super) fn run(args: &TraceArgs) -> Result<(), CliError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let names = runtime.block_on(names_or_warning(&args.page.socket));
    let from = runtime.block_on(sender(args, &names))?;
    let probe = args.probe(from)?;
    let object = egress_datapath::object::embedded().unwrap_or_default();
    let mut tracer = Tracer::new(&args.page.bpffs, object).map_err(NoTrace::from)?;
    let traced = tracer.trace(&probe).map_err(NoTrace::from)?;
    let report = TraceReport::of(&traced, &names);
    match args.page.output {
        Output::Table => print!("{}", report.text()),
        Output::Json => println!("{}", serde_json::to_string_pretty(&report).map_err(std::io::Error::other)?),
    }
    if report.agrees { Ok(()) } else { Err(CliError::Disagree) }
}

/// The pod's address of the destination's family: from the agent, else from the API server.
async fn sender(args: &TraceArgs, names: &Names) -> Result<IpAddr, NoTrace> {
    let pod = match (&args.pod_ip, &args.pod) {
        (Some(address), _) => return Ok(*address),
        (None, Some(pod)) => pod,
        // The command line has one of the two.
        (None, None) => return Ok(args.to.address),
    };
    let to = args.to.address;
    let fits = |address: &IpAddr| address.is_ipv4() == to.is_ipv4();
    let known = names.addresses_of(&pod.to_string());
    if let Some(address) = known.iter().copied().find(fits) {
        return Ok(address);
    }
    match &names.node {
        Some(node) if known.is_empty() => return Err(NoTrace::NotHere { pod: pod.clone(), node: node.clone() }),
        Some(_) => return Err(NoTrace::NoAddress { pod: pod.clone(), to }),
        None => {}
    }
    let socket = args.page.socket.clone();
    let client = match connect_as_user(args.kubeconfig.as_deref()).await {
        Ok(client) => client,
        Err(error) => return Err(NoTrace::NoServer { socket, source: Box::new(error) }),
    };
    let addresses = admin::pod_addresses(client, &pod.namespace, &pod.name).await;
    let addresses = addresses.map_err(|source| NoTrace::UnknownPod { pod: pod.clone(), socket, source })?;
    addresses.into_iter().find(fits).ok_or_else(|| NoTrace::NoAddress { pod: pod.clone(), to })
}

impl TraceArgs {
    fn probe(&self, from: IpAddr) -> Result<TestPacket, NoTrace> {
        let Destination { address: to, port } = self.to;
        let ping = if to.is_ipv4() { PROTO_ICMP } else { PROTO_ICMPV6 };
        let protocol = match (self.proto, port) {
            (Some(Protocol(PROTO_ICMP | PROTO_ICMPV6)), Some(_)) => return Err(NoTrace::HasNoPort("icmp")),
            // Of either family.
            (Some(Protocol(PROTO_ICMP | PROTO_ICMPV6)) | None, None) => ping,
            (Some(Protocol(number)), None) if TestPacket::has_ports(number) => return Err(NoTrace::NeedsPort(number)),
            (Some(Protocol(number)), Some(_)) if !TestPacket::has_ports(number) => {
                return Err(NoTrace::HasNoPort("this protocol"));
            }
            (Some(Protocol(number)), _) => number,
            (None, Some(_)) => PROTO_TCP,
        };
        let dport = port.unwrap_or_default();
        let Self { from_port: sport, under_way, length, ttl, .. } = *self;
        Ok(TestPacket { from, to, protocol, sport, dport, under_way, ttl, length })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::parse_flags;

    fn parse(arguments: &str) -> Result<TraceArgs, clap::Error> {
        parse_flags(arguments.split(' '))
    }

    fn protocol(arguments: &str) -> Result<u8, String> {
        let args = parse(&format!("--pod-ip 10.0.0.1 {arguments}")).map_err(|error| error.to_string())?;
        args.probe(IpAddr::from([10, 0, 0, 1])).map(|probe| probe.protocol).map_err(|error| error.to_string())
    }

    #[test]
    fn the_protocol_follows_from_the_arguments() {
        for (arguments, number) in [
            ("--to 198.51.100.10:80", 6),
            ("--to 198.51.100.10", 1),
            ("--to 2001:db8::1", 58),
            ("--to [2001:db8::1]:443", 6),
            ("--to [2001:db8::1] --proto icmp", 58),
            ("--to 198.51.100.10:53 --proto udp", 17),
            ("--to 198.51.100.10:9 --proto 132", 132),
            ("--to 198.51.100.10 --proto 47", 47),
        ] {
            assert_eq!(protocol(arguments), Ok(number), "{arguments}");
        }
        for arguments in
            ["--to 198.51.100.10 --proto tcp", "--to 198.51.100.10:1 --proto icmp", "--to 1.2.3.4:1 --proto 47"]
        {
            assert!(protocol(arguments).expect_err(arguments).contains("--to ADDRESS"), "{arguments}");
        }
    }

    #[test]
    fn wrong_lines_are_refused() {
        for arguments in [
            "--to 198.51.100.10",
            "--pod-ip 10.0.0.1",
            "--pod one --to 198.51.100.10",
            "--pod a/b/c --to 198.51.100.10",
            "--pod a/b --pod-ip 10.0.0.1 --to 198.51.100.10",
            "--pod-ip 10.0.0.1 --to world",
            "--pod-ip 10.0.0.1 --to 198.51.100.10 --proto 256",
        ] {
            assert!(parse(arguments).is_err(), "{arguments}");
        }
        assert_eq!(parse("--pod a/b --to 1.2.3.4").expect("a line").pod.expect("a pod").to_string(), "a/b");
    }
}
