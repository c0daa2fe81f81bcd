//! Addresses of Services that have an entry of their own in the map `cluster`.
//!
//! The service proxy translates what pods send to them, behind us, so `steer` must leave it alone. Cluster IPs are in a
//! service network as a rule, which is one entry; the rest (external addresses, those of load balancers, cluster IPs
//! outside the networks that the agent was told) have one each. Services come and go by the thousand in a large
//! cluster: an update costs what it changes, and one that changes no such address costs nothing further.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use super::view::Update;

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ServiceKey {
    pub namespace: String,
    pub name: String,
}

/// Those that have such addresses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Services {
    addresses: BTreeMap<ServiceKey, BTreeSet<IpAddr>>,
    /// How many services have each address: two may share one.
    holders: BTreeMap<IpAddr, usize>,
}

impl Services {
    /// Enters an update and says which addresses came or went.
    pub fn apply(&mut self, update: Update<ServiceKey, BTreeSet<IpAddr>>) -> BTreeSet<IpAddr> {
        let mut touched = BTreeSet::new();
        match update {
            Update::Replaced(all) => {
                let gone = self.addresses.keys().filter(|key| !all.contains_key(key)).cloned().collect::<Vec<_>>();
                for (key, addresses) in gone.into_iter().map(|key| (key, BTreeSet::new())).chain(all) {
                    self.put(key, addresses, &mut touched);
                }
            }
            Update::Changed(key, addresses) => self.put(key, addresses, &mut touched),
            Update::Removed(key) => self.put(key, BTreeSet::new(), &mut touched),
        }
        touched
    }

    fn put(&mut self, key: ServiceKey, new: BTreeSet<IpAddr>, touched: &mut BTreeSet<IpAddr>) {
        let old = match new.is_empty() {
            true => self.addresses.remove(&key),
            false => self.addresses.insert(key, new.clone()),
        };
        let old = old.unwrap_or_default();
        touched.extend(old.symmetric_difference(&new));
        for address in new.difference(&old) {
            *self.holders.entry(*address).or_default() += 1;
        }
        for address in old.difference(&new) {
            match self.holders.get_mut(address) {
                Some(count) if *count > 1 => *count -= 1,
                _ => drop(self.holders.remove(address)),
            }
        }
    }

    pub fn has(&self, address: IpAddr) -> bool {
        self.holders.contains_key(&address)
    }

    pub fn all(&self) -> impl Iterator<Item = IpAddr> {
        self.holders.keys().copied()
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

    #[test]
    fn an_address_is_there_as_long_as_a_service_has_it_and_only_changes_are_touched() {
        let mut services = Services::default();
        let mut put = |name, addresses: &[&str]| services.apply(Update::Changed(key(name), ips(addresses)));
        assert_eq!(put("a", &["192.0.2.1", "192.0.2.2"]), ips(&["192.0.2.1", "192.0.2.2"]));
        assert_eq!(put("a", &["192.0.2.1", "192.0.2.2"]), ips(&[]));
        put("b", &["192.0.2.2"]);
        assert_eq!(put("plain", &[]), ips(&[]));
        assert_eq!(put("a", &["192.0.2.3"]), ips(&["192.0.2.1", "192.0.2.2", "192.0.2.3"]));
        assert_eq!(services.all().collect::<BTreeSet<_>>(), ips(&["192.0.2.2", "192.0.2.3"]));
        let list = [(key("a"), ips(&["192.0.2.3"])), (key("c"), ips(&["192.0.2.4"])), (key("plain"), ips(&[]))];
        let touched = services.apply(Update::Replaced(list.into()));
        assert_eq!(touched, ips(&["192.0.2.2", "192.0.2.4"]));
        assert!(services.has(ip("192.0.2.4")) && !services.has(ip("192.0.2.2")));
        services.apply(Update::Removed(key("a")));
        services.apply(Update::Removed(key("c")));
        assert_eq!(services, Services::default());
    }
}
