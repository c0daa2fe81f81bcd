//! The egress IP of a flow: chosen once by hash, then kept.
//!
//! A flow keeps its address, not its node. It keeps it when other addresses are added or removed, and follows it to
//! another node. While no node serves the address, a running TCP flow waits; after its removal from the policy, a
//! running TCP flow ends and its pod gets a reset. Any other flow can begin again with any packet, and gets another
//! address.
//!
//! Where the addresses lie in several networks, a new flow gets one whose interface has the most specific route to its
//! destination. A later change of routes leaves it its address.
//!
//! The policy is read each time: a reset leaves no mark in a flow, and an address that returns serves its flows again.

use super::{ClaimOutcome, QuotaKind, Tables, phase};
use crate::abi::{
    Addr, Direction, Flow, MAX_SLOTS, PolicyEntry, PolicyEntryKey, PolicySlot, Tuple, Verdict, WhenEmpty,
};
use crate::wire::{Headers, L4, Quote, tcp};

const SLOT_MASK: u32 = MAX_SLOTS as u32 - 1;
const _: () = assert!(MAX_SLOTS.is_power_of_two());

/// The slot of the packet's flow, or the verdict without one. An ICMP error has the slot of the quoted flow, and begins
/// none.
#[inline(always)]
pub fn of_flow<'t, T: Tables>(
    headers: &Headers,
    quote: &Quote,
    tables: &'t T,
    egress_id: u32,
) -> Result<&'t PolicySlot, Verdict> {
    let policy = tables.policy(&PolicyEntryKey::new(egress_id, headers.family)).ok_or(Verdict::NoPolicy)?;
    if policy.count() == 0 {
        return Err(without_address(headers, tables, egress_id, policy));
    }
    if headers.l4 == L4::IcmpError {
        return of_error(headers, quote, tables, egress_id, policy);
    }
    translatable(headers)?;
    let known = tables.flow_seen(&headers.tuple, headers.of_pod());
    if let Some(flow) = known {
        match kept(&headers.tuple, tables, egress_id, policy, flow) {
            Ok(slot) => return Ok(slot),
            Err(verdict) if is_mid_stream(headers) => return Err(verdict),
            Err(_) => {}
        }
    }
    begin(headers, tables, egress_id, policy, known.is_some())
}

/// The verdict of a packet while no address is served. A running connection has an address, and must not get another.
#[inline(always)]
fn without_address<T: Tables>(headers: &Headers, tables: &T, egress_id: u32, policy: &PolicyEntry) -> Verdict {
    let otherwise = match policy.when_empty() {
        WhenEmpty::Drop => Verdict::NoGateway,
        WhenEmpty::NodeAddress => Verdict::NodeAddress,
        WhenEmpty::NotListed => Verdict::FamilyNotListed,
    };
    if !is_mid_stream(headers) {
        return otherwise;
    }
    let Some(flow) = tables.flow_peek(&headers.tuple) else { return otherwise };
    let waits = otherwise == Verdict::NoGateway && flow.egress_id == egress_id;
    if waits && place_of(policy, &flow.address).is_some() { Verdict::NoGateway } else { Verdict::AddressGone }
}

/// A TCP packet that does not begin a connection.
#[inline(always)]
pub fn is_mid_stream(headers: &Headers) -> bool {
    headers.l4 == L4::Tcp && headers.tcp_flags & tcp::SYN == 0
}

/// Whether this packet can be translated; an ICMP error only by the quoted packet.
#[inline(always)]
pub fn translatable(headers: &Headers) -> Result<(), Verdict> {
    if headers.source_routed {
        // A source-routed packet would continue to other addresses, for which nothing was decided.
        return Err(Verdict::SourceRouted);
    }
    match headers.l4 {
        L4::Tcp | L4::Udp | L4::Sctp | L4::EchoRequest | L4::EchoReply | L4::Other => Ok(()),
        L4::IcmpError => Err(Verdict::IcmpUnmatched),
        L4::Short => Err(Verdict::Malformed),
        L4::Later => Err(Verdict::FragmentUnknown),
        L4::Unread => Err(Verdict::ChainTooLong),
        L4::Refused => Err(Verdict::UnsupportedProtocol),
    }
}

/// The quoted packet of an ICMP error of a pod, if the pod received it and the error goes to its sender.
#[inline(always)]
pub fn quoted_by_pod<'q>(headers: &Headers, quote: &'q Quote) -> Option<&'q Quote> {
    (quote.tuple().daddr == headers.tuple.saddr && quote.tuple().saddr == headers.tuple.daddr).then_some(quote)
}

#[inline(always)]
fn of_error<'t, T: Tables>(
    headers: &Headers,
    quote: &Quote,
    tables: &T,
    egress_id: u32,
    policy: &'t PolicyEntry,
) -> Result<&'t PolicySlot, Verdict> {
    if headers.source_routed {
        return Err(Verdict::SourceRouted);
    }
    let tuple = quoted_by_pod(headers, quote).ok_or(Verdict::IcmpUnmatched)?.flow();
    let flow = tables.flow_peek(tuple).ok_or(Verdict::IcmpUnmatched)?;
    kept(tuple, tables, egress_id, policy, flow)
}

/// The slot of the flow's address, its last index first; or whether the address was removed or has no gateway now.
#[inline(always)]
fn kept<'t, T: Tables>(
    tuple: &Tuple,
    tables: &T,
    egress_id: u32,
    policy: &'t PolicyEntry,
    flow: &Flow,
) -> Result<&'t PolicySlot, Verdict> {
    if flow.egress_id != egress_id {
        return Err(Verdict::AddressGone);
    }
    if let Some(slot) = slot_at(policy, flow.slot, &flow.address) {
        return Ok(slot);
    }
    let moved = place_of(policy, &flow.address).ok_or(Verdict::AddressGone)?;
    if moved >= policy.count() {
        return Err(Verdict::NoGateway);
    }
    tables.set_flow_slot(tuple, moved);
    // Read back from the map, so that the verifier follows one unknown index instead of every possible one.
    let flow = tables.flow_peek(tuple).ok_or(Verdict::ClaimLost)?;
    slot_at(policy, flow.slot, &flow.address).ok_or(Verdict::ClaimLost)
}

/// The slot at this index, if it has this address.
#[inline(always)]
fn slot_at<'t>(policy: &'t PolicyEntry, place: u32, address: &Addr) -> Option<&'t PolicySlot> {
    let slot = &policy.slots[(place & SLOT_MASK) as usize];
    (place < policy.count() && slot.address == *address).then_some(slot)
}

/// The index of the address among the slots; pending ones come last.
#[inline(never)]
fn place_of(policy: &PolicyEntry, address: &Addr) -> Option<u32> {
    let listed = policy.count() + policy.pending();
    let mut place = 0;
    while place < MAX_SLOTS as u32 && place < listed {
        if policy.slots[(place & SLOT_MASK) as usize].address == *address {
            return Some(place);
        }
        place += 1;
    }
    None
}

#[inline(always)]
fn begin<'t, T: Tables>(
    headers: &Headers,
    tables: &T,
    egress_id: u32,
    policy: &'t PolicyEntry,
    overwrite: bool,
) -> Result<&'t PolicySlot, Verdict> {
    if !overwrite && !tables.has_quota(&headers.tuple.saddr, egress_id, QuotaKind::Flows) {
        return Err(Verdict::QuotaExceeded);
    }
    let index = match choose(&headers.tuple, tables, policy) {
        NO_ROUTE => return Err(Verdict::NoRoute),
        WAITS => return Err(Verdict::NoGateway),
        index => index,
    };
    if headers.l4 != L4::Tcp {
        // Outlives the flow: a late answer after a reset begins no inbound connection.
        tables.note_datagram(&headers.tuple);
    }
    let slot = &policy.slots[(index & SLOT_MASK) as usize];
    let state = phase::own(0, headers.tcp_flags, Direction::Egress);
    let mut flow = Flow::new(slot.address, egress_id, index, state, tables.now_ns());
    flow.acknowledged = headers.tcp_ack;
    flow.seal(&headers.tuple);
    if overwrite {
        return if tables.put_flow(&headers.tuple, &flow) { Ok(slot) } else { Err(Verdict::MapFull) };
    }
    match tables.claim_flow(&headers.tuple, &flow) {
        ClaimOutcome::Claimed => Ok(slot),
        ClaimOutcome::Full => Err(Verdict::MapFull),
        // Another CPU began the same flow: its choice wins.
        ClaimOutcome::Taken => {
            let flow = tables.flow_seen(&headers.tuple, headers.of_pod()).ok_or(Verdict::ClaimLost)?;
            kept(&headers.tuple, tables, egress_id, policy, flow).map_err(|_| Verdict::ClaimLost)
        }
    }
}

/// No address has a route to the destination.
const NO_ROUTE: u32 = u32::MAX;
/// No node serves those that have one.
const WAITS: u32 = u32::MAX - 1;

/// The index of the new flow's slot, one of those with the most specific route to its destination; [`NO_ROUTE`] or [`WAITS`].
///
/// Out of line, and a number, since the caller's frame is part of the longest call chain.
#[inline(never)]
fn choose<T: Tables>(tuple: &Tuple, tables: &T, policy: &PolicyEntry) -> u32 {
    let Some(set) = policy.destinations() else { return pick(tuple, 0, policy.count()) };
    let Some(candidates) = tables.candidates(set, &tuple.daddr) else { return NO_ROUTE };
    let place = pick(tuple, 0, candidates.count());
    let index = u32::from(candidates.slots[(place & SLOT_MASK) as usize]);
    if place < candidates.count() && index < policy.count() { index } else { WAITS }
}

/// One of `count` by the flow's hash; zero of none. Another salt is another choice.
#[inline(always)]
pub(super) fn pick(tuple: &Tuple, salt: u32, count: u32) -> u32 {
    if count == 0 {
        return 0;
    }
    let (s, d) = (fold_addr(&tuple.saddr), fold_addr(&tuple.daddr));
    let ports = (tuple.sport() as u32) << 16 | tuple.dport() as u32;
    let mut hash = mix(s ^ mix(d ^ mix(ports ^ tuple.protocol as u32 ^ salt)));
    hash ^= hash >> 15;
    // Multiply-shift maps the hash to the count without the bias and the cost of a division.
    ((hash as u64 * count as u64) >> 32) as u32
}

#[inline(always)]
fn fold_addr(addr: &Addr) -> u32 {
    let [a, b, c, d] = addr.words();
    a ^ b.rotate_left(8) ^ c.rotate_left(16) ^ d
}

/// Finaliser of MurmurHash3: every input bit reaches every output bit.
#[inline(always)]
const fn mix(mut h: u32) -> u32 {
    h ^= h >> 16;
    h = h.wrapping_mul(0x85eb_ca6b);
    h ^= h >> 13;
    h = h.wrapping_mul(0xc2b2_ae35);
    h ^ h >> 16
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::{Candidates, PolicyDestination};
    use crate::decide::memory_maps::MemoryMaps;
    use crate::decide::packets::packet;

    #[test]
    fn flows_spread_evenly() {
        let mut seen = [0u32; 5];
        for port in 1024..6024 {
            let headers = packet("10.244.1.10", "198.51.100.10", port, 80).headers();
            seen[pick(&headers.tuple, 0, 5) as usize] += 1;
        }
        assert!(seen.iter().all(|n| (850..1150).contains(n)), "{seen:?}");
    }

    /// Two addresses on the uplink, one on a further interface, and one there that no node serves now.
    #[test]
    fn a_flow_gets_an_address_with_the_most_specific_route() {
        let maps = MemoryMaps::new();
        let uplink = [[172, 18, 0, 100], [172, 18, 0, 101]].map(|address| PolicySlot::here(Addr::v4(address)));
        let further = PolicySlot::remote(Addr::v4([10, 10, 10, 100]), Addr::v4([172, 18, 0, 3]));
        let pending = Addr::v4([10, 20, 20, 100]);
        let (uplink_only, further_only) = (Candidates::new(&[0, 1], &[]), Candidates::new(&[2], &[]));
        let all = [
            ([0, 0, 0, 0], 0, uplink_only),
            ([10, 0, 0, 0], 8, further_only),
            ([10, 10, 0, 0], 16, uplink_only),
            ([10, 10, 10, 0], 24, further_only),
            ([10, 20, 0, 0], 16, Candidates::new(&[], &[3])),
            ([10, 40, 0, 0], 16, Candidates::new(&[], &[])),
            ([10, 30, 0, 0], 16, Candidates::new(&[1, 2], &[3])),
        ];
        let entries = all.map(|(to, length, candidates)| {
            (PolicyDestination { set: 5, to: Addr::v4(to) }, 96 + length, candidates.expect("few"))
        });
        maps.destinations.borrow_mut().extend(entries);
        // Of another set.
        let other = PolicyDestination { set: 6, to: Addr::v4([192, 0, 2, 7]) };
        maps.destinations.borrow_mut().push((other, 128, Candidates::new(&[2], &[]).expect("one")));
        let policy = PolicyEntry::with_slots(WhenEmpty::Drop, &[uplink[0], uplink[1], further]).expect("few slots");
        let policy = policy.with_pending(&[pending]).expect("few slots");
        let begun = |set, to: &str| {
            maps.put_policy(PolicyEntryKey::new(7, crate::abi::Family::V4), policy.with_destinations(set));
            let of = |port| {
                let headers = packet("10.244.1.10", to, port, 80).headers();
                maps.flows.remove(&headers.tuple);
                of_flow(&headers, &Quote::NONE, &maps, 7).map(|slot| slot.address)
            };
            let mut found: std::vec::Vec<_> = (2000..2064).map(of).collect();
            found.sort_by_key(|address| address.map(|address| address.octets()).unwrap_or_default());
            found.dedup();
            found
        };
        let [a, b, c] = [uplink[0].address, uplink[1].address, further.address].map(Ok);
        assert_eq!(begun(5, "192.0.2.7"), [a, b], "by the default route");
        assert_eq!(begun(5, "10.99.0.1"), [c]);
        assert_eq!(begun(5, "10.10.99.1"), [a, b], "a longer prefix");
        assert_eq!(begun(5, "10.10.10.1"), [c]);
        assert_eq!(
            begun(5, "10.20.1.1"),
            [Err(Verdict::NoGateway)],
            "its address waits, and the others lead elsewhere"
        );
        assert_eq!(begun(5, "10.40.1.1"), [Err(Verdict::NoGateway)], "its address is not in the entry yet");
        assert_eq!(begun(5, "10.30.1.1"), [c, b], "equal ones");
        assert_eq!(begun(0, "10.10.10.1"), [c, a, b], "all lie in one network");
        assert_eq!(begun(6, "10.10.10.1"), [Err(Verdict::NoRoute)]);
    }

    #[test]
    fn a_flow_keeps_its_address_across_policy_changes_and_nodes() {
        let maps = MemoryMaps::new();
        let a = PolicySlot::here(Addr::v4([172, 18, 0, 100]));
        let b = PolicySlot::remote(Addr::v4([172, 18, 0, 101]), Addr::v4([172, 18, 0, 3]));
        let c = PolicySlot::here(Addr::v4([172, 18, 0, 102]));
        maps.set_policy(7, WhenEmpty::Drop, &[b]);
        let headers = packet("10.244.1.10", "198.51.100.10", 4000, 80).headers();
        assert_eq!(of_flow(&headers, &Quote::NONE, &maps, 7), Ok(&b));
        maps.set_policy(7, WhenEmpty::Drop, &[a, b, c]);
        assert_eq!(of_flow(&headers, &Quote::NONE, &maps, 7), Ok(&b));
        let moved = PolicySlot::remote(b.address, Addr::v4([172, 18, 0, 4]));
        maps.set_policy(7, WhenEmpty::Drop, &[a, c, moved]);
        assert_eq!(of_flow(&headers, &Quote::NONE, &maps, 7), Ok(&moved));
        maps.set_policy(7, WhenEmpty::Drop, &[a, c]);
        let mut data = headers;
        data.l4 = L4::Tcp;
        data.tcp_flags = tcp::ACK;
        maps.remember_flow(&data.tuple, b.address, 7);
        assert_eq!(of_flow(&data, &Quote::NONE, &maps, 7), Err(Verdict::AddressGone));
        data.tcp_flags = tcp::SYN;
        assert!(matches!(of_flow(&data, &Quote::NONE, &maps, 7), Ok(slot) if *slot == a || *slot == c));
    }

    #[test]
    fn without_an_assigned_address_the_verdict_has_a_reason() {
        let maps = MemoryMaps::new();
        let headers = packet("10.244.1.10", "198.51.100.10", 4000, 80).headers();
        assert_eq!(of_flow(&headers, &Quote::NONE, &maps, 7), Err(Verdict::NoPolicy));
        for (when, verdict) in [
            (WhenEmpty::Drop, Verdict::NoGateway),
            (WhenEmpty::NodeAddress, Verdict::NodeAddress),
            (WhenEmpty::NotListed, Verdict::FamilyNotListed),
        ] {
            maps.set_policy(7, when, &[]);
            assert_eq!(of_flow(&headers, &Quote::NONE, &maps, 7), Err(verdict));
        }
    }
}
