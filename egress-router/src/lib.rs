//! A CNI plugin that makes a pod an egress router: it gets an interface on an external network, with an address of its own, and
//! passes on connections of other pods from that address.

pub mod call;
pub mod check;
pub mod cmd;
pub mod config;
pub mod import;
pub mod kernel;
pub mod manifests;
pub mod namespace;
pub mod neighbours;
pub mod node_files;
pub mod plan;
pub mod ruleset;
pub mod setup;
pub mod table;
