//! `leave`: the uplink, TC egress. The last look at what this node sends; it guards, and serves mark 1008.
//!
//! Our own redirected packets pass here too: their source is an egress IP already, or they are overlay packets.

use super::snat::{self, Face};
use super::steer::{self, Steer};
use super::{Owner, Tables, enter};
use crate::abi::{Addr, Config, Mapping, NODE_MARK, Origin, PrefixKind, Verdict};
use crate::wire::{Heads, L4};

/// What `skb` says besides the packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Meta {
    pub mark: u32,
    /// Came in by a device of this node, so it is forwarded. The kernel clears this when a tunnel device encapsulates.
    pub forwarded: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leave {
    Done(Verdict),
    /// Clear the mark and leave it alone: the stack has translated it already.
    Unmark,
    /// Give it the node's address ([`translate`]) and clear the mark.
    NodeSnat,
}

#[inline(always)]
pub fn leave<T: Tables>(heads: &mut Heads, meta: &Meta, tables: &T, config: &Config) -> Leave {
    if meta.forwarded
        && heads.l4 == L4::Udp
        && heads.tuple.dport() as u32 == config.tunnel_port
        && tables.node(&heads.tuple.daddr).is_some()
    {
        return Leave::Done(Verdict::ForgedTunnel);
    }
    let pod = tables.pod(&heads.tuple.saddr);
    if meta.mark == NODE_MARK {
        return if pod.is_some() { Leave::NodeSnat } else { Leave::Unmark };
    }
    if pod.is_some() {
        return Leave::Done(guard_own(heads, tables, config));
    }
    Leave::Done(guard_foreign(heads, tables, config))
}

/// The mapping of a packet marked 1008.
#[inline(always)]
pub fn translate<'t, T: Tables>(heads: &Heads, tables: &'t T, config: &Config) -> Result<&'t Mapping, Verdict> {
    let address = enter::node_address(config, heads.family);
    if address == Addr::UNSPECIFIED || config.node_ports.first == 0 {
        return Err(Verdict::NoNodeAddress);
    }
    super::slots::translatable(heads)?;
    let owner = Owner { origin: Origin::Stack, source_node: Addr::UNSPECIFIED, egress_id: 0 };
    snat::translate(heads, tables, &Face { address, ports: config.node_ports }, &owner)
}

/// A pod of this node, with its own address, about to leave: what `steer` would leave alone may, nothing else.
#[inline(never)]
fn guard_own<T: Tables>(heads: &mut Heads, tables: &T, config: &Config) -> Verdict {
    match steer::steer(heads, tables, config) {
        Steer::Done(verdict) => verdict,
        Steer::Hairpin => Verdict::Hairpin,
        Steer::Mark | Steer::Send { .. } => Verdict::NotSteered,
    }
}

/// Any other source: a pod address that is not this node's must not leave, unless it stays in the cluster (a CNI that
/// routes pods without an overlay).
#[inline(never)]
fn guard_foreign<T: Tables>(heads: &Heads, tables: &T, config: &Config) -> Verdict {
    let Some(prefix) = tables.prefix(&heads.tuple.saddr) else {
        return Verdict::NotOurs;
    };
    match prefix.kind() {
        Some(PrefixKind::PodSubnet | PrefixKind::PodNetwork) => {}
        _ => return Verdict::NotOurs,
    }
    if tables.node(&heads.tuple.saddr).is_some() || tables.node(&heads.tuple.daddr).is_some() {
        return Verdict::NotOurs;
    }
    match tables.prefix(&heads.tuple.daddr) {
        Some(to) if to.kind() != Some(PrefixKind::EgressIp) => Verdict::ToCluster,
        // An address of this node's subnet that no pod has: `steer` has judged it already.
        _ if prefix.node == config.self_node => steer::unknown_pod(config),
        _ => Verdict::ForeignPod,
    }
}
