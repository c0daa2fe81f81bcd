//! Pods of this node: labels, ports, and the addresses that the kubelet and the CNI publish.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::IpNet;
use k8s_openapi::api::core::v1::Pod as KubePod;
use serde::Deserialize;

use crate::convert::{annotation, created, protocol};
use egress_core::keys;
use egress_core::model::exposed::ContainerPort;
use egress_core::model::state::PodPort;
use egress_core::model::view::{Pod, PodKey};

/// One network of the CNI's annotation. The older field holds one address.
#[derive(Deserialize)]
struct PodNetwork {
    #[serde(default)]
    ip_addresses: Vec<IpNet>,
    #[serde(default)]
    ip_address: Option<IpNet>,
}

pub fn pod_key(pod: &KubePod) -> PodKey {
    let meta = &pod.metadata;
    PodKey { namespace: meta.namespace.clone().unwrap_or_default(), name: meta.name.clone().unwrap_or_default() }
}

pub fn pod(pod: &KubePod) -> Pod {
    let meta = &pod.metadata;
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    let announced = if is_scheduled(pod) { announced(pod) } else { Vec::new() };
    let of_each_family = of_each_family(&announced);
    let reported = reported(pod);
    Pod {
        uid: meta.uid.clone().unwrap_or_default(),
        created: created(meta),
        labels: meta.labels.clone().unwrap_or_default(),
        starting: reported.is_empty() || has_no_network(pod),
        reported: self::of_each_family(&reported),
        surplus: announced.len() - of_each_family.len(),
        announced: of_each_family,
        attached: BTreeSet::new(),
        terminating: meta.deletion_timestamp.is_some(),
        host_network: pod.spec.as_ref().and_then(|spec| spec.host_network).unwrap_or(false),
        completed: matches!(phase, Some("Succeeded" | "Failed")),
        ports: ports(pod),
    }
}

/// Maximum ports of a pod that are stored: more than any real pod has.
const MOST_PORTS: usize = 256;

/// Ports that containers declare with a name or as host ports. Init containers count too: sidecars are among them.
fn ports(pod: &KubePod) -> Vec<ContainerPort> {
    let Some(spec) = &pod.spec else { return Vec::new() };
    let containers = spec.containers.iter().chain(spec.init_containers.iter().flatten());
    let declared = containers.flat_map(|container| container.ports.iter().flatten());
    let read = declared.filter_map(|declared| {
        let number = u16::try_from(declared.container_port).ok()?;
        let port = PodPort { protocol: protocol(declared.protocol.as_deref())?, number };
        let is_host_port = declared.host_port.is_some_and(|port| port != 0);
        let name = declared.name.clone().filter(|name| !name.is_empty());
        (is_host_port || name.is_some()).then_some(ContainerPort { name, port, is_host_port })
    });
    read.take(MOST_PORTS).collect()
}

/// The API server sets the condition when a scheduler binds the pod, and the kubelet for pods that it accepts. A user can set the
/// node of thousands of pods but write no status, and a scheduler gives a node no more pods than it has room for.
fn is_scheduled(pod: &KubePod) -> bool {
    let conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
    conditions.into_iter().any(|condition| condition.type_ == "PodScheduled" && condition.status == "True")
}

/// The kubelet sets the condition since Kubernetes 1.29.
fn has_no_network(pod: &KubePod) -> bool {
    let conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
    conditions.into_iter().any(|one| one.type_ == "PodReadyToStartContainers" && one.status == "False")
}

/// The addresses in the CNI's annotation. None if it cannot be read.
fn announced(pod: &KubePod) -> Vec<IpAddr> {
    let networks = annotation(&pod.metadata, keys::POD_NETWORKS);
    let networks = networks.and_then(|text| serde_json::from_str::<BTreeMap<String, PodNetwork>>(text).ok());
    let Some(network) = networks.and_then(|mut networks| networks.remove("default")) else { return Vec::new() };
    let listed = network.ip_addresses.iter().chain(&network.ip_address);
    let mut seen = BTreeSet::new();
    listed.map(|net| net.addr().to_canonical()).filter(|address| seen.insert(*address)).collect()
}

/// The addresses in the status, which the kubelet writes.
fn reported(pod: &KubePod) -> Vec<IpAddr> {
    let Some(status) = &pod.status else { return Vec::new() };
    let listed = status.pod_ips.iter().flatten().map(|ip| ip.ip.as_str());
    listed
        .chain(status.pod_ip.as_deref())
        .filter_map(|ip| ip.parse().ok())
        .map(|ip: IpAddr| ip.to_canonical())
        .collect()
}

/// The first address of each family: Kubernetes gives a pod no more.
fn of_each_family(addresses: &[IpAddr]) -> BTreeSet<IpAddr> {
    let first = |is_ipv4| addresses.iter().find(|address| address.is_ipv4() == is_ipv4).copied();
    [first(true), first(false)].into_iter().flatten().collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Reported and announced addresses of a scheduled pod, and the surplus.
    fn addresses(mut value: serde_json::Value) -> (Vec<String>, Vec<String>, usize) {
        value["status"]["conditions"] = json!([{"type": "PodScheduled", "status": "True"}]);
        read(value)
    }

    fn read(value: serde_json::Value) -> (Vec<String>, Vec<String>, usize) {
        let pod = pod(&serde_json::from_value(value).expect("a pod"));
        let texts = |addresses: &BTreeSet<IpAddr>| addresses.iter().map(IpAddr::to_string).collect();
        (texts(&pod.reported), texts(&pod.announced), pod.surplus)
    }

    fn texts(reported: &[&str], announced: &[&str], surplus: usize) -> (Vec<String>, Vec<String>, usize) {
        let owned = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect();
        (owned(reported), owned(announced), surplus)
    }

    #[test]
    fn addresses_of_the_kubelet_and_of_the_cni_are_kept_apart() {
        let status = json!({"podIP": "10.244.1.9", "podIPs": [{"ip": "10.244.1.9"}, {"ip": "fd00::9"}]});
        let reported = texts(&["10.244.1.9", "fd00::9"], &[], 0);
        assert_eq!(addresses(json!({"metadata": {}, "status": status})), reported);
        let networks = r#"{"default":{"ip_addresses":["10.244.1.7/24"],"mac_address":"0a:58:0a:f4:01:07"}}"#;
        let meta = json!({"annotations": {"k8s.ovn.org/pod-networks": networks}});
        assert_eq!(addresses(json!({"metadata": meta})), texts(&[], &["10.244.1.7"], 0));
        let both = json!({"metadata": meta, "status": {"podIP": "10.244.1.9"}});
        assert_eq!(addresses(both), texts(&["10.244.1.9"], &["10.244.1.7"], 0));
        let older =
            json!({"annotations": {"k8s.ovn.org/pod-networks": r#"{"default":{"ip_address":"10.244.1.7/24"}}"#}});
        assert_eq!(addresses(json!({"metadata": older})), texts(&[], &["10.244.1.7"], 0));
        let broken = json!({"annotations": {"k8s.ovn.org/pod-networks": "nonsense"}});
        assert_eq!(addresses(json!({"metadata": broken, "status": status})), reported);
        assert_eq!(addresses(json!({"metadata": {}})), texts(&[], &[], 0));
    }

    #[test]
    fn a_pod_that_no_scheduler_has_bound_has_no_announced_address() {
        let networks = r#"{"default":{"ip_addresses":["10.244.1.7/24","10.244.1.8/24"]}}"#;
        let meta = json!({"annotations": {"k8s.ovn.org/pod-networks": networks}});
        for status in [json!({}), json!({"conditions": [{"type": "PodScheduled", "status": "False"}]})] {
            let value = json!({"metadata": meta, "spec": {"nodeName": "n1", "containers": []}, "status": status});
            assert_eq!(read(value.clone()), texts(&[], &[], 0));
            assert_eq!(addresses(value), texts(&[], &["10.244.1.7"], 1));
        }
    }

    #[test]
    fn one_address_of_each_family_counts_however_many_are_listed() {
        let listed: Vec<String> = (0..6000_u32).map(|i| format!("fd00:10:244:1::{:x}/64", 0x100 + i)).collect();
        let networks = json!({"default": {"ip_addresses": listed, "ip_address": "10.244.1.7/24"}}).to_string();
        let meta = json!({"annotations": {"k8s.ovn.org/pod-networks": networks}});
        let ips: Vec<_> = (1..200).map(|i| json!({"ip": format!("10.244.1.{i}")})).collect();
        let many = json!({"metadata": meta, "status": {"podIPs": ips}});
        assert_eq!(addresses(many), texts(&["10.244.1.1"], &["10.244.1.7", "fd00:10:244:1::100"], 5999));
    }
}
