//! Expiry: the program `sweep` walks `nat`, `flows` and `inbound` in the kernel, where an entry's time and its two keys are
//! judged and removed in one place; user space only says when.
//!
//! It is a classifier that is never attached and is run by `BPF_PROG_TEST_RUN`. While no agent runs, nothing expires:
//! maps may fill, and then refuse new flows by name.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use aya::programs::{ProgramError, TestRun, TestRunOptions};
use aya::sys::SyscallError;
use tokio::time::{MissedTickBehavior, interval};
use tracing::{debug, warn};

use super::{Dataplane, Shared};

/// A test run wants a whole Ethernet header.
const PACKET: [u8; 64] = [0; 64];

/// The shortest timeout is a minute; an entry may outlive its own by this time.
const INTERVAL: Duration = Duration::from_secs(10);

/// Sweeps for as long as the data plane lives.
pub(super) async fn run(shared: Arc<Shared>) {
    let mut tick = interval(INTERVAL);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tick.tick().await;
        match shared.sweep() {
            Ok(0) => {}
            Ok(removed) => debug!(removed, "idle entries removed"),
            Err(error) => warn!(%error, "cannot remove idle entries: the maps fill"),
        }
    }
}

impl Shared {
    fn sweep(&self) -> io::Result<u32> {
        let mut state = self.state();
        let Some(program) = state.programs.sweep() else {
            return Err(io::Error::new(io::ErrorKind::NotFound, "the object has no program sweep"));
        };
        let mut options = TestRunOptions::new();
        options.data_in = Some(&PACKET);
        match program.test_run(options) {
            Ok(result) => Ok(result.return_value),
            Err(ProgramError::SyscallError(SyscallError { io_error, .. })) => Err(io_error),
            Err(error) => Err(io::Error::other(error)),
        }
    }
}

impl Dataplane {
    /// Removes what is idle now; returns how many entries went.
    pub fn sweep(&self) -> io::Result<u32> {
        self.shared.sweep()
    }
}
