//! Flags that several commands share, and the configuration file. A flag overrides its environment variable, and both override the file.

pub mod file;
pub mod reachability;
pub mod shared;
pub mod timeouts;
pub mod tls;
