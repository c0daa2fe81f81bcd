//! Hand-overs without loss: the open hand-overs that this node's kernel should know. Pure. docs/adr/0015 has the proof.
//!
//! 1. The leader records the hand-over (`crate::ownership::handover`); the new node prepares
//!    ([`HandoverStage::Arriving`]).
//! 2. The old node hands over ([`HandoverStage::Leaving`]) and acknowledges the release with the new owner's name. It
//!    does so once for each number ([`handed_over`]), whichever node the record names later.
//! 3. The named node translates for every node ([`HandoverStage::Open`]). No other node is ever open under that number.
//!
//! If no new node becomes ready in time, or if the address moves between policies, the old node releases it without
//! forwarding: packets in between are dropped.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use crate::model::ledger::{HandOver, Ledger};
use crate::model::node::{Given, Node, Prepared};
use crate::model::state::family_of;
use crate::model::state::{EgressId, HandoverStage, HandoverState, KernelState, Place, SharedWith, TunnelEndpoint};
use crate::model::view::ClusterView;
use crate::ownership::node_ownership::NodeOwnership;

fn open(ledger: &Ledger) -> impl Iterator<Item = (&IpAddr, &HandOver)> {
    ledger.records.open.iter().filter(|(_, record)| record.to.as_ref().is_some_and(|to| *to != record.from))
}

/// The addresses that this node has handed over, while their records are open, whichever nodes these name by now.
fn handed_over<'a>(
    ownership: &'a NodeOwnership,
    actual: &'a KernelState,
) -> impl Iterator<Item = (IpAddr, EgressId, HandoverState)> {
    let ledger = ownership.ledger();
    let is_ours = |address: &IpAddr| {
        let record = ledger.records.open.get(address);
        !ownership.is_lease_expired() && record.is_some_and(|record| record.from == ownership.node_name())
    };
    let handed_over_here = actual.handovers.iter().filter(move |(id, handover)| {
        let is_held = actual.owned.get(id) == Some(&handover.address);
        handover.stage == HandoverStage::Leaving && !is_held && is_ours(&handover.address)
    });
    handed_over_here.map(|(id, handover)| (handover.address, *id, *handover))
}

/// This node's acknowledgement of the nodes that it has handed over to.
pub fn new_owners(ownership: &NodeOwnership, view: &ClusterView, actual: &KernelState) -> Given {
    // Of two Node objects with one endpoint, as while a node is renamed, it is the recorded one.
    let name = |address: &IpAddr, peer: TunnelEndpoint| {
        let has_endpoint = |name: &&String| view.nodes.get(*name).and_then(|node| node.endpoint()) == Some(peer);
        let recorded = ownership.ledger().records.open.get(address).and_then(|record| record.to.as_ref());
        recorded.filter(has_endpoint).or_else(|| view.nodes.keys().find(has_endpoint)).cloned()
    };
    let handed_over_here = handed_over(ownership, actual);
    handed_over_here.filter_map(|(address, _, handover)| Some((address, name(&address, handover.peer)?))).collect()
}

/// Hand-overs from this node to another one.
pub fn leaving(ownership: &NodeOwnership) -> impl Iterator<Item = (&IpAddr, &HandOver)> {
    open(ownership.ledger()).filter(|(_, record)| !ownership.is_lease_expired() && record.from == ownership.node_name())
}

fn arriving(ownership: &NodeOwnership) -> impl Iterator<Item = (&IpAddr, &HandOver)> {
    let is_ours = |record: &HandOver| record.to.as_deref() == Some(ownership.node_name());
    open(ownership.ledger())
        .filter(move |(address, record)| is_ours(record) && ownership.may_take(address, record.number))
}

/// Whether the new node has acknowledged that it is ready.
pub fn is_ready(view: &ClusterView, address: &IpAddr, record: &HandOver) -> bool {
    let new_owner = record.to.as_ref().and_then(|to| view.nodes.get(to));
    let acknowledged = new_owner.and_then(|new_owner| new_owner.prepared.get(address));
    acknowledged.is_some_and(|Prepared(number, from, _)| *number == record.number && *from == record.from)
}

/// This node's acknowledgement that it is ready.
pub fn prepared(ownership: &NodeOwnership, actual: &KernelState) -> BTreeMap<IpAddr, Prepared> {
    let stage = |address: &IpAddr| {
        let mut stages =
            actual.handovers.values().filter(|handover| handover.is_taken() && handover.address == *address);
        stages.next().map(|handover| handover.stage)
    };
    let acknowledgement = |(address, record): (&IpAddr, &HandOver)| {
        let is_open = stage(address)? == HandoverStage::Open;
        Some((*address, Prepared(record.number, record.from.clone(), is_open)))
    };
    arriving(ownership).filter_map(acknowledgement).collect()
}

/// The hand-overs that the kernel should know for this `desired` state, before addresses are withheld.
pub fn handovers(
    ownership: &NodeOwnership,
    view: &ClusterView,
    desired: &KernelState,
    actual: &KernelState,
) -> BTreeMap<EgressId, HandoverState> {
    let mut all = BTreeMap::new();
    // The host's own packets would move along, so an address of the host is given up instead.
    let moves = |id: EgressId| shared_with(view, id) != Some(SharedWith::Host);
    let endpoint = |node: &str| view.nodes.get(node).and_then(|node| node.endpoint());
    for (address, record) in leaving(ownership).filter(|(address, record)| is_ready(view, address, record)) {
        let Some(peer) = record.to.as_deref().and_then(endpoint) else { continue };
        let Some(id) = served_for(desired, *address, peer) else { continue };
        // A released address is not taken back to forward it.
        if actual.owned.get(&id) == Some(address) && moves(id) {
            let shared_with = actual.shared.get(&id).copied();
            all.insert(id, HandoverState { stage: HandoverStage::Leaving, address: *address, peer, shared_with });
        }
    }
    for (address, id, handover) in handed_over(ownership, actual) {
        if served_for(desired, address, handover.peer) == Some(id) {
            all.insert(id, handover);
        }
    }
    for (address, record) in arriving(ownership) {
        let Some(peer) = endpoint(&record.from) else { continue };
        let Some(id) = served_for(desired, *address, peer) else { continue };
        // A node has one address of a policy at a time.
        let is_free = |state: &KernelState| state.owned.get(&id).is_none_or(|owned| owned == address);
        if is_free(desired) && is_free(actual) && moves(id) {
            let is_given = |from: &Arc<Node>| {
                let to = from.given.get(address).map(String::as_str);
                from.released.get(address) == Some(&record.number) && to == Some(ownership.node_name())
            };
            let is_open = view.nodes.get(&record.from).is_some_and(is_given);
            let stage = if is_open { HandoverStage::Open } else { HandoverStage::Arriving };
            let shared_with = shared_with(view, id);
            all.insert(id, HandoverState { stage, address: *address, peer, shared_with });
        }
    }
    all
}

/// What else the policy's address is used for.
fn shared_with(view: &ClusterView, id: EgressId) -> Option<SharedWith> {
    view.policies.values().find(|policy| policy.published.ids.contains(id))?.address_use.shared_with()
}

/// The policy that the address serves, on this node or on the other one.
fn served_for(desired: &KernelState, address: IpAddr, peer: TunnelEndpoint) -> Option<EgressId> {
    let is_between = |place: Place| place == Place::Here || place == Place::Remote(peer);
    let of_family = desired.policy.iter().filter(|((_, family), _)| *family == family_of(address));
    let mut serving = of_family
        .filter(|(_, policy)| policy.slots.iter().any(|slot| slot.address == address && is_between(slot.place)));
    serving.next().map(|((id, _), _)| *id)
}
