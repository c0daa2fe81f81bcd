//! The machine and the version that figures are of.

use std::fs;

use nix::sys::utsname::uname;
use serde::{Deserialize, Serialize};

use crate::prelude::*;
use egress_toolchain::{Paths, output};

/// What results.json says of itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct MeasuredOn {
    pub(super) cpu: String,
    pub(super) cores: usize,
    pub(super) kernel: String,
    /// MiB, if it is known.
    pub(super) memory: Option<u64>,
    /// The commit as `git describe` has it, with `-dirty` where files differ from it; without a repository the version.
    pub(super) commit: String,
}

impl MeasuredOn {
    pub(super) fn this(paths: &Paths) -> Result<Self> {
        let memory = fs::read_to_string("/proc/meminfo")?;
        let memory = memory.lines().find_map(|line| line.strip_prefix("MemTotal:")).context("no MemTotal")?;
        let memory: u64 = memory.trim().trim_end_matches("kB").trim().parse()?;
        let cpu = cpu_model(&fs::read_to_string("/proc/cpuinfo")?).unwrap_or_else(|| std::env::consts::ARCH.to_owned());
        let cores = thread::available_parallelism()?.get();
        let kernel = uname()?.release().to_string_lossy().into_owned();
        let describe = ["describe", "--always", "--dirty", "--abbrev=12"];
        let commit = output(std::process::Command::new("git").args(describe).current_dir(&paths.root));
        let commit = commit.map_or(env!("CARGO_PKG_VERSION").to_owned(), |commit| commit.trim().to_owned());
        Ok(Self { cpu, cores, kernel, memory: Some(memory / 1024), commit })
    }

    /// As a sentence.
    pub(super) fn sentence(&self) -> String {
        let Self { cpu, cores, kernel, memory, commit } = self;
        let memory = memory.map(|mib| format!(", {:.0} GiB of memory", mib as f64 / 1024.0)).unwrap_or_default();
        format!("{cpu}, {cores} CPUs{memory}, Linux {kernel}; commit {commit}.")
    }
}

/// x86 names it; elsewhere the kernel gives numbers only.
fn cpu_model(cpuinfo: &str) -> Option<String> {
    let line = cpuinfo.lines().find_map(|line| line.strip_prefix("model name"))?;
    Some(line.trim_start_matches([' ', '\t', ':']).trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_machine_is_a_sentence() {
        let cpuinfo = "processor\t: 0\nmodel name\t: AMD EPYC\nstepping\t: 1\n";
        let cpu = cpu_model(cpuinfo).expect("a model");
        let mut machine =
            MeasuredOn { cpu, cores: 2, kernel: "6.18.44".into(), memory: Some(20_480), commit: "0123abcd".into() };
        assert_eq!(machine.sentence(), "AMD EPYC, 2 CPUs, 20 GiB of memory, Linux 6.18.44; commit 0123abcd.");
        machine.memory = None;
        assert_eq!(machine.sentence(), "AMD EPYC, 2 CPUs, Linux 6.18.44; commit 0123abcd.");
    }
}
