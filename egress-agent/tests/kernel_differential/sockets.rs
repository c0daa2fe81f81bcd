//! Packet sockets at the far ends of the node's veth pairs, which send and receive frames.
//!
//! Frames have the kernel's virtio header, which shows checksum and segmentation offload, and the VLAN tag that the
//! kernel keeps beside the frame.
#![expect(unsafe_code, reason = "packet access is one of the three places for it: socket calls without a safe wrapper")]

use std::io::{self, IoSliceMut};
use std::os::fd::{AsRawFd, OwnedFd};

use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, ControlMessageOwned, LinkAddr, MsgFlags, SockFlag, SockType, recvmsg, send, setsockopt, socket,
    sockopt,
};

/// Socket options that the library lacks (linux/if_packet.h).
const PACKET_AUXDATA: libc::c_int = 8;
const PACKET_VNET_HDR: libc::c_int = 15;

pub(crate) const ETHERNET: usize = 14;
const VNET: usize = 10;
const NEEDS_CHECKSUM: u8 = 1;
/// `struct tpacket_auxdata`: status, lengths, and the VLAN tag.
const AUXDATA: usize = 20;
const VLAN_VALID: u32 = 1 << 4;
/// Receive buffer for the frames between two reads.
const BUFFER: usize = 64 << 20;
const LONGEST: usize = 1 << 17;

/// Offloads to the sending device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Offload {
    /// Offset of the transport header (from the network header), and of its checksum in it.
    pub(crate) checksum: Option<(u16, u16)>,
    /// Kind of segmentation as virtio numbers it, and payload bytes of a segment.
    pub(crate) segments: Option<(u8, u16)>,
}

pub(crate) const GSO_TCPV4: u8 = 1;
pub(crate) const GSO_TCPV6: u8 = 4;
pub(crate) const GSO_UDP_L4: u8 = 5;

/// A received frame.
#[derive(Clone, Debug)]
pub(crate) struct ReceivedFrame {
    pub(crate) ethertype: u16,
    /// From the network header on.
    pub(crate) packet: Vec<u8>,
    pub(crate) vlan: Option<u16>,
    pub(crate) offload: Offload,
    /// Arrived in fragments, each with an offloaded checksum.
    pub(crate) unfinished_parts: bool,
}

/// One end of a veth pair.
pub(crate) struct Plug {
    socket: OwnedFd,
}

impl Plug {
    /// Must be called in the device's network namespace.
    pub(crate) fn into(ifindex: u32) -> Self {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let socket = socket(AddressFamily::Packet, SockType::Raw, flags, None).expect("a packet socket");
        for option in [PACKET_VNET_HDR, PACKET_AUXDATA] {
            switch_on(&socket, option).expect("ask for headers and tags");
        }
        setsockopt(&socket, sockopt::RcvBufForce, &BUFFER).expect("a large buffer");
        setsockopt(&socket, sockopt::RxqOvfl, &1).expect("count what is missed");
        bind(&socket, ifindex).expect("bind to the device");
        Self { socket }
    }

    pub(crate) fn send(&self, frame: &[u8], offload: Offload) {
        let mut bytes = vec![0; VNET];
        if let Some((start, at)) = offload.checksum {
            bytes[0] = NEEDS_CHECKSUM;
            let start = start + u16::try_from(ETHERNET).expect("fourteen");
            bytes[6..8].copy_from_slice(&start.to_ne_bytes());
            bytes[8..10].copy_from_slice(&at.to_ne_bytes());
        }
        if let Some((kind, size)) = offload.segments {
            bytes[1] = kind;
            bytes[4..6].copy_from_slice(&size.to_ne_bytes());
            let (start, _) = offload.checksum.expect("segments have their checksums computed");
            let header = usize::from(start) + ETHERNET + if kind == GSO_UDP_L4 { 8 } else { 20 };
            bytes[2..4].copy_from_slice(&u16::try_from(header).expect("a header").to_ne_bytes());
        }
        bytes.extend(frame);
        loop {
            match send(self.socket.as_raw_fd(), &bytes, MsgFlags::empty()) {
                Err(Errno::ENOBUFS | Errno::EAGAIN) => std::thread::yield_now(),
                Err(error) => panic!("send {} bytes: {error}", frame.len()),
                Ok(_) => return,
            }
        }
    }

    /// The next frame from the node, if any.
    pub(crate) fn receive(&self) -> Option<ReceivedFrame> {
        let mut buffer = vec![0; LONGEST];
        let mut ancillary = nix::cmsg_space!(u32, [u8; AUXDATA]);
        loop {
            let mut parts = [IoSliceMut::new(&mut buffer)];
            let got = recvmsg::<LinkAddr>(self.socket.as_raw_fd(), &mut parts, Some(&mut ancillary), MsgFlags::empty());
            let (length, vlan, entering) = match got {
                Err(Errno::EAGAIN) => return None,
                Err(error) => panic!("receive: {error}"),
                Ok(message) => {
                    let entering = message.address.is_some_and(|from| from.pkttype() != libc::PACKET_OUTGOING);
                    (message.bytes, vlan(message.cmsgs().expect("whole ancillary data")), entering)
                }
            };
            if entering {
                return Some(frame(&buffer[..length], vlan));
            }
        }
    }
}

fn frame(bytes: &[u8], vlan: Option<u16>) -> ReceivedFrame {
    let number = |at: usize| u16::from_ne_bytes([bytes[at], bytes[at + 1]]);
    let start = number(6).wrapping_sub(u16::try_from(ETHERNET).expect("fourteen"));
    let offload = Offload {
        checksum: (bytes[0] & NEEDS_CHECKSUM != 0).then(|| (start, number(8))),
        segments: (bytes[1] != 0).then(|| (bytes[1], number(4))),
    };
    let frame = &bytes[VNET..];
    let ethertype = u16::from_be_bytes([frame[12], frame[13]]);
    ReceivedFrame { ethertype, packet: frame[ETHERNET..].to_vec(), vlan, offload, unfinished_parts: false }
}

fn vlan(messages: impl Iterator<Item = ControlMessageOwned>) -> Option<u16> {
    let mut tag = None;
    for message in messages {
        match message {
            ControlMessageOwned::RxqOvfl(missed) => assert_eq!(missed, 0, "frames were missed"),
            ControlMessageOwned::Unknown(other) if other.data_bytes.len() >= AUXDATA => {
                let bytes = &other.data_bytes;
                let status = u32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
                tag = (status & VLAN_VALID != 0).then(|| u16::from_ne_bytes([bytes[16], bytes[17]]));
            }
            _ => {}
        }
    }
    tag
}

fn bind(socket: &OwnedFd, ifindex: u32) -> io::Result<()> {
    let protocol = u16::try_from(libc::ETH_P_ALL).map_err(io::Error::other)?;
    let address = libc::sockaddr_ll {
        sll_family: u16::try_from(libc::AF_PACKET).map_err(io::Error::other)?,
        sll_protocol: protocol.to_be(),
        sll_ifindex: i32::try_from(ifindex).map_err(io::Error::other)?,
        sll_hatype: 0,
        sll_pkttype: 0,
        sll_halen: 0,
        sll_addr: [0; 8],
    };
    let length = libc::socklen_t::try_from(size_of::<libc::sockaddr_ll>()).map_err(io::Error::other)?;
    // SAFETY: the address is a live, fully initialised `sockaddr_ll` whose size is given, and the descriptor is open.
    let result = unsafe { libc::bind(socket.as_raw_fd(), (&raw const address).cast(), length) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn switch_on(socket: &OwnedFd, option: libc::c_int) -> io::Result<()> {
    let on: libc::c_int = 1;
    let length = libc::socklen_t::try_from(size_of::<libc::c_int>()).map_err(io::Error::other)?;
    // SAFETY: the option value is a live integer whose size is given, and the descriptor is open.
    let result =
        unsafe { libc::setsockopt(socket.as_raw_fd(), libc::SOL_PACKET, option, (&raw const on).cast(), length) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
