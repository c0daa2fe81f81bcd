//! Which node may hold an address: the lease of a node, hand-overs between nodes, and the leader's view of both.

pub mod acknowledgements;
pub mod endless_leases;
pub mod handover;
pub mod kernel_handovers;
pub mod lease;
pub mod node_ownership;
#[cfg(test)]
pub mod simulation;
pub mod slow_reads;
pub mod suspicion;
