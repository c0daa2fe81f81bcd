//! The parts of the test run, and whether this machine can run them.

use std::fmt;

use anyhow::Result;
use clap::ValueEnum;

use super::{cargo_tests, lab};
use egress_scenarios::nodes;
use egress_toolchain::{Paths, is_root, packages};

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Part {
    /// Tests that need no kernel
    Pure,
    /// Programs and maps on the kernel
    Program,
    /// Agents, interfaces and packets in namespaces
    Lab,
    /// A cluster of real Kubernetes nodes, where KUBEBUILDER_ASSETS names a folder with a kubelet
    Cluster,
    /// Generated files against the code
    Codegen,
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Part::Pure => "pure",
            Part::Program => "program",
            Part::Lab => "lab",
            Part::Cluster => "cluster",
            Part::Codegen => "codegen",
        })
    }
}

impl Part {
    /// In the order in which they run.
    pub(super) const ALL: [Part; 5] = [Part::Pure, Part::Program, Part::Lab, Part::Cluster, Part::Codegen];

    /// Why this machine cannot run the part, if so.
    pub(super) fn hindrance(self) -> Option<String> {
        match self {
            Part::Pure | Part::Codegen => None,
            Part::Program => without_bpf(),
            // Without a kubelet its tests are skipped by their names, whatever else is missing.
            Part::Cluster if nodes::assets().is_none() => None,
            Part::Lab | Part::Cluster => without_bpf().or_else(without_namespaces),
        }
    }

    /// How many tests a skipped part stands for; files of tests where the tests are not known without a build.
    pub(super) fn count(self, paths: &Paths) -> Result<usize> {
        let known = match self {
            Part::Program => cargo_tests::program(paths)?.len(),
            Part::Lab => lab::lab_tests().len(),
            Part::Cluster => nodes::names().count(),
            Part::Pure | Part::Codegen => 0,
        };
        Ok(known.max(1))
    }
}

/// Bits of a capability set, as in linux/capability.h.
const CAP_NET_ADMIN: u32 = 12;
const CAP_SYS_ADMIN: u32 = 21;

fn without_bpf() -> Option<String> {
    if !is_root() {
        return Some("it needs root".to_owned());
    }
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    if !has_capabilities(&status, &[CAP_NET_ADMIN, CAP_SYS_ADMIN]) {
        return Some("root here lacks CAP_NET_ADMIN or CAP_SYS_ADMIN (a container without privileges?)".to_owned());
    }
    let filesystems = std::fs::read_to_string("/proc/filesystems").unwrap_or_default();
    if !filesystems.lines().any(|line| line.split_whitespace().last() == Some("bpf")) {
        return Some("this kernel has no BPF".to_owned());
    }
    // The system call may be forbidden all the same; bpftool asks it where it is installed already.
    let refused = packages::find("bpftool")
        .and_then(|bpftool| std::process::Command::new(bpftool).args(["prog", "show"]).output().ok())
        .is_some_and(|output| !output.status.success());
    refused.then(|| "the bpf system call is refused here".to_owned())
}

fn without_namespaces() -> Option<String> {
    let missing = !std::path::Path::new("/proc/self/ns/net").exists();
    missing.then(|| "this kernel has no network namespaces".to_owned())
}

fn has_capabilities(status: &str, wanted: &[u32]) -> bool {
    let effective = status
        .lines()
        .find_map(|line| line.strip_prefix("CapEff:"))
        .and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok())
        .unwrap_or(0);
    wanted.iter().all(|bit| effective & (1 << bit) != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capabilities_are_read_from_the_status_file() {
        let all = "Name:\txtask\nCapEff:\t000001ffffffffff\n";
        let few = "CapEff:\t00000000a80425fb\n";
        assert!(has_capabilities(all, &[CAP_NET_ADMIN, CAP_SYS_ADMIN]));
        assert!(!has_capabilities(few, &[CAP_SYS_ADMIN]));
        assert!(!has_capabilities("", &[CAP_NET_ADMIN]));
    }
}
