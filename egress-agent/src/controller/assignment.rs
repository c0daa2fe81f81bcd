//! Which node serves which egress IP. Pure.
//!
//! 1. Every address belongs to one object: to the one that has it in its status, else to the oldest that lists it.
//! 2. What is assigned and still right stays where it is.
//! 3. As many of the others as possible are placed: for each object a maximum matching of its addresses and the nodes
//!    that it does not use yet, by augmenting paths, least loaded nodes first. A node never holds two addresses of one
//!    object.
//! 4. Newly placed addresses move along chains of nodes as long as that makes loads more even.
//!
//! The order of the input does not matter: objects are taken by age and name, ties between nodes are broken by a hash of
//! address and node.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::IpAddr;
use std::sync::Arc;

use crate::model::selection::by_rank;
use crate::model::view::{EgressObject, Item, Node, parse_egress_ip};

pub type Objects = BTreeMap<String, Arc<EgressObject>>;
pub type Nodes = BTreeMap<String, Arc<Node>>;

/// What became of one entry of `spec.egressIPs`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fate {
    Assigned {
        node: String,
    },
    /// Not an address.
    Invalid,
    /// A node has this address itself.
    Conflict {
        node: String,
    },
    /// Another object has it.
    Taken {
        object: String,
        node: Option<String>,
    },
    /// No node with the label has a network that holds it.
    NoNode,
    /// This node could hold it, and is not ready or has not said its networks; as others like it, perhaps.
    NotReady {
        node: String,
    },
    /// Every node that could take it has another address of the object.
    NoRoom,
}

/// What became of one object. Entries are canonical where they can be read, in the order of the spec, each once.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    pub entries: Vec<(String, Fate)>,
}

impl Outcome {
    /// As `status.items` shows it.
    pub fn items(&self) -> Vec<Item> {
        let assigned = self.entries.iter().filter_map(|(egress_ip, fate)| match fate {
            Fate::Assigned { node } => Some(Item { node: node.clone(), egress_ip: egress_ip.clone() }),
            _ => None,
        });
        assigned.collect()
    }

    /// No node can host any address of the object: the one case in which the node's address may serve. Whether a node is
    /// ready decides on placing, not on this: an address whose node is away comes back. Nor is it this case where an
    /// address could be placed, were it free, or where nobody knows which address an entry means.
    pub fn no_eligible_node(&self) -> bool {
        !self.entries.is_empty() && self.entries.iter().all(|(_, fate)| *fate == Fate::NoNode)
    }
}

/// Has the label, is ready, and says where it is.
pub fn is_eligible(node: &Node) -> bool {
    node.assignable && node.ready && node.endpoint().is_some()
}

pub fn assign(objects: &Objects, nodes: &Nodes) -> BTreeMap<String, Outcome> {
    let ranked = by_rank(objects.values());
    let mut places = Places::new(nodes);
    let conflicts = node_addresses(nodes);
    let holders = holders(&ranked, &places, &conflicts);
    let holds = |object: &EgressObject, address: &IpAddr| holders.get(address) == Some(&object.name.as_str());

    for object in &ranked {
        places.keep(object, |address| holds(object, address));
    }
    for object in &ranked {
        let kept = places.of(&object.name);
        for address in object.addresses() {
            if holds(object, &address) && !conflicts.contains_key(&address) && !kept.contains_key(&address) {
                places.place(&object.name, address);
            }
        }
    }
    places.level();
    let waiting = |address: IpAddr| {
        nodes.iter().find(|(_, node)| node.assignable && node.may_host(address)).map(|(name, _)| name.as_str())
    };
    ranked.iter().map(|object| (object.name.clone(), outcome(object, &places, &conflicts, &holders, waiting))).collect()
}

fn outcome<'a>(
    object: &EgressObject,
    places: &Places<'_>,
    conflicts: &BTreeMap<IpAddr, &str>,
    holders: &BTreeMap<IpAddr, &str>,
    waiting: impl Fn(IpAddr) -> Option<&'a str>,
) -> Outcome {
    let assigned = places.of(&object.name);
    let fate = |address: IpAddr| match (assigned.get(&address), holders.get(&address), conflicts.get(&address)) {
        (Some(node), _, _) => Fate::Assigned { node: (*node).to_owned() },
        (_, Some(other), _) if *other != object.name => Fate::Taken {
            object: (*other).to_owned(),
            node: places.of(other).get(&address).map(|node| (*node).to_owned()),
        },
        (_, _, Some(node)) => Fate::Conflict { node: (*node).to_owned() },
        _ if places.nodes.values().any(|node| node.hosts(address)) => Fate::NoRoom,
        _ => waiting(address).map_or(Fate::NoNode, |node| Fate::NotReady { node: node.to_owned() }),
    };
    let mut seen = BTreeSet::new();
    let entries = object.listed.iter().map(|text| match parse_egress_ip(text) {
        Some(address) => (address.to_string(), fate(address)),
        None => (text.clone(), Fate::Invalid),
    });
    Outcome { entries: entries.filter(|(text, _)| seen.insert(text.clone())).collect() }
}

fn node_addresses(nodes: &Nodes) -> BTreeMap<IpAddr, &str> {
    nodes.iter().flat_map(|(name, node)| node.addresses().into_iter().map(move |a| (a, name.as_str()))).collect()
}

/// The object that each listed address belongs to.
fn holders<'a>(
    ranked: &[&'a Arc<EgressObject>],
    places: &Places<'_>,
    conflicts: &BTreeMap<IpAddr, &str>,
) -> BTreeMap<IpAddr, &'a str> {
    let mut holders = BTreeMap::new();
    for object in ranked {
        let listed = object.addresses();
        for (address, _) in items(object).into_iter().filter(|(a, node)| listed.contains(a) && places.serves(node, *a))
        {
            holders.entry(address).or_insert(object.name.as_str());
        }
    }
    for object in ranked {
        for address in object.addresses().into_iter().filter(|address| !conflicts.contains_key(address)) {
            holders.entry(address).or_insert(object.name.as_str());
        }
    }
    holders
}

fn items(object: &EgressObject) -> Vec<(IpAddr, &str)> {
    let readable = |item: &'_ Item| parse_egress_ip(&item.egress_ip);
    let mut items: Vec<_> =
        object.items.iter().filter_map(|item| readable(item).map(|a| (a, item.node.as_str()))).collect();
    items.sort_unstable();
    items
}

/// The eligible nodes and what they hold.
struct Places<'a> {
    nodes: BTreeMap<&'a str, &'a Node>,
    load: BTreeMap<&'a str, usize>,
    /// Object -> address -> node.
    held: BTreeMap<String, BTreeMap<IpAddr, &'a str>>,
    /// What was placed now and may still move.
    fresh: BTreeSet<(String, IpAddr)>,
}

impl<'a> Places<'a> {
    fn new(nodes: &'a Nodes) -> Self {
        let eligible = nodes.iter().filter(|(_, node)| is_eligible(node));
        let nodes: BTreeMap<&str, &Node> = eligible.map(|(name, node)| (name.as_str(), node.as_ref())).collect();
        let load = nodes.keys().map(|name| (*name, 0)).collect();
        Self { nodes, load, held: BTreeMap::new(), fresh: BTreeSet::new() }
    }

    fn serves(&self, node: &str, address: IpAddr) -> bool {
        self.nodes.get(node).is_some_and(|node| node.hosts(address))
    }

    fn of(&self, object: &str) -> BTreeMap<IpAddr, &'a str> {
        self.held.get(object).cloned().unwrap_or_default()
    }

    fn put(&mut self, object: &str, address: IpAddr, node: &'a str) {
        let old = self.held.entry(object.to_owned()).or_default().insert(address, node);
        for (node, change) in [(old, -1), (Some(node), 1)] {
            if let Some(load) = node.and_then(|node| self.load.get_mut(node)) {
                *load = load.saturating_add_signed(change);
            }
        }
    }

    fn keep(&mut self, object: &EgressObject, holds: impl Fn(&IpAddr) -> bool) {
        let listed = object.addresses();
        for (address, node) in items(object) {
            let taken = self.of(&object.name);
            let doubled = taken.contains_key(&address) || taken.values().any(|used| *used == node);
            let name = self.nodes.get_key_value(node).map(|(name, _)| *name);
            if let Some(name) = name.filter(|_| !doubled && holds(&address) && listed.contains(&address))
                && self.serves(name, address)
            {
                self.put(&object.name, address, name);
            }
        }
    }

    /// The nodes that could take the address, the best first.
    fn candidates(&self, address: IpAddr) -> Vec<&'a str> {
        let mut nodes: Vec<&str> = self.nodes.iter().filter(|(_, n)| n.hosts(address)).map(|(name, _)| *name).collect();
        nodes.sort_by_cached_key(|name| (self.load[name], tie(address, name), *name));
        nodes
    }

    /// Places one address, moving others of the object that were placed now where that makes room.
    fn place(&mut self, object: &str, address: IpAddr) {
        let mut visited = BTreeSet::new();
        self.augment(object, address, &mut visited);
    }

    fn augment(&mut self, object: &str, address: IpAddr, visited: &mut BTreeSet<&'a str>) -> bool {
        for node in self.candidates(address) {
            if !visited.insert(node) {
                continue;
            }
            let holder = self.of(object).into_iter().find(|(_, used)| *used == node).map(|(held, _)| held);
            let free = match holder {
                None => true,
                Some(held) => self.fresh.contains(&(object.to_owned(), held)) && self.augment(object, held, visited),
            };
            if free {
                self.put(object, address, node);
                self.fresh.insert((object.to_owned(), address));
                return true;
            }
        }
        false
    }

    /// Moves fresh addresses along chains of nodes, each time from a node to one that has at least two fewer.
    fn level(&mut self) {
        let mut sources: BTreeSet<&str> = self.load.keys().copied().collect();
        while let Some(source) = sources.iter().copied().max_by_key(|node| (self.load[node], *node)) {
            match self.chain_from(source) {
                Some(chain) => {
                    for (object, address, node) in chain {
                        self.put(&object, address, node);
                    }
                }
                None => {
                    sources.remove(source);
                }
            }
        }
    }

    /// The shortest chain of moves from this node to one with at least two fewer, its last move first.
    fn chain_from(&self, source: &'a str) -> Option<Vec<(String, IpAddr, &'a str)>> {
        let mut reached: BTreeMap<&str, (String, IpAddr, &'a str)> = BTreeMap::new();
        let mut queue = VecDeque::from([source]);
        while let Some(node) = queue.pop_front() {
            for (object, address) in &self.fresh {
                let held = &self.held[object];
                if held.get(address) != Some(&node) {
                    continue;
                }
                for next in self.candidates(*address) {
                    if next == source || reached.contains_key(next) || held.values().any(|used| *used == next) {
                        continue;
                    }
                    reached.insert(next, (object.clone(), *address, node));
                    if self.load[next] + 2 <= self.load[source] {
                        return Some(Self::trace(&reached, next, source));
                    }
                    queue.push_back(next);
                }
            }
        }
        None
    }

    fn trace(
        reached: &BTreeMap<&'a str, (String, IpAddr, &'a str)>,
        end: &'a str,
        source: &str,
    ) -> Vec<(String, IpAddr, &'a str)> {
        let (mut chain, mut node) = (Vec::new(), end);
        while node != source {
            let Some((object, address, from)) = reached.get(node) else { break };
            chain.push((object.clone(), *address, node));
            node = from;
        }
        chain
    }
}

/// FNV-1a: the same on every machine and in every version, as a tie that must stay broken needs.
fn tie(address: IpAddr, node: &str) -> u64 {
    let text = format!("{address} {node}");
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

#[cfg(test)]
mod tests;
