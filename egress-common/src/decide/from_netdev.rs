//! `from_netdev`: the uplink and the further egress interfaces, TC ingress. Packets from outside to this node.
//!
//! For an owned egress IP: replies, and ICMP errors that quote a packet of a flow, go to the pod, here or through the
//! overlay. All other packets for it are dropped, so that nothing unsolicited reaches the host or a pod; also what
//! arrives by another interface than the address's. An egress IP that is shared with a Service
//! ([`Owned::shared`](crate::abi::Owned::shared)) has clients: all other packets for it are untouched. For the node's own
//! address: replies to packets with the mark, recognised by the port range that only NAT uses; it may be an egress IP too
//! ([`Owned::hosts`](crate::abi::Owned::hosts)). All other traffic is untouched.

use super::{Tables, fragments, slots};
use crate::abi::{Addr, Class, Config, ExposedPort, Family, HandoverStage, NatEntry, Origin, Verdict};
use crate::wire::{Fragment, Headers, L4, Plain, Quote, Segment};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FromNetdev<'t> {
    Done(Verdict),
    /// For a pod of this node.
    ReplyHere {
        nat_entry: &'t NatEntry,
    },
    /// For a pod behind `nat_entry.source_node`.
    ReplyRemote {
        nat_entry: &'t NatEntry,
    },
    /// An answer to a packet marked 1008: reverse the translation and leave it to the stack.
    NodeReply {
        nat_entry: &'t NatEntry,
    },
    /// For an address in a hand-over: the NAT entry may be on the other node
    /// ([`HandoverEntry::peer`](crate::abi::HandoverEntry::peer)).
    PassOn {
        egress_id: u32,
    },
}

/// Whether a plain packet shows that [`decide`] leaves it alone, as nearly all traffic of the node itself: it is neither
/// for an owned egress IP nor for a port of NAT on the node's address.
#[inline(always)]
pub fn is_left_alone(plain: &Plain, ifindex: u32, config: &Config) -> bool {
    let may_be_nodes = is_node_port(plain.dport, config)
        && (ifindex != config.uplink_ifindex || is_node_address(&plain.daddr, config, plain.family));
    !may_be_nodes && !config.owned.may_contain(&plain.daddr)
}

/// `ifindex`: the interface that the packet came in by.
#[inline(always)]
pub fn decide<'t, T: Tables>(
    headers: &mut Headers,
    quote: &Quote,
    ifindex: u32,
    tables: &'t T,
    config: &Config,
) -> FromNetdev<'t> {
    if let Some(owned) = tables.owned_addr(&headers.tuple.daddr) {
        if owned.is_elsewhere(ifindex) {
            return FromNetdev::Done(Verdict::WrongInterface);
        }
        if is_elsewhere(headers, quote, owned.egress_id, tables, false)
            && (!owned.is_shared() || may_be_for_pod(headers, quote, tables))
        {
            return FromNetdev::PassOn { egress_id: owned.egress_id };
        }
        // Fragments of a Service's client are not held: the first one has no NAT entry and releases none.
        let decision = answer(headers, quote, tables, !owned.is_shared());
        let decision = if owned.is_hosts() { decision } else { without_nodes(decision) };
        return if owned.is_shared() { or_left_alone(decision) } else { decision };
    }
    // On other interfaces the node has other addresses, which the NAT entry has.
    if (ifindex != config.uplink_ifindex || headers.tuple.daddr == node_address(config, headers.family))
        && config.node_ports.first != 0
        && let Some(nat_entry) = for_node(headers, quote, tables, config)
        && nat_entry.origin() == Some(Origin::Stack)
    {
        return FromNetdev::NodeReply { nat_entry };
    }
    FromNetdev::Done(Verdict::NotOurs)
}

/// A reply that the other node of a hand-over has received for the egress IP and passed on.
#[inline(always)]
pub fn passed<'t, T: Tables>(headers: &mut Headers, quote: &Quote, tables: &'t T, egress_id: u32) -> FromNetdev<'t> {
    match is_elsewhere(headers, quote, egress_id, tables, true) {
        true => FromNetdev::PassOn { egress_id },
        // Fragments from the overlay are not held: reinjected, they would lack their outer headers.
        false => without_nodes(answer(headers, quote, tables, false)),
    }
}

/// A packet for an egress IP, by the NAT entries of this node. `keeps`: whether later fragments are held until their first
/// one arrives.
#[inline(always)]
fn answer<'t, T: Tables>(headers: &mut Headers, quote: &Quote, tables: &'t T, keeps: bool) -> FromNetdev<'t> {
    match headers.l4 {
        L4::IcmpError => error_for_egress_ip(headers, quote, tables),
        _ => for_egress_ip(headers, tables, keeps),
    }
}

/// The decision at an address that the node does not have itself: no NAT entry of the node has it.
#[inline(always)]
const fn without_nodes(decision: FromNetdev<'_>) -> FromNetdev<'_> {
    match decision {
        FromNetdev::NodeReply { .. } => FromNetdev::Done(Verdict::BadState),
        decision => decision,
    }
}

/// The decision at a shared address: what belongs to no flow of a pod is traffic of the Service.
#[inline(always)]
fn or_left_alone(decision: FromNetdev<'_>) -> FromNetdev<'_> {
    match decision {
        FromNetdev::Done(verdict) if verdict.class() == Class::Drop && verdict != Verdict::BadState => {
            FromNetdev::Done(Verdict::NotOurs)
        }
        _ => decision,
    }
}

/// Whether a reply goes to the other node of a hand-over first. The old owner passes on every reply, except those that
/// the new owner passes back. The new owner passes on replies of flows that it has not sent.
///
/// A fragment follows its first one, which alone has the ports: the old owner passes all of them on, and the new owner
/// keeps those whose first one it kept. An ICMP error follows the flow that it quotes.
///
/// Out of line, because a hand-over is rare.
#[inline(never)]
fn is_elsewhere<T: Tables>(headers: &mut Headers, quote: &Quote, egress_id: u32, tables: &T, passed: bool) -> bool {
    let Some(handover) = tables.handover(egress_id) else { return false };
    if handover.owned.address != headers.tuple.daddr {
        return false;
    }
    let since_ns = handover.since_ns;
    match handover.stage() {
        // An agent that was killed during this step still owns the address.
        Some(HandoverStage::Leaving) => !passed && !is_held(egress_id, &headers.tuple.daddr, tables),
        Some(HandoverStage::Arriving | HandoverStage::Open) => !is_sent_since(headers, quote, since_ns, tables),
        None => false,
    }
}

/// Whether a packet for a shared address may be for a pod's flow, known here or not: pods have no port of the Service. All
/// else is of the Service's clients, which are served where they arrive. Later fragments follow their first one.
///
/// Out of line, so that its frame is released.
#[inline(never)]
fn may_be_for_pod<T: Tables>(headers: &mut Headers, quote: &Quote, tables: &T) -> bool {
    if headers.fragment == Fragment::Later {
        fragments::resolve(headers, tables);
    }
    let reverse = match headers.l4 {
        L4::IcmpError => quote.flow(),
        L4::Tcp | L4::Udp | L4::Sctp | L4::EchoReply => &headers.tuple,
        _ => return false,
    };
    let port = ExposedPort::new(reverse.daddr, reverse.protocol, reverse.dport());
    let may_be = reverse.daddr == headers.tuple.daddr && tables.exposure(&port).is_none();
    if may_be && headers.fragment == Fragment::First {
        fragments::resolve(headers, tables);
    }
    may_be
}

/// Whether this node owns the address.
#[inline(always)]
fn is_held<T: Tables>(egress_id: u32, address: &Addr, tables: &T) -> bool {
    tables.owned(egress_id).is_some_and(|owned| owned.address == *address)
}

/// Whether this node has since sent a packet of the flow that this packet answers, or quotes in an error.
#[inline(always)]
fn is_sent_since<T: Tables>(headers: &mut Headers, quote: &Quote, since_ns: u64, tables: &T) -> bool {
    let reverse = match headers.l4 {
        L4::IcmpError => quote.flow(),
        _ => {
            if headers.fragment == Fragment::Later {
                fragments::resolve(headers, tables);
            }
            &headers.tuple
        }
    };
    let Some(forward) = tables.nat_peek(reverse).map(|nat_entry| nat_entry.other) else { return false };
    tables.nat_peek(&forward).is_some_and(|nat_entry| nat_entry.last_seen_ns >= since_ns)
}

/// For the node's address: the NAT entry of a packet marked 1008 that this packet answers, or quotes in an error. All
/// other packets belong to the host, so a first fragment is stored only with a NAT entry, and a later one needs it.
#[inline(never)]
fn for_node<'t, T: Tables>(
    headers: &mut Headers,
    quote: &Quote,
    tables: &'t T,
    config: &Config,
) -> Option<&'t NatEntry> {
    match headers.l4 {
        L4::IcmpError => {
            let quote =
                quote_from_destination(headers, quote).filter(|quote| is_node_port(quote.tuple().sport(), config))?;
            tables.nat_peek(quote.flow())
        }
        L4::Later => {
            fragments::resolve(headers, tables);
            let may_be_ours = headers.l4 != L4::Later && is_node_port(headers.tuple.dport(), config);
            if may_be_ours { tables.nat_seen(&headers.tuple, Segment::NONE) } else { None }
        }
        L4::Tcp | L4::Udp | L4::Sctp | L4::EchoReply if is_node_port(headers.tuple.dport(), config) => {
            if let Some(nat_entry) = tables.nat_seen(&headers.tuple, headers.for_pod()) {
                fragments::resolve(headers, tables);
                return Some(nat_entry);
            }
            fragments::supersede(headers, tables);
            None
        }
        _ => {
            fragments::supersede(headers, tables);
            None
        }
    }
}

#[inline(always)]
pub const fn is_node_port(port: u16, config: &Config) -> bool {
    port >= config.node_ports.first && port <= config.node_ports.last
}

/// The quoted packet of an ICMP error, if its source is the destination of the error. Echo replies are excluded, because an
/// egress IP sends none.
#[inline(always)]
fn quote_from_destination<'q>(headers: &Headers, quote: &'q Quote) -> Option<&'q Quote> {
    (quote.tuple().saddr == headers.tuple.daddr && quote.l4() != L4::EchoReply).then_some(quote)
}

#[inline(always)]
fn for_egress_ip<'t, T: Tables>(headers: &mut Headers, tables: &'t T, keeps: bool) -> FromNetdev<'t> {
    if headers.l4 == L4::Later {
        fragments::resolve_kept(headers, tables);
    }
    if let Err(verdict) = slots::translatable(headers) {
        return FromNetdev::Done(verdict);
    }
    // Only the pod's side sends requests.
    let is_request = headers.l4 == L4::EchoRequest && headers.has_l4();
    let nat_entry = if is_request { None } else { tables.nat_seen(&headers.tuple, headers.for_pod()) };
    let Some(nat_entry) = nat_entry else {
        // Its later fragments must not match an answer with the same identification, and unsolicited packets must not
        // fill the map.
        fragments::supersede(headers, tables);
        return FromNetdev::Done(Verdict::NoNatEntry);
    };
    if headers.fragment == Fragment::First && fragments::resolve_kept(headers, tables) && keeps {
        return FromNetdev::Done(Verdict::FragmentsReleased);
    }
    reply(headers, nat_entry, tables)
}

/// Any router on the path may send an error; the quoted packet must be one that was sent from here.
#[inline(always)]
fn error_for_egress_ip<'t, T: Tables>(headers: &Headers, quote: &Quote, tables: &'t T) -> FromNetdev<'t> {
    if headers.source_routed {
        return FromNetdev::Done(Verdict::SourceRouted);
    }
    let nat_entry = quote_from_destination(headers, quote).and_then(|quote| tables.nat_peek(quote.flow()));
    match nat_entry {
        Some(nat_entry) => reply(headers, nat_entry, tables),
        None => FromNetdev::Done(Verdict::IcmpUnmatched),
    }
}

#[inline(always)]
fn reply<'t, T: Tables>(headers: &Headers, nat_entry: &'t NatEntry, tables: &T) -> FromNetdev<'t> {
    // The packet goes no further than to the node's stack.
    if nat_entry.origin() == Some(Origin::Stack) {
        return FromNetdev::NodeReply { nat_entry };
    }
    // The stack answers Time Exceeded, as a router does.
    if headers.ttl <= 1 {
        return FromNetdev::Done(Verdict::TtlExpired);
    }
    match nat_entry.origin() {
        Some(Origin::Here) => {
            // An error refreshes no entry of the flow that it quotes.
            if headers.l4 != L4::IcmpError {
                tables.flow_answered(&nat_entry.other, headers.for_pod());
            }
            FromNetdev::ReplyHere { nat_entry }
        }
        Some(Origin::Remote) => FromNetdev::ReplyRemote { nat_entry },
        Some(Origin::Stack) | None => FromNetdev::Done(Verdict::BadState),
    }
}

/// Whether it is the [`node_address`], compared in place: of a copy, the compiler reads each byte.
#[inline(always)]
pub fn is_node_address(address: &Addr, config: &Config, family: Family) -> bool {
    match family {
        Family::V4 => *address == config.node_v4,
        Family::V6 => *address == config.node_v6,
    }
}

/// The address that packets marked 1008 get on the uplink.
#[inline(always)]
pub fn node_address(config: &Config, family: Family) -> Addr {
    match family {
        Family::V4 => config.node_v4,
        Family::V6 => config.node_v6,
    }
}

#[cfg(test)]
mod tests;
