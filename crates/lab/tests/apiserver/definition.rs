//! What the shipped definition of EgressIP refuses, with the messages that people read. The double knows the schema and not the
//! language of its rules, so that a real API server says these.

use std::fs;
use std::path::Path;

use anyhow::{Result, ensure};
use serde_json::{Value, json};

use crate::server::{TestedServer, has_kubectl, is_real};

fn object(spec: &Value) -> Value {
    json!({"apiVersion": "k8s.ovn.org/v1", "kind": "EgressIP", "metadata": {"name": "eip"}, "spec": spec})
}

/// With one expression for the namespaces.
fn selecting(expression: &Value) -> Value {
    object(&json!({"egressIPs": ["172.18.0.100"], "namespaceSelector": {"matchExpressions": [expression]}}))
}

#[test]
fn refusals_are_sentences() -> Result<()> {
    const NAME: &str = "refusals_are_sentences";
    if !has_kubectl(NAME) || !is_real(NAME) {
        return Ok(());
    }
    let server = TestedServer::start()?;
    let definition = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/crd/crd.yaml");
    server.kubectl_with("apply -f -", &fs::read_to_string(definition)?)?;
    server.kubectl("wait --for=condition=Established crd/egressips.k8s.ovn.org")?;
    let values = "In and NotIn need values, Exists and DoesNotExist take none";
    let many: Vec<String> = (0..65).map(|number| format!("172.18.1.{number}")).collect();
    let cases = [
        (selecting(&json!({"key": "env", "operator": "In"})), values),
        (selecting(&json!({"key": "env", "operator": "NotIn", "values": []})), values),
        (selecting(&json!({"key": "env", "operator": "Exists", "values": ["a"]})), values),
        (
            selecting(&json!({"key": "env", "operator": "Like", "values": ["a"]})),
            "operator: Unsupported value: \"Like\": supported values: \"In\", \"NotIn\", \"Exists\", \"DoesNotExist\"",
        ),
        (
            selecting(&json!({"key": "", "operator": "Exists"})),
            "key: Invalid value: \"\": spec.namespaceSelector.matchExpressions[0].key in body should be at least 1 chars long",
        ),
        (selecting(&json!({"operator": "Exists"})), "matchExpressions[0].key: Required value"),
        (
            object(&json!({"egressIPs": many, "namespaceSelector": {}})),
            "spec.egressIPs: Too many: 65: must have at most 64 items",
        ),
        (object(&json!({"egressIPs": ["172.18.0.100"]})), "spec.namespaceSelector: Required value"),
        (object(&json!({"namespaceSelector": {}})), "spec.egressIPs: Required value"),
        (
            object(&json!({"egressIPs": "172.18.0.100", "namespaceSelector": {}})),
            "spec.egressIPs in body must be of type array",
        ),
        (
            object(&json!({"egressIPs": ["172.18.0.300"], "namespaceSelector": {}})),
            "spec.egressIPs[0]: Invalid value: \"172.18.0.300\"",
        ),
        (
            object(&json!({"egressIPs": ["172.18.0.100", "192.0.2.0/24"], "namespaceSelector": {}})),
            "spec.egressIPs[1]: Invalid value: \"192.0.2.0/24\"",
        ),
    ];
    for (object, sentence) in cases {
        let refusal = server.kubectl_fails("create --validate=false -f -", &object.to_string())?;
        println!("{}", refusal.trim());
        ensure!(refusal.contains(sentence), "{refusal} does not say: {sentence}");
    }
    // An address that cannot be an egress IP is accepted: the leader refuses it, and a condition says why.
    let odd = object(&json!({"egressIPs": ["127.0.0.1"], "namespaceSelector": {}}));
    server.kubectl_with("create -f -", &odd.to_string()).map(drop)
}
