//! Removal of all that a lab made, from its ledger alone: the same way for a lab that ends well, one that is
//! interrupted, and one whose owner was killed. Every step is tried; what fails is collected and named at the end.
//!
//! Order: processes first (they hold namespaces and mounts), then mounts, then namespaces, whose devices the kernel
//! removes with them, then control groups and the folder.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Error, Result, anyhow};
use nix::errno::Errno;
use nix::mount::{MntFlags, umount2};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::ledger::{LedgerRecord, Resource};
use super::netns::MARK;

/// Says that the mount at `/run/netns`, which `ip netns` makes and never removes, was made for a lab.
const NAMES_MARK: &str = "made-run-netns";
const NAMES: &str = "/run/netns";

/// Removes what `record` names, and the lab's `folder`.
pub(super) fn remove(record: &LedgerRecord, folder: &Path) -> Result<()> {
    let mut errors = Vec::new();
    let mut attempt = |outcome: Result<()>| errors.extend(outcome.err());
    attempt(end_processes(record));
    for made in &record.made {
        if let Resource::Mount(point) = made {
            attempt(unmount(point));
        }
    }
    for made in &record.made {
        if let Resource::Namespace(name) = made {
            attempt(remove_namespace(name));
        }
    }
    for made in &record.made {
        if let Resource::Cgroup(name) = made {
            attempt(remove_cgroup(name));
        }
    }
    attempt(remove_folder(folder));
    together(&record.prefix, errors)
}

fn together(prefix: &str, errors: Vec<Error>) -> Result<()> {
    if errors.is_empty() {
        return Ok(());
    }
    let lines: Vec<String> = errors.iter().map(|error| format!("{error:#}")).collect();
    Err(anyhow!("teardown of lab {prefix}: {}", lines.join("; ")))
}

/// Kills the processes that carry the lab's mark or sit in one of its namespaces, and waits until they are gone.
fn end_processes(record: &LedgerRecord) -> Result<()> {
    let namespaces = namespace_inodes(record);
    let end = Instant::now() + Duration::from_secs(5);
    loop {
        let pids = processes_of(&record.prefix, &namespaces);
        if pids.is_empty() {
            return Ok(());
        }
        for pid in &pids {
            match kill(*pid, Signal::SIGKILL) {
                Ok(()) | Err(Errno::ESRCH) => {}
                Err(errno) => return Err(errno).with_context(|| format!("cannot kill process {pid}")),
            }
        }
        if Instant::now() > end {
            return Err(anyhow!("processes {pids:?} do not end"));
        }
        thread::sleep(Duration::from_millis(10));
    }
}

fn namespace_inodes(record: &LedgerRecord) -> BTreeSet<u64> {
    let names = record.made.iter().filter_map(|made| match made {
        Resource::Namespace(name) => Some(Path::new(NAMES).join(name)),
        Resource::Mount(_) | Resource::Cgroup(_) => None,
    });
    let own = inode(Path::new("/proc/self/ns/net"));
    names.filter_map(|path| inode(&path)).filter(|inode| Some(*inode) != own).collect()
}

fn inode(path: &Path) -> Option<u64> {
    fs::metadata(path).ok().map(|meta| meta.ino())
}

/// Processes of the lab that still run (a zombie runs no more; its parent reaps it).
pub fn processes_of(prefix: &str, namespaces: &BTreeSet<u64>) -> Vec<Pid> {
    let own = std::process::id();
    let mark = format!("{MARK}={prefix}");
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    let pids = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let ours = pids.filter(|pid| *pid != own && belongs(*pid, &mark, namespaces));
    ours.filter_map(|pid| i32::try_from(pid).ok()).map(Pid::from_raw).collect()
}

fn belongs(pid: u32, mark: &str, namespaces: &BTreeSet<u64>) -> bool {
    let folder = PathBuf::from(format!("/proc/{pid}"));
    // A kernel thread and a zombie have neither an environment nor namespaces to read.
    let environment = fs::read(folder.join("environ")).unwrap_or_default();
    environment.split(|byte| *byte == 0).any(|entry| entry == mark.as_bytes())
        || inode(&folder.join("ns/net")).is_some_and(|inode| namespaces.contains(&inode))
}

fn unmount(point: &Path) -> Result<()> {
    match umount2(point, MntFlags::MNT_DETACH) {
        // Not there, or not mounted: written down and never made.
        Ok(()) | Err(Errno::EINVAL | Errno::ENOENT) => Ok(()),
        Err(errno) => Err(errno).with_context(|| format!("cannot unmount {}", point.display())),
    }
}

fn remove_namespace(name: &str) -> Result<()> {
    let path = Path::new(NAMES).join(name);
    unmount(&path)?;
    match fs::remove_file(&path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove namespace {name}"))
        }
        _ => Ok(()),
    }
}

/// Where control groups are: one hierarchy, or (version 1) a folder for each.
fn cgroup_hierarchies() -> Vec<PathBuf> {
    let root = PathBuf::from("/sys/fs/cgroup");
    if root.join("cgroup.controllers").exists() {
        return vec![root];
    }
    let entries = fs::read_dir(root).into_iter().flatten().flatten();
    // Links are second names (`cpu` of `cpu,cpuacct`).
    entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())).map(|entry| entry.path()).collect()
}

pub fn make_cgroup(name: &str) -> Result<()> {
    for hierarchy in cgroup_hierarchies() {
        let group = hierarchy.join(name);
        fs::create_dir(&group).with_context(|| format!("cannot make control group {}", group.display()))?;
        // In version 1 a group has no CPUs until they are set.
        for file in ["cpuset.cpus", "cpuset.mems"] {
            if hierarchy.ends_with("cpuset") {
                fs::write(group.join(file), fs::read(hierarchy.join(file))?)?;
            }
        }
    }
    Ok(())
}

/// A group whose last process has just been killed is busy for a moment.
pub fn remove_cgroup(name: &str) -> Result<()> {
    let end = Instant::now() + Duration::from_secs(5);
    for group in cgroup_hierarchies().iter().map(|hierarchy| hierarchy.join(name)) {
        while let Err(error) = remove_groups(&group) {
            if Instant::now() > end {
                return Err(error).with_context(|| format!("cannot remove control group {}", group.display()));
            }
            thread::sleep(Duration::from_millis(10));
        }
    }
    Ok(())
}

/// From the leaves on; the files in a group go with it.
fn remove_groups(group: &Path) -> std::io::Result<()> {
    let Ok(entries) = fs::read_dir(group) else { return Ok(()) };
    for entry in entries.flatten().filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())) {
        remove_groups(&entry.path())?;
    }
    fs::remove_dir(group)
}

fn remove_folder(folder: &Path) -> Result<()> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", folder.display()))
        }
        _ => Ok(()),
    }
}

/// Notes, before the first `ip netns add` of a machine, that the mount which that makes is a lab's.
pub(super) fn note_names_mount(cluster: &Path) -> Result<()> {
    if !is_mount_point(NAMES)? {
        fs::write(cluster.join(NAMES_MARK), "")?;
    }
    Ok(())
}

fn is_mount_point(path: &str) -> Result<bool> {
    let mounts = fs::read_to_string("/proc/self/mountinfo").context("cannot read the mounts")?;
    Ok(mounts.lines().any(|line| line.split(' ').nth(4) == Some(path)))
}

/// The last lab to leave removes the folder of the ledgers. Called with the folder locked.
pub(super) fn leave_cgroup(cluster: &Path) -> Result<()> {
    let mark = cluster.join(NAMES_MARK);
    if mark.exists() && fs::read_dir(NAMES).is_ok_and(|mut names| names.next().is_none()) {
        unmount(Path::new(NAMES))?;
        fs::remove_file(&mark)?;
    }
    match fs::remove_dir(cluster) {
        // Other labs stand on it.
        Err(error) if error.kind() == std::io::ErrorKind::DirectoryNotEmpty => Ok(()),
        other => other.context("cannot remove the folder of labs"),
    }
}
