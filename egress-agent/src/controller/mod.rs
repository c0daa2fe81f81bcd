//! The cluster's one decision maker: assigns egress IPs to nodes, numbers objects, writes their status.
//!
//! A process of its own, `egress-agent controller`. Two of them run; both keep their view warm, and the leader alone writes.
//! - [`run`]: the process, from start to clean stop.
//! - [`election`]: the rule of leadership, pure; [`leadership`]: the loop around it and the Lease.
//! - [`gaps`]: when an API server is too slow to lead by, pure.
//! - [`assignment`]: objects and nodes -> who serves what, pure. [`numbering`]: egress IDs, pure.
//! - [`handover`]: when an address that changes its node may be given to the new one; [`suspicion`]: when a node that says
//!   nothing holds it no more. Pure but for their memory.
//!   `books`: the ledger in which that is recorded. `words`: what nodes say of it.
//! - [`verdict`]: the conditions and the events of an object, pure.
//! - [`draining`]: what stays on a node that is drained, and why, pure.
//! - [`decision`]: these together, the whole of what the leader decides.
//! - [`reach`]: which egress nodes answer. [`census`]: how many pods each object serves, and which agents of all nodes are away.
//! - [`strangers`]: others who write the status, pure. `complaint`: what is said when it cannot be written, pure.
//!   `problems`: what is said of nodes that cannot be read, pure. `summary`: what scrapes show, pure.
//!   `moves`: addresses that have another node now, pure.
//! - [`leader`]: takes changes, decides, writes what differs.

pub mod ledger;
pub mod node_health;
pub mod pod_counts;
pub mod reconciler;
pub mod run;
pub mod summary;
pub mod write_errors;
