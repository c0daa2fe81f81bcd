//! The cluster's one decision maker: assigns egress IPs to nodes, numbers objects, writes their status.
//!
//! Every agent runs it and keeps its view warm; only the leader writes.
//! - [`election`]: the rule of leadership, pure; [`leadership`]: the loop around it and the Lease.
//! - [`assignment`]: objects and nodes -> who serves what, pure. [`numbering`]: egress IDs, pure.
//! - [`verdict`]: the condition and the events of an object, pure.
//! - [`strangers`]: others who write the status, pure. `complaint`: what is said when it cannot be written, pure.
//! - [`leader`]: takes changes, decides, writes what differs.

pub mod assignment;
mod complaint;
pub mod election;
pub mod leader;
pub mod leadership;
pub mod numbering;
pub mod strangers;
pub mod verdict;
