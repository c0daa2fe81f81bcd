//! What is seen of a node that is drained, what is said of it, and when that is over. Pure.
//!
//! By the status alone a node would seem drained too early: an address may be on its way to it, its agent passes on what
//! comes late, and where that agent is dead or stopped addresses go when their leases have run out, while its programs go
//! on answering for them. So a node is drained when the status no longer names it, its agent has acknowledged every address,
//! and no hand-over from it is open, at several looks in a row.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use crate::cmd::drain::{DrainError, count};
use egress_core::allocation::Nodes;
use egress_core::allocation::draining::{held, stays};
use egress_core::model::node::Node;
use egress_core::model::policy::{Policies, PolicyKey, parse_egress_ip};

/// The leader has heard of the mark by then, and what it wrote before has come to the node.
const SETTLE: Duration = Duration::from_secs(1);
/// So many looks, at least. What nobody else can take is said to stay behind as many lists of the nodes.
const LOOKS: usize = 2;
/// How long a node that has nothing more may go on with what it says of hand-overs, or owe a word.
const FAREWELL: Duration = Duration::from_secs(6);

/// What the API server has said.
#[derive(Debug)]
pub(super) struct Look {
    pub(super) node: Option<Node>,
    /// All of them, where they were asked for.
    pub(super) nodes: Option<Nodes>,
    pub(super) policies: Policies,
}

/// What a look brought.
#[derive(Debug)]
pub(super) struct Seen {
    pub(super) said: Vec<String>,
    /// How it ended, if it did.
    pub(super) end: Option<Result<String, DrainError>>,
}

/// What has been seen.
pub(super) struct Watch<'a> {
    node: &'a str,
    begin: Instant,
    looks: usize,
    held: BTreeMap<IpAddr, PolicyKey>,
    /// What was held, and is no more, by the policy that it was held for.
    gone: BTreeMap<IpAddr, PolicyKey>,
    /// What the node's agent has said that it has let go of.
    released: BTreeSet<IpAddr>,
    /// What the node's agent is ready to take over.
    prepared: BTreeSet<IpAddr>,
    /// What cannot go, and why; so many lists of the nodes have said the same.
    stays: BTreeMap<IpAddr, String>,
    alike: usize,
    /// Since when nothing is held.
    empty: Option<Instant>,
}

impl<'a> Watch<'a> {
    /// With what there is to say; `now` is behind the mark.
    pub(super) fn begin(node: &'a str, policies: &Policies, now: Instant) -> (Self, String) {
        let held = held(policies, node);
        let said = match held.len() {
            0 => format!("{node} has no egress IPs"),
            some => format!("{node} has {}", count(some)),
        };
        let (gone, released, prepared) = Default::default();
        let (stays, alike, empty) = Default::default();
        (Self { node, begin: now, looks: 0, held, gone, released, prepared, stays, alike, empty }, said)
    }

    pub(super) fn has_any(&self) -> bool {
        !self.held.is_empty()
    }

    pub(super) fn see(&mut self, look: &Look, now: Instant) -> Seen {
        let mut said = Vec::new();
        let end = match &look.node {
            None => Some(Err(DrainError::Deleted(self.node.to_owned()))),
            Some(node) if !node.drained => Some(Err(DrainError::TakenBack(self.node.to_owned()))),
            Some(node) => {
                self.looks += 1;
                said = self.follow(&look.policies, now);
                self.released.extend(node.released.keys());
                self.prepared = node.prepared.keys().copied().collect();
                match self.has_any() {
                    true => self.all_stay(look, &mut said).map(Err),
                    false => self.is_done(node, now),
                }
            }
        };
        Seen { said, end }
    }

    /// What has gone, and come.
    fn follow(&mut self, policies: &Policies, now: Instant) -> Vec<String> {
        let (node, after) = (self.node, now.duration_since(self.begin).as_secs_f64());
        let before = std::mem::replace(&mut self.held, held(policies, node));
        let mut said = Vec::new();
        for (address, policy) in before.iter().filter(|(address, _)| !self.held.contains_key(address)) {
            let what = whereto(policies, *address).unwrap_or_else(|| match policies.contains_key(policy) {
                true => "no object has it assigned any more".to_owned(),
                false => "the object has been deleted".to_owned(),
            });
            said.push(format!("{address} ({}): {what}, after {after:.1} s", policy.name));
            self.gone.insert(*address, policy.clone());
        }
        // Who has deleted the policy wants nobody to have the address, and nobody gets it: no word is owed for that.
        self.gone.retain(|address, policy| policies.contains_key(policy) || whereto(policies, *address).is_some());
        for (address, policy) in self.held.iter().filter(|(address, _)| !before.contains_key(address)) {
            said.push(format!("{address} ({}) has come to {node}", policy.name));
            // What was said of it was about an earlier hand-over.
            self.released.remove(address);
            self.gone.remove(address);
        }
        said
    }

    fn all_stay(&mut self, look: &Look, said: &mut Vec<String>) -> Option<DrainError> {
        self.empty = None;
        let stays = stays(&look.policies, look.nodes.as_ref()?, self.node);
        self.alike = if stays == self.stays { self.alike + 1 } else { 1 };
        self.stays = stays;
        let none_goes = self.held.keys().all(|address| self.stays.contains_key(address));
        if !none_goes || self.alike < LOOKS {
            return None;
        }
        said.extend(self.rest());
        Some(DrainError::Stays { node: self.node.to_owned(), left: self.held.len() })
    }

    fn is_done(&mut self, node: &Node, now: Instant) -> Option<Result<String, DrainError>> {
        let since = *self.empty.get_or_insert(now);
        let unsaid = self.unsaid();
        let is_settled = self.looks >= LOOKS && now.duration_since(self.begin) >= SETTLE;
        let is_quiet = node.released.is_empty() && node.prepared.is_empty();
        let is_over = now.duration_since(since) >= FAREWELL;
        if !is_settled || !(is_over || (is_quiet && unsaid.is_none())) {
            return None;
        }
        let name = self.node;
        let what = if self.gone.is_empty() { "it has no egress IPs" } else { "no egress IP is served there" };
        Some(match unsaid {
            Some(unsaid) => Err(unsaid),
            None => Ok(format!("{name} is drained: {what}, and none comes until `egress-agent drain --undo {name}`")),
        })
    }

    /// What the node may still answer for.
    fn unsaid(&self) -> Option<DrainError> {
        let gone = self.gone.keys().filter(|address| !self.released.contains(address));
        let owed: BTreeSet<IpAddr> = gone.chain(&self.prepared).copied().collect();
        let addresses: Vec<String> = owed.iter().map(IpAddr::to_string).collect();
        let unsaid = || DrainError::Unsaid { node: self.node.to_owned(), addresses: addresses.join(", ") };
        (!addresses.is_empty()).then(unsaid)
    }

    /// There is no more time.
    pub(super) fn late(&self, seconds: u64) -> (Vec<String>, DrainError) {
        let (node, left) = (self.node.to_owned(), self.held.len());
        let error = match left {
            0 => self.unsaid().unwrap_or(DrainError::Short { node, seconds }),
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

fn whereto(policies: &Policies, address: IpAddr) -> Option<String> {
    let mut items = policies.values().flat_map(|policy| &policy.published.items);
    let there = items.find(|item| parse_egress_ip(&item.egress_ip) == Some(address));
    there.map(|item| format!("moved to {}", item.node))
}

#[cfg(test)]
mod tests;
