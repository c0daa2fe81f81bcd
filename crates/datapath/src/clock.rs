//! The clocks of the maps: each time in a map is compared with the clock that the programs read.

use std::io;

use nix::time::{ClockId, clock_gettime};

/// The programs' clock (`bpf_ktime_get_coarse_ns`): times in the maps are compared there.
pub fn now_ns() -> io::Result<u64> {
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC_COARSE)?;
    let seconds = u64::try_from(now.tv_sec()).map_err(io::Error::other)?;
    let nanoseconds = u64::try_from(now.tv_nsec()).map_err(io::Error::other)?;
    Ok(seconds.saturating_mul(1_000_000_000).saturating_add(nanoseconds))
}

/// CLOCK_BOOTTIME (ns), the clock of the map `lease`; includes suspended time.
pub fn boot_ns() -> io::Result<u64> {
    let time = clock_gettime(ClockId::CLOCK_BOOTTIME)?;
    let seconds = u64::try_from(time.tv_sec()).map_err(io::Error::other)?;
    let nanos = u64::try_from(time.tv_nsec()).map_err(io::Error::other)?;
    Ok(seconds * 1_000_000_000 + nanos)
}
