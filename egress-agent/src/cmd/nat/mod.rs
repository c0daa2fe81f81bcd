//! `egress-agent nat`: the NAT mappings of this node, from the pinned map. Each line is printed as it is found.

mod blocks;
pub(crate) mod log;
pub mod show;

use std::io::{self, BufWriter};
use std::net::IpAddr;
use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use egress_common::abi::{Addr, NatEntry, Origin, Tuple};
use egress_common::decide::phase::Phase;
use serde::Serialize;

use crate::cmd::nat::blocks::BlockFilters;
use crate::cmd::nat::log::LogFilters;
use crate::cmd::nat::show::{EntryVisitor, Holders, Out, count, list};

use crate::cmd::CliError;
use crate::cmd::page::{PageArgs, names_or_warning};
use crate::cmd::values::{Destination, PodName, Protocol};
use egress_core::display_names::Names;
use egress_datapath::maps::nat_entries::{Entry, shares, walk};
use egress_datapath::maps::port_blocks;

#[derive(Args, Debug)]
pub(super) struct NatArgs {
    #[command(subcommand)]
    what: NatCommand,
}

#[derive(Subcommand, Debug)]
enum NatCommand {
    /// One line for each mapping
    List(Filters),
    /// How many there are, for each egress IP; and, without a filter, which pods and objects hold most flows and mappings
    Count(Filters),
    /// One entry for each block of ports that belongs to a pod (`--port-block-size` of the agent)
    Blocks(BlockFilters),
    /// Which pods had which blocks, and when, by this node's log (`--nat-log` of the agent)
    Log(LogFilters),
}

#[derive(Args, Debug)]
struct Filters {
    /// Only mappings on this egress IP, or on this address of this node
    #[arg(long, env = "EGRESS_AGENT_NAT_EGRESS_IP", value_name = "ADDRESS")]
    egress_ip: Option<IpAddr>,
    /// Only those of the pod with this address
    #[arg(long, env = "EGRESS_AGENT_NAT_POD_IP", value_name = "ADDRESS")]
    pod_ip: Option<IpAddr>,
    /// Only those of this pod of this node; needs a running agent
    #[arg(long, env = "EGRESS_AGENT_NAT_POD", value_name = "NAMESPACE/NAME", conflicts_with = "pod_ip")]
    pod: Option<PodName>,
    /// Only those to this destination; for IPv6 with a port, [ADDRESS]:PORT
    #[arg(long, env = "EGRESS_AGENT_NAT_TO", value_name = "ADDRESS[:PORT]")]
    to: Option<Destination>,
    /// Only those of tcp, udp, icmp, sctp or a protocol by its number
    #[arg(long, env = "EGRESS_AGENT_NAT_PROTO", value_name = "PROTOCOL")]
    proto: Option<Protocol>,
    /// Only those of pods of this node, by its address, or by its name with a running agent; `here` is the node of the command
    #[arg(long, env = "EGRESS_AGENT_NAT_NODE", value_name = "NODE")]
    node: Option<String>,
    /// Only TCP connections in this state
    #[arg(long, env = "EGRESS_AGENT_NAT_STATE", value_name = "STATE")]
    state: Option<MappingState>,
    #[command(flatten)]
    page: PageArgs,
}

impl Filters {
    fn are_any(&self) -> bool {
        let Self { egress_ip, pod_ip, pod, to, proto, node, state, page: _ } = self;
        egress_ip.is_some()
            || pod_ip.is_some()
            || pod.is_some()
            || to.is_some()
            || proto.is_some()
            || node.is_some()
            || state.is_some()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "snake_case")]
enum MappingState {
    /// At least one side has not sent yet
    Opening,
    /// Both sides have sent
    Established,
    /// Both sides have finished, or one has reset
    Closing,
}

impl MappingState {
    const fn of(phase: Phase) -> Self {
        match phase {
            Phase::Opening => Self::Opening,
            Phase::Established => Self::Established,
            Phase::Closing => Self::Closing,
        }
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Opening => "opening",
            Self::Established => "established",
            Self::Closing => "closing",
        }
    }
}

/// Why nothing is listed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NoMappings {
    #[error("no programs of an agent are here (no pins below {})", .0.display())]
    NoPrograms(PathBuf),
    #[error("the pins below {} cannot be read: {source}; root is required", .bpffs.display())]
    Unreadable { bpffs: PathBuf, source: io::Error },
    #[error("cannot write the list: {0}")]
    Unwritten(#[source] io::Error),
    #[error(
        "{0} is not known here: the agent of this node does not answer, or it is a pod of another node; give --pod-ip"
    )]
    UnknownPod(PodName),
    #[error("node {0} is not known here: does the agent answer? Give its address")]
    UnknownNode(String),
}

/// The filters on keys and values.
struct Wanted<'f> {
    filters: &'f Filters,
    pods: Vec<IpAddr>,
    node: Option<Of>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Of {
    ThisNode,
    Node(IpAddr),
}

impl<'f> Wanted<'f> {
    fn new(filters: &'f Filters, names: &Names) -> Result<Self, NoMappings> {
        let mut pods: Vec<IpAddr> = filters.pod_ip.into_iter().collect();
        if let Some(pod) = &filters.pod {
            pods = names.addresses_of(&pod.to_string());
            if pods.is_empty() {
                return Err(NoMappings::UnknownPod(pod.clone()));
            }
        }
        let node = filters.node.as_deref().map(|node| named(node, names)).transpose()?;
        Ok(Self { filters, pods, node })
    }

    fn matches(&self, key: &Tuple, mapping: &NatEntry) -> bool {
        let Filters { egress_ip, to, proto, .. } = self.filters;
        let is = |wanted: &Option<IpAddr>, addr: &Addr| wanted.is_none_or(|wanted| wanted == addr.to_ip());
        let is_to =
            to.is_none_or(|to| to.address == key.daddr.to_ip() && to.port.is_none_or(|port| port == key.dport()));
        let is_of = match self.node {
            None => true,
            Some(Of::ThisNode) => mapping.origin() != Some(Origin::Remote),
            Some(Of::Node(node)) => mapping.origin() == Some(Origin::Remote) && mapping.source_node.to_ip() == node,
        };
        is(egress_ip, &mapping.other.daddr)
            && is_to
            && is_of
            && (self.pods.is_empty() || self.pods.contains(&key.saddr.to_ip()))
            // A ping's protocol depends on the family.
            && proto.is_none_or(|Protocol(wanted)| wanted == key.protocol || wanted == 1 && key.protocol == 58)
    }

    fn is_in_state(&self, entry: &Entry) -> bool {
        self.filters.state.is_none_or(|state| entry.phase.map(MappingState::of) == Some(state))
    }
}

fn named(node: &str, names: &Names) -> Result<Of, NoMappings> {
    if node == "here" || names.node.as_deref() == Some(node) {
        return Ok(Of::ThisNode);
    }
    if let Ok(address) = node.parse() {
        return Ok(Of::Node(address));
    }
    let found = names.nodes.iter().find(|(_, name)| *name == node).map(|(address, _)| Of::Node(*address));
    found.ok_or_else(|| NoMappings::UnknownNode(node.to_owned()))
}

pub(super) fn run(args: &NatArgs) -> Result<(), CliError> {
    let (filters, is_list) = match &args.what {
        NatCommand::List(filters) => (filters, true),
        NatCommand::Count(filters) => (filters, false),
        NatCommand::Blocks(filters) => return print_blocks(filters, &known_names(&filters.page)?),
        NatCommand::Log(filters) => return print_log(filters),
    };
    let names = known_names(&filters.page)?;
    let wanted = Wanted::new(filters, &names)?;
    let mut out = Out { to: BufWriter::new(io::stdout().lock()), has_failed: false };
    let walked =
        |visit: &mut EntryVisitor<'_>| walk(&filters.page.bpffs, |key, mapping| wanted.matches(key, mapping), visit);
    let unreadable = |source| NoMappings::Unreadable { bpffs: filters.page.bpffs.clone(), source };
    let done = if is_list {
        list(&wanted, &names, &mut out, walked)
    } else {
        let shares = if filters.are_any() { None } else { shares(&filters.page.bpffs).map_err(unreadable)? };
        count(&wanted, &names, &mut out, walked, shares.map(|shares| Holders::of(shares, &names)))
    };
    match done {
        Ok(Some(())) => Ok(()),
        Ok(None) => Err(NoMappings::NoPrograms(filters.page.bpffs.clone()).into()),
        // The reader has closed the pipe.
        Err(error) if out.has_failed && error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        Err(error) if out.has_failed => Err(NoMappings::Unwritten(error).into()),
        Err(source) => Err(unreadable(source).into()),
    }
}

fn known_names(page: &PageArgs) -> Result<Names, CliError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    Ok(runtime.block_on(names_or_warning(&page.socket)))
}

fn print_log(filters: &LogFilters) -> Result<(), CliError> {
    match log::print(filters, &mut BufWriter::new(io::stdout().lock()))? {
        // The reader has closed the pipe.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        done => done.map_err(|error| NoMappings::Unwritten(error).into()),
    }
}

fn print_blocks(filters: &BlockFilters, names: &Names) -> Result<(), CliError> {
    let bpffs = &filters.page.bpffs;
    let unreadable = |source| NoMappings::Unreadable { bpffs: bpffs.clone(), source };
    let blocks = port_blocks::read(bpffs).map_err(unreadable)?.ok_or_else(|| NoMappings::NoPrograms(bpffs.clone()))?;
    let mut out = Out { to: BufWriter::new(io::stdout().lock()), has_failed: false };
    match blocks::print(&blocks, filters, names, &mut out) {
        // The reader has closed the pipe.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        done => done.map_err(|error| NoMappings::Unwritten(error).into()),
    }
}

#[cfg(test)]
pub(in crate::cmd) mod tests {
    use egress_common::abi::Direction;

    use super::*;
    use crate::config::parse_flags;

    pub(super) fn filters(arguments: &str) -> Filters {
        let arguments = arguments.split(' ').filter(|argument| !argument.is_empty());
        parse_flags(arguments).expect("a line")
    }

    pub(super) fn mapping() -> (Tuple, NatEntry) {
        let addr = |text: &str| Addr::from(text.parse::<IpAddr>().expect("a literal"));
        let (pod, world) = (addr("10.244.2.10"), addr("198.51.100.10"));
        let forward = Tuple::new(Direction::Egress, pod, world, 4000, 80, 6);
        let reverse = Tuple::new(Direction::Ingress, world, addr("172.18.0.100"), 80, 4001, 6);
        (forward, NatEntry::new(reverse, Origin::Remote, addr("172.18.0.3"), 7, 1))
    }

    pub(in crate::cmd) fn names() -> Names {
        let ip = |text: &str| text.parse::<IpAddr>().expect("a literal");
        Names {
            node: Some("node1".to_owned()),
            pods: [(ip("10.244.1.10"), "red/one".to_owned())].into(),
            objects: [(7, "first".to_owned())].into(),
            nodes: [(ip("172.18.0.3"), "node2".to_owned())].into(),
            egress_ips: [(ip("172.18.0.100"), 7)].into(),
        }
    }

    #[test]
    fn each_filter_matches() {
        let (key, mapping) = mapping();
        for (arguments, takes) in [
            ("", true),
            ("--egress-ip 172.18.0.100", true),
            ("--egress-ip 172.18.0.101", false),
            ("--pod-ip 10.244.2.10", true),
            ("--pod-ip 10.244.2.11", false),
            ("--pod red/one", false),
            ("--to 198.51.100.10", true),
            ("--to 198.51.100.10:80", true),
            ("--to 198.51.100.10:81", false),
            ("--proto tcp", true),
            ("--proto udp", false),
            ("--node node2", true),
            ("--node 172.18.0.3", true),
            ("--node 172.18.0.4", false),
            ("--node here", false),
            ("--node node1", false),
        ] {
            let filters = filters(arguments);
            let wanted = Wanted::new(&filters, &names()).expect("known");
            assert_eq!(wanted.matches(&key, &mapping), takes, "{arguments}");
        }
        for arguments in ["--pod red/two", "--node node9"] {
            assert!(Wanted::new(&filters(arguments), &names()).is_err(), "{arguments}");
        }
    }
}
