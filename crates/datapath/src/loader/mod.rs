//! Loading: kernel features, the instance lock, pins, programs, and maps of another layout.

pub mod abi_migration;
pub mod features;
pub mod initial_state;
pub mod kernel_types;
pub mod lock;
pub mod pinned;
pub mod pins;
pub mod programs;
