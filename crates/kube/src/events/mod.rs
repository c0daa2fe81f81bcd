//! Events on egress policies, Services, Nodes and pods. Each carries the object's UID, so that `kubectl describe` shows it.
//!
//! - One object per event: kube's recorder merges events of one reason and would drop the differing texts.
//! - The name is a hash of the content and the hour. If the name is taken, an agent that has just started skips the event (an
//!   earlier run has written it); later it is a repeated change, and the event gets a name with its time. If it is unclear whose
//!   event has the name, the event is written twice rather than not at all.
//! - Rate: 25 events of one reason about one object, then one in five minutes ([`limit`]).
//! - Callers never wait: a queue and one task write, and wait while the API server is away. If the queue is full, or an event is
//!   older than a quarter of an hour, it becomes a log line or is counted in the next one (one in ten seconds).

pub mod limit;

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Api, ObjectMeta};
use kube::{Client, Error};
use tokio::sync::mpsc;
use tokio::sync::mpsc::error::TrySendError;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::warn;

use crate::api_outage::ApiOutages;
use crate::backoff::{Backoff, Failure};
use crate::error_text::ErrorText;
use crate::events::limit::Limit;
use crate::{crd, policy, post_params};
use egress_core::model::policy::{EgressPolicy, PolicyKey, RuleSource, SourceKind};
use egress_core::model::services::ServiceKey;
use egress_core::model::view::PodKey;

/// The namespace of events about objects without one.
const NAMESPACE: &str = "default";
/// Limits of the API in bytes: notes, names of reporting instances, names of objects.
const MAX_NOTE: usize = 1024;
const MAX_INSTANCE: usize = 128;
const MAX_NAME: usize = 253;

/// Capacity of the queue.
const QUEUE: usize = 256;
/// Timeout of one write.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Timeout of a write by an agent that exits.
const EXIT_TIMEOUT: Duration = Duration::from_secs(3);
/// An event older than this is dropped.
const MAX_AGE: Duration = Duration::from_secs(15 * 60);
/// How long after its start an agent assumes that an earlier run may have written an event.
const RECENT_START: Duration = Duration::from_secs(120);
/// An event is written again in another hour.
const HOUR_SECS: i64 = 3600;
const TOO_MANY_REQUESTS: u16 = 429;
const CONFLICT: u16 = 409;

/// Accepts events; never waits.
#[derive(Clone)]
pub struct Events {
    queue: mpsc::Sender<Recorded>,
    limit: Arc<Mutex<Limit>>,
    node_name: String,
    /// When this agent started.
    since: Instant,
}

struct Recorded {
    event: Event,
    /// An earlier run on this node may have written it.
    may_be_repeated: bool,
}

/// Writes the queued events.
pub struct Delivery {
    client: Client,
    limit: Arc<Mutex<Limit>>,
    queue: mpsc::Receiver<Recorded>,
    outages: ApiOutages,
}

/// The two ends of the queue.
pub fn queue(client: Client, node_name: &str, outages: &ApiOutages) -> (Events, Delivery) {
    let (sender, receiver) = mpsc::channel(QUEUE);
    let limit = Arc::<Mutex<Limit>>::default();
    let events =
        Events { queue: sender, limit: Arc::clone(&limit), node_name: node_name.to_owned(), since: Instant::now() };
    (events, Delivery { client, limit, queue: receiver, outages: outages.clone() })
}

impl Delivery {
    /// Runs until stopped.
    pub async fn run(mut self, stop: CancellationToken) {
        let mut backoff = Backoff::new(&self.outages);
        while let Some(Some(mut recorded)) = stop.run_until_cancelled(self.queue.recv()).await {
            match stop.run_until_cancelled(self.write(&mut recorded, &mut backoff)).await {
                Some(Ok(())) => backoff.reset(),
                Some(Err(cause)) => log_unwritten(&self.limit, &recorded.event, &cause),
                None => log_unwritten(&self.limit, &recorded.event, "the agent stops"),
            }
        }
    }

    /// Retries until the event is written, refused or too old. The error is the reason.
    async fn write(
        &self,
        Recorded { event, may_be_repeated }: &mut Recorded,
        backoff: &mut Backoff,
    ) -> Result<(), String> {
        let (params, begun) = (post_params(), Instant::now());
        let namespace = event.metadata.namespace.as_deref().unwrap_or(NAMESPACE);
        let api: Api<Event> = Api::namespaced(self.client.clone(), namespace);
        // A try with the name by time may have been written although its answer was lost.
        let (mut is_by_time, mut may_be_ours) = (false, false);
        loop {
            backoff.note_try();
            let (failure, cause) = match tokio::time::timeout(TIMEOUT, api.create(&params, event)).await {
                Ok(Ok(_)) => break,
                Ok(Err(Error::Api(status))) if status.code == CONFLICT => match is_by_time {
                    // An earlier run has written it.
                    false if *may_be_repeated => break,
                    // It may be an earlier try of this event, or an earlier event.
                    false => {
                        event.metadata.name = Some(name_by_time(event));
                        is_by_time = true;
                        continue;
                    }
                    true if may_be_ours => break,
                    true => return Err("another event has its name".to_owned()),
                },
                Ok(Err(error)) => {
                    let cause = ErrorText(&error).to_string();
                    match (&error, Failure::of(&error)) {
                        (Error::Api(status), Failure::Refusal) if status.code != TOO_MANY_REQUESTS => {
                            return Err(cause);
                        }
                        (_, failure) => (failure, cause),
                    }
                }
                Err(_) => (Failure::Outage, "a request took too long".to_owned()),
            };
            may_be_ours = is_by_time;
            if begun.elapsed() > MAX_AGE {
                return Err(cause);
            }
            if matches!(failure, Failure::Outage) {
                // Events that cannot be written are no outage if everything else is answered.
                self.outages.suspected("events", &cause);
            }
            backoff.pause(failure).await;
        }
        Ok(())
    }
}

/// Logs an event that is not written, unless a line about another one is recent.
fn log_unwritten(limit: &Mutex<Limit>, event: &Event, cause: &str) {
    let Some(others) = lock(limit).log_due(Instant::now()) else { return };
    let regarding = event.regarding.as_ref().and_then(|object| object.name.as_deref());
    let (reason, note) = (event.reason.as_deref(), event.note.as_deref());
    let kind = event.regarding.as_ref().and_then(|object| object.kind.as_deref());
    warn!(kind, name = regarding, reason, note, cause, others, "an event is not written");
}

fn lock(limit: &Mutex<Limit>) -> MutexGuard<'_, Limit> {
    // Numbers, each complete in itself.
    limit.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The object that an event is about, and a related pod.
#[derive(Clone, Debug)]
pub struct Regarding {
    object: ObjectReference,
    pod: Option<ObjectReference>,
}

impl Regarding {
    /// An object of a user.
    pub fn source(source: &RuleSource) -> Self {
        let RuleSource { kind, namespace, name, uid, .. } = source;
        let resource = crd::source_resource(*kind);
        let object = ObjectReference {
            api_version: Some(resource.api_version),
            kind: Some(resource.kind),
            namespace: (!namespace.is_empty()).then(|| namespace.clone()),
            name: Some(name.clone()),
            uid: Some(uid.clone()),
            ..ObjectReference::default()
        };
        Self { object, pod: None }
    }

    /// The object of a policy with this UID.
    pub fn policy(policy: &PolicyKey, uid: &str) -> Self {
        let resource = policy::api_of(policy.kind).resource();
        let object = ObjectReference {
            api_version: Some(resource.api_version),
            kind: Some(resource.kind),
            name: Some(policy.name.clone()),
            uid: Some(uid.to_owned()),
            ..ObjectReference::default()
        };
        Self { object, pod: None }
    }

    /// An ExternalIPPool of Antrea.
    pub fn pool(name: &str, uid: &str) -> Self {
        let resource = crate::antrea::pool_resource();
        let object = ObjectReference {
            api_version: Some(resource.api_version),
            kind: Some(resource.kind),
            name: Some(name.to_owned()),
            uid: Some(uid.to_owned()),
            ..ObjectReference::default()
        };
        Self { object, pod: None }
    }

    #[must_use]
    pub fn with_pod(self, pod: &PodKey) -> Self {
        Self { pod: Some(reference(pod)), ..self }
    }
}

/// The object that its users know: of an assignment the first one that it was made of.
impl From<&EgressPolicy> for Regarding {
    fn from(policy: &EgressPolicy) -> Self {
        let source = policy.rules.iter().flatten().map(|rule| &rule.source).min();
        source.map_or_else(|| Self::policy(policy.key(), &policy.origin.uid), Self::source)
    }
}

impl Events {
    /// A warning.
    pub fn warn(&self, about: impl Into<Regarding>, reason: &str, message: &str) {
        self.queue(self.event(about.into(), reason, message, Timestamp::now()));
    }

    /// A normal event about an object.
    pub fn note(&self, about: impl Into<Regarding>, reason: &str, message: &str) {
        let event = self.event(about.into(), reason, message, Timestamp::now());
        self.queue(Event { type_: Some("Normal".to_owned()), ..event });
    }

    /// A warning about this agent's own node.
    pub fn warn_of_node(&self, reason: &str, message: &str) {
        self.queue(of_node(&self.node_name, &self.node_name, (reason, message), Timestamp::now()));
    }

    /// A controller's warning about another node.
    pub fn warn_of_other_node(&self, node: &str, reason: &str, message: &str) {
        self.queue(of_node(&self.node_name, node, (reason, message), Timestamp::now()));
    }

    /// A warning about a pod of this agent's node, in the pod's namespace.
    pub fn warn_of_pod(&self, (pod, uid): (&PodKey, &str), reason: &str, message: &str) {
        self.queue(of_pod(&self.node_name, (pod, uid), (reason, message), Timestamp::now()));
    }

    /// A warning about a Service, in its namespace.
    pub fn warn_of_service(&self, (service, uid): (&ServiceKey, &str), reason: &str, message: &str) {
        self.queue(of_service(&self.node_name, (service, uid), (reason, message), Timestamp::now()));
    }

    /// A controller's warning about an EgressService, in its namespace.
    pub fn warn_of_egress_service(&self, (service, uid): (&ServiceKey, &str), reason: &str, message: &str) {
        let ServiceKey { namespace, name } = service.clone();
        let source = RuleSource { kind: SourceKind::EgressService, created: 0, namespace, name, uid: uid.to_owned() };
        self.warn(Regarding::source(&source), reason, message);
    }

    fn queue(&self, mut event: Event) {
        if !lock(&self.limit).try_take(kind(&event), Instant::now()) {
            return log_unwritten(&self.limit, &event, "there were too many of its reason about its object");
        }
        event.metadata.name = Some(name_by_content(&event));
        let may_be_repeated = self.since.elapsed() < RECENT_START;
        match self.queue.try_send(Recorded { event, may_be_repeated }) {
            Ok(()) => {}
            Err(TrySendError::Full(recorded)) => {
                log_unwritten(&self.limit, &recorded.event, "too many events are waiting")
            }
            Err(TrySendError::Closed(recorded)) => log_unwritten(&self.limit, &recorded.event, "the agent stops"),
        }
    }

    fn event(&self, Regarding { object, pod }: Regarding, reason: &str, message: &str, now: Timestamp) -> Event {
        let namespace = object.namespace.clone();
        let mut event = warning((&self.node_name, object), "Assign", (reason, message), now);
        // The API requires the namespace of the object.
        event.metadata.namespace = namespace.or(event.metadata.namespace);
        Event { related: pod, ..event }
    }
}

/// Sets the UID to the name, as the kubelet does: `kubectl describe node` searches for that.
fn of_node(own_name: &str, node: &str, why: (&str, &str), now: Timestamp) -> Event {
    let regarding = ObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("Node".to_owned()),
        name: Some(node.to_owned()),
        uid: Some(node.to_owned()),
        ..ObjectReference::default()
    };
    warning((own_name, regarding), "Serve", why, now)
}

/// The API requires the pod's namespace.
fn of_pod(node_name: &str, (pod, uid): (&PodKey, &str), why: (&str, &str), now: Timestamp) -> Event {
    let regarding = ObjectReference { uid: Some(uid.to_owned()), ..reference(pod) };
    let mut event = warning((node_name, regarding), "Serve", why, now);
    event.metadata.namespace = Some(pod.namespace.clone());
    event
}

fn of_service(node_name: &str, (service, uid): (&ServiceKey, &str), why: (&str, &str), now: Timestamp) -> Event {
    let regarding = ObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("Service".to_owned()),
        name: Some(service.name.clone()),
        namespace: Some(service.namespace.clone()),
        uid: Some(uid.to_owned()),
        ..ObjectReference::default()
    };
    let mut event = warning((node_name, regarding), "Serve", why, now);
    event.metadata.namespace = Some(service.namespace.clone());
    event
}

fn reference(pod: &PodKey) -> ObjectReference {
    ObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("Pod".to_owned()),
        name: Some(pod.name.clone()),
        namespace: Some(pod.namespace.clone()),
        ..ObjectReference::default()
    }
}

fn warning(
    (node_name, regarding): (&str, ObjectReference),
    action: &str,
    (reason, message): (&str, &str),
    now: Timestamp,
) -> Event {
    Event {
        metadata: ObjectMeta { namespace: Some(NAMESPACE.to_owned()), ..ObjectMeta::default() },
        action: Some(action.to_owned()),
        event_time: Some(MicroTime(now)),
        note: Some(cut(message, MAX_NOTE).to_owned()),
        reason: Some(reason.to_owned()),
        regarding: Some(regarding),
        reporting_controller: Some("egress-agent".to_owned()),
        reporting_instance: Some(cut(node_name, MAX_INSTANCE).to_owned()),
        type_: Some("Warning".to_owned()),
        ..Event::default()
    }
}

/// Writes one event about the node before the agent exits, with a short timeout.
pub async fn write_node_event(client: Client, node_name: &str, outages: &ApiOutages, (reason, message): (&str, &str)) {
    let (events, delivery) = queue(client, node_name, outages);
    events.warn_of_node(reason, message);
    // Without a sender the queue ends after the event.
    drop(events);
    if tokio::time::timeout(EXIT_TIMEOUT, delivery.run(CancellationToken::new())).await.is_err() {
        warn!(reason, "an event could not be written before the agent ends");
    }
}

/// A name that is the same for the same reporter, object, reason and note within an hour.
fn name_by_content(event: &Event) -> String {
    let Event { regarding, related, reason, note, reporting_instance, event_time, .. } = event;
    let hour = event_time.as_ref().map(|MicroTime(time)| time.as_second() / HOUR_SECS);
    // The hasher has fixed keys. Another version of it, in another agent, causes one more event.
    let mut hasher = DefaultHasher::new();
    (object(regarding), object(related), reason, note, reporting_instance, hour).hash(&mut hasher);
    name(event, &format!("{:016x}", hasher.finish()))
}

/// A number that is the same for events of one reason about one object.
fn kind(event: &Event) -> u64 {
    let mut hasher = DefaultHasher::new();
    (object(&event.regarding), &event.reason).hash(&mut hasher);
    hasher.finish()
}

/// Namespace, name and UID of the object.
fn object(reference: &Option<ObjectReference>) -> Option<[Option<&str>; 3]> {
    let ObjectReference { namespace, name, uid, .. } = reference.as_ref()?;
    Some([namespace, name, uid].map(Option::as_deref))
}

/// A name by time, as client-go gives it.
fn name_by_time(event: &Event) -> String {
    let time = event.event_time.as_ref().map(|MicroTime(time)| time.as_nanosecond()).unwrap_or_default();
    name(event, &format!("{time:x}"))
}

/// The object's name, cut if necessary, and a suffix.
fn name(event: &Event, suffix: &str) -> String {
    let object = event.regarding.as_ref().and_then(|object| object.name.as_deref()).unwrap_or_default();
    // A part that ends in a dot or a dash would make an invalid name.
    let object = cut(object, MAX_NAME - suffix.len() - 1).trim_end_matches(['.', '-']);
    format!("{object}.{suffix}")
}

/// The text, cut to a length in bytes between characters.
fn cut(text: &str, bytes: usize) -> &str {
    &text[..text.floor_char_boundary(bytes)]
}

#[cfg(test)]
mod tests;
