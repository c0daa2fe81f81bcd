//! Views of packet headers.
//!
//! [`Headers::parse`] reads a frame once, with all fields that decisions need; offsets are defined only here. A packet
//! with a truncated transport header still has addresses: the decision tells whether that matters.

pub mod arp;
pub mod crc32c;
pub mod csum;
mod headers;
pub mod icmp;
pub mod nd;
mod plain;
mod quote;
pub mod reset;

pub use headers::{Fragment, Headers, L4, MAX_EXTENSION_HEADERS, Segment};
pub use plain::Plain;
pub use quote::Quote;

use crate::abi::Addr;

/// Length of an Ethernet header; every device of ours is Ethernet.
pub const ETH_LEN: usize = network_types::eth::EthHdr::LEN;
/// Where the network header starts.
pub const L3: usize = ETH_LEN;
pub const IPV4_LEN: usize = network_types::ip::Ipv4Hdr::LEN;
pub const IPV6_LEN: usize = network_types::ip::Ipv6Hdr::LEN;

pub const PROTO_ICMP: u8 = 1;
pub const PROTO_TCP: u8 = 6;
pub const PROTO_UDP: u8 = 17;
pub const PROTO_DCCP: u8 = 33;
pub const PROTO_AH: u8 = 51;
pub const PROTO_ICMPV6: u8 = 58;
/// IPv6's "nothing follows".
pub const PROTO_NONE: u8 = 59;
pub const PROTO_SCTP: u8 = 132;
pub const PROTO_MOBILITY: u8 = 135;
pub const PROTO_UDP_LITE: u8 = 136;

/// EtherTypes as they stand in the frame, read as a big-endian number.
pub mod ethertype {
    pub const IPV4: u16 = 0x0800;
    pub const ARP: u16 = 0x0806;
    pub const IPV6: u16 = 0x86dd;
    /// Probes of agents through the overlay: Local Experimental EtherType 1 (IEEE Std 802-2014 section 9.2.3).
    pub const ECHO: u16 = 0x88b5;

    /// A VLAN tag follows (IEEE 802.1Q).
    #[inline(always)]
    pub const fn is_vlan(ethertype: u16) -> bool {
        matches!(ethertype, 0x8100 | 0x88a8)
    }
}

/// Byte offsets within the network header.
pub mod ipv4 {
    pub const TOTAL_LEN: usize = 2;
    pub const ID: usize = 4;
    pub const FRAGMENT: usize = 6;
    pub const TTL: usize = 8;
    pub const PROTOCOL: usize = 9;
    pub const CHECKSUM: usize = 10;
    pub const SADDR: usize = 12;
    pub const DADDR: usize = 16;
    /// Source route options (RFC 791 section 3.1).
    pub const LOOSE_SOURCE_ROUTE: u8 = 131;
    pub const STRICT_SOURCE_ROUTE: u8 = 137;
    pub const DONT_FRAGMENT: u16 = 0x4000;
    pub const MORE_FRAGMENTS: u16 = 0x2000;
    pub const OFFSET_MASK: u16 = 0x1fff;
}

/// Byte offsets within the network header.
pub mod ipv6 {
    pub const PAYLOAD_LEN: usize = 4;
    pub const NEXT_HEADER: usize = 6;
    pub const HOP_LIMIT: usize = 7;
    pub const SADDR: usize = 8;
    pub const DADDR: usize = 24;
}

/// Byte offsets within the transport header.
pub mod l4 {
    pub const SPORT: usize = 0;
    pub const DPORT: usize = 2;
    /// Sequence number, followed by the acknowledgement number and the next field.
    pub const TCP_SEQUENCE: usize = 4;
    pub const TCP_OFFSET_FLAGS: usize = 12;
    pub const TCP_CHECKSUM: usize = 16;
    pub const UDP_LENGTH: usize = 4;
    pub const UDP_CHECKSUM: usize = 6;
    pub const ICMP_CHECKSUM: usize = 2;
    pub const SCTP_CHECKSUM: usize = 8;
    /// Type of the first chunk, after the common header.
    pub const SCTP_CHUNK: usize = 12;
    /// Identifier of a query.
    pub const ECHO_ID: usize = 4;
}

/// TCP flags, RFC 9293 section 3.1.
pub mod tcp {
    pub const FIN: u8 = 0x01;
    pub const SYN: u8 = 0x02;
    pub const RST: u8 = 0x04;
    pub const ACK: u8 = 0x10;
}

/// Types of SCTP chunks, RFC 9260 section 3.2.
pub mod sctp {
    pub const INIT: u8 = 1;
}

/// Bytes of a frame, by offset from its start. The host tests read a slice, the programs the packet itself.
pub trait Frame {
    /// `None` when the frame ends before `offset + N`.
    fn load<const N: usize>(&self, offset: usize) -> Option<[u8; N]>;
    /// Consecutive words, as they stand in memory.
    #[inline(always)]
    fn words<const N: usize>(&self, offset: usize) -> Option<[u32; N]> {
        let mut words = [0; N];
        for (place, word) in words.iter_mut().enumerate() {
            *word = u32::from_ne_bytes(self.load(offset + 4 * place)?);
        }
        Some(words)
    }
    /// Length of the whole frame, including the non-linear part.
    fn len(&self) -> usize;

    /// An IPv6 address, word by word, to save stack in the programs.
    #[inline(always)]
    fn load_addr(&self, offset: usize) -> Option<Addr> {
        Some(Addr::from_words([
            u32::from_ne_bytes(self.load(offset)?),
            u32::from_ne_bytes(self.load(offset + 4)?),
            u32::from_ne_bytes(self.load(offset + 8)?),
            u32::from_ne_bytes(self.load(offset + 12)?),
        ]))
    }

    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl Frame for [u8] {
    fn load<const N: usize>(&self, offset: usize) -> Option<[u8; N]> {
        self.get(offset..offset.checked_add(N)?)?.try_into().ok()
    }

    fn len(&self) -> usize {
        <[u8]>::len(self)
    }
}
