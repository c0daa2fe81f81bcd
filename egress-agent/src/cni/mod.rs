//! The chained CNI plugin `egress-agent-cni`, which the container runtime calls for every pod that gets a network.
//!
//! If the CNI announces no addresses, the agent learns a pod's address from its status, which the kubelet writes some tenths of a
//! second after the pod's start. As the last plugin of the node's chain, this one passes the address to the agent and returns when
//! the maps have it, so that the pod's first packet is handled by its egress policy ([`egress_core::selection::pod_addresses`]).
//!
//! No pod's start depends on the agent: without an answer in time the pod starts as if there were no plugin. [`plugin`] implements
//! the protocol, [`chain`] adds the plugin to the chain and removes it.

pub mod chain;
pub mod plugin;

/// The plugin's type, which is also the name of its file among the CNI's binaries.
pub const PLUGIN: &str = "egress-agent-cni";
