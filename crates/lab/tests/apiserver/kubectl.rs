//! What people type.

use std::io::{BufRead, BufReader};
use std::path::Path;

use anyhow::{Context, Result, ensure};
use tokio::runtime::Runtime;

use crate::objects::{DEFINITION, EGRESS_IP, are_served};
use crate::server::{TestedServer, has_controllers, has_kubectl, is_double};

const POD: &str = r#"
apiVersion: v1
kind: Pod
metadata: {name: web, namespace: prod, labels: {app: web}}
spec:
  nodeName: node1
  containers: [{name: c, image: "image:1", env: [{name: A, value: "1"}]}]
"#;
const NODE: &str = r#"
apiVersion: v1
kind: Node
metadata: {name: node1, labels: {node-role.kubernetes.io/worker: ""}}
status:
  addresses: [{type: InternalIP, address: 172.18.0.2}]
  conditions: [{type: Ready, status: "True"}]
  nodeInfo: {kubeletVersion: v1.32.0}
"#;
const NAMESPACE: &str = r#"{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "prod"}}"#;
const HEADER: &str = "NAME EGRESSIPS ASSIGNED NODE ASSIGNED EGRESSIPS";

/// A table row with single spaces.
fn row(table: &str, number: usize) -> String {
    let line = table.lines().nth(number).unwrap_or_default();
    line.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn with_egress_ip() -> Result<TestedServer> {
    let server = with_definition()?;
    server.kubectl_with("apply -f -", EGRESS_IP)?;
    Ok(server)
}

fn with_definition() -> Result<TestedServer> {
    let server = TestedServer::start()?;
    server.kubectl_with("apply -f -", DEFINITION)?;
    server.kubectl("wait --for=condition=Established crd/egressips.k8s.ovn.org")?;
    Runtime::new()?.block_on(async { are_served(server.client().await?).await })?;
    Ok(server)
}

#[test]
fn an_egress_ip_fills_its_columns() -> Result<()> {
    if !has_kubectl("an_egress_ip_fills_its_columns") {
        return Ok(());
    }
    let server = with_egress_ip()?;
    let table = server.kubectl("get egressip")?;
    assert_eq!(row(&table, 0), HEADER);
    assert_eq!(row(&table, 1), "eip-prod 172.18.0.100");
    let status = r#"{"status":{"items":[{"node":"node1","egressIP":"172.18.0.100"}]}}"#;
    server.kubectl(&format!("patch eip eip-prod --subresource=status --type=merge -p {status}"))?;
    let table = server.kubectl("get eip")?;
    assert_eq!(row(&table, 0), HEADER);
    assert_eq!(row(&table, 1), "eip-prod 172.18.0.100 node1 172.18.0.100");
    let described = server.kubectl("describe egressip eip-prod")?;
    assert!(described.contains("Node:       node1"), "{described}");
    assert!(server.kubectl("explain egressip.spec.egressIPs")?.contains("Addresses."));
    Ok(())
}

#[test]
fn apply_again_changes_what_differs() -> Result<()> {
    if !has_kubectl("apply_again_changes_what_differs") {
        return Ok(());
    }
    let server = with_egress_ip()?;
    let generation = "get eip eip-prod -o jsonpath={.metadata.generation}";
    assert!(server.kubectl_with("apply -f -", EGRESS_IP)?.contains("unchanged"));
    assert_eq!(server.kubectl(generation)?, "1");
    let changed = EGRESS_IP.replace("env: prod", "env: qa");
    assert!(server.kubectl_with("apply -f -", &changed)?.contains("configured"));
    assert_eq!(
        server.kubectl("get eip eip-prod -o jsonpath={.spec.namespaceSelector.matchLabels}")?,
        r#"{"env":"qa"}"#
    );
    assert_eq!(server.kubectl(generation)?, "2");
    server.kubectl("annotate eip eip-prod note=hello")?;
    server.kubectl("label eip eip-prod team=net")?;
    assert_eq!(server.kubectl(generation)?, "2", "metadata is not counted");
    let diff = server.kubectl_with("apply --dry-run=server -o yaml -f -", EGRESS_IP)?;
    assert!(diff.contains("env: prod") && diff.contains("note: hello"), "{diff}");
    assert!(server.kubectl("get eip eip-prod -o yaml")?.contains("env: qa"), "a dry run changes nothing");
    Ok(())
}

#[test]
fn unknown_and_wrong_fields_are_refused() -> Result<()> {
    if !has_kubectl("unknown_and_wrong_fields_are_refused") {
        return Ok(());
    }
    let server = with_egress_ip()?;
    let extra = EGRESS_IP.replace("  egressIPs", "  extra: 1\n  egressIPs").replace("eip-prod", "eip-new");
    let refusal = server.kubectl_fails("apply -f -", &extra)?;
    assert!(refusal.contains("strict decoding error: unknown field \"spec.extra\""), "{refusal}");
    server.kubectl_with("apply --validate=ignore -f -", &extra)?;
    assert!(!server.kubectl("get eip eip-new -o yaml --show-managed-fields")?.contains("    extra:"), "it is pruned");
    let wrong = EGRESS_IP.replace(r#"["172.18.0.100", "172.18.0.101"]"#, "one");
    let refusal = server.kubectl_fails("apply -f -", &wrong)?;
    assert!(refusal.contains("spec.egressIPs in body must be of type array"), "{refusal}");
    let many = EGRESS_IP.replace(r#"["172.18.0.100", "#, r#"["1", "2", "3", "4", "#);
    let refusal = server.kubectl_fails("apply -f -", &many)?;
    assert!(refusal.contains("Too many: 5: must have at most 4 items"), "{refusal}");
    Ok(())
}

#[test]
fn the_patch_types() -> Result<()> {
    if !has_kubectl("the_patch_types") {
        return Ok(());
    }
    let server = with_egress_ip()?;
    let addresses = "get eip eip-prod -o jsonpath={.spec.egressIPs[*]}";
    server.kubectl(r#"patch eip eip-prod --type=merge -p {"spec":{"egressIPs":["1.1.1.1"]}}"#)?;
    assert_eq!(server.kubectl(addresses)?, "1.1.1.1");
    server.kubectl(r#"patch eip eip-prod --type=json -p [{"op":"test","path":"/spec/egressIPs/0","value":"1.1.1.1"},{"op":"add","path":"/spec/egressIPs/-","value":"2.2.2.2"}]"#)?;
    assert_eq!(server.kubectl(addresses)?, "1.1.1.1 2.2.2.2");
    let failed = server
        .kubectl_fails(r#"patch eip eip-prod --type=json -p [{"op":"test","path":"/metadata/uid","value":"x"}]"#, "")?;
    assert!(failed.contains("the server rejected our request due to an error in our request"), "{failed}");
    let strategic = server.kubectl_fails(r#"patch eip eip-prod -p {"spec":{}}"#, "")?;
    assert!(strategic.contains("application/strategic-merge-patch+json is not supported"), "{strategic}");
    Ok(())
}

#[test]
fn server_side_apply_has_owners() -> Result<()> {
    if !has_kubectl("server_side_apply_has_owners") {
        return Ok(());
    }
    let server = with_definition()?;
    let apply = "apply --server-side -f -";
    assert!(server.kubectl_with(apply, EGRESS_IP)?.contains("serverside-applied"));
    let version = "get eip eip-prod -o jsonpath={.metadata.resourceVersion}";
    let before = server.kubectl(version)?;
    server.kubectl_with(apply, EGRESS_IP)?;
    assert_eq!(server.kubectl(version)?, before, "the same again is no write");
    let other = EGRESS_IP.replace("env: prod", "env: qa");
    let refusal = server.kubectl_fails(&format!("{apply} --field-manager=other"), &other)?;
    assert!(refusal.contains("conflict with \"kubectl\""), "{refusal}");
    assert!(refusal.contains(".spec.namespaceSelector.matchLabels.env"), "{refusal}");
    server.kubectl_with(&format!("{apply} --field-manager=other --force-conflicts"), &other)?;
    assert!(server.kubectl("get eip eip-prod -o yaml")?.contains("env: qa"));
    // Client-side first, then server-side: kubectl migrates the owners.
    server.kubectl_with("apply -f -", &EGRESS_IP.replace("eip-prod", "migrated"))?;
    server.kubectl_with(apply, &EGRESS_IP.replace("eip-prod", "migrated"))?;
    let owners =
        server.kubectl("get eip migrated -o jsonpath={.metadata.managedFields[*].manager} --show-managed-fields")?;
    assert!(!owners.contains("kubectl-client-side-apply"), "{owners}");
    Ok(())
}

#[test]
fn nodes_and_pods_as_people_know_them() -> Result<()> {
    if !has_kubectl("nodes_and_pods_as_people_know_them") {
        return Ok(());
    }
    let server = TestedServer::start()?;
    server.kubectl_with("create -f -", NODE)?;
    server.kubectl_with("create -f -", NAMESPACE)?;
    server.kubectl("label namespace prod env=prod")?;
    assert!(server.kubectl_with("apply -f -", POD)?.contains("created"));
    let nodes = server.kubectl("get nodes")?;
    assert!(row(&nodes, 1).starts_with("node1 Ready "), "{nodes}");
    server.kubectl("label node node1 k8s.ovn.org/egress-assignable=")?;
    assert!(server.kubectl("get node -l k8s.ovn.org/egress-assignable -o name")?.contains("node/node1"));
    let pods = server.kubectl("get pods -A -o wide")?;
    assert!(row(&pods, 1).starts_with("prod web ") && pods.contains(" Pending ") && pods.contains(" node1"), "{pods}");
    assert!(server.kubectl("describe node node1")?.contains("prod                        web"), "its pods by field");
    assert!(server.kubectl("describe pod web -n prod")?.contains("Node:         node1"));
    if !has_controllers("the end of a namespace") {
        return Ok(());
    }
    server.kubectl("delete namespace prod")?;
    assert_eq!(server.kubectl("get pods -A -o name")?, "", "the content goes along");
    let gone = server.kubectl_fails("get namespace prod", "")?;
    assert!(gone.contains("namespaces \"prod\" not found"), "{gone}");
    Ok(())
}

/// Of the double alone: it has neither the encoding nor the kinds of a cluster's workloads.
#[test]
fn what_the_double_lacks_is_one_sentence() -> Result<()> {
    const NAME: &str = "what_the_double_lacks_is_one_sentence";
    if !has_kubectl(NAME) || !is_double(NAME) {
        return Ok(());
    }
    let server = TestedServer::start()?;
    for line in ["create namespace own", "create secret generic own --from-literal=a=b", "create configmap own"] {
        let refusal = server.kubectl_fails(line, "")?;
        assert!(refusal.contains("add `--dry-run=client -o yaml | kubectl apply -f -`"), "{line}: {refusal}");
        let manifest = server.kubectl(&format!("{line} --dry-run=client -o yaml"))?;
        assert!(server.kubectl_with("apply -f -", &manifest)?.contains("created"), "{line}");
    }
    let deploy = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy");
    let refusal = server.kubectl_fails(&format!("apply -k {}/overlays/bridge-cni", deploy.display()), "")?;
    assert!(refusal.contains("this test server does not serve the kind"), "{refusal}");
    assert!(!refusal.contains("content type"), "{refusal}");
    Ok(())
}

#[test]
fn get_w_shows_changes() -> Result<()> {
    if !has_kubectl("get_w_shows_changes") {
        return Ok(());
    }
    let server = with_egress_ip()?;
    let mut watching = server.kubectl_command("get eip -w").spawn()?;
    let mut lines = BufReader::new(watching.stdout.take().context("kubectl has no output")?).lines();
    let mut next = || -> Result<String> { Ok(row(&lines.next().context("the watch ended")??, 0)) };
    assert_eq!(next()?, HEADER);
    assert_eq!(next()?, "eip-prod 172.18.0.100");
    server.kubectl(r#"patch eip eip-prod --type=merge -p {"spec":{"egressIPs":["3.3.3.3"]}}"#)?;
    assert_eq!(next()?, "eip-prod 3.3.3.3");
    server.kubectl_with("apply -f -", &EGRESS_IP.replace("eip-prod", "second"))?;
    assert_eq!(next()?, "second 172.18.0.100");
    watching.kill()?;
    watching.wait()?;
    server.kubectl("delete eip --all")?;
    let left = server.kubectl("get eip -o name")?;
    ensure!(left.is_empty(), "{left}");
    Ok(())
}

/// Events are found by the uid of their object.
const EVENT: &str = r#"
apiVersion: v1
kind: Event
metadata: {name: first, namespace: default}
involvedObject: {apiVersion: k8s.ovn.org/v1, kind: EgressIP, name: eip-prod, uid: UID}
type: Warning
reason: InvalidEgressIP
message: this is no address
source: {component: egress-agent}
"#;

#[test]
fn describe_and_events_show_events() -> Result<()> {
    if !has_kubectl("describe_and_events_show_events") {
        return Ok(());
    }
    let server = with_egress_ip()?;
    let uid = server.kubectl("get eip eip-prod -o jsonpath={.metadata.uid}")?;
    server.kubectl_with("create -f -", &EVENT.replace("UID", &uid))?;
    let described = server.kubectl("describe eip eip-prod")?;
    assert!(described.contains("InvalidEgressIP") && described.contains("this is no address"), "{described}");
    let events = server.kubectl("get events")?;
    assert!(row(&events, 1).contains("Warning InvalidEgressIP") && events.contains("this is no address"), "{events}");
    Ok(())
}

#[test]
fn a_definition_must_be_structural() -> Result<()> {
    if !has_kubectl("a_definition_must_be_structural") {
        return Ok(());
    }
    let server = TestedServer::start()?;
    let constant = DEFINITION.replace("description: Addresses.", "const: 1");
    let refusal = server.kubectl_fails("apply -f -", &constant)?;
    assert!(refusal.contains("strict decoding error: unknown field") && refusal.contains(".const"), "{refusal}");
    let untyped = DEFINITION.replace("minItems: 1, maxItems: 4, items: {type: string}, ", "");
    let refusal = server.kubectl_fails("apply -f -", &untyped)?;
    assert!(refusal.contains("properties[egressIPs].items: Required value"), "{refusal}");
    Ok(())
}
