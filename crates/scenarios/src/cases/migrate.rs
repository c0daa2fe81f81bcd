//! `egress-agent migrate`: objects of Antrea that nothing serves become EgressIPs, by a dry run first, and are served.

use std::process::{Command, Output, Stdio};

use crate::prelude::*;

const POOLS: &str = "/apis/crd.antrea.io/v1beta1/externalippools";
const EGRESSES: &str = "/apis/crd.antrea.io/v1beta1/egresses";
const V4: &str = "172.18.0.110";

pub(super) fn egresses_become_egress_ips(context: &LabContext) -> Result<()> {
    let pods = vec![pod("web", "shop", 1, &[("app", "web")]), pod("plain", "shop", 2, &[])];
    let cluster = TestCluster::start(context, pods)?;
    cluster.assignable(2, true)?;
    let pool = json!({
        "apiVersion": "crd.antrea.io/v1beta1", "kind": "ExternalIPPool", "metadata": {"name": "external"},
        "spec": {
            "ipRanges": [{"start": V4, "end": V4}], "nodeSelector": {},
            "subnetInfo": {"gateway": "172.18.0.1", "prefixLength": 16, "vlan": 7},
        },
    });
    cluster.api.create(POOLS, &pool)?;
    let egress = json!({
        "apiVersion": "crd.antrea.io/v1beta1", "kind": "Egress", "metadata": {"name": "web"},
        "spec": {"appliedTo": {"podSelector": labels("app", "web")}, "egressIP": V4, "externalIPPool": "external"},
    });
    cluster.api.create(EGRESSES, &egress)?;
    println!("nothing serves it, and a dry run writes nothing");
    let to_egress_ip = ["--from", "antrea", "--to", "ovn-kubernetes"];
    let printed = migrate(context, &cluster, &to_egress_ip)?;
    ensure!(printed.status.success(), "it failed");
    let text = String::from_utf8_lossy(&printed.stdout).into_owned();
    for words in ["kind: EgressIP", V4, "# - loses: the VLAN of ExternalIPPool external"] {
        ensure!(text.contains(words), "no {words:?}");
    }
    ensure!(cluster.api.get(&format!("{EGRESS_IPS}/web"))?.is_none(), "it was written");
    println!("what would be lost is not written without a word");
    let refused = migrate(context, &cluster, &[&to_egress_ip[..], &["--apply"]].concat())?;
    let why = String::from_utf8_lossy(&refused.stderr).into_owned();
    ensure!(refused.status.code() == Some(1) && why.contains("--accept-losses"), "{why}");
    ensure!(cluster.api.get(&format!("{EGRESS_IPS}/web"))?.is_none(), "it was written");
    let written = migrate(context, &cluster, &[&to_egress_ip[..], &["--apply", "--accept-losses"]].concat())?;
    ensure!(written.status.success(), "it failed");
    cluster.is_seen_as("web", Some(V4), None)?;
    cluster.is_seen_as("plain", None, None)?;
    println!("again, it changes nothing");
    let before = cluster.api.get(&format!("{EGRESS_IPS}/web"))?.context("no object")?;
    let again = migrate(context, &cluster, &[&to_egress_ip[..], &["--apply", "--accept-losses"]].concat())?;
    ensure!(again.status.success(), "it failed");
    let after = cluster.api.get(&format!("{EGRESS_IPS}/web"))?.context("no object")?;
    ensure!(before["spec"] == after["spec"] && before["metadata"]["uid"] == after["metadata"]["uid"], "{after}");
    println!("and back, as the EgressIPs of the cluster");
    let back = migrate(context, &cluster, &["--to", "antrea"])?;
    let text = String::from_utf8_lossy(&back.stdout).into_owned();
    ensure!(
        back.status.success() && text.contains("kind: ExternalIPPool") && text.contains("kind: Egress\n"),
        "{text}"
    );
    println!("an object of another writer with another content is a conflict");
    cluster.api.merge(&format!("{EGRESS_IPS}/web"), &json!({"spec": {"egressIPs": ["172.18.0.111"]}}))?;
    let conflict = migrate(context, &cluster, &[&to_egress_ip[..], &["--apply", "--accept-losses"]].concat())?;
    let why = String::from_utf8_lossy(&conflict.stderr).into_owned();
    ensure!(conflict.status.code() == Some(1) && why.contains("EgressIP web"), "{why}");
    Ok(())
}

fn migrate(context: &LabContext, cluster: &TestCluster, arguments: &[&str]) -> Result<Output> {
    let arguments = [&["migrate"], arguments].concat();
    let mut command = Command::new(&context.built.agent);
    // As kubectl finds it.
    command.args(&arguments).env("KUBECONFIG", cluster.api.kubeconfig());
    let output = command.stdin(Stdio::null()).output()?;
    let text = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes).into_owned()).concat();
    println!("migrate {}: {}\n{text}", arguments[1..].join(" "), output.status);
    Ok(output)
}
