//! The APIs that egress policies are written in, behind one seam.
//!
//! Everything else knows policies only. Agents read two kinds of objects, EgressIP and EgressAssignment. To add an API: a
//! variant of [`SourceKind`](egress_core::model::policy::SourceKind) (its place is its precedence), and a task of the controller
//! that makes assignments of its objects; the rights in `deploy/` must cover it.

mod assignment;
mod egress_ip;
pub mod status;

use futures::future::BoxFuture;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Client;
use kube::api::{Api, ApiResource, DynamicObject};

use crate::convert::created;
use crate::policy::assignment::EgressAssignments;
use crate::policy::egress_ip::EgressIp;
pub(crate) use crate::policy::egress_ip::read::selector;
use crate::policy::status::{DesiredStatus, WriteError};
use egress_core::model::policy::{EgressPolicy, PolicyKey, PolicyKind, PolicyOrigin};

/// What differs between the APIs.
pub trait PolicyApi: Sync {
    /// What logs call the objects.
    fn objects(&self) -> &'static str;

    /// Objects are read untyped: one that another version of the schema let through does not hide the others.
    fn resource(&self) -> ApiResource;

    /// Reads any object. What cannot be read is named in [`EgressPolicy::unreadable`].
    fn read(&self, object: &DynamicObject) -> EgressPolicy;

    fn status_writer(&self, client: Client) -> Box<dyn StatusWriter>;
}

/// Writes what the controller decides into objects of one kind.
pub trait StatusWriter: Send + Sync {
    /// Whether nothing is to be written.
    fn is_current(&self, policy: &EgressPolicy, desired: &DesiredStatus) -> bool;

    /// Writes what differs, if the object is still the one that was read. Returns the policy as the server has it then.
    fn write<'a>(
        &'a self,
        policy: &'a EgressPolicy,
        desired: &'a DesiredStatus,
    ) -> BoxFuture<'a, Result<EgressPolicy, WriteError>>;
}

/// The API of a kind: where each is registered.
pub fn api_of(kind: PolicyKind) -> &'static dyn PolicyApi {
    match kind {
        PolicyKind::Assignment => &EgressAssignments,
        PolicyKind::EgressIp => &EgressIp,
    }
}

/// Requests about the objects of one API.
pub fn requests(client: &Client, kind: PolicyKind) -> Api<DynamicObject> {
    Api::all_with(client.clone(), &api_of(kind).resource())
}

/// The status writers of all APIs.
pub struct StatusWriters([Box<dyn StatusWriter>; PolicyKind::ALL.len()]);

impl StatusWriters {
    pub fn new(client: &Client) -> Self {
        Self(PolicyKind::ALL.map(|kind| api_of(kind).status_writer(client.clone())))
    }

    pub fn of(&self, policy: &EgressPolicy) -> &dyn StatusWriter {
        &*self.0[policy.key().kind as usize]
    }
}

/// The origin of a policy, by the metadata of its object.
fn origin(kind: PolicyKind, meta: &ObjectMeta) -> PolicyOrigin {
    PolicyOrigin {
        key: PolicyKey { kind, name: meta.name.clone().unwrap_or_default() },
        uid: meta.uid.clone().unwrap_or_default(),
        resource_version: meta.resource_version.clone().unwrap_or_default(),
        generation: meta.generation,
        created: created(meta),
    }
}
