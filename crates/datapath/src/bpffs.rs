//! The BPF file system that holds the pins: whether a path is on one, and mounting one on a host that has none.
//!
//! systemd mounts it at /sys/fs/bpf when a host boots, but not in a container, so nodes of kind have none. A pod mounts it for the
//! host if its container is privileged and mounts the host's directory with mount propagation `Bidirectional`
//! (deploy/mount-bpffs). It stays mounted after the pod: the pins outlive every agent.

use std::io;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::mount::{MsFlags, mount};
use nix::sys::statfs::{BPF_FS_MAGIC, statfs};

/// What a manifest sets so that agents find one, for messages.
pub const COMPONENT: &str = "the component deploy/mount-bpffs (chart: bpffs.mount=true)";

/// What became of a request to mount one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MountOutcome {
    Mounted,
    AlreadyMounted,
}

#[derive(Debug, thiserror::Error)]
pub enum MountError {
    #[error(
        "{} is not a directory: a kernel with bpf(2) has /sys/fs/bpf where sysfs is mounted; --mount-point names another \
         directory", .path.display()
    )]
    NoDirectory { path: PathBuf },
    #[error(
        "this process may not mount a BPF file system at {}: run it as root with CAP_SYS_ADMIN, in a pod in a privileged \
         container", .path.display()
    )]
    NoRights { path: PathBuf },
    #[error(
        "this kernel has no BPF file system (CONFIG_BPF_SYSCALL): use a kernel that has it (see docs/kernel-support.md)"
    )]
    NotSupported,
    #[error("cannot mount a BPF file system at {}: {source}", .path.display())]
    Other { path: PathBuf, source: io::Error },
}

/// Whether this path, which exists, is on one.
pub(crate) fn is_on_bpffs(path: &Path) -> io::Result<bool> {
    Ok(statfs(path)?.filesystem_type() == BPF_FS_MAGIC)
}

/// Mounts one at this directory, unless the directory is on one.
pub fn mount_at(point: &Path) -> Result<MountOutcome, MountError> {
    let path = || point.to_path_buf();
    if !point.is_dir() {
        return Err(MountError::NoDirectory { path: path() });
    }
    if is_on_bpffs(point).map_err(|source| MountError::Other { path: path(), source })? {
        return Ok(MountOutcome::AlreadyMounted);
    }
    // As systemd mounts it.
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    match mount(Some("bpf"), point, Some("bpf"), flags, Some("mode=0700")) {
        Ok(()) => Ok(MountOutcome::Mounted),
        Err(Errno::EPERM | Errno::EACCES) => Err(MountError::NoRights { path: path() }),
        Err(Errno::ENODEV) => Err(MountError::NotSupported),
        Err(errno) => Err(MountError::Other { path: path(), source: errno.into() }),
    }
}
