//! Pure: cluster view -> desired state -> plan. No I/O, no clock, no randomness; only [`inbox`] waits.
//!
//! - [`view`]: what is known of the cluster, in plain types, and how a change enters it.
//! - [`node`]: a node of the cluster, and which addresses it can carry.
//! - [`object`]: an EgressIP object, and what happens to what cannot be read of it.
//! - [`pod_addresses`]: which pod of this node has which address.
//! - [`selection`]: which object serves which pod of this node.
//! - [`services`]: addresses of Services outside the service networks.
//! - [`reserved`]: addresses that are never an egress IP, and why.
//! - [`desired`]: what the maps of this node should hold for that view.
//! - [`ledger`]: what the leader has recorded for everybody; [`tenure`]: which addresses this node may hold by it.
//! - [`inbox`]: changes that wait for a half that is busy.
//! - [`compile`]: keeps the last desired state and recomputes only what a change concerns.
//! - [`mod@plan`]: the ordered actions from the actual to the desired state, safe after every prefix.
//! - [`step`]: what one action does to a state, the reference that plans are tested against.
//! - [`refusal`]: what follows where the kernel refuses one entry of a plan.
//! - [`room`]: who may fill how much of the maps.
//! - [`executor`]: the seam to the one that performs plans.

pub mod exposed;
pub mod lease;
pub mod ledger;
pub mod node;
pub mod policy;
pub mod reserved;
#[cfg(any(test, feature = "testing"))]
pub mod samples;
pub mod selector;
pub mod services;
pub mod settings;
pub mod state;
pub mod view;
