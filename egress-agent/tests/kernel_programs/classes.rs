//! Pods whose policy depends on the destination: the map `classes`.

use egress_common::abi::{ClassPolicy, Family, PodEntry, Verdict};

use crate::cast::{FamilyAddresses, addr};
use crate::frames::{ACK, FrameSpec, SYN, packet};
use crate::stage::{FROM_POD, Stage, both};

const CLASS: u32 = 7;

const fn all(cast: &FamilyAddresses) -> &'static str {
    match cast.family {
        Family::V4 => "0.0.0.0",
        Family::V6 => "::",
    }
}

/// The world's host has the policy whose address is here, its network the one of the other node, and nothing else any.
fn classed(stage: &mut Stage, cast: &FamilyAddresses) {
    stage.put_class(CLASS, all(cast), Some(0), ClassPolicy::NONE);
    let network = if cast.family == Family::V4 { 24 } else { 48 };
    stage.put_class(CLASS, cast.world, Some(network), ClassPolicy::new(cast.away));
    stage.put_class(CLASS, cast.world, None, ClassPolicy::new(cast.here));
    // Another class.
    stage.put_class(CLASS + 1, cast.nowhere, None, ClassPolicy::new(cast.here));
    stage.put_pod(cast.pod, PodEntry::by_destination(CLASS, 0));
}

const fn neighbour(cast: &FamilyAddresses) -> &'static str {
    match cast.family {
        Family::V4 => "198.51.100.20",
        Family::V6 => "2001:db8::20",
    }
}

fn to(cast: &FamilyAddresses, destination: &str, port: u16) -> FrameSpec {
    packet(cast.pod, destination, port, 80)
}

#[test]
fn class_policies_depend_on_the_destination() {
    both(|stage, cast| {
        classed(stage, cast);
        // Also with a kept decision, and by the flow cache.
        stage.configure(|config| config.decisions = 1);
        for _ in 0..4 {
            stage.run_frame(&FROM_POD, &to(cast, cast.world, 4000).frame(), Verdict::SnatHere);
            stage.run_frame(&FROM_POD, &to(cast, neighbour(cast), 4000).frame(), Verdict::ToGateway);
            stage.passes(&FROM_POD, &to(cast, cast.nowhere, 4000), Verdict::NotSelected);
            stage.passes(&FROM_POD, &to(cast, cast.other_node, 4000), Verdict::NotSelected);
            stage.passes(&FROM_POD, &to(cast, cast.egress, 4000), Verdict::NotSelected);
            stage.passes(&FROM_POD, &to(cast, cast.service, 4000), Verdict::ToCluster);
        }
        let flows = stage.flows.keys().filter(|key| key.as_ref().expect("a key").saddr == addr(cast.pod));
        assert_eq!(flows.count(), 2);
    });
}

#[test]
fn class_without_entries_drops() {
    both(|stage, cast| {
        stage.put_pod(cast.pod, PodEntry::by_destination(CLASS, 0));
        for destination in [cast.world, neighbour(cast), cast.nowhere] {
            stage.drops(&FROM_POD, &to(cast, destination, 4000), Verdict::NoPolicy);
        }
    });
}

/// A pod that gets another class keeps no connection whose policy is another one now.
#[test]
fn class_changes_reset_connections() {
    both(|stage, cast| {
        classed(stage, cast);
        stage.configure(|config| config.decisions = 1);
        let sent = |flags| to(cast, cast.world, 4000).tcp(flags);
        for flags in [SYN, ACK, ACK, ACK] {
            stage.run_frame(&FROM_POD, &sent(flags).frame(), Verdict::SnatHere);
        }
        for (class, policy) in [(CLASS + 2, ClassPolicy::new(cast.away)), (CLASS + 3, ClassPolicy::NONE)] {
            stage.put_class(class, all(cast), Some(0), policy);
            stage.put_pod(cast.pod, PodEntry::by_destination(class, 0));
            stage.configure(|config| config.decisions = class);
            stage.run_frame(&FROM_POD, &sent(ACK).frame(), Verdict::CutAnswered);
        }
        stage.passes(&FROM_POD, &sent(SYN), Verdict::NotSelected);
        stage.passes(&FROM_POD, &sent(ACK), Verdict::NotSelected);
    });
}
