//! A server process for one test, and the ways to talk to it.

use std::fs;
use std::io::{self, BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context, Result, ensure};
use kube::{Client, Config};

use crate::objects;

pub(crate) struct Server {
    child: Child,
    folder: PathBuf,
    url: String,
}

impl Server {
    pub(crate) fn start() -> Result<Self> {
        static STARTED: AtomicUsize = AtomicUsize::new(0);
        let number = STARTED.fetch_add(1, Ordering::Relaxed);
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("apiserver-{}-{number}", std::process::id()));
        fs::create_dir_all(&folder).context("cannot make the test's folder")?;
        let mut child = Command::new(env!("CARGO_BIN_EXE_xtask"))
            .args(["apiserver", "--listen", "127.0.0.1:0", "--kubeconfig"])
            .arg(folder.join("kubeconfig"))
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot start the server")?;
        let mut url = String::new();
        let stdout = child.stdout.take().context("the server has no output")?;
        let read = BufReader::new(stdout).read_line(&mut url);
        let server = Self { child, folder, url: url.trim().to_owned() };
        read.context("the server does not say where it is")?;
        ensure!(server.url.starts_with("http://127.0.0.1:"), "the server says {:?}", server.url);
        Ok(server)
    }

    /// With the EgressIP kind established.
    pub(crate) async fn with_egress_ips() -> Result<Self> {
        let server = Self::start()?;
        objects::establish(server.client()?).await?;
        Ok(server)
    }

    pub(crate) fn client(&self) -> Result<Client> {
        let url = self.url.parse().context("the server's address is no URL")?;
        Client::try_from(Config::new(url)).context("cannot make a client")
    }

    /// SIGUSR1 begins and ends an outage, SIGUSR2 forgets the history.
    pub(crate) fn signal(&self, name: &str) -> Result<()> {
        let status = Command::new("kill").args([&format!("-{name}"), &self.child.id().to_string()]).status()?;
        ensure!(status.success(), "cannot send {name}");
        Ok(())
    }

    pub(crate) fn kubectl_command(&self, line: &str) -> Command {
        let mut command = Command::new("kubectl");
        command
            .args(line.split_whitespace())
            .env("KUBECONFIG", self.folder.join("kubeconfig"))
            .env("KUBECACHEDIR", self.folder.join("cache"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    /// Run kubectl with this on its standard input; words of the line are split at spaces.
    fn kubectl_output(&self, line: &str, input: &str) -> Result<Output> {
        let mut child = self.kubectl_command(line).spawn().context("cannot start kubectl")?;
        let mut stdin = child.stdin.take().context("kubectl has no input")?;
        stdin.write_all(input.as_bytes()).context("kubectl does not read")?;
        drop(stdin);
        child.wait_with_output().context("kubectl does not end")
    }

    /// What kubectl prints, where it succeeds.
    pub(crate) fn kubectl_with(&self, line: &str, input: &str) -> Result<String> {
        let output = self.kubectl_output(line, input)?;
        let errors = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "kubectl {line}: {errors}");
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    pub(crate) fn kubectl(&self, line: &str) -> Result<String> {
        self.kubectl_with(line, "")
    }

    /// What kubectl complains about, where it fails.
    pub(crate) fn kubectl_fails(&self, line: &str, input: &str) -> Result<String> {
        let output = self.kubectl_output(line, input)?;
        ensure!(!output.status.success(), "kubectl {line} should fail");
        Ok(String::from_utf8_lossy(&output.stderr).into_owned())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // A server that is gone already, or a folder that stays behind in target/, is nothing to fail a test for.
        drop(self.child.kill());
        drop(self.child.wait());
        drop(fs::remove_dir_all(&self.folder));
    }
}

/// Is kubectl here? Where it is not, the test says that it was skipped.
pub(crate) fn has_kubectl(test: &str) -> bool {
    let version = Command::new("kubectl").args(["version", "--client"]).output();
    let is_here = version.is_ok_and(|output| output.status.success());
    if !is_here {
        // Not by a macro: the test harness would hide what a passing test prints.
        writeln!(io::stderr(), "SKIPPED {test}: kubectl is not on PATH").unwrap_or_default();
    }
    is_here
}
