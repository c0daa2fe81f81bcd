//! The addresses of a node, as its kernel has them.

use std::collections::BTreeSet;
use std::io;
use std::net::IpAddr;

use ipnet::IpNet;

use super::node::Uplink;

/// Addresses of the node, each with the length of its network.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostNetworks {
    /// The one address per family that the node itself uses on its uplink.
    pub primary: Vec<IpNet>,
    /// All, those of the uplink among them, those of the management port not.
    pub all: BTreeSet<IpNet>,
    /// Those of the management port.
    pub management: BTreeSet<IpAddr>,
    /// Nothing while there is no uplink.
    pub uplink: Uplink,
}

/// Asks the kernel for them.
pub trait HostAddresses: Sync {
    fn networks(&self) -> impl Future<Output = io::Result<HostNetworks>> + Send;
}
