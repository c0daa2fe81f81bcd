//! The state of a TCP connection, after RFC 7857 section 2: *opening* until both sides have spoken, then *established*,
//! and *closing* once both have finished or one has reset. Other protocols are established from the first answer
//! ([`Segment`]).
//!
//! - A reset counts only while nothing follows it, and only the side that opened the connection can reopen it.
//! - A FIN or RST from outside may be forged, and counts only if its sequence number [`fits`] (RFC 5961 section 3.2).
//!   Both numbers are stored and compared at the check of the entry. The pod's acknowledgement is stored with the
//!   periodic refresh and with its FIN, so a reset after a pause may not count.
//! - A NAT entry has a state and a number per direction; a reset or opening is also written to the other one
//!   ([`opposite`]). `flows` and `inbound` have one state for both sides.

use crate::abi::{Direction, Flow, Inbound, NatEntry};
use crate::wire::{PROTO_TCP, Segment, tcp};

/// This side has sent more than a first SYN, or an answer of another protocol; in `inbound`: both sides have spoken.
pub const SPOKE: u32 = 1;
/// This side has sent a FIN; in `inbound`: the outside has.
pub const FINISHED: u32 = 2;
/// Either side has sent an RST, and this side nothing since.
pub const RESET: u32 = 4;
/// In `flows` and `inbound`: the other side has sent a FIN; in `inbound` that is the pod.
pub const OTHER_FINISHED: u32 = 8;
/// In `inbound`: the programs see the pod's packets, because it is selected.
pub const POD_SEEN: u32 = 16;
/// The RST came from outside and may be forged.
pub const CLAIMED: u32 = 32;

/// How far (bytes) after the pod's acknowledgement an end may be: the initial window (RFC 6928). One of 262,144 guesses
/// fits.
pub const WINDOW: u32 = 1 << 14;

/// Phase of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    Opening,
    Established,
    Closing,
}

/// Whether a FIN or RST from outside that ends at this sequence number closes the connection of a pod that has
/// acknowledged up to that number.
#[inline(always)]
pub const fn fits(acknowledged: u32, end: u32) -> bool {
    end.wrapping_sub(acknowledged) < WINDOW
}

/// The stored sequence number of a direction after one of its segments: the pod's acknowledgement, or the end of the
/// last FIN or RST from outside.
#[inline(always)]
pub const fn number(known: u32, segment: Segment, direction: Direction) -> u32 {
    let counts = match direction {
        // A reset may acknowledge nothing; all other segments of a pod do, except its SYN, which begins at zero.
        Direction::Egress => segment.flags != 0 && !resets(segment.flags),
        Direction::Ingress => segment.flags & (tcp::FIN | tcp::RST) != 0,
    };
    if counts { segment.number } else { known }
}

/// A SYN without ACK.
#[inline(always)]
pub const fn is_first(flags: u8) -> bool {
    flags & (tcp::SYN | tcp::ACK | tcp::RST) == tcp::SYN
}

#[inline(always)]
const fn resets(flags: u8) -> bool {
    flags & tcp::RST != 0
}

/// The state after a packet that is neither a first SYN nor an RST. A packet without flags changes nothing.
#[inline(always)]
const fn spoke(state: u32, flags: u8, finished: u32) -> u32 {
    if flags == 0 {
        return state;
    }
    let finished = if flags & tcp::FIN != 0 { finished } else { 0 };
    (state | SPOKE | finished) & !(RESET | CLAIMED)
}

/// The state of a direction after one of its packets.
#[inline(always)]
pub const fn own(state: u32, flags: u8, direction: Direction) -> u32 {
    match direction {
        Direction::Egress if resets(flags) => (state | RESET) & !CLAIMED,
        Direction::Ingress if resets(flags) => state | RESET | CLAIMED,
        // The pod may open the connection again; the other end may not.
        Direction::Egress if is_first(flags) => 0,
        Direction::Ingress if is_first(flags) => state,
        _ => spoke(state, flags, FINISHED),
    }
}

/// The state of the opposite direction after the same packet; `state` is the packet's own direction before it. `None`
/// if it does not change.
#[inline(always)]
pub const fn opposite(state: u32, flags: u8, direction: Direction, other: u32) -> Option<u32> {
    match direction {
        _ if resets(flags) => Some((other | RESET) & !CLAIMED),
        Direction::Egress if is_first(flags) && state != 0 => Some(0),
        _ => None,
    }
}

/// Whether [`opposite`] changes the other direction.
#[inline(always)]
pub const fn changes_opposite(state: u32, flags: u8, direction: Direction) -> bool {
    opposite(state, flags, direction, 0).is_some()
}

/// The phase of a NAT entry, by the values of both keys.
#[inline(always)]
pub fn nat_entry(forward: &NatEntry, reverse: Option<&NatEntry>) -> Phase {
    let (state, end) = reverse.map_or((0, 0), |reverse| (reverse.state, reverse.number));
    if forward.other.protocol != PROTO_TCP {
        return if state & SPOKE == 0 { Phase::Opening } else { Phase::Established };
    }
    of_nat_entry(forward.state, state, fits(forward.number, end))
}

/// The phase of a flow.
#[inline(always)]
pub fn flow(flow: &Flow) -> Phase {
    of_flow(flow.state, fits(flow.acknowledged, flow.end))
}

/// The phase of a connection from outside.
#[inline(always)]
pub fn inbound(inbound: &Inbound) -> Phase {
    of_inbound(inbound.state, fits(inbound.acknowledged, inbound.end))
}

/// Whether the RST of this state counts.
#[inline(always)]
const fn is_reset(state: u32, fits: bool) -> bool {
    state & RESET != 0 && (fits || state & CLAIMED == 0)
}

/// The phase of a NAT entry. `fits`: see [`fits`].
#[inline(always)]
const fn of_nat_entry(forward: u32, reverse: u32, fits: bool) -> Phase {
    let both = forward & reverse;
    if both & RESET != 0 && is_reset(reverse, fits) || both & FINISHED != 0 && fits {
        Phase::Closing
    } else if both & SPOKE != 0 {
        Phase::Established
    } else {
        Phase::Opening
    }
}

/// The state of a flow after a packet for the pod; for TCP only FINs and RSTs count.
#[inline(always)]
pub const fn answered(state: u32, flags: u8, protocol: u8) -> u32 {
    if protocol != PROTO_TCP {
        state | SPOKE
    } else if resets(flags) {
        state | RESET | CLAIMED
    } else if flags & tcp::FIN != 0 {
        state | OTHER_FINISHED
    } else {
        state
    }
}

/// The phase of a flow. A pod that has sent more than its SYN has been answered. `fits`: see [`fits`].
#[inline(always)]
const fn of_flow(state: u32, fits: bool) -> Phase {
    const FINISHED_BOTH: u32 = FINISHED | OTHER_FINISHED;
    if is_reset(state, fits) || state & FINISHED_BOTH == FINISHED_BOTH && fits {
        Phase::Closing
    } else if state & SPOKE != 0 {
        Phase::Established
    } else {
        Phase::Opening
    }
}

/// The state of an inbound connection after a packet from outside. A SYN on a closing tuple is a new connection; on any
/// other it may be forged. `fits`: see [`fits`].
#[inline(always)]
pub const fn seen_from_outside(state: u32, flags: u8, fits: bool) -> u32 {
    if resets(flags) {
        return state | RESET | CLAIMED;
    }
    if is_first(flags) {
        return if matches!(of_inbound(state, fits), Phase::Closing) { 0 } else { state };
    }
    spoke(state, flags, FINISHED)
}

/// The state of an inbound connection after a packet of the pod.
#[inline(always)]
pub const fn replied(state: u32, flags: u8) -> u32 {
    if resets(flags) {
        return (state | POD_SEEN | RESET) & !CLAIMED;
    }
    // A SYN+ACK does not confirm the other side.
    if flags & tcp::SYN != 0 { state | POD_SEEN } else { spoke(state, flags, OTHER_FINISHED) | POD_SEEN }
}

/// The phase of an inbound connection. The programs see the pod's FIN only if the pod is selected; otherwise the other
/// side's FIN is enough, because there is no acknowledgement to compare it with. `fits`: see [`fits`].
#[inline(always)]
const fn of_inbound(state: u32, fits: bool) -> Phase {
    let fits = fits || state & POD_SEEN == 0;
    let finished = state & FINISHED != 0 && (state & OTHER_FINISHED != 0 || state & POD_SEEN == 0);
    if is_reset(state, fits) || finished && fits {
        Phase::Closing
    } else if state & SPOKE != 0 {
        Phase::Established
    } else {
        Phase::Opening
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Direction::{Egress, Ingress};

    const SYN: u8 = tcp::SYN;
    const SYN_ACK: u8 = tcp::SYN | tcp::ACK;
    const ACK: u8 = tcp::ACK;
    const FIN: u8 = tcp::FIN | tcp::ACK;
    const RST: u8 = tcp::RST;
    const RST_ACK: u8 = tcp::RST | tcp::ACK;

    fn answered(state: u32, flags: u8) -> u32 {
        super::answered(state, flags, PROTO_TCP)
    }

    fn of_flow_fitting(state: u32) -> Phase {
        of_flow(state, true)
    }

    fn of_inbound_fitting(state: u32) -> Phase {
        of_inbound(state, true)
    }

    fn seen_fitting(state: u32, flags: u8) -> u32 {
        seen_from_outside(state, flags, true)
    }

    /// A NAT entry's phase after these packets.
    fn nat_entry(packets: &[(Direction, u8)]) -> Phase {
        let mut states = [0, 0];
        for (direction, flags) in packets {
            let (one, other) = if *direction == Egress { (0, 1) } else { (1, 0) };
            let before = states[one];
            states[one] = own(before, *flags, *direction);
            states[other] = opposite(before, *flags, *direction, states[other]).unwrap_or(states[other]);
        }
        of_nat_entry(states[0], states[1], true)
    }

    const OPEN: [(Direction, u8); 3] = [(Egress, SYN), (Ingress, SYN_ACK), (Egress, ACK)];

    fn open_then(packets: &[(Direction, u8)]) -> Phase {
        nat_entry(&[&OPEN[..], packets].concat())
    }

    #[test]
    fn a_connection_opens_lives_and_closes() {
        assert_eq!(nat_entry(&OPEN[..1]), Phase::Opening);
        assert_eq!(nat_entry(&OPEN[..2]), Phase::Opening);
        assert_eq!(nat_entry(&OPEN), Phase::Established);
        assert_eq!(open_then(&[(Egress, FIN)]), Phase::Established, "half closed: the other side may go on");
        assert_eq!(open_then(&[(Ingress, FIN)]), Phase::Established);
        assert_eq!(open_then(&[(Egress, FIN), (Ingress, FIN), (Egress, ACK)]), Phase::Closing);
        assert_eq!(nat_entry(&[(Egress, ACK), (Ingress, ACK)]), Phase::Established, "picked up in mid-stream");
    }

    #[test]
    fn a_reset_counts_while_nothing_follows_it() {
        for (from, flags) in [(Ingress, RST), (Ingress, RST_ACK), (Egress, RST_ACK)] {
            assert_eq!(open_then(&[(from, flags)]), Phase::Closing);
            for goes_on in [Egress, Ingress] {
                assert_eq!(open_then(&[(from, flags), (goes_on, ACK)]), Phase::Established, "{from:?} {goes_on:?}");
            }
        }
        assert_eq!(nat_entry(&[(Egress, SYN), (Ingress, RST_ACK)]), Phase::Closing, "refused");
    }

    #[test]
    fn only_the_pod_opens_anew() {
        let closing = [(Egress, FIN), (Ingress, FIN)];
        let again = [&closing[..], &OPEN[..1]].concat();
        assert_eq!(open_then(&again), Phase::Opening);
        assert_eq!(open_then(&[&closing[..], &OPEN[..]].concat()), Phase::Established, "the old FINs are forgotten");
        assert_eq!(open_then(&[(Ingress, SYN)]), Phase::Established, "perhaps forged");
        assert_eq!(open_then(&[&closing[..], &[(Ingress, SYN)]].concat()), Phase::Closing);
    }

    #[test]
    fn segments_without_new_information_change_nothing() {
        for state in 0..64 {
            for direction in [Egress, Ingress] {
                assert_eq!(own(state, 0, direction), state);
                assert!(!changes_opposite(state, 0, direction));
            }
            assert_eq!((seen_fitting(state, 0), answered(state, 0), answered(state, ACK)), (state, state, state));
        }
    }

    #[test]
    fn a_flow_closes_when_both_have_finished() {
        let pod = |state, flags| own(state, flags, Egress);
        let opened = pod(pod(0, SYN), ACK);
        assert_eq!((of_flow_fitting(0), of_flow_fitting(opened)), (Phase::Opening, Phase::Established));
        let half = pod(opened, FIN);
        assert_eq!(of_flow_fitting(half), Phase::Established);
        assert_eq!(of_flow_fitting(answered(half, FIN)), Phase::Closing);
        assert_eq!(of_flow_fitting(answered(opened, RST)), Phase::Closing);
        assert_eq!(of_flow_fitting(pod(answered(opened, RST), ACK)), Phase::Established);
        assert_eq!(of_flow_fitting(pod(answered(half, FIN), SYN)), Phase::Opening);
    }

    #[test]
    fn a_connection_from_outside_is_answered_and_closed() {
        let syn = seen_fitting(0, SYN);
        assert_eq!(of_inbound_fitting(syn), Phase::Opening);
        // Of an unselected pod only the other side is seen.
        assert_eq!(of_inbound_fitting(seen_fitting(syn, ACK)), Phase::Established);
        assert_eq!(of_inbound_fitting(seen_fitting(seen_fitting(syn, ACK), FIN)), Phase::Closing);
        // Of a selected pod both sides are seen.
        let answer = replied(syn, SYN_ACK);
        assert_eq!(of_inbound_fitting(answer), Phase::Opening, "it shows nothing of the other side");
        let open = replied(answer, ACK);
        assert_eq!(of_inbound_fitting(open), Phase::Established);
        assert_eq!(of_inbound_fitting(seen_fitting(open, FIN)), Phase::Established, "the pod may go on");
        assert_eq!(of_inbound_fitting(replied(seen_fitting(open, FIN), FIN)), Phase::Closing);
        assert_eq!(of_inbound_fitting(replied(syn, RST_ACK)), Phase::Closing, "refused");
    }

    #[test]
    fn forged_segments_close_no_inbound_connection() {
        let open = replied(replied(seen_fitting(0, SYN), SYN_ACK), ACK);
        let reset = seen_fitting(open, RST);
        assert_eq!(of_inbound_fitting(reset), Phase::Closing);
        assert_eq!(of_inbound_fitting(replied(reset, ACK)), Phase::Established);
        assert_eq!(seen_fitting(open, SYN), open);
        let closed = replied(seen_fitting(open, FIN), FIN);
        assert_eq!(seen_fitting(closed, SYN), 0, "used again");
    }

    #[test]
    fn an_end_is_valid_at_the_expected_sequence_number_and_slightly_after() {
        for acknowledged in [0, 1, 77, u32::MAX, u32::MAX - WINDOW / 2] {
            for (ahead, is_fitting) in [(0, true), (1, true), (WINDOW - 1, true), (WINDOW, false), (u32::MAX, false)] {
                assert_eq!(fits(acknowledged, acknowledged.wrapping_add(ahead)), is_fitting, "{acknowledged} {ahead}");
            }
            assert!(!fits(acknowledged, acknowledged ^ 0x8000_0000));
        }
    }

    #[test]
    fn a_segment_updates_the_sequence_number_of_its_direction() {
        let after = |flags, direction| number(7, Segment { flags, number: 9 }, direction);
        for flags in [SYN, ACK, FIN, SYN_ACK] {
            assert_eq!(after(flags, Egress), 9, "{flags}");
        }
        for flags in [0, RST, RST_ACK] {
            assert_eq!(after(flags, Egress), 7, "{flags}");
        }
        for (flags, known) in [(0, 7), (ACK, 7), (SYN_ACK, 7), (FIN, 9), (RST, 9), (RST_ACK, 9)] {
            assert_eq!(after(flags, Ingress), known, "{flags}");
        }
    }

    /// A forged end that does not fit shortens nothing; the pod's own end always counts.
    #[test]
    fn an_out_of_window_end_closes_nothing() {
        let (open, ack) = (own(own(0, SYN, Egress), ACK, Egress), SPOKE);
        for flags in [RST, RST_ACK, FIN] {
            let reverse = own(ack, flags, Ingress);
            let forward = opposite(ack, flags, Ingress, open).unwrap_or(open);
            for pods in [ACK, FIN] {
                let forward = if flags == FIN { own(forward, pods, Egress) } else { forward };
                assert_eq!(of_nat_entry(forward, reverse, false), Phase::Established, "{flags}");
            }
            let flow = answered(own(open, FIN, Egress), flags);
            assert_eq!((of_flow(flow, false), of_flow(flow, true)), (Phase::Established, Phase::Closing), "{flags}");
            let inbound = seen_from_outside(replied(replied(seen_from_outside(0, SYN, false), ACK), FIN), flags, false);
            assert_eq!(of_inbound(inbound, false), Phase::Established, "{flags}");
            assert_eq!(of_inbound(inbound, true), Phase::Closing, "{flags}");
        }
        let reset = opposite(open, RST, Egress, own(ack, RST, Ingress)).expect("a change");
        assert_eq!(of_nat_entry(own(open, RST, Egress), reset, false), Phase::Closing, "the pod's own");
        assert_eq!(of_flow(own(answered(open, RST), RST, Egress), false), Phase::Closing, "the pod's own");
        assert_eq!(
            of_inbound(replied(seen_from_outside(ack, RST, false), RST), false),
            Phase::Closing,
            "the pod's own"
        );
    }
}
