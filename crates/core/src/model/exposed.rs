//! Ports by which pods of this node are reached from outside the cluster.
//!
//! A datagram alone does not show which side began the exchange. A pod answers an outside client if its port is exposed
//! by its users: by a Service with node ports, a load balancer or external addresses, or by a host port. Services count
//! by selector and target port, as the service proxy builds its endpoints from these; manually written endpoints expose
//! nothing.
//!
//! All pods have entries, not only selected ones, so that a pod selected later keeps its running exchanges.

use std::collections::{BTreeMap, BTreeSet};

use crate::model::state::PodPort;
use crate::model::view::{ClusterView, Labels, Pod, PodKey};

/// Ports entered for one pod, so that no pod fills the map. A Service may name as many by number, and as many by name.
pub const MOST_PORTS: usize = 64;
/// Labels that a Service selects by. A Service with more exposes nothing.
pub const MOST_LABELS: usize = 64;
/// Service ports examined for one pod. Authors of Services decide how many there are, and every change of a Service
/// recomputes all pods of its namespace.
const MOST_LOOKED_AT: usize = 8_192;

/// What a Service exposes; nothing if it is reached from inside only, or selects no pods.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Exposes {
    pub selector: Labels,
    /// By protocol.
    pub ports: BTreeSet<(u8, TargetPort)>,
}

/// The pod port that a Service leads to.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum TargetPort {
    Number(u16),
    /// The name of a declared container port.
    Name(String),
}

/// A declared container port that has a name, or is a host port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContainerPort {
    pub name: Option<String>,
    pub port: PodPort,
    pub is_host_port: bool,
}

impl Exposes {
    pub fn is_empty(&self) -> bool {
        self.ports.is_empty()
    }

    fn selects(&self, pod: &Pod) -> bool {
        self.selector.iter().all(|(key, value)| pod.labels.get(key) == Some(value))
    }

    /// The lowest ports by number and by name, as many as a Service may name.
    pub fn of(selector: Labels, ports: BTreeSet<(u8, TargetPort)>) -> Self {
        if selector.len() > MOST_LABELS {
            return Self::default();
        }
        let (numbers, names): (Vec<_>, Vec<_>) =
            ports.into_iter().partition(|(_, target)| matches!(target, TargetPort::Number(_)));
        let lowest = numbers.into_iter().take(MOST_PORTS).chain(names.into_iter().take(MOST_PORTS));
        Self { selector, ports: lowest.collect() }
    }
}

/// All ports by which the pod is exposed, possibly more than [`MOST_PORTS`].
pub fn all_ports(view: &ClusterView, key: &PodKey, pod: &Pod) -> BTreeSet<PodPort> {
    let mut named: BTreeMap<(u8, &str), Vec<PodPort>> = BTreeMap::new();
    for ContainerPort { name, port, .. } in &pod.ports {
        if let Some(name) = name {
            named.entry((port.protocol, name)).or_default().push(*port);
        }
    }
    let of_host = pod.ports.iter().filter(|declared| declared.is_host_port).map(|declared| declared.port);
    let mut all: BTreeSet<PodPort> = of_host.collect();
    let services = view.services.exposing(&key.namespace).filter(|exposes| exposes.selects(pod));
    for (protocol, target) in services.flat_map(|exposes| &exposes.ports).take(MOST_LOOKED_AT) {
        match target {
            TargetPort::Number(number) => drop(all.insert(PodPort { protocol: *protocol, number: *number })),
            TargetPort::Name(name) => all.extend(named.get(&(*protocol, name.as_str())).into_iter().flatten()),
        }
    }
    all
}

/// The ports that are entered.
pub fn ports(view: &ClusterView, key: &PodKey, pod: &Pod) -> BTreeSet<PodPort> {
    all_ports(view, key, pod).into_iter().take(MOST_PORTS).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::services::{Service, ServiceKey};
    use crate::model::view::{Change, Update};

    const UDP: u8 = 17;
    const TCP: u8 = 6;

    fn labels(app: &str) -> Labels {
        Labels::from([("app".to_owned(), app.to_owned())])
    }

    fn pod(app: &str, ports: &[(Option<&str>, u8, u16, bool)]) -> Pod {
        let ports = ports.iter().map(|(name, protocol, number, is_host_port)| ContainerPort {
            name: name.map(str::to_owned),
            port: PodPort { protocol: *protocol, number: *number },
            is_host_port: *is_host_port,
        });
        Pod {
            uid: "u".into(),
            created: 1,
            labels: labels(app),
            reported: BTreeSet::new(),
            announced: BTreeSet::new(),
            surplus: 0,
            terminating: false,
            host_network: false,
            attached: BTreeSet::new(),
            starting: false,
            completed: false,
            ports: ports.collect(),
        }
    }

    /// Namespace, name, label of the selected pods, and exposed ports.
    type Exposing<'a> = (&'a str, &'a str, &'a str, &'a [(u8, TargetPort)]);

    fn view(services: &[Exposing<'_>]) -> ClusterView {
        let mut view = ClusterView::default();
        for (namespace, name, app, ports) in services {
            let exposes = Exposes { selector: labels(app), ports: ports.iter().cloned().collect() };
            let key = ServiceKey { namespace: (*namespace).into(), name: (*name).into() };
            view.apply(Change::Services(Update::Changed(key, Service { exposes, ..Service::default() })));
        }
        view
    }

    fn exposed(view: &ClusterView, pod: &Pod) -> Vec<(u8, u16)> {
        let key = PodKey { namespace: "prod".into(), name: "p".into() };
        ports(view, &key, pod).into_iter().map(|port| (port.protocol, port.number)).collect()
    }

    #[test]
    fn a_pod_is_exposed_by_services_of_its_namespace_that_select_it_and_by_host_ports() {
        let name = |name: &str| TargetPort::Name(name.into());
        let view = view(&[
            ("prod", "a", "web", &[(TCP, TargetPort::Number(8080)), (UDP, name("dns"))]),
            ("prod", "b", "other", &[(TCP, TargetPort::Number(1))]),
            ("dev", "c", "web", &[(TCP, TargetPort::Number(2))]),
            ("prodigy", "d", "web", &[(TCP, TargetPort::Number(3))]),
        ]);
        let declared = [
            (Some("dns"), UDP, 53, false),
            (Some("dns"), TCP, 54, false),
            (None, UDP, 5060, true),
            (Some("web"), TCP, 55, false),
        ];
        assert_eq!(exposed(&view, &pod("web", &declared)), [(TCP, 8080), (UDP, 53), (UDP, 5060)]);
        assert_eq!(exposed(&view, &pod("web", &[])), [(TCP, 8080)], "a name that no container declares");
        assert!(exposed(&view, &pod("none", &[])).is_empty());
    }

    #[test]
    fn a_pod_has_no_more_entries_than_its_share() {
        let many: Vec<(u8, TargetPort)> = (1..=1000).map(|number| (TCP, TargetPort::Number(number))).collect();
        let view = view(&[("prod", "a", "web", &many)]);
        assert_eq!(exposed(&view, &pod("web", &[])).len(), MOST_PORTS);
    }

    #[test]
    fn only_the_first_services_by_name_are_examined() {
        let mut view = view(&[]);
        for number in 0..200_u16 {
            let first = 64 * (300 - number);
            let ports = (first..first + 64).map(|port| (TCP, TargetPort::Number(port))).collect();
            let key = ServiceKey { namespace: "prod".into(), name: format!("s{number:03}") };
            let exposes = Exposes { selector: labels("web"), ports };
            view.apply(Change::Services(Update::Changed(key, Service { exposes, ..Service::default() })));
        }
        let ports = exposed(&view, &pod("web", &[(None, UDP, 5060, true)]));
        let last = 300 - u16::try_from(MOST_LOOKED_AT / 64 - 1).expect("a few");
        assert_eq!((ports.len(), ports[0]), (MOST_PORTS, (TCP, 64 * last)));
    }
}
