//! `kubectl egress check`: two pods connect to a target, one that an EgressIP selects and one beside it.
//!
//! The pods run `egress-agent connect` of the agents' image, which each node has. They are removed whatever happens, also by
//! Ctrl-C; should even that fail, their deadline ends them, and a label finds them.

mod verdict;

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::process::ExitCode;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use egress_core::model::policy::{EgressPolicy, PolicyKey, PolicyKind, parse_egress_ip};
use egress_core::model::view::Labels;
use k8s_openapi::api::core::v1::{Namespace, Pod};
use kube::api::{Api, DeleteParams, PostParams};
use kube::core::DynamicObject;
use serde_json::json;
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::{Instant, sleep, timeout_at};

use crate::arguments::CheckArgs;
use crate::check::verdict::{CheckVerdict, CheckedPod, ConnectReport, judge};
use crate::cluster::{ClusterApi, PATIENCE};
use crate::error::PluginError;
use crate::exec::printable;

/// Of both pods.
const SELECTOR: &str = "app.kubernetes.io/name=egress-check";
const INTERVAL: Duration = Duration::from_secs(1);
/// Nothing sets it, so the pods are never ready: a Service whose selector fits their labels sends them no connections.
const READINESS_GATE: &str = "egress-agent.io/check";
/// The pods' own deadline is later than that of the command by this.
const SPARE_SECS: u64 = 60;

pub(crate) async fn run(args: &CheckArgs, cluster: &ClusterApi) -> Result<ExitCode, PluginError> {
    let mut terminate = signal(SignalKind::terminate()).map_err(PluginError::Runtime)?;
    let stop = async {
        tokio::select! {
            _ = tokio::signal::ctrl_c() => {}
            _ = terminate.recv() => {}
        }
    };
    let CheckVerdict { lines, works } = check(args, cluster, INTERVAL, stop).await?;
    lines.iter().for_each(|line| println!("{}", printable(line)));
    Ok(if works { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Removes the pods before it returns, unless that fails, which is the error then. After a failure they are removed a second time,
/// an interval later: a request to create one may have been on its way.
async fn check(
    args: &CheckArgs,
    cluster: &ClusterApi,
    interval: Duration,
    stop: impl Future<Output = ()>,
) -> Result<CheckVerdict, PluginError> {
    let plan = CheckPlan::make(args, cluster).await?;
    let pods: Api<Pod> = Api::namespaced(cluster.client.clone(), cluster.namespace());
    let outcome = tokio::select! {
        outcome = play(&plan, &pods, args, cluster, interval) => outcome,
        () = stop => Err(PluginError::Interrupted),
    };
    let mut failed = remove(&plan, &pods).await;
    if outcome.is_err() || !failed.is_empty() {
        sleep(interval).await;
        failed = remove(&plan, &pods).await;
    }
    if failed.is_empty() {
        return outcome;
    }
    let namespace = cluster.namespace().to_owned();
    Err(PluginError::NotRemoved { namespace, why: failed.join("; "), selector: SELECTOR })
}

/// Why pods could not be removed.
async fn remove(plan: &CheckPlan, pods: &Api<Pod>) -> Vec<String> {
    let mut failed = Vec::new();
    for (name, ..) in &plan.pods {
        let at_once = DeleteParams::default().grace_period(0);
        match PATIENCE.wait("delete a pod of the check", pods.delete(name, &at_once)).await {
            Ok(_) => {}
            // Not created.
            Err(error) if error.is_not_found() => {}
            Err(error) => failed.push(error.to_string()),
        }
    }
    failed
}

/// What is known before anything is created.
struct CheckPlan {
    /// The name, the labels and whether the object selects it; the selected pod first.
    pods: [(String, Labels, bool); 2],
    image: String,
    /// The addresses of the object that nodes serve.
    egress_ips: BTreeSet<IpAddr>,
}

impl CheckPlan {
    async fn make(args: &CheckArgs, cluster: &ClusterApi) -> Result<Self, PluginError> {
        let policies = cluster.policies().await?;
        let key = PolicyKey { kind: PolicyKind::EgressIp, name: args.object.clone() };
        let policy = policies.get(&key).ok_or_else(|| PluginError::NoObject(args.object.clone()))?;
        let labels: Labels = match args.labels.is_empty() {
            true => match_labels(args, cluster).await?,
            false => args.labels.iter().cloned().collect(),
        };
        let namespaces: Api<Namespace> = Api::all(cluster.client.clone());
        let namespace = PATIENCE.wait("get the namespace", namespaces.get(cluster.namespace())).await?;
        let of_namespace = namespace.metadata.labels.unwrap_or_default();
        if !is_selected(policy, &of_namespace, &labels) {
            return Err(PluginError::NotSelected {
                object: args.object.clone(),
                namespace: cluster.namespace().to_owned(),
                labels: shown(&labels),
            });
        }
        let image = match &args.image {
            Some(image) => image.clone(),
            None => cluster.agents().await?.into_iter().find_map(|agent| agent.image).ok_or(PluginError::NoImage)?,
        };
        let beside = Labels::new();
        let is_beside_selected = is_selected(policy, &of_namespace, &beside);
        let number = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis());
        let name = |kind: &str| format!("egress-check-{kind}-{number:x}");
        let served = policy.published.items.iter().filter_map(|item| parse_egress_ip(&item.egress_ip));
        Ok(Self {
            pods: [(name("selected"), labels, true), (name("beside"), beside, is_beside_selected)],
            image,
            egress_ips: served.collect(),
        })
    }
}

async fn match_labels(args: &CheckArgs, cluster: &ClusterApi) -> Result<Labels, PluginError> {
    let objects: Api<DynamicObject> = egress_kube::policy::requests(&cluster.client, PolicyKind::EgressIp);
    let object = PATIENCE.wait("get the EgressIP", objects.get(&args.object)).await?;
    let labels = object.data["spec"]["podSelector"]["matchLabels"].as_object().cloned().unwrap_or_default();
    Ok(labels.into_iter().filter_map(|(key, value)| Some((key, value.as_str()?.to_owned()))).collect())
}

fn is_selected(policy: &EgressPolicy, namespace: &Labels, pod: &Labels) -> bool {
    let rules = policy.rules.iter().flatten().flat_map(|rule| &rule.selects);
    // An EgressIP selects by no labels of nodes.
    rules.into_iter().any(|one| one.namespaces.matches(namespace) && one.pods.matches(pod))
}

fn shown(labels: &Labels) -> String {
    let pairs: Vec<String> = labels.iter().map(|(key, value)| format!("{key}={value}")).collect();
    if pairs.is_empty() { "no labels".to_owned() } else { format!("the labels {}", pairs.join(",")) }
}

async fn play(
    plan: &CheckPlan,
    pods: &Api<Pod>,
    args: &CheckArgs,
    cluster: &ClusterApi,
    interval: Duration,
) -> Result<CheckVerdict, PluginError> {
    let until = Instant::now() + Duration::from_secs(args.timeout);
    for (name, labels, _) in &plan.pods {
        let pod = pod(name, labels, &plan.image, args);
        PATIENCE.wait("create a pod of the check", pods.create(&PostParams::default(), &pod)).await?;
    }
    let [selected, beside] = &plan.pods;
    let (selected, beside) = tokio::join!(
        outcome(selected, pods, cluster, until, interval),
        outcome(beside, pods, cluster, until, interval)
    );
    Ok(judge(&selected?, &beside?, &plan.egress_ips))
}

/// It fits the Pod Security Standard `restricted`.
fn pod(name: &str, labels: &Labels, image: &str, args: &CheckArgs) -> Pod {
    let mut command = vec!["egress-agent".to_owned(), "connect".to_owned(), args.target.to_string()];
    command.extend(args.http.then(|| "--http".to_owned()));
    let mut labels = labels.clone();
    // The label of an object's selector stays, even if it is this one.
    if let Some((key, value)) = SELECTOR.split_once('=') {
        labels.entry(key.to_owned()).or_insert_with(|| value.to_owned());
    }
    let value = json!({
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "restartPolicy": "Never",
            "readinessGates": [{"conditionType": READINESS_GATE}],
            "automountServiceAccountToken": false,
            "activeDeadlineSeconds": args.timeout + SPARE_SECS,
            "securityContext": {
                "runAsNonRoot": true,
                "runAsUser": 65_534,
                "runAsGroup": 65_534,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [{
                "name": "connect",
                "image": image,
                "imagePullPolicy": "IfNotPresent",
                "command": command,
                "resources": {"requests": {"cpu": "10m", "memory": "32Mi"}, "limits": {"memory": "128Mi"}},
                "securityContext": {
                    "allowPrivilegeEscalation": false,
                    "readOnlyRootFilesystem": true,
                    "capabilities": {"drop": ["ALL"]},
                },
            }],
        },
    });
    serde_json::from_value(value).expect("a pod of this API")
}

/// Waits until the pod has ended, or cannot start. A request that fails is repeated.
async fn outcome(
    (name, _, is_selected): &(String, Labels, bool),
    pods: &Api<Pod>,
    cluster: &ClusterApi,
    until: Instant,
    interval: Duration,
) -> Result<CheckedPod, PluginError> {
    loop {
        let (state, node) = match PATIENCE.wait("get a pod of the check", pods.get(name)).await {
            Ok(pod) => (progress(&pod), pod.spec.and_then(|spec| spec.node_name)),
            Err(error) if error.is_not_found() => (PodProgress::Stuck("it was deleted".to_owned()), None),
            Err(error) => (PodProgress::Waiting(error.to_string()), None),
        };
        let report = match state {
            PodProgress::Ended => read(cluster, name).await?,
            PodProgress::Stuck(why) => Err(why),
            PodProgress::Waiting(why) => match timeout_at(until, sleep(interval)).await {
                Ok(()) => continue,
                Err(_) => Err(format!("{why} (at --timeout)")),
            },
        };
        return Ok(CheckedPod { name: name.clone(), node, is_selected: *is_selected, report });
    }
}

async fn read(cluster: &ClusterApi, name: &str) -> Result<Result<ConnectReport, String>, PluginError> {
    let log = cluster.log((cluster.namespace(), name), "connect", false).await?.text;
    // Each line has a timestamp before it.
    let mut reports = log.lines().filter_map(|line| serde_json::from_str(line.split_once(' ')?.1).ok());
    Ok(reports.next_back().ok_or_else(|| format!("it printed no report: {:?}", log.trim())))
}

#[derive(Debug, PartialEq, Eq)]
enum PodProgress {
    Ended,
    /// It does not start by itself.
    Stuck(String),
    Waiting(String),
}

/// Reasons of a waiting container that time does not mend within a check.
const STUCK: [&str; 6] = [
    "ErrImagePull",
    "ImagePullBackOff",
    "InvalidImageName",
    "ErrImageNeverPull",
    "CreateContainerConfigError",
    "CreateContainerError",
];

fn progress(pod: &Pod) -> PodProgress {
    let Some(status) = &pod.status else { return PodProgress::Waiting("it had no status".to_owned()) };
    let phase = status.phase.as_deref().unwrap_or("Unknown");
    let mut states = status.container_statuses.iter().flatten().filter_map(|one| one.state.as_ref());
    if states.clone().any(|state| state.terminated.is_some()) {
        return PodProgress::Ended;
    }
    if phase == "Failed" {
        return PodProgress::Stuck(status.reason.clone().unwrap_or_else(|| "it was ended".to_owned()));
    }
    if let Some(waiting) = states.find_map(|state| state.waiting.as_ref())
        && let Some(reason) = waiting.reason.as_deref().filter(|reason| STUCK.contains(reason))
    {
        return PodProgress::Stuck(format!("{reason}: {}", waiting.message.as_deref().unwrap_or("no message")));
    }
    let conditions = status.conditions.iter().flatten();
    let unscheduled = conditions.filter(|one| one.type_ == "PodScheduled" && one.status == "False");
    let why = unscheduled.filter_map(|one| one.message.clone()).next();
    PodProgress::Waiting(why.unwrap_or_else(|| format!("it was {phase}")))
}

#[cfg(test)]
mod tests;
