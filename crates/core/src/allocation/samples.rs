//! Nodes and egress policies that tests begin with.

use std::sync::Arc;

use crate::model::node::Node;
use crate::model::policy::{EgressPolicy, PolicyKey, Published};
pub use crate::model::samples::key;
use crate::model::samples::{items, origin};

pub fn node(name: &str, network: &str) -> (String, Arc<Node>) {
    let primary = vec![network.parse().expect("a network")];
    let pod_subnets = vec!["10.244.0.0/24".parse().expect("a network")];
    let ready = Node { name: name.into(), assignable: true, ready: true, ..Node::default() };
    let node = Node { primary, pod_subnets, networks_known: true, ..ready };
    (name.to_owned(), Arc::new(node))
}

pub fn policy(name: &str, created: i64, listed: &[&str], assigned: &[(&str, &str)]) -> (PolicyKey, Arc<EgressPolicy>) {
    let policy = EgressPolicy {
        listed: listed.iter().map(|text| (*text).to_owned()).collect(),
        published: Published { items: items(assigned), ..Published::default() },
        ..EgressPolicy::new(origin(name, created))
    };
    (key(name), Arc::new(policy))
}
