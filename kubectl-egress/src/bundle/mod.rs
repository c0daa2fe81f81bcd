//! `kubectl egress bundle`: one archive for a report, from all nodes.
//!
//! Objects and logs come from the API server, the rest from the agents, several at a time. What cannot be collected does not stop
//! the rest: it is named in the archive's summary and on standard error. Everything passes [`redact`], and Secrets are never
//! requested.

mod archive;
mod redact;

use std::collections::BTreeSet;
use std::fs::OpenOptions;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use egress_kube::leader_election::lease::LEASE_NAME;
use futures::stream::{self, StreamExt};
use serde_json::Value;
use tokio::time::{Instant, timeout_at};

use crate::agents::{AgentPod, on_node};
use crate::arguments::BundleArgs;
use crate::bundle::archive::{BundleArchive, BundleSummary};
use crate::cluster::{ClusterApi, LogEnd};
use crate::error::PluginError;
use crate::exec::{Exec, printable};

/// Kinds of objects that decide about egress, each with its file. Those of other systems are there where they are served.
const KINDS: [(&str, &str); 10] = [
    ("egressips", "/apis/k8s.ovn.org/v1/egressips"),
    ("egressservices", "/apis/k8s.ovn.org/v1/egressservices"),
    ("egressassignments", "/apis/egress-agent.io/v1alpha1/egressassignments"),
    ("egressnodes", "/apis/egress-agent.io/v1alpha1/egressnodes"),
    ("egressgatewaypolicystatuses", "/apis/egress-agent.io/v1alpha1/egressgatewaypolicystatuses"),
    ("egresses", "/apis/crd.antrea.io/v1beta1/egresses"),
    ("externalippools", "/apis/crd.antrea.io/v1beta1/externalippools"),
    ("ciliumegressgatewaypolicies", "/apis/cilium.io/v2/ciliumegressgatewaypolicies"),
    ("egressrouters", "/apis/network.operator.openshift.io/v1/egressrouters"),
    ("nodes", "/api/v1/nodes"),
];
/// Kinds in the agents' namespace.
const OF_NAMESPACE: [(&str, &str, &str); 5] = [
    ("pods", "/api/v1", "pods"),
    ("configmaps", "/api/v1", "configmaps"),
    ("daemonsets", "/apis/apps/v1", "daemonsets"),
    ("deployments", "/apis/apps/v1", "deployments"),
    ("leases", "/apis/coordination.k8s.io/v1", "leases"),
];
/// The label of our objects (`deploy/base/kustomization.yaml`), and ConfigMaps of ours that may be without it: generated names have a
/// suffix.
const OURS: (&str, &str) = ("app.kubernetes.io/name", "egress-agent");
const OUR_CONFIGMAPS: [&str; 3] = ["egress-agent-config", "egress-agent-settings", "egress-agent-hand-overs"];
/// What reports our events.
const REPORTER: &str = "egress-agent";
/// Events about kinds of cluster scope are in the namespace `default`.
const EVENTS: &str = "/api/v1/events";
/// Kinds whose events are kept, of every reporter.
const EVENT_KINDS: [&str; 10] = [
    "Node",
    "EgressIP",
    "EgressService",
    "EgressAssignment",
    "EgressNode",
    "EgressGatewayPolicyStatus",
    "Egress",
    "ExternalIPPool",
    "CiliumEgressGatewayPolicy",
    "EgressRouter",
];
/// Most objects of one kind.
const OBJECTS: usize = 10_000;
/// What is asked of each agent, with the file.
const QUESTIONS: [(&str, &[&str]); 3] = [
    ("status.json", &["status", "--output", "json"]),
    ("nat-count.json", &["nat", "count", "--output", "json"]),
    ("drops.json", &["drops", "--output", "json"]),
];
/// Nodes, or logs, at the same time.
const AT_ONCE: usize = 8;

/// A file, or the reason why it is missing. A command that fails may have printed something all the same.
#[derive(Debug, PartialEq, Eq)]
struct Collected {
    name: String,
    content: Option<Vec<u8>>,
    /// Its beginning is left out.
    is_cut: bool,
    complaint: Option<String>,
}

pub(crate) async fn run(args: &BundleArgs, cluster: &ClusterApi, exec: &impl Exec) -> Result<ExitCode, PluginError> {
    let unwritten = |source| PluginError::NoArchive { file: args.file.clone(), source };
    // Others on this machine are not to read it.
    let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&args.file).map_err(unwritten)?;
    let until = Instant::now() + Duration::from_secs(args.timeout);
    let collected = collect(BundleArchive::new(file), cluster, exec, until).await;
    let (_, summary) = or_removed(&args.file, collected).map_err(unwritten)?;
    println!("wrote {}", args.file.display());
    for (what, why) in &summary.missing {
        eprintln!("{}", printable(&format!("missing: {what}: {why}")));
    }
    for name in &summary.cut {
        eprintln!("{}", printable(&format!("cut at the limit: {name}")));
    }
    let is_whole = summary.missing.is_empty() && summary.cut.is_empty();
    Ok(if is_whole { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// A part of an archive is not left.
fn or_removed<T>(file: &Path, written: io::Result<T>) -> io::Result<T> {
    if written.is_err() {
        std::fs::remove_file(file)?;
    }
    written
}

/// Fails if the archive cannot be written, and only then.
async fn collect<W: Write>(
    mut archive: BundleArchive<W>,
    cluster: &ClusterApi,
    exec: &impl Exec,
    until: Instant,
) -> io::Result<(W, BundleSummary)> {
    match cluster.version().await {
        Ok(version) => archive.summary.kubernetes_version = Some(version),
        Err(error) => archive.miss("version of Kubernetes", error.to_string()),
    }
    let agents = cluster.agents().await.unwrap_or_else(|error| {
        archive.miss("agents", error.to_string());
        Vec::new()
    });
    let nodes = objects(&mut archive, cluster).await?;
    let namespaces: BTreeSet<&str> = agents.iter().map(|agent| agent.namespace.as_str()).collect();
    let mut ours = OurObjects::default();
    for namespace in &namespaces {
        of_namespace(&mut archive, cluster, namespace, &mut ours).await?;
    }
    events(&mut archive, cluster, &ours).await?;

    let (asked, unreachable) = askable(&agents, nodes);
    for (node, why) in unreachable {
        archive.miss(format!("nodes/{node}"), why);
    }
    let questions = asked.iter().flat_map(|agent| QUESTIONS.iter().map(move |question| (*agent, question)));
    let answers = questions.map(|(agent, (file, line))| question(exec, agent, file, line));
    let expected = asked.iter().flat_map(|agent| QUESTIONS.map(|(file, _)| format!("nodes/{}/{file}", agent.node)));
    add_all(&mut archive, answers, expected.collect(), until).await?;

    let logs = containers(&ours.pods);
    let expected = logs.iter().map(ContainerLog::name).collect();
    add_all(&mut archive, logs.iter().map(|log| log.read(cluster)), expected, until).await?;
    archive.finish()
}

/// Adds what arrives until the deadline, and names the rest.
async fn add_all<W: Write, F: Future<Output = Collected>>(
    archive: &mut BundleArchive<W>,
    parts: impl Iterator<Item = F>,
    mut expected: BTreeSet<String>,
    until: Instant,
) -> io::Result<()> {
    let mut parts = stream::iter(parts).buffer_unordered(AT_ONCE);
    while let Ok(Some(Collected { name, content, is_cut, complaint })) = timeout_at(until, parts.next()).await {
        expected.remove(&name);
        if let Some(content) = content {
            note_version(&mut archive.summary, &name, &content);
            archive.add(&name, &content)?;
        }
        if is_cut {
            archive.summary.cut.insert(name.clone());
        }
        if let Some(why) = complaint {
            archive.miss(name, why);
        }
    }
    for name in expected {
        archive.miss(name, "not read before --timeout");
    }
    Ok(())
}

/// The version that a status names.
fn note_version(summary: &mut BundleSummary, name: &str, content: &[u8]) {
    let node = name.strip_prefix("nodes/").and_then(|name| name.strip_suffix("/status.json"));
    let Some(node) = node else { return };
    let status: Option<Value> = serde_json::from_slice(content).ok();
    let version = status.as_ref().and_then(|status| status["agent"]["version"].as_str());
    summary.agent_versions.extend(version.map(|version| (node.to_owned(), version.to_owned())));
}

/// Adds all objects of [`KINDS`]; returns the names of the nodes.
async fn objects<W: Write>(archive: &mut BundleArchive<W>, cluster: &ClusterApi) -> io::Result<Vec<String>> {
    let mut nodes = Vec::new();
    for (name, path) in KINDS {
        let Some(items) = list(archive, cluster, name, path).await? else { continue };
        if name == "nodes" {
            nodes = items.iter().filter_map(|node| Some(node["metadata"]["name"].as_str()?.to_owned())).collect();
        }
        add_objects(archive, &format!("objects/{name}.json"), items)?;
    }
    Ok(nodes)
}

/// Our objects in the agents' namespaces.
#[derive(Default)]
struct OurObjects {
    pods: Vec<Value>,
    /// With their namespaces, of all kinds.
    names: BTreeSet<(String, String)>,
}

impl OurObjects {
    /// Also an object that is gone, or that is made of one of ours, as a ReplicaSet of a Deployment and its pods: its name begins with
    /// that of ours.
    fn has(&self, namespace: &str, name: &str) -> bool {
        let is_of = |ours: &str| name.strip_prefix(ours).is_some_and(|rest| rest.is_empty() || rest.starts_with('-'));
        self.names.iter().any(|(there, ours)| there == namespace && is_of(ours))
    }
}

/// Adds our objects in the agents' namespace.
async fn of_namespace<W: Write>(
    archive: &mut BundleArchive<W>,
    cluster: &ClusterApi,
    namespace: &str,
    ours: &mut OurObjects,
) -> io::Result<()> {
    for (kind, api, plural) in OF_NAMESPACE {
        let name = format!("{namespace}/{kind}");
        let path = format!("{api}/namespaces/{namespace}/{plural}");
        let Some(mut items) = list(archive, cluster, &name, &path).await? else { continue };
        items.retain(|item| is_ours(kind, &item["metadata"]));
        let named = items.iter().filter_map(|item| item["metadata"]["name"].as_str());
        ours.names.extend(named.map(|name| (namespace.to_owned(), name.to_owned())));
        if kind == "pods" {
            ours.pods.extend(items.iter().cloned());
        }
        add_objects(archive, &format!("objects/{name}.json"), items)?;
    }
    Ok(())
}

/// Others may share the namespace.
fn is_ours(kind: &str, metadata: &Value) -> bool {
    let name = metadata["name"].as_str().unwrap_or_default();
    metadata["labels"][OURS.0] == OURS.1
        || kind == "leases" && name == LEASE_NAME
        || kind == "configmaps" && OUR_CONFIGMAPS.iter().any(|ours| name.starts_with(ours))
}

async fn events<W: Write>(archive: &mut BundleArchive<W>, cluster: &ClusterApi, ours: &OurObjects) -> io::Result<()> {
    let Some(mut items) = list(archive, cluster, "events", EVENTS).await? else { return Ok(()) };
    items.retain(|event| is_wanted(event, ours));
    add_objects(archive, "objects/events.json", items)
}

/// Events of ours, such as those of pods that get no egress IP; about egress policies and nodes; and about our objects in the agents'
/// namespaces, which others may share.
fn is_wanted(event: &Value, ours: &OurObjects) -> bool {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let about = &event["involvedObject"];
    event["reportingComponent"] == REPORTER
        || EVENT_KINDS.contains(&text(&about["kind"]).as_str())
        || ours.has(&text(&event["metadata"]["namespace"]), &text(&about["name"]))
}

/// `None` if the server does not serve the kind, or refuses it, which the summary then says.
async fn list<W: Write>(
    archive: &mut BundleArchive<W>,
    cluster: &ClusterApi,
    name: &str,
    path: &str,
) -> io::Result<Option<Vec<Value>>> {
    match cluster.raw_list(path, OBJECTS).await {
        Ok(items) => {
            if items.as_ref().is_some_and(|items| items.len() == OBJECTS) {
                archive.summary.cut.insert(name.to_owned());
            }
            Ok(items)
        }
        Err(error) => {
            archive.miss(format!("objects/{name}.json"), error.to_string());
            Ok(None)
        }
    }
}

fn add_objects<W: Write>(archive: &mut BundleArchive<W>, name: &str, mut items: Vec<Value>) -> io::Result<()> {
    items.iter_mut().for_each(redact::object);
    archive.add(name, &serde_json::to_vec_pretty(&items)?)
}

/// The agents that can be asked, and the nodes whose agent cannot.
fn askable(agents: &[AgentPod], nodes: Vec<String>) -> (Vec<&AgentPod>, Vec<(String, String)>) {
    let names: BTreeSet<String> = nodes.into_iter().chain(agents.iter().map(|agent| agent.node.clone())).collect();
    let (mut asked, mut unreachable) = (Vec::new(), Vec::new());
    for node in names {
        match on_node(agents, &node) {
            Ok(agent) => asked.push(agent),
            Err(error) => unreachable.push((node, error.to_string())),
        }
    }
    (asked, unreachable)
}

async fn question(exec: &impl Exec, agent: &AgentPod, file: &str, line: &[&str]) -> Collected {
    let name = format!("nodes/{}/{file}", agent.node);
    let line: Vec<String> = line.iter().map(|word| (*word).to_owned()).collect();
    let (content, complaint) = match exec.collected(agent, &line).await {
        Ok(finished) if finished.code == 0 => (Some(redacted(&finished.stdout)), None),
        // `status` of a node that needs a look prints its report and ends with an error.
        Ok(finished) => {
            let printed = Some(&finished.stdout).filter(|printed| !printed.is_empty());
            (printed.map(|printed| redacted(printed)), Some(redact::text(&finished.complaint())))
        }
        Err(error) => (None, Some(error.to_string())),
    };
    Collected { name, content, is_cut: false, complaint }
}

/// One document, or one for each line, as `drops` prints them.
fn redacted(printed: &[u8]) -> Vec<u8> {
    let mut documents = Vec::new();
    for document in serde_json::Deserializer::from_slice(printed).into_iter::<Value>() {
        let Ok(mut document) = document else { return redact::log(&String::from_utf8_lossy(printed)).into_bytes() };
        redact::object(&mut document);
        documents.push(document.to_string());
    }
    documents.join("\n").into_bytes()
}

/// One log of a container.
#[derive(Debug, PartialEq, Eq)]
struct ContainerLog {
    namespace: String,
    pod: String,
    container: String,
    /// Of the container's last run before this one.
    previous: bool,
}

impl ContainerLog {
    fn name(&self) -> String {
        let Self { namespace, pod, container, previous } = self;
        format!("logs/{namespace}/{pod}.{container}{}.log", if *previous { ".previous" } else { "" })
    }

    async fn read(&self, cluster: &ClusterApi) -> Collected {
        let name = self.name();
        match cluster.log((&self.namespace, &self.pod), &self.container, self.previous).await {
            Ok(LogEnd { text, is_cut }) => {
                Collected { name, content: Some(redact::log(&text).into_bytes()), is_cut, complaint: None }
            }
            Err(error) => Collected { name, content: None, is_cut: false, complaint: Some(error.to_string()) },
        }
    }
}

/// The logs of all pods: of containers that have restarted the previous one too.
fn containers(pods: &[Value]) -> Vec<ContainerLog> {
    let mut logs = Vec::new();
    for pod in pods {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let (namespace, name) = (text(&pod["metadata"]["namespace"]), text(&pod["metadata"]["name"]));
        let statuses = ["initContainerStatuses", "containerStatuses"].map(|list| pod["status"][list].as_array());
        for status in statuses.into_iter().flatten().flatten() {
            let log = |previous| ContainerLog {
                namespace: namespace.clone(),
                pod: name.clone(),
                container: text(&status["name"]),
                previous,
            };
            logs.push(log(false));
            if status["restartCount"].as_u64().unwrap_or_default() > 0 {
                logs.push(log(true));
            }
        }
    }
    logs
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::bundle::archive::tests::files;
    use crate::cluster::testing::{agent, cluster, egress_ip};
    use crate::exec::testing::PlayedExec;
    use crate::exec::{ExecError, Finished, InputStream};

    fn lists() -> Vec<(&'static str, Value)> {
        let mut first = agent("n1");
        first["spec"]["containers"] = json!([{"name": "agent", "env": [{"name": "SOME_TOKEN", "value": "hunter2"}, {"name": "B", "value": "kept"}]}]);
        first["status"]["containerStatuses"] = json!([{
            "name": "agent", "image": "", "imageID": "", "ready": true, "restartCount": 1, "state": {"running": {}},
        }]);
        first["status"]["initContainerStatuses"] = json!([{
            "name": "mount-bpffs", "image": "", "imageID": "", "ready": true, "restartCount": 0, "state": {"terminated": {"exitCode": 0}},
        }]);
        let mut crashing = agent("n2");
        crashing["status"]["phase"] = json!("Failed");
        let mut other = agent("n1");
        other["metadata"] =
            json!({"namespace": "egress-agent", "name": "other", "labels": {"app.kubernetes.io/name": "other"}});
        other["status"]["containerStatuses"] = first["status"]["containerStatuses"].clone();
        let configmap = |name| {
            json!({
                "metadata": {"namespace": "egress-agent", "name": name},
                "data": {"agent.conf": "a=b", "k": "users:\nkind: Config\n"},
            })
        };
        let nodes = ["n1", "n2", "n3"].map(|name| json!({"metadata": {"name": name}}));
        let event = |namespace, kind, name, reporter| {
            let object = json!({"kind": kind, "name": name});
            json!({"metadata": {"namespace": namespace}, "involvedObject": object, "reportingComponent": reporter})
        };
        let lease = |name| json!({"metadata": {"namespace": "egress-agent", "name": name}});
        vec![
            ("pods", json!([first, crashing, other])),
            ("nodes", json!(nodes)),
            ("egressips", json!([egress_ip("first", "172.18.0.100", "n1")])),
            ("secrets", json!([{"metadata": {"name": "s"}, "data": {"x": "hunter2"}}])),
            ("configmaps", json!([configmap("egress-agent-config-5t9g"), configmap("of-others")])),
            (
                "events",
                json!([
                    event("default", "EgressIP", "first", "ovnk-controlplane"),
                    event("default", "Node", "n1", "node-controller"),
                    event("red", "Pod", "refused", "egress-agent"),
                    event("egress-agent", "Pod", "agent-n1", "kubelet"),
                    event("egress-agent", "ReplicaSet", "agent-n1-7d9f", "replicaset-controller"),
                    // Of others.
                    event("red", "Pod", "secret-project", "kubelet"),
                    event("red", "EgressFirewall", "secret-project", "ovnk-controlplane"),
                    event("red", "Pod", "agent-n1", "kubelet"),
                    event("egress-agent", "Pod", "other", "kubelet"),
                    event("egress-agent", "Pod", "agent-n10", "kubelet"),
                ]),
            ),
            ("leases", json!([lease("egress-agent-leader"), lease("of-others")])),
            ("log", json!("started\npassword=hunter2\n")),
        ]
    }

    /// No agent answers.
    struct SilentExec;

    impl Exec for SilentExec {
        async fn collected(&self, _: &AgentPod, _: &[String]) -> Result<Finished, ExecError> {
            std::future::pending().await
        }

        async fn streamed(&self, _: &AgentPod, _: &[String], _: InputStream) -> Result<u8, ExecError> {
            std::future::pending().await
        }

        async fn lines(
            &self,
            _: &AgentPod,
            _: &[String],
            _: impl AsyncFnMut(String) -> Result<(), PluginError>,
        ) -> Result<u8, PluginError> {
            std::future::pending().await
        }
    }

    async fn bundle(exec: &impl Exec, left: Duration) -> (std::collections::BTreeMap<String, String>, BundleSummary) {
        let cluster = cluster(&lists());
        let collected = collect(BundleArchive::new(Vec::new()), &cluster, exec, Instant::now() + left).await;
        let (bytes, summary) = collected.expect("it is written to memory");
        (files(&bytes), summary)
    }

    #[tokio::test]
    async fn it_has_all_nodes_that_answer_and_names_the_others() {
        let exec = PlayedExec::new(|_, line| match line {
            "nat count --output json" => {
                Finished { code: 1, stderr: b"error: no pins\n".to_vec(), ..Finished::default() }
            }
            "status --output json" => {
                let stdout = br#"{"agent": {"version": "0.1.0"}}"#.to_vec();
                Finished { code: 1, stdout, stderr: b"error: a link is missing\n".to_vec() }
            }
            "drops --output json" => {
                Finished { stdout: b"{\"a\": 1}\n{\"token\": \"x\"}\n".to_vec(), ..Finished::default() }
            }
            other => panic!("{other}"),
        });
        let (files, summary) = bundle(&exec, Duration::from_secs(60)).await;
        for name in [
            "objects/egressips.json",
            "objects/egress-agent/pods.json",
            "nodes/n1/status.json",
            "nodes/n1/drops.json",
            "logs/egress-agent/agent-n1.agent.log",
            "logs/egress-agent/agent-n1.mount-bpffs.log",
            "logs/egress-agent/agent-n1.agent.previous.log",
            "summary.json",
        ] {
            assert!(files.contains_key(name), "{name}: {:?}", files.keys());
        }
        assert_eq!(files["nodes/n1/drops.json"], "{\"a\":1}\n{\"token\":\"REDACTED\"}");
        assert_eq!(summary.agent_versions["n1"], "0.1.0");
        assert_eq!(summary.missing["nodes/n1/nat-count.json"], "no pins");
        assert_eq!(summary.missing["nodes/n1/status.json"], "a link is missing", "the status is there too");
        assert!(summary.missing["nodes/n2"].contains("its pod is Failed"), "{:?}", summary.missing);
        assert!(summary.missing["nodes/n3"].contains("no agent is on node n3"), "{:?}", summary.missing);
        let events: Vec<Value> = serde_json::from_str(&files["objects/events.json"]).expect("JSON");
        let about = events.iter().filter_map(|event| event["involvedObject"]["name"].as_str());
        assert_eq!(about.collect::<Vec<_>>(), ["first", "n1", "refused", "agent-n1", "agent-n1-7d9f"]);
    }

    /// Others may share the agents' namespace.
    #[tokio::test]
    async fn objects_and_logs_of_others_are_not_in_it() {
        let exec = PlayedExec::new(|_, _| Finished { stdout: b"{}".to_vec(), ..Finished::default() });
        let (files, _) = bundle(&exec, Duration::from_secs(60)).await;
        assert!(!files.keys().any(|name| name.contains("other")), "{:?}", files.keys());
        let names = |kind: &str| {
            let items: Vec<Value> =
                serde_json::from_str(&files[&format!("objects/egress-agent/{kind}.json")]).expect("JSON");
            items.iter().map(|item| item["metadata"]["name"].as_str().expect("a name").to_owned()).collect::<Vec<_>>()
        };
        assert_eq!(names("pods"), ["agent-n1", "agent-n2"]);
        assert_eq!(names("configmaps"), ["egress-agent-config-5t9g"]);
        assert_eq!(names("leases"), ["egress-agent-leader"]);
    }

    /// The names of ConfigMaps are those of the manifests.
    #[test]
    fn our_objects_are_known_by_the_manifests_label_and_names() {
        let kustomization = include_str!("../../../deploy/base/kustomization.yaml");
        let kustomization: Value = serde_yaml::from_str(kustomization).expect("YAML");
        assert_eq!(kustomization["labels"][0]["pairs"][OURS.0], OURS.1);
        for generated in kustomization["configMapGenerator"].as_array().expect("a list") {
            assert!(is_ours("configmaps", &json!({"name": generated["name"]})), "{generated}");
        }
        assert!(!is_ours("pods", &json!({"name": "egress-agent-config"})));
    }

    /// The API server counts a log's bytes from the first line that it returns.
    #[tokio::test]
    async fn of_a_long_log_the_newest_lines_are_kept_and_it_is_named() {
        let lines: Vec<String> = (0..10_000).map(|number| format!("{number:01000}")).collect();
        let log = ContainerLog { namespace: "a".into(), pod: "b".into(), container: "c".into(), previous: false };
        let read = log.read(&cluster(&[("log", json!(lines.join("\n")))])).await;
        let text = String::from_utf8(read.content.expect("a log")).expect("text");
        assert!(text.ends_with("9999") && read.is_cut, "{}", text.len());
        let read = log.read(&cluster(&[("log", json!("short"))])).await;
        assert_eq!((read.content, read.is_cut), (Some(b"short".to_vec()), false));
    }

    #[test]
    fn a_part_of_an_archive_is_removed() {
        let file = std::env::temp_dir().join(format!("egress-bundle-test-{}", std::process::id()));
        std::fs::write(&file, "part").expect("written");
        assert_eq!(or_removed(&file, Ok(1)).expect("kept"), 1);
        assert!(file.exists());
        let error = or_removed::<()>(&file, Err(io::ErrorKind::StorageFull.into())).expect_err("the first error");
        assert_eq!((error.kind(), file.exists()), (io::ErrorKind::StorageFull, false));
    }

    /// The Secret has the same word as the variable and the log.
    #[tokio::test]
    async fn no_credential_is_in_it() {
        let exec = PlayedExec::new(|_, _| Finished { stdout: b"{}".to_vec(), ..Finished::default() });
        let (files, _) = bundle(&exec, Duration::from_secs(60)).await;
        for (name, text) in &files {
            assert!(!text.contains("hunter2") && !text.contains("kind: Config"), "{name}: {text}");
        }
        assert!(files["objects/egress-agent/pods.json"].contains("kept"));
        assert!(!files.keys().any(|name| name.contains("secret")), "{:?}", files.keys());
    }

    #[tokio::test]
    async fn what_is_not_read_in_time_is_named() {
        let (files, summary) = bundle(&SilentExec, Duration::from_millis(50)).await;
        assert!(files.contains_key("objects/nodes.json"));
        assert_eq!(summary.missing["nodes/n1/status.json"], "not read before --timeout");
    }
}
