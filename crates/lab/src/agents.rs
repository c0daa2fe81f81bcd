//! The product's processes, each in a node's network namespace and nothing else of it, confined as in its manifest
//! (`confinement`), each with its log: one `egress-agent run` per node, and one `egress-agent controller` on each of the
//! first two. They can be killed, stopped, continued and restarted, as real ones are.

use std::path::{Path, PathBuf};
use std::process::{Child, Output, Stdio};
use std::time::Duration;

use anyhow::{Context, Result};
use nix::sys::signal::Signal;
use nix::unistd::Pid;

use crate::confinement::{self, confined};
use crate::kube_api::KubeApi;
use crate::process::{NodeProcess, last_lines};
use crate::topology::UPLINK;
use crate::topology::addresses as plan;
use crate::topology::lab::{Lab, LabNode};

/// How many nodes have a controller.
pub const CONTROLLERS: usize = 2;

/// What all agents and controllers of a lab are started with.
#[derive(Debug, Clone)]
pub struct AgentOptions {
    pub binary: PathBuf,
    pub kubeconfig: PathBuf,
    pub controller_kubeconfig: PathBuf,
    /// More arguments of agents, after the usual ones.
    pub extra: Vec<String>,
    /// The same of controllers.
    pub controller_extra: Vec<String>,
}

/// Flags that controllers have too, by their beginnings.
const OF_BOTH: [&str; 6] = [
    "--config-file",
    "--egressip-healthcheck",
    "--egressip-node-healthcheck",
    "--egressip-reachability-total",
    "--log-",
    "--on-unassigned",
];
/// And those that agents do not have.
const OF_CONTROLLERS: [&str; 5] =
    ["--antrea", "--cilium", "--create-metrics-token", "--egress-router-image", "--egressip-reachability-grace"];

impl AgentOptions {
    pub fn new(binary: &Path, api: &KubeApi) -> Self {
        Self {
            binary: binary.to_owned(),
            kubeconfig: api.node_kubeconfig().to_owned(),
            controller_kubeconfig: api.controller_kubeconfig().to_owned(),
            extra: Vec::new(),
            controller_extra: Vec::new(),
        }
    }

    /// More arguments, each for the processes that have its flag: `--flag=value`, or `--flag` and its value.
    pub fn with(mut self, arguments: impl IntoIterator<Item = impl Into<String>>) -> Self {
        let (mut agents, mut controllers) = (true, false);
        for argument in arguments.into_iter().map(Into::<String>::into) {
            if argument.starts_with("--") {
                agents = !OF_CONTROLLERS.iter().any(|flag| argument.starts_with(flag));
                controllers = !agents || OF_BOTH.iter().any(|flag| argument.starts_with(flag));
            }
            if controllers {
                self.controller_extra.push(argument.clone());
            }
            if agents {
                self.extra.push(argument);
            }
        }
        self
    }
}

/// A command line: an option that is given beside the usual ones takes the place of its namesake.
fn line(command: &str, usual: &[(&str, String)], extra: &[String]) -> Vec<String> {
    let is_left = |(option, _): &&(&str, String)| !extra.iter().any(|one| one == option);
    let usual = usual.iter().filter(is_left).flat_map(|(option, value)| [(*option).to_owned(), value.clone()]);
    std::iter::once(command.to_owned()).chain(usual).chain(extra.iter().cloned()).collect()
}

/// The controller on a node.
pub struct Controller {
    process: NodeProcess,
    options: AgentOptions,
}

impl Controller {
    fn start(lab: &Lab, node: &LabNode, options: &AgentOptions) -> Result<Self> {
        let mut controller = Self { process: NodeProcess::new(lab, node, "controller"), options: options.clone() };
        controller.restart()?;
        Ok(controller)
    }

    pub fn log(&self) -> &Path {
        &self.process.log
    }

    pub fn restart(&mut self) -> Result<()> {
        let mut line = confinement::confined_by("controller", &self.options.binary.to_string_lossy())?;
        line.extend(Self::arguments(&self.process.node, &self.options));
        self.process.start(&line)
    }

    /// With which one is started on this node.
    pub fn arguments(node: &LabNode, options: &AgentOptions) -> Vec<String> {
        let pairs = [
            ("--node-name", node.name()),
            ("--kubeconfig", options.controller_kubeconfig.display().to_string()),
            ("--cluster-subnets", format!("{},{}", plan::CLUSTER_V4, plan::CLUSTER_V6)),
            ("--service-cidrs", format!("{},{}", plan::SERVICES_V4, plan::SERVICES_V6)),
            ("--egressip-node-healthcheck-port", "9107".to_owned()),
            ("--metrics-bind-address", format!(":{CONTROLLER_PAGES}")),
        ];
        line("controller", &pairs, &options.controller_extra)
    }

    pub fn pid(&mut self) -> Result<Option<Pid>> {
        self.process.pid()
    }

    /// SIGKILL, and wait for the end.
    pub fn kill(&mut self) -> Result<()> {
        self.process.kill()
    }

    /// SIGTERM, and wait for the end.
    pub fn terminate(&mut self, patience: Duration) -> Result<()> {
        self.process.terminate(patience)
    }
}

/// Where a controller's metrics are, on its node.
pub const CONTROLLER_PAGES: u16 = 9478;

/// The agent of one node, and the controller there, if it has one. Dropping it kills both, as a crash would: what the agent
/// pinned stays.
pub struct Agent {
    process: NodeProcess,
    options: AgentOptions,
    controller: Option<Controller>,
}

impl Agent {
    pub fn start(lab: &Lab, node: &LabNode, options: &AgentOptions) -> Result<Self> {
        let has_controller = node.number.index() < CONTROLLERS;
        let controller = has_controller.then(|| Controller::start(lab, node, options)).transpose()?;
        let mut agent = Self { process: NodeProcess::new(lab, node, "agent"), options: options.clone(), controller };
        agent.restart()?;
        Ok(agent)
    }

    /// Starts the agents of all nodes, and the controllers.
    pub fn start_all(lab: &Lab, options: &AgentOptions) -> Result<Vec<Self>> {
        lab.nodes().iter().map(|node| Self::start(lab, node, options)).collect()
    }

    pub fn node(&self) -> &LabNode {
        &self.process.node
    }

    pub fn log(&self) -> &Path {
        &self.process.log
    }

    /// The controller on this node.
    pub fn controller(&mut self) -> Result<&mut Controller> {
        let name = self.process.node.name();
        self.controller.as_mut().with_context(|| format!("{name} has no controller"))
    }

    pub fn controllers(agents: &mut [Self]) -> impl Iterator<Item = &mut Controller> {
        agents.iter_mut().filter_map(|agent| agent.controller.as_mut())
    }

    /// Starts the agent again, after killing it if it still runs. The controller is left as it is.
    pub fn restart(&mut self) -> Result<()> {
        let mut line = confined(&self.options.binary.to_string_lossy())?;
        line.extend(self.arguments());
        self.process.start(&line)
    }

    pub fn options(&self) -> &AgentOptions {
        &self.options
    }

    /// With which it is started.
    pub fn arguments(&self) -> Vec<String> {
        let pairs = [
            ("--node-name", self.node().name()),
            ("--kubeconfig", self.options.kubeconfig.display().to_string()),
            ("--uplink", UPLINK.to_owned()),
            ("--mgmt-port", self.node().management_port().to_owned()),
            ("--cluster-subnets", format!("{},{}", plan::CLUSTER_V4, plan::CLUSTER_V6)),
            ("--service-cidrs", format!("{},{}", plan::SERVICES_V4, plan::SERVICES_V6)),
            ("--bpffs", self.node().bpffs.display().to_string()),
            ("--egressip-node-healthcheck-port", "9107".to_owned()),
            ("--socket", self.node().socket.display().to_string()),
        ];
        line("run", &pairs, &self.options.extra)
    }

    /// Whether its programs are loaded and attached in this run. Until then it is the verifier's turn, which takes as long as
    /// the machine lets it.
    pub fn has_loaded(&self) -> Result<bool> {
        Ok(self.log_text()?.contains("data plane is up"))
    }

    /// Whether it has brought the kernel to the state of the cluster in this run, and serves.
    pub fn has_served(&self) -> Result<bool> {
        Ok(self.log_text()?.contains("this node can carry egress traffic"))
    }

    /// The process, if it still runs.
    pub fn pid(&mut self) -> Result<Option<Pid>> {
        self.process.pid()
    }

    /// Its resident memory (`VmRSS` of proc_pid_status(5)).
    pub fn resident_kib(&mut self) -> Result<u64> {
        let pid = self.pid()?.with_context(|| format!("the agent of {} does not run", self.node().name()))?;
        let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("no VmRSS")?;
        Ok(line.trim().trim_end_matches(" kB").parse()?)
    }

    /// SIGKILL, and wait for the end. A controller on this node runs on.
    pub fn kill(&mut self) -> Result<()> {
        self.process.kill()
    }

    /// SIGTERM, and wait for the end: a restart's first half, by the product's own path.
    pub fn terminate(&mut self, patience: Duration) -> Result<()> {
        self.process.terminate(patience)
    }

    /// SIGSTOP: the process is there and does nothing.
    pub fn pause(&mut self) -> Result<()> {
        self.process.signal(Signal::SIGSTOP)
    }

    pub fn resume(&mut self) -> Result<()> {
        self.process.signal(Signal::SIGCONT)
    }

    /// Stops what runs of agent and controller.
    pub fn pause_node(&mut self) -> Result<()> {
        self.signal_node(Signal::SIGSTOP)
    }

    pub fn resume_node(&mut self) -> Result<()> {
        self.signal_node(Signal::SIGCONT)
    }

    fn signal_node(&mut self, signal: Signal) -> Result<()> {
        let controller = self.controller.as_mut().map(|controller| &mut controller.process);
        for process in std::iter::once(&mut self.process).chain(controller) {
            if process.pid()?.is_some() {
                process.signal(signal)?;
            }
        }
        Ok(())
    }

    /// From its next start on it is this program: a rollout.
    pub fn roll_out(&mut self, binary: &Path) {
        binary.clone_into(&mut self.options.binary);
    }

    /// The log of this run.
    pub fn log_text(&self) -> Result<String> {
        let log = std::fs::read(&self.process.log)?;
        Ok(String::from_utf8_lossy(log.get(self.process.log_from..).unwrap_or_default()).into_owned())
    }

    /// Fails, with the end of its log, when the agent has ended, or the controller on its node by itself.
    pub fn ensure_alive(&mut self) -> Result<()> {
        self.process.ensure_alive()?;
        let controller = self.controller.as_mut().map(|controller| &mut controller.process);
        controller.filter(|process| process.child.is_some()).map_or(Ok(()), NodeProcess::ensure_alive)
    }

    /// The end of its log, and of that of the controller on its node.
    pub fn log_tails(&self) -> String {
        let processes = [Some(&self.process), self.controller.as_ref().map(|controller| &controller.process)];
        let words = |process: &NodeProcess| format!("-- {}\n{}\n", process.name, last_lines(&process.log, 12));
        processes.into_iter().flatten().map(words).collect()
    }

    /// `egress-agent status` on the node, with these arguments beside its own.
    pub fn status(&self, arguments: &[&str]) -> Result<Output> {
        self.ask(&[&["status"], arguments].concat())
    }

    /// Any command that asks the agent, or looks at its pins, on the node.
    pub fn ask(&self, arguments: &[&str]) -> Result<Output> {
        let child = self.follow(arguments)?;
        child.wait_with_output().context("wait for a command")
    }

    /// Likewise, while it runs; its output is kept. It has the rights of the agent's container and no others, as one that is
    /// typed there has.
    pub fn follow(&self, arguments: &[&str]) -> Result<Child> {
        let (line, node) = (confined(&self.options.binary.to_string_lossy())?, self.node());
        node.host.run(|| {
            let mut command = node.host.command(&line[0]);
            command.args(&line[1..]).args(arguments);
            command.env("EGRESS_AGENT_SOCKET", &node.socket).env("EGRESS_AGENT_BPFFS", &node.bpffs);
            command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
            command.spawn().with_context(|| format!("cannot start {}", line.join(" ")))
        })
    }

    /// Runs `egress-agent cleanup` on the node.
    pub fn clean_up(&self) -> Result<String> {
        let line = self.cleanup()?;
        let arguments: Vec<&str> = line[1..].iter().map(String::as_str).collect();
        self.node().host.exec(&line[0], &arguments)
    }

    /// Likewise with `--stay`: it continues when it is done. Its output is to be read.
    pub fn clean_up_and_stay(&self) -> Result<Child> {
        let line = self.cleanup()?;
        self.node().host.run(|| {
            let mut command = self.node().host.command(&line[0]);
            command.args(&line[1..]).arg("--stay").stdin(Stdio::null()).stdout(Stdio::piped());
            command.spawn().context("cannot start cleanup")
        })
    }

    fn cleanup(&self) -> Result<Vec<String>> {
        let mut line = confined(&self.options.binary.to_string_lossy())?;
        line.extend(["cleanup".to_owned(), "--bpffs".to_owned(), self.node().bpffs.display().to_string()]);
        Ok(line)
    }
}

/// Switches a node off: its cables are cut, its agent and its controller are killed. Switching it on starts new ones.
pub fn power(lab: &Lab, agent: &mut Agent, on: bool) -> Result<()> {
    let node = agent.node().clone();
    lab.set_power(&node, on)?;
    if on {
        agent.controller.as_mut().map_or(Ok(()), Controller::restart)?;
        return agent.restart();
    }
    agent.controller.as_mut().map_or(Ok(()), Controller::kill)?;
    agent.kill()
}
