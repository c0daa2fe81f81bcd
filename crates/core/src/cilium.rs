//! Cilium's CiliumEgressGatewayPolicy (`cilium.io/v2`): which nodes and addresses are the gateways of each. Pure.
//!
//! - **A gateway is a node with an address of its own**: the one that the policy names, the first one of an interface, or the
//!   first one of the interface of the default route. Of the nodes that a gateway's selector matches, the first by name that is
//!   ready and answers is the gateway. It stays while it can: a node that comes back takes nothing back, unlike in Cilium.
//! - **Families are decided separately.** A family of the destinations without any gateway is dropped.
//! - Policies whose gateways have the same address become rules of one assignment, so they share the egress ID and the ports.
//!   Those without a gateway share one that has no address.
//! - Of several gateways each pod has one, by its UID ([`PodShare`](crate::model::policy::PodShare)).

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::net::IpAddr;

use crate::allocation::{Nodes, known_by};
use crate::model::node::Node;
use crate::model::policy::EgressPolicy;
use crate::model::selector::Selector;
use crate::model::state::{Family, family_of};
use crate::model::view::CreationTimestamp;
use crate::status::conditions::{ASSIGNED, DesiredCondition};
use crate::text::named_by_address;

/// A policy as its author wrote it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GatewayPolicy {
    pub uid: String,
    pub created: CreationTimestamp,
    /// An error is one line for users.
    pub spec: Result<GatewayRequest, String>,
}

/// What the spec asks for, apart from pods and destinations.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GatewayRequest {
    /// Of the destinations.
    pub families: BTreeSet<Family>,
    pub gateways: Vec<GatewayRule>,
}

/// One gateway of the spec.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GatewayRule {
    /// Where in the spec it is.
    pub field: String,
    pub nodes: Selector,
    pub address: GatewayAddress,
}

/// The source address of a gateway.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GatewayAddress {
    /// The first one of the interface of the default route.
    Default,
    /// The first one of this interface.
    OfInterface(String),
    Is(IpAddr),
}

impl GatewayAddress {
    fn of(&self, node: &Node, family: Family) -> Option<IpAddr> {
        let is_of_family = |address: &IpAddr| family_of(*address) == family;
        match self {
            Self::Default => node.primary.iter().map(|own| own.addr()).find(is_of_family),
            Self::OfInterface(name) => {
                let interface = node.interfaces.iter().find(|interface| interface.name == *name)?;
                interface.addresses.iter().copied().find(is_of_family).filter(|address| node.has(*address))
            }
            Self::Is(address) => Some(*address).filter(|address| is_of_family(address) && node.has(*address)),
        }
    }

    /// The families that it can have at all.
    fn families(&self, wanted: &BTreeSet<Family>) -> BTreeSet<Family> {
        match self {
            Self::Default | Self::OfInterface(_) => wanted.clone(),
            Self::Is(address) => wanted.iter().copied().filter(|family| *family == family_of(*address)).collect(),
        }
    }
}

/// What gateways are chosen from.
#[derive(Clone, Copy, Debug)]
pub struct GatewayInputs<'a> {
    pub nodes: &'a Nodes,
    /// Nodes that count as gone.
    pub unreachable: &'a BTreeSet<String>,
    /// Nodes that keep what they have and get nothing new.
    pub absent: &'a BTreeSet<String>,
    /// The addresses that each policy leaves with so far, by its UID.
    pub current: &'a BTreeMap<String, BTreeSet<IpAddr>>,
}

/// Chooses the gateways of one policy after the other.
#[derive(Debug)]
pub struct GatewayChooser<'a> {
    inputs: GatewayInputs<'a>,
    /// The nodes that are known by these addresses: of several the first by name.
    known_by: HashMap<IpAddr, &'a str>,
    /// By selector, of which many policies have the same: how many nodes match, and the ready ones.
    matching: HashMap<&'a Selector, (usize, Vec<&'a Node>)>,
}

/// A chosen gateway, with an address of each family that it has one of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChosenGateway {
    pub node: String,
    pub addresses: Vec<IpAddr>,
}

/// Why a gateway of the spec is none.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum NoGateway {
    /// Its address is of no family of the destinations.
    OtherFamily(IpAddr),
    NoNode,
    /// Of the matching nodes.
    NoReadyNode(usize),
    NoInterface(String),
    NoAddress(IpAddr),
    NoDefault,
}

impl fmt::Display for NoGateway {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OtherFamily(address) => write!(f, "egressIP {address} is of no family of the destinations"),
            Self::NoNode => f.write_str("its nodeSelector matches no node"),
            Self::NoReadyNode(matching) => {
                write!(f, "none of the {matching} nodes that it matches is ready, answers and runs an agent")
            }
            Self::NoInterface(name) => write!(f, "no node that it matches has an address on an interface {name}"),
            Self::NoAddress(address) => write!(f, "no node that it matches has the address {address}"),
            Self::NoDefault => {
                f.write_str("no node that it matches has an address on the interface of its default route")
            }
        }
    }
}

/// The gateways of one policy, in the order of the spec.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PolicyGateways {
    pub gateways: Vec<Result<ChosenGateway, NoGateway>>,
}

impl PolicyGateways {
    /// Among which the pods are divided.
    pub fn addresses(&self, family: Family) -> BTreeSet<IpAddr> {
        let all = self.gateways.iter().flatten().flat_map(|gateway| &gateway.addresses);
        all.copied().filter(|address| family_of(*address) == family).collect()
    }
}

impl<'a> GatewayChooser<'a> {
    pub fn new(inputs: GatewayInputs<'a>) -> Self {
        Self { inputs, known_by: known_by(inputs.nodes), matching: HashMap::new() }
    }

    /// The gateways of a policy.
    pub fn choose(&mut self, policy: &'a GatewayPolicy) -> PolicyGateways {
        let Ok(spec) = &policy.spec else { return PolicyGateways::default() };
        let gateways = spec.gateways.iter().map(|rule| self.gateway(rule, &spec.families, &policy.uid));
        PolicyGateways { gateways: gateways.collect() }
    }

    fn gateway(
        &mut self,
        rule: &'a GatewayRule,
        wanted: &BTreeSet<Family>,
        uid: &str,
    ) -> Result<ChosenGateway, NoGateway> {
        let families = rule.address.families(wanted);
        if let (true, GatewayAddress::Is(address)) = (families.is_empty(), &rule.address) {
            return Err(NoGateway::OtherFamily(*address));
        }
        let GatewayInputs { nodes, unreachable, absent, current } = self.inputs;
        let is_ready = |node: &&Node| node.ready && node.has_published_networks() && !unreachable.contains(&node.name);
        let (matching, ready) = self.matching.entry(&rule.nodes).or_insert_with(|| {
            let matching = nodes.values().map(|node| &**node).filter(|node| rule.nodes.matches(&node.labels));
            let matching: Vec<&Node> = matching.collect();
            (matching.len(), matching.into_iter().filter(is_ready).collect())
        });
        match (*matching, ready.len()) {
            (0, _) => return Err(NoGateway::NoNode),
            (matching, 0) => return Err(NoGateway::NoReadyNode(matching)),
            _ => {}
        }
        let current = current.get(uid);
        // A kubelet may list any address on its own Node.
        let is_anothers =
            |node: &Node, address: &IpAddr| self.known_by.get(address).is_some_and(|known| *known != node.name);
        let candidates = ready.iter().filter_map(|node| {
            let addresses = families.iter().filter_map(|family| rule.address.of(node, *family));
            let addresses: Vec<IpAddr> = addresses.filter(|address| !is_anothers(node, address)).collect();
            let is_current = current.is_some_and(|current| addresses.iter().any(|one| current.contains(one)));
            // A node that takes nothing new keeps what it has, a drained one if no other can take it.
            let takes_nothing = node.drained || absent.contains(&node.name);
            let lacks = families.len() - addresses.len();
            (!addresses.is_empty() && (is_current || !takes_nothing))
                .then_some(((lacks, node.drained, !is_current, &node.name), addresses))
        });
        match candidates.min() {
            Some(((.., node), addresses)) => Ok(ChosenGateway { node: node.clone(), addresses }),
            None => Err(match &rule.address {
                GatewayAddress::Default => NoGateway::NoDefault,
                GatewayAddress::OfInterface(name) => NoGateway::NoInterface(name.clone()),
                GatewayAddress::Is(address) => NoGateway::NoAddress(*address),
            }),
        }
    }
}

/// What the controller says about a policy.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GatewayOutcome {
    /// Those in use: node and addresses.
    pub gateways: BTreeMap<String, BTreeSet<IpAddr>>,
    pub conditions: Vec<DesiredCondition>,
}

/// The spec can be read.
pub const ACCEPTED: &str = "Accepted";
/// Every pod of the policy has a gateway.
pub const READY: &str = "Ready";

/// The status of a policy with these gateways. `assignment` is that of an address; without room its rules are in none.
pub fn status<'a>(
    policy: &GatewayPolicy,
    chosen: &PolicyGateways,
    has_room: bool,
    assignment: impl Fn(IpAddr) -> Option<&'a EgressPolicy>,
) -> GatewayOutcome {
    let condition =
        |kind, status, reason, message: &str| DesiredCondition { kind, status, reason, message: message.to_owned() };
    let spec = match &policy.spec {
        Ok(spec) => spec,
        Err(why) => {
            let conditions = vec![
                condition(ACCEPTED, false, "InvalidSpec", why),
                condition(READY, false, "InvalidSpec", "pods that were selected stay so, no others are"),
            ];
            return GatewayOutcome { gateways: BTreeMap::new(), conditions };
        }
    };
    let mut gateways = BTreeMap::<String, BTreeSet<IpAddr>>::new();
    let mut waiting = BTreeMap::new();
    for (node, address) in
        chosen.gateways.iter().flatten().flat_map(|one| one.addresses.iter().map(|address| (&one.node, *address)))
    {
        let policy = assignment(address);
        // Another node could have the address too.
        match policy.and_then(|policy| policy.published.items.first()) {
            Some(item) => drop(gateways.entry(item.node.clone()).or_default().insert(address)),
            None => {
                let why = policy.and_then(|policy| policy.published.conditions.get(ASSIGNED));
                let why = why.map_or("is about to serve it".to_owned(), |(_, condition)| condition.message.clone());
                waiting.insert(address, format!("{address} on node {node}: {why}"));
            }
        }
    }
    let without: Vec<&str> = spec
        .families
        .iter()
        .filter(|family| chosen.addresses(**family).is_empty())
        .map(|family| name(*family))
        .collect();
    let mut causes: Vec<String> = spec
        .gateways
        .iter()
        .zip(&chosen.gateways)
        .filter_map(|(rule, chosen)| chosen.as_ref().err().map(|why| format!("{}: {why}", rule.field)))
        .collect();
    let ready = match () {
        () if spec.families.is_empty() => {
            condition(READY, true, "NoDestination", "it has no destination, so it selects nothing")
        }
        () if !has_room => condition(
            READY,
            false,
            "NoRoom",
            "older policies leave no room for its rules at an address of a gateway; packets to its destinations are dropped",
        ),
        () if !without.is_empty() => {
            causes.push(format!("{} packets to its destinations are dropped", without.join(" and ")));
            condition(READY, false, "NoGateway", &causes.join("; "))
        }
        () if !waiting.is_empty() => {
            causes.extend(waiting.into_values());
            condition(READY, false, "Waiting", &causes.join("; "))
        }
        () if !causes.is_empty() => condition(READY, true, "FewerGateways", &causes.join("; ")),
        () => condition(READY, true, "Ready", "every gateway serves"),
    };
    GatewayOutcome { gateways, conditions: vec![condition(ACCEPTED, true, "Accepted", "the policy is valid"), ready] }
}

fn name(family: Family) -> &'static str {
    match family {
        Family::V4 => "IPv4",
        Family::V6 => "IPv6",
    }
}

/// What the names of the assignments of gateways begin with.
pub const ASSIGNMENT_PREFIX: &str = "gateway";

/// The name of the assignment of a gateway's address.
pub fn assignment_name(address: IpAddr) -> String {
    named_by_address(ASSIGNMENT_PREFIX, address)
}

/// The assignment of policies without a gateway.
pub const WITHOUT_GATEWAY: &str = "gateway-none";

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::model::samples::{equals, interface, ip, net};
    use crate::model::view::Labels;

    /// Nodes 1 to 3, all of zone `a`, with two interfaces and both families.
    fn nodes() -> Nodes {
        let node = |number: u8| {
            let uplink = [format!("172.18.0.{number}/16"), format!("fd00:172:18::{number}/64")];
            let further = format!("10.10.10.{number}/24");
            let mut eth1 = interface("eth1", &["10.10.10.0/24"]);
            eth1.addresses = vec![ip(&format!("10.10.10.{number}"))];
            Node {
                name: format!("n{number}"),
                ready: true,
                labels: Labels::from([("zone".to_owned(), "a".to_owned())]).into(),
                primary: uplink.iter().map(|text| net(text)).collect(),
                host_cidrs: uplink.iter().chain([&further]).map(|text| net(text)).collect(),
                pod_subnets: vec![net(&format!("10.244.{number}.0/24"))],
                interfaces: vec![eth1],
                ..Node::default()
            }
        };
        (1..=3).map(|number| (format!("n{number}"), Arc::new(node(number)))).collect()
    }

    fn rule(address: GatewayAddress) -> GatewayRule {
        GatewayRule { field: "egressGateway".to_owned(), nodes: equals("zone", "a"), address }
    }

    fn policy(families: &[Family], gateways: Vec<GatewayRule>) -> GatewayPolicy {
        let spec = GatewayRequest { families: families.iter().copied().collect(), gateways };
        GatewayPolicy { uid: "u".into(), created: 1, spec: Ok(spec) }
    }

    /// What a test changes.
    #[derive(Default)]
    struct Facts {
        unreachable: BTreeSet<String>,
        absent: BTreeSet<String>,
        current: BTreeMap<String, BTreeSet<IpAddr>>,
    }

    impl Facts {
        fn choose(&self, nodes: &Nodes, policy: &GatewayPolicy) -> Vec<Result<(String, Vec<String>), NoGateway>> {
            let Self { unreachable, absent, current } = self;
            let inputs = GatewayInputs { nodes, unreachable, absent, current };
            let chosen = GatewayChooser::new(inputs).choose(policy);
            let text =
                |gateway: ChosenGateway| (gateway.node, gateway.addresses.iter().map(IpAddr::to_string).collect());
            chosen.gateways.into_iter().map(|one| one.map(text)).collect()
        }

        fn at(addresses: &[&str]) -> Self {
            let current = addresses.iter().map(|text| ip(text)).collect();
            Self { current: [("u".to_owned(), current)].into(), ..Self::default() }
        }
    }

    fn is(node: &str, addresses: &[&str]) -> Vec<Result<(String, Vec<String>), NoGateway>> {
        vec![Ok((node.to_owned(), addresses.iter().map(|text| (*text).to_owned()).collect()))]
    }

    #[test]
    fn an_address_is_the_named_one_or_the_first_of_an_interface() {
        let chosen =
            |families: &[Family], address| Facts::default().choose(&nodes(), &policy(families, vec![rule(address)]));
        let (v4, both) = (&[Family::V4][..], &[Family::V4, Family::V6][..]);
        assert_eq!(chosen(v4, GatewayAddress::Default), is("n1", &["172.18.0.1"]));
        assert_eq!(chosen(both, GatewayAddress::Default), is("n1", &["172.18.0.1", "fd00:172:18::1"]));
        let eth1 = || GatewayAddress::OfInterface("eth1".into());
        assert_eq!(chosen(v4, eth1()), is("n1", &["10.10.10.1"]));
        assert_eq!(chosen(both, eth1()), is("n1", &["10.10.10.1"]), "the other family is dropped");
        assert_eq!(chosen(v4, GatewayAddress::Is(ip("10.10.10.2"))), is("n2", &["10.10.10.2"]), "where it is");
        assert_eq!(chosen(v4, GatewayAddress::Is(ip("10.10.10.9"))), [Err(NoGateway::NoAddress(ip("10.10.10.9")))]);
        let v6 = ip("fd00:172:18::2");
        assert_eq!(chosen(v4, GatewayAddress::Is(v6)), [Err(NoGateway::OtherFamily(v6))]);
        assert_eq!(chosen(&[Family::V6], eth1()), [Err(NoGateway::NoInterface("eth1".into()))]);
    }

    #[test]
    fn the_first_ready_node_is_the_gateway_and_stays_it() {
        let policy = policy(&[Family::V4], vec![rule(GatewayAddress::Default)]);
        let mut facts = Facts::default();
        facts.unreachable.insert("n1".into());
        assert_eq!(facts.choose(&nodes(), &policy), is("n2", &["172.18.0.2"]));
        // The first node is back.
        assert_eq!(Facts::at(&["172.18.0.2"]).choose(&nodes(), &policy), is("n2", &["172.18.0.2"]));
        let changed = |name: &str, change: &dyn Fn(&mut Node)| {
            let mut nodes = nodes();
            change(Arc::make_mut(nodes.get_mut(name).expect("a node")));
            Facts::at(&["172.18.0.2"]).choose(&nodes, &policy)
        };
        assert_eq!(changed("n2", &|node| node.ready = false), is("n1", &["172.18.0.1"]));
        assert_eq!(changed("n2", &|node| node.drained = true), is("n1", &["172.18.0.1"]));
        assert_eq!(changed("n2", &|node| node.labels = Labels::new().into()), is("n1", &["172.18.0.1"]));
        // Its agent is away for a moment.
        let mut facts = Facts::at(&["172.18.0.2"]);
        facts.absent.insert("n2".into());
        assert_eq!(facts.choose(&nodes(), &policy), is("n2", &["172.18.0.2"]));
        facts.current.clear();
        facts.absent.insert("n1".into());
        assert_eq!(facts.choose(&nodes(), &policy), is("n3", &["172.18.0.3"]), "it gets nothing new");
        let mut nodes = nodes();
        for node in nodes.values_mut() {
            Arc::make_mut(node).drained = true;
        }
        let kept = Facts::at(&["172.18.0.2"]).choose(&nodes, &policy);
        assert_eq!(kept, is("n2", &["172.18.0.2"]), "no other can take it");
    }

    #[test]
    fn a_gateway_that_is_none_says_why() {
        let mut nodes = nodes();
        let chosen = |nodes: &Nodes, selector| {
            let rule = GatewayRule { nodes: selector, ..rule(GatewayAddress::Default) };
            Facts::default().choose(nodes, &policy(&[Family::V4], vec![rule]))
        };
        assert_eq!(chosen(&nodes, equals("zone", "b")), [Err(NoGateway::NoNode)]);
        // A kubelet writes the address of another node onto its own Node.
        Arc::make_mut(nodes.get_mut("n3").expect("a node")).primary = vec![net("172.18.0.1/16")];
        nodes.remove("n2");
        Arc::make_mut(nodes.get_mut("n1").expect("a node")).ready = false;
        assert_eq!(chosen(&nodes, equals("zone", "a")), [Err(NoGateway::NoDefault)], "it is known as the first one's");
        Arc::make_mut(nodes.get_mut("n3").expect("a node")).ready = false;
        assert_eq!(chosen(&nodes, equals("zone", "a")), [Err(NoGateway::NoReadyNode(2))]);
    }

    #[test]
    fn the_status_names_gateways_and_what_is_missing() {
        let both = [Family::V4, Family::V6];
        let one = policy(&both, vec![rule(GatewayAddress::Default), rule(GatewayAddress::Is(ip("10.10.10.9")))]);
        let nodes = nodes();
        let Facts { unreachable, absent, current } = Facts::default();
        let inputs = GatewayInputs { nodes: &nodes, unreachable: &unreachable, absent: &absent, current: &current };
        let choose = |policy: &GatewayPolicy| GatewayChooser::new(inputs).choose(policy);
        let chosen = choose(&one);
        let ready = |policy: &GatewayPolicy, chosen: &PolicyGateways, is_assigned: bool| {
            let assigned = |address: &str| crate::model::samples::policy("gateway", &[address], &[("n1", address)]);
            let (v4, v6) = (assigned("172.18.0.1"), assigned("fd00:172:18::1"));
            let status = status(policy, chosen, true, |address| {
                is_assigned.then_some(if address.is_ipv4() { &v4 } else { &v6 })
            });
            let ready = status.conditions.last().expect("conditions").clone();
            (status.gateways.len(), ready.status, ready.reason, ready.message)
        };
        let missing = "egressGateway: no node that it matches has the address 10.10.10.9";
        assert_eq!(ready(&one, &chosen, true), (1, true, "FewerGateways", missing.to_owned()));
        let (gateways, is_ready, reason, message) = ready(&one, &chosen, false);
        assert_eq!((gateways, is_ready, reason), (0, false, "Waiting"));
        assert!(message.contains("172.18.0.1 on node n1: is about to serve it"), "{message}");
        let v4 = policy(&both, vec![rule(GatewayAddress::Is(ip("10.10.10.2")))]);
        let (_, is_ready, reason, message) = ready(&v4, &choose(&v4), true);
        assert_eq!(
            (is_ready, reason, message.as_str()),
            (false, "NoGateway", "IPv6 packets to its destinations are dropped")
        );
        let broken = GatewayPolicy { spec: Err("spec.selectors: no list".into()), ..v4 };
        let conditions = status(&broken, &choose(&broken), true, |_| None).conditions;
        assert_eq!((conditions[0].reason, conditions[0].message.as_str()), ("InvalidSpec", "spec.selectors: no list"));
        let nothing = policy(&[], vec![rule(GatewayAddress::Default)]);
        assert_eq!(ready(&nothing, &choose(&nothing), true).2, "NoDestination");
    }
}
