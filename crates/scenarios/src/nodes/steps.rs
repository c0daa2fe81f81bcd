//! The tests on real nodes, in the order in which they run. Bounds are three times what the documents publish.

use std::fs;

use super::cluster::{KUBERNETES, RealCluster, RealNode, RealPod, condition};
use super::programs::NodePrograms;
use crate::cases::cleanup::{differences, snapshot};
use crate::prelude::*;
use egress_lab::POD_INTERFACE;
use egress_lab::capture::{Seen, turns};
use egress_lab::wait::{FAIL_OVER, LEADERS_FAIL_OVER, REPORTED};
use egress_toolchain::Progress;

pub(super) struct TestStep {
    pub(super) name: &'static str,
    pub(super) run: fn(&mut NodeTest) -> Result<()>,
    /// Whether the others stand on it.
    pub(super) is_shared: bool,
}

const fn step(name: &'static str, run: fn(&mut NodeTest) -> Result<()>) -> TestStep {
    TestStep { name, run, is_shared: false }
}

const fn shared(name: &'static str, run: fn(&mut NodeTest) -> Result<()>) -> TestStep {
    TestStep { name, run, is_shared: true }
}

pub(super) const STEPS: [TestStep; 9] = [
    shared("nodes_install_as_documented", install),
    shared("nodes_selected_pods_leave_with_the_egress_ip", first_egress_ip),
    step("nodes_new_pods_lose_no_first_packet", first_packets),
    step("nodes_a_rollout_loses_nothing", rollout),
    step("nodes_a_gateway_that_is_cut_off_loses_its_address", cut),
    step("nodes_a_drained_gateway_loses_nothing", drain),
    step("nodes_an_address_of_another_host_is_not_served", conflict),
    step("nodes_uninstall_leaves_nothing", uninstall),
    step("nodes_without_a_bpf_file_system_one_line_says_so", without_bpffs),
];

/// Of deploy/examples/egressip-simpson.yaml.
const OBJECT: &str = "egressip-simpson";
const EGRESS_IP: IpAddr = IpAddr::V4(Ipv4Addr::new(172, 18, 0, 100));
const TAKEN: Ipv4Addr = Ipv4Addr::new(172, 18, 0, 150);
/// How long it is watched whether a node that is back does harm.
const WATCHED: Duration = Duration::from_secs(5);
const TICK: Duration = Duration::from_millis(10);
/// What the agent's container has: BPF, PERFMON, NET_ADMIN, NET_RAW (linux/capability.h).
const CAPABILITIES: &str = "000000c000003000";
/// Doors of the server for long flows; those below are for single packets.
const FLOWS: u8 = 50;

type NodeSnapshot = BTreeMap<String, BTreeSet<String>>;

/// What the tests stand on.
pub(super) struct NodeTest {
    cluster: RealCluster,
    /// One on each node.
    selected: Vec<RealPod>,
    others: Vec<RealPod>,
    before: Vec<NodeSnapshot>,
}

impl NodeTest {
    /// The cluster, with pods on each node and without the product.
    pub(super) fn start(programs: &NodePrograms, logs: &Path, progress: &Progress) -> Result<Self> {
        let cluster = RealCluster::start(programs, logs, progress)?;
        let placed = [
            ("simpson", "homer", "node1"),
            ("simpson", "marge", "node2"),
            ("bouvier", "patty", "node1"),
            ("bouvier", "selma", "node2"),
        ];
        cluster.add_house("simpson")?;
        cluster.add_house("bouvier")?;
        for (house, name, node) in placed {
            cluster.add_pods(house, &[(name.to_owned(), node, None)])?;
        }
        let pods = placed.map(|(house, name, _)| cluster.pod(house, name));
        let mut pods = pods.into_iter().collect::<Result<Vec<_>>>()?;
        let others = pods.split_off(2);
        let mut test = Self { cluster, selected: pods, others, before: Vec::new() };
        test.nothing_is_selected()?;
        test.before = test.cluster.nodes().iter().map(snapshot_of).collect::<Result<_>>()?;
        Ok(test)
    }

    pub(super) fn tear_down(self) -> Result<()> {
        self.cluster.tear_down()
    }

    /// For a failed test.
    pub(super) fn keep_agents_logs(&self, folder: &Path) {
        let kept = || -> Result<()> {
            fs::create_dir_all(folder)?;
            for node in self.cluster.nodes() {
                let pods = node.path("/var/log/pods");
                let copied =
                    std::process::Command::new("cp").arg("-r").arg(pods).arg(folder.join(node.lab.name())).status()?;
                ensure!(copied.success(), "cp");
            }
            for kind in ["nodes", "pods", "events", "egressip"] {
                let objects = self.cluster.kubectl(&["get", kind, "-A", "-o", "yaml"])?;
                fs::write(folder.join(kind), objects)?;
            }
            Ok(())
        };
        match kept() {
            Ok(()) => println!("what pods said and what the cluster has: {}", folder.display()),
            Err(error) => println!("the pods' logs are not kept: {error:#}"),
        }
    }

    /// Selected pods are seen with the egress IP, the others with their node's address.
    fn all_are_right(&self) -> Result<()> {
        self.selected.iter().try_for_each(|pod| self.cluster.is_seen_as(pod, EGRESS_IP))?;
        self.others.iter().try_for_each(|pod| self.cluster.is_seen_as(pod, pod.node))
    }

    fn nothing_is_selected(&self) -> Result<()> {
        let mut pods = self.selected.iter().chain(&self.others);
        pods.try_for_each(|pod| self.cluster.is_seen_as(pod, pod.node))
    }

    fn gateway(&self) -> Result<String> {
        self.cluster.server_of(OBJECT, EGRESS_IP)?.context("no node serves the address")
    }

    /// The status is the node that this names, with its conditions right.
    fn is_served_by(&self, node: &str, patience: Duration) -> Result<()> {
        until_true(&format!("{EGRESS_IP} is assigned to {node}"), patience, || {
            let object = self.cluster.get(&["egressip", OBJECT])?;
            let right =
                condition(&object, "Assigned") == Some("True") && condition(&object, "Degraded") == Some("False");
            Ok(right && self.cluster.server_of(OBJECT, EGRESS_IP)?.as_deref() == Some(node))
        })
    }

    /// Pods of both nodes send a datagram every 10 ms, and have a connection each.
    fn traffic(&self) -> Result<Traffic> {
        let pods = self.selected.iter().chain(&self.others);
        let server_addresses: Vec<IpAddr> =
            (FLOWS..).map(|number| plan::server_address(number).v4.into()).take(pods.clone().count()).collect();
        let capture = Capture::watching_owners(&self.cluster.lab, server_addresses.iter().copied().collect())?;
        let mut flows = Vec::new();
        for (pod, server_address) in pods.zip(server_addresses) {
            let to = SocketAddr::new(server_address, ECHO_PORT);
            let source = if self.selected.iter().any(|one| one.name == pod.name) { EGRESS_IP } else { pod.node };
            let datagrams = TrafficFlow::udp(&pod.netns, to, TICK)?;
            let connection = TrafficFlow::tcp(&pod.netns, to, TICK * 10, Duration::from_secs(20))?;
            flows.push(PodFlows { name: pod.name.clone(), server_address, source, datagrams, connection });
        }
        Ok(Traffic { capture, flows })
    }
}

struct PodFlows {
    name: String,
    server_address: IpAddr,
    source: IpAddr,
    datagrams: TrafficFlow,
    connection: TrafficFlow,
}

struct Traffic {
    capture: Capture,
    flows: Vec<PodFlows>,
}

/// What became of the datagrams of a pod.
struct Lost {
    name: String,
    lost: u64,
    longest_gap: Duration,
}

impl Traffic {
    /// Ends it; no packet may have had a wrong source, nor a connection ended.
    fn finish(self) -> Result<(Vec<Lost>, Seen)> {
        let mut all = Vec::new();
        let mut sources = Vec::new();
        for flow in self.flows {
            let (datagrams, connection) = (flow.datagrams.finish()?, flow.connection.finish()?);
            let (sent, lost, longest_gap) = (datagrams.sent, datagrams.lost(), datagrams.longest_gap);
            println!("{}: {lost} of {sent} datagrams lost, at most {longest_gap:?} between two answers", flow.name);
            ensure!(sent > 100, "{} has sent {sent} datagrams only", flow.name);
            ensure!(connection.broken.is_none(), "the connection of {} has ended: {connection:?}", flow.name);
            all.push(Lost { name: flow.name, lost, longest_gap });
            sources.push((flow.server_address, flow.source));
        }
        let seen = self.capture.finish()?;
        seen.check()?;
        for (server_address, source) in sources {
            let to_door = seen.captured.iter().filter(|one| one.destination == server_address);
            let wrong = to_door.clone().filter(|one| one.source != source).count();
            ensure!(
                to_door.count() > 0 && wrong == 0,
                "{wrong} packets to {server_address} have another source than {source}"
            );
        }
        let pods = seen.to_the_world(AddressKind::Pod);
        ensure!(pods == 0, "{pods} packets left with a pod's address");
        Ok((all, seen))
    }

    fn finish_without_loss(self) -> Result<Seen> {
        let (all, seen) = self.finish()?;
        all.iter().try_for_each(|one| {
            ensure!(one.lost == 0, "{} has lost {} datagrams", one.name, one.lost);
            Ok(())
        })?;
        Ok(seen)
    }
}

fn rolled_out(cluster: &RealCluster, set: &str) -> Result<()> {
    has_rolled_out(cluster, &format!("daemonset/{set}"))
}

fn has_rolled_out(cluster: &RealCluster, what: &str) -> Result<()> {
    cluster.types(&format!("-n egress-agent rollout status {what} --timeout={}s", KUBERNETES.as_secs())).map(drop)
}

/// docs/install.md, "A bridge CNI".
fn install(test: &mut NodeTest) -> Result<()> {
    let cluster = &test.cluster;
    println!("{}", cluster.types("apply -k deploy/overlays/bridge-cni")?);
    rolled_out(cluster, "egress-agent")?;
    has_rolled_out(cluster, "deployment/egress-agent-controller")?;
    for node in cluster.nodes() {
        let name = node.lab.name();
        for (command, capabilities) in [("run", CAPABILITIES), ("cni-install", "0000000000000000")] {
            let pids = node.agents(command)?;
            let [pid] = pids[..] else { bail!("{} processes of `egress-agent {command}` on {name}", pids.len()) };
            let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
            let is = |key: &str, value: &str| {
                let found = status.lines().find_map(|line| line.strip_prefix(key)).map(str::trim);
                ensure!(found == Some(value), "`egress-agent {command}` on {name}: {key} {found:?}, not {value}");
                Ok(())
            };
            for set in ["CapEff:", "CapPrm:", "CapBnd:"] {
                is(set, capabilities)?;
            }
            is("Seccomp:", "2")?;
            is("NoNewPrivs:", "1")?;
        }
        let chain = fs::read_to_string(node.path("/etc/cni/net.d/10-bridge.conflist"))?;
        let chain: Value = serde_json::from_str(&chain)?;
        let last = chain["plugins"].as_array().and_then(|plugins| plugins.last()).cloned().unwrap_or_default();
        ensure!(last["type"] == "egress-agent-cni", "the last plugin on {name} is {last}");
        ensure!(node.path("/opt/cni/bin/egress-agent-cni").exists(), "{name} has no plugin");
    }
    test.nothing_is_selected()
}

/// docs/install.md, "The first egress IP".
fn first_egress_ip(test: &mut NodeTest) -> Result<()> {
    let cluster = &test.cluster;
    cluster.types("label node node1 k8s.ovn.org/egress-assignable=")?;
    cluster.types("apply -f deploy/examples/egressip-simpson.yaml")?;
    test.is_served_by("node1", EFFECT)?;
    test.all_are_right()?;
    until_true("two pods are counted", REPORTED, || {
        let object = cluster.get(&["egressip", OBJECT])?;
        Ok(object["status"]["selectedPods"] == 2)
    })?;
    println!("{}", cluster.types("get egressip")?);
    Ok(())
}

/// Forty pods, every second one selected; the first packet of each is an echo request to an address of its own, of which there is
/// one alone.
fn first_packets(test: &mut NodeTest) -> Result<()> {
    const PODS: u8 = 40;
    let cluster = &test.cluster;
    let server_addresses: Vec<IpAddr> = (0..PODS).map(|number| plan::server_address(number).v4.into()).collect();
    let capture = Capture::watching(&cluster.lab, server_addresses.iter().copied().collect())?;
    let mark = cluster.server.log().mark();
    let mut houses: BTreeMap<&str, Vec<_>> = BTreeMap::new();
    let mut expected = Vec::new();
    for (number, server_address) in (0..PODS).zip(&server_addresses) {
        let house = if number % 2 == 0 { "simpson" } else { "bouvier" };
        let node = if number % 4 < 2 { "node1" } else { "node2" };
        let name = format!("new-{number}");
        let request = format!("GET / HTTP/1.0\r\nUser-Agent: {name}\r\n\r\n");
        // The server takes a connection whose input has ended for one that is given up.
        let script = format!(
            "ping -c 1 -W 5 {server_address}; (printf '{request}'; sleep 2) | nc -w 5 {server_address} {HTTP_PORT}"
        );
        houses.entry(house).or_default().push((name.clone(), node, Some(script)));
        let own = cluster.node(node)?.lab.number.address().v4.into();
        expected.push((name, *server_address, if house == "simpson" { EGRESS_IP } else { own }));
    }
    houses.iter().try_for_each(|(house, pods)| cluster.add_pods(house, pods))?;
    let mut done = 0;
    until_true("forty pods have asked", KUBERNETES, || {
        let pods = cluster.get(&["pods", "-A", "-l", "made-for=tests"])?;
        let pods = pods["items"].as_array().cloned().unwrap_or_default();
        let ended = |pod: &&Value| matches!(pod["status"]["phase"].as_str(), Some("Succeeded" | "Failed"));
        let now = pods.iter().filter(ended).count();
        if now > done {
            (done, _) = (now, println!("{now} of {PODS} pods have ended"));
        }
        Ok(now == usize::from(PODS))
    })?;
    let requests = cluster.server.log().since(mark);
    let seen = capture.finish()?;
    let mut wrong = Vec::new();
    for (name, server_address, source) in &expected {
        let to_door: Vec<_> = seen.captured.iter().filter(|one| one.destination == *server_address).collect();
        let echoes = to_door.iter().filter(|one| one.protocol == 1).count();
        let others = to_door.iter().filter(|one| one.source != *source).count();
        let asked = requests.iter().filter(|one| one.user_agent == *name);
        let asked: Vec<_> = asked.map(|one| one.client.ip()).collect();
        if echoes != 1 || others > 0 || asked != [*source] {
            let all = to_door.len();
            wrong.push(format!(
                "{name}: {echoes} first packets of {all}, {others} with a wrong source, seen as {asked:?}, not {source}"
            ));
        }
    }
    for house in houses.keys() {
        cluster.kubectl(&["-n", house, "delete", "pods", "-l", "made-for=tests", "--grace-period=0", "--force"])?;
    }
    ensure!(wrong.is_empty(), "{} of {PODS}: {}", wrong.len(), wrong.join("; "));
    Ok(())
}

/// docs/install.md, "Upgrade": agents are replaced one by one.
fn rollout(test: &mut NodeTest) -> Result<()> {
    let traffic = test.traffic()?;
    test.cluster.types("-n egress-agent rollout restart daemonset/egress-agent")?;
    rolled_out(&test.cluster, "egress-agent")?;
    test.all_are_right()?;
    traffic.finish_without_loss().map(drop)
}

/// The nodes that emitted the address, in turn.
fn turns_of(seen: &Seen) -> Vec<String> {
    turns(&seen.captured, EGRESS_IP).iter().map(|node| node.name()).collect()
}

/// The address is emitted by one node, then by the other, but for what is in flight when the other begins. A node whose link is
/// back sends nothing of what has waited for its next hop: the programs ask the lease of such packets too.
fn emitted_in_turn(seen: &Seen, from: &str, to: &str) -> Result<()> {
    let turns = turns_of(seen);
    ensure!(turns == [from, to], "{EGRESS_IP} was emitted by {turns:?}");
    Ok(())
}

/// docs/operations/measured-faults.md, "What happens in each fault". Leaves both nodes with the label.
fn cut(test: &mut NodeTest) -> Result<()> {
    let cluster = &test.cluster;
    cluster.types("label node node1 node2 k8s.ovn.org/egress-assignable= --overwrite")?;
    let from = test.gateway()?;
    let (stays, to) = if from == "node1" { (1, "node2") } else { (0, "node1") };
    let lease = cluster.get(&["-n", "egress-agent", "lease", "egress-agent-leader"])?;
    let leader = lease["spec"]["holderIdentity"].as_str().unwrap_or_default().to_owned();
    let bound = if leader.starts_with(&format!("{from}_")) { LEADERS_FAIL_OVER } else { FAIL_OVER };
    println!("{from} serves, {leader} leads");
    // While there was no other gateway its lease had no end, and a node that is cut off before it has acknowledged the end keeps
    // its addresses.
    until_true("the lease of the gateway has an end", EFFECT, || {
        let ledger = cluster.get(&["-n", "egress-agent", "configmap", "egress-agent-hand-overs"])?;
        let none = |key: &str| ledger["data"][key].as_str().is_none_or(|text| text == "{}");
        Ok(none("endless-leases") && none("ending-leases"))
    })?;
    let remaining = &test.selected[stays];
    let traffic = test.traffic()?;
    let node = &cluster.node(&from)?.lab;
    until("an answer to a pod that stays", EFFECT, || Ok(cluster.is_seen_as(remaining, EGRESS_IP).ok()))?;
    cluster.lab.set_power(node, false)?;
    let moved = test.is_served_by(to, bound + EFFECT);
    let seen = cluster.is_seen_as(remaining, EGRESS_IP);
    let reported = cluster.event(OBJECT, "EgressIPMoved", REPORTED);
    cluster.lab.set_power(node, true)?;
    moved?;
    seen?;
    println!("{}", reported?);
    test.all_are_right()?;
    std::thread::sleep(WATCHED);
    let (lost, seen) = traffic.finish()?;
    let gap = lost.iter().find(|one| one.name == remaining.name).context("no flow")?.longest_gap;
    ensure!(gap < bound, "{} had no answer for {gap:?}, which is more than {bound:?}", remaining.name);
    emitted_in_turn(&seen, &from, to)?;
    Ok(())
}

/// docs/operations/drain-and-upgrade.md, "Taking a node out of service".
fn drain(test: &mut NodeTest) -> Result<()> {
    let cluster = &test.cluster;
    cluster.types("label node node1 node2 k8s.ovn.org/egress-assignable= --overwrite")?;
    let from = test.gateway()?;
    let to = if from == "node1" { "node2" } else { "node1" };
    let traffic = test.traffic()?;
    println!("{}", cluster.egress_agent(&["drain", &from])?);
    test.is_served_by(to, EFFECT)?;
    println!("{}", cluster.egress_agent(&["drain", &from, "--undo"])?);
    let node = cluster.get(&["node", &from])?;
    ensure!(node["metadata"]["annotations"]["k8s.ovn.org/egress-drain"].is_null(), "the mark is still there");
    test.all_are_right()?;
    let seen = traffic.finish_without_loss()?;
    let turns = turns_of(&seen);
    ensure!(turns == [from.as_str(), to], "{EGRESS_IP} was emitted by {turns:?}");
    Ok(())
}

/// docs/operations/assignments.md, "The condition `Degraded`": another host of the nodes' network has the address.
fn conflict(test: &mut NodeTest) -> Result<()> {
    const NAME: &str = "taken";
    let cluster = &test.cluster;
    let host = Netns::new(cluster.lab.prefix(), "host");
    cluster.lab.add_namespaces(std::slice::from_ref(&host))?;
    let lan = cluster.lab.lan();
    host.exec("ip", &["link", "add", POD_INTERFACE, "type", "veth", "peer", "name", "host", "netns", lan.name()])?;
    lan.exec("ip", &["link", "set", "host", "master", "br0", "up"])?;
    host.exec("ip", &["addr", "add", &format!("{TAKEN}/16"), "dev", POD_INTERFACE])?;
    host.exec("ip", &["link", "set", POD_INTERFACE, "up"])?;
    cluster.add_house("szyslak")?;
    cluster.apply(&egress_ip(NAME, &[&TAKEN.to_string()], &labels("house", "szyslak"), &all()))?;
    let outcome = until_true("Degraded is True", REPORTED, || {
        let object = cluster.get(&["egressip", NAME])?;
        let conditions = object["status"]["conditions"].as_array().cloned().unwrap_or_default();
        let is = |kind: &str, status: &str, reason: &str| {
            conditions.iter().any(|one| one["type"] == kind && one["status"] == status && one["reason"] == reason)
        };
        Ok(is("Degraded", "True", "AddressInUse") && is("Assigned", "False", "NotServed"))
    });
    let reported = cluster.event(NAME, "EgressIPConflict", REPORTED);
    println!("{}", cluster.kubectl(&["get", "egressip", NAME, "-o", "jsonpath={.status.conditions}"])?);
    cluster.types(&format!("delete egressip {NAME}"))?;
    outcome?;
    println!("{}", reported?);
    test.all_are_right()
}

/// docs/install.md, "Uninstall". Leaves the nodes as they were.
fn uninstall(test: &mut NodeTest) -> Result<()> {
    let cluster = &test.cluster;
    for (node, before) in cluster.nodes().iter().zip(&test.before) {
        let seen = differences(before, &snapshot_of(node)?).len();
        ensure!(seen > 3, "the snapshot of {} does not see the agent", node.lab.name());
    }
    cluster.types("delete egressip --all")?;
    test.nothing_is_selected()?;
    cluster.types("-n egress-agent delete daemonset egress-agent")?;
    cluster.types("apply -k deploy/overlays/cleanup-bridge-cni")?;
    rolled_out(cluster, "egress-agent-cleanup")?;
    cluster.types("delete -k deploy/overlays/cleanup-bridge-cni")?;
    cluster.types("delete --ignore-not-found -k deploy/overlays/bridge-cni")?;
    test.nothing_is_selected()?;
    for (node, before) in cluster.nodes().iter().zip(&test.before) {
        let mut left = Vec::new();
        let outcome = until_true(&format!("{} is as it was", node.lab.name()), EFFECT, || {
            left = differences(before, &snapshot_of(node)?);
            Ok(left.is_empty())
        });
        outcome.with_context(|| format!("left or taken: {left:#?}"))?;
    }
    Ok(())
}

/// What an agent could leave on a node: what the lab's nodes are compared by, and the files of the CNI.
fn snapshot_of(node: &RealNode) -> Result<NodeSnapshot> {
    let mut snapshot = snapshot(&node.lab)?;
    // Timers of bridges, and addresses that a bridge has learned and forgets.
    let timer = regex::Regex::new(r"_timer +[0-9.]+")?;
    for (what, lines) in &mut snapshot {
        *lines = lines.iter().map(|line| timer.replace_all(line, "_timer").into_owned()).collect();
        lines.retain(|line| !what.starts_with("bridge fdb") || line.contains("permanent"));
    }
    for folder in ["/etc/cni/net.d", "/opt/cni/bin"] {
        let mut files = BTreeSet::new();
        for entry in fs::read_dir(node.path(folder))? {
            let path = entry?.path();
            // The chain is rewritten, with other spaces, when a plugin is added or removed: its contents are compared.
            let text = fs::read(&path)?;
            let text = serde_json::from_slice::<Value>(&text)
                .map_or_else(|_| text.len().to_string(), |chain| chain.to_string());
            files.insert(format!("{} {text}", path.display()));
        }
        snapshot.insert(folder.to_owned(), files);
    }
    Ok(snapshot)
}

/// docs/install.md, "What a cluster needs".
fn without_bpffs(test: &mut NodeTest) -> Result<()> {
    const LINE: &str = "mount -t bpf bpf /sys/fs/bpf";
    let cluster = &test.cluster;
    cluster.node("node2")?.exec(&["umount", "--lazy", "/sys/fs/bpf"])?;
    cluster.types("apply -k deploy/overlays/bridge-cni")?;
    let printed = until("the agent of node2 says what is missing", KUBERNETES, || {
        let Ok(pod) = cluster.agent_pod("node2") else { return Ok(None) };
        let ended = pod["status"]["containerStatuses"].as_array().into_iter().flatten();
        if !ended.clone().any(|one| one["name"] == "agent" && one["restartCount"].as_u64() > Some(0)) {
            return Ok(None);
        }
        let name = pod["metadata"]["name"].as_str().unwrap_or_default().to_owned();
        Ok(cluster.kubectl(&["-n", "egress-agent", "logs", &name, "-c", "agent", "--previous"]).ok())
    })?;
    println!("{printed}");
    let errors: Vec<&str> = printed.lines().filter(|line| line.starts_with("error: ")).collect();
    ensure!(errors.len() == 1 && printed.lines().last() == errors.first().copied(), "that is not one line");
    ensure!(errors[0].contains(LINE), "it does not say `{LINE}`");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::cluster::SERVER_ADDRESSES;
    use super::*;

    #[test]
    fn names_are_unique_and_doors_suffice() {
        let names: BTreeSet<&str> = STEPS.iter().map(|step| step.name).collect();
        assert_eq!(names.len(), STEPS.len());
        const { assert!(FLOWS + 4 <= SERVER_ADDRESSES) };
    }
}
