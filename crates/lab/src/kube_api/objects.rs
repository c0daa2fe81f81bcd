//! The objects of a cluster that the lab stands for, as its kubelets and OVN-Kubernetes would have written them.
//! Pure: numbers and pods in, JSON out.

use std::net::Ipv4Addr;

use serde_json::{Value, json};

use crate::topology::addresses::{self as plan, Dual, HTTP_PORT, NodeNumber};
use crate::topology::host_config::Cni;
use crate::topology::lab::LabPod;

/// A node as a cloud's or kubeadm's controllers leave it: OVN-Kubernetes' annotations are not there.
fn bare_node(number: NodeNumber) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": number.name(),
            "labels": {"kubernetes.io/hostname": number.name(), "kubernetes.io/os": "linux"},
        },
        "spec": {"podCIDR": number.pod_subnet_v4(), "podCIDRs": [number.pod_subnet_v4(), number.pod_subnet_v6()]},
    })
}

pub fn node(number: NodeNumber, cni: Cni) -> Value {
    let bare = bare_node(number);
    if !cni.is_ovn_kubernetes() {
        return bare;
    }
    let own = number.address();
    let (v4, v6) = (format!("{}/16", own.v4), format!("{}/64", own.v6));
    let primary = json!({"ipv4": v4, "ipv6": v6});
    let subnets = json!({"default": [number.pod_subnet_v4(), number.pod_subnet_v6()]});
    let mut node = bare;
    node["metadata"]["annotations"] = json!({
        "k8s.ovn.org/node-primary-ifaddr": primary.to_string(),
        "k8s.ovn.org/host-cidrs": json!([v4, v6]).to_string(),
        "k8s.ovn.org/node-subnets": subnets.to_string(),
    });
    node
}

/// A merge patch of a node's status.
pub fn node_status(number: NodeNumber, ready: bool) -> Value {
    let own = number.address();
    // A node that fell silent is "Unknown", not "False": no kubelet is left there to say no.
    let (status, reason) = if ready { ("True", "KubeletReady") } else { ("Unknown", "NodeStatusUnknown") };
    json!({"status": {
        "addresses": [
            {"type": "InternalIP", "address": own.v4},
            {"type": "InternalIP", "address": own.v6},
            {"type": "Hostname", "address": number.name()},
        ],
        "conditions": [condition("Ready", status, reason)],
    }})
}

fn condition(kind: &str, status: &str, reason: &str) -> Value {
    let now = jiff::Timestamp::now().round(jiff::Unit::Second).unwrap_or_else(|_| jiff::Timestamp::now()).to_string();
    json!({
        "type": kind, "status": status, "reason": reason, "message": "",
        "lastHeartbeatTime": now, "lastTransitionTime": now,
    })
}

/// A namespace; `house=<name>` is what the story's manifests select by.
pub fn namespace(name: &str) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {"name": name, "labels": {"kubernetes.io/metadata.name": name, "house": name}},
    })
}

pub fn service_account(namespace: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default", "namespace": namespace}})
}

pub fn pod(pod: &LabPod) -> Value {
    let annotations = if pod.cni.is_ovn_kubernetes() {
        json!({"k8s.ovn.org/pod-networks": pod_networks(pod.node, pod.addresses).to_string()})
    } else {
        json!({})
    };
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": pod.name,
            "namespace": pod.namespace,
            "labels": pod.labels,
            "annotations": annotations,
        },
        "spec": {
            "nodeName": pod.node.name(),
            "automountServiceAccountToken": false,
            "containers": [{"name": "shell", "image": "lab/none"}],
        },
    })
}

fn pod_networks(node: NodeNumber, own: Dual) -> Value {
    let router = node.router();
    json!({"default": {
        "ip_addresses": [format!("{}/24", own.v4), format!("{}/64", own.v6)],
        "gateway_ips": [router.v4, router.v6],
        "role": "primary",
    }})
}

/// A merge patch of a pod's status: running, with both addresses.
pub fn pod_status(pod: &LabPod) -> Value {
    let host = pod.node.address();
    json!({"status": {
        "phase": "Running",
        "hostIP": host.v4,
        "hostIPs": [{"ip": host.v4}, {"ip": host.v6}],
        "podIP": pod.addresses.v4,
        "podIPs": [{"ip": pod.addresses.v4}, {"ip": pod.addresses.v6}],
        "conditions": [{"type": "Ready", "status": "True"}],
        "containerStatuses": [{
            "name": "shell", "image": "lab/none", "imageID": "", "ready": true, "started": true, "restartCount": 0,
            "state": {"running": {}},
        }],
    }})
}

/// A Service of type `LoadBalancer`: HTTP on port 80.
#[derive(Debug, Clone)]
pub struct LabLoadBalancer {
    pub namespace: String,
    pub name: String,
    /// Its addresses outside the cluster.
    pub ingress: Dual,
    cluster_ip: Ipv4Addr,
}

impl LabLoadBalancer {
    /// `number` distinguishes it from others in the lab's address plan.
    pub fn new(namespace: &str, name: &str, number: u8) -> Self {
        let (ingress, cluster_ip) = (plan::load_balancer_ip(number), plan::load_balancer_cluster_ip(number));
        Self { namespace: namespace.to_owned(), name: name.to_owned(), ingress, cluster_ip }
    }
}

/// The Service without its status. It selects pods with the label `app=<name>`.
pub fn load_balancer(balancer: &LabLoadBalancer) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": balancer.name, "namespace": balancer.namespace},
        "spec": {
            "type": "LoadBalancer",
            "clusterIP": balancer.cluster_ip,
            "ipFamilyPolicy": "PreferDualStack",
            "allocateLoadBalancerNodePorts": false,
            "selector": {"app": balancer.name},
            "ports": [{"name": "http", "port": 80, "targetPort": HTTP_PORT, "protocol": "TCP"}],
        },
    })
}

/// A merge patch of its status: the addresses that a load balancer's controller has given it.
pub fn load_balancer_status(balancer: &LabLoadBalancer) -> Value {
    let ingress = balancer.ingress.both().map(|ip| json!({"ip": ip, "ipMode": "VIP"}));
    json!({"status": {"loadBalancer": {"ingress": ingress}}})
}

/// Its endpoints of one family.
pub fn endpoint_slice(balancer: &LabLoadBalancer, pods: &[&LabPod], is_v4: bool) -> Value {
    let endpoint = |pod: &&LabPod| {
        let [v4, v6] = pod.addresses.both();
        json!({
            "addresses": [if is_v4 { v4 } else { v6 }],
            "conditions": {"ready": true, "serving": true, "terminating": false},
            "nodeName": pod.node.name(),
            "targetRef": {"kind": "Pod", "name": pod.name, "namespace": pod.namespace},
        })
    };
    let name = format!("{}-{}", balancer.name, if is_v4 { "v4" } else { "v6" });
    json!({
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": name,
            "namespace": balancer.namespace,
            "labels": {"kubernetes.io/service-name": balancer.name},
        },
        "addressType": if is_v4 { "IPv4" } else { "IPv6" },
        "endpoints": pods.iter().map(endpoint).collect::<Vec<_>>(),
        "ports": [{"name": "http", "port": HTTP_PORT, "protocol": "TCP"}],
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn annotations_are_json_in_strings() {
        let object = node(NodeNumber::new(1).expect("one is a node"), Cni::Routed);
        let annotation = object.pointer("/metadata/annotations/k8s.ovn.org~1node-subnets").and_then(Value::as_str);
        assert_eq!(annotation, Some(r#"{"default":["10.244.1.0/24","fd00:10:244:1::/64"]}"#));
        let annotation = object.pointer("/metadata/annotations/k8s.ovn.org~1node-primary-ifaddr");
        let text = r#"{"ipv4":"172.18.0.2/16","ipv6":"fd00:172:18::2/64"}"#;
        assert_eq!(annotation.and_then(Value::as_str), Some(text));
    }
}
