//! A process on a node, with its log. It can be killed, stopped, continued and restarted.

use std::fs::{File, OpenOptions};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::topology::lab::{Lab, LabNode};
use crate::wait::poll;

/// A process on a node. Dropping it kills it, as a crash would.
pub(crate) struct NodeProcess {
    pub(crate) node: LabNode,
    /// For messages: `the agent of node1`.
    pub(crate) name: String,
    pub(crate) log: PathBuf,
    /// Where the present run's part of the log begins.
    pub(crate) log_from: usize,
    pub(crate) child: Option<Child>,
}

impl NodeProcess {
    pub(crate) fn new(lab: &Lab, node: &LabNode, kind: &str) -> Self {
        let (log, name) = (lab.logs().join(format!("{kind}-{}.log", node.name())), node.name());
        Self { node: node.clone(), name: format!("the {kind} of {name}"), log, log_from: 0, child: None }
    }

    /// Starts it, after killing the former one if it still runs. The log is continued.
    pub(crate) fn start(&mut self, line: &[String]) -> Result<()> {
        self.kill()?;
        let log = OpenOptions::new().create(true).append(true).open(&self.log)?;
        self.log_from = usize::try_from(log.metadata()?.len())?;
        self.child = Some(self.spawn(line, log)?);
        Ok(())
    }

    fn spawn(&self, line: &[String], log: File) -> Result<Child> {
        let errors = log.try_clone()?;
        self.node.host.run(|| {
            let mut command = self.node.host.command(&line[0]);
            command.args(&line[1..]).stdin(Stdio::null()).stdout(log).stderr(errors);
            // A Ctrl-C at the terminal is for the lab, which then ends its processes.
            command.process_group(0);
            command.spawn().with_context(|| format!("cannot start {}", line.join(" ")))
        })
    }

    pub(crate) fn pid(&mut self) -> Result<Option<Pid>> {
        let Some(child) = &mut self.child else { return Ok(None) };
        if child.try_wait()?.is_some() {
            return Ok(None);
        }
        Ok(Some(Pid::from_raw(i32::try_from(child.id())?)))
    }

    pub(crate) fn kill(&mut self) -> Result<()> {
        if let Some(mut child) = self.child.take() {
            child.kill().with_context(|| format!("cannot kill {}", self.name))?;
            child.wait()?;
        }
        Ok(())
    }

    pub(crate) fn terminate(&mut self, patience: Duration) -> Result<()> {
        self.signal(Signal::SIGTERM)?;
        let ended = poll(patience, || Ok(self.pid()?.is_none().then_some(())))?;
        ensure!(ended.is_some(), "{} does not end on SIGTERM", self.name);
        self.child = None;
        Ok(())
    }

    pub(crate) fn signal(&mut self, signal: Signal) -> Result<()> {
        let pid = self.pid()?.with_context(|| format!("{} does not run", self.name))?;
        kill(pid, signal).with_context(|| format!("cannot send {signal} to {}", self.name))
    }

    pub(crate) fn ensure_alive(&mut self) -> Result<()> {
        let alive = self.pid()?.is_some();
        ensure!(alive, "{} has ended; the end of its log:\n{}", self.name, last_lines(&self.log, 15));
        Ok(())
    }
}

impl Drop for NodeProcess {
    fn drop(&mut self) {
        if let Err(error) = self.kill() {
            eprintln!("lab: {error:#}");
        }
    }
}

/// The end of a log, for error messages.
pub fn last_lines(log: &Path, count: usize) -> String {
    let text = std::fs::read_to_string(log).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(count)..].join("\n")
}
