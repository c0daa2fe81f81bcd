//! The manifests in `deploy/`: that they render, that a real API server takes them, and what its admission makes of the
//! agents' requests (`admission`). The double knows few of their kinds, so that all of it but the rendering needs the real thing.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::server::{TestedServer, has_kubectl, is_real};

pub(crate) const BRIDGE: &str = "overlays/bridge-cni";
const OPENSHIFT: &str = "overlays/ovn-kubernetes-openshift";
const CLEANUP: &str = "overlays/cleanup-bridge-cni";
const OVERLAYS: [&str; 6] = [
    BRIDGE,
    "overlays/ovn-kubernetes-kind",
    OPENSHIFT,
    "overlays/cleanup-openshift",
    "overlays/cleanup-ovn-kubernetes-kind",
    CLEANUP,
];

pub(crate) fn deploy() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy")
}

/// What kubectl makes of a folder.
pub(crate) fn rendered(folder: &str) -> Result<String> {
    rendered_in(&deploy(), folder)
}

pub(crate) fn rendered_in(deploy: &Path, folder: &str) -> Result<String> {
    let output = Command::new("kubectl").arg("kustomize").arg(deploy.join(folder)).output()?;
    ensure!(output.status.success(), "{folder}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8(output.stdout)?)
}

/// The manifests once more, to change them as administrators do.
pub(crate) struct ManifestCopy(PathBuf);

impl ManifestCopy {
    pub(crate) fn new(name: &str) -> Result<Self> {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}", std::process::id()));
        let copied = Command::new("cp").arg("-r").arg(deploy()).arg(&folder).status()?;
        ensure!(copied.success(), "cp to {}", folder.display());
        Ok(Self(folder))
    }

    pub(crate) fn folder(&self) -> &Path {
        &self.0
    }

    /// Of a file with one document.
    pub(crate) fn change(&self, path: &str, change: impl FnOnce(&mut Value)) -> Result<()> {
        let file = self.0.join(path);
        let mut document = documents(&fs::read_to_string(&file)?)?.remove(0);
        change(&mut document);
        // JSON is YAML.
        Ok(fs::write(file, document.to_string())?)
    }
}

impl Drop for ManifestCopy {
    fn drop(&mut self) {
        let _left = fs::remove_dir_all(&self.0);
    }
}

/// The containers of a DaemonSet or a Deployment.
fn containers(set: &Value) -> impl Iterator<Item = &Value> {
    let pod = &set["spec"]["template"]["spec"];
    pod["containers"].as_array().into_iter().chain(pod["initContainers"].as_array()).flatten()
}

/// Those that make pods: agents, controllers, those of a cleanup.
fn workloads(all: &[Value]) -> Result<Vec<&Value>> {
    let found: Vec<_> = all.iter().filter(|one| one["kind"] == "DaemonSet" || one["kind"] == "Deployment").collect();
    ensure!(found.iter().any(|one| one["kind"] == "DaemonSet"), "no DaemonSet");
    Ok(found)
}

/// Without the kinds that Kubernetes itself has not.
pub(crate) fn of_kubernetes(text: &str) -> String {
    let documents = text.split("---\n").filter(|one| !one.contains("kind: SecurityContextConstraints"));
    documents.collect::<Vec<_>>().join("---\n")
}

pub(crate) fn documents(text: &str) -> Result<Vec<Value>> {
    let documents = serde_yaml::Deserializer::from_str(text).map(Value::deserialize);
    documents.collect::<Result<_, _>>().context("YAML")
}

#[test]
fn every_overlay_renders() -> Result<()> {
    if !has_kubectl("every_overlay_renders") {
        return Ok(());
    }
    for folder in OVERLAYS {
        let all = documents(&rendered(folder)?)?;
        let maps: Vec<&str> = all
            .iter()
            .filter(|one| one["kind"] == "ConfigMap")
            .filter_map(|one| one["metadata"]["name"].as_str())
            .collect();
        let workloads = workloads(&all).context(folder)?;
        ensure!(folder.contains("cleanup") || workloads.len() == 2, "{folder}: agents and controllers");
        for set in workloads {
            let pod = &set["spec"]["template"]["spec"];
            for container in containers(set) {
                let image = container["image"].as_str().unwrap_or_default();
                ensure!(image.starts_with("localhost/egress-agent:"), "{folder}: no overlay sets the image {image}");
                // Controllers do not use bpf(2).
                let wants = folder.contains("openshift") && set["kind"] == "DaemonSet";
                let has = container.pointer("/securityContext/seLinuxOptions/type").is_some_and(|one| one == "spc_t");
                ensure!(has == wants, "{folder}: SELinux of {}", container["name"]);
            }
            let selects = set["spec"]["selector"]["matchLabels"] == selected(set);
            ensure!(selects, "{folder}: {} does not select its pods", set["metadata"]["name"]);
            for source in pod["containers"][0]["envFrom"].as_array().into_iter().flatten() {
                let name = source["configMapRef"]["name"].as_str().unwrap_or_default();
                ensure!(maps.contains(&name) && name != "egress-agent-settings", "{folder}: {name} among {maps:?}");
            }
        }
        let namespace = all.iter().find(|one| one["kind"] == "Namespace");
        let selector =
            namespace.and_then(|one| one.pointer("/metadata/annotations/openshift.io~1node-selector")?.as_str());
        let wanted = (folder == OPENSHIFT).then_some("");
        ensure!(selector == wanted, "{folder}: the node selector of the namespace is {selector:?}");
        let has = |name: &str| {
            all.iter().any(|one| one["kind"] == "CustomResourceDefinition" && one["metadata"]["name"] == name)
        };
        ensure!(
            has("egressips.k8s.ovn.org") == (folder == BRIDGE),
            "{folder}: OVN-Kubernetes brings its own definition"
        );
        let wanted = !folder.contains("cleanup");
        ensure!(has("egressnodes.egress-agent.io") == wanted, "{folder}: agents say what they have to say there");
    }
    Ok(())
}

/// The plugin, with a kubeconfig, and its removal.
const ROUTER: [&str; 3] = ["egress-router/base", "egress-router/configmaps", "egress-router/cleanup"];

#[test]
fn the_manifests_of_the_egress_router_render() -> Result<()> {
    if !has_kubectl("the_manifests_of_the_egress_router_render") {
        return Ok(());
    }
    for folder in ROUTER {
        let all = documents(&rendered(folder)?)?;
        let [set] = workloads(&all).context(folder)?[..] else { bail!("{folder}: one DaemonSet") };
        ensure!(set["spec"]["selector"]["matchLabels"] == selected(set), "{folder}: it does not select its pods");
        let mut lines = Vec::new();
        for container in containers(set) {
            let image = container["image"].as_str().unwrap_or_default();
            ensure!(image == "localhost/egress-agent:0.1.0", "{folder}: the image is {image}");
            ensure!(container["securityContext"]["capabilities"] == json!({"drop": ["ALL"]}), "{folder}: capabilities");
            lines.push(container["args"].clone());
        }
        let verb = if folder.ends_with("cleanup") { "uninstall" } else { "install" };
        ensure!(lines == [json!([verb, "--stay"]), json!([verb])], "{folder}: {lines:?}");
        let settings = all.iter().find(|one| one["kind"] == "ConfigMap").context("settings")?;
        let has_account = folder.ends_with("configmaps");
        ensure!((settings["data"]["EGRESS_ROUTER_KUBECONFIG"] == "true") == has_account, "{folder}: {settings}");
        let pod = &set["spec"]["template"]["spec"];
        ensure!(pod["automountServiceAccountToken"] == has_account, "{folder}: its token");
        let may_read = all.iter().filter(|one| one["kind"] == "ClusterRole").map(|one| one["rules"].clone());
        let may_read: Vec<Value> = may_read.collect();
        let wanted = json!([{"apiGroups": [""], "resources": ["configmaps"], "verbs": ["get"]}]);
        ensure!(may_read == vec![wanted; usize::from(has_account)], "{folder}: {may_read:?}");
    }
    Ok(())
}

/// What `kustomize edit set image egress-agent=...` writes into an overlay must be the image of all its containers.
#[test]
fn an_overlay_sets_the_image() -> Result<()> {
    const NAME: &str = "an_overlay_sets_the_image";
    if !has_kubectl(NAME) {
        return Ok(());
    }
    for folder in OVERLAYS {
        let copied = ManifestCopy::new(NAME)?;
        let image = json!([{"name": "egress-agent", "newName": "registry.example/mine", "newTag": "7"}]);
        copied.change(&format!("{folder}/kustomization.yaml"), |overlay| overlay["images"] = image)?;
        let all = documents(&rendered_in(&copied.0, folder)?)?;
        for container in workloads(&all)?.into_iter().flat_map(containers) {
            ensure!(container["image"] == "registry.example/mine:7", "{folder}: {}", container["image"]);
        }
    }
    Ok(())
}

/// A component installs the kinds of another API and makes the controllers serve them.
#[test]
fn components_add_kinds_and_settings() -> Result<()> {
    const NAME: &str = "components_add_kinds_and_settings";
    if !has_kubectl(NAME) {
        return Ok(());
    }
    let components: [(&str, &str, &str, &[&str]); 3] = [
        ("antrea", "EGRESS_AGENT_ANTREA", "true", &["egresses.crd.antrea.io", "externalippools.crd.antrea.io"]),
        (
            "cilium",
            "EGRESS_AGENT_CILIUM",
            "true",
            &["ciliumegressgatewaypolicies.cilium.io", "egressgatewaypolicystatuses.egress-agent.io"],
        ),
        (
            "egress-router/controller",
            "EGRESS_AGENT_EGRESS_ROUTER_IMAGE",
            "localhost/egress-agent:0.1.0",
            &["egressrouters.network.operator.openshift.io"],
        ),
    ];
    for folder in OVERLAYS.into_iter().filter(|folder| !folder.contains("cleanup")) {
        let copied = ManifestCopy::new(NAME)?;
        let names = components.map(|(name, ..)| format!("../../{name}"));
        copied.change(&format!("{folder}/kustomization.yaml"), |overlay| overlay["components"] = json!(names))?;
        let all = documents(&rendered_in(&copied.0, folder)?)?;
        let of_kind = |kind: &'static str| all.iter().filter(move |object| object["kind"] == kind);
        for (name, variable, value, kinds) in components {
            let is_set = of_kind("ConfigMap").any(|settings| settings["data"][variable] == value);
            ensure!(is_set, "{folder}: {name} does not set {variable}");
            for kind in kinds {
                let is_there = of_kind("CustomResourceDefinition").any(|one| one["metadata"]["name"] == *kind);
                ensure!(is_there, "{folder}: {name} does not install {kind}");
            }
        }
    }
    Ok(())
}

#[test]
fn an_overlay_leaves_what_others_say_of_the_namespace() -> Result<()> {
    const NAME: &str = "an_overlay_leaves_what_others_say_of_the_namespace";
    if !has_kubectl(NAME) {
        return Ok(());
    }
    let copied = ManifestCopy::new(NAME)?;
    copied.change("base/namespace.yaml", |one| one["metadata"]["annotations"] = json!({"example.org/ours": "yes"}))?;
    let all = documents(&rendered_in(&copied.0, OPENSHIFT)?)?;
    let namespace = all.iter().find(|one| one["kind"] == "Namespace").context("no namespace")?;
    let wanted = json!({"example.org/ours": "yes", "openshift.io/node-selector": ""});
    ensure!(namespace["metadata"]["annotations"] == wanted, "{}", namespace["metadata"]);
    Ok(())
}

/// The pods' labels, as far as the selector names them.
fn selected(set: &Value) -> Value {
    let mut labels = set["spec"]["template"]["metadata"]["labels"].clone();
    if let (Some(labels), Some(wanted)) = (labels.as_object_mut(), set["spec"]["selector"]["matchLabels"].as_object()) {
        labels.retain(|key, _| wanted.contains_key(key));
    }
    labels
}

/// Two sets in one namespace must not take each other's pods.
#[test]
fn cleanup_is_another_set() -> Result<()> {
    let selector = |path: &str| -> Result<Value> {
        let text = fs::read_to_string(deploy().join(path))?;
        Ok(documents(&text)?.remove(0)["spec"]["selector"]["matchLabels"].clone())
    };
    let (agents, cleanup) = (selector("base/daemonset.yaml")?, selector("cleanup/daemonset.yaml")?);
    let component = "app.kubernetes.io/component";
    ensure!(agents[component] == "agent" && cleanup[component] == "cleanup", "{agents} and {cleanup}");
    Ok(())
}

#[test]
fn a_real_server_takes_every_overlay() -> Result<()> {
    const NAME: &str = "a_real_server_takes_every_overlay";
    if !has_kubectl(NAME) || !is_real(NAME) {
        return Ok(());
    }
    let server = TestedServer::start()?;
    // A dry run makes no namespace for what is in it.
    for namespace in ["base/namespace.yaml", "egress-router/base/namespace.yaml"] {
        server.kubectl_with("apply -f -", &fs::read_to_string(deploy().join(namespace))?)?;
    }
    for folder in OVERLAYS.into_iter().chain(ROUTER) {
        let objects = of_kubernetes(&rendered(folder)?);
        let taken = server.kubectl_with("apply --dry-run=server --validate=strict -f -", &objects)?;
        ensure!(taken.lines().count() == documents(&objects)?.len(), "{folder}: {taken}");
    }
    let objects = rendered(BRIDGE)?;
    server.kubectl_with("apply -f -", &objects)?;
    let again = server.kubectl_with("apply -f -", &objects)?;
    // The patch strategy of a budget's selector is to replace it, so kubectl writes it each time; the diff below shows no change.
    let is_same = |line: &&str| line.ends_with(" unchanged") || line.starts_with("poddisruptionbudget.policy/");
    let changed: Vec<&str> = again.lines().filter(|line| !is_same(line)).collect();
    // The server completes what is not said in these, and kubectl compares with what it sent.
    ensure!(changed.is_empty(), "applying it again changes {changed:?}");
    server.kubectl_with("diff -f -", &objects)?;
    for policy in ["egressnodes", "egressips", "own-objects", "events", "controller-events"] {
        let path = format!("get validatingadmissionpolicy egress-agent-{policy} -o jsonpath={{.status.typeChecking}}");
        let warnings = server.kubectl(&path)?;
        ensure!(!warnings.contains("expressionWarnings"), "{policy}: {warnings}");
    }
    server.kubectl_with("apply -f -", &rendered(CLEANUP)?)?;
    server.kubectl_with("delete --wait=false -f -", &objects)?;
    Ok(())
}
