//! The Kubernetes edge of the agent: `kube` types do not leave this crate.
//!
//! - In: [`watches`] follows every kind that decisions depend on, [`convert`] turns objects into values of `egress_core::model`.
//!   [`fresh_read`] reads past the watches.
//! - Egress policies: [`policy`] reads them from the objects of each API, and writes their status. [`egress_service`] makes
//!   some of these objects from EgressServices.
//! - Out: [`ledger`] records hand-overs, [`node_facts`] and [`acknowledgements`] write the
//!   EgressNode object ([`node_object`]), [`events`] publishes events.
//! - Leader election: [`leader_election`] runs the loop around the Lease.
//! - Failures: [`api_outage`] logs and ends outages, [`backoff`] paces retries, [`stalled_requests`] ends hanging requests,
//!   [`restored_backup`] detects a restored etcd backup, [`error_text`] formats errors.
//! - [`crd`] defines the API types, [`health_key`] the Secret that health checks are signed with, [`metrics_token`] the one for
//!   metrics, [`admin`] serves commands.

pub mod acknowledgements;
pub mod admin;
pub mod antrea;
pub mod api_outage;
pub mod assignments;
pub mod backoff;
pub mod cilium;
pub mod client;
pub mod convert;
pub mod crd;
pub mod drain;
pub mod egress_router;
pub mod egress_service;
pub mod error_text;
pub mod events;
pub mod fresh_read;
pub mod health_key;
pub mod leader_election;
pub mod ledger;
pub mod metrics_token;
pub mod migrate;
pub mod node_facts;
pub mod node_object;
pub mod policy;
pub mod restored_backup;
#[cfg(test)]
mod rights;
pub mod stalled_requests;
#[cfg(any(test, feature = "testing"))]
pub mod stub;
pub mod watches;

use kube::api::PostParams;

/// Our name in `managedFields`.
const FIELD_MANAGER: &str = "egress-agent";

fn post_params() -> PostParams {
    PostParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PostParams::default() }
}
