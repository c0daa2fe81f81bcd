//! Flags that several commands share, and the configuration file. A flag beats its environment variable, and both beat the file.

pub mod file;
pub mod reachability;
pub mod shared;
pub mod timeouts;
pub mod tls;
