//! Users of an address, from rows as `egress-agent nat list -o json` prints them.

use clap::Parser;
use serde_json::{Value, json};

use super::past::PastAnswer;
use super::*;
use crate::arguments::{Cli, PluginCommand};
use crate::cluster::testing::{agent, cluster, egress_ip, pod};
use crate::exec::Finished;
use crate::exec::testing::PlayedExec;

fn row(pod_ip: &str, node: &str, egress_port: u16) -> Value {
    json!({
        "egress_ip": "172.18.0.100", "egress_port": egress_port, "object": "first", "egress_id": 7, "protocol": "tcp",
        "pod_ip": pod_ip, "pod_port": 4000, "node": node, "to": "198.51.100.10", "to_port": 80, "state": "established",
        "age_seconds": 40, "egress_idle_seconds": 1, "ingress_idle_seconds": 1, "timeout_seconds": 1, "expires_in_seconds": 1,
    })
}

fn lists() -> [(&'static str, Value); 3] {
    let endpoint = |name, address| json!({"metadata": {"name": name}, "status": {"addresses": [{"type": "InternalIP", "address": address}]}});
    let pods = json!([
        agent("worker1"),
        agent("worker2"),
        pod("one", "worker1", "10.244.1.10"),
        pod("two", "worker2", "10.244.2.10"),
        // Of another node: a stale address.
        pod("wrong", "worker2", "10.244.1.10"),
    ]);
    [
        ("pods", pods),
        ("nodes", json!([endpoint("worker1", "172.18.0.2"), endpoint("worker2", "172.18.0.3")])),
        ("egressips", json!([egress_ip("first", "172.18.0.100", "worker2")])),
    ]
}

async fn answer(line: &str, rows: Value) -> (Result<WhoAnswer, PluginError>, Vec<String>) {
    let line = std::iter::once("kubectl-egress").chain(line.split(' '));
    let PluginCommand::Who(args) = Cli::parse_from(line).command else { panic!("another command") };
    let stdout = serde_json::to_vec(&rows).expect("JSON");
    let exec = PlayedExec::new(move |_, _| Finished { stdout: stdout.clone(), ..Finished::default() });
    (ask(&args, &cluster(&lists()), &exec).await, exec.asked.take())
}

#[tokio::test]
async fn the_pod_of_a_port_is_named_with_object_and_node() {
    let rows = json!([row("10.244.1.10", "worker1", 4001), row("10.244.2.10", "worker2", 4002)]);
    let (answer, asked) = answer("who 172.18.0.100:4001 --to 198.51.100.10:80", rows).await;
    let line = "worker2: nat list --output json --egress-ip 172.18.0.100 --to 198.51.100.10:80";
    assert_eq!(asked, [line], "the gateway alone is asked");
    let expected = "\
172.18.0.100 is an egress IP of first, on worker2
red/one (10.244.1.10) on worker1: 1 mapping
  tcp 10.244.1.10:4000 -> 198.51.100.10:80, seen from 172.18.0.100:4001, for 40 s
";
    assert_eq!(answer.expect("an answer").text(), expected);
}

#[tokio::test]
async fn names_from_agents_cannot_control_the_terminal() {
    let mut bad = row("10.244.1.10", "worker1", 4001);
    bad["object"] = json!("first\u{1b}[2J\nred/admin");
    let (answer, _) = answer("who 172.18.0.100", json!([bad])).await;
    let text = answer.expect("an answer").text();
    assert!(text.starts_with("172.18.0.100 is an egress IP of first [2J red/admin, on worker2\n"), "{text:?}");
}

#[tokio::test]
async fn without_a_port_each_pod_has_one_line() {
    let rows = json!([
        row("10.244.2.10", "here", 4001),
        row("10.244.1.10", "172.18.0.2", 4002),
        row("10.244.1.10", "172.18.0.2", 4003),
        row("10.244.1.99", "172.18.0.2", 4004),
    ]);
    let (answer, _) = answer("who 172.18.0.100", rows).await;
    let expected = "\
172.18.0.100 is an egress IP of first, on worker2
red/one (10.244.1.10) on worker1: 2 mappings
a pod that is gone (10.244.1.99) on worker1: 1 mapping
red/two (10.244.2.10) on worker2: 1 mapping
";
    assert_eq!(answer.expect("an answer").text(), expected);
}

#[tokio::test]
async fn an_unused_port_and_an_unknown_address_are_told_apart() {
    let (found, _) = answer("who 172.18.0.100:5000", json!([row("10.244.1.10", "worker1", 4001)])).await;
    let found = found.expect("an answer");
    assert!(found.users.is_empty() && found.text().contains("no connection at port 5000"), "{}", found.text());
    let (unknown, asked) = answer("who 172.18.0.101", json!([])).await;
    assert!(matches!(unknown, Err(PluginError::NotAssigned(_))) && asked.is_empty());
}

#[tokio::test]
async fn an_incomplete_list_is_no_answer() {
    let line = ["kubectl-egress", "who", "172.18.0.100"];
    let PluginCommand::Who(args) = Cli::parse_from(line).command else { panic!("another command") };
    let exec =
        PlayedExec::new(|_, _| Finished { code: 1, stdout: b"[]".to_vec(), stderr: b"error: no pins\n".to_vec() });
    let error = ask(&args, &cluster(&lists()), &exec).await.expect_err("incomplete").to_string();
    assert_eq!(error, "the agent on worker2 (egress-agent/agent-worker2) cannot answer: no pins");
}

fn block(first: u16, pod_ip: &str, pod_node: &str, from: &str) -> Value {
    json!({
        "from": from, "to": "2026-05-01T13:00:00Z", "node": "worker2", "egress_ip": "172.18.0.100", "first_port": first,
        "last_port": first + 63, "pod_ip": pod_ip, "given_ns": 1, "pod_node": pod_node, "object": "first",
    })
}

async fn past(
    line: &str,
    logs: impl Fn(&str, &str) -> Result<Value, &'static str> + 'static,
) -> (PastAnswer, Vec<String>) {
    let line = std::iter::once("kubectl-egress").chain(line.split(' '));
    let PluginCommand::Who(args) = Cli::parse_from(line).command else { panic!("another command") };
    let exec = PlayedExec::new(move |node, arguments| match logs(node, arguments) {
        Ok(log) => Finished { stdout: serde_json::to_vec(&log).expect("JSON"), ..Finished::default() },
        Err(why) => Finished { code: 1, stderr: why.as_bytes().to_vec(), ..Finished::default() },
    });
    let (port, at) = (args.seen.port.expect("a port"), args.at.clone().expect("a time"));
    let answer = past::ask(&args, (port, &at), &cluster(&lists()), &exec).await.expect("an answer");
    let mut asked = exec.asked.take();
    asked.sort();
    (answer, asked)
}

#[tokio::test]
async fn the_pod_of_a_port_in_the_past_is_named_by_two_nodes() {
    let (answer, asked) = past("who 172.18.0.100:1030 --at 2026-05-01T12:00:00Z", |node, arguments| {
        Ok(match (node, arguments.contains("--pod-ip")) {
            ("worker2", false) => {
                json!({"blocks": [block(1024, "10.244.1.10", "worker1", "2026-05-01T11:00:00Z")], "unread_lines": 0})
            }
            ("worker1", true) => json!({"blocks": [], "pods": [{"pod": "red/one", "from": "x"}], "unread_lines": 0}),
            _ => json!({"blocks": [], "unread_lines": 0}),
        })
    })
    .await;
    let at = "nat log --output json --at 2026-05-01T12:00:00Z";
    let expected = [
        format!("worker1: {at} --egress-ip 172.18.0.100 --port 1030"),
        format!("worker1: {at} --pod-ip 10.244.1.10"),
        format!("worker2: {at} --egress-ip 172.18.0.100 --port 1030"),
    ];
    assert_eq!(asked, expected);
    let expected = "\
red/one (10.244.1.10) on worker1, by first
  ports 1024-1087 on gateway worker2 from 2026-05-01T11:00:00Z to 2026-05-01T13:00:00Z
";
    assert_eq!(answer.text(), expected);
}

#[tokio::test]
async fn nodes_without_a_log_are_named_and_the_others_answer() {
    let (answer, _) = past("who 172.18.0.100:1030 --at 2026-05-01T12:00:00Z", |node, _| match node {
        "worker1" => Err("error: /var/log/egress-agent/nat.log: No such file"),
        _ => Ok(json!({"blocks": [], "unread_lines": 0})),
    })
    .await;
    let text = answer.text();
    assert!(text.starts_with("no log has a pod for 172.18.0.100:1030 at 2026-05-01T12:00:00Z\nworker1: "), "{text}");
    assert!(text.contains("nat.log: No such file") && !text.contains("worker2:"), "{text}");
}
