//! `egress-agent status`: what it says beside a running agent, a stopped one, a killed one, and where nothing is. On the same
//! lab: the pages for scrapers (`metrics`).

use std::io::{BufRead, BufReader};
use std::process::Output;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::explain;
use super::metrics;
use crate::prelude::*;

const ADDRESS: &str = "172.18.0.110";

/// The exit code of a command that no agent answers.
pub(super) const NO_AGENT: i32 = 3;

pub(super) fn printed(output: Output) -> String {
    [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat()
}

fn table(cluster: &mut TestCluster, node: usize) -> Result<String> {
    table_that_ends_with(cluster, node, 0)
}

fn table_that_ends_with(cluster: &mut TestCluster, node: usize, code: i32) -> Result<String> {
    let output = cluster.agent(node)?.status(&[])?;
    ensure!(output.status.code() == Some(code), "status ends with {}, and is to end with {code}", output.status);
    let silence = String::from_utf8_lossy(&output.stderr).starts_with("error: ");
    ensure!(silence == (code != 0), "the silence of an agent is on standard error: {output:?}");
    let text = printed(output);
    println!("{text}");
    Ok(text)
}

pub(super) fn has(text: &str, expected: &[&str]) -> Result<()> {
    expected.iter().try_for_each(|one| {
        ensure!(text.contains(one), "{one:?} is not in its output:\n{text}");
        Ok(())
    })
}

pub(super) fn status_with_and_without_an_agent(context: &LabContext) -> Result<()> {
    let unselected = [pod("three", "green", 1, &[]), pod("four", "green", 3, &[])];
    let pods = [pod("one", "red", 1, &[]), pod("two", "red", 2, &[])].into_iter().chain(unselected);
    let mut cluster = metrics::start(context, pods.collect())?;
    cluster.assignable(1, true)?;
    cluster.assign(&egress_ip("first", &[ADDRESS], &labels("house", "red"), &all()))?;
    cluster.assign(&egress_ip("late", &["172.18.0.111"], &labels("house", "red"), &all()))?;
    cluster.is_seen_as("one", Some(ADDRESS), None)?;
    // The other object's address is served as well, for no pod.
    let text = until("both are served", EFFECT, || {
        let text = printed(cluster.agent(1)?.status(&[])?);
        Ok((text.matches("  served").count() == 2).then_some(text))
    })?;
    println!("{text}");
    has(
        &text,
        &[
            "node1 (egress node)",
            "serves       yes",
            "lease        held",
            ADDRESS,
            "first",
            "STANDBY OBJECT",
            "red/one",
            "OBJECT  ID  PODS HERE  EGRESS IPS",
            "first   1   1 ",
            "pods         2 known, 1 selected, by 4 addresses",
            "172.18.0.110 here",
            "from_pod      ovn-k8s-mp0",
            "management port  ovn-k8s-mp0  up     1400",
            "nat ",
        ],
    )?;
    ensure!(!text.contains("NOT ATTACHED"), "all programs are on their hooks");
    ensure!(text.contains("controller") && text.contains("on node"), "the controller is known");
    let text = table(&mut cluster, 2)?;
    has(&text, &["node2 (no egress node)", "no egress IPs here", "172.18.0.110 node1", "GATEWAY  ADDRESS"])?;

    let json = |cluster: &mut TestCluster| -> Result<Value> {
        Ok(serde_json::from_slice(&cluster.agent(1)?.status(&["-o", "json"])?.stdout)?)
    };
    let status = json(&mut cluster)?;
    ensure!(status["agent"]["running"] == true && status["cluster"]["node"] == "node1", "{status:#}");
    ensure!(status["addresses"][0]["address"] == ADDRESS, "{status:#}");
    ensure!(status["cluster"]["standby"][0]["served_by"] == "first", "{status:#}");

    println!("again and again");
    let mut watched = cluster.agent(1)?.follow(&["status", "--watch=1", "-o", "json"])?;
    let mut lines = BufReader::new(watched.stdout.take().context("its output")?).lines();
    for _ in 0..2 {
        let line = lines.next().context("it has ended")??;
        let status: Value = serde_json::from_str(&line).with_context(|| line.clone())?;
        ensure!(status["addresses"][0]["address"] == ADDRESS, "{status:#}");
    }
    kill(Pid::from_raw(i32::try_from(watched.id())?), Signal::SIGINT)?;
    let ended = until("it ends on Ctrl-C", EFFECT, || Ok(watched.try_wait()?))?;
    ensure!(ended.success(), "{ended}");

    metrics::are_seen(&cluster, ADDRESS)?;
    explain::beside_an_agent(&mut cluster, ADDRESS)?;
    explain::by_filters(&mut cluster, ADDRESS)?;
    metrics::shared_gateway_is_reported(&mut cluster)?;

    println!("wrong input");
    let output = cluster.agent(1)?.status(&["-o", "xml"])?;
    ensure!(output.status.code() == Some(2), "{}", output.status);
    has(&printed(output), &["'xml'", "table", "json"])?;
    let output = cluster.lab.node(egress_lab::test_cluster::node(1)?).host.output(
        &context.built.agent.display().to_string(),
        &["status", "--socket", "/run/nowhere.sock", "--bpffs", "/run/nowhere"],
    )?;
    ensure!(output.status.code() == Some(NO_AGENT), "{}", output.status);
    has(&printed(output), &["error: no agent runs here", "/run/nowhere.sock", "no pins below /run/nowhere"])?;

    println!("the agent is stopped");
    cluster.agent(1)?.pause()?;
    has(
        &table_that_ends_with(&mut cluster, 1, NO_AGENT)?,
        &["does not answer: it is stopped, or hangs", "agent        does not answer", ADDRESS],
    )?;
    cluster.agent(1)?.resume()?;
    println!("the agent is killed");
    let (follower, _) = explain::follower(&mut cluster)?;
    cluster.agent(1)?.kill()?;
    has(
        &table_that_ends_with(&mut cluster, 1, NO_AGENT)?,
        &["no agent runs here", ADDRESS, "served, by the programs alone", "4 addresses known, 2 selected", "from_pod"],
    )?;
    explain::beside_none(&mut cluster, ADDRESS, follower)?;
    let status = json(&mut cluster)?;
    ensure!(status["agent"]["running"] == false && status.get("cluster").is_none(), "{status:#}");
    println!("it runs again");
    cluster.agent(1)?.restart()?;
    cluster.serves(1)?;
    has(&table(&mut cluster, 1)?, &["node1 (egress node)"])?;
    let mode = std::fs::metadata(&cluster.lab.node(egress_lab::test_cluster::node(1)?).socket).context("the socket")?;
    let mode = std::os::unix::fs::PermissionsExt::mode(&mode.permissions()) & 0o777;
    ensure!(mode == 0o600, "its mode is {mode:o}");
    Ok(())
}
