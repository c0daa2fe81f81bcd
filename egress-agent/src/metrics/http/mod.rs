//! The HTTP server of `/metrics`, `/healthz` and `/readyz`: one request for each connection.
//!
//! Its clients are a scraper and a kubelet, so everything is bounded: connections at a time, the time of a request, the time of
//! a connection. `axum::serve` bounds none of these, so the accept loop is here; scrapes run one at a time.
//!
//! A kubelet restarts an agent that does not answer, so other hosts must not keep it out: connections from loopback, where the
//! kubelet connects from, have slots of their own, and the server listens on loopback whatever other address is configured.

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Mutex, OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use crate::metrics::catalogue::MOST_EGRESS_IPS;
use crate::metrics::expose;
use crate::metrics::health_page::HealthPage;

/// Concurrent connections from other hosts, and as many from this one. Excess connections are closed.
const CONNECTIONS: usize = 32;
/// From the connection to the end of the request.
const REQUEST: Duration = Duration::from_secs(2);
/// From the first byte to the last.
const CONNECTION: Duration = Duration::from_secs(10);
/// How long a scrape waits for the one before it.
const SCRAPE_WAIT: Duration = Duration::from_secs(2);
const RETRY: Duration = Duration::from_secs(2);
const PLAIN: &str = "text/plain; charset=utf-8";

/// Where to listen: an address and a port, or a port alone for all addresses of the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Listen {
    At(SocketAddr),
    Everywhere(u16),
}

impl FromStr for Listen {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        const WRONG: &str = "give ADDRESS:PORT, [ADDRESS]:PORT for IPv6, or :PORT for all addresses";
        let port = |text: &str| text.parse().ok().filter(|port| *port != 0).ok_or(WRONG);
        match text.strip_prefix(':') {
            Some(text) => Ok(Self::Everywhere(port(text)?)),
            None => {
                let address: SocketAddr = text.parse().map_err(|_| WRONG)?;
                port(&address.port().to_string()).map(|_| Self::At(address))
            }
        }
    }
}

impl fmt::Display for Listen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::At(address) => address.fmt(f),
            Self::Everywhere(port) => write!(f, ":{port}"),
        }
    }
}

impl Listen {
    async fn bind(self) -> io::Result<TcpListener> {
        match self {
            Self::At(address) => TcpListener::bind(address).await,
            // Both families, if the host has both.
            Self::Everywhere(port) => match TcpListener::bind((IpAddr::from(Ipv6Addr::UNSPECIFIED), port)).await {
                Err(error) if error.raw_os_error() == Some(libc::EAFNOSUPPORT) => {
                    TcpListener::bind((IpAddr::from(Ipv4Addr::UNSPECIFIED), port)).await
                }
                bound => bound,
            },
        }
    }

    /// Loopback on the same port, where probes ask, unless it is covered already.
    fn for_probes(self) -> Option<Self> {
        match self {
            Self::At(address) if !address.ip().is_unspecified() && address.ip() != Ipv4Addr::LOCALHOST => {
                Some(Self::At((Ipv4Addr::LOCALHOST, address.port()).into()))
            }
            Self::At(_) | Self::Everywhere(_) => None,
        }
    }
}

/// Serves until `stop`. If the address cannot be bound the agent continues, and retries.
pub async fn serve(listen: Listen, page: Arc<HealthPage>, stop: CancellationToken) {
    let acceptor = Arc::new(MetricsServer::new(page, is_of_this_host));
    let for_probes = async {
        if let Some(listen) = listen.for_probes() {
            serve_at(listen, Arc::clone(&acceptor), &stop).await;
        }
    };
    tokio::join!(serve_at(listen, Arc::clone(&acceptor), &stop), for_probes);
}

async fn serve_at(listen: Listen, acceptor: Arc<MetricsServer>, stop: &CancellationToken) {
    let mut failing = false;
    let listener = loop {
        match listen.bind().await {
            Ok(listener) => break listener,
            Err(error) if !std::mem::replace(&mut failing, true) => {
                warn!(address = %listen, %error, "cannot serve metrics and health pages; trying again");
            }
            Err(_) => {}
        }
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(RETRY) => {}
        }
    };
    info!(address = %listen, "serving /metrics, /healthz and /readyz");
    serve_on(listener, acceptor, stop).await;
}

/// The same on a bound address.
async fn serve_on(listener: TcpListener, acceptor: Arc<MetricsServer>, stop: &CancellationToken) {
    loop {
        let accepted = tokio::select! {
            () = stop.cancelled() => return,
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok((stream, peer)) => {
                let Some(slot) = acceptor.slot(peer.ip()) else {
                    debug!(%peer, "too many connections for metrics and health");
                    continue;
                };
                let acceptor = Arc::clone(&acceptor);
                // Short-lived: one connection, which ends by its timeouts.
                tokio::spawn(async move {
                    // Slow clients are disconnected.
                    if timeout(CONNECTION, answer(stream, acceptor)).await.is_err() {
                        debug!(%peer, "a request for metrics or health took too long");
                    }
                    drop(slot);
                });
            }
            // Usually no file descriptor is free, which passes.
            Err(error) => {
                debug!(%error, "cannot accept a connection");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

/// Loopback: the kernel accepts no such packet from another host.
fn is_of_this_host(peer: IpAddr) -> bool {
    peer.to_canonical().is_loopback()
}

/// What all connections share.
struct MetricsServer {
    page: Arc<HealthPage>,
    is_of_this_host: fn(IpAddr) -> bool,
    own: Arc<Semaphore>,
    others: Arc<Semaphore>,
    scrapes: Mutex<()>,
}

impl MetricsServer {
    fn new(page: Arc<HealthPage>, is_of_this_host: fn(IpAddr) -> bool) -> Self {
        let [own, others] = [(); 2].map(|()| Arc::new(Semaphore::new(CONNECTIONS)));
        Self { page, is_of_this_host, own, others, scrapes: Mutex::new(()) }
    }

    fn slot(&self, peer: IpAddr) -> Option<OwnedSemaphorePermit> {
        let slots = if (self.is_of_this_host)(peer) { &self.own } else { &self.others };
        Arc::clone(slots).try_acquire_owned().ok()
    }
}

/// The pages. HEAD is served as GET; any other method is refused.
fn pages(acceptor: Arc<MetricsServer>) -> Router {
    let live = |State(acceptor): State<Arc<MetricsServer>>| async move { health(acceptor.page.check_live()) };
    let ready = |State(acceptor): State<Arc<MetricsServer>>| async move { health(acceptor.page.check_ready().await) };
    Router::new()
        .route("/metrics", get(metrics))
        .route("/healthz", get(live))
        .route("/readyz", get(ready))
        .fallback(|| async { text(StatusCode::NOT_FOUND, "there are /metrics, /healthz and /readyz\n".to_owned()) })
        .with_state(acceptor)
}

async fn metrics(State(acceptor): State<Arc<MetricsServer>>) -> Response {
    let Ok(_one_at_a_time) = timeout(SCRAPE_WAIT, acceptor.scrapes.lock()).await else {
        return text(StatusCode::SERVICE_UNAVAILABLE, "another scrape is in progress\n".to_owned());
    };
    match expose::page(acceptor.page.snapshot(MOST_EGRESS_IPS).await) {
        Ok(page) => typed(StatusCode::OK, expose::CONTENT_TYPE, page),
        Err(error) => text(StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")),
    }
}

fn health(outcome: Result<(), String>) -> Response {
    match outcome {
        Ok(()) => text(StatusCode::OK, "ok\n".to_owned()),
        Err(why) => text(StatusCode::SERVICE_UNAVAILABLE, format!("{why}\n")),
    }
}

fn text(status: StatusCode, text: String) -> Response {
    typed(status, PLAIN, text)
}

fn typed(status: StatusCode, kind: &'static str, text: String) -> Response {
    (status, [(CONTENT_TYPE, kind), (CACHE_CONTROL, "no-store")], text).into_response()
}

async fn answer(stream: TcpStream, acceptor: Arc<MetricsServer>) {
    let mut server = http1::Builder::new();
    server.timer(TokioTimer::new()).header_read_timeout(REQUEST).keep_alive(false).max_headers(64);
    let pages = TowerToHyperService::new(pages(acceptor));
    if let Err(error) = server.serve_connection(TokioIo::new(stream), pages).await {
        debug!(%error, "a request for metrics or health ended early");
    }
}

#[cfg(test)]
mod tests;
