//! Owned addresses: the two maps, the programs' bloom filter, and recovery after a kill or an error.

use std::net::IpAddr;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use egress_common::abi::{Addr, BloomFilter, Owned, OwnedAddr};
use egress_core::model::state::{Action, EgressId};
use egress_core::plan::executor::{DataplaneError, Executor};
use egress_datapath::names::Hook;

use crate::actions::addr;
use crate::node::{MGMT, TestNode, UPLINK, eventually, ip, is_attached, on_node, output, place};
use crate::skips::skipped;

/// An agent may be killed between the two writes of a claim, or of its end.
#[test]
fn an_incomplete_claim_is_repaired_at_start() {
    on_node(|node| async move {
        let mut dataplane = node.start().await;
        let [whole, answered, translated] = ["172.18.0.100", "fd00:172:18::1:101", "172.18.0.102"].map(addr);
        for (id, address) in (1..).zip([whole, answered, translated]) {
            dataplane.apply(&Action::Own(EgressId(id), address)).await.expect("own");
        }
        drop(dataplane);
        let owned_addr = || node.map::<Addr, OwnedAddr>("owned_addr");
        let entry = |address: IpAddr| owned_addr().get(&address.into(), 0).ok().map(|entry| entry.egress_id);
        let answer = owned_addr().get(&translated.into(), 0).expect("its entry");
        node.map::<u32, Owned>("owned").remove(&2).expect("half of the second");
        owned_addr().remove(&translated.into()).expect("half of the third");
        let filter = || output(&["ip", "maddr", "show", "dev", UPLINK]);
        assert!(filter().contains("33:33:ff:01:01:01"));

        let mut next = node.start().await;
        assert_eq!([entry(whole), entry(answered), entry(translated)], [Some(1), None, Some(3)]);
        let healed = owned_addr().get(&translated.into(), 0).expect("its entry");
        assert_eq!((healed.ifindex, healed.mac), (answer.ifindex, answer.mac));
        let owned = next.observe().await.expect("observe").owned;
        assert_eq!(owned, [(EgressId(1), whole), (EgressId(3), translated)].into());
        eventually("the group of the removed address is left", || !filter().contains("33:33:ff:01:01:01")).await;
        // No program answers for it, so the probe finds it free.
        next.apply(&Action::Own(EgressId(2), answered)).await.expect("own it again");
    });
}

/// Flows keep cached decisions until the decision number changes, so that changes last.
#[test]
fn a_start_repairs_claims_before_it_invalidates_cached_decisions() {
    on_node(|node| async move {
        drop(node.start().await);
        let before = node.config().decisions;
        // Enough incomplete claims that their removal takes a while.
        let mut halves = node.map::<Addr, OwnedAddr>("owned_addr");
        for id in 1..=2_000_u32 {
            let [.., high, low] = id.to_be_bytes();
            let address = Addr::v4([172, 19, high, low]);
            let half = Owned::new(id, address, 1, [2; 6], 1500).by_address(id);
            halves.insert(address, half, 0).expect("half a claim");
        }
        let (config, is_started) = (node.config_map(), Arc::new(AtomicBool::new(false)));
        let stop = Arc::clone(&is_started);
        let watch = std::thread::spawn(move || {
            let mut reads = 0_u32;
            while !stop.load(Ordering::Relaxed) {
                let decisions = config.get(&0, 0).expect("the config").decisions;
                assert!(decisions == before || halves.keys().next().is_none(), "decisions changed before the repair");
                reads += 1;
            }
            reads
        });
        drop(node.start().await);
        is_started.store(true, Ordering::Relaxed);
        println!("read {} times", watch.join().expect("the order always held"));
        assert_ne!(node.config().decisions, before);
    });
}

/// The programs look up only these addresses in the map.
#[test]
fn the_bloom_filter_has_the_owned_addresses() {
    on_node(|node| async move {
        let filter = || node.config().owned;
        let [first, second] = ["172.18.0.100", "fd00:172:18::1:101"].map(addr);
        let of =
            |addresses: &[IpAddr]| addresses.iter().fold(BloomFilter::NONE, |filter, at| filter.with(&Addr::from(*at)));
        let mut dataplane = node.start().await;
        assert_eq!(filter(), BloomFilter::NONE);
        dataplane.apply(&Action::Own(EgressId(1), first)).await.expect("own");
        dataplane.apply(&Action::Own(EgressId(2), second)).await.expect("own");
        assert_eq!(filter(), of(&[first, second]));
        drop(dataplane);
        let mut next = node.start().await;
        assert_eq!(filter(), of(&[first, second]), "as the maps say");
        next.apply(&Action::Disown(EgressId(1), first)).await.expect("disown");
        assert_eq!(filter(), of(&[second]));
    });
}

/// The old address is removed only when the new one is owned.
#[test]
fn a_refused_address_does_not_affect_the_old_one() {
    on_node(|node| async move {
        let mut dataplane = node.start().await;
        let [old, new] = ["172.18.0.100", "172.18.0.101"].map(addr);
        dataplane.apply(&Action::Own(EgressId(1), old)).await.expect("own");
        node.outside(|| ip("addr add 172.18.0.101/16 dev out0\n"));
        let refused = dataplane.apply(&Action::Own(EgressId(1), new)).await;
        assert!(matches!(refused, Err(DataplaneError::AddressInUse { .. })), "{refused:?}");
        assert_eq!(dataplane.observe().await.expect("observe").owned, [(EgressId(1), old)].into());
        assert!(node.map::<Addr, OwnedAddr>("owned_addr").get(&old.into(), 0).is_ok());

        node.outside(|| ip("addr del 172.18.0.101/16 dev out0\n"));
        dataplane.apply(&Action::Own(EgressId(1), new)).await.expect("free now");
        assert_eq!(dataplane.observe().await.expect("observe").owned, [(EgressId(1), new)].into());
        assert!(node.map::<Addr, OwnedAddr>("owned_addr").get(&old.into(), 0).is_err(), "one object, one address");
    });
}

/// An error is reported, and leaves as little state as possible.
#[test]
fn the_group_of_an_address_is_left_also_if_the_map_cannot_be_written() {
    on_node(|node| async move {
        let address = addr("fd00:172:18::1:100");
        let mut dataplane = node.start().await;
        dataplane.apply(&Action::Own(EgressId(1), address)).await.expect("own");
        let joined = || output(&["ip", "maddr", "show", "dev", UPLINK]).contains("33:33:ff:01:01:00");
        assert!(joined());
        if !freeze(&node, "config") {
            return skipped("bpftool is not installed");
        }
        let refused = dataplane.apply(&Action::Disown(EgressId(1), address)).await;
        assert!(matches!(refused, Err(DataplaneError::Kernel { what: "write map config", .. })), "{refused:?}");
        eventually("the group is left", || !joined()).await;
    });
}

/// A device without its program lets packets pass, so programs come first.
#[test]
fn programs_are_attached_again_also_if_maps_cannot_be_written() {
    on_node(|node| async move {
        let mut dataplane = node.start().await;
        dataplane.apply(&Action::Own(EgressId(1), addr("172.18.0.100"))).await.expect("own");
        for (map, device, again) in
            [("owned_addr", UPLINK, TestNode::make_uplink as fn(&TestNode)), ("config", MGMT, TestNode::make_mgmt)]
        {
            if !freeze(&node, map) {
                return skipped("bpftool is not installed");
            }
            ip(&format!("link del {device}\n"));
            again(&node);
            let hooks = Hook::ALL.into_iter().filter(|hook| place(*hook).0 == device);
            for hook in hooks {
                eventually("the program is back", || is_attached(hook)).await;
            }
        }
    });
}

/// Makes the kernel refuse every write to the map. False without bpftool.
fn freeze(node: &TestNode, map: &str) -> bool {
    let pin = node.pin("maps").join(map);
    let Ok(frozen) = Command::new("bpftool").args(["map", "freeze", "pinned"]).arg(&pin).status() else {
        return false;
    };
    assert!(frozen.success(), "freeze the map");
    true
}
