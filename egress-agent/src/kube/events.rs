//! Events on EgressIP objects, and on this agent's own Node.
//!
//! Each carries the object's UID, so that `kubectl describe` shows it. They are created one by one: kube's recorder
//! counts events of one reason as one and would drop the differing texts, and callers here publish once per change.
//!
//! Nobody waits for them: neither the kernel's half nor the leader may be held up by an API server that answers slowly.
//! They stand in a queue of their own, from which one task writes them, and wait there while the API server is away. Where
//! it is full, or nobody takes it for a quarter of an hour, an event is a line in the log instead: what it says is in the
//! object's condition or in the log of the node as well.

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

use super::causes::Causes;
use super::crd::EgressIP;
use super::outage::Outages;
use super::pace::{Failure, Pace};
use super::post_params;
use crate::model::view::PodKey;

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
const TOO_MANY_REQUESTS: u16 = 429;
const CONFLICT: u16 = 409;

/// Takes events; never waits.
#[derive(Clone)]
pub struct Events {
    queue: mpsc::Sender<Event>,
    node_name: String,
}

/// Writes them.
pub struct Delivery {
    api: Api<Event>,
    queue: mpsc::Receiver<Event>,
    outages: Outages,
}

/// The two ends of a queue of events.
pub fn queue(client: Client, node_name: &str, outages: &Outages) -> (Events, Delivery) {
    let (sender, receiver) = mpsc::channel(QUEUE);
    let events = Events { queue: sender, node_name: node_name.to_owned() };
    (events, Delivery { api: Api::namespaced(client, NAMESPACE), queue: receiver, outages: outages.clone() })
}

impl Delivery {
    /// Runs until told to stop.
    pub async fn run(mut self, stop: CancellationToken) {
        let mut pace = Pace::new(&self.outages);
        while let Some(Some(event)) = stop.run_until_cancelled(self.queue.recv()).await {
            match stop.run_until_cancelled(self.write(&event, &mut pace)).await {
                Some(Ok(())) => pace.succeed(),
                Some(Err(cause)) => lost(&event, &cause),
                None => lost(&event, "the agent stops"),
            }
        }
    }

    /// Tries until it is written, refused, or old; why it is not.
    async fn write(&self, event: &Event, pace: &mut Pace) -> Result<(), String> {
        let (params, begun) = (post_params(), Instant::now());
        loop {
            pace.begin();
            let (failure, cause) = match tokio::time::timeout(PATIENCE, self.api.create(&params, event)).await {
                Ok(Ok(_)) => break,
                // A former try has arrived, and its answer has not.
                Ok(Err(Error::Api(status))) if status.code == CONFLICT => break,
                Ok(Err(error)) => {
                    let cause = Causes(&error).to_string();
                    match (&error, Failure::of(&error)) {
                        (Error::Api(status), Failure::Refusal) if status.code != TOO_MANY_REQUESTS => {
                            return Err(cause);
                        }
                        (_, failure) => (failure, cause),
                    }
                }
                Err(_) => (Failure::Absence, "a request took too long".to_owned()),
            };
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

/// What an event would have said.
fn lost(event: &Event, cause: &str) {
    let regarding = event.regarding.as_ref().and_then(|object| object.name.as_deref());
    let (reason, note) = (event.reason.as_deref(), event.note.as_deref());
    warn!(egressip = regarding, reason, note, cause, "an event could not be written");
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

    /// A warning about this agent's own node.
    pub fn warn_of_node(&self, reason: &str, message: &str) {
        self.queue(of_node(&self.node_name, reason, message, Timestamp::now()));
    }

    fn queue(&self, event: Event) {
        match self.queue.try_send(event) {
            Ok(()) => {}
            Err(TrySendError::Full(event)) => lost(&event, "too many events are waiting"),
            Err(TrySendError::Closed(event)) => lost(&event, "the agent stops"),
        }
    }

    fn event(&self, about: About<'_>, reason: &str, message: &str, now: Timestamp) -> Event {
        let pod = about.pod.map(|pod| ObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some("Pod".to_owned()),
            name: Some(pod.name.clone()),
            namespace: Some(pod.namespace.clone()),
            ..ObjectReference::default()
        });
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
fn of_node(node_name: &str, reason: &str, message: &str, now: Timestamp) -> Event {
    let regarding = ObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("Node".to_owned()),
        name: Some(node_name.to_owned()),
        uid: Some(node_name.to_owned()),
        ..ObjectReference::default()
    };
    warning((node_name, regarding), "Serve", (reason, message), now)
}

fn warning(
    (node_name, regarding): (&str, ObjectReference),
    action: &str,
    (reason, message): (&str, &str),
    now: Timestamp,
) -> Event {
    Event {
        metadata: ObjectMeta {
            name: Some(name(regarding.name.as_deref().unwrap_or_default(), now)),
            namespace: Some(NAMESPACE.to_owned()),
            ..ObjectMeta::default()
        },
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
pub async fn tell_of_node(client: Client, node_name: &str, outages: &Outages, (reason, message): (&str, &str)) {
    let (events, delivery) = queue(client, node_name, outages);
    events.warn_of_node(reason, message);
    // Without its sender the queue ends behind the event.
    drop(events);
    if tokio::time::timeout(LAST_WORD, delivery.run(CancellationToken::new())).await.is_err() {
        warn!(reason, "an event could not be written before the agent ends");
    }
}

/// The object's name and the time, as every writer of events does it; a long name leaves room for the time.
fn name(object: &str, now: Timestamp) -> String {
    let time = format!(".{:x}", now.as_nanosecond());
    // A part that ends in a dot or a dash would make no name.
    let object = cut(object, MAX_NAME - time.len()).trim_end_matches(['.', '-']);
    format!("{object}{time}")
}

/// As much of the text as fits, in whole characters.
fn cut(text: &str, bytes: usize) -> &str {
    &text[..text.floor_char_boundary(bytes)]
}

#[cfg(test)]
mod tests {
    use super::super::outage::Seen;
    use super::super::stub::{Server, until};
    use super::*;

    #[tokio::test]
    async fn an_event_waits_for_a_server_that_hangs_up() {
        let server = Server::start().await;
        let (client, outages) = server.client();
        let (events, delivery) = queue(client, "a", &outages);
        let stop = CancellationToken::new();
        let writing = tokio::spawn(delivery.run(stop.clone()));
        server.hang_up(2);
        let about = |name| About { name, uid: "u", pod: None };
        events.warn(about("one"), "EgressIPConflict", "first");
        events.warn(about("two"), "EgressIPConflict", "second");
        // Two tries in vain, then one for each.
        until("both are written", || server.asked("POST") == 4).await;
        stop.cancel();
        writing.await.expect("no panic");
        assert_eq!(outages.seen(), Seen::default(), "what fails at events alone is no outage");
    }

    #[tokio::test]
    async fn who_ends_writes_its_event_first() {
        let server = Server::start().await;
        let (client, outages) = server.client();
        tell_of_node(client, "a", &outages, ("SecondAgent", "another one runs here")).await;
        assert_eq!(server.asked("POST"), 1);
    }

    #[test]
    fn an_event_of_a_node_is_where_describe_looks_for_it() {
        let event = of_node("node1", "MapNearlyFull", "nat", Timestamp::UNIX_EPOCH);
        let regarding = event.regarding.expect("whom it is about");
        assert_eq!((regarding.kind.as_deref(), regarding.uid.as_deref()), (Some("Node"), Some("node1")));
        assert_eq!(
            (event.reporting_instance.as_deref(), event.reason.as_deref()),
            (Some("node1"), Some("MapNearlyFull"))
        );
        assert!(event.metadata.name.is_some_and(|name| name.starts_with("node1.")));
    }

    #[test]
    fn long_names_are_cut_where_the_api_refuses_them() {
        let now = Timestamp::UNIX_EPOCH + std::time::Duration::from_secs(1_700_000_000);
        assert_eq!(name("eip", now), "eip.17979cfe362a0000");
        let long = name(&format!("{}.b", "a".repeat(251)), now);
        assert_eq!(long.len(), MAX_NAME);
        assert!(name(&format!("{}.{}", "a".repeat(235), "b".repeat(17)), now).starts_with(&"a".repeat(235)));
        assert!(!name(&format!("{}.{}", "a".repeat(235), "b".repeat(17)), now).contains(".."));
    }

    #[test]
    fn a_note_is_cut_between_characters() {
        assert_eq!(cut("no\u{e9}", 3), "no");
        assert_eq!(cut("no\u{e9}", 4), "no\u{e9}");
        assert_eq!(cut("note", 1024), "note");
    }
}
