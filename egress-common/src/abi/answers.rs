//! Packets that programs generate: their kinds, and the key of their budgets (`decide::limit`).

use super::{Addr, abi};

/// Kinds of generated packets, each with its own budgets. ARP and neighbour discovery have none: link addresses are
/// forged at will, so any host could use up a budget and cut an egress IP off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum AnswerKind {
    /// ICMP error to a pod: packet too big.
    TooBigToPod,
    /// ICMP error to a sender outside, about its packet to a pod: packet too big.
    TooBigToWorld,
    /// ICMP error to a pod that sends to an egress IP.
    Hairpin,
    /// TCP reset to a pod.
    Reset,
}

impl AnswerKind {
    pub const ALL: [Self; 4] = [Self::TooBigToPod, Self::TooBigToWorld, Self::Hairpin, Self::Reset];

    #[inline(always)]
    pub const fn index(self) -> u32 {
        self as u32
    }
}

/// Key of `answers`. The endpoint is the address of the pod that sent the answered packet, or that it is for; never an
/// address outside, which a sender can choose.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(C)]
pub struct AnswerKey {
    pub endpoint: Addr,
    kind: u32,
}
abi!(AnswerKey, 20);

impl AnswerKey {
    #[inline(always)]
    pub const fn new(endpoint: Addr, kind: AnswerKind) -> Self {
        Self { endpoint, kind: kind.index() }
    }
}
