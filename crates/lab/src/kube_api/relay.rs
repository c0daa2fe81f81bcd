//! Carries connections from a listener in the lab's outside to the API server, byte by byte. The listener was bound
//! inside a namespace of the lab; what it accepts is connected onward from the root namespace.

use std::net::TcpListener;
use std::time::Duration;

use anyhow::Result;
use tokio::io::copy_bidirectional;
use tokio::net::TcpStream;
use tokio::runtime::Runtime;
use tokio::task::{JoinHandle, JoinSet};

/// A running relay; dropping it closes the listener and all connections.
pub(super) struct Relay {
    task: JoinHandle<()>,
}

impl Relay {
    /// `target` is `host:port`.
    pub(super) fn start(runtime: &Runtime, listener: TcpListener, target: String) -> Result<Self> {
        listener.set_nonblocking(true)?;
        let _inside = runtime.enter();
        let listener = tokio::net::TcpListener::from_std(listener)?;
        Ok(Self { task: runtime.spawn(accept(listener, target)) })
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn accept(listener: tokio::net::TcpListener, target: String) {
    // Dropped with this task, and its connections with it.
    let mut connections = JoinSet::new();
    loop {
        while connections.try_join_next().is_some() {}
        match listener.accept().await {
            Ok((stream, _)) => drop(connections.spawn(carry(stream, target.clone()))),
            Err(error) => {
                tracing::warn!(%error, "the relay to the API server cannot accept");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    }
}

async fn carry(mut from: TcpStream, target: String) -> std::io::Result<()> {
    let mut to = TcpStream::connect(&target).await?;
    from.set_nodelay(true)?;
    to.set_nodelay(true)?;
    copy_bidirectional(&mut from, &mut to).await?;
    Ok(())
}
