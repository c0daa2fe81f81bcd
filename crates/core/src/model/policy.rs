//! An EgressIP object.
//!
//! **Unreadable parts keep their last value.** The meaning of an unreadable selector, list of addresses or status is
//! unknown, and a guess would give some pod a wrong source address: if it counted as empty, pods would be deselected
//! and leave with their node's address. So such a part is taken from the last reading ([`Reading::filled_from`]), for
//! single changes and for lists. Without an earlier reading, the object selects only the pods that the kernel knew as
//! its own (`selection`), lists the addresses that are assigned to it, and drops traffic that has no address.

use std::collections::BTreeSet;
use std::net::IpAddr;

use crate::model::selector::Selector;

use crate::model::state::{EgressId, Family, family_of};
use crate::model::view::{Created, Reading};

/// One entry of `status.items`, as written.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Item {
    pub node: String,
    pub egress_ip: String,
}

/// A condition of the status.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Condition {
    pub status: bool,
    pub reason: String,
    pub message: String,
    pub observed_generation: Option<i64>,
    pub last_transition: String,
}

/// Conditions with their places in the status: foreign ones stay where they are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Conditions {
    /// The status has a list of conditions.
    pub listed: bool,
    /// The first of each of the agent's own types, with its place. They are few, and all objects of a large cluster
    /// have them, so a list takes a tenth of the space of a tree. A status may contain thousands of foreign ones.
    found: Box<[(String, usize, Condition)]>,
}

impl Conditions {
    /// Reads the list of a status; `own` are the agent's types.
    pub fn of(own: &[&str], list: impl IntoIterator<Item = (String, Condition)>) -> Self {
        let mut found: Vec<(String, usize, Condition)> = Vec::new();
        for (place, (kind, condition)) in list.into_iter().enumerate() {
            if own.contains(&kind.as_str()) && !found.iter().any(|(known, ..)| *known == kind) {
                found.push((kind, place, condition));
            }
        }
        Self { listed: true, found: found.into() }
    }

    /// The first condition of the type, and its place in the list.
    pub fn get(&self, kind: &str) -> Option<(usize, &Condition)> {
        self.found.iter().find(|(known, ..)| known == kind).map(|(_, place, condition)| (*place, condition))
    }
}

/// The selectors of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Selects {
    pub namespaces: Selector,
    pub pods: Selector,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EgressObject {
    pub name: String,
    pub uid: String,
    pub resource_version: String,
    pub generation: Option<i64>,
    pub created: Created,
    /// `spec.egressIPs` as typed.
    pub listed: Vec<String>,
    /// `None` if a selector is unreadable and no earlier reading is known: then no new pods are selected.
    pub selects: Option<Selects>,
    /// The egress ID of the object.
    pub id: Option<EgressId>,
    /// The addresses for which the controller has published that no node can host any of them.
    pub no_eligible_node: Option<BTreeSet<IpAddr>>,
    /// The object asks for a drop instead of the node's address.
    pub drop_unassigned: bool,
    pub has_annotations: bool,
    pub has_status: bool,
    /// The status has a list of items, possibly empty.
    pub has_items: bool,
    pub items: Vec<Item>,
    /// `status.selectedPods`.
    pub selected_pods: Option<u32>,
    pub conditions: Conditions,
    /// The parts of the current object that are unreadable.
    pub unreadable: Vec<Unreadable>,
}

/// A part of an object that can be unreadable by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    /// `spec.egressIPs`. An entry that is no address does not make it unreadable.
    Addresses,
    /// `spec.namespaceSelector` or `spec.podSelector`.
    Selectors,
    /// `status.items`.
    Items,
}

/// An unreadable part, and why, in a line for users.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Unreadable {
    pub part: Part,
    pub why: String,
    /// The part has its last value; otherwise nothing is known of it.
    pub is_known: bool,
}

impl Reading for EgressObject {
    fn is_whole(&self) -> bool {
        self.unreadable.is_empty()
    }

    fn filled_from(mut self, known: &Self) -> Self {
        if known.uid != self.uid {
            return self;
        }
        for unreadable in &mut self.unreadable {
            unreadable.is_known = !known.is_unknown(unreadable.part);
            match unreadable.part {
                Part::Addresses => self.listed.clone_from(&known.listed),
                Part::Selectors => self.selects.clone_from(&known.selects),
                Part::Items => self.items.clone_from(&known.items),
            }
        }
        self
    }
}

impl EgressObject {
    /// Unreadable now and never read before.
    pub fn is_unknown(&self, part: Part) -> bool {
        self.unreadable.iter().any(|unreadable| unreadable.part == part && !unreadable.is_known)
    }

    /// Age first, then name: the precedence of objects, the same on every node.
    pub fn rank(&self) -> (Created, &str) {
        (self.created, &self.name)
    }

    /// Whether a listed address has a node in the status.
    pub fn has_assigned(&self) -> bool {
        let listed = self.addresses();
        self.items.iter().filter_map(|item| parse_egress_ip(&item.egress_ip)).any(|address| listed.contains(&address))
    }

    /// The valid listed addresses, canonical and unique.
    pub fn addresses(&self) -> BTreeSet<IpAddr> {
        self.listed.iter().filter_map(|text| parse_egress_ip(text)).collect()
    }
}

/// Parses an egress IP: an address without a prefix length; `::ffff:a.b.c.d` is IPv4.
pub fn parse_egress_ip(text: &str) -> Option<IpAddr> {
    // Most have no spaces, and all addresses of the cluster are parsed often.
    let read = text.parse::<IpAddr>().or_else(|_| text.trim().parse());
    read.ok().map(|address| address.to_canonical())
}

/// The family of an entry, guessed if it is invalid: a typing error must not turn a drop into a leak.
pub fn listed_family(text: &str) -> Family {
    match parse_egress_ip(text) {
        Some(address) => family_of(address),
        None if text.contains(':') => Family::V6,
        None => Family::V4,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn egress_ips_are_parsed_strictly_and_made_canonical() {
        let ip = |text: &str| parse_egress_ip(text).map(|a| a.to_string());
        assert_eq!(ip("172.18.0.100").as_deref(), Some("172.18.0.100"));
        assert_eq!(ip("FD00:0172:18::0100").as_deref(), Some("fd00:172:18::100"));
        assert_eq!(ip("::ffff:172.18.0.100").as_deref(), Some("172.18.0.100"));
        for bad in ["172.18.0.100/32", "172.18.0.1000", "172.018.0.100", "", "eip"] {
            assert_eq!(ip(bad), None, "{bad}");
        }
    }
}
