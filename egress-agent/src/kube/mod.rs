//! The Kubernetes edge: kube types end here.
//!
//! In: [`watch`] follows the kinds that count and turns every object into a value of `model::view` by [`convert`].
//! Out: [`status`] patches EgressIP objects, [`lease`] reads and writes the leader's Lease, [`ledger`] what is recorded for
//! all agents, [`own_node`] and [`words`] what the agent says of its node (`own_object`), [`events`] tells users. [`secret`] has the key that agents sign with.
//! [`anew`] and [`pods`] read objects past the watches, [`causes`] says why something failed, [`outage`] when the API server is away, [`rollback`] when it has gone back;
//! `pace` and `revive` have everything go on as soon as it is back;
//! [`crd`] holds the type of the API, [`keys`] every label and annotation by name.

pub mod administration;
pub mod anew;
pub mod causes;
pub mod client;
pub mod convert;
pub mod crd;
pub mod events;
pub mod keys;
pub mod lease;
pub mod ledger;
pub mod outage;
pub mod own_node;
mod own_object;
mod pace;
pub mod pods;
mod revive;
#[cfg(test)]
mod rights;
pub mod rollback;
pub mod secret;
pub mod status;
#[cfg(test)]
pub(crate) mod stub;
pub mod watch;
pub mod words;

use kube::api::PostParams;

/// Who we are in `managedFields`, so that people see which fields are ours.
const FIELD_MANAGER: &str = "egress-agent";

fn post_params() -> PostParams {
    PostParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PostParams::default() }
}
