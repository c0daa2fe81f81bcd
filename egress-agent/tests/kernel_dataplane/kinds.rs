//! Egress IPs on interfaces of kinds that a kernel may be built without: VLAN devices, bonds, and devices in a VRF. The guests of
//! `cargo xtask test --kernel` have them.

use std::process::Command;

use egress_core::model::interface::InterfaceState;
use egress_core::model::state::{Action, EgressId, OnUnknownPod};
use egress_core::plan::executor::Executor;
use egress_datapath::Dataplane;

use crate::interfaces::{ADDRESSES, address, has_programs, programs_on, routes, state};
use crate::node::{TestNode, device, eventually, ip, mac_text, on_node, output};
use crate::skips::skipped;

/// Makes a device; false where the kernel has none of its kind.
fn made(kind: &str, arguments: &str) -> bool {
    let words = ["link", "add"].into_iter().chain(arguments.split(' '));
    let done = Command::new("ip").args(words).output().expect("run ip");
    if !done.status.success() {
        skipped(&format!("no {kind}: {}", String::from_utf8_lossy(&done.stderr).trim()));
    }
    done.status.success()
}

/// The networks of `eth1`, on another device of the node.
fn address_of(name: &str) -> String {
    format!("addr add 10.10.10.2/24 dev {name}\nlink set {name} up\naddr add fd00:10::2/64 dev {name} nodad\n")
}

async fn serve(node: &TestNode, name: &str) -> Dataplane {
    let mut dataplane = node.start().await;
    eventually("it has programs", || has_programs(name)).await;
    eventually("it can send", || state(&dataplane, name) == Some(InterfaceState::Usable)).await;
    dataplane.apply(&Action::SetUnknownPods(OnUnknownPod::Pass)).await.expect("apply");
    for (id, text) in (1..).zip(ADDRESSES) {
        dataplane.apply(&Action::Own(EgressId(id), address(text))).await.expect("own");
        assert_eq!(node.owned(id).ifindex, device(name).0);
    }
    dataplane
}

/// Neighbours on this device of the outside get the link address of the node's device when they ask.
async fn answers(node: &TestNode, lan: &str, name: &str) {
    let mac = mac_text(device(name).1);
    node.outside(|| ip("neigh flush all\n"));
    for text in ADDRESSES {
        node.ask_for(text);
        let known = || node.outside(|| output(&["ip", "neigh", "show", text, "dev", lan]));
        eventually("it is answered there", || known().contains(&mac)).await;
    }
}

/// Its parent, which has no network, has no programs: tagged frames pass it as they are.
#[test]
fn nic_on_a_vlan() {
    on_node(|node| async move {
        node.make_eth1();
        if !made("VLAN device", "link eth1 name eth1.7 type vlan id 7") {
            return;
        }
        ip(&format!("addr flush dev eth1\n{}", address_of("eth1.7")));
        node.outside(|| {
            ip("addr flush dev lan1\nlink add link lan1 name lan1.7 type vlan id 7\nlink set lan1.7 up\n\
                addr add 10.10.10.1/24 dev lan1.7\naddr add fd00:10::1/64 dev lan1.7 nodad\n");
        });
        let dataplane = serve(&node, "eth1.7").await;
        assert!(programs_on("eth1").is_empty());
        answers(&node, "lan1.7", "eth1.7").await;
        // Without an agent.
        drop(dataplane);
        answers(&node, "lan1.7", "eth1.7").await;
    });
}

/// Its ports have no programs. When another one becomes active, neighbours hear of the addresses again.
#[test]
fn nic_on_a_bond() {
    on_node(|node| async move {
        node.make_eth1();
        if !made("bond", "bond9 type bond mode active-backup miimon 20") {
            return;
        }
        let outside = node.outside_path();
        ip(&format!(
            "link add eth2 type veth peer name lan2 netns {outside}\naddr flush dev eth1\nlink set eth1 down\n\
             link set eth1 master bond9\nlink set eth2 master bond9\n{}",
            address_of("bond9")
        ));
        node.outside(|| {
            ip(
                "addr flush dev lan1\nlink add lans type bridge\nlink set lan1 master lans\nlink set lan2 master lans\n\
                link set lan2 up\nlink set lans up\n\
                addr add 10.10.10.1/24 dev lans\naddr add fd00:10::1/64 dev lans nodad\n",
            );
        });
        let dataplane = serve(&node, "bond9").await;
        assert!(programs_on("eth1").is_empty() && programs_on("eth2").is_empty());
        answers(&node, "lans", "bond9").await;
        // A claim is announced for some seconds; a restart announces nothing.
        drop(dataplane);
        let dataplane = node.start().await;
        let stale = |text: &str| format!("neigh replace {text} lladdr 02:00:00:00:00:99 dev lans nud stale\n");
        node.outside(|| ip(&ADDRESSES.map(stale).concat()));
        let active = || std::fs::read_to_string("/sys/class/net/bond9/bonding/active_slave").ok();
        let before = output(&["ip", "-d", "link", "show", "bond9"]);
        let word = |text: &str| {
            text.split_once("active_slave ").map(|(_, rest)| rest.split(' ').next().unwrap_or("").to_owned())
        };
        let first = word(&before).or_else(active).expect("an active port");
        ip(&format!("link set {} down\n", first.trim()));
        for text in ADDRESSES {
            let known = || node.outside(|| output(&["ip", "neigh", "show", text, "dev", "lans"]));
            let mac = mac_text(device("bond9").1);
            eventually("it is announced again", || known().contains(&mac)).await;
        }
        answers(&node, "lans", "bond9").await;
        drop(dataplane);
    });
}

/// The routes are those of the VRF's table, and the VRF's device has no programs.
#[test]
fn nic_in_a_vrf() {
    on_node(|node| async move {
        node.make_eth1();
        if !made("VRF", "vrf7 type vrf table 7") {
            return;
        }
        // The kernel removes the IPv6 addresses of a device that moves into a VRF.
        ip("link set vrf7 up\nlink set eth1 master vrf7\naddr add fd00:10::2/64 dev eth1 nodad\n\
            route add default via 10.10.10.1 table 7\nroute add 198.51.100.0/24 via 172.18.0.1\n");
        let dataplane = serve(&node, "eth1").await;
        assert!(programs_on("vrf7").is_empty());
        let of_eth1 = || routes(&node, device("eth1").0);
        eventually("its routes are those of the VRF", || of_eth1().contains(&"0.0.0.0/0 Via 10.10.10.1".to_owned()))
            .await;
        assert!(!of_eth1().iter().any(|route| route.contains("198.51.100.0")), "{:?}", of_eth1());
        answers(&node, "lan1", "eth1").await;

        ip("link set eth1 nomaster\naddr add fd00:10::2/64 dev eth1 nodad\n");
        let own = ["10.10.10.0/24 OnLink", "fd00:10::/64 OnLink"];
        eventually("and the main ones again", || of_eth1() == own).await;
        answers(&node, "lan1", "eth1").await;
        drop(dataplane);
    });
}
