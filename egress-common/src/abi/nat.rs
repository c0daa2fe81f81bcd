//! Map `nat`: tuple -> NAT entry.
//!
//! A NAT entry has two keys. The forward key is the tuple as the pod sends it, the reverse key the tuple as the answer
//! arrives for the egress IP. Each value holds the other key, which is also the rewritten packet: the forward value's
//! `other` has the source to write, the reverse value's `other` the destination to restore. The reverse key is claimed
//! first, by insert-if-absent; both are removed together.

use super::flows::EPOCHS;
use super::seal::Seal;
use super::{Addr, abi};

/// Direction of a packet relative to the endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Direction {
    /// From the pod.
    Egress = 1,
    /// Towards the pod.
    Ingress = 2,
}

/// Source, destination, protocol and direction of a packet: the key of `nat`, and of `flows` and `inbound`, where the
/// direction is always egress. For ICMP echo the query id stands in both ports (RFC 5508 section 3.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(C)]
pub struct Tuple {
    pub saddr: Addr,
    pub daddr: Addr,
    sport: [u8; 2],
    dport: [u8; 2],
    pub protocol: u8,
    direction: u8,
    reserved: [u8; 2],
}
abi!(Tuple, 40);

impl Tuple {
    #[inline(always)]
    pub const fn new(direction: Direction, saddr: Addr, daddr: Addr, sport: u16, dport: u16, protocol: u8) -> Self {
        Self {
            saddr,
            daddr,
            sport: sport.to_be_bytes(),
            dport: dport.to_be_bytes(),
            protocol,
            direction: direction as u8,
            reserved: [0; 2],
        }
    }

    #[inline(always)]
    pub const fn sport(&self) -> u16 {
        u16::from_be_bytes(self.sport)
    }

    #[inline(always)]
    pub const fn dport(&self) -> u16 {
        u16::from_be_bytes(self.dport)
    }

    #[inline(always)]
    pub const fn set_ports(&mut self, sport: u16, dport: u16) {
        self.sport = sport.to_be_bytes();
        self.dport = dport.to_be_bytes();
    }

    #[inline(always)]
    pub const fn direction(&self) -> Direction {
        if self.direction == Direction::Egress as u8 { Direction::Egress } else { Direction::Ingress }
    }

    /// The ports, and the rest, as they stand in memory.
    #[inline(always)]
    pub(super) const fn last_words(&self) -> [u32; 2] {
        let (s, d, r) = (self.sport, self.dport, self.reserved);
        [u32::from_ne_bytes([s[0], s[1], d[0], d[1]]), u32::from_ne_bytes([self.protocol, self.direction, r[0], r[1]])]
    }

    /// Index into the map `epochs`: the same for both directions of a flow before NAT, and of one after NAT.
    #[inline(always)]
    pub const fn bucket(&self) -> u32 {
        let [_, _, _, s] = self.saddr.words();
        let [_, _, _, d] = self.daddr.words();
        let ports = self.sport() as u32 ^ (self.dport() as u32);
        // The upper bits of a product depend on all bits of the factor.
        ((s ^ d).rotate_left(16) ^ ports).wrapping_mul(0x9e37_79b1) >> (u32::BITS - EPOCHS.ilog2())
    }

    /// The tuple of the pod's packet that this tuple answers, whatever its direction.
    #[inline(always)]
    pub const fn answered(&self) -> Self {
        Self::new(Direction::Egress, self.daddr, self.saddr, self.dport(), self.sport(), self.protocol)
    }

    /// The tuple of the answer, which goes the other way.
    #[inline(always)]
    pub const fn reversed(&self) -> Self {
        let direction = match self.direction() {
            Direction::Egress => Direction::Ingress,
            Direction::Ingress => Direction::Egress,
        };
        Self::new(direction, self.daddr, self.saddr, self.dport(), self.sport(), self.protocol)
    }
}

/// Location of a NAT entry's pod, and so the path of the reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Origin {
    /// A pod of this node; the reply goes to the management port.
    Here = 1,
    /// A pod behind the tunnel endpoint [`NatEntry::source_node`].
    Remote = 2,
    /// A pod of this node that sends to another node (mark 1008); both directions pass the host's stack.
    Stack = 3,
}

/// A cached next hop: device, link addresses and the smallest MTU of the path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct NextHop {
    pub ifindex: u32,
    /// Value of [`super::Config::route_generation`] when it was settled; with another value there, it is looked up
    /// again.
    pub generation: u32,
    /// CLOCK_MONOTONIC (ns) after which it is looked up again.
    pub valid_until_ns: u64,
    /// Largest packet (bytes, from the IP header on) that the route takes.
    pub mtu: u32,
    pub dmac: [u8; 6],
    pub smac: [u8; 6],
    /// Over all fields and the seal of the NAT entry, because several CPUs may write them at once.
    pub seal: u32,
    pub reserved: u32,
}
abi!(NextHop, 40);

impl NextHop {
    /// Not looked up yet: never valid, since it expires at time zero.
    pub const NONE: Self =
        Self { ifindex: 0, generation: 0, valid_until_ns: 0, mtu: 0, dmac: [0; 6], smac: [0; 6], seal: 0, reserved: 0 };

    /// As it is written into the NAT entry with this seal.
    #[inline(always)]
    pub const fn seal(&mut self, of: u32) {
        self.seal = self.seal_in(of);
    }

    /// Whether this is a complete value of the NAT entry with this seal. Called on a copy; see `abi::seal`.
    #[inline(always)]
    pub const fn is_of(&self, nat_entry: u32) -> bool {
        self.seal == self.seal_in(nat_entry)
    }

    #[inline(always)]
    const fn seal_in(&self, nat_entry: u32) -> u32 {
        let (d, s) = (&self.dmac, &self.smac);
        Seal::of_number(nat_entry)
            .word(1, self.ifindex)
            .word(2, self.generation)
            .word(3, self.valid_until_ns as u32)
            .word(4, (self.valid_until_ns >> 32) as u32)
            .word(5, self.mtu)
            .word(6, u32::from_ne_bytes([d[0], d[1], d[2], d[3]]))
            .word(7, u32::from_ne_bytes([d[4], d[5], s[0], s[1]]))
            .word(8, u32::from_ne_bytes([s[2], s[3], s[4], s[5]]))
            .done()
    }
}

/// Value of `nat`, one shape for both directions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct NatEntry {
    /// CLOCK_MONOTONIC (ns) of the last packet of this direction.
    pub last_seen_ns: u64,
    /// TCP state of this direction: bits of `decide::phase`.
    pub state: u32,
    /// Over the key and the constant fields `other`, `source_node`, `egress_id`, `origin`.
    pub seal: u32,
    /// The NAT entry's other key.
    pub other: Tuple,
    pub egress_id: u32,
    origin: u32,
    /// Tunnel endpoint of the pod's node where [`origin`](Self::origin) is remote.
    pub source_node: Addr,
    /// Next hop of this direction.
    pub hop: NextHop,
    /// When the NAT entry was created.
    pub created_ns: u64,
    /// Of a TCP connection, as last noted in this direction: what the pod has acknowledged, or where the last FIN or RST
    /// for it ends (`decide::phase`).
    pub number: u32,
    pub reserved: u32,
}
abi!(NatEntry, 16 + 40 + 8 + 16 + 40 + 8 + 8);

impl NatEntry {
    /// Not sealed yet.
    #[inline(always)]
    pub const fn new(other: Tuple, origin: Origin, source_node: Addr, egress_id: u32, now_ns: u64) -> Self {
        Self {
            other,
            source_node,
            egress_id,
            origin: origin as u32,
            last_seen_ns: now_ns,
            created_ns: now_ns,
            hop: NextHop::NONE,
            state: 0,
            seal: 0,
            number: 0,
            reserved: 0,
        }
    }

    /// As it is written at `key`.
    #[inline(always)]
    #[must_use]
    pub const fn sealed(self, key: &Tuple) -> Self {
        Self { seal: self.seal_at(key), ..self }
    }

    /// As [`sealed`](Self::sealed), in place.
    #[inline(always)]
    pub const fn seal(&mut self, key: &Tuple) {
        self.seal = self.seal_at(key);
    }

    /// Whether this is a complete value of `key`. Called on a copy; see `abi::seal`.
    #[inline(always)]
    pub const fn is_of(&self, key: &Tuple) -> bool {
        self.seal == self.seal_at(key)
    }

    #[inline(always)]
    const fn seal_at(&self, key: &Tuple) -> u32 {
        Seal::of_tuple(key)
            .other_tuple(&self.other)
            .addr(20, &self.source_node)
            .word(24, self.egress_id)
            .word(25, self.origin)
            .done()
    }

    #[cfg(test)]
    pub(crate) const fn of_another_version(self) -> Self {
        Self { origin: 99, ..self }
    }

    /// `None` when another version wrote it.
    #[inline(always)]
    pub const fn origin(&self) -> Option<Origin> {
        Some(match self.origin {
            1 => Origin::Here,
            2 => Origin::Remote,
            3 => Origin::Stack,
            _ => return None,
        })
    }
}
