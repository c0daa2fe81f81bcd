//! The agents' pods: which one is on a node. Pure.
//!
//! Commands run in these pods, their image runs elsewhere, and their logs are collected. Labels alone are no proof, since everyone
//! who may create pods sets them: an agent belongs to a DaemonSet and uses its node's network, which Pod Security refuses to
//! ordinary users, and all agents are in one namespace.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;

/// The labels of the DaemonSet's pods (`deploy/base/daemonset.yaml`).
pub(crate) const LABELS: &str = "app.kubernetes.io/name=egress-agent,app.kubernetes.io/component=agent";
/// The container of the agent: overlays may add others.
pub(crate) const CONTAINER: &str = "agent";

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct AgentPod {
    pub(crate) namespace: String,
    pub(crate) name: String,
    pub(crate) node: String,
    /// Of the agent's container.
    pub(crate) image: Option<String>,
    /// Why no command can run in it, if so.
    pub(crate) obstacle: Option<String>,
}

/// Why no agent can be asked.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub(crate) enum NoAgent {
    #[error(
        "no pod of a DaemonSet in its node's network has the labels {LABELS} and a container {CONTAINER}{}: is egress-agent installed \
         there? See --agent-namespace",
        within(.0.as_deref())
    )]
    Nowhere(Option<String>),
    #[error("no agent is on node {0}: does the node exist, and does the DaemonSet select it? kubectl get nodes")]
    NotOn(String),
    #[error("the agent on {node} ({pod}) cannot run a command: {why}")]
    NotRunning { node: String, pod: String, why: String },
    #[error("pods that look like agents are in several namespaces ({}): give --agent-namespace", .0.join(", "))]
    Several(Vec<String>),
}

fn within(namespace: Option<&str>) -> String {
    namespace.map_or_else(String::new, |namespace| format!(" in namespace {namespace}"))
}

impl AgentPod {
    /// `None` if the pod is no agent, or on no node yet.
    pub(crate) fn of(pod: &Pod) -> Option<Self> {
        let spec = pod.spec.as_ref()?;
        let container = spec.containers.iter().find(|one| one.name == CONTAINER)?;
        if spec.host_network != Some(true) || !is_of_daemonset(pod) {
            return None;
        }
        Some(Self {
            namespace: pod.namespace().unwrap_or_default(),
            name: pod.name_any(),
            node: spec.node_name.clone()?,
            image: container.image.clone(),
            obstacle: obstacle(pod),
        })
    }
}

fn is_of_daemonset(pod: &Pod) -> bool {
    let owner = pod.owner_references().iter().find(|owner| owner.controller == Some(true));
    owner.is_some_and(|owner| owner.kind == "DaemonSet" && owner.api_version == "apps/v1")
}

/// The agents, which must be in one namespace.
pub(crate) fn of_one_namespace(agents: Vec<AgentPod>) -> Result<Vec<AgentPod>, NoAgent> {
    let namespaces: BTreeSet<&str> = agents.iter().map(|agent| agent.namespace.as_str()).collect();
    if namespaces.len() > 1 {
        return Err(NoAgent::Several(namespaces.into_iter().map(str::to_owned).collect()));
    }
    Ok(agents)
}

fn obstacle(pod: &Pod) -> Option<String> {
    if pod.metadata.deletion_timestamp.is_some() {
        return Some("it is being deleted".to_owned());
    }
    let status = pod.status.as_ref();
    let phase = status.and_then(|status| status.phase.as_deref()).unwrap_or("Unknown");
    if phase != "Running" {
        return Some(format!("its pod is {phase}"));
    }
    let containers = status.and_then(|status| status.container_statuses.as_ref());
    let own = containers.into_iter().flatten().find(|one| one.name == CONTAINER)?;
    let state = own.state.as_ref()?;
    if let Some(waiting) = &state.waiting {
        return Some(format!("its container waits ({})", waiting.reason.as_deref().unwrap_or("no reason is given")));
    }
    state.terminated.as_ref().map(|ended| format!("its container has ended with code {}", ended.exit_code))
}

/// The agent on a node. Of several pods, as in a rolling update, the one that runs.
pub(crate) fn on_node<'a>(agents: &'a [AgentPod], node: &str) -> Result<&'a AgentPod, NoAgent> {
    let mut there = agents.iter().filter(|agent| agent.node == node);
    let running = there.clone().find(|agent| agent.obstacle.is_none());
    running.ok_or_else(|| match there.next() {
        None => NoAgent::NotOn(node.to_owned()),
        Some(one) => NoAgent::NotRunning {
            node: node.to_owned(),
            pod: format!("{}/{}", one.namespace, one.name),
            why: one.obstacle.clone().unwrap_or_default(),
        },
    })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn pod(namespace: &str, name: &str, node: Option<&str>, status: Value) -> Pod {
        let value = json!({
            "metadata": {"namespace": namespace, "name": name, "ownerReferences": [
                {"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "egress-agent", "uid": "1", "controller": true},
            ]},
            "spec": {"nodeName": node, "hostNetwork": true, "containers": [{"name": "agent", "image": "egress-agent:1"}]},
            "status": status,
        });
        serde_json::from_value(value).expect("a pod")
    }

    fn running() -> Value {
        json!({"phase": "Running"})
    }

    fn agents(pods: &[Pod]) -> Vec<AgentPod> {
        pods.iter().filter_map(AgentPod::of).collect()
    }

    #[test]
    fn the_running_pod_of_the_node_is_found() {
        let mut leaving = pod("egress-agent", "old", Some("n1"), running());
        leaving.metadata.deletion_timestamp = serde_json::from_value(json!("2026-01-01T00:00:00Z")).expect("a time");
        let all = agents(&[
            leaving,
            pod("egress-agent", "new", Some("n1"), running()),
            pod("egress-agent", "other", Some("n2"), running()),
            pod("egress-agent", "pending", None, json!({"phase": "Pending"})),
        ]);
        assert_eq!(on_node(&all, "n1").map(|agent| agent.name.as_str()), Ok("new"));
        assert_eq!(on_node(&all, "n3"), Err(NoAgent::NotOn("n3".into())));
    }

    #[test]
    fn a_pod_that_cannot_answer_is_named_with_the_reason() {
        let crashing = json!({"phase": "Running", "containerStatuses": [{
            "name": "agent", "image": "", "imageID": "", "ready": false, "restartCount": 3,
            "state": {"waiting": {"reason": "CrashLoopBackOff"}},
        }]});
        let all =
            agents(&[pod("a", "x", Some("n1"), crashing), pod("a", "y", Some("n2"), json!({"phase": "Pending"}))]);
        for (node, why) in [("n1", "its container waits (CrashLoopBackOff)"), ("n2", "its pod is Pending")] {
            let error = on_node(&all, node).expect_err("it cannot answer").to_string();
            assert!(error.contains(why) && error.contains("a/"), "{error}");
        }
    }

    #[test]
    fn two_installations_are_not_mixed_up() {
        let of = |second| agents(&[pod("a", "x", Some("n1"), running()), pod(second, "y", Some("n2"), running())]);
        let error = of_one_namespace(of("b")).expect_err("two").to_string();
        assert!(error.contains("(a, b)") && error.contains("--agent-namespace"), "{error}");
        assert_eq!(of_one_namespace(of("a")), Ok(of("a")));
    }

    /// Everyone who may create pods sets labels and names of containers.
    #[test]
    fn a_pod_that_only_looks_like_an_agent_is_none() {
        let real = pod("egress-agent", "real", Some("n1"), running());
        assert!(AgentPod::of(&real).is_some());
        let changes: [fn(&mut Pod); 6] = [
            |pod| pod.metadata.owner_references = None,
            |pod| pod.metadata.owner_references.as_mut().expect("one")[0].kind = "ReplicaSet".into(),
            |pod| pod.metadata.owner_references.as_mut().expect("one")[0].api_version = "example.com/v1".into(),
            |pod| pod.metadata.owner_references.as_mut().expect("one")[0].controller = None,
            |pod| pod.spec.as_mut().expect("a spec").host_network = None,
            |pod| pod.spec.as_mut().expect("a spec").containers[0].name = "other".into(),
        ];
        for (number, change) in changes.into_iter().enumerate() {
            let mut fake = real.clone();
            change(&mut fake);
            assert_eq!(AgentPod::of(&fake), None, "change {number}");
        }
    }

    /// The constants are those of the manifests.
    #[test]
    fn the_labels_and_the_container_are_those_of_the_daemonset() {
        let text = include_str!("../../deploy/base/daemonset.yaml");
        let daemonset: Value = serde_yaml::from_str(text).expect("YAML");
        let template = &daemonset["spec"]["template"];
        for label in LABELS.split(',') {
            let (key, value) = label.split_once('=').expect("a label");
            assert_eq!(template["metadata"]["labels"][key], value);
        }
        assert_eq!(template["spec"]["containers"][0]["name"], CONTAINER);
        assert_eq!(template["spec"]["hostNetwork"], true);
    }
}
