//! Expiry: the program `sweep` walks `nat`, `flows` and `inbound` in the kernel, where it checks the time and removes both keys
//! of an entry; user space starts it. Each sweep also follows the host's port ranges, which NAT on the node's own address
//! avoids, and drops counters of removed policies.
//!
//! `sweep` is a classifier that is never attached and runs by `BPF_PROG_TEST_RUN`. Without an agent nothing expires: full maps
//! refuse new flows with their own drop reason.

use std::io;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use aya::programs::{ProgramError, SchedClassifier, TestRun, TestRunOptions};
use aya::sys::SyscallError;
use egress_common::abi::SWEEP_PRESSED;
use tokio::task::spawn_blocking;
use tokio::time::sleep;
use tracing::{debug, info, warn};

use crate::error::map_io;
use crate::maps::handles::FlowMaps;
use crate::node_state::config;
use crate::node_state::shared::Shared;
use egress_supervise;

/// A test run needs a whole Ethernet header.
const PACKET: [u8; 64] = [0; 64];
/// Size of `struct __sk_buff` (linux/bpf.h), and the offset of its mark.
const CONTEXT: usize = 192;
const MARK: usize = 8;

/// Interval of sweeps: an entry may outlive its timeout by this time. The shortest usual timeout is a minute.
const INTERVAL: Duration = Duration::from_secs(10);
/// While a map is nearly full.
const PRESSED_INTERVAL: Duration = Duration::from_secs(1);

/// Sweeps at once and then periodically, until the data plane is dropped. With a nearly full map unanswered connections expire
/// early and the next sweep comes sooner.
pub async fn run(shared: Arc<Shared>) {
    loop {
        let mut pressed = false;
        // Reads of /proc and map walks block, and this thread watches the node's devices.
        let sweeping = Arc::clone(&shared);
        let sweep = move || {
            if let Err(error) = sweeping.follow_ports() {
                warn!(%error, "cannot follow the host's port ranges");
            }
            sweeping.sweep()
        };
        match egress_supervise::joined(spawn_blocking(sweep).await) {
            Ok(swept) => {
                if swept.removed > 0 {
                    debug!(removed = swept.removed, "idle entries removed");
                }
                pressed = swept.pressed;
            }
            Err(error) => warn!(%error, "cannot remove idle entries: the maps fill"),
        }
        sleep(if pressed { PRESSED_INTERVAL } else { INTERVAL }).await;
    }
}

/// Result of a sweep.
pub(crate) struct Swept {
    pub(crate) removed: u32,
    /// A map was, or is, nearly full.
    pressed: bool,
}

impl Shared {
    /// Reads the host's ephemeral and reserved ports: the kernel sends no event for a change.
    pub(crate) fn follow_ports(&self) -> io::Result<()> {
        let seen = config::host_ports();
        let news = self.state().follow_ports(&self.settings, seen)?;
        if let Some(ports) = news {
            info!(first = ports.first, last = ports.last, "other ports for pods' traffic to other nodes");
            config::warn_of_few(ports);
        }
        Ok(())
    }

    pub(crate) fn sweep(&self) -> io::Result<Swept> {
        // One sweep at a time; nothing else waits for it.
        let program = self.sweep.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(program) = program.as_ref() else {
            return Err(io::Error::new(io::ErrorKind::NotFound, "the object has no program sweep"));
        };
        let removed = test_run(program, 0)?;
        self.forget_all_counts()?;
        let full = self.flow_maps().nearly_full()?;
        if full.is_empty() {
            return Ok(Swept { removed, pressed: false });
        }
        let unanswered = test_run(program, SWEEP_PRESSED)?;
        warn!(maps = full.join(", "), unanswered, "nearly full: unanswered connections expire early");
        Ok(Swept { removed: removed + unanswered, pressed: true })
    }
}

/// Runs the program; returns the number of removed entries.
fn test_run(program: &SchedClassifier, mark: u32) -> io::Result<u32> {
    let mut context = [0; CONTEXT];
    context[MARK..MARK + 4].copy_from_slice(&mark.to_ne_bytes());
    let mut options = TestRunOptions::new();
    options.data_in = Some(&PACKET);
    options.ctx_in = Some(&context);
    match program.test_run(options) {
        Ok(result) => Ok(result.return_value),
        Err(ProgramError::SyscallError(SyscallError { io_error, .. })) => Err(io_error),
        Err(error) => Err(io::Error::other(error)),
    }
}

impl FlowMaps {
    /// Names of the maps that are seven eighths full or more, as the last sweep has counted.
    fn nearly_full(&self) -> io::Result<Vec<&'static str>> {
        let usage = self.usage.get(&0, 0).map_err(map_io)?;
        let maps = [
            ("nat", usage.nat, self.nat.limit()),
            ("flows", usage.flows, self.flows.limit()),
            ("inbound", usage.inbound, self.inbound.limit()),
        ];
        Ok(maps.into_iter().filter(|(_, used, limit)| *used >= limit - limit / 8).map(|(name, ..)| name).collect())
    }
}
