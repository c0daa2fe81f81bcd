//! Expiry of entries: the timeouts, and how the two directions of a NAT entry combine.
//!
//! TCP follows RFC 5382 section 5 ([`phase`]), UDP RFC 4787 section 4.3, ICMP RFC 5508 section 3.2. All other protocols
//! have one timeout, which suits SCTP's heartbeats (RFC 9260 section 8.3). A flow outlives the gateway's NAT entry, so
//! that a flow that only receives keeps its address. Unanswered entries of other protocols than TCP live 30 s, as in
//! Linux, because a pod can create any number of them.
//!
//! An idle entry counts as absent: a packet that finds one removes it and continues without. The sweep removes the
//! others, so that they take no space. An entry is marked as [`GONE`] by compare-and-swap before it is removed. A packet
//! updates the time by the same operation, so one of them wins. Both keys of an idle NAT entry are marked before either
//! is removed.

use super::phase::{self, Phase};
use crate::abi::{Flow, Inbound, NatEntry, Timeouts};
use crate::wire::{PROTO_ICMP, PROTO_ICMPV6, PROTO_TCP, PROTO_UDP};

const SECOND_NS: u64 = 1_000_000_000;
/// Replaces the last-seen time of an entry that is about to be removed.
pub const GONE: u64 = u64::MAX;
/// Timeout of an unanswered connection while a map is nearly full: long enough for two SYN retransmissions.
pub const PRESSED_OPENING_SECS: u32 = 10;
/// How long `inbound` keeps a TCP connection that is opening or closing: a SYN is retransmitted within 4 s.
pub const INBOUND_BRIEF_SECS: u32 = 10;
/// Likewise while a map is nearly full.
pub const PRESSED_INBOUND_SECS: u32 = 4;
/// First fragments are remembered for so long (RFC 8200 section 4.5 gives a minute, Linux 30 s).
pub const FRAGMENT_NS: u64 = 30 * SECOND_NS;

/// The timeouts while a map is nearly full: unanswered entries expire first.
#[inline(always)]
#[must_use]
pub const fn pressed(timeouts: Timeouts) -> Timeouts {
    Timeouts { tcp_opening: PRESSED_OPENING_SECS, unreplied: PRESSED_OPENING_SECS, ..timeouts }
}

/// How long an entry may be idle.
#[inline(always)]
pub const fn timeout_ns(timeouts: &Timeouts, protocol: u8, phase: Phase) -> u64 {
    let answered = match protocol {
        PROTO_UDP => timeouts.udp,
        PROTO_ICMP | PROTO_ICMPV6 => timeouts.icmp,
        _ => timeouts.other,
    };
    let seconds = match (protocol, phase) {
        (PROTO_TCP, Phase::Opening) => timeouts.tcp_opening,
        (PROTO_TCP, Phase::Established) => timeouts.tcp_established,
        (PROTO_TCP, Phase::Closing) => timeouts.tcp_closing,
        (_, Phase::Opening) if timeouts.unreplied < answered => timeouts.unreplied,
        _ => answered,
    };
    seconds as u64 * SECOND_NS
}

/// The shortest time that an entry of this protocol may be idle, whatever its phase.
#[inline(always)]
const fn shortest_ns(timeouts: &Timeouts, protocol: u8) -> u64 {
    let opening = timeout_ns(timeouts, protocol, Phase::Opening);
    let closing = timeout_ns(timeouts, protocol, Phase::Closing);
    let established = timeout_ns(timeouts, protocol, Phase::Established);
    let shorter = if opening < closing { opening } else { closing };
    if shorter < established { shorter } else { established }
}

/// Whether a NAT entry may be idle, by the value of one of its keys; [`is_nat_entry_idle`] decides, by both.
#[inline(always)]
pub const fn may_nat_entry_be_idle(timeouts: &Timeouts, protocol: u8, last_seen_ns: u64, now_ns: u64) -> bool {
    now_ns.saturating_sub(last_seen_ns) > shortest_ns(timeouts, protocol)
}

/// Whether a NAT entry expires; both directions count, since both keys are removed together.
#[inline(always)]
pub fn is_nat_entry_idle(timeouts: &Timeouts, forward: &NatEntry, reverse: Option<&NatEntry>, now_ns: u64) -> bool {
    let seen = reverse.map_or(0, |reverse| reverse.last_seen_ns).max(forward.last_seen_ns);
    let phase = phase::nat_entry(forward, reverse);
    now_ns.saturating_sub(seen) > timeout_ns(timeouts, forward.other.protocol, phase)
}

/// Whether a flow expires that was last seen then. Answered datagrams get three times the gateway's timeout, so that a flow outlives its NAT
/// entry.
#[inline(always)]
pub fn is_flow_idle(timeouts: &Timeouts, flow: &Flow, last_seen_ns: u64, protocol: u8, now_ns: u64) -> bool {
    let phase = phase::flow(flow);
    let timeout = timeout_ns(timeouts, protocol, phase);
    let patience = if protocol == PROTO_TCP || matches!(phase, Phase::Opening) { timeout } else { 3 * timeout };
    now_ns.saturating_sub(last_seen_ns) > patience
}

/// Whether an inbound connection expires that was last seen then; `pressed` while a map is nearly full. Unconfirmed and closed connections
/// expire within seconds, because any host outside can create such entries, and a live connection is in neither phase.
#[inline(always)]
pub fn is_inbound_idle(
    timeouts: &Timeouts,
    pressed: bool,
    inbound: &Inbound,
    last_seen_ns: u64,
    protocol: u8,
    now_ns: u64,
) -> bool {
    // The pod's answers to inbound datagrams are not recorded.
    let phase = if protocol == PROTO_TCP { phase::inbound(inbound) } else { Phase::Established };
    let timeout = timeout_ns(timeouts, protocol, phase);
    let brief = if pressed { PRESSED_INBOUND_SECS } else { INBOUND_BRIEF_SECS };
    let is_brief = protocol == PROTO_TCP && !matches!(phase, Phase::Established);
    let timeout = if is_brief { timeout.min(u64::from(brief) * SECOND_NS) } else { timeout };
    now_ns.saturating_sub(last_seen_ns) > timeout
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::{Addr, Direction, Origin, Tuple};
    use crate::decide::phase::{FINISHED, OTHER_FINISHED, RESET, SPOKE};

    const DEFAULT: &Timeouts = &Timeouts::DEFAULT;

    fn nat_entry(protocol: u8, seen_secs: u64, state: u32) -> NatEntry {
        let other = Tuple::new(Direction::Ingress, Addr::UNSPECIFIED, Addr::UNSPECIFIED, 1, 2, protocol);
        let mut nat_entry = NatEntry::new(other, Origin::Here, Addr::UNSPECIFIED, 1, seen_secs * SECOND_NS);
        nat_entry.state = state;
        nat_entry
    }

    /// The last second at which an entry is kept.
    fn kept_secs(is_idle: impl Fn(u64) -> bool) -> u64 {
        (0..100_000).find(|seconds| is_idle((seconds + 1) * SECOND_NS)).expect("it goes some day")
    }

    #[test]
    fn the_later_direction_counts() {
        let (forward, reverse) = (nat_entry(PROTO_UDP, 0, SPOKE), nat_entry(PROTO_UDP, 200, SPOKE));
        assert_eq!(kept_secs(|now| is_nat_entry_idle(DEFAULT, &forward, Some(&reverse), now)), 500);
        assert_eq!(kept_secs(|now| is_nat_entry_idle(DEFAULT, &reverse, Some(&forward), now)), 500);
        assert_eq!(kept_secs(|now| is_nat_entry_idle(DEFAULT, &forward, None, now)), 30);
    }

    #[test]
    fn each_protocol_and_phase_has_its_time() {
        let timeouts = &Timeouts {
            tcp_established: 1000,
            tcp_opening: 20,
            tcp_closing: 30,
            udp: 40,
            icmp: 50,
            other: 60,
            unreplied: 45,
        };
        for (protocol, forward, reverse, secs) in [
            (PROTO_TCP, 0, 0, 20),
            (PROTO_TCP, SPOKE, 0, 20),
            (PROTO_TCP, SPOKE, SPOKE, 1000),
            (PROTO_TCP, SPOKE | FINISHED, SPOKE, 1000),
            (PROTO_TCP, SPOKE | FINISHED, SPOKE | FINISHED, 30),
            (PROTO_TCP, SPOKE | RESET, SPOKE | RESET, 30),
            (PROTO_TCP, SPOKE, SPOKE | RESET, 1000),
            (PROTO_UDP, 0, SPOKE, 40),
            (PROTO_UDP, 0, 0, 40),
            (PROTO_ICMP, 0, SPOKE, 50),
            (PROTO_ICMPV6, 0, 0, 45),
            (47, 0, SPOKE, 60),
            (47, 0, 0, 45),
        ] {
            let (one, other) = (nat_entry(protocol, 0, forward), nat_entry(protocol, 0, reverse));
            let kept = kept_secs(|now| is_nat_entry_idle(timeouts, &one, Some(&other), now));
            assert_eq!(kept, secs, "{protocol} {forward} {reverse}");
        }
    }

    #[test]
    fn a_flow_outlives_its_nat_entry() {
        let flow = |state| Flow::new(Addr::UNSPECIFIED, 1, 0, state, 0);
        for (protocol, state, secs) in [
            (PROTO_TCP, 0, 240),
            (PROTO_TCP, SPOKE | FINISHED, 7_440),
            (PROTO_TCP, SPOKE | FINISHED | OTHER_FINISHED, 240),
            (PROTO_UDP, SPOKE, 900),
            (PROTO_ICMP, SPOKE, 180),
            (PROTO_UDP, 0, 30),
        ] {
            assert_eq!(
                kept_secs(|now| is_flow_idle(DEFAULT, &flow(state), 0, protocol, now)),
                secs,
                "{protocol} {state}"
            );
        }
    }

    #[test]
    fn a_connection_from_outside_lives_as_long_as_it_is_one() {
        for (protocol, state, secs) in [
            (PROTO_TCP, 0, 10),
            (PROTO_TCP, SPOKE, 7_440),
            (PROTO_TCP, SPOKE | FINISHED, 10),
            (PROTO_TCP, SPOKE | RESET, 10),
            (PROTO_UDP, 0, 300),
            (PROTO_ICMPV6, 0, 60),
        ] {
            let inbound = Inbound { state, ..Inbound::new(0) };
            let kept = |pressed| kept_secs(|now| is_inbound_idle(DEFAULT, pressed, &inbound, 0, protocol, now));
            assert_eq!((kept(false), kept(true)), (secs, if secs == 10 { 4 } else { secs }), "{protocol} {state}");
        }
    }

    #[test]
    fn under_pressure_only_unanswered_entries_expire_earlier() {
        let timeouts = &pressed(Timeouts::DEFAULT);
        let kept = |state| {
            let (one, other) = (nat_entry(PROTO_TCP, 0, state), nat_entry(PROTO_TCP, 0, state));
            kept_secs(|now| is_nat_entry_idle(timeouts, &one, Some(&other), now))
        };
        assert_eq!((kept(0), kept(SPOKE), kept(FINISHED)), (10, 7_440, 240));
        for protocol in [PROTO_UDP, PROTO_ICMP, 47] {
            let one = nat_entry(protocol, 0, 0);
            let kept = |other| kept_secs(|now| is_nat_entry_idle(timeouts, &one, Some(&other), now));
            let answered =
                kept_secs(|now| now / SECOND_NS > u64::from(if protocol == PROTO_ICMP { 60_u32 } else { 300 }));
            assert_eq!(
                (kept(nat_entry(protocol, 0, 0)), kept(nat_entry(protocol, 0, SPOKE))),
                (10, answered),
                "{protocol}"
            );
        }
    }
}
