//! How far a TCP connection is, as far as one can tell who compares no sequence numbers.
//!
//! RFC 7857 section 2 (after RFC 6146 section 3.5.2): a connection is *opening* until both sides have spoken, then
//! *established*, and *closing* once both sides have finished or one has reset. Nobody here can tell a reset from one that
//! a stranger made up, so a reset counts only while nothing follows it; and only the side that opened the connection can
//! open it anew. What a stranger may send (RST, SYN) thereby shortens no connection that goes on.
//!
//! A mapping has a state per direction, written by the packets of that direction, so that each packet needs one lookup. A
//! reset and an opening concern both and are also told to the other ([`told`]). `flows` and `inbound` have one state for
//! both sides.

use crate::abi::Direction;
use crate::wire::tcp;

/// More than a first SYN has come from this side; in `inbound`: both sides have spoken.
pub const SPOKE: u32 = 1;
/// A FIN has come from this side; in `inbound`: from outside.
pub const FINISHED: u32 = 2;
/// An RST has passed, from whichever side, and nothing from this one since.
pub const RESET: u32 = 4;
/// In `flows` and `inbound`: a FIN has come from the other side; in `inbound` that is the pod.
pub const OTHER_FINISHED: u32 = 8;
/// In `inbound`: packets of the pod are seen, because it is selected.
pub const POD_SEEN: u32 = 16;

/// How far a connection is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    Opening,
    Established,
    Closing,
}

/// A SYN that answers nothing.
#[inline(always)]
pub const fn is_first(flags: u8) -> bool {
    flags & (tcp::SYN | tcp::ACK | tcp::RST) == tcp::SYN
}

#[inline(always)]
const fn resets(flags: u8) -> bool {
    flags & tcp::RST != 0
}

/// What a packet that is neither a first SYN nor an RST leaves behind. Packets without a flag, and those that are no TCP,
/// say nothing.
#[inline(always)]
const fn spoke(state: u32, flags: u8, finished: u32) -> u32 {
    if flags == 0 {
        return state;
    }
    let finished = if flags & tcp::FIN != 0 { finished } else { 0 };
    (state | SPOKE | finished) & !RESET
}

/// The state of a direction after a packet of its own.
#[inline(always)]
pub const fn own(state: u32, flags: u8, direction: Direction) -> u32 {
    match direction {
        _ if resets(flags) => state | RESET,
        // The pod opens anew; a stranger does not.
        Direction::Egress if is_first(flags) => 0,
        Direction::Ingress if is_first(flags) => state,
        _ => spoke(state, flags, FINISHED),
    }
}

/// The state of the other direction after the same packet, where `state` is what the packet's own direction was in;
/// `None` where it says nothing to the other.
#[inline(always)]
pub const fn told(state: u32, flags: u8, direction: Direction, other: u32) -> Option<u32> {
    if resets(flags) {
        return Some(other | RESET);
    }
    match direction {
        Direction::Egress if is_first(flags) && state != 0 => Some(0),
        _ => None,
    }
}

/// Whether [`told`] has something to say.
#[inline(always)]
pub const fn tells(state: u32, flags: u8, direction: Direction) -> bool {
    told(state, flags, direction, 0).is_some()
}

/// The phase of a mapping.
#[inline(always)]
pub const fn of_mapping(forward: u32, reverse: u32) -> Phase {
    let both = forward & reverse;
    if both & (RESET | FINISHED) != 0 {
        Phase::Closing
    } else if both & SPOKE != 0 {
        Phase::Established
    } else {
        Phase::Opening
    }
}

/// The state of a flow after a packet for the pod, whose FINs and RSTs are looked at.
#[inline(always)]
pub const fn answered(state: u32, flags: u8) -> u32 {
    if resets(flags) {
        state | RESET
    } else if flags & tcp::FIN != 0 {
        state | OTHER_FINISHED
    } else {
        state
    }
}

/// The phase of a flow. That the pod has gone on after its SYN shows that it was answered.
#[inline(always)]
pub const fn of_flow(state: u32) -> Phase {
    const FINISHED_BOTH: u32 = FINISHED | OTHER_FINISHED;
    if state & RESET != 0 || state & FINISHED_BOTH == FINISHED_BOTH {
        Phase::Closing
    } else if state & SPOKE != 0 {
        Phase::Established
    } else {
        Phase::Opening
    }
}

/// The state of a connection from outside after a packet from outside. A SYN on a tuple that is closing is a new
/// connection; on any other it may be anybody's.
#[inline(always)]
pub const fn heard(state: u32, flags: u8) -> u32 {
    if resets(flags) {
        return state | RESET;
    }
    if is_first(flags) {
        return if matches!(of_inbound(state), Phase::Closing) { 0 } else { state };
    }
    spoke(state, flags, FINISHED)
}

/// The state of a connection from outside after a packet of the pod.
#[inline(always)]
pub const fn replied(state: u32, flags: u8) -> u32 {
    if resets(flags) {
        return state | POD_SEEN | RESET;
    }
    // A SYN+ACK does not show that the other side is there.
    if flags & tcp::SYN != 0 { state | POD_SEEN } else { spoke(state, flags, OTHER_FINISHED) | POD_SEEN }
}

/// The phase of a connection from outside. The pod's FIN is seen only where the pod is selected; elsewhere the other's will
/// do.
#[inline(always)]
pub const fn of_inbound(state: u32) -> Phase {
    let finished = state & FINISHED != 0 && (state & OTHER_FINISHED != 0 || state & POD_SEEN == 0);
    if state & RESET != 0 || finished {
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

    /// A mapping's phase after these packets.
    fn mapping(packets: &[(Direction, u8)]) -> Phase {
        let mut states = [0, 0];
        for (direction, flags) in packets {
            let (one, other) = if *direction == Egress { (0, 1) } else { (1, 0) };
            let before = states[one];
            states[one] = own(before, *flags, *direction);
            states[other] = told(before, *flags, *direction, states[other]).unwrap_or(states[other]);
        }
        of_mapping(states[0], states[1])
    }

    const OPEN: [(Direction, u8); 3] = [(Egress, SYN), (Ingress, SYN_ACK), (Egress, ACK)];

    fn open_then(packets: &[(Direction, u8)]) -> Phase {
        mapping(&[&OPEN[..], packets].concat())
    }

    #[test]
    fn a_connection_opens_lives_and_closes() {
        assert_eq!(mapping(&OPEN[..1]), Phase::Opening);
        assert_eq!(mapping(&OPEN[..2]), Phase::Opening);
        assert_eq!(mapping(&OPEN), Phase::Established);
        assert_eq!(open_then(&[(Egress, FIN)]), Phase::Established, "half closed: the other side may go on");
        assert_eq!(open_then(&[(Ingress, FIN)]), Phase::Established);
        assert_eq!(open_then(&[(Egress, FIN), (Ingress, FIN), (Egress, ACK)]), Phase::Closing);
        assert_eq!(mapping(&[(Egress, ACK), (Ingress, ACK)]), Phase::Established, "picked up in mid-stream");
    }

    #[test]
    fn a_reset_counts_while_nothing_follows_it() {
        for (from, flags) in [(Ingress, RST), (Ingress, RST_ACK), (Egress, RST_ACK)] {
            assert_eq!(open_then(&[(from, flags)]), Phase::Closing);
            for goes_on in [Egress, Ingress] {
                assert_eq!(open_then(&[(from, flags), (goes_on, ACK)]), Phase::Established, "{from:?} {goes_on:?}");
            }
        }
        assert_eq!(mapping(&[(Egress, SYN), (Ingress, RST_ACK)]), Phase::Closing, "refused");
    }

    #[test]
    fn only_the_pod_opens_anew() {
        let closing = [(Egress, FIN), (Ingress, FIN)];
        let again = [&closing[..], &OPEN[..1]].concat();
        assert_eq!(open_then(&again), Phase::Opening);
        assert_eq!(open_then(&[&closing[..], &OPEN[..]].concat()), Phase::Established, "the old FINs are forgotten");
        assert_eq!(open_then(&[(Ingress, SYN)]), Phase::Established, "a stranger's");
        assert_eq!(open_then(&[&closing[..], &[(Ingress, SYN)]].concat()), Phase::Closing);
    }

    #[test]
    fn packets_that_say_nothing_change_nothing() {
        for state in 0..32 {
            for direction in [Egress, Ingress] {
                assert_eq!(own(state, 0, direction), state);
                assert!(!tells(state, 0, direction));
            }
            assert_eq!((heard(state, 0), answered(state, 0), answered(state, ACK)), (state, state, state));
        }
    }

    #[test]
    fn a_flow_closes_when_both_have_finished() {
        let pod = |state, flags| own(state, flags, Egress);
        let opened = pod(pod(0, SYN), ACK);
        assert_eq!((of_flow(0), of_flow(opened)), (Phase::Opening, Phase::Established));
        let half = pod(opened, FIN);
        assert_eq!(of_flow(half), Phase::Established);
        assert_eq!(of_flow(answered(half, FIN)), Phase::Closing);
        assert_eq!(of_flow(answered(opened, RST)), Phase::Closing);
        assert_eq!(of_flow(pod(answered(opened, RST), ACK)), Phase::Established);
        assert_eq!(of_flow(pod(answered(half, FIN), SYN)), Phase::Opening);
    }

    #[test]
    fn a_connection_from_outside_is_answered_and_closed() {
        let syn = heard(0, SYN);
        assert_eq!(of_inbound(syn), Phase::Opening);
        // Of a pod that nothing selects only the other side is seen.
        assert_eq!(of_inbound(heard(syn, ACK)), Phase::Established);
        assert_eq!(of_inbound(heard(heard(syn, ACK), FIN)), Phase::Closing);
        // Of a selected one both.
        let answer = replied(syn, SYN_ACK);
        assert_eq!(of_inbound(answer), Phase::Opening, "it shows nothing of the other side");
        let open = replied(answer, ACK);
        assert_eq!(of_inbound(open), Phase::Established);
        assert_eq!(of_inbound(heard(open, FIN)), Phase::Established, "the pod may go on");
        assert_eq!(of_inbound(replied(heard(open, FIN), FIN)), Phase::Closing);
        assert_eq!(of_inbound(replied(syn, RST_ACK)), Phase::Closing, "refused");
    }

    #[test]
    fn a_strangers_packets_close_no_connection_from_outside_that_goes_on() {
        let open = replied(replied(heard(0, SYN), SYN_ACK), ACK);
        let reset = heard(open, RST);
        assert_eq!(of_inbound(reset), Phase::Closing);
        assert_eq!(of_inbound(replied(reset, ACK)), Phase::Established);
        assert_eq!(heard(open, SYN), open);
        let closed = replied(heard(open, FIN), FIN);
        assert_eq!(heard(closed, SYN), 0, "used again");
    }
}
