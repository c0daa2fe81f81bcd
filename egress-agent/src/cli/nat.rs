//! `egress-agent nat`: the NAT mappings of this node, from the pinned map. Each line is printed as it is found.

use std::collections::BTreeMap;
use std::io::{self, BufWriter, Write};
use std::net::IpAddr;
use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use egress_common::abi::{Addr, Mapping, Origin, Tuple};
use egress_common::decide::phase::Phase;
use serde::Serialize;

use super::CliError;
use super::status::{DEFAULT_SOCKET, Output};
use super::values::{Destination, PodName, Protocol};
use crate::dataplane::mappings::{Entry, walk};
use crate::dataplane::names::DEFAULT_BPFFS;
use crate::explain::questions::protocol;
use crate::inspect::names::Names;
use crate::inspect::socket::names;

#[derive(Args, Debug)]
pub(super) struct NatArgs {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand, Debug)]
enum What {
    /// One line for each mapping
    List(Filters),
    /// How many there are, for each egress IP
    Count(Filters),
}

#[derive(Args, Debug)]
struct Filters {
    /// Only mappings on this egress IP, or on this address of this node
    #[arg(long, env = "EGRESS_AGENT_NAT_EGRESS_IP", value_name = "ADDRESS")]
    egress_ip: Option<IpAddr>,
    /// Only those of the pod with this address
    #[arg(long, env = "EGRESS_AGENT_NAT_POD_IP", value_name = "ADDRESS")]
    pod_ip: Option<IpAddr>,
    /// Only those of this pod, which is on this node, while the agent answers
    #[arg(long, env = "EGRESS_AGENT_NAT_POD", value_name = "NAMESPACE/NAME", conflicts_with = "pod_ip")]
    pod: Option<PodName>,
    /// Only those to this destination; of IPv6 with a port [ADDRESS]:PORT
    #[arg(long, env = "EGRESS_AGENT_NAT_TO", value_name = "ADDRESS[:PORT]")]
    to: Option<Destination>,
    /// Only those of tcp, udp, icmp, sctp or a protocol by its number
    #[arg(long, env = "EGRESS_AGENT_NAT_PROTO", value_name = "PROTOCOL")]
    proto: Option<Protocol>,
    /// Only those of pods of this node, by its name while the agent answers, or by its address; `here` for this one
    #[arg(long, env = "EGRESS_AGENT_NAT_NODE", value_name = "NODE")]
    node: Option<String>,
    /// Only TCP connections that are so far
    #[arg(long, env = "EGRESS_AGENT_NAT_STATE", value_name = "STATE")]
    state: Option<State>,
    /// Socket on which the agent answers, which knows names
    #[arg(long, env = "EGRESS_AGENT_SOCKET", value_name = "PATH", default_value = DEFAULT_SOCKET)]
    socket: PathBuf,
    /// Directory of pinned programs and maps
    #[arg(long, env = "EGRESS_AGENT_BPFFS", value_name = "DIRECTORY", default_value = DEFAULT_BPFFS)]
    bpffs: PathBuf,
    /// Form of the answer
    #[arg(short, long, env = "EGRESS_AGENT_OUTPUT", value_name = "FORM", default_value = "table")]
    output: Output,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "snake_case")]
enum State {
    /// Both sides have yet to speak
    Opening,
    /// Both sides have spoken
    Established,
    /// Both sides have finished, or one has reset
    Closing,
}

impl State {
    const fn of(phase: Phase) -> Self {
        match phase {
            Phase::Opening => Self::Opening,
            Phase::Established => Self::Established,
            Phase::Closing => Self::Closing,
        }
    }

    const fn word(self) -> &'static str {
        match self {
            Self::Opening => "opening",
            Self::Established => "established",
            Self::Closing => "closing",
        }
    }
}

/// Why nothing is listed.
#[derive(Debug, thiserror::Error)]
pub(super) enum NoMappings {
    #[error("no programs of an agent are here (no pins below {})", .0.display())]
    NoPrograms(PathBuf),
    #[error("the pins below {} cannot be read: {source}; it takes root", .bpffs.display())]
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

/// A mapping as it is printed.
#[derive(Debug, Serialize)]
struct Row {
    egress_ip: IpAddr,
    egress_port: u16,
    #[serde(skip_serializing_if = "Option::is_none")]
    object: Option<String>,
    egress_id: u32,
    protocol: String,
    pod_ip: IpAddr,
    pod_port: u16,
    #[serde(skip_serializing_if = "Option::is_none")]
    pod: Option<String>,
    node: String,
    to: IpAddr,
    to_port: u16,
    #[serde(skip_serializing_if = "Option::is_none")]
    state: Option<State>,
    age_seconds: u64,
    /// Since the last packet from the pod, and towards it.
    egress_idle_seconds: u64,
    ingress_idle_seconds: u64,
    timeout_seconds: u64,
    expires_in_seconds: u64,
}

impl Row {
    fn of(entry: &Entry, names: &Names) -> Self {
        let Entry { egress, ingress, source_node, egress_id, .. } = *entry;
        let pod_ip = egress.saddr.to_ip();
        let here = || names.node.clone().unwrap_or_else(|| "here".to_owned());
        let node = source_node.map_or_else(here, |node| names.nodes.get(&node).cloned().unwrap_or(node.to_string()));
        Self {
            egress_ip: ingress.daddr.to_ip(),
            egress_port: ingress.dport(),
            object: names.objects.get(&egress_id).cloned(),
            egress_id,
            protocol: protocol(egress.protocol),
            pod_ip,
            pod_port: egress.sport(),
            pod: names.pods.get(&pod_ip).filter(|_| source_node.is_none()).cloned(),
            node,
            to: egress.daddr.to_ip(),
            to_port: egress.dport(),
            state: entry.phase.map(State::of),
            age_seconds: entry.age.as_secs(),
            egress_idle_seconds: entry.egress_idle.as_secs(),
            ingress_idle_seconds: entry.ingress_idle.as_secs(),
            timeout_seconds: entry.timeout.as_secs(),
            expires_in_seconds: entry.timeout.saturating_sub(entry.idle()).as_secs(),
        }
    }

    /// Columns of fixed widths: nobody knows the longest before the end.
    fn line(&self) -> String {
        let end = |ip: IpAddr, port: u16| std::net::SocketAddr::new(ip, port).to_string();
        let (from, to) = (end(self.pod_ip, self.pod_port), end(self.to, self.to_port));
        let shown = end(self.egress_ip, self.egress_port);
        let state = self.state.map_or("-", State::word);
        let pod = self.pod.as_deref().unwrap_or("-");
        let object = self.object.as_deref().unwrap_or("-");
        format!(
            "{:<6} {from:<22} {to:<22} {shown:<22} {state:<12} {:>6} {:>6} {:>7} {:<12} {object:<20} {pod}",
            self.protocol,
            self.age_seconds,
            self.egress_idle_seconds.min(self.ingress_idle_seconds),
            self.expires_in_seconds,
            self.node,
        )
    }
}

fn headline() -> String {
    format!(
        "{:<6} {:<22} {:<22} {:<22} {:<12} {:>6} {:>6} {:>7} {:<12} {:<20} {}",
        "PROTO", "POD'S END", "TO", "EGRESS IP", "STATE", "AGE", "IDLE", "EXPIRES", "NODE", "OBJECT", "POD"
    )
}

/// What is asked for, by key and value alone.
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

    fn takes(&self, key: &Tuple, mapping: &Mapping) -> bool {
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

    fn is_so_far(&self, entry: &Entry) -> bool {
        self.filters.state.is_none_or(|state| entry.phase.map(State::of) == Some(state))
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
    let (What::List(filters) | What::Count(filters)) = &args.what;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let names = runtime.block_on(names(&filters.socket));
    let wanted = Wanted::new(filters, &names)?;
    let mut out = Out { to: BufWriter::new(io::stdout().lock()), has_failed: false };
    let walked = |visit: &mut Visit<'_>| walk(&filters.bpffs, |key, mapping| wanted.takes(key, mapping), visit);
    let done = match &args.what {
        What::List(_) => list(&wanted, &names, &mut out, walked),
        What::Count(_) => count(&wanted, &names, &mut out, walked),
    };
    match done {
        Ok(Some(())) => Ok(()),
        Ok(None) => Err(NoMappings::NoPrograms(filters.bpffs.clone()).into()),
        // Whoever reads has had enough.
        Err(error) if out.has_failed && error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        Err(error) if out.has_failed => Err(NoMappings::Unwritten(error).into()),
        Err(source) => Err(NoMappings::Unreadable { bpffs: filters.bpffs.clone(), source }.into()),
    }
}

/// Where the list goes: what cannot be written is told from what cannot be read.
struct Out<W> {
    to: W,
    has_failed: bool,
}

impl<W: Write> Write for Out<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.to.write(bytes);
        // Of nothing `write_all` makes an error.
        self.has_failed |= !matches!(written, Ok(1..));
        written
    }

    fn flush(&mut self) -> io::Result<()> {
        self.to.flush().inspect_err(|_| self.has_failed = true)
    }
}

type Visit<'v> = dyn FnMut(&Entry) -> io::Result<()> + 'v;

fn list(
    wanted: &Wanted<'_>,
    names: &Names,
    out: &mut Out<impl Write>,
    walk: impl FnOnce(&mut Visit<'_>) -> io::Result<Option<u32>>,
) -> io::Result<Option<()>> {
    let is_json = wanted.filters.output == Output::Json;
    let mut begun = false;
    let walked = walk(&mut |entry| {
        if !wanted.is_so_far(entry) {
            return Ok(());
        }
        let row = Row::of(entry, names);
        let first = !std::mem::replace(&mut begun, true);
        if is_json {
            out.write_all(if first { b"[\n" } else { b",\n" })?;
            return out.write_all(&serde_json::to_vec(&row)?);
        }
        if first {
            writeln!(out, "{}", headline())?;
        }
        writeln!(out, "{}", row.line())
    });
    // What was shown can be read, whatever happened then: that it is not all is for the exit code to say.
    if is_json && begun && walked.is_err() && !out.has_failed {
        out.write_all(b"\n]\n")?;
        out.flush()?;
    }
    if walked?.is_none() {
        return Ok(None);
    }
    match (is_json, begun) {
        (true, true) => out.write_all(b"\n]\n")?,
        (true, false) => out.write_all(b"[]\n")?,
        (false, true) => {}
        (false, false) => writeln!(out, "no mappings")?,
    }
    out.flush()?;
    Ok(Some(()))
}

/// What `count` prints.
#[derive(Debug, Serialize)]
struct Counted {
    mappings: usize,
    /// How many the node may have.
    limit: u32,
    egress_ips: BTreeMap<IpAddr, usize>,
}

fn count(
    wanted: &Wanted<'_>,
    names: &Names,
    out: &mut Out<impl Write>,
    walk: impl FnOnce(&mut Visit<'_>) -> io::Result<Option<u32>>,
) -> io::Result<Option<()>> {
    let (mut egress_ips, mut objects) = (BTreeMap::<IpAddr, usize>::new(), BTreeMap::new());
    let walked = walk(&mut |entry| {
        if wanted.is_so_far(entry) {
            let address = entry.ingress.daddr.to_ip();
            *egress_ips.entry(address).or_default() += 1;
            objects.insert(address, entry.egress_id);
        }
        Ok(())
    })?;
    let Some(limit) = walked else { return Ok(None) };
    let counted = Counted { mappings: egress_ips.values().sum(), limit, egress_ips };
    if wanted.filters.output == Output::Json {
        writeln!(out, "{}", serde_json::to_string_pretty(&counted)?)?;
    } else {
        for (address, mappings) in &counted.egress_ips {
            let object = objects.get(address).and_then(|id| names.objects.get(id)).map_or("-", String::as_str);
            writeln!(out, "{:>8}  {address:<40} {object}", mappings)?;
        }
        writeln!(out, "{:>8}  in all; the node may have {}", counted.mappings, counted.limit)?;
    }
    out.flush()?;
    Ok(Some(()))
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use egress_common::abi::Direction;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        filters: Filters,
    }

    fn filters(words: &str) -> Filters {
        let words = words.split(' ').filter(|word| !word.is_empty());
        Line::try_parse_from(std::iter::once("nat").chain(words)).map(|line| line.filters).expect("a line")
    }

    fn mapping() -> (Tuple, Mapping) {
        let addr = |text: &str| Addr::from(text.parse::<IpAddr>().expect("a literal"));
        let (pod, world) = (addr("10.244.2.10"), addr("198.51.100.10"));
        let forward = Tuple::new(Direction::Egress, pod, world, 4000, 80, 6);
        let reverse = Tuple::new(Direction::Ingress, world, addr("172.18.0.100"), 80, 4001, 6);
        (forward, Mapping::new(reverse, Origin::Remote, addr("172.18.0.3"), 7, 1))
    }

    fn names() -> Names {
        let ip = |text: &str| text.parse::<IpAddr>().expect("a literal");
        Names {
            node: Some("node1".to_owned()),
            pods: [(ip("10.244.1.10"), "red/one".to_owned())].into(),
            objects: [(7, "first".to_owned())].into(),
            nodes: [(ip("172.18.0.3"), "node2".to_owned())].into(),
        }
    }

    #[test]
    fn each_filter_tells() {
        let (key, mapping) = mapping();
        for (words, takes) in [
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
            let filters = filters(words);
            let wanted = Wanted::new(&filters, &names()).expect("known");
            assert_eq!(wanted.takes(&key, &mapping), takes, "{words}");
        }
        for words in ["--pod red/two", "--node node9"] {
            assert!(Wanted::new(&filters(words), &names()).is_err(), "{words}");
        }
    }

    fn entry() -> Entry {
        let (egress, mapping) = mapping();
        let second = std::time::Duration::from_secs(1);
        Entry {
            egress,
            ingress: mapping.other,
            origin: mapping.origin(),
            source_node: Some(mapping.source_node.to_ip()),
            egress_id: 7,
            phase: Some(Phase::Established),
            age: second * 40,
            egress_idle: second * 10,
            ingress_idle: second * 20,
            timeout: second * 7440,
        }
    }

    #[test]
    fn a_list_that_breaks_off_can_be_read_and_is_an_error() {
        let filters = filters("-o json");
        let wanted = Wanted::new(&filters, &names()).expect("known");
        let mut out = Out { to: Vec::new(), has_failed: false };
        let listed = list(&wanted, &names(), &mut out, |visit| {
            visit(&entry())?;
            visit(&entry())?;
            Err(io::Error::from_raw_os_error(libc::EPERM))
        });
        assert_eq!(listed.map_err(|error| error.raw_os_error()), Err(Some(libc::EPERM)));
        assert!(!out.has_failed, "the pins cannot be read");
        let rows: serde_json::Value = serde_json::from_slice(&out.to).expect("whole JSON");
        assert_eq!(rows.as_array().map(Vec::len), Some(2));
        // A list that nobody takes is no fault of the pins.
        let mut room = [0; 8];
        let mut out = Out { to: &mut room[..], has_failed: false };
        let listed = list(&wanted, &names(), &mut out, |visit| visit(&entry()).map(|()| Some(1)));
        assert!(listed.is_err() && out.has_failed);
    }

    #[test]
    fn a_row_names_what_it_can() {
        let entry = entry();
        let row = Row::of(&entry, &names());
        assert_eq!((row.node.as_str(), row.object.as_deref(), row.expires_in_seconds), ("node2", Some("first"), 7430));
        let line = row.line();
        let words: Vec<_> = line.split_whitespace().collect();
        let expected = [
            "tcp",
            "10.244.2.10:4000",
            "198.51.100.10:80",
            "172.18.0.100:4001",
            "established",
            "40",
            "10",
            "7430",
            "node2",
            "first",
            "-",
        ];
        assert_eq!(words, expected);
        assert_eq!(Row::of(&Entry { source_node: None, ..entry }, &Names::default()).node, "here");
    }
}
