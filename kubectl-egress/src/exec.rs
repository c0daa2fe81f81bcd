//! Commands of `egress-agent` in the agents' pods, by `kubectl exec`.
//!
//! No terminal is allocated: standard output and standard error stay apart, and the exit code is that of the command in the pod.

use std::ffi::OsString;
use std::os::unix::process::ExitStatusExt;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncReadExt, BufReader};
use tokio::process::Command;
use tokio::time::timeout;

use crate::agents::{AgentPod, CONTAINER};
use crate::arguments::ConnectionArgs;
use crate::error::PluginError;

/// Of a command whose output is collected.
const TIMEOUT: Duration = Duration::from_secs(30);
/// Largest output of such a command, on each stream.
const LARGEST: u64 = 64 << 20;
/// Of a command whose lines are taken one by one (bytes).
const LONGEST_LINE: u64 = 64 << 10;
/// The last line that kubectl adds to the command's own.
const OF_KUBECTL: &str = "command terminated with exit code";

#[derive(Debug, thiserror::Error)]
pub(crate) enum ExecError {
    #[error("cannot start kubectl ({0}): is it in the PATH?")]
    NoKubectl(#[source] std::io::Error),
    #[error("the agent on {node} does not answer within {} s", TIMEOUT.as_secs())]
    Unanswered { node: String },
    #[error("the agent on {node} prints more than {} MiB: is it of another version than this plugin?", LARGEST >> 20)]
    TooLong { node: String },
    #[error("the agent on {node} prints a line of more than {} KiB: is it of another version than this plugin?", LONGEST_LINE >> 10)]
    LongLine { node: String },
    #[error("cannot read what kubectl prints: {0}")]
    Unreadable(#[source] std::io::Error),
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
        match lines.is_empty() {
            true => format!("it ends with code {} and says nothing", self.code),
            false => printable(&lines.join("; ")),
        }
    }
}

/// One line without control characters: what other programs and objects say does not reach the terminal as commands.
pub(crate) fn printable(text: &str) -> String {
    text.chars().map(|one| if one.is_control() { ' ' } else { one }).collect()
}

/// The standard input of a command in a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum InputStream {
    Empty,
    /// Until the end of this process, or of the command. A command in a pod does not notice otherwise that its connection is gone;
    /// with `--end-with-stdin` the agent's commands end then.
    Open,
}

/// The one thing that needs a kubelet.
pub(crate) trait Exec {
    /// Runs `egress-agent` with these arguments and collects its output.
    async fn collected(&self, agent: &AgentPod, arguments: &[String]) -> Result<Finished, ExecError>;

    /// The same with the streams of this process for output; returns the exit code.
    async fn streamed(&self, agent: &AgentPod, arguments: &[String], input: InputStream) -> Result<u8, ExecError>;

    /// The same with an open input, but for each line of its standard output, which `take` gets.
    async fn lines(
        &self,
        agent: &AgentPod,
        arguments: &[String],
        take: impl AsyncFnMut(String) -> Result<(), PluginError>,
    ) -> Result<u8, PluginError>;
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

    fn arguments(&self, agent: &AgentPod, input: InputStream, arguments: &[String]) -> Vec<OsString> {
        let AgentPod { namespace, name, .. } = agent;
        let fixed = ["--namespace", namespace, name, "--container", CONTAINER, "--", "egress-agent"];
        let how: &[&str] = if input == InputStream::Open { &["--stdin"] } else { &[] };
        let fixed = ["exec"].iter().chain(how).chain(&fixed).map(OsString::from);
        self.connection.iter().cloned().chain(fixed).chain(arguments.iter().map(OsString::from)).collect()
    }

    fn command(&self, agent: &AgentPod, arguments: &[String], input: InputStream) -> Command {
        let mut command = Command::new("kubectl");
        command.stdin(if input == InputStream::Open { Stdio::piped() } else { Stdio::null() });
        command.args(self.arguments(agent, input, arguments)).kill_on_drop(true);
        command
    }
}

impl Exec for KubectlExec {
    async fn collected(&self, agent: &AgentPod, arguments: &[String]) -> Result<Finished, ExecError> {
        let finished =
            timeout(TIMEOUT, finished(self.command(agent, arguments, InputStream::Empty), &agent.node, LARGEST)).await;
        finished.map_err(|_| ExecError::Unanswered { node: agent.node.clone() })?
    }

    async fn streamed(&self, agent: &AgentPod, arguments: &[String], input: InputStream) -> Result<u8, ExecError> {
        let mut child = self.command(agent, arguments, input).spawn().map_err(ExecError::NoKubectl)?;
        // It closes with this value; `wait` would close it before.
        let _input = child.stdin.take();
        child.wait().await.map(code).map_err(ExecError::Unreadable)
    }

    async fn lines(
        &self,
        agent: &AgentPod,
        arguments: &[String],
        take: impl AsyncFnMut(String) -> Result<(), PluginError>,
    ) -> Result<u8, PluginError> {
        each_line(self.command(agent, arguments, InputStream::Open), &agent.node, take).await
    }
}

/// Runs a command with an open standard input, and takes each line that it prints.
async fn each_line(
    mut command: Command,
    node: &str,
    mut take: impl AsyncFnMut(String) -> Result<(), PluginError>,
) -> Result<u8, PluginError> {
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().map_err(ExecError::NoKubectl)?;
    // It closes with this value. The child ends by itself before, or is killed.
    let _input = child.stdin.take();
    if let Some(stdout) = child.stdout.take() {
        let mut reader = BufReader::new(stdout);
        loop {
            let mut line = Vec::new();
            let limited = (&mut reader).take(LONGEST_LINE).read_until(b'\n', &mut line).await;
            match limited.map_err(ExecError::Unreadable)? {
                0 => break,
                length if length as u64 == LONGEST_LINE => {
                    return Err(ExecError::LongLine { node: node.to_owned() }.into());
                }
                _ => take(String::from_utf8_lossy(&line).trim_end().to_owned()).await?,
            }
        }
    }
    Ok(code(child.wait().await.map_err(ExecError::Unreadable)?))
}

/// Reads both streams up to the limit; a command that prints more is killed.
async fn finished(mut command: Command, node: &str, limit: u64) -> Result<Finished, ExecError> {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().map_err(ExecError::NoKubectl)?;
    let streams =
        tokio::try_join!(bounded(child.stdout.take(), node, limit), bounded(child.stderr.take(), node, limit));
    if streams.is_err() {
        child.kill().await.map_err(ExecError::Unreadable)?;
    }
    let (stdout, stderr) = streams?;
    let status = child.wait().await.map_err(ExecError::Unreadable)?;
    Ok(Finished { code: code(status), stdout, stderr })
}

async fn bounded(stream: Option<impl AsyncRead + Unpin>, node: &str, limit: u64) -> Result<Vec<u8>, ExecError> {
    let mut bytes = Vec::new();
    let Some(stream) = stream else { return Ok(bytes) };
    let read = stream.take(limit + 1).read_to_end(&mut bytes).await.map_err(ExecError::Unreadable)?;
    if read as u64 > limit { Err(ExecError::TooLong { node: node.to_owned() }) } else { Ok(bytes) }
}

/// As a shell has it.
fn code(status: ExitStatus) -> u8 {
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal));
    code.and_then(|code| u8::try_from(code).ok()).unwrap_or(u8::MAX)
}

#[cfg(test)]
pub(crate) mod testing {
    use std::cell::RefCell;

    use super::{AgentPod, Exec, ExecError, Finished, InputStream, PluginError};

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

        async fn streamed(&self, agent: &AgentPod, arguments: &[String], _: InputStream) -> Result<u8, ExecError> {
            Ok(self.reply(agent, arguments).code)
        }

        async fn lines(
            &self,
            agent: &AgentPod,
            arguments: &[String],
            mut take: impl AsyncFnMut(String) -> Result<(), PluginError>,
        ) -> Result<u8, PluginError> {
            let finished = self.reply(agent, arguments);
            for line in String::from_utf8_lossy(&finished.stdout).lines() {
                take(line.to_owned()).await?;
            }
            Ok(finished.code)
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
        let line =
            KubectlExec::new(&args).arguments(&agent(), InputStream::Open, &["status".to_owned(), "-o".to_owned()]);
        let expected = [
            "--kubeconfig",
            "/tmp/a file",
            "--context",
            "prod",
            "exec",
            "--stdin",
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
        assert_eq!(said("error: \u{1b}[2Jno\u{7}\u{9b}m"), " [2Jno  m", "no commands of a terminal");
    }

    #[tokio::test]
    async fn an_output_is_read_up_to_its_limit() {
        let shell = |line: &str| {
            let mut command = Command::new("sh");
            command.args(["-c", line]).kill_on_drop(true);
            command
        };
        for endless in ["yes", "yes >&2"] {
            let error = timeout(TIMEOUT, finished(shell(endless), "n1", 1 << 16)).await.expect("it ends");
            assert!(matches!(error, Err(ExecError::TooLong { node }) if node == "n1"), "{endless}");
        }
        let whole = finished(shell("printf 12345; printf 123 >&2; exit 3"), "n1", 5).await.expect("not too long");
        assert_eq!(whole, Finished { code: 3, stdout: b"12345".to_vec(), stderr: b"123".to_vec() });
    }

    /// The input of the command is open while it prints, and closed after an error.
    #[tokio::test]
    async fn lines_are_taken_one_by_one_with_an_open_input() {
        let shell = |line: &str| {
            let mut command = Command::new("sh");
            command.args(["-c", line]).kill_on_drop(true);
            command
        };
        let mut taken = Vec::new();
        let open = "echo one; if read -t 0.1 line; then echo closed; else test $? -gt 128 && echo open; fi; exit 3";
        let mut bash = Command::new("bash");
        bash.args(["-c", open]).kill_on_drop(true);
        let take = async |line| {
            taken.push(line);
            Ok(())
        };
        let code = each_line(bash, "n1", take).await.expect("it ends");
        assert_eq!((code, taken), (3, vec!["one".to_owned(), "open".to_owned()]));
        // It waits for the end of its input, which comes with the error.
        let stopped = each_line(shell("echo one; cat; echo two"), "n1", async |_| Err(PluginError::NoGateways));
        let error = timeout(TIMEOUT, stopped).await.expect("it ends");
        assert!(matches!(error, Err(PluginError::NoGateways)));
        let endless = each_line(shell("head -c 1000000 /dev/zero"), "n1", async |_| Ok(())).await;
        assert!(matches!(endless, Err(PluginError::Exec(ExecError::LongLine { .. }))), "{endless:?}");
    }

    #[test]
    fn exit_codes_are_those_of_a_shell() {
        assert_eq!([0, 1 << 8, 137 << 8, 2].map(|raw| code(ExitStatus::from_raw(raw))), [0, 1, 137, 130]);
    }
}
