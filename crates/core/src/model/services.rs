//! Addresses of Services that have their own entry in the map `cluster`.
//!
//! The service proxy translates what pods send to them after `from_pod`, which must leave it alone. Cluster IPs are
//! usually in a service network, which is one entry. The others (external addresses, load balancer addresses, cluster
//! IPs outside the configured networks) have one entry each, as far as there is room ([`crate::plan::capacity`]).
//! Services change often in a large cluster: an update that changes no such address costs nothing further.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use crate::model::exposed::{Exposes, MOST_PORTS};
use crate::model::state::PodPort;
use crate::model::view::Update;

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ServiceKey {
    pub namespace: String,
    pub name: String,
}

/// A Service.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Service {
    pub uid: String,
    /// Addresses that the service proxy handles and that are in no service network, at most
    /// [`crate::plan::capacity::MOST_OF_SERVICE`].
    pub addresses: BTreeSet<IpAddr>,
    /// Those of them that the cluster assigned: cluster IPs, and addresses given by a load balancer.
    pub given: BTreeSet<IpAddr>,
    /// Its own ports, at most [`MOST_PORTS`](crate::model::exposed::MOST_PORTS).
    pub ports: BTreeSet<PodPort>,
    /// The number of its other addresses.
    pub surplus: usize,
    pub exposes: Exposes,
}

/// What an update of Services affects.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct ServicesTouched {
    pub addresses: BTreeSet<IpAddr>,
    /// Namespaces whose pods may be exposed by other ports now.
    pub namespaces: BTreeSet<String>,
}

/// Services that have such addresses, or expose pods.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Services(BTreeMap<ServiceKey, Service>);

impl Services {
    /// Applies an update and returns what it changed.
    pub fn apply(&mut self, update: Update<ServiceKey, Service>) -> ServicesTouched {
        let mut touched = ServicesTouched::default();
        match update {
            Update::Replaced(all) => {
                let gone = self.0.keys().filter(|key| !all.contains_key(key)).cloned().collect::<Vec<_>>();
                for (key, service) in gone.into_iter().map(|key| (key, Service::default())).chain(all) {
                    self.put(key, service, &mut touched);
                }
            }
            Update::Changed(key, service) => self.put(key, service, &mut touched),
            Update::Removed(key) => self.put(key, Service::default(), &mut touched),
        }
        touched
    }

    fn put(&mut self, key: ServiceKey, new: Service, touched: &mut ServicesTouched) {
        let (addresses, given) = (new.addresses.clone(), new.given.clone());
        let (surplus, exposes, ports) = (new.surplus, new.exposes.clone(), new.ports.clone());
        let namespace = key.namespace.clone();
        let is_nothing = addresses.is_empty() && exposes.is_empty();
        let old = if is_nothing { self.0.remove(&key) } else { self.0.insert(key, new) };
        let old = old.unwrap_or_default();
        if old.exposes != exposes {
            touched.namespaces.insert(namespace);
        }
        touched.addresses.extend(old.addresses.symmetric_difference(&addresses));
        touched.addresses.extend(old.given.symmetric_difference(&given));
        if old.ports != ports {
            touched.addresses.extend(&given);
        }
        if old.surplus != surplus {
            // No entry changes, but the reported room does.
            touched.addresses.extend(addresses.first());
        }
    }

    /// What the Services of a namespace expose.
    pub fn exposing<'a>(&'a self, namespace: &'a str) -> impl Iterator<Item = &'a Exposes> {
        let first = ServiceKey { namespace: namespace.to_owned(), name: String::new() };
        let all = self.0.range(first..).take_while(move |(key, _)| key.namespace == namespace);
        all.map(|(_, service)| &service.exposes)
    }

    pub fn get(&self, key: &ServiceKey) -> Option<&Service> {
        self.0.get(key)
    }

    /// Addresses that the cluster assigned to Services, not their authors.
    pub fn given(&self) -> impl Iterator<Item = IpAddr> {
        self.0.values().flat_map(|service| service.given.iter().copied())
    }

    /// The ports of the Services that were given this address, the lowest ones: NAT leaves them to these Services where
    /// an egress policy shares the address.
    pub fn ports_at(&self, address: IpAddr) -> BTreeSet<PodPort> {
        let sharing = self.0.values().filter(|service| service.given.contains(&address));
        let all: BTreeSet<PodPort> = sharing.flat_map(|service| &service.ports).copied().collect();
        all.into_iter().take(MOST_PORTS).collect()
    }

    /// By namespace and name.
    pub fn iter(&self) -> impl Iterator<Item = (&ServiceKey, &Service)> {
        self.0.iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::samples::ip;

    fn key(name: &str) -> ServiceKey {
        ServiceKey { namespace: "default".into(), name: name.into() }
    }

    fn ips(addresses: &[&str]) -> BTreeSet<IpAddr> {
        addresses.iter().map(|address| ip(address)).collect()
    }

    fn with(addresses: &[&str]) -> Service {
        Service { addresses: ips(addresses), given: ips(addresses), ..Service::default() }
    }

    #[test]
    fn only_changes_are_touched_and_a_service_without_addresses_is_not_stored() {
        let mut services = Services::default();
        let mut put = |name, addresses: &[&str]| services.apply(Update::Changed(key(name), with(addresses))).addresses;
        assert_eq!(put("a", &["192.0.2.1", "192.0.2.2"]), ips(&["192.0.2.1", "192.0.2.2"]));
        assert_eq!(put("a", &["192.0.2.1", "192.0.2.2"]), ips(&[]));
        put("b", &["192.0.2.2"]);
        assert_eq!(put("plain", &[]), ips(&[]));
        assert_eq!(put("a", &["192.0.2.3"]), ips(&["192.0.2.1", "192.0.2.2", "192.0.2.3"]));
        let list = [(key("a"), with(&["192.0.2.3"])), (key("c"), with(&["192.0.2.4"])), (key("plain"), with(&[]))];
        let touched = services.apply(Update::Replaced(list.into())).addresses;
        assert_eq!(touched, ips(&["192.0.2.2", "192.0.2.4"]));
        assert_eq!(services.iter().map(|(key, _)| key.name.as_str()).collect::<Vec<_>>(), ["a", "c"]);
        assert_eq!(services.given().collect::<BTreeSet<_>>(), ips(&["192.0.2.3", "192.0.2.4"]));
        services.apply(Update::Removed(key("a")));
        services.apply(Update::Removed(key("c")));
        assert_eq!(services, Services::default());
    }

    #[test]
    fn an_address_has_the_ports_of_all_services_that_were_given_it() {
        let mut services = Services::default();
        let port = |number| PodPort { protocol: 6, number };
        let mut put = |name, ports: &[u16]| {
            let ports = ports.iter().copied().map(port).collect();
            services.apply(Update::Changed(key(name), Service { ports, ..with(&["192.0.2.1"]) })).addresses
        };
        put("a", &[80]);
        put("b", &[443, 80]);
        assert_eq!(put("b", &[443, 80]), ips(&[]));
        assert_eq!(put("b", &[443, 8443]), ips(&["192.0.2.1"]), "its ports have changed");
        let chosen = Service { addresses: ips(&["192.0.2.1"]), ports: [port(22)].into(), ..Service::default() };
        services.apply(Update::Changed(key("c"), chosen));
        assert_eq!(services.ports_at(ip("192.0.2.1")), [80, 443, 8443].map(port).into(), "not those of a claimant");
        assert_eq!(services.ports_at(ip("192.0.2.2")), [].into());
        let many = (0..200).map(port).collect();
        services.apply(Update::Changed(key("d"), Service { ports: many, ..with(&["192.0.2.1"]) }));
        assert_eq!(services.ports_at(ip("192.0.2.1")).len(), MOST_PORTS);
    }
}
