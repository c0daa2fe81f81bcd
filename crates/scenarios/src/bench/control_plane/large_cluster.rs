//! A large cluster as objects: what its kubelets, its CNI and its people would have written.
//!
//! ```text
//!   node k      172.18.16.0 + k, pods in 10.128.0.0 + k * 1024 (a /22); all host egress IPs
//!   namespaces  one for each hundred pods, label team=<number>
//!   objects     one address each, 172.18.64.0 + n; object n selects app=<n mod 10> in the namespaces of one team. Mixed, of
//!               ten of them four are EgressIPs, three Egresses of one pool, one is a CiliumEgressGatewayPolicy with a gateway in
//!               one of three zones, and two are EgressServices with their Services
//!   pods        app=<0..9>; those of the real node in the first namespaces
//! ```

use axum::http::Method;

use crate::prelude::*;
use egress_lab::apiserver::ApiServer;

/// The pod network of the cluster.
pub(super) const PODS: &str = "10.128.0.0/10";
/// All nodes but the real one.
pub(super) const NODE_NETWORK: &str = "172.18.16.0/20";
const NODES: Ipv4Addr = Ipv4Addr::new(172, 18, 16, 0);
const EGRESS: Ipv4Addr = Ipv4Addr::new(172, 18, 64, 0);
/// The addresses of the pool.
const POOL: Ipv4Addr = Ipv4Addr::new(172, 18, 128, 0);
const FIRST_POD: Ipv4Addr = Ipv4Addr::new(10, 128, 0, 0);
const PODS_PER_NODE: u32 = 1024;
const APPS: usize = 10;
const ZONES: usize = 3;
const PODS_PER_NAMESPACE: usize = 100;

pub(super) struct Scale {
    pub(super) nodes: usize,
    /// Of the whole cluster, those of the real node included.
    pub(super) pods: usize,
    pub(super) own_pods: usize,
    pub(super) objects: usize,
    /// Of all kinds; otherwise all are EgressIPs.
    pub(super) is_mixed: bool,
}

impl Scale {
    /// How many objects get a node: the policies of one gateway share its address.
    pub(super) fn assigned(&self) -> usize {
        let policies =
            if self.is_mixed { (0..self.objects).filter(|number| is_gateway_policy(*number)).count() } else { 0 };
        self.objects - policies + policies.min(ZONES)
    }
}

const fn is_gateway_policy(number: usize) -> bool {
    number % 10 == 8
}

pub(super) fn node_name(number: usize) -> String {
    format!("node{number}")
}

pub(super) fn namespace(number: usize) -> String {
    format!("team-{number:04}")
}

pub(super) fn object_name(number: usize) -> String {
    format!("egress-{number:05}")
}

fn behind(base: Ipv4Addr, number: usize) -> Result<Ipv4Addr> {
    Ok(Ipv4Addr::from_bits(base.to_bits() + u32::try_from(number)?))
}

/// The address of a pod of a node, by its place there.
pub(super) fn pod_address(node: usize, place: usize) -> Result<Ipv4Addr> {
    behind(FIRST_POD, node * PODS_PER_NODE as usize + 16 + place)
}

/// Where the real node's agent answers health checks: the second address of its pod subnet, as everywhere.
pub(super) fn management() -> Result<Ipv4Addr> {
    behind(FIRST_POD, PODS_PER_NODE as usize + 2)
}

/// The namespace and name of a pod of the real node.
pub(super) fn own_pod(place: usize) -> (String, String) {
    (namespace(place / PODS_PER_NAMESPACE), format!("pod-{place:06}"))
}

/// The label by which an object selects the pod.
pub(super) fn app(place: usize) -> String {
    format!("app-{}", place % APPS)
}

pub(super) fn fill(server: &ApiServer, scale: &Scale) -> Result<()> {
    let merge = "application/merge-patch+json";
    let own = json!({"metadata": {"labels": labels(1), "annotations": annotations(1, false)?}});
    server.request(&Method::PATCH, "/api/v1/nodes/node1", merge, &own)?;
    for number in 2..=scale.nodes {
        let name = node_name(number);
        let node = json!({
            "apiVersion": "v1", "kind": "Node",
            "metadata": {"name": name, "labels": labels(number), "annotations": annotations(number, true)?},
        });
        server.create("/api/v1/nodes", &node)?;
        let status = json!({"status": {
            "addresses": [{"type": "InternalIP", "address": behind(NODES, number)?}],
            "conditions": [{"type": "Ready", "status": "True", "reason": "KubeletReady"}],
        }});
        server.request(&Method::PATCH, &format!("/api/v1/nodes/{name}/status"), merge, &status)?;
    }
    for number in 0..scale.pods.div_ceil(PODS_PER_NAMESPACE) {
        let name = namespace(number);
        let labels = json!({"kubernetes.io/metadata.name": name, "team": number.to_string()});
        let object = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}});
        server.create("/api/v1/namespaces", &object)?;
    }
    if scale.is_mixed {
        fill_pool(server, scale)?;
    }
    (0..scale.objects).try_for_each(|number| fill_object(server, scale, number))?;
    fill_pods(server, scale)
}

fn labels(number: usize) -> Value {
    json!({
        "kubernetes.io/hostname": node_name(number), "kubernetes.io/os": "linux",
        "topology.kubernetes.io/zone": format!("zone-{}", number % ZONES),
        "k8s.ovn.org/egress-assignable": "",
    })
}

/// Of the real node, its own addresses stay as the lab wrote them.
fn annotations(number: usize, with_addresses: bool) -> Result<Value> {
    let subnet = format!("{}/22", behind(FIRST_POD, number * PODS_PER_NODE as usize)?);
    let mut annotations = json!({"k8s.ovn.org/node-subnets": json!({"default": [subnet]}).to_string()});
    if with_addresses {
        let address = format!("{}/16", behind(NODES, number)?);
        annotations["k8s.ovn.org/node-primary-ifaddr"] = json!({"ipv4": address}).to_string().into();
        annotations["k8s.ovn.org/host-cidrs"] = json!([address]).to_string().into();
    }
    Ok(annotations)
}

/// Objects of one team differ in the label of the pods; teams of which there are fewer than objects have several.
fn fill_object(server: &ApiServer, scale: &Scale, number: usize) -> Result<()> {
    let teams = scale.pods.div_ceil(PODS_PER_NAMESPACE);
    let team = (number / APPS) % teams;
    match number % 5 {
        3 if scale.is_mixed && is_gateway_policy(number) => return fill_gateway_policy(server, number, team),
        2 | 3 if scale.is_mixed => return fill_egress(server, number, team),
        4 if scale.is_mixed => return fill_service(server, number, team),
        _ => {}
    }
    let object = json!({
        "apiVersion": "k8s.ovn.org/v1", "kind": "EgressIP",
        "metadata": {"name": object_name(number)},
        "spec": {
            "egressIPs": [behind(EGRESS, number)?],
            "namespaceSelector": {"matchLabels": {"team": team.to_string()}},
            "podSelector": {"matchLabels": {"app": app(number)}},
        },
    });
    server.create("/apis/k8s.ovn.org/v1/egressips", &object).map(drop).context("make an object")
}

/// For all Egresses, on nodes of one of the three zones.
fn fill_pool(server: &ApiServer, scale: &Scale) -> Result<()> {
    let (start, end) = (behind(POOL, 0)?, behind(POOL, scale.objects)?);
    let object = json!({
        "apiVersion": "crd.antrea.io/v1beta1", "kind": "ExternalIPPool", "metadata": {"name": "pool"},
        "spec": {
            "ipRanges": [{"start": start, "end": end}],
            "nodeSelector": {"matchLabels": {"topology.kubernetes.io/zone": "zone-2"}},
        },
    });
    server.create("/apis/crd.antrea.io/v1beta1/externalippools", &object).map(drop).context("make a pool")
}

fn fill_egress(server: &ApiServer, number: usize, team: usize) -> Result<()> {
    let object = json!({
        "apiVersion": "crd.antrea.io/v1beta1", "kind": "Egress", "metadata": {"name": object_name(number)},
        "spec": {
            "externalIPPool": "pool",
            "appliedTo": {
                "namespaceSelector": {"matchLabels": {"team": team.to_string()}},
                "podSelector": {"matchLabels": {"app": app(number)}},
            },
        },
    });
    server.create("/apis/crd.antrea.io/v1beta1/egresses", &object).map(drop).context("make an Egress")
}

fn fill_gateway_policy(server: &ApiServer, number: usize, team: usize) -> Result<()> {
    let zone = format!("zone-{}", number / 10 % ZONES);
    let object = json!({
        "apiVersion": "cilium.io/v2", "kind": "CiliumEgressGatewayPolicy", "metadata": {"name": object_name(number)},
        "spec": {
            "selectors": [{
                "namespaceSelector": {"matchLabels": {"team": team.to_string()}},
                "podSelector": {"matchLabels": {"app": app(number)}},
            }],
            "destinationCIDRs": ["203.0.113.0/24"],
            "egressGateway": {"nodeSelector": {"matchLabels": {"topology.kubernetes.io/zone": zone}}},
        },
    });
    server.create("/apis/cilium.io/v2/ciliumegressgatewaypolicies", &object).map(drop).context("make a policy")
}

fn fill_service(server: &ApiServer, number: usize, team: usize) -> Result<()> {
    let (name, namespace) = (object_name(number), namespace(team));
    let service = json!({
        "apiVersion": "v1", "kind": "Service", "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "type": "LoadBalancer", "selector": {"app": app(number)},
            "ports": [{"name": "web", "protocol": "TCP", "port": 80, "targetPort": 8080}],
        },
    });
    let services = format!("/api/v1/namespaces/{namespace}/services");
    server.create(&services, &service).context("make a Service")?;
    let status = json!({"status": {"loadBalancer": {"ingress": [{"ip": behind(EGRESS, number)?}]}}});
    let path = format!("{services}/{name}/status");
    server.request(&Method::PATCH, &path, "application/merge-patch+json", &status).context("give it an address")?;
    let slice = json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
        "metadata": {"name": name, "namespace": namespace, "labels": {"kubernetes.io/service-name": name}},
        "endpoints": [{
            "addresses": [pod_address(1, number)?], "nodeName": node_name(1), "conditions": {"ready": true},
        }],
        "ports": [{"name": "web", "protocol": "TCP", "port": 8080}],
    });
    let slices = format!("/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices");
    server.create(&slices, &slice).context("make an EndpointSlice")?;
    let object = json!({
        "apiVersion": "k8s.ovn.org/v1", "kind": "EgressService", "metadata": {"name": name, "namespace": namespace},
        "spec": {"sourceIPBy": "LoadBalancerIP"},
    });
    let path = format!("/apis/k8s.ovn.org/v1/namespaces/{namespace}/egressservices");
    server.create(&path, &object).map(drop).context("make an EgressService")
}

/// The first pods are the real node's; the others are spread over all other nodes. No agent here ever sees those: that they
/// are there is what counts, and they are stored without further ado.
fn fill_pods(server: &ApiServer, scale: &Scale) -> Result<()> {
    let others = scale.nodes - 1;
    let theirs = (scale.own_pods..scale.pods).map(|place| {
        let behind = place - scale.own_pods;
        let (node, nth) = (2 + behind % others, behind / others);
        let mut pod = pod(node, place, pod_address(node, nth)?);
        let metadata = json!({"uid": format!("00000000-0000-4000-8000-{place:012}"),
            "creationTimestamp": "2026-01-01T00:00:00Z"});
        if let (Some(to), Some(from)) = (pod["metadata"].as_object_mut(), metadata.as_object()) {
            to.extend(from.clone());
        }
        Ok(pod)
    });
    server.restore("pods", theirs.collect::<Result<Vec<_>>>()?);
    for place in 0..scale.own_pods {
        let pod = pod(1, place, pod_address(1, place)?);
        let (namespace, name) = own_pod(place);
        let collection = format!("/api/v1/namespaces/{namespace}/pods");
        server.create(&collection, &pod)?;
        let (path, status) = (format!("{collection}/{name}/status"), json!({"status": pod["status"]}));
        server.request(&Method::PATCH, &path, "application/merge-patch+json", &status).context("run a pod")?;
    }
    Ok(())
}

fn pod(node: usize, place: usize, address: Ipv4Addr) -> Value {
    let (namespace, name) = own_pod(place);
    let networks = json!({"default": {"ip_addresses": [format!("{address}/22")], "role": "primary"}}).to_string();
    let setting = |number| json!({"name": format!("SETTING_{number}"), "value": "a value of some length"});
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {
            "name": name, "namespace": namespace,
            "labels": {"app": app(place), "pod-template-hash": "6b7c9d5f4d", "tier": "platform"},
            "annotations": {"k8s.ovn.org/pod-networks": networks},
        },
        "spec": {
            "nodeName": node_name(node),
            "containers": [{
                "name": "main", "image": "registry.example/app:1.2.3",
                "env": (0..20).map(setting).collect::<Vec<_>>(),
            }],
        },
        "status": {
            "phase": "Running", "podIP": address, "podIPs": [{"ip": address}],
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    })
}
