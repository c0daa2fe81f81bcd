//! Offsets of a packet's parts, also for a truncated packet.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::packets::{AH, DESTINATION_OPTIONS, FRAGMENT, ICMP, ICMPV6, ROUTING, SCTP, TCP, UDP, octets, word};

/// Offsets of a packet's parts.
#[derive(Clone, Debug)]
pub(crate) struct View<'a> {
    pub(crate) bytes: &'a [u8],
    pub(crate) v6: bool,
    pub(crate) from: IpAddr,
    pub(crate) to: IpAddr,
    pub(crate) protocol: u8,
    /// The transport header, or the available payload.
    pub(crate) payload: &'a [u8],
    pub(crate) payload_at: usize,
    /// Length from the header.
    pub(crate) whole: bool,
    pub(crate) fragment: Option<FragmentFields>,
    pub(crate) extensions: Vec<(u8, &'a [u8])>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FragmentFields {
    pub(crate) id: u32,
    pub(crate) offset: usize,
    pub(crate) more: bool,
    /// Offsets of an IPv6 fragment header, and of the next-header field that names it.
    pub(crate) header: Option<(usize, usize)>,
}

pub(crate) fn number(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..at + 2).map(|pair| u16::from_be_bytes([pair[0], pair[1]]))
}

pub(crate) fn long(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..at + 4).map(|four| u32::from_be_bytes([four[0], four[1], four[2], four[3]]))
}

fn address(bytes: &[u8], v6: bool, at: usize) -> Option<IpAddr> {
    Some(if v6 {
        IpAddr::V6(Ipv6Addr::from(<[u8; 16]>::try_from(bytes.get(at..at + 16)?).ok()?))
    } else {
        IpAddr::V4(Ipv4Addr::from(<[u8; 4]>::try_from(bytes.get(at..at + 4)?).ok()?))
    })
}

impl<'a> View<'a> {
    pub(crate) fn of(bytes: &'a [u8]) -> Option<Self> {
        match bytes.first()? >> 4 {
            4 => Self::v4(bytes),
            6 => Self::v6(bytes),
            _ => None,
        }
    }

    fn v4(bytes: &'a [u8]) -> Option<Self> {
        let header = (usize::from(bytes[0] & 0x0f) * 4).min(bytes.len());
        let total = usize::from(number(bytes, 2)?);
        let bits = number(bytes, 6)?;
        let fragment = (bits & 0x3fff != 0).then_some(FragmentFields {
            id: number(bytes, 4)?.into(),
            offset: usize::from(bits & 0x1fff) * 8,
            more: bits & 0x2000 != 0,
            header: None,
        });
        Some(Self {
            bytes,
            v6: false,
            from: address(bytes, false, 12)?,
            to: address(bytes, false, 16)?,
            protocol: bytes[9],
            payload: bytes.get(header..total.clamp(header, bytes.len()))?,
            payload_at: header,
            whole: total <= bytes.len(),
            fragment,
            extensions: Vec::new(),
        })
    }

    fn v6(bytes: &'a [u8]) -> Option<Self> {
        let end = 40 + usize::from(number(bytes, 4)?);
        let (mut next, mut named_at, mut at) = (*bytes.get(6)?, 6, 40);
        let (mut fragment, mut extensions) = (None, Vec::new());
        while matches!(next, 0 | AH | FRAGMENT | ROUTING | DESTINATION_OPTIONS) {
            let Some([following, length]) = bytes.get(at..at + 2) else { break };
            let length = match next {
                FRAGMENT => 8,
                AH => (usize::from(*length) + 2) * 4,
                _ => (usize::from(*length) + 1) * 8,
            };
            let Some(content) = bytes.get(at..at + length) else { break };
            if next == FRAGMENT {
                let bits = number(content, 2)?;
                let (offset, more) = (usize::from(bits & 0xfff8), bits & 1 == 1);
                fragment = Some(FragmentFields { id: long(content, 4)?, offset, more, header: Some((at, named_at)) });
            } else {
                extensions.push((next, &content[1..]));
            }
            (next, named_at, at) = (*following, at, at + length);
            if fragment.is_some_and(|fragment| fragment.offset > 0) {
                break;
            }
        }
        Some(Self {
            bytes,
            v6: true,
            from: address(bytes, true, 8)?,
            to: address(bytes, true, 24)?,
            protocol: next,
            payload: bytes.get(at..end.max(at).min(bytes.len()))?,
            payload_at: at,
            whole: end <= bytes.len(),
            fragment,
            extensions,
        })
    }

    pub(crate) fn is_error(&self) -> bool {
        let kind = self.payload.first().copied();
        let later = self.fragment.is_some_and(|fragment| fragment.offset > 0);
        !later
            && match self.protocol {
                ICMP => matches!(kind, Some(3 | 4 | 5 | 11 | 12)),
                ICMPV6 => matches!(kind, Some(1..=127)),
                _ => false,
            }
    }

    /// The quoted packet of an ICMP error.
    pub(crate) fn quote(&self) -> Option<View<'a>> {
        if self.is_error() { View::of(self.payload.get(8..)?) } else { None }
    }

    /// Ports, or the identifier of an echo message for both.
    pub(crate) fn ports(&self) -> Option<(u16, u16)> {
        match self.protocol {
            TCP | UDP | SCTP => Some((number(self.payload, 0)?, number(self.payload, 2)?)),
            ICMP if matches!(self.payload.first()?, 0 | 8) => self.echo(),
            ICMPV6 if matches!(self.payload.first()?, 128 | 129) => self.echo(),
            _ => None,
        }
    }

    fn echo(&self) -> Option<(u16, u16)> {
        let id = number(self.payload, 4)?;
        Some((id, id))
    }

    /// The pseudo header of a transport checksum.
    pub(crate) fn pseudo(&self, length: usize) -> Vec<u8> {
        if self.protocol == ICMP {
            return Vec::new();
        }
        [octets(self.from), octets(self.to), vec![0, self.protocol], word(length).to_vec()].concat()
    }
}
