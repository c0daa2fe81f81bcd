//! node.

mod fan_out;
pub mod lease_keeper;
pub mod probe_orders;
pub mod reconciler;
pub mod run;
