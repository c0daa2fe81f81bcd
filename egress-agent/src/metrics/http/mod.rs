//! The HTTP server of `/metrics`, `/healthz` and `/readyz`: one request for each connection.
//!
//! Its clients are a scraper and a kubelet, so everything is bounded: connections at a time, the time of a request, the time of
//! a connection. `axum::serve` bounds none of these, so the accept loop is here; scrapes run one at a time.
//!
//! A kubelet restarts an agent that does not answer, so other hosts must not keep it out: connections from loopback, where the
//! kubelet connects from, have slots of their own, and the server listens on loopback whatever other address is configured. Of the
//! slots of other hosts no address has more than a few, so that one does not keep the scraper out; several addresses can.
//!
//! Other hosts, which pods are too, must know a token if a file of it is configured. The pages are in plaintext, so the token is
//! worth no more than the metrics; that is why it is a token of its own, and none of an account.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::Path;
use std::str::FromStr;
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::Duration;

use aws_lc_rs::constant_time::verify_slices_are_equal;
use axum::Router;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::http::header::{AUTHORIZATION, CACHE_CONTROL, CONTENT_TYPE, WWW_AUTHENTICATE};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use nix::sys::socket::setsockopt;
use nix::sys::socket::sockopt::Ipv6V6Only;
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::{Mutex, OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use crate::metrics::catalogue::MOST_EGRESS_IPS;
use crate::metrics::expose;
use crate::metrics::health_page::HealthPage;

/// Concurrent connections from this host. Excess connections are closed, of other hosts too.
const OWN_CONNECTIONS: usize = 32;
/// From all other hosts.
const OTHER_CONNECTIONS: usize = 64;
/// From one address of them. Several scrapers may be behind one.
const CONNECTIONS_PER_ADDRESS: usize = 8;
/// Connections that wait to be accepted.
const BACKLOG: u32 = 1024;
/// From the connection to the end of the request.
const REQUEST: Duration = Duration::from_secs(2);
/// From the first byte to the last.
const CONNECTION: Duration = Duration::from_secs(10);
/// How long a scrape waits for the one before it.
const SCRAPE_WAIT: Duration = Duration::from_secs(2);
const RETRY: Duration = Duration::from_secs(2);
/// How often the file of the token is looked at, for the log.
const TOKEN_INTERVAL: Duration = Duration::from_secs(10);
const NO_TOKEN: &str = "other hosts cannot read metrics and health pages: --metrics-token-file has no token. A controller \
                        makes the Secret egress-agent-metrics with the key `token` within a minute (docs/install.md#metrics)";
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
            Self::Everywhere(port) => match bind_both_families(port) {
                Err(error) if error.raw_os_error() == Some(libc::EAFNOSUPPORT) => {
                    TcpListener::bind((IpAddr::from(Ipv4Addr::UNSPECIFIED), port)).await
                }
                bound => bound,
            },
        }
    }

    fn is_loopback(self) -> bool {
        matches!(self, Self::At(address) if is_of_this_host(address.ip()))
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

/// Of both families, whatever the host's `net.ipv6.bindv6only` says: probes come by 127.0.0.1.
fn bind_both_families(port: u16) -> io::Result<TcpListener> {
    let socket = TcpSocket::new_v6()?;
    setsockopt(&socket, Ipv6V6Only, &false)?;
    socket.set_reuseaddr(true)?;
    socket.bind((Ipv6Addr::UNSPECIFIED, port).into())?;
    socket.listen(BACKLOG)
}

/// Serves until `stop`. If the address cannot be bound the agent continues, and retries.
pub async fn serve(listen: Listen, token: Option<Arc<Path>>, page: Arc<HealthPage>, stop: CancellationToken) {
    let watched = token.clone().filter(|_| !listen.is_loopback());
    let acceptor = Arc::new(MetricsServer::new(page, token, is_of_this_host));
    let for_probes = async {
        if let Some(listen) = listen.for_probes() {
            serve_at(listen, Arc::clone(&acceptor), &stop).await;
        }
    };
    let watch_token = async {
        if let Some(file) = watched {
            watch_token(&file, TOKEN_INTERVAL, &stop).await;
        }
    };
    tokio::join!(serve_at(listen, Arc::clone(&acceptor), &stop), for_probes, watch_token);
}

/// Says while other hosts read nothing for want of a token, and when that is over.
async fn watch_token(file: &Path, interval: Duration, stop: &CancellationToken) {
    let (mut is_missing, condition) = (false, "metrics-token");
    loop {
        match (token_of(file).await, is_missing) {
            (Err(error), false) => {
                is_missing = true;
                warn!(file = %file.display(), %error, condition, "{NO_TOKEN}");
            }
            (Ok(_), true) => {
                is_missing = false;
                info!(file = %file.display(), condition, "other hosts that know the token can read metrics and health pages");
            }
            _ => {}
        }
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(interval) => {}
        }
    }
}

async fn serve_at(listen: Listen, acceptor: Arc<MetricsServer>, stop: &CancellationToken) {
    let (mut failing, condition) = (false, format!("metrics-server/{listen}"));
    let listener = loop {
        match listen.bind().await {
            Ok(listener) => break listener,
            Err(error) if !std::mem::replace(&mut failing, true) => {
                warn!(address = %listen, %error, condition, "cannot serve metrics and health pages; trying again");
            }
            Err(_) => {}
        }
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(RETRY) => {}
        }
    };
    info!(address = %listen, condition, "serving /metrics, /healthz and /readyz");
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
                    if timeout(CONNECTION, answer(stream, peer.ip(), acceptor)).await.is_err() {
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
    /// The file of what other hosts must know.
    token: Option<Arc<Path>>,
    is_of_this_host: fn(IpAddr) -> bool,
    own: Arc<Semaphore>,
    others: OtherHosts,
    scrapes: Mutex<()>,
}

impl MetricsServer {
    fn new(page: Arc<HealthPage>, token: Option<Arc<Path>>, is_of_this_host: fn(IpAddr) -> bool) -> Self {
        let own = Arc::new(Semaphore::new(OWN_CONNECTIONS));
        Self { page, token, is_of_this_host, own, others: OtherHosts::default(), scrapes: Mutex::new(()) }
    }

    /// The file of the token that this client must know.
    fn token_for(&self, peer: IpAddr) -> Option<Arc<Path>> {
        self.token.clone().filter(|_| !(self.is_of_this_host)(peer))
    }

    fn slot(&self, peer: IpAddr) -> Option<ConnectionPermit> {
        match (self.is_of_this_host)(peer) {
            true => Arc::clone(&self.own).try_acquire_owned().ok().map(ConnectionPermit::Own),
            false => self.others.slot(peer.to_canonical()).map(ConnectionPermit::Other),
        }
    }
}

/// Of one connection; dropping it frees the slot.
enum ConnectionPermit {
    Own(#[expect(dead_code, reason = "held")] OwnedSemaphorePermit),
    Other(#[expect(dead_code, reason = "held")] OtherHostPermit),
}

/// The connections of other hosts, by address.
#[derive(Clone, Default)]
struct OtherHosts(Arc<std::sync::Mutex<BTreeMap<IpAddr, usize>>>);

impl OtherHosts {
    fn slot(&self, address: IpAddr) -> Option<OtherHostPermit> {
        let mut open = self.open();
        let count = open.get(&address).copied().unwrap_or_default();
        if count >= CONNECTIONS_PER_ADDRESS || open.values().sum::<usize>() >= OTHER_CONNECTIONS {
            return None;
        }
        open.insert(address, count + 1);
        drop(open);
        Some(OtherHostPermit { hosts: self.clone(), address })
    }

    /// A panic cannot leave it inconsistent.
    fn open(&self) -> MutexGuard<'_, BTreeMap<IpAddr, usize>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct OtherHostPermit {
    hosts: OtherHosts,
    address: IpAddr,
}

impl Drop for OtherHostPermit {
    fn drop(&mut self) {
        let mut open = self.hosts.open();
        match open.get_mut(&self.address) {
            Some(count) if *count > 1 => *count -= 1,
            _ => drop(open.remove(&self.address)),
        }
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

/// Read for each request, since a Secret that is changed changes its file.
async fn token_of(file: &Path) -> io::Result<Vec<u8>> {
    let token = tokio::fs::read(file).await?.trim_ascii().to_vec();
    if token.is_empty() { Err(io::Error::other("the file is empty")) } else { Ok(token) }
}

/// Lets a request pass that has the token of this file.
async fn with_token(file: Arc<Path>, request: Request, next: Next) -> Response {
    let given = request.headers().get(AUTHORIZATION).and_then(|value| value.as_bytes().strip_prefix(b"Bearer "));
    // The file is read for those alone who send something.
    let known = match given {
        Some(given) => {
            token_of(&file).await.is_ok_and(|wanted| verify_slices_are_equal(given.trim_ascii(), &wanted).is_ok())
        }
        None => false,
    };
    if known {
        return next.run(request).await;
    }
    let refusal = text(StatusCode::UNAUTHORIZED, "send the token: Authorization: Bearer TOKEN\n".to_owned());
    ([(WWW_AUTHENTICATE, "Bearer")], refusal).into_response()
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

async fn answer(stream: TcpStream, peer: IpAddr, acceptor: Arc<MetricsServer>) {
    let mut server = http1::Builder::new();
    server.timer(TokioTimer::new()).header_read_timeout(REQUEST).keep_alive(false).max_headers(64);
    let token = acceptor.token_for(peer);
    let mut pages = pages(acceptor);
    if let Some(file) = token {
        let ask = move |request: Request, next: Next| with_token(Arc::clone(&file), request, next);
        pages = pages.layer(middleware::from_fn(ask));
    }
    let pages = TowerToHyperService::new(pages);
    if let Err(error) = server.serve_connection(TokioIo::new(stream), pages).await {
        debug!(%error, "a request for metrics or health ended early");
    }
}

#[cfg(test)]
mod tests;
