//! An EgressIP object as the model knows it.
//!
//! **What cannot be read stays as it was.** Nobody can say what an unreadable selector, list of addresses or status
//! means, and each guess would be somebody's wrong source address: taken for empty it deselects pods, which then leave
//! with their node's address. So such a part is taken from the last reading ([`Reading::filled_from`]), whether
//! the object came alone or in a list. Where there is no last reading, the object selects nothing but the pods that the
//! kernel knew as its own (`selection`), lists the addresses that it was assigned, and drops what has none.

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

/// A condition as found in the status.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Condition {
    pub status: bool,
    pub reason: String,
    pub message: String,
    pub observed_generation: Option<i64>,
    pub last_transition: String,
}

/// Where conditions stand in the status: those of others stay where they are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Conditions {
    /// The status has a list of conditions.
    pub listed: bool,
    /// The first of each of the agent's own types, by its type and with its place. Few, and all objects of a large cluster
    /// have them: a tree would take ten times the room. Who may write the status may list thousands of others.
    found: Box<[(String, usize, Condition)]>,
}

impl Conditions {
    /// A list, as it stands in the status, and which types of it are the agent's own.
    pub fn of(own: &[&str], list: impl IntoIterator<Item = (String, Condition)>) -> Self {
        let mut found: Vec<(String, usize, Condition)> = Vec::new();
        for (place, (kind, condition)) in list.into_iter().enumerate() {
            if own.contains(&kind.as_str()) && !found.iter().any(|(known, ..)| *known == kind) {
                found.push((kind, place, condition));
            }
        }
        Self { listed: true, found: found.into() }
    }

    /// The first of the type, and its place in the list.
    pub fn get(&self, kind: &str) -> Option<(usize, &Condition)> {
        self.found.iter().find(|(known, ..)| known == kind).map(|(_, place, condition)| (*place, condition))
    }
}

/// Whom an object selects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Selects {
    pub namespaces: Selector,
    pub pods: Selector,
}

/// An EgressIP object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EgressObject {
    pub name: String,
    pub uid: String,
    pub resource_version: String,
    pub generation: Option<i64>,
    pub created: Created,
    /// `spec.egressIPs` as typed.
    pub listed: Vec<String>,
    /// `None` where a selector cannot be read and no earlier reading is known: nothing new is selected then.
    pub selects: Option<Selects>,
    /// The egress ID that the object carries.
    pub id: Option<EgressId>,
    /// The addresses for which the controller has published that no node can host any of them.
    pub no_eligible_node: Option<BTreeSet<IpAddr>>,
    /// The object asks for a drop where the node's address would serve.
    pub drop_unassigned: bool,
    pub has_annotations: bool,
    pub has_status: bool,
    /// The status has a list of items, empty or not.
    pub has_items: bool,
    pub items: Vec<Item>,
    /// `status.selectedPods`.
    pub selected_pods: Option<u32>,
    pub conditions: Conditions,
    /// What cannot be read of the object as it is now.
    pub unreadable: Vec<Unreadable>,
}

/// A part of an object that can be unreadable by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    /// `spec.egressIPs`; an entry that is no address is not this.
    Addresses,
    /// `spec.namespaceSelector` or `spec.podSelector`.
    Selectors,
    /// `status.items`.
    Items,
}

/// A part that cannot be read, and why, in a line for people.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Unreadable {
    pub part: Part,
    pub why: String,
    /// The part is as it was last read; else nothing is known of it.
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
    /// Cannot be read now, and was never read before.
    pub fn is_unknown(&self, part: Part) -> bool {
        self.unreadable.iter().any(|unreadable| unreadable.part == part && !unreadable.is_known)
    }

    /// Age first, then name: the order in which objects win over each other, the same on every node.
    pub fn rank(&self) -> (Created, &str) {
        (self.created, &self.name)
    }

    /// An address that it lists has a node, by its status.
    pub fn has_assigned(&self) -> bool {
        let listed = self.addresses();
        self.items.iter().filter_map(|item| parse_egress_ip(&item.egress_ip)).any(|address| listed.contains(&address))
    }

    /// The listed addresses that can be read, canonical and each once.
    pub fn addresses(&self) -> BTreeSet<IpAddr> {
        self.listed.iter().filter_map(|text| parse_egress_ip(text)).collect()
    }
}

/// The only reading of an egress IP: an address without prefix length; `::ffff:a.b.c.d` is IPv4.
pub fn parse_egress_ip(text: &str) -> Option<IpAddr> {
    // Most are written without spaces, and this is asked of every address of the cluster.
    let read = text.parse::<IpAddr>().or_else(|_| text.trim().parse());
    read.ok().map(|address| address.to_canonical())
}

/// The family that an entry means, also where it cannot be read: a typing error must not turn a drop into a leak.
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
    fn egress_ips_are_read_strictly_and_made_canonical() {
        let ip = |text: &str| parse_egress_ip(text).map(|a| a.to_string());
        assert_eq!(ip("172.18.0.100").as_deref(), Some("172.18.0.100"));
        assert_eq!(ip("FD00:0172:18::0100").as_deref(), Some("fd00:172:18::100"));
        assert_eq!(ip("::ffff:172.18.0.100").as_deref(), Some("172.18.0.100"));
        for bad in ["172.18.0.100/32", "172.18.0.1000", "172.018.0.100", "", "eip"] {
            assert_eq!(ip(bad), None, "{bad}");
        }
    }
}
