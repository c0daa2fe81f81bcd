//! What people type: real kubectl drives the product from the first label to the last delete. Without kubectl on the
//! machine there is nothing to show, and the test says so.

use std::fs::File;
use std::process::{Child, Command, Stdio};

use crate::prelude::*;
use egress_lab::kube_api::KubeApi;
use egress_lab::wait::REPORTED;
use egress_toolchain::{Paths, kubectl};

const OBJECT: &str = "egressip-simpson";
/// As `kubectl get egressip` has shown it to users of the original for years, and the count, the reason and the age.
const COLUMNS: &str = "NAME EGRESSIPS ASSIGNED NODE ASSIGNED EGRESSIPS SELECTED PODS REASON DEGRADED AGE";

pub(super) fn drives_everything(context: &LabContext) -> Result<()> {
    if !KubeApi::has_kubectl() {
        return Err(Skip("kubectl is not installed").into());
    }
    let pods = vec![pod("homer", "simpson", 1, &[]), pod("patty", "bouvier", 2, &[])];
    let cluster = TestCluster::start(context, pods)?;
    let watched = context.logs.join("watched");
    let watch = KubectlWatch::start(&cluster, &watched)?;
    assigned(&cluster)?;
    changed(&cluster)?;
    until_true("get -w shows both assignments", EFFECT, || {
        let rows = std::fs::read_to_string(&watched)?;
        let row = |address: &str| {
            rows.lines().any(|row| columns(row).starts_with(&format!("{OBJECT} {address} node2 {address}")))
        };
        Ok(row("172.18.0.100") && row("172.18.0.105"))
    })?;
    drop(watch);
    explained(&cluster)?;
    refused(&cluster, context)?;
    shows_no_difference(&cluster)?;
    type_in(&cluster, &["delete", "egressip", OBJECT])?;
    cluster.is_seen_as("homer", None, None)?;
    let rows = type_in(&cluster, &["get", "eip"])?;
    ensure!(rows.trim().is_empty(), "a deleted object is still shown: {rows}");
    Ok(())
}

fn type_in(cluster: &TestCluster, args: &[&str]) -> Result<String> {
    println!("$ kubectl {}", args.join(" "));
    let printed = cluster.api.kubectl(args)?;
    print!("{printed}");
    Ok(printed)
}

/// A line's words.
fn columns(line: &str) -> String {
    line.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn assigned(cluster: &TestCluster) -> Result<()> {
    type_in(cluster, &["label", "node", "node2", &format!("{ASSIGNABLE}=")])?;
    let example = Paths::find()?.root.join("deploy/examples/egressip-simpson.yaml");
    type_in(cluster, &["apply", "-f", &example.to_string_lossy()])?;
    becomes(cluster, "172.18.0.100")?;
    cluster.is_seen_as("homer", Some("172.18.0.100"), None)?;
    cluster.is_seen_as("patty", None, None)?;
    until_true("the table counts homer", REPORTED, || {
        let table = cluster.api.kubectl(&["get", "egressip"])?;
        let row = table.lines().nth(1).map(columns);
        let counted = format!("{OBJECT} 172.18.0.100 node2 172.18.0.100 1 Assigned ");
        Ok(row.is_some_and(|row| row.starts_with(&counted)))
    })
}

/// Waits until the table shows the address on node2.
fn becomes(cluster: &TestCluster, address: &str) -> Result<()> {
    let table = until(&format!("the table shows {address}"), EFFECT, || {
        let table = cluster.api.kubectl(&["get", "egressip"])?;
        let row = table.lines().nth(1).map(columns);
        let is_shown = row.is_some_and(|row| row.starts_with(&format!("{OBJECT} {address} node2 {address}")));
        Ok(is_shown.then_some(table))
    })?;
    print!("{table}");
    ensure!(table.lines().next().map(columns).as_deref() == Some(COLUMNS), "the columns are others");
    Ok(())
}

fn changed(cluster: &TestCluster) -> Result<()> {
    type_in(cluster, &["label", "--overwrite", "namespace", "bouvier", "house=simpson"])?;
    cluster.is_seen_as("patty", Some("172.18.0.100"), None)?;
    type_in(cluster, &["label", "--overwrite", "namespace", "bouvier", "house=bouvier"])?;
    cluster.is_seen_as("patty", None, None)?;
    patch(cluster, r#"["172.18.0.105"]"#)?;
    becomes(cluster, "172.18.0.105")?;
    cluster.is_seen_as("homer", Some("172.18.0.105"), None)
}

fn patch(cluster: &TestCluster, addresses: &str) -> Result<()> {
    let patch = format!(r#"{{"spec":{{"egressIPs":{addresses}}}}}"#);
    type_in(cluster, &["patch", "egressip", OBJECT, "--type", "merge", "-p", &patch]).map(drop)
}

/// `describe` shows events of an object only where they carry its UID.
fn explained(cluster: &TestCluster) -> Result<()> {
    patch(cluster, r#"["172.18.0.105", "172.18.0.2"]"#)?;
    let printed = until("describe shows the event", REPORTED, || {
        let printed = cluster.api.kubectl(&["describe", "egressip", OBJECT])?;
        let events = printed.split_once("Events:").map_or("", |(_, events)| events);
        Ok(events.contains("EgressIPConflict").then_some(printed))
    })?;
    println!("{printed}");
    ensure!(printed.contains("172.18.0.2") && printed.contains("PartiallyAssigned"), "the condition is not shown");
    cluster.is_seen_as("homer", Some("172.18.0.105"), None)
}

/// The API server refuses invalid objects with a message, and nothing changes.
fn refused(cluster: &TestCluster, context: &LabContext) -> Result<()> {
    let file = context.logs.join("bad-operator.yaml");
    std::fs::write(
        &file,
        format!(
            "apiVersion: k8s.ovn.org/v1\nkind: EgressIP\nmetadata: {{name: {OBJECT}}}\nspec:\n  egressIPs: [172.18.0.105]\n  \
             namespaceSelector:\n    matchExpressions:\n    - {{key: house, operator: Like, values: [simpson]}}\n"
        ),
    )?;
    for (bad, addresses) in [
        ("172.18.0.300", r#"["172.18.0.105", "172.18.0.300"]"#),
        ("172.18.0.106/16", r#"["172.18.0.106/16"]"#),
        ("eip", r#"["eip"]"#),
    ] {
        let refusal = patch(cluster, addresses).err();
        let refusal = format!("{:#}", refusal.with_context(|| format!("{bad} was taken for an address"))?);
        println!("{refusal}");
        ensure!(refusal.contains("spec.egressIPs[") && refusal.contains(bad), "the refusal does not name {bad}");
    }
    let refusal = type_in(cluster, &["apply", "-f", &file.to_string_lossy()]).err();
    let refusal = format!("{:#}", refusal.context("a selector with the operator Like was taken")?);
    println!("{refusal}");
    ensure!(refusal.contains("operator") && refusal.contains("Like"), "the refusal does not say what is wrong");
    cluster.is_seen_as("homer", Some("172.18.0.105"), None)
}

/// What the agent writes into an object is no difference to who keeps it as a file; `repository` has the rest of this.
fn shows_no_difference(cluster: &TestCluster) -> Result<()> {
    let example = Paths::find()?.root.join("deploy/examples/egressip-simpson.yaml");
    let path = example.to_string_lossy();
    let as_repository = |verb| [verb, "--server-side", "--force-conflicts", "--field-manager=repository", "-f", &*path];
    type_in(cluster, &as_repository("apply"))?;
    becomes(cluster, "172.18.0.100")?;
    type_in(cluster, &as_repository("diff")).map(drop)
}

/// `kubectl get egressip -w` until it is dropped.
struct KubectlWatch(Child);

impl KubectlWatch {
    fn start(cluster: &TestCluster, output: &Path) -> Result<Self> {
        let program = kubectl::find().context("kubectl has gone")?;
        let mut command = Command::new(program);
        command.arg("--kubeconfig").arg(cluster.api.kubeconfig()).args(["get", "egressip", "-w"]);
        command.stdin(Stdio::null()).stdout(File::create(output)?);
        Ok(Self(command.spawn().context("cannot start kubectl")?))
    }
}

impl Drop for KubectlWatch {
    fn drop(&mut self) {
        if let Err(error) = self.0.kill().and_then(|()| self.0.wait()) {
            eprintln!("lab: cannot end kubectl: {error}");
        }
    }
}
