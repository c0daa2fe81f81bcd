//! EgressServices (`k8s.ovn.org/v1`): what the controller reads and writes for them. What follows from what, [`egress_core::egress_service`]
//! says.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use futures::{Stream, StreamExt, stream};
use k8s_openapi::api::core::v1::{Node, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::api::{Api, DynamicObject, ObjectMeta, Patch};
use kube::core::PartialObjectMeta;
use kube::{Client, ResourceExt};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::api_outage::ApiOutages;
use crate::assignments::{self, StoredAssignment, ignored, patch_params, put};
use crate::convert::{self, created};
use crate::crd;
use crate::crd::{AddressesOf, SourceIpBy};
use crate::policy::selector;
use crate::policy::status::WriteError;
use crate::watches::{config, updates};
use egress_core::egress_service::{
    BalancedService, EgressService, EgressServiceInputs, EgressServiceRequest, ServiceEndpoints, WantedAssignment,
};
use egress_core::keys;
use egress_core::model::policy::SourceKind;
use egress_core::model::services::ServiceKey;
use egress_core::model::view::{Labels, Update};

/// One change of what EgressServices follow from.
#[derive(Clone, Debug)]
pub enum EgressServiceChange {
    EgressServices(Update<ServiceKey, EgressService>),
    Services(Update<ServiceKey, BalancedService>),
    Slices(Update<ServiceKey, ServiceEndpoints>),
    Nodes(Update<String, Labels>),
    Assignments(Update<String, StoredAssignment>),
}

/// Everything that EgressServices follow from. `others` are the kinds of the assignments that other tasks have.
pub fn watches(
    client: &Client,
    outages: &ApiOutages,
    others: Vec<SourceKind>,
) -> impl Stream<Item = EgressServiceChange> + Send + use<> {
    let is_own = move |_: &str, stored: &StoredAssignment| stored.kind().is_none_or(|kind| !others.contains(&kind));
    let egress_services = Api::all_with(client.clone(), &crd::egress_service_resource());
    let services: Api<Service> = Api::all(client.clone());
    let slices: Api<EndpointSlice> = Api::all(client.clone());
    let nodes: Api<PartialObjectMeta<Node>> = Api::all(client.clone());
    let of = |what| (what, outages.clone());
    let labels = |node: &PartialObjectMeta<Node>| node.metadata.labels.clone().unwrap_or_default();
    let slice_key = |slice: &EndpointSlice| key(&slice.metadata);
    stream::select_all([
        updates(of("EgressService objects"), egress_services, config(), object_key, egress_service)
            .map(EgressServiceChange::EgressServices)
            .boxed(),
        updates(of("services of load balancers"), services, config(), convert::service_key, balanced)
            .map(EgressServiceChange::Services)
            .boxed(),
        updates(of("endpoints"), slices, config(), slice_key, endpoints).map(EgressServiceChange::Slices).boxed(),
        updates(of("labels of nodes"), nodes, config(), ResourceExt::name_any, labels)
            .map(EgressServiceChange::Nodes)
            .boxed(),
        assignments::watch(client, outages, "assignments of EgressServices", is_own)
            .map(EgressServiceChange::Assignments)
            .boxed(),
    ])
}

fn key(meta: &ObjectMeta) -> ServiceKey {
    ServiceKey { namespace: meta.namespace.clone().unwrap_or_default(), name: meta.name.clone().unwrap_or_default() }
}

fn object_key(object: &DynamicObject) -> ServiceKey {
    key(&object.metadata)
}

fn egress_service(object: &DynamicObject) -> EgressService {
    EgressService {
        uid: object.metadata.uid.clone().unwrap_or_default(),
        created: created(&object.metadata),
        spec: spec(&object.data["spec"]),
        host: object.data["status"]["host"].as_str().map(str::to_owned),
    }
}

/// An object needs no spec.
fn spec(spec: &Value) -> Result<EgressServiceRequest, String> {
    let by_network = match spec["sourceIPBy"].as_str() {
        None if spec["sourceIPBy"].is_null() => false,
        Some("LoadBalancerIP") => false,
        Some("Network") => true,
        _ => return Err("spec.sourceIPBy is neither LoadBalancerIP nor Network".to_owned()),
    };
    let nodes = &spec["nodeSelector"];
    let nodes = (!nodes.is_null()).then(|| selector("spec.nodeSelector", nodes)).transpose()?;
    let network = Option::<String>::deserialize(&spec["network"]).map_err(|error| format!("spec.network: {error}"))?;
    Ok(EgressServiceRequest { by_network, nodes, network })
}

fn balanced(service: &Service) -> BalancedService {
    let spec = service.spec.clone().unwrap_or_default();
    let status = service.status.as_ref().and_then(|status| status.load_balancer.as_ref());
    let ingress = status.and_then(|balancer| balancer.ingress.as_ref()).into_iter().flatten();
    let address = |text: &String| text.parse::<IpAddr>().ok().map(|address| address.to_canonical());
    BalancedService {
        is_balanced: spec.type_.as_deref() == Some("LoadBalancer"),
        selector: spec.selector.unwrap_or_default(),
        ingress: ingress.filter_map(|one| one.ip.as_ref().and_then(address)).collect(),
        is_local: spec.external_traffic_policy.as_deref() == Some("Local"),
    }
}

fn endpoints(slice: &EndpointSlice) -> ServiceEndpoints {
    let nodes = slice.endpoints.iter().flatten().filter_map(|endpoint| endpoint.node_name.clone());
    // Host names are no addresses of pods.
    let nodes: BTreeSet<String> = if slice.address_type == "FQDN" { BTreeSet::new() } else { nodes.collect() };
    let service = slice.metadata.labels.iter().flatten().find(|(label, _)| *label == keys::SERVICE_NAME);
    ServiceEndpoints { service: service.map(|(_, name)| name.clone()).unwrap_or_default(), nodes }
}

/// The spec that an assignment should have.
pub fn assignment_spec(key: &ServiceKey, service: &EgressService, wanted: &WantedAssignment) -> Value {
    let ServiceKey { namespace, name } = key;
    let mut spec = json!({
        "egressIPs": wanted.addresses,
        "addressesOf": AddressesOf::Service,
        "rules": [{
            "from": {
                "kind": SourceKind::EgressService,
                "namespace": namespace,
                "name": name,
                "uid": service.uid,
                "created": service.created,
            },
            "selectors": [{
                "namespaces": {"matchLabels": {keys::NAMESPACE_NAME: namespace}},
                "pods": {"matchLabels": wanted.pods},
            }],
        }],
    });
    let by = wanted.by_own_nodes.then_some(SourceIpBy::Network);
    for (field, value) in [
        ("nodes", wanted.nodes.as_ref().map(|nodes| json!(nodes))),
        ("network", wanted.network.as_ref().map(|network| json!(network))),
        ("sourceIPBy", by.map(|by| json!(by))),
    ] {
        if let (Some(value), Some(spec)) = (value, spec.as_object_mut()) {
            spec.insert(field.to_owned(), value);
        }
    }
    spec
}

/// Writes the status of EgressServices, and the labels of nodes.
#[derive(Clone)]
pub struct EgressServiceWriter {
    client: Client,
}

impl EgressServiceWriter {
    pub const fn new(client: Client) -> Self {
        Self { client }
    }

    /// Sets `status.host` of an EgressService.
    pub async fn set_host(&self, key: &ServiceKey, host: &str) -> Result<(), WriteError> {
        let resource = crd::egress_service_resource();
        let api: Api<DynamicObject> = Api::namespaced_with(self.client.clone(), &key.namespace, &resource);
        let patch = Patch::Merge(json!({"status": {"host": host}}));
        ignored(api.patch_status(&key.name, &patch_params(), &patch).await, 404)
    }

    /// Sets a label of a node, or removes it.
    pub async fn label(&self, node: &str, label: &str, value: Option<&str>) -> Result<(), WriteError> {
        let nodes: Api<Node> = Api::all(self.client.clone());
        let patch = Patch::Merge(json!({"metadata": {"labels": {label: value}}}));
        ignored(nodes.patch(node, &patch_params(), &patch).await, 404)
    }
}

/// What the watches have brought so far.
#[derive(Default)]
pub struct EgressServiceView {
    pub inputs: EgressServiceInputs,
    pub assignments: BTreeMap<String, StoredAssignment>,
    listed: BTreeSet<u8>,
}

impl EgressServiceView {
    /// Takes a change. Returns whether it says anything new.
    pub fn apply(&mut self, change: EgressServiceChange) -> bool {
        let (inputs, listed) = (&mut self.inputs, &mut self.listed);
        match change {
            EgressServiceChange::EgressServices(update) => put(&mut inputs.egress_services, update, (listed, 0)),
            EgressServiceChange::Services(update) => put(&mut inputs.services, update, (listed, 1)),
            EgressServiceChange::Slices(update) => put(&mut inputs.slices, update, (listed, 2)),
            EgressServiceChange::Nodes(update) => put(&mut inputs.nodes, update, (listed, 3)),
            EgressServiceChange::Assignments(update) => put(&mut self.assignments, update, (listed, 4)),
        }
    }

    /// Whether every kind has been listed.
    pub fn is_whole(&self) -> bool {
        self.listed.len() == 5
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spec_is_read_as_ovn_kubernetes_means_it() {
        assert_eq!(spec(&Value::Null), Ok(EgressServiceRequest::default()));
        let whole = json!({"sourceIPBy": "Network", "nodeSelector": {"matchLabels": {"rack": "a"}}, "network": "100"});
        let read = spec(&whole).expect("it can be read");
        assert_eq!((read.by_network, read.network.as_deref()), (true, Some("100")));
        let rack = |value: &str| Labels::from([("rack".to_owned(), value.to_owned())]);
        assert!(read.nodes.as_ref().is_some_and(|nodes| nodes.matches(&rack("a")) && !nodes.matches(&rack("b"))));
        let invalid = json!({"matchExpressions": [{"key": "rack", "operator": "Near"}]});
        assert!(spec(&json!({"nodeSelector": invalid})).is_err_and(|why| why.contains("unknown operator")));
        assert!(spec(&json!({"sourceIPBy": "Moon"})).is_err());
    }

    #[test]
    fn a_service_has_the_addresses_of_its_load_balancer() {
        let service = json!({
            "metadata": {"name": "front", "namespace": "shop"},
            "spec": {"type": "LoadBalancer", "selector": {"app": "web"}, "externalTrafficPolicy": "Local"},
            "status": {"loadBalancer": {"ingress": [{"hostname": "lb.example"}, {"ip": "192.0.2.1"}, {"ip": "nonsense"}]}},
        });
        let read = balanced(&serde_json::from_value(service).expect("a Service"));
        assert_eq!((read.is_balanced, read.is_local), (true, true));
        assert_eq!(read.ingress, ["192.0.2.1".parse::<IpAddr>().expect("a literal")]);
    }

    #[test]
    fn an_assignment_of_all_nodes_has_no_list() {
        let key = ServiceKey { namespace: "shop".into(), name: "front".into() };
        let wanted = |nodes| WantedAssignment {
            addresses: vec!["192.0.2.1".parse().expect("a literal")],
            pods: Labels::from([("app".to_owned(), "web".to_owned())]),
            nodes,
            network: None,
            by_own_nodes: false,
        };
        let service =
            EgressService { uid: "u".into(), created: 7, spec: Ok(EgressServiceRequest::default()), host: None };
        let spec_of = |wanted: &WantedAssignment| assignment_spec(&key, &service, wanted);
        let spec = spec_of(&wanted(None));
        let rule = &spec["rules"][0];
        assert_eq!(rule["selectors"][0]["namespaces"]["matchLabels"]["kubernetes.io/metadata.name"], "shop");
        assert_eq!((&rule["from"]["kind"], &rule["from"]["created"]), (&json!("EgressService"), &json!(7)));
        assert!(spec.get("nodes").is_none());
        assert!(spec.get("network").is_none() && spec.get("sourceIPBy").is_none());
        assert_eq!(spec_of(&wanted(Some(["n1".into()].into())))["nodes"], json!(["n1"]));
        let by_nodes = WantedAssignment { network: Some("100".into()), by_own_nodes: true, ..wanted(None) };
        let spec = spec_of(&by_nodes);
        assert_eq!((&spec["network"], &spec["sourceIPBy"]), (&json!("100"), &json!("Network")));
    }
}
