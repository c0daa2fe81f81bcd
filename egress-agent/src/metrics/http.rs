//! The server: three pages, one request for each connection.
//!
//! It is for a scraper and a kubelet, so everything is bounded: connections at a time, the time that a request may take to
//! come, the time that a connection may last. Scrapes are made one after another.

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
use tokio::sync::{Mutex, Semaphore};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use super::expose;
use super::station::Station;

/// At a time. Others wait in the kernel's queue.
const CONNECTIONS: usize = 32;
/// Until the whole request is there.
const REQUEST: Duration = Duration::from_secs(2);
/// From the first byte to the last.
const CONNECTION: Duration = Duration::from_secs(10);
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
}

/// Serves until told to stop. Without its address the agent goes on, and tries again.
pub async fn serve(listen: Listen, station: Arc<Station>, stop: CancellationToken) {
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
    serve_on(listener, station, stop).await;
}

/// The same where the address is taken already.
pub(super) async fn serve_on(listener: TcpListener, station: Arc<Station>, stop: CancellationToken) {
    let (places, scrapes) = (Arc::new(Semaphore::new(CONNECTIONS)), Arc::new(Mutex::new(())));
    loop {
        let Ok(place) = places.clone().acquire_owned().await else { return };
        let stream = tokio::select! {
            () = stop.cancelled() => return,
            accepted = listener.accept() => accepted,
        };
        match stream {
            Ok((stream, _)) => {
                let (station, scrapes) = (Arc::clone(&station), Arc::clone(&scrapes));
                tokio::spawn(async move {
                    // Whoever is too slow is hung up on.
                    if timeout(CONNECTION, answer(stream, station, scrapes)).await.is_err() {
                        debug!("a request for metrics or health took too long");
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

async fn answer(stream: TcpStream, station: Arc<Station>, scrapes: Arc<Mutex<()>>) {
    let service = service_fn(|request: Request<Incoming>| {
        let (station, scrapes) = (Arc::clone(&station), Arc::clone(&scrapes));
        async move { Ok::<_, Infallible>(page(&request, &station, &scrapes).await) }
    });
    let mut server = http1::Builder::new();
    server.timer(TokioTimer::new()).header_read_timeout(REQUEST).keep_alive(false).max_headers(64);
    if let Err(error) = server.serve_connection(TokioIo::new(stream), service).await {
        debug!(%error, "a request for metrics or health ended early");
    }
}

async fn page(request: &Request<Incoming>, station: &Station, scrapes: &Mutex<()>) -> Response<Full<Bytes>> {
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
        "/healthz" => said(station.live().await),
        "/readyz" => said(station.ready().await),
        _ => {
            let _one_at_a_time = scrapes.lock().await;
            match expose::page(station.facts().await) {
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
