//! `egress-agent migrate`: what the objects of another system become, what changes, and what cannot be had.
//!
//! ```text
//! objects of a system ── sources ──> MigrationRequests ── targets ──> objects of another one
//!                     └─ kept: objects whose kind is served here as it is
//! ```
//!
//! Pure, apart from `cluster`, which lists and writes objects with the rights of the user. Nothing is dropped in silence: each
//! object is in the result, with a note for each thing that it loses.

pub mod cluster;
mod sources;
mod targets;

use std::collections::BTreeMap;
use std::fmt;

use kube::api::DynamicObject;
use serde_json::{Value, json};

use crate::convert::created;

/// A system whose objects say which pods leave with which addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EgressSystem {
    Antrea,
    Cilium,
    OpenShiftSdn,
    OvnKubernetes,
}

impl fmt::Display for EgressSystem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Antrea => "Antrea",
            Self::Cilium => "Cilium",
            Self::OpenShiftSdn => "OpenShift SDN",
            Self::OvnKubernetes => "OVN-Kubernetes",
        })
    }
}

/// Where objects go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MigrationTarget {
    /// This project, in the kind that fits: kinds that it serves stay what they are.
    Here,
    /// The kinds of this system, to be served by it or by this project.
    System(EgressSystem),
}

/// Of one thing that is not as before.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MigrationNote {
    /// It works, and differently.
    Changes(String),
    /// It cannot be had.
    Loses(String),
}

impl fmt::Display for MigrationNote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Changes(what) => write!(f, "changes: {what}"),
            Self::Loses(what) => write!(f, "loses: {what}"),
        }
    }
}

/// What becomes of one object.
#[derive(Clone, Debug, PartialEq)]
pub struct Migrated {
    /// Its kind and name.
    pub from: String,
    /// Without any, it becomes nothing.
    pub becomes: Vec<Value>,
    pub notes: Vec<MigrationNote>,
}

impl Migrated {
    pub fn loses(&self) -> bool {
        self.notes.iter().any(|note| matches!(note, MigrationNote::Loses(_)))
    }
}

/// What becomes of all objects.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Migration {
    /// What changes for all.
    pub general: Vec<&'static str>,
    /// The oldest first: of policies that select one pod the oldest counts, and new objects are of one age.
    pub objects: Vec<Migrated>,
    /// How many objects of other kinds there are, by kind.
    pub others: BTreeMap<String, usize>,
}

/// What becomes of these objects of a system.
pub fn migrate(objects: &[DynamicObject], from: EgressSystem, to: MigrationTarget) -> Migration {
    let mut by_age: Vec<&DynamicObject> = objects.iter().collect();
    by_age.sort_by_key(|object| (created(&object.metadata), object.metadata.name.clone()));
    let mut migration = Migration { general: general(from, to), ..Migration::default() };
    let is_kept = |kind: &str| match (from, to) {
        (EgressSystem::OpenShiftSdn, _) => false,
        (_, MigrationTarget::Here) => true,
        // A kind that no other system has.
        (_, MigrationTarget::System(system)) => system == from || kind == "EgressService",
    };
    for object in &by_age {
        let kind = kind(object);
        if !sources::kinds(from).contains(&kind) {
            *migration.others.entry(kind.to_owned()).or_default() += 1;
        } else if is_kept(kind) {
            migration.objects.push(kept(object, from, to));
        } else {
            let request = sources::read(object, from, &by_age);
            migration
                .objects
                .extend(request.map(|request| request.map_or_else(|done| done, |one| targets::write(one, to))));
        }
    }
    migration
}

fn kind(object: &DynamicObject) -> &str {
    object.types.as_ref().map_or("", |types| types.kind.as_str())
}

fn named(object: &DynamicObject) -> String {
    let name = object.metadata.name.as_deref().unwrap_or_default();
    match object.metadata.namespace.as_deref() {
        Some(namespace) => format!("{} {namespace}/{name}", kind(object)),
        None => format!("{} {name}", kind(object)),
    }
}

/// The object without what an API server and controllers add.
fn kept(object: &DynamicObject, from: EgressSystem, to: MigrationTarget) -> Migrated {
    let notes = if to == MigrationTarget::Here { sources::unserved(object, from) } else { Vec::new() };
    let types = object.types.clone().unwrap_or_default();
    let version = match from {
        EgressSystem::Antrea => "crd.antrea.io/v1beta1",
        _ => types.api_version.as_str(),
    };
    let mut meta = json!({"name": object.metadata.name});
    if let Some(fields) = meta.as_object_mut() {
        fields.extend(object.metadata.namespace.iter().map(|namespace| ("namespace".to_owned(), json!(namespace))));
        let labels = object.metadata.labels.iter().filter(|labels| !labels.is_empty());
        fields.extend(labels.map(|labels| ("labels".to_owned(), json!(labels))));
    }
    let becomes = json!({"apiVersion": version, "kind": types.kind, "metadata": meta, "spec": object.data["spec"]});
    Migrated { from: named(object), becomes: vec![becomes], notes }
}

/// What changes for all objects of a system.
fn general(from: EgressSystem, to: MigrationTarget) -> Vec<&'static str> {
    let ours: &[&str] = match from {
        EgressSystem::Antrea => &[
            "controllers need --antrea (deploy/antrea), and Antrea's feature Egress must be off: docs/operations/antrea.md",
            "a node that returns does not get its addresses back, so connections do not break again",
            "of several Egresses that select a pod the oldest counts, not one at random",
        ],
        EgressSystem::Cilium => &[
            "controllers need --cilium (deploy/cilium), and Cilium's egress gateway must be off: docs/operations/cilium.md",
            "Cilium cannot be the only CNI: pods must enter the host by a bridge or a management port",
            "a gateway must be ready and answer, and stays the gateway when another one returns",
            "an exclusion takes its destinations from its own policy alone",
        ],
        EgressSystem::OpenShiftSdn => &[
            "the nodes of egress IPs get the label k8s.ovn.org/egress-assignable, and the leader chooses among all of them",
            "connections of pods that have several egress IPs spread over all of them",
        ],
        EgressSystem::OvnKubernetes => &[
            "OVN-Kubernetes' own EgressIP must be off (--enable-egress-ip=false): docs/migration.md",
            "packets that wait for an address are dropped, where OVN-Kubernetes sends them with the node's address",
            "connections end when an address leaves an object, and continue when it moves to another node",
        ],
    };
    match to {
        MigrationTarget::Here => ours.to_vec(),
        MigrationTarget::System(EgressSystem::Antrea) => vec![
            "by Antrea itself: packets leave with the node's address while no node has the address, and a node that returns gets \
             its addresses back",
            "an ExternalIPPool for each object: addresses in one pool could not be named by their objects before they are there",
        ],
        MigrationTarget::System(EgressSystem::Cilium) => vec![
            "an address is one of the gateway's own: it must be on an interface of the node, and does not move with the gateway",
            "by Cilium itself: the first node by name is the gateway, ready or not",
        ],
        MigrationTarget::System(EgressSystem::OvnKubernetes | EgressSystem::OpenShiftSdn) => vec![
            "nodes with the label k8s.ovn.org/egress-assignable host addresses, whatever their object",
            "by OVN-Kubernetes itself: packets leave with the node's address while an address has no node",
        ],
    }
}

/// What one object asks for, as far as one of the systems can say it.
#[derive(Clone, Debug)]
struct MigrationRequest {
    /// Kind and name of the object.
    from: String,
    name: String,
    /// A pod is selected by any of them.
    selectors: Vec<PodSelectors>,
    sources: RequestedSources,
    /// `None`: all.
    destinations: Option<RequestedDestinations>,
    notes: Vec<MigrationNote>,
}

/// Label selectors.
#[derive(Clone, Debug)]
struct PodSelectors {
    namespaces: Value,
    pods: Value,
    nodes: Option<Value>,
}

/// The source addresses.
#[derive(Clone, Debug)]
enum RequestedSources {
    /// On no interface; on the nodes that all of these select, or, without one, on nodes with the label.
    Free(Vec<String>, Vec<Value>),
    OfNodes(Vec<RequestedGateway>),
}

#[derive(Clone, Debug)]
struct RequestedGateway {
    nodes: Value,
    interface: Option<String>,
    address: Option<String>,
}

#[derive(Clone, Debug)]
struct RequestedDestinations {
    included: Vec<String>,
    excluded: Vec<String>,
}

#[cfg(test)]
mod tests;
