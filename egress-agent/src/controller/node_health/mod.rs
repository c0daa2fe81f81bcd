//! controller::node_health.

pub mod confirmation;
pub mod leader_probe;
pub mod prober;
pub mod session;
