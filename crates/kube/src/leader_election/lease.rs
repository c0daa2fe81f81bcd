//! The leader's Lease: input and output for `egress_core::leader_election`.

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Api, ObjectMeta};
use kube::{Client, Error};

use crate::post_params;
use egress_core::leader_election::{ElectionRecord, ElectionStep, Timing};

pub const LEASE_NAME: &str = "egress-agent-leader";

/// A Lease in a namespace, as last read.
pub struct LeaderLease {
    api: Api<Lease>,
    lease: Option<Lease>,
    /// The latest resource version, and a rollback that has not been reported yet: the latest and the greater one before.
    version: u64,
    rollback: Option<(u64, u64)>,
}

impl LeaderLease {
    pub fn new(client: Client, namespace: &str) -> Self {
        Self { api: Api::namespaced(client, namespace), lease: None, version: 0, rollback: None }
    }

    pub async fn read(&mut self) -> Result<Option<ElectionRecord>, Error> {
        self.lease = self.api.get_opt(LEASE_NAME).await?;
        self.note_version();
        Ok(self.lease.as_ref().map(record))
    }

    /// Resource versions of one kind only grow, even if an object is created again, and no cache answers here. A smaller version
    /// means that the server's data have been replaced by older data.
    fn note_version(&mut self) {
        let version = self.lease.as_ref().and_then(|lease| lease.metadata.resource_version.as_ref()?.parse().ok());
        let Some(version) = version else { return };
        if version < self.version {
            self.rollback = Some((version, self.version));
        }
        self.version = version;
    }

    /// The latest version and the greater one before, if the server was rolled back since the last call.
    pub fn take_rollback(&mut self) -> Option<(u64, u64)> {
        self.rollback.take()
    }

    /// Writes the step over the last version that was read. `None` if another writer was faster.
    pub async fn write(
        &mut self,
        step: &ElectionStep,
        identity: &str,
        timing: Timing,
    ) -> Result<Option<ElectionRecord>, Error> {
        let now = MicroTime(Timestamp::now());
        let known = self.lease.clone().and_then(|lease| lease.spec).unwrap_or_default();
        let mut spec = LeaseSpec {
            holder_identity: Some(identity.to_owned()),
            lease_duration_seconds: i32::try_from(timing.lease_duration.as_secs()).ok(),
            renew_time: Some(now.clone()),
            ..known
        };
        match step {
            ElectionStep::Wait => return Ok(None),
            ElectionStep::Renew => {}
            ElectionStep::Create { transitions } | ElectionStep::TakeOver { transitions } => {
                (spec.acquire_time, spec.lease_transitions) = (Some(now), Some(*transitions));
            }
        }
        self.put(spec).await
    }

    /// Releases the Lease, so that another controller need not wait.
    pub async fn release(&mut self) -> Result<(), Error> {
        let Some(spec) = self.lease.clone().and_then(|lease| lease.spec) else { return Ok(()) };
        let spec = LeaseSpec {
            holder_identity: Some(String::new()),
            lease_duration_seconds: Some(1),
            renew_time: Some(MicroTime(Timestamp::now())),
            ..spec
        };
        self.put(spec).await.map(|_| ())
    }

    async fn put(&mut self, spec: LeaseSpec) -> Result<Option<ElectionRecord>, Error> {
        let written = match &self.lease {
            // Conditional on the last version that was read: a conflict is another writer, and so is a deleted Lease.
            Some(lease) => {
                let lease = Lease { spec: Some(spec), ..lease.clone() };
                self.api.replace(LEASE_NAME, &post_params(), &lease).await
            }
            None => {
                let metadata = ObjectMeta { name: Some(LEASE_NAME.to_owned()), ..ObjectMeta::default() };
                self.api.create(&post_params(), &Lease { metadata, spec: Some(spec) }).await
            }
        };
        match written {
            Ok(lease) => {
                let record = record(&lease);
                self.lease = Some(lease);
                self.note_version();
                Ok(Some(record))
            }
            Err(Error::Api(status)) if status.code == 409 || (status.code == 404 && self.lease.is_some()) => Ok(None),
            Err(error) => Err(error),
        }
    }
}

fn record(lease: &Lease) -> ElectionRecord {
    let spec = lease.spec.clone().unwrap_or_default();
    let text = |time: Option<MicroTime>| time.map(|time| time.0.to_string()).unwrap_or_default();
    let seconds = u64::try_from(spec.lease_duration_seconds.unwrap_or(0)).unwrap_or(0);
    ElectionRecord {
        holder: spec.holder_identity.unwrap_or_default(),
        duration: std::time::Duration::from_secs(seconds),
        renewed: text(spec.renew_time),
        acquired: text(spec.acquire_time),
        transitions: spec.lease_transitions.unwrap_or(0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stub::StubServer;

    #[tokio::test]
    async fn a_rollback_of_the_server_is_reported_once() {
        let mut lease = LeaderLease::new(StubServer::start().await.client().0, "there");
        let mut seen = |version: Option<&str>| {
            let metadata = ObjectMeta { resource_version: version.map(str::to_owned), ..ObjectMeta::default() };
            lease.lease = version.map(|_| Lease { metadata, spec: None });
            lease.note_version();
            lease.take_rollback()
        };
        let versions = [Some("7"), Some("99"), None, Some("100"), Some("98"), Some("98"), Some("101"), Some("x")];
        let expected = [None, None, None, None, Some((98, 100)), None, None, None];
        assert_eq!(versions.map(&mut seen), expected);
    }
}
