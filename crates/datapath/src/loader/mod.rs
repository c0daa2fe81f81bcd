//! loader.

pub mod abi_migration;
pub mod config;
pub mod features;
pub mod initial_state;
pub mod kernel_types;
pub mod lock;
pub mod object;
pub mod pinned;
pub mod pins;
pub mod programs;
