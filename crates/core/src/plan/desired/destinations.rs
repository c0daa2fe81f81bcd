//! Which addresses of a policy have a route to which destination.
//!
//! Addresses on the uplinks and on further interfaces lead to different networks, and a flow with an address of the wrong one
//! is lost. The pod's node knows the routes of the gateways' interfaces from their EgressNode objects.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use crate::model::interface::EgressInterface;
use crate::model::view::ClusterView;

/// Maximum prefixes of a policy and family; of longer ones the packets count as part of shorter ones.
const MOST: usize = 256;

/// The addresses with a route to each prefix. Empty if all lie in one network, where each serves every destination.
///
/// `addresses` are those of one family with their nodes. One that no node serves counts for the destinations of the first node
/// that could, so that their flows wait for it.
pub(super) fn of_policy<'a>(
    view: &ClusterView,
    addresses: impl Iterator<Item = (IpAddr, Option<&'a str>)>,
) -> BTreeMap<IpNet, BTreeSet<IpAddr>> {
    let find = |node: Option<&str>, address: IpAddr| match node {
        Some(name) => view.nodes.get(name),
        None => view.nodes.values().find(|node| node.hosts(address)),
    };
    let found = addresses.filter_map(|(address, node)| Some((address, find(node, address)?)));
    // With the further interface, of those that lie on one.
    let found: Vec<_> = found.map(|(address, node)| (address, node, node.other_interface(address))).collect();
    let networks: BTreeSet<Option<IpNet>> =
        found.iter().map(|(address, _, further)| further.and_then(|one| one.network_of(*address))).collect();
    if networks.len() < 2 {
        return BTreeMap::new();
    }
    let mut destinations = BTreeMap::<IpNet, BTreeSet<IpAddr>>::new();
    for (address, node, further) in found {
        let uplink = || node.interfaces.iter().find(|one| one.is_uplink);
        // Also of an agent that publishes no interfaces.
        let default = further.is_none().then(|| default_route(address));
        let reached = further.or_else(uplink).into_iter().flat_map(EgressInterface::reached);
        for prefix in reached.chain(default).filter(|prefix| prefix.addr().is_ipv4() == address.is_ipv4()) {
            destinations.entry(prefix).or_default().insert(address);
        }
    }
    let mut all: Vec<_> = destinations.into_iter().collect();
    all.sort_by_key(|(prefix, _)| prefix.prefix_len());
    all.truncate(MOST);
    all.into_iter().collect()
}

fn default_route(address: IpAddr) -> IpNet {
    if address.is_ipv4() { Ipv4Net::default().into() } else { Ipv6Net::default().into() }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::model::node::Node;
    use crate::model::samples::{interface, ip, net};

    const ON_UPLINKS: [&str; 2] = ["172.18.0.100", "172.18.0.101"];
    const FURTHER: &str = "10.10.10.100";

    /// `n1` has its uplink alone, `n2` and `n3` are in a further network too.
    fn view() -> ClusterView {
        let node = |number: u8| {
            let network = net("172.18.0.0/16");
            let uplink = EgressInterface { is_uplink: true, ..interface("eth0", &["172.18.0.0/16", "10.9.0.0/16"]) };
            let mut eth1 = interface("eth1", &["10.10.10.0/24", "fd00:10::/64"]);
            eth1.destinations = [net("10.20.0.0/16"), net("fd00:20::/48")].into();
            let interfaces = if number == 1 { vec![uplink] } else { vec![uplink, eth1] };
            let primary = vec![IpNet::new(ip(&format!("172.18.0.{number}")), 16).expect("a length")];
            let host_cidrs = vec![network, net("10.10.10.0/24")];
            Node { name: format!("n{number}"), primary, host_cidrs, interfaces, ..Node::default() }
        };
        let nodes = (1..=3).map(|number| (format!("n{number}"), Arc::new(node(number))));
        ClusterView { nodes: nodes.collect(), ..ClusterView::default() }
    }

    fn found(addresses: &[(&str, Option<&str>)]) -> Vec<(String, Vec<String>)> {
        let addresses = addresses.iter().map(|(address, node)| (ip(address), *node));
        let text = |(prefix, addresses): (IpNet, BTreeSet<IpAddr>)| {
            (prefix.to_string(), addresses.iter().map(IpAddr::to_string).collect())
        };
        of_policy(&view(), addresses).into_iter().map(text).collect()
    }

    fn expected(all: &[(&str, &[&str])]) -> Vec<(String, Vec<String>)> {
        let texts = |addresses: &[&str]| addresses.iter().map(|text| (*text).to_owned()).collect();
        all.iter().map(|(prefix, addresses)| ((*prefix).to_owned(), texts(addresses))).collect()
    }

    #[test]
    fn addresses_of_several_networks_have_destinations() {
        let [one, two] = ON_UPLINKS;
        let all = [(one, Some("n1")), (two, Some("n2")), (FURTHER, Some("n3"))];
        let destinations = expected(&[
            ("0.0.0.0/0", &[one, two]),
            ("10.9.0.0/16", &[one, two]),
            ("10.10.10.0/24", &[FURTHER]),
            ("10.20.0.0/16", &[FURTHER]),
            ("172.18.0.0/16", &[one, two]),
        ]);
        assert_eq!(found(&all), destinations);
        // It waits for a node, and so do the flows to its network.
        assert_eq!(found(&[(one, Some("n1")), (two, Some("n2")), (FURTHER, None)]), destinations);
        assert_eq!(found(&[(one, Some("n1")), (two, None), (FURTHER, Some("n3"))]), destinations);
        let v6 = [("fd00:172:18::100", Some("n1")), ("fd00:10::100", Some("n2"))];
        let leads = found(&v6);
        assert_eq!(
            leads,
            expected(&[("::/0", &[v6[0].0]), ("fd00:10::/64", &[v6[1].0]), ("fd00:20::/48", &[v6[1].0])])
        );
    }

    #[test]
    fn addresses_of_one_network_have_none() {
        let [one, two] = ON_UPLINKS;
        for all in [
            vec![(one, Some("n1"))],
            vec![(one, Some("n1")), (two, Some("n2"))],
            vec![(one, Some("n1")), ("10.9.0.7", Some("n2"))],
            vec![(FURTHER, Some("n2")), ("10.10.10.101", Some("n3"))],
            vec![(FURTHER, Some("n2")), ("10.10.10.101", None)],
            vec![(FURTHER, Some("n2")), ("10.66.0.1", None)],
            vec![],
        ] {
            assert_eq!(found(&all), [], "{all:?}");
        }
    }

    #[test]
    fn the_shortest_prefixes_of_many_count() {
        let mut view = view();
        let node = Arc::make_mut(view.nodes.get_mut("n2").expect("a node"));
        node.interfaces[1].destinations = (0..=u8::MAX).map(|i| net(&format!("10.20.{i}.0/24"))).collect();
        node.interfaces[1].destinations.insert(net("10.20.0.0/15"));
        let addresses = [(ip(ON_UPLINKS[0]), Some("n1")), (ip(FURTHER), Some("n2"))];
        let destinations = of_policy(&view, addresses.into_iter());
        assert_eq!(destinations.len(), MOST);
        assert!(
            ["0.0.0.0/0", "10.20.0.0/15", "172.18.0.0/16"].iter().all(|text| destinations.contains_key(&net(text)))
        );
    }
}
