//! How long the log of NAT gets: 1,000 pods of one gateway that make 100 connections a second together.
//!
//! Each case has a node of its own, with a real agent that writes its log, and as many egress IPs as the pods need: one has 63 blocks of
//! 1,024 ports. The pods are objects; a SYN of each connection is written to the pods' end of the node's management port, and the server
//! outside refuses it. Programs give the blocks, and the agent's passes close them and take them back, at their usual pace.
//!
//! The time for which a connection lasts is left out, and its entry stays for 30 s after it instead of 240 s, so that a short run sees
//! blocks come and go. Neither changes how many are given: pods either connect every ten seconds, and keep their blocks, or pause for
//! longer than a block is kept with the usual timeouts too.
//!
//! A day is computed of a run. A file begins with what goes on at the end of the run. Blocks that were given long enough before the end
//! to be taken back in the run, as the one that took longest shows, say how many are given and taken back in a day.

use std::collections::HashMap;
use std::os::fd::{AsRawFd, OwnedFd};

use egress_common::abi::{BlockOwner, PortBlock};
use egress_lab::MANAGEMENT;
use egress_lab::api_objects::NODES;
use egress_lab::kube_api::ApiChoice;
use egress_lab::topology::netns::link_address;
use egress_lab::traffic::packet;
use egress_toolchain::Built;
use jiff::Timestamp;
use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockType, bind, send, socket};
use serde::Deserialize;

use super::bench_cluster::{FAR_END, NAMESPACE, bare, link_address_of};
use super::drops;
use super::nat_entries::open;
use super::plan::{PacketPath, Work};
use super::samples::Results;
use crate::prelude::*;

const PODS: u16 = 1_000;
/// Connections of a second, of all pods of a case.
const RATE: u32 = 100;
const FIRST_PORT: u32 = 10_000;
const HTTPS: u16 = 443;
/// How long to measure, but for `--seconds`.
pub(super) const USUAL: Duration = Duration::from_secs(540);
/// A block is taken back earlier after its last connection: after the timeout, the pass that removes the entry, and three more.
const ENOUGH: Duration = Duration::from_secs(480);
const CLOSING_TIMEOUT: &str = "--tcp-closing-timeout=30";
/// No address moves on a busy machine.
const TOTAL_TIMEOUT: &str = "--egressip-reachability-total-timeout=600";
/// Pods' addresses: of each node a network of this length. The lab's own have too few.
const PODS_NETWORK: Ipv4Addr = Ipv4Addr::new(10, 128, 0, 0);
const PODS_NETWORK_OF_ALL: &str = "10.128.0.0/10";
/// How long agents may take for thousands of objects.
const START: Duration = Duration::from_secs(60);
const DAY: f64 = 86_400.0;
/// Eight files, as by `--nat-log-size` and `--nat-log-files` where nothing else is asked for.
const KEPT: f64 = 8.0 * 16_777_216.0;

/// When pods make their connections.
#[derive(Clone, Copy, Debug)]
enum Pattern {
    /// Each pod one every ten seconds.
    Even,
    /// Each pod 100 in one second, every 1,000 seconds.
    Bursts,
}

impl Pattern {
    const fn name(self) -> &'static str {
        match self {
            Self::Even => "evenly",
            Self::Bursts => "in bursts",
        }
    }

    /// The pod of the n-th connection, and its port. No two connections of a pod have the same one.
    fn connection(self, number: u32) -> (u16, u16) {
        let pods = u32::from(PODS);
        let (pod, nth) = match self {
            Self::Even => (number % pods, number / pods),
            Self::Bursts => (number / RATE % pods, number / RATE / pods * RATE + number % RATE),
        };
        let port = FIRST_PORT + nth % (u32::from(u16::MAX) - FIRST_PORT);
        (u16::try_from(pod).unwrap_or(0), u16::try_from(port).unwrap_or(u16::MAX))
    }
}

/// One size of blocks, and one pattern.
struct LogCase {
    size: u16,
    pattern: Pattern,
    /// Node and place in the addresses.
    number: u8,
}

impl LogCase {
    fn all() -> Vec<Self> {
        let cases = [Pattern::Even, Pattern::Bursts]
            .into_iter()
            .flat_map(|pattern| [64, 256, 1024].map(|size| (size, pattern)));
        (1..).zip(cases).map(|(number, (size, pattern))| Self { size, pattern, number }).collect()
    }

    fn name(&self) -> String {
        format!("{}, blocks of {}, {}", Work::NatLog.name(), self.size, self.pattern.name())
    }

    /// Its pool, and the label of its node.
    fn label(&self) -> String {
        format!("case{}", self.number)
    }

    fn pod_address(&self, place: u16) -> Ipv4Addr {
        Ipv4Addr::from_bits(PODS_NETWORK.to_bits() + u32::from(self.number) * 1_024 + 2 + u32::from(place))
    }

    fn subnet(&self) -> String {
        format!("{}/22", Ipv4Addr::from_bits(PODS_NETWORK.to_bits() + u32::from(self.number) * 1_024))
    }

    /// Egress IPs: each has blocks for its part of the pods, and some more.
    const fn egress_ips(&self) -> u16 {
        match self.size {
            64 => 2,
            256 => 5,
            _ => 20,
        }
    }

    /// The object that selects the pod in this place.
    fn object_of(&self, place: u16) -> String {
        format!("{}-{:02}", self.label(), place % self.egress_ips())
    }

    /// All pods, and after them one of each object by which the measurement waits for the programs.
    const fn places(&self) -> u16 {
        PODS + self.egress_ips()
    }

    fn is_counted(&self, pod: IpAddr) -> bool {
        (PODS..self.places()).all(|place| IpAddr::V4(self.pod_address(place)) != pod)
    }

    fn log(&self, cluster: &TestCluster) -> PathBuf {
        cluster.lab.folder().join(format!("nat-{}.log", self.number))
    }
}

pub(super) fn measure(
    built: &Built,
    prefix: &str,
    time: Duration,
    say: &dyn Fn(&str),
    results: &mut Results,
) -> Result<()> {
    let cases = LogCase::all();
    let mut builder = LabBuilder::default().readable_prefix(prefix).nodes(cases.len()).host_config(bare);
    // The namespace of all pods.
    builder = builder.pod(pod("first", NAMESPACE, 1, &[]));
    let mut cluster = TestCluster::bring_up(builder, Some(0), &ApiChoice::InMemory)?;
    for case in &cases {
        prepare(&cluster, case)?;
        let options = AgentOptions::new(&built.agent, &cluster.api).with([
            format!("--cluster-subnets={PODS_NETWORK_OF_ALL},{},{}", plan::CLUSTER_V4, plan::CLUSTER_V6),
            "--antrea".to_owned(),
            CLOSING_TIMEOUT.to_owned(),
            TOTAL_TIMEOUT.to_owned(),
            format!("--port-block-size={}", case.size),
            format!("--nat-log={}", case.log(&cluster).display()),
        ]);
        let agent = Agent::start(&cluster.lab, cluster.lab.node(NodeNumber::new(case.number.into())?), &options)?;
        cluster.agents.push(agent);
        cluster.serves(case.number.into())?;
    }
    cases.iter().try_for_each(|case| add_pods(&cluster, case))?;
    cases.iter().try_for_each(|case| select(&cluster, case))?;
    let ends = cases.iter().map(|case| PodsEnd::of(cluster.lab.node(NodeNumber::new(case.number.into())?)));
    let ends = ends.collect::<Result<Vec<_>>>()?;
    for (case, end) in cases.iter().zip(&ends) {
        until_logged(&case.log(&cluster), &["pod_has"], usize::from(case.places()), START)?;
        serves(&cluster, case, end)?;
    }
    let minutes = time.as_secs_f64() / 60.0;
    say(&format!("{}: {} cases for {minutes:.1} minutes", Work::NatLog.name(), cases.len()));
    let before = drops::dropped(cluster.lab.nodes())?;
    let begin = Timestamp::now();
    connect(&cases, &ends, time)?;
    let end = Timestamp::now();
    let dropped = drops::since(&before, &drops::dropped(cluster.lab.nodes())?);
    let made = time.as_secs() * u64::from(RATE) * u64::try_from(cases.len())?;
    ensure!(dropped.values().sum::<u64>() * 100 <= made, "the programs have dropped connections: {dropped:?}");
    if !dropped.is_empty() {
        eprintln!("of {made} connections the programs have dropped {dropped:?}");
    }
    for case in &cases {
        let text = std::fs::read_to_string(case.log(&cluster))?;
        let volume = LogVolume::of(&text, (begin, end), |pod| case.is_counted(pod)).with_context(|| case.name())?;
        let mut row = |what: &str, unit, value: f64| {
            results.add(&format!("{}: {what}", case.name()), PacketPath::Local.name(), "ours", unit, value);
        };
        row("begin of a file", "kB", volume.state / 1e3);
        if let Some(longest) = volume.longest {
            row("a block is taken back, at the latest", "s", longest);
        } else if time < ENOUGH {
            eprintln!("{}: no block could be taken back in this time, so a day cannot be computed of it", case.name());
            continue;
        }
        row("blocks given in a day", "blocks", volume.blocks_a_day);
        row("a day", "MB", volume.a_day() / 1e6);
        row("a day, one line a connection", "MB", volume.of_connections() / 1e6);
        row("one line a connection, to this", "times", volume.of_connections() / volume.a_day());
        row("eight files of 16 MiB last", "days", KEPT / volume.a_day());
    }
    cluster.tear_down()
}

/// The node's subnet, and its way to the pods. The packets to them end in the lab's router.
fn prepare(cluster: &TestCluster, case: &LogCase) -> Result<()> {
    let number = NodeNumber::new(case.number.into())?;
    let node = cluster.lab.node(number);
    let subnet = case.subnet();
    node.router.exec("ip", &["route", "add", "blackhole", &subnet])?;
    node.host.exec("ip", &["route", "add", &subnet, "via", &number.router().v4.to_string(), "dev", MANAGEMENT])?;
    let subnets = json!({"default": [number.pod_subnet_v4(), number.pod_subnet_v6(), subnet]}).to_string();
    let annotations = json!({"metadata": {"annotations": {"k8s.ovn.org/node-subnets": subnets}}});
    cluster.api.merge(&format!("/api/v1/nodes/{}", node.name()), &annotations)
}

/// The pods, as objects.
fn add_pods(cluster: &TestCluster, case: &LogCase) -> Result<()> {
    let node = cluster.lab.node(NodeNumber::new(case.number.into())?);
    let collection = format!("/api/v1/namespaces/{NAMESPACE}/pods");
    for place in 0..case.places() {
        let (name, address) = (format!("{}-{place:04}", case.label()), case.pod_address(place));
        let networks = json!({"default": {"ip_addresses": [format!("{address}/22")], "role": "primary"}}).to_string();
        let object = json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {
                "name": name, "namespace": NAMESPACE, "labels": {"object": case.object_of(place)},
                "annotations": {"k8s.ovn.org/pod-networks": networks},
            },
            "spec": {"nodeName": node.name(), "containers": [{"name": "main", "image": "registry.example/app:1"}]},
        });
        cluster.api.create(&collection, &object)?;
        let status = json!({"phase": "Running", "podIP": address, "podIPs": [{"ip": address}]});
        cluster.api.patch_status(&format!("{collection}/{name}"), &json!({"status": status}))?;
    }
    Ok(())
}

/// A pool of the node's, and an object for each of its addresses.
fn select(cluster: &TestCluster, case: &LogCase) -> Result<()> {
    let pool = case.label();
    cluster.label(&format!("{NODES}/node{}", case.number), &pool, &json!("yes"))?;
    let addresses = [1, case.egress_ips()].map(|end| format!("172.18.{}.{end}", case.number));
    let object = json!({
        "apiVersion": "crd.antrea.io/v1beta1", "kind": "ExternalIPPool", "metadata": {"name": pool},
        "spec": {
            "ipRanges": [{"start": addresses[0], "end": addresses[1]}], "nodeSelector": labels(&pool, "yes"),
        },
    });
    cluster.api.create("/apis/crd.antrea.io/v1beta1/externalippools", &object)?;
    for name in (0..case.egress_ips()).map(|place| case.object_of(place)) {
        let object = json!({
            "apiVersion": "crd.antrea.io/v1beta1", "kind": "Egress", "metadata": {"name": name},
            "spec": {"appliedTo": {"podSelector": labels("object", &name)}, "externalIPPool": pool},
        });
        cluster.api.create("/apis/crd.antrea.io/v1beta1/egresses", &object)?;
    }
    Ok(())
}

/// Waits until connections by each object get a block.
fn serves(cluster: &TestCluster, case: &LogCase, end: &PodsEnd) -> Result<()> {
    let node = cluster.lab.node(NodeNumber::new(case.number.into())?);
    let blocks = open::<PortBlock, BlockOwner>(node, "blocks")?;
    let mut ports = 1_024..u16::MAX;
    until_true(&format!("{} gives blocks", node.name()), START, || {
        let port = ports.next().context("no port is left")?;
        (PODS..case.places())
            .try_for_each(|place| end.connects(SocketAddr::new(case.pod_address(place).into(), port)))?;
        let pods = blocks.iter().map(|entry| Ok(entry?.1.pod.octets())).collect::<Result<BTreeSet<_>>>()?;
        Ok(pods.len() == usize::from(case.egress_ips()))
    })
}

/// The far end of a node's management port.
struct PodsEnd {
    socket: OwnedFd,
    link_addresses: [[u8; 6]; 2],
}

impl PodsEnd {
    fn of(node: &LabNode) -> Result<Self> {
        let link_addresses = [link_address_of(&node.host, MANAGEMENT)?, link_address_of(&node.router, "br0")?];
        let socket = node.router.run(|| {
            let socket = socket(AddressFamily::Packet, SockType::Raw, SockFlag::SOCK_CLOEXEC, None)?;
            bind(socket.as_raw_fd(), &link_address(FAR_END)?)?;
            Ok(socket)
        })?;
        Ok(Self { socket, link_addresses })
    }

    fn connects(&self, from: SocketAddr) -> Result<()> {
        let [to, own] = &self.link_addresses;
        let frame =
            [to.as_slice(), own, &packet::syn(from, SocketAddr::new(plan::SERVER.v4.into(), HTTPS), 1)?].concat();
        send(self.socket.as_raw_fd(), &frame, MsgFlags::empty()).context("send a SYN")?;
        Ok(())
    }
}

/// Makes the connections of all cases at their pace.
fn connect(cases: &[LogCase], ends: &[PodsEnd], time: Duration) -> Result<()> {
    let begin = Instant::now();
    for number in 0.. {
        let due = Duration::from_secs(1) / RATE * number;
        if due >= time {
            break;
        }
        thread::sleep(due.saturating_sub(begin.elapsed()));
        for (case, end) in cases.iter().zip(ends) {
            let (place, port) = case.pattern.connection(number);
            end.connects(SocketAddr::new(case.pod_address(place).into(), port))?;
        }
    }
    Ok(())
}

/// What is needed of a line.
#[derive(Deserialize)]
struct NatLogLine {
    time: Timestamp,
    event: String,
    pod_ip: Option<IpAddr>,
    egress_ip: Option<IpAddr>,
    #[serde(default)]
    first_port: u16,
    #[serde(default)]
    given_ns: u64,
}

/// Bytes of a log, and what they come to in a day.
#[derive(Debug)]
struct LogVolume {
    /// Of a file's begin: what goes on at the end of the run.
    state: f64,
    /// Of a line about a block that is given, and of one about a block that is taken back.
    given_line: f64,
    taken_back_line: f64,
    blocks_a_day: f64,
    /// Seconds from its being given until a block was taken back.
    longest: Option<f64>,
}

impl LogVolume {
    fn of(log: &str, (begin, end): (Timestamp, Timestamp), is_counted: impl Fn(IpAddr) -> bool) -> Result<Self> {
        let (mut pods, mut given_bytes, mut taken_back_bytes) = (0, 0, 0);
        let (mut given, mut ages) = (HashMap::new(), Vec::new());
        for text in log.lines() {
            let line: NatLogLine = serde_json::from_str(text)?;
            if line.pod_ip.is_some_and(|pod| !is_counted(pod)) {
                continue;
            }
            let (length, block) = (text.len() + 1, (line.egress_ip, line.first_port, line.given_ns));
            match line.event.as_str() {
                "started" | "pod_has" => pods += length,
                "given" => {
                    given_bytes += length;
                    given.insert(block, line.time);
                }
                "taken_back" => {
                    taken_back_bytes += length;
                    let since = given.get(&block).context("a block was taken back that was not given")?;
                    ages.push((*since, line.time.duration_since(*since).as_secs_f64()));
                }
                other => bail!("the log has an event {other} that does not belong to the run"),
            }
        }
        ensure!(!given.is_empty(), "no block was given");
        let longest = ages.iter().map(|(_, age)| *age).reduce(f64::max);
        let given_line = mean(given_bytes, given.len());
        let blocks_a_day = longest.map_or(0.0, |longest| {
            let seconds = end.duration_since(begin).as_secs_f64() - longest;
            let is_before = |since: &Timestamp| since.duration_since(begin).as_secs_f64() <= seconds;
            mean(ages.iter().filter(|(since, _)| is_before(since)).count(), 1) / seconds.max(1.0) * DAY
        });
        Ok(Self {
            state: mean(pods, 1) + given_line * mean(given.len() - ages.len(), 1),
            given_line,
            taken_back_line: mean(taken_back_bytes, ages.len().max(1)),
            blocks_a_day,
            longest,
        })
    }

    fn a_day(&self) -> f64 {
        self.state + self.blocks_a_day * (self.given_line + self.taken_back_line)
    }

    /// One line for the begin of each connection, as long as that for a block.
    fn of_connections(&self) -> f64 {
        f64::from(RATE) * DAY * self.given_line
    }
}

#[expect(clippy::cast_precision_loss, reason = "bytes and lines of a run are far below 2^52")]
fn mean(sum: usize, count: usize) -> f64 {
    sum as f64 / count as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(1_800_000_000 + second).expect("a time")
    }

    #[test]
    fn each_pod_makes_as_many_connections_at_its_own_pace() {
        for pattern in [Pattern::Even, Pattern::Bursts] {
            let all: BTreeSet<_> = (0..2_000 * RATE).map(|number| pattern.connection(number)).collect();
            assert_eq!(all.len(), 200_000, "{pattern:?}");
            assert_eq!(all.iter().filter(|(pod, _)| *pod == 7).count(), 200, "{pattern:?}");
        }
        assert_eq!((0..100).map(|number| Pattern::Bursts.connection(number).0).max(), Some(0), "a second is one pod's");
    }

    #[test]
    fn a_day_is_computed_of_blocks_that_could_be_taken_back_in_the_run() {
        let line = |time, event: &str, port: i64| {
            json!({"time": at(time), "event": event, "first_port": port, "given_ns": 1, "node": "node1"}).to_string()
        };
        // One each second, which is taken back after 60 s: the last 60 of 100 are still there.
        let mut lines = vec![line(0, "started", 0)];
        lines.extend((0..100).map(|second| line(second, "given", 1_024 + second)));
        lines.extend((0..40).map(|second| line(second + 60, "taken_back", 1_024 + second)));
        let volume = LogVolume::of(&(lines.join("\n") + "\n"), (at(0), at(100)), |_| true).expect("a log");
        assert_eq!((volume.longest, volume.blocks_a_day.round()), (Some(60.0), DAY));
        let open = volume.given_line * 60.0 + mean(lines[0].len() + 1, 1);
        assert!((volume.state - open).abs() < 1e-6);
        assert!((volume.a_day() - open - DAY * (volume.given_line + volume.taken_back_line)).abs() < 1e-3);
        let lasting = LogVolume::of(&lines[..11].join("\n"), (at(0), at(100)), |_| true).expect("a log");
        assert_eq!((lasting.longest, lasting.blocks_a_day), (None, 0.0));
        assert!(LogVolume::of(&lines[0], (at(0), at(100)), |_| true).is_err(), "nothing was measured");
    }
}
