//! Hand-overs without loss: the open hand-overs that this node's kernel should know. Pure.
//!
//! If both nodes have living agents, a hand-over goes in these steps. Each step is visible to the party that does the
//! next:
//!
//! 1. the leader records it (`crate::ownership::handover`);
//! 2. the new node prepares ([`HandoverStage::Arriving`]) and acknowledges (`egress_kube::acknowledgements`): it
//!    translates forwarded packets, and emits nothing until some arrive;
//! 3. the old node hands over ([`HandoverStage::Leaving`]): in one step it stops emitting and forwards what arrives; it
//!    acknowledges the release and names the node that has the address now;
//! 4. the named node translates for every node from now on ([`HandoverStage::Open`]), and acknowledges that;
//! 5. the leader writes the status; the new node answers for the address and announces it, and the others send to it;
//! 6. the record is removed some seconds later, and both end the forwarding.
//!
//! **One new owner per number.** The leader may change its mind, and watches are not ordered. So the old node's
//! acknowledgement decides, and it is given once: it hands over to one node under a number and keeps forwarding to it
//! while the record is open, whichever node the record names by then ([`handed_over`]). A node is open only if that
//! acknowledgement names it, so at most one node is ever open under one number. Other prepared nodes emit nothing,
//! since the old node forwards nothing to them. The leader treats the named node as the holder
//! (`crate::ownership::handover`): it must release the address before another node, even the old one, gets it, by a
//! hand-over with its own number.
//!
//! One race remains. The leader removes a record to leave the address at the old node, before it knows that the new
//! node is ready, and the old node has just handed it over. The old node takes the address back after a fresh read of
//! ledger and policy; the new one stops when it sees that the record is gone. If its watch is later than that read,
//! both may emit in between: the new one only packets of a third node that has missed an older hand-over too, since the
//! old one no longer forwards.
//!
//! If no new node becomes ready in time, or if the address moves between policies, the old node releases it without
//! forwarding: packets in between are dropped.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use crate::model::ledger::{HandOver, Ledger};
use crate::model::node::{Given, Node, Prepared};
use crate::model::state::family_of;
use crate::model::state::{EgressId, HandoverStage, HandoverState, KernelState, Place, TunnelEndpoint};
use crate::model::view::ClusterView;
use crate::ownership::holdings::Ownership;

fn open(ledger: &Ledger) -> impl Iterator<Item = (&IpAddr, &HandOver)> {
    ledger.records.open.iter().filter(|(_, record)| record.to.as_ref().is_some_and(|to| *to != record.from))
}

/// The addresses that this node has handed over, while their records are open, whichever nodes these name by now.
fn handed_over<'a>(
    ownership: &'a Ownership,
    actual: &'a KernelState,
) -> impl Iterator<Item = (IpAddr, EgressId, HandoverState)> {
    let ledger = ownership.ledger();
    let is_ours = |address: &IpAddr| {
        let record = ledger.records.open.get(address);
        !ownership.is_lease_expired() && record.is_some_and(|record| record.from == ownership.node_name())
    };
    let gone = actual.handovers.iter().filter(move |(id, handover)| {
        let is_held = actual.owned.get(id) == Some(&handover.address);
        handover.stage == HandoverStage::Leaving && !is_held && is_ours(&handover.address)
    });
    gone.map(|(id, handover)| (handover.address, *id, *handover))
}

/// This node's acknowledgement of the nodes that it has handed over to.
pub fn given(ownership: &Ownership, view: &ClusterView, actual: &KernelState) -> Given {
    // Of two Node objects with one endpoint, as while a node is renamed, it is the recorded one.
    let name = |address: &IpAddr, peer: TunnelEndpoint| {
        let is_there = |name: &&String| view.nodes.get(*name).and_then(|node| node.endpoint()) == Some(peer);
        let recorded = ownership.ledger().records.open.get(address).and_then(|record| record.to.as_ref());
        recorded.filter(is_there).or_else(|| view.nodes.keys().find(is_there)).cloned()
    };
    let gone = handed_over(ownership, actual);
    gone.filter_map(|(address, _, handover)| Some((address, name(&address, handover.peer)?))).collect()
}

/// Hand-overs from this node to another one.
pub fn leaving(ownership: &Ownership) -> impl Iterator<Item = (&IpAddr, &HandOver)> {
    open(ownership.ledger()).filter(|(_, record)| !ownership.is_lease_expired() && record.from == ownership.node_name())
}

fn arriving(ownership: &Ownership) -> impl Iterator<Item = (&IpAddr, &HandOver)> {
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
pub fn prepared(ownership: &Ownership, actual: &KernelState) -> BTreeMap<IpAddr, Prepared> {
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
    ownership: &Ownership,
    view: &ClusterView,
    desired: &KernelState,
    actual: &KernelState,
) -> BTreeMap<EgressId, HandoverState> {
    let mut all = BTreeMap::new();
    let endpoint = |node: &str| view.nodes.get(node).and_then(|node| node.endpoint());
    for (address, record) in leaving(ownership).filter(|(address, record)| is_ready(view, address, record)) {
        let Some(peer) = record.to.as_deref().and_then(endpoint) else { continue };
        let Some(id) = served_for(desired, *address, peer) else { continue };
        // A released address is not taken up again to forward it.
        if actual.owned.get(&id) == Some(address) {
            all.insert(id, HandoverState { stage: HandoverStage::Leaving, address: *address, peer });
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
        if is_free(desired) && is_free(actual) {
            let is_given = |from: &Arc<Node>| {
                let to = from.given.get(address).map(String::as_str);
                from.released.get(address) == Some(&record.number) && to == Some(ownership.node_name())
            };
            let is_open = view.nodes.get(&record.from).is_some_and(is_given);
            let stage = if is_open { HandoverStage::Open } else { HandoverStage::Arriving };
            all.insert(id, HandoverState { stage, address: *address, peer });
        }
    }
    all
}

/// The policy that the address serves, on this node or on the other one.
fn served_for(desired: &KernelState, address: IpAddr, peer: TunnelEndpoint) -> Option<EgressId> {
    let is_between = |place: Place| place == Place::Here || place == Place::Remote(peer);
    let of_family = desired.policy.iter().filter(|((_, family), _)| *family == family_of(address));
    let mut serving = of_family
        .filter(|(_, policy)| policy.slots.iter().any(|slot| slot.address == address && is_between(slot.place)));
    serving.next().map(|((id, _), _)| *id)
}
