//! Why a node does not serve an address that it has been assigned: it tells the leader with its answers to probes
//! ([`egress_agent::health::unserved`]), and the leader the object, by its conditions.

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;

use crate::plan::executor::DataplaneError;

/// By address.
pub type UnservedAddresses = BTreeMap<IpAddr, Unserved>;

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Unserved {
    /// Another host answers for it, with this link address.
    InUse(String),
    /// Another node of the cluster does, which has this address.
    HeldByNode(IpAddr),
    /// It can be no egress IP there.
    Reserved,
    /// The kernel does not take the entry.
    Refused,
}

impl Unserved {
    /// The reason of a condition.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::InUse(_) => "AddressInUse",
            Self::HeldByNode(_) => "HeldByNode",
            Self::Reserved => "ReservedAddress",
            Self::Refused => "EntryRefused",
        }
    }
}

impl fmt::Display for Unserved {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::InUse(mac) => write!(f, "another host ({mac}) answers for it"),
            Self::HeldByNode(node) => write!(f, "node {node} still answers for it"),
            Self::Reserved => f.write_str("it can be no egress IP there"),
            Self::Refused => f.write_str("the node's kernel does not take it"),
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
