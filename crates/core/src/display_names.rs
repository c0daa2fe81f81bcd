//! Display names for the numbers and addresses that maps contain.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use serde::{Deserialize, Serialize};

/// The names that this node's agent knows; empty without an agent.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Names {
    pub node: Option<String>,
    /// `namespace/name` of this node's pods, by address.
    pub pods: BTreeMap<IpAddr, String>,
    /// The objects that users wrote, by egress ID.
    pub objects: BTreeMap<u32, String>,
    /// Nodes by their tunnel endpoint.
    pub nodes: BTreeMap<IpAddr, String>,
    /// The egress IDs of egress IPs: a gateway knows the object of a packet by them, and not by the pod of another node.
    #[serde(default)]
    pub egress_ips: BTreeMap<IpAddr, u32>,
}

impl Names {
    /// Addresses of a pod of this node.
    pub fn addresses_of(&self, pod: &str) -> Vec<IpAddr> {
        self.pods.iter().filter(|(_, name)| *name == pod).map(|(address, _)| *address).collect()
    }

    /// How many pods have these addresses; `None` if one of the addresses has no name.
    pub fn pods_of(&self, addresses: impl IntoIterator<Item = IpAddr>) -> Option<usize> {
        let pods = addresses.into_iter().map(|address| self.pods.get(&address));
        Some(pods.collect::<Option<BTreeSet<_>>>()?.len())
    }

    /// `name (10.244.1.10)`, or the address alone.
    pub fn pod(&self, address: IpAddr) -> String {
        named(self.pods.get(&address), &address)
    }

    /// `name (3)`, or the number alone.
    pub fn object(&self, egress_id: u32) -> String {
        named(self.objects.get(&egress_id), &format!("egress ID {egress_id}"))
    }

    /// `name (172.18.0.3)`, or the address alone.
    pub fn node(&self, endpoint: IpAddr) -> String {
        named(self.nodes.get(&endpoint), &endpoint)
    }
}

fn named(name: Option<&String>, number: &dyn std::fmt::Display) -> String {
    name.map_or_else(|| number.to_string(), |name| format!("{name} ({number})"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_without_a_name_show_their_number() {
        let ip: IpAddr = "10.244.1.10".parse().expect("a literal");
        let none = Names::default();
        assert_eq!([none.pod(ip), none.object(3), none.node(ip)], ["10.244.1.10", "egress ID 3", "10.244.1.10"]);
        let names = Names {
            pods: [(ip, "red/one".to_owned())].into(),
            objects: [(3, "first".to_owned())].into(),
            ..Names::default()
        };
        assert_eq!([names.pod(ip), names.object(3)], ["red/one (10.244.1.10)", "first (egress ID 3)"]);
        assert_eq!([names.pods_of([ip]), names.pods_of([ip, [10, 244, 1, 11].into()])], [Some(1), None]);
        assert_eq!((names.addresses_of("red/one"), names.addresses_of("red/two")), (vec![ip], vec![]));
    }
}
