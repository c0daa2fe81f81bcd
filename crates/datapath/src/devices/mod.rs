//! The node's devices, addresses and networks, from the kernel, and the ports that NAT may use on the node's address.

pub mod host;
pub mod interfaces;
pub mod node_ports;
pub mod queueing;
pub mod records;
pub mod routes;
pub mod vlans;
