//! Changes while connections run: labels of pods and namespaces come and go, pods are deleted and made again. What an
//! object took from a pod is cut, so that no connection continues with a wrong address; no other's connection notices. On the
//! same lab: an object that a repository keeps (`repository`).

use std::io::ErrorKind;

use super::gitops;
use crate::prelude::*;
use egress_lab::traffic::flows::FlowReport;

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
    let cluster = TestCluster::start(context, pods)?;
    cluster.assignable(2, true)?;
    cluster.assignable(3, true)?;
    cluster.assign(&egress_ip("changes", &[V4, V6], &labels("house", "red"), &labels("app", "a")))?;
    cluster.is_seen_as("changing", Some(V4), Some(V6))?;
    cluster.is_seen_as("steady", Some(V4), Some(V6))?;
    let witnesses = [flows(&cluster.pod("steady")?.netns)?, flows(&cluster.pod("other")?.netns)?];
    pod_label(&cluster)?;
    born_again(&cluster)?;
    cluster.is_seen_as("steady", Some(V4), Some(V6))?;
    for (name, flows) in ["steady", "other"].into_iter().zip(witnesses) {
        for flow in flows {
            let report = flow.finish()?;
            ensure!(whole(&report), "changes of another pod have hurt {name}: {report:?}");
            println!("{name}: {} sent, none lost, while another pod changed", report.sent);
        }
    }
    namespace_label(&cluster)?;
    cluster.remove("changes")?;
    cluster.is_seen_as("spare", None, None)?;
    gitops::and_agents_do_not_fight(&cluster, "spare")
}

fn flows(from: &Netns) -> Result<Vec<TrafficFlow>> {
    let mut flows = Vec::new();
    for to in plan::SERVER.both() {
        let echo = SocketAddr::new(to, ECHO_PORT);
        flows.push(TrafficFlow::tcp(from, echo, TICK, client::PATIENCE)?);
        flows.push(TrafficFlow::udp(from, echo, TICK)?);
    }
    Ok(flows)
}

fn whole(report: &FlowReport) -> bool {
    report.lost() == 0 && report.broken.is_none() && report.sent > 10
}

/// A connection that has lost its address ends at once, not by a timeout.
fn is_cut(flow: TrafficFlow) -> Result<()> {
    // The change may be through before its next message is due.
    let report = flow.break_within(AT_ONCE)?;
    let cut = matches!(report.broken, Some(ErrorKind::ConnectionReset | ErrorKind::ConnectionAborted));
    ensure!(cut, "a connection whose address was taken away was not reset: {report:?}");
    Ok(())
}

fn tcp(from: &Netns) -> Result<[TrafficFlow; 2]> {
    let [v4, v6] =
        plan::SERVER.both().map(|to| TrafficFlow::tcp(from, SocketAddr::new(to, ECHO_PORT), TICK, client::PATIENCE));
    Ok([v4?, v6?])
}

fn pod_label(cluster: &TestCluster) -> Result<()> {
    let connections = tcp(&cluster.pod("changing")?.netns)?;
    // Both connections stand when new ones do, which are made after them.
    cluster.is_seen_as("changing", Some(V4), Some(V6))?;
    cluster.label_pod("changing", "app", Some("c"))?;
    cluster.is_seen_as("changing", None, None)?;
    connections.into_iter().try_for_each(is_cut)?;
    // Those that it has with its node's address do not continue either: the other end knows them by no other.
    let connections = tcp(&cluster.pod("changing")?.netns)?;
    cluster.is_seen_as("changing", None, None)?;
    cluster.label_pod("changing", "app", Some("a"))?;
    cluster.is_seen_as("changing", Some(V4), Some(V6))?;
    connections.into_iter().try_for_each(is_cut)
}

fn namespace_label(cluster: &TestCluster) -> Result<()> {
    cluster.label_namespace("red", "house", Some("none"))?;
    cluster.is_seen_as("changing", None, None)?;
    cluster.is_seen_as("steady", None, None)?;
    cluster.label_namespace("blue", "house", Some("red"))?;
    cluster.is_seen_as("spare", None, None)?;
    cluster.label_pod("spare", "app", Some("a"))?;
    cluster.is_seen_as("spare", Some(V4), Some(V6))?;
    cluster.label_namespace("red", "house", Some("red"))?;
    cluster.is_seen_as("changing", Some(V4), Some(V6))?;
    // An object that takes everybody.
    cluster.assign(&egress_ip("changes", &[V4, V6], &all(), &all()))?;
    cluster.is_seen_as("other", Some(V4), Some(V6))
}

/// A pod of the same name comes back with the same address, then with another pod's.
fn born_again(cluster: &TestCluster) -> Result<()> {
    let old = cluster.pod("changing")?.clone();
    let path = cluster.pod_path("changing")?;
    let [v4, v6] = plan::SERVER.both();
    cluster.api.delete(&path)?;
    cluster.becomes(&old.netns, v4, Observed::Nothing)?;
    cluster.api.publish_pod(&old)?;
    cluster.is_seen_as("changing", Some(V4), Some(V6))?;

    let spare = cluster.pod("spare")?.clone();
    cluster.api.delete(&cluster.pod_path("spare")?)?;
    cluster.api.delete(&path)?;
    cluster.becomes(&old.netns, v4, Observed::Nothing)?;
    // No object selected it.
    cluster.becomes(&spare.netns, v4, Observed::Source(spare.node.address().towards(v4)))?;
    let moved = LabPod { addresses: spare.addresses, netns: spare.netns.clone(), ..old.clone() };
    cluster.api.publish_pod(&moved)?;
    for (to, egress) in [(v4, V4), (v6, V6)] {
        cluster.becomes(&spare.netns, to, Observed::Source(egress.parse().context("a literal")?))?;
        cluster.becomes(&old.netns, to, Observed::Nothing)?;
    }
    cluster.api.delete(&path)?;
    cluster.becomes(&spare.netns, v4, Observed::Nothing)?;
    cluster.api.publish_pod(&old)?;
    cluster.api.publish_pod(&spare)?;
    cluster.is_seen_as("changing", Some(V4), Some(V6))?;
    cluster.is_seen_as("spare", None, None)
}
