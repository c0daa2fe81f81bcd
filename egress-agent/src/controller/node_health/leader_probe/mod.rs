//! Knocking at the node of the controller that leads, while it is another than this one.
//!
//! A node that has lost its power or its network takes its controller with it, and need not be waited for as long as a
//! controller that alone is silent (`egress_core::leader_election`). Every address is knocked at where the first does not
//! answer: a connection that is accepted or refused is a sign that the node is there.
//!
//! What is found is found by knocks that were given their time in vain. So a standby that has stood still finds nobody
//! silent for it. Nor is a node silent that has never answered: a firewall may be between them.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::StreamExt;
use futures::stream::FuturesUnordered;
use ipnet::IpNet;
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval, sleep, timeout};
use tokio_util::sync::CancellationToken;

use crate::change_queue::ChangeReceiver;
use crate::controller::node_health::session::{DISCARD, is_there};
use egress_core::leader_election::{SilentHolder, Timing, node_of};
use egress_core::model::view::{Change, Node, Update};

/// Between two rounds of knocks.
const AGAIN: Duration = Duration::from_millis(125);
/// How much later than one address the next is knocked at: not at all where one answers.
const NEXT: Duration = Duration::from_millis(25);

/// Knocks until told to stop. `port` is that of the agents' health service, zero for the discard port.
pub async fn run(
    port: u16,
    mut nodes: ChangeReceiver,
    mut holder: watch::Receiver<Option<String>>,
    silence: watch::Sender<Option<SilentHolder>>,
    stop: CancellationToken,
) {
    let port = if port == 0 { DISCARD } else { port };
    let mut known = BTreeMap::new();
    let mut beat = interval(AGAIN);
    beat.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut rounds = FuturesUnordered::new();
    let mut heard = None::<Instant>;
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            changes = nodes.take() => {
                let Some(changes) = changes else { return };
                changes.into_iter().for_each(|change| apply(&mut known, change));
            }
            changed = holder.changed() => {
                if changed.is_err() {
                    return;
                }
                rounds.clear();
                heard = None;
                silence.send_replace(None);
            }
            _ = beat.tick() => {
                let node = holder.borrow().as_deref().and_then(node_of).and_then(|node| known.get(node).cloned());
                if let Some(node) = node {
                    rounds.push(async move { (Instant::now(), answers(&addresses(&node), port).await) });
                }
            }
            Some((begun, answers)) = rounds.next() => {
                if answers {
                    heard = Some(Instant::now());
                    silence.send_if_modified(|silence| silence.take().is_some());
                } else if heard.is_some_and(|heard| heard <= begun) {
                    let of = holder.borrow().clone();
                    silence.send_if_modified(|silence| {
                        let is_news = silence.is_none();
                        if is_news {
                            *silence = of.map(|holder| SilentHolder { holder, since: begun });
                        }
                        is_news
                    });
                }
            }
        }
    }
}

fn apply(known: &mut BTreeMap<String, Arc<Node>>, change: Change) {
    match change {
        Change::Nodes(Update::Replaced(nodes)) => *known = nodes,
        Change::Nodes(Update::Changed(name, node)) => drop(known.insert(name, node)),
        Change::Nodes(Update::Removed(name)) => drop(known.remove(&name)),
        Change::Objects(_) | Change::Namespaces(_) | Change::Pods(_) | Change::Services(_) | Change::Ledger(_) => {}
    }
}

/// All that are known, of the management network and the node's own.
fn addresses(node: &Node) -> BTreeSet<IpAddr> {
    let own = node.primary.iter().map(IpNet::addr).chain(node.internal.iter().copied());
    own.chain(node.health_addresses()).collect()
}

/// Whether any of them does in time. Where none is known nobody is silent.
async fn answers(addresses: &BTreeSet<IpAddr>, port: u16) -> bool {
    let patience = Timing::default().silence;
    let knocks = (0..).zip(addresses).map(|(place, address)| async move {
        sleep(NEXT * place).await;
        is_there(SocketAddr::new(*address, port), patience).await
    });
    let mut knocks: FuturesUnordered<_> = knocks.collect();
    let any = async {
        while let Some(is_there) = knocks.next().await {
            if is_there {
                return true;
            }
        }
        false
    };
    addresses.is_empty() || timeout(patience, any).await.unwrap_or(false)
}

#[cfg(test)]
mod tests;
