//! Nodes and egress policies that tests begin with.

use std::sync::Arc;

use crate::model::node::Node;
use crate::model::view::{Conditions, EgressObject, Item};

pub fn node(name: &str, network: &str) -> (String, Arc<Node>) {
    let primary = vec![network.parse().expect("a network")];
    let pod_subnets = vec!["10.244.0.0/24".parse().expect("a network")];
    let ready = Node { name: name.into(), assignable: true, ready: true, ..Node::default() };
    let node = Node { primary, pod_subnets, networks_known: true, ..ready };
    (name.to_owned(), Arc::new(node))
}

pub fn object(name: &str, created: i64, listed: &[&str], items: &[(&str, &str)]) -> (String, Arc<EgressObject>) {
    let item = |(node, ip): &(&str, &str)| Item { node: (*node).into(), egress_ip: (*ip).into() };
    let object = EgressObject {
        name: name.into(),
        uid: name.into(),
        resource_version: "1".into(),
        generation: Some(1),
        created,
        listed: listed.iter().map(|text| (*text).to_owned()).collect(),
        selects: None,
        id: None,
        no_eligible_node: None,
        drop_unassigned: false,
        has_annotations: false,
        has_status: false,
        has_items: false,
        selected_pods: None,
        items: items.iter().map(item).collect(),
        conditions: Conditions::default(),
        unreadable: Vec::new(),
    };
    (name.to_owned(), Arc::new(object))
}
