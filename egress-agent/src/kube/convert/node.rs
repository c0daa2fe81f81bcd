//! Nodes: who they are, where their pods are, which addresses are theirs.

use std::collections::BTreeMap;
use std::net::IpAddr;

use ipnet::IpNet;
use k8s_openapi::api::core::v1::Node as KubeNode;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::annotation;
use crate::kube::keys;
use crate::model::view::Node;

#[derive(Deserialize)]
struct PrimaryIfaddr {
    #[serde(default)]
    ipv4: String,
    #[serde(default)]
    ipv6: String,
}

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
        all.filter_map(|a| a.address.parse().ok()).collect()
    };
    let ready = status
        .into_iter()
        .flat_map(|s| s.conditions.iter().flatten())
        .any(|condition| condition.type_ == "Ready" && condition.status == "True");
    let mut problems = Vec::new();
    let primary = primary(meta, &mut problems);
    Node {
        name: meta.name.clone().unwrap_or_default(),
        assignable: meta.labels.iter().flatten().any(|(key, _)| key == keys::ASSIGNABLE),
        ready,
        networks_known: !primary.is_empty() && problems.is_empty(),
        primary,
        host_cidrs: read(meta, keys::HOST_CIDRS, &mut problems).unwrap_or_default(),
        internal: addresses("InternalIP"),
        external: addresses("ExternalIP"),
        pod_subnets: pod_subnets(node, &mut problems),
        announces_pods: annotation(meta, keys::CHASSIS_ID).is_some(),
        problems,
    }
}

fn primary(meta: &ObjectMeta, problems: &mut Vec<String>) -> Vec<IpNet> {
    let Some(PrimaryIfaddr { ipv4, ipv6 }) = read(meta, keys::PRIMARY_IFADDR, problems) else { return Vec::new() };
    let mut networks = Vec::new();
    for text in [ipv4, ipv6].iter().filter(|text| !text.is_empty()) {
        match text.parse() {
            Ok(network) => networks.push(network),
            Err(error) => problems.push(format!("annotation {}: {text:?}: {error}", keys::PRIMARY_IFADDR)),
        }
    }
    networks
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
    fn one_broken_annotation_leaves_the_others() {
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
}
