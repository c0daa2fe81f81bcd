//! The commands of all pages, run on one lab: each ends as its page says, and prints what the page shows of names and
//! headings. Addresses, times and numbers are the lab's own and are not compared.

use std::io::{BufRead, BufReader};
use std::process::{Child, Output, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, anyhow, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};

use crate::documents::page::{Block, Scene, Shown, blocks};
use crate::documents::typed::{BPFFS, Runner};
use crate::documents::{pages, read};
use egress_lab::api_objects::{EGRESS_IPS, all, assigned, condition, egress_ip, labels};
use egress_lab::kube_api::KubeApi;
use egress_lab::test::{LabContext, Skip};
use egress_lab::test_cluster::{TestCluster, node, pod};
use egress_lab::wait::{EFFECT, until, until_true};
use egress_scenarios::cases::explain::forge;
use egress_scenarios::cases::metrics;
use egress_toolchain::Paths;

const NODES: usize = 3;
const DRAIN: &str = "k8s.ovn.org/egress-drain";

pub(super) fn commands_of_all_pages(context: &LabContext) -> Result<()> {
    let mut all_blocks = Vec::new();
    for page in pages()? {
        all_blocks.extend(blocks(&page, &read(&page)?).map_err(|wrong| anyhow!(wrong))?);
    }
    let mut test = CommandsTest::start(context)?;
    let mut run = 0;
    for block in all_blocks {
        run += test.play(&block)?;
    }
    println!("{run} commands were run");
    if !test.has_kubectl {
        return Err(Skip("kubectl is not installed; the commands of other programs were run").into());
    }
    ensure!(run > 30, "only {run} commands were run");
    Ok(())
}

/// The lab, and what it looks like.
struct CommandsTest {
    cluster: TestCluster,
    agent: String,
    router: String,
    /// `None` after a block that may have changed something.
    scene: Option<Scene>,
    has_kubectl: bool,
}

impl CommandsTest {
    fn start(context: &LabContext) -> Result<Self> {
        let pods = vec![pod("one", "red", 1, &[]), pod("homer", "simpson", 1, &[]), pod("two", "red", 2, &[])];
        let cluster = metrics::start(context, pods)?;
        let [agent, router] = [&context.built.agent, &context.built.router].map(|path| path.display().to_string());
        Ok(Self { cluster, agent, router, scene: None, has_kubectl: KubeApi::has_kubectl() })
    }

    /// Runs a block's commands, one after the other; returns how many.
    fn play(&mut self, block: &Block) -> Result<usize> {
        let mut run = 0;
        for command in &block.commands {
            let runner = match command.runner().map_err(|wrong| anyhow!(wrong))? {
                None | Some(Runner::Xtask) => continue,
                Some(Runner::Kubectl(_)) if !self.has_kubectl => continue,
                Some(runner) => runner,
            };
            if run == 0 && self.scene != Some(block.scene) {
                self.set(block.scene).with_context(|| format!("the scene of {}", command.place))?;
            }
            println!("{}: {}", command.place, command.line);
            self.run(command, &runner).with_context(|| format!("{}: {}", command.place, command.line))?;
            run += 1;
            if changes(&runner) {
                self.scene = None;
            }
        }
        Ok(run)
    }

    fn run(&mut self, command: &Shown, runner: &Runner) -> Result<()> {
        let begin = Instant::now();
        let output = match runner {
            Runner::Kubectl(arguments) => self.kubectl(arguments)?,
            Runner::Agent(arguments) => self.agent(arguments)?,
            Runner::Router(arguments) => self.router(arguments)?,
            Runner::OnNode(words) => self.on_node(words)?,
            Runner::Xtask => return Ok(()),
        };
        let [printed, warned] = [output.stdout, output.stderr].map(|said| String::from_utf8_lossy(&said).into_owned());
        println!("{printed}{warned}it took {} ms\n", begin.elapsed().as_millis());
        let expected = i32::from(command.fails());
        ensure!(
            output.status.code() == Some(expected),
            "it ends with {}, and is to end with {expected}",
            output.status
        );
        let missing = command.missing(&printed, &warned);
        ensure!(missing.is_empty(), "the page shows {missing:?}, and it says:\n{printed}{warned}");
        Ok(())
    }

    fn kubectl(&self, arguments: &[String]) -> Result<Output> {
        let root = Paths::find()?.root;
        let mut command = std::process::Command::new("kubectl");
        command.arg("--kubeconfig").arg(self.cluster.api.kubeconfig()).args(arguments).current_dir(root);
        command.output().context("cannot start kubectl")
    }

    /// With the variables that an agent's pod has; what an administrator types elsewhere with a person's rights.
    fn agent(&self, arguments: &[String]) -> Result<Output> {
        if arguments.first().is_some_and(|command| ["drain", "migrate"].contains(&command.as_str())) {
            let mut command = std::process::Command::new(&self.agent);
            command.args(arguments).env("EGRESS_AGENT_KUBECONFIG", self.cluster.api.kubeconfig());
            return command.stdin(Stdio::null()).output().context("cannot start egress-agent");
        }
        let place = self.cluster.lab.node(node(1)?);
        let child = place.host.run(|| {
            let mut command = place.host.command(&self.agent);
            command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
            command.env("EGRESS_AGENT_SOCKET", &place.socket).env("EGRESS_AGENT_BPFFS", &place.bpffs);
            command.env("EGRESS_AGENT_KUBECONFIG", self.cluster.api.node_kubeconfig());
            command.spawn().context("cannot start egress-agent")
        })?;
        if arguments.iter().any(|argument| argument == "--follow") {
            return until_ctrl_c(child);
        }
        child.wait_with_output().context("wait for egress-agent")
    }

    fn router(&self, arguments: &[String]) -> Result<Output> {
        let (place, root) = (&self.cluster.lab.node(node(1)?).host, Paths::find()?.root);
        place.run(|| {
            let mut command = place.command(&self.router);
            command.args(arguments).stdin(Stdio::null()).current_dir(root);
            command.output().context("cannot start egress-router")
        })
    }

    fn on_node(&self, words: &[String]) -> Result<Output> {
        let place = self.cluster.lab.node(node(1)?);
        let pins = place.bpffs.display().to_string();
        let words: Vec<String> = words.iter().map(|word| word.replace(BPFFS, &pins)).collect();
        let (program, arguments) = words.split_first().context("no words")?;
        place.host.output(program, &arguments.iter().map(String::as_str).collect::<Vec<_>>())
    }

    /// Brings the lab to what a block begins with.
    fn set(&mut self, scene: Scene) -> Result<()> {
        let cluster = &mut self.cluster;
        for number in 1..=NODES {
            let drained = if scene == Scene::Node1Drained && number == 1 { json!("") } else { Value::Null };
            let marked = json!({"metadata": {"annotations": {DRAIN: drained}}});
            cluster.api.merge(&format!("/api/v1/nodes/node{number}"), &marked)?;
        }
        for object in objects() {
            cluster.put(&object)?;
        }
        if scene == Scene::Usual && !is_on_node1(cluster, FIRST)? {
            // The pages look at node1, so that something is to be seen there.
            label(cluster, |number| number == 1)?;
            until_true("node1 has an address", EFFECT, || is_on_node1(cluster, FIRST))?;
        }
        label(cluster, |_| scene != Scene::NoLabel)?;
        until("the lab is as it is to be", EFFECT, || {
            for object in objects() {
                let name = object["metadata"]["name"].as_str().unwrap_or_default();
                let reason = condition(&present(cluster, name)?).map(|(reason, _)| reason).unwrap_or_default();
                let is_done = match scene {
                    Scene::Usual => is_assigned(&reason),
                    Scene::NoLabel => reason == "NoEligibleNode",
                    Scene::Node1Drained => is_assigned(&reason) && !is_on_node1(cluster, name)?,
                };
                if !is_done {
                    return Ok(None);
                }
            }
            Ok(Some(()))
        })?;
        if scene != Scene::NoLabel {
            cluster.is_seen_as("one", Some("172.18.0.110"), None)?;
        }
        // Something to tell for who asks for drops.
        forge(cluster, "one")?;
        self.agent(&["log-level", "info"].map(str::to_owned))?;
        self.scene = Some(scene);
        Ok(())
    }
}

/// The object whose address node1 has in the usual scene.
const FIRST: &str = "first";

fn objects() -> [Value; 3] {
    let (red, simpson) = (labels("house", "red"), labels("house", "simpson"));
    [
        egress_ip(FIRST, &["172.18.0.110"], &red, &all()),
        egress_ip("late", &["172.18.0.111"], &red, &all()),
        egress_ip("egressip-simpson", &["172.18.0.100", "172.18.0.101"], &simpson, &all()),
    ]
}

fn present(cluster: &TestCluster, name: &str) -> Result<Value> {
    Ok(cluster.api.get(&format!("{EGRESS_IPS}/{name}"))?.unwrap_or_default())
}

/// An older object serves the pods of one of them.
fn is_assigned(reason: &str) -> bool {
    ["Assigned", "NoPodServed"].contains(&reason)
}

fn is_on_node1(cluster: &TestCluster, name: &str) -> Result<bool> {
    Ok(assigned(&present(cluster, name)?).iter().any(|(_, node)| node == "node1"))
}

fn label(cluster: &TestCluster, has: impl Fn(usize) -> bool) -> Result<()> {
    (1..=NODES).try_for_each(|number| cluster.assignable(number, has(number)))
}

/// Whether the lab may look otherwise after it.
fn changes(runner: &Runner) -> bool {
    let does = |words: &[String], verbs: &[&str]| words.iter().any(|word| verbs.contains(&word.as_str()));
    match runner {
        Runner::Kubectl(words) => does(words, &["annotate", "apply", "delete", "label"]),
        Runner::Agent(words) => does(words, &["drain", "log-level"]),
        Runner::Router(_) | Runner::OnNode(_) | Runner::Xtask => false,
    }
}

/// A command that runs until it is stopped: its first line is awaited, then Ctrl-C is typed.
fn until_ctrl_c(mut child: Child) -> Result<Output> {
    let mut lines = BufReader::new(child.stdout.take().context("its output")?);
    let mut first = String::new();
    lines.read_line(&mut first)?;
    kill(Pid::from_raw(i32::try_from(child.id())?), Signal::SIGINT)?;
    let mut output = child.wait_with_output()?;
    output.stdout = first.into_bytes();
    Ok(output)
}
