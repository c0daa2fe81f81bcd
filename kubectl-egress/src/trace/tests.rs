//! Both halves as agents print them, and the answer.

use clap::Parser;
use egress_datapath::trace::report::{
    ArrivalReport, OverlayHop, ToEgressIp as ReportedDestination, TraceReport, TracedGateway,
    TracedSource as ReportedSource,
};
use serde_json::{Value, json};

use super::*;
use crate::arguments::{Cli, PluginCommand};
use crate::cluster::testing::{agent, cluster, pod};
use crate::exec::Finished;
use crate::exec::testing::PlayedExec;

fn ip(text: &str) -> IpAddr {
    text.parse().expect("a literal")
}

/// As the agent of the pod's node prints it.
fn source_report(verdict: &'static str, gateway: Option<TracedGateway>) -> TraceReport {
    TraceReport {
        packet: "tcp 10.244.1.10:40000 -> 198.51.100.10:443".into(),
        pod: "red/one (10.244.1.10)".into(),
        questions: Vec::new(),
        verdict,
        class: "redirected",
        meaning: "A meaning.",
        gateway,
        to_egress_ip: None,
        source: None,
        advice: Some("Look there."),
        agrees: true,
        foreseen: vec![verdict],
        program: String::new(),
        warnings: vec!["the tag is not known".into()],
    }
}

fn remote_gateway(node: Option<&str>) -> TracedGateway {
    TracedGateway {
        here: false,
        node: "worker2 (172.18.0.3)".into(),
        egress_ip: ip("172.18.0.100"),
        egress_id: 7,
        why: "one of its object's, by the flow's hash",
        does: String::new(),
        overlay: Some(OverlayHop {
            from: ip("172.18.0.2"),
            to: ip("172.18.0.3"),
            node: node.map(str::to_owned),
            source: ip("10.244.1.10"),
            source_port: 40_000,
        }),
    }
}

fn gateway_report(verdict: &'static str, leaves: bool) -> ArrivalReport {
    let source = ReportedSource { address: ip("172.18.0.100"), port: Some(40_000), whose: "the egress IP" };
    ArrivalReport {
        packet: "tcp 10.244.1.10:40000 -> 198.51.100.10:443".into(),
        from_node: "worker1 (172.18.0.2)".into(),
        object: "first (egress ID 7)".into(),
        questions: Vec::new(),
        verdict,
        class: if leaves { "redirected" } else { "dropped" },
        meaning: "Another meaning.",
        foreseen: if leaves { vec![verdict, "no_route", "no_neighbour"] } else { vec![verdict] },
        passed_to: None,
        source: leaves.then_some(source),
        advice: (!leaves).then_some("Wait."),
        warnings: vec!["the decision alone".into()],
    }
}

fn printed(report: &impl Serialize) -> Finished {
    Finished { code: 0, stdout: serde_json::to_vec(report).expect("JSON"), stderr: Vec::new() }
}

fn arguments(line: &str) -> PathArgs {
    let line = std::iter::once("kubectl-egress").chain(line.split(' '));
    let PluginCommand::Trace(args) = Cli::parse_from(line).command else { panic!("another command") };
    args
}

fn pods() -> Value {
    json!([agent("worker1"), agent("worker2"), pod("one", "worker1", "10.244.1.10")])
}

const LINE: &str = "trace red/one 198.51.100.10:443";
const AT_SOURCE: &str = "worker1: trace --output json --pod red/one --to 198.51.100.10:443";
const AT_GATEWAY: &str = "worker2: trace --output json --pod-ip 10.244.1.10 --from-node 172.18.0.2 --egress-id 7 --to \
                          198.51.100.10:443 --from-port 40000";

#[tokio::test]
async fn the_gateway_is_asked_about_the_second_half() {
    let exec = PlayedExec::new(|node, _| match node {
        "worker1" => printed(&source_report("to_gateway", Some(remote_gateway(Some("worker2"))))),
        _ => printed(&gateway_report("snat_for_node", true)),
    });
    let answer = follow(&arguments(LINE), &cluster(&[("pods", pods())]), &exec).await.expect("an answer");
    assert_eq!(*exec.asked.borrow(), [AT_SOURCE, AT_GATEWAY]);
    assert_eq!(answer.leaves_with_egress_ip, Some(true));
    let expected = "\
packet     tcp 10.244.1.10:40000 -> 198.51.100.10:443
pod        red/one on worker1
egress IP  172.18.0.100 of first (egress ID 7)
verdict    worker1: to_gateway (redirected): A meaning.
verdict    worker2: snat_for_node (redirected): Another meaning.
answer     leaves worker2 from 172.18.0.100:40000, unless route or next hop fail there (no_route, no_neighbour)
!          worker1: the tag is not known
!          worker2: the decision alone
";
    assert_eq!(answer.text(), expected);
}

#[tokio::test]
async fn a_packet_to_an_egress_ip_says_whose_it_is() {
    let to =
        ReportedDestination { address: ip("172.18.0.100"), object: Some("first (egress ID 7)".into()), fate: "a fate" };
    let exec = PlayedExec::new(move |_, _| {
        printed(&TraceReport { to_egress_ip: Some(to.clone()), ..source_report("not_selected", None) })
    });
    let answer = follow(&arguments(LINE), &cluster(&[("pods", pods())]), &exec).await.expect("an answer");
    assert_eq!(answer.answer, "172.18.0.100 is an egress IP of first (egress ID 7): a fate");
    assert_eq!(answer.leaves_with_egress_ip, Some(false));
}

#[tokio::test]
async fn a_packet_that_is_left_alone_reads_as_a_sentence() {
    let host = TraceReport { class: "goes on to the host's stack", ..source_report("to_cluster", None) };
    let exec = PlayedExec::new(move |_, _| printed(&host));
    let answer = follow(&arguments(LINE), &cluster(&[("pods", pods())]), &exec).await.expect("an answer");
    assert_eq!(answer.answer, "goes on to the host's stack on worker1 (to_cluster)");
}

#[tokio::test]
async fn a_gateway_without_a_name_is_found_by_its_endpoint() {
    let node = json!({"metadata": {"name": "worker2"}, "status": {"addresses": [{"type": "InternalIP", "address": "172.18.0.3"}]}});
    let exec = PlayedExec::new(|node, _| match node {
        "worker1" => printed(&source_report("to_gateway", Some(remote_gateway(None)))),
        _ => printed(&gateway_report("not_gateway", false)),
    });
    let lists = [("pods", pods()), ("nodes", json!([node]))];
    let answer = follow(&arguments(LINE), &cluster(&lists), &exec).await.expect("an answer");
    assert_eq!(
        (answer.leaves_with_egress_ip, answer.answer.as_str()),
        (Some(false), "is dropped on worker2 (not_gateway)")
    );
    assert_eq!(answer.advice.as_deref(), Some("Wait."), "the gateway's, not the source's");
}

#[tokio::test]
async fn a_packet_that_leaves_its_own_node_asks_no_gateway() {
    let mut report = source_report("snat_here", None);
    report.source = Some(ReportedSource { address: ip("2001:db8::100"), port: Some(40_000), whose: "the egress IP" });
    let exec = PlayedExec::new(move |_, _| printed(&report));
    let answer = follow(&arguments(LINE), &cluster(&[("pods", pods())]), &exec).await.expect("an answer");
    assert_eq!(exec.asked.borrow().len(), 1);
    assert_eq!(
        (answer.leaves_with_egress_ip, answer.answer.as_str()),
        (Some(true), "leaves worker1 from [2001:db8::100]:40000")
    );
    let exec = PlayedExec::new(|_, _| printed(&source_report("no_gateway", None)));
    let answer = follow(&arguments(LINE), &cluster(&[("pods", pods())]), &exec).await.expect("an answer");
    assert_eq!(answer.leaves_with_egress_ip, Some(false));
    assert!(answer.text().contains("to do      Look there."), "{}", answer.text());
}

/// The first half is printed all the same, and the exit code says that the answer is not whole.
#[tokio::test]
async fn a_gateway_that_cannot_be_asked_leaves_the_answer_open() {
    let refused = |node: &str, _: &str| match node {
        "worker1" => printed(&source_report("to_gateway", Some(remote_gateway(Some("worker2"))))),
        _ => {
            Finished { code: 1, stderr: b"error: unexpected argument '--from-node'\n".to_vec(), ..Finished::default() }
        }
    };
    let cluster_of = |pods| cluster(&[("pods", pods)]);
    let without_gateway = json!([agent("worker1"), pod("one", "worker1", "10.244.1.10")]);
    for (pods, why) in [(pods(), "unexpected argument"), (without_gateway, "no agent is on node worker2")] {
        let exec = PlayedExec::new(refused);
        let answer = follow(&arguments(LINE), &cluster_of(pods.clone()), &exec).await.expect("an answer");
        assert_eq!(answer.leaves_with_egress_ip, None);
        assert!(answer.answer.contains(why) && answer.answer.contains("not known"), "{}", answer.answer);
        let code = run(&arguments(LINE), &cluster_of(pods), &exec).await.expect("printed");
        assert_eq!(format!("{code:?}"), format!("{:?}", ExitCode::FAILURE));
    }
}

/// The API server has no node with the endpoint.
#[tokio::test]
async fn a_gateway_whose_name_is_not_found_leaves_the_answer_open() {
    let exec = PlayedExec::new(|_, _| printed(&source_report("to_gateway", Some(remote_gateway(None)))));
    let answer = follow(&arguments(LINE), &cluster(&[("pods", pods())]), &exec).await.expect("the first half");
    assert_eq!((answer.leaves_with_egress_ip, answer.path.len()), (None, 1));
    assert!(answer.answer.contains("goes to 172.18.0.3") && answer.answer.contains("no node has"), "{}", answer.answer);
}

/// An agent that does not say what to ask at the gateway, and hand-overs in progress on each node.
#[tokio::test]
async fn a_packet_that_is_sent_on_without_a_further_answer_has_none() {
    let mut old = remote_gateway(Some("worker2"));
    old.overlay = None;
    let mut passed_on = gateway_report("handed_over", false);
    passed_on.passed_to = Some("worker3".into());
    for (first, said) in [
        (
            source_report("to_gateway", Some(old.clone())),
            "goes to worker2 (172.18.0.3), and what becomes of it there is not known",
        ),
        (source_report("handed_over", Some(old)), "worker1 passes it on"),
        (source_report("to_gateway", Some(remote_gateway(Some("worker2")))), "worker2 passes it on to worker3"),
    ] {
        let second = passed_on.clone();
        let exec = PlayedExec::new(move |node, _| if node == "worker1" { printed(&first) } else { printed(&second) });
        let answer = follow(&arguments(LINE), &cluster(&[("pods", pods())]), &exec).await.expect("an answer");
        assert_eq!(answer.leaves_with_egress_ip, None, "{said}");
        assert!(answer.answer.contains(said), "{}", answer.answer);
    }
}

#[tokio::test]
async fn what_agents_say_cannot_control_the_terminal() {
    let mut report = source_report("no_gateway", None);
    report.warnings = vec!["bad\u{1b}]0;\u{7}\nanswer     leaves".into()];
    let exec = PlayedExec::new(move |_, _| printed(&report));
    let answer = follow(&arguments(LINE), &cluster(&[("pods", pods())]), &exec).await.expect("an answer");
    assert!(answer.text().ends_with("!          worker1: bad ]0;  answer     leaves\n"), "{:?}", answer.text());
}

#[tokio::test]
async fn a_pod_that_cannot_be_traced_is_named() {
    let mut of_host = pod("host", "worker1", "172.18.0.2");
    of_host["spec"]["hostNetwork"] = json!(true);
    let mut waiting = pod("waiting", "worker1", "10.244.1.11");
    waiting["spec"]["nodeName"] = Value::Null;
    let cluster = cluster(&[("pods", json!([agent("worker1"), of_host, waiting]))]);
    let exec = PlayedExec::new(|_, _| Finished::default());
    for (name, said) in
        [("host", "its node's network"), ("waiting", "on no node yet"), ("none", "there is no pod red/none")]
    {
        let line = format!("trace red/{name} 198.51.100.10:443");
        let error = follow(&arguments(&line), &cluster, &exec).await.expect_err("no trace").to_string();
        assert!(error.contains(said), "{error}");
    }
    assert!(exec.asked.borrow().is_empty());
}
