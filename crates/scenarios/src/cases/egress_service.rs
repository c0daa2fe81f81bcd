//! EgressServices, with a load balancer that announces by the label of the node: pods leave with the Service's address by one
//! node, its clients reach it there, and both follow the object, the Service and the nodes.

use egress_lab::api_objects::{NODES, egress_service_label};
use egress_lab::capture::CaptureKey;
use egress_lab::capture::dissect::TCP;
use egress_lab::kube_api::ApiChoice;
use egress_lab::kube_api::objects::LabLoadBalancer;
use egress_lab::load_balancer::{ANNOUNCED_BY, LoadBalancer};
use egress_lab::topology::UPLINK;
use egress_lab::topology::addresses::{Dual, HTTP_PORT};
use egress_lab::{SECOND_UPLINK, SecondNic};

use crate::prelude::*;

const EGRESS_SERVICES: &str = "/apis/k8s.ovn.org/v1/namespaces/default/egressservices";
const ASSIGNMENTS: &str = "/apis/egress-agent.io/v1alpha1/egressassignments";
const SERVICE: &str = "/api/v1/namespaces/default/services/web";
/// The pods of the Service, each on the node of its number.
const PODS: [&str; 3] = ["web1", "web2", "web3"];
/// Of no Service.
const PLAIN: &str = "plain";
/// The routing table of a network.
const TABLE: &str = "100";
const EGRESS_IP: Dual = Dual::new([172, 18, 0, 110], [0xfd00, 0x172, 0x18, 0, 0, 0, 0, 0x110]);
const CALL: Duration = Duration::from_millis(400);
/// How long nothing may change, where nothing should.
const STAYS: Duration = Duration::from_secs(3);
/// What the router believes of an announcement takes as long.
const MOVED: Duration = Duration::from_secs(10);

pub(super) fn tests() -> Vec<LabTest> {
    let tests = [
        LabTest::new("service_pods_leave_with_its_address", Duration::from_secs(120), leave_with_its_address),
        LabTest::new("service_precedes_egress_ip", Duration::from_secs(60), precedes_egress_ip),
        LabTest::new("service_of_local_traffic_has_a_node_with_pods", Duration::from_secs(90), local_traffic),
        LabTest::new("service_follows_its_nodes", Duration::from_secs(90), follows_its_nodes),
        LabTest::new("service_shares_pods_with_other_policies", Duration::from_secs(90), shares_pods),
        LabTest::new("service_follows_its_network", Duration::from_secs(120), follows_its_network),
        LabTest::new("service_pods_leave_by_their_nodes_network", Duration::from_secs(120), leave_by_their_network),
        LabTest::new("service_networks_lead_to_one_address", Duration::from_secs(90), two_networks),
        LabTest::new("service_that_cannot_be_served_says_why", Duration::from_secs(60), says_why),
    ];
    tests.into_iter().map(|test| test.not_on_ovn(NO_LOAD_BALANCER)).collect()
}

struct ServiceLab {
    cluster: TestCluster,
    balancer: LabLoadBalancer,
    running: LoadBalancer,
    _servers: Vec<Server>,
}

impl ServiceLab {
    /// The Service leads to these pods.
    fn start(context: &LabContext, pods: &[&str]) -> Result<Self> {
        Self::start_on(TestCluster::with_crd(context, Self::pods(), 0, |_| {})?, pods)
    }

    /// On nodes with a second network.
    fn with_second_network(context: &LabContext) -> Result<Self> {
        let config = |index| HostConfig { second: Some(SecondNic::default()), ..HostConfig::mixed(index) };
        let lab = LabBuilder::default().nodes(3).host_config(config).keep_logs(context.logs.clone());
        let lab = Self::pods().into_iter().fold(lab, LabBuilder::pod);
        let mut cluster = TestCluster::bring_up(lab, Some(0), &ApiChoice::new(None))?;
        cluster.start_agents(&cluster.options(context))?;
        cluster.agents_serve()?;
        // As OVN-Kubernetes lists all addresses of a node.
        for node in cluster.lab.nodes() {
            let networks = [(node.number.address(), 16), (node.number.second_address(), 24)];
            let nets = networks.map(|(own, length)| [format!("{}/{length}", own.v4), format!("{}/64", own.v6)]);
            let annotations = json!({"k8s.ovn.org/host-cidrs": json!(nets.concat()).to_string()});
            let patch = json!({"metadata": {"annotations": annotations}});
            cluster.api.merge(&format!("{NODES}/{}", node.name()), &patch)?;
        }
        Self::start_on(cluster, &PODS)
    }

    fn pods() -> Vec<PodSpec> {
        let web = PODS.iter().zip(1..).map(|(name, node)| pod(name, "default", node, &[("app", "web")]));
        web.chain([pod(PLAIN, "default", 3, &[])]).collect()
    }

    fn start_on(cluster: TestCluster, pods: &[&str]) -> Result<Self> {
        let servers =
            PODS.iter().map(|name| Server::in_pod(&cluster.lab, cluster.pod(name)?)).collect::<Result<_>>()?;
        let balancer = LabLoadBalancer::new("default", "web", 0);
        let running = LoadBalancer::start(&cluster.lab, &cluster.api)?;
        let lab = Self { cluster, balancer, running, _servers: servers };
        lab.lead_to(pods)?;
        Ok(lab)
    }

    fn lead_to(&self, pods: &[&str]) -> Result<()> {
        let pods = pods.iter().map(|name| self.cluster.pod(name)).collect::<Result<Vec<_>>>()?;
        self.cluster.api.publish_load_balancer(&self.balancer, &pods)
    }

    fn put(&self, spec: Value) -> Result<()> {
        let object = json!({
            "apiVersion": "k8s.ovn.org/v1", "kind": "EgressService",
            "metadata": {"name": "web", "namespace": "default"}, "spec": spec,
        });
        self.cluster.api.create(EGRESS_SERVICES, &object).map(drop)
    }

    fn edit(&self, spec: Value) -> Result<()> {
        self.cluster.api.merge(&format!("{EGRESS_SERVICES}/web"), &json!({"spec": spec}))
    }

    fn delete(&self) -> Result<()> {
        self.cluster.api.delete(&format!("{EGRESS_SERVICES}/web"))
    }

    fn host(&self) -> Result<Option<String>> {
        let object = self.cluster.api.get(&format!("{EGRESS_SERVICES}/web"))?;
        Ok(object.and_then(|object| Some(object["status"]["host"].as_str()?.to_owned())))
    }

    /// The nodes with the Service's label.
    fn labelled(&self) -> Result<Vec<usize>> {
        let label = egress_service_label("default", "web");
        let mut labelled = Vec::new();
        for number in 1..=3 {
            let node = self.cluster.api.get(&format!("{NODES}/node{number}"))?.unwrap_or_default();
            if node["metadata"]["labels"].get(&label).is_some() {
                labelled.push(number);
            }
        }
        Ok(labelled)
    }

    /// The status, the label, what the world sees of each pod, and that clients reach the address.
    fn is_hosted_by(&self, number: usize) -> Result<()> {
        self.is_hosted_for(number, &PODS)
    }

    /// The same, as far as these pods can tell.
    fn is_hosted_for(&self, number: usize, pods: &[&str]) -> Result<()> {
        let host = format!("node{number}");
        until_true(&format!("{host} hosts it"), MOVED, || {
            Ok(self.host()?.as_deref() == Some(&host) && self.labelled()? == [number])
        })?;
        for name in pods {
            self.pod_is_seen_as(name, self.balancer.ingress)?;
        }
        until_true("clients reach the Service by its address", MOVED, || {
            let answers = self.balancer.ingress.both().map(|to| self.answers(to));
            Ok(answers.into_iter().collect::<Result<Vec<_>>>()?.iter().all(|answered| *answered))
        })
    }

    fn answers(&self, to: IpAddr) -> Result<bool> {
        let answer = client::get_within(self.cluster.lab.outside(), SocketAddr::new(to, 80), "/", "caller", CALL)?;
        Ok(answer.is_ok())
    }

    fn is_not_hosted(&self) -> Result<()> {
        until_true("no node hosts it", MOVED, || {
            Ok(self.host()?.unwrap_or_default().is_empty() && self.labelled()?.is_empty())
        })?;
        PODS.iter().zip(1..).try_for_each(|(name, number)| self.pod_is_seen_as(name, node(number)?.address()))
    }

    fn pod_is_seen_as(&self, name: &str, expected: Dual) -> Result<()> {
        let netns = &self.cluster.pod(name)?.netns;
        plan::SERVER
            .both()
            .into_iter()
            .zip(expected.both())
            .try_for_each(|(to, source)| self.cluster.becomes(netns, to, Observed::Source(source)))
    }

    /// The load balancer announces by this node, whatever the labels.
    fn announce_by(&self, number: usize) -> Result<()> {
        let annotations = json!({"metadata": {"annotations": {ANNOUNCED_BY: format!("node{number}")}}});
        self.cluster.api.merge(SERVICE, &annotations)
    }

    /// Routes of a table on every node, in both families.
    fn route(&self, change: &str, what: &[&str]) -> Result<()> {
        for node in self.cluster.lab.nodes() {
            for family in ["-4", "-6"] {
                let words = [&[family, "route", change], what, &["table", TABLE]].concat();
                node.host.exec("ip", &words)?;
            }
        }
        Ok(())
    }

    /// What the pods send to pods of other nodes arrives, and to the nodes, and to the Service by its load balancer's address.
    fn reach_the_cluster(&self) -> Result<()> {
        for (from, to) in PODS.iter().zip(PODS.iter().cycle().skip(1)) {
            let (netns, peer) = (&self.cluster.pod(from)?.netns, self.cluster.pod(to)?);
            for address in peer.addresses.both() {
                let reply = client::get_within(netns, SocketAddr::new(address, HTTP_PORT), "/", "caller", CALL)?;
                ensure!(reply.is_ok(), "{from} does not reach {to} at {address}: {reply:?}");
            }
            for address in peer.node.address().both() {
                let pong = client::ping(netns, address, Ping::default())?;
                ensure!(pong.received == 1, "{from} does not reach the node of {to} at {address}: {}", pong.text);
            }
            for address in self.balancer.ingress.both() {
                for from in [*from, PLAIN] {
                    // To any of the pods, possibly to itself, which some service proxies do not support.
                    let netns = &self.cluster.pod(from)?.netns;
                    until_true(&format!("{from} reaches the Service at {address}"), MOVED, || {
                        Ok(client::get_within(netns, SocketAddr::new(address, 80), "/", "caller", CALL)?.is_ok())
                    })?;
                }
            }
        }
        Ok(())
    }

    fn clients_are_answered(&self, expected: bool) -> Result<()> {
        let what = if expected { "clients are answered" } else { "clients get no answer" };
        until_true(what, MOVED, || {
            let answers = self.balancer.ingress.both().map(|to| self.answers(to));
            let answers = answers.into_iter().collect::<Result<Vec<_>>>()?;
            Ok(answers.iter().all(|answered| *answered == expected))
        })
    }

    fn pods_are_seen_as(&self, expected: impl Fn(usize) -> Result<Observed2>) -> Result<()> {
        for (name, number) in PODS.iter().zip(1..) {
            let netns = &self.cluster.pod(name)?.netns;
            for (to, observed) in plan::SERVER.both().into_iter().zip(expected(number)?) {
                self.cluster.becomes(netns, to, observed)?;
            }
        }
        Ok(())
    }

    fn finish(self) -> Result<()> {
        self.running.finish()?;
        self.cluster.tear_down()
    }
}

/// In both families.
type Observed2 = [Observed; 2];

fn source(address: Dual) -> Observed2 {
    address.both().map(Observed::Source)
}

const NOTHING: Observed2 = [Observed::Nothing, Observed::Nothing];

/// An EgressIP object and two EgressServices select one pod, which also calls nodes on both of their networks, and sends pings.
fn shares_pods(context: &LabContext) -> Result<()> {
    let lab = ServiceLab::with_second_network(context)?;
    lab.cluster.assignable(1, true)?;
    lab.cluster.assignable(3, true)?;
    let object = egress_ip("both", &["172.18.0.110", "fd00:172:18::110"], &all(), &labels("app", "web"));
    lab.cluster.assign(&object)?;
    lab.put(json!({"nodeSelector": hostname("node2")}))?;
    lab.is_hosted_by(2)?;

    println!("pods call other nodes");
    let to = lab.cluster.lab.node(node(3)?);
    let server = Server::on_node(&lab.cluster.lab, to)?;
    for number in [1, 2] {
        let (netns, own) = (&lab.cluster.pod(PODS[number - 1])?.netns, node(number)?);
        for (addresses, source) in
            [(to.number.address(), own.address()), (to.number.second_address(), own.second_address())]
        {
            for (to, source) in addresses.both().into_iter().zip(source.both()) {
                lab.cluster.becomes(netns, to, Observed::Source(source))?;
            }
        }
    }
    drop(server);

    println!("pods send pings");
    let capture = Capture::start(&lab.cluster.lab)?;
    for name in PODS {
        for to in plan::SERVER.both() {
            let pong = client::ping(&lab.cluster.pod(name)?.netns, to, Ping::default())?;
            ensure!(pong.received == 1, "{name} got no answer from {to}: {}", pong.text);
        }
    }
    let ingress = lab.balancer.ingress;
    let pings = |key: &CaptureKey| plan::SERVER.is(key.destination) && key.protocol != TCP;
    let seen = capture.finish_clean()?;
    let (by_service, all) = (seen.packets(|key| pings(key) && ingress.is(key.source)), seen.packets(pings));
    ensure!(by_service == 6 && all == 6, "{by_service} of {all} pings had the Service's address, not 6");

    println!("a younger EgressService selects the same pods");
    let second = LabLoadBalancer::new("default", "second", 1);
    let pods = PODS.iter().map(|name| lab.cluster.pod(name)).collect::<Result<Vec<_>>>()?;
    lab.cluster.api.publish_load_balancer(&second, &pods)?;
    let service = "/api/v1/namespaces/default/services/second";
    lab.cluster.api.merge(service, &json!({"spec": {"selector": {"app": "web"}}}))?;
    // Ages are in seconds.
    std::thread::sleep(Duration::from_millis(1100));
    lab.cluster.api.create(
        EGRESS_SERVICES,
        &json!({"apiVersion": "k8s.ovn.org/v1", "kind": "EgressService",
                "metadata": {"name": "second", "namespace": "default"}, "spec": {}}),
    )?;
    let event = lab.cluster.event("second", "UndefinedRequest")?;
    println!("it says: {event}");
    lab.is_hosted_by(2)?;
    lab.delete()?;
    lab.pods_are_seen_as(|_| Ok(source(second.ingress)))?;
    lab.cluster.api.delete(&format!("{EGRESS_SERVICES}/second"))?;
    lab.pods_are_seen_as(|_| Ok(source(EGRESS_IP)))?;
    lab.finish()
}

/// Answers to clients and what leaves with the shared address follow a table of the host, whatever the Service's traffic policy.
fn follows_its_network(context: &LabContext) -> Result<()> {
    const REFUSE: [&str; 2] = ["blackhole", "default"];
    let lab = ServiceLab::start(context, &PODS)?;
    lab.announce_by(2)?;
    for policy in ["Cluster", "Local"] {
        println!("externalTrafficPolicy: {policy}");
        lab.cluster.api.merge(SERVICE, &json!({"spec": {"externalTrafficPolicy": policy}}))?;
        lab.put(json!({"network": TABLE, "nodeSelector": hostname("node2")}))?;
        // Without a route there, the main table.
        lab.is_hosted_by(2)?;
        lab.route("add", &REFUSE)?;
        lab.pods_are_seen_as(|_| Ok(NOTHING))?;
        lab.clients_are_answered(false)?;
        lab.reach_the_cluster()?;
        lab.cluster.becomes(&lab.cluster.pod(PLAIN)?.netns, plan::SERVER.v4.into(), source(node(3)?.address())[0])?;
        lab.route("del", &REFUSE)?;
        lab.is_hosted_by(2)?;
        lab.route("add", &REFUSE)?;
        lab.pods_are_seen_as(|_| Ok(NOTHING))?;
        lab.delete()?;
        lab.pods_are_seen_as(|number| Ok(source(node(number)?.address())))?;
        lab.clients_are_answered(true)?;
        lab.route("del", &REFUSE)?;
    }
    lab.finish()
}

/// Each pod by its own node and the table there, without an egress IP.
fn leave_by_their_network(context: &LabContext) -> Result<()> {
    const REFUSE: [&str; 2] = ["blackhole", "default"];
    let lab = ServiceLab::with_second_network(context)?;
    lab.announce_by(1)?;
    let route_by_network = || -> Result<()> {
        for node in lab.cluster.lab.nodes() {
            for (family, via) in ["-4", "-6"].into_iter().zip(plan::EXT2.both().map(|via| via.to_string())) {
                let by = ["default", "via", &via, "dev", SECOND_UPLINK, "table", TABLE];
                node.host.exec("ip", &[&[family, "route", "replace"], &by[..]].concat())?;
            }
        }
        Ok(())
    };
    route_by_network()?;
    let own = |number: usize| Ok(source(node(number)?.address()));
    let by_network = |number: usize| Ok(source(node(number)?.second_address()));
    for policy in ["Cluster", "Local"] {
        println!("externalTrafficPolicy: {policy}");
        lab.cluster.api.merge(SERVICE, &json!({"spec": {"externalTrafficPolicy": policy}}))?;
        lab.pods_are_seen_as(own)?;
        lab.put(json!({"network": TABLE, "sourceIPBy": "Network"}))?;
        until_true("the host is ALL", MOVED, || {
            Ok(lab.host()?.as_deref() == Some("ALL") && lab.labelled()?.is_empty())
        })?;
        lab.pods_are_seen_as(by_network)?;
        lab.reach_the_cluster()?;
        lab.cluster.becomes(&lab.cluster.pod(PLAIN)?.netns, plan::SERVER.v4.into(), source(node(3)?.address())[0])?;
        let (first, second) = (Capture::start(&lab.cluster.lab)?, Capture::on_second(&lab.cluster.lab)?);
        lab.clients_are_answered(true)?;
        let ingress = lab.balancer.ingress;
        // The load balancer advertises the addresses too.
        let is_answer = |key: &CaptureKey| ingress.is(key.source) && key.protocol == TCP;
        let answers = [first.finish_clean()?, second.finish_clean()?].map(|seen| seen.packets(is_answer));
        ensure!(
            answers[0] == 0 && answers[1] > 0,
            "answers to clients left by the uplink and the network: {answers:?}"
        );
        lab.route("replace", &REFUSE)?;
        lab.pods_are_seen_as(|_| Ok(NOTHING))?;
        lab.clients_are_answered(false)?;
        lab.reach_the_cluster()?;
        route_by_network()?;
        lab.pods_are_seen_as(by_network)?;
        lab.delete()?;
        lab.pods_are_seen_as(own)?;
        lab.clients_are_answered(true)?;
    }
    lab.finish()
}

/// Two Services whose clients have one address, each in a network of its own, and a main table that leads to neither.
fn two_networks(context: &LabContext) -> Result<()> {
    const OTHER_TABLE: &str = "101";
    let lab = ServiceLab::with_second_network(context)?;
    lab.announce_by(1)?;
    let on_nodes = |words: &[&str]| -> Result<()> {
        lab.cluster.lab.nodes().iter().try_for_each(|node| node.host.exec("ip", words).map(drop))
    };
    let routes = [(plan::EXT2, SECOND_UPLINK, TABLE), (plan::EXT, UPLINK, OTHER_TABLE)];
    for (router, device, table) in routes {
        for (family, via) in ["-4", "-6"].into_iter().zip(router.both().map(|via| via.to_string())) {
            on_nodes(&[family, "route", "add", "default", "via", &via, "dev", device, "table", table])?;
        }
    }
    for network in [plan::BEHIND_V4, plan::BEHIND_V6] {
        on_nodes(&["route", "add", "blackhole", network])?;
    }
    // The kernel asks the main table whether packets from there may arrive.
    for (node, device) in
        lab.cluster.lab.nodes().iter().flat_map(|node| [(node, "all"), (node, UPLINK), (node, SECOND_UPLINK)])
    {
        node.host.sysctl(&[(format!("ipv4/conf/{device}/rp_filter"), "0".to_owned())])?;
    }
    let plain = lab.cluster.pod(PLAIN)?;
    let _server = Server::in_pod(&lab.cluster.lab, plain)?;
    lab.cluster.label(&format!("/api/v1/namespaces/default/pods/{PLAIN}"), "app", &json!("other"))?;
    let other = LabLoadBalancer::new("default", "other", 1);
    lab.cluster.api.publish_load_balancer(&other, &[plain])?;
    let announced = json!({"metadata": {"annotations": {ANNOUNCED_BY: "node3"}}});
    lab.cluster.api.merge("/api/v1/namespaces/default/services/other", &announced)?;
    let is_seen_as = |expected: Observed2| {
        let both = plan::SERVER.both().into_iter().zip(expected);
        both.into_iter().try_for_each(|(to, observed)| lab.cluster.becomes(&plain.netns, to, observed))
    };
    let others_clients = |expected: bool| {
        until_true(&format!("the other Service answers its clients: {expected}"), MOVED, || {
            let answers = other.ingress.both().map(|to| lab.answers(to));
            Ok(answers.into_iter().collect::<Result<Vec<_>>>()?.iter().all(|answered| *answered == expected))
        })
    };
    println!("nothing leads there");
    lab.pods_are_seen_as(|_| Ok(NOTHING))?;
    is_seen_as(NOTHING)?;
    lab.clients_are_answered(false)?;
    others_clients(false)?;

    println!("each by its own network");
    lab.put(json!({"network": TABLE, "sourceIPBy": "Network"}))?;
    lab.cluster.api.create(
        EGRESS_SERVICES,
        &json!({"apiVersion": "k8s.ovn.org/v1", "kind": "EgressService", "metadata": {"name": "other", "namespace": "default"},
                "spec": {"network": OTHER_TABLE, "sourceIPBy": "Network"}}),
    )?;
    lab.pods_are_seen_as(|number| Ok(source(node(number)?.second_address())))?;
    is_seen_as(source(node(3)?.address()))?;
    lab.clients_are_answered(true)?;
    others_clients(true)?;

    println!("the second one alone, then none");
    lab.delete()?;
    lab.pods_are_seen_as(|_| Ok(NOTHING))?;
    lab.clients_are_answered(false)?;
    is_seen_as(source(node(3)?.address()))?;
    others_clients(true)?;
    lab.cluster.api.delete(&format!("{EGRESS_SERVICES}/other"))?;
    is_seen_as(NOTHING)?;
    others_clients(false)?;
    lab.finish()
}

fn hostname(name: &str) -> Value {
    json!({"matchLabels": {"kubernetes.io/hostname": name}})
}

fn leave_with_its_address(context: &LabContext) -> Result<()> {
    let lab = ServiceLab::start(context, &PODS)?;
    let capture = Capture::start(&lab.cluster.lab)?;
    lab.put(json!({}))?;
    let first = until("some node hosts it", MOVED, || Ok(lab.labelled()?.first().copied()))?;
    lab.is_hosted_by(first)?;

    for number in [1, 2] {
        println!("node{number} alone may host it");
        lab.edit(json!({"nodeSelector": {"matchLabels": {"rack": number.to_string()}}}))?;
        let label = |to: usize, value: Value| lab.cluster.label(&format!("{NODES}/node{to}"), "rack", &value);
        label(number, json!(number.to_string()))?;
        lab.is_hosted_by(number)?;
    }
    println!("no node may host it, then node3");
    lab.edit(json!({"nodeSelector": {"matchLabels": {"rack": "3"}}}))?;
    lab.is_not_hosted()?;
    lab.cluster.label(&format!("{NODES}/node3"), "rack", &json!("3"))?;
    lab.is_hosted_by(3)?;

    println!("labels by others are taken back");
    lab.cluster.label(&format!("{NODES}/node1"), &egress_service_label("default", "web"), &json!(""))?;
    lab.cluster.label(&format!("{NODES}/node2"), &egress_service_label("gone", "x"), &json!(""))?;
    lab.is_hosted_by(3)?;
    until_true("the label of no EgressService is gone", EFFECT, || {
        let node = lab.cluster.api.get(&format!("{NODES}/node2"))?.unwrap_or_default();
        Ok(node["metadata"]["labels"].get(egress_service_label("gone", "x")).is_none())
    })?;

    println!("the EgressService is deleted");
    lab.delete()?;
    until_true("the label goes", EFFECT, || Ok(lab.labelled()?.is_empty()))?;
    lab.is_not_hosted()?;
    let left = lab.cluster.api.get(ASSIGNMENTS)?.unwrap_or_default();
    ensure!(left["items"].as_array().is_some_and(Vec::is_empty), "assignments are left: {left}");
    let seen = capture.finish_clean()?;
    let pods = seen.packets(|key| !plan::is_lan(key.destination) && seen.class(key.source) == AddressKind::Pod);
    ensure!(pods == 0, "{pods} packets with a pod's address have left the nodes");
    lab.finish()
}

fn precedes_egress_ip(context: &LabContext) -> Result<()> {
    let lab = ServiceLab::start(context, &PODS)?;
    lab.cluster.assignable(1, true)?;
    lab.cluster.assignable(3, true)?;
    let object = egress_ip("both", &["172.18.0.110", "fd00:172:18::110"], &all(), &labels("app", "web"));
    lab.cluster.assign(&object)?;
    for name in PODS {
        lab.pod_is_seen_as(name, EGRESS_IP)?;
    }
    lab.put(json!({"nodeSelector": hostname("node2")}))?;
    lab.is_hosted_by(2)?;
    lab.delete()?;
    for name in PODS {
        lab.pod_is_seen_as(name, EGRESS_IP)?;
    }
    lab.finish()
}

fn local_traffic(context: &LabContext) -> Result<()> {
    let lab = ServiceLab::start(context, &["web2"])?;
    lab.cluster.api.merge(SERVICE, &json!({"spec": {"externalTrafficPolicy": "Local"}}))?;
    lab.put(json!({"nodeSelector": hostname("node1")}))?;
    lab.is_not_hosted()?;
    let asked = Instant::now();
    until_true("it stays without a node", STAYS * 2, || {
        ensure!(
            lab.host()?.unwrap_or_default().is_empty() && lab.labelled()?.is_empty(),
            "a node without pods hosts it"
        );
        Ok(asked.elapsed() > STAYS)
    })?;
    println!("a pod on node1");
    lab.lead_to(&["web1", "web2"])?;
    lab.is_hosted_by(1)?;
    println!("that pod is gone");
    lab.lead_to(&["web2"])?;
    lab.is_not_hosted()?;
    lab.finish()
}

/// Running flows survive that their host is drained, and a dead host is replaced.
fn follows_its_nodes(context: &LabContext) -> Result<()> {
    // Controllers run on the other nodes.
    const FIRST: usize = 3;
    const SECOND: usize = 2;
    let lab = ServiceLab::start(context, &["web1"])?;
    let label = |to: usize| lab.cluster.label(&format!("{NODES}/node{to}"), "rack", &json!("a"));
    let drain = |value: Value| {
        let annotations = json!({"metadata": {"annotations": {"k8s.ovn.org/egress-drain": value}}});
        lab.cluster.api.merge(&format!("{NODES}/node{FIRST}"), &annotations)
    };
    lab.put(json!({"nodeSelector": {"matchLabels": {"rack": "a"}}}))?;
    label(FIRST)?;
    lab.is_hosted_by(FIRST)?;
    label(SECOND)?;

    println!("its host is drained");
    let (netns, seen) = (&lab.cluster.pod("web1")?.netns, Observed::Source(lab.balancer.ingress.v4.into()));
    let flow = TrafficFlow::udp(netns, (plan::SERVER.v4, ECHO_PORT).into(), Duration::from_millis(20))?;
    drain(json!("true"))?;
    let mut asked = 0;
    // Until the load balancer has followed, answers arrive at the old node, also those to connections by the new one.
    let mut goes_on = |what: &str| {
        asked += 1;
        let now = observe(netns, plan::SERVER.v4.into())?;
        ensure!(now == seen, "{what}: connection {asked} was seen as {now}");
        anyhow::Ok(())
    };
    until_true("the label moves", MOVED, || {
        goes_on("the address moves")?;
        Ok(lab.labelled()? == [SECOND])
    })?;
    let moved = Instant::now();
    while moved.elapsed() < MOVED / 4 {
        goes_on("the load balancer and the router follow")?;
    }
    lab.is_hosted_by(SECOND)?;
    let report = flow.finish()?;
    println!("meanwhile {asked} new connections, and {} datagrams of one flow", report.sent);
    ensure!(report.lost() == 0, "a flow that was there before has lost datagrams: {report:?}");

    println!("its host loses its power");
    drain(Value::Null)?;
    let off = Instant::now();
    lab.cluster.lab.set_power(lab.cluster.lab.node(node(SECOND)?), false)?;
    lab.is_hosted_for(FIRST, &["web1", "web3"])?;
    println!("after {} ms", off.elapsed().as_millis());
    lab.cluster.lab.set_power(lab.cluster.lab.node(node(SECOND)?), true)?;
    lab.is_hosted_for(FIRST, &["web1", "web2", "web3"])?;
    lab.finish()
}

fn says_why(context: &LabContext) -> Result<()> {
    let lab = ServiceLab::start(context, &PODS)?;
    lab.put(json!({"network": "no-such-table", "nodeSelector": hostname("node2")}))?;
    let event = lab.cluster.event("web", "NoNetwork")?;
    ensure!(event.contains("no routing table \"no-such-table\""), "the event says {event}");
    // A node is named, and nothing leaves by another network.
    lab.pods_are_seen_as(|_| Ok(NOTHING))?;
    println!("each pod by its own node, and a table that none has");
    lab.edit(json!({"nodeSelector": null, "sourceIPBy": "Network"}))?;
    until_true("the host is ALL", MOVED, || Ok(lab.host()?.as_deref() == Some("ALL")))?;
    lab.pods_are_seen_as(|_| Ok(NOTHING))?;
    lab.reach_the_cluster()?;
    println!("each pod by its own node");
    lab.edit(json!({"network": null, "nodeSelector": null, "sourceIPBy": "Network"}))?;
    until_true("the host is ALL", MOVED, || Ok(lab.host()?.as_deref() == Some("ALL") && lab.labelled()?.is_empty()))?;
    for (name, number) in PODS.iter().zip(1..) {
        lab.pod_is_seen_as(name, node(number)?.address())?;
    }
    println!("a name that is too long for a label");
    let name = "n".repeat(60);
    let object = json!({"apiVersion": "k8s.ovn.org/v1", "kind": "EgressService",
                        "metadata": {"name": name, "namespace": "default"}, "spec": {}});
    lab.cluster.api.create(EGRESS_SERVICES, &object)?;
    lab.cluster.event(&name, "NoLabel")?;
    lab.edit(json!({"sourceIPBy": null}))?;
    let number = until("some node hosts it", MOVED, || Ok(lab.labelled()?.first().copied()))?;
    lab.is_hosted_by(number)?;
    println!("the address of the load balancer goes, and comes back");
    lab.cluster.api.patch_status(SERVICE, &json!({"status": {"loadBalancer": {"ingress": []}}}))?;
    lab.is_not_hosted()?;
    lab.lead_to(&PODS)?;
    lab.is_hosted_by(number)?;
    lab.finish()
}
