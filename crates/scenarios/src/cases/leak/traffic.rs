//! A caller that never stops: to its own address it sends, in both families, datagrams of an old flow and of a new one each
//! time, echo requests, requests on new connections, and messages on a connection that it keeps as long as it can.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::Result;

use egress_lab::LabPod;
use egress_lab::background::Background;
use egress_lab::topology::addresses::{Dual, ECHO_PORT, HTTP_PORT};
use egress_lab::traffic::flows::{allow_echo_sockets, echo_request, echo_socket, udp_socket};

/// Between two rounds of datagrams, and of requests.
const TICK: Duration = Duration::from_millis(60);
const REQUESTS: Duration = Duration::from_millis(150);
const PATIENCE: Duration = Duration::from_millis(250);

/// Talks until it is stopped.
pub(super) struct CallerTraffic(Vec<Background<()>>);

impl CallerTraffic {
    pub(super) fn start(pod: &LabPod, server_address: Dual) -> Result<Self> {
        allow_echo_sockets(&pod.netns)?;
        let mut workers = Vec::new();
        for to in server_address.both() {
            workers.push(Background::start_in(&pod.netns, move |stop| Ok(datagrams(to, stop)?))?);
            workers.push(Background::start_in(&pod.netns, move |stop| Ok(connections(to, stop)?))?);
        }
        Ok(Self(workers))
    }

    pub(super) fn finish(self) -> Result<()> {
        Background::finish_all(self.0)
    }
}

/// What the network says about a packet (refused, unreachable, forbidden) is no reason to stop sending.
fn sent(outcome: io::Result<usize>) -> io::Result<()> {
    match outcome {
        Err(error) if error.kind() == ErrorKind::NotConnected => Err(error),
        _ => Ok(()),
    }
}

fn datagrams(to: IpAddr, stop: &AtomicBool) -> io::Result<()> {
    let echo = SocketAddr::new(to, ECHO_PORT);
    let old = udp_socket(echo)?;
    let ping = echo_socket(to)?;
    while !stop.load(Ordering::Relaxed) {
        sent(old.send(b"old"))?;
        sent(udp_socket(echo)?.send(b"new"))?;
        sent(ping.send(&echo_request(to)))?;
        thread::sleep(TICK);
    }
    Ok(())
}

fn connections(to: IpAddr, stop: &AtomicBool) -> io::Result<()> {
    let mut kept: Option<TcpStream> = None;
    while !stop.load(Ordering::Relaxed) {
        // A request that fails has sent its packets all the same.
        if let Ok(mut stream) = TcpStream::connect_timeout(&SocketAddr::new(to, HTTP_PORT), PATIENCE) {
            stream.set_read_timeout(Some(PATIENCE))?;
            let head = format!("GET / HTTP/1.1\r\nHost: {to}\r\nConnection: close\r\n\r\n");
            let asked = stream.write_all(head.as_bytes());
            drop(asked.and_then(|()| stream.read_to_end(&mut Vec::new())));
        }
        kept = match kept.take() {
            Some(stream) => talk(stream).ok(),
            None => TcpStream::connect_timeout(&SocketAddr::new(to, ECHO_PORT), PATIENCE).ok(),
        };
        thread::sleep(REQUESTS);
    }
    Ok(())
}

/// One message; the echoes so far are read and forgotten. An error ends the connection.
fn talk(mut stream: TcpStream) -> io::Result<TcpStream> {
    stream.set_nonblocking(true)?;
    match stream.write(b"still here") {
        Err(error) if error.kind() != ErrorKind::WouldBlock => return Err(error),
        _ => {}
    }
    match stream.read(&mut [0; 256]) {
        Ok(0) => Err(ErrorKind::UnexpectedEof.into()),
        Err(error) if error.kind() != ErrorKind::WouldBlock => Err(error),
        _ => Ok(stream),
    }
}
