//! The progress of a drain: the lines to print, and when the node is drained. Pure.
//!
//! The status alone would show a node as drained too early. A hand-over to the node may be in progress; its agent forwards
//! late packets; and the addresses of a dead agent move when its lease has expired, while its programs may still answer. So
//! a node is drained when, in several states in a row, the status no longer names it, its agent has acknowledged every
//! address, and no hand-over of the node is open.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use crate::drain::{DrainError, count};
use egress_core::allocation::Nodes;
use egress_core::allocation::draining::{hosted, stays};
use egress_core::model::node::Node;
use egress_core::model::policy::{Policies, PolicyKey, parse_egress_ip};

/// By then the leader knows the mark, and the node knows what the leader wrote before.
const SETTLE: Duration = Duration::from_secs(1);
/// At least this many states. An address stays if this many lists of the nodes agree.
const STATES: usize = 2;
/// How long a node without addresses may have open hand-overs, or owe an acknowledgement.
const RELEASE_LIMIT: Duration = Duration::from_secs(6);

/// One read of the API server.
#[derive(Debug)]
pub(super) struct DrainSnapshot {
    pub(super) node: Option<Node>,
    /// All nodes, if they were listed.
    pub(super) nodes: Option<Nodes>,
    pub(super) policies: Policies,
}

/// The result of one state.
#[derive(Debug)]
pub(super) struct DrainProgress {
    /// Lines to print.
    pub(super) lines: Vec<String>,
    /// How the drain ended, if it did.
    pub(super) end: Option<Result<String, DrainError>>,
}

/// The progress so far.
pub(super) struct DrainWatch<'a> {
    node: &'a str,
    start: Instant,
    states: usize,
    held: BTreeMap<IpAddr, PolicyKey>,
    /// Addresses that have left the node, each with its policy.
    gone: BTreeMap<IpAddr, PolicyKey>,
    /// Addresses whose release the node's agent has acknowledged.
    released: BTreeSet<IpAddr>,
    /// Addresses that the node's agent is ready to take over.
    prepared: BTreeSet<IpAddr>,
    /// Addresses that no other node can take, with the reason, and how many lists of the nodes agree.
    stays: BTreeMap<IpAddr, String>,
    agreeing: usize,
    /// Since when the node holds no address.
    empty: Option<Instant>,
}

impl<'a> DrainWatch<'a> {
    /// Returns the first line too. `now` is after the mark.
    pub(super) fn start(node: &'a str, policies: &Policies, now: Instant) -> (Self, String) {
        let held = hosted(policies, node);
        let line = match held.len() {
            0 => format!("{node} has no egress IPs"),
            some => format!("{node} has {}", count(some)),
        };
        let (gone, released, prepared) = Default::default();
        let (stays, agreeing, empty) = Default::default();
        (Self { node, start: now, states: 0, held, gone, released, prepared, stays, agreeing, empty }, line)
    }

    pub(super) fn has_any(&self) -> bool {
        !self.held.is_empty()
    }

    pub(super) fn update(&mut self, state: &DrainSnapshot, now: Instant) -> DrainProgress {
        let mut lines = Vec::new();
        let end = match &state.node {
            None => Some(Err(DrainError::Deleted(self.node.to_owned()))),
            Some(node) if !node.drained => Some(Err(DrainError::Undone(self.node.to_owned()))),
            Some(node) => {
                self.states += 1;
                lines = self.follow(&state.policies, now);
                self.released.extend(node.released.keys());
                self.prepared = node.prepared.keys().copied().collect();
                match self.has_any() {
                    true => self.all_stay(state, &mut lines).map(Err),
                    false => self.is_done(node, now),
                }
            }
        };
        DrainProgress { lines, end }
    }

    /// Addresses that left the node or were assigned to it.
    fn follow(&mut self, policies: &Policies, now: Instant) -> Vec<String> {
        let (node, after) = (self.node, now.duration_since(self.start).as_secs_f64());
        let before = std::mem::replace(&mut self.held, hosted(policies, node));
        let mut lines = Vec::new();
        for (address, policy) in before.iter().filter(|(address, _)| !self.held.contains_key(address)) {
            let what = new_place(policies, *address).unwrap_or_else(|| match policies.contains_key(policy) {
                true => "no object has it assigned now".to_owned(),
                false => "the object was deleted".to_owned(),
            });
            lines.push(format!("{address} ({}): {what}, after {after:.1} s", policy.name));
            self.gone.insert(*address, policy.clone());
        }
        // After the deletion of its policy no node gets the address, so no acknowledgement is needed.
        self.gone.retain(|address, policy| policies.contains_key(policy) || new_place(policies, *address).is_some());
        for (address, policy) in self.held.iter().filter(|(address, _)| !before.contains_key(address)) {
            lines.push(format!("{address} ({}): assigned to {node}", policy.name));
            // The acknowledgement was that of an earlier hand-over.
            self.released.remove(address);
            self.gone.remove(address);
        }
        lines
    }

    fn all_stay(&mut self, state: &DrainSnapshot, lines: &mut Vec<String>) -> Option<DrainError> {
        self.empty = None;
        let stays = stays(&state.policies, state.nodes.as_ref()?, self.node);
        self.agreeing = if stays == self.stays { self.agreeing + 1 } else { 1 };
        self.stays = stays;
        let all_stay = self.held.keys().all(|address| self.stays.contains_key(address));
        if !all_stay || self.agreeing < STATES {
            return None;
        }
        lines.extend(self.rest());
        Some(DrainError::Stays { node: self.node.to_owned(), left: self.held.len() })
    }

    fn is_done(&mut self, node: &Node, now: Instant) -> Option<Result<String, DrainError>> {
        let since = *self.empty.get_or_insert(now);
        let unconfirmed = self.unconfirmed();
        let is_settled = self.states >= STATES && now.duration_since(self.start) >= SETTLE;
        let is_quiet = node.released.is_empty() && node.prepared.is_empty();
        let is_over = now.duration_since(since) >= RELEASE_LIMIT;
        if !is_settled || !(is_over || (is_quiet && unconfirmed.is_none())) {
            return None;
        }
        let name = self.node;
        let what = if self.gone.is_empty() { "it has no egress IPs" } else { "no egress IP is served there" };
        Some(match unconfirmed {
            Some(unconfirmed) => Err(unconfirmed),
            None => Ok(format!("{name} is drained: {what}")),
        })
    }

    /// Addresses that the node may still answer for.
    fn unconfirmed(&self) -> Option<DrainError> {
        let gone = self.gone.keys().filter(|address| !self.released.contains(address));
        let owed: BTreeSet<IpAddr> = gone.chain(&self.prepared).copied().collect();
        let addresses: Vec<String> = owed.iter().map(IpAddr::to_string).collect();
        let unconfirmed = || DrainError::Unconfirmed { node: self.node.to_owned(), addresses: addresses.join(", ") };
        (!addresses.is_empty()).then(unconfirmed)
    }

    /// The result at the timeout.
    pub(super) fn timed_out(&self, seconds: u64) -> (Vec<String>, DrainError) {
        let (node, left) = (self.node.to_owned(), self.held.len());
        let error = match left {
            0 => self.unconfirmed().unwrap_or(DrainError::Short { node, seconds }),
            left => DrainError::Late { node, seconds, left },
        };
        (self.rest(), error)
    }

    fn rest(&self) -> Vec<String> {
        let line = |(address, policy): (&IpAddr, &PolicyKey)| match self.stays.get(address) {
            Some(why) => format!("{address} ({}) stays: {why}", policy.name),
            None => format!("{address} ({}): not moved yet", policy.name),
        };
        self.held.iter().map(line).collect()
    }
}

fn new_place(policies: &Policies, address: IpAddr) -> Option<String> {
    let mut items = policies.values().flat_map(|policy| &policy.published.items);
    let there = items.find(|item| parse_egress_ip(&item.egress_ip) == Some(address));
    there.map(|item| format!("moved to {}", item.node))
}

#[cfg(test)]
mod tests;
