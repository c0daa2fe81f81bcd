//! Values that tests begin with.

use std::collections::BTreeSet;
use std::net::IpAddr;

use crate::model::selector::{Requirement, Selector};
use ipnet::IpNet;

use crate::model::settings::{OnUnassigned, Settings, UnknownPods};
use crate::model::state::EgressId;
use crate::model::view::{Conditions, EgressObject, Item, Selects};

pub fn ip(text: &str) -> IpAddr {
    text.parse().expect("a literal")
}

pub fn net(text: &str) -> IpNet {
    text.parse().expect("a literal")
}

/// Of node `n1`.
pub fn settings() -> Settings {
    Settings {
        node_name: "n1".into(),
        cluster_subnets: vec![net("10.244.0.0/16")],
        service_cidrs: vec![net("10.96.0.0/16")],
        excluded_cidrs: vec![net("198.51.100.0/24")],
        api_servers: BTreeSet::new(),
        unknown_pods: UnknownPods::Auto,
        on_unassigned: OnUnassigned::NodeAddress,
    }
}

/// Selects the pods of namespaces with `env=prod`, with egress ID 1. Items are pairs of node and address.
pub fn object(name: &str, listed: &[&str], items: &[(&str, &str)]) -> EgressObject {
    EgressObject {
        name: name.into(),
        uid: name.into(),
        resource_version: "1".into(),
        generation: None,
        created: 1,
        listed: listed.iter().map(|text| (*text).to_owned()).collect(),
        selects: Some(Selects { namespaces: equals("env", "prod"), pods: Selector::default() }),
        id: Some(EgressId(1)),
        no_eligible_node: None,
        drop_unassigned: false,
        has_annotations: false,
        has_status: false,
        has_items: false,
        selected_pods: None,
        items: items.iter().map(|(n, a)| Item { node: (*n).into(), egress_ip: (*a).into() }).collect(),
        conditions: Conditions::default(),
        unreadable: Vec::new(),
    }
}

/// The label has this value.
pub fn equals(key: &str, value: &str) -> Selector {
    [Requirement::In(key.to_owned(), BTreeSet::from([value.to_owned()]))].into_iter().collect()
}
