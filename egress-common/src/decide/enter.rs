//! `enter`: the uplink, TC ingress. What the world sends to this node.
//!
//! For an owned egress IP: the reply of a flow goes back to its pod, here or through the overlay; anything else for it is
//! dropped, so that nothing unasked reaches the host or a pod. For the node's own address: replies to packets marked 1008,
//! recognised by the port range that only NAT uses. Everything else is left alone.

use super::{Tables, fragments, slots};
use crate::abi::{Addr, Config, Family, Mapping, Origin, Verdict};
use crate::wire::{Heads, L4};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Enter<'t> {
    Done(Verdict),
    /// For a pod of this node.
    ReplyHere {
        mapping: &'t Mapping,
    },
    /// For a pod behind `mapping.source_node`.
    ReplyRemote {
        mapping: &'t Mapping,
    },
    /// Answers a packet marked 1008: translate back and leave it to the stack.
    NodeReply {
        mapping: &'t Mapping,
    },
}

#[inline(always)]
pub fn enter<'t, T: Tables>(heads: &mut Heads, tables: &'t T, config: &Config) -> Enter<'t> {
    if tables.owned_addr(&heads.tuple.daddr).is_some() {
        return for_egress_ip(heads, tables);
    }
    if is_node_nat(heads, config)
        && let Some(mapping) = tables.nat_seen(&heads.tuple, heads.tcp_flags)
        && mapping.origin() == Some(Origin::Stack)
    {
        return Enter::NodeReply { mapping };
    }
    Enter::Done(Verdict::NotOurs)
}

#[inline(always)]
fn for_egress_ip<'t, T: Tables>(heads: &mut Heads, tables: &'t T) -> Enter<'t> {
    fragments::resolve(heads, tables);
    if let Err(verdict) = slots::translatable(heads) {
        return Enter::Done(verdict);
    }
    // A request begins something, and only the pod's side does that.
    if heads.l4 == L4::EchoRequest && heads.has_l4() {
        return Enter::Done(Verdict::NoMapping);
    }
    let Some(mapping) = tables.nat_seen(&heads.tuple, heads.tcp_flags) else {
        return Enter::Done(Verdict::NoMapping);
    };
    // The stack answers Time Exceeded, as a router does.
    if heads.ttl <= 1 {
        return Enter::Done(Verdict::TtlExpired);
    }
    match mapping.origin() {
        Some(Origin::Here) => Enter::ReplyHere { mapping },
        Some(Origin::Remote) => Enter::ReplyRemote { mapping },
        Some(Origin::Stack) | None => Enter::Done(Verdict::BadState),
    }
}

/// Whether this could answer a packet marked 1008. Later fragments show no port, so those flows do without them: such
/// datagrams to nodes are larger than a node's MTU and rare.
#[inline(always)]
fn is_node_nat(heads: &Heads, config: &Config) -> bool {
    let port = heads.tuple.dport();
    port >= config.node_ports.first
        && port <= config.node_ports.last
        && config.node_ports.first != 0
        && heads.tuple.daddr == node_address(config, heads.family)
        && matches!(heads.l4, L4::Tcp | L4::Udp | L4::EchoReply)
}

/// The address that packets marked 1008 get.
#[inline(always)]
pub fn node_address(config: &Config, family: Family) -> Addr {
    match family {
        Family::V4 => config.node_v4,
        Family::V6 => config.node_v6,
    }
}
