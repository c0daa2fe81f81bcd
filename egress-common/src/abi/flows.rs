//! Maps `flows`, `inbound`, `exposed`, `datagrams` and `frags`: what the source node remembers of its pods' traffic.

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
    /// Value of [`super::Config::decisions`] when `settled` was written; another value there means: ask again.
    pub decided: u32,
    /// Of `seal`, `decided` and `settled`: several CPUs may write them at once, in any order.
    pub settled_seal: u32,
    /// Of the key and of what stays as it was made: `address` and `egress_id`.
    pub seal: u32,
    pub egress_id: u32,
    /// Index into the policy's slots where the address was last found.
    pub slot: u32,
    /// The slot that the flow was sent to when all questions were last asked.
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

    /// Whether this was written, as a whole, at `key`. Asked of a copy; see `abi::seal`.
    #[inline(always)]
    pub const fn is_of(&self, key: &Tuple) -> bool {
        self.seal == self.seal_at(key)
    }

    #[inline(always)]
    const fn seal_at(&self, key: &Tuple) -> u32 {
        Self::seal_of(key, &self.address, self.egress_id)
    }

    /// Of the flow with this key, this address and this object.
    #[inline(always)]
    pub const fn seal_of(key: &Tuple, address: &Addr, egress_id: u32) -> u32 {
        Seal::of_tuple(key).addr(10, address).word(14, egress_id).done()
    }

    /// Notes what the questions came to under these decisions, for the flow with the seal `of`: not the one that lies here,
    /// which may be another flow's by now. What several CPUs write at once may become a mix, which
    /// [`settled_under`](Self::settled_under) does not take.
    #[inline(always)]
    pub const fn settle(&mut self, of: u32, slot: &PolicySlot, decisions: u32) {
        self.settled = *slot;
        self.decided = decisions;
        self.settled_seal = Self::settled_seal_in(of, slot, decisions);
    }

    /// What the questions came to, where these are the decisions under which they were asked. Asked of a copy that
    /// [`is_of`](Self::is_of) its key, so that the seal stands for that.
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

/// Value of `inbound`; the key is the tuple as the pod's answer will look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Inbound {
    /// CLOCK_MONOTONIC (ns) of the last packet that keeps it: of either side for TCP, from outside for datagrams.
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

/// Key of `exposed`: a port by which a pod of this node is reached from outside the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(C)]
pub struct ExposedPort {
    pub pod: Addr,
    pub port: [u8; 2],
    pub protocol: u8,
    pub reserved: u8,
}
abi!(ExposedPort, 20);

impl ExposedPort {
    #[inline(always)]
    pub const fn new(pod: Addr, protocol: u8, port: u16) -> Self {
        Self { pod, port: port.to_be_bytes(), protocol, reserved: 0 }
    }

    /// The port that this tuple of a pod's packet has come from.
    #[inline(always)]
    pub const fn of(tuple: &Tuple) -> Self {
        Self::new(tuple.saddr, tuple.protocol, tuple.sport())
    }
}

/// Value of `exposed`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Exposure {
    /// Entries of `inbound` at this port: as last counted, and claimed since.
    pub inbound: u32,
    /// What the present sweep adds in the end.
    pub counting: u32,
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

/// Value of `shares`: how many entries the holder has, as last counted, and claimed since.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Share {
    pub flows: u32,
    /// In `nat`, two keys each.
    pub nat_entries: u32,
    /// What the present sweep adds in the end.
    pub counting_flows: u32,
    pub counting_nat_entries: u32,
}
abi!(Share, 16);

/// Value of `datagrams`, whose key is the tuple as the pod sends it, and of `exhausted`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Datagram {
    /// CLOCK_MONOTONIC (ns).
    pub last_seen_ns: u64,
}
abi!(Datagram, 8);

/// The value of `usage`: entries in use as last counted, and claimed since.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Usage {
    /// Two for each NAT entry.
    pub nat: u32,
    pub flows: u32,
    pub inbound: u32,
    /// Raised by the programs after removing a flow, NAT entry or connection from outside, and after a reset or opening
    /// changed one: entries of the flow cache end.
    pub epoch: u32,
}
abi!(Usage, 16);

/// Key of `frags`: what the fragments of one datagram share (RFC 791, RFC 8200 section 4.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(C)]
pub struct FragKey {
    pub saddr: Addr,
    pub daddr: Addr,
    /// Identification, wire order; the 16 bits of IPv4 in the last two bytes.
    pub id: [u8; 4],
    /// Zero for IPv6, where it does not tell datagrams apart.
    pub protocol: u8,
    pub reserved: [u8; 3],
}
abi!(FragKey, 40);

/// Value of `frags`: the ports, which only the first fragment carries, and the protocol, which for IPv6 may stand behind
/// more headers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct FragPorts {
    pub sport: [u8; 2],
    pub dport: [u8; 2],
    pub protocol: u8,
    /// One of an answer to a ping, zero of all else: which of the two an ICMP fragment is, only the first one shows.
    pub is_reply: u8,
    pub reserved: [u8; 2],
    pub seen_ns: u64,
}
abi!(FragPorts, 16);
