//! Places addresses on nodes: as many as possible, older policies first, then as evenly as possible.
//!
//! It is a min-cost flow, one unit at a time, from a policy over one of its addresses to a node; the n-th address of
//! a node costs more than the one before. A node takes one address of a policy, and no more than its cloud allows.
//! To add a unit, [`search`] finds a chain of moves to the least loaded reachable node with room; only addresses
//! placed in this run move. The search is skipped if the direct placement is optimal, which is the usual case.
//!
//! One exception to exactness: if a policy has addresses of both families and a cloud limits each family, the limits
//! are kept but the number may not be maximal.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use crate::allocation::hosts::{AddressClass, ClassIndex, NodeIndex};
use crate::allocation::search;
use crate::model::node::Capacity;
use crate::rendezvous;

pub(super) type UnitIndex = usize;

/// An address to be placed.
#[derive(Debug)]
pub(super) struct Unit {
    pub(super) policy: usize,
    pub(super) address: IpAddr,
    tie: u64,
    pub(super) class: ClassIndex,
    /// Its former node.
    former: Option<NodeIndex>,
    pub(super) node: Option<NodeIndex>,
}

/// A node and the addresses it holds.
#[derive(Debug)]
pub(super) struct NodeLoad {
    tie: u64,
    capacity: Capacity,
    load: usize,
    load_v4: usize,
    /// Addresses placed in this run, which may still move.
    pub(super) placed: Vec<UnitIndex>,
    /// How many of these each class has.
    placed_of_class: BTreeMap<ClassIndex, usize>,
}

impl NodeLoad {
    pub(super) fn new(name: &str, capacity: Capacity) -> Self {
        let tie = rendezvous::hash(name.as_bytes());
        Self { tie, capacity, load: 0, load_v4: 0, placed: Vec::new(), placed_of_class: BTreeMap::new() }
    }

    /// The classes of addresses that may still move.
    pub(super) fn classes(&self) -> impl Iterator<Item = ClassIndex> {
        self.placed_of_class.keys().copied()
    }

    /// How many more addresses of this family it takes.
    fn room_of_family(&self, v4: bool) -> usize {
        let (limit, load) = match v4 {
            true => (self.capacity.v4, self.load_v4),
            false => (self.capacity.v6, self.load - self.load_v4),
        };
        limit.map_or(usize::MAX, |limit| limit.saturating_sub(load))
    }

    pub(super) fn has_room(&self, v4: bool) -> bool {
        self.room_of_family(v4) > 0 && self.capacity.total.is_none_or(|limit| self.load < limit)
    }

    /// Whether an address of one family may replace one of the other.
    pub(super) fn may_exchange(&self, new_v4: bool, old_v4: bool) -> bool {
        new_v4 == old_v4 || self.room_of_family(new_v4) > 0
    }

    pub(super) fn limits_families(&self) -> bool {
        self.capacity.v4.is_some() || self.capacity.v6.is_some()
    }

    fn is_within_limits(&self) -> bool {
        let within = |limit: Option<usize>, load| limit.is_none_or(|limit| load <= limit);
        within(self.capacity.total, self.load)
            && within(self.capacity.v4, self.load_v4)
            && within(self.capacity.v6, self.load - self.load_v4)
    }
}

/// What a policy has on a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NodeUse {
    /// It was there before and stays.
    Kept,
    Placed(UnitIndex),
}

#[derive(Debug, Default)]
pub(super) struct ObjectPlacement {
    pub(super) slots: BTreeMap<NodeIndex, NodeUse>,
    /// Addresses without a node, those that had one first.
    pub(super) waiting: Vec<UnitIndex>,
}

#[derive(Debug)]
pub(super) struct Matching<'a> {
    pub(super) classes: &'a [AddressClass],
    pub(super) nodes: Vec<NodeLoad>,
    pub(super) policies: Vec<ObjectPlacement>,
    pub(super) units: Vec<Unit>,
    /// Candidate nodes in groups that no address connects.
    groups: Vec<Vec<NodeIndex>>,
    group: Vec<Option<usize>>,
    pub(super) dead: search::Dead,
    /// Processed policies with waiting addresses that could still stand in for others.
    unsettled: BTreeSet<usize>,
}

impl<'a> Matching<'a> {
    pub(super) fn new(nodes: Vec<NodeLoad>, policies: usize, classes: &'a [AddressClass]) -> Self {
        let (group, groups) = groups(nodes.len(), classes);
        let policies = (0..policies).map(|_| ObjectPlacement::default()).collect();
        let (units, dead, unsettled) = (Vec::new(), search::Dead::default(), BTreeSet::new());
        Self { classes, nodes, policies, units, groups, group, dead, unsettled }
    }

    /// The policy keeps an address of this family on the node.
    pub(super) fn keep(&mut self, policy: usize, node: NodeIndex, v4: bool) {
        self.policies[policy].slots.insert(node, NodeUse::Kept);
        self.nodes[node].load += 1;
        self.nodes[node].load_v4 += usize::from(v4);
    }

    /// Adds an address to be placed.
    pub(super) fn add(&mut self, policy: usize, address: IpAddr, class: ClassIndex, last: Option<NodeIndex>) {
        let unit = self.units.len();
        let tie = rendezvous::hash_of_address(address);
        self.units.push(Unit { policy, address, tie, class, former: last, node: None });
        self.policies[policy].waiting.push(unit);
    }

    /// Places the added addresses.
    pub(super) fn solve(&mut self) {
        for policy in 0..self.policies.len() {
            let units = &self.units;
            self.policies[policy].waiting.sort_by_key(|unit| (units[*unit].former.is_none(), units[*unit].address));
            while !self.policies[policy].waiting.is_empty() && self.place_one(policy) {}
            self.unsettled.insert(policy);
        }
    }

    /// Nodes with an address of a policy that has others waiting: `policy`, or one processed before.
    pub(super) fn nodes_with_stand_ins(&mut self, policy: usize) -> BTreeSet<NodeIndex> {
        let (policies, dead) = (&self.policies, &self.dead);
        self.unsettled.retain(|policy| policies[*policy].waiting.iter().any(|unit| !dead.has_unit(*unit)));
        let slots = self.unsettled.iter().chain([&policy]).flat_map(|policy| &policies[*policy].slots);
        slots.filter(|(_, slot)| matches!(slot, NodeUse::Placed(_))).map(|(node, _)| *node).collect()
    }

    fn place_one(&mut self, policy: usize) -> bool {
        let direct = self.best_direct(policy);
        if let Some((unit, node)) = direct
            && self.is_least_loaded(node)
        {
            self.place(unit, node);
            return true;
        }
        let load = direct.map(|(_, node)| self.nodes[node].load);
        let chain =
            search::chain(self, policy).filter(|chain| load.is_none_or(|load| self.nodes[chain.end].load < load));
        if let Some(chain) = chain
            && self.apply(&chain.moves)
        {
            return true;
        }
        let Some((unit, node)) = direct else { return false };
        self.place(unit, node);
        true
    }

    /// The best node for a waiting address of the policy without moving another. One address represents all of its
    /// class.
    fn best_direct(&self, policy: usize) -> Option<(UnitIndex, NodeIndex)> {
        let object_placement = &self.policies[policy];
        let mut classes_seen = BTreeSet::new();
        let first =
            object_placement.waiting.iter().copied().filter(|unit| classes_seen.insert(self.units[*unit].class));
        let best = first.filter_map(|unit| {
            let nodes = self.classes[self.units[unit].class].nodes.iter().copied();
            let v4 = self.units[unit].address.is_ipv4();
            let free =
                nodes.filter(|node| !object_placement.slots.contains_key(node) && self.nodes[*node].has_room(v4));
            free.map(|node| (self.cost(unit, node), unit, node)).min()
        });
        best.min().map(|(_, unit, node)| (unit, node))
    }

    /// The order of nodes for an address: the least loaded, then its former one, then by hash.
    pub(super) fn cost(&self, unit: UnitIndex, node: NodeIndex) -> (usize, bool, u64) {
        let Unit { tie, former: last, .. } = self.units[unit];
        (self.nodes[node].load, last != Some(node), rendezvous::weight(tie, self.nodes[node].tie))
    }

    /// Whether no reachable node with room has fewer addresses than this one.
    fn is_least_loaded(&self, node: NodeIndex) -> bool {
        let Some(group) = self.group[node] else { return false };
        let load = self.nodes[node].load;
        let has_room = |load: &NodeLoad| load.has_room(true) || load.has_room(false);
        self.groups[group].iter().all(|other| self.nodes[*other].load >= load || !has_room(&self.nodes[*other]))
    }

    fn place(&mut self, unit: UnitIndex, node: NodeIndex) {
        let Unit { policy, address, class, .. } = self.units[unit];
        self.units[unit].node = Some(node);
        self.policies[policy].waiting.retain(|other| *other != unit);
        self.policies[policy].slots.insert(node, NodeUse::Placed(unit));
        let load = &mut self.nodes[node];
        load.placed.push(unit);
        *load.placed_of_class.entry(class).or_default() += 1;
        load.load += 1;
        load.load_v4 += usize::from(address.is_ipv4());
    }

    fn unplace(&mut self, unit: UnitIndex) {
        let Unit { policy, address, class, node, .. } = self.units[unit];
        let Some(node) = node else { return };
        self.units[unit].node = None;
        self.policies[policy].waiting.push(unit);
        self.policies[policy].slots.remove(&node);
        let load = &mut self.nodes[node];
        load.placed.retain(|other| *other != unit);
        if let Entry::Occupied(mut count) = load.placed_of_class.entry(class) {
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
            }
        }
        load.load -= 1;
        load.load_v4 -= usize::from(address.is_ipv4());
    }

    /// Applies all moves, or none if a node would exceed a limit.
    fn apply(&mut self, moves: &[(UnitIndex, Option<NodeIndex>)]) -> bool {
        let before: Vec<_> = moves.iter().map(|(unit, _)| (*unit, self.units[*unit].node)).collect();
        self.set(moves);
        let fits = moves.iter().filter_map(|(_, node)| *node).all(|node| self.nodes[node].is_within_limits());
        if !fits {
            self.set(&before);
        }
        fits
    }

    fn set(&mut self, places: &[(UnitIndex, Option<NodeIndex>)]) {
        places.iter().for_each(|(unit, _)| self.unplace(*unit));
        for (unit, node) in places {
            if let Some(node) = node {
                self.place(*unit, *node);
            }
        }
    }
}

/// Joins the nodes of each class.
fn groups(nodes: usize, classes: &[AddressClass]) -> (Vec<Option<usize>>, Vec<Vec<NodeIndex>>) {
    let mut group: Vec<Option<usize>> = vec![None; nodes];
    let mut groups: Vec<Vec<NodeIndex>> = Vec::new();
    for class in classes {
        let joined: BTreeSet<usize> = class.nodes.iter().filter_map(|node| group[*node]).collect();
        let mut members: BTreeSet<NodeIndex> = class.nodes.iter().copied().collect();
        for old in joined {
            members.extend(std::mem::take(&mut groups[old]));
        }
        members.iter().for_each(|node| group[*node] = Some(groups.len()));
        groups.push(members.into_iter().collect());
    }
    (group, groups)
}
