//! Pure: cluster view -> desired state -> plan. No I/O, no clock, no randomness.

pub mod executor;
pub mod state;
