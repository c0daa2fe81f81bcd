//! Who is selected: every kind of selector against pods of two namespaces, pods that are no endpoints, and several
//! objects on one pod. What the world sees is the only witness.

use std::collections::BTreeMap;
use std::net::IpAddr;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use egress_lab::api_objects::{all, egress_ip, expression, labels};
use egress_lab::cluster::objects;
use egress_lab::pins::Pins;
use egress_lab::test::LabContext;
use egress_lab::test_cluster::{Ground, Sight, look, node, pod};
use egress_lab::topology::addresses as plan;
use egress_lab::wait::{EFFECT, until};

const V4: &str = "172.18.0.110";
const V6: &str = "fd00:172:18::110";

/// Name, namespace, node, labels.
type Who = (&'static str, &'static str, usize, &'static [(&'static str, &'static str)]);

/// Labels: `app` and `tier` on pods; `house` (the namespace's own name) and, in red, `team` on namespaces.
const PODS: [Who; 4] = [
    ("front", "red", 1, &[("app", "a"), ("tier", "front")]),
    ("back", "red", 2, &[("app", "b")]),
    ("plain", "blue", 3, &[]),
    ("blue-a", "blue", 1, &[("app", "a")]),
];

fn ground(context: &LabContext) -> Result<Ground> {
    let pods = PODS.into_iter().map(|(name, namespace, node, labels)| pod(name, namespace, node, labels));
    let ground = Ground::start(context, pods.collect())?;
    ground.label_namespace("red", "team", Some("x"))?;
    ground.assignable(2, true)?;
    ground.assignable(3, true)?;
    Ok(ground)
}

/// Namespace selector, pod selector, who is selected.
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
    let ground = ground(context)?;
    for (namespaces, pods, selected) in selectors() {
        let mut object = egress_ip("selecting", &[V4, V6], &namespaces, &pods);
        if pods.is_null() {
            object["spec"].as_object_mut().context("no spec")?.remove("podSelector");
        }
        println!("namespaces {namespaces}, pods {pods}: {selected:?}");
        ground.assign(&object)?;
        expect(&ground, selected)?;
    }
    ground.remove("selecting")?;
    expect(&ground, &[])
}

/// These pods have the egress IPs, all others their node's addresses.
fn expect(ground: &Ground, selected: &[&str]) -> Result<()> {
    for (name, ..) in PODS {
        let chosen = selected.contains(&name);
        ground.is_seen_as(name, chosen.then_some(V4), chosen.then_some(V6))?;
    }
    Ok(())
}

/// Pods without an address, in the host's network, and completed ones: selected by name only.
pub(super) fn only_endpoints_count(context: &LabContext) -> Result<()> {
    let ground = ground(context)?;
    ground.assign(&egress_ip("everybody", &[V4, V6], &all(), &all()))?;
    expect(&ground, &["front", "back", "plain", "blue-a"])?;
    on_the_host(&ground)?;
    without_address(&ground)?;
    completed(&ground)
}

/// A pod in the host's network has the host's addresses, and the host is not selected.
fn on_the_host(ground: &Ground) -> Result<()> {
    let host = ground.lab.node(node(1)?);
    let own = host.number.address();
    let pods = "/api/v1/namespaces/red/pods";
    ground.cluster.create(
        pods,
        &json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": "on-host", "namespace": "red", "labels": {"app": "a"}},
            "spec": {"nodeName": "node1", "hostNetwork": true, "containers": [{"name": "shell", "image": "lab/none"}]},
        }),
    )?;
    let status = json!({"status": {"phase": "Running", "podIP": own.v4, "podIPs": [{"ip": own.v4}, {"ip": own.v6}]}});
    ground.cluster.patch_status(&format!("{pods}/on-host"), &status)?;
    // Changes behind it take effect, so this one has, too.
    ground.remove("everybody")?;
    expect(ground, &[])?;
    ground.assign(&egress_ip("everybody", &[V4, V6], &all(), &all()))?;
    expect(ground, &["front", "back", "plain", "blue-a"])?;
    for to in plan::SERVER.both() {
        let seen = look(&host.host, to)?;
        ensure!(seen == Sight::As(own.towards(to)), "a pod in the host's network is {seen}");
    }
    let count = Pins::of(host).keys("pods")?.len();
    ensure!(count == 4, "node1 has two pods with two addresses, its map {count} entries");
    Ok(())
}

/// A pod that gets its address late is served from then on; the others never notice.
fn without_address(ground: &Ground) -> Result<()> {
    let late = ground.pod("front")?.clone();
    let path = ground.pod_path("front")?;
    ground.cluster.delete(&path)?;
    ground.becomes(&late.netns, plan::SERVER.v4.into(), Sight::Nothing)?;
    let bare = json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": "front", "namespace": "red", "labels": late.labels},
        "spec": {"nodeName": "node1", "containers": [{"name": "shell", "image": "lab/none"}]},
    });
    ground.cluster.create("/api/v1/namespaces/red/pods", &bare)?;
    ground.cluster.patch_status(&path, &json!({"status": {"phase": "Pending"}}))?;
    ground.is_seen_as("blue-a", Some(V4), Some(V6))?;
    let seen = look(&late.netns, plan::SERVER.v4.into())?;
    ensure!(seen == Sight::Nothing, "a pod whose address nobody knows is {seen}");
    // No annotation of a CNI here: the kubelet's word counts.
    ground.cluster.patch_status(&path, &objects::pod_status(&late))?;
    ground.is_seen_as("front", Some(V4), Some(V6))
}

/// The address of a completed pod belongs to whoever has it next.
fn completed(ground: &Ground) -> Result<()> {
    let done = ground.pod("blue-a")?.clone();
    let to: IpAddr = plan::SERVER.v4.into();
    ground.cluster.patch_status(&ground.pod_path("blue-a")?, &json!({"status": {"phase": "Succeeded"}}))?;
    ground.becomes(&done.netns, to, Sight::Nothing)?;
    ground.assign(&egress_ip("everybody", &[V4, V6], &all(), &expression("heir", "DoesNotExist", &[])))?;
    let mut heir = done.clone();
    heir.name = "heir".to_owned();
    heir.labels = BTreeMap::from([("heir".to_owned(), "true".to_owned())]);
    ground.cluster.publish_pod(&heir)?;
    ground.becomes(&done.netns, to, Sight::As(done.node.address().towards(to)))?;
    ground.label("/api/v1/namespaces/blue/pods/heir", "heir", &Value::Null)?;
    ground.becomes(&done.netns, to, Sight::As(V4.parse()?))
}

/// The oldest object serves, whatever its name; the next takes its place when it goes. One that lists IPv6 alone leaves
/// IPv4 alone.
pub(super) fn oldest_object_serves(context: &LabContext) -> Result<()> {
    let ground = ground(context)?;
    let on = |name: &str, addresses: &[&str]| egress_ip(name, addresses, &labels("team", "x"), &labels("app", "a"));
    ground.assign(&on("zebra", &["172.18.0.120"]))?;
    ground.is_seen_as("front", Some("172.18.0.120"), None)?;
    next_second(&ground, "zebra")?;
    ground.assign(&on("aardvark", &["172.18.0.121", "fd00:172:18::121"]))?;
    println!("{}", ground.event("aardvark", "UndefinedRequest")?);
    // The older lists no IPv6 address: the younger does not fill in.
    ground.is_seen_as("front", Some("172.18.0.120"), None)?;
    next_second(&ground, "aardvark")?;
    ground.assign(&on("six", &["fd00:172:18::122"]))?;
    ground.remove("zebra")?;
    ground.is_seen_as("front", Some("172.18.0.121"), Some("fd00:172:18::121"))?;
    ground.remove("aardvark")?;
    ground.is_seen_as("front", None, Some("fd00:172:18::122"))?;
    ground.is_seen_as("blue-a", None, None)?;
    ground.remove("six")?;
    ground.is_seen_as("front", None, None)
}

/// Ages count in seconds: waits until the next object is younger than this one.
fn next_second(ground: &Ground, name: &str) -> Result<()> {
    let object = ground.cluster.egress_ip(name)?.context("no such object")?;
    let created = object["metadata"]["creationTimestamp"].as_str().unwrap_or_default().to_owned();
    let created: jiff::Timestamp = created.parse()?;
    until("a second later", EFFECT, || Ok((jiff::Timestamp::now().as_second() > created.as_second()).then_some(())))
}
