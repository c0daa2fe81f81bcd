//! maps.

pub mod access;
pub mod convert;
pub mod counters;
pub mod events;
pub mod facts;
pub mod lease;
pub mod meter;
pub mod nat_entries;
pub mod port_use;
pub mod tables;
