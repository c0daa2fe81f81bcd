//! How many pods each object serves on each node, and which agents are away: asked of every node, with or without the label,
//! every few seconds while this controller leads.
//!
//! Probes ([`egress_core::node_health`]) go to egress nodes alone and decide who holds addresses. This only tells people: the status has the
//! sum, and a condition names the nodes whose pods nobody looks after. A request is a health check that is signed and is no
//! probe, so that it confirms nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use futures::StreamExt;
use http::Uri;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval, timeout};
use tokio_util::sync::CancellationToken;
use tonic::Request;
use tonic::metadata::AsciiMetadataValue;
use tonic::transport::Channel;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;
use tracing::{info, warn};

use crate::controller::node_health::session::Manner;
use crate::health::signature::MessageAuth;
use crate::health::{SERVICE, pod_counts};
use egress_core::allocation::Nodes;
use egress_core::model::state::SelectedPods;
use egress_core::model::view::Node;
pub use egress_core::status::pod_counts::PodCounts;

const ROUND: Duration = Duration::from_secs(5);
const PATIENCE: Duration = Duration::from_secs(2);
/// Requests at a time.
const PARALLEL: usize = 64;
/// An agent that is updated is away for some seconds.
const AWAY_AFTER: Duration = Duration::from_secs(30);
/// How long the first sum waits for agents that have not answered yet.
const COMPLETE_AFTER: Duration = Duration::from_secs(15);
/// Of a request, random: an answer to an earlier one is none to this.
const NONCE: &str = "egress-agent-nonce";

/// What has been heard since this controller leads. Pure.
struct Tally {
    since: Instant,
    /// When each node was first to be asked, or answered last.
    heard: BTreeMap<String, Instant>,
    pods: BTreeMap<String, SelectedPods>,
}

impl Tally {
    fn begin(now: Instant) -> Self {
        Self { since: now, heard: BTreeMap::new(), pods: BTreeMap::new() }
    }

    fn note(&mut self, node: &str, pods: SelectedPods, at: Instant) {
        self.heard.insert(node.to_owned(), at);
        self.pods.insert(node.to_owned(), pods);
    }

    fn census(&mut self, nodes: &Nodes, now: Instant) -> PodCounts {
        self.heard.retain(|name, _| nodes.contains_key(name));
        self.pods.retain(|name, _| nodes.contains_key(name));
        let mut away = BTreeSet::new();
        for (name, node) in nodes {
            let heard = self.heard.entry(name.clone()).or_insert(now);
            // Of a node that is not Ready its pods are gone too, or about to be, and others say so. Its time begins anew.
            if !node.ready {
                *heard = now;
            } else if now >= *heard + AWAY_AFTER {
                away.insert(name.clone());
            }
        }
        let is_silent = |(name, node): (&String, &Arc<Node>)| node.ready && !self.pods.contains_key(name);
        let is_complete = now >= self.since + COMPLETE_AFTER || !nodes.iter().any(is_silent);
        PodCounts { pods: self.pods.clone(), away, is_complete }
    }
}

/// Asks while there are nodes to be asked, until told to stop.
pub async fn run(
    manner: Manner,
    own_node: String,
    mut nodes: watch::Receiver<Option<Arc<Nodes>>>,
    census: watch::Sender<PodCounts>,
    stop: CancellationToken,
) {
    let mut clients = Clients::new(manner, own_node);
    let mut tally: Option<Tally> = None;
    let mut round = interval(ROUND);
    round.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            _ = round.tick() => {}
            changed = nodes.changed() => {
                if changed.is_err() {
                    return;
                }
                // A duty that begins is taken up at once; nodes that come and go can wait.
                if nodes.borrow().is_some() == tally.is_some() {
                    continue;
                }
            }
        }
        let Some(now) = nodes.borrow_and_update().clone() else {
            (tally, clients.kept) = (None, BTreeMap::new());
            census.send_if_modified(|known| std::mem::take(known) != PodCounts::default());
            continue;
        };
        let tally = tally.get_or_insert_with(|| Tally::begin(Instant::now()));
        let answers = tokio::select! {
            () = stop.cancelled() => return,
            answers = clients.ask_all(&now) => answers,
        };
        for (node, pods) in answers {
            tally.note(&node, pods, Instant::now());
        }
        let new = tally.census(&now, Instant::now());
        tell_of_agents(&census.borrow().away, &new.away);
        census.send_if_modified(|known| std::mem::replace(known, new.clone()) != new);
    }
}

fn tell_of_agents(known: &BTreeSet<String>, now: &BTreeSet<String>) {
    for node in now.difference(known) {
        let seconds = AWAY_AFTER.as_secs();
        warn!(%node, "the agent of a Ready node has not answered for {seconds} s: nobody looks after its pods");
    }
    for node in known.difference(now) {
        info!(%node, "the agent of the node answers again");
    }
}

/// Connections that are kept between rounds.
struct Clients {
    manner: Manner,
    own_node: String,
    kept: BTreeMap<SocketAddr, HealthClient<Channel>>,
}

/// What came of asking one node.
#[derive(Default)]
struct Asked {
    /// Where nothing came.
    silent: Vec<SocketAddr>,
    /// Who has answered by which connection.
    answer: Option<(SocketAddr, HealthClient<Channel>, (String, SelectedPods))>,
}

impl Clients {
    fn new(manner: Manner, own_node: String) -> Self {
        Self { manner, own_node, kept: BTreeMap::new() }
    }

    async fn ask_all(&mut self, nodes: &Nodes) -> Vec<(String, SelectedPods)> {
        let addresses = |node: &Node| node.health_addresses();
        let all: BTreeSet<IpAddr> = nodes.values().flat_map(|node| addresses(node)).collect();
        self.kept.retain(|at, _| all.contains(&at.ip()));
        let mut questions = Vec::new();
        for (name, node) in nodes {
            let mut roads = Vec::new();
            for address in addresses(node) {
                let at = SocketAddr::new(address, self.manner.port);
                roads.extend(self.client(at).map(|client| (at, client)));
            }
            questions.push(self.ask(name.clone(), roads));
        }
        let asked: Vec<Asked> = futures::stream::iter(questions).buffer_unordered(PARALLEL).collect().await;
        let mut answers = Vec::new();
        for Asked { silent, answer } in asked {
            silent.iter().for_each(|at| drop(self.kept.remove(at)));
            let Some((at, client, said)) = answer else { continue };
            self.kept.insert(at, client);
            answers.push(said);
        }
        answers
    }

    /// The kept one, or one that connects with the certificates of now. It is kept when it has brought an answer.
    fn client(&self, at: SocketAddr) -> Option<HealthClient<Channel>> {
        if let Some(client) = self.kept.get(&at) {
            return Some(client.clone());
        }
        let endpoint = self.manner.dial.endpoint(at).ok()?.connect_timeout(PATIENCE);
        // A connection that breaks is not made anew by itself: it would begin with the certificates of then, which may have been
        // replaced since.
        let is_made = AtomicBool::new(false);
        let connector = tower::service_fn(move |_: Uri| {
            let is_first = !is_made.swap(true, Ordering::Relaxed);
            async move {
                match is_first {
                    true => TcpStream::connect(at).await.map(TokioIo::new),
                    false => Err(io::ErrorKind::NotConnected.into()),
                }
            }
        });
        Some(HealthClient::new(endpoint.connect_with_connector_lazy(connector)))
    }

    /// By one address after the other. Only an answer that the agent has signed counts.
    fn ask(
        &self,
        node: String,
        roads: Vec<(SocketAddr, HealthClient<Channel>)>,
    ) -> impl Future<Output = Asked> + use<> {
        let (key, own_node) = (self.manner.key.now(), self.own_node.clone());
        async move {
            let mut asked = Asked::default();
            let Some(key) = key else { return asked };
            for (at, mut client) in roads {
                let mut request = Request::new(HealthCheckRequest { service: SERVICE.to_owned() });
                let nonce = format!("{:016x}", std::hash::BuildHasher::hash_one(&std::hash::RandomState::new(), &node));
                let Ok(nonce) = AsciiMetadataValue::try_from(nonce) else { continue };
                request.metadata_mut().insert(NONCE, nonce);
                let signature = key.sign_request(request.metadata_mut(), SERVICE, &own_node, &node);
                let Ok(Ok(answer)) = timeout(PATIENCE, client.check(request)).await else {
                    asked.silent.push(at);
                    continue;
                };
                let metadata = answer.metadata();
                if key.has_signed_answer(metadata, answer.get_ref().status, &node, &signature)
                    && let Some(pods) = pod_counts::read(metadata)
                {
                    asked.answer = Some((at, client, (node, pods)));
                    break;
                }
            }
            asked
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use egress_core::model::state::EgressId;

    fn nodes(all: &[(&str, bool)]) -> Nodes {
        let node = |ready| Arc::new(Node { ready, ..Node::default() });
        all.iter().map(|(name, ready)| ((*name).to_owned(), node(*ready))).collect()
    }

    fn pods(counts: &[(u32, u32)]) -> SelectedPods {
        counts.iter().map(|(id, count)| (EgressId(*id), *count)).collect()
    }

    #[test]
    fn what_all_agents_say_is_added_up() {
        let (begin, known) = (Instant::now(), nodes(&[("n1", true), ("n2", true), ("n3", false)]));
        let at = |seconds| begin + Duration::from_secs(seconds);
        let mut tally = Tally::begin(begin);
        tally.note("n1", pods(&[(1, 2), (2, 1)]), at(0));
        assert_eq!(tally.census(&known, at(0)).selected(EgressId(1)), None, "n2 has not been heard");
        tally.note("n2", pods(&[(1, 3)]), at(5));
        let census = tally.census(&known, at(5));
        assert_eq!([1, 2, 3].map(|id| census.selected(EgressId(id))), [Some(5), Some(1), Some(0)]);
        tally.note("n2", pods(&[]), at(10));
        assert_eq!(tally.census(&known, at(10)).selected(EgressId(1)), Some(2));
        // A node that goes takes its pods along.
        assert_eq!(tally.census(&nodes(&[("n2", true)]), at(11)).selected(EgressId(1)), Some(0));
        // One whose agent was never there is not waited for without end.
        let mut tally = Tally::begin(begin);
        tally.note("n1", pods(&[(1, 2)]), at(14));
        assert_eq!(tally.census(&known, at(14)).selected(EgressId(1)), None);
        assert_eq!(tally.census(&known, at(15)).selected(EgressId(1)), Some(2));
    }

    #[test]
    fn an_agent_is_away_that_is_silent_for_long_on_a_node_that_is_ready() {
        let begin = Instant::now();
        let at = |seconds| begin + Duration::from_secs(seconds);
        let known = |ready| nodes(&[("n1", ready), ("n2", true)]);
        let alone = |census: &PodCounts| {
            census.left_alone(EgressId(1)).map(|(node, count)| (node.to_owned(), count)).collect::<Vec<_>>()
        };
        let mut tally = Tally::begin(begin);
        tally.note("n1", pods(&[(1, 2)]), at(0));
        for second in (0..120).step_by(5) {
            tally.note("n2", pods(&[(1, 1)]), at(second));
            let census = tally.census(&known(second < 60), at(second));
            let is_away = (30..60).contains(&second);
            assert_eq!(alone(&census).is_empty(), !is_away, "{second}");
            // What it said last stands.
            assert_eq!(census.selected(EgressId(1)), Some(3));
        }
        assert!(alone(&tally.census(&known(true), at(120))).is_empty(), "its time has begun anew");
        assert_eq!(alone(&tally.census(&known(true), at(150))), [("n1".to_owned(), 2), ("n2".to_owned(), 1)]);
        tally.note("n1", pods(&[]), at(151));
        assert_eq!(alone(&tally.census(&known(true), at(151))), [("n2".to_owned(), 1)]);
    }
}
