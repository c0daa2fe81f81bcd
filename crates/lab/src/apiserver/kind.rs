//! What the server serves: one description per kind, from which everything generic (routes, discovery, verbs, tables) follows.
//!
//! Built-in kinds are the table in [`BUILTIN`]; kinds of custom resources are made from their definition (`crd`).
//! A kind is one *served version*: two versions of a resource, or Events under both of their groups, are two kinds that
//! share one `storage`. Objects are stored in one form and converted at the edge (`convert`).

use std::sync::Arc;

use serde_json::{Value, json};

use super::access;
use super::fields::ListType;
use super::schema::Schema;
use super::table::{self, PrinterColumn};

#[derive(Clone)]
pub struct Kind {
    pub group: String,
    pub version: String,
    pub kind: String,
    pub list_kind: String,
    pub plural: String,
    pub singular: String,
    pub short_names: Vec<String>,
    pub categories: Vec<String>,
    pub namespaced: bool,
    /// Name of the table that holds the objects; kinds that share it show the same objects.
    pub storage: Arc<str>,
    pub traits: KindTraits,
    /// Only custom resources have a schema; built-in kinds are taken as they come.
    pub schema: Option<Arc<Schema>>,
    pub columns: Vec<PrinterColumn>,
}

/// Where the resources of Kubernetes differ from each other.
#[derive(Clone, Copy, Default)]
pub struct KindTraits {
    pub custom: bool,
    pub status_subresource: bool,
    /// A new object may bring its status (kubelets register their Node so).
    pub create_keeps_status: bool,
    pub tracks_generation: bool,
    /// PUT without a resource version overwrites.
    pub unconditional_update: bool,
    /// PUT of an object that is not there creates it.
    pub create_on_update: bool,
    /// DELETE answers with the object instead of a Status.
    pub delete_returns_object: bool,
}

impl Kind {
    pub fn api_version(&self) -> String {
        if self.group.is_empty() { self.version.clone() } else { format!("{}/{}", self.group, self.version) }
    }

    /// `egressips.k8s.ovn.org`, or `pods` for the core group.
    pub fn group_resource(&self) -> String {
        if self.group.is_empty() { self.plural.clone() } else { format!("{}.{}", self.plural, self.group) }
    }

    /// How the list at this path of field names merges.
    pub fn list_type(&self, path: &[String]) -> ListType {
        match &self.schema {
            Some(schema) if path.first().is_none_or(|first| first != "metadata") => schema.list_type(path),
            _ => builtin_list_type(path),
        }
    }

    /// Does the map at this path change as a whole?
    pub fn is_atomic_map(&self, path: &[String]) -> bool {
        match &self.schema {
            Some(schema) => schema.is_atomic_map(path),
            None => path.last().is_some_and(|field| matches!(field.as_str(), "selector" | "nodeSelector")),
        }
    }

    /// The entry of a discovery document, and of the status subresource after it.
    pub fn discovery(&self) -> Vec<Value> {
        let mut main = json!({
            "name": self.plural,
            "singularName": self.singular,
            "namespaced": self.namespaced,
            "kind": self.kind,
            "verbs": ["create", "delete", "get", "list", "patch", "update", "watch"],
        });
        if !self.short_names.is_empty() {
            main["shortNames"] = json!(self.short_names);
        }
        if !self.categories.is_empty() {
            main["categories"] = json!(self.categories);
        }
        let mut entries = vec![main];
        if self.traits.status_subresource {
            entries.push(json!({
                "name": format!("{}/status", self.plural),
                "singularName": "",
                "namespaced": self.namespaced,
                "kind": self.kind,
                "verbs": ["get", "patch", "update"],
            }));
        }
        entries
    }
}

pub(super) const NAMESPACES: &str = "namespaces";
pub(super) const SERVICE_ACCOUNTS: &str = "serviceaccounts";
pub(super) const CRDS: &str = "customresourcedefinitions.apiextensions.k8s.io";

const RBAC: &str = "rbac.authorization.k8s.io";

/// One line per built-in kind: group, version, kind, plural, short names, namespaced, storage.
type BuiltInKind =
    (&'static str, &'static str, &'static str, &'static str, &'static [&'static str], bool, &'static str);
const BUILTIN: &[BuiltInKind] = &[
    ("", "v1", "ConfigMap", "configmaps", &["cm"], true, "configmaps"),
    ("", "v1", "Event", "events", &["ev"], true, "events"),
    ("", "v1", "Namespace", "namespaces", &["ns"], false, NAMESPACES),
    ("", "v1", "Node", "nodes", &["no"], false, "nodes"),
    ("", "v1", "Pod", "pods", &["po"], true, "pods"),
    ("", "v1", "Secret", "secrets", &[], true, "secrets"),
    ("", "v1", "Service", "services", &["svc"], true, "services"),
    ("apps", "v1", "Deployment", "deployments", &["deploy"], true, "deployments.apps"),
    ("", "v1", "ServiceAccount", "serviceaccounts", &["sa"], true, SERVICE_ACCOUNTS),
    (
        "apiextensions.k8s.io",
        "v1",
        "CustomResourceDefinition",
        "customresourcedefinitions",
        &["crd", "crds"],
        false,
        CRDS,
    ),
    ("coordination.k8s.io", "v1", "Lease", "leases", &[], true, "leases.coordination.k8s.io"),
    ("discovery.k8s.io", "v1", "EndpointSlice", "endpointslices", &[], true, "endpointslices.discovery.k8s.io"),
    ("events.k8s.io", "v1", "Event", "events", &["ev"], true, "events"),
    (RBAC, "v1", "ClusterRole", "clusterroles", &[], false, access::CLUSTER_ROLES),
    (RBAC, "v1", "ClusterRoleBinding", "clusterrolebindings", &[], false, access::CLUSTER_ROLE_BINDINGS),
    (RBAC, "v1", "Role", "roles", &[], true, access::ROLES),
    (RBAC, "v1", "RoleBinding", "rolebindings", &[], true, access::ROLE_BINDINGS),
];

pub(super) fn builtins() -> Vec<Arc<Kind>> {
    BUILTIN.iter().map(|line| Arc::new(from_line(line))).collect()
}

#[cfg(test)]
pub(super) fn builtin(group: &str, plural: &str) -> Option<Arc<Kind>> {
    builtins().into_iter().find(|kind| kind.group == group && kind.plural == plural)
}

fn from_line(&(group, version, kind, plural, short_names, namespaced, storage): &BuiltInKind) -> Kind {
    Kind {
        group: group.to_owned(),
        version: version.to_owned(),
        kind: kind.to_owned(),
        list_kind: format!("{kind}List"),
        plural: plural.to_owned(),
        singular: kind.to_lowercase(),
        short_names: short_names.iter().map(|&name| name.to_owned()).collect(),
        categories: if matches!(kind, "Pod" | "Service") { vec!["all".to_owned()] } else { Vec::new() },
        namespaced,
        storage: Arc::from(storage),
        traits: builtin_traits(kind),
        schema: None,
        columns: table::builtin(kind),
    }
}

fn builtin_traits(kind: &str) -> KindTraits {
    let plain = KindTraits { unconditional_update: true, ..KindTraits::default() };
    match kind {
        "Pod" => KindTraits { status_subresource: true, delete_returns_object: true, ..plain },
        "Node" => KindTraits { status_subresource: true, create_keeps_status: true, ..plain },
        "Namespace" | "Service" => KindTraits { status_subresource: true, ..plain },
        "Deployment" => KindTraits { status_subresource: true, tracks_generation: true, ..plain },
        "Event" => KindTraits { create_on_update: true, ..plain },
        "Lease" => KindTraits { create_on_update: true, ..KindTraits::default() },
        "CustomResourceDefinition" => {
            KindTraits { status_subresource: true, tracks_generation: true, ..KindTraits::default() }
        }
        _ => plain,
    }
}

/// Merge keys of the lists in built-in kinds.
fn builtin_list_type(path: &[String]) -> ListType {
    let keys: &[&str] = match path.last().map(String::as_str) {
        Some("conditions" | "addresses") => &["type"],
        Some("containers" | "initContainers" | "ephemeralContainers" | "volumes" | "env") => &["name"],
        Some("imagePullSecrets" | "secrets" | "resourceClaims") => &["name"],
        Some("volumeMounts") => &["mountPath"],
        Some("volumeDevices") => &["devicePath"],
        Some("podIPs" | "hostIPs" | "hostAliases") => &["ip"],
        Some("ownerReferences") => &["uid"],
        Some("topologySpreadConstraints") => &["topologyKey", "whenUnsatisfiable"],
        Some("ports") if path.iter().any(|field| field.ends_with("ontainers")) => &["containerPort", "protocol"],
        Some("ports") => &["port", "protocol"],
        Some("finalizers" | "podCIDRs") => return ListType::Set,
        _ => return ListType::Atomic,
    };
    ListType::Map(keys.iter().map(|&key| key.to_owned()).collect())
}
