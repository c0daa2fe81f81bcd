//! Objects of the lab in an API server that existed before and outlives the lab: they have its label, all other objects stay
//! untouched, and all of them are removed at the end, so that the next lab finds the server unchanged.
//!
//! A bare kube-apiserver has no controllers. There the lab finalizes namespaces itself.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use axum::http::Method;
use serde_json::{Value, json};

use super::{KubeApi, status_code};
use crate::api_objects::LEASE;
use crate::wait::poll;

/// On what a lab has made.
const LABEL: &str = "egress-agent-lab";
const CRDS: &str = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions";
/// How long a definition may take until its kind is served, or gone.
const PATIENCE: Duration = Duration::from_secs(20);
/// Held where there is a controller that ends namespaces, and how long that may take.
const CONTROLLERS: &str = "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases/kube-controller-manager";
const CONTROLLER: Duration = Duration::from_secs(60);

impl KubeApi {
    /// Installs a custom resource definition, unless there is one already, and waits until its kind is served.
    pub fn install_crd(&self, file: &Path) -> Result<()> {
        let text = std::fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
        let crd: Value = serde_yaml::from_str(&text).with_context(|| format!("{} is no manifest", file.display()))?;
        let texts = ["/metadata/name", "/spec/group", "/spec/names/plural", "/spec/versions/0/name"]
            .map(|path| crd.pointer(path).and_then(Value::as_str));
        let [Some(name), Some(group), Some(plural), Some(version)] = texts else {
            bail!("{} is no custom resource definition", file.display());
        };
        if !self.claim(CRDS, crd.clone())? {
            println!("the API server has {name} already: it is used as it is");
        }
        // Clients find a kind by discovery, which learns of it some moments after the kind is served.
        let served = |resources: &Value| {
            resources["resources"].as_array().is_some_and(|all| all.iter().any(|one| one["name"] == plural))
        };
        self.wait_for(&format!("/apis/{group}/{version}"), PATIENCE, served)?;
        let path = format!("/apis/{group}/{version}/{plural}");
        self.wait_for(&path, PATIENCE, |list| list.get("items").is_some()).map(drop)
    }

    /// Makes an object with the lab's label. One of that name which a lab has left is recreated, another's is not
    /// touched: false.
    pub(super) fn claim(&self, collection: &str, mut object: Value) -> Result<bool> {
        object["metadata"]["labels"][LABEL] = json!("true");
        let name = object.pointer("/metadata/name").and_then(Value::as_str).context("an object without a name")?;
        let path = format!("{collection}/{name}");
        if let Some(there) = self.get(&path)? {
            if there["metadata"]["labels"].get(LABEL).is_none() {
                return Ok(false);
            }
            self.remove(&path)?;
        }
        self.create(collection, &object).map(|_| true)
    }

    /// The same where nothing can be done with another's.
    pub(super) fn claim_alone(&self, collection: &str, object: Value) -> Result<()> {
        let name = object.pointer("/metadata/name").and_then(Value::as_str).unwrap_or_default().to_owned();
        let ours = self.claim(collection, object)?;
        ensure!(
            ours,
            "the API server has a {collection}/{name} that no lab has made; the lab needs a cluster to itself"
        );
        Ok(())
    }

    pub(super) fn remember(&self, path: String) {
        self.made.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push(path);
    }

    /// Deletes what the lab and its agents made, newest first, and waits until it is gone.
    pub fn remove_objects(&self) -> Result<()> {
        let made = std::mem::take(&mut *self.made.lock().unwrap_or_else(std::sync::PoisonError::into_inner));
        let mut errors: Vec<_> = self.remove_lease(&made).err().into_iter().collect();
        errors.extend(made.iter().rev().filter_map(|path| self.remove(path).err()));
        match errors.into_iter().next() {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }

    /// The leader's Lease, unless another's agent holds it.
    fn remove_lease(&self, made: &[String]) -> Result<()> {
        let Some(lease) = self.get(LEASE)? else { return Ok(()) };
        let holder = lease["spec"]["holderIdentity"].as_str().unwrap_or_default();
        let node = holder.split('_').next().unwrap_or_default();
        let ours = holder.is_empty() || made.contains(&format!("/api/v1/nodes/{node}"));
        if ours { self.delete(LEASE) } else { Ok(()) }
    }

    fn remove(&self, path: &str) -> Result<()> {
        self.delete(path)?;
        if path.starts_with(CRDS) {
            return self.wait_until_gone(path, PATIENCE);
        }
        let is_namespace = path.strip_prefix("/api/v1/namespaces/").is_some_and(|name| !name.contains('/'));
        if !is_namespace {
            return Ok(());
        }
        if self.get(CONTROLLERS)?.is_some() {
            return self.wait_until_gone(path, CONTROLLER);
        }
        let Some(mut namespace) = self.get(path)? else { return Ok(()) };
        namespace["spec"]["finalizers"] = json!([]);
        match self.request(&Method::PUT, &format!("{path}/finalize"), "application/json", &namespace) {
            Err(error) if !matches!(status_code(&error), Some(404 | 409)) => {
                Err(error).with_context(|| format!("cannot finalize {path}"))
            }
            _ => self.wait_until_gone(path, PATIENCE),
        }
    }

    fn wait_until_gone(&self, path: &str, patience: Duration) -> Result<()> {
        let gone = poll(patience, || Ok(self.get(path)?.is_none().then_some(())))?;
        gone.with_context(|| format!("{path} is still there after {} s", patience.as_secs()))
    }
}
