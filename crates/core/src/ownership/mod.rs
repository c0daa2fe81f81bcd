//! Which node may hold an address: the lease of a node, hand-overs between nodes, and the leader's view of both.

pub mod acknowledgements;
pub mod endless;
pub mod handover;
pub mod holdings;
pub mod kernel_handovers;
pub mod lease;
#[cfg(test)]
pub mod simulation;
pub mod slow_reads;
pub mod suspicion;
