//! EgressIP (`k8s.ovn.org/v1`) as an egress policy.

pub(super) mod read;
pub(super) mod write;

use kube::Client;
use kube::api::{ApiResource, DynamicObject};

use crate::crd;
use crate::policy::{PolicyApi, StatusWriter};
use egress_core::model::policy::{EgressPolicy, PolicyKind};

pub(super) struct EgressIp;

impl PolicyApi for EgressIp {
    fn objects(&self) -> &'static str {
        "EgressIP objects"
    }

    fn resource(&self) -> ApiResource {
        crd::egressip_resource()
    }

    fn read(&self, object: &DynamicObject) -> EgressPolicy {
        read::policy(PolicyKind::EgressIp, object)
    }

    fn status_writer(&self, client: Client) -> Box<dyn StatusWriter> {
        Box::new(write::Writer::new(&client, PolicyKind::EgressIp))
    }
}
