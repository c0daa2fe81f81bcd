//! The policy model: plain values without input or output.
//!
//! - [`view`]: the cluster as this node knows it, and how a change enters it.
//! - [`policy`], [`selector`]: an egress policy. [`node`]: a node, and which addresses it can host.
//!   [`interface`]: its interfaces, and which of them hosts an address.
//! - [`services`], [`exposed`]: addresses of Services, and pod ports that are reached from outside.
//! - [`reserved`]: addresses that are never an egress IP, and why. [`settings`]: what the operator configures.
//! - [`state`]: the state of the kernel and the actions that change it. [`lease`]: the lease shared with programs.
//! - [`ledger`]: what the leader records for all nodes.

pub mod exposed;
pub mod interface;
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
