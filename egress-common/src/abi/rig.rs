//! Configuration of the benchmark rig (egress-ebpf/src/bin/rig.rs) by `cargo xtask bench`: the packet that replaces the
//! last one before the next run of the program under test. Not part of the product.

use super::abi;

/// Length of every frame that the rig restores.
pub const RIG_FRAME: usize = 160;

/// Flows differ by port, by the end of one address and by the end of the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Rig {
    /// Place of the program in the rig's list.
    pub subject: u32,
    /// The flows are numbered from zero and visited in steps of `stride`, which is coprime to their number.
    pub flows: u32,
    pub stride: u32,
    pub next: u32,
    /// Number of sources.
    pub sources: u32,
    /// Where in the frame the 16-bit port and the last 32 bits of the two addresses lie; zero for none.
    pub port_at: u32,
    pub source_at: u32,
    pub destination_at: u32,
    /// Of flow zero.
    pub first_port: u32,
    pub first_source: u32,
    pub first_destination: u32,
    pub mark: u32,
    /// Mark that a redirecting program leaves.
    pub priority: u32,
    pub frame: [u8; RIG_FRAME],
}
abi!(Rig, 52 + RIG_FRAME);
