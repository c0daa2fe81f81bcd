//! The test cluster: network namespaces with real interfaces, real packets, real agents and an API server. It needs only root.
//!
//! - `topology` builds and removes a lab. All devices are in its namespaces, and its ledger names everything that outlives a
//!   process before it exists.
//! - `test_cluster` is a lab with API server (`kube_api`, `apiserver`), a server outside (`traffic`) and agents (`agents`, with
//!   the capabilities of their manifests, `confinement`). Tests, soak, faults, benchmark and walkthrough start with it.
//! - `capture` counts every packet on the nodes' network by source and verifies its checksums, and shows which devices of a node
//!   a packet passes.
//! - `load_balancer` announces addresses of Services and leads to their pods.
//! - `cut` and `machine` cut parts of the network and pause machines; `pins` reads a node's pinned maps and links.

pub mod agents;
pub mod api_objects;
pub mod apiserver;
pub mod background;
pub mod capture;
pub mod cni_runtime;
pub mod columns;
pub mod confinement;
pub mod cut;
pub mod hold;
pub mod kube_api;
pub mod load_balancer;
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
pub use topology::host_config::{Cni, HostConfig, NicKind, ReversePath, SecondNic};
pub use topology::lab::{Lab, LabNode, LabPod, LabService};
pub use topology::netns::Netns;
pub use topology::signals::{wait_for_signal, yield_to_signal};
pub use topology::{EXT_LAN, MANAGEMENT, POD_INTERFACE, SECOND_UPLINK, UPLINK};
