//! Commands of `egress-agent` in the agents' pods, by `kubectl exec`.
//!
//! No terminal is allocated: standard output and standard error stay apart, and the exit code is that of the command in the pod.

use std::ffi::OsString;
use std::os::unix::process::ExitStatusExt;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use tokio::process::Command;
use tokio::time::timeout;

use crate::agents::{AgentPod, CONTAINER};
use crate::arguments::ConnectionArgs;

/// Of a command whose output is collected.
const TIMEOUT: Duration = Duration::from_secs(30);
/// The last line that kubectl adds to the command's own.
const OF_KUBECTL: &str = "command terminated with exit code";

#[derive(Debug, thiserror::Error)]
pub(crate) enum ExecError {
    #[error("cannot start kubectl ({0}): is it in the PATH?")]
    NoKubectl(#[source] std::io::Error),
    #[error("the agent on {node} does not answer within {} s", TIMEOUT.as_secs())]
    Unanswered { node: String },
}

/// What a command has left.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Finished {
    pub(crate) code: u8,
    pub(crate) stdout: Vec<u8>,
    pub(crate) stderr: Vec<u8>,
}

impl Finished {
    /// What it says on standard error, in one line, without what kubectl adds.
    pub(crate) fn complaint(&self) -> String {
        let text = String::from_utf8_lossy(&self.stderr);
        let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with(OF_KUBECTL));
        let lines: Vec<_> = lines.map(|line| line.strip_prefix("error: ").unwrap_or(line)).collect();
        if lines.is_empty() { format!("it ends with code {} and says nothing", self.code) } else { lines.join("; ") }
    }
}

/// The one thing that needs a kubelet.
pub(crate) trait Exec {
    /// Runs `egress-agent` with these arguments and collects its output.
    async fn collected(&self, agent: &AgentPod, arguments: &[String]) -> Result<Finished, ExecError>;

    /// The same with the streams of this process; returns the exit code.
    async fn streamed(&self, agent: &AgentPod, arguments: &[String]) -> Result<u8, ExecError>;
}

pub(crate) struct KubectlExec {
    connection: Vec<OsString>,
}

impl KubectlExec {
    pub(crate) fn new(args: &ConnectionArgs) -> Self {
        let mut connection: Vec<OsString> = Vec::new();
        if let Some(file) = &args.kubeconfig {
            connection.extend(["--kubeconfig".into(), file.into()]);
        }
        if let Some(context) = &args.context {
            connection.extend(["--context".into(), context.into()]);
        }
        Self { connection }
    }

    fn arguments(&self, agent: &AgentPod, arguments: &[String]) -> Vec<OsString> {
        let AgentPod { namespace, name, .. } = agent;
        let fixed = ["exec", "--namespace", namespace, name, "--container", CONTAINER, "--", "egress-agent"];
        let given = arguments.iter().map(OsString::from);
        self.connection.iter().cloned().chain(fixed.into_iter().map(OsString::from)).chain(given).collect()
    }

    fn command(&self, agent: &AgentPod, arguments: &[String]) -> Command {
        let mut command = Command::new("kubectl");
        command.args(self.arguments(agent, arguments)).stdin(Stdio::null()).kill_on_drop(true);
        command
    }
}

impl Exec for KubectlExec {
    async fn collected(&self, agent: &AgentPod, arguments: &[String]) -> Result<Finished, ExecError> {
        let output = timeout(TIMEOUT, self.command(agent, arguments).output()).await;
        let output = output.map_err(|_| ExecError::Unanswered { node: agent.node.clone() })?;
        let output = output.map_err(ExecError::NoKubectl)?;
        Ok(Finished { code: code(output.status), stdout: output.stdout, stderr: output.stderr })
    }

    async fn streamed(&self, agent: &AgentPod, arguments: &[String]) -> Result<u8, ExecError> {
        self.command(agent, arguments).status().await.map(code).map_err(ExecError::NoKubectl)
    }
}

/// As a shell has it.
fn code(status: ExitStatus) -> u8 {
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal));
    code.and_then(|code| u8::try_from(code).ok()).unwrap_or(u8::MAX)
}

#[cfg(test)]
pub(crate) mod testing {
    use std::cell::RefCell;

    use super::{AgentPod, Exec, ExecError, Finished};

    type Reply = dyn Fn(&str, &str) -> Finished;

    /// Answers by node and arguments, and remembers what it was asked.
    pub(crate) struct PlayedExec {
        reply: Box<Reply>,
        pub(crate) asked: RefCell<Vec<String>>,
    }

    impl PlayedExec {
        pub(crate) fn new(reply: impl Fn(&str, &str) -> Finished + 'static) -> Self {
            Self { reply: Box::new(reply), asked: RefCell::default() }
        }

        fn reply(&self, agent: &AgentPod, arguments: &[String]) -> Finished {
            let line = arguments.join(" ");
            self.asked.borrow_mut().push(format!("{}: {line}", agent.node));
            (self.reply)(&agent.node, &line)
        }
    }

    impl Exec for PlayedExec {
        async fn collected(&self, agent: &AgentPod, arguments: &[String]) -> Result<Finished, ExecError> {
            Ok(self.reply(agent, arguments))
        }

        async fn streamed(&self, agent: &AgentPod, arguments: &[String]) -> Result<u8, ExecError> {
            Ok(self.reply(agent, arguments).code)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn agent() -> AgentPod {
        AgentPod { namespace: "ns".into(), name: "agent-x".into(), node: "n1".into(), image: None, obstacle: None }
    }

    #[test]
    fn the_line_of_kubectl_has_the_connection_the_pod_and_the_arguments() {
        let args = ConnectionArgs {
            kubeconfig: Some("/tmp/a file".into()),
            context: Some("prod".into()),
            ..ConnectionArgs::default()
        };
        let line = KubectlExec::new(&args).arguments(&agent(), &["status".to_owned(), "-o".to_owned()]);
        let expected = [
            "--kubeconfig",
            "/tmp/a file",
            "--context",
            "prod",
            "exec",
            "--namespace",
            "ns",
            "agent-x",
            "--container",
            "agent",
            "--",
            "egress-agent",
            "status",
            "-o",
        ];
        assert_eq!(line, expected);
    }

    #[test]
    fn a_complaint_is_one_line_of_the_command_itself() {
        let said = |stderr: &str| Finished { code: 3, stderr: stderr.into(), ..Finished::default() }.complaint();
        assert_eq!(said("error: no such pod\ncommand terminated with exit code 1\n"), "no such pod");
        assert_eq!(said("command terminated with exit code 3"), "it ends with code 3 and says nothing");
    }

    #[test]
    fn exit_codes_are_those_of_a_shell() {
        assert_eq!([0, 1 << 8, 137 << 8, 2].map(|raw| code(ExitStatus::from_raw(raw))), [0, 1, 137, 130]);
    }
}
