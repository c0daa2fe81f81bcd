//! One CPU for the traffic, the others for everything else.

use anyhow::{Context, Result};
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;

/// This thread.
const SELF: Pid = Pid::from_raw(0);

/// Chooses the core for the traffic and keeps this thread, and all that it starts from now on, off it. On a machine with
/// one core there is nothing to choose.
pub(super) fn reserve() -> Result<usize> {
    let allowed = sched_getaffinity(SELF).context("ask which CPUs there are")?;
    let mut ours = (0..CpuSet::count()).filter(|cpu| allowed.is_set(*cpu).unwrap_or(false));
    let core = ours.next().context("no CPU is allowed")?;
    let mut rest = CpuSet::new();
    let mut some = false;
    for cpu in ours {
        rest.set(cpu)?;
        some = true;
    }
    if some {
        sched_setaffinity(SELF, &rest).context("leave the traffic's CPU")?;
    }
    Ok(core)
}

/// Puts this thread on the core.
pub(super) fn pin(core: usize) -> Result<()> {
    let mut set = CpuSet::new();
    set.set(core)?;
    sched_setaffinity(SELF, &set).with_context(|| format!("pin a thread to CPU {core}"))
}
