//! Probes the node of the leading controller, while that is another than this one.
//!
//! A node that loses power or its network takes its controller with it, and is waited for less long than a controller
//! that is silent alone (`egress_core::leader_election`). A probe is a TCP connection that is closed at once: accepted
//! or refused, it proves that the node is running. Further addresses are tried if the first does not answer.
//!
//! Only probes that waited for their full timeout count as unanswered, so a standby that was stopped for a while finds
//! no node silent because of that. A node that has never answered does not count as silent: a firewall may block the
//! probes.

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
use crate::controller::node_health::session::{DISCARD, is_reachable};
use egress_core::leader_election::{SilentHolder, Timing, node_of};
use egress_core::model::node::Node;
use egress_core::model::view::{Change, Update};

/// Interval between rounds of probes.
const PROBE_INTERVAL: Duration = Duration::from_millis(125);
/// Delay between the addresses of one round. Later addresses are not tried if one answers.
const STAGGER: Duration = Duration::from_millis(25);

/// Runs until stopped. `port` is that of the agents' health service, zero for the discard port.
pub async fn run(
    port: u16,
    mut nodes: ChangeReceiver,
    mut holder: watch::Receiver<Option<String>>,
    silent_holder: watch::Sender<Option<SilentHolder>>,
    stop: CancellationToken,
) {
    let port = if port == 0 { DISCARD } else { port };
    let mut known = BTreeMap::new();
    let mut tick = interval(PROBE_INTERVAL);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut rounds = FuturesUnordered::new();
    let mut last_answer = None::<Instant>;
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
                last_answer = None;
                silent_holder.send_replace(None);
            }
            _ = tick.tick() => {
                let node = holder.borrow().as_deref().and_then(node_of).and_then(|node| known.get(node).cloned());
                if let Some(node) = node {
                    rounds.push(async move { (Instant::now(), is_any_reachable(&addresses(&node), port).await) });
                }
            }
            Some((begun, answers)) = rounds.next() => {
                if answers {
                    last_answer = Some(Instant::now());
                    silent_holder.send_if_modified(|silent_holder| silent_holder.take().is_some());
                } else if last_answer.is_some_and(|last_answer| last_answer <= begun) {
                    let of = holder.borrow().clone();
                    silent_holder.send_if_modified(|silent_holder| {
                        let is_news = silent_holder.is_none();
                        if is_news {
                            *silent_holder = of.map(|holder| SilentHolder { holder, since: begun });
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
        Change::Policies(_) | Change::Namespaces(_) | Change::Pods(_) | Change::Services(_) | Change::Ledger(_) => {}
    }
}

/// All known addresses: in the management network, and the node's own.
fn addresses(node: &Node) -> BTreeSet<IpAddr> {
    let own = node.primary.iter().map(IpNet::addr).chain(node.internal.iter().copied());
    own.chain(node.health_addresses()).collect()
}

/// Whether any address answers in time. Without a known address the node does not count as silent.
async fn is_any_reachable(addresses: &BTreeSet<IpAddr>, port: u16) -> bool {
    let probe_timeout = Timing::default().node_silence;
    let probes = (0..).zip(addresses).map(|(place, address)| async move {
        sleep(STAGGER * place).await;
        is_reachable(SocketAddr::new(*address, port), probe_timeout).await
    });
    let mut probes: FuturesUnordered<_> = probes.collect();
    let any = async {
        while let Some(is_reachable) = probes.next().await {
            if is_reachable {
                return true;
            }
        }
        false
    };
    addresses.is_empty() || timeout(probe_timeout, any).await.unwrap_or(false)
}

/// Against real sockets on loopback.
#[cfg(test)]
mod tests {
    use tokio::net::{TcpListener, TcpSocket, TcpStream};
    use tokio_util::sync::DropGuard;

    use super::*;
    use crate::change_queue::{ChangeSender, inbox};
    use egress_core::leader_election::identity;

    /// A few times the timeout of a silent node.
    const PROOF: Duration = Duration::from_millis(1500);

    /// Accepts a few connections in its queue, then is as silent as a node without power.
    fn listener(address: &str) -> TcpListener {
        let socket = TcpSocket::new_v4().expect("a socket");
        socket.bind(address.parse().expect("a literal")).expect("a port");
        socket.listen(1).expect("listens")
    }

    struct ProbingStandby {
        nodes: ChangeSender,
        holder: watch::Sender<Option<String>>,
        silent_holder: watch::Receiver<Option<SilentHolder>>,
        _stop: DropGuard,
    }

    /// Probes a node with these addresses, whose controller leads.
    fn standby_for(addresses: &[IpAddr], port: u16) -> ProbingStandby {
        let ((nodes, taker), stop) = (inbox(), CancellationToken::new());
        let ((holder, is_holder), (silent, silent_holder)) =
            (watch::channel(Some(identity("node1", 1, 1))), watch::channel(None));
        tokio::spawn(run(port, taker, is_holder, silent, stop.clone()));
        let node = Node { name: "node1".into(), internal: addresses.to_vec(), ..Node::default() };
        nodes.put(Change::Nodes(Update::Replaced([("node1".to_owned(), Arc::new(node))].into())));
        ProbingStandby { nodes, holder, silent_holder, _stop: stop.drop_guard() }
    }

    impl ProbingStandby {
        async fn until_silent(&mut self) -> Option<SilentHolder> {
            let silent = self.silent_holder.wait_for(Option::is_some);
            tokio::time::timeout(PROOF, silent).await.ok()?.expect("it runs").clone()
        }
    }

    #[tokio::test]
    async fn a_node_is_silent_from_its_last_answer_until_the_next() {
        let begin = Instant::now();
        let listener = listener("127.1.31.1:0");
        let address = listener.local_addr().expect("an address");
        let mut standby = standby_for(&[address.ip()], address.port());
        let silent_holder = standby.until_silent().await.expect("silent");
        assert_eq!(silent_holder.holder, identity("node1", 1, 1));
        assert!(silent_holder.since > begin && silent_holder.since.elapsed() >= Timing::default().node_silence);
        tokio::spawn(async move {
            while let Ok(accepted) = listener.accept().await {
                drop(accepted);
            }
        });
        let answers = standby.silent_holder.wait_for(Option::is_none);
        assert!(tokio::time::timeout(PROOF, answers).await.is_ok(), "it answers again");
        assert_eq!(standby.until_silent().await, None, "it keeps answering");
    }

    #[tokio::test]
    async fn one_answering_address_is_enough_and_a_refusal_is_an_answer() {
        let full = listener("127.1.32.1:0");
        let address = full.local_addr().expect("an address");
        // The other has no listener.
        let mut standby = standby_for(&[address.ip(), [127, 1, 32, 2].into()], address.port());
        assert_eq!(standby.until_silent().await, None);
        drop(standby.nodes);
    }

    #[tokio::test]
    async fn a_node_that_never_answered_is_not_silent_and_a_new_leader_starts_afresh() {
        let full = listener("127.1.33.1:0");
        let address = full.local_addr().expect("an address");
        let mut queue = Vec::new();
        while let Ok(Ok(connection)) = timeout(Duration::from_millis(200), TcpStream::connect(address)).await {
            queue.push(connection);
        }
        assert_eq!(standby_for(&[address.ip()], address.port()).until_silent().await, None, "it may be a firewall");
        assert_eq!(standby_for(&[], address.port()).until_silent().await, None, "no address is known");

        let other = listener("127.1.33.2:0");
        let address = other.local_addr().expect("an address");
        let mut standby = standby_for(&[address.ip()], address.port());
        assert!(standby.until_silent().await.is_some());
        standby.holder.send_replace(Some(identity("node1", 2, 2)));
        let forgotten = standby.silent_holder.wait_for(Option::is_none);
        assert!(tokio::time::timeout(PROOF, forgotten).await.is_ok(), "a controller that has just begun to lead");
        assert_eq!(standby.until_silent().await, None);
    }
}
