//! The lab without any agent, tested by itself: all other tests depend on it.
//!
//! Pods reach the world with their node's address and each other with their own; services lead to their pods; cuts of power cut;
//! long-lived flows survive; and nothing of a lab is left afterwards, even where it was killed.

use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::process::{Child, Command, Stdio};

use crate::prelude::*;
use egress_lab::kube_api::{ApiChoice, KubeApi};

/// Until then a node whose power is back must reach the world.
const POWER_RETURNS: Duration = Duration::from_secs(10);

/// The lab's own tests, for the list of all tests on the lab.
pub(super) fn tests() -> Vec<LabTest> {
    let test = |name, run| LabTest::new(name, Duration::from_secs(60), run);
    vec![
        test("lab_pods_reach_the_world_with_their_nodes_address", world),
        test("lab_pods_reach_pods_and_nodes", neighbours),
        test("lab_services_lead_to_their_pods", services),
        test("lab_long_flows_lose_nothing_and_checksums_are_right", long_flows).not_on_ovn(super::OVN_LOSES),
        test("lab_of_plain_nodes_has_right_checksums", plain_nodes),
        test("lab_agents_can_be_stopped_and_started", agents),
        test("lab_node_without_power_is_cut_off", power),
        test("lab_interfaces_can_be_recreated", recreated_interfaces),
        test("lab_nodes_and_people_share_an_api_server", api_server),
        test("lab_leaves_nothing_behind", nothing_left),
        test("lab_of_a_killed_run_is_removed_by_the_next", recovery),
    ]
}

fn start(context: &LabContext) -> Result<Lab> {
    builder(context).start()
}

fn builder(context: &LabContext) -> LabBuilder {
    LabBuilder::default().nodes(3).pods_per_node(2).keep_logs(context.logs.clone())
}

/// The address that a server saw, asked from a namespace.
fn seen_as(from: &Netns, to: SocketAddr) -> Result<IpAddr> {
    let reply = client::get(from, to, "/", "baseline")?;
    let reply = reply.with_context(|| format!("{} does not reach {to}", from.name()))?;
    println!("{} {} -> {to}: seen as {}", from.name(), reply.local, reply.seen_as()?);
    reply.seen_as()
}

fn expect_seen(from: &Netns, to: SocketAddr, expected: IpAddr) -> Result<()> {
    let seen = seen_as(from, to)?;
    ensure!(seen == expected, "{} is seen at {to} as {seen}, not as {expected}", from.name());
    Ok(())
}

fn world(context: &LabContext) -> Result<()> {
    let lab = start(context)?;
    let server = Server::outside(&lab)?;
    let capture = Capture::start(&lab)?;
    for pod in lab.pods() {
        for to in plan::SERVER.both() {
            expect_seen(&pod.netns, SocketAddr::new(to, HTTP_PORT), pod.node.address().towards(to))?;
            ensure!(client::ping(&pod.netns, to, Ping::default())?.received == 1, "{} cannot ping {to}", pod.name);
        }
    }
    let requests = server.log().since(0).len();
    ensure!(requests == 2 * lab.pods().len(), "the access log has {requests} lines");
    let seen = capture.finish_clean()?;
    let packets = seen.to_the_world(AddressKind::Node);
    println!("{} frames captured, {packets} packets to the world, all from nodes' addresses", seen.frames);
    ensure!(packets > 0, "the capture saw nothing");
    Ok(())
}

fn neighbours(context: &LabContext) -> Result<()> {
    let lab = start(context)?;
    for target in lab.pods() {
        let _server = Server::in_pod(&lab, target)?;
        for pod in lab.pods().iter().filter(|pod| pod.name != target.name) {
            for to in target.addresses.both() {
                expect_seen(&pod.netns, SocketAddr::new(to, HTTP_PORT), pod.addresses.towards(to))?;
            }
        }
    }
    for node in lab.nodes() {
        let _server = Server::on_node(&lab, node)?;
        for pod in lab.pods() {
            for to in node.number.address().both() {
                let own = if pod.node == node.number { pod.addresses } else { pod.node.address() };
                expect_seen(&pod.netns, SocketAddr::new(to, HTTP_PORT), own.towards(to))?;
            }
        }
        for other in lab.nodes() {
            for to in node.management().both() {
                let pong = client::ping(&other.host, to, Ping::default())?;
                ensure!(pong.received == 1, "{} cannot ping {to}: {}", other.name(), pong.text);
            }
        }
    }
    Ok(())
}

fn services(context: &LabContext) -> Result<()> {
    let lab = start(context)?;
    let servers = lab.pods().iter().map(|pod| Server::in_pod(&lab, pod)).collect::<Result<Vec<_>>>()?;
    for node in lab.nodes() {
        for to in node.number.address().both() {
            // Local traffic policy: the backend sees who really called.
            expect_seen(lab.outside(), SocketAddr::new(to, plan::NODE_PORT), plan::SERVER.towards(to))?;
        }
        let (place, _) = lab.pods().iter().enumerate().find(|(_, pod)| pod.node == node.number).context("no pod")?;
        let calls = servers[place].log().since(0).len();
        ensure!(calls == 2, "the NodePort of {} reached its first pod {calls} times", node.name());
    }
    for pod in lab.pods().iter().skip(1) {
        for to in plan::SERVICE.both() {
            seen_as(&pod.netns, SocketAddr::new(to, 80))?;
        }
    }
    Ok(())
}

fn long_flows(context: &LabContext) -> Result<()> {
    const TICK: Duration = Duration::from_millis(5);
    let lab = start(context)?;
    let _server = Server::outside(&lab)?;
    let capture = Capture::start(&lab)?;
    let mut flows = Vec::new();
    for pod in lab.pods() {
        for to in plan::SERVER.both() {
            let echo = SocketAddr::new(to, ECHO_PORT);
            flows.push(TrafficFlow::tcp(&pod.netns, echo, TICK, client::PATIENCE)?);
            flows.push(TrafficFlow::udp(&pod.netns, echo, TICK)?);
        }
    }
    for pod in lab.pods() {
        for to in plan::SERVER.both() {
            let to = SocketAddr::new(to, HTTP_PORT);
            let large = client::get(&pod.netns, to, "/bytes/500000", "baseline")??;
            ensure!(large.body.len() == 500_000, "a large answer is not whole");
            let sent = client::post(&pod.netns, to, &vec![b'.'; 500_000], "baseline")??;
            ensure!(sent.body == b"500000\n", "a large request is not whole");
        }
    }
    // A fast machine has had its large transfers before a flow has sent what is asked of it below.
    std::thread::sleep(20 * TICK);
    for flow in flows {
        let report = flow.finish()?;
        let whole = report.lost() == 0 && report.duplicated == 0 && report.broken.is_none() && report.sent > 10;
        ensure!(whole, "a flow lost something: {report:?}");
    }
    let seen = capture.finish()?;
    println!("{} frames captured", seen.frames);
    seen.check()
}

fn plain_nodes(context: &LabContext) -> Result<()> {
    let plain = |_| HostConfig { checksum_offload: false, ..HostConfig::default() };
    let lab = builder(context).host_config(plain).server_without_checksum_offload().start()?;
    let _server = Server::outside(&lab)?;
    let capture = Capture::start(&lab)?;
    for pod in lab.pods() {
        for to in plan::SERVER.both() {
            let answer = client::get(&pod.netns, SocketAddr::new(to, HTTP_PORT), "/bytes/100000", "baseline")??;
            ensure!(answer.body.len() == 100_000, "a large answer is not whole");
        }
    }
    capture.finish()?.check()
}

/// A stand-in for an agent: it runs until it is stopped, and has nothing to clean up.
const STAND_IN: &str = "#!/bin/sh\n[ \"$1\" = cleanup ] && exec echo clean\nwhile :; do sleep 0.05; done\n";

fn agents(context: &LabContext) -> Result<()> {
    let lab = start(context)?;
    let binary = context.logs.join("stand-in");
    std::fs::write(&binary, STAND_IN)?;
    std::fs::set_permissions(&binary, std::fs::Permissions::from_mode(0o755))?;
    let none = context.logs.join("none");
    let options = AgentOptions {
        binary,
        kubeconfig: none.clone(),
        controller_kubeconfig: none,
        extra: Vec::new(),
        controller_extra: Vec::new(),
    };
    let mut agents = Agent::start_all(&lab, &options)?;
    let agent = agents.first_mut().context("no agent")?;
    let first = agent.pid()?.context("the agent does not run")?;
    agent.pause()?;
    agent.resume()?;
    agent.terminate(Duration::from_secs(2))?;
    ensure!(agent.pid()?.is_none(), "a terminated agent still runs");
    agent.restart()?;
    agent.ensure_alive()?;
    ensure!(agent.pid()? != Some(first), "the agent was not started again");
    ensure!(agent.clean_up()? == "clean\n", "cleanup was not run");
    agent.kill()?;
    ensure!(agent.ensure_alive().is_err(), "a killed agent counts as alive");
    Ok(())
}

fn power(context: &LabContext) -> Result<()> {
    let lab = start(context)?;
    let _server = Server::outside(&lab)?;
    let node = lab.node(NodeNumber::new(2)?);
    let pod = lab.pod("pod2-1")?;
    let to = SocketAddr::new(plan::SERVER.v4.into(), HTTP_PORT);
    seen_as(&pod.netns, to)?;
    lab.set_power(node, false)?;
    ensure!(client::get(&pod.netns, to, "/", "baseline")?.is_err(), "a node without power reaches the world");
    lab.set_power(node, true)?;
    // A neighbour that did not answer is not asked again at once: by the kernel's timer.
    let until = Instant::now() + POWER_RETURNS;
    loop {
        match seen_as(&pod.netns, to) {
            Err(_) if Instant::now() < until => std::thread::sleep(Duration::from_millis(100)),
            outcome => return outcome.map(drop),
        }
    }
}

fn recreated_interfaces(context: &LabContext) -> Result<()> {
    let lab = start(context)?;
    let _server = Server::outside(&lab)?;
    for node in lab.nodes() {
        lab.remake_uplink(node)?;
        lab.remake_management(node)?;
        let pod = lab.pods_on(node.number).next().context("no pod")?;
        for to in plan::SERVER.both() {
            expect_seen(&pod.netns, SocketAddr::new(to, HTTP_PORT), node.number.address().towards(to))?;
        }
    }
    Ok(())
}

fn api_server(context: &LabContext) -> Result<()> {
    let lab = start(context)?;
    let api = KubeApi::start(&lab, &ApiChoice::InMemory)?;
    api.publish(&lab)?;
    let node = lab.nodes().first().context("no node")?;
    let relay = SocketAddr::new(plan::EXT.v4.into(), egress_lab::kube_api::API_PORT);
    let reply = client::get(&node.host, relay, "/api/v1/pods", "baseline")??;
    let pods: serde_json::Value = serde_json::from_slice(&reply.body)?;
    let count = pods.pointer("/items").and_then(|items| items.as_array()).map_or(0, Vec::len);
    ensure!(count == lab.pods().len(), "a node sees {count} pods");
    let nodes: kube::Api<k8s_openapi::api::core::v1::Node> = kube::Api::all(api.client());
    let listed = api.runtime().block_on(nodes.list(&kube::api::ListParams::default()))?;
    ensure!(listed.items.len() == lab.nodes().len(), "a client sees {} nodes", listed.items.len());
    let in_memory = api.in_memory().context("the lab's API server is another one")?;
    in_memory.set_outage(true);
    ensure!(client::get(&node.host, relay, "/api/v1/pods", "baseline")?.is_err(), "a node sees no outage");
    in_memory.set_outage(false);
    if KubeApi::has_kubectl() {
        let nodes = api.kubectl(&["get", "nodes"])?;
        println!("{nodes}");
        ensure!(nodes.matches(" Ready").count() == lab.nodes().len(), "kubectl does not see all nodes ready");
    }
    Ok(())
}

/// Resources of the machine that a lab could leave.
#[derive(Debug, PartialEq, Eq)]
struct MachineSnapshot {
    namespaces: BTreeSet<String>,
    links: BTreeSet<String>,
    mounts: BTreeSet<String>,
    ledgers: BTreeSet<String>,
}

impl MachineSnapshot {
    /// Only what bears the prefix, where things have names: other labs come and go in the meantime.
    fn take(prefix: &str) -> Result<Self> {
        let ours = |name: &String| name.starts_with(prefix);
        let entries = |folder: &str| -> BTreeSet<String> {
            let Ok(entries) = std::fs::read_dir(folder) else { return BTreeSet::new() };
            entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).filter(ours).collect()
        };
        let mounts = std::fs::read_to_string("/proc/self/mountinfo")?;
        let points = mounts.lines().filter_map(|line| line.split(' ').nth(4)).map(str::to_owned);
        Ok(Self {
            namespaces: entries("/run/netns"),
            links: std::fs::read_dir("/sys/class/net")?
                .flatten()
                .map(|entry| entry.file_name().to_string_lossy().into_owned())
                .collect(),
            mounts: points.filter(|point| point.contains(&format!("/{prefix}"))).collect(),
            ledgers: entries(egress_lab::topology::ledger::FOLDER),
        })
    }
}

fn nothing_left(context: &LabContext) -> Result<()> {
    let prefix = format!("t{}-", std::process::id());
    let before = MachineSnapshot::take(&prefix)?;
    let lab = start(context)?;
    let mut bystander = lab.nodes()[0].host.run(|| spawn_sleep(&lab.nodes()[0].host))?;
    ensure!(MachineSnapshot::take(&prefix)? != before, "the snapshot does not see the lab");
    ensure!(MachineSnapshot::take(&prefix)?.links == before.links, "the lab made a device in the root namespace");
    lab.tear_down()?;
    let after = MachineSnapshot::take(&prefix)?;
    ensure!(before == after, "before: {before:?}, after: {after:?}");
    ensure!(bystander.wait()?.code().is_none(), "a process of the lab has outlived it");
    Ok(())
}

fn spawn_sleep(netns: &Netns) -> Result<Child> {
    Ok(netns.command("sleep").arg("600").spawn()?)
}

fn recovery(context: &LabContext) -> Result<()> {
    let prefix = format!("k{}", std::process::id());
    let living = start(context)?;
    let mut doomed = hold(&prefix)?;
    ensure!(!MachineSnapshot::take(&prefix)?.namespaces.is_empty(), "the lab to be killed is not up");
    doomed.kill()?;
    doomed.wait()?;
    ensure!(!MachineSnapshot::take(&prefix)?.namespaces.is_empty(), "a killed lab cleans up by itself?");
    drop(LabBuilder::default().nodes(1).start()?);
    let left = MachineSnapshot::take(&prefix)?;
    let nothing = left.namespaces.is_empty() && left.mounts.is_empty() && left.ledgers.is_empty();
    ensure!(nothing, "a killed lab left {left:?}");
    let host = &living.nodes()[0].host;
    ensure!(Path::exists(&host.path()), "the recovery has removed a living lab");
    Ok(())
}

/// Starts `cargo xtask lab --hold` as its own process and waits until it is up.
fn hold(prefix: &str) -> Result<Child> {
    let program = std::env::current_exe()?;
    let mut child = Command::new(program)
        .args(["lab", "--hold", "--nodes", "1", "--pods", "1", "--prefix", prefix])
        .stdout(Stdio::piped())
        .spawn()?;
    let output = child.stdout.take().context("no output")?;
    for line in BufReader::new(output).lines() {
        if line?.contains("Ctrl-C") {
            return Ok(child);
        }
    }
    bail!("the lab to be killed did not come up");
}
