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

use crate::health::leader_contact::{self, LeaderContact, Probe};
use crate::health::signature::MessageAuth;
use crate::health::signature::{self, Challenge, ReplayGuard, Signature};
use crate::health::{MESSAGE, REASON, Reports, SERVICE, handover, pod_counts, unserved};
use egress_core::model::ledger::Acknowledgements;
use egress_core::model::node::UnservedAddresses;
use egress_core::model::state::SelectedPods;
use egress_core::node_health::fitness::ServingObstacle;
use egress_kube::health_key::{HealthKey, SharedKey};

/// Longest age of a probe's challenge, plus twice the total timeout, the longest delay of answers.
const CHALLENGE_AGE: Duration = Duration::from_secs(10);
/// Interval of the warning about unsigned probes.
const WARNING_INTERVAL: Duration = Duration::from_secs(600);

/// Shared by the servers on all addresses.
#[derive(Clone)]
pub(super) struct HealthService(Arc<HealthServiceState>);

struct HealthServiceState {
    /// The current answer; `None`: the node serves.
    obstacle: watch::Sender<Option<ServingObstacle>>,
    unserved: watch::Sender<UnservedAddresses>,
    /// The same for `Watch` calls.
    reporter: HealthReporter,
    total_timeout: Duration,
    key: SharedKey,
    node_name: String,
    sources: AnswerSources,
    probes: Mutex<Probes>,
}

/// State of other parts of the agent, for answers.
pub(super) struct AnswerSources {
    pub(super) released: watch::Receiver<Acknowledgements>,
    /// The overlay's port, while probes through the overlay are answered.
    pub(super) overlay: watch::Receiver<Option<u16>>,
    /// The number of the latest end of an endless lease that the programs have obeyed.
    pub(super) bounded: watch::Receiver<Option<u64>>,
    /// When a next hop of this node answered last.
    pub(super) next_hop: watch::Receiver<Option<Instant>>,
    /// How many pods each object serves here.
    pub(super) selected: watch::Receiver<SelectedPods>,
}

struct Probes {
    guard: ReplayGuard,
    contact: LeaderContact,
    reports: Reports,
    /// The leader's total timeout if it differs from ours; already logged.
    other_timeout: Option<Duration>,
    /// When an unsigned probe was last logged.
    unsigned: Option<Instant>,
}

impl HealthService {
    pub(super) async fn new(
        total_timeout: Duration,
        (key, node_name): (SharedKey, String),
        sources: AnswerSources,
        reports: Reports,
    ) -> Self {
        let reporter = HealthReporter::new();
        report(&reporter, false).await;
        let guard = ReplayGuard::new(Instant::now());
        let probes = Probes { guard, contact: LeaderContact::default(), reports, other_timeout: None, unsigned: None };
        let (probes, obstacle) = (Mutex::new(probes), watch::Sender::new(Some(ServingObstacle::NotInStep)));
        let unserved = watch::Sender::default();
        Self(Arc::new(HealthServiceState {
            obstacle,
            unserved,
            reporter,
            total_timeout,
            key,
            node_name,
            sources,
            probes,
        }))
    }

    pub(super) fn into_server(self) -> HealthServer<Self> {
        HealthServer::new(self).max_decoding_message_size(MESSAGE)
    }

    /// Sets the answer.
    pub(super) async fn set(&self, obstacle: Option<ServingObstacle>, unserved: UnservedAddresses) {
        self.0.unserved.send_replace(unserved);
        let serves = obstacle.is_none();
        let served = self.0.obstacle.send_replace(obstacle).is_none();
        // `Watch` calls get changes only.
        if serves != served {
            report(&self.0.reporter, serves).await;
        }
    }

    /// The signature of a signed request. Any other request is a plain health check.
    fn authentic(&self, request: &Request<HealthCheckRequest>, at: Instant) -> Option<(HealthKey, Signature)> {
        let (metadata, service) = (request.metadata(), &request.get_ref().service);
        let key = self.0.key.current();
        if let Some(key) = &key
            && let Some(signature) = key.verify_request(metadata, service, &self.0.node_name)
        {
            return Some((key.clone(), signature));
        }
        if Probe::read(metadata).is_some() {
            self.0.key.suspect();
            let mut probes = self.0.probes.lock().unwrap_or_else(PoisonError::into_inner);
            if probes.unsigned.is_none_or(|logged| at >= logged + WARNING_INTERVAL) {
                probes.unsigned = Some(at);
                warn!(
                    from = ?request.remote_addr(), has_key = key.is_some(),
                    "a probe is not signed with the agents' key, and changes nothing: its sender has another version or \
                     another key, or imitates a controller"
                );
            }
        }
        None
    }

    /// Notes what a signed probe confirms, if it is not a replay. Returns the greatest term, for the answer.
    fn note(&self, request: &Request<HealthCheckRequest>, at: Instant) -> Option<u64> {
        let probe = Probe::read(request.metadata())?;
        let mut probes = self.0.probes.lock().unwrap_or_else(PoisonError::into_inner);
        let total = leader_contact::timeout(request.metadata()).unwrap_or(self.0.total_timeout);
        let (challenge, counted) = (Challenge::read(request.metadata()), (probe.session, probe.number));
        if !probes.guard.accept(challenge, counted, CHALLENGE_AGE + total * 2, at) {
            return Some(probes.contact.term());
        }
        probes.contact.note(probe, at);
        // A former leader's ledger is outdated.
        if probe.term >= probes.contact.term() {
            note_leader(&probes.reports, request);
            if let Some(returned) = leader_contact::returned_age(request.metadata()).and_then(|age| at.checked_sub(age))
            {
                probes.reports.outages.note_reported_rollback(returned);
            }
            let total = leader_contact::timeout(request.metadata());
            probes.reports.total.send_if_modified(|known| std::mem::replace(known, total) != total);
            let orders = handover::orders(request.metadata());
            probes.reports.orders.send_if_modified(|known| {
                let has_changed = *known != orders;
                *known = orders;
                has_changed
            });
        }
        // After the timeout, so that a reader of this sees the new timeout too.
        let confirmed = probes.contact.confirmed();
        probes.reports.confirmed.send_if_modified(|known| std::mem::replace(known, confirmed) != confirmed);
        let other = leader_contact::timeout(request.metadata()).filter(|timeout| *timeout != self.0.total_timeout);
        if std::mem::replace(&mut probes.other_timeout, other) != other
            && let Some(other) = other
        {
            warn!(
                leader = ?other, own = ?self.0.total_timeout,
                "the leader has another --egressip-reachability-total-timeout than this agent: set the same for agents and \
                 controllers"
            );
        }
        Some(probes.contact.term())
    }
}

/// Notes the sender of a signed request.
fn note_leader(reports: &Reports, request: &Request<HealthCheckRequest>) {
    let leader = signature::from(request.metadata()).map(str::to_owned);
    reports.leader.send_if_modified(|known| {
        let has_changed = *known != leader;
        *known = leader;
        has_changed
    });
}

impl HealthServiceState {
    fn challenge(&self, now: Instant) -> Challenge {
        self.probes.lock().unwrap_or_else(PoisonError::into_inner).guard.challenge(now)
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
            handover::set_released(metadata, &self.0.sources.released.borrow());
            unserved::write(metadata, &self.0.unserved.borrow());
            let overlay = *self.0.sources.overlay.borrow();
            overlay.into_iter().for_each(|port| leader_contact::set_overlay_port(metadata, port));
            let bounded = *self.0.sources.bounded.borrow();
            bounded.into_iter().for_each(|number| leader_contact::set_bounded(metadata, number));
            let next_hop = *self.0.sources.next_hop.borrow();
            next_hop.into_iter().for_each(|at| leader_contact::set_next_hop_age(metadata, at.elapsed()));
        }
        if let Some((key, signature)) = authentic {
            // Probes are too frequent for this.
            if Probe::read(request.metadata()).is_none() {
                note_leader(&self.0.probes.lock().unwrap_or_else(PoisonError::into_inner).reports, &request);
                pod_counts::write(metadata, &self.0.sources.selected.borrow());
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
