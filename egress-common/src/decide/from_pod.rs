//! `from_pod`: management port, TC ingress. Packets of this node's pods.
//!
//! The steps follow OVN-Kubernetes' policy priorities (in parentheses); the first match decides. A step is skipped only
//! where a later one gives the same verdict for less work: an unselected pod's packets are left alone for every
//! destination.

use super::{Tables, fragments, policy_of, slots, to_pod};
use crate::abi::{Config, NodePlace, Origin, PolicySlot, PrefixKind, Verdict};
use crate::wire::{ETH_LEN, Fragment, Frame, Headers, L4, PROTO_TCP, Quote, ethertype, sctp, tcp};

/// What to do with the packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FromPod<'t> {
    Done(Verdict),
    /// Drop, and send the pod an ICMP error (administratively prohibited).
    Hairpin,
    /// Drop for this reason, and send the pod a reset.
    Reset(Verdict),
    /// Set mark 1008 and leave it to the stack.
    Mark,
    /// The flow has this slot's address and gateway.
    Send {
        egress_id: u32,
        slot: &'t PolicySlot,
    },
}

#[inline(always)]
pub fn decide<'t, T: Tables>(headers: &mut Headers, quote: &Quote, tables: &'t T, config: &Config) -> FromPod<'t> {
    judge(headers, quote, tables, config, true)
}

/// The verdict of a frame that cannot be parsed ([`why_unread`](Headers::why_unread)). The kernel strips one VLAN tag
/// before the programs run. After a priority tag (number zero) the stack strips another tag too, and would forward a
/// pod's packet that bypassed this decision.
#[inline(always)]
pub fn unread<F: Frame + ?Sized>(why: Verdict, frame: &F) -> Verdict {
    let is_tagged = frame.load(ETH_LEN - 2).is_some_and(|kind| ethertype::is_vlan(u16::from_be_bytes(kind)));
    if is_tagged { Verdict::Malformed } else { why }
}

/// The same decision without holding fragments: see [`fragments::resolve_kept`].
///
/// Out of line, because in the programs its frame would crowd what follows it.
#[inline(never)]
pub fn judge<'t, T: Tables>(
    headers: &mut Headers,
    quote: &Quote,
    tables: &'t T,
    config: &Config,
    keeps: bool,
) -> FromPod<'t> {
    if let Some((egress_id, slot)) = settled(headers, tables, config) {
        return FromPod::Send { egress_id, slot };
    }
    let decisions = tables.decisions();
    // 0. No pod may send overlay packets, whatever its source address.
    if headers.may_be_udp_to(config.tunnel_port) && tables.node(&headers.tuple.daddr).is_some() {
        return FromPod::Done(Verdict::ForgedTunnel);
    }
    // 1. Is the source a pod of this node? Anti-spoofing is the CNI's.
    let pod = tables.pod(&headers.tuple.saddr);
    if pod.is_none() && !in_own_pod_subnet(headers, tables, config) {
        return FromPod::Done(Verdict::NotPod);
    }
    // Not an `Option`, because the verifier refuses to copy the undefined number of `None`.
    let (is_selected, egress_id) = match pod.and_then(|pod| policy_of(pod, &headers.tuple.daddr, tables)) {
        Some(egress_id) => (true, egress_id),
        None => (false, 0),
    };
    if let Some(pod) = pod.filter(|_| !is_selected) {
        to_pod::follow_datagram(headers, tables, config);
        // Zero except for pods that were deselected recently, or are selected for other destinations.
        if pod.cut_until_ns == 0 {
            return FromPod::Done(Verdict::NotSelected);
        }
    }
    let node = tables.node(&headers.tuple.daddr).map(|node| node.place());
    // 2. An address of this node (1004).
    if node == Some(NodePlace::Own) {
        return FromPod::Done(Verdict::ToOwnNode);
    }
    // 3. An address of the cluster (102).
    let prefix = tables.prefix(&headers.tuple.daddr).map(|prefix| prefix.kind());
    match prefix {
        None | Some(Some(PrefixKind::EgressIp)) => {}
        // Also a value of another version: it is some prefix of the cluster.
        Some(_) => return FromPod::Done(Verdict::ToCluster),
    }
    // 4. An answer to an inbound connection.
    if headers.fragment != Fragment::Whole && fragments::resolve_kept(headers, tables) && keeps {
        return FromPod::Done(Verdict::FragmentsReleased);
    }
    if !is_selected {
        match left_over(headers, tables, node.is_some()) {
            LeftOver::NotKnown => {}
            LeftOver::Nothing => return FromPod::Done(Verdict::NotSelected),
            LeftOver::Unknown => return FromPod::Done(Verdict::FragmentUnknown),
            LeftOver::Cut => return FromPod::Reset(Verdict::FlowCut),
            LeftOver::Marked => return FromPod::Mark,
        }
    }
    if is_answer(headers, tables) {
        tables.inbound_answered(&headers.tuple, headers.of_pod());
        return FromPod::Done(Verdict::InboundReply);
    }
    if begins(headers) {
        // A pod's SYN or INIT begins a new connection and ends an inbound one on its tuple.
        tables.forget_inbound(&headers.tuple);
    } else if headers.l4 == L4::IcmpError {
        // An error about a packet of such a connection refreshes nothing (RFC 5508 section 4).
        if answers_known(headers, quote, tables) {
            return FromPod::Done(Verdict::InboundReply);
        }
    } else if may_answer(headers) && tables.inbound_answered(&headers.tuple, headers.of_pod()) {
        return FromPod::Done(Verdict::InboundReply);
    }
    // 5. No egress policy selects the pod, or the pod is unknown.
    if !is_selected {
        // Packets of known unselected pods are left alone above.
        let verdict = unknown_pod(tables, config);
        if verdict == Verdict::UnknownPodPassed {
            to_pod::follow_datagram(headers, tables, config);
        }
        return FromPod::Done(verdict);
    }
    // 6. An address of another node (102 with the mark).
    if node.is_some() {
        note_own_datagram(headers, tables);
        return FromPod::Mark;
    }
    // 7. An egress IP of the cluster.
    if prefix.is_some() {
        return FromPod::Hairpin;
    }
    // 8. The flow's address.
    match slots::of_flow(headers, quote, tables, egress_id) {
        // The stack sends Time Exceeded and does not forward such a packet.
        Ok(_) if headers.ttl <= 1 => FromPod::Done(Verdict::TtlExpired),
        Ok(slot) => {
            // An error has no ports: its tuple is not that of the quoted flow, but may be that of another one.
            if decisions != 0 && headers.l4 != L4::IcmpError {
                tables.settle_flow(&headers.tuple, egress_id, slot, decisions);
            }
            FromPod::Send { egress_id, slot }
        }
        Err(Verdict::AddressGone) if headers.l4 == L4::Tcp => FromPod::Reset(Verdict::AddressGone),
        Err(verdict) => {
            if verdict == Verdict::NodeAddress {
                // The stack, or `to_netdev` after it, gives it the node's address.
                note_own_datagram(headers, tables);
            }
            FromPod::Done(verdict)
        }
    }
}

/// What a deselected pod's packet belongs to.
#[derive(Clone, Copy, PartialEq, Eq)]
enum LeftOver {
    /// To no known flow.
    NotKnown,
    Nothing,
    /// A later fragment; its first one will show the ports.
    Unknown,
    /// To a connection that had an egress IP, and must get no other address.
    Cut,
    /// To a flow to another node with the node's address: no egress policy owns that address, so the flow continues.
    Marked,
}

/// Classifies a deselected pod's packet. A packet that begins a flow belongs to none before. A reset connection is
/// remembered while the pod continues it, and forgotten when either end begins another one on its tuple.
#[inline(never)]
fn left_over<T: Tables>(headers: &Headers, tables: &T, to_node: bool) -> LeftOver {
    // Looked up again, because the caller's stack frame has no space for it.
    let Some(pod) = tables.pod(&headers.tuple.saddr) else { return LeftOver::NotKnown };
    let gets_reset = headers.tuple.protocol == PROTO_TCP && tables.now_ns() < pod.cut_until_ns;
    if gets_reset && headers.l4 == L4::Later {
        return LeftOver::Unknown;
    }
    if gets_reset && headers.l4 == L4::Tcp && tables.flow_peek(&headers.tuple).is_some() {
        // Also for a later fragment, by the ports of its first one.
        if slots::is_mid_stream(headers) {
            tables.keep_flow(&headers.tuple);
            return LeftOver::Cut;
        }
        tables.forget_flow(&headers.tuple);
    }
    if begins(headers) || !to_node || slots::translatable(headers).is_err() {
        return LeftOver::Nothing;
    }
    let nat_entry = tables.nat_peek(&headers.tuple);
    let is_marked = nat_entry.is_some_and(|nat_entry| nat_entry.origin() == Some(Origin::Stack));
    if is_marked { LeftOver::Marked } else { LeftOver::Nothing }
}

/// A datagram that leaves through the stack: its reply begins no inbound connection.
#[inline(always)]
fn note_own_datagram<T: Tables>(headers: &Headers, tables: &T) {
    if !matches!(headers.l4, L4::Tcp | L4::IcmpError) && headers.has_l4() {
        tables.note_datagram(&headers.tuple);
    }
}

/// The cached decision of the packet's flow, if no input has changed. The only input that does not come from the agent
/// is an inbound connection on this tuple (4). None can begin while the flow exists (`to_pod`), and a SYN of the pod,
/// which would end the flow, always takes the full decision.
#[inline(always)]
fn settled<'t, T: Tables>(headers: &Headers, tables: &'t T, config: &Config) -> Option<(u32, &'t PolicySlot)> {
    let is_plain = headers.fragment == Fragment::Whole && headers.ttl > 1 && !headers.source_routed;
    let may_be = match headers.l4 {
        L4::Tcp => headers.tcp_flags & tcp::SYN == 0,
        L4::Udp => headers.tuple.dport() as u32 != config.tunnel_port,
        L4::EchoRequest => true,
        _ => false,
    };
    if config.decisions == 0 || !is_plain || !may_be {
        return None;
    }
    // The egress ID comes from the pod, not from the flow: a reused flow entry may belong to another policy. The caller
    // compares the slot with the owned address.
    let egress_id = tables.pod(&headers.tuple.saddr).and_then(|pod| policy_of(pod, &headers.tuple.daddr, tables))?;
    let flow = tables.flow_seen(&headers.tuple, headers.of_pod())?;
    let slot = flow.settled_under(config.decisions).filter(|_| flow.egress_id == egress_id)?;
    Some((egress_id, slot))
}

#[inline(always)]
fn in_own_pod_subnet<T: Tables>(headers: &Headers, tables: &T, config: &Config) -> bool {
    tables
        .prefix(&headers.tuple.saddr)
        .is_some_and(|prefix| prefix.kind() == Some(PrefixKind::PodSubnet) && prefix.node == config.self_node)
}

/// The verdict for a pod that the agent does not know.
#[inline(always)]
pub fn unknown_pod<T: Tables>(tables: &T, config: &Config) -> Verdict {
    if config.passes_unknown_pods(tables.now_ns()) { Verdict::UnknownPodPassed } else { Verdict::UnknownPod }
}

/// Whether the packet may belong to an inbound connection with its tuple. Unreadable ports are zero, and would match a
/// connection with port or identifier zero. A query of a pod is no answer, even if a host outside has chosen the same
/// identifier.
#[inline(always)]
const fn may_answer(headers: &Headers) -> bool {
    !matches!(headers.l4, L4::EchoRequest | L4::IcmpError | L4::Later | L4::Refused | L4::Short | L4::Unread)
}

/// Whether the packet, or the quoted packet of an ICMP error, belongs to a known inbound connection.
#[inline(always)]
pub fn answers_known<T: Tables>(headers: &Headers, quote: &Quote, tables: &T) -> bool {
    match headers.l4 {
        // A quoted reply belongs to the pod's own query, even if a host outside uses the same identifier.
        L4::IcmpError => slots::quoted_by_pod(headers, quote)
            .is_some_and(|quote| quote.l4() != L4::EchoReply && tables.inbound_known(quote.flow())),
        _ => may_answer(headers) && tables.inbound_known(&headers.tuple),
    }
}

/// A packet that always begins a connection: a SYN of TCP, an INIT of SCTP.
#[inline(always)]
fn begins(headers: &Headers) -> bool {
    match headers.l4 {
        L4::Tcp => headers.has_l4() && headers.tcp_flags & (tcp::SYN | tcp::ACK) == tcp::SYN,
        L4::Sctp => headers.has_l4() && headers.sctp_chunk == sctp::INIT,
        _ => false,
    }
}

/// Packets that are always answers, without a lookup. In a simultaneous open (RFC 9293 section 3.5) the pod answers
/// within its own flow.
#[inline(always)]
fn is_answer<T: Tables>(headers: &Headers, tables: &T) -> bool {
    const SYN_ACK: u8 = tcp::SYN | tcp::ACK;
    const ASKED: u8 = SYN_ACK | tcp::RST | tcp::FIN;
    match headers.l4 {
        L4::Tcp => headers.tcp_flags & ASKED == SYN_ACK && tables.flow_peek(&headers.tuple).is_none(),
        L4::EchoReply => true,
        _ => false,
    }
}

#[cfg(test)]
mod tests;
