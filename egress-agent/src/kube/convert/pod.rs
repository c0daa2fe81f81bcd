//! Pods of this node.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::IpNet;
use k8s_openapi::api::core::v1::Pod as KubePod;
use serde::Deserialize;

use super::{annotation, created};
use crate::kube::keys;
use crate::model::view::{Pod, PodKey};

/// One network of the CNI's annotation; the older field holds one address.
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
    Pod {
        uid: meta.uid.clone().unwrap_or_default(),
        created: created(meta),
        labels: meta.labels.clone().unwrap_or_default(),
        addresses: announced(pod).unwrap_or_else(|| reported(pod)),
        host_network: pod.spec.as_ref().and_then(|spec| spec.host_network).unwrap_or(false),
        completed: matches!(phase, Some("Succeeded" | "Failed")),
    }
}

/// What the CNI says, which it says before the pod starts.
fn announced(pod: &KubePod) -> Option<BTreeSet<IpAddr>> {
    let text = annotation(&pod.metadata, keys::POD_NETWORKS)?;
    let mut networks: BTreeMap<String, PodNetwork> = serde_json::from_str(text).ok()?;
    let network = networks.remove("default")?;
    let addresses: BTreeSet<IpAddr> =
        network.ip_addresses.iter().chain(&network.ip_address).map(|net| net.addr().to_canonical()).collect();
    (!addresses.is_empty()).then_some(addresses)
}

/// What the kubelet says.
fn reported(pod: &KubePod) -> BTreeSet<IpAddr> {
    let Some(status) = &pod.status else { return BTreeSet::new() };
    let listed = status.pod_ips.iter().flatten().map(|ip| ip.ip.as_str());
    listed.chain(status.pod_ip.as_deref()).filter_map(|ip| ip.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn addresses(value: serde_json::Value) -> Vec<String> {
        let pod = pod(&serde_json::from_value(value).expect("a pod"));
        pod.addresses.iter().map(IpAddr::to_string).collect()
    }

    #[test]
    fn the_cni_is_believed_before_the_kubelet() {
        let status = json!({"podIP": "10.244.1.9", "podIPs": [{"ip": "10.244.1.9"}, {"ip": "fd00::9"}]});
        assert_eq!(addresses(json!({"metadata": {}, "status": status})), ["10.244.1.9", "fd00::9"]);
        let networks = r#"{"default":{"ip_addresses":["10.244.1.7/24"],"mac_address":"0a:58:0a:f4:01:07"}}"#;
        let meta = json!({"annotations": {"k8s.ovn.org/pod-networks": networks}});
        assert_eq!(addresses(json!({"metadata": meta})), ["10.244.1.7"]);
        let older =
            json!({"annotations": {"k8s.ovn.org/pod-networks": r#"{"default":{"ip_address":"10.244.1.7/24"}}"#}});
        assert_eq!(addresses(json!({"metadata": older})), ["10.244.1.7"]);
        let broken = json!({"annotations": {"k8s.ovn.org/pod-networks": "nonsense"}});
        assert_eq!(addresses(json!({"metadata": broken, "status": status})), ["10.244.1.9", "fd00::9"]);
        assert!(addresses(json!({"metadata": {}})).is_empty());
    }
}
