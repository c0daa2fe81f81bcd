//! Map `nat`: tuple -> mapping.
//!
//! A mapping has two keys. The forward key is the tuple as the pod sends it, the reverse key the tuple as the answer
//! arrives for the egress IP. Each value holds the other key, which is also what the packet must become: the forward
//! value's `other` names the source to write, the reverse value's `other` the destination to restore. The reverse key is
//! claimed first, by insert-if-absent; both live and die together.

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

/// Where the pod of a mapping is, and thereby the way of the reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Origin {
    /// A pod of this node; the reply goes to the management port.
    Here = 1,
    /// A pod behind the tunnel endpoint [`Mapping::source_node`].
    Remote = 2,
    /// A pod of this node towards another node (mark 1008); both directions pass the host's stack.
    Stack = 3,
}

/// A next hop as settled when the flow was created: device, link addresses and the smallest MTU of the way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Hop {
    pub ifindex: u32,
    /// Value of [`super::Config::route_generation`] when it was settled; another value there means: look up again.
    pub generation: u32,
    /// CLOCK_MONOTONIC (ns) after which it is looked up again.
    pub valid_until_ns: u64,
    /// Largest packet (bytes, from the IP header on) that the route takes.
    pub mtu: u32,
    pub dmac: [u8; 6],
    pub smac: [u8; 6],
}
abi!(Hop, 32);

impl Hop {
    /// Not settled yet: never valid, since it ends at time zero.
    pub const NONE: Self = Self { ifindex: 0, generation: 0, valid_until_ns: 0, mtu: 0, dmac: [0; 6], smac: [0; 6] };
}

/// Value of `nat`, one shape for both directions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Mapping {
    /// The mapping's other key.
    pub other: Tuple,
    /// Tunnel endpoint of the pod's node where [`origin`](Self::origin) is remote.
    pub source_node: Addr,
    pub egress_id: u32,
    origin: u32,
    /// CLOCK_MONOTONIC (ns) of the last packet of this direction.
    pub last_seen_ns: u64,
    /// When the mapping was made.
    pub created_ns: u64,
    /// Next hop of this direction.
    pub hop: Hop,
    /// What this direction has shown of a TCP connection: bits of `decide::phase`.
    pub state: u32,
    pub reserved: u32,
}
abi!(Mapping, 40 + 16 + 8 + 16 + 32 + 8);

impl Mapping {
    #[inline(always)]
    pub const fn new(other: Tuple, origin: Origin, source_node: Addr, egress_id: u32, now_ns: u64) -> Self {
        Self {
            other,
            source_node,
            egress_id,
            origin: origin as u32,
            last_seen_ns: now_ns,
            created_ns: now_ns,
            hop: Hop::NONE,
            state: 0,
            reserved: 0,
        }
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
