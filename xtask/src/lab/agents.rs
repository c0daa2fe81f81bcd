//! The product's processes: one `egress-agent` per node, started in the node's network namespace and nothing else of
//! it, confined as in their DaemonSet (`confinement`), each with a log of its own. They can be killed, stopped, continued and restarted, as real ones are.

use std::fs::{File, OpenOptions};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::addresses as plan;
use super::confinement::confined;
use super::{Lab, Node, UPLINK};

/// What all agents of a lab are started with.
#[derive(Debug, Clone)]
pub(crate) struct AgentOptions {
    pub(crate) binary: PathBuf,
    pub(crate) kubeconfig: PathBuf,
    /// More arguments, behind the usual ones.
    pub(crate) extra: Vec<String>,
}

/// The agent of one node. Dropping it kills it, as a crash would: what it pinned stays.
pub(crate) struct Agent {
    node: Node,
    options: AgentOptions,
    log: PathBuf,
    /// Where the present run's part of the log begins.
    log_from: usize,
    child: Option<Child>,
}

impl Agent {
    pub(crate) fn start(lab: &Lab, node: &Node, options: &AgentOptions) -> Result<Self> {
        let log = lab.logs().join(format!("agent-{}.log", node.name()));
        let mut agent = Self { node: node.clone(), options: options.clone(), log, log_from: 0, child: None };
        agent.restart()?;
        Ok(agent)
    }

    /// Starts the agents of all nodes.
    pub(crate) fn start_all(lab: &Lab, options: &AgentOptions) -> Result<Vec<Self>> {
        lab.nodes().iter().map(|node| Self::start(lab, node, options)).collect()
    }

    pub(crate) fn node(&self) -> &Node {
        &self.node
    }

    pub(crate) fn log(&self) -> &Path {
        &self.log
    }

    /// Starts the agent again, after killing it if it still runs. The log goes on.
    pub(crate) fn restart(&mut self) -> Result<()> {
        self.kill()?;
        let log = OpenOptions::new().create(true).append(true).open(&self.log)?;
        self.log_from = usize::try_from(log.metadata()?.len())?;
        self.child = Some(self.spawn(log)?);
        Ok(())
    }

    fn spawn(&self, log: File) -> Result<Child> {
        let errors = log.try_clone()?;
        self.node.host.run(|| {
            let binary = self.options.binary.to_string_lossy();
            let confined = confined(&binary)?;
            let mut command = self.node.host.command(&confined[0]);
            command.args(&confined[1..]).args(self.arguments());
            command.stdin(Stdio::null()).stdout(log).stderr(errors);
            // A Ctrl-C at the terminal is for the lab, which then ends its agents.
            command.process_group(0);
            command.spawn().with_context(|| format!("cannot start {binary}"))
        })
    }

    /// With which it is started.
    pub(crate) fn arguments(&self) -> Vec<String> {
        let pairs = [
            ("--node-name", self.node.name()),
            ("--kubeconfig", self.options.kubeconfig.display().to_string()),
            ("--uplink", UPLINK.to_owned()),
            ("--mgmt-port", self.node.management_port().to_owned()),
            ("--cluster-subnets", format!("{},{}", plan::CLUSTER_V4, plan::CLUSTER_V6)),
            ("--service-cidrs", format!("{},{}", plan::SERVICES_V4, plan::SERVICES_V6)),
            ("--bpffs", self.node.bpffs.display().to_string()),
            ("--egressip-node-healthcheck-port", "9107".to_owned()),
            ("--socket", self.node.socket.display().to_string()),
        ];
        let options = pairs.into_iter().flat_map(|(option, value)| [option.to_owned(), value]);
        std::iter::once("run".to_owned()).chain(options).chain(self.options.extra.iter().cloned()).collect()
    }

    /// Whether its programs are loaded and attached in this run. Until then it is the verifier's turn, which takes as long as
    /// the machine lets it.
    pub(crate) fn has_loaded(&self) -> Result<bool> {
        let log = std::fs::read(&self.log)?;
        let present = String::from_utf8_lossy(log.get(self.log_from..).unwrap_or_default());
        Ok(present.contains("data plane is up"))
    }

    /// The process, if it still runs.
    pub(crate) fn pid(&mut self) -> Result<Option<Pid>> {
        let Some(child) = &mut self.child else { return Ok(None) };
        if child.try_wait()?.is_some() {
            return Ok(None);
        }
        Ok(Some(Pid::from_raw(i32::try_from(child.id())?)))
    }

    /// SIGKILL, and wait for the end.
    pub(crate) fn kill(&mut self) -> Result<()> {
        if let Some(mut child) = self.child.take() {
            child.kill().context("cannot kill an agent")?;
            child.wait()?;
        }
        Ok(())
    }

    /// SIGTERM, and wait for the end: a restart's first half, by the product's own road.
    pub(crate) fn terminate(&mut self, patience: Duration) -> Result<()> {
        self.signal(Signal::SIGTERM)?;
        let end = Instant::now() + patience;
        while self.pid()?.is_some() {
            ensure!(Instant::now() < end, "the agent of {} does not end on SIGTERM", self.node.name());
            thread::sleep(Duration::from_millis(20));
        }
        self.child = None;
        Ok(())
    }

    /// SIGSTOP: the process is there and does nothing.
    pub(crate) fn pause(&mut self) -> Result<()> {
        self.signal(Signal::SIGSTOP)
    }

    pub(crate) fn resume(&mut self) -> Result<()> {
        self.signal(Signal::SIGCONT)
    }

    fn signal(&mut self, signal: Signal) -> Result<()> {
        let pid = self.pid()?.with_context(|| format!("the agent of {} does not run", self.node.name()))?;
        kill(pid, signal).with_context(|| format!("cannot send {signal} to the agent of {}", self.node.name()))
    }

    /// Fails, with the end of its log, when the agent has ended by itself.
    pub(crate) fn ensure_alive(&mut self) -> Result<()> {
        let alive = self.pid()?.is_some();
        ensure!(alive, "the agent of {} has ended; its last words:\n{}", self.node.name(), last_lines(&self.log, 15));
        Ok(())
    }

    /// `egress-agent status` on the node, with these arguments beside its own.
    pub(crate) fn status(&self, arguments: &[&str]) -> Result<Output> {
        self.ask(&[&["status"], arguments].concat())
    }

    /// Any command that asks the agent, or looks at its pins, on the node.
    pub(crate) fn ask(&self, arguments: &[&str]) -> Result<Output> {
        let child = self.follow(arguments)?;
        child.wait_with_output().context("wait for a command")
    }

    /// Likewise, while it runs; what it says is kept. It has the rights of the agent's container and no others, as one that is
    /// typed there has.
    pub(crate) fn follow(&self, arguments: &[&str]) -> Result<Child> {
        let (line, node) = (confined(&self.options.binary.to_string_lossy())?, &self.node);
        node.host.run(|| {
            let mut command = node.host.command(&line[0]);
            command.args(&line[1..]).args(arguments);
            command.env("EGRESS_AGENT_SOCKET", &node.socket).env("EGRESS_AGENT_BPFFS", &node.bpffs);
            command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
            command.spawn().with_context(|| format!("cannot start {}", line.join(" ")))
        })
    }

    /// Runs `egress-agent cleanup` on the node.
    pub(crate) fn clean_up(&self) -> Result<String> {
        let line = self.cleanup()?;
        let arguments: Vec<&str> = line[1..].iter().map(String::as_str).collect();
        self.node.host.exec(&line[0], &arguments)
    }

    /// Likewise with `--stay`: it goes on when it is done. Its output is to be read.
    pub(crate) fn clean_up_and_stay(&self) -> Result<Child> {
        let line = self.cleanup()?;
        self.node.host.run(|| {
            let mut command = self.node.host.command(&line[0]);
            command.args(&line[1..]).arg("--stay").stdin(Stdio::null()).stdout(Stdio::piped());
            command.spawn().context("cannot start cleanup")
        })
    }

    fn cleanup(&self) -> Result<Vec<String>> {
        let mut line = confined(&self.options.binary.to_string_lossy())?;
        line.extend(["cleanup".to_owned(), "--bpffs".to_owned(), self.node.bpffs.display().to_string()]);
        Ok(line)
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        if let Err(error) = self.kill() {
            eprintln!("lab: {error:#}");
        }
    }
}

/// The end of a log, for error messages.
pub(crate) fn last_lines(log: &Path, count: usize) -> String {
    let text = std::fs::read_to_string(log).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(count)..].join("\n")
}

/// Switches a node off: its cables are cut and its agent is killed. Switching it on starts a new agent.
pub(crate) fn power(lab: &Lab, agent: &mut Agent, on: bool) -> Result<()> {
    let node = agent.node.clone();
    if on {
        lab.set_power(&node, true)?;
        return agent.restart();
    }
    lab.set_power(&node, false)?;
    agent.kill()
}
