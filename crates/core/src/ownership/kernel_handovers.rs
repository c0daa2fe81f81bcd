//! Hand-overs that lose nothing: what of the open ones this node's kernel is to know of. Pure.
//!
//! A hand-over of an address whose two nodes both have living agents goes in these steps. Each is seen by the one who does
//! the next, so they come in this order:
//!
//! 1. the leader records it (`controller::handover`);
//! 2. the new node is made ready ([`HandoverStage::Arriving`]) and says so (`kube::words`): it translates what the old node passes
//!    on, and as long as that one passes nothing on it emits nothing;
//! 3. the old node, which has served the address until now, hands over ([`HandoverStage::Leaving`]): in one step it emits nothing
//!    any more and passes on what comes; it says that it has let go, and who has it now;
//! 4. the new node that is named by that translates for every node from now on ([`HandoverStage::Open`]), and says so;
//! 5. the leader writes the status; the new node answers for the address and announces it, the others send to it;
//! 6. the record is forgotten some seconds later, and both end the passing on.
//!
//! **One heir for a number.** The leader may change its mind meanwhile, more than once, and its word and those of nodes come
//! by watches that nothing orders. So who has the address is what the old node says, and it says it once: it hands over to
//! one node under a number, and goes on passing on to that one for as long as the record is open, whoever is named there by
//! then ([`handed_over`]). A node is open only by that word, with its own name. So under one number at most one node is ever
//! open, and what others are that were ready for it, and were called off, comes to nothing: they take packets from the old
//! node alone, which sends them none. The leader takes who is named for the holder (`controller::handover`): it lets go
//! before anybody is given the address, the old node too, and that is a hand-over with a number of its own.
//!
//! One order of things is left. The leader forgets a record before it has heard that its new node is ready, because the old
//! one is to keep the address, which has handed it over just then. It takes the address up again when it has read ledger and
//! object anew; the new one ends what it has begun when it hears of the forgotten record. If its watch is later than that
//! reading, both may emit for that long: the new one only what a third node sends it that has not heard of an older
//! hand-over either, since the old one passes nothing on any more.
//!
//! An old node that finds no new node ready in time gives the address up as before: what comes in between is dropped. So is it where the address moves between objects: what comes late is no longer the object's.

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

/// What this node has handed over, as long as the record of that is open, whoever is named there by now.
fn handed_over<'a>(
    tenure: &'a Ownership,
    actual: &'a KernelState,
) -> impl Iterator<Item = (IpAddr, EgressId, HandoverState)> {
    let ledger = tenure.ledger();
    let is_ours = |address: &IpAddr| {
        let record = ledger.records.open.get(address);
        !tenure.is_fenced() && record.is_some_and(|record| record.from == tenure.node_name())
    };
    let gone = actual.moving.iter().filter(move |(id, moving)| {
        let is_held = actual.owned.get(id) == Some(&moving.address);
        moving.course == HandoverStage::Leaving && !is_held && is_ours(&moving.address)
    });
    gone.map(|(id, moving)| (moving.address, *id, *moving))
}

/// This node's word about whom it has handed over to.
pub fn given(tenure: &Ownership, view: &ClusterView, actual: &KernelState) -> Given {
    // Of two Node objects with one endpoint, while a node gets another name, it is the one that is recorded.
    let name = |address: &IpAddr, peer: TunnelEndpoint| {
        let is_there = |name: &&String| view.nodes.get(*name).and_then(|node| node.endpoint()) == Some(peer);
        let recorded = tenure.ledger().records.open.get(address).and_then(|record| record.to.as_ref());
        recorded.filter(is_there).or_else(|| view.nodes.keys().find(is_there)).cloned()
    };
    let gone = handed_over(tenure, actual);
    gone.filter_map(|(address, _, moving)| Some((address, name(&address, moving.peer)?))).collect()
}

/// From this node to another one.
pub fn leaving(tenure: &Ownership) -> impl Iterator<Item = (&IpAddr, &HandOver)> {
    open(tenure.ledger()).filter(|(_, record)| !tenure.is_fenced() && record.from == tenure.node_name())
}

fn arriving(tenure: &Ownership) -> impl Iterator<Item = (&IpAddr, &HandOver)> {
    let is_ours = |record: &HandOver| record.to.as_deref() == Some(tenure.node_name());
    open(tenure.ledger()).filter(move |(address, record)| is_ours(record) && tenure.may_take(address, record.number))
}

/// Whether the new node has said that it is ready.
pub fn is_ready(view: &ClusterView, address: &IpAddr, record: &HandOver) -> bool {
    let heir = record.to.as_ref().and_then(|to| view.nodes.get(to));
    let said = heir.and_then(|heir| heir.prepared.get(address));
    said.is_some_and(|Prepared(number, from, _)| *number == record.number && *from == record.from)
}

/// This node's word that it is ready.
pub fn prepared(tenure: &Ownership, actual: &KernelState) -> BTreeMap<IpAddr, Prepared> {
    let course = |address: &IpAddr| {
        let mut courses = actual.moving.values().filter(|moving| moving.is_taken() && moving.address == *address);
        courses.next().map(|moving| moving.course)
    };
    let word = |(address, record): (&IpAddr, &HandOver)| {
        let is_open = course(address)? == HandoverStage::Open;
        Some((*address, Prepared(record.number, record.from.clone(), is_open)))
    };
    arriving(tenure).filter_map(word).collect()
}

/// What the kernel should know of hand-overs, where all else should be as in `desired`, before anything is withheld.
pub fn moving(
    tenure: &Ownership,
    view: &ClusterView,
    desired: &KernelState,
    actual: &KernelState,
) -> BTreeMap<EgressId, HandoverState> {
    let mut all = BTreeMap::new();
    let endpoint = |node: &str| view.nodes.get(node).and_then(|node| node.endpoint());
    for (address, record) in leaving(tenure).filter(|(address, record)| is_ready(view, address, record)) {
        let Some(peer) = record.to.as_deref().and_then(endpoint) else { continue };
        let Some(id) = served_for(desired, *address, peer) else { continue };
        // What this node has let go of it does not take up again, to pass it on.
        if actual.owned.get(&id) == Some(address) {
            all.insert(id, HandoverState { course: HandoverStage::Leaving, address: *address, peer });
        }
    }
    for (address, id, moving) in handed_over(tenure, actual) {
        if served_for(desired, address, moving.peer) == Some(id) {
            all.insert(id, moving);
        }
    }
    for (address, record) in arriving(tenure) {
        let Some(peer) = endpoint(&record.from) else { continue };
        let Some(id) = served_for(desired, *address, peer) else { continue };
        // A node has one address of an object at a time.
        let is_free = |state: &KernelState| state.owned.get(&id).is_none_or(|owned| owned == address);
        if is_free(desired) && is_free(actual) {
            let is_given = |from: &Arc<Node>| {
                let to = from.given.get(address).map(String::as_str);
                from.released.get(address) == Some(&record.number) && to == Some(tenure.node_name())
            };
            let is_open = view.nodes.get(&record.from).is_some_and(is_given);
            let course = if is_open { HandoverStage::Open } else { HandoverStage::Arriving };
            all.insert(id, HandoverState { course, address: *address, peer });
        }
    }
    all
}

/// The object that the address serves, by this node or by the other one.
fn served_for(desired: &KernelState, address: IpAddr, peer: TunnelEndpoint) -> Option<EgressId> {
    let is_between = |place: Place| place == Place::Here || place == Place::Remote(peer);
    let of_family = desired.policy.iter().filter(|((_, family), _)| *family == family_of(address));
    let mut serving = of_family
        .filter(|(_, policy)| policy.slots.iter().any(|slot| slot.address == address && is_between(slot.place)));
    serving.next().map(|((id, _), _)| *id)
}
