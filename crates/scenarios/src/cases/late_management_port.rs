//! An agent that starts before its node's management port exists, as after a boot: no pod sends before the programs are attached.

use crate::prelude::*;
use egress_lab::MANAGEMENT;

const V4: &str = "172.18.0.110";
const V6: &str = "fd00:172:18::110";
const TICK: Duration = Duration::from_millis(2);

pub(super) fn no_pod_sends_before_the_programs(context: &LabContext) -> Result<()> {
    let mut cluster = TestCluster::start(context, vec![pod("one", "red", 1, &[])])?;
    cluster.assignable(2, true)?;
    cluster.assignable(3, true)?;
    cluster.assign(&egress_ip("early", &[V4, V6], &all(), &all()))?;
    cluster.is_seen_as("one", Some(V4), Some(V6))?;

    let place = cluster.lab.node(node(1)?).clone();
    cluster.agent(1)?.kill()?;
    cluster.lab.remove_management(&place)?;
    println!("{}", cluster.agent(1)?.clean_up()?);
    ensure!(!place.bpffs.exists(), "cleanup has left pins");
    // A node of Cilium alone looks like this, and its agent waits in vain.
    place.host.exec("ip", &["link", "add", "cilium_host", "type", "veth", "peer", "name", "cilium_net"])?;
    cluster.agent(1)?.restart()?;
    let line = format!("waiting for interface {MANAGEMENT}, the management port (--mgmt-port)");
    until_logged(cluster.agent(1)?.log(), &[&line, "Cilium must be chained to a CNI"], 1, EFFECT)?;
    place.host.exec("ip", &["link", "del", "cilium_host"])?;
    // Its programs are loaded and know the pod, who may send by then.
    let pins = AgentPins::of(&place);
    until_true("the pod's both addresses are in the kernel", EFFECT, || {
        Ok(pins.keys("pods").is_ok_and(|pods| pods.len() >= 2))
    })?;

    let capture = Capture::start(&cluster.lab)?;
    let from = &cluster.pod("one")?.netns;
    let flows = plan::SERVER.both().into_iter().map(|to| TrafficFlow::udp(from, SocketAddr::new(to, ECHO_PORT), TICK));
    let flows = flows.collect::<Result<Vec<_>>>()?;
    cluster.lab.make_management(&place)?;
    cluster.is_seen_as("one", Some(V4), Some(V6))?;
    for flow in flows {
        let report = flow.finish()?;
        println!("{} sent, {} came back", report.sent, report.sent - report.lost());
    }
    let seen = capture.finish()?;
    seen.check()?;
    let [nodes, egress] = [AddressKind::Node, AddressKind::Egress].map(|class| seen.to_the_world(class));
    let pods = seen.of_pods_to_the_world();
    println!("outside: {egress} packets with an egress IP, {nodes} with a node's address, with a pod's: {pods:?}");
    let is_right = egress > 0 && nodes == 0 && pods.is_empty();
    ensure!(is_right, "a selected pod's packets left with another address, or none with the egress IP");
    Ok(())
}
