//! What people type: real kubectl drives the product from the first label to the last delete. Without kubectl on the
//! machine there is nothing to show, and the test says so.

use std::fs::File;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::ground::{Ground, pod};
use super::objects::ASSIGNABLE;
use super::wait::{EFFECT, until};
use crate::lab::cluster::Cluster;
use crate::testing::lab::{LabContext, Skip};
use crate::toolchain::{Paths, packages};

const OBJECT: &str = "egressip-simpson";
/// As `kubectl get egressip` has shown it to users of the original for years.
const COLUMNS: &str = "NAME EGRESSIPS ASSIGNED NODE ASSIGNED EGRESSIPS";

pub(super) fn drives_everything(context: &LabContext) -> Result<()> {
    if !Cluster::has_kubectl() {
        return Err(Skip("kubectl is not installed").into());
    }
    let pods = vec![pod("homer", "simpson", 1, &[]), pod("patty", "bouvier", 2, &[])];
    let ground = Ground::start(context, pods)?;
    let watched = context.logs.join("watched");
    let watch = Watch::start(&ground, &watched)?;
    assigned(&ground)?;
    changed(&ground)?;
    until("get -w shows both assignments", EFFECT, || {
        let rows = std::fs::read_to_string(&watched)?;
        let row = |address: &str| rows.lines().any(|row| columns(row) == format!("{OBJECT} {address} node2 {address}"));
        Ok((row("172.18.0.100") && row("172.18.0.105")).then_some(()))
    })?;
    drop(watch);
    explained(&ground)?;
    refused(&ground, context)?;
    kept_by_two_hands(&ground, context)?;
    type_in(&ground, &["delete", "egressip", OBJECT])?;
    ground.is_seen_as("homer", None, None)?;
    let rows = type_in(&ground, &["get", "eip"])?;
    ensure!(rows.trim().is_empty(), "a deleted object is still shown: {rows}");
    Ok(())
}

fn type_in(ground: &Ground, args: &[&str]) -> Result<String> {
    println!("$ kubectl {}", args.join(" "));
    let said = ground.cluster.kubectl(args)?;
    print!("{said}");
    Ok(said)
}

/// The words of a line.
fn columns(line: &str) -> String {
    line.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn assigned(ground: &Ground) -> Result<()> {
    type_in(ground, &["label", "node", "node2", &format!("{ASSIGNABLE}=")])?;
    let example = Paths::find()?.root.join("deploy/examples/egressip-simpson.yaml");
    type_in(ground, &["apply", "-f", &example.to_string_lossy()])?;
    becomes(ground, "172.18.0.100")?;
    ground.is_seen_as("homer", Some("172.18.0.100"), None)?;
    ground.is_seen_as("patty", None, None)
}

/// Waits until the table shows the address on node2.
fn becomes(ground: &Ground, address: &str) -> Result<()> {
    let table = until(&format!("the table shows {address}"), EFFECT, || {
        let table = ground.cluster.kubectl(&["get", "egressip"])?;
        let row = table.lines().nth(1).map(columns);
        Ok((row == Some(format!("{OBJECT} {address} node2 {address}"))).then_some(table))
    })?;
    print!("{table}");
    ensure!(table.lines().next().map(columns).as_deref() == Some(COLUMNS), "the columns are others");
    Ok(())
}

fn changed(ground: &Ground) -> Result<()> {
    type_in(ground, &["label", "--overwrite", "namespace", "bouvier", "house=simpson"])?;
    ground.is_seen_as("patty", Some("172.18.0.100"), None)?;
    type_in(ground, &["label", "--overwrite", "namespace", "bouvier", "house=bouvier"])?;
    ground.is_seen_as("patty", None, None)?;
    patch(ground, r#"["172.18.0.105"]"#)?;
    becomes(ground, "172.18.0.105")?;
    ground.is_seen_as("homer", Some("172.18.0.105"), None)
}

fn patch(ground: &Ground, addresses: &str) -> Result<()> {
    let patch = format!(r#"{{"spec":{{"egressIPs":{addresses}}}}}"#);
    type_in(ground, &["patch", "egressip", OBJECT, "--type", "merge", "-p", &patch]).map(drop)
}

/// `describe` shows events of an object only where they carry its UID.
fn explained(ground: &Ground) -> Result<()> {
    patch(ground, r#"["172.18.0.105", "172.18.0.300"]"#)?;
    let said = until("describe shows the event", EFFECT, || {
        let said = ground.cluster.kubectl(&["describe", "egressip", OBJECT])?;
        let events = said.split_once("Events:").map_or("", |(_, events)| events);
        Ok(events.contains("InvalidEgressIP").then_some(said))
    })?;
    println!("{said}");
    ensure!(said.contains("172.18.0.300") && said.contains("PartiallyAssigned"), "the condition is not shown");
    ground.is_seen_as("homer", Some("172.18.0.105"), None)
}

/// What no reader could mean is refused by the API server, in words, and changes nothing.
fn refused(ground: &Ground, context: &LabContext) -> Result<()> {
    let file = context.logs.join("bad-operator.yaml");
    std::fs::write(
        &file,
        format!(
            "apiVersion: k8s.ovn.org/v1\nkind: EgressIP\nmetadata: {{name: {OBJECT}}}\nspec:\n  egressIPs: [172.18.0.105]\n  \
             namespaceSelector:\n    matchExpressions:\n    - {{key: house, operator: Like, values: [simpson]}}\n"
        ),
    )?;
    let refusal = type_in(ground, &["apply", "-f", &file.to_string_lossy()]).err();
    let refusal = format!("{:#}", refusal.context("a selector with the operator Like was taken")?);
    println!("{refusal}");
    ensure!(refusal.contains("operator") && refusal.contains("Like"), "the refusal does not say what is wrong");
    ground.is_seen_as("homer", Some("172.18.0.105"), None)
}

/// A tool that keeps objects as a repository has them: it applies by the server, as a manager of its own, again and again.
/// What the agent writes stays, and is no difference to the tool; what the tool deletes is gone and comes anew.
fn kept_by_two_hands(ground: &Ground, context: &LabContext) -> Result<()> {
    const ADDRESS: &str = "172.18.0.107";
    let file = context.logs.join("kept.yaml");
    let object = |label: &str| {
        format!(
            "apiVersion: k8s.ovn.org/v1\nkind: EgressIP\nmetadata: {{name: kept, labels: {{team: {label}}}}}\nspec:\n  \
             egressIPs: [{ADDRESS}]\n  namespaceSelector: {{matchLabels: {{kubernetes.io/metadata.name: bouvier}}}}\n"
        )
    };
    let path = file.to_string_lossy().into_owned();
    let apply = || type_in(ground, &["apply", "--server-side", "--field-manager=repository", "-f", &path]).map(drop);
    let read = || {
        let text = ground.cluster.kubectl(&["get", "egressip", "kept", "-o", "json", "--show-managed-fields"])?;
        Ok::<Value, anyhow::Error>(serde_json::from_str(&text)?)
    };
    let assigned = || {
        until("the agent has written its part", EFFECT, || {
            let object = read()?;
            let condition = object.pointer("/status/conditions/0/observedGeneration");
            let items = object.pointer("/status/items/0/egressIP").is_some_and(|one| one == ADDRESS);
            let number = object.pointer("/metadata/annotations/k8s.ovn.org~1egressip-tunnel-id");
            let done = items && number.is_some() && condition == object.pointer("/metadata/generation");
            Ok(done.then_some(object))
        })
    };
    std::fs::write(&file, object("a"))?;
    apply()?;
    let written = assigned()?;
    ground.is_seen_as("patty", Some(ADDRESS), None)?;
    for _ in 0..3 {
        apply()?;
        type_in(ground, &["diff", "--server-side", "--field-manager=repository", "-f", &path])?;
        ensure!(read()? == written, "the two write over each other: {}, it was {written}", read()?);
    }
    std::fs::write(&file, object("b"))?;
    apply()?;
    let (now, mut expected) = (read()?, written);
    expected["metadata"]["labels"]["team"] = json!("b");
    for field in ["spec", "status"] {
        ensure!(now[field] == expected[field], "{field} has become {}", now[field]);
    }
    ensure!(now["metadata"]["annotations"] == expected["metadata"]["annotations"], "{}", now["metadata"]);
    let managers = now.pointer("/metadata/managedFields").and_then(Value::as_array).context("no managers")?;
    for manager in managers {
        let (name, fields) = (manager["manager"].as_str().unwrap_or_default(), manager["fieldsV1"].to_string());
        let (ours, theirs) =
            (fields.contains("egressip-tunnel-id") || fields.contains("f:status"), fields.contains("f:spec"));
        ensure!((name == "egress-agent" && !theirs) || (name == "repository" && !ours), "{name} has {fields}");
    }
    type_in(ground, &["delete", "egressip", "kept"])?;
    ground.is_seen_as("patty", None, None)?;
    apply()?;
    assigned()?;
    ground.is_seen_as("patty", Some(ADDRESS), None)?;
    type_in(ground, &["delete", "egressip", "kept"]).map(drop)
}

/// `kubectl get egressip -w` until it is dropped.
struct Watch(Child);

impl Watch {
    fn start(ground: &Ground, output: &Path) -> Result<Self> {
        let program = packages::find("kubectl").context("kubectl has gone")?;
        let mut command = Command::new(program);
        command.arg("--kubeconfig").arg(ground.cluster.kubeconfig()).args(["get", "egressip", "-w"]);
        command.stdin(Stdio::null()).stdout(File::create(output)?);
        Ok(Self(command.spawn().context("cannot start kubectl")?))
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        if let Err(error) = self.0.kill().and_then(|()| self.0.wait()) {
            eprintln!("lab: cannot end kubectl: {error}");
        }
    }
}
