//! The check against an API server that plays the pods.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use clap::Parser;
use http::{Method, Request, Response};
use kube::Client;
use kube::client::Body;
use serde_json::{Value, json};

use super::*;
use crate::arguments::{Cli, PluginCommand};
use crate::cluster::testing::{agent, egress_ip};

/// The pods that exist, and everything that was asked.
#[derive(Clone, Default)]
struct PlayedCluster {
    pods: Arc<Mutex<BTreeMap<String, Value>>>,
    created: Arc<Mutex<Vec<Value>>>,
    /// So many requests for a pod's state fail.
    failing: Arc<Mutex<usize>>,
    /// A request to create a pod is unanswered, and takes effect after the first request to delete the pod.
    creates_late: bool,
    on_the_way: Arc<Mutex<BTreeMap<String, Value>>>,
}

/// What becomes of a pod, by its name: its status, and its log.
type Fate = fn(&str) -> (Value, &'static str);

fn ended(_: &str) -> (Value, &'static str) {
    let state = json!({"terminated": {"exitCode": 0}});
    let status = json!({"phase": "Succeeded", "containerStatuses": [{
        "name": "connect", "image": "", "imageID": "", "ready": false, "restartCount": 0, "state": state,
    }]});
    (status, "2026-01-01T00:00:00Z {\"connected\": true, \"body\": \"172.18.0.100\"}\n")
}

fn pending(_: &str) -> (Value, &'static str) {
    (json!({"phase": "Pending"}), "")
}

impl PlayedCluster {
    /// With `refuse` the pods of that kind are not created.
    fn api(&self, fate: Fate, refuse: Option<&'static str>) -> ClusterApi {
        let this = self.clone();
        let service = tower::service_fn(move |request: Request<Body>| {
            let this = this.clone();
            async move {
                let (parts, body) = request.into_parts();
                let bytes = body.collect_bytes().await.expect("a body");
                let (status, body) = this.answer(&parts.method, parts.uri.path(), &bytes, fate, refuse);
                if this.creates_late && parts.method == Method::POST {
                    return std::future::pending().await;
                }
                let text = body.as_str().map_or_else(|| body.to_string(), str::to_owned);
                Response::builder().status(status).body(Body::from(text.into_bytes()))
            }
        });
        ClusterApi::of(Client::new(service, "red"))
    }

    fn answer(&self, method: &Method, path: &str, body: &[u8], fate: Fate, refuse: Option<&str>) -> (u16, Value) {
        let failure = |code: u16| {
            (code, json!({"kind": "Status", "status": "Failure", "code": code, "reason": "x", "message": "no"}))
        };
        let mut pods = self.pods.lock().expect("not poisoned");
        if let Some(rest) = path.strip_prefix("/api/v1/namespaces/red/pods/") {
            let name = rest.trim_end_matches("/log");
            if *method == Method::DELETE
                && let Some(pod) = self.on_the_way.lock().expect("not poisoned").remove(name)
            {
                pods.insert(name.to_owned(), pod);
                return failure(404);
            }
            let mut failing = self.failing.lock().expect("not poisoned");
            if *method == Method::GET && *failing > 0 {
                *failing -= 1;
                return failure(503);
            }
            let Some(pod) = pods.get(name).cloned() else { return failure(404) };
            let (status, log) = fate(name);
            return match (method.clone(), rest.ends_with("/log")) {
                (Method::DELETE, _) => {
                    pods.remove(name);
                    (200, pod)
                }
                (_, true) => (200, log.into()),
                (_, false) => {
                    let mut pod = pod;
                    pod["status"] = status;
                    (200, pod)
                }
            };
        }
        match (method.clone(), path) {
            (Method::POST, "/api/v1/namespaces/red/pods") => {
                let pod: Value = serde_json::from_slice(body).expect("a pod");
                let name = pod["metadata"]["name"].as_str().expect("a name").to_owned();
                if refuse.is_some_and(|kind| name.contains(kind)) {
                    return failure(403);
                }
                self.created.lock().expect("not poisoned").push(pod.clone());
                let to =
                    if self.creates_late { &mut *self.on_the_way.lock().expect("not poisoned") } else { &mut *pods };
                to.insert(name, pod.clone());
                (201, pod)
            }
            (_, "/api/v1/namespaces/red") => (200, json!({"metadata": {"name": "red", "labels": {"a": "b"}}})),
            (_, "/apis/k8s.ovn.org/v1/egressips/first") => (200, object()),
            (_, "/apis/k8s.ovn.org/v1/egressips") => (200, json!({"metadata": {}, "items": [object()]})),
            (_, "/api/v1/pods") => {
                let mut agent = agent("n1");
                agent["spec"]["containers"] = json!([{"name": "agent", "image": "registry/egress-agent:1"}]);
                // Of a tenant: the labels and the container, in the network of pods.
                let mut fake = agent.clone();
                fake["metadata"] =
                    json!({"namespace": "tenant", "name": "fake", "labels": agent["metadata"]["labels"]});
                fake["spec"] = json!({"nodeName": "n1", "containers": [{"name": "agent", "image": "registry/fake"}]});
                (200, json!({"metadata": {}, "items": [fake, agent]}))
            }
            _ => (200, json!({"metadata": {}, "items": []})),
        }
    }

    fn left(&self) -> usize {
        self.pods.lock().expect("not poisoned").len()
    }
}

fn object() -> Value {
    let mut object = egress_ip("first", "172.18.0.100", "n2");
    object["spec"]["podSelector"] = json!({"matchLabels": {"app": "web"}});
    object
}

fn arguments(line: &str) -> CheckArgs {
    let line = std::iter::once("kubectl-egress").chain(line.split(' '));
    let PluginCommand::Check(args) = Cli::parse_from(line).command else { panic!("another command") };
    args
}

const LINE: &str = "check --target 198.51.100.10:80 --object first --http";

async fn play(
    played: &PlayedCluster,
    line: &str,
    fate: Fate,
    refuse: Option<&'static str>,
) -> Result<CheckVerdict, PluginError> {
    let short = Duration::from_millis(1);
    check(&arguments(line), &played.api(fate, refuse), short, std::future::pending()).await
}

#[tokio::test]
async fn two_pods_connect_and_are_removed() {
    let played = PlayedCluster::default();
    let verdict = play(&played, LINE, ended, None).await.expect("a verdict");
    assert!(verdict.works, "{verdict:?}");
    assert_eq!(verdict.lines.last().map(String::as_str), Some("works: the target sees the egress IP 172.18.0.100"));
    assert_eq!(played.left(), 0);
    let created = played.created.lock().expect("not poisoned");
    let [selected, beside] = created.as_slice() else { panic!("{created:?}") };
    assert_eq!(
        (&selected["metadata"]["labels"]["app"], &beside["metadata"]["labels"]["app"]),
        (&json!("web"), &Value::Null)
    );
    for pod in [selected, beside] {
        // No Service sends connections to a pod that is never ready.
        assert_eq!(pod["spec"]["readinessGates"], json!([{"conditionType": "egress-agent.io/check"}]));
    }
    let container = &selected["spec"]["containers"][0];
    assert_eq!(container["image"], "registry/egress-agent:1");
    assert_eq!(container["command"], json!(["egress-agent", "connect", "198.51.100.10:80", "--http"]));
    assert!(verdict.lines[0].contains("(selected)") && verdict.lines[1].contains("(not selected)"), "{verdict:?}");
}

/// A quota, a pod that does not start, and Ctrl-C.
#[tokio::test]
async fn the_pods_are_removed_whatever_happens() {
    let played = PlayedCluster::default();
    let error = play(&played, LINE, ended, Some("beside")).await.expect_err("refused").to_string();
    assert!(error.contains("cannot create a pod of the check"), "{error}");
    assert_eq!((played.created.lock().expect("not poisoned").len(), played.left()), (1, 0));

    let api = played.api(pending, None);
    let stop = tokio::time::sleep(Duration::from_millis(50));
    let interrupted = check(&arguments(LINE), &api, Duration::from_millis(1), stop).await;
    assert!(matches!(interrupted, Err(PluginError::Interrupted)));
    assert_eq!((played.created.lock().expect("not poisoned").len(), played.left()), (3, 0));
}

/// Ctrl-C while the API server has a request to create a pod, which it answers too late.
#[tokio::test]
async fn a_pod_that_appears_after_the_interruption_is_removed() {
    let played = PlayedCluster { creates_late: true, ..PlayedCluster::default() };
    let api = played.api(pending, None);
    let created = played.created.clone();
    let stop = async move {
        while created.lock().expect("not poisoned").is_empty() {
            tokio::task::yield_now().await;
        }
    };
    let interrupted = check(&arguments(LINE), &api, Duration::from_millis(1), stop).await;
    assert!(matches!(interrupted, Err(PluginError::Interrupted)));
    assert!(played.on_the_way.lock().expect("not poisoned").is_empty(), "it has appeared");
    assert_eq!(played.left(), 0);
}

#[tokio::test]
async fn a_request_that_fails_is_repeated() {
    let played = PlayedCluster { failing: Arc::new(Mutex::new(3)), ..PlayedCluster::default() };
    let verdict = play(&played, LINE, ended, None).await.expect("a verdict");
    assert!(verdict.works, "{verdict:?}");
    assert_eq!(*played.failing.lock().expect("not poisoned"), 0);
}

#[tokio::test]
async fn nothing_is_created_for_a_pod_that_the_object_does_not_select() {
    let played = PlayedCluster::default();
    for (line, said) in [
        ("check --target 198.51.100.10:80 --object first --labels app=other", "app=other"),
        ("check --target 198.51.100.10:80 --object second", "there is no EgressIP second"),
    ] {
        let error = play(&played, line, ended, None).await.expect_err("refused").to_string();
        assert!(error.contains(said), "{error}");
    }
    assert!(played.created.lock().expect("not poisoned").is_empty());
}

#[test]
fn a_pod_that_cannot_start_is_not_waited_for() {
    let of = |status: Value| {
        let pod = json!({"metadata": {"name": "one"}, "status": status});
        progress(&serde_json::from_value(pod).expect("a pod"))
    };
    let waiting = |reason: &str| {
        json!({"phase": "Pending", "containerStatuses": [{
            "name": "connect", "image": "", "imageID": "", "ready": false, "restartCount": 0,
            "state": {"waiting": {"reason": reason, "message": "why"}},
        }]})
    };
    assert_eq!(of(waiting("ImagePullBackOff")), PodProgress::Stuck("ImagePullBackOff: why".into()));
    assert_eq!(of(waiting("ContainerCreating")), PodProgress::Waiting("it was Pending".into()));
    assert_eq!(
        of(json!({"phase": "Failed", "reason": "DeadlineExceeded"})),
        PodProgress::Stuck("DeadlineExceeded".into())
    );
    let unscheduled = json!({"type": "PodScheduled", "status": "False", "message": "no node fits"});
    assert_eq!(
        of(json!({"phase": "Pending", "conditions": [unscheduled]})),
        PodProgress::Waiting("no node fits".into())
    );
}
