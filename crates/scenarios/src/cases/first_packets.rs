//! The first packets of pods on a CNI that announces no addresses: packets from an unknown address pass, but
//! for the time in which a selected pod may be among it.

use crate::prelude::*;
use egress_lab::kube_api::objects;
use egress_lab::topology::addresses::SERVER;

const V4: &str = "172.18.0.110";
const TICK: Duration = Duration::from_millis(10);

/// The pod's object as it is before the kubelet has reported anything.
fn is_scheduled(cluster: &TestCluster, pod: &LabPod) -> Result<()> {
    let collection = format!("/api/v1/namespaces/{}/pods", pod.namespace);
    cluster.api.create(&collection, &objects::pod(pod)).map(drop)
}

pub(super) fn of_pods_with_unknown_addresses(context: &LabContext) -> Result<()> {
    let names = [("steady", "red"), ("chosen", "red"), ("plain", "blue"), ("unknown", "blue")];
    let mut cluster = TestCluster::start(context, names.map(|(name, house)| pod(name, house, 1, &[])).to_vec())?;
    cluster.assignable(1, true)?;
    cluster.assign(&egress_ip("eip", &[V4], &labels("house", "red"), &all()))?;
    cluster.is_seen_as("chosen", Some(V4), None)?;
    let [chosen, plain, unknown] = ["chosen", "plain", "unknown"].map(|name| cluster.pod(name).cloned());
    let (chosen, plain, unknown) = (chosen?, plain?, unknown?);
    let to = SERVER.v4.into();
    let node = Observed::Source(plain.node.address().v4.into());
    let drops = |pod: &LabPod| cluster.api.delete(&cluster.pod_path(&pod.name)?);

    println!("a pod that nothing selects, before anybody knows its address");
    drops(&plain)?;
    drops(&unknown)?;
    cluster.becomes(&plain.netns, to, node)?;
    is_scheduled(&cluster, &plain)?;
    let flows = [
        TrafficFlow::udp(&plain.netns, SocketAddr::new(to, ECHO_PORT), TICK)?,
        TrafficFlow::tcp(&plain.netns, SocketAddr::new(to, ECHO_PORT), TICK, client::PATIENCE)?,
    ];
    std::thread::sleep(Duration::from_secs(1));
    cluster.api.publish_pod(&plain)?;
    std::thread::sleep(Duration::from_secs(1));
    for flow in flows {
        let report = flow.finish()?;
        ensure!(report.sent > 100 && report.lost() == 0 && report.broken.is_none(), "{report:?}");
    }

    println!("a pod that is deleted, and has not ended yet, and comes again");
    let capture = Capture::start(&cluster.lab)?;
    // The selected pod alone asks this port by IPv4; the last packets of the closed flows go to another.
    let wrong = |capture: &Capture| -> Result<u64> {
        let seen = capture.seen()?;
        let node = chosen.node.address();
        Ok(seen.packets(|key| node.is(key.source) && key.destination == to && key.to_port == HTTP_PORT))
    };
    let before = wrong(&capture)?;
    drops(&chosen)?;
    cluster.becomes(&chosen.netns, to, Observed::Nothing)?;
    is_scheduled(&cluster, &chosen)?;
    // While a selected pod is starting, the sender of these packets is unknown. Over IPv6, so that they are not counted.
    cluster.becomes(&unknown.netns, SERVER.v6.into(), Observed::Nothing)?;
    cluster.becomes(&chosen.netns, to, Observed::Nothing)?;
    cluster.api.publish_pod(&chosen)?;
    cluster.is_seen_as("chosen", Some(V4), None)?;
    let after = wrong(&capture)?;
    ensure!(after == before, "{} packets left with the node's address", after - before);
    cluster.becomes(&unknown.netns, to, node)?;

    println!("an agent that is gone follows no pods");
    cluster.agent(1)?.kill()?;
    until_true("the programs let no unknown pod pass", EFFECT, || {
        Ok(egress_lab::test_cluster::observe(&unknown.netns, to)? == Observed::Nothing)
    })?;
    cluster.becomes(&plain.netns, to, node)?;
    cluster.agent(1)?.restart()?;
    cluster.becomes(&unknown.netns, to, node)
}
