//! The test cluster: network namespaces with real interfaces, real packets, real agents and an API server. Needs nothing but root.
//!
//! ```text
//! LabBuilder --start--> Lab (topology up) --TestCluster::bring_up--> API server, server outside --start_agents--> agents
//!                        | drop, signal, or the next lab after a crash
//!                        v
//!                       removed from its ledger
//! ```
//!
//! | module | what |
//! |---|---|
//! | [`topology`] | nodes with a host's stack and options, pods, the CNI's overlay, the network outside; the ledger and its removal |
//! | [`test_cluster`] | a lab with everything on it: every test, the soak, the faults, the benchmark and the walkthrough begin with it |
//! | [`agents`], [`process`] | the agent and controller processes, one agent per node, with the capabilities of their manifests (`confinement`) |
//! | [`kube_api`], [`apiserver`] | Kubernetes as the agents see it, and the API server in memory |
//! | [`traffic`] | servers with an access log, clients, long-lived flows, hand-made packets and fragments |
//! | [`capture`] | every packet on the nodes' network by source, with its checksums verified |
//! | [`cut`], [`machine`] | parts of the network that are cut, and machines that are paused |
//! | [`api_objects`], [`pins`] | EgressIP objects and API paths; a node's pinned maps and links |
//! | [`wait`], [`background`], [`random`], [`test`] | waiting, background threads, random numbers from a seed, tests on the lab |
//!
//! Invariants: all devices are made inside namespaces of the lab (the root namespace never has one of them); everything that
//! outlives a process is in the ledger before it exists; every process carries the lab's mark.

pub mod agents;
pub mod api_objects;
pub mod apiserver;
pub mod background;
pub mod capture;
pub mod confinement;
pub mod cut;
pub mod hold;
pub mod kube_api;
pub mod machine;
pub mod pins;
pub mod process;
pub mod random;
pub mod test;
pub mod test_cluster;
pub mod topology;
pub mod traffic;
pub mod wait;

pub use topology::builder::{LabBuilder, PodSpec};
pub use topology::host_config::{Cni, HostConfig, ReversePath};
pub use topology::lab::{Lab, Node, Pod, Service};
pub use topology::netns::Netns;
pub use topology::signals::{wait_for_signal, yield_to_signal};
pub use topology::{EXT_LAN, MANAGEMENT, POD_INTERFACE, SECOND_UPLINK, UPLINK};
