//! The logical network as ovnkube-controller writes it: one router of the cluster, a switch for each node, and for each node a
//! gateway router on the way to `breth0`. In local gateway mode a route by source sends what pods send out of the cluster to
//! their node's management port. Pure: commands of `ovn-nbctl`.

use std::net::{IpAddr, Ipv4Addr};

use super::super::addresses::{self as plan, Dual, EXT, NodeNumber};
use super::super::host_config::Cni;
use super::super::lab::LabPod;

const CLUSTER_ROUTER: &str = "ovn_cluster_router";
const JOIN_V4: &str = "100.64.0.0/16";
const JOIN_V6: &str = "fd98::/64";

/// OVN-Kubernetes makes link addresses of IPv4 addresses.
pub(in super::super) fn link_address(v4: Ipv4Addr) -> String {
    let [a, b, c, d] = v4.octets();
    format!("0a:58:{a:02x}:{b:02x}:{c:02x}:{d:02x}")
}

/// The NIC's, `breth0`'s and the gateway router's.
pub(in super::super) fn nic_address(number: NodeNumber) -> String {
    let [a, b, c, d] = number.address().v4.octets();
    format!("02:00:{a:02x}:{b:02x}:{c:02x}:{d:02x}")
}

/// Of the cluster's router (0) and of each gateway router on the switch between them.
fn join(number: u8) -> Dual {
    let end = number + 1;
    Dual::new([100, 64, 0, end], [0xfd98, 0, 0, 0, 0, 0, 0, u16::from(end)])
}

fn join_of(number: NodeNumber) -> Dual {
    join(u8::try_from(number.index() + 1).unwrap_or(u8::MAX))
}

fn words(line: &str) -> Vec<String> {
    line.split_whitespace().map(str::to_owned).collect()
}

/// A command whose words may have spaces.
fn command(words: &[&str]) -> Vec<String> {
    words.iter().map(ToString::to_string).collect()
}

/// A router's port and the switch's port that is its peer.
fn plug(router: &str, port: &str, mac: &str, networks: &str, switch: &str, peer: &str) -> Vec<Vec<String>> {
    vec![
        words(&format!("lrp-add {router} {port} {mac} {networks}")),
        words(&format!("lsp-add {switch} {peer}")),
        words(&format!("lsp-set-type {peer} router")),
        words(&format!("lsp-set-addresses {peer} router")),
        words(&format!("lsp-set-options {peer} router-port={port}")),
    ]
}

pub(super) fn cluster() -> Vec<Vec<String>> {
    let own = join(0);
    let mut all = vec![words(&format!("lr-add {CLUSTER_ROUTER}")), words("ls-add join")];
    let networks = format!("{}/16 {}/64", own.v4, own.v6);
    all.extend(plug(
        CLUSTER_ROUTER,
        "rtoj-ovn_cluster_router",
        &link_address(own.v4),
        &networks,
        "join",
        "jtor-ovn_cluster_router",
    ));
    let inside = [
        ("ip4", plan::CLUSTER_V4, [plan::CLUSTER_V4, JOIN_V4]),
        ("ip6", plan::CLUSTER_V6, [plan::CLUSTER_V6, JOIN_V6]),
    ];
    for (family, pods, destinations) in inside {
        for destination in destinations {
            let matched = format!("{family}.src == {pods} && {family}.dst == {destination}");
            all.push(command(&["lr-policy-add", CLUSTER_ROUTER, "102", &matched, "allow"]));
        }
    }
    all
}

pub(super) fn node(number: NodeNumber) -> Vec<Vec<String>> {
    let (name, gateway) = (number.name(), gateway_of(number));
    let (router, management, own, on_join) =
        (number.router(), number.management(Cni::Ovn), number.address(), join_of(number));
    let (subnet_v4, subnet_v6) = (number.pod_subnet_v4(), number.pod_subnet_v6());
    let (stor, rtos) = (format!("stor-{name}"), format!("rtos-{name}"));
    let mut all = vec![
        words(&format!("ls-add {name}")),
        words(&format!(
            "set logical_switch {name} other-config:subnet={subnet_v4} other-config:exclude_ips={}",
            management.v4
        )),
    ];
    all.extend(plug(
        CLUSTER_ROUTER,
        &rtos,
        &link_address(router.v4),
        &format!("{}/24 {}/64", router.v4, router.v6),
        &name,
        &stor,
    ));
    all.push(words(&format!("lsp-add {name} k8s-{name}")));
    all.push(lsp_addresses(&format!("k8s-{name}"), management));
    // The node may reach its pods whatever a network policy says.
    for matched in [format!("ip4.src == {}", management.v4), format!("ip6.src == {}", management.v6)] {
        all.push(command(&["acl-add", &name, "to-lport", "1001", &matched, "allow-related"]));
    }
    all.extend(gateway_router(number, &gateway, own, on_join));
    all.extend([
        words(&format!("lrp-set-gateway-chassis {rtos} {} 1", chassis(number))),
        words(&format!("lr-route-add {CLUSTER_ROUTER} {} {}", on_join.v4, on_join.v4)),
        words(&format!("lr-route-add {CLUSTER_ROUTER} {} {}", on_join.v6, on_join.v6)),
        words(&format!("--policy=src-ip lr-route-add {CLUSTER_ROUTER} {subnet_v4} {}", management.v4)),
        words(&format!("--policy=src-ip lr-route-add {CLUSTER_ROUTER} {subnet_v6} {}", management.v6)),
    ]);
    // What pods send to their own node is taken to its management port.
    for (family, own, via) in
        [("ip4", own.v4.to_string(), management.v4.to_string()), ("ip6", own.v6.to_string(), management.v6.to_string())]
    {
        let matched = format!("inport == \"{rtos}\" && {family}.dst == {own}");
        all.push(command(&["lr-policy-add", CLUSTER_ROUTER, "1004", &matched, "reroute", &via]));
    }
    all
}

pub(super) fn gateway_of(number: NodeNumber) -> String {
    format!("GR_{}", number.name())
}

/// Between a gateway router and its host: the host's next hop for services, with a link address that nothing answers for.
pub(super) const SERVICE_HOP: Dual = Dual::new([169, 254, 0, 4], [0xfd69, 0, 0, 0, 0, 0, 0, 4]);

fn gateway_router(number: NodeNumber, gateway: &str, own: Dual, on_join: Dual) -> Vec<Vec<String>> {
    let (name, hw) = (number.name(), nic_address(number));
    let cluster = join(0);
    let mut all = vec![
        words(&format!("lr-add {gateway}")),
        words(&format!(
            "set logical_router {gateway} options:chassis={} options:always_learn_from_arp_request=false \
             options:dynamic_neigh_routers=true options:snat-ct-zone=0 options:lb_force_snat_ip=router_ip",
            chassis(number),
        )),
    ];
    let networks = |own: Dual| format!("{}/16 {}/64", own.v4, own.v6);
    all.extend(plug(
        gateway,
        &format!("rtoj-{gateway}"),
        &link_address(on_join.v4),
        &networks(on_join),
        "join",
        &format!("jtor-{gateway}"),
    ));
    let (outside, outer) = (format!("ext_{name}"), format!("etor-{gateway}"));
    all.push(words(&format!("ls-add {outside}")));
    all.extend(plug(gateway, &format!("rtoe-{gateway}"), &hw, &networks(own), &outside, &outer));
    all.extend([
        words(&format!("lsp-set-addresses {outer} {hw}")),
        words(&format!(
            "lsp-set-options {outer} router-port=rtoe-{gateway} nat-addresses=router exclude-lb-vips-from-garp=true"
        )),
        words(&format!("lsp-add {outside} breth0_{name}")),
        words(&format!("lsp-set-type breth0_{name} localnet")),
        words(&format!("lsp-set-addresses breth0_{name} unknown")),
        words(&format!("lsp-set-options breth0_{name} network_name=physnet")),
        words(&format!("lr-route-add {gateway} {} {}", plan::CLUSTER_V4, cluster.v4)),
        words(&format!("lr-route-add {gateway} {} {}", plan::CLUSTER_V6, cluster.v6)),
        words(&format!("lr-route-add {gateway} 0.0.0.0/0 {} rtoe-{gateway}", EXT.v4)),
        words(&format!("lr-route-add {gateway} ::/0 {} rtoe-{gateway}", EXT.v6)),
        words(&format!("lr-route-add {gateway} 169.254.0.0/29 {} rtoe-{gateway}", SERVICE_HOP.v4)),
        words(&format!("lr-route-add {gateway} fd69::/125 {} rtoe-{gateway}", SERVICE_HOP.v6)),
        words(&format!("static-mac-binding-add rtoe-{gateway} {} {}", SERVICE_HOP.v4, link_address(SERVICE_HOP.v4))),
        words(&format!("static-mac-binding-add rtoe-{gateway} {} {}", SERVICE_HOP.v6, link_address(SERVICE_HOP.v4))),
        words(&format!("lr-nat-add {gateway} snat {} {}", own.v4, plan::CLUSTER_V4)),
        words(&format!("lr-nat-add {gateway} snat {} {}", own.v6, plan::CLUSTER_V6)),
    ]);
    all
}

/// As Open vSwitch's database names the node.
pub(super) fn chassis(number: NodeNumber) -> String {
    format!("chassis-{}", number.name())
}

fn lsp_addresses(port: &str, own: Dual) -> Vec<String> {
    command(&["lsp-set-addresses", port, &addresses(own)])
}

fn addresses(own: Dual) -> String {
    format!("{} {} {}", link_address(own.v4), own.v4, own.v6)
}

/// A pod's port, which may send with no other addresses than the pod's.
pub(super) fn pod(pod: &LabPod) -> Vec<Vec<String>> {
    let port = port_of(pod);
    vec![
        words(&format!("lsp-add {} {port}", pod.node.name())),
        lsp_addresses(&port, pod.addresses),
        command(&["lsp-set-port-security", &port, &addresses(pod.addresses)]),
    ]
}

/// As OVN-Kubernetes names it.
pub(super) fn port_of(pod: &LabPod) -> String {
    format!("{}_{}", pod.namespace, pod.name)
}

/// The priority of OVN-Kubernetes' EgressIP: below that of traffic inside the cluster.
const REROUTE: &str = "100";

/// Takes the routes of local gateway mode away and adds those of shared gateway mode.
pub(super) fn shared_gateway(number: NodeNumber) -> Vec<Vec<String>> {
    let on_join = join_of(number);
    let pairs = [(number.pod_subnet_v4(), IpAddr::V4(on_join.v4)), (number.pod_subnet_v6(), IpAddr::V6(on_join.v6))];
    let lines = pairs.into_iter().flat_map(|(subnet, via)| {
        [
            words(&format!("--policy=src-ip lr-route-del {CLUSTER_ROUTER} {subnet}")),
            words(&format!("--policy=src-ip lr-route-add {CLUSTER_ROUTER} {subnet} {via}")),
        ]
    });
    lines.collect()
}

/// Policies that send a pod's packets out of the cluster to this next hop.
pub(super) fn reroute(pod: &LabPod, via: Dual) -> Vec<Vec<String>> {
    let policy = |(address, via): (IpAddr, IpAddr)| {
        command(&["lr-policy-add", CLUSTER_ROUTER, REROUTE, &sent_by(address), "reroute", &via.to_string()])
    };
    pod.addresses.both().into_iter().zip(via.both()).map(policy).collect()
}

/// Removes them.
pub(super) fn remove_reroute(pod: &LabPod) -> Vec<Vec<String>> {
    let policy = |address| command(&["lr-policy-del", CLUSTER_ROUTER, REROUTE, &sent_by(address)]);
    pod.addresses.both().map(policy).to_vec()
}

fn sent_by(address: IpAddr) -> String {
    let family = if address.is_ipv4() { "ip4" } else { "ip6" };
    format!("{family}.src == {address}")
}

pub(super) fn own_egress_ip(pod: &LabPod, address: Dual) -> Vec<Vec<String>> {
    let mut all = reroute(pod, join_of(pod.node));
    let gateway = gateway_of(pod.node);
    let translations = address.both().into_iter().zip(pod.addresses.both());
    all.extend(translations.map(|(address, pod)| words(&format!("lr-nat-add {gateway} snat {address} {pod}"))));
    all
}

pub(super) fn remove_own_egress_ip(pod: &LabPod) -> Vec<Vec<String>> {
    let mut all = remove_reroute(pod);
    let gateway = gateway_of(pod.node);
    all.extend(pod.addresses.both().map(|pod| words(&format!("lr-nat-del {gateway} snat {pod}"))));
    all
}
