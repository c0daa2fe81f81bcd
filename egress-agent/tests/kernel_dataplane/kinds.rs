//! Egress IPs on interfaces of kinds that a kernel may be built without: VLAN devices, bonds, and devices in a VRF. The guests of
//! `cargo xtask test --kernel` have them.

use std::process::Command;
use std::time::Duration;

use egress_core::model::interface::{InterfaceReason, InterfaceState};
use egress_core::model::state::{Action, EgressId, OnUnknownPod};
use egress_core::plan::executor::Executor;
use egress_core::vlans::Vlans;
use egress_datapath::Dataplane;
use egress_datapath::announce::next_hop::watch_further;
use nix::net::if_::if_nametoindex;
use tokio::sync::watch::channel;
use tokio_util::sync::CancellationToken;

use crate::interfaces::{ADDRESSES, address, has_programs, programs_on, routes, state};
use crate::node::{TestNode, UPLINK, clean, device, eventually, ip, mac_text, on_node, output, within};
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

/// A device without an address of the node, for the addresses of pools: it is made, hosts them, survives a restart, follows its
/// gateways, and goes when it is no longer needed. A device of the administrator's stays.
#[test]
fn vlan_of_a_pool() {
    on_node(|node| async move {
        if !made("VLAN device", &format!("link {UPLINK} name trial type vlan id 7")) {
            return;
        }
        ip("link del trial\n");
        node.outside(|| {
            ip("link add link out0 name out0.7 type vlan id 7\nlink set out0.7 up\n\
                addr add 10.20.0.1/24 dev out0.7\naddr add fd00:20::1/64 dev out0.7 nodad\n");
        });
        let gateways = ["10.20.0.1/24", "fd00:20::1/64"].map(|text| text.parse().expect("a literal"));
        let wanted = Vlans::from([(7, gateways.into())]);
        let (pooled, none) = (["10.20.0.100", "fd00:20::100"], Vlans::new());
        let usable = Some(InterfaceState::Usable);

        let mut dataplane = node.start().await;
        dataplane.follow_vlans(&wanted);
        eventually("it has programs", || has_programs("egress.7")).await;
        eventually("it can send", || state(&dataplane, "egress.7") == usable).await;
        let index = device("egress.7").0;
        let expected = ["0.0.0.0/0 Via 10.20.0.1", "10.20.0.0/24 OnLink", "::/0 Via fd00:20::1", "fd00:20::/64 OnLink"];
        eventually("its routes", || routes(&node, index) == expected).await;
        let addresses = output(&["ip", "-o", "addr", "show", "dev", "egress.7", "scope", "global"]);
        assert_eq!(addresses, "");
        // Of IPv6 the kernel has routes to link-local and multicast addresses for each device.
        let by_it = |family| output(&["ip", family, "route", "show", "table", "all", "dev", "egress.7"]);
        let used: Vec<_> = by_it("-6")
            .lines()
            .filter(|line| !line.contains("fe80:") && !line.contains("ff00::/8"))
            .map(str::to_owned)
            .collect();
        assert_eq!((by_it("-4").as_str(), used.as_slice()), ("", [].as_slice()), "the host does not use it");

        // The gateways are asked without an address of the node.
        let (_is_egress_node, may_host) = channel(true);
        let (further, stop) = (dataplane.next_hops(), CancellationToken::new());
        let until = stop.clone();
        let watch = tokio::spawn(async move { watch_further(&further, may_host, until).await });
        let is_lost = || state(&dataplane, "egress.7") == Some(InterfaceState::Attached(InterfaceReason::NextHopLost));
        for gateway in ["10.20.0.1/24", "fd00:20::1/64"] {
            node.outside(|| ip(&format!("addr del {gateway} dev out0.7\n")));
            within(Duration::from_secs(20), "the gateway does not answer", is_lost).await;
            node.outside(|| ip(&format!("addr add {gateway} dev out0.7\n")));
            within(Duration::from_secs(20), "it answers", || state(&dataplane, "egress.7") == usable).await;
        }
        stop.cancel();
        watch.await.expect("the watch ends");

        dataplane.apply(&Action::SetUnknownPods(OnUnknownPod::Pass)).await.expect("apply");
        for (id, text) in (1..).zip(pooled) {
            dataplane.apply(&Action::Own(EgressId(id), address(text))).await.expect("own");
            assert_eq!(node.owned(id).ifindex, index);
        }
        let mac = mac_text(device("egress.7").1);
        let are_answered = || async {
            node.outside(|| ip("neigh flush all\n"));
            for text in pooled {
                node.ask_for(text);
                let known = || node.outside(|| output(&["ip", "neigh", "show", text, "dev", "out0.7"]));
                eventually("it is answered there", || known().contains(&mac)).await;
            }
        };
        are_answered().await;

        // A start knows what the device is for without any plan.
        drop(dataplane);
        are_answered().await;
        let mut dataplane = node.start().await;
        assert!(has_programs("egress.7") && routes(&node, index) == expected);
        assert_eq!(state(&dataplane, "egress.7"), usable);

        dataplane.follow_vlans(&none);
        ip("addr add 10.99.0.1/24 dev breth0\n");
        let of_uplink =
            || dataplane.interfaces().borrow()[0].networks.contains_key(&"10.99.0.0/24".parse().expect("one"));
        eventually("the devices are looked after", of_uplink).await;
        assert_eq!(device("egress.7").0, index, "it has addresses");
        are_answered().await;
        for (id, text) in (1..).zip(pooled) {
            dataplane.apply(&Action::Disown(EgressId(id), address(text))).await.expect("disown");
        }
        let is_there = |name: &str| if_nametoindex(name).is_ok();
        within(Duration::from_secs(15), "it goes", || !is_there("egress.7")).await;
        eventually("so does its record", || state(&dataplane, "egress.7").is_none()).await;

        // The VLAN of an interface `egress` has such a name; what a run that was killed has left is not up.
        ip(&format!(
            "link add link {UPLINK} name mine type vlan id 7\nlink set mine up\n\
             link add link {UPLINK} name egress.9 type vlan id 9\nlink set egress.9 up\n\
             link add link {UPLINK} name egress.8 type vlan id 8\n"
        ));
        dataplane.follow_vlans(&wanted);
        ip("addr add 10.20.0.2/24 dev mine\n");
        eventually("the administrator's device hosts them", || state(&dataplane, "mine") == usable).await;
        assert!(!is_there("egress.7"));
        dataplane.follow_vlans(&Vlans::from([(8, wanted[&7].clone())]));
        eventually("another VLAN has its device", || has_programs("egress.8")).await;
        drop(dataplane);
        assert_eq!(clean(&node.settings()).await, [] as [&str; 0]);
        assert!(is_there("mine") && is_there("egress.9") && !is_there("egress.8"));
    });
}
