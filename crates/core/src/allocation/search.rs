//! The search for a chain of moves that ends with one more address placed.
//!
//! Each step is an address that looks for a node: a waiting one of the policy to be served, one whose node another
//! step's address takes, or a waiting one of a policy whose address gives way to it. Every address and every node is
//! visited once. An address is skipped, with all of its class on the same node, if others of its class have already
//! examined all candidates. So a search costs about the nodes of the classes that it reaches, however many addresses
//! are placed.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::allocation::hosts::{ClassIndex, NodeIndex};
use crate::allocation::matching::{Matching, NodeUse, UnitIndex};

/// Addresses and nodes from which no free slot is reachable. Later searches skip them, since that cannot change.
#[derive(Debug, Default)]
pub(super) struct Dead {
    units: BTreeSet<UnitIndex>,
    nodes: Visits,
}

impl Dead {
    pub(super) fn has_unit(&self, unit: UnitIndex) -> bool {
        self.units.contains(&unit)
    }
}

/// A node, and a family if it limits families.
type Visit = (NodeIndex, Option<bool>);

/// A set of visits: a few bits for each node.
#[derive(Debug, Default)]
struct Visits(Vec<u8>);

impl Visits {
    fn bit((_, v4): Visit) -> u8 {
        match v4 {
            None => 1,
            Some(true) => 2,
            Some(false) => 4,
        }
    }

    fn contains(&self, visit: Visit) -> bool {
        self.0.get(visit.0).is_some_and(|bits| bits & Self::bit(visit) != 0)
    }

    fn insert(&mut self, visit: Visit) {
        if self.0.len() <= visit.0 {
            self.0.resize(visit.0 + 1, 0);
        }
        self.0[visit.0] |= Self::bit(visit);
    }

    fn extend(&mut self, others: &Self) {
        self.0.resize(self.0.len().max(others.0.len()), 0);
        self.0.iter_mut().zip(&others.0).for_each(|(bits, others)| *bits |= others);
    }
}

/// Moves that are applied together, and the node that has one more address then.
pub(super) struct Chain {
    pub(super) moves: Vec<(UnitIndex, Option<NodeIndex>)>,
    pub(super) end: NodeIndex,
}

#[derive(Clone, Copy)]
enum Cause {
    /// It waits, and its policy is to be served.
    Waiting,
    /// The address of that step takes its node.
    Displaced { by: usize, from: NodeIndex },
    /// It waits, and stands in for the address of that step, of the same policy.
    StandsIn { for_step: usize },
}

struct SearchStep {
    unit: UnitIndex,
    cause: Cause,
}

/// The next item to examine.
enum Next {
    Step(usize),
    /// The addresses of the node: each could give way to the address of that step.
    Node {
        node: NodeIndex,
        by: usize,
    },
}

struct Search<'m, 'a> {
    matching: &'m Matching<'a>,
    steps: Vec<SearchStep>,
    queue: VecDeque<Next>,
    units: BTreeSet<UnitIndex>,
    nodes: Visits,
    /// Nodes of each class that no address could examine yet.
    remaining: BTreeMap<ClassIndex, Vec<NodeIndex>>,
    /// Nodes with an address of a policy that has others waiting: they could stand in for it.
    with_stand_ins: BTreeSet<NodeIndex>,
    best: Option<((usize, bool, u64), usize, NodeIndex)>,
}

/// The chain to the least loaded reachable node with room.
pub(super) fn chain(matching: &mut Matching<'_>, policy: usize) -> Option<Chain> {
    let with_stand_ins = matching.nodes_with_stand_ins(policy);
    let mut search = Search {
        matching,
        steps: Vec::new(),
        queue: VecDeque::new(),
        units: BTreeSet::new(),
        nodes: Visits::default(),
        remaining: BTreeMap::new(),
        with_stand_ins,
        best: None,
    };
    for unit in matching.policies[policy].waiting.iter().copied() {
        search.add(unit, Cause::Waiting);
    }
    while let Some(next) = search.queue.pop_front() {
        match next {
            Next::Step(step) => search.examine(step),
            Next::Node { node, by } => search.displace(node, by),
        }
    }
    let found = search.best.map(|(_, step, end)| search.trace(step, end));
    let Search { units, nodes, .. } = search;
    if found.is_none() {
        matching.dead.units.extend(units);
        matching.dead.nodes.extend(&nodes);
    }
    found
}

impl Search<'_, '_> {
    /// Makes the address a step, unless it is one already.
    fn step(&mut self, unit: UnitIndex, cause: Cause) -> Option<usize> {
        if self.matching.dead.has_unit(unit) || !self.units.insert(unit) {
            return None;
        }
        self.steps.push(SearchStep { unit, cause });
        Some(self.steps.len() - 1)
    }

    fn add(&mut self, unit: UnitIndex, cause: Cause) {
        let step = self.step(unit, cause);
        self.queue.extend(step.map(Next::Step));
    }

    /// Whether addresses of this class have examined all of their candidates.
    fn has_examined_all(&self, class: ClassIndex) -> bool {
        self.remaining.get(&class).is_some_and(Vec::is_empty)
    }

    fn displace(&mut self, node: NodeIndex, by: usize) {
        let matching = self.matching;
        let load = &matching.nodes[node];
        let has_stand_ins = self.with_stand_ins.contains(&node);
        if !has_stand_ins && load.classes().all(|class| self.has_examined_all(class)) {
            return;
        }
        let v4 = matching.units[self.steps[by].unit].address.is_ipv4();
        for unit in load.placed.iter().copied() {
            let is_of_use = has_stand_ins || !self.has_examined_all(matching.units[unit].class);
            if is_of_use
                && load.may_exchange(v4, matching.units[unit].address.is_ipv4())
                && let Some(step) = self.step(unit, Cause::Displaced { by, from: node })
            {
                self.examine(step);
            }
        }
    }

    fn examine(&mut self, step: usize) {
        let matching = self.matching;
        let unit = self.steps[step].unit;
        let policy = matching.units[unit].policy;
        let class = matching.units[unit].class;
        if matching.units[unit].node.is_some() {
            for other in matching.policies[policy].waiting.iter().copied() {
                self.add(other, Cause::StandsIn { for_step: step });
            }
        }
        let mut nodes = self.remaining.remove(&class).unwrap_or_else(|| matching.classes[class].nodes.clone());
        nodes.retain(|node| !self.examine_node(step, *node));
        self.remaining.insert(class, nodes);
    }

    /// Returns true if nothing is left to examine there.
    fn examine_node(&mut self, step: usize, node: NodeIndex) -> bool {
        let matching = self.matching;
        let unit = self.steps[step].unit;
        let v4 = matching.units[unit].address.is_ipv4();
        let load = &matching.nodes[node];
        let visit = (node, load.limits_families().then_some(v4));
        if self.nodes.contains(visit) || matching.dead.nodes.contains(visit) {
            return true;
        }
        match matching.policies[matching.units[unit].policy].slots.get(&node) {
            Some(NodeUse::Kept) => return false,
            // The policy has the node already: only its address there can give way.
            Some(NodeUse::Placed(other)) => {
                if load.may_exchange(v4, matching.units[*other].address.is_ipv4()) {
                    self.add(*other, Cause::Displaced { by: step, from: node });
                }
                return false;
            }
            None => {}
        }
        if load.limits_families() && self.is_taken_earlier(step, node) {
            return false;
        }
        self.nodes.insert(visit);
        if load.has_room(v4) {
            let cost = matching.cost(unit, node);
            if self.best.is_none_or(|(best, ..)| cost < best) {
                self.best = Some((cost, step, node));
            }
        }
        if !load.placed.is_empty() {
            self.queue.push_back(Next::Node { node, by: step });
        }
        true
    }

    /// Whether an address of the same policy takes this node earlier in the chain.
    fn is_taken_earlier(&self, step: usize, node: NodeIndex) -> bool {
        let policy = |step: usize| self.matching.units[self.steps[step].unit].policy;
        let (own, mut at) = (policy(step), step);
        loop {
            match self.steps[at].cause {
                Cause::Waiting => return false,
                Cause::StandsIn { for_step } => at = for_step,
                Cause::Displaced { by, from } => {
                    if from == node && policy(by) == own {
                        return true;
                    }
                    at = by;
                }
            }
        }
    }

    fn trace(&self, step: usize, end: NodeIndex) -> Chain {
        let (mut moves, mut step, mut to) = (Vec::new(), step, Some(end));
        loop {
            moves.push((self.steps[step].unit, to));
            (step, to) = match self.steps[step].cause {
                Cause::Waiting => return Chain { moves, end },
                Cause::Displaced { by, from } => (by, Some(from)),
                Cause::StandsIn { for_step } => (for_step, None),
            };
        }
    }
}
