//! The agent of one node: what it learns, what it owns, and the loop that programs the kernel.

mod fan_out;
pub mod lease_keeper;
pub mod probe_orders;
pub mod reconciler;
pub mod run;
