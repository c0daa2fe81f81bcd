//! The seam between plans and the kernel.
//!
//! A plan is a list of [`Action`]s; one executor performs them, in order, and stops at the first that fails. What then
//! holds is a prefix of the plan, and every prefix is safe (see `plan`).

use std::collections::BTreeSet;
use std::future::Future;
use std::net::IpAddr;

use super::state::{Action, KernelState};

/// The one that performs plans. Implemented by `dataplane::Dataplane` on the kernel and by a recorder in tests.
pub trait Executor {
    /// What the kernel holds now.
    fn observe(&mut self) -> impl Future<Output = Result<KernelState, DataplaneError>> + Send;

    /// These addresses come from other nodes of ours, which have let go of them or are out of touch: who answers for one
    /// is no stranger, and its claim need not wait.
    fn expect(&mut self, _addresses: &BTreeSet<IpAddr>) {}

    /// The plan that is about to be performed, for what is better done for all of it at once. It changes nothing.
    fn prepare(&mut self, _plan: &[Action]) -> impl Future<Output = ()> + Send {
        std::future::ready(())
    }

    /// The kernel holds what the cluster wants, for the first time since it was observed. An earlier run may have ended
    /// before it had told the network what it had claimed.
    fn confirm(&mut self) {}

    /// One action; an error leaves the state as it was before the action.
    fn apply(&mut self, action: &Action) -> impl Future<Output = Result<(), DataplaneError>> + Send;
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
    /// Somebody else answers for an egress IP on the network (RFC 5227): it is not claimed.
    #[error("{address} is in use by {mac}: free it there or take it out of the EgressIP object")]
    AddressInUse { address: std::net::IpAddr, mac: String },
    /// Another node of the cluster still answers for an egress IP that has been assigned to this one.
    #[error(
        "node {node} ({mac}) still answers for {address}: is its egress-agent running? It is taken over from there when that \
         node has had time to give it up"
    )]
    HeldByNode { address: std::net::IpAddr, node: std::net::IpAddr, mac: String },
}
