//! The accounts of agents and controllers, with the rights of `deploy/base/rbac.yaml` as it is shipped, and of controllers those for
//! EgressRouters too: a missing right shows in the lab first. Only the namespace differs, one that every cluster has: a namespace
//! that the lab made could not be removed again from a server without controllers.
//!
//! ```text
//! rbac.yaml --create--> accounts, roles, bindings --TokenRequest--> tokens --> the nodes' kubeconfigs
//! ```

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use axum::http::Method;
use egress_toolchain::Paths;
use serde::Deserialize;
use serde_json::{Value, json};

use super::{KubeApi, kubeconfig};
use crate::wait::poll;

/// The namespaces of the accounts as they are shipped, and in the lab.
const SHIPPED: [&str; 2] = ["namespace: egress-agent\n", "namespace: egress-router\n"];
const HERE: &str = "namespace: kube-system\n";
/// An API server makes it some moments after it is ready.
const NAMESPACE: &str = "/api/v1/namespaces/kube-system";
const ACCOUNTS: &str = "/api/v1/namespaces/kube-system/serviceaccounts";
/// Longer than a lab is held. A server may grant less, which only the token shows.
const LIFETIME_SECONDS: u32 = 24 * 3600;
/// How long it may take until the server knows a binding that it was given.
const PATIENCE: Duration = Duration::from_secs(10);

impl KubeApi {
    /// Makes the accounts with their rights, and the nodes' kubeconfigs ones with their tokens.
    pub(super) fn restrict_agents(&self, manifests: &[PathBuf]) -> Result<()> {
        self.introduce(manifests)?;
        for (account, file) in [("egress-agent", &self.for_nodes), ("egress-agent-controller", &self.for_controllers)] {
            let token = self.token(account)?;
            self.wait_until_granted(&token, "/api/v1/nodes?limit=1")?;
            kubeconfig::authenticate(file, &token)?;
        }
        Ok(())
    }

    /// Writes a kubeconfig for the nodes with the rights of the egress router, as its manifest grants them.
    pub fn router_kubeconfig(&self, file: &Path) -> Result<()> {
        let manifest = Paths::find()?.root.join("deploy/egress-router/configmaps/rbac.yaml");
        self.introduce(&[manifest])?;
        let token = self.token("egress-router")?;
        self.wait_until_granted(&token, "/api/v1/namespaces/default/configmaps/none")?;
        std::fs::copy(&self.for_nodes, file)?;
        kubeconfig::authenticate(file, &token)
    }

    /// Makes what is in the manifests.
    fn introduce(&self, manifests: &[PathBuf]) -> Result<()> {
        self.wait_for(NAMESPACE, PATIENCE, |_| true)?;
        for manifest in manifests {
            let text = std::fs::read_to_string(manifest);
            let mut text = text.with_context(|| format!("cannot read {}", manifest.display()))?;
            for shipped in SHIPPED {
                text = text.replace(shipped, HERE);
            }
            for document in serde_yaml::Deserializer::from_str(&text) {
                let object = Value::deserialize(document)?;
                let collection = collection(&object).with_context(|| format!("no path for {object}"))?;
                self.claim(&collection, object)?;
            }
        }
        Ok(())
    }

    fn token(&self, account: &str) -> Result<String> {
        let request = json!({
            "apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest",
            "spec": {"expirationSeconds": LIFETIME_SECONDS},
        });
        let path = format!("{ACCOUNTS}/{account}/token");
        let answer = self.request(&Method::POST, &path, "application/json", &request)?;
        let token = answer.pointer("/status/token").and_then(Value::as_str).context("the server gave no token")?;
        Ok(token.to_owned())
    }

    /// Asks for something that the account may read, whether or not it exists.
    fn wait_until_granted(&self, token: &str, path: &str) -> Result<()> {
        let file = self.for_people.with_extension("probe");
        std::fs::copy(&self.for_people, &file)?;
        kubeconfig::authenticate(&file, token)?;
        let client = self.runtime.block_on(kubeconfig::client(&file))?;
        let granted = poll(PATIENCE, || {
            let request = axum::http::Request::get(path).body(Vec::new())?;
            let answer = self.runtime.block_on(client.request::<Value>(request));
            let is_granted = match answer {
                Err(kube::Error::Api(status)) => status.code == 404,
                answer => answer.is_ok(),
            };
            Ok(is_granted.then_some(()))
        })?;
        ensure!(granted.is_some(), "the account may not read {path}");
        Ok(std::fs::remove_file(&file)?)
    }
}

/// Where objects like this one are created.
fn collection(object: &Value) -> Option<String> {
    let group = match object.get("apiVersion")?.as_str()? {
        "v1" => "/api/v1".to_owned(),
        version => format!("/apis/{version}"),
    };
    let namespace = object.pointer("/metadata/namespace").and_then(Value::as_str);
    let namespace = namespace.map(|name| format!("/namespaces/{name}")).unwrap_or_default();
    // True of every kind in the manifest.
    let plural = object.get("kind")?.as_str()?.to_lowercase() + "s";
    Some(format!("{group}{namespace}/{plural}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_paths_of_what_rights_are_made_of() {
        let path = |version: &str, kind: &str, namespace: Option<&str>| {
            collection(&json!({"apiVersion": version, "kind": kind, "metadata": {"namespace": namespace}}))
        };
        let rbac = "rbac.authorization.k8s.io/v1";
        let expected = "/api/v1/namespaces/kube-system/serviceaccounts";
        assert_eq!(path("v1", "ServiceAccount", Some("kube-system")).as_deref(), Some(expected));
        let expected = "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings";
        assert_eq!(path(rbac, "ClusterRoleBinding", None).as_deref(), Some(expected));
        let expected = "/apis/rbac.authorization.k8s.io/v1/namespaces/default/roles";
        assert_eq!(path(rbac, "Role", Some("default")).as_deref(), Some(expected));
    }
}
