//! A minimal API server, for tests of failures.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kube::{Client, Config};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::api_outage::ApiOutages;
use crate::client::client;

/// Answers lists and writes, and holds watches open. A name in the request selects a failure: `silence` gets no answer,
/// `busy` 503, `absent` 404, a write to `past` a conflict, `slow` a late answer. [`StubServer::hang_up`] and
/// [`StubServer::creates`] set others.
pub struct StubServer {
    address: SocketAddr,
    state: Arc<Mutex<StubState>>,
}

#[derive(Default)]
struct StubState {
    requests: Vec<String>,
    hang_up: usize,
    creates: VecDeque<Created>,
    /// Bodies of requests to create an object.
    created: Vec<String>,
}

/// The outcome of a request to create an object.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Created {
    /// An object of that name exists.
    Exists,
    /// The connection is closed without an answer.
    HangsUp,
}

/// Delay of a `slow` answer.
const SLOW: Duration = Duration::from_millis(1500);
const OBJECT: &str = r#"{"kind":"ConfigMap","apiVersion":"v1","metadata":{"resourceVersion":"7"}}"#;
const EGRESS_IP: &str = r#"{"kind":"EgressIP","apiVersion":"k8s.ovn.org/v1","metadata":{"name":"slow"},
"status":{"items":[{"node":"a","egressIP":"10.0.0.1"}]}}"#;
const LIST: &str = r#"{"kind":"ConfigMapList","apiVersion":"v1","metadata":{"resourceVersion":"7"},"items":[]}"#;

impl StubServer {
    pub async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("loopback has ports");
        let (address, state) = (listener.local_addr().expect("bound"), Arc::default());
        let server = Self { address, state: Arc::clone(&state) };
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(answer(stream, Arc::clone(&state)));
            }
        });
        server
    }

    pub fn client(&self) -> (Client, ApiOutages) {
        client(Config::new(format!("http://{}", self.address).parse().expect("an address"))).expect("a client")
    }

    /// The number of requests whose first line contains this.
    pub fn requests(&self, what: &str) -> usize {
        self.state.lock().expect("not poisoned").requests.iter().filter(|line| line.contains(what)).count()
    }

    /// Closes the connections of the next requests without an answer.
    pub fn close_connections(&self, times: usize) {
        self.state.lock().expect("not poisoned").hang_up = times;
    }

    /// The outcomes of the next requests to create an object; later ones succeed.
    pub fn creates(&self, each: impl IntoIterator<Item = Created>) {
        self.state.lock().expect("not poisoned").creates = each.into_iter().collect();
    }

    /// Bodies of all requests to create an object.
    pub fn created(&self) -> Vec<String> {
        self.state.lock().expect("not poisoned").created.clone()
    }
}

async fn answer(mut stream: TcpStream, state: Arc<Mutex<StubState>>) {
    let mut buffer = [0; 4096];
    while let Ok(length @ 1..) = stream.read(&mut buffer).await {
        let request = String::from_utf8_lossy(&buffer[..length]).into_owned();
        let line = request.lines().next().unwrap_or_default().to_owned();
        let is_slow = line.contains("slow");
        let end = line.starts_with("POST").then(|| {
            let mut state = state.lock().expect("not poisoned");
            state.created.push(request);
            state.creates.pop_front()
        });
        let end = end.flatten();
        let text = if end == Some(Created::Exists) {
            "HTTP/1.1 409 Conflict\r\nContent-Length: 0\r\n\r\n".to_owned()
        } else if line.contains("watch=true") {
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n".to_owned()
        } else if line.contains("silence") {
            String::new()
        } else if line.contains("busy") {
            "HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n".to_owned()
        } else if line.contains("past") && line.starts_with("PUT") {
            "HTTP/1.1 409 Conflict\r\nContent-Length: 0\r\n\r\n".to_owned()
        } else if line.contains("absent") {
            "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n".to_owned()
        } else {
            let body = match &line {
                line if line.starts_with("POST") => "{}",
                line if line.contains("configmaps/") => OBJECT,
                line if line.contains("egressips/") => EGRESS_IP,
                _ => LIST,
            };
            format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len())
        };
        {
            let mut state = state.lock().expect("not poisoned");
            state.requests.push(line);
            if end == Some(Created::HangsUp) {
                return;
            }
            if state.hang_up > 0 {
                state.hang_up -= 1;
                return;
            }
        }
        if is_slow {
            tokio::time::sleep(SLOW).await;
        }
        if stream.write_all(text.as_bytes()).await.is_err() {
            return;
        }
    }
}

pub async fn until(what: &str, is_so: impl Fn() -> bool) {
    for _ in 0..500 {
        if is_so() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("{what}: not within 5 s");
}
