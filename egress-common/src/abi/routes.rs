//! The maps `routes` and `neighbours`: next hops of further egress interfaces, which the agent finds. The uplink asks the
//! kernel.

use super::seal::Seal;
use super::{Addr, abi};

/// Data of the key of `routes`, a trie of prefixes: the interface as it is, and the destination. The length of a prefix is 32
/// more than that of `cluster`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(C)]
pub struct RouteDestination {
    pub ifindex: u32,
    pub to: Addr,
}
abi!(RouteDestination, 20);

/// Next hops of a route that programs choose from. The agent repeats those of greater weight.
pub const MAX_NEXT_HOPS: usize = 8;
const _: () = assert!(MAX_NEXT_HOPS.is_power_of_two());

/// What a route does with its packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u32)]
pub enum RouteKind {
    /// The destination is a neighbour.
    OnLink = 1,
    /// By one of the next hops.
    Via = 2,
    /// Blackhole, unreachable or prohibit: no shorter prefix applies.
    Refused = 3,
}

/// Value of `routes`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct RouteEntry {
    kind: u32,
    /// Number of next hops.
    count: u32,
    /// Of the route, in bytes from the IP header on; zero for that of the interface.
    pub mtu: u32,
    hops: [Addr; MAX_NEXT_HOPS],
}
abi!(RouteEntry, 12 + 16 * MAX_NEXT_HOPS);

impl RouteEntry {
    /// Without next hops.
    pub const fn new(kind: RouteKind, mtu: u32) -> Self {
        Self { kind: kind as u32, count: 0, mtu, hops: [Addr::UNSPECIFIED; MAX_NEXT_HOPS] }
    }

    /// With these next hops, of which the first [`MAX_NEXT_HOPS`] count.
    pub fn via(hops: &[Addr], mtu: u32) -> Self {
        let mut entry = Self::new(RouteKind::Via, mtu);
        for (to, from) in entry.hops.iter_mut().zip(hops) {
            *to = *from;
            entry.count += 1;
        }
        entry
    }

    /// `None` for what another version has written.
    #[inline(always)]
    pub const fn kind(&self) -> Option<RouteKind> {
        match self.kind {
            1 => Some(RouteKind::OnLink),
            2 => Some(RouteKind::Via),
            3 => Some(RouteKind::Refused),
            _ => None,
        }
    }

    #[inline(always)]
    pub const fn count(&self) -> u32 {
        self.count
    }

    /// All next hops, those of greater weight more than once.
    pub fn hops(&self) -> impl Iterator<Item = &Addr> {
        self.hops.iter().take(self.count as usize)
    }

    /// The next hop of this number; `None` if there are none. The number wraps around at [`MAX_NEXT_HOPS`], by a mask, which
    /// the verifier follows where it loses a comparison.
    #[inline(always)]
    pub fn hop(&self, index: u32) -> Option<&Addr> {
        if self.count == 0 {
            return None;
        }
        self.hops.get(index as usize & (MAX_NEXT_HOPS - 1))
    }
}

/// Key of `neighbours`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(C)]
pub struct NeighbourKey {
    pub ifindex: u32,
    pub address: Addr,
}
abi!(NeighbourKey, 20);

/// Value of `neighbours`: the link address of a neighbour. A packet to a neighbour without an entry is resolved by the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct NeighbourEntry {
    pub mac: [u8; 6],
    pub reserved: u16,
    /// Over the key and the whole value.
    pub seal: u32,
}
abi!(NeighbourEntry, 12);

impl NeighbourEntry {
    /// As it is written at this key.
    pub const fn new(key: &NeighbourKey, mac: [u8; 6]) -> Self {
        let entry = Self { mac, reserved: 0, seal: 0 };
        Self { seal: entry.seal_at(key), ..entry }
    }

    /// Whether this is a complete value of the key. Called on a copy; see `abi::seal`.
    #[inline(always)]
    pub const fn is_of(&self, key: &NeighbourKey) -> bool {
        self.seal == self.seal_at(key)
    }

    #[inline(always)]
    const fn seal_at(&self, key: &NeighbourKey) -> u32 {
        let m = &self.mac;
        Seal::of_number(key.ifindex)
            .addr(1, &key.address)
            .word(5, u32::from_ne_bytes([m[0], m[1], m[2], m[3]]))
            .word(6, u16::from_ne_bytes([m[4], m[5]]) as u32)
            .done()
    }
}
