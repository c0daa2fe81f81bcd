//! The egress router: a pod gets an interface on the nodes' network, and the pods of all nodes reach the outside by it, beside an
//! EgressIP that has some of them.

use super::pods::BOUVIER;
use super::steps::{as_node, before, nothing_leaked, only};
use super::walkthrough::Walkthrough;
use super::{egress_ip, pods::SIMPSON};
use crate::prelude::*;
use egress_lab::cni_runtime::attach;

/// Of the router on the nodes' network.
const ROUTER: plan::Dual = plan::Dual::new([172, 18, 0, 170], [0xfd00, 0x172, 0x18, 0, 0, 0, 0, 0x170]);
/// Where clients connect to.
const PORT: u16 = 8080;

pub(super) fn play(walkthrough: &mut Walkthrough) -> Result<()> {
    let lab = &walkthrough.cluster.lab;
    let pod = lab.pods().iter().find(|pod| pod.namespace == BOUVIER).or(lab.pods().first()).context("no pod")?.clone();
    let gateway = lab.nodes().last().context("no node")?.number;
    before(walkthrough)?;
    let added = added(walkthrough, &pod)?;
    by_the_router(walkthrough, &pod)?;
    beside_an_egress_ip(walkthrough, &pod, gateway)?;
    refused(walkthrough, &pod)?;
    removed(walkthrough, &pod, added)?;
    egress_ip::withdraw(walkthrough, gateway)?;
    walkthrough.expect_outside(as_node)?;
    nothing_leaked(walkthrough)
}

fn config() -> Value {
    let redirects = plan::SERVER.both().map(|server| format!("{PORT} tcp {server} {HTTP_PORT}"));
    json!({
        "cniVersion": "1.0.0", "name": "router", "type": "egress-router",
        "clusterNetworks": [plan::CLUSTER_V4, plan::CLUSTER_V6],
        "ip": {"addresses": ROUTER.both(), "redirect": redirects},
    })
}

fn added(walkthrough: &mut Walkthrough, pod: &LabPod) -> Result<Value> {
    walkthrough.report.begin("A pod becomes a router: the plugin is called as Multus would call it");
    println!("   {}", config());
    let result = call(walkthrough, pod, "ADD", &config())?;
    let addresses = result["ips"].as_array().into_iter().flatten().filter_map(|one| one["address"].as_str());
    let addresses: Vec<&str> = addresses.collect();
    println!("   {} has {} on net1", pod.name, addresses.join(" and "));
    let wanted = format!("{}/16, {}/64", ROUTER.v4, ROUTER.v6);
    walkthrough.report.check("addresses", &wanted, &addresses.join(", "));
    Ok(result)
}

/// Every pod reaches the server by the router, and the router itself has its own address.
fn by_the_router(walkthrough: &mut Walkthrough, router: &LabPod) -> Result<()> {
    walkthrough.report.begin("Pods of every node reach the outside by it, and the world sees the router's address");
    for pod in walkthrough.cluster.lab.pods().to_vec().into_iter().filter(|pod| pod.name != router.name) {
        for to in router.addresses.both() {
            let what = format!("{} -> {} -> {}", pod.name, router.name, if to.is_ipv4() { "IPv4" } else { "IPv6" });
            walkthrough.expect_inside(&what, &pod.netns, SocketAddr::new(to, PORT), ROUTER.towards(to))?;
        }
    }
    let name = router.name.clone();
    walkthrough
        .expect_outside(move |pod, to| if pod.name == name { only(ROUTER.towards(to)) } else { as_node(pod, to) })
}

fn beside_an_egress_ip(walkthrough: &mut Walkthrough, router: &LabPod, gateway: NodeNumber) -> Result<()> {
    egress_ip::assign(walkthrough, gateway)?;
    walkthrough
        .report
        .begin("Pods with an egress IP have it when they leave by themselves, and the router's address by it");
    let name = router.name.clone();
    walkthrough.expect_outside(move |pod, to| match pod.name == name {
        true => only(ROUTER.towards(to)),
        false => egress_ip::with_first(pod, to),
    })?;
    let selected =
        walkthrough.cluster.lab.pods().iter().find(|pod| pod.namespace == SIMPSON).context("no pod")?.clone();
    let to = IpAddr::V4(router.addresses.v4);
    let what = format!("{} -> {} -> IPv4", selected.name, router.name);
    walkthrough.expect_inside(&what, &selected.netns, SocketAddr::new(to, PORT), ROUTER.towards(to))
}

fn refused(walkthrough: &mut Walkthrough, router: &LabPod) -> Result<()> {
    walkthrough.report.begin("What is not redirected is refused");
    let pods = walkthrough.cluster.lab.pods();
    let pod = pods.iter().find(|pod| pod.name != router.name).context("no other pod")?.clone();
    let to = SocketAddr::new(router.addresses.v4.into(), PORT + 1);
    let seen = client::get(&pod.netns, to, "/", "refused")?
        .map_or_else(|error| error.kind().to_string(), |_| "an answer".to_owned());
    let expected = std::io::ErrorKind::ConnectionRefused.to_string();
    walkthrough.report.check(&format!("{} -> {}:{}", pod.name, router.name, to.port()), &expected, &seen);
    Ok(())
}

fn removed(walkthrough: &mut Walkthrough, pod: &LabPod, added: Value) -> Result<()> {
    walkthrough.report.begin("The runtime checks the router and removes it");
    let mut with_result = config();
    with_result["prevResult"] = added;
    let checked =
        call(walkthrough, pod, "CHECK", &with_result).err().map_or("as it was".to_owned(), |error| error.to_string());
    walkthrough.report.check("CHECK", &"as it was", &checked);
    call(walkthrough, pod, "DEL", &with_result)?;
    let left = pod.netns.output("ip", &["link", "show", "net1"])?.status.success();
    walkthrough.report.check("net1", &"gone", &if left { "there" } else { "gone" });
    Ok(())
}

/// Calls the plugin on the pod's node.
fn call(walkthrough: &Walkthrough, pod: &LabPod, command: &str, config: &Value) -> Result<Value> {
    println!(
        "   $ CNI_COMMAND={command} CNI_NETNS={} CNI_IFNAME=net1 egress-router < router.json",
        pod.netns.path().display()
    );
    let node = &walkthrough.cluster.lab.node(pod.node).host;
    attach(node, &pod.netns, &walkthrough.router, command, config)
}
