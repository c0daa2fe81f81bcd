//! Events on EgressIP objects.
//!
//! Each carries the object's UID, so that `kubectl describe` shows it. They are created one by one: kube's recorder
//! counts events of one reason as one and would drop the differing texts, and callers here publish once per change.

use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Api, ObjectMeta, PostParams};
use kube::{Client, Resource};
use tracing::warn;

use super::crd::EgressIP;
use crate::model::view::PodKey;

/// Where events of objects without a namespace are kept.
const NAMESPACE: &str = "default";
/// The API refuses longer notes.
const MAX_NOTE: usize = 1024;

#[derive(Clone)]
pub struct Events {
    api: Api<Event>,
    node_name: String,
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
    pub fn new(client: Client, node_name: &str) -> Self {
        Self { api: Api::namespaced(client, NAMESPACE), node_name: node_name.to_owned() }
    }

    /// A warning. That it cannot be written is a line in the log, no more.
    pub async fn warn(&self, about: About<'_>, reason: &str, message: &str) {
        let event = self.event(about, reason, message, Timestamp::now());
        if let Err(error) = self.api.create(&PostParams::default(), &event).await {
            warn!(egressip = about.name, reason, message, %error, "cannot write an event");
        }
    }

    fn event(&self, about: About<'_>, reason: &str, message: &str, now: Timestamp) -> Event {
        let note = message.char_indices().take_while(|(i, c)| i + c.len_utf8() <= MAX_NOTE).map(|(_, c)| c).collect();
        let pod = about.pod.map(|pod| ObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some("Pod".to_owned()),
            name: Some(pod.name.clone()),
            namespace: Some(pod.namespace.clone()),
            ..ObjectReference::default()
        });
        Event {
            metadata: ObjectMeta {
                name: Some(format!("{}.{:x}", about.name, now.as_nanosecond())),
                namespace: Some(NAMESPACE.to_owned()),
                ..ObjectMeta::default()
            },
            action: Some("Assign".to_owned()),
            event_time: Some(MicroTime(now)),
            note: Some(note),
            reason: Some(reason.to_owned()),
            regarding: Some(ObjectReference {
                api_version: Some(EgressIP::api_version(&()).into_owned()),
                kind: Some(EgressIP::kind(&()).into_owned()),
                name: Some(about.name.to_owned()),
                uid: Some(about.uid.to_owned()),
                ..ObjectReference::default()
            }),
            related: pod,
            reporting_controller: Some("egress-agent".to_owned()),
            reporting_instance: Some(self.node_name.clone()),
            type_: Some("Warning".to_owned()),
            ..Event::default()
        }
    }
}
