//! The chained CNI plugin `egress-agent-cni`, which the container runtime calls for every pod that gets a network.
//!
//! A CNI that announces no addresses leaves the agent to learn a pod's address from its status, which the kubelet writes when the
//! pod has been running for some tenths of a second. Last in the node's plugin chain, this plugin tells the agent the address and
//! returns when the maps have it, so that the pod's first packet is judged by its object ([`egress_core::selection::pod_addresses`]).
//!
//! It makes no pod's start depend on the agent: where none answers in time the pod starts, and what it sends is judged as if there
//! were no plugin. [`plugin`] speaks the protocol, [`chain`] puts the plugin into the chain and takes it out.

pub mod chain;
pub mod plugin;

/// The plugin's type, and so the name of its file among the CNI's binaries.
pub const PLUGIN: &str = "egress-agent-cni";
