//! Link-layer sockets: sending frames, receiving ARP and neighbour discovery, multicast filters of a device, and raw socket
//! options.

#![expect(unsafe_code, reason = "packet access is one of the three places for it: these calls have no safe wrapper")]

use std::io;
use std::mem::size_of;
use std::net::{IpAddr, Ipv6Addr, UdpSocket};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use nix::net::if_::if_indextoname;
use nix::sys::socket::sockopt::RcvBufForce;
use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockType, recv, send, setsockopt, socket};
use tokio::io::unix::AsyncFd;

use crate::announce::frames::{
    ETHERNET_LEN, ETHERTYPE_ARP, ETHERTYPE_IPV6, ICMPV6, IPV6_LEN, NEIGHBOUR_ADVERTISEMENT, NEIGHBOUR_SOLICITATION,
};
use egress_core::model::node::Mac;

/// Bytes, including the kernel's overhead per frame: some thousand frames.
const RECEIVE_BUFFER: usize = 1 << 20;

/// A link-layer socket bound to one device. It receives one EtherType, or nothing.
///
/// Closing waits until no CPU uses the socket (`synchronize_net`, tens of milliseconds): sockets are kept, or closed in
/// [`blocking`](egress_supervise::blocking).
#[derive(Debug)]
pub struct PacketSocket {
    fd: OwnedFd,
}

impl PacketSocket {
    /// Sends only.
    pub fn sender(ifindex: u32) -> io::Result<Self> {
        let fd = raw_socket()?;
        bind(&fd, ifindex, 0)?;
        Ok(Self { fd })
    }

    /// Sends, and receives one EtherType, outside a runtime.
    pub fn bound(ifindex: u32, ethertype: u16) -> io::Result<Self> {
        let fd = raw_socket()?;
        bind(&fd, ifindex, ethertype)?;
        Ok(Self { fd })
    }

    /// Sends, and receives possible claims of other hosts on addresses of this family. Must be called in a runtime.
    pub fn listener(ifindex: u32, is_ipv4: bool) -> io::Result<AsyncFd<Self>> {
        let fd = raw_socket()?;
        // Large, so that many claims at once do not displace an answer.
        setsockopt(&fd, RcvBufForce, &RECEIVE_BUFFER)?;
        let ethertype = if is_ipv4 {
            ETHERTYPE_ARP
        } else {
            // Before the bind, so that it never receives the rest of the IPv6 traffic.
            filter(&fd, &NEIGHBOUR_DISCOVERY)?;
            ETHERTYPE_IPV6
        };
        bind(&fd, ifindex, ethertype)?;
        Self { fd }.registered()
    }

    /// As [`listener`](Self::listener), for one address. The kernel drops frames about other addresses, so that they use
    /// neither buffer space nor time of the agent. Must be called in a runtime.
    pub fn listener_of(ifindex: u32, address: IpAddr) -> io::Result<AsyncFd<Self>> {
        let fd = raw_socket()?;
        // Before the bind, so that it never receives other frames.
        filter(&fd, &claims_of(address))?;
        bind(&fd, ifindex, if address.is_ipv4() { ETHERTYPE_ARP } else { ETHERTYPE_IPV6 })?;
        Self { fd }.registered()
    }

    /// Any socket that receives.
    #[cfg(test)]
    pub fn of(fd: OwnedFd) -> io::Result<AsyncFd<Self>> {
        Self { fd }.registered()
    }

    /// Receives one EtherType without a filter. Must be called in a runtime.
    pub fn hearing(ifindex: u32, ethertype: u16) -> io::Result<AsyncFd<Self>> {
        let fd = raw_socket()?;
        bind(&fd, ifindex, ethertype)?;
        Self { fd }.registered()
    }

    fn registered(self) -> io::Result<AsyncFd<Self>> {
        // SAFETY: the socket owns its descriptor, gives out that one only, and closes it when it is dropped, which `AsyncFd`
        // does after it has taken the descriptor out of the reactor.
        unsafe { AsyncFd::register(self) }.map_err(io::Error::from)
    }

    pub fn send(&self, frame: &[u8]) -> io::Result<()> {
        send(self.fd.as_raw_fd(), frame, MsgFlags::empty())?;
        Ok(())
    }

    pub fn receive(&self, frame: &mut [u8]) -> io::Result<usize> {
        Ok(recv(self.fd.as_raw_fd(), frame, MsgFlags::empty())?)
    }
}

impl AsFd for PacketSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl AsRawFd for PacketSocket {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

fn raw_socket() -> io::Result<OwnedFd> {
    // Protocol zero: receives nothing until it is bound to one.
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    Ok(socket(AddressFamily::Packet, SockType::Raw, flags, None)?)
}

fn bind(fd: &OwnedFd, ifindex: u32, ethertype: u16) -> io::Result<()> {
    let address = libc::sockaddr_ll {
        sll_family: u16::try_from(libc::AF_PACKET).map_err(io::Error::other)?,
        sll_protocol: ethertype.to_be(),
        sll_ifindex: i32::try_from(ifindex).map_err(io::Error::other)?,
        sll_hatype: 0,
        sll_pkttype: 0,
        sll_halen: 0,
        sll_addr: [0; 8],
    };
    let length = libc::socklen_t::try_from(size_of::<libc::sockaddr_ll>()).map_err(io::Error::other)?;
    // SAFETY: the address is a live, fully initialised `sockaddr_ll` whose size is given, and the descriptor is open.
    let result = unsafe { libc::bind(fd.as_raw_fd(), (&raw const address).cast(), length) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// One instruction of a classic BPF socket filter.
const fn op(code: u32, jt: u8, jf: u8, k: u32) -> libc::sock_filter {
    // Codes of classic BPF have eight bits.
    #[expect(clippy::cast_possible_truncation, reason = "codes of classic BPF have eight bits")]
    let code = code as u16;
    libc::sock_filter { code, jt, jf, k }
}

const LOAD_BYTE: u32 = libc::BPF_LD | libc::BPF_B | libc::BPF_ABS;
const JUMP_EQUAL: u32 = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
/// Offsets of the two tested bytes.
const NEXT_HEADER: u32 = 20;
const ICMP_TYPE: u32 = 54;
const _: () = assert!(NEXT_HEADER as usize == ETHERNET_LEN + 6 && ICMP_TYPE as usize == ETHERNET_LEN + IPV6_LEN);
const RETURN: u32 = libc::BPF_RET | libc::BPF_K;

/// Passes neighbour solicitations and advertisements without extension headers.
const NEIGHBOUR_DISCOVERY: [libc::sock_filter; 7] = [
    op(LOAD_BYTE, 0, 0, NEXT_HEADER),
    op(JUMP_EQUAL, 0, 4, ICMPV6 as u32),
    op(LOAD_BYTE, 0, 0, ICMP_TYPE),
    op(JUMP_EQUAL, 1, 0, NEIGHBOUR_SOLICITATION as u32),
    op(JUMP_EQUAL, 0, 1, NEIGHBOUR_ADVERTISEMENT as u32),
    op(RETURN, 0, 0, u32::MAX),
    op(RETURN, 0, 0, 0),
];

const LOAD_WORD: u32 = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
/// Offsets of the ARP sender address, and of the neighbour discovery target without extension headers.
const ARP_SENDER: usize = ETHERNET_LEN + 14;
const ND_TARGET: usize = ETHERNET_LEN + IPV6_LEN + 8;

/// Passes frames with this address as the ARP sender or the neighbour discovery target. The agent checks the rest.
fn claims_of(address: IpAddr) -> Vec<libc::sock_filter> {
    let (at, octets) = match address {
        IpAddr::V4(address) => (ARP_SENDER, address.octets().to_vec()),
        IpAddr::V6(address) => (ND_TARGET, address.octets().to_vec()),
    };
    let mut program = Vec::new();
    for (place, word) in (at..).step_by(4).zip(octets.as_chunks::<4>().0) {
        program.push(op(LOAD_WORD, 0, 0, u32::try_from(place).unwrap_or(u32::MAX)));
        program.push(op(JUMP_EQUAL, 1, 0, u32::from_be_bytes(*word)));
        program.push(op(RETURN, 0, 0, 0));
    }
    program.push(op(RETURN, 0, 0, u32::MAX));
    program
}

fn filter(fd: &OwnedFd, program: &[libc::sock_filter]) -> io::Result<()> {
    let program = libc::sock_fprog {
        len: u16::try_from(program.len()).map_err(io::Error::other)?,
        // The kernel only reads it.
        filter: program.as_ptr().cast_mut(),
    };
    let length = libc::socklen_t::try_from(size_of::<libc::sock_fprog>()).map_err(io::Error::other)?;
    // SAFETY: the option value is a live `sock_fprog` of the size given; its pointer and length describe a live slice,
    // which the kernel copies before the call returns.
    let result = unsafe {
        libc::setsockopt(fd.as_raw_fd(), libc::SOL_SOCKET, libc::SO_ATTACH_FILTER, (&raw const program).cast(), length)
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// `getsockopt` into `value`, which may begin with an argument. An error unless all of it is filled.
pub fn option(fd: &OwnedFd, level: i32, option: i32, value: &mut [u8]) -> io::Result<()> {
    let wanted = libc::socklen_t::try_from(value.len()).map_err(io::Error::other)?;
    let mut length = wanted;
    // SAFETY: the value is a live, initialised and exclusive slice, of which the kernel writes no more bytes than the length
    // that is given says, and any bytes are a value of it; the length is live and exclusive too; the descriptor is open.
    let result = unsafe { libc::getsockopt(fd.as_raw_fd(), level, option, value.as_mut_ptr().cast(), &raw mut length) };
    match result {
        0 if length == wanted => Ok(()),
        0 => Err(io::ErrorKind::InvalidData.into()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Membership of a multicast group on a device for the lifetime of the socket, for switches that snoop.
pub fn join(group: Ipv6Addr, ifindex: u32) -> io::Result<UdpSocket> {
    let fd = socket(AddressFamily::Inet6, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None)?;
    // Never bound: it takes no port and receives nothing.
    let socket = UdpSocket::from(fd);
    socket.join_multicast_v6(&group, ifindex)?;
    Ok(socket)
}

/// Adds a multicast link address to the device's filter. It outlives this process, until it is removed or the device is.
/// Adding it twice has no further effect.
pub fn add_filter(ifindex: u32, mac: Mac) -> io::Result<()> {
    multicast_filter(ifindex, mac, ADD_MULTICAST)
}

/// Removes it; a missing one, or a missing device, is no error.
pub fn remove_filter(ifindex: u32, mac: Mac) -> io::Result<()> {
    match multicast_filter(ifindex, mac, REMOVE_MULTICAST) {
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENODEV | libc::ENXIO)) => Ok(()),
        other => other,
    }
}

/// A byte as C has it in a string: signed on x86, unsigned on Arm.
const fn c_char(byte: u8) -> libc::c_char {
    libc::c_char::from_ne_bytes([byte])
}

/// `SIOCADDMULTI` and `SIOCDELMULTI` (linux/sockios.h): C libraries differ in the type of such numbers.
const ADD_MULTICAST: libc::Ioctl = 0x8931;
const REMOVE_MULTICAST: libc::Ioctl = 0x8932;

fn multicast_filter(ifindex: u32, mac: Mac, request: libc::Ioctl) -> io::Result<()> {
    let device = if_indextoname(ifindex)?;
    let fd = socket(AddressFamily::Inet, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None)?;
    let mut name = [0; libc::IFNAMSIZ];
    // The kernel's names are shorter, so a zero byte follows.
    for (to, from) in name.iter_mut().zip(device.to_bytes()) {
        *to = c_char(*from);
    }
    let mut address = libc::sockaddr { sa_family: libc::sa_family_t::default(), sa_data: [0; 14] };
    for (to, from) in address.sa_data.iter_mut().zip(mac) {
        *to = c_char(from);
    }
    let mut ask = libc::ifreq { ifr_name: name, ifr_ifru: libc::__c_anonymous_ifr_ifru { ifru_hwaddr: address } };
    // SAFETY: both requests read an `ifreq` with a name, whose last byte the kernel overwrites by zero, and a link address; it
    // is live and initialised, and the descriptor is an open socket.
    let result = unsafe { libc::ioctl(fd.as_raw_fd(), request, &raw mut ask) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixDatagram;

    use super::*;
    use crate::announce::frames;

    #[test]
    fn a_listener_of_one_address_hears_nothing_of_others() {
        let mac = [2, 0, 0, 0, 0, 9];
        for (own, other) in [("172.18.0.1", "172.18.0.9"), ("fd00:172:18::1", "fd00:172:18::9")] {
            let [own, other]: [IpAddr; 2] = [own, other].map(|address| address.parse().expect("a literal"));
            let (sender, listener) = UnixDatagram::pair().expect("a pair");
            listener.set_nonblocking(true).expect("a flag");
            let listener = OwnedFd::from(listener);
            filter(&listener, &claims_of(own)).expect("a filter");
            let (claim, noise) = (frames::announcement(mac, own), frames::announcement(mac, other));
            for frame in [&noise, &frames::solicitation(mac, other, own, None).slice(..20), &claim] {
                // The sender of a filtered frame gets no error.
                let _refused = sender.send(frame);
            }
            let mut heard = [0; 256];
            let length = recv(listener.as_raw_fd(), &mut heard, MsgFlags::empty()).expect("the claim");
            assert_eq!(heard[..length], claim[..], "{own}");
            assert!(recv(listener.as_raw_fd(), &mut heard, MsgFlags::empty()).is_err(), "and nothing else");
        }
    }
}
