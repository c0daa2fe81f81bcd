//! Removal of entries of the flow maps by the program `sweep`: a classifier that is never attached and runs by
//! `BPF_PROG_TEST_RUN`. It counts what it removes, as all programs do, and removes both keys of a NAT entry.

use std::io;

use aya::maps::MapData;
use aya::programs::{ProgramError, SchedClassifier, TestRun, TestRunOptions};
use aya::sys::SyscallError;
use egress_common::abi::{CANDIDATES, SweepMode, SweepRequest, SweptMap, Tuple};

use crate::maps::access;

/// A test run needs a whole Ethernet header.
const PACKET: [u8; 64] = [0; 64];
/// Size of `struct __sk_buff` (linux/bpf.h), and the offset of its mark.
const CONTEXT: usize = 192;
const MARK: usize = 8;

/// The program, and the map from which it reads keys.
pub struct Sweeper {
    program: SchedClassifier,
    candidates: MapData,
}

impl Sweeper {
    pub fn new(program: SchedClassifier, candidates: MapData) -> Self {
        Self { program, candidates }
    }

    /// Removes the entries of these keys, as `mode` says; returns the number of removed keys. In `nat` either key of an entry
    /// expires it, but only the reverse one removes it whatever its age. Exclusive, because a run reads its keys from a map.
    pub fn remove(&mut self, map: SweptMap, mode: SweepMode, keys: &[Tuple]) -> io::Result<u32> {
        let mut removed = 0;
        for chunk in keys.chunks(CANDIDATES as usize) {
            access::write_array(&self.candidates, chunk)?;
            let count = u16::try_from(chunk.len()).map_err(io::Error::other)?;
            removed += test_run(&self.program, SweepRequest { map, mode, count }.to_mark())?;
        }
        Ok(removed)
    }
}

/// Runs the program; returns the number of removed keys.
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
