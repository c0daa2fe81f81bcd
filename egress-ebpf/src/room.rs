//! Room between the link and the network header, in the words of `bpf_skb_adjust_room`.

use egress_common::wire::L3;

/// What room is made, or taken away, for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Room {
    /// Headers of the family that is there.
    Plain,
    /// IP, UDP, VXLAN and Ethernet are put before the packet.
    EncapsulateV4,
    EncapsulateV6,
    /// The packet behind is of that family, and the one before of the other (Linux 6.3).
    DecapsulateV4,
    DecapsulateV6,
}

impl Room {
    #[inline(always)]
    pub const fn flags(self) -> u64 {
        // linux/bpf.h; the length of the inner link header is in the uppermost byte.
        const FIXED_GSO: u64 = 1;
        const ENCAP_L3_IPV4: u64 = 1 << 1;
        const ENCAP_L3_IPV6: u64 = 1 << 2;
        const ENCAP_L4_UDP: u64 = 1 << 4;
        const ENCAP_L2_ETH: u64 = 1 << 6;
        const DECAP_L3_IPV4: u64 = 1 << 7;
        const DECAP_L3_IPV6: u64 = 1 << 8;
        const TUNNEL: u64 = FIXED_GSO | ENCAP_L4_UDP | ENCAP_L2_ETH | (L3 as u64) << 56;
        match self {
            Self::Plain => 0,
            Self::EncapsulateV4 => TUNNEL | ENCAP_L3_IPV4,
            Self::EncapsulateV6 => TUNNEL | ENCAP_L3_IPV6,
            Self::DecapsulateV4 => DECAP_L3_IPV4,
            Self::DecapsulateV6 => DECAP_L3_IPV6,
        }
    }
}
