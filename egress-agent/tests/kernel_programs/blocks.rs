//! Port blocks: each pod has its own ports of an egress IP.

use std::collections::{BTreeMap, BTreeSet};

use egress_common::abi::{
    BlockHolder, BlockOwner, Direction, HeldBlocks, MOST_BLOCKS, PodEntry, PortBlock, Tuple, Verdict,
};
use egress_common::decide::snat::EGRESS_PORTS;

use crate::cast::{FamilyAddresses, addr};
use crate::frames::{ACK, Body, FrameSpec, SYN, packet};
use crate::races::{has_both_cpus, rounds, run_both};
use crate::skips::skipped;
use crate::stage::{FROM_POD, REDIRECT, Stage, both};

const SIZE: u16 = 64;

impl Stage {
    fn use_blocks(&mut self, cast: &FamilyAddresses) {
        self.configure(|config| config.port_block = SIZE);
        // Another pod of the same policy.
        self.put_pod(cast.known_pod, PodEntry::selected(cast.here, 0));
    }

    /// Ports of the pod's flows at its egress IP.
    fn ports_of(&self, cast: &FamilyAddresses, pod: &str) -> Vec<u16> {
        let mappings = self.mappings();
        let is_own = |key: &Tuple| key.direction() == Direction::Ingress && key.daddr == addr(cast.egress);
        let own = mappings.values().filter(|(key, entry)| is_own(key) && entry.other.saddr == addr(pod));
        own.map(|(key, _)| key.dport()).collect()
    }

    /// The pod's blocks: by their first ports, with their values, each sealed for its key.
    fn blocks_of(&self, cast: &FamilyAddresses, pod: &str) -> BTreeMap<u16, BlockOwner> {
        let all = self.blocks.iter().map(|entry| entry.expect("an entry"));
        let own = all.filter(|(block, owner)| block.address == addr(cast.egress) && owner.pod == addr(pod));
        own.map(|(block, owner)| {
            assert!(owner.is_of(&block), "{block:?}: {owner:?}");
            (block.first(), owner)
        })
        .collect()
    }

    /// First ports on the pod's list.
    fn listed(&self, cast: &FamilyAddresses, pod: &str) -> BTreeSet<u16> {
        let holder = BlockHolder { address: addr(cast.egress), pod: addr(pod) };
        let held = self.pod_blocks.get(&holder, 0).expect("a list");
        (0..MOST_BLOCKS).filter_map(|place| held.at(place)).collect()
    }

    fn is_in_blocks(&self, cast: &FamilyAddresses, pod: &str) -> bool {
        let blocks = self.blocks_of(cast, pod);
        let ports = self.ports_of(cast, pod);
        !ports.is_empty()
            && ports.iter().all(|port| blocks.range(..=port).next_back().is_some_and(|(first, _)| port - first < SIZE))
    }
}

fn flow(pod: &str, cast: &FamilyAddresses, port: u16, to: u16) -> FrameSpec {
    packet(pod, cast.world, port, to)
}

#[test]
fn a_pods_ports_are_of_its_own_block() {
    both(|stage, cast| {
        stage.use_blocks(cast);
        for port in 4000..4020 {
            for pod in [cast.pod, cast.known_pod] {
                let tcp = flow(pod, cast, port, 80).tcp(SYN);
                let query = flow(pod, cast, port, port).body(Body::EchoRequest);
                for sent in [flow(pod, cast, port, 80), tcp, query, flow(pod, cast, port, 81)] {
                    stage.run_frame(&FROM_POD, &sent.frame(), Verdict::SnatHere);
                }
            }
        }
        let (one, other) = (stage.blocks_of(cast, cast.pod), stage.blocks_of(cast, cast.known_pod));
        assert_eq!((one.len(), other.len()), (1, 1), "one block of each pod");
        let first = *one.keys().next().expect("a block");
        assert_ne!(Some(&first), other.keys().next());
        assert_eq!((first - EGRESS_PORTS.first) % SIZE, 0);
        let owner = one[&first];
        assert_eq!((owner.egress_id, owner.size, owner.is_open()), (cast.here, SIZE, true));
        assert!(owner.given_ns > 0);
        for pod in [cast.pod, cast.known_pod] {
            assert!(stage.is_in_blocks(cast, pod), "{:?}", stage.ports_of(cast, pod));
            assert_eq!(stage.listed(cast, pod), stage.blocks_of(cast, pod).into_keys().collect());
        }
        // A connection that began elsewhere.
        stage.run_frame(&FROM_POD, &flow(cast.pod, cast, 5000, 80).tcp(ACK).frame(), Verdict::CutAnswered);
    });
}

#[test]
fn a_pod_uses_up_its_own_ports_only() {
    both(|stage, cast| {
        stage.use_blocks(cast);
        let most = u16::try_from(MOST_BLOCKS).expect("few") * SIZE;
        for port in 0..most {
            stage.run_frame(&FROM_POD, &flow(cast.pod, cast, 10_000 + port, 80).frame(), Verdict::SnatHere);
        }
        let ports = stage.ports_of(cast, cast.pod);
        assert_eq!(ports.iter().collect::<BTreeSet<_>>().len(), usize::from(most), "every port of four blocks");
        assert_eq!(stage.blocks_of(cast, cast.pod).len(), MOST_BLOCKS);
        assert!(stage.is_in_blocks(cast, cast.pod));
        stage.drops_all(&FROM_POD, [flow(cast.pod, cast, 20_000, 80)], Verdict::PortsExhausted);
        stage.run_frame(&FROM_POD, &flow(cast.pod, cast, 20_000, 81).frame(), Verdict::SnatHere);
        stage.run_frame(&FROM_POD, &flow(cast.known_pod, cast, 20_000, 80).frame(), Verdict::SnatHere);
        assert!(stage.is_in_blocks(cast, cast.known_pod));
    });
}

/// What the agent has closed, and what it has given to another pod, is no block of the pod, whatever its list says.
#[test]
fn closed_and_foreign_blocks_give_no_ports() {
    both(|stage, cast| {
        stage.use_blocks(cast);
        stage.run_frame(&FROM_POD, &flow(cast.pod, cast, 4000, 80).frame(), Verdict::SnatHere);
        let (first, owner) = stage.blocks_of(cast, cast.pod).pop_first().expect("a block");
        let block = PortBlock::new(addr(cast.egress), first);
        stage.blocks.insert(block, owner.closed(&block), 0).expect("close it");
        stage.run_frame(&FROM_POD, &flow(cast.pod, cast, 4001, 80).frame(), Verdict::SnatHere);
        assert_eq!(stage.blocks_of(cast, cast.pod).len(), 2);
        assert_eq!(stage.listed(cast, cast.pod).len(), 1, "the closed one is off the list");
        // One that is open, and another pod's.
        let foreign = *stage.listed(cast, cast.pod).first().expect("the second block");
        let holder = BlockHolder { address: block.address, pod: addr(cast.known_pod) };
        stage.pod_blocks.insert(holder, HeldBlocks::default().before(foreign), 0).expect("a wrong list");
        stage.run_frame(&FROM_POD, &flow(cast.known_pod, cast, 4001, 80).frame(), Verdict::SnatHere);
        assert!(stage.is_in_blocks(cast, cast.known_pod));
        assert_eq!(stage.listed(cast, cast.known_pod), stage.blocks_of(cast, cast.known_pod).into_keys().collect());
    });
}

/// Two CPUs with new flows of one pod at once: it has no more open blocks than it may have, and its list names them.
#[test]
fn both_cpus_give_a_pod_the_same_blocks() {
    both(|stage, cast| {
        if !has_both_cpus() {
            return skipped("needs two CPUs");
        }
        stage.use_blocks(cast);
        // Each CPU's own flows, and so many to each destination that the pod needs all its blocks.
        let sides = run_both(stage, &FROM_POD, |cpu, round| {
            let port = 1_024 + round * 2 + u16::try_from(cpu).expect("a CPU");
            flow(cast.pod, cast, port, 80 + round / 120)
        });
        assert!(sides.iter().flatten().all(|ran| ran.action == REDIRECT));
        let all = stage.blocks_of(cast, cast.pod);
        let open: BTreeSet<u16> = all.iter().filter(|(_, owner)| owner.is_open()).map(|(first, _)| *first).collect();
        assert_eq!(stage.listed(cast, cast.pod), open, "each open block is on the list");
        assert!((1..=MOST_BLOCKS).contains(&open.len()), "{open:?}");
        assert!(all.len() <= 2 * MOST_BLOCKS, "each race for a block closes one: {all:?}");
        assert!(stage.is_in_blocks(cast, cast.pod));
        assert_eq!(stage.ports_of(cast, cast.pod).len(), 2 * usize::from(rounds()));
    });
}
