//! One agent per node.
//!
//! Two locks, both gone with the process, however it dies: a `flock` on the `--bpffs` directory, which two containers
//! that mount the same BPF file system share, and an abstract socket, which two agents in one network namespace share
//! whatever directories they were given.

use std::fs::{self, File};
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::path::Path;

use nix::fcntl::{Flock, FlockArg};
use nix::sys::statfs::{BPF_FS_MAGIC, statfs};

use super::error::StartError;
use super::names::{INSTANCE_SOCKET, Pins};

/// Held as long as this agent runs.
#[derive(Debug)]
pub(super) struct InstanceLock {
    _directory: Flock<File>,
    _socket: UnixListener,
}

impl InstanceLock {
    /// Makes the directory where it is missing.
    pub(super) fn take(pins: &Pins) -> Result<Self, StartError> {
        let root = pins.root();
        let shown = root.display();
        require_bpffs(root)?;
        fs::create_dir_all(root).map_err(|error| StartError::kernel(format!("make {shown}"), error))?;
        let directory = File::open(root).map_err(|error| StartError::kernel(format!("open {shown}"), error))?;
        let directory = Flock::lock(directory, FlockArg::LockExclusiveNonblock).map_err(|(_, errno)| match errno {
            nix::errno::Errno::EWOULDBLOCK => StartError::Busy { what: format!("{shown}") },
            other => StartError::kernel(format!("lock {shown}"), other.into()),
        })?;
        let name = SocketAddr::from_abstract_name(INSTANCE_SOCKET)
            .map_err(|error| StartError::kernel("name the instance socket", error))?;
        let socket = UnixListener::bind_addr(&name).map_err(|error| match error.kind() {
            io::ErrorKind::AddrInUse => StartError::Busy { what: "this node".to_owned() },
            _ => StartError::kernel("bind the instance socket", error),
        })?;
        Ok(Self { _directory: directory, _socket: socket })
    }
}

/// The path itself may not exist yet; its nearest existing ancestor says which file system it will be on.
fn require_bpffs(root: &Path) -> Result<(), StartError> {
    let existing = root.ancestors().find(|path| path.exists()).unwrap_or(root);
    let shown = existing.display();
    let status =
        statfs(existing).map_err(|error| StartError::kernel(format!("look at file system {shown}"), error.into()))?;
    if status.filesystem_type() == BPF_FS_MAGIC {
        return Ok(());
    }
    Err(StartError::NotBpffs { path: root.to_path_buf(), mount: root.parent().unwrap_or(root).to_path_buf() })
}
