//! How much arrives at a server of senders that send as much as goes.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv6Addr, TcpListener, TcpStream, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use nix::sys::socket::setsockopt;
use nix::sys::socket::sockopt::{UdpGroSegment, UdpGsoSegment};

use crate::bench::pin;
use crate::prelude::*;

const PORT: u16 = 7_010;
/// Bytes of a datagram, which fits the pods' MTU, and of its headers with the link's.
const DATAGRAM: usize = 1_300;
const DATAGRAM_HEADERS: u64 = 42;
/// Datagrams of a GSO packet, which has less than 64 KiB.
const TOGETHER: usize = 40;
const CHUNK: usize = 128 << 10;

/// Bytes that the server has received: the content of streams, and whole frames of datagrams.
pub(crate) struct Received(Arc<AtomicU64>);

/// A sender on a thread of its own.
pub(crate) struct LoadSender {
    is_over: Arc<AtomicBool>,
    thread: thread::JoinHandle<Result<()>>,
}

impl LoadSender {
    pub(crate) fn stop(self) -> Result<()> {
        self.is_over.store(true, Ordering::Relaxed);
        self.thread.join().ok().context("a sender has panicked")?
    }

    fn start(
        netns: &Netns,
        core: Option<usize>,
        work: impl FnOnce(&AtomicBool) -> Result<()> + Send + 'static,
    ) -> Result<Self> {
        let is_over = Arc::new(AtomicBool::new(false));
        let ends = Arc::clone(&is_over);
        let thread = netns.spawn(move || {
            core.map_or(Ok(()), pin)?;
            work(&ends)
        })?;
        Ok(Self { is_over, thread })
    }
}

impl Received {
    /// Starts the server. Its threads wait, and end with the process.
    pub(crate) fn serve(outside: &Netns, core: Option<usize>) -> Result<Self> {
        let received = Arc::new(AtomicU64::new(0));
        let listener = outside.run(|| Ok(TcpListener::bind((Ipv6Addr::UNSPECIFIED, PORT))?))?;
        let socket = outside.run(|| Ok(UdpSocket::bind((Ipv6Addr::UNSPECIFIED, PORT))?))?;
        // Datagrams that were sent together are received together.
        setsockopt(&socket, UdpGroSegment, &true)?;
        let count = Arc::clone(&received);
        thread::spawn(move || {
            for stream in listener.incoming() {
                let (stream, count) = (stream?, Arc::clone(&count));
                thread::spawn(move || swallow(stream, core, &count));
            }
            Ok::<(), anyhow::Error>(())
        });
        let count = Arc::clone(&received);
        thread::spawn(move || {
            core.map_or(Ok(()), pin)?;
            let mut bytes = vec![0; 2 * TOGETHER * DATAGRAM];
            loop {
                let length = socket.recv(&mut bytes)?;
                let headers = length.div_ceil(DATAGRAM) as u64 * DATAGRAM_HEADERS;
                count.fetch_add(length as u64 + headers, Ordering::Relaxed);
            }
            #[expect(unreachable_code, reason = "names the type of the closure's errors")]
            Ok::<(), anyhow::Error>(())
        });
        Ok(Self(received))
    }

    /// What arrives during this time.
    #[expect(clippy::cast_precision_loss, reason = "a rate needs no more digits than a double has")]
    pub(crate) fn bits_per_second(&self, time: Duration) -> f64 {
        let (first, begin) = (self.0.load(Ordering::Relaxed), Instant::now());
        thread::sleep(time);
        let (bytes, took) = (self.0.load(Ordering::Relaxed) - first, begin.elapsed());
        (bytes * 8) as f64 / took.as_secs_f64()
    }

    /// One connection.
    #[expect(clippy::unused_self, reason = "it is this server that receives it")]
    pub(crate) fn stream(&self, netns: &Netns, core: Option<usize>) -> Result<LoadSender> {
        LoadSender::start(netns, core, |is_over| {
            let mut stream = TcpStream::connect_timeout(&SocketAddr::new(plan::SERVER.v4.into(), PORT), EFFECT)?;
            // A stream that waits for a long time looks whether it is over.
            stream.set_write_timeout(Some(Duration::from_millis(200)))?;
            let bytes = vec![7; CHUNK];
            while !is_over.load(Ordering::Relaxed) {
                match stream.write(&bytes) {
                    Err(error) if error.kind() != ErrorKind::WouldBlock => return Err(error.into()),
                    _ => {}
                }
            }
            Ok(())
        })
    }

    /// Datagrams from one port, each sent by itself.
    pub(crate) fn datagrams(&self, netns: &Netns, core: Option<usize>) -> Result<LoadSender> {
        self.datagrams_by(netns, core, 1)
    }

    /// As fast as goes: the kernel gets a GSO packet, which becomes datagrams only where a device or a receiver asks for them.
    pub(crate) fn datagrams_together(&self, netns: &Netns, core: Option<usize>) -> Result<LoadSender> {
        self.datagrams_by(netns, core, TOGETHER)
    }

    #[expect(clippy::unused_self, reason = "it is this server that receives them")]
    fn datagrams_by(&self, netns: &Netns, core: Option<usize>, count: usize) -> Result<LoadSender> {
        LoadSender::start(netns, core, move |is_over| {
            let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
            socket.connect((plan::SERVER.v4, PORT))?;
            if count > 1 {
                setsockopt(&socket, UdpGsoSegment, &i32::try_from(DATAGRAM)?)?;
            }
            let bytes = vec![7; count * DATAGRAM];
            while !is_over.load(Ordering::Relaxed) {
                // A full queue of the pod's device is none of a limit's.
                let _full = socket.send(&bytes);
            }
            Ok(())
        })
    }
}

fn swallow(mut stream: TcpStream, core: Option<usize>, count: &AtomicU64) -> Result<()> {
    core.map_or(Ok(()), pin)?;
    let mut bytes = vec![0; CHUNK];
    loop {
        match stream.read(&mut bytes)? {
            0 => return Ok(()),
            length => count.fetch_add(length as u64, Ordering::Relaxed),
        };
    }
}
