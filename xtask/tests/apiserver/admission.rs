//! What an agent's token may change, as a real API server judges it by `deploy/base/rbac.yaml` and `admission.yaml`: its own
//! Node, its own keys, its own objects. Requests are made with a token that is bound to a pod, as the kubelet asks for it.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::install::{BRIDGE, rendered};
use crate::server::{Server, has_kubectl, is_real};

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
    server: Server,
    /// Of an agent on node1, one on node2, one that is bound to no pod, and one on the node with the long name.
    tokens: [String; 4],
}

impl Agents {
    fn start() -> Result<Self> {
        let server = Server::start()?;
        server.kubectl_with("apply -f -", &rendered(BRIDGE)?)?;
        server.kubectl("wait --for=condition=Established crd/egressips.k8s.ovn.org")?;
        server.kubectl_with("apply -f -", NODES)?;
        let create = "create token egress-agent -n egress-agent";
        let token = |more: &str| Ok::<_, anyhow::Error>(server.kubectl(&format!("{create}{more}"))?.trim().to_owned());
        let tokens = [
            token(" --bound-object-kind Pod --bound-object-name agent-1")?,
            token(" --bound-object-kind Pod --bound-object-name agent-2")?,
            token("")?,
            token(" --bound-object-kind Pod --bound-object-name agent-3")?,
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
                self.patch(2, "node node1", &other),
                self.patch(0, "egressip eip", &other),
                self.create(0, &config_map("other")),
                self.create(0, &event("Pod", "node1")),
            ];
            let judged = refusals.map(|one| one.is_ok_and(|said| said.contains("ValidatingAdmissionPolicy")));
            if judged.iter().all(|one| *one) {
                return Ok(());
            }
            ensure!(Instant::now() < end, "the server does not go by all policies: {judged:?}");
            std::thread::sleep(Duration::from_millis(200));
        }
    }

    /// What kubectl complains of; an error where it does not.
    fn patch(&self, agent: usize, what: &str, patch: &Value) -> Result<String> {
        self.server.kubectl_fails(&self.patch_line(agent, what), &patch.to_string())
    }

    fn patch_line(&self, agent: usize, what: &str) -> String {
        format!("patch {what} --token {} --type merge --patch-file /dev/stdin", self.tokens[agent])
    }

    fn may_patch(&self, agent: usize, what: &str, patch: &Value) -> Result<()> {
        self.server.kubectl_with(&self.patch_line(agent, what), &patch.to_string()).map(drop)
    }

    /// Not by kubectl, which reads the subresource first: an agent may not and does not.
    fn patch_status(&self, agent: usize, path: &str, patch: &Value) -> Result<()> {
        let request =
            axum::http::Request::patch(format!("{path}/status")).header("content-type", "application/merge-patch+json");
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
fn an_agent_changes_what_is_its_own() -> Result<()> {
    const NAME: &str = "an_agent_changes_what_is_its_own";
    if !has_kubectl(NAME) || !is_real(NAME) {
        return Ok(());
    }
    let agents = Agents::start()?;
    its_own_node(&agents)?;
    its_own_keys(&agents)?;
    egress_ips(&agents)?;
    its_own_objects(&agents)
}

fn its_own_node(agents: &Agents) -> Result<()> {
    let ours = "k8s.ovn.org/egress-agent-released";
    for value in [json!("{}"), json!("{\"a\":1}"), Value::Null] {
        agents.may_patch(0, "node node1", &annotated(ours, &value))?;
        agents.may_patch(1, "node node2", &annotated(ours, &value))?;
    }
    let sentence = "an agent may change its own Node and no other: this one runs on node1, not on node2";
    says(agents.patch(0, "node node2", &annotated(ours, &json!("{}"))), sentence)?;
    let sentence = "an agent may change its own Node and no other: this one runs on node2, not on node1";
    says(agents.patch(1, "node node1", &annotated(ours, &json!("{}"))), sentence)?;
    let sentence =
        "an agent's token must say on which node it runs, so it must be bound to a pod (Kubernetes 1.30 or later)";
    says(agents.patch(2, "node node1", &annotated(ours, &json!("{}"))), sentence)
}

fn its_own_keys(agents: &Agents) -> Result<()> {
    let networks = ["k8s.ovn.org/node-primary-ifaddr", "k8s.ovn.org/host-cidrs", "k8s.ovn.org/node-subnets"];
    let own = ["k8s.ovn.org/egress-agent-published", "k8s.ovn.org/egress-agent-prepared", "k8s.ovn.org/egress-drain"];
    for key in networks.into_iter().chain(own) {
        agents.may_patch(0, "node node1", &annotated(key, &json!("x")))?;
    }
    let only = "an agent may change its own annotations of its Node and no others: not ";
    for (key, value) in [("theirs", json!("y")), ("theirs", Value::Null), ("another", json!("y"))] {
        says(agents.patch(0, "node node1", &annotated(key, &value)), &format!("{only}{key}"))?;
    }
    // OVN-Kubernetes says the second node's networks.
    says(agents.patch(1, "node node2", &annotated(networks[1], &json!("x"))), &format!("{only}{}", networks[1]))?;
    let nothing_else = "an agent may change annotations of its Node and nothing else of it";
    for patch in [
        json!({"metadata": {"labels": {"k8s.ovn.org/egress-assignable": ""}}}),
        json!({"metadata": {"labels": {"zone": null}}}),
        json!({"metadata": {"finalizers": ["a.b/c"]}}),
        json!({"spec": {"unschedulable": true}}),
        json!({"spec": {"taints": [{"key": "a", "effect": "NoExecute"}]}}),
    ] {
        says(agents.patch(0, "node node1", &patch), nothing_else)?;
    }
    let refused = agents.patch_status(0, "/api/v1/nodes/node1", &json!({"status": {"phase": "x"}}));
    says(
        refused.map_or_else(|error| Ok(format!("{error:#}")), |()| Ok(String::new())),
        "cannot patch resource \"nodes/status\"",
    )?;
    // Of everybody else nothing is asked.
    agents.server.kubectl("label node node2 k8s.ovn.org/egress-assignable=").map(drop)
}

fn egress_ips(agents: &Agents) -> Result<()> {
    for key in ["k8s.ovn.org/egressip-tunnel-id", "k8s.ovn.org/egressip-no-eligible-node"] {
        agents.may_patch(0, "egressip eip", &annotated(key, &json!("7")))?;
    }
    let items = json!([{"node": "node1", "egressIP": "172.18.0.100"}]);
    agents.patch_status(0, "/apis/k8s.ovn.org/v1/egressips/eip", &json!({"status": {"items": items}}))?;
    let spec = json!({"spec": {"egressIPs": ["172.18.0.9"]}});
    says(agents.patch(0, "egressip eip", &spec), "an agent may not change what an EgressIP object asks for")?;
    let only = "an agent may change its own annotations of an EgressIP object and no others: not ";
    for (key, value) in [("theirs", Value::Null), ("k8s.ovn.org/egressip-on-unassigned", json!("drop"))] {
        says(agents.patch(0, "egressip eip", &annotated(key, &value)), &format!("{only}{key}"))?;
    }
    let nothing_else = "an agent may change annotations and status of an EgressIP object and nothing else of it";
    for patch in [json!({"metadata": {"labels": {"team": null}}}), json!({"metadata": {"finalizers": ["a.b/c"]}})] {
        says(agents.patch(0, "egressip eip", &patch), nothing_else)?;
    }
    let line = format!("delete egressip eip --token {}", agents.tokens[0]);
    says(agents.server.kubectl_fails(&line, ""), "cannot delete resource \"egressips\"")
}

fn its_own_objects(agents: &Agents) -> Result<()> {
    let only = "an agent may create the Lease egress-agent-leader, the ConfigMap egress-agent-hand-overs and the Secret \
                egress-agent-key, and no others";
    says(agents.create(0, &config_map("egress-agent-config")), only)?;
    says(agents.create(0, &lease("egress-agent-hand-overs")), only)?;
    agents.may_create(0, &config_map("egress-agent-hand-overs"))?;
    let secret = |name: &str| {
        let mut secret = config_map(name);
        (secret["kind"], secret["data"]) = (json!("Secret"), json!({"key": "MQ=="}));
        secret
    };
    says(agents.create(0, &secret("another")), only)?;
    agents.may_create(0, &secret("egress-agent-key"))?;
    agents.may_create(1, &lease("egress-agent-leader"))?;
    let mut elsewhere = lease("egress-agent-leader");
    elsewhere["metadata"]["namespace"] = json!("kube-system");
    says(agents.create(0, &elsewhere), "cannot create resource \"leases\"")?;
    agents.may_create(0, &event("EgressIP", "node1"))?;
    for reason in ["PodAddressConflict", "PodAddressRefused"] {
        agents.may_create(0, &event_of(("Pod", reason), "node1"))?;
    }
    agents.may_create(0, &event_of(("Service", "ServiceAddressesLeftOut"), "node1"))?;
    let in_its_name = "an agent may tell of EgressIP objects, of its own Node, and of addresses that pods do not get or \
                       Services have no room for, in its own name, and of nothing else";
    says(agents.create(0, &event("Pod", "node1")), in_its_name)?;
    says(agents.create(0, &event_of(("Service", "PodAddressConflict"), "node1")), in_its_name)?;
    let own_node = "an agent may tell events as of its own node: this one runs on node1";
    says(agents.create(0, &event("EgressIP", "node2")), own_node)?;
    // The name of another node may be how this one's begins.
    says(agents.create(0, &event("EgressIP", "node")), own_node)?;
    // As the agent cuts a name that is too long.
    let own_node = format!("an agent may tell events as of its own node: this one runs on {LONG_NAME}");
    agents.may_create(3, &event("EgressIP", &LONG_NAME[..128]))?;
    says(agents.create(3, &event("EgressIP", &LONG_NAME[..127])), &own_node)
}
