//! Claims on the network: announcements, conflicts, and solicitations through a filtering uplink.

use std::net::{IpAddr, UdpSocket};
use std::os::fd::AsRawFd;
use std::time::Duration;

use egress_common::abi::{Addr, Lease, Owned, OwnedAddr};
use egress_core::model::reserved::Reserved;
use egress_core::model::state::{
    Action, EgressId, HandoverStage, HandoverState, OnUnknownPod, SharedWith, TunnelEndpoint,
};
use egress_core::plan::executor::{DataplaneError, Executor, Expected};
use egress_datapath::{Dataplane, Settings};
use nix::sys::socket::{AddressFamily, LinkAddr, SockFlag, SockProtocol, SockType, recvfrom, socket};

use crate::node::{UPLINK, clean, device, eventually, ip, mac_text, on_node, output, patience, start};

const ADDRESSES: [&str; 2] = ["172.18.0.100", "fd00:172:18::1:100"];

fn address(text: &str) -> IpAddr {
    text.parse().expect("a literal")
}

#[test]
fn neighbours_believe_the_announcement() {
    on_node(|node| async move {
        let mut dataplane = node.start().await;
        let (_, mac) = device(UPLINK);
        for (id, text) in (1..).zip(ADDRESSES) {
            // The neighbour knows the address at its last gateway.
            node.outside(|| ip(&format!("neigh replace {text} lladdr 02:00:00:00:00:99 dev out0 nud reachable\n")));
            dataplane.apply(&Action::Own(EgressId(id), address(text))).await.expect("own");
            eventually("the neighbour's entry points here", || {
                node.outside(|| output(&["ip", "neigh", "show", text])).contains(&mac_text(mac))
            })
            .await;
        }
    });
}

/// The next agent also finds the lease of the former one.
#[test]
fn without_a_lease_nothing_is_announced() {
    on_node(|node| async move {
        let mut dataplane = node.start().await;
        let (lease, text, mac) = (dataplane.lease(), ADDRESSES[0], mac_text(device(UPLINK).1));
        let neighbour = || node.outside(|| output(&["ip", "neigh", "show", text]));
        lease.expire();
        node.outside(|| ip(&format!("neigh replace {text} lladdr 02:00:00:00:00:99 dev out0 nud reachable\n")));
        dataplane.apply(&Action::Own(EgressId(1), address(text))).await.expect("own");
        // Announcements are due at once and a second later.
        tokio::time::sleep(Duration::from_millis(1500)).await;
        assert!(!neighbour().contains(&mac), "{}", neighbour());
        assert!(lease.renew(lease.read(), Lease::ENDLESS));
        eventually("the neighbour's entry points here", || neighbour().contains(&mac)).await;
        // For years, and no gap of heartbeats ends it.
        let until_ns = 77 << 50;
        assert!(lease.renew(lease.read(), Lease::bounded(until_ns, 0, u64::MAX)));
        drop((dataplane, lease));
        let dataplane = Dataplane::start(node.settings()).await.expect("start the data plane");
        assert_eq!(dataplane.lease().read().until_ns, until_ns);
        let shown = output(&["bpftool", "map", "dump", "pinned", &node.pin("maps/lease").display().to_string()]);
        assert!(shown.contains(&format!("\"until_ns\": {until_ns}")), "{shown}");
    });
}

#[test]
fn addresses_are_announced_again_when_the_carrier_returns() {
    on_node(|node| async move {
        let mut dataplane = node.start().await;
        let text = ADDRESSES[0];
        dataplane.apply(&Action::Own(EgressId(1), address(text))).await.expect("own");
        // The claim would be announced for eight more seconds; a restart announces nothing.
        drop(dataplane);
        let _dataplane = node.start().await;
        node.outside(|| ip(&format!("neigh replace {text} lladdr 02:00:00:00:00:99 dev out0 nud permanent\n")));
        node.outside(|| ip("link set out0 down\n"));
        eventually("the carrier is gone", || output(&["ip", "link", "show", UPLINK]).contains("NO-CARRIER")).await;
        tokio::time::sleep(Duration::from_millis(50)).await;
        node.outside(|| {
            ip(&format!("link set out0 up\nneigh replace {text} lladdr 02:00:00:00:00:99 dev out0 nud stale\n"));
        });
        let mac = mac_text(device(UPLINK).1);
        eventually("the neighbour's entry points here", || {
            node.outside(|| output(&["ip", "neigh", "show", text])).contains(&mac)
        })
        .await;
    });
}

#[test]
fn all_claims_of_a_plan_are_probed_together() {
    on_node(|node| async move {
        let mut dataplane = node.start().await;
        let addresses = (1..=20).map(|last| IpAddr::from([172, 18, 7, last]));
        let plan: Vec<_> = (1..).zip(addresses).map(|(id, address)| Action::Own(EgressId(id), address)).collect();
        node.outside(|| ip("addr add 172.18.7.20/16 dev out0\n"));
        let start = std::time::Instant::now();
        dataplane.probe_ahead(&plan).await;
        for action in &plan[..19] {
            dataplane.apply(action).await.expect("own");
        }
        assert!(start.elapsed() < patience(Duration::from_secs(2)), "{:?}", start.elapsed());
        let refused = dataplane.apply(&plan[19]).await;
        assert!(matches!(refused, Err(DataplaneError::AddressInUse { .. })), "{refused:?}");
    });
}

/// A claim during the early probe, as after the loss of the old node, waits for the end of that probe and starts no other.
#[test]
fn a_claim_waits_for_the_running_probe() {
    on_node(|node| async move {
        let mut dataplane = node.start().await;
        let (id, address) = (EgressId(1), address(ADDRESSES[0]));
        let moving = HandoverState {
            stage: HandoverStage::Arriving,
            address,
            peer: TunnelEndpoint(IpAddr::from([172, 18, 0, 3])),
            shared_with: None,
        };
        let own = Action::Own(id, address);
        let start = std::time::Instant::now();
        dataplane.apply(&Action::PutHandover(id, moving)).await.expect("ready");
        tokio::time::sleep(Duration::from_millis(200)).await;
        dataplane.probe_ahead(std::slice::from_ref(&own)).await;
        dataplane.apply(&own).await.expect("own");
        // A probe takes 300 ms.
        let took = start.elapsed();
        assert!(took >= Duration::from_millis(300) && took < patience(Duration::from_millis(480)), "{took:?}");
    });
}

#[test]
fn an_address_in_use_is_not_claimed() {
    on_node(|node| async move {
        let mut dataplane = node.start().await;
        let mac = node.outside(|| device("out0").1);
        for text in ADDRESSES {
            node.outside(|| ip(&format!("addr add {text}/64 dev out0 nodad\n").replace("0.100/64", "0.100/16")));
            let refused = dataplane.apply(&Action::Own(EgressId(5), address(text))).await;
            let Err(DataplaneError::AddressInUse { address: named, mac: by }) = refused else {
                panic!("{text}: {refused:?}");
            };
            assert_eq!((named, by), (address(text), mac_text(mac)));
            assert!(dataplane.observe().await.expect("observe").owned.is_empty());
            eventually("the group is left", || {
                !output(&["ip", "maddr", "show", "dev", UPLINK]).contains("33:33:ff:01:01:00")
            })
            .await;
            node.outside(|| ip(&format!("addr flush to {text} dev out0\n")));
            dataplane.apply(&Action::Own(EgressId(5), address(text))).await.expect("free now");
            dataplane.apply(&Action::Disown(EgressId(5), address(text))).await.expect("disown");
        }
    });
}

/// Also if that node is the old owner: its programs still emit the address.
#[test]
fn an_address_that_another_node_answers_for_is_not_claimed() {
    on_node(|node| async move {
        let mut dataplane = node.start().await;
        dataplane.apply(&Action::SetUnknownPods(OnUnknownPod::Pass)).await.expect("apply");
        let link = node.outside(|| device("out0").1);
        let holder = address("172.18.0.3");
        for (id, text) in (1..).zip(ADDRESSES) {
            node.outside(|| ip(&format!("addr add {text}/64 dev out0 nodad\n").replace("0.100/64", "0.100/16")));
            let own = Action::Own(EgressId(id), address(text));
            for holders in [[].into(), [(address(text), holder)].into()] {
                // The link address as that node publishes it.
                dataplane.expect(Expected { links: [(link, holder)].into(), holders, ..Expected::default() });
                let refused = dataplane.apply(&own).await;
                let Err(DataplaneError::HeldByNode { address: held, node, mac }) = &refused else {
                    panic!("{text}: {refused:?}");
                };
                assert_eq!((*held, *node, mac), (address(text), holder, &mac_text(link)));
                assert!(!dataplane.observe().await.expect("observe").owned.contains_key(&EgressId(id)));
            }
            node.outside(|| ip(&format!("addr flush to {text} dev out0\n")));
            dataplane.apply(&own).await.expect("that node has stopped");
            assert_eq!(dataplane.observe().await.expect("observe").owned.get(&EgressId(id)), Some(&address(text)));
        }
    });
}

/// Only the acknowledgement of the old owner spares the probe; a record of a hand-over does not.
#[test]
fn only_the_acknowledgement_of_the_old_owner_spares_the_probe() {
    on_node(|node| async move {
        let mut dataplane = node.start().await;
        let (holder, other, recorded) = (address("172.18.0.3"), [2, 0, 0, 0, 0, 9], address(ADDRESSES[0]));
        node.outside(|| ip(&format!("addr add {recorded}/16 dev out0\n")));
        let own = Action::Own(EgressId(1), recorded);
        let (holders, links) = ([(recorded, holder)].into(), [(other, holder)].into());
        dataplane.expect(Expected { holders, links, ..Expected::default() });
        let refused = dataplane.apply(&own).await;
        assert!(matches!(refused, Err(DataplaneError::AddressInUse { .. })), "{refused:?}");
        dataplane.expect(Expected { handed_over: [recorded].into(), ..Expected::default() });
        let start = std::time::Instant::now();
        dataplane.apply(&own).await.expect("handed over");
        assert!(start.elapsed() < Duration::from_millis(250), "{:?}", start.elapsed());
    });
}

#[test]
fn a_nodes_own_next_hop_is_not_claimed() {
    on_node(|node| async move {
        let mut dataplane = node.start().await;
        // Also if it does not answer a probe.
        node.outside(|| ip("link set out0 arp off\n"));
        let hop = address("172.18.0.1");
        let refused = dataplane.apply(&Action::Own(EgressId(1), hop)).await;
        let Err(DataplaneError::Reserved { address: named, reason }) = refused else { panic!("{refused:?}") };
        assert_eq!((named, reason), (hop, Reserved::NextHop(None)));
        assert!(dataplane.observe().await.expect("observe").owned.is_empty());
    });
}

/// While the address is held, not only after the claim.
#[test]
fn another_host_that_claims_a_held_address_is_reported_and_answered() {
    on_node(|node| async move {
        let mut dataplane = node.start().await;
        dataplane.apply(&Action::SetUnknownPods(OnUnknownPod::Pass)).await.expect("apply");
        for (id, text) in (1..).zip(ADDRESSES) {
            dataplane.apply(&Action::Own(EgressId(id), address(text))).await.expect("own");
        }
        // Past all announcements of the claims.
        tokio::time::sleep(Duration::from_secs(12)).await;
        let (index, mac) = device(UPLINK);
        let link = node.outside(|| device("out0").1);
        for text in ADDRESSES {
            let is_ipv4 = address(text).is_ipv4();
            let claim = || {
                ip("neigh flush all\n");
                let socket = UdpSocket::bind((address(text), 0)).expect("a socket");
                socket.send_to(b"?", ("172.18.0.99", 9)).expect("send");
            };
            node.outside(|| {
                // An IPv4 host shows it by its first packet, an IPv6 host by duplicate address detection.
                let length = if is_ipv4 { 16 } else { 64 };
                ip(&format!("addr add {text}/{length} dev out0\n"));
                if is_ipv4 {
                    claim();
                }
            });
            // Once more within the ten seconds; then the host is silent.
            let again = async {
                if is_ipv4 {
                    tokio::time::sleep(Duration::from_millis(1_500)).await;
                    node.outside(claim);
                    tokio::time::sleep(Duration::from_millis(500)).await;
                    node.outside(|| ip(&format!("addr flush to {text} dev out0\n")));
                }
            };
            let (announced, conflict, ()) = tokio::join!(
                announcements(index, mac, Duration::from_secs(if is_ipv4 { 12 } else { 3 })),
                tokio::time::timeout(Duration::from_secs(3), dataplane.conflict()),
                again,
            );
            let conflict = conflict.unwrap_or_else(|_| panic!("{text}: no conflict is reported"));
            assert_eq!((conflict.address, conflict.mac), (address(text), link));
            // One announcement at once, and one after ten seconds for further claims. The program's own answer to duplicate
            // address detection is also sent to all nodes.
            assert_eq!(announced.len(), 2, "{text}: {announced:?}");
            assert_eq!(announced[1] > Duration::from_secs(9), is_ipv4, "{text}: {announced:?}");
            node.outside(|| ip(&format!("addr flush to {text} dev out0\n")));
        }
    });
}

/// Times of announcements that leave the device with this source, for the given duration.
async fn announcements(ifindex: u32, mac: [u8; 6], during: Duration) -> Vec<Duration> {
    let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
    let listener = socket(AddressFamily::Packet, SockType::Raw, flags, SockProtocol::EthAll).expect("a packet socket");
    let start = std::time::Instant::now();
    let mut seen = Vec::new();
    let mut frame = [0_u8; 2048];
    while start.elapsed() < during {
        while let Ok((length, from)) = recvfrom::<LinkAddr>(listener.as_raw_fd(), &mut frame) {
            let here = from.is_some_and(|from| from.ifindex() == ifindex as usize) && frame[6..12] == mac;
            // A gratuitous ARP request (sender and target the same), or an unsolicited advertisement to all nodes.
            let arp = length >= 42 && frame[12..14] == [8, 6] && frame[28..32] == frame[38..42];
            let advertisement =
                length >= 78 && frame[12..14] == [0x86, 0xdd] && frame[54] == 136 && frame[38..40] == [0xff, 2];
            if here && (arp || advertisement) {
                seen.push(start.elapsed());
            }
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    seen
}

/// A second interface in the uplink's network.
fn make_macvlan() {
    ip(&format!(
        "link add link {UPLINK} name mv0 type macvlan mode bridge\n\
         link set mv0 up\n\
         addr add 172.18.0.3/16 dev mv0\n\
         addr add fd00:172:18::3/64 dev mv0 nodad\n"
    ));
}

#[test]
fn solicitations_pass_an_uplink_that_filters_multicast() {
    on_node(|node| async move {
        // Like a NIC, the macvlan passes only joined groups.
        make_macvlan();
        let mut dataplane = start(Settings { uplink: "mv0".to_owned(), ..node.settings() }).await;
        let (index, _) = device("mv0");
        let wanted = address(ADDRESSES[1]);
        let received = || {
            let solicit = || {
                let socket = UdpSocket::bind("[::]:0").expect("a socket");
                socket.send_to(b"?", (wanted, 9)).expect("ask for the address");
            };
            solicitations(index, wanted, || node.outside(solicit))
        };
        node.outside(|| ip("neigh flush all\n"));
        assert_eq!(received(), 0, "the group is filtered out");
        dataplane.apply(&Action::Own(EgressId(1), wanted)).await.expect("own");
        node.outside(|| ip("neigh flush all\n"));
        assert_ne!(received(), 0, "the solicitation passes");
        let filter = || output(&["ip", "maddr", "show", "dev", "mv0"]);
        assert!(filter().contains("33:33:ff:01:01:00"));

        // The filter outlives the agent, whose socket membership does not.
        drop(dataplane);
        assert!(filter().contains("33:33:ff:01:01:00"));
        node.outside(|| ip("neigh flush all\n"));
        assert_ne!(received(), 0, "also while no agent runs");
        let mut again = start(Settings { uplink: "mv0".to_owned(), ..node.settings() }).await;
        again.apply(&Action::Disown(EgressId(1), wanted)).await.expect("disown");
        eventually("the group is left", || !filter().contains("33:33:ff:01:01:00")).await;
    });
}

/// Programs answer without an agent.
#[test]
fn neighbours_find_an_owned_address() {
    on_node(|node| async move {
        make_macvlan();
        for uplink in [UPLINK, "mv0"] {
            let mut dataplane = start(Settings { uplink: uplink.to_owned(), ..node.settings() }).await;
            dataplane.apply(&Action::SetUnknownPods(OnUnknownPod::Pass)).await.expect("apply");
            for (id, text) in (1..).zip(ADDRESSES) {
                dataplane.apply(&Action::Own(EgressId(id), address(text))).await.expect("own");
            }
            drop(dataplane);
            node.outside(|| ip("neigh flush all\n"));
            let mac = mac_text(device(uplink).1);
            for text in ADDRESSES {
                node.outside(|| {
                    let any = if address(text).is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
                    let socket = UdpSocket::bind(any).expect("a socket");
                    socket.send_to(b"?", (address(text), 9)).expect("ask for the address");
                });
                eventually("the neighbour knows it", || {
                    node.outside(|| output(&["ip", "neigh", "show", text])).contains(&mac)
                })
                .await;
            }
        }
        let filter = |device| output(&["ip", "maddr", "show", "dev", device]).contains("33:33:ff:01:01:00");
        // The macvlan joins the group on its parent, so the parent's filter proves nothing.
        assert!(filter("mv0"), "it moved with the uplink");
        // Also if the user names another uplink than that of the agent.
        assert_eq!(clean(&node.settings()).await, [] as [&str; 0]);
        for device in [UPLINK, "mv0"] {
            eventually("the filter no longer has the group", || !filter(device)).await;
        }
    });
}

#[test]
fn addresses_that_share_a_group_keep_it() {
    on_node(|node| async move {
        let mut dataplane = node.start().await;
        // The same last three bytes.
        let twins = ["fd00:172:18::1:100", "fd00:172:18::2:1:100"].map(address);
        for (id, twin) in (1..).zip(twins) {
            dataplane.apply(&Action::Own(EgressId(id), twin)).await.expect("own");
        }
        let joined = || output(&["ip", "maddr", "show", "dev", UPLINK]).contains("33:33:ff:01:01:00");
        dataplane.apply(&Action::Disown(EgressId(1), twins[0])).await.expect("disown");
        assert!(joined());
        dataplane.apply(&Action::Disown(EgressId(2), twins[1])).await.expect("disown");
        eventually("the group is left", || !joined()).await;
    });
}

/// A Service's provider has the address on the network, here or elsewhere.
#[test]
fn a_shared_address_is_neither_probed_nor_announced() {
    on_node(|node| async move {
        let mut dataplane = node.start().await;
        let filter = || output(&["ip", "maddr", "show", "dev", UPLINK]).contains("33:33:ff:01:01:00");
        let neighbour = |text: &str| node.outside(|| output(&["ip", "neigh", "show", text]));
        let mac = mac_text(device(UPLINK).1);
        for (id, text) in (1..).zip(ADDRESSES) {
            let bits = if address(text).is_ipv4() { 16 } else { 64 };
            node.outside(|| ip(&format!("addr add {text}/{bits} dev out0\n")));
            dataplane
                .apply(&Action::Share(EgressId(id), address(text), SharedWith::Service))
                .await
                .expect("another host has it");
            node.outside(|| ip(&format!("addr del {text}/{bits} dev out0\n")));
            node.outside(|| ip(&format!("neigh replace {text} lladdr 02:00:00:00:00:99 dev out0 nud reachable\n")));
        }
        let held = dataplane.held().await.expect("held");
        assert_eq!(held.shared, held.owned.keys().map(|id| (*id, SharedWith::Service)).collect());
        // Announcements would be due at once and a second later, and after the restart.
        dataplane.confirm();
        tokio::time::sleep(Duration::from_millis(1500)).await;
        drop(dataplane);
        let mut dataplane = node.start().await;
        dataplane.confirm();
        tokio::time::sleep(Duration::from_millis(300)).await;
        for text in ADDRESSES {
            assert!(!neighbour(text).contains(&mac), "{}", neighbour(text));
        }
        assert!(!filter());
        assert_eq!(dataplane.held().await.expect("held").shared, held.shared, "it is adopted");
        let entry = |text: &str| node.map::<Addr, OwnedAddr>("owned_addr").get(&address(text).into(), 0);
        assert!(ADDRESSES.iter().all(|text| entry(text).expect("its entry").is_shared()));

        for (id, text) in (1..).zip(ADDRESSES) {
            dataplane.apply(&Action::Disown(EgressId(id), address(text))).await.expect("disown");
            assert!(entry(text).is_err());
            dataplane.apply(&Action::Own(EgressId(id), address(text))).await.expect("it is free");
            eventually("the neighbour's entry points here", || neighbour(text).contains(&mac)).await;
        }
        assert!(filter());
        assert_eq!(dataplane.held().await.expect("held").shared, [].into());
    });
}

/// An address of the host, as a virtual router's: the programs use it while the node has it, whatever the plan says.
#[test]
fn an_address_of_the_host_is_used_while_the_host_has_it() {
    on_node(|node| async move {
        let mut dataplane = node.start().await;
        let change = |change: &str, text: &str| {
            let options = if change == "add" { " nodad" } else { "" };
            let length = if address(text).is_ipv4() { 32 } else { 128 };
            ip(&format!("addr {change} {text}/{length} dev {UPLINK}{options}\n"));
        };
        let usable = |id: u32| {
            let entry = node.map::<u32, Owned>("owned").get(&id, 0).expect("its entry");
            assert!(entry.is_hosts() && entry.is_of(id), "{entry:?}");
            entry.is_usable()
        };
        for (id, text) in (1..).zip(ADDRESSES) {
            dataplane.apply(&Action::Share(EgressId(id), address(text), SharedWith::Host)).await.expect("share");
            assert!(!usable(id), "{text}: the host does not have it");
            change("add", text);
            eventually("it is used", || usable(id)).await;
            change("del", text);
            eventually("it is used no more", || !usable(id)).await;
            change("add", text);
            eventually("it is used again", || usable(id)).await;
        }
        let held = dataplane.held().await.expect("held");
        assert_eq!(held.shared, held.owned.keys().map(|id| (*id, SharedWith::Host)).collect());
        // While no agent runs, nothing follows it.
        drop(dataplane);
        change("del", ADDRESSES[0]);
        let dataplane = node.start().await;
        let (lost, kept) = (usable(1), usable(2));
        assert!(!lost && kept, "{lost} {kept}");
        drop(dataplane);
    });
}

/// How many neighbour solicitations for the address the device shows within a short time after `cause`.
fn solicitations(ifindex: u32, wanted: IpAddr, cause: impl FnOnce()) -> usize {
    let IpAddr::V6(wanted) = wanted else { panic!("an IPv6 address") };
    let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
    let listener = socket(AddressFamily::Packet, SockType::Raw, flags, SockProtocol::EthAll).expect("a packet socket");
    cause();
    std::thread::sleep(Duration::from_millis(200));
    let mut count = 0;
    let mut frame = [0_u8; 2048];
    while let Ok((length, from)) = recvfrom::<LinkAddr>(listener.as_raw_fd(), &mut frame) {
        let here = from.is_some_and(|from| from.ifindex() == ifindex as usize);
        let solicitation = length >= 78 && frame[12..14] == [0x86, 0xdd] && frame[20] == 58 && frame[54] == 135;
        let solicitation = solicitation && frame[62..78] == wanted.octets();
        count += usize::from(here && solicitation);
    }
    count
}
