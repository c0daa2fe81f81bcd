//! Expiry: the program `sweep` walks `flows`, `nat` and `inbound` in the kernel, where an entry's time and its two keys
//! can be judged and removed without a race; user space only says when.
//!
//! It is a classifier that is never attached and is run by `BPF_PROG_TEST_RUN`; its argument is the packet.

use std::io;

use aya::programs::{ProgramError, TestRun, TestRunOptions};
use aya::sys::SyscallError;

use super::Dataplane;

/// A test run wants a whole Ethernet header.
const LEAST_PACKET: usize = 14;

impl Dataplane {
    /// Runs the sweep with this argument and returns what the program returned; `None` where the object has no such
    /// program.
    pub fn sweep(&self, argument: [u8; 8]) -> io::Result<Option<u32>> {
        let mut packet = [0_u8; 64];
        packet[LEAST_PACKET..LEAST_PACKET + argument.len()].copy_from_slice(&argument);
        let mut state = self.shared.state();
        let Some(program) = state.programs.sweep() else { return Ok(None) };
        let mut options = TestRunOptions::new();
        options.data_in = Some(&packet);
        match program.test_run(options) {
            Ok(result) => Ok(Some(result.return_value)),
            Err(ProgramError::SyscallError(SyscallError { io_error, .. })) => Err(io_error),
            Err(error) => Err(io::Error::other(error)),
        }
    }
}
