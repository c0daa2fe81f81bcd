//! Nodes: identity, pod subnets, addresses, and the facts that their agents publish.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;
use std::net::IpAddr;
use std::str::FromStr;
use std::sync::Arc;

use ipnet::IpNet;
use k8s_openapi::api::core::v1::Node as KubeNode;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::DynamicObject;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::convert::{MOST_OF_PROBLEM, annotation, interface};
use crate::crd::{EgressNodeStatus, NodeUplink, PreparedAddress, ReleasedAddress};
use egress_core::keys;
use egress_core::model::interface::{EgressInterface, MOST_INTERFACES};
use egress_core::model::ledger::Acknowledgements;
use egress_core::model::node::{Capacity, CloudConfig, Given, Mac, Node, NodePart, Prepared, Uplink};
use egress_core::model::view::Labels;
use egress_core::text::quoted;

#[derive(Deserialize)]
struct PrimaryIfaddr {
    #[serde(default)]
    ipv4: String,
    #[serde(default)]
    ipv6: String,
}

/// What a cloud allows on one interface: networks, and how many addresses. The first entry is the primary interface.
#[derive(Deserialize)]
struct CloudInterface {
    ifaddr: PrimaryIfaddr,
    #[serde(default)]
    capacity: CloudCapacity,
}

/// A missing key is no limit; zero allows no address.
#[derive(Default, Deserialize)]
struct CloudCapacity {
    ip: Option<i64>,
    ipv4: Option<i64>,
    ipv6: Option<i64>,
}

/// Maximum entries of a list of addresses or networks, whatever writes it: agents have a kernel entry for each. Pod subnets and
/// next hops are few.
const MOST_LISTED: usize = 1_024;
const MOST_SUBNETS: usize = 64;
const MOST_NEXT_HOPS: usize = 64;
/// Maximum addresses of a management port.
const MOST_HEALTH_ADDRESSES: usize = 4;
/// Maximum problems of one EgressNode object.
const MOST_PROBLEMS: usize = 8;

/// Older releases wrote a single-stack node's subnet as a plain string.
#[derive(Deserialize)]
#[serde(untagged)]
enum OneOrMany {
    One(IpNet),
    Many(Vec<IpNet>),
}

pub fn node(node: &KubeNode) -> Node {
    let meta = &node.metadata;
    let status = node.status.as_ref();
    let addresses = |kind: &str| -> Vec<IpAddr> {
        let all = status.into_iter().flat_map(|s| s.addresses.iter().flatten()).filter(|a| a.type_ == kind);
        all.filter_map(|a| a.address.parse().ok()).take(MOST_LISTED).collect()
    };
    let ready = status
        .into_iter()
        .flat_map(|s| s.conditions.iter().flatten())
        .any(|condition| condition.type_ == "Ready" && condition.status == "True");
    let mut unreadable = UnreadableParts::default();
    let primary = unreadable.part(NodePart::Primary, |problems| {
        let pair = read(meta, keys::PRIMARY_IFADDR, problems);
        pair.map(|pair| networks(keys::PRIMARY_IFADDR, &pair, problems)).unwrap_or_default()
    });
    let cloud = unreadable.part(NodePart::Cloud, |problems| cloud(meta, problems));
    let max_egress_ips = unreadable.part(NodePart::MaxEgressIps, |problems| read(meta, keys::MAX_EGRESS_IPS, problems));
    let pod_subnets = unreadable.part(NodePart::PodSubnets, |problems| {
        few((keys::NODE_SUBNETS, MOST_SUBNETS), pod_subnets(node, problems), problems)
    });
    let host_cidrs = unreadable.part(NodePart::HostCidrs, |problems| {
        few((keys::HOST_CIDRS, MOST_LISTED), read(meta, keys::HOST_CIDRS, problems).unwrap_or_default(), problems)
    });
    let UnreadableParts { parts: unreadable, mut problems } = unreadable;
    for problem in &mut problems {
        *problem = quoted(problem, MOST_OF_PROBLEM).into_owned();
    }
    let mut read = Node {
        name: meta.name.clone().unwrap_or_default(),
        uid: meta.uid.clone().unwrap_or_default(),
        labels: Arc::new(own_labels(meta)),
        assignable: meta.labels.iter().flatten().any(|(key, _)| key == keys::ASSIGNABLE),
        ready,
        drained: annotation(meta, keys::DRAIN).is_some_and(|value| value != "false"),
        primary,
        host_cidrs,
        internal: addresses("InternalIP"),
        external: addresses("ExternalIP"),
        pod_subnets,
        cloud,
        max_egress_ips,
        announces_pods: annotation(meta, keys::CHASSIS_ID).is_some(),
        shared_gateway: is_shared_gateway(meta),
        foreign_egress_ips: keys::EGRESS_IPS_ON_INTERFACES.iter().any(|key| lists_any(meta, key)),
        problems,
        unreadable,
        ..Node::default()
    };
    read.networks_known = knows_networks(&read);
    read
}

/// Without the labels of EgressServices: the controller changes them whenever a Service moves, and no selector of a policy
/// means them.
fn own_labels(meta: &ObjectMeta) -> Labels {
    let labels = meta.labels.iter().flatten().filter(|(key, _)| !key.starts_with(keys::EGRESS_SERVICE_PREFIX));
    labels.map(|(key, value)| (key.clone(), value.clone())).collect()
}

/// Whether the node's pod subnets and networks are published and readable.
fn knows_networks(node: &Node) -> bool {
    let is_missed = |part: &NodePart| match part {
        NodePart::HostCidrs | NodePart::MaxEgressIps => false,
        NodePart::Interfaces => node.cloud.is_none(),
        NodePart::Primary | NodePart::PodSubnets | NodePart::Cloud => true,
    };
    !node.primary.is_empty() && !node.pod_subnets.is_empty() && !node.unreadable.iter().any(is_missed)
}

/// The facts that a node's agent publishes in its EgressNode object.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AgentFacts {
    node_uid: String,
    primary: Vec<IpNet>,
    all: Vec<IpNet>,
    uplink: Uplink,
    interfaces: Vec<EgressInterface>,
    health: Option<Vec<IpAddr>>,
    released: Acknowledgements,
    given: Given,
    prepared: BTreeMap<IpAddr, Prepared>,
    problems: Vec<String>,
    bounded: Option<u64>,
}

/// Reads the status of an EgressNode object. What cannot be read is a problem, and counts as not published.
pub fn agent_facts(object: &DynamicObject) -> AgentFacts {
    let mut problems = Vec::new();
    let status = object.data.get("status").cloned().unwrap_or_default();
    let status: EgressNodeStatus = match status {
        Value::Null => EgressNodeStatus::default(),
        status => serde_json::from_value(status).unwrap_or_else(|error| {
            problems.push(format!("EgressNode: {error}"));
            EgressNodeStatus::default()
        }),
    };
    let EgressNodeStatus {
        node_uid,
        networks,
        uplink,
        interfaces,
        health_addresses,
        released,
        prepared,
        bounded_lease,
    } = status;
    let networks = networks.unwrap_or_default();
    let primary = parsed(networks.primary, MOST_LISTED, &mut problems);
    let all = parsed(networks.all, MOST_LISTED, &mut problems);
    let health = health_addresses.map(|all| parsed(all, MOST_HEALTH_ADDRESSES, &mut problems));
    let mut facts = AgentFacts { node_uid, primary, all, health, bounded: bounded_lease, ..AgentFacts::default() };
    if let Some(NodeUplink { mac, next_hops }) = uplink {
        facts.uplink = read_uplink(&mac, next_hops, &mut problems);
    }
    let interfaces = interfaces.into_iter().flatten().take(MOST_INTERFACES);
    facts.interfaces = interfaces.filter_map(|one| interface::record(one, &mut problems)).collect();
    for ReleasedAddress { address, hand_over, to } in released.into_iter().flatten() {
        let Some(address) = one(&address, &mut problems) else { continue };
        facts.released.insert(address, hand_over);
        facts.given.extend(to.map(|to| (address, to)));
    }
    for PreparedAddress { address, hand_over, from, open } in prepared.into_iter().flatten() {
        let Some(address) = one(&address, &mut problems) else { continue };
        facts.prepared.insert(address, Prepared(hand_over, from, open));
    }
    problems.truncate(MOST_PROBLEMS);
    facts.problems = problems.iter().map(|problem| quoted(problem, MOST_OF_PROBLEM).into_owned()).collect();
    facts
}

fn parsed<T: FromStr<Err: Display>>(texts: Vec<String>, most: usize, problems: &mut Vec<String>) -> Vec<T> {
    texts.iter().take(most).filter_map(|text| one(text, problems)).collect()
}

pub(super) fn one<T: FromStr<Err: Display>>(text: &str, problems: &mut Vec<String>) -> Option<T> {
    let read = text.parse().inspect_err(|error| problems.push(format!("EgressNode: {text:?}: {error}")));
    read.ok()
}

/// A node with the facts of its agent. Annotations of its networks, by a CNI or an administrator, take precedence.
pub fn joined(node: &Node, published: Option<&AgentFacts>) -> Node {
    let mut node = node.clone();
    let Some(published) = published.filter(|published| published.node_uid == node.uid) else {
        // The last facts hold: an object that is deleted, and written again by its agent, takes no address from the node.
        node.unreadable.insert(NodePart::Interfaces);
        if node.primary.is_empty() {
            node.unreadable.extend([NodePart::Primary, NodePart::HostCidrs]);
        }
        node.networks_known = knows_networks(&node);
        return node;
    };
    if node.primary.is_empty() && !node.unreadable.contains(&NodePart::Primary) {
        node.primary.clone_from(&published.primary);
        node.networks_by_agent |= !published.primary.is_empty();
    }
    if node.host_cidrs.is_empty() && !node.unreadable.contains(&NodePart::HostCidrs) {
        node.host_cidrs.clone_from(&published.all);
        node.networks_by_agent |= !published.all.is_empty();
    }
    node.uplink.clone_from(&published.uplink);
    node.interfaces.clone_from(&published.interfaces);
    node.health.clone_from(&published.health);
    node.released.clone_from(&published.released);
    node.given.clone_from(&published.given);
    node.prepared.clone_from(&published.prepared);
    node.bounded = published.bounded;
    node.problems.extend_from_slice(&published.problems);
    node.networks_known = knows_networks(&node);
    node
}

fn read_uplink(mac: &str, next_hops: Vec<String>, problems: &mut Vec<String>) -> Uplink {
    let mac = link_address(mac, problems);
    Uplink { mac, next_hops: parsed(next_hops, MOST_NEXT_HOPS, problems).into_iter().collect() }
}

pub(super) fn link_address(mac: &str, problems: &mut Vec<String>) -> Option<Mac> {
    let bytes: Option<Vec<u8>> = mac.split(':').map(|byte| u8::from_str_radix(byte, 16).ok()).collect();
    let read = bytes.and_then(|bytes| bytes.try_into().ok());
    if read.is_none() {
        problems.push(format!("EgressNode: {mac:?} is no link address"));
    }
    read
}

/// The list, or a problem if it is longer than any node's.
fn few((key, most): (&str, usize), list: Vec<IpNet>, problems: &mut Vec<String>) -> Vec<IpNet> {
    if list.len() > most {
        problems.push(format!("annotation {key}: {} entries, and a node has {most} at most", list.len()));
        return Vec::new();
    }
    list
}

/// Only if the annotation says so: an unreadable one is OVN-Kubernetes' concern.
fn is_shared_gateway(meta: &ObjectMeta) -> bool {
    let config = annotation(meta, keys::GATEWAY_CONFIG).and_then(|text| serde_json::from_str::<Value>(text).ok());
    config.is_some_and(|config| config["default"]["mode"] == "shared")
}

fn lists_any(meta: &ObjectMeta, key: &str) -> bool {
    let list = annotation(meta, key).and_then(|text| serde_json::from_str::<Vec<String>>(text).ok());
    list.is_some_and(|list| !list.is_empty())
}

/// Unreadable parts, and a line for each problem.
#[derive(Default)]
struct UnreadableParts {
    parts: BTreeSet<NodePart>,
    problems: Vec<String>,
}

impl UnreadableParts {
    /// Reads a part. It counts as unreadable if there is any problem with it.
    fn part<T>(&mut self, part: NodePart, read: impl FnOnce(&mut Vec<String>) -> T) -> T {
        let before = self.problems.len();
        let value = read(&mut self.problems);
        if self.problems.len() > before {
            self.parts.insert(part);
        }
        value
    }
}

fn networks(key: &str, pair: &PrimaryIfaddr, problems: &mut Vec<String>) -> Vec<IpNet> {
    let mut networks = Vec::new();
    for text in [&pair.ipv4, &pair.ipv6].into_iter().filter(|text| !text.is_empty()) {
        match text.parse() {
            Ok(network) => networks.push(network),
            Err(error) => problems.push(format!("annotation {key}: {text:?}: {error}")),
        }
    }
    networks
}

/// If the cloud's configuration cannot be read, nothing is allowed.
fn cloud(meta: &ObjectMeta, problems: &mut Vec<String>) -> Option<CloudConfig> {
    annotation(meta, keys::CLOUD_CONFIG)?;
    let interfaces: Vec<serde_json::Value> = read(meta, keys::CLOUD_CONFIG, problems).unwrap_or_default();
    let first = interfaces.into_iter().next().unwrap_or_default();
    match serde_json::from_value::<CloudInterface>(first) {
        Ok(CloudInterface { ifaddr, capacity: CloudCapacity { ip, ipv4, ipv6 } }) => {
            if ifaddr.ipv4.is_empty() && ifaddr.ipv6.is_empty() {
                problems.push(format!("annotation {}: the first interface has no network", keys::CLOUD_CONFIG));
            }
            let limit = |n: Option<i64>| n.map(|n| usize::try_from(n).unwrap_or(0));
            let capacity = Capacity { total: limit(ip), v4: limit(ipv4), v6: limit(ipv6) };
            Some(CloudConfig { networks: networks(keys::CLOUD_CONFIG, &ifaddr, problems), capacity })
        }
        Err(error) => {
            problems.push(format!("annotation {}: the first interface: {error}", keys::CLOUD_CONFIG));
            Some(CloudConfig::default())
        }
    }
}

fn pod_subnets(node: &KubeNode, problems: &mut Vec<String>) -> Vec<IpNet> {
    let subnets: Option<BTreeMap<String, OneOrMany>> = read(&node.metadata, keys::NODE_SUBNETS, problems);
    if let Some(subnets) = subnets.and_then(|mut networks| networks.remove("default")) {
        return match subnets {
            OneOrMany::One(subnet) => vec![subnet],
            OneOrMany::Many(subnets) => subnets,
        };
    }
    let Some(spec) = &node.spec else { return Vec::new() };
    let cidrs = match &spec.pod_cidrs {
        Some(cidrs) if !cidrs.is_empty() => cidrs.clone(),
        _ => spec.pod_cidr.clone().into_iter().collect(),
    };
    cidrs.iter().filter_map(|cidr| cidr.parse().ok()).collect()
}

fn read<T: DeserializeOwned>(meta: &ObjectMeta, key: &str, problems: &mut Vec<String>) -> Option<T> {
    match serde_json::from_str(annotation(meta, key)?) {
        Ok(value) => Some(value),
        Err(error) => {
            problems.push(format!("annotation {key}: {error}"));
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use egress_core::model::interface::MOST_INTERFACE_NETWORKS;
    use egress_core::model::samples::interface;
    use egress_core::model::view::Reading;

    fn convert(value: serde_json::Value) -> Node {
        node(&serde_json::from_value(value).expect("a node"))
    }

    fn nets(texts: &[&str]) -> Vec<IpNet> {
        texts.iter().map(|text| text.parse().expect("a literal")).collect()
    }

    #[test]
    fn both_shapes_of_subnets_and_the_spec_are_read() {
        let with = |subnets: &str| {
            convert(json!({
                "metadata": {"name": "a", "annotations": {"k8s.ovn.org/node-subnets": subnets}},
                "spec": {"podCIDRs": ["10.1.0.0/24", "fd01::/64"], "podCIDR": "10.1.0.0/24"}
            }))
        };
        assert_eq!(with(r#"{"default":"10.244.1.0/24"}"#).pod_subnets, nets(&["10.244.1.0/24"]));
        let both = r#"{"default":["10.244.1.0/24","fd00:10:244:1::/64"]}"#;
        assert_eq!(with(both).pod_subnets, nets(&["10.244.1.0/24", "fd00:10:244:1::/64"]));
        let broken = with("10.244.1.0/24");
        assert_eq!(broken.pod_subnets, nets(&["10.1.0.0/24", "fd01::/64"]));
        assert_eq!(broken.problems.len(), 1);
    }

    #[test]
    fn annotations_of_ovn_kubernetes_are_read() {
        let with = |annotations| {
            let node = convert(json!({"metadata": {"name": "n1", "annotations": annotations}}));
            (node.shared_gateway, node.foreign_egress_ips)
        };
        let gateway = |mode: &str| format!(r#"{{"default":{{"mode":"{mode}","interface-id":"breth0_n1"}}}}"#);
        assert_eq!(with(json!({})), (false, false));
        assert_eq!(with(json!({"k8s.ovn.org/l3-gateway-config": gateway("local")})), (false, false));
        assert_eq!(with(json!({"k8s.ovn.org/l3-gateway-config": gateway("shared")})), (true, false));
        assert_eq!(with(json!({"k8s.ovn.org/l3-gateway-config": "nonsense"})), (false, false));
        for key in keys::EGRESS_IPS_ON_INTERFACES {
            assert_eq!(with(json!({key: "[]"})), (false, false));
            assert_eq!(with(json!({key: r#"["10.10.10.100"]"#})), (false, true));
        }
    }

    #[test]
    fn one_broken_annotation_does_not_hide_the_others() {
        let node = convert(json!({
            "metadata": {"name": "a", "labels": {"k8s.ovn.org/egress-assignable": "false"}, "annotations": {
                "k8s.ovn.org/node-primary-ifaddr": r#"{"ipv4":"172.18.0.2/16","ipv6":""}"#,
                "k8s.ovn.org/host-cidrs": "nonsense"}},
            "status": {"conditions": [{"type": "Ready", "status": "True"}],
                       "addresses": [{"type": "InternalIP", "address": "172.18.0.2"}, {"type": "Hostname", "address": "a"}]}
        }));
        assert!(node.assignable && node.ready);
        assert_eq!(node.primary, nets(&["172.18.0.2/16"]));
        assert_eq!(node.internal.len(), 1);
        assert_eq!(node.problems.len(), 1);
    }

    fn facts(status: serde_json::Value) -> AgentFacts {
        let object = json!({"apiVersion": "egress-agent.io/v1alpha1", "kind": "EgressNode",
                            "metadata": {"name": "a"}, "spec": {}, "status": status});
        agent_facts(&serde_json::from_value(object).expect("an object"))
    }

    #[test]
    fn a_broken_link_address_is_a_problem_and_keeps_the_next_hops() {
        for (mac, read, problems) in [
            ("02:00:ac:12:00:02", Some([2, 0, 0xac, 0x12, 0, 2]), 0),
            ("02:00:ac:12:00:02:03", None, 1),
            ("02:00:ac:12:00", None, 1),
            ("02:00:ac:12:00:100", None, 1),
            ("", None, 1),
        ] {
            let published = facts(json!({"nodeUID": "u", "uplink": {"mac": mac, "nextHops": ["172.18.0.1"]}}));
            assert_eq!((published.uplink.mac, published.problems.len()), (read, problems), "{mac}");
            assert_eq!(published.uplink.next_hops.len(), 1);
        }
    }

    #[test]
    fn facts_of_an_agent_count_for_its_own_node_and_after_annotations_of_a_cni() {
        let of = |annotations: serde_json::Value| {
            convert(json!({"metadata": {"name": "a", "uid": "u", "annotations": annotations},
                           "spec": {"podCIDRs": ["10.1.0.0/24"]}}))
        };
        let published = facts(json!({
            "nodeUID": "u",
            "networks": {"primary": ["172.18.0.2/16"], "all": ["172.18.0.2/16", "10.9.9.9/24"]},
            "interfaces": [crate::convert::interface::published(&interface("eth1", &["10.9.9.0/24"]))],
            "healthAddresses": ["10.1.0.1"],
            "released": [{"address": "172.18.0.100", "handOver": 7}, {"address": "fd00::1", "handOver": 8, "to": "b"}],
            "prepared": [{"address": "172.18.0.101", "handOver": 9, "from": "b", "open": true}],
            "boundedLease": 12,
        }));
        let bare = joined(&of(json!({})), Some(&published));
        assert_eq!(bare.primary, nets(&["172.18.0.2/16"]));
        assert_eq!(bare.host_cidrs, nets(&["172.18.0.2/16", "10.9.9.9/24"]));
        assert_eq!(bare.interfaces, [interface("eth1", &["10.9.9.0/24"])]);
        assert!(bare.networks_known && bare.health.is_some_and(|all| all.len() == 1));
        let ip = |text: &str| -> IpAddr { text.parse().expect("a literal") };
        assert_eq!(bare.bounded, Some(12));
        assert_eq!(bare.released, [(ip("172.18.0.100"), 7), (ip("fd00::1"), 8)].into());
        assert_eq!(bare.given, [(ip("fd00::1"), "b".to_owned())].into());
        assert_eq!(bare.prepared, [(ip("172.18.0.101"), Prepared(9, "b".into(), true))].into());
        let annotated = of(json!({"k8s.ovn.org/node-primary-ifaddr": r#"{"ipv4":"192.0.2.9/24"}"#}));
        assert_eq!(joined(&annotated, Some(&published)).primary, nets(&["192.0.2.9/24"]));
        let broken = of(json!({"k8s.ovn.org/node-primary-ifaddr": "nonsense"}));
        assert!(joined(&broken, Some(&published)).primary.is_empty(), "an unreadable annotation is not replaced");
        let former = facts(json!({"nodeUID": "former", "healthAddresses": ["10.1.0.1"]}));
        let without_facts = joined(&of(json!({})), None);
        assert_eq!(joined(&of(json!({})), Some(&former)), without_facts, "facts of a Node that was deleted");
        assert_eq!(without_facts.unreadable, [NodePart::Primary, NodePart::HostCidrs, NodePart::Interfaces].into());
        assert!(!without_facts.networks_known && without_facts.problems.is_empty());
        let known = joined(&of(json!({})), Some(&published));
        let held = without_facts.filled_from(&known);
        assert_eq!((held.primary, held.interfaces), (known.primary, known.interfaces), "the last facts hold");
    }

    #[test]
    fn nonsense_of_an_agent_is_bounded_and_named() {
        let published = facts(json!({"nodeUID": "u", "healthAddresses": vec!["x".repeat(200_000); 100],
                                "networks": {"primary": ["nonsense"], "all": ["10.0.0.1/24"]}}));
        assert!(published.problems.len() <= MOST_PROBLEMS && published.all.len() == 1, "{}", published.problems.len());
        assert!(published.problems.iter().all(|problem| problem.len() < MOST_OF_PROBLEM + 32));
        let published = facts(json!({"nodeUID": 7}));
        assert!(published.problems.len() == 1 && published.node_uid.is_empty());
    }

    #[test]
    fn what_is_stored_and_reported_of_a_node_is_bounded() {
        let with = |key: &str, value: String| {
            convert(json!({"metadata": {"name": "a", "annotations": {key: value}},
                           "spec": {"podCIDRs": ["10.1.0.0/24"]}}))
        };
        for (key, published) in
            [(keys::PRIMARY_IFADDR, json!("x".repeat(200_000))), (keys::HOST_CIDRS, json!("x".repeat(200_000)))]
        {
            let node = with(key, published.to_string());
            assert!(node.problems.len() == 1 && node.problems[0].len() < MOST_OF_PROBLEM + 32, "{key}");
        }
        let networks = |count: u32| {
            let all = (0..count).map(|i| format!("{}/32", std::net::Ipv4Addr::from(0x1400_0000 + i)));
            all.collect::<Vec<_>>()
        };
        let node = with(keys::HOST_CIDRS, json!(networks(15_000)).to_string());
        assert!(node.host_cidrs.is_empty() && node.unreadable == [NodePart::HostCidrs].into(), "{:?}", node.problems);
        assert_eq!(with(keys::HOST_CIDRS, json!(networks(1_024)).to_string()).host_cidrs.len(), MOST_LISTED);
        let node = with(keys::NODE_SUBNETS, json!({"default": networks(65)}).to_string());
        assert!(node.pod_subnets.is_empty() && node.unreadable == [NodePart::PodSubnets].into());
        let networks =
            |count: u32| (0..count).map(|i| json!({"network": format!("10.9.{i}.0/24")})).collect::<Vec<_>>();
        let interface = |i: u32, count| {
            json!({"name": format!("eth{i}"), "index": i, "mac": "02:00:00:00:00:01", "mtu": 1500, "uplink": false,
                   "networks": networks(count), "state": "Usable"})
        };
        let all: Vec<_> = (0..33).map(|i| interface(i, 65)).collect();
        let published = facts(json!({"nodeUID": "u", "interfaces": all}));
        assert_eq!(published.interfaces.len(), MOST_INTERFACES);
        assert_eq!(published.interfaces[0].networks.len(), MOST_INTERFACE_NETWORKS);
        let addresses: Vec<_> = (0..60_000_u32)
            .map(|i| json!({"type": "ExternalIP", "address": std::net::Ipv4Addr::from(0x1400_0000 + i).to_string()}))
            .collect();
        let node = convert(json!({"metadata": {"name": "a"}, "status": {"addresses": addresses}}));
        assert_eq!(node.external.len(), MOST_LISTED);
    }

    #[test]
    fn unreadable_networks_are_unknown_if_they_may_host_egress_ips() {
        let with = |more: serde_json::Value| {
            let mut annotations = json!({
                "k8s.ovn.org/node-primary-ifaddr": r#"{"ipv4":"172.18.0.2/16"}"#,
                "k8s.ovn.org/node-subnets": r#"{"default":["10.244.1.0/24"]}"#,
                keys::HOST_CIDRS: "nonsense"});
            let more = more.as_object().expect("an object").clone();
            annotations.as_object_mut().expect("an object").extend(more);
            convert(json!({"metadata": {"name": "a", "uid": "u", "annotations": annotations}}))
        };
        let plain = with(json!({}));
        assert_eq!((plain.uid.as_str(), plain.networks_known), ("u", true), "a list of addresses hosts nothing");
        assert_eq!(plain.unreadable, [NodePart::HostCidrs].into());
        assert!(!joined(&plain, None).networks_known, "one of its interfaces might host an address");
        for published in [json!({"nodeUID": "u"}), json!({"nodeUID": "u", "interfaces": []})] {
            assert!(joined(&plain, Some(&facts(published))).networks_known);
        }
        let cloudy = with(json!({keys::CLOUD_CONFIG: r#"[{"ifaddr":{"ipv4":"172.18.0.0/16"}}]"#}));
        assert!(joined(&cloudy, None).networks_known, "of a cloud's node only the primary interface counts");
    }

    #[test]
    fn a_node_may_limit_its_egress_ips() {
        let with = |limit: &str, cloud: &str| {
            convert(json!({"metadata": {"annotations": {keys::MAX_EGRESS_IPS: limit, keys::CLOUD_CONFIG:
                format!(r#"[{{"ifaddr":{{"ipv4":"10.0.128.0/18"}},"capacity":{cloud}}}]"#)}}}))
        };
        assert_eq!(with("3", r#"{"ipv4":9}"#).capacity(), Capacity { total: Some(3), v4: Some(9), v6: None });
        assert_eq!(with("0", r#"{"ip":14}"#).capacity().total, Some(0));
        assert_eq!(with("20", r#"{"ip":14}"#).capacity().total, Some(14));
        for broken in ["-1", "many", ""] {
            let node = with(broken, r#"{"ip":14}"#);
            assert_eq!(node.unreadable, [NodePart::MaxEgressIps].into(), "{broken}");
            assert_eq!(node.problems.len(), 1, "{broken}");
            let known = with("3", r#"{"ip":14}"#);
            assert_eq!(node.filled_from(&known).capacity().total, Some(3), "the last readable limit stays");
        }
    }

    #[test]
    fn the_first_interface_of_a_cloud_counts_and_a_missing_limit_is_none() {
        let with = |config: &str| {
            convert(json!({"metadata": {"name": "a", "annotations": {
                "k8s.ovn.org/node-primary-ifaddr": r#"{"ipv4":"10.0.128.9/18"}"#,
                "k8s.ovn.org/node-subnets": r#"{"default":["10.244.1.0/24"]}"#,
                "cloud.network.openshift.io/egress-ipconfig": config}}}))
        };
        let node = with(
            r#"[{"interface":"eni-1","ifaddr":{"ipv4":"10.0.128.0/18","ipv6":"2600:1f::/64"},"capacity":{"ipv4":0,"ip":14}},
                {"interface":"eni-2","ifaddr":{"ipv4":"10.1.0.0/18"},"capacity":{"ipv4":9}}]"#,
        );
        let cloud = node.cloud.expect("the config");
        assert_eq!(cloud.networks, nets(&["10.0.128.0/18", "2600:1f::/64"]));
        assert_eq!(cloud.capacity, Capacity { total: Some(14), v4: Some(0), v6: None });
        assert!(node.networks_known && node.problems.is_empty());
        for broken in
            ["[]", "nonsense", r#"[{"ifaddr":7}]"#, r#"[{"ifaddr":{}}]"#, r#"[{"ifaddr":{"ipv4":"10.0.128.0/99"}}]"#]
        {
            let node = with(broken);
            assert!(!node.networks_known && !node.problems.is_empty(), "{broken}");
            assert_eq!(node.cloud, Some(CloudConfig::default()), "{broken}");
        }
    }
}
