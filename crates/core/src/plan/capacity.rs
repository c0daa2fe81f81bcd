//! Shares of the maps. Pure.
//!
//! | entries of `cluster` | limited by | at most, of 65,536 |
//! |---|---|---|
//! | nodes' pod subnets, and prefixes from flags | the cluster | what the others leave: 16,384 |
//! | assigned egress IPs | authors of EgressIP objects | [`MOST_EGRESS_IPS`], of the oldest objects |
//! | addresses of Services outside the service networks | authors of Services | [`MOST_OF_SERVICES`], in equal shares for the namespaces, cluster-assigned before author-chosen; [`MOST_OF_SERVICE`] of one Service |
//!
//! An address without an entry is judged by a shorter prefix, in the end as outside: a selected pod reaches such a
//! Service address with its egress IP, and is not refused at such an egress IP of another object. Every node leaves out
//! the same ones.
//!
//! `policy` has entries only for objects that select a pod or have an address here, now or before ([`spare_policies`]),
//! so that other objects cost a node nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::IpNet;

use crate::model::services::{ServiceKey, Services};
use crate::model::state::{EgressId, KernelState, NodeAddress, PodState, Prefix, PrefixKind};

pub const MOST_OF_SERVICE: usize = 64;
pub const MOST_OF_SERVICES: usize = 32_768;
pub const MOST_EGRESS_IPS: usize = 16_384;

/// The addresses of Services that have an entry.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ServiceRoom {
    admitted: BTreeSet<IpAddr>,
    /// The number of addresses of each Service that have no entry because of limited room.
    left_out: BTreeMap<ServiceKey, usize>,
}

impl ServiceRoom {
    /// The number of addresses left out of each Service by the last call of [`follow`](Self::follow).
    pub fn left_out(&self) -> &BTreeMap<ServiceKey, usize> {
        &self.left_out
    }

    /// Updates the entries of Services' addresses and returns the changed ones. An address that is a node's, an egress
    /// IP, or in a prefix of the cluster takes no room: its own entry would hide the more exact one.
    pub fn follow(
        &mut self,
        services: &Services,
        nodes: &BTreeMap<IpAddr, NodeAddress>,
        cluster: &mut BTreeMap<IpNet, Prefix>,
    ) -> BTreeSet<IpAddr> {
        for address in &self.admitted {
            cluster.remove(&IpNet::from(*address));
        }
        let lengths: BTreeSet<(bool, u8)> =
            cluster.keys().map(|prefix| (prefix.addr().is_ipv4(), prefix.prefix_len())).collect();
        let is_known = |address: &IpAddr| {
            let of_family = lengths.iter().filter(|(is_ipv4, _)| *is_ipv4 == address.is_ipv4());
            let mut prefixes = of_family.filter_map(|(_, length)| IpNet::new(*address, *length).ok());
            nodes.contains_key(address) || prefixes.any(|prefix| cluster.contains_key(&prefix.trunc()))
        };
        let (admitted, left_out) = admit(services, |address| !is_known(address), MOST_OF_SERVICES);
        let touched = self.admitted.symmetric_difference(&admitted).copied().collect();
        let entry = Prefix { kind: PrefixKind::Service, node: None };
        cluster.extend(admitted.iter().map(|address| (IpNet::from(*address), entry)));
        *self = Self { admitted, left_out };
        touched
    }
}

/// The addresses of Services by namespace.
type ByNamespace<'a> = BTreeMap<&'a str, Vec<(&'a ServiceKey, IpAddr)>>;

/// Admits at most `most` addresses and counts the others. Each Service admits its lowest ones, and namespaces get equal
/// shares. Author-chosen addresses come after all cluster-assigned ones, so that creating namespaces takes no cluster
/// IP from others.
fn admit(
    services: &Services,
    takes_room: impl Fn(&IpAddr) -> bool,
    most: usize,
) -> (BTreeSet<IpAddr>, BTreeMap<ServiceKey, usize>) {
    let (mut given, mut chosen): (ByNamespace<'_>, ByNamespace<'_>) = Default::default();
    let mut left_out: BTreeMap<ServiceKey, usize> = BTreeMap::new();
    for (key, service) in services.iter() {
        let asks = service.addresses.iter().copied().filter(|address| takes_room(address));
        let mut asks: Vec<_> = asks.map(|address| (key, address)).collect();
        asks.sort_by_key(|(_, address)| !service.given.contains(address));
        let beyond = service.surplus + asks.len().saturating_sub(MOST_OF_SERVICE);
        asks.truncate(MOST_OF_SERVICE);
        let of_author = asks.split_off(asks.partition_point(|(_, address)| service.given.contains(address)));
        given.entry(&key.namespace).or_default().extend(asks);
        chosen.entry(&key.namespace).or_default().extend(of_author);
        if beyond > 0 {
            left_out.insert(key.clone(), beyond);
        }
    }
    let mut admitted = BTreeSet::new();
    for by_namespace in [given, chosen] {
        let mut asking: Vec<_> = by_namespace.into_values().map(Vec::into_iter).collect();
        // Namespaces without further requests drop out, so that one with many Services does not cost a look at all
        // others for each address.
        while !asking.is_empty() {
            asking.retain_mut(|asks| {
                let Some((key, address)) = asks.next() else { return false };
                if admitted.len() < most {
                    admitted.insert(address);
                } else if !admitted.contains(&address) {
                    *left_out.entry(key.clone()).or_default() += 1;
                }
                true
            });
        }
    }
    (admitted, left_out)
}

/// Removes the policies of objects that select no pod of this node and have no address here. Policies in the kernel
/// stay until their object is gone: a plan would take a removed policy for lost addresses.
pub fn spare_policies(desired: &mut KernelState, actual: &KernelState) {
    let mut asked: BTreeSet<EgressId> = BTreeSet::new();
    for state in [&*desired, actual] {
        asked.extend(state.pods.values().filter_map(|pod| match pod {
            PodState::Selected(id) => Some(*id),
            PodState::Known | PodState::ByDestination(_) => None,
        }));
        asked.extend(state.classes.values().flat_map(|policies| policies.ids()));
        asked.extend(state.owned.keys().chain(state.handovers.keys()));
    }
    desired.policy.retain(|key, _| asked.contains(&key.0) || actual.policy.contains_key(key));
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;
    use crate::model::samples::{ip, net};
    use crate::model::services::Service;
    use crate::model::view::Update;

    fn addresses(first: u32, count: u32) -> BTreeSet<IpAddr> {
        (first..first + count).map(|number| IpAddr::from(Ipv4Addr::from(number))).collect()
    }

    fn put(services: &mut Services, namespace: &str, name: &str, addresses: BTreeSet<IpAddr>) {
        let key = ServiceKey { namespace: namespace.into(), name: name.into() };
        services.apply(Update::Changed(key, Service { addresses, ..Service::default() }));
    }

    #[test]
    fn one_service_gets_no_more_than_its_share_and_known_addresses_take_none() {
        let (mut services, mut room) = (Services::default(), ServiceRoom::default());
        let subnet = Prefix { kind: PrefixKind::PodSubnet, node: None };
        let mut cluster = BTreeMap::from([(net("10.0.0.0/24"), subnet)]);
        put(&mut services, "a", "many", addresses(0x0a00_0000, 256 + 100));
        put(&mut services, "a", "one", BTreeSet::from([ip("192.0.2.1")]));
        let touched = room.follow(&services, &BTreeMap::new(), &mut cluster);
        let mut expected = addresses(0x0a00_0100, 64);
        expected.insert(ip("192.0.2.1"));
        assert_eq!((&touched, cluster.len()), (&expected, 1 + 65));
        let left_out: Vec<_> = room.left_out().iter().map(|(key, count)| (key.name.as_str(), *count)).collect();
        assert_eq!(left_out, [("many", 36)]);

        services.apply(Update::Removed(ServiceKey { namespace: "a".into(), name: "many".into() }));
        assert_eq!(room.follow(&services, &BTreeMap::new(), &mut cluster).len(), 64);
        assert_eq!(cluster.keys().copied().collect::<Vec<_>>(), [net("10.0.0.0/24"), net("192.0.2.1/32")]);
        assert!(room.left_out().is_empty() && room.follow(&services, &BTreeMap::new(), &mut cluster).is_empty());
    }

    #[test]
    fn a_namespace_that_asks_for_all_takes_no_room_of_others() {
        let mut services = Services::default();
        for number in 0..1_000_u32 {
            put(&mut services, "greedy", &format!("s{number}"), addresses(0x0a00_0000 + number * 64, 64));
        }
        let modest: BTreeSet<IpAddr> = addresses(0xc000_0200, 50);
        put(&mut services, "modest", "s", modest.clone());
        let (admitted, left_out) = admit(&services, |_| true, 1_000);
        assert_eq!(admitted.len(), 1_000);
        assert!(modest.is_subset(&admitted));
        assert!(left_out.keys().all(|key| key.namespace == "greedy"));
        assert_eq!(left_out.values().sum::<usize>(), 64_000 - 950);
    }

    #[test]
    fn creating_namespaces_takes_no_cluster_ip_from_others() {
        let mut services = Services::default();
        for number in 0..100_u32 {
            put(&mut services, &format!("greedy{number}"), "s", addresses(0x0a00_0000 + number * 64, 64));
        }
        let cluster_ips = addresses(0xac1e_0000, 50);
        for (number, address) in cluster_ips.iter().enumerate() {
            let key = ServiceKey { namespace: "modest".into(), name: format!("s{number}") };
            let given = BTreeSet::from([*address]);
            services.apply(Update::Changed(key, Service { addresses: given.clone(), given, ..Service::default() }));
        }
        let (admitted, left_out) = admit(&services, |_| true, 1_000);
        assert_eq!(admitted.len(), 1_000);
        assert!(cluster_ips.is_subset(&admitted) && left_out.keys().all(|key| key.name == "s"));
    }

    #[test]
    fn an_object_without_pods_has_no_policy() {
        use crate::model::state::{Family, HandoverStage, HandoverState, Policy, TunnelEndpoint, WhenEmpty};
        let policy = Policy::new(Vec::new(), Vec::new(), WhenEmpty::Drop);
        let key = |id| (EgressId(id), Family::V4);
        let all = KernelState {
            policy: (1..=5).map(|id| (key(id), policy.clone())).collect(),
            pods: BTreeMap::from([(ip("10.244.1.10"), PodState::Selected(EgressId(1)))]),
            owned: BTreeMap::from([(EgressId(2), ip("172.18.0.100"))]),
            ..KernelState::default()
        };
        let mut desired = all.clone();
        spare_policies(&mut desired, &KernelState::default());
        assert_eq!(desired.policy.keys().copied().collect::<Vec<_>>(), [key(1), key(2)]);
        // The same for addresses that this node takes over, also when an agent starts during the hand-over.
        let peer = TunnelEndpoint(ip("172.18.0.3"));
        let taken = HandoverState { stage: HandoverStage::Open, address: ip("172.18.0.101"), peer, shared_with: None };
        let held = KernelState {
            policy: BTreeMap::from([(key(3), policy)]),
            handovers: BTreeMap::from([(EgressId(4), taken)]),
            ..KernelState::default()
        };
        let mut desired = all;
        spare_policies(&mut desired, &held);
        assert_eq!(desired.policy.keys().copied().collect::<Vec<_>>(), [key(1), key(2), key(3), key(4)]);
    }
}
