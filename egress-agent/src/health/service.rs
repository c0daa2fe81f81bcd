//! The health service itself.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::watch;
use tonic::metadata::MetadataValue;
use tonic::{Request, Response, Status};
use tonic_health::ServingStatus;
use tonic_health::pb::health_check_response::ServingStatus as Answer;
use tonic_health::pb::health_server::{Health, HealthServer};
use tonic_health::pb::{HealthCheckRequest, HealthCheckResponse};
use tonic_health::server::{HealthReporter, HealthService as Reported, WatchStream};
use tracing::warn;

use crate::health::leader_contact::{self, Probe, Touch};
use crate::health::signature::MessageAuth;
use crate::health::signature::{self, Challenge, Fresh, Signature};
use crate::health::{MESSAGE, REASON, Reports, SERVICE, handover, pod_counts, unserved};
use egress_core::model::ledger::Acknowledgements;
use egress_core::model::node::UnservedAddresses;
use egress_core::model::state::SelectedPods;
use egress_core::node_health::fitness::ServingObstacle;
use egress_kube::health_key::{Key, SharedKey};

/// How old a challenge may be that a probe names, beside twice the total timeout: answers may take as long as that.
const CHALLENGE_AGE: Duration = Duration::from_secs(10);
/// How often is said that probes are not signed as they should be.
const SAID_AGAIN: Duration = Duration::from_secs(600);

/// Answers on all addresses alike.
#[derive(Clone)]
pub(super) struct HealthService(Arc<Shared>);

struct Shared {
    /// What is answered now. `None` inside: the node serves.
    obstacle: watch::Sender<Option<ServingObstacle>>,
    unserved: watch::Sender<UnservedAddresses>,
    /// The same for those who watch.
    reporter: HealthReporter,
    total_timeout: Duration,
    key: SharedKey,
    node_name: String,
    known: Known,
    probes: Mutex<Probes>,
}

/// What other parts of the agent know, for answers.
pub(super) struct Known {
    pub(super) released: watch::Receiver<Acknowledgements>,
    /// The overlay's port, while questions that come through it are answered.
    pub(super) overlay: watch::Receiver<Option<u16>>,
    /// The number of the latest end of an endless lease that the programs have obeyed.
    pub(super) bounded: watch::Receiver<Option<u64>>,
    /// When a next hop of this node answered last.
    pub(super) next_hop: watch::Receiver<Option<Instant>>,
    /// How many pods each object serves here.
    pub(super) selected: watch::Receiver<SelectedPods>,
}

struct Probes {
    fresh: Fresh,
    touch: Touch,
    told: Reports,
    /// The leader's total timeout where it is not ours, once said.
    other_timeout: Option<Duration>,
    /// When a probe came last that was not signed, and that was said.
    unsigned: Option<Instant>,
}

impl HealthService {
    pub(super) async fn new(
        total_timeout: Duration,
        (key, node_name): (SharedKey, String),
        known: Known,
        told: Reports,
    ) -> Self {
        let reporter = HealthReporter::new();
        report(&reporter, false).await;
        let fresh = Fresh::new(Instant::now());
        let probes = Probes { fresh, touch: Touch::default(), told, other_timeout: None, unsigned: None };
        let (probes, obstacle) = (Mutex::new(probes), watch::Sender::new(Some(ServingObstacle::NotInStep)));
        let unserved = watch::Sender::default();
        Self(Arc::new(Shared { obstacle, unserved, reporter, total_timeout, key, node_name, known, probes }))
    }

    pub(super) fn into_server(self) -> HealthServer<Self> {
        HealthServer::new(self).max_decoding_message_size(MESSAGE)
    }

    /// What is answered from now on.
    pub(super) async fn set(&self, obstacle: Option<ServingObstacle>, unserved: UnservedAddresses) {
        self.0.unserved.send_replace(unserved);
        let serves = obstacle.is_none();
        let served = self.0.obstacle.send_replace(obstacle).is_none();
        // Who watches is told of changes only.
        if serves != served {
            report(&self.0.reporter, serves).await;
        }
    }

    /// The signature of a leader's probe. Whatever else asks is a plain health check.
    fn authentic(&self, request: &Request<HealthCheckRequest>, at: Instant) -> Option<(Key, Signature)> {
        let (metadata, service) = (request.metadata(), &request.get_ref().service);
        let key = self.0.key.now();
        if let Some(key) = &key
            && let Some(signature) = key.verify_request(metadata, service, &self.0.node_name)
        {
            return Some((key.clone(), signature));
        }
        if Probe::read(metadata).is_some() {
            self.0.key.doubt();
            let mut probes = self.0.probes.lock().unwrap_or_else(PoisonError::into_inner);
            if probes.unsigned.is_none_or(|said| at >= said + SAID_AGAIN) {
                probes.unsigned = Some(at);
                warn!(
                    from = ?request.remote_addr(), has_key = key.is_some(),
                    "a probe is not signed with the agents' key, and changes nothing: an agent of another version or with \
                     another key, or a stranger"
                );
            }
        }
        None
    }

    /// Notes what a signed probe confirms, where it is new. The greatest term, which the answer to it bears.
    fn note(&self, request: &Request<HealthCheckRequest>, at: Instant) -> Option<u64> {
        let probe = Probe::read(request.metadata())?;
        let mut probes = self.0.probes.lock().unwrap_or_else(PoisonError::into_inner);
        let total = leader_contact::timeout(request.metadata()).unwrap_or(self.0.total_timeout);
        let (named, counted) = (Challenge::read(request.metadata()), (probe.session, probe.number));
        if !probes.fresh.take(named, counted, CHALLENGE_AGE + total * 2, at) {
            return Some(probes.touch.term());
        }
        probes.touch.probed(probe, at);
        // A former leader's ledger is a former one.
        if probe.term >= probes.touch.term() {
            note_leader(&probes.told, request);
            if let Some(returned) = leader_contact::returned_age(request.metadata()).and_then(|age| at.checked_sub(age))
            {
                probes.told.outages.learn_of_rollback(returned);
            }
            let total = leader_contact::timeout(request.metadata());
            probes.told.total.send_if_modified(|known| std::mem::replace(known, total) != total);
            let orders = handover::orders(request.metadata());
            probes.told.orders.send_if_modified(|known| {
                let is_news = *known != orders;
                *known = orders;
                is_news
            });
        }
        // Behind the timeout: whoever sees the one sees the other.
        let heard = probes.touch.heard();
        probes.told.heard.send_if_modified(|known| std::mem::replace(known, heard) != heard);
        let other = leader_contact::timeout(request.metadata()).filter(|timeout| *timeout != self.0.total_timeout);
        if std::mem::replace(&mut probes.other_timeout, other) != other
            && let Some(other) = other
        {
            warn!(
                leader = ?other, own = ?self.0.total_timeout,
                "the leader goes by another --egressip-reachability-total-timeout than this agent: set the same for agents \
                 and controllers"
            );
        }
        Some(probes.touch.term())
    }
}

/// Of a signed request.
fn note_leader(told: &Reports, request: &Request<HealthCheckRequest>) {
    let leader = signature::from(request.metadata()).map(str::to_owned);
    told.leader.send_if_modified(|known| {
        let is_news = *known != leader;
        *known = leader;
        is_news
    });
}

impl Shared {
    fn challenge(&self, now: Instant) -> Challenge {
        self.probes.lock().unwrap_or_else(PoisonError::into_inner).fresh.challenge(now)
    }
}

async fn report(reporter: &HealthReporter, serves: bool) {
    let status = if serves { ServingStatus::Serving } else { ServingStatus::NotServing };
    for service in ["", SERVICE] {
        reporter.set_service_status(service, status).await;
    }
}

#[tonic::async_trait]
impl Health for HealthService {
    async fn check(&self, request: Request<HealthCheckRequest>) -> Result<Response<HealthCheckResponse>, Status> {
        let at = Instant::now();
        if !["", SERVICE].contains(&request.get_ref().service.as_str()) {
            return Err(Status::not_found("service not registered"));
        }
        let authentic = self.authentic(&request, at);
        let term = authentic.as_ref().and_then(|_| self.note(&request, at));
        let obstacle = self.0.obstacle.borrow().clone();
        let status = if obstacle.is_none() { Answer::Serving } else { Answer::NotServing };
        let mut answer = Response::new(HealthCheckResponse { status: status.into() });
        let metadata = answer.metadata_mut();
        if let Some(obstacle) = obstacle {
            metadata.insert(REASON, MetadataValue::from_static(obstacle.code()));
        }
        if let Some(term) = term {
            leader_contact::set_term(metadata, term);
            leader_contact::set_timeout(metadata, self.0.total_timeout);
            handover::set_released(metadata, &self.0.known.released.borrow());
            unserved::write(metadata, &self.0.unserved.borrow());
            let overlay = *self.0.known.overlay.borrow();
            overlay.into_iter().for_each(|port| leader_contact::set_overlay_port(metadata, port));
            let bounded = *self.0.known.bounded.borrow();
            bounded.into_iter().for_each(|number| leader_contact::set_bounded(metadata, number));
            let next_hop = *self.0.known.next_hop.borrow();
            next_hop.into_iter().for_each(|at| leader_contact::set_next_hop_age(metadata, at.elapsed()));
        }
        if let Some((key, signature)) = authentic {
            // Not with each probe: these are frequent.
            if Probe::read(request.metadata()).is_none() {
                note_leader(&self.0.probes.lock().unwrap_or_else(PoisonError::into_inner).told, &request);
                pod_counts::write(metadata, &self.0.known.selected.borrow());
            }
            self.0.challenge(Instant::now()).write(metadata);
            key.sign_answer(metadata, status.into(), &self.0.node_name, &signature);
        }
        Ok(answer)
    }

    type WatchStream = WatchStream;

    async fn watch(&self, request: Request<HealthCheckRequest>) -> Result<Response<WatchStream>, Status> {
        Reported::from_health_reporter(self.0.reporter.clone()).watch(request).await
    }
}
