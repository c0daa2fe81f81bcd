//! A panic in any long-lived task of an agent or of a controller: the process ends at once and names the task, the pinned
//! programs keep serving traffic, and the next agent adopts them.

use std::process::{Output, Stdio};

use super::tls;
use crate::prelude::*;
use egress_lab::agents::Controller;
use egress_lab::confinement::{confined, confined_by};
use egress_lab::test_cluster::LOADED;
use egress_toolchain::Paths;

const V4: &str = "172.18.0.110";
const V6: &str = "fd00:172:18::110";
const TICK: Duration = Duration::from_millis(10);
/// As crates/supervise/src/lib.rs has it.
const PANIC_IN: &str = "EGRESS_AGENT_TEST_PANIC_IN";
/// Tasks of controllers; those that both have are played in agents.
const OF_CONTROLLERS: [&str; 10] = [
    "Antrea",
    "Cilium",
    "EgressRouters",
    "EgressServices",
    "census",
    "controller",
    "leader election",
    "leader knocks",
    "metrics token",
    "prober",
];
/// An object that logs packets is built for it alone.
const ELSEWHERE: [&str; 1] = ["packet log"];

pub(super) fn one_that_panics_ends_the_agent(context: &LabContext) -> Result<()> {
    let mut cluster = tls::start(context)?;
    for number in [1, 2] {
        cluster.assignable(number, true)?;
    }
    cluster.assign(&egress_ip("held", &[V4, V6], &all(), &all()))?;
    cluster.is_seen_as("one", Some(V4), Some(V6))?;
    let echo = SocketAddr::new(plan::SERVER.v4.into(), ECHO_PORT);
    let flow = TrafficFlow::tcp(&cluster.pod("one")?.netns, echo, TICK, client::PATIENCE)?;
    cluster.agent(3)?.kill()?;
    for name in names()?.iter().filter(|name| !ELSEWHERE.contains(&name.as_str())) {
        let begin = Instant::now();
        let output = ends(&mut cluster, context, name)?;
        let printed = String::from_utf8_lossy(&output.stderr);
        let lines: Vec<&str> = printed.lines().filter(|line| line.contains("a task ")).collect();
        println!("{name}: {} after {:.1} s: {lines:?}", output.status, begin.elapsed().as_secs_f32());
        ensure!(output.status.code() == Some(1), "{name}: the exit status is {}:\n{printed}", output.status);
        let words = ["has panicked: injected by a test".to_owned(), format!("task=\"{name}\"")];
        // Some have several: a server for each address, a connection for each purpose.
        let is_named = lines.iter().all(|line| words.iter().all(|word| line.contains(word)));
        ensure!(is_named && !lines.is_empty(), "{name}: it is not what the line names:\n{printed}");
    }
    cluster.agent(3)?.restart()?;
    cluster.serves(3)?;
    cluster.is_seen_as("one", Some(V4), Some(V6))?;
    let report = flow.finish()?;
    ensure!(report.lost() == 0 && report.broken.is_none(), "running traffic was harmed: {report:?}");
    Ok(())
}

/// Of all tasks, from their one definition.
fn names() -> Result<Vec<String>> {
    let file = Paths::find()?.root.join("crates/supervise/src/lib.rs");
    let text = std::fs::read_to_string(&file).with_context(|| format!("read {}", file.display()))?;
    let names = text.lines().filter_map(|line| line.trim().strip_prefix("Self::")?.split_once(" => \""));
    let names: Vec<String> = names.filter_map(|(_, name)| Some(name.strip_suffix("\",")?.to_owned())).collect();
    ensure!(names.len() > 20, "{} has only {names:?}", file.display());
    Ok(names)
}

/// Node 3's agent, or a controller there, with a panic in this task; its output until it ends.
fn ends(cluster: &mut TestCluster, context: &LabContext, name: &str) -> Result<Output> {
    let binary = context.built.agent.to_string_lossy();
    let agent = cluster.agent(3)?;
    let (line, arguments) = match OF_CONTROLLERS.contains(&name) {
        true => {
            let mut arguments = Controller::arguments(agent.node(), agent.options());
            let flags = [
                ("Antrea", "--antrea"),
                ("Cilium", "--cilium"),
                ("EgressRouters", "--egress-router-image=none"),
                ("metrics token", "--create-metrics-token"),
            ];
            arguments.extend(flags.iter().filter(|(task, _)| *task == name).map(|(_, flag)| (*flag).to_owned()));
            (confined_by("controller", &binary)?, arguments)
        }
        false => {
            let mut arguments = agent.arguments();
            arguments.extend(["--metrics-bind-address".to_owned(), ":9109".to_owned()]);
            if name == "nat log" {
                let file = context.logs.join("nat.log").display().to_string();
                arguments.extend(["--port-block-size=64".to_owned(), format!("--nat-log={file}")]);
            }
            (confined(&binary)?, arguments)
        }
    };
    let host = &agent.node().host;
    let child = host.run(|| {
        let mut command = host.command("timeout");
        command.arg(LOADED.as_secs().to_string()).args(&line).args(&arguments);
        command.env(PANIC_IN, name).env("RUST_BACKTRACE", "0");
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        command.spawn().context("cannot start an agent")
    })?;
    child.wait_with_output().context("wait for an agent")
}
