//! Maps `flows`, `inbound`, `exposed`, `datagrams` and `frags`: the source node's state of its pods' traffic.

use super::seal::Seal;
use super::{Addr, PolicySlot, Tuple, abi};

/// Value of `flows`; the key is the tuple as the pod sends it. A flow keeps its address, not its node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Flow {
    /// CLOCK_MONOTONIC (ns).
    pub last_seen_ns: u64,
    /// Of a TCP connection, as the pod's node sees it: bits of `decide::phase`.
    pub state: u32,
    /// Value of [`super::Config::decisions`] when `settled` was written; with another value there, the flow is decided
    /// again.
    pub decided: u32,
    /// Over `seal`, `decided` and `settled`, which several CPUs may write at once in any order.
    pub settled_seal: u32,
    /// Over the key and the constant fields `address` and `egress_id`.
    pub seal: u32,
    pub egress_id: u32,
    /// Index into the policy's slots where the address was last found.
    pub slot: u32,
    /// The slot that the last full decision chose for the flow.
    pub settled: PolicySlot,
    /// The egress IP that this flow shows to the world.
    pub address: Addr,
    /// Of a TCP connection: what the pod has acknowledged, as last noted, and where the last FIN or RST for it ends
    /// (`decide::phase`).
    pub acknowledged: u32,
    pub end: u32,
    pub reserved: u32,
}
abi!(Flow, 32 + 36 + 16 + 12);

impl Flow {
    /// Not sealed yet.
    #[inline(always)]
    pub const fn new(address: Addr, egress_id: u32, slot: u32, state: u32, now_ns: u64) -> Self {
        Self {
            last_seen_ns: now_ns,
            state,
            decided: 0,
            settled_seal: 0,
            seal: 0,
            egress_id,
            slot,
            settled: PolicySlot::EMPTY,
            address,
            acknowledged: 0,
            end: 0,
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
        Self::seal_of(key, &self.address, self.egress_id)
    }

    /// The seal of a flow with this key, address and egress ID.
    #[inline(always)]
    pub const fn seal_of(key: &Tuple, address: &Addr, egress_id: u32) -> u32 {
        Seal::of_tuple(key).addr(10, address).word(14, egress_id).done()
    }

    /// Stores the decision made under this number, for the flow with the seal `of`; the entry may belong to another
    /// flow by now. Concurrent writes may mix; [`settled_under`](Self::settled_under) ignores a mix.
    #[inline(always)]
    pub const fn settle(&mut self, of: u32, slot: &PolicySlot, decisions: u32) {
        self.settled = *slot;
        self.decided = decisions;
        self.settled_seal = Self::settled_seal_in(of, slot, decisions);
    }

    /// The stored decision, if it was made under this number. Called on a copy for which [`is_of`](Self::is_of) holds,
    /// so that the seal includes the key.
    #[inline(always)]
    pub const fn settled_under(&self, decisions: u32) -> Option<&PolicySlot> {
        let is_whole = self.settled_seal == Self::settled_seal_in(self.seal, &self.settled, decisions);
        if self.decided == decisions && is_whole { Some(&self.settled) } else { None }
    }

    #[inline(always)]
    const fn settled_seal_in(of: u32, slot: &PolicySlot, decisions: u32) -> u32 {
        let seal = Seal::of_number(of).addr(15, &slot.address).addr(19, &slot.endpoint);
        seal.word(23, slot.place_number()).word(24, decisions).done()
    }
}

/// Value of `inbound`; the key is the tuple of the pod's answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Inbound {
    /// CLOCK_MONOTONIC (ns) of the last packet that refreshes it: of either side for TCP, from outside for datagrams.
    pub last_seen_ns: u64,
    /// Of a TCP connection: bits of `decide::phase`.
    pub state: u32,
    /// Likewise: what the pod has acknowledged, as last noted, and where the last FIN or RST from outside ends.
    pub acknowledged: u32,
    pub end: u32,
    pub reserved: u32,
}
abi!(Inbound, 24);

impl Inbound {
    #[inline(always)]
    pub const fn new(now_ns: u64) -> Self {
        Self { last_seen_ns: now_ns, state: 0, acknowledged: 0, end: 0, reserved: 0 }
    }
}

/// Key of `exposed`: a port by which a pod of this node is reached from outside the cluster, or a Service at an address
/// that this node shares ([`Owned::shared`](super::Owned::shared)).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(C)]
pub struct ExposedPort {
    pub address: Addr,
    pub port: [u8; 2],
    pub protocol: u8,
    pub reserved: u8,
}
abi!(ExposedPort, 20);

impl ExposedPort {
    #[inline(always)]
    pub const fn new(address: Addr, protocol: u8, port: u16) -> Self {
        Self { address, port: port.to_be_bytes(), protocol, reserved: 0 }
    }

    /// The source port of this tuple of a pod's packet.
    #[inline(always)]
    pub const fn of(tuple: &Tuple) -> Self {
        Self::new(tuple.saddr, tuple.protocol, tuple.sport())
    }
}

/// Value of `exposed`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Exposure {
    /// Entries of `inbound` at this port; signed as in [`Share`].
    pub inbound: i32,
    pub reserved: u32,
}
abi!(Exposure, 8);

/// Key of `shares`: a pod address, or an egress policy by its egress ID; the other field is zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(C)]
pub struct Holder {
    pub pod: Addr,
    pub egress_id: u32,
}
abi!(Holder, 20);

impl Holder {
    #[inline(always)]
    pub const fn pod(pod: Addr) -> Self {
        Self { pod, egress_id: 0 }
    }

    #[inline(always)]
    pub const fn policy(egress_id: u32) -> Self {
        Self { pod: Addr::UNSPECIFIED, egress_id }
    }
}

/// Value of `shares`: how many entries the holder has. The program that creates an entry counts up, the one that
/// removes it counts down. Signed, because an entry may be removed before its creator has counted it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Share {
    pub flows: i32,
    /// In `nat`, two keys each.
    pub nat_entries: i32,
}
abi!(Share, 8);

/// Value of `datagrams`, whose key is the tuple as the pod sends it, and of `exhausted`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Datagram {
    /// CLOCK_MONOTONIC (ns).
    pub last_seen_ns: u64,
}
abi!(Datagram, 8);

/// The value of `usage`: entries in use; signed as in [`Share`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Usage {
    /// Two for each NAT entry.
    pub nat: i32,
    pub flows: i32,
    pub inbound: i32,
    pub reserved: u32,
}
abi!(Usage, 16);

/// The value of `flow_cache_use`, for each CPU: packets whose outcome the flow cache had, and packets of flows that it
/// takes, whose outcome it had not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct FlowCacheUse {
    pub hits: u64,
    pub misses: u64,
}
abi!(FlowCacheUse, 16);

/// Elements of `epochs`. A flow has the element of its [bucket](Tuple::bucket); the programs raise it after they have
/// removed a flow, NAT entry or inbound connection, and after a reset or opening has changed one, which invalidates the
/// flow cache for the flows of that bucket.
pub const EPOCHS: u32 = 4096;

/// Size of the map `candidates`.
pub const CANDIDATES: u32 = 256;

/// The map that a run of the program `sweep` works on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum SweptMap {
    Nat = 1,
    Flows = 2,
    Inbound = 3,
}

/// Which candidates a run of the program `sweep` removes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum SweepMode {
    /// Idle ones.
    Idle = 1,
    /// Likewise while a map is nearly full: unanswered ones sooner.
    Pressed = 2,
    /// All.
    All = 3,
    /// Marked ones: of keys that were marked when they were read, and still are, the remover was refused by the kernel. Asked
    /// of any other key, this would remove what has replaced an entry that a packet is just removing.
    Marked = 4,
}

/// What the program `sweep` is asked for: it checks the first `count` keys in the map `candidates`, and removes their
/// entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SweepRequest {
    pub map: SweptMap,
    pub mode: SweepMode,
    /// At most [`CANDIDATES`].
    pub count: u16,
}

impl SweepRequest {
    /// As the mark of the test packet, which never leaves the node.
    #[must_use]
    pub const fn to_mark(self) -> u32 {
        (self.map as u32) << 24 | (self.mode as u32) << 16 | self.count as u32
    }

    /// `None` for any other mark.
    #[inline(always)]
    pub const fn of_mark(mark: u32) -> Option<Self> {
        let map = match mark >> 24 {
            1 => SweptMap::Nat,
            2 => SweptMap::Flows,
            3 => SweptMap::Inbound,
            _ => return None,
        };
        let mode = match mark >> 16 & 0xff {
            1 => SweepMode::Idle,
            2 => SweepMode::Pressed,
            3 => SweepMode::All,
            4 => SweepMode::Marked,
            _ => return None,
        };
        Some(Self { map, mode, count: mark as u16 })
    }
}

/// Key of `frags`: the fields that all fragments of a datagram share (RFC 791, RFC 8200 section 4.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(C)]
pub struct FragKey {
    pub saddr: Addr,
    pub daddr: Addr,
    /// Identification, wire order; the 16 bits of IPv4 in the last two bytes.
    pub id: [u8; 4],
    /// Zero for IPv6, where it does not distinguish datagrams.
    pub protocol: u8,
    pub reserved: [u8; 3],
}
abi!(FragKey, 40);

/// Value of `frags`: the ports, which only the first fragment carries, and the protocol, which may follow more headers
/// in IPv6.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct FragPorts {
    pub sport: [u8; 2],
    pub dport: [u8; 2],
    pub protocol: u8,
    /// One for a ping reply, zero otherwise: only the first ICMP fragment shows which.
    pub is_reply: u8,
    pub reserved: [u8; 2],
    pub seen_ns: u64,
}
abi!(FragPorts, 16);
