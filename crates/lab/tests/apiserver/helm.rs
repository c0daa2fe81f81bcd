//! The chart in `deploy/helm`, as Helm itself renders it: equal to the overlays, object by object, and free of names.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::Path;
use std::process::{Command, Output};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::install::{ManifestCopy, deploy, documents, rendered, rendered_in};
use crate::server::{TestedServer, has_kubectl, is_real, skipped};

/// Names the program where it is not in `PATH`; `cargo xtask test` sets it.
const VARIABLE: &str = "EGRESS_TEST_HELM";

/// The values of a kind of cluster, its overlay, and that of its cleanup.
const CLUSTERS: [(&str, &str, &str); 3] = [
    ("ovn-kubernetes-kind", "overlays/ovn-kubernetes-kind", "overlays/cleanup-ovn-kubernetes-kind"),
    ("ovn-kubernetes-openshift", "overlays/ovn-kubernetes-openshift", "overlays/cleanup-openshift"),
    ("bridge-cni", "overlays/bridge-cni", "overlays/cleanup-bridge-cni"),
];

/// Everything that the chart can add, with a component of kustomize for each.
const ADDED: [(&str, &str); 7] = [
    ("antrea", "antrea.enabled=true"),
    ("cilium", "cilium.enabled=true"),
    ("egress-router/controller", "egressRouter.controller.enabled=true"),
    ("monitoring/operator", "monitoring.enabled=true"),
    ("aggregated-edit", "roles.aggregateEdit=true"),
    ("mount-bpffs", "bpffs.mount=true"),
    ("nat-log", "natLog.enabled=true"),
];

fn helm() -> OsString {
    std::env::var_os(VARIABLE).unwrap_or_else(|| "helm".into())
}

fn has_helm(test: &str) -> bool {
    let version = Command::new(helm()).arg("version").output();
    version.is_ok_and(|output| output.status.success()) || skipped(test, "helm is not here")
}

fn with_values(verb: &str, cluster: &str, arguments: &[&str]) -> Result<Output> {
    let chart = deploy().join("helm/egress-agent");
    let mut command = Command::new(helm());
    command.args(verb.split(' ')).arg(&chart).arg("--values").arg(chart.join(format!("clusters/{cluster}.yaml")));
    // Nothing of the user who runs this.
    for variable in ["HELM_CONFIG_HOME", "HELM_CACHE_HOME", "HELM_DATA_HOME"] {
        command.env(variable, Path::new(env!("CARGO_TARGET_TMPDIR")).join("helm"));
    }
    command.args(arguments).output().context("helm")
}

/// The objects of the release `egress-agent`, with these values.
fn templated(cluster: &str, set: &[&str], more: &[&str]) -> Result<Vec<Value>> {
    let mut arguments = vec!["--namespace", "egress-agent", "--set", "namespace.create=true"];
    arguments.extend(set.iter().flat_map(|one| ["--set", *one]));
    arguments.extend(more);
    let output = with_values("template egress-agent", cluster, &arguments)?;
    ensure!(output.status.success(), "{cluster}: {}", String::from_utf8_lossy(&output.stderr));
    documents(&String::from_utf8(output.stdout)?)
}

type RenderedObjects = BTreeMap<[String; 3], Value>;

/// By kind, namespace and name, in one form.
fn normal(objects: Vec<Value>) -> Result<RenderedObjects> {
    let mut all = RenderedObjects::new();
    for mut object in objects {
        forget(&mut object);
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let metadata = &object["metadata"];
        let key = [text(&object["kind"]), text(&metadata["namespace"]), text(&metadata["name"])];
        ensure!(all.insert(key.clone(), object).is_none(), "twice: {key:?}");
    }
    Ok(all)
}

/// What only one of the two has. kustomize's names of ConfigMaps end with a hash; the chart's pods have one as an annotation.
fn forget(object: &mut Value) {
    let kind = object["kind"].as_str().unwrap_or_default().to_owned();
    for of_helm in
        ["app.kubernetes.io/instance", "app.kubernetes.io/managed-by", "app.kubernetes.io/version", "helm.sh/chart"]
    {
        remove(object, "/metadata/labels", of_helm);
    }
    // The chart labels every object, kustomize those of its base.
    for common in ["app.kubernetes.io/name", "app.kubernetes.io/part-of"] {
        remove(object, "/metadata/labels", common);
    }
    remove(object, "/metadata/annotations", "helm.sh/resource-policy");
    remove(object, "/spec/template/metadata/annotations", "checksum/configuration");
    for empty in ["labels", "annotations"] {
        for place in ["/metadata", "/spec/template/metadata"] {
            if object.pointer(place).is_some_and(|one| one[empty] == json!({})) {
                remove(object, place, empty);
            }
        }
    }
    forget_hashes(object, kind == "ConfigMap");
}

fn remove(object: &mut Value, place: &str, key: &str) {
    if let Some(map) = object.pointer_mut(place).and_then(Value::as_object_mut) {
        map.remove(key);
    }
}

/// Also the order of lists whose entries have names, and how a whole number is written.
fn forget_hashes(value: &mut Value, is_map: bool) {
    match value {
        Value::Object(fields) => {
            let is_reference = is_map && fields.contains_key("name");
            for (key, field) in fields {
                let refers = is_reference && key == "name";
                if let (true, Some((base, _))) = (refers, field.as_str().and_then(without_hash)) {
                    *field = base.into();
                }
                forget_hashes(field, is_map || key == "configMapRef" || key == "configMap");
            }
        }
        Value::Array(entries) => {
            entries.iter_mut().for_each(|entry| forget_hashes(entry, false));
            if entries.iter().all(|entry| entry["name"].is_string()) {
                entries.sort_by_key(|entry| entry["name"].as_str().map(str::to_owned));
            }
        }
        Value::Number(number) => {
            if let Some(float) = number.as_f64() {
                *value = float.into();
            }
        }
        _ => {}
    }
}

/// `egress-agent-settings-hd24k7ddtf`.
fn without_hash(name: &str) -> Option<(&str, &str)> {
    let (base, hash) = name.rsplit_once('-')?;
    let is_hash = hash.len() == 10 && hash.chars().all(|one| one.is_ascii_digit() || one.is_ascii_lowercase());
    is_hash.then_some((base, hash))
}

/// Fails with the first field that differs.
fn compare(what: &str, chart: &RenderedObjects, overlay: &RenderedObjects) -> Result<()> {
    let only = |one: &RenderedObjects, other: &RenderedObjects| -> Vec<_> {
        one.keys().filter(|key| !other.contains_key(*key)).cloned().collect()
    };
    let (missing, superfluous) = (only(overlay, chart), only(chart, overlay));
    ensure!(missing.is_empty() && superfluous.is_empty(), "{what}: missing {missing:?}, superfluous {superfluous:?}");
    for (key, object) in overlay {
        let differs = difference(&chart[key], object, "");
        ensure!(differs.is_none(), "{what}: {key:?}: {}", differs.unwrap_or_default());
    }
    Ok(())
}

fn difference(chart: &Value, overlay: &Value, path: &str) -> Option<String> {
    match (chart, overlay) {
        (Value::Object(ours), Value::Object(theirs)) => {
            let mut keys: Vec<&String> = ours.keys().chain(theirs.keys()).collect();
            keys.sort();
            keys.dedup();
            keys.into_iter().find_map(|key| difference(&chart[key], &overlay[key], &format!("{path}.{key}")))
        }
        (Value::Array(ours), Value::Array(theirs)) if ours.len() == theirs.len() => {
            let pairs = ours.iter().zip(theirs).enumerate();
            pairs.into_iter().find_map(|(at, (ours, theirs))| difference(ours, theirs, &format!("{path}[{at}]")))
        }
        _ => (chart != overlay).then(|| format!("{path}: the chart has {chart}, kustomize {overlay}")),
    }
}

#[test]
fn chart_passes_lint() -> Result<()> {
    const NAME: &str = "chart_passes_lint";
    if !has_helm(NAME) {
        return Ok(());
    }
    for (cluster, ..) in CLUSTERS {
        let all = ADDED.map(|(_, set)| set).join(",");
        for set in ["cleanup.enabled=false", "cleanup.enabled=true", &all] {
            let output = with_values("lint --strict", cluster, &["--set", set])?;
            ensure!(output.status.success(), "{cluster}, {set}: {}", String::from_utf8_lossy(&output.stdout));
        }
    }
    Ok(())
}

#[test]
fn chart_equals_every_overlay() -> Result<()> {
    const NAME: &str = "chart_equals_every_overlay";
    if !has_helm(NAME) || !has_kubectl(NAME) {
        return Ok(());
    }
    for (cluster, overlay, cleanup) in CLUSTERS {
        let wanted = normal(documents(&rendered(overlay)?)?)?;
        compare(overlay, &normal(templated(cluster, &[], &[])?)?, &wanted)?;
        // The cleanup takes the place of the agents; all else stays until the release is removed.
        let mut cleaning = wanted;
        cleaning.retain(|[kind, ..], _| kind != "DaemonSet");
        cleaning.extend(normal(documents(&rendered(cleanup)?)?)?);
        compare(cleanup, &normal(templated(cluster, &["cleanup.enabled=true"], &[])?)?, &cleaning)?;
    }
    Ok(())
}

#[test]
fn chart_equals_every_component() -> Result<()> {
    const NAME: &str = "chart_equals_every_component";
    if !has_helm(NAME) || !has_kubectl(NAME) {
        return Ok(());
    }
    for (cluster, overlay, _) in CLUSTERS {
        for (component, set) in ADDED {
            let copied = ManifestCopy::new(NAME)?;
            let component_path = format!("../../{component}");
            copied.change(&format!("{overlay}/kustomization.yaml"), |one| {
                let mut components = one["components"].as_array().cloned().unwrap_or_default();
                if !components.contains(&json!(component_path)) {
                    components.push(component_path.clone().into());
                }
                one["components"] = components.into();
            })?;
            let wanted = normal(documents(&rendered_in(copied.folder(), overlay)?)?)?;
            compare(&format!("{overlay}, {component}"), &normal(templated(cluster, &[set], &[])?)?, &wanted)?;
        }
    }
    Ok(())
}

/// The CNI plugin egress-router, which the chart puts into its own namespace.
#[test]
fn chart_equals_the_manifests_of_the_egress_router() -> Result<()> {
    const NAME: &str = "chart_equals_the_manifests_of_the_egress_router";
    if !has_helm(NAME) || !has_kubectl(NAME) {
        return Ok(());
    }
    let cases = [
        ("egress-router/base", "cleanup.enabled=false"),
        ("egress-router/configmaps", "egressRouter.plugin.configMaps=true"),
        ("egress-router/cleanup", "cleanup.enabled=true"),
    ];
    for (folder, set) in cases {
        let mut wanted = documents(&rendered(folder)?)?;
        wanted.retain(|object| object["kind"] != "Namespace");
        // The networks of the overlay for a bridge CNI are those of this base.
        let mut found =
            templated("bridge-cni", &["egressRouter.plugin.enabled=true", set], &["--namespace", "egress-router"])?;
        found
            .retain(|object| object["metadata"]["name"].as_str().is_some_and(|name| name.starts_with("egress-router")));
        found.retain(|object| object["kind"] != "Namespace");
        compare(folder, &normal(found)?, &normal(wanted)?)?;
    }
    Ok(())
}

/// In an object of the release with these names, nothing has the names of the manifests.
#[test]
fn chart_has_no_names_of_its_own() -> Result<()> {
    const NAME: &str = "chart_has_no_names_of_its_own";
    if !has_helm(NAME) {
        return Ok(());
    }
    // What the programs assume: objects that they make themselves, in their namespace.
    const OF_PROGRAMS: [&str; 4] =
        ["egress-agent-leader", "egress-agent-hand-overs", "egress-agent-key", "egress-agent-metrics"];
    fn leftovers(value: &Value, path: &str, found: &mut Vec<String>) {
        let is_name = |text: &str| {
            let is_ours = text == "egress-agent"
                || text.starts_with("egress-agent-")
                || text.contains("serviceaccount:egress-agent");
            is_ours && !OF_PROGRAMS.contains(&text) || text == "egress-router"
        };
        match value {
            Value::String(text) if is_name(text) => found.push(format!("{path}: {text}")),
            Value::String(text) if text.contains(":egress-agent") && text.contains("serviceaccount") => {
                found.push(format!("{path}: {text}"))
            }
            Value::Array(entries) => entries.iter().for_each(|entry| leftovers(entry, path, found)),
            Value::Object(fields) => {
                for (key, field) in fields.iter().filter(|(key, _)| *key != "labels" && *key != "matchLabels") {
                    leftovers(field, &format!("{path}.{key}"), found);
                }
            }
            _ => {}
        }
    }
    let on = ADDED.map(|(_, set)| set).join(",");
    for (cluster, ..) in CLUSTERS {
        for cleanup in ["cleanup.enabled=false", "cleanup.enabled=true"] {
            let set = [on.as_str(), cleanup, "egressRouter.plugin.enabled=true", "egressRouter.plugin.configMaps=true"];
            let named = "fullnameOverride=zzname,egressRouter.plugin.name=zzrouter";
            let renamed = templated(cluster, &[&set[..], &[named]].concat(), &["--namespace", "zzspace"])?;
            for object in renamed
                .iter()
                .filter(|one| one["kind"] != "CustomResourceDefinition" && one["kind"] != "PrometheusRule")
            {
                let mut found = Vec::new();
                leftovers(object, "", &mut found);
                ensure!(found.is_empty(), "{cluster}: {} {}: {found:?}", object["kind"], object["metadata"]["name"]);
            }
            let text = serde_json::to_string(&renamed)?;
            let text = text
                .replace("zzname", "egress-agent")
                .replace("zzspace", "egress-agent")
                .replace("zzrouter", "egress-router");
            let usual = normal(templated(cluster, &set, &[])?)?;
            compare(cluster, &normal(serde_json::from_str(&text)?)?, &usual)?;
        }
    }
    Ok(())
}

#[test]
fn chart_refuses_what_it_cannot_mean() -> Result<()> {
    const NAME: &str = "chart_refuses_what_it_cannot_mean";
    if !has_helm(NAME) {
        return Ok(());
    }
    let by_schema = "values don't meet the specifications of the schema";
    let cases = [
        ("interfaces.managementPort=", "set interfaces.managementPort: ovn-k8s-mp0, or the bridge", ""),
        ("monitoring.enabled=true,metrics.exposed=false", "monitoring.enabled needs metrics.exposed", ""),
        ("controller.replicas=0", by_schema, "replicas"),
        ("uplink=eth0", by_schema, "uplink"),
        ("settings.EGRESS_AGENT_LEASE=5", by_schema, "EGRESS_AGENT_LEASE"),
        ("settings.LOG_LEVEL=debug", by_schema, "LOG_LEVEL"),
        ("networks.pods={10.0.0.1}", by_schema, "pods"),
        ("fullnameOverride=Springfield", by_schema, "fullnameOverride"),
    ];
    for (set, sentence, field) in cases {
        let output = with_values("template egress-agent", "bridge-cni", &["--set", set])?;
        let told = String::from_utf8_lossy(&output.stderr);
        ensure!(!output.status.success() && told.contains(sentence) && told.contains(field), "{set}: {told}");
    }
    Ok(())
}

#[test]
fn chart_sets_the_image_of_every_container() -> Result<()> {
    const NAME: &str = "chart_sets_the_image_of_every_container";
    if !has_helm(NAME) {
        return Ok(());
    }
    for (tag, wanted) in [("7", "registry.example/mine:7"), ("sha256:00ff", "registry.example/mine@sha256:00ff")] {
        for cleanup in ["cleanup.enabled=false", "cleanup.enabled=true"] {
            let set = ["image.repository=registry.example/mine,egressRouter.plugin.enabled=true", cleanup];
            let secret = "imagePullSecrets[0].name=flanders";
            let tag = format!("image.tag={tag}");
            let all = templated("bridge-cni", &[set[0], set[1], secret], &["--set-string", &tag])?;
            for pod in all.iter().filter_map(|one| one.pointer("/spec/template/spec")) {
                for container in ["containers", "initContainers"].iter().flat_map(|list| pod[list].as_array()).flatten()
                {
                    ensure!(container["image"] == wanted, "{cleanup}: {}", container["image"]);
                }
                ensure!(pod["imagePullSecrets"] == json!([{"name": "flanders"}]), "{cleanup}: {pod}");
            }
        }
    }
    Ok(())
}

/// A changed setting replaces the pods, another label of the chart does not.
#[test]
fn chart_replaces_pods_when_their_settings_change() -> Result<()> {
    const NAME: &str = "chart_replaces_pods_when_their_settings_change";
    if !has_helm(NAME) {
        return Ok(());
    }
    let pods = |set: &str| -> Result<Vec<Value>> {
        let all = templated("bridge-cni", &[set, "egressRouter.plugin.enabled=true"], &[])?;
        Ok(all.iter().map(|one| one["spec"]["template"].clone()).filter(|one| !one.is_null()).collect())
    };
    let usual = pods("image.pullPolicy=IfNotPresent")?;
    ensure!(usual.len() == 3, "agents, controllers and the plugin: {}", usual.len());
    let changed =
        |set: &str| -> Result<usize> { Ok(pods(set)?.iter().zip(&usual).filter(|(one, other)| one != other).count()) };
    ensure!(changed("settings.EGRESS_AGENT_ON_UNASSIGNED=drop")? == 2, "agents and controllers");
    ensure!(changed("agentConf=x")? == 2, "agents and controllers");
    ensure!(changed("networks.services={10.97.0.0/16}")? == 3, "all");
    ensure!(changed("roles.aggregateEdit=true")? == 0, "none");
    Ok(())
}

/// Installed, made a cleanup and removed, with names of its own. The server checks the types of the policies' expressions.
#[test]
fn chart_is_taken_by_a_real_server() -> Result<()> {
    const NAME: &str = "chart_is_taken_by_a_real_server";
    if !has_helm(NAME) || !has_kubectl(NAME) || !is_real(NAME) {
        return Ok(());
    }
    let server = TestedServer::start()?;
    server.kubectl("create namespace moes")?;
    let kubeconfig = server.kubeconfig().display().to_string();
    let release = ["--namespace", "moes", "--kubeconfig", &kubeconfig];
    let typed = |verb: &str, more: &[&str]| -> Result<()> {
        let output = with_values(verb, "bridge-cni", &[&release, more].concat())?;
        ensure!(output.status.success(), "{verb}: {}", String::from_utf8_lossy(&output.stderr));
        Ok(())
    };
    let kinds = "antrea.enabled=true,cilium.enabled=true,egressRouter.controller.enabled=true";
    let plugin = "egressRouter.plugin.enabled=true,egressRouter.plugin.configMaps=true";
    typed("install bar", &["--set", "fullnameOverride=tavern", "--set", kinds, "--set", plugin])?;
    let named = |line: &str| -> Result<Vec<String>> {
        let text = server.kubectl(&format!("get {line} --output name"))?;
        Ok(text.lines().filter_map(|line| line.split_once('/')).map(|(_, name)| name.to_owned()).collect())
    };
    let of_release = "--selector app.kubernetes.io/instance=bar";
    let policies = named(&format!("validatingadmissionpolicies {of_release}"))?;
    ensure!(policies.len() == 6, "{policies:?}");
    for name in &policies {
        let path = format!("get validatingadmissionpolicy {name} -o jsonpath={{.status.typeChecking}}");
        let warnings = server.kubectl(&path)?;
        ensure!(!warnings.contains("expressionWarnings"), "{name}: {warnings}");
    }
    let sets = || named("daemonsets,deployments --namespace moes");
    ensure!(sets()? == ["egress-router", "tavern", "tavern-controller"], "{:?}", sets()?);
    typed("upgrade bar", &["--reuse-values", "--set", "cleanup.enabled=true"])?;
    ensure!(sets()? == ["egress-router", "tavern-cleanup", "tavern-controller"], "{:?}", sets()?);
    let definitions = named(&format!("customresourcedefinitions {of_release}"))?;
    ensure!(definitions.len() == 9, "{definitions:?}");
    let output = Command::new(helm()).args(["uninstall", "bar"]).args(release).output()?;
    ensure!(output.status.success(), "uninstall: {}", String::from_utf8_lossy(&output.stderr));
    ensure!(sets()?.is_empty(), "{:?}", sets()?);
    let left = named(&format!("customresourcedefinitions {of_release}"))?;
    ensure!(left == definitions, "their objects would be lost: {left:?}");
    for kind in ["validatingadmissionpolicies", "clusterroles", "clusterrolebindings", "flowschemas"] {
        let left = named(&format!("{kind} {of_release}"))?;
        ensure!(left.is_empty(), "{kind}: {left:?}");
    }
    Ok(())
}
