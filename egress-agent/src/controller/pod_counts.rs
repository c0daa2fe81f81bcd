//! How many pods each object serves on each node, and which agents do not answer. While this controller leads, it
//! requests the counts from every node every few seconds, with or without the egress label.
//!
//! These requests only inform users: the status has the sum, and a condition names nodes whose pods have no running agent. Probes
//! ([`egress_core::node_health`]) go to egress nodes only and decide who holds addresses. A request here is a signed health check
//! that is no probe, so it confirms nothing.

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

use crate::controller::node_health::session::ProbeSettings;
use crate::health::signature::MessageAuth;
use crate::health::{SERVICE, pod_counts};
use egress_core::allocation::Nodes;
use egress_core::model::node::Node;
use egress_core::model::state::SelectedPods;
pub use egress_core::status::pod_counts::{PodCounts, WithoutPods};

const ROUND: Duration = Duration::from_secs(5);
const TIMEOUT: Duration = Duration::from_secs(2);
/// Concurrent requests.
const PARALLEL: usize = 64;
/// An agent does not answer for some seconds during an update.
const MISSING_AFTER: Duration = Duration::from_secs(30);
/// How long the first sum waits for agents that have not answered yet.
const COMPLETE_AFTER: Duration = Duration::from_secs(15);
/// A random value per request, so that an answer to an earlier request is not accepted.
const NONCE: &str = "egress-agent-nonce";

/// The answers since this controller leads. Pure.
struct PodCountTally {
    since: Instant,
    /// The last answer of each node, or the time of its first request.
    last_answer: BTreeMap<String, Instant>,
    pods: BTreeMap<String, SelectedPods>,
}

impl PodCountTally {
    fn new(now: Instant) -> Self {
        Self { since: now, last_answer: BTreeMap::new(), pods: BTreeMap::new() }
    }

    fn note(&mut self, node: &str, pods: SelectedPods, at: Instant) {
        self.last_answer.insert(node.to_owned(), at);
        self.pods.insert(node.to_owned(), pods);
    }

    fn counts(&mut self, nodes: &Nodes, now: Instant) -> PodCounts {
        self.last_answer.retain(|name, _| nodes.contains_key(name));
        self.pods.retain(|name, _| nodes.contains_key(name));
        let mut without_agent = BTreeSet::new();
        for (name, node) in nodes {
            let last_answer = self.last_answer.entry(name.clone()).or_insert(now);
            // The pods of a node that is not Ready are about to go too, and others report that. Its time starts again.
            if !node.ready {
                *last_answer = now;
            } else if now >= *last_answer + MISSING_AFTER {
                without_agent.insert(name.clone());
            }
        }
        let is_silent = |(name, node): (&String, &Arc<Node>)| node.ready && !self.pods.contains_key(name);
        let is_complete = now >= self.since + COMPLETE_AFTER || !nodes.iter().any(is_silent);
        PodCounts { pods: self.pods.clone(), without_agent, is_complete }
    }
}

/// Requests the counts of the published nodes, until stopped.
pub async fn run(
    settings: ProbeSettings,
    own_node: String,
    mut nodes: watch::Receiver<Option<Arc<Nodes>>>,
    counts: watch::Sender<PodCounts>,
    stop: CancellationToken,
) {
    let mut clients = Clients::new(settings, own_node);
    let mut tally: Option<PodCountTally> = None;
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
                // Leadership that begins is acted on at once; changes of nodes can wait.
                if nodes.borrow().is_some() == tally.is_some() {
                    continue;
                }
            }
        }
        let Some(now) = nodes.borrow_and_update().clone() else {
            (tally, clients.connections) = (None, BTreeMap::new());
            counts.send_if_modified(|known| std::mem::take(known) != PodCounts::default());
            continue;
        };
        let tally = tally.get_or_insert_with(|| PodCountTally::new(Instant::now()));
        let answers = tokio::select! {
            () = stop.cancelled() => return,
            answers = clients.request_all(&now) => answers,
        };
        for (node, pods) in answers {
            tally.note(&node, pods, Instant::now());
        }
        let new = tally.counts(&now, Instant::now());
        log_agents(&counts.borrow().without_agent, &new.without_agent);
        counts.send_if_modified(|known| std::mem::replace(known, new.clone()) != new);
    }
}

fn log_agents(known: &BTreeSet<String>, now: &BTreeSet<String>) {
    for node in now.difference(known) {
        let seconds = MISSING_AFTER.as_secs();
        warn!(%node, "the agent of a Ready node has not answered for {seconds} s: its pods have no running agent");
    }
    for node in known.difference(now) {
        info!(%node, "the agent of the node answers again");
    }
}

/// Connections that are kept between rounds.
struct Clients {
    settings: ProbeSettings,
    own_node: String,
    connections: BTreeMap<SocketAddr, HealthClient<Channel>>,
}

/// The outcome of the requests to one node.
#[derive(Default)]
struct PodCountReply {
    /// Addresses without an answer.
    unanswered: Vec<SocketAddr>,
    /// The connection that brought an answer, and the answer.
    answer: Option<(SocketAddr, HealthClient<Channel>, (String, SelectedPods))>,
}

impl Clients {
    fn new(settings: ProbeSettings, own_node: String) -> Self {
        Self { settings, own_node, connections: BTreeMap::new() }
    }

    async fn request_all(&mut self, nodes: &Nodes) -> Vec<(String, SelectedPods)> {
        let addresses = |node: &Node| node.health_addresses();
        let all: BTreeSet<IpAddr> = nodes.values().flat_map(|node| addresses(node)).collect();
        self.connections.retain(|at, _| all.contains(&at.ip()));
        let mut requests = Vec::new();
        for (name, node) in nodes {
            let mut paths = Vec::new();
            for address in addresses(node) {
                let at = SocketAddr::new(address, self.settings.port);
                paths.extend(self.connection(at).map(|client| (at, client)));
            }
            requests.push(self.request(name.clone(), paths));
        }
        let reply: Vec<PodCountReply> = futures::stream::iter(requests).buffer_unordered(PARALLEL).collect().await;
        let mut answers = Vec::new();
        for PodCountReply { unanswered, answer } in reply {
            unanswered.iter().for_each(|at| drop(self.connections.remove(at)));
            let Some((at, client, answer)) = answer else { continue };
            self.connections.insert(at, client);
            answers.push(answer);
        }
        answers
    }

    /// The kept connection, or a new one with the current certificates. A new one is kept after its first answer.
    fn connection(&self, at: SocketAddr) -> Option<HealthClient<Channel>> {
        if let Some(client) = self.connections.get(&at) {
            return Some(client.clone());
        }
        let endpoint = self.settings.dial.endpoint(at).ok()?.connect_timeout(TIMEOUT);
        // A broken connection is not made again by the library: it would use certificates that may have been replaced since.
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

    /// Tries one address after the other. Only an answer that the agent has signed counts.
    fn request(
        &self,
        node: String,
        paths: Vec<(SocketAddr, HealthClient<Channel>)>,
    ) -> impl Future<Output = PodCountReply> + use<> {
        let (key, own_node) = (self.settings.key.current(), self.own_node.clone());
        async move {
            let mut reply = PodCountReply::default();
            let Some(key) = key else { return reply };
            for (at, mut client) in paths {
                let mut request = Request::new(HealthCheckRequest { service: SERVICE.to_owned() });
                let nonce = format!("{:016x}", std::hash::BuildHasher::hash_one(&std::hash::RandomState::new(), &node));
                let Ok(nonce) = AsciiMetadataValue::try_from(nonce) else { continue };
                request.metadata_mut().insert(NONCE, nonce);
                let signature = key.sign_request(request.metadata_mut(), SERVICE, &own_node, &node);
                let Ok(Ok(answer)) = timeout(TIMEOUT, client.check(request)).await else {
                    reply.unanswered.push(at);
                    continue;
                };
                let metadata = answer.metadata();
                if key.has_signed_answer(metadata, answer.get_ref().status, &node, &signature)
                    && let Some(pods) = pod_counts::read(metadata)
                {
                    reply.answer = Some((at, client, (node, pods)));
                    break;
                }
            }
            reply
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use egress_core::model::state::{EgressId, EgressIds};

    fn both(id: u32) -> EgressIds {
        EgressIds::both(EgressId(id))
    }

    fn nodes(all: &[(&str, bool)]) -> Nodes {
        let node = |ready| Arc::new(Node { ready, ..Node::default() });
        all.iter().map(|(name, ready)| ((*name).to_owned(), node(*ready))).collect()
    }

    fn pods(counts: &[(u32, u32)]) -> SelectedPods {
        counts.iter().map(|(id, count)| (EgressId(*id), *count)).collect()
    }

    #[test]
    fn counts_of_all_agents_are_added_up() {
        let (begin, known) = (Instant::now(), nodes(&[("n1", true), ("n2", true), ("n3", false)]));
        let at = |seconds| begin + Duration::from_secs(seconds);
        let mut tally = PodCountTally::new(begin);
        tally.note("n1", pods(&[(1, 2), (2, 1)]), at(0));
        assert_eq!(tally.counts(&known, at(0)).selected(both(1)), None, "n2 has not answered");
        tally.note("n2", pods(&[(1, 3)]), at(5));
        let counts = tally.counts(&known, at(5));
        assert_eq!([1, 2, 3].map(|id| counts.selected(both(id))), [Some(5), Some(1), Some(0)]);
        tally.note("n2", pods(&[]), at(10));
        assert_eq!(tally.counts(&known, at(10)).selected(both(1)), Some(2));
        // The pods of a deleted node do not count.
        assert_eq!(tally.counts(&nodes(&[("n2", true)]), at(11)).selected(both(1)), Some(0));
        // A node whose agent never answers is not waited for without end.
        let mut tally = PodCountTally::new(begin);
        tally.note("n1", pods(&[(1, 2)]), at(14));
        assert_eq!(tally.counts(&known, at(14)).selected(both(1)), None);
        assert_eq!(tally.counts(&known, at(15)).selected(both(1)), Some(2));
    }

    #[test]
    fn a_pod_with_addresses_of_both_families_counts_once() {
        let (begin, known) = (Instant::now(), nodes(&[("n1", true), ("n2", true)]));
        let mut tally = PodCountTally::new(begin);
        tally.note("n1", pods(&[(1, 2), (2, 3)]), begin);
        tally.note("n2", pods(&[(1, 1)]), begin);
        let counts = tally.counts(&known, begin);
        let ids = EgressIds::new(Some(EgressId(1)), Some(EgressId(2)));
        assert_eq!((counts.selected(ids), counts.selected(EgressIds::NONE)), (Some(4), None));
    }

    #[test]
    fn an_agent_is_away_after_long_silence_on_a_ready_node() {
        let begin = Instant::now();
        let at = |seconds| begin + Duration::from_secs(seconds);
        let known = |ready| nodes(&[("n1", ready), ("n2", true)]);
        let without_agent = |counts: &PodCounts| {
            counts
                .pods_without_agent(both(1))
                .into_iter()
                .map(|(node, count)| (node.to_owned(), count))
                .collect::<Vec<_>>()
        };
        let mut tally = PodCountTally::new(begin);
        tally.note("n1", pods(&[(1, 2)]), at(0));
        for second in (0..120).step_by(5) {
            tally.note("n2", pods(&[(1, 1)]), at(second));
            let counts = tally.counts(&known(second < 60), at(second));
            let is_away = (30..60).contains(&second);
            assert_eq!(without_agent(&counts).is_empty(), !is_away, "{second}");
            // Its last answer counts.
            assert_eq!(counts.selected(both(1)), Some(3));
        }
        assert!(without_agent(&tally.counts(&known(true), at(120))).is_empty(), "its time has started again");
        assert_eq!(without_agent(&tally.counts(&known(true), at(150))), [("n1".to_owned(), 2), ("n2".to_owned(), 1)]);
        tally.note("n1", pods(&[]), at(151));
        assert_eq!(without_agent(&tally.counts(&known(true), at(151))), [("n2".to_owned(), 1)]);
    }
}
