//! EgressServices (`k8s.ovn.org/v1`): what becomes of each, by its Service, the endpoints and the nodes. Pure.
//!
//! The controller writes the result as an EgressAssignment, which is an egress policy like any other: the leader
//! chooses a node for it, agents serve it. What is assigned is said in `status.host` and by a label of the node, which
//! load balancers announce by.
//!
//! Pods are selected by the Service's selector, not by its endpoints: a pod is known from the moment it is scheduled, so
//! none of its packets leaves with its node's address, and the author of an EndpointSlice gets no pods of others.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::IpAddr;

use crate::keys;
use crate::model::policy::{Item, parse_egress_ip};
use crate::model::selector::Selector;
use crate::model::services::ServiceKey;
use crate::model::view::{CreationTimestamp, Labels};

/// Bytes of the name of a label (`metav1` label keys, after the prefix).
const LONGEST_LABEL: usize = 63;

/// Bytes of the name of a routing table. More is no name, and would be repeated in objects and events.
const LONGEST_NETWORK: usize = 64;

/// An EgressService.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EgressService {
    pub uid: String,
    pub created: CreationTimestamp,
    /// Or why it cannot be read.
    pub spec: Result<EgressServiceRequest, String>,
    /// `status.host`; `None` without a status.
    pub host: Option<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EgressServiceRequest {
    /// `sourceIPBy: Network`.
    pub by_network: bool,
    /// `None` selects all nodes.
    pub nodes: Option<Selector>,
    /// A routing table.
    pub network: Option<String>,
}

/// A Service, as far as it matters here.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BalancedService {
    /// Its type is `LoadBalancer`.
    pub is_balanced: bool,
    pub selector: Labels,
    /// The addresses of its load balancer.
    pub ingress: Vec<IpAddr>,
    /// `externalTrafficPolicy: Local`.
    pub is_local: bool,
}

/// One EndpointSlice.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ServiceEndpoints {
    /// The Service that it belongs to.
    pub service: String,
    /// The nodes of its endpoints.
    pub nodes: BTreeSet<String>,
}

/// What a status says while each pod leaves by its own node.
pub const ALL_HOSTS: &str = "ALL";

/// What the cluster has.
#[derive(Clone, Debug, Default)]
pub struct EgressServiceInputs {
    pub egress_services: BTreeMap<ServiceKey, EgressService>,
    pub services: BTreeMap<ServiceKey, BalancedService>,
    /// By namespace and name of the slice.
    pub slices: BTreeMap<ServiceKey, ServiceEndpoints>,
    /// The labels of each node.
    pub nodes: BTreeMap<String, Labels>,
}

/// What the controller writes for one EgressService.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WantedAssignment {
    /// The first of each family.
    pub addresses: Vec<IpAddr>,
    /// Labels of the pods.
    pub pods: Labels,
    /// `None` for all nodes.
    pub nodes: Option<BTreeSet<String>>,
    /// A routing table.
    pub network: Option<String>,
    /// Each pod leaves by its own node, with an address of the network; no address is assigned.
    pub by_own_nodes: bool,
}

/// Why an EgressService has no assignment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NotAssigned {
    Unreadable(String),
    /// Nothing is to be assigned: each pod leaves by its own node, with the address that the node's routes give it.
    EachNode,
    NoService,
    NotBalanced,
    NoSelector,
    NoIngress,
    NoEndpoints,
    LabelTooLong,
    /// The label would be that of this EgressService too.
    LabelTaken(ServiceKey),
}

impl NotAssigned {
    /// The reason of an event. `None` for what is usual while a Service is created or removed.
    pub const fn reason(&self) -> Option<&'static str> {
        match self {
            Self::Unreadable(_) => Some("InvalidSpec"),
            Self::NotBalanced | Self::NoSelector => Some("UnsupportedService"),
            Self::LabelTooLong | Self::LabelTaken(_) => Some("NoLabel"),
            Self::EachNode | Self::NoService | Self::NoIngress | Self::NoEndpoints => None,
        }
    }
}

impl fmt::Display for NotAssigned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unreadable(why) => write!(f, "{why}"),
            Self::EachNode => f.write_str("each pod leaves by its own node"),
            Self::NoService => f.write_str("there is no Service of this name and namespace"),
            Self::NotBalanced => f.write_str("the Service is not of type LoadBalancer"),
            Self::NoSelector => {
                f.write_str("the Service has no selector, and endpoints written by hand are not served")
            }
            Self::NoIngress => f.write_str("the Service has no address of a load balancer"),
            Self::NoEndpoints => f.write_str("the Service has no endpoints on any node"),
            Self::LabelTooLong => {
                write!(
                    f,
                    "its namespace and name have more than {} characters, too many for the label of a node",
                    LONGEST_LABEL - 1
                )
            }
            Self::LabelTaken(ServiceKey { namespace, name }) => write!(
                f,
                "nodes would have one label for it and for EgressService {name} of namespace {namespace}, which is older"
            ),
        }
    }
}

/// The name of the assignment of an EgressService. A namespace has no dot in its name, so it is unique.
pub fn assignment_name(key: &ServiceKey) -> String {
    format!("{}.{}", key.namespace, key.name)
}

/// The label of the node that hosts it.
pub fn host_label(key: &ServiceKey) -> String {
    format!("{}{}-{}", keys::EGRESS_SERVICE_PREFIX, key.namespace, key.name)
}

impl EgressServiceInputs {
    /// What becomes of each EgressService.
    pub fn wanted(&self) -> BTreeMap<ServiceKey, Result<WantedAssignment, NotAssigned>> {
        let mut by_age: Vec<_> = self.egress_services.iter().collect();
        by_age.sort_by_key(|(key, service)| (service.created, *key));
        let mut labels: BTreeMap<String, &ServiceKey> = BTreeMap::new();
        let mut wanted = BTreeMap::new();
        for (key, service) in by_age {
            let label = host_label(key);
            // Each node of the pods is the host, and none has the label.
            let needs_label = !self.is_by_own_nodes(key);
            let outcome = match labels.get(&label).filter(|_| needs_label) {
                Some(older) => Err(NotAssigned::LabelTaken((*older).clone())),
                None if needs_label && label.len() > keys::EGRESS_SERVICE_PREFIX.len() + LONGEST_LABEL => {
                    Err(NotAssigned::LabelTooLong)
                }
                None => self.assignment(key, service),
            };
            if needs_label {
                labels.entry(label).or_insert(key);
            }
            wanted.insert(key.clone(), outcome);
        }
        wanted
    }

    fn assignment(&self, key: &ServiceKey, service: &EgressService) -> Result<WantedAssignment, NotAssigned> {
        let spec = service.spec.as_ref().map_err(|why| NotAssigned::Unreadable(why.clone()))?;
        let network = spec.network.clone().filter(|network| !network.is_empty());
        if network.as_ref().is_some_and(|network| network.len() > LONGEST_NETWORK) {
            let why =
                format!("spec.network is longer than {LONGEST_NETWORK} bytes, and no routing table has such a name");
            return Err(NotAssigned::Unreadable(why));
        }
        let balanced = self.services.get(key).ok_or(NotAssigned::NoService)?;
        if spec.by_network && network.is_none() {
            return Err(NotAssigned::EachNode);
        }
        if !balanced.is_balanced {
            return Err(NotAssigned::NotBalanced);
        }
        if balanced.selector.is_empty() {
            return Err(NotAssigned::NoSelector);
        }
        let first = |is_v4: bool| balanced.ingress.iter().find(|address| address.is_ipv4() == is_v4).copied();
        let addresses: Vec<IpAddr> = [first(true), first(false)].into_iter().flatten().collect();
        if addresses.is_empty() {
            return Err(NotAssigned::NoIngress);
        }
        let pods = balanced.selector.clone();
        if spec.by_network {
            return Ok(WantedAssignment { addresses, pods, nodes: Some(BTreeSet::new()), network, by_own_nodes: true });
        }
        let endpoints = self.endpoint_nodes(key);
        if endpoints.is_empty() {
            return Err(NotAssigned::NoEndpoints);
        }
        let is_eligible = |(name, labels): &(&String, &Labels)| {
            spec.nodes.as_ref().is_none_or(|selector| selector.matches(labels))
                && (!balanced.is_local || endpoints.contains(name.as_str()))
        };
        let is_limited = spec.nodes.is_some() || balanced.is_local;
        let nodes = is_limited.then(|| self.nodes.iter().filter(is_eligible).map(|(name, _)| name.clone()).collect());
        Ok(WantedAssignment { addresses, pods, nodes, network, by_own_nodes: false })
    }

    /// Whether each pod leaves by its own node (`sourceIPBy: Network`), also where nothing else can be done for it.
    pub fn is_by_own_nodes(&self, key: &ServiceKey) -> bool {
        let spec = self.egress_services.get(key).and_then(|service| service.spec.as_ref().ok());
        spec.is_some_and(|spec| spec.by_network) && self.services.contains_key(key)
    }

    /// The nodes with endpoints of a Service.
    fn endpoint_nodes(&self, key: &ServiceKey) -> BTreeSet<&str> {
        let first = ServiceKey { namespace: key.namespace.clone(), name: String::new() };
        let of_namespace = self.slices.range(first..).take_while(|(slice, _)| slice.namespace == key.namespace);
        let of_service = of_namespace.filter(|(_, slice)| slice.service == key.name);
        of_service.flat_map(|(_, slice)| slice.nodes.iter().map(String::as_str)).collect()
    }
}

/// The host that a status should name, by the items of the assignment: the node of all addresses. While they move one
/// after the other it stays.
pub fn host(former: &str, items: &[Item]) -> String {
    let nodes: BTreeSet<&str> =
        items.iter().filter(|item| parse_egress_ip(&item.egress_ip).is_some()).map(|item| item.node.as_str()).collect();
    match (nodes.len(), nodes.contains(former)) {
        (0, _) => String::new(),
        (_, true) => former.to_owned(),
        (_, false) => nodes.first().map(|node| (*node).to_owned()).unwrap_or_default(),
    }
}

/// A node, and a label of it.
pub type NodeLabel = (String, String);

/// Changes of the labels of nodes: those to remove, and then those to set. `hosts` are the nodes that serve each
/// EgressService.
pub fn label_changes(
    nodes: &BTreeMap<String, Labels>,
    hosts: &BTreeMap<ServiceKey, String>,
) -> (Vec<NodeLabel>, Vec<NodeLabel>) {
    let wanted: BTreeSet<(&str, String)> = hosts.iter().map(|(key, node)| (node.as_str(), host_label(key))).collect();
    let mut remove = Vec::new();
    let mut set = Vec::new();
    for (node, labels) in nodes {
        let first = keys::EGRESS_SERVICE_PREFIX.to_owned();
        let ours = labels.range(first..).take_while(|(label, _)| label.starts_with(keys::EGRESS_SERVICE_PREFIX));
        let strays = ours.filter(|(label, _)| !wanted.contains(&(node.as_str(), (*label).clone())));
        remove.extend(strays.map(|(label, _)| (node.clone(), label.clone())));
    }
    for (node, label) in wanted {
        let has = nodes.get(node).is_none_or(|labels| labels.get(&label).is_some_and(String::is_empty));
        if !has {
            set.push((node.to_owned(), label));
        }
    }
    (remove, set)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::selector::Requirement;

    fn key(namespace: &str, name: &str) -> ServiceKey {
        ServiceKey { namespace: namespace.into(), name: name.into() }
    }

    fn ip(text: &str) -> IpAddr {
        text.parse().expect("a literal")
    }

    fn labels(pairs: &[(&str, &str)]) -> Labels {
        pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    fn names(names: &[&str]) -> BTreeSet<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    fn egress_service(created: i64) -> EgressService {
        EgressService { uid: "u".into(), created, spec: Ok(EgressServiceRequest::default()), host: None }
    }

    /// Three nodes, of which two have endpoints, and one EgressService.
    fn inputs() -> EgressServiceInputs {
        let front = BalancedService {
            is_balanced: true,
            selector: labels(&[("app", "web")]),
            ingress: vec![ip("192.0.2.1"), ip("192.0.2.2"), ip("2001:db8::1")],
            is_local: false,
        };
        let slice = |service: &str, nodes: &[&str]| ServiceEndpoints { service: service.into(), nodes: names(nodes) };
        EgressServiceInputs {
            egress_services: [(key("shop", "front"), egress_service(1))].into(),
            services: [(key("shop", "front"), front)].into(),
            slices: [
                (key("shop", "front-a"), slice("front", &["n1"])),
                (key("shop", "front-b"), slice("front", &["n2"])),
                (key("shop", "other"), slice("back", &["n3"])),
            ]
            .into(),
            nodes: ["n1", "n2", "n3"].map(|name| (name.to_owned(), labels(&[("rack", name)]))).into(),
        }
    }

    fn outcome(inputs: &EgressServiceInputs) -> Result<WantedAssignment, NotAssigned> {
        inputs.wanted().remove(&key("shop", "front")).expect("an outcome")
    }

    #[test]
    fn the_first_address_of_each_family_and_the_services_pods() {
        let wanted = outcome(&inputs()).expect("it is assigned");
        assert_eq!(wanted.addresses, [ip("192.0.2.1"), ip("2001:db8::1")]);
        assert_eq!((wanted.pods, wanted.nodes), (labels(&[("app", "web")]), None));
    }

    #[test]
    fn nodes_follow_from_the_selector_and_from_endpoints_of_a_local_service() {
        let mut all = inputs();
        let service = all.services.get_mut(&key("shop", "front")).expect("it is there");
        service.is_local = true;
        assert_eq!(outcome(&all).expect("assigned").nodes, Some(names(&["n1", "n2"])));
        let on = |names_: &[&str]| {
            let selector = Selector::from_iter([Requirement::In("rack".into(), names(names_).into_iter().collect())]);
            Ok(EgressServiceRequest { nodes: Some(selector), ..EgressServiceRequest::default() })
        };
        let set = |all: &mut EgressServiceInputs, spec| {
            all.egress_services.get_mut(&key("shop", "front")).expect("it is there").spec = spec;
        };
        set(&mut all, on(&["n2", "n3"]));
        assert_eq!(outcome(&all).expect("assigned").nodes, Some(names(&["n2"])));
        set(&mut all, on(&["n9"]));
        assert_eq!(outcome(&all).expect("assigned").nodes, Some(names(&[])), "none may host it");
    }

    #[test]
    fn what_is_missing_is_named() {
        let without = |change: &dyn Fn(&mut EgressServiceInputs)| {
            let mut all = inputs();
            change(&mut all);
            outcome(&all).expect_err("it is not assigned")
        };
        let front = key("shop", "front");
        assert_eq!(without(&|all| all.services.clear()), NotAssigned::NoService);
        let service = |change: &dyn Fn(&mut BalancedService)| {
            without(&|all| change(all.services.get_mut(&front).expect("it is there")))
        };
        assert_eq!(service(&|service| service.is_balanced = false), NotAssigned::NotBalanced);
        assert_eq!(service(&|service| service.selector.clear()), NotAssigned::NoSelector);
        assert_eq!(service(&|service| service.ingress.clear()), NotAssigned::NoIngress);
        assert_eq!(without(&|all| all.slices.clear()), NotAssigned::NoEndpoints);
        let spec = |spec: EgressServiceRequest| {
            without(&|all| all.egress_services.get_mut(&front).expect("it is there").spec = Ok(spec.clone()))
        };
        let by_network = EgressServiceRequest { by_network: true, ..EgressServiceRequest::default() };
        assert_eq!(spec(by_network), NotAssigned::EachNode);
    }

    #[test]
    fn a_network_is_followed_by_one_host_or_by_each_node() {
        let with = |by_network: bool, change: &dyn Fn(&mut EgressServiceInputs)| {
            let mut all = inputs();
            let spec = EgressServiceRequest { by_network, network: Some("100".into()), ..Default::default() };
            all.egress_services.get_mut(&key("shop", "front")).expect("it is there").spec = Ok(spec);
            change(&mut all);
            (outcome(&all), all.is_by_own_nodes(&key("shop", "front")))
        };
        let by_host = outcome(&inputs()).expect("assigned");
        let (network, none) = (Some("100".to_owned()), |_: &mut EgressServiceInputs| {});
        assert_eq!(with(false, &none), (Ok(WantedAssignment { network: network.clone(), ..by_host.clone() }), false));
        let by_nodes = WantedAssignment { network, by_own_nodes: true, nodes: Some(names(&[])), ..by_host };
        assert_eq!(with(true, &none), (Ok(by_nodes.clone()), true));
        assert_eq!(with(true, &|all| all.slices.clear()), (Ok(by_nodes), true), "answers need no endpoints");
        let no_ingress = with(true, &|all| all.services.values_mut().for_each(|service| service.ingress.clear()));
        assert_eq!(no_ingress, (Err(NotAssigned::NoIngress), true), "the status says so all the same");
        assert_eq!(with(true, &|all| all.services.clear()), (Err(NotAssigned::NoService), false));
        let long = |all: &mut EgressServiceInputs| {
            let spec = EgressServiceRequest { network: Some("n".repeat(65)), ..Default::default() };
            all.egress_services.get_mut(&key("shop", "front")).expect("it is there").spec = Ok(spec);
        };
        let (refused, _) = with(false, &long);
        assert!(matches!(&refused, Err(why) if why.reason() == Some("InvalidSpec")), "{refused:?}");
    }

    #[test]
    fn pods_that_leave_by_their_own_nodes_need_no_label() {
        let mut all = inputs();
        let by_nodes = || {
            let spec = EgressServiceRequest { by_network: true, network: Some("100".into()), ..Default::default() };
            EgressService { spec: Ok(spec), ..egress_service(1) }
        };
        let long = key("shop", &"x".repeat(63));
        let front = all.services[&key("shop", "front")].clone();
        for one in [&key("a-b", "c"), &long] {
            all.egress_services.insert(one.clone(), by_nodes());
            all.services.insert(one.clone(), front.clone());
        }
        all.egress_services.insert(key("a", "b-c"), egress_service(2));
        let wanted = all.wanted();
        assert!(wanted[&key("a-b", "c")].is_ok() && wanted[&long].is_ok());
        assert_eq!(wanted[&key("a", "b-c")], Err(NotAssigned::NoService), "the label is free");
    }

    #[test]
    fn a_label_belongs_to_the_oldest_and_fits() {
        let mut all = inputs();
        all.egress_services = [
            (key("a", "b-c"), egress_service(2)),
            (key("a-b", "c"), egress_service(1)),
            (key("shop", &"x".repeat(63)), egress_service(1)),
        ]
        .into();
        let wanted = all.wanted();
        assert_eq!(wanted[&key("a", "b-c")], Err(NotAssigned::LabelTaken(key("a-b", "c"))));
        assert_eq!(wanted[&key("a-b", "c")], Err(NotAssigned::NoService));
        assert_eq!(wanted[&key("shop", &"x".repeat(63))], Err(NotAssigned::LabelTooLong));
    }

    #[test]
    fn the_host_stays_while_addresses_move_one_after_the_other() {
        let items = |nodes: &[&str]| -> Vec<Item> {
            let of = |(node, address): (&&str, &str)| Item { node: (*node).into(), egress_ip: address.into() };
            nodes.iter().zip(["192.0.2.1", "2001:db8::1"]).map(of).collect()
        };
        assert_eq!(host("", &items(&["n1", "n1"])), "n1");
        assert_eq!(host("n1", &items(&["n2", "n1"])), "n1");
        assert_eq!(host("n1", &items(&["n2", "n2"])), "n2");
        assert_eq!(host("n1", &[]), "");
    }

    #[test]
    fn labels_are_set_where_they_belong_and_removed_elsewhere() {
        let label = host_label(&key("shop", "front"));
        let stray = format!("{}gone-x", keys::EGRESS_SERVICE_PREFIX);
        let nodes = BTreeMap::from([
            ("n1".to_owned(), labels(&[(&label, ""), ("rack", "a"), (&stray, "")])),
            ("n2".to_owned(), labels(&[("zone", "b")])),
        ]);
        let at = |node: &str| BTreeMap::from([(key("shop", "front"), node.to_owned())]);
        let pair = |node: &str, label: &str| (node.to_owned(), label.to_owned());
        assert_eq!(label_changes(&nodes, &at("n1")), (vec![pair("n1", &stray)], vec![]));
        let moved = (vec![pair("n1", &stray), pair("n1", &label)], vec![pair("n2", &label)]);
        let (mut removed, set) = label_changes(&nodes, &at("n2"));
        removed.reverse();
        let (mut expected, _) = moved.clone();
        expected.sort();
        removed.sort();
        assert_eq!((removed, set), (expected, moved.1));
        assert_eq!(label_changes(&nodes, &at("gone")).1, vec![], "a node that is gone gets none");
    }
}
