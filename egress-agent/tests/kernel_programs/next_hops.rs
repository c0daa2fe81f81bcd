//! Cached next hops, and what invalidates them.

use egress_common::abi::{PolicyEntry, PolicyEntryKey, PolicySlot, Verdict, WhenEmpty};

use crate::cast::addr;
use crate::frames::packet;
use crate::stage::{FROM_POD, REDIRECT, ROUTER_MAC, Ran, UPLINK_MAC, both};

/// A next hop is cached until the agent raises the route generation. The kernel writes the link addresses of the packet
/// that looks it up.
#[test]
fn a_cached_next_hop_ends_with_a_route_change() {
    both(|stage, cast| {
        stage.configure(|_| ());
        let sent = packet(cast.pod, cast.world, 4000, 80);
        let looked_up = sent.snat(cast.egress, 4000).hop();
        let kept = looked_up.clone().macs(ROUTER_MAC, UPLINK_MAC).frame();
        // Cached for a second, which a busy machine may need between two packets.
        let is_kept = (0..20).any(|_| stage.run_frame(&FROM_POD, &sent.frame(), Verdict::SnatHere).frame == kept);
        assert!(is_kept, "never kept");
        stage.configure(|config| config.route_generation = 2);
        let ran = stage.run_frame(&FROM_POD, &sent.frame(), Verdict::SnatHere);
        assert_eq!(ran, Ran::plain(REDIRECT, looked_up.frame(), 0), "looked up again");
    });
}

/// A policy that is newer than the ownership: its address is not owned here yet, and the owned one was removed from the
/// policy.
#[test]
fn an_address_that_is_not_owned_is_not_used() {
    both(|stage, cast| {
        let other =
            PolicyEntry::with_slots(WhenEmpty::Drop, &[PolicySlot::here(addr(cast.away_egress))]).expect("few slots");
        stage.policy.insert(PolicyEntryKey::new(cast.here, cast.family), other, 0).expect("a policy");
        let sent = packet(cast.pod, cast.world, 4001, 80);
        stage.drops(&FROM_POD, &sent, Verdict::NotGateway);
        stage.own(cast.here, cast.away_egress);
        let shown = sent.snat(cast.away_egress, 4001).hop();
        stage.redirects(&FROM_POD, &sent, Verdict::SnatHere, &shown);
    });
}
