//! EgressAssignment (`egress-agent.io/v1alpha1`) as an egress policy: what the controller has made of objects of other kinds.
//!
//! They are cluster-wide and written by the controller alone, since agents believe them: an EgressService is written by users of
//! its namespace, and so are its annotations.

use std::collections::BTreeSet;
use std::net::IpAddr;

use ipnet::IpNet;
use kube::Client;
use kube::api::{ApiResource, DynamicObject};
use serde::Deserialize;
use serde_json::Value;

use crate::crd::{self, AssignedVlanNetwork, AssignmentSource};
use crate::policy::egress_ip::{read, write};
use crate::policy::{PolicyApi, StatusWriter, selector};
use egress_core::model::interface::VlanNetwork;
use egress_core::model::policy::{
    AddressUse, DestinationPrefixes, Destinations, EgressPolicy, EligibleNodes, Item, NodeSelectors, PodShare,
    PolicyKind, PolicyNetwork, PolicyRule, RuleSource, SelectedNodes, Selects, parse_egress_ip,
};
use egress_core::model::selector::Selector;
use egress_core::model::state::BandwidthLimit;

pub(super) struct EgressAssignments;

impl PolicyApi for EgressAssignments {
    fn objects(&self) -> &'static str {
        "EgressAssignment objects"
    }

    fn resource(&self) -> ApiResource {
        crd::egress_assignment_resource()
    }

    fn read(&self, object: &DynamicObject) -> EgressPolicy {
        read::policy(PolicyKind::Assignment, object)
    }

    fn status_writer(&self, client: Client) -> Box<dyn StatusWriter> {
        Box::new(write::Writer::new(&client, PolicyKind::Assignment))
    }
}

/// Sorted by precedence.
pub(super) fn rules(spec: &Value) -> Result<Vec<PolicyRule>, String> {
    let rules = spec["rules"].as_array().ok_or("spec.rules: no list")?;
    let own = spec["egressIPs"][0].as_str().and_then(parse_egress_ip);
    let mut rules = rules.iter().map(|one| rule(one, own)).collect::<Result<Vec<_>, String>>()?;
    rules.sort_by(|a, b| a.source.cmp(&b.source));
    Ok(rules)
}

fn rule(rule: &Value, own: Option<IpAddr>) -> Result<PolicyRule, String> {
    let from = AssignmentSource::deserialize(&rule["from"]).map_err(|error| format!("rules.from: {error}"))?;
    let AssignmentSource { kind, namespace, name, uid, created } = from;
    let selectors = rule["selectors"].as_array().ok_or("rules.selectors: no list")?;
    let selects = selectors.iter().map(|one| {
        Ok(Selects {
            namespaces: selector("namespaces", &one["namespaces"])?,
            pods: selector("pods", &one["pods"])?,
            nodes: if one["nodes"].is_null() { Selector::default() } else { selector("nodes", &one["nodes"])? },
        })
    });
    let selects = selects.collect::<Result<Vec<_>, String>>()?;
    let source = RuleSource { kind, created, namespace: namespace.unwrap_or_default(), name, uid };
    Ok(PolicyRule { source, selects, destinations: destinations(rule)?, share: share(rule, own)? })
}

/// Of the only address of the assignment.
fn share(rule: &Value, own: Option<IpAddr>) -> Result<Option<PodShare>, String> {
    if rule["among"].is_null() {
        return Ok(None);
    }
    let among = BTreeSet::deserialize(&rule["among"]).map_err(|error| format!("rules.among: {error}"))?;
    match own.filter(|own| among.contains(own)) {
        Some(address) => Ok(Some(PodShare { address, among })),
        None => Err("rules.among: without the address itself".to_owned()),
    }
}

fn destinations(rule: &Value) -> Result<Destinations, String> {
    if rule["destinations"].is_null() {
        return Ok(Destinations::All);
    }
    let nets = |field: &str| match &rule[field] {
        Value::Null => Ok(Vec::new()),
        nets => Vec::<IpNet>::deserialize(nets).map_err(|error| format!("rules.{field}: {error}")),
    };
    let prefixes = DestinationPrefixes::new(nets("destinations")?, nets("excluded")?);
    Ok(Destinations::Prefixes(prefixes.into()))
}

pub(super) fn address_use(spec: &Value) -> AddressUse {
    match spec["addressesOf"].as_str() {
        Some("Service") => AddressUse::OfService,
        Some("Host") => AddressUse::OfHost,
        _ => AddressUse::EgressOnly,
    }
}

/// In bits per second, and bits.
pub(super) fn limit(spec: &Value) -> BandwidthLimit {
    let bits = |field: &str| spec["bandwidth"][field].as_u64();
    bits("rate").map_or(BandwidthLimit::NONE, |rate| BandwidthLimit::new(rate, bits("burst").unwrap_or_default()))
}

/// An EgressService without a node leaves its pods alone.
pub(super) fn selecting(
    address_use: AddressUse,
    mut rules: Vec<PolicyRule>,
    items: Option<&[Item]>,
) -> Vec<PolicyRule> {
    if address_use == AddressUse::OfService && items.is_some_and(<[Item]>::is_empty) {
        rules.iter_mut().for_each(|rule| rule.selects.clear());
    }
    rules
}

/// The controller writes `sourceIPBy` only if each pod leaves by its own node.
pub(super) fn network(spec: &Value, listed: Option<&[String]>, rules: Option<&[PolicyRule]>) -> Option<PolicyNetwork> {
    let selects = || rules.into_iter().flatten().flat_map(|rule| &rule.selects).next().cloned();
    Some(PolicyNetwork {
        table: spec["network"].as_str()?.to_owned(),
        addresses: listed.into_iter().flatten().filter_map(|address| parse_egress_ip(address)).collect(),
        pods: if spec["sourceIPBy"].is_null() { None } else { selects() },
    })
}

/// A list of nodes, of selectors or of VLANs that cannot be read stands for no node.
pub(super) fn eligible_nodes(spec: &Value, address_use: AddressUse) -> EligibleNodes {
    let names = || match &spec["nodes"] {
        Value::Null => None,
        names => Some(BTreeSet::deserialize(names).unwrap_or_default()),
    };
    let selectors = || match &spec["nodeSelectors"] {
        Value::Null => NodeSelectors::new(),
        Value::Array(all) => {
            let read = all.iter().map(|one| selector("spec.nodeSelectors", one));
            read.map(|read| read.unwrap_or_else(|_| Selector::nothing())).collect()
        }
        _ => [Selector::nothing()].into(),
    };
    match address_use {
        AddressUse::OfService => EligibleNodes::One(names()),
        AddressUse::OfHost => EligibleNodes::Having { candidates: candidates(spec) },
        AddressUse::EgressOnly => EligibleNodes::Selected(match vlans(spec) {
            Ok(vlans) => Box::new(SelectedNodes { selectors: selectors(), vlans }),
            Err(_) => NodeSelectors::from([Selector::nothing()]).into(),
        }),
    }
}

fn vlans(spec: &Value) -> Result<BTreeSet<VlanNetwork>, String> {
    let read = |AssignedVlanNetwork { vlan, gateway, prefix_length }| {
        let gateway: IpAddr = gateway.parse().map_err(|error| format!("{gateway:?}: {error}"))?;
        let gateway = IpNet::new(gateway, prefix_length).map_err(|error| error.to_string())?;
        Ok(VlanNetwork { vlan, gateway })
    };
    let all = Option::<Vec<AssignedVlanNetwork>>::deserialize(&spec["vlanNetworks"]);
    all.map_err(|error| error.to_string())?.unwrap_or_default().into_iter().map(read).collect()
}

/// One that cannot be read selects no node.
fn candidates(spec: &Value) -> BTreeSet<Selector> {
    let all = spec["candidates"].as_array().into_iter().flatten();
    all.filter_map(|one| selector("spec.candidates", one).ok()).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use egress_core::model::node::Node;
    use egress_core::model::policy::{PolicyPart, SourceKind};
    use egress_core::model::view::Labels;

    /// One rule, with the fields of its spec and its status.
    fn read(extra: &Value, items: &Value) -> EgressPolicy {
        let rule = json!({
            "from": {"kind": "EgressService", "namespace": "shop", "name": "front", "uid": "u", "created": 7},
            "selectors": [{"namespaces": {}, "pods": {"matchLabels": {"app": "web"}}}],
        });
        let mut spec = json!({"egressIPs": ["192.0.2.1", "2001:db8::1"], "addressesOf": "Service", "rules": [rule]});
        let fields = extra.as_object().expect("fields").clone();
        spec.as_object_mut().expect("an object").extend(fields);
        let object = json!({"metadata": {"name": "shop.front"}, "spec": spec, "status": {"items": items}});
        EgressAssignments.read(&serde_json::from_value(object).expect("an object"))
    }

    fn selects_web(policy: &EgressPolicy) -> bool {
        let web = Labels::from([("app".to_owned(), "web".to_owned())]);
        let selects = policy.rules.iter().flatten().flat_map(|rule| &rule.selects);
        selects.into_iter().any(|one| one.pods.matches(&web))
    }

    #[test]
    fn an_assignment_limits_what_its_pods_send() {
        let read = |extra: Value| read(&extra, &json!([])).limit;
        assert_eq!(read(json!({})), BandwidthLimit::NONE);
        let limited = json!({"bandwidth": {"rate": 10_000_000, "burst": 1_000_000}});
        assert_eq!(read(limited), BandwidthLimit::new(10_000_000, 1_000_000));
    }

    #[test]
    fn an_assignment_of_a_service_selects_once_it_has_a_node_and_names_who_may_host_it() {
        let there = json!([{"node": "n1", "egressIP": "192.0.2.1"}]);
        let (idle, served) = (read(&json!({}), &json!([])), read(&json!({"nodes": ["n1"]}), &there));
        assert!(!selects_web(&idle) && selects_web(&served));
        assert_eq!(idle.eligible_nodes, EligibleNodes::One(None));
        assert_eq!(served.eligible_nodes, EligibleNodes::One(Some(["n1".to_owned()].into())));
        assert_eq!((served.network.as_ref(), served.address_use), (None, AddressUse::OfService));
        let none = EligibleNodes::One(Some([].into()));
        assert_eq!(read(&json!({"nodes": "n1"}), &json!([])).eligible_nodes, none, "a list that cannot be read");
    }

    #[test]
    fn a_network_is_followed_by_what_leaves_or_by_each_pod() {
        let there = json!([{"node": "n1", "egressIP": "192.0.2.1"}]);
        let with = |by: Value| read(&json!({"nodes": [], "network": "100", "sourceIPBy": by}), &there);
        let by_host = with(json!(null));
        let network = by_host.network.as_ref().expect("a network");
        assert_eq!((network.table.as_str(), network.addresses.len(), network.pods.is_some()), ("100", 2, false));
        assert_eq!((by_host.listed.len(), by_host.is_by_own_nodes()), (2, false));
        let by_nodes = with(json!("Network"));
        assert!(by_nodes.is_by_own_nodes() && by_nodes.listed.is_empty(), "no address is assigned");
        let pods = by_nodes.network.and_then(|network| network.pods).expect("pods");
        let web = Labels::from([("app".to_owned(), "web".to_owned())]);
        assert!(pods.pods.matches(&web) && !pods.pods.matches(&Labels::new()));
    }

    #[test]
    fn addresses_in_vlans_have_their_networks() {
        let with = |vlans: Value| {
            let extra = json!({"addressesOf": null, "vlanNetworks": vlans});
            read(&extra, &json!([])).eligible_nodes
        };
        let gateway = "10.10.0.1/24".parse().expect("a literal");
        let vlans = [VlanNetwork { vlan: 7, gateway }].into();
        let expected = EligibleNodes::Selected(Box::new(SelectedNodes { vlans, ..SelectedNodes::default() }));
        assert_eq!(with(json!([{"vlan": 7, "gateway": "10.10.0.1", "prefixLength": 24}])), expected);
        assert_eq!(with(json!(null)), EligibleNodes::Selected(Box::default()));
        for broken in [
            json!("7"),
            json!([{"vlan": 7, "gateway": "10.10.0.1"}]),
            json!([{"vlan": 7, "gateway": "10.10.0", "prefixLength": 24}]),
            json!([{"vlan": 7, "gateway": "10.10.0.1", "prefixLength": 33}]),
        ] {
            assert!(!with(broken.clone()).has(&Node::default()), "{broken}");
        }
    }

    #[test]
    fn rules_of_several_objects_share_the_addresses_and_come_by_age() {
        let rule = |name: &str, created: i64, more: Value| {
            let mut rule = json!({
                "from": {"kind": "Egress", "name": name, "uid": name, "created": created},
                "selectors": [{"namespaces": {}, "pods": {"matchLabels": {"app": "web"}}}],
            });
            rule.as_object_mut().expect("an object").extend(more.as_object().expect("fields").clone());
            rule
        };
        let prefixes = json!({"destinations": ["198.51.100.0/24", "2001:db8::/32"], "excluded": ["198.51.100.7/32"]});
        let rules = json!([rule("young", 9, json!({})), rule("old", 3, prefixes)]);
        let on = |selectors: Value| {
            let extra = json!({"addressesOf": null, "rules": rules.clone(), "nodeSelectors": selectors});
            read(&extra, &json!([]))
        };
        let policy = on(json!([{"matchLabels": {"rack": "r1"}}]));
        assert!(selects_web(&policy), "also before it has a node: its packets are dropped until then");
        let node = |rack: &str| Node { labels: Labels::from([("rack".into(), rack.into())]).into(), ..Node::default() };
        assert!(policy.eligible_nodes.has(&node("r1")) && !policy.eligible_nodes.has(&node("r2")));
        assert!(on(json!(null)).eligible_nodes.has(&node("r2")), "without a selector all nodes");
        for broken in [json!("rack"), json!([{"matchExpressions": 7}]), json!([{}, "rack"])] {
            assert!(!on(broken.clone()).eligible_nodes.has(&node("r1")), "{broken}");
        }
        assert_eq!((policy.rank().0, policy.rank().1), (SourceKind::Egress, 3));
        let rules = policy.rules.expect("rules");
        let names: Vec<_> = rules.iter().map(|rule| rule.source.to_string()).collect();
        assert_eq!(names, ["Egress old", "Egress young"]);
        let Destinations::Prefixes(prefixes) = &rules[0].destinations else { panic!("no prefixes") };
        assert_eq!((prefixes.entries().count(), &rules[1].destinations), (3, &Destinations::All));
        let broken = read(&json!({"rules": [rule("a", 1, json!({"destinations": ["198.51.100.0"]}))]}), &json!([]));
        assert!(
            broken.rules.is_none() && broken.unreadable[0].part == PolicyPart::Selectors,
            "{:?}",
            broken.unreadable
        );
    }
}
