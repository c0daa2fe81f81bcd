//! `accept`: the overlay, TC ingress. What another node sent: a flow for an egress IP of ours, or a gateway's reply to a
//! pod of ours.
//!
//! Nodes are trusted, their overlay packets are not taken on faith: the outer source must be another node's address, and
//! the inner source of a flow a pod of that very node.

use super::snat::{self, Face};
use super::{Owner, Tables, fragments, slots};
use crate::abi::{Addr, Config, Mapping, NodePlace, Origin, Owned, PrefixKind, Verdict};
use crate::wire::Heads;

/// Where the packet came from, read from the tunnel header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outer {
    pub source: Addr,
    pub egress_id: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accept<'t> {
    Done(Verdict),
    /// A reply from a gateway for a pod of this node.
    Deliver,
    /// Ours to translate; the pod's node is named for the way back.
    Translate {
        owned: &'t Owned,
        source_node: &'t Addr,
    },
}

#[inline(always)]
pub fn accept<'t, T: Tables>(heads: &mut Heads, outer: &Outer, tables: &'t T, config: &Config) -> Accept<'t> {
    let Some(sender) = tables.node(&outer.source).filter(|node| node.place() == NodePlace::Other) else {
        return Accept::Done(Verdict::ForgedOuter);
    };
    if is_pod_here(heads, tables, config) {
        return Accept::Deliver;
    }
    let of_sender = tables
        .prefix(&heads.tuple.saddr)
        .is_some_and(|prefix| prefix.kind() == Some(PrefixKind::PodSubnet) && prefix.node == sender.node);
    if !of_sender {
        return Accept::Done(Verdict::ForgedInner);
    }
    let Some(owned) = tables.owned(outer.egress_id).filter(|owned| owned.address.family() == heads.family) else {
        return Accept::Done(Verdict::NotGateway);
    };
    fragments::resolve(heads, tables);
    match slots::translatable(heads) {
        Ok(()) => Accept::Translate { owned, source_node: &sender.node },
        Err(verdict) => Accept::Done(verdict),
    }
}

#[inline(always)]
fn is_pod_here<T: Tables>(heads: &Heads, tables: &T, config: &Config) -> bool {
    tables.pod(&heads.tuple.daddr).is_some()
        || tables
            .prefix(&heads.tuple.daddr)
            .is_some_and(|prefix| prefix.kind() == Some(PrefixKind::PodSubnet) && prefix.node == config.self_node)
}

/// The mapping of a flow that another node sent.
#[inline(always)]
pub fn translate<'t, T: Tables>(
    heads: &Heads,
    tables: &'t T,
    owned: &Owned,
    egress_id: u32,
    source_node: &Addr,
) -> Result<&'t Mapping, Verdict> {
    let owner = Owner { origin: Origin::Remote, source_node: *source_node, egress_id };
    snat::translate(heads, tables, &Face { address: owned.address, ports: snat::EGRESS_PORTS }, &owner)
}
