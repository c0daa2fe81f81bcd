//! The lab's load balancer, tested by itself and without agents: who calls a Service's address from outside reaches a pod by the
//! node that has the Service's label, and by another one when the label moves.

use egress_lab::EXT_LAN;
use egress_lab::api_objects::{NODES, egress_service_label};
use egress_lab::kube_api::ApiChoice;
use egress_lab::kube_api::objects::LabLoadBalancer;
use egress_lab::load_balancer::LoadBalancer;
use egress_lab::topology::addresses::Dual;

use crate::prelude::*;

/// How long calls may take the old way: the router believes one announcement a second.
const MOVED: Duration = Duration::from_secs(6);
/// Of two pods each is as good: that one gets none of so many calls happens once in two million runs.
const CALLS: usize = 22;
const CALL: Duration = Duration::from_millis(400);

/// The tests of the load balancer, for the list of all tests on the lab.
pub(super) fn tests() -> Vec<LabTest> {
    vec![
        LabTest::new("lab_lb_announces_by_label", Duration::from_secs(60), announces_by_label)
            .not_on_ovn(NO_LOAD_BALANCER),
    ]
}

fn announces_by_label(context: &LabContext) -> Result<()> {
    let lab = LabBuilder::default().nodes(3).keep_logs(context.logs.clone());
    let lab = lab.pod(pod("web1", "default", 1, &[("app", "web")])).pod(pod("web3", "default", 3, &[("app", "web")]));
    let cluster = TestCluster::bring_up(lab, Some(0), &ApiChoice::new(None))?;
    let (web1, web3) = (cluster.pod("web1")?, cluster.pod("web3")?);
    let servers = [Server::in_pod(&cluster.lab, web1)?, Server::in_pod(&cluster.lab, web3)?];
    let balancer = LabLoadBalancer::new("default", "web", 0);
    cluster.api.publish_load_balancer(&balancer, &[web1, web3])?;
    let running = LoadBalancer::start(&cluster.lab, &cluster.api)?;
    let calls = Calls { cluster: &cluster, address: balancer.ingress, servers };
    let label = |number: usize, value: Value| {
        cluster.label(&format!("{NODES}/node{number}"), &egress_service_label("default", "web"), &value)
    };
    let change = |spec: Value| cluster.api.merge("/api/v1/namespaces/default/services/web", &json!({"spec": spec}));

    let capture = Capture::start(&cluster.lab)?;
    ensure!(calls.seen()? == [None, None], "a node without the label answers for the address");
    // The node of no pod; its uplink filters multicast.
    label(2, json!(""))?;
    calls.become_seen_as(cluster.lab.node(node(2)?).management())?;
    let counts = calls.counts()?;
    ensure!(counts.iter().all(|count| *count > 0), "of {CALLS} calls the pods got {counts:?}");
    label(2, Value::Null)?;
    label(3, json!(""))?;
    calls.become_seen_as(cluster.lab.node(node(3)?).management())?;
    let claims = capture.finish_clean()?.claims;
    let claimed = |number: &usize| claims.contains_key(&(format!("node{number}"), balancer.ingress.v4.into()));
    let claimed: Vec<usize> = (1..=3).filter(claimed).collect();
    ensure!(claimed == [2, 3], "the nodes that have claimed the address are {claimed:?}");

    // Its own pod, which sees who calls.
    change(json!({"externalTrafficPolicy": "Local"}))?;
    calls.become_seen_as(plan::SERVER)?;
    ensure!(calls.counts()? == [0, CALLS], "calls have left the node of their only pod");
    change(json!({"externalTrafficPolicy": "Cluster"}))?;
    calls.become_seen_as(cluster.lab.node(node(3)?).management())?;
    cluster.api.publish_load_balancer(&balancer, &[web1])?;
    until_true("the only endpoint gets all calls", MOVED, || Ok(calls.counts()? == [CALLS, 0]))?;

    // What the router knows outlives the label, as with any other load balancer of this kind.
    label(3, Value::Null)?;
    until_true("the address is not answered for", MOVED, || {
        cluster.lab.ext().exec("ip", &["neigh", "flush", "dev", EXT_LAN])?;
        Ok(calls.seen()? == [None, None])
    })?;
    running.finish()
}

/// Calls from outside.
struct Calls<'a> {
    cluster: &'a TestCluster,
    address: Dual,
    /// In the pods.
    servers: [Server; 2],
}

impl Calls<'_> {
    /// The client addresses that a pod saw, by IPv4 and by IPv6; `None` without an answer.
    fn seen(&self) -> Result<[Option<IpAddr>; 2]> {
        let [v4, v6] = self.address.both().map(|to| {
            let reply = client::get_within(self.cluster.lab.outside(), SocketAddr::new(to, 80), "/", "caller", CALL)?;
            reply.ok().map(|reply| reply.seen_as()).transpose()
        });
        Ok([v4?, v6?])
    }

    fn become_seen_as(&self, expected: Dual) -> Result<()> {
        let wanted = expected.both().map(Some);
        until_true(&format!("pods see {} and {}", expected.v4, expected.v6), MOVED, || Ok(self.seen()? == wanted))
    }

    /// How many of [`CALLS`] each pod gets.
    fn counts(&self) -> Result<[usize; 2]> {
        let marks = self.servers.each_ref().map(|server| server.log().mark());
        for _ in 0..CALLS / 2 {
            let seen = self.seen()?;
            ensure!(seen.iter().all(Option::is_some), "a call got no answer: {seen:?}");
        }
        let [first, second] = self.servers.each_ref();
        Ok([first.log().since(marks[0]).len(), second.log().since(marks[1]).len()])
    }
}
