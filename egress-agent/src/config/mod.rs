//! config.

pub mod file;
pub mod reachability;
pub mod shared;
pub mod timeouts;
pub mod tls;
