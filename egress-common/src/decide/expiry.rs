//! When an entry is idle: the timeouts, and how the two directions of a mapping count together.
//!
//! RFC 5382 section 5 (TCP: established at least 2 h 4 min, transitory at least 4 min), RFC 4787 section 4.3 (UDP: two
//! minutes, better five), RFC 5508 section 3.2 (ICMP: 60 s). A flow of the source node outlives the gateway's mapping, so
//! that a flow that only receives keeps its address.

use crate::abi::{Flow, Mapping};
use crate::wire::{PROTO_TCP, PROTO_UDP, tcp};

const SECOND_NS: u64 = 1_000_000_000;
pub const TCP_ESTABLISHED_NS: u64 = 7_440 * SECOND_NS;
pub const TCP_TRANSITORY_NS: u64 = 240 * SECOND_NS;
pub const UDP_NS: u64 = 300 * SECOND_NS;
pub const OTHER_NS: u64 = 60 * SECOND_NS;

/// How long a mapping or flow may be idle. `forward` and `reverse` are the TCP flags seen from and towards the pod.
#[inline(always)]
const fn timeout_ns(protocol: u8, forward: u32, reverse: u32) -> u64 {
    const CLOSING: u32 = (tcp::FIN | tcp::RST) as u32;
    match protocol {
        PROTO_TCP if (forward | reverse) & CLOSING != 0 => TCP_TRANSITORY_NS,
        // Both sides have spoken, beyond the first SYN.
        PROTO_TCP if forward & tcp::ACK as u32 != 0 && reverse & tcp::ACK as u32 != 0 => TCP_ESTABLISHED_NS,
        PROTO_TCP => TCP_TRANSITORY_NS,
        PROTO_UDP => UDP_NS,
        _ => OTHER_NS,
    }
}

/// Whether a mapping goes; both directions are judged together, since both keys live and die together.
#[inline(always)]
pub fn is_mapping_idle(forward: &Mapping, reverse: Option<&Mapping>, now_ns: u64) -> bool {
    let (seen, flags) = match reverse {
        Some(reverse) if reverse.last_seen_ns > forward.last_seen_ns => (reverse.last_seen_ns, reverse.tcp_flags),
        Some(reverse) => (forward.last_seen_ns, reverse.tcp_flags),
        None => (forward.last_seen_ns, 0),
    };
    let timeout = timeout_ns(forward.other.protocol, forward.tcp_flags, flags);
    now_ns.saturating_sub(seen) > timeout
}

/// Whether a flow goes. Only the pod's side is seen here, so a TCP flow that is not closing counts as established, and
/// datagrams get three times the gateway's patience.
#[inline(always)]
pub fn is_flow_idle(flow: &Flow, protocol: u8, now_ns: u64) -> bool {
    let timeout = match protocol {
        PROTO_TCP => timeout_ns(protocol, flow.tcp_flags, tcp::ACK as u32),
        _ => 3 * timeout_ns(protocol, 0, 0),
    };
    now_ns.saturating_sub(flow.last_seen_ns) > timeout
}

/// Whether a connection from outside is forgotten.
#[inline(always)]
pub fn is_inbound_idle(last_seen_ns: u64, protocol: u8, now_ns: u64) -> bool {
    const ACKED: u32 = tcp::ACK as u32;
    now_ns.saturating_sub(last_seen_ns) > timeout_ns(protocol, ACKED, ACKED)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::{Addr, Direction, Origin, Tuple};

    fn mapping(protocol: u8, seen_secs: u64, flags: u8) -> Mapping {
        let other = Tuple::new(Direction::Ingress, Addr::UNSPECIFIED, Addr::UNSPECIFIED, 1, 2, protocol);
        let mut mapping = Mapping::new(other, Origin::Here, Addr::UNSPECIFIED, 1, seen_secs * SECOND_NS);
        mapping.tcp_flags = flags.into();
        mapping
    }

    #[test]
    fn the_later_direction_counts() {
        let forward = mapping(PROTO_UDP, 0, 0);
        let reverse = mapping(PROTO_UDP, 200, 0);
        assert!(!is_mapping_idle(&forward, Some(&reverse), 450 * SECOND_NS));
        assert!(is_mapping_idle(&forward, Some(&reverse), 501 * SECOND_NS));
        assert!(is_mapping_idle(&forward, None, 301 * SECOND_NS));
    }

    #[test]
    fn tcp_has_three_lives() {
        let syn = mapping(PROTO_TCP, 0, tcp::SYN);
        assert!(is_mapping_idle(&syn, None, 241 * SECOND_NS), "unanswered");
        let ack = mapping(PROTO_TCP, 0, tcp::SYN | tcp::ACK);
        assert!(!is_mapping_idle(&ack, Some(&ack), 7_440 * SECOND_NS), "established");
        assert!(is_mapping_idle(&ack, Some(&ack), 7_441 * SECOND_NS), "established");
        let fin = mapping(PROTO_TCP, 0, tcp::FIN | tcp::ACK);
        assert!(is_mapping_idle(&ack, Some(&fin), 241 * SECOND_NS), "closing");
    }
}
