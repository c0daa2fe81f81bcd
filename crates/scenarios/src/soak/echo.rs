//! The server outside: a UDP echo that answers each datagram with the address that it saw it come from.

use crate::prelude::*;
use egress_lab::background::Background;
use std::net::UdpSocket;
use std::sync::atomic::{AtomicBool, Ordering};

pub(crate) const PORT: u16 = 8090;

/// Serves until it is dropped.
pub(crate) struct EchoServer(Vec<Background<()>>);

impl EchoServer {
    pub(crate) fn start(netns: &Netns, addresses: &[IpAddr]) -> Result<Self> {
        let start = |address: &IpAddr| {
            let socket = netns.run(|| Ok(UdpSocket::bind(SocketAddr::new(*address, PORT))?));
            let socket = socket.with_context(|| format!("cannot bind the echo at {address}"))?;
            socket.set_read_timeout(Some(Duration::from_millis(100)))?;
            Background::start("soak-echo", move |stop| {
                serve(&socket, stop);
                Ok(())
            })
        };
        addresses.iter().map(start).collect::<Result<_>>().map(Self)
    }

    pub(crate) fn finish(self) -> Result<()> {
        Background::finish_all(self.0)
    }
}

fn serve(socket: &UdpSocket, stop: &AtomicBool) {
    let mut buffer = [0; 64];
    while !stop.load(Ordering::Relaxed) {
        // An ICMP error about an earlier answer surfaces here too, and is the caller's loss.
        let Ok((_, caller)) = socket.recv_from(&mut buffer) else { continue };
        let seen = caller.ip().to_string();
        if let Err(error) = socket.send_to(seen.as_bytes(), caller) {
            tracing::debug!(%caller, %error, "the echo was not sent");
        }
    }
}
