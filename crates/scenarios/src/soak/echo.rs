//! The server outside: a UDP echo that answers each datagram with the address that it saw it come from.

use crate::prelude::*;
use std::net::UdpSocket;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

pub(crate) const PORT: u16 = 8090;

/// Serves until it is dropped.
pub(crate) struct Echo {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Echo {
    pub(crate) fn start(netns: &Netns, addresses: &[IpAddr]) -> Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let mut echo = Self { stop, threads: Vec::new() };
        for address in addresses {
            let socket = netns.run(|| Ok(UdpSocket::bind(SocketAddr::new(*address, PORT))?));
            let socket = socket.with_context(|| format!("cannot bind the echo at {address}"))?;
            socket.set_read_timeout(Some(Duration::from_millis(100)))?;
            let stop = Arc::clone(&echo.stop);
            let serve = move || serve(&socket, &stop);
            echo.threads.push(thread::Builder::new().name("soak-echo".to_owned()).spawn(serve)?);
        }
        Ok(echo)
    }
}

impl Drop for Echo {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                eprintln!("soak: the echo panicked");
            }
        }
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
