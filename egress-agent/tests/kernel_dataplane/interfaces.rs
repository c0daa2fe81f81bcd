//! Programs, claims and announcements on further egress interfaces.

use std::net::{IpAddr, UdpSocket};
use std::time::Duration;

use aya::maps::lpm_trie::Key;
use aya::maps::{LpmTrie, Map, MapData};
use egress_common::abi::{InterfaceAddresses, NeighbourEntry, NeighbourKey, Owned, RouteDestination, RouteEntry};
use egress_core::model::interface::{InterfaceReason, InterfaceState};
use egress_core::model::state::{Action, EgressId, OnUnknownPod};
use egress_core::plan::executor::{Executor, Expected};
use egress_datapath::announce::next_hop::watch_further;
use egress_datapath::devices::routes::MOST_ROUTES;
use egress_datapath::names::Hook;
use egress_datapath::{Dataplane, Settings, survey};
use tokio::sync::watch::channel;
use tokio_util::sync::CancellationToken;

use crate::node::{self, TestNode, UPLINK, clean, device, eventually, ip, mac_text, on_node, output, start, within};

/// In the network of `eth1`.
pub(crate) const ADDRESSES: [&str; 2] = ["10.10.10.100", "fd00:10::1:100"];

pub(crate) fn address(text: &str) -> IpAddr {
    text.parse().expect("a literal")
}

/// The programs of egress interfaces on this device.
pub(crate) fn programs_on(name: &str) -> Vec<String> {
    let on = |hook: Hook| node::programs_on(name, hook.direction()).into_iter().map(|(program, _)| program);
    Hook::NETDEV.into_iter().flat_map(on).collect()
}

/// Each of them once.
pub(crate) fn has_programs(name: &str) -> bool {
    programs_on(name) == Hook::NETDEV.map(Hook::name)
}

/// The state of `eth1` as the agent publishes it.
pub(crate) fn state(dataplane: &Dataplane, name: &str) -> Option<InterfaceState> {
    dataplane.interfaces().borrow().iter().find(|one| one.name == name).map(|one| one.state.clone())
}

impl TestNode {
    pub(crate) fn owned(&self, id: u32) -> Owned {
        self.map::<u32, Owned>("owned").get(&id, 0).expect("its entry")
    }

    /// Something outside sends to the address, so that its link address is asked for.
    pub(crate) fn ask_for(&self, text: &str) {
        self.outside(|| {
            let any = if address(text).is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
            let socket = UdpSocket::bind(any).expect("a socket");
            socket.send_to(b"?", (address(text), 9)).expect("ask for the address");
        });
    }

    /// What the network of `eth1` knows of the address.
    fn neighbour(&self, text: &str) -> String {
        self.outside(|| output(&["ip", "neigh", "show", text]))
    }
}

#[test]
fn nic_programs_follow_the_interfaces() {
    on_node(|node| async move {
        let dataplane = node.start().await;
        node.make_eth1();
        eventually("a late interface has programs", || has_programs("eth1")).await;
        eventually("and its record", || state(&dataplane, "eth1") == Some(InterfaceState::Usable)).await;
        let addresses = InterfaceAddresses { v4: address("10.10.10.2").into(), v6: address("fd00:10::2").into() };
        let entry = || node.map::<u32, InterfaceAddresses>("interfaces").get(&device("eth1").0, 0).ok();
        eventually("the programs know its addresses", || entry() == Some(addresses)).await;

        ip("link set eth1 down\nlink set eth1 name nic1\n");
        let down = Some(InterfaceState::Attached(InterfaceReason::Down));
        eventually("it is renamed and down", || state(&dataplane, "nic1") == down).await;
        assert!(has_programs("nic1"));
        drop(dataplane);
        let dataplane = node.start().await;
        assert!(has_programs("nic1"), "adopted, and not twice");
        assert_eq!(state(&dataplane, "nic1"), down);

        // The bridge has the addresses now.
        ip("link add br1 type bridge\nlink set nic1 master br1\naddr add 10.10.13.2/24 dev br1\n");
        eventually("the bridge has programs", || has_programs("br1")).await;
        eventually("its port has none", || programs_on("nic1").is_empty()).await;
        assert_eq!(state(&dataplane, "nic1"), None);
        ip("link del br1\n");
        eventually("it is an interface of its own again", || has_programs("nic1")).await;

        let index = device("nic1").0;
        ip("link del nic1\n");
        node.make_eth1();
        eventually("a new device has programs", || has_programs("eth1")).await;
        assert_ne!(device("eth1").0, index);
        let left = || node.map::<u32, InterfaceAddresses>("interfaces").keys().count();
        eventually("its predecessor is forgotten", || left() == 1).await;
        drop(dataplane);
        assert_eq!(clean(&node.settings()).await, [] as [&str; 0]);
        assert!(programs_on("eth1").is_empty() && programs_on(UPLINK).is_empty());
        assert!(!node.bpffs.exists() || std::fs::read_dir(&node.bpffs).expect("a folder").next().is_none());
    });
}

/// A line for each route of `eth1`: its prefix, and its next hops.
pub(crate) fn routes(node: &TestNode, ifindex: u32) -> Vec<String> {
    let data = MapData::from_pin(node.pin("maps/routes")).expect("open a pinned map");
    let map = LpmTrie::<MapData, RouteDestination, RouteEntry>::try_from(Map::LpmTrie(data)).expect("a trie");
    let all = map.iter().map(|entry| entry.expect("an entry"));
    let line = |(key, entry): (Key<RouteDestination>, RouteEntry)| {
        let RouteDestination { to, .. } = key.data();
        let mapped = if to.to_ip().is_ipv4() { 96 } else { 0 };
        let hops = (0..entry.count()).map(|index| format!(" {}", entry.hop(index).expect("a hop").to_ip()));
        let kind = entry.kind().expect("a kind");
        format!("{}/{} {kind:?}{}", to.to_ip(), key.prefix_len() - 32 - mapped, hops.collect::<String>())
    };
    let mut lines: Vec<_> = all.filter(|(key, _)| key.data().ifindex == ifindex).map(line).collect();
    lines.sort();
    lines
}

#[test]
fn nic_routes_and_neighbours_follow_the_kernel() {
    on_node(|node| async move {
        node.make_eth1();
        let dataplane = node.start().await;
        let index = device("eth1").0;
        let own = ["10.10.10.0/24 OnLink", "fd00:10::/64 OnLink"];
        assert_eq!(routes(&node, index), own);
        ip("route add 198.51.100.0/24 via 10.10.10.1\n\
            route add default via 10.10.10.1 dev eth1 metric 500\n\
            route add 198.51.101.0/24 nexthop via 10.10.10.1 weight 2 nexthop via 10.10.10.3 nexthop via 172.18.0.1\n\
            route add blackhole 198.51.102.0/24\n\
            route add ::/0 via fe80::1 dev eth1 metric 2048\n\
            route add 2001:db8:1::/64 via fd00:10::1\n");
        let all = [
            "0.0.0.0/0 Via 10.10.10.1",
            own[0],
            "198.51.100.0/24 Via 10.10.10.1",
            "198.51.101.0/24 Via 10.10.10.1 10.10.10.1 10.10.10.1 10.10.10.1 10.10.10.1 10.10.10.3 10.10.10.3 10.10.10.3",
            "198.51.102.0/24 Refused",
            "2001:db8:1::/64 Via fd00:10::1",
            "::/0 Via fe80::1",
            own[1],
        ];
        eventually("routes are followed", || routes(&node, index) == all).await;
        assert_eq!(routes(&node, device(UPLINK).0), [""; 0], "the uplink asks the kernel");
        let published = || -> Vec<String> {
            let records = dataplane.interfaces().borrow().clone();
            let eth1 = records.into_iter().find(|one| one.name == "eth1").expect("a record");
            eth1.destinations.iter().map(ToString::to_string).collect()
        };
        let beyond = ["0.0.0.0/0", "198.51.100.0/24", "198.51.101.0/24", "::/0", "2001:db8:1::/64"];
        eventually("other nodes know where it leads", || published() == beyond).await;
        drop(dataplane);
        ip("route del 198.51.100.0/24\nroute del 198.51.101.0/24\nroute del blackhole 198.51.102.0/24\n\
            route del default dev eth1\nroute del ::/0 dev eth1\nroute del 2001:db8:1::/64\n");
        let dataplane = node.start().await;
        assert_eq!(routes(&node, index), own, "also those of the time without an agent");

        let mac = |text: &str| {
            let key = NeighbourKey { ifindex: index, address: address(text).into() };
            node.map::<NeighbourKey, NeighbourEntry>("neighbours").get(&key, 0).ok().map(|entry| entry.mac)
        };
        for text in ["10.10.10.1", "fd00:10::1", "fe80::1"] {
            for last in [1, 2] {
                ip(&format!("neigh replace {text} lladdr 02:00:00:00:09:0{last} dev eth1 nud reachable\n"));
                eventually("the neighbour is followed", || mac(text) == Some([2, 0, 0, 0, 9, last])).await;
            }
            ip(&format!("neigh del {text} dev eth1\n"));
            eventually("and forgotten", || mac(text).is_none()).await;
        }
        ip("link del eth1\n");
        eventually("nothing is left of a removed interface", || routes(&node, index).is_empty()).await;
        drop(dataplane);
    });
}

#[test]
fn nic_with_too_many_routes_sends_nothing() {
    on_node(|node| async move {
        node.make_eth1();
        let dataplane = node.start().await;
        let index = device("eth1").0;
        // With that of the network.
        let line = |i: usize| format!("route add 10.{}.{}.0/24 via 10.10.10.1\n", 100 + i / 256, i % 256);
        ip(&(0..MOST_ROUTES).map(line).collect::<String>());
        let too_many = Some(InterfaceState::Attached(InterfaceReason::TooManyRoutes));
        eventually("the interface cannot send", || state(&dataplane, "eth1") == too_many).await;
        eventually("by any of them", || routes(&node, index).is_empty()).await;
        ip("route del 10.100.0.0/24\nroute del 10.100.1.0/24\n");
        eventually("it can", || state(&dataplane, "eth1") == Some(InterfaceState::Usable)).await;
        assert_eq!(routes(&node, index).len(), MOST_ROUTES);
    });
}

/// Another agent's `--uplink`: each device keeps a program while its role changes.
#[test]
fn nic_and_uplink_change_their_roles() {
    on_node(|node| async move {
        node.make_eth1();
        drop(node.start().await);
        for uplink in ["eth1", UPLINK] {
            let dataplane = start(Settings { uplink: uplink.to_owned(), ..node.settings() }).await;
            for name in ["eth1", UPLINK] {
                assert!(has_programs(name), "{name} while {uplink} is the uplink");
            }
            assert_eq!(node.config().uplink_ifindex, device(uplink).0);
            drop(dataplane);
        }
        assert_eq!(clean(&node.settings()).await, [] as [&str; 0]);
    });
}

/// While the agent runs: the former uplink has another name and no network, so that it hosts nothing.
#[test]
fn nic_of_a_renamed_uplink_keeps_no_program() {
    on_node(|node| async move {
        let _dataplane = node.start().await;
        ip(&format!("link set {UPLINK} down\nlink set {UPLINK} name old0\naddr flush dev old0\n"));
        ip("link add breth0 type veth peer name far0\nlink set breth0 up\naddr add 172.18.0.2/16 dev breth0\n");
        eventually("the new device has programs", || has_programs(UPLINK)).await;
        within(Duration::from_secs(12), "the former one has none", || programs_on("old0").is_empty()).await;
    });
}

/// Neighbours of the other networks hear nothing of it.
#[test]
fn nic_addresses_are_claimed_in_their_network() {
    on_node(|node| async move {
        node.make_eth1();
        let mut dataplane = node.start().await;
        dataplane.apply(&Action::SetUnknownPods(OnUnknownPod::Pass)).await.expect("apply");
        let (index, mac) = device("eth1");
        for (id, text) in (1..).zip(ADDRESSES) {
            for lan in ["lan1", "out0"] {
                let stale = format!("neigh replace {text} lladdr 02:00:00:00:00:99 dev {lan} nud reachable\n");
                node.outside(|| ip(&stale));
            }
            dataplane.apply(&Action::Own(EgressId(id), address(text))).await.expect("own");
            assert_eq!((node.owned(id).ifindex, node.owned(id).mac, node.owned(id).mtu), (index, mac, 1400));
            let of = |lan| node.outside(|| output(&["ip", "neigh", "show", text, "dev", lan]));
            let facts = dataplane.meter().expect("a meter").read([EgressId(id)].into_iter()).expect("read the maps");
            assert_eq!(facts.interfaces, [(EgressId(id), "eth1".to_owned())].into(), "for the metrics");
            eventually("it is announced there", || of("lan1").contains(&mac_text(mac))).await;
            assert!(of("out0").contains("02:00:00:00:00:99"), "and not on the uplink: {}", of("out0"));
        }
        let filter = |device| output(&["ip", "maddr", "show", "dev", device]).contains("33:33:ff:01:01:00");
        assert!(filter("eth1") && !filter(UPLINK));
        let names = survey::interfaces_of_addresses(&node.bpffs).expect("read the pins");
        assert_eq!(names, ADDRESSES.map(|text| (address(text), "eth1".to_owned())).into());
        let kernel = survey::survey(&node.bpffs, false).expect("read the pins").expect("programs");
        let on_eth1 = kernel.programs.iter().filter(|one| one.interface.as_deref() == Some("eth1"));
        let mut on_eth1: Vec<_> = on_eth1.map(|one| one.name.as_str()).collect();
        on_eth1.sort_unstable();
        assert_eq!(on_eth1, ["from_netdev", "to_netdev"]);

        // Without an agent.
        drop(dataplane);
        node.outside(|| ip("neigh flush all\n"));
        for text in ADDRESSES {
            node.ask_for(text);
            eventually("it is answered there", || node.neighbour(text).contains(&mac_text(mac))).await;
        }

        let mut dataplane = node.start().await;
        dataplane.apply(&Action::SetUnknownPods(OnUnknownPod::Pass)).await.expect("apply");
        let other = [0x02, 0, 0, 0, 0, 0x77];
        ip(&format!("link set eth1 address {}\n", mac_text(other)));
        for (id, text) in (1..).zip(ADDRESSES) {
            eventually("the entry has the new link address", || node.owned(id).mac == other).await;
            eventually("and it is announced", || node.neighbour(text).contains(&mac_text(other))).await;
        }
        for (id, text) in (1..).zip(ADDRESSES) {
            dataplane.apply(&Action::Disown(EgressId(id), address(text))).await.expect("disown");
        }
        eventually("the group is left", || !filter("eth1")).await;
    });
}

#[test]
fn nic_addresses_are_announced_when_the_carrier_returns() {
    on_node(|node| async move {
        node.make_eth1();
        let mut dataplane = node.start().await;
        let text = ADDRESSES[0];
        dataplane.apply(&Action::Own(EgressId(1), address(text))).await.expect("own");
        // The claim would be announced for eight more seconds; a restart announces nothing.
        drop(dataplane);
        let dataplane = node.start().await;
        node.outside(|| ip("link set lan1 down\n"));
        let no_carrier = Some(InterfaceState::Attached(InterfaceReason::NoCarrier));
        eventually("the carrier is gone", || state(&dataplane, "eth1") == no_carrier).await;
        node.outside(|| {
            ip("link set lan1 up\n");
            ip(&format!("neigh replace {text} lladdr 02:00:00:00:00:99 dev lan1 nud stale\n"));
        });
        let mac = mac_text(device("eth1").1);
        eventually("the neighbour's entry points here", || node.neighbour(text).contains(&mac)).await;
    });
}

/// The uplink is in another network: nothing of it may show the address there.
#[test]
fn nic_addresses_do_not_move_to_the_uplink() {
    on_node(|node| async move {
        node.make_eth1();
        let mut dataplane = node.start().await;
        let own = |id, text| Action::Own(EgressId(id), address(text));
        dataplane.apply(&own(1, ADDRESSES[0])).await.expect("own");
        let (index, _) = device("eth1");
        ip("link del eth1\n");
        eventually("the record is gone", || state(&dataplane, "eth1").is_none()).await;
        assert_eq!(node.owned(1).ifindex, index, "it leaves by no other interface");
        dataplane.apply(&own(2, "10.10.10.101")).await.expect_err("there is no interface for it");

        // Networks that the uplink has by a cloud's settings, for example.
        let primary_networks = vec!["10.10.10.0/24".parse().expect("a literal")];
        dataplane.expect(Expected { primary_networks, ..Expected::default() });
        assert_eq!(node.owned(1).ifindex, device(UPLINK).0);
        dataplane.apply(&own(2, "10.10.10.101")).await.expect("own");
        node.make_eth1();
        eventually("an interface in that network has it", || node.owned(2).ifindex == device("eth1").0).await;
    });
}

/// Two gateways of a family, of which one is enough, and one of the other family.
#[test]
fn nic_without_a_next_hop_cannot_send() {
    on_node(|node| async move {
        node.make_eth1();
        let dataplane = node.start().await;
        let (is_egress_node, may_host) = channel(true);
        let (further, stop) = (dataplane.next_hops(), CancellationToken::new());
        let until = stop.clone();
        let watch = tokio::spawn(async move { watch_further(&further, may_host, until).await });
        let lost = Some(InterfaceState::Attached(InterfaceReason::NextHopLost));
        let works = || state(&dataplane, "eth1") == Some(InterfaceState::Usable);
        let is_lost = || state(&dataplane, "eth1") == lost;
        ip("route add 198.51.100.0/24 via 10.10.10.77\n");
        eventually("no host has the gateway's address", is_lost).await;
        ip("route add 198.51.101.0/24 via 10.10.10.1\n");
        eventually("another one answers", works).await;
        ip("route add 2001:db8:1::/64 via fd00:10::77\n");
        eventually("no gateway of the other family does", is_lost).await;
        ip("route replace 2001:db8:1::/64 via fd00:10::1\n");
        eventually("now it does", works).await;
        ip("route del 198.51.101.0/24\n");
        eventually("the other gateway does not count any more", is_lost).await;
        is_egress_node.send_replace(false);
        eventually("a node that takes no part asks no gateway", works).await;
        stop.cancel();
        watch.await.expect("the watch ends");
    });
}
