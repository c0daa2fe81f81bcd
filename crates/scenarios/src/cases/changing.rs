//! Changes while connections run: labels of pods and namespaces come and go, pods are deleted and made again. What an
//! object took from a pod is cut, so that no connection goes on with a wrong address; nobody else's connection notices. On the
//! same lab: an object that a repository keeps (`repository`).

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::repository;
use egress_lab::api_objects::{all, egress_ip, labels};
use egress_lab::test::LabContext;
use egress_lab::test_cluster::{Ground, Sight, pod};
use egress_lab::topology::addresses as plan;
use egress_lab::traffic::client;
use egress_lab::traffic::flows::{Flow, FlowReport};
use egress_lab::traffic::server::ECHO_PORT;
use egress_lab::{Netns, Pod};

const V4: &str = "172.18.0.110";
const V6: &str = "fd00:172:18::110";
const TICK: Duration = Duration::from_millis(10);
/// How soon a connection that was cut is reset.
const AT_ONCE: Duration = Duration::from_secs(2);

pub(super) fn labels_and_pods(context: &LabContext) -> Result<()> {
    let pods = vec![
        pod("changing", "red", 1, &[("app", "a")]),
        pod("steady", "red", 1, &[("app", "a")]),
        pod("other", "red", 1, &[("app", "b")]),
        pod("spare", "blue", 1, &[]),
    ];
    let ground = Ground::start(context, pods)?;
    ground.assignable(2, true)?;
    ground.assignable(3, true)?;
    ground.assign(&egress_ip("changes", &[V4, V6], &labels("house", "red"), &labels("app", "a")))?;
    ground.is_seen_as("changing", Some(V4), Some(V6))?;
    ground.is_seen_as("steady", Some(V4), Some(V6))?;
    let witnesses = [flows(&ground.pod("steady")?.netns)?, flows(&ground.pod("other")?.netns)?];
    pod_label(&ground)?;
    born_again(&ground)?;
    ground.is_seen_as("steady", Some(V4), Some(V6))?;
    for (name, flows) in ["steady", "other"].into_iter().zip(witnesses) {
        for flow in flows {
            let report = flow.finish()?;
            ensure!(whole(&report), "changes of another pod have hurt {name}: {report:?}");
            println!("{name}: {} sent, none lost, while another pod changed", report.sent);
        }
    }
    namespace_label(&ground)?;
    ground.remove("changes")?;
    ground.is_seen_as("spare", None, None)?;
    repository::and_agents_do_not_fight(&ground, "spare")
}

fn flows(from: &Netns) -> Result<Vec<Flow>> {
    let mut flows = Vec::new();
    for to in plan::SERVER.both() {
        let echo = SocketAddr::new(to, ECHO_PORT);
        flows.push(Flow::tcp(from, echo, TICK, client::PATIENCE)?);
        flows.push(Flow::udp(from, echo, TICK)?);
    }
    Ok(flows)
}

fn whole(report: &FlowReport) -> bool {
    report.lost() == 0 && report.broken.is_none() && report.sent > 10
}

/// A connection that has lost its address ends at once, not by a timeout.
fn is_cut(flow: Flow) -> Result<()> {
    // The change may be through before its next message is due.
    let report = flow.break_within(AT_ONCE)?;
    let cut = matches!(report.broken, Some(ErrorKind::ConnectionReset | ErrorKind::ConnectionAborted));
    ensure!(cut, "a connection whose address was taken away was not reset: {report:?}");
    Ok(())
}

fn tcp(from: &Netns) -> Result<[Flow; 2]> {
    let [v4, v6] =
        plan::SERVER.both().map(|to| Flow::tcp(from, SocketAddr::new(to, ECHO_PORT), TICK, client::PATIENCE));
    Ok([v4?, v6?])
}

fn pod_label(ground: &Ground) -> Result<()> {
    let connections = tcp(&ground.pod("changing")?.netns)?;
    // Both connections stand when new ones do, which are made behind them.
    ground.is_seen_as("changing", Some(V4), Some(V6))?;
    ground.label_pod("changing", "app", Some("c"))?;
    ground.is_seen_as("changing", None, None)?;
    connections.into_iter().try_for_each(is_cut)?;
    // Those that it has with its node's address do not go on either: the other end knows them by no other.
    let connections = tcp(&ground.pod("changing")?.netns)?;
    ground.label_pod("changing", "app", Some("a"))?;
    ground.is_seen_as("changing", Some(V4), Some(V6))?;
    connections.into_iter().try_for_each(is_cut)
}

fn namespace_label(ground: &Ground) -> Result<()> {
    ground.label_namespace("red", "house", Some("none"))?;
    ground.is_seen_as("changing", None, None)?;
    ground.is_seen_as("steady", None, None)?;
    ground.label_namespace("blue", "house", Some("red"))?;
    ground.is_seen_as("spare", None, None)?;
    ground.label_pod("spare", "app", Some("a"))?;
    ground.is_seen_as("spare", Some(V4), Some(V6))?;
    ground.label_namespace("red", "house", Some("red"))?;
    ground.is_seen_as("changing", Some(V4), Some(V6))?;
    // An object that takes everybody.
    ground.assign(&egress_ip("changes", &[V4, V6], &all(), &all()))?;
    ground.is_seen_as("other", Some(V4), Some(V6))
}

/// A pod of the same name comes back with the same address, then with another pod's.
fn born_again(ground: &Ground) -> Result<()> {
    let old = ground.pod("changing")?.clone();
    let path = ground.pod_path("changing")?;
    let [v4, v6] = plan::SERVER.both();
    ground.cluster.delete(&path)?;
    ground.becomes(&old.netns, v4, Sight::Nothing)?;
    ground.cluster.publish_pod(&old)?;
    ground.is_seen_as("changing", Some(V4), Some(V6))?;

    let spare = ground.pod("spare")?.clone();
    ground.cluster.delete(&ground.pod_path("spare")?)?;
    ground.cluster.delete(&path)?;
    ground.becomes(&old.netns, v4, Sight::Nothing)?;
    // No object selected it.
    ground.becomes(&spare.netns, v4, Sight::As(spare.node.address().towards(v4)))?;
    let moved = Pod { addresses: spare.addresses, netns: spare.netns.clone(), ..old.clone() };
    ground.cluster.publish_pod(&moved)?;
    for (to, egress) in [(v4, V4), (v6, V6)] {
        ground.becomes(&spare.netns, to, Sight::As(egress.parse().context("a literal")?))?;
        ground.becomes(&old.netns, to, Sight::Nothing)?;
    }
    ground.cluster.delete(&path)?;
    ground.becomes(&spare.netns, v4, Sight::Nothing)?;
    ground.cluster.publish_pod(&old)?;
    ground.cluster.publish_pod(&spare)?;
    ground.is_seen_as("changing", Some(V4), Some(V6))?;
    ground.is_seen_as("spare", None, None)
}
