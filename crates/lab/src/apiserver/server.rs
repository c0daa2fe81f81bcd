//! The server as the lab holds it: started on a listener, talked to in-process, cut off and stopped.

use std::net::{SocketAddr, TcpListener};
use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result};
use axum::Router;
use axum::extract::{DefaultBodyLimit, State};
use axum::http::Method;
use axum::middleware::{Next, from_fn_with_state};
use axum::response::Response;
use serde_json::{Value, json};
use tokio::task::JoinHandle;

use super::connections::{Switch, SwitchedListener};
use super::http::{self, ApiRequest, ApiResponse};
use super::lag::Lag;
use super::status::ApiError;
use super::store::{Backup, Store};

/// As much as a real server takes in one object.
const MAX_BODY: usize = 3 * 1024 * 1024;

pub struct ApiServer {
    address: SocketAddr,
    store: Arc<Store>,
    switch: Switch,
    delay: Delay,
    task: JoinHandle<()>,
}

/// How late answers are.
#[derive(Clone, Default)]
struct Delay {
    /// In milliseconds; `None` for at once.
    usual: Arc<Mutex<Option<RangeInclusive<u64>>>>,
    /// Each sixteenth takes 1.5 s.
    is_uneven: Arc<AtomicBool>,
    answered: Arc<AtomicU64>,
}

impl Delay {
    fn set(&self, usual: RangeInclusive<u64>, is_uneven: bool) {
        *self.usual.lock().unwrap_or_else(PoisonError::into_inner) = Some(usual);
        self.is_uneven.store(is_uneven, Ordering::Relaxed);
    }

    /// Of the next answer.
    fn next(&self) -> Option<Duration> {
        let usual = self.usual.lock().unwrap_or_else(PoisonError::into_inner).clone()?;
        let number = self.answered.fetch_add(1, Ordering::Relaxed);
        let (first, width) = (usual.start(), usual.end() - usual.start() + 1);
        let is_rare = self.is_uneven.load(Ordering::Relaxed) && number % 16 == 15;
        let milliseconds = if is_rare { 1500 } else { first + number.wrapping_mul(137) % width };
        Some(Duration::from_millis(milliseconds))
    }
}

/// Hands on an answer when its time has come.
async fn late(State(delay): State<Delay>, request: axum::extract::Request, next: Next) -> Response {
    let answer = next.run(request).await;
    if let Some(late) = delay.next() {
        tokio::time::sleep(late).await;
    }
    answer
}

impl ApiServer {
    /// Serve on a new listener. Needs a tokio runtime around it, as does [`ApiServer::serve`].
    pub fn bind(address: SocketAddr) -> Result<Self> {
        let listener = TcpListener::bind(address).with_context(|| format!("cannot listen on {address}"))?;
        Self::serve(listener)
    }

    /// Serve on a listener that may have been bound elsewhere, in another network namespace for one.
    pub fn serve(listener: TcpListener) -> Result<Self> {
        listener.set_nonblocking(true).context("cannot make the API server's listener asynchronous")?;
        let address = listener.local_addr().context("the API server's listener has no address")?;
        let listener = tokio::net::TcpListener::from_std(listener).context("the API server needs a tokio runtime")?;
        let store = Arc::new(Store::new());
        let switch = Switch::default();
        let delay = Delay::default();
        let routes = Router::new()
            .fallback(http::serve)
            .layer(from_fn_with_state(delay.clone(), late))
            .layer(DefaultBodyLimit::max(MAX_BODY))
            .with_state(store.clone());
        let door = SwitchedListener { listener, switch: switch.clone() };
        let task = tokio::spawn(async move {
            if let Err(error) = axum::serve(door, routes).await {
                tracing::error!(%error, "the API server ended");
            }
        });
        let server = Self { address, store, switch, delay, task };
        for namespace in ["default", "kube-system", "kube-public", "kube-node-lease"] {
            server.create("/api/v1/namespaces", &json!({"metadata": {"name": namespace}}))?;
        }
        Ok(server)
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// POST to a collection such as `/api/v1/nodes`.
    pub fn create(&self, collection: &str, object: &Value) -> Result<Value, ApiError> {
        self.request(&Method::POST, collection, "application/json", object)
    }

    /// Any request handled as over HTTP, without the wire: a patch of a status, say, is PATCH of `<path>/status`
    /// with the content type `application/merge-patch+json`. No body is `Value::Null`.
    pub fn request(&self, method: &Method, path: &str, content_type: &str, body: &Value) -> Result<Value, ApiError> {
        let body = if body.is_null() { Vec::new() } else { body.to_string().into_bytes() };
        let request = ApiRequest {
            method,
            path,
            query: &[],
            accept: "",
            content_type,
            user_agent: "xtask",
            authorization: "",
            body: &body,
        };
        match http::answer(&self.store, &request)? {
            ApiResponse::Json { body, .. } => Ok(body),
            ApiResponse::Text { text, .. } => Ok(json!(text)),
            ApiResponse::Watch(_) => Err(ApiError::method_not_allowed()),
        }
    }

    /// Forget the history of changes: watches and paged lists from before are answered 410 Gone.
    pub fn compact(&self) {
        self.store.compact();
    }

    /// What `map` makes of each of these objects, without an answer being made of them.
    pub fn survey<T>(&self, storage: &str, map: impl Fn(&Value) -> T) -> Vec<T> {
        self.store.lock().list(storage).values().map(|object| map(object)).collect()
    }

    /// Stores objects as they are given, as a restored backup would: nothing is checked, and nothing is added.
    pub fn restore(&self, storage: &str, objects: impl IntoIterator<Item = Value>) {
        let storage: Arc<str> = Arc::from(storage);
        for object in objects {
            self.store.write(|state| state.put(&storage, object));
        }
    }

    /// All that is stored now, and its version.
    pub fn save(&self) -> Backup {
        self.store.save()
    }

    /// A restore from a backup: connections are cut, and objects and version are those of then. Says how many versions are lost.
    pub fn go_back(&self, backup: &Backup) -> u64 {
        self.set_outage(true);
        let lost = self.store.go_back(backup);
        self.set_outage(false);
        lost
    }

    /// How many changes of these objects were stored so far; those that changed nothing do not count.
    pub fn written(&self, storage: &str) -> u64 {
        self.store.lock().written(storage)
    }

    /// How many watches clients have; those of clients that are cut off count until their connections end.
    pub fn watches(&self) -> usize {
        self.store.watches()
    }

    /// An outage: every connection is cut and new ones are closed at once, until it is called with `false`.
    pub fn set_outage(&self, is_out: bool) {
        self.switch.set_outage(is_out);
    }

    /// From now on answers are late: by 300 to 700 ms, and each sixteenth by 1.5 s. What was asked for is done before.
    pub fn be_slow(&self) {
        self.delay.set(300..=700, true);
    }

    /// Likewise by as many milliseconds, one answer like the other.
    pub fn answer_late(&self, milliseconds: RangeInclusive<u64>) {
        self.delay.set(milliseconds, false);
    }

    /// From now on each watch, and each list that asks for any version, is late by a random time in this range (milliseconds).
    pub fn lag(&self, seed: u64, milliseconds: RangeInclusive<u64>) {
        self.store.lock().lag = Some(Lag::new(seed, milliseconds));
    }

    /// Stop: cut the connections and close the listener.
    pub async fn stop(mut self) {
        self.switch.set_outage(true);
        self.task.abort();
        // The only error of an aborted task is that it was aborted.
        (&mut self.task).await.unwrap_or_default();
    }
}

impl Drop for ApiServer {
    fn drop(&mut self) {
        self.switch.set_outage(true);
        self.task.abort();
    }
}

/// A kubeconfig for a server at this address, without credentials.
pub fn kubeconfig(url: &str) -> String {
    format!(
        "apiVersion: v1\n\
         kind: Config\n\
         clusters:\n\
         - name: lab\n  \
           cluster:\n    \
             server: {url}\n\
         users:\n\
         - name: lab\n  \
           user: {{}}\n\
         contexts:\n\
         - name: lab\n  \
           context:\n    \
             cluster: lab\n    \
             user: lab\n\
         current-context: lab\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_lab_seeds_and_reads_without_the_wire() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("loopback has ports");
        let server = ApiServer::serve(listener).expect("a runtime is around");
        let nodes = "/api/v1/nodes";
        server.create(nodes, &json!({"metadata": {"name": "n"}})).expect("a new node");
        let again = server.create(nodes, &json!({"metadata": {"name": "n"}})).expect_err("it is there");
        assert_eq!(again.code(), 409);
        let ready = json!({"status": {"conditions": [{"type": "Ready", "status": "True"}]}});
        let (path, merge) = ("/api/v1/nodes/n/status", "application/merge-patch+json");
        let patched = server.request(&Method::PATCH, path, merge, &ready).expect("a patched node");
        assert_eq!(patched["status"], ready["status"]);
        let list = server.request(&Method::GET, nodes, "", &Value::Null).expect("a list");
        assert_eq!(list["items"].as_array().map(Vec::len), Some(1));
        assert!(kubeconfig(&server.url()).contains(&format!("    server: {}\n", server.url())));
        server.stop().await;
    }

    #[tokio::test]
    async fn a_stopped_server_frees_its_port() {
        let server = ApiServer::bind(([127, 0, 0, 1], 0).into()).expect("loopback has ports");
        let address = server.address;
        server.stop().await;
        TcpListener::bind(address).expect("the port is free again");
    }
}
