//! What the agents learn of the cluster besides objects and pods, and what they say themselves:
//!
//! 1. A node without a CNI's annotations publishes its networks by its own agent, and can host an egress IP then.
//! 2. An external address of a Service is the service proxy's: a selected pod that calls it reaches the backend.
//! 3. Where no node can host an address the pods leave with their node's address, also where the CNI does not masquerade.

use super::findings::Findings;
use crate::prelude::*;
use egress_lab::LabService;
use egress_lab::test_cluster::placement::{FIRST_V4, FIRST_V6, OBJECT, PATIENCE, seen_as};

pub(super) fn tests() -> Vec<LabTest> {
    let timeout = Duration::from_secs(180);
    vec![
        LabTest::new("paths_follow_what_the_cluster_says_of_itself", timeout, facts)
            .not_on_ovn("OVN itself answers for the addresses of Services that the test adds and removes on hosts"),
    ]
}

/// An external address of a Service, beyond no router of the lab.
const EXTERNAL: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 80));
const NETWORKS: [&str; 3] = ["k8s.ovn.org/node-primary-ifaddr", "k8s.ovn.org/host-cidrs", "k8s.ovn.org/node-subnets"];

fn facts(context: &LabContext) -> Result<()> {
    let cluster = TestCluster::for_placement(context, |_| HostConfig::default())?;
    let mut findings = Findings::default();
    own_networks(&cluster, &mut findings)?;
    cluster.place(&[(FIRST_V4, 2), (FIRST_V6, 3)])?;
    service_address(&cluster, &mut findings)?;
    exception(&cluster, &mut findings)?;
    findings.conclude()
}

/// The annotations of the three nodes go, as on a cluster of another CNI.
fn own_networks(cluster: &TestCluster, findings: &mut Findings) -> Result<()> {
    for number in 1..=3 {
        let path = format!("/api/v1/nodes/node{number}");
        let before = cluster.api.get(&path)?.context("the node is there")?;
        let nothing: serde_json::Map<String, Value> =
            NETWORKS.iter().map(|key| ((*key).to_owned(), Value::Null)).collect();
        cluster.api.merge(&path, &json!({"metadata": {"annotations": nothing}}))?;
        let object = format!("/apis/egress-agent.io/v1alpha1/egressnodes/node{number}");
        let after = cluster.api.wait_for(&object, PATIENCE, |object| !object["status"]["networks"].is_null())?;
        let of = |key: &str| -> Value {
            let text = before["metadata"]["annotations"][key].as_str().unwrap_or_default();
            serde_json::from_str(text).unwrap_or_default()
        };
        let primary = of(NETWORKS[0]);
        let (primary, all) = (json!([primary["ipv4"], primary["ipv6"]]), of(NETWORKS[1]));
        findings.equal(&format!("node{number} says its own"), &primary, &after["status"]["networks"]["primary"]);
        findings.equal(&format!("node{number} says all"), &all, &after["status"]["networks"]["all"]);
    }
    Ok(())
}

fn service_address(cluster: &TestCluster, findings: &mut Findings) -> Result<()> {
    let backend = cluster.plain(1)?;
    let _server = Server::in_pod(&cluster.lab, backend)?;
    let (front, backend) = (SocketAddr::new(EXTERNAL, 80), SocketAddr::new(backend.addresses.v4.into(), HTTP_PORT));
    for node in cluster.lab.nodes() {
        cluster.lab.add_services(node, &[LabService { front, protocol: "tcp", backend }])?;
    }
    let answers = |pod: usize| -> Result<bool> {
        let answer = client::get_within(&cluster.chosen(pod)?.netns, front, "/", "facts", Duration::from_secs(1))?;
        Ok(answer.is_ok())
    };
    findings.equal("a selected pod reaches an address that no Service has", &false, &answers(1)?);
    let service = json!({
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "front", "namespace": "default"},
        "spec": {"clusterIP": "10.96.0.99", "clusterIPs": ["10.96.0.99"], "externalIPs": [EXTERNAL], "ports": [{"port": 80}]},
    });
    cluster.api.create("/api/v1/namespaces/default/services", &service)?;
    for pod in 1..=3 {
        let reached = time_until("the Service's address is left alone", PATIENCE, || answers(pod));
        findings.right(&format!("chosen{pod} reaches the Service's external address"), &reached);
    }
    Ok(())
}

/// No node has the label, and node 2 does not masquerade.
fn exception(cluster: &TestCluster, findings: &mut Findings) -> Result<()> {
    cluster.node(2)?.host.exec("nft", &["delete", "table", "inet", "cni"])?;
    let capture = Capture::start(&cluster.lab)?;
    for number in 1..=3 {
        cluster.assignable(number, false)?;
    }
    let path = format!("/apis/k8s.ovn.org/v1/egressips/{OBJECT}");
    let is_published = |object: &Value| object["status"]["conditions"][0]["reason"] == "NoEligibleNode";
    cluster.api.wait_for(&path, PATIENCE, is_published)?;
    for number in 1..=3 {
        let pod = cluster.chosen(number)?;
        for to in plan::SERVER.both() {
            let node = pod.node.address().towards(to);
            let seen = time_until("it is seen as its node", PATIENCE, || Ok(seen_as(&pod.netns, to)? == Some(node)));
            findings.right(&format!("{} is seen as {node}", pod.name), &seen);
            let flow = TrafficFlow::udp(&pod.netns, SocketAddr::new(to, ECHO_PORT), Duration::from_millis(10))?;
            let pong = client::ping(&pod.netns, to, Ping { count: 3, ..Ping::default() })?;
            findings.equal(&format!("pings of {} to {to} answered", pod.name), &3, &pong.received);
            let report = flow.finish()?;
            let whole = report.lost() == 0 && report.sent > 3;
            findings.note(whole, &format!("{} UDP {to}: {} of {} came back", pod.name, report.echoed, report.sent));
        }
    }
    let seen = capture.finish()?;
    findings.equal("packets outside with a pod's address", &0, &seen.to_the_world(AddressKind::Pod));
    findings.right("checksums", &seen.check());
    Ok(())
}
