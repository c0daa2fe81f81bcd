//! One CPU for the traffic, the others for everything else; a second one for what runs on two.

use anyhow::{Context, Result};
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;

/// This thread.
const SELF: Pid = Pid::from_raw(0);

/// The CPUs of the traffic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Cores {
    pub(super) first: usize,
    /// With two CPUs, agents run there too. `None` on a machine with one.
    pub(super) second: Option<usize>,
    /// One of those that agents run on.
    pub(super) agents: usize,
}

/// Chooses the cores of the traffic and keeps this thread, and all that it starts from now on, off the first one, and off
/// the second one where a third one is left. On a machine with one core there is nothing to choose.
pub(super) fn reserve() -> Result<Cores> {
    let allowed = sched_getaffinity(SELF).context("ask which CPUs there are")?;
    let ours: Vec<usize> = (0..CpuSet::count()).filter(|cpu| allowed.is_set(*cpu).unwrap_or(false)).collect();
    let first = *ours.first().context("no CPU is allowed")?;
    let rest = if ours.len() > 2 { &ours[2..] } else { &ours[1..] };
    if !rest.is_empty() {
        let mut set = CpuSet::new();
        rest.iter().try_for_each(|cpu| set.set(*cpu))?;
        sched_setaffinity(SELF, &set).context("leave the traffic's CPUs")?;
    }
    Ok(Cores { first, second: ours.get(1).copied(), agents: rest.first().copied().unwrap_or(first) })
}

/// Puts this thread on the core.
pub(crate) fn pin(core: usize) -> Result<()> {
    let mut set = CpuSet::new();
    set.set(core)?;
    sched_setaffinity(SELF, &set).with_context(|| format!("pin a thread to CPU {core}"))
}
