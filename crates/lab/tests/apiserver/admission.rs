//! What the tokens of agents and controllers may change, as a real API server judges it by `deploy/base/rbac.yaml` and
//! `admission.yaml`. Requests are made with tokens that are bound to pods, as the kubelet asks for them.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::install::{BRIDGE, rendered};
use crate::server::{TestedServer, has_kubectl, is_real};

const NODES: &str = r#"
apiVersion: v1
kind: Node
metadata: {name: node1, labels: {zone: a}, annotations: {theirs: x}}
spec: {podCIDR: 10.244.1.0/24}
---
apiVersion: v1
kind: Node
metadata: {name: node2, annotations: {"k8s.ovn.org/node-chassis-id": c, "k8s.ovn.org/host-cidrs": "[]"}}
---
apiVersion: v1
kind: Pod
metadata: {name: agent-1, namespace: egress-agent}
spec: {nodeName: node1, serviceAccountName: egress-agent, containers: [{name: c, image: i}]}
---
apiVersion: v1
kind: Pod
metadata: {name: agent-2, namespace: egress-agent}
spec: {nodeName: node2, serviceAccountName: egress-agent, containers: [{name: c, image: i}]}
---
apiVersion: v1
kind: Pod
metadata: {name: agent-3, namespace: egress-agent}
spec: {nodeName: nnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnn.nnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnn.nnnnnnnnnnnnnnnnnnnn, serviceAccountName: egress-agent, containers: [{name: c, image: i}]}
---
apiVersion: v1
kind: Pod
metadata: {name: controller-1, namespace: egress-agent}
spec: {nodeName: node1, serviceAccountName: egress-agent-controller, containers: [{name: c, image: i}]}
---
apiVersion: v1
kind: Node
metadata: {name: nnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnn.nnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnn.nnnnnnnnnnnnnnnnnnnn}
---
apiVersion: k8s.ovn.org/v1
kind: EgressIP
metadata: {name: eip, annotations: {theirs: x}, labels: {team: a}}
spec: {egressIPs: [172.18.0.100], namespaceSelector: {}}
"#;

/// Of a node; more than an event's instance may have.
const LONG_NAME: &str = "nnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnn.nnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnn.nnnnnnnnnnnnnnnnnnnn";

/// How long a server may take until it goes by a policy that it was given.
const PATIENCE: Duration = Duration::from_secs(60);

struct Agents {
    server: TestedServer,
    /// Of an agent on node1, one on node2, one that is bound to no pod, one on the node with the long name, and of a controller.
    tokens: [String; 5],
}

/// Whose token.
const CONTROLLER: usize = 4;
const EIP: &str = "/apis/k8s.ovn.org/v1/egressips/eip";

impl Agents {
    fn start() -> Result<Self> {
        let server = TestedServer::start()?;
        server.kubectl_with("apply -f -", &rendered(BRIDGE)?)?;
        server.kubectl("wait --for=condition=Established crd/egressips.k8s.ovn.org")?;
        server.kubectl_with("apply -f -", NODES)?;
        let token = |of: &str, pod: &str| {
            let bound = if pod.is_empty() { "" } else { "--bound-object-kind Pod --bound-object-name" };
            let line = format!("create token {of} -n egress-agent {bound} {pod}");
            Ok::<_, anyhow::Error>(server.kubectl(line.trim())?.trim().to_owned())
        };
        let tokens = [
            token("egress-agent", "agent-1")?,
            token("egress-agent", "agent-2")?,
            token("egress-agent", "")?,
            token("egress-agent", "agent-3")?,
            token("egress-agent-controller", "controller-1")?,
        ];
        let agents = Self { server, tokens };
        agents.wait_for_policies()?;
        Ok(agents)
    }

    /// Each policy has refused something: until then the server may let everything pass.
    fn wait_for_policies(&self) -> Result<()> {
        let end = Instant::now() + PATIENCE;
        let other = json!({"metadata": {"labels": {"x": "y"}}});
        loop {
            let refusals = [
                self.create(2, &egress_node("node1")),
                self.refused(CONTROLLER, EIP, &other),
                self.create(CONTROLLER, &config_map("other")),
                self.create(0, &event("Pod", "node1")),
                self.create(CONTROLLER, &event("Pod", "node1")),
                self.refused(CONTROLLER, "/api/v1/nodes/node1", &other),
            ];
            let judged = refusals.map(|one| one.is_ok_and(|printed| printed.contains("ValidatingAdmissionPolicy")));
            if judged.iter().all(|one| *one) {
                return Ok(());
            }
            ensure!(Instant::now() < end, "the server does not go by all policies: {judged:?}");
            std::thread::sleep(Duration::from_millis(200));
        }
    }

    /// What the server complains of, by a request of its own: kubectl reads an object before it patches it, which a controller may
    /// not and does not.
    fn refused(&self, agent: usize, path: &str, patch: &Value) -> Result<String> {
        let outcome = self.request(agent, path, patch);
        Ok(outcome.err().map(|error| format!("{error:#}")).unwrap_or_default())
    }

    /// What kubectl complains of; an error where it does not.
    fn patch(&self, agent: usize, what: &str, patch: &Value) -> Result<String> {
        self.server.kubectl_fails(&self.patch_line(agent, what), &patch.to_string())
    }

    fn patch_line(&self, agent: usize, what: &str) -> String {
        format!("patch {what} --token {} --type merge --patch-file /dev/stdin", self.tokens[agent])
    }

    fn patch_status(&self, agent: usize, path: &str, patch: &Value) -> Result<()> {
        self.request(agent, &format!("{path}/status"), patch)
    }

    fn request(&self, agent: usize, path: &str, patch: &Value) -> Result<()> {
        let request = axum::http::Request::patch(path).header("content-type", "application/merge-patch+json");
        let request = request.body(patch.to_string().into_bytes())?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(async {
            let client = self.server.client_with(&self.tokens[agent]).await?;
            client.request::<Value>(request).await.map(drop).context("the server refuses it")
        })
    }

    fn create(&self, agent: usize, object: &Value) -> Result<String> {
        let token = &self.tokens[agent];
        self.server.kubectl_fails(&format!("create --token {token} --validate=false -f -"), &object.to_string())
    }

    fn may_create(&self, agent: usize, object: &Value) -> Result<()> {
        let token = &self.tokens[agent];
        let line = format!("create --token {token} --validate=false -f -");
        self.server.kubectl_with(&line, &object.to_string()).map(drop)
    }
}

fn annotated(key: &str, value: &Value) -> Value {
    json!({"metadata": {"annotations": {key: value}}})
}

fn egress_node(name: &str) -> Value {
    json!({"apiVersion": "egress-agent.io/v1alpha1", "kind": "EgressNode", "metadata": {"name": name}, "spec": {}})
}

fn config_map(name: &str) -> Value {
    let metadata = json!({"name": name, "namespace": "egress-agent"});
    json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"last": "1"}})
}

fn lease(name: &str) -> Value {
    let metadata = json!({"name": name, "namespace": "egress-agent"});
    json!({"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": {"holderIdentity": "a"}})
}

/// As `kube/events.rs` writes it.
fn event(kind: &str, node: &str) -> Value {
    event_of((kind, "EgressIPConflict"), node)
}

fn event_of((kind, reason): (&str, &str), node: &str) -> Value {
    static NUMBER: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);
    let number = NUMBER.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    let namespace = "default";
    json!({
        "apiVersion": "events.k8s.io/v1", "kind": "Event",
        "metadata": {"name": format!("eip.{number}"), "namespace": namespace},
        "eventTime": "2026-01-01T00:00:00.000000Z", "action": "Assign", "reason": reason, "type": "Warning",
        "note": "n", "regarding": {"apiVersion": "k8s.ovn.org/v1", "kind": kind, "name": "eip", "namespace": if kind == "Pod" { namespace } else { "" }},
        "reportingController": "egress-agent", "reportingInstance": node,
    })
}

/// Does the complaint have the sentence?
fn says(complaint: Result<String>, sentence: &str) -> Result<()> {
    let complaint = complaint?;
    println!("{}", complaint.trim());
    ensure!(complaint.contains(sentence), "{complaint} does not say: {sentence}");
    Ok(())
}

#[test]
fn agents_and_controllers_change_what_is_their_own() -> Result<()> {
    const NAME: &str = "agents_and_controllers_change_what_is_their_own";
    if !has_kubectl(NAME) || !is_real(NAME) {
        return Ok(());
    }
    let agents = Agents::start()?;
    its_own_node(&agents)?;
    egress_ips(&agents)?;
    its_own_objects(&agents)?;
    events(&agents)?;
    every_other_verb(&agents)
}

/// An EgressNode object is its own node's agent's to write, and no Node is.
fn its_own_node(agents: &Agents) -> Result<()> {
    const PATH: &str = "/apis/egress-agent.io/v1alpha1/egressnodes";
    let mut own = egress_node("node1");
    own["metadata"]["ownerReferences"] = json!([{"apiVersion": "v1", "kind": "Node", "name": "node1", "uid": "u"}]);
    agents.may_create(0, &own)?;
    agents.may_create(1, &egress_node("node2"))?;
    let status = json!({"status": {"nodeUID": "u", "released": [{"address": "172.18.0.100", "handOver": 7}]}});
    agents.patch_status(0, &format!("{PATH}/node1"), &status)?;
    agents.patch_status(1, &format!("{PATH}/node2"), &status)?;
    let refused = |agent: usize, path: &str, patch: &Value| agents.refused(agent, &format!("{path}/status"), patch);
    let sentence =
        "an agent may write the EgressNode of its own node and no other: this one runs on node1, not on node2";
    says(refused(0, &format!("{PATH}/node2"), &status), sentence)?;
    let mut kept = egress_node("node1");
    kept["metadata"]["finalizers"] = json!(["a.b/c"]);
    says(agents.create(0, &kept), "an EgressNode has no finalizers and belongs to the Node of its name alone")?;
    let mut of_another = egress_node("node1");
    of_another["metadata"]["ownerReferences"] =
        json!([{"apiVersion": "v1", "kind": "Node", "name": "node2", "uid": "u"}]);
    says(agents.create(0, &of_another), "an EgressNode has no finalizers and belongs to the Node of its name alone")?;
    let sentence = "an agent may write the EgressNode of its own node and no other: this one runs on node2, not on ";
    says(agents.create(1, &egress_node(LONG_NAME)), sentence)?;
    let sentence =
        "an agent's token must say on which node it runs, so it must be bound to a pod (Kubernetes 1.30 or later)";
    says(refused(2, &format!("{PATH}/node1"), &status), sentence)?;
    // What no agent would say is refused by the schema.
    let nonsense = json!({"status": {"released": vec![json!({"address": "a", "handOver": 1}); 5000]}});
    says(refused(0, &format!("{PATH}/node1"), &nonsense), "released")?;
    says(refused(0, "/api/v1/nodes/node1", &json!({"status": {"phase": "x"}})), "cannot patch resource")?;
    let drained = annotated("k8s.ovn.org/egress-drain", &json!("true"));
    says(agents.refused(0, "/api/v1/nodes/node1", &drained), "cannot patch resource \"nodes\"")?;
    labels_of_nodes(agents)?;
    says(refused(CONTROLLER, &format!("{PATH}/node1"), &status), "cannot patch resource")
}

/// A controller sets the labels of nodes that load balancers announce by, and changes nothing else of them.
fn labels_of_nodes(agents: &Agents) -> Result<()> {
    const PATH: &str = "/api/v1/nodes/node1";
    let labels = |labels: Value| json!({"metadata": {"labels": labels}});
    agents.request(CONTROLLER, PATH, &labels(json!({"egress-service.k8s.ovn.org/shop-front": ""})))?;
    agents.request(CONTROLLER, PATH, &labels(json!({"egress-service.k8s.ovn.org/shop-front": null})))?;
    let only = "a controller may change the labels of nodes that name EgressServices and no others: not ";
    for (label, value) in [("zone", Value::Null), ("zone", json!("b")), ("k8s.ovn.org/egress-assignable", json!(""))] {
        says(agents.refused(CONTROLLER, PATH, &labels(json!({label: value}))), &format!("{only}{label}"))?;
    }
    let nothing_else = "a controller may change labels of a node and nothing else of it";
    let drained = annotated("k8s.ovn.org/egress-drain", &json!("true"));
    for patch in [drained, json!({"spec": {"unschedulable": true}})] {
        says(agents.refused(CONTROLLER, PATH, &patch), nothing_else)?;
    }
    Ok(())
}

fn egress_ips(agents: &Agents) -> Result<()> {
    for key in ["k8s.ovn.org/egressip-tunnel-id", "k8s.ovn.org/egressip-no-eligible-node"] {
        agents.request(CONTROLLER, EIP, &annotated(key, &json!("7")))?;
        says(agents.patch(0, "egressip eip", &annotated(key, &json!("8"))), "cannot patch resource \"egressips\"")?;
    }
    let items = json!([{"node": "node1", "egressIP": "172.18.0.100"}]);
    let status = json!({"status": {"items": items}});
    agents.patch_status(CONTROLLER, EIP, &status)?;
    says(agents.refused(0, &format!("{EIP}/status"), &status), "cannot patch resource")?;
    let spec = json!({"spec": {"egressIPs": ["172.18.0.9"]}});
    says(agents.refused(CONTROLLER, EIP, &spec), "a controller may not change what an EgressIP object asks for")?;
    let only = "a controller may change its own annotations of an EgressIP object and no others: not ";
    for (key, value) in [("theirs", Value::Null), ("k8s.ovn.org/egressip-on-unassigned", json!("drop"))] {
        says(agents.refused(CONTROLLER, EIP, &annotated(key, &value)), &format!("{only}{key}"))?;
    }
    let nothing_else = "a controller may change annotations and status of an EgressIP object and nothing else of it";
    for patch in [json!({"metadata": {"labels": {"team": null}}}), json!({"metadata": {"finalizers": ["a.b/c"]}})] {
        says(agents.refused(CONTROLLER, EIP, &patch), nothing_else)?;
    }
    for agent in [0, CONTROLLER] {
        let line = format!("delete egressip eip --token {}", agents.tokens[agent]);
        says(agents.server.kubectl_fails(&line, ""), "cannot delete resource \"egressips\"")?;
    }
    Ok(())
}

fn its_own_objects(agents: &Agents) -> Result<()> {
    let secret = |name: &str| {
        let mut secret = config_map(name);
        (secret["kind"], secret["data"]) = (json!("Secret"), json!({"key": "MQ=="}));
        secret
    };
    for one in [config_map("egress-agent-hand-overs"), secret("egress-agent-key"), lease("egress-agent-leader")] {
        says(agents.create(0, &one), "cannot create resource")?;
    }
    let only = "a controller may create the Lease egress-agent-leader, the ConfigMap egress-agent-hand-overs and the Secrets \
                egress-agent-key and egress-agent-metrics, and no others";
    says(agents.create(CONTROLLER, &config_map("egress-agent-config")), only)?;
    says(agents.create(CONTROLLER, &lease("egress-agent-hand-overs")), only)?;
    says(agents.create(CONTROLLER, &secret("another")), only)?;
    let mut token = secret("egress-agent-key");
    token["type"] = json!("kubernetes.io/service-account-token");
    token["metadata"]["annotations"] = json!({"kubernetes.io/service-account.name": "default"});
    says(agents.create(CONTROLLER, &token), "a controller may create a Secret of the type Opaque, and of no other")?;
    agents.may_create(CONTROLLER, &config_map("egress-agent-hand-overs"))?;
    agents.may_create(CONTROLLER, &secret("egress-agent-key"))?;
    agents.may_create(CONTROLLER, &secret("egress-agent-metrics"))?;
    says(agents.create(CONTROLLER, &config_map("egress-agent-metrics")), only)?;
    agents.may_create(CONTROLLER, &lease("egress-agent-leader"))?;
    let mut elsewhere = lease("egress-agent-leader");
    elsewhere["metadata"]["namespace"] = json!("kube-system");
    says(agents.create(CONTROLLER, &elsewhere), "cannot create resource \"leases\"")
}

fn events(agents: &Agents) -> Result<()> {
    agents.may_create(0, &event("EgressIP", "node1"))?;
    for reason in ["PodAddressConflict", "PodAddressRefused"] {
        agents.may_create(0, &event_of(("Pod", reason), "node1"))?;
    }
    agents.may_create(0, &event_of(("Service", "ServiceAddressesLeftOut"), "node1"))?;
    let in_its_name = "an agent may tell of its own Node, of what it cannot serve of egress policies, and of addresses that \
                       pods do not get or Services have no room for, in its own name, and of nothing else";
    says(agents.create(0, &event("Pod", "node1")), in_its_name)?;
    says(agents.create(0, &event_of(("EgressIP", "EgressIPMoved"), "node1")), in_its_name)?;
    says(agents.create(0, &event_of(("Service", "PodAddressConflict"), "node1")), in_its_name)?;
    let own_node = "an agent may tell events as of its own node: this one runs on node1";
    says(agents.create(0, &event("EgressIP", "node2")), own_node)?;
    // The name of another node may be how this one's begins.
    says(agents.create(0, &event("EgressIP", "node")), own_node)?;
    // As the agent cuts a name that is too long.
    let own_node = format!("an agent may tell events as of its own node: this one runs on {LONG_NAME}");
    agents.may_create(3, &event("EgressIP", &LONG_NAME[..128]))?;
    says(agents.create(3, &event("EgressIP", &LONG_NAME[..127])), &own_node)?;
    agents.may_create(CONTROLLER, &event_of(("EgressIP", "EgressIPMoved"), "node1"))?;
    let only = "a controller may tell of egress policies, of pools of addresses and of nodes whose health answers are not signed";
    says(agents.create(CONTROLLER, &event("Pod", "node1")), only)
}

/// What an agent's token can write, by the server's own list of its rights: nothing by which another node's address could be
/// moved, taken or starved. What it can is played above.
fn every_other_verb(agents: &Agents) -> Result<()> {
    const READS: [&str; 3] = ["get", "list", "watch"];
    let own = [
        ("egressnodes.egress-agent.io", "create"),
        ("egressnodes.egress-agent.io/status", "patch"),
        ("events.events.k8s.io", "create"),
    ];
    for namespace in ["egress-agent", "kube-system", "default"] {
        let line = format!("auth can-i --list --no-headers -n {namespace} --token {}", agents.tokens[0]);
        let rights = agents.server.kubectl(&line)?;
        println!("{namespace}:\n{rights}");
        let mut seen = Vec::new();
        for right in rights.lines() {
            let (Some(resource), Some((_, verbs))) = (right.split_whitespace().next(), right.rsplit_once('[')) else {
                continue;
            };
            let verbs = verbs.trim_end_matches(']').split_whitespace();
            // Every token may ask what it may do, which changes nothing.
            let asks_about_itself = resource.starts_with("self");
            for verb in verbs.filter(|verb| !READS.contains(verb) && !asks_about_itself) {
                ensure!(own.contains(&(resource, verb)), "in {namespace} it may {verb} {resource}");
                seen.push((resource, verb));
            }
        }
        ensure!(own.iter().all(|one| seen.contains(one)), "the list of rights is not read: {seen:?}");
    }
    Ok(())
}
