//! The health of egress nodes, as this controller observes it.
//!
//! - [`prober`] probes all egress nodes while that is this controller's duty; [`session`] probes one node by one address.
//! - [`confirmation`] decides which answers are confirmed to agents, by which they hold addresses.
//! - [`leader_probe`] watches, on a standby, the node of the leader.
//!
//! `egress_core::node_health` evaluates the findings.

pub mod confirmation;
pub mod leader_probe;
pub mod prober;
pub mod session;
