//! The interface between plans and the kernel.
//!
//! A plan is a list of [`Action`]s; one executor performs them in order. An entry that the kernel refuses is skipped
//! (`refusal`); any other failure stops the plan. The result is a prefix of the plan, and every prefix is safe (see
//! `plan`).

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::future::Future;
use std::net::IpAddr;
use std::pin::Pin;

use ipnet::IpNet;

use crate::model::lease::SharedLease;
use crate::model::node::{Mac, Unserved};
use crate::model::reserved::Reserved;
use crate::model::state::{Action, KernelState};
use crate::networks::RoutedNetworks;
use crate::vlans::Vlans;

/// Return type of an asynchronous method of a trait object.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// The field `condition` of log lines about the claim of an address: of a warning that it has failed, and of the line that says
/// that the address is served.
pub fn claim_condition(address: IpAddr) -> String {
    format!("claim/{address}")
}

/// Performs plans. Implemented on the kernel by `egress_datapath`, and by a recorder in tests.
pub trait Executor {
    /// The state of the kernel.
    fn observe(&mut self) -> impl Future<Output = Result<KernelState, DataplaneError>> + Send;

    /// Only the owned addresses and the hand-overs, independent of concurrent changes.
    fn held(&mut self) -> impl Future<Output = Result<KernelState, DataplaneError>> + Send;

    /// What the claims of the next plan may rely on; replaces the former value.
    fn expect(&mut self, _expected: Expected) {}

    /// Makes this node route by these tables, and by no others. Returns why nothing follows some of them, by name.
    fn route(&mut self, _networks: &RoutedNetworks) -> impl Future<Output = BTreeMap<String, String>> + Send {
        std::future::ready(BTreeMap::new())
    }

    /// Makes the uplink have VLAN devices for these networks, in its own time. One that hosts an egress IP stays until it hosts
    /// none.
    fn follow_vlans(&mut self, _vlans: &Vlans) {}

    /// Announces the next plan, for work that is better done for all of it at once. Changes nothing.
    fn prepare(&mut self, _plan: &[Action]) -> impl Future<Output = ()> + Send {
        std::future::ready(())
    }

    /// The kernel has reached the desired state for the first time since it was observed. An earlier run may have ended
    /// before it announced its claims.
    fn confirm(&mut self) {}

    /// Called each second while the node's pods are followed and the kernel is up to date; false when that ends.
    fn follows(&mut self, _is_so: bool) {}

    /// Until when the programs may emit egress IPs.
    fn lease(&self) -> SharedLease {
        SharedLease::default()
    }

    /// Waits until another host answers for an address that is held here. May be dropped and called again.
    fn conflict(&mut self) -> impl Future<Output = AddressClaim> + Send {
        std::future::pending()
    }

    /// Performs all cuts in one walk. It begins at once, runs beside other actions, and completes even if the future is
    /// dropped. After an error some of them are done.
    fn cut(&mut self, cuts: Vec<Action>) -> BoxFuture<'static, Result<(), DataplaneError>>;

    /// Performs one action; an error leaves the state as it was before.
    fn apply(&mut self, action: &Action) -> impl Future<Output = Result<(), DataplaneError>> + Send;
}

/// What is known of addresses that this node is about to claim, and of the nodes that may answer for them.
///
/// A record alone proves nothing: its old node may never have had the address, so that another host may have it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Expected {
    /// Addresses whose old node acknowledges that it handed them over to this one: no probe is needed.
    pub handed_over: BTreeSet<IpAddr>,
    /// The old nodes (by tunnel endpoint) of open hand-overs to this node. Such a node may answer an early probe: its
    /// lease has ended when the address is claimed.
    pub holders: BTreeMap<IpAddr, IpAddr>,
    /// The link addresses of egress interfaces that nodes publish, with the node's tunnel endpoint.
    pub links: BTreeMap<Mac, IpAddr>,
    /// The networks of egress IPs on this node's uplink, where they are not those of its addresses: of a cloud, for example.
    pub primary_networks: Vec<IpNet>,
}

impl Expected {
    /// Whether the host with this link address is the old node of the address.
    pub fn is_holder(&self, address: IpAddr, mac: Mac) -> bool {
        self.links.get(&mac).is_some_and(|node| self.holders.get(&address) == Some(node))
    }
}

/// Another host answers for an address that this node holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AddressClaim {
    pub address: IpAddr,
    pub mac: Mac,
}

/// The same with the cluster's knowledge of that host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Conflict {
    pub address: IpAddr,
    /// The tunnel endpoint, if the host is a node of the cluster.
    pub node: Option<IpAddr>,
    pub mac: String,
}

impl fmt::Display for Conflict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { address, node, mac } = self;
        match node {
            Some(node) => write!(
                f,
                "node {node} ({mac}) keeps answering for egress IP {address}, which another node serves: is its \
                 egress-agent running? Start it, or run `egress-agent cleanup` there"
            ),
            None => {
                write!(f, "{mac} answers for egress IP {address}, which a node of the cluster serves: free it there")
            }
        }
    }
}

/// Why the data plane could not perform an action.
#[derive(Debug, thiserror::Error)]
pub enum DataplaneError {
    /// A map, a program or a link could not be read or written.
    #[error("{what}: {source}")]
    Kernel { what: &'static str, source: std::io::Error },
    /// The action exceeds the size of a map.
    #[error("{map} is full: {limit} entries")]
    Full { map: &'static str, limit: u32 },
    /// The kernel refuses this entry of the map and takes others.
    #[error("map {map} does not take the entry: {source}")]
    Refused { map: &'static str, source: std::io::Error },
    /// Another host answers for an egress IP on the network (RFC 5227): it is not claimed.
    #[error("{address} is in use by {mac}: free it there or take it out of the EgressIP object")]
    AddressInUse { address: std::net::IpAddr, mac: String },
    /// The address is reserved: it is neither probed nor claimed.
    #[error("{address} {reason}: take it out of the EgressIP object")]
    Reserved { address: std::net::IpAddr, reason: Reserved },
    /// Another node of the cluster still answers for an egress IP that is assigned to this one: it is not claimed.
    #[error(
        "node {node} ({mac}) still answers for {address}: is its egress-agent running? The address is claimed when that \
         node has stopped; `egress-agent cleanup` there stops it at once"
    )]
    HeldByNode { address: std::net::IpAddr, node: std::net::IpAddr, mac: String },
    /// The address must leave by a routing table, and nothing follows it here: it is not claimed.
    #[error("{address} cannot leave by its network: {why}")]
    NoNetwork { address: std::net::IpAddr, why: String },
}

impl DataplaneError {
    /// Whether the error concerns one entry only.
    pub fn is_of_entry(&self) -> bool {
        match self {
            Self::Full { .. } | Self::Refused { .. } => true,
            Self::Kernel { .. }
            | Self::AddressInUse { .. }
            | Self::Reserved { .. }
            | Self::HeldByNode { .. }
            | Self::NoNetwork { .. } => false,
        }
    }
}

impl From<&DataplaneError> for Unserved {
    fn from(error: &DataplaneError) -> Self {
        match error {
            DataplaneError::AddressInUse { mac, .. } => Self::InUse(mac.clone()),
            DataplaneError::HeldByNode { node, .. } => Self::HeldByNode(*node),
            DataplaneError::Reserved { .. } => Self::Reserved,
            DataplaneError::Kernel { .. }
            | DataplaneError::Full { .. }
            | DataplaneError::Refused { .. }
            | DataplaneError::NoNetwork { .. } => Self::Refused,
        }
    }
}
