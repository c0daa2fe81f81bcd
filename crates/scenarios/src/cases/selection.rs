//! Who is selected: every kind of selector against pods of two namespaces, pods that are no endpoints, and several
//! objects on one pod. What the world sees is the only witness.

use crate::prelude::*;
use egress_lab::api_objects::expression;
use egress_lab::kube_api::objects;

const V4: &str = "172.18.0.110";
const V6: &str = "fd00:172:18::110";

/// Name, namespace, node, labels.
type PodCase = (&'static str, &'static str, usize, &'static [(&'static str, &'static str)]);

/// Labels: `app` and `tier` on pods; `house` (the namespace's own name) and, in red, `team` on namespaces.
const PODS: [PodCase; 4] = [
    ("front", "red", 1, &[("app", "a"), ("tier", "front")]),
    ("back", "red", 2, &[("app", "b")]),
    ("plain", "blue", 3, &[]),
    ("blue-a", "blue", 1, &[("app", "a")]),
];

fn cluster(context: &LabContext) -> Result<TestCluster> {
    let pods = PODS.into_iter().map(|(name, namespace, node, labels)| pod(name, namespace, node, labels));
    let cluster = TestCluster::start(context, pods.collect())?;
    cluster.label_namespace("red", "team", Some("x"))?;
    cluster.assignable(2, true)?;
    cluster.assignable(3, true)?;
    Ok(cluster)
}

/// Namespace selector, pod selector, selected pods.
fn selectors() -> Vec<(Value, Value, &'static [&'static str])> {
    let e = expression;
    vec![
        (all(), all(), &["front", "back", "plain", "blue-a"]),
        (all(), Value::Null, &["front", "back", "plain", "blue-a"]),
        (labels("team", "x"), all(), &["front", "back"]),
        (all(), labels("app", "a"), &["front", "blue-a"]),
        (labels("team", "x"), labels("app", "a"), &["front"]),
        (e("house", "In", &["blue", "green"]), all(), &["plain", "blue-a"]),
        (e("team", "NotIn", &["x", "y"]), e("app", "DoesNotExist", &[]), &["plain"]),
        (e("team", "Exists", &[]), e("app", "In", &["b"]), &["back"]),
        (e("team", "DoesNotExist", &[]), e("app", "Exists", &[]), &["blue-a"]),
        (all(), e("app", "NotIn", &["a"]), &["back", "plain"]),
        (
            json!({"matchLabels": {"house": "red"}, "matchExpressions": [{"key": "team", "operator": "Exists"}]}),
            json!({"matchLabels": {"app": "a"}, "matchExpressions": [{"key": "tier", "operator": "NotIn", "values": ["back"]}]}),
            &["front"],
        ),
        (labels("team", "y"), all(), &[]),
    ]
}

pub(super) fn selectors_select(context: &LabContext) -> Result<()> {
    let cluster = cluster(context)?;
    for (namespaces, pods, selected) in selectors() {
        let mut object = egress_ip("selecting", &[V4, V6], &namespaces, &pods);
        if pods.is_null() {
            object["spec"].as_object_mut().context("no spec")?.remove("podSelector");
        }
        println!("namespaces {namespaces}, pods {pods}: {selected:?}");
        cluster.assign(&object)?;
        expect(&cluster, selected)?;
    }
    cluster.remove("selecting")?;
    expect(&cluster, &[])
}

/// These pods have the egress IPs, all others their node's addresses.
fn expect(cluster: &TestCluster, selected: &[&str]) -> Result<()> {
    for (name, ..) in PODS {
        let chosen = selected.contains(&name);
        cluster.is_seen_as(name, chosen.then_some(V4), chosen.then_some(V6))?;
    }
    Ok(())
}

/// Pods without an address, in the host's network, and completed ones: selected by name only.
pub(super) fn only_endpoints_count(context: &LabContext) -> Result<()> {
    let cluster = cluster(context)?;
    cluster.assign(&egress_ip("everybody", &[V4, V6], &all(), &all()))?;
    expect(&cluster, &["front", "back", "plain", "blue-a"])?;
    on_the_host(&cluster)?;
    without_address(&cluster)?;
    completed(&cluster)
}

/// A pod in the host's network has the host's addresses, and the host is not selected.
fn on_the_host(cluster: &TestCluster) -> Result<()> {
    let host = cluster.lab.node(node(1)?);
    let own = host.number.address();
    let pods = "/api/v1/namespaces/red/pods";
    cluster.api.create(
        pods,
        &json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": "on-host", "namespace": "red", "labels": {"app": "a"}},
            "spec": {"nodeName": "node1", "hostNetwork": true, "containers": [{"name": "shell", "image": "lab/none"}]},
        }),
    )?;
    let status = json!({"status": {"phase": "Running", "podIP": own.v4, "podIPs": [{"ip": own.v4}, {"ip": own.v6}]}});
    cluster.api.patch_status(&format!("{pods}/on-host"), &status)?;
    // Later changes take effect, so this one has, too.
    cluster.remove("everybody")?;
    expect(cluster, &[])?;
    cluster.assign(&egress_ip("everybody", &[V4, V6], &all(), &all()))?;
    expect(cluster, &["front", "back", "plain", "blue-a"])?;
    for to in plan::SERVER.both() {
        let seen = observe(&host.host, to)?;
        ensure!(seen == Observed::Source(own.towards(to)), "a pod in the host's network is {seen}");
    }
    let count = AgentPins::of(host).keys("pods")?.len();
    ensure!(count == 4, "node1 has two pods with two addresses, its map {count} entries");
    Ok(())
}

/// A pod that gets its address late is served from then on; the others never notice.
fn without_address(cluster: &TestCluster) -> Result<()> {
    let late = cluster.pod("front")?.clone();
    let path = cluster.pod_path("front")?;
    cluster.api.delete(&path)?;
    cluster.becomes(&late.netns, plan::SERVER.v4.into(), Observed::Nothing)?;
    let bare = json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": "front", "namespace": "red", "labels": late.labels},
        "spec": {"nodeName": "node1", "containers": [{"name": "shell", "image": "lab/none"}]},
    });
    cluster.api.create("/api/v1/namespaces/red/pods", &bare)?;
    cluster.api.patch_status(&path, &json!({"status": {"phase": "Pending"}}))?;
    cluster.is_seen_as("blue-a", Some(V4), Some(V6))?;
    let seen = observe(&late.netns, plan::SERVER.v4.into())?;
    ensure!(seen == Observed::Nothing, "a pod with an unknown address is {seen}");
    // No annotation of a CNI here: the kubelet's report counts.
    cluster.api.patch_status(&path, &objects::pod_status(&late))?;
    cluster.is_seen_as("front", Some(V4), Some(V6))
}

/// The address of a completed pod belongs to its next pod.
fn completed(cluster: &TestCluster) -> Result<()> {
    let done = cluster.pod("blue-a")?.clone();
    let to: IpAddr = plan::SERVER.v4.into();
    cluster.api.patch_status(&cluster.pod_path("blue-a")?, &json!({"status": {"phase": "Succeeded"}}))?;
    cluster.becomes(&done.netns, to, Observed::Nothing)?;
    cluster.assign(&egress_ip("everybody", &[V4, V6], &all(), &expression("later", "DoesNotExist", &[])))?;
    let mut later = done.clone();
    later.name = "later".to_owned();
    later.labels = BTreeMap::from([("later".to_owned(), "true".to_owned())]);
    cluster.api.publish_pod(&later)?;
    cluster.becomes(&done.netns, to, Observed::Source(done.node.address().towards(to)))?;
    cluster.label("/api/v1/namespaces/blue/pods/later", "later", &Value::Null)?;
    cluster.becomes(&done.netns, to, Observed::Source(V4.parse()?))
}

/// The oldest object serves, whatever its name; the next takes its place when it goes. One that lists IPv6 alone leaves
/// IPv4 alone.
pub(super) fn oldest_object_serves(context: &LabContext) -> Result<()> {
    let cluster = cluster(context)?;
    let on = |name: &str, addresses: &[&str]| egress_ip(name, addresses, &labels("team", "x"), &labels("app", "a"));
    cluster.assign(&on("zebra", &["172.18.0.120"]))?;
    cluster.is_seen_as("front", Some("172.18.0.120"), None)?;
    next_second(&cluster, "zebra")?;
    cluster.assign(&on("aardvark", &["172.18.0.121", "fd00:172:18::121"]))?;
    println!("{}", cluster.event("aardvark", "UndefinedRequest")?);
    // The older lists no IPv6 address: the younger does not fill in.
    cluster.is_seen_as("front", Some("172.18.0.120"), None)?;
    next_second(&cluster, "aardvark")?;
    cluster.assign(&on("six", &["fd00:172:18::122"]))?;
    cluster.remove("zebra")?;
    cluster.is_seen_as("front", Some("172.18.0.121"), Some("fd00:172:18::121"))?;
    cluster.remove("aardvark")?;
    cluster.is_seen_as("front", None, Some("fd00:172:18::122"))?;
    cluster.is_seen_as("blue-a", None, None)?;
    cluster.remove("six")?;
    cluster.is_seen_as("front", None, None)
}

/// Ages count in seconds: waits until the next object is younger than this one.
fn next_second(cluster: &TestCluster, name: &str) -> Result<()> {
    let object = cluster.api.egress_ip(name)?.context("no such object")?;
    let created = object["metadata"]["creationTimestamp"].as_str().unwrap_or_default().to_owned();
    let created: jiff::Timestamp = created.parse()?;
    until_true("a second later", EFFECT, || Ok(jiff::Timestamp::now().as_second() > created.as_second()))
}
