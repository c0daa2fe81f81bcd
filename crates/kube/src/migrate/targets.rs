//! Requests, as objects of each system.

use serde_json::{Value, json};

use super::{
    EgressSystem, Migrated, MigrationNote, MigrationRequest, MigrationTarget, PodSelectors, RequestedDestinations,
    RequestedGateway, RequestedSources,
};
use egress_core::keys;

/// What a request becomes there.
pub(super) fn write(request: MigrationRequest, to: MigrationTarget) -> Migrated {
    let MigrationRequest { from, mut notes, .. } = request.clone();
    if request.selectors.is_empty() {
        notes.push(MigrationNote::Loses("it selects no pods, so it becomes nothing".to_owned()));
        return Migrated { from, becomes: Vec::new(), notes };
    }
    let written = match to {
        MigrationTarget::System(EgressSystem::Antrea) => egresses(&request, &mut notes),
        MigrationTarget::System(EgressSystem::Cilium) => gateway_policies(&request, &mut notes),
        MigrationTarget::Here | MigrationTarget::System(EgressSystem::OvnKubernetes | EgressSystem::OpenShiftSdn) => {
            egress_ip(&request, &mut notes)
        }
    };
    let becomes = written.unwrap_or_else(|why| {
        notes.push(MigrationNote::Loses(why));
        Vec::new()
    });
    Migrated { from, becomes, notes }
}

/// The addresses of nodes that are named.
fn named_addresses(gateways: &[RequestedGateway]) -> Option<Vec<String>> {
    gateways.iter().map(|gateway| gateway.address.clone()).collect()
}

/// The nodes of one selector, or those with the label.
fn first_or_labelled(selectors: &[Value], notes: &mut Vec<MigrationNote>) -> Value {
    for other in selectors.iter().skip(1) {
        notes.push(MigrationNote::Loses(format!("nodes: those that {other} selects too")));
    }
    let labelled = || json!({"matchExpressions": [{"key": keys::ASSIGNABLE, "operator": "Exists"}]});
    selectors.first().cloned().unwrap_or_else(labelled)
}

fn has_conditions(selector: &Value) -> bool {
    selector.as_object().is_some_and(|fields| fields.values().any(|value| value != &json!({}) && value != &json!([])))
}

fn egress_ip(request: &MigrationRequest, notes: &mut Vec<MigrationNote>) -> Result<Vec<Value>, String> {
    let [PodSelectors { namespaces, pods, nodes }] = request.selectors.as_slice() else {
        return Err("several selectors: EgressIPs share no address, so it would need one for each".to_owned());
    };
    if nodes.is_some() {
        return Err("selectors.nodeSelector: an EgressIP selects pods of all nodes".to_owned());
    }
    if request.destinations.is_some() {
        return Err("destinations: an EgressIP applies to all, apart from the agents' --excluded-cidrs".to_owned());
    }
    let label = keys::ASSIGNABLE;
    let addresses = match &request.sources {
        RequestedSources::Free(addresses, _) if addresses.is_empty() => {
            return Err("it has no address yet: run this on the cluster, or name one".to_owned());
        }
        RequestedSources::Free(addresses, selectors) => {
            for selector in selectors {
                let what = format!("nodes: give the label {label} to those that {selector} selects");
                notes.push(MigrationNote::Changes(what));
            }
            addresses.clone()
        }
        RequestedSources::OfNodes(gateways) => {
            let addresses = named_addresses(gateways)
                .ok_or("its address is that of a gateway, and an EgressIP has a free address: name one")?;
            for (address, gateway) in addresses.iter().zip(gateways) {
                let what = format!("{address}: take it from the interface of the node, an EgressIP is on none");
                notes.push(MigrationNote::Changes(what));
                if has_conditions(&gateway.nodes) {
                    let what = format!("nodes: give the label {label} to those that {} selects", gateway.nodes);
                    notes.push(MigrationNote::Changes(what));
                }
            }
            addresses
        }
    };
    let mut spec = json!({"egressIPs": addresses, "namespaceSelector": namespaces});
    if let Some(fields) = spec.as_object_mut().filter(|_| has_conditions(pods)) {
        fields.insert("podSelector".to_owned(), pods.clone());
    }
    let name = &request.name;
    Ok(vec![json!({"apiVersion": "k8s.ovn.org/v1", "kind": "EgressIP", "metadata": {"name": name}, "spec": spec})])
}

fn egresses(request: &MigrationRequest, notes: &mut Vec<MigrationNote>) -> Result<Vec<Value>, String> {
    const VERSION: &str = "crd.antrea.io/v1beta1";
    let MigrationRequest { name, selectors, .. } = request;
    if request.destinations.is_some() {
        return Err("destinations: an Egress applies to all, apart from exceptCIDRs of the whole cluster".to_owned());
    }
    if selectors.iter().any(|one| one.nodes.is_some()) {
        return Err("selectors.nodeSelector: an Egress selects pods of all nodes".to_owned());
    }
    let (addresses, pool_nodes) = match &request.sources {
        RequestedSources::Free(addresses, selectors) => (addresses.clone(), Some(first_or_labelled(selectors, notes))),
        RequestedSources::OfNodes(gateways) => {
            let addresses = named_addresses(gateways)
                .ok_or("its address is that of a gateway, and an Egress names an address: name one")?;
            for gateway in gateways.iter().filter(|gateway| has_conditions(&gateway.nodes)) {
                let what =
                    format!("nodes: whichever has the address serves it, not those that {} selects", gateway.nodes);
                notes.push(MigrationNote::Changes(what));
            }
            (addresses, None)
        }
    };
    let Some((address, others)) = addresses.split_first() else {
        return Err("it has no address yet: run this on the cluster, or name one".to_owned());
    };
    if !others.is_empty() {
        let what = format!("{}: Antrea refuses several addresses of an Egress", others.join(", "));
        notes.push(MigrationNote::Loses(what));
    }
    let mut objects = Vec::new();
    if let Some(nodes) = &pool_nodes {
        objects.push(json!({
            "apiVersion": VERSION, "kind": "ExternalIPPool", "metadata": {"name": name},
            "spec": {"ipRanges": [{"start": address, "end": address}], "nodeSelector": nodes},
        }));
    }
    for (at, one) in selectors.iter().enumerate() {
        let mut applied_to = json!({"namespaceSelector": one.namespaces});
        if let Some(fields) = applied_to.as_object_mut().filter(|_| has_conditions(&one.pods)) {
            fields.insert("podSelector".to_owned(), one.pods.clone());
        }
        let mut spec = json!({"appliedTo": applied_to, "egressIP": address});
        // Others share the address of the first.
        if let Some(fields) = spec.as_object_mut().filter(|_| at == 0 && pool_nodes.is_some()) {
            fields.insert("externalIPPool".to_owned(), json!(name));
        }
        let own = if at == 0 { name.clone() } else { format!("{name}-{}", at + 1) };
        objects.push(json!({"apiVersion": VERSION, "kind": "Egress", "metadata": {"name": own}, "spec": spec}));
    }
    Ok(objects)
}

fn gateway_policies(request: &MigrationRequest, notes: &mut Vec<MigrationNote>) -> Result<Vec<Value>, String> {
    let gateways: Vec<RequestedGateway> = match &request.sources {
        RequestedSources::Free(addresses, _) if addresses.is_empty() => {
            return Err("it has no address yet: run this on the cluster, or name one".to_owned());
        }
        RequestedSources::Free(addresses, selectors) => {
            let nodes = first_or_labelled(selectors, notes);
            for address in addresses {
                let what =
                    format!("{address}: put it on an interface of the gateway; nothing moves it when the node is lost");
                notes.push(MigrationNote::Changes(what));
            }
            let gateway = |address: &String| RequestedGateway {
                nodes: nodes.clone(),
                interface: None,
                address: Some(address.clone()),
            };
            addresses.iter().map(gateway).collect()
        }
        RequestedSources::OfNodes(gateways) => gateways.clone(),
    };
    // A gateway has one address, so each family is a policy.
    let is_v6 = |gateway: &RequestedGateway| gateway.address.as_ref().is_some_and(|address| address.contains(':'));
    let (v6, v4): (Vec<_>, Vec<_>) = gateways.into_iter().partition(is_v6);
    let is_mixed = !v4.is_empty() && !v6.is_empty();
    if v4.len() > 1 || v6.len() > 1 {
        let what = "each pod has one of the gateways, where its connections were spread over the addresses";
        notes.push(MigrationNote::Changes(what.to_owned()));
    }
    let families = [(v4, "0.0.0.0/0", ""), (v6, "::/0", if is_mixed { "-v6" } else { "" })];
    let families = families.into_iter().filter(|(gateways, ..)| !gateways.is_empty());
    Ok(families
        .map(|(gateways, all, suffix)| {
            let everything = RequestedDestinations { included: vec![all.to_owned()], excluded: Vec::new() };
            let destinations = request.destinations.clone().unwrap_or(everything);
            one_gateway_policy(&format!("{}{suffix}", request.name), &request.selectors, &gateways, &destinations)
        })
        .collect())
}

fn one_gateway_policy(
    name: &str,
    selectors: &[PodSelectors],
    gateways: &[RequestedGateway],
    RequestedDestinations { included, excluded }: &RequestedDestinations,
) -> Value {
    let gateways: Vec<Value> = gateways
        .iter()
        .map(|RequestedGateway { nodes, interface, address }| {
            let mut gateway = json!({"nodeSelector": nodes});
            if let Some(fields) = gateway.as_object_mut() {
                fields.extend(interface.iter().map(|name| ("interface".to_owned(), json!(name))));
                fields.extend(address.iter().map(|address| ("egressIP".to_owned(), json!(address))));
            }
            gateway
        })
        .collect();
    let selectors = selectors.iter().map(|PodSelectors { namespaces, pods, nodes }| {
        let mut selector = json!({"namespaceSelector": namespaces, "podSelector": pods});
        if let Some(fields) = selector.as_object_mut() {
            fields.extend(nodes.iter().map(|nodes| ("nodeSelector".to_owned(), nodes.clone())));
        }
        selector
    });
    let selectors: Vec<Value> = selectors.collect();
    let mut spec = json!({"selectors": selectors, "destinationCIDRs": included, "egressGateway": gateways[0]});
    if let Some(fields) = spec.as_object_mut() {
        fields.extend((!excluded.is_empty()).then(|| ("excludedCIDRs".to_owned(), json!(excluded))));
        fields.extend((gateways.len() > 1).then(|| ("egressGateways".to_owned(), json!(gateways))));
    }
    let meta = json!({"name": name});
    json!({"apiVersion": "cilium.io/v2", "kind": "CiliumEgressGatewayPolicy", "metadata": meta, "spec": spec})
}
