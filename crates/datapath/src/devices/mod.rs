//! devices.

pub mod host;
pub mod interfaces;
pub mod late;
pub mod neighbours;
pub mod next_hop;
pub mod node_ports;
pub mod watch;
