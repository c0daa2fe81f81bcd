//! What the shipped definitions refuse, with the messages that people read. The double knows the schema and not the language of its
//! rules, so that a real API server says these.

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

/// A definition of another API, and how its objects begin.
struct ForeignKind {
    file: &'static str,
    definition: &'static str,
    versions: &'static [&'static str],
    kind: &'static str,
}

const EGRESS: ForeignKind = ForeignKind {
    file: "antrea/egresses.yaml",
    definition: "egresses.crd.antrea.io",
    versions: &["crd.antrea.io/v1beta1", "crd.antrea.io/v1alpha2"],
    kind: "Egress",
};
const POOL: ForeignKind = ForeignKind {
    file: "antrea/externalippools.yaml",
    definition: "externalippools.crd.antrea.io",
    versions: &["crd.antrea.io/v1beta1", "crd.antrea.io/v1alpha2"],
    kind: "ExternalIPPool",
};
const GATEWAY_POLICY: ForeignKind = ForeignKind {
    file: "cilium/ciliumegressgatewaypolicies.yaml",
    definition: "ciliumegressgatewaypolicies.cilium.io",
    versions: &["cilium.io/v2"],
    kind: "CiliumEgressGatewayPolicy",
};

/// A spec that is accepted after the former one, if any, or refused with a text.
type SpecCase = (Value, Option<Value>, Result<(), &'static str>);

impl ForeignKind {
    fn check(&self, server: &TestedServer, cases: &[SpecCase]) -> Result<()> {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy").join(self.file);
        server.kubectl_with("apply --server-side -f -", &fs::read_to_string(file)?)?;
        server.kubectl(&format!("wait --for=condition=Established crd/{}", self.definition))?;
        for version in self.versions {
            let object = |spec: &Value| {
                json!({"apiVersion": version, "kind": self.kind, "metadata": {"name": "x"}, "spec": spec}).to_string()
            };
            for (spec, former, expected) in cases {
                if let Some(former) = former {
                    server.kubectl_with("create -f -", &object(former))?;
                }
                let verb = if former.is_some() { "replace -f -" } else { "create --validate=strict -f -" };
                match expected {
                    Ok(()) => drop(server.kubectl_with(verb, &object(spec))?),
                    Err(text) => {
                        let refusal = server.kubectl_fails(verb, &object(spec))?;
                        ensure!(refusal.contains(text), "{version}, {spec}: {refusal} does not say: {text}");
                    }
                }
                server.kubectl(&format!("delete --ignore-not-found {} x", self.definition))?;
            }
        }
        Ok(())
    }
}

#[test]
fn definitions_of_other_apis_refuse_what_they_should() -> Result<()> {
    const NAME: &str = "definitions_of_other_apis_refuse_what_they_should";
    if !has_kubectl(NAME) || !is_real(NAME) {
        return Ok(());
    }
    let server = TestedServer::start()?;
    EGRESS.check(&server, &egresses())?;
    POOL.check(&server, &pools())?;
    GATEWAY_POLICY.check(&server, &gateway_policies())
}

fn new(spec: Value, expected: Result<(), &'static str>) -> SpecCase {
    (spec, None, expected)
}

fn egresses() -> Vec<SpecCase> {
    const EITHER: &str = "either egressIP and externalIPPool, or egressIPs and externalIPPools";
    const VALUES: &str = "In and NotIn need values, Exists and DoesNotExist take none";
    let with = |more: Value| {
        let mut spec = json!({"appliedTo": {"podSelector": {"matchLabels": {"a": "b"}}}});
        spec.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
        spec
    };
    let selecting = |expression: Value| json!({"egressIP": "10.0.0.1", "appliedTo": {"podSelector": {"matchExpressions": [expression]}}});
    let limited = |bandwidth: Value| with(json!({"egressIP": "10.0.0.1", "bandwidth": bandwidth}));
    let many: Vec<String> = (0..9).map(|number| format!("10.0.0.{number}")).collect();
    vec![
        new(with(json!({"externalIPPool": "p"})), Ok(())),
        new(with(json!({"externalIPPool": "p", "egressIP": "10.0.0.1"})), Ok(())),
        new(with(json!({"egressIP": "2001:db8::1"})), Ok(())),
        new(with(json!({"egressIPs": ["10.0.0.2", "2001:db8::1"]})), Ok(())),
        new(with(json!({"externalIPPools": ["a", "b"]})), Ok(())),
        new(with(json!({"egressIP": "10.0.0"})), Err("spec.egressIP")),
        new(with(json!({"egressIP": ""})), Err("spec.egressIP")),
        new(with(json!({})), Err(EITHER)),
        new(with(json!({"egressIP": "10.0.0.1", "egressIPs": ["10.0.0.2"]})), Err(EITHER)),
        new(
            with(json!({"externalIPPools": ["a", "b"], "egressIPs": ["10.0.0.2"]})),
            Err("egressIPs and externalIPPools are of one length"),
        ),
        new(with(json!({"egressIPs": many})), Err("spec.egressIPs: Too many: 9: must have at most 8 items")),
        new(with(json!({"egressIP": "10.0.0.1", "unheard": 1})), Err("unknown field \"spec.unheard\"")),
        new(json!({"egressIP": "10.0.0.1"}), Err("spec.appliedTo: Required value")),
        new(selecting(json!({"key": "a", "operator": "In", "values": ["x"]})), Ok(())),
        new(selecting(json!({"key": "a", "operator": "In"})), Err(VALUES)),
        new(selecting(json!({"key": "a", "operator": "Exists", "values": ["x"]})), Err(VALUES)),
        new(selecting(json!({"key": "a", "operator": "Gt", "values": ["x"]})), Err("operator: Unsupported value")),
        new(limited(json!({"rate": "10M", "burst": "1M"})), Ok(())),
        new(limited(Value::Null), Ok(())),
        new(limited(json!({"rate": "fast", "burst": "1M"})), Err("spec.bandwidth.rate")),
        new(limited(json!({"rate": "1M"})), Err("spec.bandwidth.burst: Required value")),
    ]
}

fn pools() -> Vec<SpecCase> {
    const FIXED: &str = "existing IPRanges cannot be updated or deleted";
    let with = |ranges: Value| json!({"nodeSelector": {}, "ipRanges": ranges});
    let cidr = |cidr: &str| json!({"cidr": cidr});
    let range = |end: &str| json!([{"start": "10.0.0.1", "end": end}]);
    let changed = |former: Value, spec: Value, expected| (with(spec), Some(with(former)), expected);
    let on_subnet = |subnet: Value| {
        let mut spec = with(json!([cidr("10.0.0.0/24")]));
        spec["subnetInfo"] = subnet;
        spec
    };
    // As many as there can be, each compared with each.
    let all: Vec<Value> = (0..64).map(|number| cidr(&format!("10.0.{number}.0/24"))).collect();
    let reversed: Vec<Value> = all.iter().rev().cloned().collect();
    vec![
        new(with(json!([cidr("10.0.0.0/24")])), Ok(())),
        new(with(range("10.0.0.9")), Ok(())),
        new(
            with(json!([{"cidr": "10.0.0.0/24", "start": "10.0.0.1", "end": "10.0.0.2"}])),
            Err("either cidr, or start"),
        ),
        new(with(json!([{"start": "10.0.0.1"}])), Err("either cidr, or start and end")),
        new(with(json!([cidr("10.0.0.0")])), Err("spec.ipRanges[0].cidr")),
        new(with(range("10.0.0.x")), Err("spec.ipRanges[0].end")),
        new(with(json!([])), Err("spec.ipRanges")),
        new(json!({"ipRanges": [cidr("10.0.0.0/24")]}), Err("spec.nodeSelector: Required value")),
        changed(json!([cidr("10.0.0.0/24")]), json!([cidr("10.0.1.0/24"), cidr("10.0.0.0/24")]), Ok(())),
        changed(json!([cidr("10.0.0.0/24")]), json!([cidr("10.0.1.0/24")]), Err(FIXED)),
        changed(range("10.0.0.8"), range("10.0.0.9"), Err(FIXED)),
        changed(json!(all), json!(reversed), Ok(())),
        new(on_subnet(json!({"gateway": "10.0.0.254", "prefixLength": 24, "vlan": 4})), Ok(())),
        new(on_subnet(json!({"gateway": "10.0.0.254", "prefixLength": 24, "vlan": 4095})), Err("spec.subnetInfo.vlan")),
        new(on_subnet(json!({"gateway": "10.0.0.254", "prefixLength": 0})), Err("spec.subnetInfo.prefixLength")),
        new(on_subnet(json!({"prefixLength": 24})), Err("spec.subnetInfo.gateway: Required value")),
    ]
}

fn gateway_policies() -> Vec<SpecCase> {
    const EITHER: &str = "either egressGateway or egressGateways";
    let gateway = json!({"nodeSelector": {"matchLabels": {"a": "b"}}});
    let by = |more: Value| {
        let mut gateway = gateway.clone();
        gateway.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
        gateway
    };
    let with = |selector: Value, cidr: &str, more: Value| {
        let mut spec = json!({"selectors": [selector], "destinationCIDRs": [cidr]});
        spec.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
        spec
    };
    let to_all = |more: Value| with(json!({"podSelector": {}}), "0.0.0.0/0", more);
    vec![
        new(to_all(json!({"egressGateway": gateway})), Ok(())),
        new(to_all(json!({"egressGateway": by(json!({"egressIP": "10.0.0.1"}))})), Ok(())),
        new(to_all(json!({"egressGateway": by(json!({"interface": "eth0"}))})), Ok(())),
        new(to_all(json!({"egressGateways": [gateway, gateway]})), Ok(())),
        new(to_all(json!({"egressGateway": gateway, "egressGateways": null})), Ok(())),
        new(
            to_all(json!({"egressGateway": by(json!({"interface": "eth0", "egressIP": "10.0.0.1"}))})),
            Err("an interface or an egressIP, not both"),
        ),
        new(to_all(json!({})), Err(EITHER)),
        new(to_all(json!({"egressGateways": []})), Err(EITHER)),
        new(to_all(json!({"egressGateways": null})), Err(EITHER)),
        new(to_all(json!({"egressGateway": {}})), Err("spec.egressGateway.nodeSelector: Required value")),
        new(
            with(json!({}), "0.0.0.0/0", json!({"egressGateway": gateway})),
            Err("a namespaceSelector or a podSelector"),
        ),
        new(
            with(json!({"podSelector": {}}), "192.0.2.1", json!({"egressGateway": gateway})),
            Err("spec.destinationCIDRs[0]"),
        ),
        new(with(json!({"podSelector": {}}), "2001:db8::/32", json!({"egressGateway": gateway})), Ok(())),
    ]
}
