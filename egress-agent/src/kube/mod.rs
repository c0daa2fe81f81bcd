//! The Kubernetes edge: kube types end here.
//!
//! In: [`watch`] follows four kinds and turns every object into a value of `model::view` by [`convert`].
//! Out: [`status`] patches EgressIP objects, [`lease`] reads and writes the leader's Lease, [`events`] tells users,
//! [`own_node`] says what this node's networks are where no CNI does.
//! [`causes`] says why something failed, [`outage`] when the API server is away,
//! [`crd`] holds the type of the API, [`keys`] every label and annotation by name.

pub mod causes;
pub mod client;
pub mod convert;
pub mod crd;
pub mod events;
pub mod keys;
pub mod lease;
pub mod outage;
pub mod own_node;
pub mod status;
pub mod watch;

use kube::api::PostParams;

/// Who we are in `managedFields`, so that people see which fields are the agent's.
const FIELD_MANAGER: &str = "egress-agent";

fn post_params() -> PostParams {
    PostParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PostParams::default() }
}
