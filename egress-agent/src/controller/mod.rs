//! The controller, `egress-agent controller`: it assigns egress IPs to nodes, gives objects their IDs, and writes their status.
//!
//! Two controllers run; both keep their view current, and only the leader writes.
//! - [`run`]: the list of parts, from start to clean stop. Leader election is `egress_kube::leader_election`.
//! - [`reconciler`]: takes changes, computes the desired status (`egress_core::desired_status`, pure), writes what
//!   differs.
//! - [`ledger`]: the record of hand-overs, and the evidence of releases.
//! - [`node_health`]: which egress nodes answer.
//! - [`pod_counts`]: how many pods each object serves, and which agents are away.
//! - `egress_services`, `antrea`, `cilium`, `egress_routers`: what becomes of EgressServices, of Antrea's Egresses, of Cilium's
//!   policies, of EgressRouters. `conversion`
//!   is the loop that they share.
//! - [`cluster_metrics`]: the cluster in numbers. Pure.

mod antrea;
mod cilium;
pub mod cluster_metrics;
mod conversion;
mod egress_routers;
mod egress_services;
mod fan_out;
pub mod ledger;
pub mod node_health;
pub mod pod_counts;
pub mod reconciler;
pub mod run;
