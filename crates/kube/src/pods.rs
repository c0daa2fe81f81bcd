//! One pod, for a command that nobody else can tell of it.

use std::net::IpAddr;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use kube::api::ListParams;
use kube::{Api, Client};
use tokio::time::timeout;

use crate::convert;

const PATIENCE: Duration = Duration::from_secs(5);

#[derive(Debug, thiserror::Error)]
pub enum PodError {
    #[error("there is no such pod")]
    NotThere,
    #[error("{0}")]
    Refused(Box<kube::Error>),
    #[error("it does not answer within {} s", PATIENCE.as_secs())]
    Silent,
}

/// The pod's addresses: what the kubelet reports, else what a CNI announces. A list of one: that is a right which agents have.
pub async fn addresses(client: Client, namespace: &str, name: &str) -> Result<Vec<IpAddr>, PodError> {
    let api: Api<Pod> = Api::namespaced(client, namespace);
    let one = ListParams::default().fields(&format!("metadata.name={name}"));
    let found = timeout(PATIENCE, api.list(&one)).await.map_err(|_| PodError::Silent)?;
    let found = found.map_err(|error| PodError::Refused(Box::new(error)))?;
    let pod = found.items.first().ok_or(PodError::NotThere)?;
    let pod = convert::pod(pod);
    Ok(if pod.reported.is_empty() { pod.announced } else { pod.reported }.into_iter().collect())
}
