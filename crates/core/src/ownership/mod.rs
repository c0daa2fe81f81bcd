//! ownership.

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
