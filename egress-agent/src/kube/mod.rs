//! The Kubernetes edge: kube types end here.
//!
//! In: [`watch`] follows four kinds and turns every object into a value of `model::view` by [`convert`].
//! Out: [`status`] patches EgressIP objects, [`lease`] reads and writes the leader's Lease, [`events`] tells users.
//! [`causes`] says why something failed,
//! [`crd`] holds the type of the API, [`keys`] every label and annotation by name.

pub mod causes;
pub mod client;
pub mod convert;
pub mod crd;
pub mod events;
pub mod keys;
pub mod lease;
pub mod status;
pub mod watch;
