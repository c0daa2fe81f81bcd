//! SNAT: the port of a flow on its egress IP (RFC 4787, RFC 5382, RFC 6056; docs/adr/0004-claim-order.md). The source
//! port is kept if it is free and no system port; otherwise a search covers 1024..=65535 per egress IP, destination and
//! protocol. At an egress IP that is shared with a Service, the Service's ports are never used: a client's connection
//! could have the tuple of a pod's flow. At an address of the node itself, only the ports that the host leaves to NAT are
//! used, whatever the source port.
//!
//! 1. The reverse key is claimed by insert-if-absent. If it exists with *this* forward tuple, it is adopted.
//! 2. The forward key is claimed likewise. The loser removes the reverse key that it claimed, and reads the winner's.
//! 3. That removal may hit an adopted key. So after an adoption the reverse key is claimed again, and after a removal
//!    the forward key is read again.
//!
//! With [port blocks](blocks), no port is kept, and the search covers the blocks of the flow's pod.
//!
//! A protocol without ports has one NAT entry per address and destination, and none on an address of the node itself.

use super::{ClaimOutcome, NatOwner, PortClaim, QuotaKind, Tables, slots};
use crate::abi::{Addr, Config, Direction, HeldBlocks, NatEntry, Origin, Owned, PortRange, Tuple, Verdict};
use crate::wire::{Headers, L4, PROTO_ICMP, PROTO_ICMPV6, Quote, sctp};

/// NAT uses no system ports.
pub const EGRESS_PORTS: PortRange = PortRange { first: 1024, last: u16::MAX };

/// Walks a port range, or several blocks of ports, from a random start, without omission.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortSearch {
    /// First ports: one of a range, or one of each block.
    firsts: HeldBlocks,
    /// Ports of a block; zero for a range.
    size: u16,
    /// Number of ports.
    pub span: u32,
    start: u32,
    stride: u32,
}

impl PortSearch {
    #[inline(always)]
    pub fn new(range: PortRange, random: u32) -> Self {
        let span = (range.last as u32).saturating_sub(range.first as u32) + 1;
        Self::over(HeldBlocks(range.first as u64), 0, span, random)
    }

    /// `blocks` has no gaps.
    #[inline(always)]
    pub fn of_blocks(blocks: HeldBlocks, size: u16, random: u32) -> Self {
        Self::over(blocks, size, blocks.count() * size as u32, random)
    }

    #[inline(always)]
    fn over(firsts: HeldBlocks, size: u16, span: u32, random: u32) -> Self {
        // A prime that does not divide the span visits every residue once.
        let mut stride = 1;
        for prime in [32_771u32, 16_411, 8_209, 4_099, 1_031] {
            if stride == 1 && !span.is_multiple_of(prime) {
                stride = prime;
            }
        }
        Self { firsts, size, span, start: random.checked_rem(span).unwrap_or(0), stride }
    }

    /// The `index`-th port of the walk, for indices below `span`.
    #[inline(always)]
    pub const fn at(&self, index: u32) -> u16 {
        // 2^16 * 2^16 does not fit 32 bits.
        let walked = self.start as u64 + index as u64 * self.stride as u64;
        let Some(offset) = walked.checked_rem(self.span as u64) else { return self.firsts.0 as u16 };
        let (Some(block), Some(within)) = (offset.checked_div(self.size as u64), offset.checked_rem(self.size as u64))
        else {
            return self.firsts.0 as u16 + offset as u16;
        };
        ((self.firsts.0 >> ((block * 16) & 63)) as u16).wrapping_add(within as u16)
    }
}

/// Key of the answer to `forward` once its source is `address` and `port`.
#[inline(always)]
pub fn reverse_key(forward: &Tuple, address: &Addr, port: u16) -> Tuple {
    Tuple::new(Direction::Ingress, forward.daddr, *address, reverse_sport(forward, port), port, forward.protocol)
}

/// Changes the key to another port.
#[inline(always)]
pub fn set_reverse_port(key: &mut Tuple, forward: &Tuple, port: u16) {
    key.set_ports(reverse_sport(forward, port), port);
}

/// A query has its identifier in both ports, so both change.
#[inline(always)]
const fn reverse_sport(forward: &Tuple, port: u16) -> u16 {
    if is_echo(forward) { port } else { forward.dport() }
}

#[inline(always)]
const fn is_echo(tuple: &Tuple) -> bool {
    matches!(tuple.protocol, PROTO_ICMP | PROTO_ICMPV6)
}

/// The translated source of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SnatSource {
    pub address: Addr,
    pub ports: PortRange,
    /// The node has it itself: other ports are the host's.
    is_nodes: bool,
}

impl SnatSource {
    /// An egress IP that this node owns.
    #[inline(always)]
    pub const fn of(owned: &Owned, config: &Config) -> Self {
        let is_nodes = owned.is_hosts();
        let ports = if is_nodes { config.node_ports } else { EGRESS_PORTS };
        Self { address: owned.address, ports, is_nodes }
    }

    /// An address that the node does not have itself.
    #[inline(always)]
    pub const fn egress_only(address: Addr) -> Self {
        Self { address, ports: EGRESS_PORTS, is_nodes: false }
    }

    /// An address of the node itself.
    #[inline(always)]
    pub const fn of_node(address: Addr, config: &Config) -> Self {
        Self { address, ports: config.node_ports, is_nodes: true }
    }
}

/// Finds or creates the NAT entry of a packet from a pod; for an ICMP error, finds that of the quoted flow.
#[inline(always)]
pub fn translate<'t, T: Tables>(
    headers: &Headers,
    quote: &Quote,
    tables: &'t T,
    pool: &SnatSource,
    owner: &NatOwner,
) -> Result<&'t NatEntry, Verdict> {
    // The host leaves no port to NAT.
    if pool.ports.first == 0 {
        return Err(Verdict::NoNodeAddress);
    }
    // The address of packets with the mark needs no lease.
    if owner.origin != Origin::Stack && !tables.has_lease() {
        return Err(Verdict::LeaseExpired);
    }
    if headers.l4 == L4::IcmpError {
        let nat_entry = of_error(headers, quote, tables).filter(|nat_entry| nat_entry.other.daddr == pool.address);
        return nat_entry.ok_or(Verdict::IcmpUnmatched);
    }
    let forward = &headers.tuple;
    if let Some(nat_entry) = seen(headers, tables) {
        if is_current_for(nat_entry, pool, owner) {
            return Ok(nat_entry);
        }
        retire(forward, nat_entry, tables);
    }
    if !tables.has_quota(&forward.saddr, owner.egress_id, QuotaKind::NatEntries) {
        return Err(Verdict::QuotaExceeded);
    }
    let mut own = claim_own_port(headers, tables, pool, owner);
    if own == OwnPort::Taken && expire_own_port(forward, tables, pool) {
        own = claim_own_port(headers, tables, pool, owner);
    }
    let port = match own {
        OwnPort::Claimed => Port { number: forward.sport(), ours: true },
        OwnPort::Adopted => Port { number: forward.sport(), ours: false },
        OwnPort::Full => return Err(Verdict::MapFull),
        OwnPort::Taken if headers.l4 == L4::Other => return Err(Verdict::ProtocolTaken),
        // The peer knows this flow by its current port only.
        OwnPort::Taken if is_under_way(headers) => return Err(Verdict::PortTaken),
        OwnPort::Taken if is_exhausted(forward, pool, tables, owner) => return Err(Verdict::PortsExhausted),
        OwnPort::Taken => match find_any_port(headers, tables, pool, owner) {
            PortClaim::Claimed(number) => Port { number, ours: true },
            PortClaim::NoneFree => {
                note_exhausted(forward, pool, tables, owner);
                return Err(Verdict::PortsExhausted);
            }
            PortClaim::Full => return Err(Verdict::MapFull),
        },
    };
    if claim_forward(headers, tables, pool, owner, port)? == Forward::NeedsReverse {
        hold_reverse(headers, tables, pool, owner, port)?;
    }
    let nat_entry = seen(headers, tables).ok_or(Verdict::ClaimLost)?;
    if nat_entry.other.daddr == pool.address { Ok(nat_entry) } else { Err(Verdict::ClaimLost) }
}

/// The NAT entry of a packet from a pod, refreshed. Out of line, because its arguments would take the frame of [`translate`].
#[inline(never)]
fn seen<'t, T: Tables>(headers: &Headers, tables: &'t T) -> Option<&'t NatEntry> {
    tables.nat_seen(&headers.tuple, headers.of_pod())
}

/// The NAT entry of a pod's ICMP error about a packet that it received. The error refreshes nothing (RFC 5508 section
/// 4).
#[inline(never)]
fn of_error<'t, T: Tables>(headers: &Headers, quote: &Quote, tables: &'t T) -> Option<&'t NatEntry> {
    // A pod receives no request by a flow, so a quoted request is invalid.
    let quote = slots::quoted_by_pod(headers, quote).filter(|quote| quote.l4() != L4::EchoRequest)?;
    tables.nat_peek(quote.flow())
}

/// Whether a NAT entry has the current address of the flow and the current node of the pod. The node's tunnel endpoint
/// or the subnet's node may have changed. The NAT port range of the node's own addresses may have changed too: answers to
/// other ports belong to the host. Out of line for its frame.
#[inline(never)]
fn is_current_for(nat_entry: &NatEntry, pool: &SnatSource, owner: &NatOwner) -> bool {
    let port = nat_entry.other.dport();
    let is_listed = port >= pool.ports.first && port <= pool.ports.last;
    nat_entry.other.daddr == pool.address
        && nat_entry.egress_id == owner.egress_id
        && nat_entry.source_node == owner.source_node
        && (is_listed || !pool.is_nodes)
}

// The steps are out of line, because their inlined stack frames would exceed the programs' stack.

/// Removes the NAT entry of a flow's former address; answers to that address are dropped from now on. Of several CPUs,
/// only the one that removes the old reverse key removes the forward key, which may belong to a new NAT entry by then.
/// If the reverse key is missing, another CPU is removing the entry, or the sweep will remove a lone forward key. Both
/// cases look the same, and removing the forward key here could break the other CPU's new NAT entry.
#[inline(never)]
fn retire<T: Tables>(forward: &Tuple, old: &NatEntry, tables: &T) {
    // Copied, because the memory of a removed value may be reused.
    let reverse = old.other;
    let is_whole = tables.nat_peek(&reverse).is_some_and(|there| there.other == *forward);
    if is_whole && tables.forget_nat(&reverse) {
        tables.forget_nat(forward);
    }
}

/// Whether a new NAT entry may have the flow's own port. One of a flow that is under way may: its peer knows no other port, if
/// another gateway without random ports had it. With port blocks none had it.
#[inline(always)]
fn keeps_port<T: Tables>(headers: &Headers, tables: &T, pool: &SnatSource, owner: &NatOwner) -> bool {
    if headers.l4 == L4::Other {
        return true;
    }
    // Of a node's own address, few flows have a port in the range.
    let may = pool.is_nodes || !tables.has_random_ports() || is_under_way(headers);
    may && !blocks::are_used(tables, owner)
}

/// Whether the packet belongs to a TCP connection or SCTP association that began before this node saw it.
#[inline(always)]
fn is_under_way(headers: &Headers) -> bool {
    slots::is_mid_stream(headers) || headers.l4 == L4::Sctp && headers.sctp_chunk != sctp::INIT
}

/// Outcome of claiming the reverse key with the source port.
#[derive(Clone, Copy, PartialEq, Eq)]
enum OwnPort {
    Claimed,
    /// It existed for this flow.
    Adopted,
    /// It belongs to another flow or to a Service, is outside the pool's ports, or is not wanted.
    Taken,
    Full,
}

/// A claimed port, and whether this packet claimed it.
#[derive(Clone, Copy)]
struct Port {
    number: u16,
    ours: bool,
}

#[inline(never)]
fn claim_own_port<T: Tables>(headers: &Headers, tables: &T, pool: &SnatSource, owner: &NatOwner) -> OwnPort {
    let port = headers.tuple.sport();
    let is_listed = port >= pool.ports.first && port <= pool.ports.last;
    if !is_listed && (pool.is_nodes || headers.l4 != L4::Other) || !keeps_port(headers, tables, pool, owner) {
        return OwnPort::Taken;
    }
    let forward = &headers.tuple;
    if tables.is_service_port(&pool.address, forward.protocol, port) {
        return OwnPort::Taken;
    }
    let reverse = reverse_key(forward, &pool.address, port);
    // A second attempt if the claim was removed in between.
    for _ in 0..2 {
        match tables.claim_nat(&reverse, forward, owner) {
            ClaimOutcome::Claimed => return OwnPort::Claimed,
            ClaimOutcome::Full => return OwnPort::Full,
            ClaimOutcome::Taken => {}
        }
        if let Some(there) = tables.nat_peek(&reverse) {
            return if there.other == *forward { OwnPort::Adopted } else { OwnPort::Taken };
        }
    }
    OwnPort::Taken
}

/// Whether the reverse key with the source port belonged to an idle entry, which is removed.
#[inline(never)]
fn expire_own_port<T: Tables>(forward: &Tuple, tables: &T, pool: &SnatSource) -> bool {
    tables.expire_nat(&reverse_key(forward, &pool.address, forward.sport()))
}

/// How long a failed search holds for new flows of the same kind, because a search visits every port. A freed port is
/// found after this time at the latest, the port of an idle entry after the next pass of the sweep. A flow whose source
/// port is free, or belongs to an idle entry, gets it at once.
pub const EXHAUSTED_NS: u64 = 1_000_000_000;

#[inline(never)]
fn is_exhausted<T: Tables>(forward: &Tuple, pool: &SnatSource, tables: &T, owner: &NatOwner) -> bool {
    tables.is_exhausted(&exhausted_key(forward, pool, tables, owner))
}

#[inline(never)]
fn note_exhausted<T: Tables>(forward: &Tuple, pool: &SnatSource, tables: &T, owner: &NatOwner) {
    tables.note_exhausted(&exhausted_key(forward, pool, tables, owner));
}

/// The destination, at the egress IP or, where a pod has blocks of its own, at the pod.
#[inline(always)]
fn exhausted_key<T: Tables>(forward: &Tuple, pool: &SnatSource, tables: &T, owner: &NatOwner) -> Tuple {
    let of = if blocks::are_used(tables, owner) { &forward.saddr } else { &pool.address };
    reverse_key(forward, of, 0)
}

/// Claims the reverse key with any free port of the pool.
#[inline(never)]
fn find_port<T: Tables>(headers: &Headers, tables: &T, pool: &SnatSource, owner: &NatOwner) -> PortClaim {
    let forward = &headers.tuple;
    let search = PortSearch::new(pool.ports, tables.random());
    tables.claim_any_port(forward, &pool.address, owner, &search)
}

/// The same or, with port blocks, of the pod's, which gets another block if it may.
#[inline(always)]
fn find_any_port<T: Tables>(headers: &Headers, tables: &T, pool: &SnatSource, owner: &NatOwner) -> PortClaim {
    if !blocks::are_used(tables, owner) {
        return find_port(headers, tables, pool, owner);
    }
    let forward = &headers.tuple;
    let held = blocks::held_blocks(forward, tables, pool);
    let own = blocks::own_blocks(forward, tables, pool, held);
    if own != HeldBlocks::default() {
        let claim = blocks::find_port(forward, tables, pool, owner, own);
        if claim != PortClaim::NoneFree {
            return claim;
        }
    }
    match blocks::give_block(forward, tables, pool, owner, (held, own)) {
        // This one, or that of another CPU.
        PortClaim::Claimed(_) => {
            let held = blocks::held_blocks(forward, tables, pool);
            blocks::find_port(forward, tables, pool, owner, blocks::own_blocks(forward, tables, pool, held))
        }
        none => none,
    }
}

/// Outcome of claiming the forward key.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Forward {
    Stands,
    /// It exists, and names a reverse key that another CPU may have removed.
    NeedsReverse,
}

/// Claims the forward key. The loser removes the reverse key that it claimed, unless a NAT entry of the flow names this
/// reverse key: then another CPU has adopted it. An entry under removal by the sweep does not count.
#[inline(never)]
fn claim_forward<T: Tables>(
    headers: &Headers,
    tables: &T,
    pool: &SnatSource,
    owner: &NatOwner,
    port: Port,
) -> Result<Forward, Verdict> {
    let forward = &headers.tuple;
    let reverse = reverse_key(forward, &pool.address, port.number);
    let claim = tables.claim_nat(forward, &reverse, owner);
    if claim == ClaimOutcome::Claimed {
        tables.count_nat_entry(&forward.saddr, owner.egress_id);
        return Ok(if port.ours { Forward::Stands } else { Forward::NeedsReverse });
    }
    let is_named = || tables.nat_peek(forward).is_some_and(|winner| winner.other == reverse);
    if port.ours && !is_named() {
        tables.forget_nat(&reverse);
        if is_named() {
            return Ok(Forward::NeedsReverse);
        }
    }
    if claim == ClaimOutcome::Full { Err(Verdict::MapFull) } else { Ok(Forward::Stands) }
}

/// Claims the reverse key of a NAT entry whose forward key exists. A key that vanishes in between was removed by a CPU
/// that reads the forward key next. If another flow claims it first, the NAT entry is removed, and the next packet
/// creates another one.
#[inline(never)]
fn hold_reverse<T: Tables>(
    headers: &Headers,
    tables: &T,
    pool: &SnatSource,
    owner: &NatOwner,
    port: Port,
) -> Result<(), Verdict> {
    let forward = &headers.tuple;
    let reverse = reverse_key(forward, &pool.address, port.number);
    let is_held = match tables.claim_nat(&reverse, forward, owner) {
        ClaimOutcome::Claimed => true,
        ClaimOutcome::Taken => tables.nat_peek(&reverse).is_none_or(|there| there.other == *forward),
        ClaimOutcome::Full => false,
    };
    if is_held {
        return Ok(());
    }
    tables.forget_nat(forward);
    Err(Verdict::ClaimLost)
}

pub mod blocks;
#[cfg(test)]
mod interleaved;
#[cfg(test)]
mod tests;
