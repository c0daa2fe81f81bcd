//! The policy model of egress-agent: selection, allocation, ownership, desired state and plan. No Kubernetes client, no
//! eBPF library, no sockets: time and facts are arguments.

pub mod allocation;
pub mod antrea;
pub mod cilium;
pub mod desired_status;
pub mod display_names;
pub mod dropped_packet;
pub mod egress_service;
pub mod keys;
pub mod leader_election;
pub mod model;
pub mod networks;
pub mod node_health;
pub mod notes;
pub mod ownership;
pub mod plan;
pub mod rendezvous;
pub mod selection;
pub mod status;
pub mod text;
pub mod vlans;
