//! Seals reject a copy with words of two values, of one key or two, in every order of a concurrent write.

use std::vec::Vec;

use crate::abi::{Addr, Direction, Flow, NatEntry, NextHop, Origin, Owned, PodEntry, PolicySlot, Tuple};
use crate::random::Random;

const POD: Addr = Addr::v4([10, 244, 1, 10]);
const OTHER_POD: Addr = Addr::v4([10, 244, 1, 11]);
const WORLD: Addr = Addr::v4([198, 51, 100, 10]);
const EGRESS: Addr = Addr::v4([172, 18, 0, 100]);
const NODE: Addr = Addr::v4([172, 18, 0, 3]);

fn forward(pod: Addr, port: u16) -> Tuple {
    Tuple::new(Direction::Egress, pod, WORLD, port, 80, 6)
}

fn nat_entry(key: &Tuple, egress: Addr, port: u16, origin: Origin, node: Addr, id: u32) -> NatEntry {
    let other = Tuple::new(Direction::Ingress, WORLD, egress, 80, port, 6);
    NatEntry::new(other, origin, node, id, 1).sealed(key)
}

/// NAT entries that may reuse one element's memory and differ in single words.
fn nat_entries() -> Vec<(Tuple, NatEntry)> {
    let mut all = Vec::new();
    for (pod, port) in [(POD, 4000), (POD, 4001), (OTHER_POD, 4000)] {
        let key = forward(pod, port);
        for (egress, public, origin, node, id) in [
            (EGRESS, 4000, Origin::Here, Addr::UNSPECIFIED, 7),
            (EGRESS, 4001, Origin::Here, Addr::UNSPECIFIED, 7),
            (NODE, 4000, Origin::Remote, NODE, 8),
            (EGRESS, 4000, Origin::Remote, NODE, 7),
        ] {
            all.push((key, nat_entry(&key, egress, public, origin, node, id)));
        }
    }
    all
}

/// Reads `words` of one value during a write of another one, each in its own order, word by word. Passes the copy to
/// `take`.
fn race<const N: usize>(numbers: &mut Random, old: [u32; N], new: [u32; N], mut take: impl FnMut([u32; N])) {
    let (mut memory, mut copy) = (old, [0; N]);
    let (mut reads, mut writes) = (numbers.shuffled(0..N), numbers.shuffled(0..N));
    if numbers.below(2) == 0 {
        // As memcpy mostly does it.
        (reads, writes) = ((0..N).collect(), (0..N).rev().collect());
    }
    while let Some(read) = reads.last().copied() {
        if numbers.below(2) == 0
            && let Some(write) = writes.pop()
        {
            memory[write] = new[write];
        } else {
            copy[read] = memory[read];
            reads.pop();
        }
    }
    take(copy);
}

/// The words of a NAT entry that are used, and the NAT entry made of such words.
fn words(of: &NatEntry) -> [u32; 17] {
    let [ports, rest] = of.other.last_words();
    let (s, d, n) = (of.other.saddr.words(), of.other.daddr.words(), of.source_node.words());
    let origin = of.origin().map_or(0, |origin| origin as u32);
    [of.seal, s[0], s[1], s[2], s[3], d[0], d[1], d[2], d[3], ports, rest, of.egress_id, origin, n[0], n[1], n[2], n[3]]
}

fn made_of(w: [u32; 17]) -> Option<NatEntry> {
    let [sport, sport_low, dport, dport_low] = w[9].to_ne_bytes();
    let [protocol, direction, ..] = w[10].to_ne_bytes();
    let direction = if direction == Direction::Egress as u8 { Direction::Egress } else { Direction::Ingress };
    let (saddr, daddr) = ([w[1], w[2], w[3], w[4]], [w[5], w[6], w[7], w[8]]);
    let ports = (u16::from_be_bytes([sport, sport_low]), u16::from_be_bytes([dport, dport_low]));
    let (saddr, daddr) = (Addr::from_words(saddr), Addr::from_words(daddr));
    let other = Tuple::new(direction, saddr, daddr, ports.0, ports.1, protocol);
    let origin = [Origin::Here, Origin::Remote, Origin::Stack].into_iter().find(|origin| *origin as u32 == w[12])?;
    let node = Addr::from_words([w[13], w[14], w[15], w[16]]);
    let mut copy = NatEntry::new(other, origin, node, w[11], 1);
    copy.seal = w[0];
    Some(copy)
}

#[test]
fn a_nat_entry_read_during_memory_reuse_is_valid_or_ignored() {
    let (all, mut numbers) = (nat_entries(), Random::new(1));
    let (mut whole, mut refused) = (0, 0);
    for _ in 0..200 {
        for (key, old) in &all {
            for (_, new) in &all {
                race(&mut numbers, words(old), words(new), |words| match made_of(words) {
                    Some(copy) if copy.is_of(key) => {
                        whole += 1;
                        let own = all.iter().any(|(of, nat_entry)| of == key && *nat_entry == copy);
                        assert!(own, "{key:?} was never {copy:?}");
                    }
                    _ => refused += 1,
                });
            }
        }
    }
    // Both outcomes occurred often.
    assert!(whole > 1000 && refused > 1000, "{whole} {refused}");
}

#[test]
fn every_word_that_is_used_is_sealed() {
    let key = forward(POD, 4000);
    let sealed = nat_entry(&key, EGRESS, 4000, Origin::Here, NODE, 7);
    for bit in 0..17 * 32 {
        let mut changed = words(&sealed);
        changed[bit / 32] ^= 1 << (bit % 32);
        assert!(made_of(changed).is_none_or(|copy| copy == sealed || !copy.is_of(&key)), "bit {bit}");
    }
    for other in [forward(POD, 4001), forward(OTHER_POD, 4000), key.reversed()] {
        assert!(!sealed.is_of(&other));
    }
    // Fields that change during the life of a NAT entry are not sealed.
    let mut used = sealed;
    (used.last_seen_ns, used.state) = (9, 3);
    assert!(used.is_of(&key));
}

#[test]
fn a_flow_is_sealed_to_its_key() {
    let key = forward(POD, 4000);
    let flow = Flow::new(EGRESS, 7, 0, 0, 1).sealed(&key);
    assert!(flow.is_of(&key) && !flow.is_of(&forward(POD, 4001)));
    assert!(!Flow { address: NODE, ..flow }.is_of(&key) && !Flow { egress_id: 8, ..flow }.is_of(&key));
    assert_eq!(flow.settled_under(0), None, "nothing is settled yet");
    let mut settled = flow;
    settled.settle(flow.seal, &PolicySlot::here(EGRESS), 5);
    assert_eq!(settled.settled_under(5), Some(&PolicySlot::here(EGRESS)));
    assert_eq!((settled.settled_under(6), settled.sealed(&forward(POD, 4001)).settled_under(5)), (None, None));
    assert!(settled.is_of(&key));
    // Of two CPUs that write at once: the number of the one, the slot of the other, or half a slot.
    let there = PolicySlot::remote(EGRESS, NODE);
    for mixed in [
        Flow { decided: 6, ..settled },
        Flow { settled: there, ..settled },
        Flow { settled: PolicySlot::here(NODE), ..settled },
        Flow { settled: PolicySlot::remote(NODE, NODE), ..settled },
    ] {
        assert_eq!(mixed.settled_under(mixed.decided), None);
    }
}

#[test]
fn a_next_hop_is_sealed_to_its_nat_entry() {
    let mut hop = NextHop { ifindex: 11, generation: 1, valid_until_ns: 1 << 40, mtu: 1500, ..NextHop::NONE };
    (hop.dmac, hop.smac) = ([2, 0, 0, 0, 1, 1], [2, 0, 0, 0, 1, 2]);
    hop.seal(77);
    assert!(hop.is_of(77) && !hop.is_of(78));
    for mixed in [
        NextHop { ifindex: 12, ..hop },
        NextHop { generation: 2, ..hop },
        NextHop { valid_until_ns: 1 << 41, ..hop },
        NextHop { mtu: 0, ..hop },
        NextHop { dmac: [2, 0, 0, 0, 1, 9], ..hop },
        NextHop { dmac: [3, 0, 0, 0, 1, 1], ..hop },
        NextHop { smac: [2, 0, 0, 0, 1, 9], ..hop },
        NextHop { smac: [3, 0, 0, 0, 1, 2], ..hop },
    ] {
        assert!(!mixed.is_of(77), "{mixed:?}");
    }
}

#[test]
fn an_owned_entry_is_sealed_to_its_egress_id() {
    let mac = [2, 0, 0, 0, 1, 2];
    let owned = Owned::new(7, EGRESS, 11, mac, 1500);
    assert!(owned.is_of(7) && !owned.is_of(8));
    for mixed in [
        Owned { address: NODE, ..owned },
        Owned { ifindex: 12, ..owned },
        Owned { mtu: 1400, ..owned },
        Owned { mac: [2, 0, 0, 0, 1, 3], ..owned },
        Owned { mac: [3, 0, 0, 0, 1, 2], ..owned },
        Owned { flags: 1, ..owned },
    ] {
        assert!(!mixed.is_of(7), "{mixed:?}");
    }
    let shared = owned.shared(7);
    assert!(shared.is_of(7) && !shared.is_of(8));
    assert!(!Owned { flags: 0, ..shared }.is_of(7));
}

#[test]
fn a_pod_entry_is_sealed_to_its_address() {
    let entry = PodEntry::selected(7, 1).sealed(&POD);
    assert!(entry.is_of(&POD) && !entry.is_of(&OTHER_POD));
    let deselected = PodEntry::known().with_cut_until(1 << 40).sealed(&POD);
    assert!(deselected.is_of(&POD));
    let with_seal = |mut mixed: PodEntry, seal| {
        mixed.seal = seal;
        mixed
    };
    for mixed in [
        with_seal(PodEntry::selected(8, 1), entry.seal),
        with_seal(PodEntry::known(), entry.seal),
        deselected.with_cut_until(0),
        deselected.with_cut_until(1 << 40 | 1),
        with_seal(entry, deselected.seal),
    ] {
        assert!(!mixed.is_of(&POD), "{mixed:?}");
    }
    // For display and the agent only.
    assert!(with_seal(PodEntry::selected(7, 2).with_owner(9), entry.seal).is_of(&POD));
}
