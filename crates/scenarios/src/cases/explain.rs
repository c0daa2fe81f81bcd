//! What an administrator asks a node: `egress-agent trace`, `nat`, `drops`, `log-level`. Played on the lab of `inspect`, with an
//! agent and without one, and where programs are filters; always with the rights of the agent's container and no others.

use std::io::{BufRead, BufReader};
use std::net::UdpSocket;
use std::process::Child;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::inspect::{NO_AGENT, has, printed};
use crate::prelude::*;
use egress_lab::pins::HOOKS;

/// The overlay's.
const TUNNEL_PORT: u16 = 4794;

/// A pod's packet to the tunnel port of node 3, which its own node drops.
pub fn forge(cluster: &TestCluster, pod: &str) -> Result<()> {
    let to = SocketAddr::new(cluster.lab.node(node(3)?).number.address().v4.into(), TUNNEL_PORT);
    cluster.pod(pod)?.netns.run(|| {
        UdpSocket::bind("0.0.0.0:0")?.send_to(&[0; 20], to)?;
        Ok(())
    })
}

fn asked(cluster: &mut TestCluster, line: &str) -> Result<String> {
    asked_on(cluster, 1, line)
}

fn asked_on(cluster: &mut TestCluster, node: usize, line: &str) -> Result<String> {
    let words: Vec<&str> = line.split(' ').collect();
    let output = cluster.agent(node)?.ask(&words)?;
    let status = output.status;
    let text = printed(output);
    ensure!(status.success(), "{line}: {status}\n{text}");
    Ok(text)
}

fn json(cluster: &mut TestCluster, line: &str) -> Result<Value> {
    json_on(cluster, 1, line)
}

/// From standard output alone: without an agent there is a warning on the other one.
fn json_on(cluster: &mut TestCluster, node: usize, line: &str) -> Result<Value> {
    let words: Vec<&str> = line.split(' ').chain(["-o", "json"]).collect();
    let output = cluster.agent(node)?.ask(&words)?;
    let (status, json) = (output.status, output.stdout.clone());
    let text = printed(output);
    ensure!(status.success(), "{line}: {status}\n{text}");
    serde_json::from_slice(&json).with_context(|| format!("{line}: {text}"))
}

/// Beside an agent that serves `egress` to the pod red/one.
pub(super) fn beside_an_agent(cluster: &mut TestCluster, egress: &str) -> Result<()> {
    let server = plan::SERVER.v4;
    println!("trace");
    let counted = |cluster: &mut TestCluster| asked(cluster, "nat count");
    let before = counted(cluster)?;
    let traced = json(cluster, &format!("trace --pod red/one --to {server}:{HTTP_PORT}"))?;
    ensure!(traced["verdict"] == "snat_here" && traced["agrees"] == true, "{traced:#}");
    ensure!(traced["source"]["address"] == egress && traced["gateway"]["here"] == true, "{traced:#}");
    ensure!(
        traced["warnings"].as_array().is_some_and(Vec::is_empty),
        "the program on the hook is this one: {traced:#}"
    );
    ensure!(counted(cluster)? == before, "a trace makes no mapping");
    let text = asked(cluster, &format!("trace --pod red/one --to {server} --proto icmp"))?;
    println!("{text}");
    has(
        &text,
        &["red/one", "a pod of this node? yes, selected by first", &format!("sees {egress}"), "verdict   snat_here"],
    )?;
    let there = cluster.lab.node(node(2)?).number.address().v4;
    let text = asked(cluster, &format!("trace --pod red/one --to {there}:80"))?;
    has(&text, &["verdict   marked_node", "of node2"])?;
    to_an_egress_ip(cluster, egress)?;
    let kubeconfig = cluster.api.node_kubeconfig().display().to_string();
    let elsewhere = ["trace", "--to", "198.51.100.10:80", "--kubeconfig", &kubeconfig, "--pod"];
    let refused = cluster.agent(1)?.ask(&[&elsewhere[..], &["red/two"]].concat())?;
    ensure!(refused.status.code() == Some(1), "{}", refused.status);
    has(&printed(refused), &["red/two is on node2, and this is node1"])?;
    let refused = cluster.agent(1)?.ask(&[&elsewhere[..], &["blue/one"]].concat())?;
    ensure!(refused.status.code() == Some(1), "{}", refused.status);
    has(&printed(refused), &["there is no pod blue/one; pods of this name on this node: red/one"])?;

    println!("nat");
    cluster.is_seen_as("one", Some(egress), None)?;
    let list = json(cluster, &format!("nat list --egress-ip {egress} --pod red/one --to {server} --proto tcp"))?;
    let first = list.get(0).with_context(|| format!("the request has no mapping: {list:#}"))?;
    ensure!(first["object"] == "first" && first["node"] == "node1" && first["pod"] == "red/one", "{list:#}");
    ensure!(
        json(cluster, "nat list --pod-ip 10.244.1.99")?.as_array().is_some_and(Vec::is_empty),
        "an unknown pod has entries"
    );
    let text = asked(cluster, "nat list")?;
    println!("{text}");
    has(&text, &["EGRESS IP", egress, "red/one"])?;
    println!("{}", asked(cluster, "nat count")?);
    let count = json(cluster, "nat count")?;
    ensure!(count["egress_ips"][egress].as_u64() >= Some(1), "{count:#}");
    dropped(cluster)?;
    log_level(cluster)
}

/// A trace says what becomes of a packet to an egress IP: of a selected pod, and of pods that no object selects, on the node that
/// holds the address and on another one.
fn to_an_egress_ip(cluster: &mut TestCluster, egress: &str) -> Result<()> {
    let whose = format!("to        {egress}, an egress IP of first (egress ID 1): ");
    let to_do = "to do     Egress IPs are source addresses only";
    let text = asked(cluster, &format!("trace --pod red/one --to {egress}:80"))?;
    println!("{text}");
    has(&text, &["verdict   hairpin_answered", &whose, to_do])?;
    for (number, pod) in [(1, "three"), (3, "four")] {
        let text = asked_on(cluster, number, &format!("trace --pod green/{pod} --to {egress}:80"))?;
        println!("{text}");
        has(&text, &["verdict   not_selected", &whose, to_do])?;
        ensure!(!text.contains("world     sees"), "it reaches the world: {text}");
        let url = format!("http://{egress}:80/");
        let answer = cluster.pod(pod)?.netns.exec("curl", &["--silent", "--show-error", "--max-time", "4", &url]);
        println!("{pod}: {answer:?}");
        ensure!(answer.is_err(), "{pod} is answered by {egress}");
    }
    let drops = asked(cluster, "drops --reason no_nat_entry")?;
    println!("{drops}");
    // The host of the pod gives its packets the node's address.
    let source = cluster.lab.node(node(3)?).number.address().v4;
    has(&drops, &[egress, &format!("tcp {source}:")])
}

/// A packet that is dropped, and where that shows.
fn dropped(cluster: &mut TestCluster) -> Result<()> {
    println!("drops");
    let text = until("a drop is shown", EFFECT, || {
        forge(cluster, "one")?;
        let text = asked(cluster, "drops --reason forged_tunnel")?;
        Ok((!text.is_empty()).then_some(text))
    })?;
    println!("{text}");
    has(&text, &["forged_tunnel", "(red/one)", "first", "ovn-k8s-mp0"])?;
    ensure!(asked(cluster, "drops --reason no_route")?.is_empty(), "another reason's");
    has(&asked(cluster, "drops --reason forged_tunnel --pod red/one --object first")?, &["(red/one)", ", first"])?;
    ensure!(asked(cluster, "drops --pod red/one --address 192.0.2.1")?.is_empty(), "another address's");
    let refused = cluster.agent(1)?.ask(&["drops", "--pod", "red/two"])?;
    ensure!(refused.status.code() == Some(1), "{}", refused.status);
    has(&printed(refused), &["red/two is not a pod of this node, node1"])?;
    let (mut follower, first) = follower(cluster)?;
    has(&first, &["forged_tunnel", "(red/one)"])?;
    // Ctrl-C is the end of who follows.
    kill(Pid::from_raw(i32::try_from(follower.id())?), Signal::SIGINT)?;
    let ended = until("it ends on Ctrl-C", EFFECT, || Ok(follower.try_wait()?))?;
    ensure!(ended.success(), "{ended}");
    Ok(())
}

fn log_level(cluster: &mut TestCluster) -> Result<()> {
    println!("log-level");
    ensure!(asked(cluster, "log-level")?.trim() == "info", "as it was started");
    has(&asked(cluster, "log-level info,egress_datapath=debug")?, &["egress_datapath=debug"])?;
    let log = cluster.agent(1)?.log().to_owned();
    until_true("drops are in the log", EFFECT, || {
        forge(cluster, "one")?;
        Ok(std::fs::read_to_string(&log)?.contains("packet dropped"))
    })?;
    let refused = cluster.agent(1)?.ask(&["log-level", "==="])?;
    ensure!(refused.status.code() == Some(1), "{}", refused.status);
    has(&printed(refused), &["is not understood"])?;
    asked(cluster, "log-level info")?;
    Ok(())
}

/// On node 2, whose programs are filters and whose pod red/two goes by the gateway of node 1: beside its agent, and without.
pub(super) fn by_filters(cluster: &mut TestCluster, egress: &str) -> Result<()> {
    println!("where the programs are filters");
    let server = plan::SERVER.v4;
    let pod = cluster.pod("two")?.addresses.v4;
    for runs in [true, false] {
        if !runs {
            cluster.agent(2)?.kill()?;
        }
        let status = cluster.agent(2)?.ask(&["status"])?;
        ensure!(status.status.code() == Some(if runs { 0 } else { NO_AGENT }), "{}", status.status);
        let status = printed(status);
        for line in status.lines().filter(|line| HOOKS.iter().any(|hook| line.starts_with(hook))) {
            has(line, &["clsact"])?;
        }
        has(&status, &HOOKS)?;
        cluster.is_seen_as("two", Some(egress), None)?;
        let traced = json_on(cluster, 2, &format!("trace --pod-ip {pod} --to {server}:{HTTP_PORT}"))?;
        ensure!(traced["verdict"] == "to_gateway" && traced["agrees"] == true, "{traced:#}");
        ensure!(traced["warnings"].as_array().is_some_and(Vec::is_empty), "the filter is this program: {traced:#}");
        for line in ["nat list", "nat count"] {
            asked_on(cluster, 2, line)?;
        }
    }
    cluster.agent(2)?.restart()?;
    cluster.serves(2)?;
    until_true("a drop is shown", EFFECT, || {
        forge(cluster, "two")?;
        Ok(asked_on(cluster, 2, "drops")?.contains("forged_tunnel"))
    })
}

/// Follows drops; the first that it tells is one of before.
pub(super) fn follower(cluster: &mut TestCluster) -> Result<(Child, String)> {
    let mut child = cluster.agent(1)?.follow(&["drops", "--follow", "--reason", "forged_tunnel"])?;
    let mut first = String::new();
    BufReader::new(child.stdout.as_mut().context("its output")?).read_line(&mut first)?;
    Ok((child, first))
}

/// Without one.
pub(super) fn beside_none(cluster: &mut TestCluster, egress: &str, follower: Child) -> Result<()> {
    let output = follower.wait_with_output()?;
    ensure!(output.status.success(), "{}", output.status);
    has(&printed(output), &["the agent has ended"])?;
    let server = plan::SERVER.v4;
    let pod = cluster.pod("one")?.addresses.v4;
    let traced = json(cluster, &format!("trace --pod-ip {pod} --to {server}:{HTTP_PORT}"))?;
    ensure!(traced["verdict"] == "snat_here" && traced["source"]["address"] == egress, "{traced:#}");
    has(&asked(cluster, &format!("nat list --egress-ip {egress}"))?, &[egress])?;
    for words in [&["drops"][..], &["log-level"]] {
        let output = cluster.agent(1)?.ask(words)?;
        ensure!(output.status.code() == Some(NO_AGENT), "{words:?}: {}", output.status);
        has(&printed(output), &["no agent runs here"])?;
    }
    Ok(())
}
