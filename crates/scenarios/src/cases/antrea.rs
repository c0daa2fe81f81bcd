//! Antrea's Egress and ExternalIPPool: addresses are allocated from pools and released, several Egresses share one, nodes follow
//! the pool's selector and their health. The times are those of Antrea's own tests.

use egress_lab::api_objects::NODES;

use egress_lab::topology::{EXT_LAN, UPLINK};

use crate::bench::drops;
use crate::prelude::*;
use crate::received::{LoadSender, Received};

const EGRESSES: &str = "/apis/crd.antrea.io/v1beta1/egresses";
const POOLS: &str = "/apis/crd.antrea.io/v1beta1/externalippools";
const FORMER: &str = "/apis/crd.antrea.io/v1alpha2";
const ASSIGNMENTS: &str = "/apis/egress-agent.io/v1alpha1/egressassignments";
const PODS: [(&str, usize, &str); 4] =
    [("web1", 1, "web"), ("web2", 2, "web"), ("db3", 3, "db"), ("plain", 3, "plain")];
/// Conditions after a change.
const REALISED: Duration = Duration::from_secs(3);
/// A changed address or selector, as in Antrea's own tests.
const UPDATED: Duration = Duration::from_secs(1);
/// Another node after the loss of one.
const FAILED_OVER: Duration = Duration::from_secs(10);

pub(super) fn tests() -> Vec<LabTest> {
    vec![
        LabTest::new("antrea_pools_give_addresses", Duration::from_secs(120), pools_give_addresses),
        LabTest::new("antrea_egresses_are_updated", Duration::from_secs(120), are_updated),
        LabTest::new("antrea_bandwidth_is_shared_by_pods", Duration::from_secs(120), bandwidth_is_shared),
        LabTest::new("antrea_pools_lie_in_a_vlan", Duration::from_secs(120), pools_in_a_vlan),
        LabTest::new("antrea_bandwidth_by_fq_loses_no_stream", Duration::from_secs(120), bandwidth_by_fq),
        LabTest::new("antrea_egresses_follow_nodes", Duration::from_secs(120), follow_nodes),
        LabTest::new("antrea_static_addresses_are_of_nodes", Duration::from_secs(120), static_addresses),
    ]
}

struct AntreaLab {
    cluster: TestCluster,
}

impl AntreaLab {
    fn start(context: &LabContext, extra: &[&str]) -> Result<Self> {
        let pods = PODS.iter().map(|(name, node, app)| pod(name, "default", *node, &[("app", app)])).collect();
        Ok(Self { cluster: TestCluster::start_with(context, pods, &[&["--antrea"], extra].concat())? })
    }

    fn pool(&self, name: &str, ranges: Value, nodes: Value) -> Result<()> {
        let object = json!({
            "apiVersion": "crd.antrea.io/v1beta1", "kind": "ExternalIPPool", "metadata": {"name": name},
            "spec": {"ipRanges": ranges, "nodeSelector": nodes},
        });
        self.cluster.api.create(POOLS, &object).map(drop)
    }

    fn egress(&self, name: &str, app: Option<&str>, address: Value) -> Result<()> {
        let applied_to = app.map_or_else(|| json!({}), |app| json!({"podSelector": labels("app", app)}));
        let mut spec = json!({"appliedTo": applied_to});
        let fields = address.as_object().context("fields")?.clone();
        spec.as_object_mut().context("an object")?.extend(fields);
        let object = json!({
            "apiVersion": "crd.antrea.io/v1beta1", "kind": "Egress", "metadata": {"name": name}, "spec": spec,
        });
        self.cluster.api.create(EGRESSES, &object).map(drop)
    }

    fn create_of_former_version(&self, kind: &str, name: &str, spec: &Value) -> Result<()> {
        let object =
            json!({"apiVersion": "crd.antrea.io/v1alpha2", "kind": kind, "metadata": {"name": name}, "spec": spec});
        let plural = if kind == "Egress" { "egresses" } else { "externalippools" };
        self.cluster.api.create(&format!("{FORMER}/{plural}"), &object).map(drop)
    }

    fn get(&self, path: &str) -> Result<Value> {
        self.cluster.api.get(path)?.with_context(|| format!("{path} is not there"))
    }

    /// Waits until the conditions have these reasons, and returns the object.
    fn conditions(&self, name: &str, reasons: [&str; 2], patience: Duration) -> Result<Value> {
        until(&format!("Egress {name} is {reasons:?}"), patience, || {
            let object = self.get(&format!("{EGRESSES}/{name}"))?;
            let reason = |kind: &str| {
                let conditions = object["status"]["conditions"].as_array();
                let one = conditions.into_iter().flatten().find(|one| one["type"] == kind)?;
                one["reason"].as_str().map(str::to_owned)
            };
            let found = ["IPAllocated", "IPAssigned"].map(reason);
            Ok((found == reasons.map(|reason| Some(reason.to_owned()))).then_some(object))
        })
    }

    /// Waits until it is served, and returns its node.
    fn served(&self, name: &str, address: &str) -> Result<usize> {
        let object = self.conditions(name, ["Allocated", "Assigned"], REALISED)?;
        ensure!(object["spec"]["egressIP"] == address, "{name} has {}", object["spec"]);
        ensure!(object["status"]["egressIP"] == address, "{name} has {}", object["status"]);
        self.node(name)
    }

    fn node(&self, name: &str) -> Result<usize> {
        let object = self.get(&format!("{EGRESSES}/{name}"))?;
        let node = object["status"]["egressNode"].as_str().and_then(|node| node.strip_prefix("node")?.parse().ok());
        node.with_context(|| format!("{name} is on no node: {}", object["status"]))
    }

    fn usage(&self, pool: &str, total: u64, used: u64) -> Result<()> {
        until_true(&format!("pool {pool} has {used} of {total} in use"), REALISED, || {
            let usage = self.get(&format!("{POOLS}/{pool}"))?["status"]["usage"].clone();
            Ok(usage == json!({"total": total, "used": used}))
        })
    }

    fn delete(&self, name: &str) -> Result<()> {
        self.cluster.api.delete(&format!("{EGRESSES}/{name}"))
    }
}

fn range(first: u8, last: u8) -> Value {
    json!([{"start": format!("172.18.0.{first}"), "end": format!("172.18.0.{last}")}])
}

fn pools_give_addresses(context: &LabContext) -> Result<()> {
    let lab = AntreaLab::start(context, &[])?;
    lab.pool("p", range(110, 112), json!({}))?;
    lab.usage("p", 3, 0)?;
    lab.egress("web", Some("web"), json!({"externalIPPool": "p"}))?;
    lab.served("web", "172.18.0.110")?;
    for name in ["web1", "web2"] {
        lab.cluster.is_seen_as(name, Some("172.18.0.110"), None)?;
    }
    for name in ["db3", "plain"] {
        lab.cluster.is_seen_as(name, None, None)?;
    }
    println!("{}", lab.cluster.event("web", "IPAssigned")?);
    lab.usage("p", 3, 1)?;

    println!("one names its address, and one without a pool shares it");
    lab.egress("db", Some("db"), json!({"egressIP": "172.18.0.112", "externalIPPool": "p"}))?;
    let node = lab.served("db", "172.18.0.112")?;
    lab.egress("plain", Some("plain"), json!({"egressIP": "172.18.0.112"}))?;
    lab.cluster.is_seen_as("plain", Some("172.18.0.112"), None)?;
    lab.cluster.is_seen_as("db3", Some("172.18.0.112"), None)?;
    until_true("it has the same node", REALISED, || Ok(lab.node("plain").ok() == Some(node)))?;
    let assignments = lab.get(ASSIGNMENTS)?["items"].as_array().map_or(0, Vec::len);
    ensure!(assignments == 2, "{assignments} assignments");

    println!("an empty appliedTo selects nothing, an exhausted pool says so, and a full one frees an address");
    lab.egress("nothing", None, json!({"externalIPPool": "p"}))?;
    lab.served("nothing", "172.18.0.111")?;
    lab.usage("p", 3, 3)?;
    lab.egress("late", Some("plain"), json!({"externalIPPool": "p"}))?;
    lab.conditions("late", ["AllocationError", "AssignmentError"], REALISED)?;
    println!("{}", lab.cluster.event("late", "AllocationError")?);
    lab.delete("nothing")?;
    lab.served("late", "172.18.0.111")?;

    println!("what cannot be: another's address, an address outside, a pool that is not there, a changed range");
    let held = json!({"egressIP": "172.18.0.110", "externalIPPool": "p"});
    lab.egress("held", Some("db"), held)?;
    lab.conditions("held", ["AllocationError", "AssignmentError"], REALISED)?;
    lab.egress("outside", Some("db"), json!({"egressIP": "172.18.0.120", "externalIPPool": "p"}))?;
    let outside = lab.cluster.event("outside", "AllocationError")?;
    ensure!(outside == "IP 172.18.0.120 is not within the IP range of ExternalIPPool p", "{outside}");
    lab.egress("nowhere", Some("db"), json!({"externalIPPool": "q"}))?;
    let nowhere = lab.cluster.event("nowhere", "AllocationError")?;
    ensure!(nowhere == "ExternalIPPool q does not exist", "{nowhere}");
    lab.pool("q", json!([{"cidr": "172.18.0.108/29"}]), json!({}))?;
    let overlaps = lab.cluster.event("q", "InvalidPool")?;
    ensure!(overlaps.contains("older ExternalIPPool p"), "{overlaps}");

    println!("an older one that is edited takes no address from one that is served");
    let path = format!("{EGRESSES}/web");
    lab.cluster.api.merge(&path, &json!({"spec": {"egressIP": "172.18.0.112"}}))?;
    lab.conditions("web", ["AllocationError", "AssignmentError"], REALISED)?;
    lab.served("db", "172.18.0.112")?;
    lab.served("held", "172.18.0.110")?;
    lab.cluster.is_seen_as("web1", None, None)?;
    lab.delete("held")?;
    lab.cluster.api.merge(&path, &json!({"spec": {"egressIP": "172.18.0.110"}}))?;
    lab.served("web", "172.18.0.110")?;
    lab.cluster.is_seen_as("web1", Some("172.18.0.110"), None)?;

    println!("deleted ones are released, and their pods are seen as before");
    for name in ["outside", "nowhere", "late", "db"] {
        lab.delete(name)?;
    }
    lab.usage("p", 3, 1)?;
    // What has shared an address names one of no node by itself.
    let path = format!("{EGRESSES}/plain");
    until_true("the other is on no node", REALISED, || Ok(lab.get(&path)?["status"]["egressNode"] == ""))?;
    lab.delete("plain")?;
    for name in ["db3", "plain"] {
        lab.cluster.is_seen_as(name, None, None)?;
    }
    lab.delete("web")?;
    lab.usage("p", 3, 0)?;
    lab.cluster.is_seen_as("web1", None, None)?;
    until_true("nothing is assigned", REALISED, || {
        Ok(lab.get(ASSIGNMENTS)?["items"].as_array().is_some_and(Vec::is_empty))
    })?;

    println!("manifests of the former version are served");
    let pool = json!({"ipRanges": range(120, 120), "nodeSelector": {}});
    lab.create_of_former_version("ExternalIPPool", "former", &pool)?;
    let spec = json!({"appliedTo": {"podSelector": labels("app", "web")}, "externalIPPool": "former"});
    lab.create_of_former_version("Egress", "former", &spec)?;
    let node = lab.served("former", "172.18.0.120")?;
    lab.cluster.is_seen_as("web1", Some("172.18.0.120"), None)?;
    let object = lab.get(&format!("{FORMER}/egresses/former"))?;
    ensure!(object["status"]["egressNode"] == format!("node{node}"), "{object}");
    Ok(())
}

/// What Antrea's own tests change: both families, pools of one address, the pods, the address and the nodes. The router of the nodes'
/// network learns the new node of an address without asking.
fn are_updated(context: &LabContext) -> Result<()> {
    let lab = AntreaLab::start(context, &[])?;
    let capture = Capture::start(&lab.cluster.lab)?;
    println!("a pool of a /30 and one of an IPv6 /124 give their first addresses");
    lab.pool("v4", json!([{"cidr": "172.18.0.120/30"}]), json!({}))?;
    lab.pool("v6", json!([{"cidr": "fd00:172:18::120/124"}]), json!({}))?;
    lab.usage("v4", 2, 0)?;
    lab.usage("v6", 15, 0)?;
    lab.egress("four", Some("web"), json!({"externalIPPool": "v4"}))?;
    lab.egress("six", Some("db"), json!({"externalIPPool": "v6"}))?;
    lab.served("four", "172.18.0.121")?;
    lab.served("six", "fd00:172:18::121")?;
    lab.usage("v4", 2, 1)?;
    lab.usage("v6", 15, 1)?;
    lab.cluster.is_seen_as("web1", Some("172.18.0.121"), None)?;
    lab.cluster.is_seen_as("db3", None, Some("fd00:172:18::121"))?;

    println!("it is of other pods");
    let path = format!("{EGRESSES}/four");
    let of = |app: &str| json!({"spec": {"appliedTo": {"podSelector": labels("app", app)}}});
    lab.cluster.api.merge(&path, &of("plain"))?;
    lab.cluster.is_seen_as("plain", Some("172.18.0.121"), None)?;
    lab.cluster.is_seen_as("web1", None, None)?;
    lab.cluster.api.merge(&path, &of("web"))?;
    lab.cluster.is_seen_as("web2", Some("172.18.0.121"), None)?;

    println!("it has another address, and no node answers for the old one");
    lab.cluster.api.merge(&path, &json!({"spec": {"egressIP": "172.18.0.122"}}))?;
    until_true("the new address has a node", UPDATED, || Ok(lab.get(&path)?["status"]["egressIP"] == "172.18.0.122"))?;
    lab.cluster.is_seen_as("web1", Some("172.18.0.122"), None)?;
    lab.usage("v4", 2, 1)?;
    let router = lab.cluster.lab.ext();
    router.exec("ip", &["neigh", "flush", "to", "172.18.0.121"])?;
    let old = router.output("ping", &["-n", "-c1", "-W1", "172.18.0.121"])?;
    let known = router.exec("ip", &["neigh", "show", "172.18.0.121"])?;
    ensure!(!old.status.success() && !known.contains("lladdr"), "a node answers for it: {known}");

    println!("its pool selects one node after the other, and the router follows");
    let node = lab.node("four")?;
    let other = (1..=3).find(|other| *other != node).context("no other node")?;
    for to in [other, node] {
        for number in 1..=3 {
            let value = if number == to { json!("yes") } else { Value::Null };
            lab.cluster.label(&format!("{NODES}/node{number}"), "here", &value)?;
        }
        lab.cluster.api.merge(&format!("{POOLS}/v4"), &json!({"spec": {"nodeSelector": labels("here", "yes")}}))?;
        until_true(&format!("node{to} has the address"), UPDATED, || Ok(lab.node("four").ok() == Some(to)))?;
        let host = &lab.cluster.lab.nodes()[to - 1].host;
        let shown: Value = serde_json::from_str(&host.exec("ip", &["-j", "link", "show", "dev", UPLINK])?)?;
        let mac = shown[0]["address"].as_str().context("no link address")?.to_owned();
        until_true("the router knows it", REALISED, || {
            Ok(router.exec("ip", &["neigh", "show", "172.18.0.122"])?.contains(&mac))
        })?;
        lab.cluster.is_seen_as("web1", Some("172.18.0.122"), None)?;
    }
    lab.delete("four")?;
    lab.delete("six")?;
    lab.usage("v4", 2, 0)?;
    lab.usage("v6", 15, 0)?;
    lab.cluster.is_seen_as("web1", None, None)?;
    lab.cluster.is_seen_as("db3", None, None)?;
    capture.finish_clean().map(drop)
}

/// Bits per second of the limits, and the tolerance of Antrea's own test.
const LIMITS: [u32; 2] = [10_000_000, 20_000_000];
const TOLERANCE_PERCENT: f64 = 20.0;
/// A burst takes this part of a second at the rate.
const BURSTS_PER_SECOND: u32 = 2;

fn bandwidth_is_shared(context: &LabContext) -> Result<()> {
    let mut lab = AntreaLab::start(context, &[])?;
    lab.pool("p", range(110, 112), json!({}))?;
    lab.egress("web", Some("web"), json!({"externalIPPool": "p"}))?;
    let gateway = lab.served("web", "172.18.0.110")?;
    for name in ["web1", "web2"] {
        lab.cluster.is_seen_as(name, Some("172.18.0.110"), None)?;
    }
    let received = Received::serve(lab.cluster.lab.outside(), None)?;
    for limit in LIMITS {
        println!("{limit} bit/s for the pods of two nodes");
        let burst = limit / BURSTS_PER_SECOND;
        let bandwidth = json!({"rate": limit.to_string(), "burst": burst.to_string()});
        lab.cluster.api.merge(&format!("{EGRESSES}/web"), &json!({"spec": {"bandwidth": bandwidth}}))?;
        let shown = format!("(at most {} Mbit/s)", limit / 1_000_000);
        until_true(&format!("node{gateway} shows {shown}"), REALISED, || {
            let status = lab.cluster.agent(gateway)?.status(&[])?;
            Ok(String::from_utf8_lossy(&status.stdout).contains(&shown))
        })?;
        let mut senders = Vec::new();
        for name in ["web1", "web2"] {
            senders.push(received.datagrams(&lab.cluster.pod(name)?.netns, None)?);
        }
        // The burst is used up by then: each sender alone is faster.
        thread::sleep(Duration::from_secs(1));
        let percent = received.bits_per_second(Duration::from_secs(3)) * 100.0 / f64::from(limit);
        println!("{percent:.1} % of it arrives");
        let plain = lab.cluster.pod("plain")?;
        let seen = observe(&plain.netns, plan::SERVER.v4.into())?;
        senders.into_iter().try_for_each(LoadSender::stop)?;
        ensure!((percent - 100.0).abs() <= TOLERANCE_PERCENT, "{percent} % of {limit} bit/s");
        ensure!(matches!(seen, Observed::Source(_)), "another pod is limited too: {seen:?}");
    }
    println!("without a limit");
    lab.cluster.api.merge(&format!("{EGRESSES}/web"), &json!({"spec": {"bandwidth": null}}))?;
    until_true(&format!("node{gateway} shows no limit"), REALISED, || {
        let status = lab.cluster.agent(gateway)?.status(&[])?;
        Ok(!String::from_utf8_lossy(&status.stdout).contains("(at most"))
    })
}

/// One TCP connection with a burst that is too short for it where packets are dropped: here they wait.
fn bandwidth_by_fq(context: &LabContext) -> Result<()> {
    const LIMIT: u32 = 5_000_000;
    /// What full segments leave of the limit is 95.6 %.
    const LEAST_PERCENT: f64 = 90.0;
    let mut lab = AntreaLab::start(context, &[])?;
    for node in lab.cluster.lab.nodes() {
        let discipline = ["qdisc", "replace", "dev", UPLINK, "root", "fq"];
        if !node.host.output("tc", &discipline)?.status.success() {
            return Err(Skip("no fq").into());
        }
    }
    lab.pool("p", range(110, 112), json!({}))?;
    lab.egress("web", Some("web"), json!({"externalIPPool": "p"}))?;
    let gateway = lab.served("web", "172.18.0.110")?;
    lab.cluster.is_seen_as("web1", Some("172.18.0.110"), None)?;
    let bandwidth = json!({"rate": LIMIT.to_string(), "burst": (LIMIT / 10).to_string()});
    lab.cluster.api.merge(&format!("{EGRESSES}/web"), &json!({"spec": {"bandwidth": bandwidth}}))?;
    until_true(&format!("node{gateway} has the limit"), REALISED, || {
        let status = lab.cluster.agent(gateway)?.status(&[])?;
        Ok(String::from_utf8_lossy(&status.stdout).contains("(at most 5 Mbit/s)"))
    })?;
    let received = Received::serve(lab.cluster.lab.outside(), None)?;
    let sender = received.stream(&lab.cluster.pod("web1")?.netns, None)?;
    // The agent looks for the discipline every ten seconds, and drops until then.
    let nodes = lab.cluster.lab.nodes();
    until_true("nothing of the stream is dropped", Duration::from_secs(30), || {
        let before = drops::dropped(nodes)?;
        let percent = received.bits_per_second(Duration::from_secs(3)) * 100.0 / f64::from(LIMIT);
        let dropped = drops::since(&before, &drops::dropped(nodes)?);
        println!("{percent:.1} %, dropped: {dropped:?}");
        Ok(dropped.is_empty() && (LEAST_PERCENT..=100.0).contains(&percent))
    })?;
    sender.stop()
}

/// Both families, in a VLAN in which the router has addresses and the nodes have none.
fn pools_in_a_vlan(context: &LabContext) -> Result<()> {
    const DEVICE: &str = "egress.7";
    const GONE: Duration = Duration::from_secs(15);
    let lab = AntreaLab::start(context, &[])?;
    let router = lab.cluster.lab.ext();
    let device = ["link", "add", "link", EXT_LAN, "name", "vlan7", "type", "vlan", "id", "7"];
    if !router.output("ip", &device)?.status.success() {
        return Err(Skip("no VLAN device").into());
    }
    router.exec("ip", &["addr", "add", "10.30.0.1/24", "dev", "vlan7"])?;
    router.exec("ip", &["addr", "add", "fd00:30::1/64", "dev", "vlan7", "nodad"])?;
    router.exec("ip", &["link", "set", "vlan7", "up"])?;
    let has_device = |node: &LabNode| Ok(node.host.output("ip", &["link", "show", DEVICE])?.status.success());

    let pool = |name: &str, cidr: &str, gateway: &str, length: u8, vlan: u16| {
        let subnet = json!({"gateway": gateway, "prefixLength": length, "vlan": vlan});
        let object = json!({
            "apiVersion": "crd.antrea.io/v1beta1", "kind": "ExternalIPPool", "metadata": {"name": name},
            "spec": {"ipRanges": [{"cidr": cidr}], "subnetInfo": subnet, "nodeSelector": {}},
        });
        lab.cluster.api.create(POOLS, &object).map(drop)
    };
    pool("v4", "10.30.0.0/29", "10.30.0.1", 24, 7)?;
    pool("v6", "fd00:30::/124", "fd00:30::1", 64, 7)?;
    lab.egress("web", Some("web"), json!({"externalIPPools": ["v4", "v6"]}))?;
    lab.conditions("web", ["Allocated", "Assigned"], REALISED * 2)?;
    let as_pooled = |name: &str| lab.cluster.is_seen_as(name, Some("10.30.0.2"), Some("fd00:30::2"));
    for name in ["web1", "web2"] {
        as_pooled(name)?;
    }
    lab.cluster.is_seen_as("plain", None, None)?;
    for node in lab.cluster.lab.nodes() {
        let shown = node.host.exec("ip", &["-o", "addr", "show", "dev", DEVICE, "scope", "global"])?;
        ensure!(shown.is_empty(), "{} has an address there: {shown}", node.name());
    }

    println!("the router itself, which is in the addresses' network, answers");
    for to in ["10.30.0.1", "fd00:30::1"] {
        let answer = lab.cluster.pod("web1")?.netns.output("ping", &["-n", "-c3", "-i0.3", "-W2", to])?;
        ensure!(answer.status.success(), "{to}: {}", String::from_utf8_lossy(&answer.stdout));
    }

    println!("what contradicts it is refused");
    pool("other", "10.31.0.0/29", "10.31.0.1", 24, 7)?;
    let why = lab.cluster.event("other", "InvalidPool")?;
    ensure!(why.contains("in the older ExternalIPPool v4 its VLAN has another gateway"), "{why}");

    println!("a node that loses its uplink loses the addresses");
    let gateway = lab.node("web")?;
    lab.cluster.lab.set_carrier(&lab.cluster.lab.nodes()[gateway - 1], false)?;
    until_true("another node has them", FAILED_OVER, || Ok(lab.node("web").is_ok_and(|node| node != gateway)))?;
    lab.cluster.lab.set_carrier(&lab.cluster.lab.nodes()[gateway - 1], true)?;
    for name in ["web1", "web2"] {
        as_pooled(name)?;
    }

    println!("without an Egress the devices go");
    lab.delete("web")?;
    lab.cluster.is_seen_as("web1", None, None)?;
    for node in lab.cluster.lab.nodes() {
        until_true(&format!("{} has no {DEVICE}", node.name()), GONE, || has_device(node).map(|has| !has))?;
    }
    Ok(())
}

fn follow_nodes(context: &LabContext) -> Result<()> {
    // An agent that is away for a moment, as in a restart, keeps its addresses: for 30 s by default.
    let mut lab = AntreaLab::start(context, &["--egressip-reachability-grace", "2"])?;
    let role = |node: usize, on: bool| {
        let value = if on { json!("egress") } else { Value::Null };
        lab.cluster.label(&format!("{NODES}/node{node}"), "role", &value)
    };
    lab.pool("p", range(110, 119), labels("role", "egress"))?;
    lab.egress("web", Some("web"), json!({"externalIPPool": "p"}))?;
    lab.conditions("web", ["Allocated", "AssignmentError"], REALISED)?;
    println!("no node is selected; then one is, without the label of EgressIPs");
    role(2, true)?;
    ensure!(lab.served("web", "172.18.0.110")? == 2, "on another node");
    lab.cluster.is_seen_as("web1", Some("172.18.0.110"), None)?;
    lab.cluster.is_seen_as("web2", Some("172.18.0.110"), None)?;
    role(3, true)?;
    role(2, false)?;
    until_true("it moves to the other node", REALISED, || Ok(lab.node("web").ok() == Some(3)))?;
    lab.cluster.is_seen_as("web1", Some("172.18.0.110"), None)?;
    role(2, true)?;

    println!("the agent of node3 stops, as in Antrea's test");
    lab.cluster.agent(3)?.pause()?;
    let moved = until_true("another node has the address", FAILED_OVER, || Ok(lab.node("web").ok() == Some(2)));
    lab.cluster.agent(3)?.resume()?;
    moved?;
    lab.cluster.is_seen_as("web1", Some("172.18.0.110"), None)?;
    // It does not come back by itself, unlike in Antrea: connections would break again.
    std::thread::sleep(REALISED);
    ensure!(lab.node("web")? == 2, "it has moved back");
    Ok(())
}

/// Addresses that a node has on an interface, as a virtual router's.
const OWN: [&str; 2] = ["172.18.0.50", "fd00:172:18::50"];

/// Gives the node its addresses, or takes them from it.
fn has_own(lab: &AntreaLab, node: usize, does: bool) -> Result<()> {
    let host = &lab.cluster.lab.nodes()[node - 1].host;
    for address in OWN {
        // As virtual routers do: with a network's prefix length it could be the first address of the interface.
        let address = format!("{address}/{}", if address.contains(':') { 128 } else { 32 });
        let change: &[&str] = if does { &["addr", "add", &address, "nodad"] } else { &["addr", "del", &address] };
        host.exec("ip", &[change, &["dev", UPLINK]].concat())?;
    }
    Ok(())
}

/// An Egress without a pool has an address of a node. The host and the pods use it at once, and its node changes with it.
fn static_addresses(context: &LabContext) -> Result<()> {
    let mut lab = AntreaLab::start(context, &[])?;
    let capture = Capture::start(&lab.cluster.lab)?;
    println!("the agents say which addresses their nodes have, as where no CNI does");
    for node in 1..=3 {
        let none = ["node-primary-ifaddr", "host-cidrs", "node-subnets"]
            .map(|key| (format!("k8s.ovn.org/{key}"), Value::Null));
        let annotations: serde_json::Map<String, Value> = none.into_iter().collect();
        lab.cluster.api.merge(&format!("{NODES}/node{node}"), &json!({"metadata": {"annotations": annotations}}))?;
    }
    for (name, app, address) in [("v4", "web", OWN[0]), ("v6", "db", OWN[1])] {
        lab.egress(name, Some(app), json!({"egressIP": address}))?;
    }
    println!("no node has it");
    let why = until("its assignment says so", REALISED, || {
        let assignment = lab.get(&format!("{ASSIGNMENTS}/egress-{}", OWN[0]));
        let conditions = assignment.map(|one| one["status"]["conditions"].clone()).unwrap_or_default();
        let message = conditions[0]["message"].as_str().unwrap_or_default().to_owned();
        Ok(message.contains("no node has it on an interface").then_some(message))
    })?;
    println!("{why}");
    for node in [2, 1] {
        println!("node{node} has it, and its pods and others are seen with it");
        has_own(&lab, node, true)?;
        until_true(&format!("node{node} serves both"), FAILED_OVER, || {
            Ok(["v4", "v6"].iter().all(|name| lab.node(name).ok() == Some(node)))
        })?;
        let [v4, v6] = plan::SERVER.both();
        for (name, server, own) in [("web1", v4, OWN[0]), ("web2", v4, OWN[0]), ("db3", v6, OWN[1])] {
            let pod = lab.cluster.pod(name)?;
            lab.cluster.becomes(&pod.netns, server, Observed::Source(own.parse()?))?;
        }
        lab.cluster.is_seen_as("plain", None, None)?;
        println!("the host answers for it, and sends with it");
        let host = &lab.cluster.lab.nodes()[node - 1].host;
        for (own, server) in OWN.into_iter().zip(plan::SERVER.both()) {
            host.exec("ping", &["-n", "-c2", "-i0.2", "-W1", "-I", own, &server.to_string()])?;
            lab.cluster.lab.outside().exec("ping", &["-n", "-c2", "-i0.2", "-W1", own])?;
        }
        let output = lab.cluster.agent(node)?.ask(&["nat", "list", "--egress-ip", OWN[0]])?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        ensure!(text.contains("Egress v4") && text.contains(&format!("web{node}")), "{text}");
        has_own(&lab, node, false)?;
    }
    capture.finish_clean().map(drop)
}
