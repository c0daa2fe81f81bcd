//! Probes one node by one address, continuously. A probe is a health check with a number ([`leader_contact`]); several
//! may be in flight, and an answer counts until the total timeout. After that the connection counts as broken.
//!
//! If an answer is late, TCP probes (connections that are closed at once) show whether the node is running. They go to
//! the management address and to the node's own addresses, which are reached by the overlay's network, not by the
//! CNI's; these are also probed every 30 s while the agent answers. Without health checks, a TCP probe of the discard
//! port is the probe.
//!
//! An answer counts only if the agent has signed it (`crate::health::signature`). An unsigned answer, and an error of
//! gRPC itself, only show that something else answers.

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::StreamExt;
use futures::stream::FuturesUnordered;
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval_at, timeout};
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Response, Status};
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;
use tonic_health::pb::{HealthCheckRequest, HealthCheckResponse};

use crate::controller::node_health::confirmation::Confirmation;
use crate::health::leader_contact::{self, Probe};
use crate::health::signature::MessageAuth;
use crate::health::signature::{Challenge, Signature};
use crate::health::tls::{Tls, cause};
use crate::health::{REASON, SERVICE, handover, unserved};
use crate::metrics::Meters;
use crate::metrics::meters::Probed;
use egress_core::model::ledger::Acknowledgements;
use egress_core::model::node::UnservedAddresses;
use egress_core::node_health::fitness::refusal;
use egress_core::node_health::liveness::{AgentAnswer, ProbeTiming, Signal};
use egress_core::ownership::suspicion::LeaseDurations;
use egress_kube::api_outage::ApiOutages;
use egress_kube::error_text::ErrorText;
use egress_kube::events::Events;
use egress_kube::health_key::{HealthKey, SharedKey};

/// Maximum probes in flight.
const MAX_PENDING: usize = 8;
/// Interval of TCP probes of the own addresses of a node that answers: whether it is reachable there must be known
/// before it falls silent.
const OWN_ADDRESS_INTERVAL: Duration = Duration::from_secs(30);
/// How long agents get the report that the API server was rolled back.
const ROLLBACK_REPORTED_FOR: Duration = Duration::from_secs(600);
/// RFC 863. A refusal by the kernel is an answer.
pub(super) const DISCARD: u16 = 9;

/// How to reach an agent's health service.
#[derive(Clone, Debug)]
pub enum Dial {
    /// Without encryption.
    Plaintext,
    Tls(Tls),
}

impl Dial {
    /// Called for each connection, so that it uses the current certificates. An error is one line for people.
    pub fn endpoint(&self, address: SocketAddr) -> Result<Endpoint, String> {
        let endpoint = match self {
            Self::Plaintext => Endpoint::try_from(format!("http://{address}")),
            Self::Tls(tls) => {
                Endpoint::try_from(format!("https://{address}")).and_then(|all| all.tls_config(tls.client()))
            }
        };
        endpoint.map_err(|error| ErrorText(&error).to_string())
    }
}

/// How nodes are probed.
#[derive(Clone)]
pub struct ProbeSettings {
    pub rules: ProbeTiming,
    /// Of the agents' health service; zero for the discard port.
    pub port: u16,
    pub dial: Dial,
    /// What probes and answers are signed with.
    pub key: SharedKey,
    /// Where answers are counted.
    pub meters: Meters,
    /// Where problems of a node's answers are reported.
    pub events: Option<Events>,
    /// Of the API server, whose rollback is reported to agents; `None` in tests.
    pub outages: Option<ApiOutages>,
}

impl ProbeSettings {
    /// How long nodes may emit egress IPs after the last answer of their agents.
    pub const fn lease_durations(&self) -> LeaseDurations {
        LeaseDurations { lease: self.rules.total, programs: self.rules.total.saturating_add(self.rules.grace) }
    }

    /// Whether agents answer, rather than the kernel at the discard port.
    pub const fn asks_agents(&self) -> bool {
        self.port != 0
    }
}

/// The addresses of one probe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ProbePath {
    /// The address of the node's management port.
    pub(super) address: IpAddr,
    /// The node's own addresses of the same family.
    pub(super) tcp_probe_addresses: Vec<IpAddr>,
}

/// A result of probing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Finding {
    Signal(Signal, Instant),
    /// The node was reached at its own address at this time.
    ReachedDirectly(Instant),
    /// The answer received at this time will be confirmed to the agent.
    Confirmed(Instant),
    /// With an answer: the agent's total timeout, and the greatest term that it knows.
    AgentReport {
        timeout: Option<Duration>,
        term: Option<u64>,
        /// The port of the overlay, if the agent answers probes through it.
        overlay: Option<u16>,
        /// The latest end of an endless lease that its programs obey.
        bounded: Option<u64>,
        /// A time at which its next hop had answered.
        next_hop: Option<Instant>,
    },
    /// With an answer: the released addresses. Sent again until it is accepted, then only when it changes.
    Released(Acknowledgements),
    /// With an answer: assigned addresses that the node does not serve. Sent like `Released`.
    Unserved(UnservedAddresses),
    /// Whether the last answer at this address came from something else than the agent. Sent like `Released`.
    UnexpectedResponder(IpAddr, bool),
    /// Why there is no answer.
    NoAnswer(String),
}

/// What the loop waits for.
enum Event {
    AgentAnswer {
        connection: usize,
        number: u64,
        sent: Instant,
        signed: Option<Box<Signed>>,
        outcome: Result<Response<HealthCheckResponse>, ProbeFailure>,
    },
    TcpProbe {
        at: IpAddr,
        is_reachable: bool,
    },
}

/// What a probe was signed with.
type Signed = (HealthKey, Signature);

enum ProbeFailure {
    Late,
    Status(Box<Status>),
    NoEndpoint(String),
}

impl ProbeFailure {
    /// The metric's label.
    fn kind(&self) -> Probed {
        match self {
            Self::Late => Probed::Late,
            Self::Status(status) if is_from_a_server(status.code()) => Probed::Refused,
            Self::Status(_) | Self::NoEndpoint(_) => Probed::Unreachable,
        }
    }
}

impl From<AgentAnswer> for Probed {
    fn from(answer: AgentAnswer) -> Self {
        match answer {
            // `OverlayLost` is a judgement about an agent that reports that it serves.
            AgentAnswer::Serving | AgentAnswer::OverlayLost => Self::Serving,
            AgentAnswer::NextHopLost => Self::NextHopLost,
            AgentAnswer::NotServing => Self::NotServing,
        }
    }
}

type EventFuture = Pin<Box<dyn Future<Output = Event> + Send>>;
type PendingEvents = FuturesUnordered<EventFuture>;

/// What a session knows of the leader and of the probed node.
#[derive(Clone, Debug)]
pub(super) struct SessionInputs {
    /// The leader's term.
    pub(super) term: u64,
    /// Delay of the first probe, so that not all nodes are probed at one moment.
    pub(super) offset: Duration,
    /// Which answers may be confirmed.
    pub(super) confirmation: Confirmation,
    /// The addresses that the agent has to release.
    pub(super) orders: watch::Receiver<Acknowledgements>,
    /// The probed node.
    pub(super) node: Arc<str>,
    /// The node of the leader.
    pub(super) own_node: Arc<str>,
}

/// Probes until it is dropped. `report` gets every finding, before the agent gets its confirmation, and returns whether it has
/// accepted it.
pub(super) async fn probe_node(
    settings: &ProbeSettings,
    path: &ProbePath,
    inputs: &SessionInputs,
    report: impl Fn(Finding) -> bool,
) {
    let rules = settings.rules;
    let begin = tokio::time::Instant::now() + inputs.offset;
    if !settings.asks_agents() {
        return probe_discard_port(settings, path, interval_at(begin, rules.interval), report).await;
    }
    // Every second tick is a probe, and every other one checks for its answer.
    let mut tick = interval_at(begin, rules.interval / 2);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut orders = inputs.orders.clone();
    let mut session = Session::new(settings, path, inputs);
    let (mut pending, mut tcp_probes) = (PendingEvents::new(), BTreeSet::new());
    let (mut is_probe, mut answered, mut last_tcp_probe) = (false, 0, None::<Instant>);
    loop {
        tokio::select! {
            _ = tick.tick() => {
                is_probe = !is_probe;
                let is_late = answered < session.number;
                if !is_probe && (is_late || last_tcp_probe.is_none_or(|last_tcp_probe| last_tcp_probe.elapsed() >= OWN_ADDRESS_INTERVAL)) {
                    last_tcp_probe = Some(Instant::now());
                    // At most one TCP probe per address is in flight, so a busy node does not get more of them.
                    for address in path.tcp_probe_addresses.iter().copied().chain(is_late.then_some(path.address)) {
                        if tcp_probes.insert(address) {
                            pending.push(tcp_probe(SocketAddr::new(address, settings.port), rules.interval * 2));
                        }
                    }
                } else if is_probe && pending.len() < MAX_PENDING + tcp_probes.len() {
                    session.confirm_answers(inputs, &report);
                    pending.push(session.next_probe(&orders.borrow()));
                }
            }
            // A probe at once, so that the agent starts sooner.
            Ok(()) = orders.changed() => {
                if pending.len() < MAX_PENDING + tcp_probes.len() {
                    pending.push(session.next_probe(&orders.borrow()));
                }
            }
            Some(event) = pending.next() => match event {
                Event::AgentAnswer { signed, outcome: Ok(answer), .. } if !session.is_signed_by_agent(&answer, signed.as_deref()) => {
                    settings.meters.probed(Probed::Unsigned, None);
                    settings.key.suspect();
                    report(Finding::NoAnswer(match &signed {
                        Some(_) => format!("something else answers at {}, or an agent without this one's key", session.address),
                        None => "this controller does not know the agents' key yet, and trusts no answer".to_owned(),
                    }));
                    if signed.is_some() {
                        session.set_unexpected(true, &report);
                    }
                    // If the agent is back, another connection finds it.
                    session.disconnect();
                }
                Event::AgentAnswer { number, sent, outcome: Ok(answer), .. } => {
                    let now = Instant::now();
                    answered = answered.max(number);
                    session.unconfirmed.push((number, now));
                    session.confirm_answers(inputs, &report);
                    let metadata = answer.metadata();
                    session.set_unexpected(false, &report);
                    // First, because the queue may be nearly full: all other findings come with each answer.
                    let released = handover::released(metadata);
                    if number == answered && session.released != released && report(Finding::Released(released.clone())) {
                        session.released = released;
                    }
                    let unserved = unserved::read(metadata);
                    if number == answered && session.unserved != unserved && report(Finding::Unserved(unserved.clone())) {
                        session.unserved = unserved;
                    }
                    let (timeout, term) = (leader_contact::timeout(metadata), leader_contact::term(metadata));
                    let (overlay, bounded) = (leader_contact::overlay_port(metadata), leader_contact::bounded(metadata));
                    // Its age is that of a moment after the request was sent.
                    let next_hop = leader_contact::next_hop_age(metadata).and_then(|age| sent.checked_sub(age));
                    report(Finding::AgentReport { timeout, term, overlay, bounded, next_hop });
                    let serves = answer.get_ref().status == i32::from(ServingStatus::Serving);
                    let reason = metadata.get(REASON).and_then(|reason| reason.to_str().ok());
                    let answer_kind = if serves { AgentAnswer::Serving } else { refusal(reason) };
                    settings.meters.probed(answer_kind.into(), Some(now.duration_since(sent)));
                    report(Finding::Signal(Signal::AgentAnswer(answer_kind), now));
                    // The first probe that counts is sent at once.
                    if session.take_challenge(Challenge::read(metadata)) && pending.len() < MAX_PENDING + tcp_probes.len() {
                        pending.push(session.next_probe(&orders.borrow()));
                    }
                }
                // A probe of a connection that has broken since.
                Event::AgentAnswer { connection, .. } if connection != session.connection => {}
                Event::AgentAnswer { outcome: Err(failure), .. } => {
                    session.disconnect();
                    settings.meters.probed(failure.kind(), None);
                    let why = match failure {
                        ProbeFailure::Late => format!("no answer within {} ms", rules.total.as_millis()),
                        ProbeFailure::NoEndpoint(why) => why,
                        ProbeFailure::Status(status) => {
                            if is_from_a_server(status.code()) {
                                session.set_unexpected(true, &report);
                            }
                            cause::find(&*status).unwrap_or_else(|| last_cause(&status))
                        }
                    };
                    report(Finding::NoAnswer(why));
                }
                Event::TcpProbe { at, is_reachable } => {
                    tcp_probes.remove(&at);
                    if is_reachable {
                        let now = Instant::now();
                        report(Finding::Signal(Signal::Kernel, now));
                        if at != path.address {
                            report(Finding::ReachedDirectly(now));
                        }
                    }
                }
            }
        }
    }
}

/// The last cause in the chain: the others name libraries.
fn last_cause(status: &Status) -> String {
    let mut last = std::error::Error::source(status);
    while let Some(next) = last.and_then(std::error::Error::source) {
        last = Some(next);
    }
    last.map_or_else(|| format!("{}: {}", status.code(), status.message()), ToString::to_string)
}

/// Codes that only a server sends, which is not an agent then. The others also arise on this side.
fn is_from_a_server(code: Code) -> bool {
    matches!(code, Code::NotFound | Code::Unimplemented | Code::PermissionDenied | Code::Unauthenticated)
}

async fn probe_discard_port(
    settings: &ProbeSettings,
    path: &ProbePath,
    mut tick: tokio::time::Interval,
    report: impl Fn(Finding) -> bool,
) {
    let rules = settings.rules;
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut pending = FuturesUnordered::new();
    loop {
        tokio::select! {
            _ = tick.tick() => {
                for (address, signal) in std::iter::once((path.address, Signal::AgentAnswer(AgentAnswer::Serving)))
                    .chain(path.tcp_probe_addresses.iter().map(|address| (*address, Signal::Kernel)))
                {
                    pending.push(async move {
                        let begun = Instant::now();
                        (is_reachable(SocketAddr::new(address, DISCARD), rules.total).await, signal, begun.elapsed())
                    });
                }
            }
            Some((is_reachable, signal, took)) = pending.next() => {
                // The others only show by which address the node is reachable.
                if let Signal::AgentAnswer(answer) = signal {
                    let (what, took) = if is_reachable { (answer.into(), Some(took)) } else { (Probed::Late, None) };
                    settings.meters.probed(what, took);
                }
                if is_reachable {
                    let now = Instant::now();
                    report(Finding::Signal(signal, now));
                    if signal == Signal::Kernel {
                        report(Finding::ReachedDirectly(now));
                    }
                }
            }
        }
    }
}

fn tcp_probe(address: SocketAddr, probe_timeout: Duration) -> EventFuture {
    Box::pin(
        async move { Event::TcpProbe { at: address.ip(), is_reachable: is_reachable(address, probe_timeout).await } },
    )
}

/// Whether the node's kernel accepts or refuses a connection.
pub(super) async fn is_reachable(address: SocketAddr, probe_timeout: Duration) -> bool {
    match timeout(probe_timeout, TcpStream::connect(address)).await {
        Ok(Ok(_)) => true,
        // All other errors are of this node, or of a router without a route to the other.
        Ok(Err(error)) => matches!(error.kind(), ErrorKind::ConnectionRefused | ErrorKind::ConnectionReset),
        Err(_) => false,
    }
}

/// The numbered probes of one session, and their connections.
struct Session<'a> {
    settings: &'a ProbeSettings,
    address: SocketAddr,
    client: Option<HealthClient<Channel>>,
    /// Number of the current connection.
    connection: usize,
    id: u64,
    number: u64,
    /// Unconfirmed answers: the number of the probe, and the time of its answer.
    unconfirmed: Vec<(u64, Instant)>,
    confirmed: u64,
    /// The last released addresses that were accepted.
    released: Acknowledgements,
    /// The last unserved addresses that were accepted.
    unserved: UnservedAddresses,
    term: u64,
    node: Arc<str>,
    own_node: Arc<str>,
    /// The challenge that the next probe has to contain.
    challenge: Option<Challenge>,
    is_unexpected: bool,
}

impl<'a> Session<'a> {
    fn new(settings: &'a ProbeSettings, path: &ProbePath, inputs: &SessionInputs) -> Self {
        let address = SocketAddr::new(path.address, settings.port);
        // Random, so that probes of another prober are not confused with these.
        let id = std::hash::BuildHasher::hash_one(&std::hash::RandomState::new(), address);
        Self {
            settings,
            address,
            client: None,
            connection: 0,
            id,
            number: 0,
            unconfirmed: Vec::new(),
            confirmed: 0,
            released: Acknowledgements::new(),
            unserved: UnservedAddresses::new(),
            term: inputs.term,
            node: inputs.node.clone(),
            own_node: inputs.own_node.clone(),
            challenge: None,
            is_unexpected: false,
        }
    }

    /// Whether the agent has signed the answer.
    fn is_signed_by_agent(&self, answer: &Response<HealthCheckResponse>, signed: Option<&Signed>) -> bool {
        signed.is_some_and(|(key, request)| {
            key.has_signed_answer(answer.metadata(), answer.get_ref().status, &self.node, request)
        })
    }

    fn set_unexpected(&mut self, is_unexpected: bool, report: &impl Fn(Finding) -> bool) {
        if self.is_unexpected != is_unexpected && report(Finding::UnexpectedResponder(self.address.ip(), is_unexpected))
        {
            self.is_unexpected = is_unexpected;
        }
    }

    /// Whether no earlier probe can have counted for the agent's process that issued it.
    fn take_challenge(&mut self, given: Option<Challenge>) -> bool {
        let Some(given) = given else { return false };
        let known = self.challenge;
        if known.is_none_or(|known| given.is_newer_than(&known)) {
            self.challenge = Some(given);
        }
        known.is_none_or(|known| !known.is_of_the_process_of(&given))
    }

    /// Determines which answer the next probe confirms, and reports it first.
    fn confirm_answers(&mut self, inputs: &SessionInputs, report: &impl Fn(Finding) -> bool) {
        let limit = inputs.confirmation.limit(Instant::now());
        let Some(limit) = limit else { return self.unconfirmed.clear() };
        let confirmed = self.unconfirmed.extract_if(.., |(_, at)| *at <= limit);
        for (number, at) in confirmed {
            report(Finding::Confirmed(at));
            self.confirmed = self.confirmed.max(number);
        }
        // If confirmation is off for long, only the latest answers matter.
        self.unconfirmed.drain(..self.unconfirmed.len().saturating_sub(MAX_PENDING));
    }

    /// Drops the connection.
    fn disconnect(&mut self) {
        self.client = None;
        self.connection += 1;
    }

    fn client(&mut self) -> Result<HealthClient<Channel>, String> {
        if let Some(client) = &self.client {
            return Ok(client.clone());
        }
        let endpoint =
            self.settings.dial.endpoint(self.address)?.connect_timeout(self.settings.rules.total).tcp_nodelay(true);
        Ok(self.client.insert(HealthClient::new(endpoint.connect_lazy())).clone())
    }

    /// The next probe.
    fn next_probe(&mut self, orders: &Acknowledgements) -> EventFuture {
        self.number += 1;
        let (connection, number, probe_timeout) = (self.connection, self.number, self.settings.rules.total);
        let mut request = Request::new(HealthCheckRequest { service: SERVICE.to_owned() });
        let probe = Probe { session: self.id, number, confirmed: self.confirmed, term: self.term };
        probe.write(request.metadata_mut());
        leader_contact::set_timeout(request.metadata_mut(), probe_timeout);
        handover::set_orders(request.metadata_mut(), orders);
        let rollback_age = self.settings.outages.as_ref().and_then(ApiOutages::rolled_back_at).map(|at| at.elapsed());
        if let Some(age) = rollback_age.filter(|age| *age < ROLLBACK_REPORTED_FOR) {
            leader_contact::set_returned_age(request.metadata_mut(), age);
        }
        let sent = Instant::now();
        self.challenge.iter().for_each(|challenge| challenge.write(request.metadata_mut()));
        let signed = self.settings.key.current().map(|key| {
            let signature = key.sign_request(request.metadata_mut(), SERVICE, &self.own_node, &self.node);
            Box::new((key, signature))
        });
        if signed.is_none() {
            // Without a key, send a plain health check.
            request.metadata_mut().clear();
        }
        let client = self.client();
        Box::pin(async move {
            let outcome = match client {
                Ok(mut client) => match timeout(probe_timeout, client.check(request)).await {
                    Ok(answer) => answer.map_err(|status| ProbeFailure::Status(Box::new(status))),
                    Err(_) => Err(ProbeFailure::Late),
                },
                Err(why) => Err(ProbeFailure::NoEndpoint(why)),
            };
            Event::AgentAnswer { connection, number, sent, signed, outcome }
        })
    }
}

#[cfg(test)]
mod tests;
