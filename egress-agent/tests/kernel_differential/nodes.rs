//! Two nodes that differ only in the translator: our programs or nftables. Devices, addresses, routes, neighbours and
//! MTUs are equal.
//!
//! ```text
//!   far end              the node                                      far end
//!   pods0 -------------- ovn-k8s-mp0 10.244.1.2 (1400 bytes)
//!                        breth0      172.18.0.2, .100 is the egress IP -------------- out0
//! ```
//!
//! The node's neighbours are permanent, with unused link addresses, so that the far ends' stacks ignore the packets.

use std::net::IpAddr;

use egress_core::model::reserved::{LINK_LOCAL, MULTICAST};
use egress_core::model::state::{
    Action, EgressId, Family, NodeAddress, OnUnknownPod, Place, PodState, Policy, Prefix, PrefixKind, Slot,
    TunnelEndpoint, WhenEmpty,
};
use egress_core::plan::executor::Executor;
use egress_datapath::Dataplane;
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;

use crate::endpoints::{CaseAddresses, ROUTES};
use crate::node::{MGMT, TestNode, UPLINK, device, eventually, ip, mac_text, on_node, output};
use crate::sockets::Plug;

pub(crate) const ROUTER_MAC: [u8; 6] = [2, 0, 0, 0, 1, 1];
pub(crate) const POD_MAC: [u8; 6] = [2, 0, 0, 0, 2, 0x10];

/// The translator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Translator {
    Ours,
    Netfilter,
}

/// Both far ends of a node, and the link addresses of the node's devices.
pub(crate) struct FarEnds {
    pub(crate) pods: Plug,
    pub(crate) world: Plug,
    pub(crate) mgmt_mac: [u8; 6],
    pub(crate) uplink_mac: [u8; 6],
}

/// Runs `work` on a node with this translator; skipped without root.
pub(crate) fn on_translator<T: Send + 'static>(
    by: Translator,
    work: impl FnOnce(&FarEnds) -> T + Send + 'static,
) -> Option<T> {
    let (to, from) = std::sync::mpsc::channel();
    on_node(move |node| async move {
        stay_on_one_cpu(by);
        prepare();
        let cast = CaseAddresses { v6: true, index: 0, narrow: false };
        for address in [cast.node(), cast.mgmt()] {
            know(address).await;
        }
        let _dataplane = match by {
            Translator::Ours => Some(start_ours(&node).await),
            Translator::Netfilter => {
                start_netfilter();
                know(cast.egress()).await;
                None
            }
        };
        let far = |name: &'static str| node.outside(|| Plug::into(device(name).0));
        let ends =
            FarEnds { pods: far("pods0"), world: far("out0"), mgmt_mac: device(MGMT).1, uplink_mac: device(UPLINK).1 };
        to.send(work(&ends)).expect("the caller waits for it");
    });
    from.recv().ok()
}

/// An IPv6 address becomes usable with a delay.
async fn know(address: IpAddr) {
    let local = format!("local {address} ");
    eventually(&local, || output(&["ip", "-6", "route", "show", "table", "local"]).contains(&local)).await;
}

/// On one CPU, so that the order is preserved: both ends of a veth pair share a queue per CPU.
fn stay_on_one_cpu(by: Translator) {
    let allowed = sched_getaffinity(Pid::from_raw(0)).expect("the allowed CPUs");
    let cpus: Vec<usize> = (0..CpuSet::count()).filter(|cpu| allowed.is_set(*cpu).unwrap_or(false)).collect();
    let chosen = if by == Translator::Ours { cpus.first() } else { cpus.last() };
    let mut one = CpuSet::new();
    one.set(*chosen.expect("a CPU")).expect("a CPU");
    sched_setaffinity(Pid::from_raw(0), &one).expect("stay on one CPU");
}

fn prepare() {
    let settings = [
        ("ipv4/ip_forward", "1"),
        ("ipv6/conf/all/forwarding", "1"),
        ("ipv4/conf/all/rp_filter", "0"),
        // No rate limits of ICMP errors, so that cases do not affect one another.
        ("ipv4/icmp_ratelimit", "0"),
        ("ipv6/icmp/ratelimit", "0"),
        // The global limit, which a rate of zero does not turn off; per network namespace since Linux 6.13.
        ("ipv4/icmp_msgs_per_sec", "1000000"),
        ("ipv4/icmp_msgs_burst", "1000000"),
    ];
    for (name, value) in settings {
        std::fs::write(format!("/proc/sys/net/{name}"), value).unwrap_or_else(|error| panic!("{name}: {error}"));
    }
    let (router, pod) = (mac_text(ROUTER_MAC), mac_text(POD_MAC));
    let mut script = format!("addr add fd00:10:244:1::2/64 dev {MGMT} nodad\nroute add default via fd00:172:18::1\n");
    for neighbour in ["172.18.0.1", "fd00:172:18::1"] {
        script += &format!("neigh replace {neighbour} lladdr {router} dev {UPLINK} nud permanent\n");
    }
    for v6 in [false, true] {
        let cast = CaseAddresses { v6, index: 0, narrow: false };
        for address in [cast.pod(), cast.other_pod()] {
            script += &format!("neigh replace {address} lladdr {pod} dev {MGMT} nud permanent\n");
        }
    }
    for route in ROUTES {
        script += &format!("route add {route}\n");
    }
    ip(&script);
}

/// SNAT by nftables, with kube-proxy's rule: the node has the address, and packets that connection tracking calls
/// invalid are dropped.
fn start_netfilter() {
    let with_ports = "meta l4proto { tcp, udp, sctp }";
    let rules = format!(
        "table inet nat {{
            chain forward {{ type filter hook forward priority 0; ct state invalid drop; }}
            chain postrouting {{
                type nat hook postrouting priority 100;
                oifname {UPLINK} ip saddr 10.244.1.0/24 {with_ports} snat ip to 172.18.0.100:1024-65535
                oifname {UPLINK} ip saddr 10.244.1.0/24 snat ip to 172.18.0.100
                oifname {UPLINK} ip6 saddr fd00:10:244:1::/64 {with_ports} snat ip6 to [fd00:172:18::100]:1024-65535
                oifname {UPLINK} ip6 saddr fd00:10:244:1::/64 snat ip6 to fd00:172:18::100
            }}
        }}"
    );
    output(&["nft", &rules]);
    ip(&format!("addr add 172.18.0.100/32 dev {UPLINK}\naddr add fd00:172:18::100/128 dev {UPLINK} nodad\n"));
}

async fn start_ours(node: &TestNode) -> Dataplane {
    let mut dataplane = node.start().await;
    let cast = |v6| CaseAddresses { v6, index: 0, narrow: false };
    let own = TunnelEndpoint(cast(false).node());
    let mut actions = vec![Action::SetUnknownPods(OnUnknownPod::Drop)];
    for (nets, kind) in [(LINK_LOCAL.as_slice(), PrefixKind::LinkLocal), (&MULTICAST, PrefixKind::Multicast)] {
        actions.extend(nets.iter().map(|net| Action::PutPrefix(*net, Prefix { kind, node: None })));
    }
    for (v6, family, subnet, bits) in
        [(false, Family::V4, "10.244.1.0/24", "32"), (true, Family::V6, "fd00:10:244:1::/64", "128")]
    {
        let (cast, id) = (cast(v6), EgressId(if v6 { 17 } else { 7 }));
        let net = |text: &str| text.parse().expect("a prefix");
        let slots = vec![Slot { address: cast.egress(), place: Place::Here }];
        actions.extend([cast.node(), cast.mgmt()].map(|at| Action::PutNode(at, NodeAddress { own: true, node: own })));
        actions.push(Action::PutPrefix(net(subnet), Prefix { kind: PrefixKind::PodSubnet, node: Some(own) }));
        let egress = net(&format!("{}/{bits}", cast.egress()));
        actions.push(Action::PutPrefix(egress, Prefix { kind: PrefixKind::EgressIp, node: None }));
        actions.push(Action::Own(id, cast.egress()));
        actions.push(Action::PutPolicy(id, family, Policy::new(slots, Vec::new(), WhenEmpty::Drop)));
        let pods: [IpAddr; 2] = [cast.pod(), cast.other_pod()];
        actions.extend(pods.map(|pod| Action::PutPod(pod, PodState::Selected(id))));
    }
    for action in actions {
        dataplane.apply(&action).await.unwrap_or_else(|error| panic!("{action:?}: {error}"));
    }
    dataplane
}
