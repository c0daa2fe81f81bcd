//! The server's connections, and the switch that cuts them: what clients see when an API server goes away.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};

use axum::serve::Listener;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};

/// Shared by the listener and who wants an outage.
#[derive(Clone, Default)]
pub(super) struct Switch(Arc<Mutex<SwitchPosition>>);

#[derive(Default)]
struct SwitchPosition {
    is_out: bool,
    /// Cancelled to cut the connections accepted so far.
    cut: CancellationToken,
}

impl Switch {
    /// Cut every connection and refuse new ones until it is switched back.
    pub(super) fn set_outage(&self, is_out: bool) {
        let mut position = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        position.is_out = is_out;
        if is_out {
            std::mem::take(&mut position.cut).cancel();
        }
    }

    /// What cuts a connection that comes in now; none during an outage.
    fn admit(&self) -> Option<CancellationToken> {
        let position = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        (!position.is_out).then(|| position.cut.clone())
    }
}

pub(super) struct SwitchedListener {
    pub listener: TcpListener,
    pub switch: Switch,
}

impl Listener for SwitchedListener {
    type Io = ApiConnection;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (ApiConnection, SocketAddr) {
        loop {
            let (stream, peer) = Listener::accept(&mut self.listener).await;
            // During an outage the stream is dropped here: the client sees its connection closed.
            if let Some(cut) = self.switch.admit() {
                if let Err(error) = stream.set_nodelay(true) {
                    tracing::debug!(%error, %peer, "a connection keeps Nagle's delay");
                }
                return (ApiConnection { stream, cut: Box::pin(cut.cancelled_owned()) }, peer);
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

/// A stream that fails once it is cut.
pub(super) struct ApiConnection {
    stream: TcpStream,
    cut: Pin<Box<WaitForCancellationFutureOwned>>,
}

impl ApiConnection {
    fn check(&mut self, context: &mut Context<'_>) -> io::Result<()> {
        match self.cut.as_mut().poll(context) {
            Poll::Ready(()) => Err(io::ErrorKind::ConnectionReset.into()),
            Poll::Pending => Ok(()),
        }
    }
}

impl AsyncRead for ApiConnection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.check(context)?;
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for ApiConnection {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.check(context)?;
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
