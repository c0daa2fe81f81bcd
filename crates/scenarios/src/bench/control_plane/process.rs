//! The kernel's figures of the agent's process and of its node's uplink.

use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use nix::unistd::{Pid, SysconfVar, sysconf};

use egress_lab::{LabNode, UPLINK};

#[derive(Clone, Copy)]
pub(super) struct MeasuredProcess(Pid);

pub(super) struct Memory {
    pub(super) resident_mib: f64,
    pub(super) peak_mib: f64,
}

pub(super) struct Cost {
    pub(super) percent_of_a_core: f64,
}

impl MeasuredProcess {
    pub(super) const fn of(pid: Pid) -> Self {
        Self(pid)
    }

    /// `VmRSS` and `VmHWM` of proc_pid_status(5).
    pub(super) fn memory(self) -> Result<Memory> {
        let status = fs::read_to_string(format!("/proc/{}/status", self.0))?;
        let mib = |name: &str| -> Result<f64> {
            let line = status.lines().find_map(|line| line.strip_prefix(name)).with_context(|| format!("no {name}"))?;
            let kib: f64 = line.trim_start_matches(':').trim().trim_end_matches("kB").trim().parse()?;
            Ok(kib / 1024.0)
        };
        Ok(Memory { resident_mib: mib("VmRSS")?, peak_mib: mib("VmHWM")? })
    }

    /// Time on all CPUs so far, in user space and in the kernel on the process's behalf.
    fn time(self) -> Result<Duration> {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.0))?;
        let ticks = ticks(&stat).context("a process without times")?;
        let per_second = sysconf(SysconfVar::CLK_TCK)?.context("no clock ticks")?;
        Ok(Duration::from_secs_f64(ticks as f64 / per_second as f64))
    }

    pub(super) fn cost_of(self, work: impl FnOnce() -> Result<()>) -> Result<Cost> {
        let (start, before) = (Instant::now(), self.time()?);
        work()?;
        let spent = self.time()?.saturating_sub(before);
        Ok(Cost { percent_of_a_core: 100.0 * spent.as_secs_f64() / start.elapsed().as_secs_f64() })
    }
}

/// `utime` and `stime` of proc_pid_stat(5). The command's name, in brackets, may hold anything.
fn ticks(stat: &str) -> Option<u64> {
    let (_, behind) = stat.rsplit_once(") ")?;
    let mut fields = behind.split(' ').skip(11);
    let mut next = || fields.next()?.parse::<u64>().ok();
    Some(next()? + next()?)
}

/// Bytes that the node has received on its uplink.
pub(super) fn received(node: &LabNode) -> Result<u64> {
    let shown = node.host.exec("ip", &["-j", "-s", "link", "show", "dev", UPLINK])?;
    let shown: serde_json::Value = serde_json::from_str(&shown)?;
    shown.pointer("/0/stats64/rx/bytes").and_then(serde_json::Value::as_u64).context("an uplink without statistics")
}

#[cfg(test)]
mod tests {
    use super::ticks;

    #[test]
    fn times_are_found_behind_any_name() {
        let stat = "7 (a ) b) S 1 7 7 0 -1 4194560 100 0 0 0 40 2 0 0 20 0 4 0 100 1 1";
        assert_eq!(ticks(stat), Some(42));
        assert_eq!(ticks("7 (a) S 1"), None);
    }
}
