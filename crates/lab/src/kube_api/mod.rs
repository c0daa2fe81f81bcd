//! Kubernetes as the lab's agents see it.
//!
//! ```text
//!  agents on nodes --> 172.18.0.1:6443 in `ext` --relay--> API server on the root namespace's loopback <-- kubectl
//! ```
//!
//! The API server is the in-memory one (the default), one that a kubeconfig names, or etcd and kube-apiserver from
//! `KUBEBUILDER_ASSETS`. Nodes reach each by the same relay, so that a node which is cut off has no API server. The lab writes
//! what kubelets, a CNI and OVN-Kubernetes would: ready nodes, annotations, and running pods with addresses ([`objects`]).

mod control_plane;
mod kubeconfig;
mod kubectl;
pub mod objects;
mod relay;
mod rights;
mod shared_server;

use std::fmt;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use axum::http::{Method, Request};
use kube::Client;
use serde_json::Value;
use tokio::runtime::Runtime;

use crate::apiserver::{self, ApiServer};
use crate::topology::addresses::{self as plan, NodeNumber};
use crate::topology::lab::{Lab, LabNode, LabPod};
use crate::wait::poll;
pub use control_plane::{ControlPlane, ControlPlaneLocation, etcd_arguments};
use egress_toolchain::Paths;
pub(crate) use kubeconfig::client;
pub use kubectl::{EGRESS, EGRESS_IP, EXTERNAL_IP_POOL, GATEWAY_POLICY, GATEWAY_POLICY_STATUS, TypedKind};
use objects::LabLoadBalancer;
use relay::Relay;

/// The port on `ext` that agents find their API server at.
pub const API_PORT: u16 = 6443;

/// Which API server a lab has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ApiChoice {
    InMemory,
    /// One that is already there.
    Kubeconfig(PathBuf),
    /// etcd and kube-apiserver from this folder.
    Assets(PathBuf),
}

impl ApiChoice {
    /// A kubeconfig that was given wins over `KUBEBUILDER_ASSETS`, which wins over the in-memory server.
    pub fn new(kubeconfig: Option<PathBuf>) -> Self {
        match (kubeconfig, std::env::var_os("KUBEBUILDER_ASSETS")) {
            (Some(path), _) => Self::Kubeconfig(path),
            (None, Some(folder)) if !folder.is_empty() => Self::Assets(PathBuf::from(folder)),
            (None, _) => Self::InMemory,
        }
    }

    /// Anything but the test double?
    pub fn is_real(&self) -> bool {
        *self != Self::InMemory
    }
}

impl fmt::Display for ApiChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::InMemory => f.write_str("the lab's in-memory API server"),
            Self::Kubeconfig(path) => write!(f, "the API server of {}", path.display()),
            Self::Assets(folder) => write!(f, "etcd and kube-apiserver from {}", folder.display()),
        }
    }
}

/// The lab's Kubernetes. Dropping it stops what it started; objects in a server that was there before stay unless
/// [`Cluster::remove_objects`] is called.
pub struct KubeApi {
    // Fields are dropped in this order: who calls goes before who is called, the runtime last.
    client: Client,
    _relay: Relay,
    server: Option<ApiServer>,
    _control_plane: Option<ControlPlane>,
    for_people: PathBuf,
    for_nodes: PathBuf,
    for_controllers: PathBuf,
    made: std::sync::Mutex<Vec<String>>,
    description: String,
    runtime: Runtime,
}

/// More than anybody writes an object in a row.
const REPLACE_TRIES: usize = 20;

impl KubeApi {
    /// Starts or finds the API server and makes it known to the nodes. It has no objects of the lab yet.
    pub fn start(lab: &Lab, choice: &ApiChoice) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
        let for_people = lab.folder().join("kubeconfig");
        let for_nodes = lab.folder().join("kubeconfig-nodes");
        let for_controllers = lab.folder().join("kubeconfig-controllers");
        let (mut server, mut control_plane) = (None, None);
        match choice {
            ApiChoice::InMemory => {
                let listener = TcpListener::bind("127.0.0.1:0").context("cannot listen on loopback")?;
                let _inside = runtime.enter();
                let started = ApiServer::serve(listener)?;
                std::fs::write(&for_people, apiserver::kubeconfig(&started.url()))?;
                server = Some(started);
            }
            ApiChoice::Kubeconfig(path) => kubeconfig::copy(path, &for_people)?,
            ApiChoice::Assets(folder) => {
                let started = ControlPlane::start(
                    &ControlPlaneLocation {
                        folder: lab.folder().join("control-plane"),
                        logs: lab.logs(),
                        prefix: lab.prefix(),
                    },
                    folder,
                )?;
                std::fs::write(&for_people, started.kubeconfig())?;
                control_plane = Some(started);
            }
        }
        let inside = SocketAddr::new(plan::EXT.v4.into(), API_PORT);
        let target = kubeconfig::for_nodes(&for_people, inside, &for_nodes)?;
        std::fs::copy(&for_nodes, &for_controllers)?;
        let listener = lab.ext().run(|| Ok(TcpListener::bind(inside)?)).context("cannot listen for the nodes")?;
        let relay = Relay::start(&runtime, listener, target)?;
        let client = runtime.block_on(kubeconfig::client(&for_people))?;
        let made = std::sync::Mutex::default();
        let description = choice.to_string();
        let (_relay, _control_plane) = (relay, control_plane);
        let mut api = Self {
            client,
            _relay,
            server,
            _control_plane,
            for_people,
            for_nodes,
            for_controllers,
            made,
            description,
            runtime,
        };
        api.introduce_agents(choice)?;
        Ok(api)
    }

    /// Agents get the rights that they are shipped with.
    fn introduce_agents(&mut self, choice: &ApiChoice) -> Result<()> {
        let base = Paths::find()?.root.join("deploy/base");
        self.install_crd(&base.join("egressnodes.yaml"))?;
        self.install_crd(&base.join("egressassignments.yaml"))?;
        self.install_crd(&base.join("../crd/egressservices.yaml"))?;
        self.install_crd(&base.join("../antrea/egresses.yaml"))?;
        self.install_crd(&base.join("../antrea/externalippools.yaml"))?;
        self.install_crd(&base.join("../cilium/ciliumegressgatewaypolicies.yaml"))?;
        self.install_crd(&base.join("../cilium/egressgatewaypolicystatuses.yaml"))?;
        self.install_crd(&base.join("../egress-router/controller/egressrouters.yaml"))?;
        let manifests = ["rbac.yaml", "../egress-router/controller/rbac.yaml"].map(|path| base.join(path));
        match self.restrict_agents(&manifests) {
            Ok(()) => self.description.push_str("; agents have the rights of deploy/base/rbac.yaml and no others"),
            // A foreign server may have no service accounts; the story runs without them.
            Err(error) if matches!(choice, ApiChoice::Kubeconfig(_)) => {
                let words =
                    format!("; agents use its own credentials, NOT the rights of deploy/base/rbac.yaml: {error:#}");
                self.description.push_str(&words);
            }
            Err(error) => return Err(error.context("the agents cannot be given their rights")),
        }
        Ok(())
    }

    /// Which API server it is, for people.
    pub fn description(&self) -> &str {
        &self.description
    }

    /// The kubeconfig for people and tools in the root namespace.
    pub fn kubeconfig(&self) -> &Path {
        &self.for_people
    }

    /// The kubeconfig for agents, inside the nodes' namespaces.
    pub fn node_kubeconfig(&self) -> &Path {
        &self.for_nodes
    }

    /// The same for controllers.
    pub fn controller_kubeconfig(&self) -> &Path {
        &self.for_controllers
    }

    /// The in-memory server, if that is the one: tests cut it off and make it forget.
    pub fn in_memory(&self) -> Option<&ApiServer> {
        self.server.as_ref()
    }

    /// For code that speaks to the API server on its own.
    pub fn client(&self) -> Client {
        self.client.clone()
    }

    pub fn runtime(&self) -> &Runtime {
        &self.runtime
    }

    /// Makes the nodes, namespaces and pods of the lab, as a kubelet and a CNI leave them.
    pub fn publish(&self, lab: &Lab) -> Result<()> {
        lab.nodes().iter().try_for_each(|node| self.publish_node(node))?;
        let mut namespaces: Vec<&str> = lab.pods().iter().map(|pod| pod.namespace.as_str()).collect();
        namespaces.sort_unstable();
        namespaces.dedup();
        for namespace in namespaces {
            self.publish_namespace(namespace)?;
        }
        lab.pods().iter().try_for_each(|pod| {
            // One that a killed lab has left where no controller empties namespaces.
            self.delete(&format!("/api/v1/namespaces/{}/pods/{}", pod.namespace, pod.name))?;
            self.publish_pod(pod)
        })
    }

    /// Makes a node that is ready, without labels.
    pub fn publish_node(&self, node: &LabNode) -> Result<()> {
        self.claim_alone("/api/v1/nodes", objects::node(node.number, node.config.cni))?;
        self.set_ready(node.number, true)
    }

    fn publish_namespace(&self, name: &str) -> Result<()> {
        if name != "default" {
            self.claim_alone("/api/v1/namespaces", objects::namespace(name))?;
        }
        // A real API server refuses pods without it; one that does not know the kind does not need it.
        let accounts = format!("/api/v1/namespaces/{name}/serviceaccounts");
        match self.get(&accounts)? {
            Some(_) => self.create(&accounts, &objects::service_account(name)).map(drop),
            None => Ok(()),
        }
    }

    /// Makes one pod that runs and has its addresses.
    pub fn publish_pod(&self, pod: &LabPod) -> Result<()> {
        let collection = format!("/api/v1/namespaces/{}/pods", pod.namespace);
        self.create(&collection, &objects::pod(pod))?;
        self.patch_status(&format!("{collection}/{}", pod.name), &objects::pod_status(pod))
    }

    /// Makes a Service of type `LoadBalancer` that has its addresses and leads to these pods, or leads it to them.
    pub fn publish_load_balancer(&self, balancer: &LabLoadBalancer, pods: &[&LabPod]) -> Result<()> {
        let services = format!("/api/v1/namespaces/{}/services", balancer.namespace);
        self.create(&services, &objects::load_balancer(balancer))?;
        self.patch_status(&format!("{services}/{}", balancer.name), &objects::load_balancer_status(balancer))?;
        let slices = format!("/apis/discovery.k8s.io/v1/namespaces/{}/endpointslices", balancer.namespace);
        let of_family = |is_v4| self.create(&slices, &objects::endpoint_slice(balancer, pods, is_v4)).map(drop);
        [true, false].into_iter().try_for_each(of_family)
    }

    /// What the node lifecycle controller does when a node is gone or back.
    pub fn set_ready(&self, node: NodeNumber, ready: bool) -> Result<()> {
        self.patch_status(&format!("/api/v1/nodes/{}", node.name()), &objects::node_status(node, ready))
    }

    /// Creates an object, or merges it into the one of that name. Says whether it is new.
    pub fn create(&self, collection: &str, object: &Value) -> Result<bool> {
        let name = object.pointer("/metadata/name").and_then(Value::as_str).context("an object without a name")?;
        let path = format!("{collection}/{name}");
        match self.request(&Method::POST, collection, "application/json", object) {
            Ok(_) => {
                self.remember(path);
                Ok(true)
            }
            Err(error) if status_code(&error) == Some(409) => self.merge(&path, object).map(|()| false),
            Err(error) => Err(error).with_context(|| format!("cannot create {path}")),
        }
    }

    /// JSON merge patch.
    pub fn merge(&self, path: &str, patch: &Value) -> Result<()> {
        let patched = self.request(&Method::PATCH, path, "application/merge-patch+json", patch);
        patched.map(drop).with_context(|| format!("cannot patch {path}"))
    }

    /// Server-side apply by this manager; the object as it then is.
    pub fn apply(&self, path: &str, manager: &str, object: &Value) -> Result<Value> {
        let to = format!("{path}?fieldManager={manager}");
        let applied = self.request(&Method::PATCH, &to, "application/apply-patch+yaml", object);
        self.remember(path.to_owned());
        applied.with_context(|| format!("cannot apply {path}"))
    }

    /// Writes an object as it is given over the one that is there: what is not in it goes. As often as others, who write its
    /// status at the same time, are faster.
    pub fn replace(&self, path: &str, object: &Value) -> Result<()> {
        let mut object = object.clone();
        let has_annotations = !object["metadata"]["annotations"].is_null();
        for tries_left in (0..REPLACE_TRIES).rev() {
            let now = self.get(path)?.with_context(|| format!("there is no {path}"))?;
            object["metadata"]["resourceVersion"] = now["metadata"]["resourceVersion"].clone();
            if !has_annotations {
                object["metadata"]["annotations"] = now["metadata"]["annotations"].clone();
            }
            match self.request(&Method::PUT, path, "application/json", &object) {
                Err(error) if status_code(&error) == Some(409) && tries_left > 0 => {}
                replaced => return replaced.map(drop).with_context(|| format!("cannot replace {path}")),
            }
        }
        Ok(())
    }

    pub fn patch_status(&self, path: &str, status: &Value) -> Result<()> {
        self.merge(&format!("{path}/status"), status)
    }

    pub fn delete(&self, path: &str) -> Result<()> {
        // No kubelet here would end a pod's grace period.
        let options = serde_json::json!({"gracePeriodSeconds": 0});
        match self.request(&Method::DELETE, path, "application/json", &options) {
            Err(error) if status_code(&error) != Some(404) => {
                Err(error).with_context(|| format!("cannot delete {path}"))
            }
            _ => Ok(()),
        }
    }

    /// The object or list at a path; `None` when there is none.
    pub fn get(&self, path: &str) -> Result<Option<Value>> {
        match self.request(&Method::GET, path, "application/json", &Value::Null) {
            Ok(value) => Ok(Some(value)),
            Err(error) if status_code(&error) == Some(404) => Ok(None),
            Err(error) => Err(error).with_context(|| format!("cannot read {path}")),
        }
    }

    /// Waits until the object at a path is as wanted.
    pub fn wait_for(&self, path: &str, patience: Duration, wanted: impl Fn(&Value) -> bool) -> Result<Value> {
        let mut last = None;
        let found = poll(patience, || {
            last = self.get(path)?;
            Ok(last.clone().filter(&wanted))
        })?;
        found.with_context(|| {
            let shown = last.map_or("nothing".to_owned(), |value| value.to_string());
            format!("{path} did not become as wanted within {} s, it is: {shown}", patience.as_secs_f32())
        })
    }

    fn request(&self, method: &Method, path: &str, content: &str, body: &Value) -> kube::Result<Value> {
        let body = if body.is_null() { Vec::new() } else { body.to_string().into_bytes() };
        let request = Request::builder().method(method).uri(path).header("content-type", content);
        let request = request.body(body).map_err(kube::Error::HttpError)?;
        self.runtime.block_on(self.client.request::<Value>(request))
    }
}

fn status_code(error: &kube::Error) -> Option<u16> {
    match error {
        kube::Error::Api(status) => Some(status.code),
        _ => None,
    }
}
