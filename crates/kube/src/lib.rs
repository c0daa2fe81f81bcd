//! The Kubernetes edge: kube types end here.
//!
//! In: [`watch`] follows the kinds that count and turns every object into a value of `model::view` by [`convert`].
//! Out: [`status`] patches EgressIP objects, [`lease`] reads and writes the leader's Lease, [`ledger`] what is recorded for
//! all agents, [`own_node`] and [`words`] what the agent says of its node (`own_object`), [`events`] tells users. [`secret`] has the key that agents sign with.
//! [`anew`] and [`pods`] read objects past the watches, [`causes`] says why something failed, [`outage`] when the API server is away, [`rollback`] when it has gone back;
//! `pace` and `revive` have everything go on as soon as it is back;
//! [`crd`] holds the type of the API, [`keys`] every label and annotation by name.

pub mod acknowledgements;
pub mod admin;
pub mod api_outage;
pub mod backoff;
pub mod client;
pub mod convert;
pub mod crd;
pub mod error_text;
pub mod events;
pub mod fresh_read;
pub mod health_key;
pub mod leader_election;
pub mod ledger;
pub mod node_facts;
pub mod node_object;
pub mod pods;
pub mod restored_backup;
#[cfg(test)]
mod rights;
pub mod stalled_requests;
pub mod status;
#[cfg(any(test, feature = "testing"))]
pub mod stub;
pub mod watches;

use kube::api::PostParams;

/// Who we are in `managedFields`, so that people see which fields are ours.
const FIELD_MANAGER: &str = "egress-agent";

fn post_params() -> PostParams {
    PostParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PostParams::default() }
}
