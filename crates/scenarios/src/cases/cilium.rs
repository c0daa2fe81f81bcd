//! Cilium's CiliumEgressGatewayPolicy: pods leave for some destinations by a gateway, with an address of its node: the one of the
//! default route, of an interface, or a named one. The gateways follow the nodes, and several divide the pods.

use egress_lab::api_objects::NODES;
use egress_lab::kube_api::ApiChoice;
use egress_lab::topology::addresses::Dual;
use egress_lab::{SECOND_UPLINK, SecondNic};

use crate::prelude::*;

const POLICIES: &str = "/apis/cilium.io/v2/ciliumegressgatewaypolicies";
const STATUSES: &str = "/apis/egress-agent.io/v1alpha1/egressgatewaypolicystatuses";
const ASSIGNMENTS: &str = "/apis/egress-agent.io/v1alpha1/egressassignments";
/// From the loss of a node on.
const FAILED_OVER: Duration = Duration::from_secs(10);

pub(super) fn tests() -> Vec<LabTest> {
    let test = |name, run| LabTest::new(name, Duration::from_secs(120), run);
    vec![
        test("cilium_policies_have_gateways_and_destinations", gateways_and_destinations),
        test("cilium_gateways_follow_nodes", follow_nodes),
        test("cilium_gateways_divide_the_pods", divide_the_pods),
    ]
}

struct CiliumLab {
    cluster: TestCluster,
}

impl CiliumLab {
    /// Nodes with a second NIC.
    fn start(context: &LabContext, nodes: usize, pods: &[(&str, usize, &str)]) -> Result<Self> {
        let config = |index| HostConfig { second: Some(SecondNic::default()), ..HostConfig::mixed(index) };
        let lab = LabBuilder::default().nodes(nodes).host_config(config).keep_logs(context.logs.clone());
        let pods = pods.iter().map(|(name, node, app)| pod(name, "shop", *node, &[("app", app)]));
        let mut cluster = TestCluster::bring_up(pods.fold(lab, LabBuilder::pod), Some(0), &ApiChoice::new(None))?;
        // An agent that is away for a moment, as in a restart, keeps its addresses: for 30 s by default.
        let flags = ["--cilium", "--egressip-reachability-grace", "2"];
        cluster.start_agents(&cluster.options(context).with(flags))?;
        cluster.agents_serve()?;
        // The agents say which addresses their nodes have, as where no CNI does.
        for node in 1..=nodes {
            let none = ["node-primary-ifaddr", "host-cidrs", "node-subnets"];
            let none = none.map(|key| (format!("k8s.ovn.org/{key}"), Value::Null));
            let annotations: serde_json::Map<String, Value> = none.into_iter().collect();
            cluster.api.merge(&format!("{NODES}/node{node}"), &json!({"metadata": {"annotations": annotations}}))?;
        }
        Ok(Self { cluster })
    }

    fn policy(&self, name: &str, app: &str, to: &[&str], more: Value) -> Result<()> {
        let mut spec = json!({"selectors": [{"podSelector": labels("app", app)}], "destinationCIDRs": to});
        let fields = more.as_object().context("fields")?.clone();
        spec.as_object_mut().context("an object")?.extend(fields);
        let object = json!({
            "apiVersion": "cilium.io/v2", "kind": "CiliumEgressGatewayPolicy", "metadata": {"name": name}, "spec": spec,
        });
        self.cluster.api.create(POLICIES, &object).map(drop)
    }

    fn change(&self, name: &str, spec: Value) -> Result<()> {
        self.cluster.api.merge(&format!("{POLICIES}/{name}"), &json!({"spec": spec}))
    }

    fn label(&self, node: usize, key: &str, on: bool) -> Result<()> {
        let value = if on { json!("yes") } else { Value::Null };
        self.cluster.label(&format!("{NODES}/node{node}"), key, &value)
    }

    /// Waits until the policy says this, and returns its gateways and the message.
    fn says(&self, name: &str, reason: &str) -> Result<(Vec<String>, String)> {
        let status = || {
            let object = self.cluster.api.get(&format!("{STATUSES}/{name}"))?.unwrap_or_default();
            Ok::<Value, anyhow::Error>(object["status"].clone())
        };
        let found = until(&format!("{name} is {reason}"), FAILED_OVER, || {
            let status = status()?;
            let conditions = status["conditions"].as_array().cloned().unwrap_or_default();
            let ready = conditions.iter().find(|one| one["type"] == "Ready" && one["reason"] == reason);
            let gateways = status["gateways"].as_array().into_iter().flatten();
            let gateways = gateways.filter_map(|one| one["node"].as_str().map(str::to_owned)).collect();
            Ok(ready.map(|ready| (gateways, ready["message"].as_str().unwrap_or_default().to_owned())))
        });
        found.with_context(|| format!("its status is {}", status().unwrap_or_default()))
    }

    fn has_gateway(&self, name: &str, node: usize) -> Result<()> {
        until_true(&format!("the gateway of {name} is node{node}"), FAILED_OVER, || {
            Ok(self.says(name, "Ready")?.0 == [format!("node{node}")])
        })
    }

    /// Of the first network.
    fn own(&self, number: usize) -> Result<Dual> {
        Ok(node(number)?.address())
    }

    /// Waits until the pods are seen by the server at these addresses.
    fn seen(&self, pods: &[&str], server: Dual, expected: Dual) -> Result<()> {
        for (pod, to) in pods.iter().flat_map(|pod| server.both().map(|to| (pod, to))) {
            self.cluster.becomes(&self.cluster.pod(pod)?.netns, to, Observed::Source(expected.towards(to)))?;
        }
        Ok(())
    }

    /// By which addresses of these gateways the pods are seen, once all are.
    fn sources(&self, pods: &[String], gateways: &[usize]) -> Result<BTreeMap<(String, IpAddr), IpAddr>> {
        let own = gateways.iter().map(|number| self.own(*number)).collect::<Result<Vec<_>>>()?;
        let mut sources = BTreeMap::new();
        for (name, to) in pods.iter().flat_map(|name| plan::SERVER.both().map(|to| (name, to))) {
            let netns = &self.cluster.pod(name)?.netns;
            let source =
                until(&format!("{name} leaves by one of {gateways:?}"), EFFECT, || match observe(netns, to)? {
                    Observed::Source(source) if own.iter().any(|own| own.is(source)) => Ok(Some(source)),
                    _ => Ok(None),
                })?;
            sources.insert((name.clone(), to), source);
        }
        Ok(sources)
    }

    fn dropped(&self, pod: &str, to: IpAddr) -> Result<()> {
        self.cluster.becomes(&self.cluster.pod(pod)?.netns, to, Observed::Nothing)
    }
}

fn gateway(key: &str, more: &Value) -> Value {
    let mut gateway = json!({"nodeSelector": labels(key, "yes")});
    gateway.as_object_mut().into_iter().for_each(|fields| fields.extend(more.as_object().cloned().unwrap_or_default()));
    gateway
}

/// One gateway without an address of its own.
fn by_default(key: &str) -> Value {
    json!({"egressGateway": gateway(key, &json!({}))})
}

fn gateways_and_destinations(context: &LabContext) -> Result<()> {
    let lab = CiliumLab::start(
        context,
        3,
        &[("web1", 1, "web"), ("web2", 2, "web"), ("db3", 3, "db"), ("plain", 1, "plain")],
    )?;
    let captures = (Capture::start(&lab.cluster.lab)?, Capture::on_second(&lab.cluster.lab)?);
    let (near, far) = ([plan::BEHIND_V4, plan::BEHIND_V6], [plan::BEHIND2_V4, plan::BEHIND2_V6]);
    lab.label(2, "near", true)?;
    lab.label(3, "far", true)?;
    lab.policy("near", "web", &near, by_default("near"))?;
    println!("the node's address of the default route, for these destinations and pods alone");
    lab.has_gateway("near", 2)?;
    lab.seen(&["web1", "web2"], plan::SERVER, lab.own(2)?)?;
    for name in ["web1", "web2"] {
        lab.cluster.is_seen_at(plan::SERVER2, name, None, None)?;
    }
    for name in ["db3", "plain"] {
        lab.cluster.is_seen_as(name, None, None)?;
    }
    println!("{}", lab.cluster.event("near", "Ready")?);
    println!("the gateway's host goes on using its address");
    let host = &lab.cluster.lab.nodes()[1].host;
    for to in plan::SERVER.both() {
        ensure!(observe(host, to)? == Observed::Source(lab.own(2)?.towards(to)), "the host is not seen at {to}");
    }

    println!("the first address of an interface, and a named one");
    let of_interface = json!({"egressGateway": gateway("far", &json!({"interface": SECOND_UPLINK}))});
    lab.policy("far", "db", &far, of_interface)?;
    lab.has_gateway("far", 3)?;
    let second = |number: usize| Ok::<Dual, anyhow::Error>(node(number)?.second_address());
    lab.seen(&["db3"], plan::SERVER2, second(3)?)?;
    let named = json!({"nodeSelector": {"matchLabels": null}, "interface": null, "egressIP": second(1)?.v4});
    lab.change("far", json!({"destinationCIDRs": [far[0]], "egressGateway": named}))?;
    lab.has_gateway("far", 1)?;
    let [v4, v6] = plan::SERVER2.both();
    let db3 = &lab.cluster.pod("db3")?.netns;
    lab.cluster.becomes(db3, v4, Observed::Source(second(1)?.v4.into()))?;
    println!("a family without a gateway is dropped, and an excluded part of the destinations leaves as before");
    lab.change("far", json!({"destinationCIDRs": far}))?;
    let (_, why) = lab.says("far", "NoGateway")?;
    ensure!(why == "IPv6 packets to its destinations are dropped", "{why}");
    lab.dropped("db3", v6)?;
    lab.cluster.becomes(db3, v4, Observed::Source(second(1)?.v4.into()))?;
    lab.change("far", json!({"excludedCIDRs": [format!("{v6}/128")]}))?;
    lab.cluster.becomes(
        db3,
        v6,
        Observed::Source(lab.cluster.lab.nodes()[2].address_towards(plan::SERVER2).towards(v6)),
    )?;

    println!("pods by their node, and by their namespace as a label of the pod");
    let by = |selector: Value| json!({"selectors": [selector]});
    lab.label(1, "zone", true)?;
    lab.change("near", by(json!({"podSelector": {}, "nodeSelector": labels("zone", "yes")})))?;
    lab.seen(&["web1", "plain"], plan::SERVER, lab.own(2)?)?;
    lab.cluster.is_seen_as("web2", None, None)?;
    lab.change("near", by(json!({"podSelector": labels("io.kubernetes.pod.namespace", "other")})))?;
    lab.cluster.is_seen_as("web1", None, None)?;
    lab.change("near", by(json!({"podSelector": labels("io.kubernetes.pod.namespace", "shop")})))?;
    lab.seen(&["web1", "db3"], plan::SERVER, lab.own(2)?)?;
    println!("what cannot be read leaves everything as it is, and says so");
    lab.change("near", by(json!({"podSelector": labels("io.cilium.k8s.policy.serviceaccount", "web")})))?;
    println!("{}", lab.cluster.event("near", "InvalidSpec")?);
    lab.seen(&["web1", "db3"], plan::SERVER, lab.own(2)?)?;

    println!("deleted policies are no more");
    for name in ["near", "far"] {
        lab.cluster.api.delete(&format!("{POLICIES}/{name}"))?;
    }
    for name in ["web1", "db3"] {
        lab.cluster.is_seen_as(name, None, None)?;
        lab.cluster.is_seen_at(plan::SERVER2, name, None, None)?;
    }
    until_true("nothing of them is left", EFFECT, || {
        let count = |path| {
            Ok::<_, anyhow::Error>(
                lab.cluster.api.get(path)?.unwrap_or_default()["items"].as_array().map_or(0, Vec::len),
            )
        };
        Ok(count(ASSIGNMENTS)? == 0 && count(STATUSES)? == 0)
    })?;
    captures.0.finish_clean()?;
    captures.1.finish_clean().map(drop)
}

fn follow_nodes(context: &LabContext) -> Result<()> {
    let mut lab = CiliumLab::start(context, 3, &[("web1", 1, "web"), ("web3", 3, "web")])?;
    let capture = Capture::start(&lab.cluster.lab)?;
    lab.policy("web", "web", &[plan::BEHIND_V4, plan::BEHIND_V6], by_default("gateway"))?;
    println!("no node is a gateway: the packets are dropped, and the policy says why");
    let (_, why) = lab.says("web", "NoGateway")?;
    ensure!(why.starts_with("egressGateway: its nodeSelector matches no node; IPv4 and IPv6 packets"), "{why}");
    println!("{}", lab.cluster.event("web", "NoGateway")?);
    for to in plan::SERVER.both() {
        lab.dropped("web1", to)?;
    }
    lab.cluster.is_seen_at(plan::SERVER2, "web1", None, None)?;
    for node in [2, 3] {
        lab.label(node, "gateway", true)?;
    }
    lab.has_gateway("web", 2)?;
    lab.seen(&["web1", "web3"], plan::SERVER, lab.own(2)?)?;

    println!("its agent stops, another node takes over and stays the gateway");
    lab.cluster.agent(2)?.pause()?;
    let moved = lab.has_gateway("web", 3);
    lab.cluster.agent(2)?.resume()?;
    moved?;
    lab.seen(&["web1", "web3"], plan::SERVER, lab.own(3)?)?;
    std::thread::sleep(Duration::from_secs(4));
    lab.has_gateway("web", 3)?;

    println!("a planned move: no packet leaves with the address of its own node");
    let drain = |value: Value| {
        let annotations = json!({"metadata": {"annotations": {"k8s.ovn.org/egress-drain": value}}});
        lab.cluster.api.merge(&format!("{NODES}/node3"), &annotations)
    };
    drain(json!("true"))?;
    lab.has_gateway("web", 2)?;
    lab.seen(&["web1", "web3"], plan::SERVER, lab.own(2)?)?;
    drain(Value::Null)?;

    println!("the gateway's selector matches no node any more");
    for node in [2, 3] {
        lab.label(node, "gateway", false)?;
    }
    for to in plan::SERVER.both() {
        lab.dropped("web3", to)?;
    }
    let seen = capture.finish_clean()?;
    // The pods are on nodes 1 and 3; node 3 was a gateway too.
    let own = lab.own(1)?;
    let leaked = seen.packets(|key| own.is(key.source) && plan::SERVER.is(key.destination));
    ensure!(leaked == 0, "{leaked} packets left with the address of the pod's node");
    Ok(())
}

fn divide_the_pods(context: &LabContext) -> Result<()> {
    let names: Vec<String> = (1..=12).map(|number| format!("web{number}")).collect();
    let pods: Vec<(&str, usize, &str)> = names.iter().map(|name| (name.as_str(), 4, "web")).collect();
    let lab = CiliumLab::start(context, 4, &pods)?;
    (1..=3).try_for_each(|node| lab.label(node, &format!("gateway{node}"), true))?;
    let by = |nodes: &[usize]| {
        let all: Vec<Value> = nodes.iter().map(|node| gateway(&format!("gateway{node}"), &json!({}))).collect();
        json!({"egressGateway": gateway("unused", &json!({})), "egressGateways": all})
    };
    lab.policy("web", "web", &[plan::BEHIND_V4, plan::BEHIND_V6], by(&[1, 2, 3]))?;
    // The agents publish their addresses one after the other.
    until_true("the policy has three gateways", FAILED_OVER, || Ok(lab.says("web", "Ready")?.0.len() == 3))?;
    let first = until("the agents have the same gateways", EFFECT, || {
        let seen = lab.sources(&names, &[1, 2, 3])?;
        Ok((lab.sources(&names, &[1, 2, 3])? == seen).then_some(seen))
    })?;
    // Random UIDs divide the pods: one of three gateways has none in 2 % of all runs, two have none in 0.0006 %.
    let gateway_of = |pod: &str| first[&(pod.to_owned(), plan::SERVER.v4.into())];
    let used: BTreeSet<IpAddr> = names.iter().map(|name| gateway_of(name)).collect();
    ensure!(used.len() >= 2, "12 pods have one gateway: {used:?}");
    let going =
        (1..=3).find(|number| lab.own(*number).is_ok_and(|own| own.is(gateway_of("web1")))).context("a gateway")?;
    let others: Vec<usize> = (1..=3).filter(|number| *number != going).collect();
    println!("each pod keeps its own");
    for ((name, to), source) in &first {
        let seen = (0..3).map(|_| observe(&lab.cluster.pod(name)?.netns, *to)).collect::<Result<Vec<_>>>()?;
        ensure!(seen.iter().all(|one| *one == Observed::Source(*source)), "{name} is seen by {seen:?}");
    }
    println!("a gateway that goes moves its own pods and no others");
    lab.change("web", by(&others))?;
    let gone = lab.own(going)?;
    for (at, source) in lab.sources(&names, &others)? {
        ensure!(gone.is(first[&at]) || first[&at] == source, "{at:?} has moved from {} to {source}", first[&at]);
    }
    println!("and they come back with it");
    lab.change("web", by(&[1, 2, 3]))?;
    for ((name, to), source) in &first {
        lab.cluster.becomes(&lab.cluster.pod(name)?.netns, *to, Observed::Source(*source))?;
    }
    lab.label(2, "gateway2", false)?;
    let (gateways, why) = lab.says("web", "FewerGateways")?;
    ensure!(gateways == ["node1", "node3"] && why == "egressGateways[1]: its nodeSelector matches no node", "{why}");
    Ok(())
}
