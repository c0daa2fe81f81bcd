//! Why a command failed: one line that says what to do.

use std::net::IpAddr;
use std::path::PathBuf;

use egress_kube::admin::RequestError;
use egress_kube::client::ClientError;
use egress_kube::drain::DrainError;

use crate::agents::NoAgent;
use crate::exec::ExecError;

#[derive(Debug, thiserror::Error)]
pub(crate) enum PluginError {
    #[error("cannot start: {0}")]
    Runtime(std::io::Error),
    #[error(transparent)]
    Client(#[from] ClientError),
    #[error(transparent)]
    Request(#[from] RequestError),
    #[error(transparent)]
    NoAgent(#[from] NoAgent),
    #[error(transparent)]
    Exec(#[from] ExecError),
    #[error(transparent)]
    Drain(#[from] DrainError),
    #[error("{0:?} is no format of drops: give -o table or -o json")]
    NoFormat(String),
    #[error("cannot print: {0}")]
    Stdout(std::io::Error),
    #[error("there is no pod {0}: kubectl get pods -A")]
    UnknownPod(String),
    #[error("pod {0} is on no node yet: kubectl describe pod")]
    Unscheduled(String),
    #[error("pod {0} uses its node's network: egress IPs are for pods with an address of their own")]
    HostNetwork(String),
    #[error("pod {0} has no address yet: kubectl describe pod")]
    NoPodAddress(String),
    #[error("no node serves an egress IP: kubectl get egressip")]
    NoGateways,
    #[error(
        "no object has {0} assigned now: kubectl get egressip,ega. An address that has moved to no node, or that an object has lost, \
         is not found"
    )]
    NotAssigned(IpAddr),
    #[error("--at needs the port too, as in 192.0.2.10:23210: an address belongs to many pods at a time")]
    NoPort,
    #[error("the agent on {node} ({pod}) cannot answer: {why}")]
    Refused { node: String, pod: String, why: String },
    #[error("the answer of the agent on {node} cannot be read ({source}): is it of another version than this plugin?")]
    Unreadable { node: String, source: serde_json::Error },
    #[error("no node has the tunnel endpoint {0}: kubectl get nodes -o wide")]
    UnknownEndpoint(IpAddr),
    #[error("there is no EgressIP {0}: kubectl get egressip")]
    NoObject(String),
    #[error(
        "EgressIP {object} does not select a pod of namespace {namespace} with {labels}: give a namespace by -n and labels by --labels \
         that it selects, see `kubectl get egressip {object} -o yaml`"
    )]
    NotSelected { object: String, namespace: String, labels: String },
    #[error("the agents' pods name no image: give --image, of egress-agent")]
    NoImage,
    #[error("interrupted; the pods of the check are removed")]
    Interrupted,
    #[error(
        "pods of the check are left in namespace {namespace} ({why}): kubectl -n {namespace} delete pod -l {selector}"
    )]
    NotRemoved { namespace: String, why: String, selector: &'static str },
    #[error("cannot write {}: {source}; give another --file", .file.display())]
    NoArchive { file: PathBuf, source: std::io::Error },
    #[error("cannot write the answer: {0}")]
    Unwritten(serde_json::Error),
}
