//! An IP address of either family as a map key.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::abi;

/// Address family of a packet or an egress policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u32)]
pub enum Family {
    V4 = 4,
    V6 = 6,
}

/// An address in wire order, IPv4 as v4-mapped IPv6. Aligned to 4 so that the programs compare and copy words.
#[derive(Clone, Copy, Eq)]
#[repr(C, align(4))]
pub struct Addr {
    bytes: [u8; 16],
}
abi!(Addr, 16);

const V4_MAPPED: [u8; 4] = [0, 0, 0xff, 0xff];

impl Addr {
    /// The unspecified IPv6 address: where a field is not in use because another field says so.
    pub const UNSPECIFIED: Self = Self { bytes: [0; 16] };

    #[inline(always)]
    pub const fn v4(o: [u8; 4]) -> Self {
        Self { bytes: [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, o[0], o[1], o[2], o[3]] }
    }

    #[inline(always)]
    pub const fn v6(bytes: [u8; 16]) -> Self {
        Self { bytes }
    }

    #[inline(always)]
    pub const fn octets(&self) -> [u8; 16] {
        self.bytes
    }

    /// The last four octets: the IPv4 address where [`family`](Self::family) is V4.
    #[inline(always)]
    pub const fn v4_octets(&self) -> [u8; 4] {
        [self.bytes[12], self.bytes[13], self.bytes[14], self.bytes[15]]
    }

    #[inline(always)]
    pub const fn words(&self) -> [u32; 4] {
        let b = &self.bytes;
        [
            u32::from_ne_bytes([b[0], b[1], b[2], b[3]]),
            u32::from_ne_bytes([b[4], b[5], b[6], b[7]]),
            u32::from_ne_bytes([b[8], b[9], b[10], b[11]]),
            u32::from_ne_bytes([b[12], b[13], b[14], b[15]]),
        ]
    }

    #[inline(always)]
    pub const fn from_words(w: [u32; 4]) -> Self {
        let (a, b, c, d) = (w[0].to_ne_bytes(), w[1].to_ne_bytes(), w[2].to_ne_bytes(), w[3].to_ne_bytes());
        Self { bytes: [a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3], c[0], c[1], c[2], c[3], d[0], d[1], d[2], d[3]] }
    }

    #[inline(always)]
    pub const fn family(&self) -> Family {
        let w = self.words();
        if w[0] == 0 && w[1] == 0 && w[2] == u32::from_ne_bytes(V4_MAPPED) { Family::V4 } else { Family::V6 }
    }

    pub const fn to_ip(self) -> IpAddr {
        match self.family() {
            Family::V4 => {
                let o = self.v4_octets();
                IpAddr::V4(Ipv4Addr::new(o[0], o[1], o[2], o[3]))
            }
            Family::V6 => IpAddr::V6(Ipv6Addr::from_octets(self.bytes)),
        }
    }
}

impl From<IpAddr> for Addr {
    fn from(ip: IpAddr) -> Self {
        match ip {
            IpAddr::V4(ip) => Self::v4(ip.octets()),
            IpAddr::V6(ip) => Self::v6(ip.octets()),
        }
    }
}

impl PartialEq for Addr {
    #[inline(always)]
    fn eq(&self, other: &Self) -> bool {
        let (a, b) = (self.words(), other.words());
        // One branch instead of four: fewer paths for the verifier to walk.
        (a[3] ^ b[3]) | (a[2] ^ b[2]) | (a[1] ^ b[1]) | (a[0] ^ b[0]) == 0
    }
}

impl core::hash::Hash for Addr {
    fn hash<H: core::hash::Hasher>(&self, state: &mut H) {
        self.bytes.hash(state);
    }
}

impl core::fmt::Debug for Addr {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        core::fmt::Display::fmt(&self.to_ip(), f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_families_round_trip() {
        for text in ["172.18.0.100", "fd00:172:18::100", "::1", "255.255.255.255"] {
            let ip: IpAddr = text.parse().expect("a literal");
            let addr = Addr::from(ip);
            assert_eq!(addr.to_ip(), ip);
            assert_eq!(Addr::from_words(addr.words()), addr);
            assert_eq!(addr.family() == Family::V4, ip.is_ipv4());
        }
    }
}
