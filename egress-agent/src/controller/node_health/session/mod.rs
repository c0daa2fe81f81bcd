//! Asking one node by one of its addresses, on and on: probes over a session that is kept, and knocks where no answer comes.
//!
//! A probe is a health check with a number ([`touch`]). Several may be on their way: a slow answer is an answer, until the
//! total timeout; then the session counts as broken and another is begun. Where an answer is late, knocks tell whether the
//! node is there: connections that are closed as soon as they are accepted or refused. They go to the management address,
//! and to the node's own addresses too: these are reached by the roads that the overlay takes, whatever becomes of the
//! CNI's. There they also go now and then where all is well, to know that somebody answers.
//!
//! An answer counts where the agent has signed it (`crate::health::signature`). One that is not signed is no sign of anything but of
//! something that answers there; nor is a word of gRPC's own, which nobody signs.
//!
//! Where agents serve no health checks, a knock at the discard port is all there is, and a node that is there counts as
//! serving.

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
use egress_core::node_health::liveness::{AgentAnswer, Rules, Signal};
use egress_core::ownership::suspicion::Terms;
use egress_kube::api_outage::ApiOutages;
use egress_kube::error_text::ErrorText;
use egress_kube::events::Events;
use egress_kube::health_key::{Key, SharedKey};

/// Probes on their way at a time.
const MOST_PENDING: usize = 8;
/// Between two knocks at the own addresses of a node that answers: whether it can be reached there must be known before it
/// falls silent.
const TRY: Duration = Duration::from_secs(30);
/// How long agents are told that the API server has gone back.
const TOLD_OF_RETURN: Duration = Duration::from_secs(600);
/// RFC 863. Nobody listens there, which is an answer.
pub(super) const DISCARD: u16 = 9;

/// How to reach an agent's health service.
#[derive(Clone, Debug)]
pub enum Dial {
    /// Without encryption.
    Plaintext,
    Tls(Tls),
}

impl Dial {
    /// Asked anew for each connection: it has the certificates that are in use when it is made. An error is one line for people.
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

/// How nodes are asked.
#[derive(Clone)]
pub struct Manner {
    pub rules: Rules,
    /// Of the agents' health service; zero for the discard port.
    pub port: u16,
    pub dial: Dial,
    /// What probes and answers are signed with.
    pub key: SharedKey,
    /// Where answers are counted.
    pub meters: Meters,
    /// Where is told what is wrong with a node's answers.
    pub events: Option<Events>,
    /// Of the API server, whose going back agents are told of; `None` in tests.
    pub outages: Option<ApiOutages>,
}

impl Manner {
    /// How long nodes may emit egress IPs after their agents were heard last.
    pub const fn terms(&self) -> Terms {
        Terms { lease: self.rules.total, programs: self.rules.total.saturating_add(self.rules.grace) }
    }

    /// Whether agents answer. At the discard port it is the kernel that does.
    pub const fn asks_agents(&self) -> bool {
        self.port != 0
    }
}

/// Where a node is asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Road {
    /// Of its management port.
    pub(super) address: IpAddr,
    /// The node's own addresses of the same family.
    pub(super) knock_at: Vec<IpAddr>,
}

/// What came of asking.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Finding {
    Signal(Signal, Instant),
    /// The node was reached at its own address then.
    Direct(Instant),
    /// The agent will be told that its answer was received then.
    Heard(Instant),
    /// Beside an answer: the total timeout that the agent goes by, and the greatest term that it has heard of.
    Said {
        timeout: Option<Duration>,
        term: Option<u64>,
        /// The overlay's port, where it answers questions through it.
        overlay: Option<u16>,
        /// The latest end of an endless lease that its programs have obeyed.
        bounded: Option<u64>,
        /// When its next hop had surely answered.
        next_hop: Option<Instant>,
    },
    /// Beside an answer: what the agent has let go of. Said again until it is taken, then not while it stays the same.
    Released(Acknowledgements),
    /// Beside an answer: what the node has been assigned and does not serve. Likewise.
    Unserved(UnservedAddresses),
    /// Whether something else than the agent answered at this address last. As above.
    Strange(IpAddr, bool),
    /// Why there is no answer.
    Trouble(String),
}

/// Something that was waited for.
enum Came {
    AgentAnswer {
        connection: usize,
        number: u64,
        sent: Instant,
        signed: Option<Box<Signed>>,
        outcome: Result<Response<HealthCheckResponse>, Failure>,
    },
    Knock {
        at: IpAddr,
        is_there: bool,
    },
}

/// What a probe was signed with.
type Signed = (Key, Signature);

enum Failure {
    Late,
    Status(Box<Status>),
    NoDial(String),
}

impl Failure {
    /// As it is counted.
    fn kind(&self) -> Probed {
        match self {
            Self::Late => Probed::Late,
            Self::Status(status) if is_the_servers(status.code()) => Probed::Refused,
            Self::Status(_) | Self::NoDial(_) => Probed::Unreachable,
        }
    }
}

impl From<AgentAnswer> for Probed {
    fn from(answer: AgentAnswer) -> Self {
        match answer {
            // The judge's word of one that says so.
            AgentAnswer::Serving | AgentAnswer::OverlayLost => Self::Serving,
            AgentAnswer::NextHopLost => Self::NextHopLost,
            AgentAnswer::NotServing => Self::NotServing,
        }
    }
}

type Coming = Pin<Box<dyn Future<Output = Came> + Send>>;
type Pending = FuturesUnordered<Coming>;

/// For whom one asks.
#[derive(Clone, Debug)]
pub(super) struct Asker {
    /// Of the leader.
    pub(super) term: u64,
    /// Until the first probe, so that not all nodes are asked in one moment.
    pub(super) offset: Duration,
    /// Which answers the agent is told of.
    pub(super) vouch: Confirmation,
    /// What the agent is to let go of.
    pub(super) orders: watch::Receiver<Acknowledgements>,
    /// The node that is asked.
    pub(super) node: Arc<str>,
    /// The node of the leader.
    pub(super) own_node: Arc<str>,
}

/// Asks until it is dropped. `tell` is told of everything, and before the agent is; it says whether it has taken it.
pub(super) async fn ask(manner: &Manner, road: &Road, asker: &Asker, tell: impl Fn(Finding) -> bool) {
    let rules = manner.rules;
    let begin = tokio::time::Instant::now() + asker.offset;
    if !manner.asks_agents() {
        return discard(manner, road, interval_at(begin, rules.interval), tell).await;
    }
    // Probes and, half-way between two, a look whether there is an answer.
    let mut beat = interval_at(begin, rules.interval / 2);
    beat.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut orders = asker.orders.clone();
    let mut line = Line::new(manner, road, asker);
    let (mut pending, mut knocks) = (Pending::new(), BTreeSet::new());
    let (mut is_probe, mut answered, mut tried) = (false, 0, None::<Instant>);
    loop {
        tokio::select! {
            _ = beat.tick() => {
                is_probe = !is_probe;
                let is_late = answered < line.number;
                if !is_probe && (is_late || tried.is_none_or(|tried| tried.elapsed() >= TRY)) {
                    tried = Some(Instant::now());
                    // One that is busy is not asked the more for it: where a knock is on its way there is no other.
                    for address in road.knock_at.iter().copied().chain(is_late.then_some(road.address)) {
                        if knocks.insert(address) {
                            pending.push(knock(SocketAddr::new(address, manner.port), rules.interval * 2));
                        }
                    }
                } else if is_probe && pending.len() < MOST_PENDING + knocks.len() {
                    line.confirm(asker, &tell);
                    pending.push(line.probe(&orders.borrow()));
                }
            }
            // What the agent has to do begins sooner.
            Ok(()) = orders.changed() => {
                if pending.len() < MOST_PENDING + knocks.len() {
                    pending.push(line.probe(&orders.borrow()));
                }
            }
            Some(came) = pending.next() => match came {
                Came::AgentAnswer { signed, outcome: Ok(answer), .. } if !line.believes(&answer, signed.as_deref()) => {
                    manner.meters.probed(Probed::Unsigned, None);
                    manner.key.doubt();
                    tell(Finding::Trouble(match &signed {
                        Some(_) => format!("something else answers at {}, or an agent without this one's key", line.address),
                        None => "this agent does not know the agents' key yet, and believes nobody".to_owned(),
                    }));
                    if signed.is_some() {
                        line.set_strange(true, &tell);
                    }
                    // Where the agent is back another connection finds it.
                    line.hang_up();
                }
                Came::AgentAnswer { number, sent, outcome: Ok(answer), .. } => {
                    let now = Instant::now();
                    answered = answered.max(number);
                    line.received.push((number, now));
                    line.confirm(asker, &tell);
                    let metadata = answer.metadata();
                    line.set_strange(false, &tell);
                    // First, where there is room for little: all else comes with each answer.
                    let released = handover::released(metadata);
                    if number == answered && line.released != released && tell(Finding::Released(released.clone())) {
                        line.released = released;
                    }
                    let unserved = unserved::read(metadata);
                    if number == answered && line.unserved != unserved && tell(Finding::Unserved(unserved.clone())) {
                        line.unserved = unserved;
                    }
                    let (timeout, term) = (leader_contact::timeout(metadata), leader_contact::term(metadata));
                    let (overlay, bounded) = (leader_contact::overlay_port(metadata), leader_contact::bounded(metadata));
                    // Its age is that of a moment after the request was sent.
                    let next_hop = leader_contact::next_hop_age(metadata).and_then(|age| sent.checked_sub(age));
                    tell(Finding::Said { timeout, term, overlay, bounded, next_hop });
                    let serves = answer.get_ref().status == i32::from(ServingStatus::Serving);
                    let reason = metadata.get(REASON).and_then(|reason| reason.to_str().ok());
                    let said = if serves { AgentAnswer::Serving } else { refusal(reason) };
                    manner.meters.probed(said.into(), Some(now.duration_since(sent)));
                    tell(Finding::Signal(Signal::AgentAnswer(said), now));
                    // The first that counts need not wait.
                    if line.take_challenge(Challenge::read(metadata)) && pending.len() < MOST_PENDING + knocks.len() {
                        pending.push(line.probe(&orders.borrow()));
                    }
                }
                // One of those that were on their way when the connection broke.
                Came::AgentAnswer { connection, .. } if connection != line.connection => {}
                Came::AgentAnswer { outcome: Err(failure), .. } => {
                    line.hang_up();
                    manner.meters.probed(failure.kind(), None);
                    let trouble = match failure {
                        Failure::Late => format!("no answer within {} ms", rules.total.as_millis()),
                        Failure::NoDial(trouble) => trouble,
                        Failure::Status(status) => {
                            if is_the_servers(status.code()) {
                                line.set_strange(true, &tell);
                            }
                            cause::find(&*status).unwrap_or_else(|| last_cause(&status))
                        }
                    };
                    tell(Finding::Trouble(trouble));
                }
                Came::Knock { at, is_there } => {
                    knocks.remove(&at);
                    if is_there {
                        let now = Instant::now();
                        tell(Finding::Signal(Signal::Kernel, now));
                        if at != road.address {
                            tell(Finding::Direct(now));
                        }
                    }
                }
            }
        }
    }
}

/// The end of the chain: what stands before it names libraries.
fn last_cause(status: &Status) -> String {
    let mut last = std::error::Error::source(status);
    while let Some(next) = last.and_then(std::error::Error::source) {
        last = Some(next);
    }
    last.map_or_else(|| format!("{}: {}", status.code(), status.message()), ToString::to_string)
}

/// Codes by which a server says that it is not one of ours; the others are made up on this side too.
fn is_the_servers(code: Code) -> bool {
    matches!(code, Code::NotFound | Code::Unimplemented | Code::PermissionDenied | Code::Unauthenticated)
}

async fn discard(manner: &Manner, road: &Road, mut beat: tokio::time::Interval, tell: impl Fn(Finding) -> bool) {
    let rules = manner.rules;
    beat.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut pending = FuturesUnordered::new();
    loop {
        tokio::select! {
            _ = beat.tick() => {
                for (address, sign) in std::iter::once((road.address, Signal::AgentAnswer(AgentAnswer::Serving)))
                    .chain(road.knock_at.iter().map(|address| (*address, Signal::Kernel)))
                {
                    pending.push(async move {
                        let begun = Instant::now();
                        (is_there(SocketAddr::new(address, DISCARD), rules.total).await, sign, begun.elapsed())
                    });
                }
            }
            Some((is_there, sign, took)) = pending.next() => {
                // The others only say by which road the node is there.
                if let Signal::AgentAnswer(answer) = sign {
                    let (what, took) = if is_there { (answer.into(), Some(took)) } else { (Probed::Late, None) };
                    manner.meters.probed(what, took);
                }
                if is_there {
                    let now = Instant::now();
                    tell(Finding::Signal(sign, now));
                    if sign == Signal::Kernel {
                        tell(Finding::Direct(now));
                    }
                }
            }
        }
    }
}

fn knock(address: SocketAddr, patience: Duration) -> Coming {
    Box::pin(async move { Came::Knock { at: address.ip(), is_there: is_there(address, patience).await } })
}

/// Does the node's kernel accept or refuse a connection?
pub(super) async fn is_there(address: SocketAddr, patience: Duration) -> bool {
    match timeout(patience, TcpStream::connect(address)).await {
        Ok(Ok(_)) => true,
        // All other errors are those of this node, or of a router that cannot find the other.
        Ok(Err(error)) => matches!(error.kind(), ErrorKind::ConnectionRefused | ErrorKind::ConnectionReset),
        Err(_) => false,
    }
}

/// The probes of one session with their numbers, and the connections that they take.
struct Line<'a> {
    manner: &'a Manner,
    address: SocketAddr,
    client: Option<HealthClient<Channel>>,
    /// Counts connections.
    connection: usize,
    session: u64,
    number: u64,
    /// Answers that the agent is not told of yet: the number of the probe, and when its answer came in.
    received: Vec<(u64, Instant)>,
    confirmed: u64,
    /// What the agent said last that it has let go of.
    released: Acknowledgements,
    /// And what it does not serve.
    unserved: UnservedAddresses,
    term: u64,
    node: Arc<str>,
    own_node: Arc<str>,
    /// What the next probe has to name.
    challenge: Option<Challenge>,
    is_strange: bool,
}

impl<'a> Line<'a> {
    fn new(manner: &'a Manner, road: &Road, asker: &Asker) -> Self {
        let address = SocketAddr::new(road.address, manner.port);
        // Random: whatever another prober numbers is not mixed up with this.
        let session = std::hash::BuildHasher::hash_one(&std::hash::RandomState::new(), address);
        Self {
            manner,
            address,
            client: None,
            connection: 0,
            session,
            number: 0,
            received: Vec::new(),
            confirmed: 0,
            released: Acknowledgements::new(),
            unserved: UnservedAddresses::new(),
            term: asker.term,
            node: asker.node.clone(),
            own_node: asker.own_node.clone(),
            challenge: None,
            is_strange: false,
        }
    }

    /// Whether the agent has signed the answer.
    fn believes(&self, answer: &Response<HealthCheckResponse>, signed: Option<&Signed>) -> bool {
        signed.is_some_and(|(key, request)| {
            key.has_signed_answer(answer.metadata(), answer.get_ref().status, &self.node, request)
        })
    }

    fn set_strange(&mut self, is_strange: bool, tell: &impl Fn(Finding) -> bool) {
        if self.is_strange != is_strange && tell(Finding::Strange(self.address.ip(), is_strange)) {
            self.is_strange = is_strange;
        }
    }

    /// Whether no probe so far can have counted with the process that gave it.
    fn take_challenge(&mut self, given: Option<Challenge>) -> bool {
        let Some(given) = given else { return false };
        let known = self.challenge;
        if known.is_none_or(|known| given.is_newer_than(&known)) {
            self.challenge = Some(given);
        }
        known.is_none_or(|known| !known.is_of_the_process_of(&given))
    }

    /// Settles which answer the next probe confirms, and tells of it first.
    fn confirm(&mut self, asker: &Asker, tell: &impl Fn(Finding) -> bool) {
        let limit = asker.vouch.limit(Instant::now());
        let Some(limit) = limit else { return self.received.clear() };
        let told = self.received.extract_if(.., |(_, at)| *at <= limit);
        for (number, at) in told {
            tell(Finding::Heard(at));
            self.confirmed = self.confirmed.max(number);
        }
        // Of one that waits for long only the latest matter.
        self.received.drain(..self.received.len().saturating_sub(MOST_PENDING));
    }

    /// The connection is good for nothing.
    fn hang_up(&mut self) {
        self.client = None;
        self.connection += 1;
    }

    fn client(&mut self) -> Result<HealthClient<Channel>, String> {
        if let Some(client) = &self.client {
            return Ok(client.clone());
        }
        let endpoint =
            self.manner.dial.endpoint(self.address)?.connect_timeout(self.manner.rules.total).tcp_nodelay(true);
        Ok(self.client.insert(HealthClient::new(endpoint.connect_lazy())).clone())
    }

    /// The next probe.
    fn probe(&mut self, orders: &Acknowledgements) -> Coming {
        self.number += 1;
        let (connection, number, patience) = (self.connection, self.number, self.manner.rules.total);
        let mut request = Request::new(HealthCheckRequest { service: SERVICE.to_owned() });
        let probe = Probe { session: self.session, number, confirmed: self.confirmed, term: self.term };
        probe.write(request.metadata_mut());
        leader_contact::set_timeout(request.metadata_mut(), patience);
        handover::set_orders(request.metadata_mut(), orders);
        let returned = self.manner.outages.as_ref().and_then(ApiOutages::returned).map(|at| at.elapsed());
        if let Some(age) = returned.filter(|age| *age < TOLD_OF_RETURN) {
            leader_contact::set_returned_age(request.metadata_mut(), age);
        }
        let sent = Instant::now();
        self.challenge.iter().for_each(|challenge| challenge.write(request.metadata_mut()));
        let signed = self.manner.key.now().map(|key| {
            let signature = key.sign_request(request.metadata_mut(), SERVICE, &self.own_node, &self.node);
            Box::new((key, signature))
        });
        if signed.is_none() {
            // A plain health check: who cannot sign has nothing to say.
            request.metadata_mut().clear();
        }
        let client = self.client();
        Box::pin(async move {
            let outcome = match client {
                Ok(mut client) => match timeout(patience, client.check(request)).await {
                    Ok(answer) => answer.map_err(|status| Failure::Status(Box::new(status))),
                    Err(_) => Err(Failure::Late),
                },
                Err(trouble) => Err(Failure::NoDial(trouble)),
            };
            Came::AgentAnswer { connection, number, sent, signed, outcome }
        })
    }
}

#[cfg(test)]
mod tests;
