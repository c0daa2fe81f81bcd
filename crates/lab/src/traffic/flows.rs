//! Long-lived flows to an echo: what a moved gateway or a restarted agent must not hurt. Each runs on a thread inside
//! its namespace until it is stopped, and counts.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Result;
use nix::sys::socket::{AddressFamily, SockFlag, SockProtocol, SockType, socket};

use crate::background::Background;
use crate::topology::netns::Netns;

/// What a flow has lived through.
#[derive(Debug, Clone, Default)]
pub struct FlowReport {
    pub local: Option<SocketAddr>,
    pub sent: u64,
    pub echoed: u64,
    /// Datagrams that came back twice. TCP has none.
    pub duplicated: u64,
    /// The longest time between two echoes.
    pub longest_gap: Duration,
    /// Why the flow ended before it was stopped: reset, timed out. UDP flows never end by themselves.
    pub broken: Option<ErrorKind>,
}

impl FlowReport {
    pub fn lost(&self) -> u64 {
        self.sent - self.echoed
    }
}

/// A flow that runs until it is stopped.
pub struct TrafficFlow(Background<FlowReport>);

impl TrafficFlow {
    /// A TCP connection to an echo that sends a message every `interval` and expects it back within `patience`.
    pub fn tcp(from: &Netns, to: SocketAddr, interval: Duration, patience: Duration) -> Result<Self> {
        Background::start_in(from, move |stop| Ok(tcp(to, interval, patience, stop))).map(Self)
    }

    /// A UDP flow that sends a numbered datagram every `interval` and counts those that come back.
    pub fn udp(from: &Netns, to: SocketAddr, interval: Duration) -> Result<Self> {
        Background::start_in(from, move |stop| Ok(datagrams(&udp_socket(to)?, &[], interval, stop)?)).map(Self)
    }

    /// A ping that sends a numbered echo request every `interval` and counts the replies, for each of which it can say
    /// whether it came.
    pub fn ping(from: &Netns, to: IpAddr, interval: Duration) -> Result<Self> {
        allow_echo_sockets(from)?;
        Background::start_in(from, move |stop| Ok(datagrams(&echo_socket(to)?, &echo_request(to), interval, stop)?))
            .map(Self)
    }

    /// As [`finish`](Self::finish), of a flow that is expected to break by itself within `time`, and may take it.
    pub fn break_within(self, time: Duration) -> Result<FlowReport> {
        let until = Instant::now() + time;
        while !self.0.is_finished() && Instant::now() < until {
            thread::sleep(Duration::from_millis(5));
        }
        self.finish()
    }

    /// Ends the flow and returns its report.
    pub fn finish(self) -> Result<FlowReport> {
        self.0.finish()
    }
}

fn tcp(to: SocketAddr, interval: Duration, patience: Duration, stop: &AtomicBool) -> FlowReport {
    let mut report = FlowReport::default();
    if let Err(error) = tcp_until(to, interval, patience, stop, &mut report) {
        report.broken = Some(error.kind());
    }
    report
}

fn tcp_until(
    to: SocketAddr,
    interval: Duration,
    patience: Duration,
    stop: &AtomicBool,
    report: &mut FlowReport,
) -> io::Result<()> {
    let mut stream = TcpStream::connect_timeout(&to, patience)?;
    report.local = Some(stream.local_addr()?);
    stream.set_read_timeout(Some(patience))?;
    stream.set_nodelay(true)?;
    let mut last = Instant::now();
    while !stop.load(Ordering::Relaxed) {
        let message = report.sent.to_be_bytes();
        stream.write_all(&message)?;
        report.sent += 1;
        let mut echo = [0; 8];
        stream.read_exact(&mut echo)?;
        if echo != message {
            return Err(ErrorKind::InvalidData.into());
        }
        report.echoed += 1;
        report.longest_gap = report.longest_gap.max(last.elapsed());
        last = Instant::now();
        thread::sleep(interval);
    }
    Ok(())
}

/// How long a stopped UDP flow waits for its last echoes.
const LAST_ECHOES: Duration = Duration::from_millis(300);

pub fn udp_socket(to: SocketAddr) -> io::Result<UdpSocket> {
    let any = match to {
        SocketAddr::V4(_) => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        SocketAddr::V6(_) => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
    };
    let socket = UdpSocket::bind((any, 0))?;
    socket.connect(to)?;
    Ok(socket)
}

/// The kernel's ICMP sockets choose the identifier and the checksum; each namespace says who may have them.
pub fn allow_echo_sockets(netns: &Netns) -> Result<()> {
    netns.sysctl(&[("ipv4/ping_group_range".to_owned(), "0\t0".to_owned())])
}

pub fn echo_socket(to: IpAddr) -> io::Result<UdpSocket> {
    let (family, protocol) = match to {
        IpAddr::V4(_) => (AddressFamily::Inet, SockProtocol::Icmp),
        IpAddr::V6(_) => (AddressFamily::Inet6, SockProtocol::IcmpV6),
    };
    let socket = UdpSocket::from(socket(family, SockType::Datagram, SockFlag::SOCK_CLOEXEC, protocol)?);
    socket.connect(SocketAddr::new(to, 0))?;
    Ok(socket)
}

/// The header of an echo request; a reply's differs in the type alone.
pub fn echo_request(to: IpAddr) -> [u8; 8] {
    const ECHO_V4: u8 = 8;
    const ECHO_V6: u8 = 128;
    [if to.is_ipv4() { ECHO_V4 } else { ECHO_V6 }, 0, 0, 0, 0, 0, 0, 0]
}

/// Numbered datagrams after `head`; each comes back with a head as long as that.
fn datagrams(socket: &UdpSocket, head: &[u8], interval: Duration, stop: &AtomicBool) -> io::Result<FlowReport> {
    let mut report = FlowReport { local: Some(socket.local_addr()?), ..FlowReport::default() };
    let mut echoes = Echoes { head: head.len(), seen: Vec::new(), last: Instant::now() };
    while !stop.load(Ordering::Relaxed) {
        // An ICMP error of an earlier datagram surfaces here; this one was not sent then.
        if socket.send(&[head, &report.sent.to_be_bytes()].concat()).is_ok() {
            report.sent += 1;
            echoes.seen.push(false);
        }
        echoes.collect(socket, interval, &mut report)?;
    }
    report.longest_gap = report.longest_gap.max(echoes.last.elapsed());
    echoes.collect(socket, LAST_ECHOES, &mut report)?;
    Ok(report)
}

/// Which datagrams of a UDP flow came back.
struct Echoes {
    head: usize,
    seen: Vec<bool>,
    last: Instant,
}

impl Echoes {
    fn collect(&mut self, socket: &UdpSocket, time: Duration, report: &mut FlowReport) -> io::Result<()> {
        let end = Instant::now() + time;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(());
            }
            socket.set_read_timeout(Some(left))?;
            let mut buffer = [0; 64];
            let Ok(length) = socket.recv(&mut buffer) else { continue };
            let message = buffer[..length].get(self.head..).and_then(|number| number.try_into().ok());
            let Some(message) = message else { continue };
            let number = usize::try_from(u64::from_be_bytes(message)).unwrap_or(usize::MAX);
            match self.seen.get_mut(number) {
                Some(seen) if !*seen => {
                    *seen = true;
                    report.echoed += 1;
                    report.longest_gap = report.longest_gap.max(self.last.elapsed());
                    self.last = Instant::now();
                }
                Some(_) => report.duplicated += 1,
                None => {}
            }
        }
    }
}
