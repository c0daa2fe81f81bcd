//! Datagrams and segments cut into fragments by hand, and sent in any order: what a kernel that sends, and a lab without
//! detours, would not do.

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use nix::sys::socket::{AddressFamily, SockFlag, SockProtocol, SockType, socket};

use crate::topology::netns::Netns;
use crate::traffic::packet::{self, ICMP, ICMPV6, TCP, UDP, octets};

const FRAGMENT: u8 = 44;
/// Bytes of a datagram in each of its pieces; three make one.
const PIECE: usize = 1200;
/// Data of a datagram.
pub const DATA: usize = 3000;
/// Longer than a first fragment may be late for the test.
const LATE: Duration = Duration::from_millis(1200);

/// In which order the pieces are sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    Straight,
    Reversed,
    /// More than a second after the others.
    FirstLate,
    /// Two datagrams, each reversed, piece by piece.
    Interleaved,
}

impl Order {
    pub const ALL: [Self; 4] = [Self::Straight, Self::Reversed, Self::FirstLate, Self::Interleaved];

    /// How many datagrams it takes.
    pub const fn datagrams(self) -> usize {
        if matches!(self, Self::Interleaved) { 2 } else { 1 }
    }
}

/// A datagram, or a segment, before it is cut: what follows the IP header, with its checksum.
pub struct IpPayload {
    from: IpAddr,
    to: IpAddr,
    protocol: u8,
    bytes: Vec<u8>,
}

impl IpPayload {
    pub fn udp(from: SocketAddr, to: SocketAddr, data: &[u8]) -> Result<Self> {
        Ok(Self { from: from.ip(), to: to.ip(), protocol: UDP, bytes: packet::udp(from, to, data)? })
    }

    /// A segment of a connection that runs.
    pub fn tcp(from: SocketAddr, to: SocketAddr, sequence: u32, acknowledged: u32, data: &[u8]) -> Self {
        const PUSH_ACK: [u8; 2] = [0x50, 0x18];
        const WINDOW: [u8; 2] = [0x20, 0];
        let ports = [from.port().to_be_bytes(), to.port().to_be_bytes()].concat();
        let numbers = [sequence.to_be_bytes(), acknowledged.to_be_bytes()].concat();
        let rest = [PUSH_ACK, WINDOW, [0; 2], [0; 2]].concat();
        Self::summed(from.ip(), to.ip(), TCP, [&ports, &numbers, &rest, data].concat(), 16)
    }

    pub fn echo(from: IpAddr, to: IpAddr, is_request: bool, identifier: u16, data: &[u8]) -> Self {
        let (protocol, kind) = match (from.is_ipv4(), is_request) {
            (true, true) => (ICMP, 8),
            (true, false) => (ICMP, 0),
            (false, true) => (ICMPV6, 128),
            (false, false) => (ICMPV6, 129),
        };
        let [high, low] = identifier.to_be_bytes();
        Self::summed(from, to, protocol, [&[kind, 0, 0, 0, high, low, 0, 1], data].concat(), 2)
    }

    fn summed(from: IpAddr, to: IpAddr, protocol: u8, bytes: Vec<u8>, sum_at: usize) -> Self {
        Self { from, to, protocol, bytes: packet::summed(from, to, protocol, bytes, sum_at) }
    }

    /// Whole packets, one for each piece.
    fn cut(&self, number: u16) -> Result<Vec<Vec<u8>>> {
        let pieces = self.bytes.chunks(PIECE).enumerate();
        let whole = |(place, piece): (usize, &[u8])| {
            let (offset, more) = (u16::try_from(place * PIECE)?, (place + 1) * PIECE < self.bytes.len());
            Ok(match (self.from, self.to) {
                (IpAddr::V4(_), IpAddr::V4(_)) => self.ipv4(number, offset >> 3 | u16::from(more) << 13, piece)?,
                (IpAddr::V6(_), IpAddr::V6(_)) => self.ipv6(number, offset | u16::from(more), piece)?,
                _ => bail!("a datagram has one family"),
            })
        };
        pieces.map(whole).collect()
    }

    /// The kernel fills in the header's checksum.
    fn ipv4(&self, number: u16, bits: u16, piece: &[u8]) -> Result<Vec<u8>> {
        let total = u16::try_from(20 + piece.len())?;
        let words = [total.to_be_bytes(), number.to_be_bytes(), bits.to_be_bytes()].concat();
        let header = [&[0x45, 0], words.as_slice(), &[64, self.protocol, 0, 0]].concat();
        Ok([&header, &octets(self.from), &octets(self.to), piece].concat())
    }

    fn ipv6(&self, number: u16, bits: u16, piece: &[u8]) -> Result<Vec<u8>> {
        let length = u16::try_from(8 + piece.len())?.to_be_bytes();
        let header = [0x60, 0, 0, 0, length[0], length[1], FRAGMENT, 64];
        let extension = [&[self.protocol, 0], bits.to_be_bytes().as_slice(), &u32::from(number).to_be_bytes()].concat();
        Ok([&header, octets(self.from).as_slice(), &octets(self.to), &extension, piece].concat())
    }
}

/// Sends datagrams in pieces from a namespace, each with its own number from `number` on.
pub fn send(from: &Netns, datagrams: &[IpPayload], order: Order, number: u16) -> Result<()> {
    let mut cut = Vec::new();
    for (datagram, number) in datagrams.iter().zip(number..) {
        cut.push(datagram.cut(number)?);
    }
    let to = datagrams.first().context("no datagram")?.to;
    from.run(|| {
        let socket = raw(to)?;
        let send = |packet: &Vec<u8>| {
            socket.send_to(packet, SocketAddr::new(to, 0)).map(|_length| ()).map_err(anyhow::Error::from)
        };
        match order {
            Order::Straight => cut.iter().flatten().try_for_each(send),
            Order::Reversed | Order::Interleaved => {
                let places = cut.iter().map(Vec::len).max().unwrap_or(0);
                (0..places).rev().try_for_each(|place| cut.iter().filter_map(|one| one.get(place)).try_for_each(send))
            }
            Order::FirstLate => {
                cut.iter().flat_map(|one| &one[1..]).try_for_each(send)?;
                thread::sleep(LATE);
                cut.iter().map(|one| &one[0]).try_for_each(send)
            }
        }
    })
}

/// Sends packets with their own headers.
pub fn raw(to: IpAddr) -> Result<UdpSocket> {
    let family = if to.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    Ok(UdpSocket::from(socket(family, SockType::Raw, SockFlag::SOCK_CLOEXEC, SockProtocol::Raw)?))
}
