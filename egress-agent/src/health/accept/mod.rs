//! The accept loop of the health port. Whoever reaches the management address can connect, so what anybody can take is bounded.
//!
//! - A node of the cluster is known by its addresses, and has places that no other address takes. All other addresses share
//!   [`OTHERS`]. No address has more than [`OF_ONE`]. A connection without a place is reset as soon as it is accepted.
//! - A connection that sends nothing for [`IDLE`], or not even HTTP/2's preface within [`HANDSHAKE`], ends. HTTP/2 pings keep
//!   one that lives alive. One of another address ends after [`AGE`] in any case, and is read at [`PACE`].
//! - Errors of `accept` are no connection and no end: without a free descriptor the loop waits.
//!
//! What one connection may do is HTTP/2's and gRPC's to bound (`crate::health::bounded`).

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, ErrorKind};
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures::Stream;
use futures::stream::unfold;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::time::{Instant, Sleep, sleep};
use tonic::transport::server::{Connected, TcpConnectInfo};
use tracing::debug;

use crate::metrics::Meters;

/// Connections of addresses that are no node's, all together.
const OTHERS: usize = 64;
/// Connections of one address. A leader has one to each management address, a few that it has just closed, and knocks.
const OF_ONE: usize = 8;
/// Until a connection has sent HTTP/2's preface, or a TLS handshake that is no shorter.
const HANDSHAKE: Duration = Duration::from_secs(5);
/// HTTP/2's preface and the header of the settings behind it (RFC 9113, section 3.4).
const PREFACE: usize = 24 + 9;
/// For how long a connection may send nothing: twice the pings' interval.
const IDLE: Duration = Duration::from_secs(20);
/// How old a connection of another address than a node's may get.
const AGE: Duration = Duration::from_secs(600);
/// Bytes that are read in a second from one of those.
const PACE: usize = 16 * 1024;
/// Behind an error of `accept`.
const PAUSE: Duration = Duration::from_millis(100);

/// The addresses of all nodes.
pub type NodeAddresses = watch::Receiver<Arc<BTreeSet<IpAddr>>>;

/// Shared by the servers of all management addresses.
#[derive(Clone)]
pub(super) struct Acceptor {
    nodes: NodeAddresses,
    inside: Arc<Mutex<Inside>>,
    meters: Meters,
}

#[derive(Default)]
struct Inside {
    by_address: BTreeMap<IpAddr, usize>,
    others: usize,
}

impl Acceptor {
    pub(super) fn new(nodes: NodeAddresses, meters: Meters) -> Self {
        Self { nodes, inside: Arc::default(), meters }
    }

    /// Those that have a place.
    pub(super) fn guests(self, listener: TcpListener) -> impl Stream<Item = io::Result<Guest>> {
        unfold((self, listener), |(door, listener)| async move {
            loop {
                match listener.accept().await {
                    Ok((stream, peer)) => match door.enter(peer.ip()) {
                        Some(place) => return Some((Ok(Guest::new(stream, place)), (door, listener))),
                        None => door.refuse(&stream, peer),
                    },
                    // Of a connection that was gone again.
                    Err(error) if matches!(error.kind(), ErrorKind::ConnectionAborted | ErrorKind::ConnectionReset) => {
                    }
                    // No descriptor is free, as a rule: one will be.
                    Err(error) => {
                        debug!(%error, "cannot take a health check's connection");
                        sleep(PAUSE).await;
                    }
                }
            }
        })
    }

    fn enter(&self, peer: IpAddr) -> Option<Place> {
        let address = peer.to_canonical();
        let is_node = self.nodes.borrow().contains(&address);
        let mut inside = lock(&self.inside);
        let of_one = inside.by_address.get(&address).copied().unwrap_or_default();
        if of_one >= OF_ONE || (!is_node && inside.others >= OTHERS) {
            return None;
        }
        inside.by_address.insert(address, of_one + 1);
        inside.others += usize::from(!is_node);
        Some(Place { inside: self.inside.clone(), address, is_node })
    }

    fn refuse(&self, stream: &TcpStream, peer: SocketAddr) {
        debug!(%peer, "too many connections for health checks");
        self.meters.refused_connection();
        // A reset leaves nothing in the kernel either.
        drop(stream.set_zero_linger());
    }
}

/// No step leaves it half changed.
fn lock(inside: &Mutex<Inside>) -> MutexGuard<'_, Inside> {
    inside.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Of one connection, until it is dropped.
struct Place {
    inside: Arc<Mutex<Inside>>,
    address: IpAddr,
    /// As it was when the connection came.
    is_node: bool,
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut inside = lock(&self.inside);
        match inside.by_address.get_mut(&self.address) {
            Some(count) if *count > 1 => *count -= 1,
            _ => drop(inside.by_address.remove(&self.address)),
        }
        inside.others -= usize::from(!self.is_node);
    }
}

/// A connection that has a place.
pub(super) struct Guest {
    stream: TcpStream,
    place: Place,
    /// When it ends if nothing comes.
    idle: Pin<Box<Sleep>>,
    /// When it ends in any case.
    ends: Option<Instant>,
    /// Bytes that have come, all together and since when.
    read: usize,
    second: (Instant, usize),
    /// Until it may be read from again.
    rest: Option<Pin<Box<Sleep>>>,
}

impl Guest {
    fn new(stream: TcpStream, place: Place) -> Self {
        let now = Instant::now();
        // Where it fails the connection is good for nothing, which the first read says.
        drop(stream.set_nodelay(true));
        let ends = (!place.is_node).then_some(now + AGE);
        Self { stream, place, idle: Box::pin(sleep(HANDSHAKE)), ends, read: 0, second: (now, 0), rest: None }
    }

    fn note(&mut self, length: usize, now: Instant) {
        self.read += length;
        if self.read >= PREFACE {
            self.idle.as_mut().reset(now + IDLE);
        }
        if self.place.is_node {
            return;
        }
        let (begin, bytes) = self.second;
        let next = begin + Duration::from_secs(1);
        self.second = if now < next { (begin, bytes + length) } else { (now, length) };
        if self.second.1 >= PACE && now < next {
            self.rest = Some(Box::pin(tokio::time::sleep_until(next)));
        }
    }
}

impl AsyncRead for Guest {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let now = Instant::now();
        if self.ends.is_some_and(|ends| now >= ends) {
            return Poll::Ready(Err(ErrorKind::TimedOut.into()));
        }
        if let Some(rest) = &mut self.rest {
            ready!(rest.as_mut().poll(cx));
            self.rest = None;
        }
        let before = buf.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(cx, buf);
        match read {
            Poll::Ready(outcome) => {
                self.note(buf.filled().len() - before, now);
                Poll::Ready(outcome)
            }
            Poll::Pending => {
                ready!(self.idle.as_mut().poll(cx));
                Poll::Ready(Err(ErrorKind::TimedOut.into()))
            }
        }
    }
}

impl AsyncWrite for Guest {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

impl Connected for Guest {
    type ConnectInfo = TcpConnectInfo;

    fn connect_info(&self) -> Self::ConnectInfo {
        self.stream.connect_info()
    }
}

#[cfg(test)]
mod tests;
