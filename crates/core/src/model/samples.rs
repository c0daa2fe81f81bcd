//! Values that tests begin with.

use std::collections::BTreeSet;
use std::net::IpAddr;

use crate::model::selector::{LabelValues, Requirement, Selector};
use ipnet::IpNet;

use crate::model::interface::{EgressInterface, InterfaceState};
use crate::model::policy::{
    AddressUse, EgressPolicy, Item, PolicyKey, PolicyKind, PolicyOrigin, PolicyRule, Published, Selects, SourceKind,
};
use crate::model::settings::{NodeSettings, OnUnassigned, UnknownPods};
use crate::model::state::{EgressId, EgressIds};
use crate::model::view::CreationTimestamp;

pub fn ip(text: &str) -> IpAddr {
    text.parse().expect("a literal")
}

pub fn net(text: &str) -> IpNet {
    text.parse().expect("a literal")
}

/// A usable interface with these networks, which is no uplink. Its index is the number in its name.
pub fn interface(name: &str, networks: &[&str]) -> EgressInterface {
    let digits: String = name.chars().filter(char::is_ascii_digit).collect();
    EgressInterface {
        index: digits.parse().expect("a number in the name"),
        name: name.to_owned(),
        mac: [2, 0, 0, 0, 0, 1],
        mtu: 1500,
        is_uplink: false,
        vlan: None,
        addresses: Vec::new(),
        networks: networks.iter().map(|network| (net(network), None)).collect(),
        destinations: BTreeSet::new(),
        state: InterfaceState::Usable,
    }
}

/// Of node `n1`.
pub fn settings() -> NodeSettings {
    NodeSettings {
        node_name: "n1".into(),
        cluster_subnets: vec![net("10.244.0.0/16")],
        service_cidrs: vec![net("10.96.0.0/16")],
        excluded_cidrs: vec![net("198.51.100.0/24")],
        api_servers: BTreeSet::new(),
        unknown_pods: UnknownPods::Auto,
        on_unassigned: OnUnassigned::NodeAddress,
    }
}

pub fn key(name: &str) -> PolicyKey {
    PolicyKey::egress_ip(name)
}

/// The origin of an EgressIP object whose UID is its name.
pub fn origin(name: &str, created: i64) -> PolicyOrigin {
    PolicyOrigin { key: key(name), uid: name.into(), resource_version: "1".into(), generation: Some(1), created }
}

pub fn items(items: &[(&str, &str)]) -> Vec<Item> {
    items.iter().map(|(node, address)| Item { node: (*node).into(), egress_ip: (*address).into() }).collect()
}

/// Selects the pods of namespaces with `env=prod`, with egress ID 1. Items are pairs of node and address.
pub fn policy(name: &str, listed: &[&str], assigned: &[(&str, &str)]) -> EgressPolicy {
    let selects = Selects { namespaces: equals("env", "prod"), ..Selects::default() };
    EgressPolicy {
        listed: listed.iter().map(|text| (*text).to_owned()).collect(),
        rules: Some(vec![EgressPolicy::own_rule(&origin(name, 1), selects)]),
        published: Published { ids: EgressIds::both(EgressId(1)), items: items(assigned), ..Published::default() },
        ..EgressPolicy::new(origin(name, 1))
    }
}

impl From<&str> for PolicyKey {
    fn from(name: &str) -> Self {
        key(name)
    }
}

impl EgressPolicy {
    /// A copy with another published state.
    #[must_use]
    pub fn published_as(&self, change: impl FnOnce(&mut Published)) -> Self {
        let mut policy = self.clone();
        change(&mut policy.published);
        policy
    }

    /// A copy of another origin, which its rules have too.
    #[must_use]
    pub fn from_origin(&self, change: impl FnOnce(&mut PolicyOrigin)) -> Self {
        let mut policy = self.clone();
        change(&mut policy.origin);
        let PolicyOrigin { key, uid, created, .. } = policy.origin.clone();
        for source in policy.rules.iter_mut().flatten().map(|rule| &mut rule.source) {
            (source.name, source.uid, source.created) = (key.name.clone(), uid.clone(), created);
        }
        policy
    }

    /// A copy as the assignment of an EgressService, created then.
    #[must_use]
    pub fn of_service(&self, created: CreationTimestamp) -> Self {
        let policy = self.from_origin(|origin| {
            origin.key.kind = PolicyKind::Assignment;
            origin.created = created;
        });
        let any = || vec![Self::own_rule(&policy.origin, Selects::default())];
        let rules = Some(policy.rules.clone().unwrap_or_else(any));
        let policy = Self { address_use: AddressUse::OfService, rules, ..policy };
        policy.with_rules(|rule| rule.source.kind = SourceKind::EgressService)
    }

    /// A copy whose rules are changed.
    #[must_use]
    pub fn with_rules(&self, change: impl Fn(&mut PolicyRule)) -> Self {
        let mut policy = self.clone();
        policy.rules.iter_mut().flatten().for_each(change);
        policy
    }
}

/// The label has this value.
pub fn equals(key: &str, value: &str) -> Selector {
    [Requirement::In(key.to_owned(), LabelValues::from_iter([value.to_owned()]))].into_iter().collect()
}
