//! The server: three pages, one request for each connection.
//!
//! It is for a scraper and a kubelet, so everything is bounded: connections at a time, the time that a request may take to
//! come, the time that a connection may last. Scrapes are made one after another.
//!
//! An agent whose kubelet gets no answer is ended. So nobody from outside can take the kubelet's place: connections by
//! loopback, which is where it comes from, have places of their own, and loopback is listened on whatever other address is
//! asked for.

use std::convert::Infallible;
use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::header::{ALLOW, CACHE_CONTROL, CONTENT_TYPE, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Mutex, OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use crate::metrics::catalogue::MOST_EGRESS_IPS;
use crate::metrics::expose;
use crate::metrics::health_page::HealthPage;

/// At a time, of other hosts, and as many of this one. Who comes when there is no place is hung up on.
const CONNECTIONS: usize = 32;
/// Until the whole request is there.
const REQUEST: Duration = Duration::from_secs(2);
/// From the first byte to the last.
const CONNECTION: Duration = Duration::from_secs(10);
/// Until a scrape's turn comes.
const TURN: Duration = Duration::from_secs(2);
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
            // Of both families, where the host has both.
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

/// Serves until told to stop. Without an address the agent goes on, and tries again.
pub async fn serve(listen: Listen, station: Arc<HealthPage>, stop: CancellationToken) {
    let door = Arc::new(Acceptor::new(station, is_of_this_host));
    let for_probes = async {
        if let Some(listen) = listen.for_probes() {
            serve_at(listen, Arc::clone(&door), &stop).await;
        }
    };
    tokio::join!(serve_at(listen, Arc::clone(&door), &stop), for_probes);
}

async fn serve_at(listen: Listen, door: Arc<Acceptor>, stop: &CancellationToken) {
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
    serve_on(listener, door, stop).await;
}

/// The same where the address is taken already.
async fn serve_on(listener: TcpListener, door: Arc<Acceptor>, stop: &CancellationToken) {
    loop {
        let accepted = tokio::select! {
            () = stop.cancelled() => return,
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok((stream, peer)) => {
                let Some(place) = door.place(peer.ip()) else {
                    debug!(%peer, "too many connections for metrics and health");
                    continue;
                };
                let door = Arc::clone(&door);
                // Short-lived: one connection, which ends by its timeouts.
                tokio::spawn(async move {
                    // Whoever is too slow is hung up on.
                    if timeout(CONNECTION, answer(stream, &door)).await.is_err() {
                        debug!(%peer, "a request for metrics or health took too long");
                    }
                    drop(place);
                });
            }
            // No descriptor is free, as a rule: it will be.
            Err(error) => {
                debug!(%error, "cannot take a connection");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

/// By loopback: the kernel takes no such packet from another host.
fn is_of_this_host(peer: IpAddr) -> bool {
    peer.to_canonical().is_loopback()
}

/// What all connections share.
struct Acceptor {
    station: Arc<HealthPage>,
    is_of_this_host: fn(IpAddr) -> bool,
    own: Arc<Semaphore>,
    others: Arc<Semaphore>,
    scrapes: Mutex<()>,
}

impl Acceptor {
    fn new(station: Arc<HealthPage>, is_of_this_host: fn(IpAddr) -> bool) -> Self {
        let [own, others] = [(); 2].map(|()| Arc::new(Semaphore::new(CONNECTIONS)));
        Self { station, is_of_this_host, own, others, scrapes: Mutex::new(()) }
    }

    fn place(&self, peer: IpAddr) -> Option<OwnedSemaphorePermit> {
        let places = if (self.is_of_this_host)(peer) { &self.own } else { &self.others };
        Arc::clone(places).try_acquire_owned().ok()
    }
}

async fn answer(stream: TcpStream, door: &Acceptor) {
    let service =
        service_fn(|request: Request<Incoming>| async move { Ok::<_, Infallible>(page(&request, door).await) });
    let mut server = http1::Builder::new();
    server.timer(TokioTimer::new()).header_read_timeout(REQUEST).keep_alive(false).max_headers(64);
    if let Err(error) = server.serve_connection(TokioIo::new(stream), service).await {
        debug!(%error, "a request for metrics or health ended early");
    }
}

async fn page(request: &Request<Incoming>, door: &Acceptor) -> Response<Full<Bytes>> {
    let station = &door.station;
    let path = request.uri().path();
    if !["/metrics", "/healthz", "/readyz"].contains(&path) {
        return text(StatusCode::NOT_FOUND, "there are /metrics, /healthz and /readyz\n".to_owned());
    }
    if ![Method::GET, Method::HEAD].contains(request.method()) {
        let mut refused = text(StatusCode::METHOD_NOT_ALLOWED, "GET or HEAD\n".to_owned());
        refused.headers_mut().insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
        return refused;
    }
    match path {
        "/healthz" => said(station.live()),
        "/readyz" => said(station.ready().await),
        _ => {
            let Ok(_one_at_a_time) = timeout(TURN, door.scrapes.lock()).await else {
                return text(StatusCode::SERVICE_UNAVAILABLE, "others are scraping\n".to_owned());
            };
            match expose::page(station.facts(MOST_EGRESS_IPS).await) {
                Ok(page) => typed(StatusCode::OK, expose::CONTENT_TYPE, page),
                Err(error) => text(StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")),
            }
        }
    }
}

fn said(outcome: Result<(), String>) -> Response<Full<Bytes>> {
    match outcome {
        Ok(()) => text(StatusCode::OK, "ok\n".to_owned()),
        Err(why) => text(StatusCode::SERVICE_UNAVAILABLE, format!("{why}\n")),
    }
}

fn text(status: StatusCode, text: String) -> Response<Full<Bytes>> {
    typed(status, PLAIN, text)
}

fn typed(status: StatusCode, kind: &'static str, text: String) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::from(text));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

#[cfg(test)]
mod tests;
