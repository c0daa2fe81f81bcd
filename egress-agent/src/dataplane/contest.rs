//! An egress IP that is assigned to this node while another node still answers for it.
//!
//! Programs outlive their agent, so a node whose agent is dead goes on answering for what it held. To a probe that looks
//! like any other address in use, and a stranger's address is never claimed. A node of ours is told from a stranger by its
//! link address, which the node's own addresses are asked for. It is given time to let go, as a living agent does within
//! moments of hearing of the assignment; then the address is taken over and defended (see `claim`).
//!
//! Both answer from then on until the other node's agent runs again or its programs are gone. What would end it there by
//! itself, a deadline in the programs' own entries, does not exist yet (docs/adr/0011-hand-over-from-a-dead-agent.md).

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use egress_common::abi::{Addr, NodeEntry};
use futures::StreamExt;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender};
use tracing::warn;

use super::claim::{self, Claimant};
use super::frames::Mac;
use super::interfaces::Interface;
use super::{Shared, convert};
use crate::model::executor::Conflict;

/// How long a node of ours has to let go of an address. An agent that hears of it needs milliseconds.
const TIME_TO_LET_GO: Duration = Duration::from_secs(5);
/// A claim that was not tried for longer than this was given up meanwhile: its next try begins anew. Longer than the
/// longest pause between tries.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(60);
/// Nodes that are asked at the same time: each takes a socket.
const AT_ONCE: usize = 64;

/// The node that has this link address on the uplink's network. One whose own address is on another network than its egress
/// IPs is not found, and is a stranger then.
pub(super) async fn node_with(uplink: Interface, nodes: BTreeSet<IpAddr>, mac: Mac) -> Option<IpAddr> {
    let asked = nodes.into_iter().map(|node| async move {
        // A host with several devices on one network answers by each of them.
        let found = claim::probe_for(uplink, node, |found| found == mac).await;
        matches!(found, Ok(Some(_))).then_some(node)
    });
    let mut found = futures::stream::iter(asked).buffer_unordered(AT_ONCE).filter_map(std::future::ready).boxed();
    found.next().await
}

/// The tunnel endpoints of all other nodes.
pub(super) fn other_nodes(shared: &Shared) -> io::Result<BTreeSet<IpAddr>> {
    let mut nodes = BTreeSet::new();
    let see = |_: &Addr, entry: &NodeEntry| {
        let node = convert::node(entry);
        if !node.own {
            nodes.insert(node.node.0);
        }
    };
    shared.tables().nodes.for_each(see)?;
    Ok(nodes)
}

/// Finds out who they are that answer for addresses of this node, and tells of them.
pub(super) async fn name(shared: Arc<Shared>, mut heard: UnboundedReceiver<Claimant>, told: UnboundedSender<Conflict>) {
    while let Some((address, mac)) = heard.recv().await {
        let Some(uplink) = shared.state().facts().uplink else { continue };
        let node = match other_nodes(&shared) {
            Ok(nodes) => node_with(uplink, nodes, mac).await,
            Err(error) => {
                warn!(%error, "cannot read map nodes: a node that answers for an egress IP is taken for a stranger");
                None
            }
        };
        if told.send(Conflict { address, node, mac: mac_text(mac) }).is_err() {
            return;
        }
    }
}

pub(super) fn mac_text(mac: [u8; 6]) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}

/// Addresses that other nodes hold although they are this node's.
#[derive(Debug, Default)]
pub(super) struct Contests {
    open: BTreeMap<IpAddr, Contest>,
}

#[derive(Clone, Copy, Debug)]
struct Contest {
    node: IpAddr,
    since: Instant,
    seen: Instant,
}

impl Contests {
    /// The node was heard answering for the address now; whether it has had time enough.
    pub(super) fn is_over(&mut self, address: IpAddr, node: IpAddr, now: Instant) -> bool {
        let known = self.open.get(&address);
        let known = known.filter(|known| known.node == node && now.duration_since(known.seen) < FORGOTTEN_AFTER);
        let since = known.map_or(now, |known| known.since);
        self.open.insert(address, Contest { node, since, seen: now });
        now.duration_since(since) >= TIME_TO_LET_GO
    }

    /// Nobody, or a stranger, answers for it.
    pub(super) fn end(&mut self, address: IpAddr) {
        self.open.remove(&address);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_has_its_time_to_let_go() {
        let (address, node, other) = ([172, 18, 0, 100].into(), [172, 18, 0, 3].into(), [172, 18, 0, 4].into());
        let mut contests = Contests::default();
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        assert!(!contests.is_over(address, node, at(0)));
        assert!(!contests.is_over(address, node, at(4)));
        assert!(contests.is_over(address, node, at(5)));
        assert!(!contests.is_over(address, other, at(6)), "another node, another time");
        assert!(contests.is_over(address, other, at(11)));
        contests.end(address);
        assert!(!contests.is_over(address, other, at(12)), "it had let go in between");
        assert!(!contests.is_over(address, other, at(200)), "nobody had wanted it for long");
        assert!(contests.is_over(address, other, at(205)));
    }
}
