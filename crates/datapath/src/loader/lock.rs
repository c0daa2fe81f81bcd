//! One agent per node.
//!
//! Two locks that end with the process: a `flock` on the `--bpffs` directory, shared by containers that mount the same BPF
//! file system, and an abstract socket, shared by agents in one network namespace with any directories.

use std::fs::{self, File};
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::path::{Path, PathBuf};

use nix::fcntl::{Flock, FlockArg};

use crate::bpffs::{self, COMPONENT};
use crate::error::StartError;
use crate::names::{INSTANCE_SOCKET, Pins};

/// Held while this agent runs.
#[derive(Debug)]
pub struct InstanceLock {
    _directory: Flock<File>,
    _socket: UnixListener,
}

impl InstanceLock {
    /// Creates the directory if it is missing.
    pub fn take(pins: &Pins) -> Result<Self, StartError> {
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

/// The path may not exist yet; its nearest existing ancestor shows its file system.
fn require_bpffs(root: &Path) -> Result<(), StartError> {
    let existing = root.ancestors().find(|path| path.exists()).unwrap_or(root);
    let shown = existing.display();
    let is_on_bpffs = bpffs::is_on_bpffs(existing);
    if is_on_bpffs.map_err(|error| StartError::kernel(format!("look at file system {shown}"), error))? {
        return Ok(());
    }
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    Err(StartError::NotBpffs { path: root.to_path_buf(), advice: advice(root, &mounts) })
}

/// Where to mount one: in a container the directory belongs to the host, with another name.
fn advice(root: &Path, mounts: &str) -> String {
    let wanted = root.parent().unwrap_or(root);
    // proc_pid_mountinfo(5): the directory of the file system, where it is mounted, and after the dash the file system's type.
    let mount = |line: &str| -> Option<(PathBuf, PathBuf, String)> {
        let (fields, kind) = line.split_once(" - ")?;
        let mut fields = fields.split(' ').skip(3);
        Some((fields.next()?.into(), fields.next()?.into(), kind.split(' ').next()?.to_owned()))
    };
    let found = mounts.lines().filter_map(mount).filter(|(_, point, _)| root.starts_with(point));
    // Of several mounts at one path the last one counts.
    let (directory, point, kind) = found.max_by_key(|(_, point, _)| point.components().count()).unwrap_or_default();
    match wanted.strip_prefix(&point) {
        Ok(below) if kind == "sysfs" && directory != Path::new("/") => {
            let of_host = Path::new("/sys").join(directory.strip_prefix("/").unwrap_or(&directory)).join(below);
            let of_host: PathBuf = of_host.components().collect();
            format!(
                "{point} is {host} of the host, where none is mounted; {COMPONENT} mounts one, as does `mount -t bpf bpf {host}` on \
                 the node (systemd does so when it boots), and the agent continues when its container is started again",
                point = point.display(),
                host = of_host.display()
            )
        }
        _ => format!("mount one with `mount -t bpf bpf {}`, or name another with --bpffs", wanted.display()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn in_a_container_the_directory_of_the_host_is_named() {
        let root = "22 1 8:1 / / rw,relatime - ext4 /dev/vda1 rw\n23 22 0:22 / /sys rw - sysfs sysfs rw\n";
        let pod = format!("{root}30 22 0:22 /fs/bpf /bpf rw,nosuid - sysfs sysfs rw\n");
        let said = advice(Path::new("/bpf/egress-agent"), &pod);
        assert!(said.starts_with("/bpf is /sys/fs/bpf of the host"), "{said}");
        // The path and the value exist: `a_component_mounts_what_the_agent_pins_in`.
        for remedy in ["mount -t bpf bpf /sys/fs/bpf`", "deploy/mount-bpffs", "bpffs.mount=true"] {
            assert!(said.contains(remedy), "{remedy}: {said}");
        }
        for (path, mounted) in
            [("/bpf/egress-agent", "/bpf"), ("/sys/fs/bpf/egress-agent", "/sys/fs/bpf"), ("/a/b", "/a")]
        {
            let said = advice(Path::new(path), root);
            assert_eq!(said, format!("mount one with `mount -t bpf bpf {mounted}`, or name another with --bpffs"));
        }
        assert!(advice(Path::new("/bpf/a"), "").contains("bpf /bpf`"));
    }
}
