//! `kubectl`, where the machine has it; else the same requests by the lab's own client, with the same output, which
//! says when it was not kubectl.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use super::KubeApi;
use crate::api_objects::EGRESS_IPS;
use crate::columns::aligned;
use egress_toolchain::kubectl;

/// A kind as one types it.
#[derive(Clone, Copy, Debug)]
pub struct TypedKind {
    pub resource: &'static str,
    group: &'static str,
    collection: &'static str,
    /// Titles, and where the values are.
    columns: &'static [(&'static str, &'static str)],
}

impl TypedKind {
    pub fn path(&self, name: &str) -> String {
        format!("{}/{name}", self.collection)
    }
}

pub const EGRESS_IP: TypedKind = TypedKind {
    resource: "egressip",
    group: "k8s.ovn.org",
    collection: EGRESS_IPS,
    columns: &[
        ("NAME", "/metadata/name"),
        ("EGRESSIPS", "/spec/egressIPs/0"),
        ("ASSIGNED NODE", "/status/items/0/node"),
        ("ASSIGNED EGRESSIPS", "/status/items/0/egressIP"),
        ("SELECTED PODS", "/status/selectedPods"),
        ("REASON", "/status/conditions/0/reason"),
        ("DEGRADED", "/status/conditions/1/status"),
    ],
};

/// Antrea's.
pub const EGRESS: TypedKind = TypedKind {
    resource: "egress",
    group: "crd.antrea.io",
    collection: "/apis/crd.antrea.io/v1beta1/egresses",
    columns: &[("NAME", "/metadata/name"), ("EGRESSIP", "/status/egressIP"), ("NODE", "/status/egressNode")],
};

/// Antrea's.
pub const EXTERNAL_IP_POOL: TypedKind = TypedKind {
    resource: "externalippool",
    group: "crd.antrea.io",
    collection: "/apis/crd.antrea.io/v1beta1/externalippools",
    columns: &[("NAME", "/metadata/name"), ("TOTAL", "/status/usage/total"), ("USED", "/status/usage/used")],
};

/// Cilium's.
pub const GATEWAY_POLICY: TypedKind = TypedKind {
    resource: "ciliumegressgatewaypolicy",
    group: "cilium.io",
    collection: "/apis/cilium.io/v2/ciliumegressgatewaypolicies",
    columns: &[("NAME", "/metadata/name")],
};

/// What has become of it.
pub const GATEWAY_POLICY_STATUS: TypedKind = TypedKind {
    resource: "egressgatewaypolicystatus",
    group: "egress-agent.io",
    collection: "/apis/egress-agent.io/v1alpha1/egressgatewaypolicystatuses",
    columns: &[
        ("NAME", "/metadata/name"),
        ("GATEWAYS", "/status/nodes"),
        ("READY", "/status/conditions/1/status"),
        ("REASON", "/status/conditions/1/reason"),
    ],
};

impl KubeApi {
    pub fn has_kubectl() -> bool {
        kubectl::find().is_some()
    }

    /// Runs kubectl against the lab's API server and returns what it printed.
    pub fn kubectl(&self, args: &[&str]) -> Result<String> {
        let program = kubectl::find().context("kubectl is not installed")?;
        let mut command = Command::new(program);
        command.arg("--kubeconfig").arg(self.kubeconfig()).args(args);
        let output = command.output().context("cannot start kubectl")?;
        if !output.status.success() {
            bail!("kubectl {}: {}", args.join(" "), String::from_utf8_lossy(&output.stderr).trim());
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// `kubectl apply -f FILE` for one manifest of the kind.
    pub fn apply_file(&self, kind: &TypedKind, file: &Path) -> Result<String> {
        if Self::has_kubectl() {
            return self.kubectl(&["apply", "-f", &file.to_string_lossy()]);
        }
        let text = std::fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
        let object: Value = serde_yaml::from_str(&text)?;
        let done = if self.create(kind.collection, &object)? { "created" } else { "configured" };
        let name = object.pointer("/metadata/name").and_then(Value::as_str).unwrap_or_default();
        Ok(format!("{}.{}/{name} {done}\n", kind.resource, kind.group))
    }

    /// `kubectl delete RESOURCE NAME`.
    pub fn delete_named(&self, kind: &TypedKind, name: &str) -> Result<String> {
        if Self::has_kubectl() {
            return self.kubectl(&["delete", kind.resource, name]);
        }
        self.delete(&kind.path(name))?;
        Ok(format!("{}.{} \"{name}\" deleted\n", kind.resource, kind.group))
    }

    /// `kubectl label node NODE KEY=VALUE`, or `KEY-` where there is no value.
    pub fn label_node(&self, node: &str, key: &str, value: Option<&str>) -> Result<String> {
        if Self::has_kubectl() {
            let label = value.map_or_else(|| format!("{key}-"), |value| format!("{key}={value}"));
            return self.kubectl(&["label", "--overwrite", "node", node, &label]);
        }
        self.merge(&format!("/api/v1/nodes/{node}"), &json!({"metadata": {"labels": {key: value}}}))?;
        Ok(format!("node/{node} {}\n", if value.is_some() { "labeled" } else { "unlabeled" }))
    }

    /// `kubectl get RESOURCE`.
    pub fn listed(&self, kind: &TypedKind) -> Result<String> {
        if Self::has_kubectl() {
            return self.kubectl(&["get", kind.resource]);
        }
        let list = self.get(kind.collection)?.unwrap_or_default();
        let items = list.get("items").and_then(Value::as_array).cloned().unwrap_or_default();
        Ok(table(kind, &items))
    }

    pub fn object(&self, kind: &TypedKind, name: &str) -> Result<Option<Value>> {
        self.get(&kind.path(name))
    }

    pub fn egress_ip(&self, name: &str) -> Result<Option<Value>> {
        self.get(&format!("{EGRESS_IPS}/{name}"))
    }
}

/// The table that kubectl prints: like it, only the first of several values, and without the age.
fn table(kind: &TypedKind, items: &[Value]) -> String {
    let cell = |item: &Value, path: &str| match item.pointer(path) {
        Some(Value::String(text)) => text.clone(),
        Some(other) => other.to_string(),
        None => String::new(),
    };
    let columns = kind.columns.iter();
    let mut rows = vec![columns.clone().map(|(title, _)| (*title).to_owned()).collect::<Vec<_>>()];
    rows.extend(items.iter().map(|item| columns.clone().map(|(_, path)| cell(item, path)).collect()));
    aligned(&rows, "   ", |_| false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_reads_as_kubectls() {
        let item = json!({
            "metadata": {"name": "a"},
            "spec": {"egressIPs": ["172.18.0.100", "172.18.0.101"]},
            "status": {"items": [{"node": "node1", "egressIP": "172.18.0.100"}], "selectedPods": 2,
                       "conditions": [{"type": "Assigned", "reason": "Assigned"}, {"type": "Degraded", "status": "False"}]},
        });
        let expected = "NAME   EGRESSIPS      ASSIGNED NODE   ASSIGNED EGRESSIPS   SELECTED PODS   REASON     DEGRADED\n\
             a      172.18.0.100   node1           172.18.0.100         2               Assigned   False\n";
        assert_eq!(table(&EGRESS_IP, &[item]), expected);
    }
}
