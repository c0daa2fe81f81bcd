//! Agents of three nodes against a real or in-memory API server, with a recorder in the kernel's place.
//!
//! `EGRESS_TEST_KUBECONFIG` names the server (`cargo xtask apiserver --kubeconfig FILE` starts one); without it the test is
//! skipped. It installs the CRD and removes everything else at its end.

#[path = "../skips/mod.rs"]
mod skips;
mod slow;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::skips::skipped;
use egress_agent::controller;
use egress_agent::controller::node_health::session::{Dial, ProbeSettings};
use egress_agent::controller::run::ControllerSettings;
use egress_agent::health;
use egress_agent::metrics::Meters;
use egress_agent::node::run::{self, AgentSettings};
use egress_core::model::reserved::ClusterNetworks;
use egress_core::model::settings::{NodeSettings, OnUnassigned, UnknownPods};
use egress_core::model::state::{Action, HandoverStage, HandoverState, KernelState, PodState};
use egress_core::node_health::liveness::ProbeTiming;
use egress_core::plan::executor::{DataplaneError, Executor};
use egress_kube::api_outage::ApiOutages;
use egress_kube::client::connect;
use egress_kube::crd::{EgressAssignment, EgressIP, EgressNode, EgressService};
use egress_kube::health_key::SharedKey;
use egress_kube::metrics_token;
use futures::future::BoxFuture;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{ConfigMap, Namespace, Node, Pod, Secret, ServiceAccount};
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::{Client, CustomResourceExt, Resource};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

/// A model of one node's kernel.
#[derive(Clone, Default)]
struct ModelKernel {
    node: &'static str,
    state: Arc<Mutex<KernelState>>,
    lan: Lan,
}

/// Which node holds each address. Two must never hold one at the same time.
#[derive(Clone, Default)]
struct Lan {
    holders: Arc<Mutex<BTreeMap<IpAddr, &'static str>>>,
    clashes: Arc<Mutex<Vec<String>>>,
}

impl Lan {
    fn note(&self, node: &'static str, action: &Action) {
        let mut holders = self.holders.lock().expect("not poisoned");
        match action {
            Action::Own(_, address) => {
                let other = holders.insert(*address, node).filter(|other| *other != node);
                let clash = other.map(|other| format!("{address} at {node} while {other} holds it"));
                self.clashes.lock().expect("not poisoned").extend(clash);
            }
            Action::Disown(_, address)
            | Action::PutHandover(_, HandoverState { stage: HandoverStage::Leaving, address, .. })
                if holders.get(address) == Some(&node) =>
            {
                holders.remove(address);
            }
            _ => {}
        }
    }

    fn clashes(&self) -> Vec<String> {
        self.clashes.lock().expect("not poisoned").clone()
    }
}

impl Executor for ModelKernel {
    async fn held(&mut self) -> Result<KernelState, DataplaneError> {
        let KernelState { owned, handovers, .. } = self.now();
        Ok(KernelState { owned, handovers, ..KernelState::default() })
    }

    async fn observe(&mut self) -> Result<KernelState, DataplaneError> {
        Ok(self.now())
    }

    fn cut(&mut self, _cuts: Vec<Action>) -> BoxFuture<'static, Result<(), DataplaneError>> {
        Box::pin(std::future::ready(Ok(())))
    }

    async fn apply(&mut self, action: &Action) -> Result<(), DataplaneError> {
        self.lan.note(self.node, action);
        self.state.lock().expect("not poisoned").apply(action);
        Ok(())
    }
}

impl ModelKernel {
    fn now(&self) -> KernelState {
        self.state.lock().expect("not poisoned").clone()
    }
}

/// Management addresses on this host's loopback, so that the controller's TCP probes of the discard port succeed.
const PODS: &str = "127.244.0.0/16";
const RULES: ProbeTiming =
    ProbeTiming { total: Duration::from_secs(1), interval: Duration::from_millis(250), grace: Duration::from_secs(1) };
const NODES: [&str; 3] = ["t-node1", "t-node2", "t-node3"];

struct Cluster {
    rules: ProbeTiming,
    client: Client,
    outages: ApiOutages,
    kernels: BTreeMap<&'static str, ModelKernel>,
    lan: Lan,
    stop: CancellationToken,
}

impl Cluster {
    fn objects(&self) -> Api<EgressIP> {
        Api::all(self.client.clone())
    }

    async fn object(&self, name: &str) -> Option<Value> {
        let object = self.objects().get_opt(name).await.expect("the server answers");
        object.map(|object| serde_json::to_value(object).expect("serializable"))
    }

    /// Node of each assigned address.
    async fn items(&self, name: &str) -> BTreeMap<String, String> {
        let object = self.object(name).await.unwrap_or_default();
        let items = object["status"]["items"].as_array().cloned().unwrap_or_default();
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        items.iter().map(|item| (text(&item["egressIP"]), text(&item["node"]))).collect()
    }

    /// The open hand-overs as text, and the number of the last one.
    async fn ledger(&self) -> (String, u64) {
        let ledgers: Api<ConfigMap> = Api::namespaced(self.client.clone(), "kube-system");
        let ledger = ledgers.get_opt("egress-agent-hand-overs").await.expect("the server answers");
        let data = ledger.and_then(|ledger| ledger.data).unwrap_or_default();
        (
            data.get("records").cloned().unwrap_or_default(),
            data.get("last").map_or(0, |text| text.parse().expect("a number")),
        )
    }

    /// The hand-overs that a node has acknowledged as the old owner, by address.
    async fn released(&self, node: &str) -> BTreeMap<String, u64> {
        let nodes: Api<EgressNode> = Api::all(self.client.clone());
        let status = nodes.get_opt(node).await.expect("the server answers").and_then(|node| node.status);
        let all = status.and_then(|status| status.released).unwrap_or_default();
        all.into_iter().map(|one| (one.address, one.hand_over)).collect()
    }

    async fn label(&self, node: &str, on: bool) {
        let value = if on { json!("") } else { Value::Null };
        self.patch(node, json!({"labels": {"k8s.ovn.org/egress-assignable": value}})).await;
    }

    async fn patch(&self, node: &str, metadata: Value) {
        let nodes: Api<Node> = Api::all(self.client.clone());
        let patch = Patch::Merge(json!({"metadata": metadata}));
        nodes.patch(node, &PatchParams::default(), &patch).await.expect("a patched node");
    }

    fn start(&mut self) -> JoinSet<()> {
        let mut agents = JoinSet::new();
        for name in NODES {
            let settings = AgentSettings {
                model: NodeSettings {
                    node_name: name.into(),
                    api_servers: std::collections::BTreeSet::new(),
                    cluster_subnets: vec![PODS.parse().expect("a literal")],
                    service_cidrs: Vec::new(),
                    excluded_cidrs: Vec::new(),
                    unknown_pods: UnknownPods::Auto,
                    on_unassigned: OnUnassigned::NodeAddress,
                },
                namespace: "kube-system".into(),
                health: health::HealthSettings { port: 0, tls: None, total_timeout: self.rules.total },
                overlay: None,
                host: None,
                questions: None,
                health_page: None,
                outages: self.outages.clone(),
            };
            let new = || ModelKernel { node: name, lan: self.lan.clone(), ..ModelKernel::default() };
            let kernel = self.kernels.entry(name).or_insert_with(new).clone();
            agents.spawn(run::run(self.client.clone(), settings, kernel, self.stop.clone()));
        }
        for name in &NODES[..2] {
            let settings = ControllerSettings {
                node_name: (*name).to_owned(),
                namespace: "kube-system".into(),
                networks: ClusterNetworks {
                    pods: vec![PODS.parse().expect("a literal")],
                    ..ClusterNetworks::default()
                },
                on_unassigned: OnUnassigned::NodeAddress,
                serves_antrea: false,
                serves_cilium: false,
                metrics_token_interval: Some(Duration::from_millis(100)),
                router_image: None,
                probing: ProbeSettings {
                    rules: self.rules,
                    port: 0,
                    dial: Dial::Plaintext,
                    key: SharedKey::default(),
                    meters: Meters::default(),
                    events: None,
                    outages: None,
                },
                overlay: None,
                outages: self.outages.clone(),
                health_page: None,
            };
            agents.spawn(controller::run::run(self.client.clone(), settings, self.stop.clone()));
        }
        agents
    }
}

/// Waits until the condition is true.
async fn until<F: Future<Output = bool>>(what: &str, condition: impl FnMut() -> F) {
    within(Duration::from_secs(15), what, condition).await;
}

async fn within<F: Future<Output = bool>>(limit: Duration, what: &str, mut condition: impl FnMut() -> F) {
    let begin = tokio::time::Instant::now();
    while begin.elapsed() < limit {
        if condition().await {
            return;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("not within {limit:?}: {what}");
}

async fn put<K>(api: &Api<K>, value: Value)
where
    K: Resource + Clone + Serialize + DeserializeOwned + std::fmt::Debug,
{
    let object = serde_json::from_value(value).expect("an object");
    api.create(&PostParams::default(), &object).await.expect("created");
}

/// Installs our CRD, or one like OVN-Kubernetes': no status subresource, no conditions.
async fn install_crd(client: &Client, full: bool) {
    let mut crd = serde_json::to_value(EgressIP::crd()).expect("serializable");
    let version = &mut crd["spec"]["versions"][0];
    if !full {
        version["subresources"] = json!({});
        let status = &mut version["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"];
        *status = json!({"items": status["items"]});
    }
    let crds: Api<CustomResourceDefinition> = Api::all(client.clone());
    let name = "egressips.k8s.ovn.org";
    if let Some(old) = crds.get_opt(name).await.expect("the server answers") {
        crd["metadata"]["resourceVersion"] = json!(old.metadata.resource_version);
        let crd = serde_json::from_value(crd).expect("a CRD");
        crds.replace(name, &PostParams::default(), &crd).await.expect("replaced");
    } else {
        put(&crds, crd).await;
    }
    for other in [EgressNode::crd(), EgressService::crd(), EgressAssignment::crd()] {
        match crds.create(&PostParams::default(), &other).await {
            Err(kube::Error::Api(status)) if status.code == 409 => {}
            created => drop(created.expect("created")),
        }
    }
    let assignments: Api<EgressAssignment> = Api::all(client.clone());
    until("the kind EgressAssignment is served", || async { assignments.list(&ListParams::default()).await.is_ok() })
        .await;
    let egress_nodes: Api<EgressNode> = Api::all(client.clone());
    until("the kind EgressNode is served", || async { egress_nodes.list(&ListParams::default()).await.is_ok() }).await;
    // A new kind is not served at once.
    let objects: Api<EgressIP> = Api::all(client.clone());
    until("the kind is served", || async { objects.list(&ListParams::default()).await.is_ok() }).await;
}

async fn set_up(client: &Client) {
    let namespaces: Api<Namespace> = Api::all(client.clone());
    put(&namespaces, json!({"metadata": {"name": "t-prod", "labels": {"env": "t-prod"}}})).await;
    // Without it a real server refuses pods; a controller may have created it already.
    let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), "t-prod");
    let account = serde_json::from_value(json!({"metadata": {"name": "default"}})).expect("an account");
    drop(accounts.create(&PostParams::default(), &account).await);
    let nodes: Api<Node> = Api::all(client.clone());
    let pods: Api<Pod> = Api::namespaced(client.clone(), "t-prod");
    for (i, name) in (1..).zip(NODES) {
        let annotations = json!({
            "k8s.ovn.org/node-primary-ifaddr": json!({"ipv4": format!("172.18.0.{i}/16"), "ipv6": ""}).to_string(),
            "k8s.ovn.org/node-subnets": json!({"default": [format!("127.244.{i}.0/24")]}).to_string(),
        });
        put(&nodes, json!({"metadata": {"name": name, "annotations": annotations}})).await;
        let status = json!({"status": {"conditions": [{"type": "Ready", "status": "True"}]}});
        nodes.patch_status(name, &PatchParams::default(), &Patch::Merge(status)).await.expect("ready");
        let pod = format!("t-pod{i}");
        let spec = json!({"nodeName": name, "containers": [{"name": "c", "image": "i"}]});
        put(&pods, json!({"metadata": {"name": pod, "labels": {"app": "web"}}, "spec": spec})).await;
        let address = format!("127.244.{i}.10");
        let status = json!({"status": {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}]}});
        pods.patch_status(&pod, &PatchParams::default(), &Patch::Merge(status)).await.expect("an address");
    }
}

async fn tear_down(client: &Client) {
    let now = DeleteParams { grace_period_seconds: Some(0), ..DeleteParams::default() };
    let pods: Api<Pod> = Api::namespaced(client.clone(), "t-prod");
    let nodes: Api<Node> = Api::all(client.clone());
    for i in 1..=NODES.len() {
        // Missing objects need no deletion.
        drop(pods.delete(&format!("t-pod{i}"), &now).await);
        drop(nodes.delete(&format!("t-node{i}"), &now).await);
        drop(Api::<EgressNode>::all(client.clone()).delete(&format!("t-node{i}"), &now).await);
    }
    drop(Api::<Namespace>::all(client.clone()).delete("t-prod", &now).await);
    end_namespace(client, "t-prod").await;
    drop(secrets(client).delete(metrics_token::SECRET_NAME, &now).await);
    for name in ["t-eip", "t-other", "t-third"] {
        drop(Api::<EgressIP>::all(client.clone()).delete(name, &now).await);
    }
}

/// A bare API server has no controller that ends a deleted namespace.
async fn end_namespace(client: &Client, name: &str) {
    let namespaces: Api<Namespace> = Api::all(client.clone());
    let Some(mut namespace) = namespaces.get_opt(name).await.expect("the server answers") else { return };
    namespace.spec.get_or_insert_default().finalizers = None;
    // A controller may have done it already.
    drop(namespaces.replace_subresource("finalize", name, &PostParams::default(), &namespace).await);
    until("the namespace is gone", || async { namespaces.get_opt(name).await.is_ok_and(|found| found.is_none()) })
        .await;
}

fn eip(name: &str, addresses: &[&str]) -> Value {
    json!({
        "apiVersion": "k8s.ovn.org/v1", "kind": "EgressIP",
        "metadata": {"name": name, "annotations": {"team": "x"}},
        "spec": {"egressIPs": addresses, "namespaceSelector": {"matchLabels": {"env": "t-prod"}}},
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_agents_assign_number_select_and_move() {
    let Some(kubeconfig) = std::env::var_os("EGRESS_TEST_KUBECONFIG") else {
        skipped("EGRESS_TEST_KUBECONFIG names no API server");
        return;
    };
    let (client, outages) = connect(Some(kubeconfig.as_ref())).await.expect("a kubeconfig");
    for full in [true, false] {
        install_crd(&client, full).await;
        tear_down(&client).await;
        set_up(&client).await;
        let (kernels, lan) = (BTreeMap::new(), Lan::default());
        let (client, outages, stop) = (client.clone(), outages.clone(), CancellationToken::new());
        let mut cluster = Cluster { rules: RULES, client: client.clone(), outages, kernels, lan, stop };
        let agents = cluster.start();
        assign_and_move(&cluster, full).await;
        if full {
            foreign_lease_holder(&cluster).await;
            unreadable_node(&cluster).await;
            deleted_metrics_token(&cluster).await;
        }
        cluster.stop.cancel();
        agents.join_all().await;
        assert_eq!(cluster.lan.clashes(), Vec::<String>::new(), "two nodes held one address");
        tear_down(&client).await;
    }
    install_crd(&client, true).await;
}

async fn assign_and_move(cluster: &Cluster, full: bool) {
    let one = "172.18.0.100";
    put(&cluster.objects(), eip("t-eip", &[one])).await;
    let annotation = |object: &Value, key: &str| object["metadata"]["annotations"][key].as_str().map(str::to_owned);
    until("the fact that no node can host it is published", || async {
        let object = cluster.object("t-eip").await.unwrap_or_default();
        annotation(&object, "k8s.ovn.org/egressip-no-eligible-node").as_deref() == Some(one)
            && (!full || object["status"]["conditions"][0]["reason"] == "NoEligibleNode")
    })
    .await;

    cluster.label("t-node2", true).await;
    until("the address is assigned", || async {
        cluster.items("t-eip").await.get(one).map(String::as_str) == Some("t-node2")
    })
    .await;
    let object = cluster.object("t-eip").await.expect("it exists");
    assert_eq!(annotation(&object, "team").as_deref(), Some("x"), "annotations of others survive");
    assert_eq!(annotation(&object, "k8s.ovn.org/egressip-no-eligible-node"), None);
    assert!(annotation(&object, "k8s.ovn.org/egressip-tunnel-id").is_some());
    if full {
        until("the status is of this generation", || async {
            let object = cluster.object("t-eip").await.unwrap_or_default();
            object["status"]["observedGeneration"] == object["metadata"]["generation"]
        })
        .await;
    }

    let address: IpAddr = one.parse().expect("a literal");
    until("all nodes select their pods, one owns the address", || async {
        let selected = |name: &str, pod: &str| {
            let kernel = cluster.kernels[name].now();
            matches!(kernel.pods.get(&pod.parse::<IpAddr>().expect("a literal")), Some(PodState::Selected(_)))
        };
        let owners = cluster.kernels.values().filter(|kernel| kernel.now().owned.values().any(|a| *a == address));
        owners.count() == 1
            && selected("t-node1", "127.244.1.10")
            && selected("t-node2", "127.244.2.10")
            && selected("t-node3", "127.244.3.10")
    })
    .await;

    // A duplicate waits, with an event.
    put(&cluster.objects(), eip("t-other", &[one, "172.18.0.101"])).await;
    cluster.label("t-node3", true).await;
    until("the duplicate's other address is assigned", || async {
        cluster.items("t-other").await.contains_key("172.18.0.101")
    })
    .await;
    until("an event says why", || async {
        let events: Api<Event> = Api::all(cluster.client.clone());
        let events = events.list(&ListParams::default()).await.expect("events");
        events.items.iter().any(|event| event.reason.as_deref() == Some("UnsupportedRequest"))
    })
    .await;

    // The label is removed: the address moves.
    let (_, before) = cluster.ledger().await;
    cluster.label("t-node2", false).await;
    until("the old owner has acknowledged the release", || async {
        cluster.released("t-node2").await.get(one).is_some_and(|number| *number > before)
    })
    .await;
    until("the address has moved", || async {
        cluster.items("t-eip").await.get(one).map(String::as_str) == Some("t-node3")
    })
    .await;
    assert!(cluster.kernels["t-node2"].now().owned.is_empty());
    until("the new owner has it", || async {
        cluster.kernels["t-node3"].now().owned.values().any(|owned| *owned == address)
    })
    .await;
    until("the hand-over has ended", || async {
        cluster.ledger().await.0 == "{}" && cluster.released("t-node2").await.is_empty()
    })
    .await;
    let (_, before) = cluster.ledger().await;

    // The other object has an address on that node: the freed address needs another node.
    cluster.label("t-node1", true).await;
    cluster.objects().delete("t-eip", &DeleteParams::default()).await.expect("deleted");
    until("the waiting object has the address", || async { cluster.items("t-other").await.contains_key(one) }).await;
    // Suspicions and endless leases use numbers too.
    until("that hand-over has ended too", || async {
        let (records, last) = cluster.ledger().await;
        records == "{}" && last > before
    })
    .await;
    let (_, before) = cluster.ledger().await;

    // A user deletes the ledger: it is recreated, and no number is used twice.
    let ledgers: Api<ConfigMap> = Api::namespaced(cluster.client.clone(), "kube-system");
    ledgers.delete("egress-agent-hand-overs", &DeleteParams::default()).await.expect("deleted");
    until("the ledger exists again", || async {
        let (records, last) = cluster.ledger().await;
        records == "{}" && last >= before
    })
    .await;

    // Without changes nothing is written.
    let version =
        || async { cluster.object("t-other").await.unwrap_or_default()["metadata"]["resourceVersion"].clone() };
    tokio::time::sleep(Duration::from_millis(300)).await;
    let before = version().await;
    tokio::time::sleep(Duration::from_millis(1500)).await;
    assert_eq!(version().await, before);
}

/// A foreign client takes the Lease with a wrong clock and does not renew it: controllers wait as for one of theirs, and then
/// one of them leads.
async fn foreign_lease_holder(cluster: &Cluster) {
    let leases: Api<Lease> = Api::namespaced(cluster.client.clone(), "kube-system");
    let foreign = json!({"spec": {
        "holderIdentity": "foreign", "leaseDurationSeconds": 1, "renewTime": "1970-01-01T00:00:00.000000Z",
    }});
    leases.patch("egress-agent-leader", &PatchParams::default(), &Patch::Merge(foreign)).await.expect("a Lease");
    // The next leader has something to do.
    cluster.label("t-node2", true).await;
    cluster.label("t-node3", false).await;
    until("a controller leads again", || async {
        let lease = leases.get("egress-agent-leader").await.expect("the Lease");
        let holder = lease.spec.and_then(|spec| spec.holder_identity).unwrap_or_default();
        holder.starts_with("t-node")
    })
    .await;
    until("both addresses are on nodes that may have them", || async {
        let items = cluster.items("t-other").await;
        items.values().map(String::as_str).collect::<BTreeSet<_>>() == BTreeSet::from(["t-node1", "t-node2"])
    })
    .await;
}

/// A node whose annotation becomes unreadable keeps its addresses and gets new ones, by its last readable value.
async fn unreadable_node(cluster: &Cluster) {
    let before = cluster.items("t-other").await;
    let invalid = json!({"k8s.ovn.org/node-primary-ifaddr": "invalid", "k8s.ovn.org/node-subnets": "invalid"});
    cluster.patch("t-node1", json!({"annotations": invalid})).await;
    cluster.label("t-node3", true).await;
    put(&cluster.objects(), eip("t-third", &["172.18.0.102", "172.18.0.103", "172.18.0.104"])).await;
    until("an object with three addresses has all three nodes", || async {
        cluster.items("t-third").await.len() == NODES.len()
    })
    .await;
    assert_eq!(cluster.items("t-other").await, before, "nothing has moved");
}

fn secrets(client: &Client) -> Api<Secret> {
    Api::namespaced(client.clone(), "kube-system")
}

/// Controllers that run make another token.
async fn deleted_metrics_token(cluster: &Cluster) {
    let secrets = secrets(&cluster.client);
    let token = || async {
        let secret = secrets.get_opt(metrics_token::SECRET_NAME).await.expect("the server answers");
        secret.map(|secret| secret.data.unwrap_or_default()["token"].0.clone())
    };
    let former = token().await.expect("a token since the controllers have started");
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(token().await.as_ref(), Some(&former), "a token that is there stays");
    secrets.delete(metrics_token::SECRET_NAME, &DeleteParams::default()).await.expect("deleted");
    until("there is another token", || async { token().await.is_some_and(|token| token != former) }).await;
}
