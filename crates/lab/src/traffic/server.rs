//! What answers in the lab: HTTP, a TCP echo and a UDP echo, outside or in a pod.
//!
//! The sockets are bound inside the namespace and served by one thread outside it: a socket stays in the namespace
//! where it was made, and so do the connections that it accepts.
//!
//! HTTP: any path answers with the client's address as the server sees it; `/bytes/N` answers with N bytes; a request
//! with a body is answered with the number of bytes that arrived. Connections are kept alive.

use std::collections::HashSet;
use std::net::{IpAddr, SocketAddr, TcpListener, UdpSocket};
use std::path::Path;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context, Result};
use axum::Router;
use axum::body::{Body, Bytes, HttpBody};
use axum::extract::{ConnectInfo, State};
use axum::http::{Method, Request, Response, header};
use futures::StreamExt;
use jiff::Timestamp;
use tokio::runtime::{self, Runtime};
use tokio_util::sync::CancellationToken;

use super::access_log::{AccessLog, AccessLogEntry};
use crate::topology::POD_INTERFACE;
use crate::topology::addresses::{self as plan, ECHO_PORT, HTTP_PORT};
use crate::topology::lab::{Lab, LabNode, LabPod};
use crate::topology::netns::Netns;

/// A running server. Dropping it closes its sockets.
pub struct Server {
    log: Arc<AccessLog>,
    stop: CancellationToken,
    thread: Option<JoinHandle<()>>,
}

struct Sockets {
    http: Vec<TcpListener>,
    tcp: Vec<TcpListener>,
    udp: Vec<UdpSocket>,
}

impl Server {
    /// Serves on these addresses of the namespace. When this returns, connections are accepted.
    pub fn start(netns: &Netns, addresses: &[IpAddr], log: &Path) -> Result<Self> {
        let log = Arc::new(AccessLog::create(log)?);
        let sockets = netns.run(|| bind(addresses))?;
        let runtime = runtime::Builder::new_current_thread().enable_all().build()?;
        let stop = CancellationToken::new();
        let (run_log, run_stop) = (Arc::clone(&log), stop.clone());
        let serve_all = move || run(&runtime, sockets, &run_log, &run_stop);
        let thread = thread::Builder::new().name(format!("{}-srv", netns.name())).spawn(serve_all)?;
        Ok(Self { log, stop, thread: Some(thread) })
    }

    /// The server outside the cluster, on both families.
    pub fn outside(lab: &Lab) -> Result<Self> {
        Self::start(lab.outside(), &plan::SERVER.both(), &lab.logs().join("access_log"))
    }

    /// The server behind the second network, on both families.
    pub fn behind_second(lab: &Lab) -> Result<Self> {
        Self::start(&lab.second()?.world.server, &plan::SERVER2.both(), &lab.logs().join("access_log-2"))
    }

    /// The server outside with so many more addresses ([`plan::address`]).
    pub fn outside_with_addresses(lab: &Lab, server_addresses: u8) -> Result<Self> {
        let outside = lab.outside();
        let mut addresses = plan::SERVER.both().to_vec();
        for server_address in (0..server_addresses).map(plan::server_address) {
            for (address, length) in [(IpAddr::V4(server_address.v4), 24), (IpAddr::V6(server_address.v6), 64)] {
                let prefix = format!("{address}/{length}");
                outside.exec("ip", &["addr", "add", &prefix, "dev", POD_INTERFACE, "nodad"])?;
                addresses.push(address);
            }
        }
        Self::start(outside, &addresses, &lab.logs().join("access_log"))
    }

    /// A server in a pod; the lab's services lead to those.
    pub fn in_pod(lab: &Lab, pod: &LabPod) -> Result<Self> {
        Self::start(&pod.netns, &pod.addresses.both(), &lab.logs().join(format!("access_log-{}", pod.name)))
    }

    /// A server on a node's own addresses, as a pod in the host's network has.
    pub fn on_node(lab: &Lab, node: &LabNode) -> Result<Self> {
        let mut addresses = node.number.address().both().to_vec();
        if node.config.second.is_some() {
            addresses.extend(node.number.second_address().both());
        }
        Self::start(&node.host, &addresses, &lab.logs().join(format!("access_log-{}", node.name())))
    }

    pub fn log(&self) -> &AccessLog {
        &self.log
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.cancel();
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            eprintln!("lab: a server panicked");
        }
    }
}

fn bind(addresses: &[IpAddr]) -> Result<Sockets> {
    let mut sockets = Sockets { http: Vec::new(), tcp: Vec::new(), udp: Vec::new() };
    for address in addresses {
        let listen = |port| TcpListener::bind((*address, port)).with_context(|| format!("cannot listen on {address}"));
        sockets.http.push(listen(HTTP_PORT)?);
        sockets.tcp.push(listen(ECHO_PORT)?);
        sockets.udp.push(UdpSocket::bind((*address, ECHO_PORT)).context("cannot bind the UDP echo")?);
    }
    for listener in sockets.http.iter().chain(&sockets.tcp) {
        listener.set_nonblocking(true)?;
    }
    for socket in &sockets.udp {
        socket.set_nonblocking(true)?;
    }
    Ok(sockets)
}

fn run(runtime: &Runtime, sockets: Sockets, log: &Arc<AccessLog>, stop: &CancellationToken) {
    let served: std::io::Result<()> = runtime.block_on(async {
        for listener in sockets.http {
            let listener = tokio::net::TcpListener::from_std(listener)?;
            let app = Router::new().fallback(answer).with_state(Arc::clone(log));
            let service = app.into_make_service_with_connect_info::<SocketAddr>();
            tokio::spawn(async move { axum::serve(listener, service).await });
        }
        for listener in sockets.tcp {
            tokio::spawn(tcp_echo(tokio::net::TcpListener::from_std(listener)?, Arc::clone(log)));
        }
        for socket in sockets.udp {
            tokio::spawn(udp_echo(tokio::net::UdpSocket::from_std(socket)?, Arc::clone(log)));
        }
        stop.cancelled().await;
        Ok(())
    });
    if let Err(error) = served {
        eprintln!("lab: a server failed: {error}");
    }
}

async fn answer(
    State(log): State<Arc<AccessLog>>,
    ConnectInfo(client): ConnectInfo<SocketAddr>,
    request: Request<Body>,
) -> Response<Body> {
    let line = format!("{} {} {:?}", request.method(), request.uri(), request.version());
    let agent = request.headers().get(header::USER_AGENT).and_then(|value| value.to_str().ok()).unwrap_or("-");
    let user_agent = agent.to_owned();
    let head = request.method() == Method::HEAD;
    let body = body_of(client, request).await;
    let bytes = if head { 0 } else { body.size_hint().exact().unwrap_or(0) };
    log.add(AccessLogEntry { at: Timestamp::now(), client, request: line, status: 200, bytes, user_agent });
    Response::new(body)
}

async fn body_of(client: SocketAddr, request: Request<Body>) -> Body {
    if let Some(count) = request.uri().path().strip_prefix("/bytes/").and_then(|count| count.parse().ok()) {
        return Body::from(Bytes::from(vec![b'.'; count]));
    }
    if request.method() == Method::POST || request.method() == Method::PUT {
        let mut arrived = 0;
        let mut chunks = request.into_body().into_data_stream();
        while let Some(Ok(chunk)) = chunks.next().await {
            arrived += chunk.len();
        }
        return Body::from(format!("{arrived}\n"));
    }
    Body::from(format!("{}\n", client.ip()))
}

fn echo_entry(client: SocketAddr, request: &str) -> AccessLogEntry {
    let (request, user_agent) = (request.to_owned(), "-".to_owned());
    AccessLogEntry { at: Timestamp::now(), client, request, status: 200, bytes: 0, user_agent }
}

async fn tcp_echo(listener: tokio::net::TcpListener, log: Arc<AccessLog>) {
    loop {
        let Ok((mut stream, client)) = listener.accept().await else {
            // Out of file descriptors, most likely: the others still need their turn.
            tokio::time::sleep(Duration::from_millis(10)).await;
            continue;
        };
        log.add(echo_entry(client, "TCP echo"));
        tokio::spawn(async move {
            let (mut from, mut to) = stream.split();
            tokio::io::copy(&mut from, &mut to).await
        });
    }
}

async fn udp_echo(socket: tokio::net::UdpSocket, log: Arc<AccessLog>) {
    let mut seen = HashSet::new();
    let mut buffer = vec![0; 65536];
    loop {
        // An ICMP error of an earlier answer surfaces here; the datagram it is about is lost, as on any network.
        let Ok((length, client)) = socket.recv_from(&mut buffer).await else { continue };
        if seen.insert(client) {
            log.add(echo_entry(client, "UDP echo"));
        }
        if let Err(error) = socket.send_to(&buffer[..length], client).await {
            tracing::debug!(%client, %error, "the echo was not sent");
        }
    }
}
