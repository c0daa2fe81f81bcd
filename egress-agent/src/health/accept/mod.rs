//! The accept loop of the health port. Any host that reaches the management address can connect, so resources are bounded.
//!
//! - Each node of the cluster, known by its addresses, has reserved slots. All other addresses share [`OTHER_SLOTS`]. No
//!   address has more than [`SLOTS_PER_ADDRESS`]. A connection without a slot is reset when it is accepted.
//! - A connection ends if it sends nothing for [`IDLE`], or no HTTP/2 preface within [`HANDSHAKE`]. HTTP/2 pings keep a live
//!   one open. A connection that is not a node's ends after [`AGE`], and is read at [`READ_RATE`].
//! - After an error of `accept`, such as no free descriptor, the loop waits and continues.
//!
//! HTTP/2 and gRPC bound the use of one connection (`crate::health::limited_server`).

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

/// Connections of all addresses that are not a node's.
const OTHER_SLOTS: usize = 64;
/// Connections of one address. A leader has one to each management address, some just closed ones, and TCP probes.
const SLOTS_PER_ADDRESS: usize = 8;
/// Timeout of HTTP/2's preface, or of a TLS handshake, which is not shorter.
const HANDSHAKE: Duration = Duration::from_secs(5);
/// HTTP/2's preface and the header of the settings after it (RFC 9113, section 3.4).
const PREFACE: usize = 24 + 9;
/// How long a connection may send nothing: twice the interval of pings.
const IDLE: Duration = Duration::from_secs(20);
/// Longest duration of a connection that is not a node's.
const AGE: Duration = Duration::from_secs(600);
/// Bytes per second that are read from such a connection.
const READ_RATE: usize = 16 * 1024;
/// After an error of `accept`.
const PAUSE: Duration = Duration::from_millis(100);

/// The addresses of all nodes.
pub type NodeAddresses = watch::Receiver<Arc<BTreeSet<IpAddr>>>;

/// Shared by the servers of all management addresses.
#[derive(Clone)]
pub(super) struct Acceptor {
    nodes: NodeAddresses,
    open: Arc<Mutex<Connections>>,
    meters: Meters,
}

#[derive(Default)]
struct Connections {
    by_address: BTreeMap<IpAddr, usize>,
    of_others: usize,
}

impl Acceptor {
    pub(super) fn new(nodes: NodeAddresses, meters: Meters) -> Self {
        Self { nodes, open: Arc::default(), meters }
    }

    /// The connections that get a slot.
    pub(super) fn admitted(self, listener: TcpListener) -> impl Stream<Item = io::Result<Admitted>> {
        unfold((self, listener), |(acceptor, listener)| async move {
            loop {
                match listener.accept().await {
                    Ok((stream, peer)) => match acceptor.take_slot(peer.ip()) {
                        Some(slot) => return Some((Ok(Admitted::new(stream, slot)), (acceptor, listener))),
                        None => acceptor.refuse(&stream, peer),
                    },
                    // The connection has already been closed.
                    Err(error) if matches!(error.kind(), ErrorKind::ConnectionAborted | ErrorKind::ConnectionReset) => {
                    }
                    // Usually no file descriptor is free, which passes.
                    Err(error) => {
                        debug!(%error, "cannot accept a connection for health checks");
                        sleep(PAUSE).await;
                    }
                }
            }
        })
    }

    fn take_slot(&self, peer: IpAddr) -> Option<ConnectionSlot> {
        let address = peer.to_canonical();
        let is_node = self.nodes.borrow().contains(&address);
        let mut open = lock(&self.open);
        let count = open.by_address.get(&address).copied().unwrap_or_default();
        if count >= SLOTS_PER_ADDRESS || (!is_node && open.of_others >= OTHER_SLOTS) {
            return None;
        }
        open.by_address.insert(address, count + 1);
        open.of_others += usize::from(!is_node);
        Some(ConnectionSlot { open: self.open.clone(), address, is_node })
    }

    fn refuse(&self, stream: &TcpStream, peer: SocketAddr) {
        debug!(%peer, "too many connections for health checks");
        self.meters.refused_connection();
        // A reset leaves no state in the kernel.
        drop(stream.set_zero_linger());
    }
}

/// A panic cannot leave it inconsistent.
fn lock(open: &Mutex<Connections>) -> MutexGuard<'_, Connections> {
    open.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The slot of one connection; dropping it frees the slot.
struct ConnectionSlot {
    open: Arc<Mutex<Connections>>,
    address: IpAddr,
    /// As of the connection's start.
    is_node: bool,
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        let mut open = lock(&self.open);
        match open.by_address.get_mut(&self.address) {
            Some(count) if *count > 1 => *count -= 1,
            _ => drop(open.by_address.remove(&self.address)),
        }
        open.of_others -= usize::from(!self.is_node);
    }
}

/// A connection with a slot.
pub(super) struct Admitted {
    stream: TcpStream,
    slot: ConnectionSlot,
    /// Deadline of the next bytes.
    idle: Pin<Box<Sleep>>,
    /// Deadline of the whole connection.
    ends: Option<Instant>,
    /// Bytes that have come, all together and since when.
    read: usize,
    second: (Instant, usize),
    /// Until it may be read from again.
    rest: Option<Pin<Box<Sleep>>>,
}

impl Admitted {
    fn new(stream: TcpStream, slot: ConnectionSlot) -> Self {
        let now = Instant::now();
        // If it fails, the connection is broken and the first read fails too.
        drop(stream.set_nodelay(true));
        let ends = (!slot.is_node).then_some(now + AGE);
        Self { stream, slot, idle: Box::pin(sleep(HANDSHAKE)), ends, read: 0, second: (now, 0), rest: None }
    }

    fn note(&mut self, length: usize, now: Instant) {
        self.read += length;
        if self.read >= PREFACE {
            self.idle.as_mut().reset(now + IDLE);
        }
        if self.slot.is_node {
            return;
        }
        let (begin, bytes) = self.second;
        let next = begin + Duration::from_secs(1);
        self.second = if now < next { (begin, bytes + length) } else { (now, length) };
        if self.second.1 >= READ_RATE && now < next {
            self.rest = Some(Box::pin(tokio::time::sleep_until(next)));
        }
    }
}

impl AsyncRead for Admitted {
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

impl AsyncWrite for Admitted {
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

impl Connected for Admitted {
    type ConnectInfo = TcpConnectInfo;

    fn connect_info(&self) -> Self::ConnectInfo {
        self.stream.connect_info()
    }
}

#[cfg(test)]
mod tests;
