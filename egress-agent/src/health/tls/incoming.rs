//! Connections of a server, each after its handshake. One that fails ends there, with a line in the log that says why: once
//! for each address and cause, until one from there succeeds.

use std::collections::BTreeMap;
use std::io;
use std::net::IpAddr;
use std::time::Duration;

use futures::{Stream, StreamExt};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::server::TlsStream;
use tonic::transport::server::{Connected, TcpConnectInfo};
use tracing::warn;

use crate::health::tls::{Tls, cause};

/// How long a handshake may take.
const PATIENCE: Duration = Duration::from_secs(5);
/// Handshakes at a time: more than there are places for connections that say nothing.
const AT_ONCE: usize = 1024;
/// Addresses of which is remembered what was said.
const REMEMBERED: usize = 256;

impl Tls {
    /// The connections, made from plain ones.
    pub fn incoming<S, C>(&self, plain: S) -> impl Stream<Item = io::Result<TlsStream<C>>> + use<S, C>
    where
        S: Stream<Item = io::Result<C>>,
        C: Connection,
    {
        let (tls, mut said) = (self.clone(), Said::default());
        let handshakes = plain.map(move |connection| handshake(tls.clone(), connection)).buffer_unordered(AT_ONCE);
        handshakes.filter_map(move |outcome| {
            let connection = match outcome {
                Outcome::Refused(peer, cause) => {
                    if said.is_news(peer, &cause) {
                        warn!(%peer, "a health check is refused: {cause}");
                    }
                    None
                }
                Outcome::Made(peer, connection) => {
                    said.0.remove(&peer);
                    Some(Ok(*connection))
                }
                Outcome::Gone => None,
                Outcome::Failed(error) => Some(Err(error)),
            };
            std::future::ready(connection)
        })
    }
}

/// One that says where it comes from.
pub trait Connection: AsyncRead + AsyncWrite + Connected<ConnectInfo = TcpConnectInfo> + Unpin {}

impl<C: AsyncRead + AsyncWrite + Connected<ConnectInfo = TcpConnectInfo> + Unpin> Connection for C {}

enum Outcome<C> {
    Made(IpAddr, Box<TlsStream<C>>),
    Refused(IpAddr, String),
    /// Whoever it was has gone before the end: to look whether somebody listens, for instance.
    Gone,
    /// No connection came.
    Failed(io::Error),
}

async fn handshake<C: Connection>(tls: Tls, connection: io::Result<C>) -> Outcome<C> {
    let connection = match connection {
        Ok(connection) => connection,
        Err(error) => return Outcome::Failed(error),
    };
    let Some(peer) = connection.connect_info().remote_addr() else { return Outcome::Gone };
    let peer = peer.ip().to_canonical();
    let acceptor = tls.now().acceptor();
    match tokio::time::timeout(PATIENCE, acceptor.accept(connection)).await {
        Ok(Ok(connection)) => Outcome::Made(peer, Box::new(connection)),
        Ok(Err(error)) => cause::find(&error).map_or(Outcome::Gone, |cause| Outcome::Refused(peer, cause)),
        Err(_) => Outcome::Gone,
    }
}

/// What was said last of each address.
#[derive(Default)]
struct Said(BTreeMap<IpAddr, String>);

impl Said {
    fn is_news(&mut self, peer: IpAddr, cause: &str) -> bool {
        if self.0.get(&peer).is_some_and(|said| said == cause) {
            return false;
        }
        if self.0.len() >= REMEMBERED {
            self.0.clear();
        }
        self.0.insert(peer, cause.to_owned());
        true
    }
}
