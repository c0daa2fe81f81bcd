//! Connections of a server, each after its handshake. A failed handshake is logged with its cause, once for each address and
//! cause until one from that address succeeds.

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

/// Timeout of a handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// Concurrent handshakes: more than there are slots for silent connections.
const AT_ONCE: usize = 1024;
/// Addresses whose last cause is kept.
const REMEMBERED: usize = 256;

impl Tls {
    /// TLS connections from plain ones.
    pub fn incoming<S, C>(&self, plain: S) -> impl Stream<Item = io::Result<TlsStream<C>>> + use<S, C>
    where
        S: Stream<Item = io::Result<C>>,
        C: Connection,
    {
        let (tls, mut logged) = (self.clone(), Logged::default());
        let handshakes = plain.map(move |connection| handshake(tls.clone(), connection)).buffer_unordered(AT_ONCE);
        handshakes.filter_map(move |outcome| {
            let connection = match outcome {
                HandshakeOutcome::Refused(peer, cause) => {
                    if logged.is_new(peer, &cause) {
                        warn!(%peer, "a health check is refused: {cause}");
                    }
                    None
                }
                HandshakeOutcome::Made(peer, connection) => {
                    logged.0.remove(&peer);
                    Some(Ok(*connection))
                }
                HandshakeOutcome::Gone => None,
                HandshakeOutcome::Failed(error) => Some(Err(error)),
            };
            std::future::ready(connection)
        })
    }
}

/// A connection with its peer's address.
pub trait Connection: AsyncRead + AsyncWrite + Connected<ConnectInfo = TcpConnectInfo> + Unpin {}

impl<C: AsyncRead + AsyncWrite + Connected<ConnectInfo = TcpConnectInfo> + Unpin> Connection for C {}

enum HandshakeOutcome<C> {
    Made(IpAddr, Box<TlsStream<C>>),
    Refused(IpAddr, String),
    /// Closed by the peer before the end, by a port scan for instance.
    Gone,
    /// Accepting failed.
    Failed(io::Error),
}

async fn handshake<C: Connection>(tls: Tls, connection: io::Result<C>) -> HandshakeOutcome<C> {
    let connection = match connection {
        Ok(connection) => connection,
        Err(error) => return HandshakeOutcome::Failed(error),
    };
    let Some(peer) = connection.connect_info().remote_addr() else { return HandshakeOutcome::Gone };
    let peer = peer.ip().to_canonical();
    let acceptor = tls.now().acceptor();
    match tokio::time::timeout(HANDSHAKE_TIMEOUT, acceptor.accept(connection)).await {
        Ok(Ok(connection)) => HandshakeOutcome::Made(peer, Box::new(connection)),
        Ok(Err(error)) => {
            cause::find(&error).map_or(HandshakeOutcome::Gone, |cause| HandshakeOutcome::Refused(peer, cause))
        }
        Err(_) => HandshakeOutcome::Gone,
    }
}

/// The last logged cause of each address.
#[derive(Default)]
struct Logged(BTreeMap<IpAddr, String>);

impl Logged {
    fn is_new(&mut self, peer: IpAddr, cause: &str) -> bool {
        if self.0.get(&peer).is_some_and(|logged| logged == cause) {
            return false;
        }
        if self.0.len() >= REMEMBERED {
            self.0.clear();
        }
        self.0.insert(peer, cause.to_owned());
        true
    }
}
