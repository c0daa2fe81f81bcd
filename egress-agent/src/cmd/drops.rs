//! `egress-agent drops`: dropped packets as the agent samples them, with the names of pods and objects.

use std::collections::BTreeSet;
use std::io::{self, Write};
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Args;
use jiff::Timestamp;
use nix::net::if_::if_indextoname;

use crate::cmd::CliError;
use crate::cmd::page::{DEFAULT_SOCKET, Output, end_of_input};
use crate::cmd::values::PodName;
use crate::debug::socket::{AskError, drops, names};
use egress_core::display_names::Names;
use egress_core::dropped_packet::DroppedPacket;
use egress_datapath::events::drops::{DropFilter, DropLine, ObjectFilter, Sample};
use egress_datapath::trace::questions::protocol;

#[derive(Args, Debug)]
pub(super) struct DropsArgs {
    /// Also show new drops, until Ctrl-C or the agent's end
    #[arg(short, long, env = "EGRESS_AGENT_DROPS_FOLLOW")]
    follow: bool,
    /// Only drops for this reason, by its label. Also a sample: each CPU reports one drop of any reason in ten milliseconds;
    /// /metrics has the counts
    #[arg(long, env = "EGRESS_AGENT_DROPS_REASON", value_name = "REASON", value_parser = reason)]
    reason: Option<String>,
    /// Only drops of packets from or to this pod of this node
    #[arg(long, env = "EGRESS_AGENT_DROPS_POD", value_name = "NAMESPACE/NAME")]
    pod: Option<PodName>,
    /// Only drops of packets from or to this address: of a pod of any node, an egress IP or a destination
    #[arg(long, env = "EGRESS_AGENT_DROPS_ADDRESS", value_name = "ADDRESS")]
    address: Option<IpAddr>,
    /// Only drops of packets of this object: of pods of this node that it selects, or from or to one of its egress IPs. Its name, or
    /// as `egress-agent status` shows it
    #[arg(long, env = "EGRESS_AGENT_DROPS_OBJECT", value_name = "NAME")]
    object: Option<String>,
    /// End when standard input ends: `kubectl exec --stdin` closes it when its connection is gone, and ends nothing else
    #[arg(long, env = "EGRESS_AGENT_DROPS_END_WITH_STDIN")]
    end_with_stdin: bool,
    /// Socket of the agent
    #[arg(long, env = "EGRESS_AGENT_SOCKET", value_name = "PATH", default_value = DEFAULT_SOCKET)]
    socket: PathBuf,
    /// Format of the output; JSON is one object per line
    #[arg(short, long, env = "EGRESS_AGENT_OUTPUT", value_name = "FORMAT", default_value = "table")]
    output: Output,
}

/// Why no drops are shown.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NoDrops {
    #[error("{pod} is not a pod of this node{}; give --address", .node.as_ref().map(|node| format!(", {node}")).unwrap_or_default())]
    UnknownPod { pod: PodName, node: Option<String> },
    #[error("no object {name:?} is known here; those with an egress IP are {}", list(.known))]
    UnknownObject { name: String, known: BTreeSet<String> },
}

fn list(names: &BTreeSet<String>) -> String {
    match names.is_empty() {
        true => "none".to_owned(),
        false => names.iter().map(String::as_str).collect::<Vec<_>>().join(", "),
    }
}

impl DropsArgs {
    fn filter(&self, names: &Names) -> Result<DropFilter, NoDrops> {
        let mut ends: Vec<BTreeSet<IpAddr>> = self.address.map(|address| [address].into()).into_iter().collect();
        if let Some(pod) = &self.pod {
            let addresses: BTreeSet<IpAddr> = names.addresses_of(&pod.to_string()).into_iter().collect();
            if addresses.is_empty() {
                return Err(NoDrops::UnknownPod { pod: pod.clone(), node: names.node.clone() });
            }
            ends.push(addresses);
        }
        let object = self.object.as_deref().map(|name| object_filter(name, names)).transpose()?;
        Ok(DropFilter { reason: self.reason.clone(), ends, object })
    }
}

/// An object is named as in its manifest, or with its kind as in all output.
fn object_filter(name: &str, names: &Names) -> Result<ObjectFilter, NoDrops> {
    let is_named = |written: &str| written == name || written.rsplit_once(' ').is_some_and(|(_, alone)| alone == name);
    let egress_ids: BTreeSet<u32> =
        names.objects.iter().filter(|(_, written)| is_named(written)).map(|(id, _)| *id).collect();
    if egress_ids.is_empty() {
        let known = names.objects.values().cloned().collect();
        return Err(NoDrops::UnknownObject { name: name.to_owned(), known });
    }
    let egress_ips = names.egress_ips.iter().filter(|(_, id)| egress_ids.contains(id)).map(|(address, _)| *address);
    Ok(ObjectFilter { egress_ips: egress_ips.collect(), egress_ids })
}

/// Drops that a slow reader misses are counted before the filter.
fn missed(count: u64, filter: &DropFilter) -> String {
    let of = if *filter == DropFilter::default() { "" } else { ", whether asked for or not" };
    format!("... and {count} more{of}")
}

fn reason(text: &str) -> Result<String, String> {
    use egress_common::abi::{Class, Verdict};
    let drops = || Verdict::ALL.iter().filter(|verdict| verdict.class() == Class::Drop).map(|verdict| verdict.label());
    match drops().find(|label| *label == text) {
        Some(label) => Ok(label.to_owned()),
        None => Err(format!("the reasons are {}", drops().collect::<Vec<_>>().join(", "))),
    }
}

/// A sample with the names that the agent knows.
fn named(sample: &Sample, names: &Names) -> DroppedPacket {
    let pod = |end: &SocketAddr| names.pods.get(&end.ip()).cloned();
    // The programs know the policy of a pod of this node; a gateway knows that of an egress IP.
    let by_egress_ip = |end: &SocketAddr| names.egress_ips.get(&end.ip()).copied();
    let egress_id = match sample.egress_id {
        0 => by_egress_ip(&sample.source).or_else(|| by_egress_ip(&sample.destination)).unwrap_or_default(),
        id => id,
    };
    let time = Timestamp::try_from(sample.at).unwrap_or_default();
    // An unknown index has an empty name.
    let interface = if_indextoname(sample.ifindex).ok().and_then(|name| name.into_string().ok());
    let interface = interface.filter(|name| !name.is_empty());
    DroppedPacket {
        time: format!("{time:.3}"),
        reason: sample.reason.to_string(),
        protocol: protocol(sample.protocol),
        source: sample.source,
        destination: sample.destination,
        source_pod: pod(&sample.source),
        destination_pod: pod(&sample.destination),
        object: names.objects.get(&egress_id).cloned(),
        egress_id,
        bytes: sample.length,
        interface: interface.unwrap_or_else(|| sample.ifindex.to_string()),
    }
}

/// The output, with the agent's names.
struct Show<'a> {
    args: &'a DropsArgs,
    filter: DropFilter,
    names: Names,
    /// When the names were read.
    named: Instant,
}

/// Names are read again if one is missing, but not more often than this.
const NAMES_INTERVAL: Duration = Duration::from_secs(5);

impl Show<'_> {
    async fn line(&mut self, line: DropLine) -> io::Result<()> {
        let mut out = io::stdout().lock();
        let sample = match line {
            DropLine::LeftOut(count) if self.args.output == Output::Json => {
                return writeln!(out, "{{\"left_out\":{count}}}");
            }
            DropLine::LeftOut(count) => return writeln!(out, "{}", missed(count, &self.filter)),
            // An older agent does not know all filters and sends more.
            DropLine::Drop(sample) if !self.filter.takes(&sample) => return Ok(()),
            DropLine::Drop(sample) => sample,
        };
        let knows = |end: &SocketAddr| self.names.pods.contains_key(&end.ip());
        if !knows(&sample.source) && !knows(&sample.destination) && self.named.elapsed() >= NAMES_INTERVAL {
            drop(out);
            self.read_names(&self.args.socket).await;
            out = io::stdout().lock();
        }
        let row = named(&sample, &self.names);
        match self.args.output {
            Output::Table => writeln!(out, "{}", row.line()),
            Output::Json => writeln!(out, "{}", serde_json::to_string(&row)?),
        }
    }

    async fn read_names(&mut self, socket: &Path) {
        self.named = Instant::now();
        // An agent that has ended ends the drops too.
        if let Ok(names) = names(socket).await {
            self.names = names;
        }
    }
}

pub(super) fn run(args: &DropsArgs) -> Result<(), CliError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let names = names(&args.socket).await?;
        let filter = args.filter(&names)?;
        let mut show = Show { args, filter: filter.clone(), names, named: Instant::now() };
        let ended = tokio::select! {
            ended = drops(&args.socket, (args.follow, filter), async |line| show.line(line).await) => ended,
            interrupted = tokio::signal::ctrl_c() => return interrupted.map_err(CliError::from),
            () = end_of_input(args.end_with_stdin) => return Ok(()),
        };
        match ended {
            Ok(()) if args.follow => eprintln!("the agent has ended"),
            Ok(()) => {}
            // The reader has closed the pipe.
            Err(AskError::Refused { source, .. }) if source.kind() == io::ErrorKind::BrokenPipe => {}
            Err(error) => return Err(error.into()),
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Sample {
        Sample {
            at: std::time::SystemTime::UNIX_EPOCH + Duration::from_millis(1_500),
            reason: "no_gateway".into(),
            ifindex: u32::MAX,
            egress_id: 3,
            length: 60,
            source: "10.244.1.10:4000".parse().expect("a literal"),
            destination: "198.51.100.10:80".parse().expect("a literal"),
            protocol: 6,
        }
    }

    #[test]
    fn a_line_has_the_names_that_are_known() {
        let sample = sample();
        let mut names = Names::default();
        assert_eq!(
            named(&sample, &names).line(),
            "1970-01-01T00:00:01.500Z no_gateway         tcp 10.244.1.10:4000 -> 198.51.100.10:80, 60 bytes, 4294967295, \
             egress ID 3"
        );
        names.pods.insert(sample.source.ip(), "red/one".to_owned());
        names.objects.insert(3, "first".to_owned());
        let row = named(&sample, &names);
        assert!(row.line().contains("10.244.1.10:4000 (red/one) -> 198.51.100.10:80, 60 bytes, 4294967295, first"));
        let json = serde_json::to_value(&row).expect("JSON");
        assert_eq!((&json["source_pod"], &json["object"]), (&"red/one".into(), &"first".into()));
    }

    /// On the gateway: the pod is another node's, the address is the object's.
    #[test]
    fn a_gateway_names_the_object_of_an_egress_ip() {
        let ip = |text: &str| text.parse::<IpAddr>().expect("a literal");
        let mut names = Names { egress_ips: [(ip("172.18.0.100"), 3)].into(), ..Names::default() };
        names.objects.insert(3, "first".to_owned());
        for (source, destination) in
            [("198.51.100.10:80", "172.18.0.100:4000"), ("172.18.0.100:4000", "198.51.100.10:80")]
        {
            let end = |end: &str| end.parse().expect("a literal");
            let sample = Sample { egress_id: 0, source: end(source), destination: end(destination), ..sample() };
            let row = named(&sample, &names);
            assert_eq!((row.object.as_deref(), row.egress_id), (Some("first"), 3));
        }
        let sample = Sample { egress_id: 0, ..sample() };
        assert_eq!(named(&sample, &names).object, None, "of nothing known");
    }

    #[test]
    fn flags_become_a_filter() {
        let filter = |arguments: &str| {
            let arguments = arguments.split(' ').filter(|argument| !argument.is_empty());
            let args: DropsArgs = crate::config::parse_flags(arguments).expect("a line");
            args.filter(&crate::cmd::nat::tests::names()).map_err(|error| error.to_string())
        };
        assert_eq!(filter(""), Ok(DropFilter::default()));
        let all = filter("--reason map_full --pod red/one --address 198.51.100.10 --object first").expect("known");
        let ip = |text: &str| text.parse::<IpAddr>().expect("a literal");
        assert_eq!(all.ends, [[ip("198.51.100.10")].into(), [ip("10.244.1.10")].into()]);
        let object = ObjectFilter { egress_ids: [7].into(), egress_ips: [ip("172.18.0.100")].into() };
        assert_eq!((all.reason.as_deref(), all.object), (Some("map_full"), Some(object)));
        let unknown = |arguments: &str| filter(arguments).expect_err(arguments);
        assert_eq!(unknown("--pod blue/one"), "blue/one is not a pod of this node, node1; give --address");
        assert_eq!(unknown("--object second"), "no object \"second\" is known here; those with an egress IP are first");
    }

    #[test]
    fn an_object_is_named_with_or_without_its_kind() {
        let objects = [(1, "Egress web"), (2, "web"), (3, "EgressService shop/front")];
        let objects = objects.map(|(id, name)| (id, name.to_owned())).into();
        let names = Names { objects, ..Names::default() };
        let ids = |name: &str| object_filter(name, &names).map(|object| object.egress_ids).unwrap_or_default();
        assert_eq!(ids("web"), [1, 2].into());
        assert_eq!([ids("Egress web"), ids("shop/front"), ids("front")], [[1].into(), [3].into(), [].into()]);
    }

    #[test]
    fn omitted_drops_are_counted_before_the_filter() {
        assert_eq!(missed(7, &DropFilter::default()), "... and 7 more");
        let reason = DropFilter { reason: Some("map_full".to_owned()), ..DropFilter::default() };
        assert_eq!(missed(7, &reason), "... and 7 more, whether asked for or not");
    }

    /// As an older agent sends and reads them.
    #[test]
    fn a_request_without_new_filters_is_the_former_one() {
        let filter = DropFilter { reason: Some("map_full".to_owned()), ..DropFilter::default() };
        let request = crate::debug::Request::Drops { follow: true, filter };
        let json = serde_json::to_value(&request).expect("JSON");
        assert_eq!(json, serde_json::json!({"want": "drops", "follow": true, "reason": "map_full"}));
        let former = r#"{"want":"drops","follow":false,"reason":null}"#;
        let crate::debug::Request::Drops { filter, .. } = serde_json::from_str(former).expect("a request") else {
            panic!("another request")
        };
        assert_eq!(filter, DropFilter::default());
    }

    #[test]
    fn a_reason_is_one_of_the_list() {
        assert_eq!(reason("no_gateway"), Ok("no_gateway".to_owned()));
        assert!(reason("snat_here").expect_err("no drop").contains("no_gateway, "));
    }
}
