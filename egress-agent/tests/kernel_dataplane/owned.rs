//! What this node owns: two maps, the programs' sieve, and what an agent that was killed, or that fails, leaves of them.

use std::net::IpAddr;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use egress_common::abi::{Addr, BloomFilter, Owned, OwnedAddr};
use egress_core::model::state::{Action, EgressId};
use egress_core::plan::executor::{DataplaneError, Executor};
use egress_datapath::names::Hook;

use crate::actions::addr;
use crate::node::{MGMT, Node, UPLINK, eventually, ip, is_attached, on_node, output, place};
use crate::skips::skipped;

/// An agent may be killed between the two writes of a claim, or of its end.
#[test]
fn half_a_claim_is_healed_at_start() {
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
        eventually("the group of what is gone is left", || !filter().contains("33:33:ff:01:01:01")).await;
        // Nobody answers for it any more, so the probe finds it free.
        next.apply(&Action::Own(EgressId(2), answered)).await.expect("own it again");
    });
}

/// Flows keep what an entry said until the decisions are others, so these come last.
#[test]
fn what_a_start_heals_is_healed_before_flows_are_asked_anew() {
    on_node(|node| async move {
        drop(node.start().await);
        let before = node.config().decisions;
        // So many halves of claims that removing them takes a while.
        let mut halves = node.map::<Addr, OwnedAddr>("owned_addr");
        for id in 1..=2_000_u32 {
            let [.., high, low] = id.to_be_bytes();
            let half = OwnedAddr { egress_id: id, ifindex: 1, mac: [2; 6], reserved: [0; 2] };
            halves.insert(Addr::v4([172, 19, high, low]), half, 0).expect("half a claim");
        }
        let (config, is_started) = (node.config_map(), Arc::new(AtomicBool::new(false)));
        let stop = Arc::clone(&is_started);
        let watch = std::thread::spawn(move || {
            let mut looks = 0_u32;
            while !stop.load(Ordering::Relaxed) {
                let decisions = config.get(&0, 0).expect("the config").decisions;
                assert!(decisions == before || halves.keys().next().is_none(), "decided with a half that is there");
                looks += 1;
            }
            looks
        });
        drop(node.start().await);
        is_started.store(true, Ordering::Relaxed);
        println!("looked {} times", watch.join().expect("never seen otherwise"));
        assert_ne!(node.config().decisions, before);
    });
}

/// The programs look for no other addresses in the map.
#[test]
fn what_is_owned_is_looked_for() {
    on_node(|node| async move {
        let sieve = || node.config().owned;
        let [first, second] = ["172.18.0.100", "fd00:172:18::1:101"].map(addr);
        let of =
            |addresses: &[IpAddr]| addresses.iter().fold(BloomFilter::NONE, |sieve, at| sieve.with(&Addr::from(*at)));
        let mut dataplane = node.start().await;
        assert_eq!(sieve(), BloomFilter::NONE);
        dataplane.apply(&Action::Own(EgressId(1), first)).await.expect("own");
        dataplane.apply(&Action::Own(EgressId(2), second)).await.expect("own");
        assert_eq!(sieve(), of(&[first, second]));
        drop(dataplane);
        let mut next = node.start().await;
        assert_eq!(sieve(), of(&[first, second]), "as the maps say");
        next.apply(&Action::Disown(EgressId(1), first)).await.expect("disown");
        assert_eq!(sieve(), of(&[second]));
    });
}

/// The old address goes when the new one is there, and not before.
#[test]
fn a_refused_address_costs_no_other() {
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

/// What cannot be finished is reported, and leaves no more behind than it must.
#[test]
fn the_group_of_an_address_is_left_also_where_the_programs_cannot_be_told() {
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

/// Without its program a device is open, whatever else the kernel refuses.
#[test]
fn programs_are_put_back_also_where_maps_cannot_be_written() {
    on_node(|node| async move {
        let mut dataplane = node.start().await;
        dataplane.apply(&Action::Own(EgressId(1), addr("172.18.0.100"))).await.expect("own");
        for (map, device, again) in
            [("owned_addr", UPLINK, Node::make_uplink as fn(&Node)), ("config", MGMT, Node::make_mgmt)]
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

/// From now on the kernel refuses every write of ours to the map. False where there is nobody to ask it.
fn freeze(node: &Node, map: &str) -> bool {
    let pin = node.pin("maps").join(map);
    let Ok(frozen) = Command::new("bpftool").args(["map", "freeze", "pinned"]).arg(&pin).status() else {
        return false;
    };
    assert!(frozen.success(), "freeze the map");
    true
}
