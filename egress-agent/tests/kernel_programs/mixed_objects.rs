//! Objects with addresses in several networks: the map `destinations`.

use egress_common::abi::{Candidates, PolicyEntry, PolicyEntryKey, PolicySlot, Verdict, WhenEmpty};

use crate::cast::{FamilyAddresses, V4, addr};
use crate::frames::{FrameSpec, packet};
use crate::stage::{FROM_POD, Stage, both};

const SET: u32 = 7;

impl Stage {
    /// A prefix of this length, or of the whole address, that contains it.
    pub(crate) fn put_candidates(&mut self, set: u32, to: &str, length: Option<u32>, candidates: Candidates) {
        self.destinations.insert(&Self::destination_key(set, to, length), candidates, 0).expect("a destination");
    }

    /// The pod's policy has an address here, one on the other node, and one that no node serves.
    fn mix(&mut self, cast: &FamilyAddresses) {
        let slots =
            [PolicySlot::here(addr(cast.egress)), PolicySlot::remote(addr(cast.away_egress), addr(V4.other_node))];
        let policy = PolicyEntry::with_slots(WhenEmpty::Drop, &slots).expect("few slots");
        let policy = policy.with_pending(&[addr(cast.router)]).expect("few slots").with_destinations(SET);
        self.policy.insert(PolicyEntryKey::new(cast.here, cast.family), policy, 0).expect("a policy");
    }
}

fn to(cast: &FamilyAddresses, destination: &str, port: u16) -> FrameSpec {
    packet(cast.pod, destination, port, 80)
}

fn only(slot: u8) -> Candidates {
    Candidates::new(&[slot], &[]).expect("one")
}

#[test]
fn mixed_flows_get_an_address_with_a_route() {
    both(|stage, cast| {
        stage.mix(cast);
        stage.drops(&FROM_POD, &to(cast, cast.world, 4000), Verdict::NoRoute);
        // Another set's.
        stage.put_candidates(SET + 1, cast.world, None, only(0));
        stage.drops(&FROM_POD, &to(cast, cast.world, 4000), Verdict::NoRoute);
        stage.put_candidates(SET, cast.world, Some(0), only(0));
        stage.put_candidates(SET, cast.nowhere, None, only(1));
        for port in 4001..4033 {
            stage.run_frame(&FROM_POD, &to(cast, cast.world, port).frame(), Verdict::SnatHere);
            stage.run_frame(&FROM_POD, &to(cast, cast.nowhere, port).frame(), Verdict::ToGateway);
        }
        stage.put_candidates(SET, cast.world, None, Candidates::new(&[0, 1], &[2]).expect("few"));
        let before = [Verdict::SnatHere, Verdict::ToGateway].map(|verdict| stage.packets_of(verdict));
        for port in 5000..5032 {
            crate::stage::test_run(stage.program(FROM_POD.program), &FROM_POD, &to(cast, cast.world, port).frame());
        }
        let [here, away] = [Verdict::SnatHere, Verdict::ToGateway].map(|verdict| stage.packets_of(verdict));
        assert!(here > before[0] && away > before[1] && here + away == before[0] + before[1] + 32, "equal ones share");
    });
}

/// Its network has no other address, and the other addresses lead elsewhere.
#[test]
fn mixed_flows_wait_for_an_address_that_moves() {
    both(|stage, cast| {
        stage.mix(cast);
        stage.put_candidates(SET, cast.world, Some(0), only(0));
        stage.put_candidates(SET, cast.world, None, Candidates::new(&[], &[2]).expect("one"));
        stage.drops(&FROM_POD, &to(cast, cast.world, 4000), Verdict::NoGateway);
        assert_eq!(stage.flows.iter().count(), 0);
        // Its address is being exchanged.
        stage.put_candidates(SET, cast.world, None, Candidates::new(&[], &[]).expect("none"));
        stage.drops(&FROM_POD, &to(cast, cast.world, 4000), Verdict::NoGateway);
        // A slot that the entry does not have.
        stage.put_candidates(SET, cast.world, None, only(2));
        stage.drops(&FROM_POD, &to(cast, cast.world, 4000), Verdict::NoGateway);
        stage.put_candidates(SET, cast.world, None, only(200));
        stage.drops(&FROM_POD, &to(cast, cast.world, 4000), Verdict::NoGateway);
    });
}

#[test]
fn mixed_flows_keep_their_address_when_routes_change() {
    both(|stage, cast| {
        stage.mix(cast);
        stage.put_candidates(SET, cast.world, None, only(0));
        stage.run_frame(&FROM_POD, &to(cast, cast.world, 4000).frame(), Verdict::SnatHere);
        stage.put_candidates(SET, cast.world, None, only(1));
        for _ in 0..3 {
            stage.run_frame(&FROM_POD, &to(cast, cast.world, 4000).frame(), Verdict::SnatHere);
        }
        stage.run_frame(&FROM_POD, &to(cast, cast.world, 4001).frame(), Verdict::ToGateway);
    });
}
