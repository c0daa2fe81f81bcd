//! Tunnel endpoints of all nodes, for probes through the overlay, and all node addresses, to recognise a node. Published when
//! one of them changes, not with each change of a node.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use tokio::sync::watch;

use egress_core::model::node::Node;
use egress_core::model::view::Update;

pub struct Endpoints {
    own_name: String,
    by_node: BTreeMap<String, IpAddr>,
    own: watch::Sender<Option<IpAddr>>,
    all: watch::Sender<Arc<BTreeSet<IpAddr>>>,
    addresses_by_node: BTreeMap<String, BTreeSet<IpAddr>>,
    addresses: watch::Sender<Arc<BTreeSet<IpAddr>>>,
}

/// Receivers: the own node's tunnel endpoint, all tunnel endpoints, all addresses of all nodes.
pub type PublishedEndpoints =
    (watch::Receiver<Option<IpAddr>>, watch::Receiver<Arc<BTreeSet<IpAddr>>>, watch::Receiver<Arc<BTreeSet<IpAddr>>>);

impl Endpoints {
    pub fn new(own_name: &str) -> (Self, PublishedEndpoints) {
        let ((own, is_own), (all, are_all)) = (watch::channel(None), watch::channel(Arc::default()));
        let (addresses, are_addresses) = watch::channel(Arc::default());
        let (by_node, addresses_by_node) = (BTreeMap::new(), BTreeMap::new());
        let endpoints = Self { own_name: own_name.to_owned(), by_node, own, all, addresses_by_node, addresses };
        (endpoints, (is_own, are_all, are_addresses))
    }

    pub fn apply(&mut self, update: &Update<String, Arc<Node>>) {
        let is_news = match update {
            Update::Replaced(nodes) => {
                let of = |(name, node): (&String, &Arc<Node>)| Some((name.clone(), endpoint(node)?));
                std::mem::replace(&mut self.by_node, nodes.iter().filter_map(of).collect()) != self.by_node
            }
            Update::Changed(name, node) => match endpoint(node) {
                Some(endpoint) => self.by_node.insert(name.clone(), endpoint) != Some(endpoint),
                None => self.by_node.remove(name).is_some(),
            },
            Update::Removed(name) => self.by_node.remove(name).is_some(),
        };
        if is_news {
            self.own.send_replace(self.by_node.get(&self.own_name).copied());
            self.all.send_replace(Arc::new(self.by_node.values().copied().collect()));
        }
        self.apply_addresses(update);
    }

    fn apply_addresses(&mut self, update: &Update<String, Arc<Node>>) {
        let by_node = &mut self.addresses_by_node;
        let is_news = match update {
            Update::Replaced(nodes) => {
                let all = nodes.iter().map(|(name, node)| (name.clone(), node.addresses())).collect();
                std::mem::replace(by_node, all) != *by_node
            }
            Update::Changed(name, node) => {
                let addresses = node.addresses();
                by_node.insert(name.clone(), addresses.clone()) != Some(addresses)
            }
            Update::Removed(name) => by_node.remove(name).is_some(),
        };
        if is_news {
            self.addresses.send_replace(Arc::new(by_node.values().flatten().copied().collect()));
        }
    }
}

pub fn endpoint(node: &Node) -> Option<IpAddr> {
    node.endpoint().map(|endpoint| endpoint.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use egress_core::model::samples::ip;

    fn node(name: &str, address: &str) -> (String, Arc<Node>) {
        (name.to_owned(), Arc::new(Node { name: name.into(), internal: vec![ip(address)], ..Node::default() }))
    }

    #[test]
    fn endpoints_follow_the_nodes() {
        let (mut endpoints, (own, mut all, addresses)) = Endpoints::new("n1");
        endpoints.apply(&Update::Replaced([node("n1", "172.18.0.2"), node("n2", "172.18.0.3")].into()));
        assert_eq!(*own.borrow(), Some(ip("172.18.0.2")));
        assert_eq!(**all.borrow_and_update(), [ip("172.18.0.2"), ip("172.18.0.3")].into());
        let (name, same) = node("n2", "172.18.0.3");
        endpoints.apply(&Update::Changed(name, same));
        assert!(!all.has_changed().expect("a sender"), "nothing has changed");
        let (name, moved) = node("n2", "172.18.0.4");
        endpoints.apply(&Update::Changed(name, moved));
        assert_eq!(**all.borrow_and_update(), [ip("172.18.0.2"), ip("172.18.0.4")].into());
        assert_eq!(**addresses.borrow(), [ip("172.18.0.2"), ip("172.18.0.4")].into());
        endpoints.apply(&Update::Removed("n1".into()));
        assert_eq!((*own.borrow(), &**addresses.borrow()), (None, &[ip("172.18.0.4")].into()));
        assert_eq!(**all.borrow_and_update(), [ip("172.18.0.4")].into());
    }
}
