//! Events on EgressIP objects, on Services, on this agent's own Node, and on pods of it.
//!
//! Each carries the object's UID, so that `kubectl describe` shows it. They are created one by one: kube's recorder
//! counts events of one reason as one and would drop the differing texts, and callers here publish once per change.
//!
//! An agent that starts finds what an earlier one may have told of already. So an event has a name that follows from what it
//! says and from the hour, and where the API server has one of that name a young agent leaves it at that: whoever looks sees
//! what has been said within the hour. Later it is a change, which has been there before, and the event gets a name with its
//! time. Where it cannot be known whose a name is that is taken, an event is written twice rather than not at all.
//!
//! Of one reason about one object there are 25 at once and then one more in five minutes ([`limit`]).
//!
//! Nobody waits for them: neither the kernel's half nor the leader may be held up by an API server that answers slowly.
//! They stand in a queue of their own, from which one task writes them, and wait there while the API server is away. Where
//! it is full, or nobody takes it for a quarter of an hour, an event is a line in the log instead, or is counted in the
//! next one (one in ten seconds): what it says is in the object's condition or in the log of the node as well.

pub mod limit;

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Api, ObjectMeta};
use kube::{Client, Error, Resource};
use tokio::sync::mpsc;
use tokio::sync::mpsc::error::TrySendError;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::warn;

use crate::api_outage::ApiOutages;
use crate::backoff::{Backoff, Failure};
use crate::crd::EgressIP;
use crate::error_text::ErrorText;
use crate::events::limit::Limit;
use crate::post_params;
use egress_core::model::view::{PodKey, ServiceKey};

/// Where events of objects without a namespace are kept.
const NAMESPACE: &str = "default";
/// The API refuses what is longer, each in bytes: notes, names of senders, names of objects.
const MAX_NOTE: usize = 1024;
const MAX_INSTANCE: usize = 128;
const MAX_NAME: usize = 253;

/// Events that may wait.
const QUEUE: usize = 256;
/// How long one write may take.
const PATIENCE: Duration = Duration::from_secs(10);
/// The same for an agent that ends.
const LAST_WORD: Duration = Duration::from_secs(3);
/// How long an event is worth being written.
const KEPT: Duration = Duration::from_secs(15 * 60);
/// For so long an agent looks about: what it tells of may be older than it is.
const YOUNG: Duration = Duration::from_secs(120);
/// What was said in an earlier one is said again.
const HOUR_SECS: i64 = 3600;
const TOO_MANY_REQUESTS: u16 = 429;
const CONFLICT: u16 = 409;

/// Takes events; never waits.
#[derive(Clone)]
pub struct Events {
    queue: mpsc::Sender<Recorded>,
    limit: Arc<Mutex<Limit>>,
    node_name: String,
    /// Since when there are events of this agent.
    since: Instant,
}

struct Recorded {
    event: Event,
    /// An earlier agent of this node may have said it.
    maybe_again: bool,
}

/// Writes them.
pub struct Delivery {
    client: Client,
    limit: Arc<Mutex<Limit>>,
    queue: mpsc::Receiver<Recorded>,
    outages: ApiOutages,
}

/// The two ends of a queue of events.
pub fn queue(client: Client, node_name: &str, outages: &ApiOutages) -> (Events, Delivery) {
    let (sender, receiver) = mpsc::channel(QUEUE);
    let limit = Arc::<Mutex<Limit>>::default();
    let events =
        Events { queue: sender, limit: Arc::clone(&limit), node_name: node_name.to_owned(), since: Instant::now() };
    (events, Delivery { client, limit, queue: receiver, outages: outages.clone() })
}

impl Delivery {
    /// Runs until told to stop.
    pub async fn run(mut self, stop: CancellationToken) {
        let mut pace = Backoff::new(&self.outages);
        while let Some(Some(mut told)) = stop.run_until_cancelled(self.queue.recv()).await {
            match stop.run_until_cancelled(self.write(&mut told, &mut pace)).await {
                Some(Ok(())) => pace.succeed(),
                Some(Err(cause)) => lost(&self.limit, &told.event, &cause),
                None => lost(&self.limit, &told.event, "the agent stops"),
            }
        }
    }

    /// Tries until it is written, refused, or old; why it is not.
    async fn write(&self, Recorded { event, maybe_again }: &mut Recorded, pace: &mut Backoff) -> Result<(), String> {
        let (params, begun) = (post_params(), Instant::now());
        let namespace = event.metadata.namespace.as_deref().unwrap_or(NAMESPACE);
        let api: Api<Event> = Api::namespaced(self.client.clone(), namespace);
        // A try of a name with the time may have arrived although its answer has not.
        let (mut is_by_time, mut may_be_ours) = (false, false);
        loop {
            pace.begin();
            let (failure, cause) = match tokio::time::timeout(PATIENCE, api.create(&params, event)).await {
                Ok(Ok(_)) => break,
                Ok(Err(Error::Api(status))) if status.code == CONFLICT => match is_by_time {
                    // An earlier agent has said it.
                    false if *maybe_again => break,
                    // It may be a try of ours that has arrived, and as well what was said before.
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
                Err(_) => (Failure::Absence, "a request took too long".to_owned()),
            };
            may_be_ours = is_by_time;
            if begun.elapsed() > KEPT {
                return Err(cause);
            }
            if matches!(failure, Failure::Absence) {
                // No outage of its own: where events alone cannot be written, all else is answered.
                self.outages.suspected("events", &cause);
            }
            pace.rest(failure).await;
        }
        Ok(())
    }
}

/// What an event would have said, unless there has just been a line about another one.
fn lost(limit: &Mutex<Limit>, event: &Event, cause: &str) {
    let Some(others) = lock(limit).line(Instant::now()) else { return };
    let regarding = event.regarding.as_ref().and_then(|object| object.name.as_deref());
    let (reason, note) = (event.reason.as_deref(), event.note.as_deref());
    let kind = event.regarding.as_ref().and_then(|object| object.kind.as_deref());
    warn!(kind, name = regarding, reason, note, cause, others, "an event is not written");
}

fn lock(limit: &Mutex<Limit>) -> MutexGuard<'_, Limit> {
    // Numbers, each complete in itself.
    limit.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The EgressIP object that an event is about.
#[derive(Clone, Copy, Debug)]
pub struct About<'a> {
    pub name: &'a str,
    pub uid: &'a str,
    /// A pod that it is about, too.
    pub pod: Option<&'a PodKey>,
}

impl Events {
    /// A warning.
    pub fn warn(&self, about: About<'_>, reason: &str, message: &str) {
        self.queue(self.event(about, reason, message, Timestamp::now()));
    }

    /// What went as it should, about an object.
    pub fn note(&self, about: About<'_>, reason: &str, message: &str) {
        let event = self.event(about, reason, message, Timestamp::now());
        self.queue(Event { type_: Some("Normal".to_owned()), ..event });
    }

    /// A warning about this agent's own node.
    pub fn warn_of_node(&self, reason: &str, message: &str) {
        self.queue(of_node(&self.node_name, &self.node_name, (reason, message), Timestamp::now()));
    }

    /// A warning of a controller about a node, beside it.
    pub fn warn_of_other_node(&self, node: &str, reason: &str, message: &str) {
        self.queue(of_node(&self.node_name, node, (reason, message), Timestamp::now()));
    }

    /// A warning about a pod of this agent's node, beside the pod.
    pub fn warn_of_pod(&self, (pod, uid): (&PodKey, &str), reason: &str, message: &str) {
        self.queue(of_pod(&self.node_name, (pod, uid), (reason, message), Timestamp::now()));
    }

    /// A warning about a Service, beside it.
    pub fn warn_of_service(&self, (service, uid): (&ServiceKey, &str), reason: &str, message: &str) {
        self.queue(of_service(&self.node_name, (service, uid), (reason, message), Timestamp::now()));
    }

    fn queue(&self, mut event: Event) {
        if !lock(&self.limit).take(kind(&event), Instant::now()) {
            return lost(&self.limit, &event, "there were too many of its reason about its object");
        }
        event.metadata.name = Some(name_by_content(&event));
        let maybe_again = self.since.elapsed() < YOUNG;
        match self.queue.try_send(Recorded { event, maybe_again }) {
            Ok(()) => {}
            Err(TrySendError::Full(told)) => lost(&self.limit, &told.event, "too many events are waiting"),
            Err(TrySendError::Closed(told)) => lost(&self.limit, &told.event, "the agent stops"),
        }
    }

    fn event(&self, about: About<'_>, reason: &str, message: &str, now: Timestamp) -> Event {
        let pod = about.pod.map(reference);
        let regarding = ObjectReference {
            api_version: Some(EgressIP::api_version(&()).into_owned()),
            kind: Some(EgressIP::kind(&()).into_owned()),
            name: Some(about.name.to_owned()),
            uid: Some(about.uid.to_owned()),
            ..ObjectReference::default()
        };
        let event = warning((&self.node_name, regarding), "Assign", (reason, message), now);
        Event { related: pod, ..event }
    }
}

/// As the kubelet does it, with the name for the UID: `kubectl describe node` looks for that.
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

/// Where the API wants it: in the pod's own namespace.
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

/// Writes one about the node, before there is an agent that could: waits for it no longer than it is worth.
pub async fn tell_of_node(client: Client, node_name: &str, outages: &ApiOutages, (reason, message): (&str, &str)) {
    let (events, delivery) = queue(client, node_name, outages);
    events.warn_of_node(reason, message);
    // Without its sender the queue ends behind the event.
    drop(events);
    if tokio::time::timeout(LAST_WORD, delivery.run(CancellationToken::new())).await.is_err() {
        warn!(reason, "an event could not be written before the agent ends");
    }
}

/// The same for whatever says the same of the same within an hour: who, of whom, what.
fn name_by_content(event: &Event) -> String {
    let Event { regarding, related, reason, note, reporting_instance, event_time, .. } = event;
    let hour = event_time.as_ref().map(|MicroTime(time)| time.as_second() / HOUR_SECS);
    // Its keys are fixed. Another version of it, in another agent, has what lasts told once more.
    let mut hasher = DefaultHasher::new();
    (object(regarding), object(related), reason, note, reporting_instance, hour).hash(&mut hasher);
    name(event, &format!("{:016x}", hasher.finish()))
}

/// The same for events of one reason about one object.
fn kind(event: &Event) -> u64 {
    let mut hasher = DefaultHasher::new();
    (object(&event.regarding), &event.reason).hash(&mut hasher);
    hasher.finish()
}

/// Which object: namespace, name, UID.
fn object(reference: &Option<ObjectReference>) -> Option<[Option<&str>; 3]> {
    let ObjectReference { namespace, name, uid, .. } = reference.as_ref()?;
    Some([namespace, name, uid].map(Option::as_deref))
}

/// As every writer of events does it.
fn name_by_time(event: &Event) -> String {
    let time = event.event_time.as_ref().map(|MicroTime(time)| time.as_nanosecond()).unwrap_or_default();
    name(event, &format!("{time:x}"))
}

/// The object's name and more; a long name leaves room for that.
fn name(event: &Event, more: &str) -> String {
    let object = event.regarding.as_ref().and_then(|object| object.name.as_deref()).unwrap_or_default();
    // A part that ends in a dot or a dash would make no name.
    let object = cut(object, MAX_NAME - more.len() - 1).trim_end_matches(['.', '-']);
    format!("{object}.{more}")
}

/// As much of the text as fits, in whole characters.
fn cut(text: &str, bytes: usize) -> &str {
    &text[..text.floor_char_boundary(bytes)]
}

#[cfg(test)]
mod tests;
