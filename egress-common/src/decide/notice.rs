//! `notice`: the management port, TC egress. What the host sends to pods of this node.
//!
//! A connection that came in from outside must be answered by the way it came, whatever the policy says, so it is
//! remembered here. TCP shows its first packet; for datagrams the first one seen counts, unless it answers a flow of the
//! pod. Replies that we redirect to this port answer such flows, so they are never taken for connections from outside.

use super::{Claim, Tables};
use crate::abi::Verdict;
use crate::wire::{Heads, L4, tcp};

/// Datagrams within this time after the pod became selected may answer what it sent before; they are not remembered.
pub const SETTLE_NS: u64 = 30_000_000_000;

#[inline(always)]
pub fn notice<T: Tables>(heads: &Heads, tables: &T) -> Verdict {
    let Some(pod) = tables.pod(&heads.tuple.daddr) else {
        return Verdict::NotPod;
    };
    let begins = match heads.l4 {
        L4::Tcp => heads.tcp_flags & (tcp::SYN | tcp::ACK) == tcp::SYN,
        L4::Udp | L4::EchoRequest => {
            pod.egress_id().is_some() && tables.now_ns().saturating_sub(pod.selected_since_ns) > SETTLE_NS
        }
        _ => false,
    };
    if !begins || tables.node(&heads.tuple.saddr).is_some() || tables.prefix(&heads.tuple.saddr).is_some() {
        return Verdict::NotOurs;
    }
    let answer = heads.tuple.reversed();
    if heads.l4 != L4::Tcp && tables.flow_seen(&answer, 0).is_some() {
        return Verdict::NotOurs;
    }
    match tables.claim_inbound(&answer) {
        Claim::Claimed => Verdict::InboundRemembered,
        Claim::Taken => Verdict::NotOurs,
        Claim::Full => Verdict::InboundRefused,
    }
}
