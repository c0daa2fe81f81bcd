//! One network namespace of the lab, and work done inside it.
//!
//! A thread enters the namespace by `setns` and does the work there; sockets that it opens and processes that it
//! starts belong to the namespace. Nothing else changes: `/sys` and the mount namespace stay the root's, which is
//! why the lab's bpffs stays visible (`ip netns exec` mounts a fresh `/sys` and hides `/sys/fs/bpf`). The thread
//! ends with the work, so no other work can land in the namespace by accident.

use std::fs::File;
use std::io::Write;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::thread;

use anyhow::{Context, Result, anyhow, bail};
use nix::ifaddrs::getifaddrs;
use nix::sched::{CloneFlags, setns};
use nix::sys::socket::{AddressFamily, LinkAddr, SockFlag, SockProtocol, SockType, bind, socket};

/// Where `ip netns` keeps names.
const NAMES: &str = "/run/netns";

/// The environment variable that every process of a lab carries: its prefix. Recovery finds orphans by it.
pub const MARK: &str = "EGRESS_LAB";

/// A handle by name; it owns nothing (the ledger does).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Netns {
    prefix: String,
    name: String,
}

impl Netns {
    /// `role` is what the namespace is in the lab: `node1`, `ext`, a pod's name.
    pub fn new(prefix: &str, role: &str) -> Self {
        Self { prefix: prefix.to_owned(), name: format!("{prefix}-{role}") }
    }

    /// That of a process on this machine, like a container of a real node.
    pub fn of_process(prefix: &str, pid: u32) -> Self {
        // An absolute path stands for itself below any folder.
        Self { prefix: prefix.to_owned(), name: format!("/proc/{pid}/ns/net") }
    }

    /// The name under `ip netns`.
    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn path(&self) -> PathBuf {
        Path::new(NAMES).join(&self.name)
    }

    pub(crate) fn enter(&self) -> Result<()> {
        let file = File::open(self.path()).with_context(|| format!("namespace {} is not there", self.name))?;
        setns(&file, CloneFlags::CLONE_NEWNET).with_context(|| format!("cannot enter namespace {}", self.name))
    }

    /// Runs `work` inside the namespace and waits for it.
    pub fn run<T, F>(&self, work: F) -> Result<T>
    where
        T: Send,
        F: FnOnce() -> Result<T> + Send,
    {
        thread::scope(|scope| {
            let worker = thread::Builder::new().name(self.name.clone()).spawn_scoped(scope, || {
                self.enter()?;
                work()
            })?;
            worker.join().map_err(|_panic| anyhow!("work in namespace {} panicked", self.name))?
        })
    }

    /// Starts `work` inside the namespace on its own thread.
    pub fn spawn<T, F>(&self, work: F) -> Result<thread::JoinHandle<Result<T>>>
    where
        T: Send + 'static,
        F: FnOnce() -> Result<T> + Send + 'static,
    {
        let own = self.clone();
        let thread = thread::Builder::new().name(self.name.clone()).spawn(move || {
            own.enter()?;
            work()
        })?;
        Ok(thread)
    }

    /// The lab's.
    pub fn prefix(&self) -> &str {
        &self.prefix
    }

    /// A command with the lab's mark; start it inside [`Netns::run`], or use [`Netns::output`].
    pub fn command(&self, program: &str) -> Command {
        marked(&self.prefix, program)
    }

    /// Runs a program inside the namespace to its end, whatever its exit code.
    pub fn output(&self, program: &str, args: &[&str]) -> Result<Output> {
        self.run(|| {
            let mut command = self.command(program);
            command.args(args).stdin(Stdio::null());
            command.output().with_context(|| format!("cannot start {program}"))
        })
    }

    /// Runs a program inside the namespace; a failure is an error with its standard error. Returns its standard output.
    pub fn exec(&self, program: &str, args: &[&str]) -> Result<String> {
        let output = self.output(program, args)?;
        if !output.status.success() {
            bail!("{}: {program} {}: {}", self.name, args.join(" "), String::from_utf8_lossy(&output.stderr).trim());
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Feeds `input` to a program inside the namespace, as `ip -batch -` and `nft -f -` take it.
    pub fn feed(&self, program: &str, args: &[&str], input: &str) -> Result<()> {
        self.run(|| {
            let mut command = self.command(program);
            command.args(args);
            feed(command, input).with_context(|| format!("in namespace {}", self.name))
        })
    }

    /// Writes `net.*` settings; a path has slashes, as in `ipv4/ip_forward`.
    pub fn sysctl(&self, settings: &[(String, String)]) -> Result<()> {
        self.run(|| {
            for (path, value) in settings {
                let file = Path::new("/proc/sys/net").join(path);
                std::fs::write(&file, value)
                    .with_context(|| format!("{}: cannot set {} to {value}", self.name, file.display()))?;
            }
            Ok(())
        })
    }
}

/// A command that carries the mark of the lab `prefix`.
pub fn marked(prefix: &str, program: &str) -> Command {
    let mut command = Command::new(program);
    command.env(MARK, prefix);
    command
}

/// Runs `command` with `input` on its standard input.
pub fn feed(mut command: Command, input: &str) -> Result<()> {
    let program = command.get_program().to_string_lossy().into_owned();
    command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.spawn().with_context(|| format!("cannot start {program}"))?;
    let written = match child.stdin.take() {
        Some(mut pipe) => pipe.write_all(input.as_bytes()),
        None => Ok(()),
    };
    let output = child.wait_with_output()?;
    if !output.status.success() {
        bail!("{program}: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    written.with_context(|| format!("cannot write to {program}"))
}

/// A packet socket on a device of this namespace, and the device's link address. Without a protocol it only sends.
pub(crate) fn packet_socket(netns: &Netns, device: &str, protocol: Option<SockProtocol>) -> Result<(OwnedFd, [u8; 6])> {
    netns.run(|| {
        let socket = socket(AddressFamily::Packet, SockType::Raw, SockFlag::SOCK_CLOEXEC, protocol)
            .context("cannot open a packet socket")?;
        let own = link_address(device)?;
        bind(socket.as_raw_fd(), &own).with_context(|| format!("cannot bind to {device}"))?;
        Ok((socket, own.addr().context("no link address")?))
    })
}

/// The packet address of a device in this thread's namespace.
pub fn link_address(device: &str) -> Result<LinkAddr> {
    let found = getifaddrs()?
        .filter(|interface| interface.interface_name == device)
        .find_map(|interface| interface.address?.as_link_addr().copied());
    found.with_context(|| format!("no device {device}"))
}
