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

    /// `kubectl apply -f FILE` for one EgressIP manifest.
    pub fn apply_egress_ip(&self, file: &Path) -> Result<String> {
        if Self::has_kubectl() {
            return self.kubectl(&["apply", "-f", &file.to_string_lossy()]);
        }
        let text = std::fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
        let object: Value = serde_yaml::from_str(&text)?;
        let done = if self.create(EGRESS_IPS, &object)? { "created" } else { "configured" };
        let name = object.pointer("/metadata/name").and_then(Value::as_str).unwrap_or_default();
        Ok(format!("egressip.k8s.ovn.org/{name} {done}\n"))
    }

    /// `kubectl delete egressip NAME`.
    pub fn delete_egress_ip(&self, name: &str) -> Result<String> {
        if Self::has_kubectl() {
            return self.kubectl(&["delete", "egressip", name]);
        }
        self.delete(&format!("{EGRESS_IPS}/{name}"))?;
        Ok(format!("egressip.k8s.ovn.org \"{name}\" deleted\n"))
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

    /// `kubectl get egressip`.
    pub fn egress_ip_table(&self) -> Result<String> {
        if Self::has_kubectl() {
            return self.kubectl(&["get", "egressip"]);
        }
        let list = self.get(EGRESS_IPS)?.unwrap_or_default();
        let items = list.get("items").and_then(Value::as_array).cloned().unwrap_or_default();
        Ok(table(&items))
    }

    pub fn egress_ip(&self, name: &str) -> Result<Option<Value>> {
        self.get(&format!("{EGRESS_IPS}/{name}"))
    }
}

/// The table that kubectl prints for EgressIP objects: like it, only the first of several values.
fn table(items: &[Value]) -> String {
    let header = ["NAME", "EGRESSIPS", "ASSIGNED NODE", "ASSIGNED EGRESSIPS", "SELECTED PODS"].map(str::to_owned);
    let paths = [
        "/metadata/name",
        "/spec/egressIPs/0",
        "/status/items/0/node",
        "/status/items/0/egressIP",
        "/status/selectedPods",
    ];
    let cell = |item: &Value, path: &str| match item.pointer(path) {
        Some(Value::String(text)) => text.clone(),
        Some(other) => other.to_string(),
        None => String::new(),
    };
    let mut rows = vec![header];
    rows.extend(items.iter().map(|item| paths.map(|path| cell(item, path))));
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
            "status": {"items": [{"node": "node1", "egressIP": "172.18.0.100"}], "selectedPods": 2},
        });
        let expected = "NAME   EGRESSIPS      ASSIGNED NODE   ASSIGNED EGRESSIPS   SELECTED PODS\n\
                        a      172.18.0.100   node1           172.18.0.100         2\n";
        assert_eq!(table(&[item]), expected);
    }
}
