//! From Kubernetes objects to values of `egress_core::model`; [`crate::policy`] converts egress policies. Pure.
//!
//! What cannot be read becomes a problem that is named in the value; it blocks nothing else.

pub mod interface;
pub mod node;
pub mod pod;
pub mod service;

pub use crate::convert::node::{AgentFacts, agent_facts, joined, node};
pub use crate::convert::pod::{pod, pod_key};
pub use crate::convert::service::{service, service_key};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use egress_core::model::view::CreationTimestamp;

/// Maximum bytes of a problem: it may quote what a user has written.
pub(crate) const MOST_OF_PROBLEM: usize = 256;

/// IANA's number of a port's protocol. The default is TCP.
fn protocol(name: Option<&str>) -> Option<u8> {
    match name {
        None | Some("TCP") => Some(6),
        Some("UDP") => Some(17),
        Some("SCTP") => Some(132),
        Some(_) => None,
    }
}

pub(crate) fn created(meta: &ObjectMeta) -> CreationTimestamp {
    meta.creation_timestamp.as_ref().map_or(CreationTimestamp::MAX, |time| time.0.as_second())
}

pub(crate) fn annotation<'a>(meta: &'a ObjectMeta, key: &str) -> Option<&'a str> {
    meta.annotations.as_ref()?.get(key).map(String::as_str)
}
