//! The seam between plans and the kernel.
//!
//! A plan is a list of [`Action`]s; one executor performs them, in order. An entry that the kernel refuses is left out
//! (`refusal`); at the first other failure it stops. What then holds is a prefix of the plan, and every prefix is safe
//! (see `plan`).

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::future::Future;
use std::net::IpAddr;

use std::pin::Pin;

use crate::model::lease::SharedLease;
use crate::model::node::{Mac, Unserved};
use crate::model::reserved::Reserved;
use crate::model::state::{Action, KernelState};

/// What an asynchronous method of a trait object returns.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// The one that performs plans. Implemented by `dataplane::Dataplane` on the kernel and by a recorder in tests.
pub trait Executor {
    /// What the kernel holds now.
    fn observe(&mut self) -> impl Future<Output = Result<KernelState, DataplaneError>> + Send;

    /// What it owns and what is handed over alone, whatever else is being done with the kernel's state.
    fn held(&mut self) -> impl Future<Output = Result<KernelState, DataplaneError>> + Send;

    /// What the claims of the plan that is about to be performed may count on. It replaces what was said before.
    fn expect(&mut self, _expected: Expected) {}

    /// The plan that is about to be performed, for what is better done for all of it at once. It changes nothing.
    fn prepare(&mut self, _plan: &[Action]) -> impl Future<Output = ()> + Send {
        std::future::ready(())
    }

    /// The kernel holds what the cluster wants, for the first time since it was observed. An earlier run may have ended
    /// before it had told the network what it had claimed.
    fn confirm(&mut self) {}

    /// The node's pods are followed just now, and what is known of them is in the kernel: said each second. Or no more.
    fn follows(&mut self, _is_so: bool) {}

    /// Until when the programs may emit egress IPs.
    fn lease(&self) -> SharedLease {
        SharedLease::default()
    }

    /// Waits until somebody else is heard to answer for an address that is held here. May be dropped and asked again.
    fn conflict(&mut self) -> impl Future<Output = Claimant> + Send {
        std::future::pending()
    }

    /// Cuts, all by one walk. It begins at once, goes on beside other actions, and ends also where nobody waits for it. An error
    /// leaves some of them done.
    fn cut(&mut self, cuts: Vec<Action>) -> BoxFuture<'static, Result<(), DataplaneError>>;

    /// One action; an error leaves the state as it was before the action.
    fn apply(&mut self, action: &Action) -> impl Future<Output = Result<(), DataplaneError>> + Send;
}

/// What is known of addresses that this node is about to claim, and of the nodes that may answer for them.
///
/// A record alone proves nothing: its node may never have had the address, which another host has then.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Expected {
    /// Their former node says that it has handed them over to this one, and it hands over what it serves: no probe is
    /// needed.
    pub handed_over: BTreeSet<IpAddr>,
    /// The nodes (by tunnel endpoint) that open hand-overs to this node name as holders. Such a node may answer an early
    /// probe: its lease has ended when the address is claimed.
    pub holders: BTreeMap<IpAddr, IpAddr>,
    /// The nodes, by tunnel endpoint, that publish these link addresses of their uplinks.
    pub links: BTreeMap<Mac, IpAddr>,
}

impl Expected {
    /// Whether the host with this link address is the node that the address comes from.
    pub fn is_holder(&self, address: IpAddr, mac: Mac) -> bool {
        self.links.get(&mac).is_some_and(|node| self.holders.get(&address) == Some(node))
    }
}

/// Another host answers for an address that this node holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Claimant {
    pub address: IpAddr,
    pub mac: Mac,
}

/// Likewise, with what the cluster knows of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Conflict {
    pub address: IpAddr,
    /// Where it is a node of the cluster.
    pub node: Option<IpAddr>,
    pub mac: String,
}

impl fmt::Display for Conflict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { address, node, mac } = self;
        match node {
            Some(node) => write!(
                f,
                "node {node} ({mac}) goes on answering for egress IP {address}, which another node serves: is its \
                 egress-agent running? Start it, or run `egress-agent cleanup` there"
            ),
            None => {
                write!(f, "{mac} answers for egress IP {address}, which a node of the cluster serves: free it there")
            }
        }
    }
}

/// Why the data plane could not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum DataplaneError {
    /// A map, a program or a link could not be read or written.
    #[error("{what}: {source}")]
    Kernel { what: &'static str, source: std::io::Error },
    /// The action asks for more than a map holds.
    #[error("{map} is full: {limit} entries")]
    Full { map: &'static str, limit: u32 },
    /// The kernel takes entries of this map, and not this one.
    #[error("map {map} does not take the entry: {source}")]
    Refused { map: &'static str, source: std::io::Error },
    /// Somebody else answers for an egress IP on the network (RFC 5227): it is not claimed.
    #[error("{address} is in use by {mac}: free it there or take it out of the EgressIP object")]
    AddressInUse { address: std::net::IpAddr, mac: String },
    /// The address can be no egress IP: it is not asked for on the network.
    #[error("{address} {reason}: take it out of the EgressIP object")]
    Reserved { address: std::net::IpAddr, reason: Reserved },
    /// Another node of the cluster still answers for an egress IP that has been assigned to this one: it is not claimed.
    #[error(
        "node {node} ({mac}) still answers for {address}: is its egress-agent running? The address is claimed when that \
         node has stopped; `egress-agent cleanup` there stops it at once"
    )]
    HeldByNode { address: std::net::IpAddr, node: std::net::IpAddr, mac: String },
}

impl DataplaneError {
    /// Whether it says something of one entry alone, and nothing of all others.
    pub fn is_of_entry(&self) -> bool {
        match self {
            Self::Full { .. } | Self::Refused { .. } => true,
            Self::Kernel { .. } | Self::AddressInUse { .. } | Self::Reserved { .. } | Self::HeldByNode { .. } => false,
        }
    }
}

impl From<&DataplaneError> for Unserved {
    fn from(error: &DataplaneError) -> Self {
        match error {
            DataplaneError::AddressInUse { mac, .. } => Self::InUse(mac.clone()),
            DataplaneError::HeldByNode { node, .. } => Self::HeldByNode(*node),
            DataplaneError::Reserved { .. } => Self::Reserved,
            DataplaneError::Kernel { .. } | DataplaneError::Full { .. } | DataplaneError::Refused { .. } => {
                Self::Refused
            }
        }
    }
}
