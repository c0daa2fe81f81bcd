//! The search for a chain of moves that ends with one more address placed.
//!
//! Each step is an address that looks for a node: a waiting one of the object that is to be served, one that another
//! step's address takes the node from, or a waiting one of an object whose address gives way to it. Every address and
//! every node is visited once, so a search costs no more than what was placed in this run plus the nodes of its classes.

use std::collections::{BTreeMap, BTreeSet};

use super::hosts::{ClassIndex, NodeIndex};
use super::matching::{Matching, Slot, UnitIndex};

/// What leads to no room. Nothing of it ever will: a chain that entered it would have found what the search did not.
#[derive(Debug, Default)]
pub(super) struct Dead {
    units: BTreeSet<UnitIndex>,
    nodes: BTreeSet<Visit>,
}

/// A node, and a family where it limits families.
type Visit = (NodeIndex, Option<bool>);

/// Moves that are done at once, and the node that has one more address then.
pub(super) struct Chain {
    pub(super) moves: Vec<(UnitIndex, Option<NodeIndex>)>,
    pub(super) end: NodeIndex,
}

#[derive(Clone, Copy)]
enum Cause {
    /// It waits, and its object is to be served.
    Waiting,
    /// The address of that step takes its node.
    Displaced { by: usize, from: NodeIndex },
    /// It waits, and stands in for the address of that step, of the same object.
    StandsIn { for_step: usize },
}

struct Step {
    unit: UnitIndex,
    cause: Cause,
}

struct Search<'m, 'a> {
    matching: &'m Matching<'a>,
    steps: Vec<Step>,
    units: BTreeSet<UnitIndex>,
    nodes: BTreeSet<Visit>,
    /// Nodes of each class that no address was able to look at yet.
    remaining: BTreeMap<ClassIndex, Vec<NodeIndex>>,
    best: Option<((usize, bool, u64), usize, NodeIndex)>,
}

/// The chain to the least loaded node with room that can be reached.
pub(super) fn chain(matching: &mut Matching<'_>, object: usize) -> Option<Chain> {
    let mut search = Search {
        matching,
        steps: Vec::new(),
        units: BTreeSet::new(),
        nodes: BTreeSet::new(),
        remaining: BTreeMap::new(),
        best: None,
    };
    for unit in matching.objects[object].waiting.iter().copied() {
        search.add(unit, Cause::Waiting);
    }
    let mut next = 0;
    while next < search.steps.len() {
        search.look(next);
        next += 1;
    }
    let found = search.best.map(|(_, step, end)| search.trace(step, end));
    let Search { units, nodes, .. } = search;
    if found.is_none() {
        matching.dead.units.extend(units);
        matching.dead.nodes.extend(nodes);
    }
    found
}

impl Search<'_, '_> {
    fn add(&mut self, unit: UnitIndex, cause: Cause) {
        if !self.matching.dead.units.contains(&unit) && self.units.insert(unit) {
            self.steps.push(Step { unit, cause });
        }
    }

    fn look(&mut self, step: usize) {
        let matching = self.matching;
        let unit = self.steps[step].unit;
        let object = matching.units[unit].object;
        let class = matching.units[unit].class;
        if matching.units[unit].node.is_some() {
            for other in matching.objects[object].waiting.iter().copied() {
                self.add(other, Cause::StandsIn { for_step: step });
            }
        }
        let nodes = self.remaining.remove(&class).unwrap_or_else(|| matching.classes[class].nodes.clone());
        let nodes = nodes.into_iter().filter(|node| !self.look_at(step, *node)).collect();
        self.remaining.insert(class, nodes);
    }

    /// True when nothing is left to be seen there.
    fn look_at(&mut self, step: usize, node: NodeIndex) -> bool {
        let matching = self.matching;
        let unit = self.steps[step].unit;
        let v4 = matching.units[unit].address.is_ipv4();
        let holding = &matching.nodes[node];
        let visit = (node, holding.limits_families().then_some(v4));
        if self.nodes.contains(&visit) || matching.dead.nodes.contains(&visit) {
            return true;
        }
        let exchange = |other: &UnitIndex| holding.may_exchange(v4, matching.units[*other].address.is_ipv4());
        match matching.objects[matching.units[unit].object].slots.get(&node) {
            Some(Slot::Kept) => return false,
            // The object has the node already: only what it has there can give way.
            Some(Slot::Fresh(other)) => {
                if exchange(other) {
                    self.add(*other, Cause::Displaced { by: step, from: node });
                }
                return false;
            }
            None => {}
        }
        if holding.limits_families() && self.is_taken_on_the_way(step, node) {
            return false;
        }
        self.nodes.insert(visit);
        if holding.has_room(v4) {
            let cost = matching.cost(unit, node);
            if self.best.is_none_or(|(best, ..)| cost < best) {
                self.best = Some((cost, step, node));
            }
        }
        for other in holding.fresh.iter().filter(|other| exchange(other)) {
            self.add(*other, Cause::Displaced { by: step, from: node });
        }
        true
    }

    /// Does an address of the same object take this node earlier in the chain?
    fn is_taken_on_the_way(&self, step: usize, node: NodeIndex) -> bool {
        let object = |step: usize| self.matching.units[self.steps[step].unit].object;
        let (own, mut at) = (object(step), step);
        loop {
            match self.steps[at].cause {
                Cause::Waiting => return false,
                Cause::StandsIn { for_step } => at = for_step,
                Cause::Displaced { by, from } => {
                    if from == node && object(by) == own {
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
