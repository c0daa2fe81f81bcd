//! Objects of each system, as requests.

use kube::api::DynamicObject;
use serde_json::{Value, json};

use super::{
    EgressSystem, Migrated, MigrationNote, MigrationRequest, PodSelectors, RequestedDestinations, RequestedGateway,
    RequestedSources, kind, named,
};
use crate::cilium;
use egress_core::keys;

/// The kinds that say which pods leave with which addresses.
pub(super) fn kinds(system: EgressSystem) -> &'static [&'static str] {
    match system {
        EgressSystem::Antrea => &["Egress", "ExternalIPPool"],
        EgressSystem::Cilium => &["CiliumEgressGatewayPolicy"],
        EgressSystem::OpenShiftSdn => &["NetNamespace", "HostSubnet"],
        EgressSystem::OvnKubernetes => &["EgressIP", "EgressService"],
    }
}

/// What this project does not serve of a kind that it serves.
pub(super) fn unserved(object: &DynamicObject, system: EgressSystem) -> Vec<MigrationNote> {
    let spec = &object.data["spec"];
    let loses = |what: String| MigrationNote::Loses(what);
    let mut notes = Vec::new();
    match (system, kind(object)) {
        (EgressSystem::Antrea, "Egress") => {
            let is_static = spec["externalIPPool"].is_null() && spec["externalIPPools"].is_null();
            let ports = "pods get the ports of the node's address that the host leaves to NAT";
            notes.extend(is_static.then(|| MigrationNote::Changes(ports.to_owned())));
        }
        (EgressSystem::Cilium, _) => {
            notes.extend(cilium::policy(object).object.spec.err().map(|why| loses(format!("refused: {why}"))));
        }
        (EgressSystem::OvnKubernetes, "EgressIP") => {
            let what = "spec.egressNodeSelector: not read, the label of nodes alone counts";
            notes.extend((!spec["egressNodeSelector"].is_null()).then(|| loses(what.to_owned())));
        }
        _ => {}
    }
    notes
}

/// What an object asks for; an error is one that asks for no addresses, and what becomes of it. `None` for one that needs no word.
pub(super) fn read(
    object: &DynamicObject,
    system: EgressSystem,
    all: &[&DynamicObject],
) -> Option<Result<MigrationRequest, Migrated>> {
    let mut request = MigrationRequest {
        from: named(object),
        name: object.metadata.name.clone().unwrap_or_default(),
        selectors: Vec::new(),
        sources: RequestedSources::Free(Vec::new(), Vec::new()),
        destinations: None,
        notes: Vec::new(),
    };
    match (system, kind(object)) {
        (EgressSystem::Antrea, "Egress") => egress(object, all, &mut request),
        (EgressSystem::Cilium, _) => {
            if let Err(why) = gateway_policy(object, &mut request) {
                let notes = vec![MigrationNote::Loses(format!("it cannot be read: {why}"))];
                return Some(Err(Migrated { from: request.from, becomes: Vec::new(), notes }));
            }
        }
        (EgressSystem::OpenShiftSdn, "NetNamespace") => net_namespace(object, &mut request)?,
        (EgressSystem::OpenShiftSdn, "HostSubnet") => return host_subnet(object).map(Err),
        (EgressSystem::OvnKubernetes, "EgressIP") => egress_ip(object, &mut request),
        // Its Egresses say what becomes of it.
        _ => return None,
    }
    Some(Ok(request))
}

fn texts(value: &Value) -> Vec<String> {
    match value {
        Value::String(text) if !text.is_empty() => vec![text.clone()],
        Value::Array(all) => all.iter().filter_map(|one| one.as_str().map(str::to_owned)).collect(),
        _ => Vec::new(),
    }
}

/// An absent selector selects everything.
fn selector(value: &Value) -> Value {
    if value.is_null() { json!({}) } else { value.clone() }
}

fn egress(object: &DynamicObject, all: &[&DynamicObject], request: &mut MigrationRequest) {
    let spec = &object.data["spec"];
    let applied_to = &spec["appliedTo"];
    if !applied_to["namespaceSelector"].is_null() || !applied_to["podSelector"].is_null() {
        request.selectors.push(PodSelectors {
            namespaces: selector(&applied_to["namespaceSelector"]),
            pods: selector(&applied_to["podSelector"]),
            nodes: None,
        });
    }
    let is_plural = !spec["egressIPs"].is_null() || !spec["externalIPPools"].is_null();
    let (addresses, pools) = match is_plural {
        true => (texts(&spec["egressIPs"]), texts(&spec["externalIPPools"])),
        false => (texts(&spec["egressIP"]), texts(&spec["externalIPPool"])),
    };
    if !spec["bandwidth"].is_null() {
        request.notes.push(MigrationNote::Loses("spec.bandwidth: not limited".to_owned()));
    }
    if pools.is_empty() {
        let gateway = |address| RequestedGateway { nodes: json!({}), interface: None, address: Some(address) };
        request.sources = RequestedSources::OfNodes(addresses.into_iter().map(gateway).collect());
        return;
    }
    let mut nodes = Vec::new();
    for pool in &pools {
        let is_it = |one: &&&DynamicObject| kind(one) == "ExternalIPPool" && one.metadata.name.as_deref() == Some(pool);
        let Some(found) = all.iter().find(is_it) else {
            let what = format!("ExternalIPPool {pool} is not among the objects, so its nodes are not known");
            request.notes.push(MigrationNote::Loses(what));
            continue;
        };
        if found.data["spec"]["subnetInfo"]["vlan"].as_u64().is_some_and(|vlan| vlan != 0) {
            let what = format!("the VLAN of ExternalIPPool {pool}: nodes must have an interface in it");
            request.notes.push(MigrationNote::Loses(what));
        }
        let selector = &found.data["spec"]["nodeSelector"];
        if selector.as_object().is_some_and(|fields| !fields.is_empty()) {
            nodes.push(selector.clone());
        }
    }
    request.sources = RequestedSources::Free(addresses, nodes);
}

fn gateway_policy(object: &DynamicObject, request: &mut MigrationRequest) -> Result<(), String> {
    let spec = &object.data["spec"];
    cilium::policy(object).object.spec?;
    for one in spec["selectors"].as_array().into_iter().flatten() {
        let read = cilium::rule_selector(one)?;
        let nodes = (!read["nodes"].is_null()).then(|| read["nodes"].clone());
        request.selectors.push(PodSelectors {
            namespaces: read["namespaces"].clone(),
            pods: read["pods"].clone(),
            nodes,
        });
    }
    let destinations =
        RequestedDestinations { included: texts(&spec["destinationCIDRs"]), excluded: texts(&spec["excludedCIDRs"]) };
    let is_everything = destinations.excluded.is_empty()
        && destinations.included.iter().all(|net| net.ends_with("/0"))
        && !destinations.included.is_empty();
    request.destinations = (!is_everything).then_some(destinations);
    let gateways = match spec["egressGateways"].as_array().filter(|all| !all.is_empty()) {
        Some(all) => all.clone(),
        None => vec![spec["egressGateway"].clone()],
    };
    let text = |value: &Value| value.as_str().filter(|text| !text.is_empty()).map(str::to_owned);
    let gateway = |one: &Value| RequestedGateway {
        nodes: selector(&one["nodeSelector"]),
        interface: text(&one["interface"]),
        address: text(&one["egressIP"]),
    };
    request.sources = RequestedSources::OfNodes(gateways.iter().map(gateway).collect());
    Ok(())
}

/// Its fields are not in a spec.
fn net_namespace(object: &DynamicObject, request: &mut MigrationRequest) -> Option<()> {
    let addresses = Some(texts(&object.data["egressIPs"])).filter(|addresses| !addresses.is_empty())?;
    let name = object.data["netname"].as_str().map_or_else(|| request.name.clone(), str::to_owned);
    request.selectors.push(PodSelectors {
        namespaces: json!({"matchLabels": {keys::NAMESPACE_NAME: name}}),
        pods: json!({}),
        nodes: None,
    });
    if addresses.len() > 1 {
        let what = "connections spread over all addresses, where OpenShift SDN used the first that a node had";
        request.notes.push(MigrationNote::Changes(what.to_owned()));
    }
    request.sources = RequestedSources::Free(addresses, Vec::new());
    Some(())
}

/// A label of the node.
fn host_subnet(object: &DynamicObject) -> Option<Migrated> {
    let (addresses, networks) = (texts(&object.data["egressIPs"]), texts(&object.data["egressCIDRs"]));
    if addresses.is_empty() && networks.is_empty() {
        return None;
    }
    let host = object.data["host"].as_str().or(object.metadata.name.as_deref()).unwrap_or_default();
    let node =
        json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": host, "labels": {keys::ASSIGNABLE: ""}}});
    let what = match networks.is_empty() {
        true => "egressIPs: no address is bound to the node, the leader chooses one with the label",
        false => "egressCIDRs: the node can host any address of its networks",
    };
    Some(Migrated { from: named(object), becomes: vec![node], notes: vec![MigrationNote::Changes(what.to_owned())] })
}

fn egress_ip(object: &DynamicObject, request: &mut MigrationRequest) {
    let spec = &object.data["spec"];
    request.selectors.push(PodSelectors {
        namespaces: selector(&spec["namespaceSelector"]),
        pods: selector(&spec["podSelector"]),
        nodes: None,
    });
    request.sources = RequestedSources::Free(texts(&spec["egressIPs"]), Vec::new());
}
