//! Fragments: only the first one has the ports; later ones are matched by their identification.

use super::expiry::FRAGMENT_NS;
use super::{Tables, slots};
use crate::abi::{Family, FragKey, FragPorts};
use crate::wire::{Fragment, Headers, L4};

/// Stores the ports of a first fragment, or sets those of a later one. A later fragment without a known first fragment
/// gets no ports; the verdict is [`crate::abi::Verdict::FragmentUnknown`]. A fragment that names a protocol without
/// ports needs none of this.
#[inline(always)]
pub fn resolve<T: Tables>(headers: &mut Headers, tables: &T) {
    match headers.fragment {
        Fragment::Whole => {}
        Fragment::First if slots::translatable(headers).is_err() => {}
        Fragment::First => remember(headers, tables),
        Fragment::Later if headers.l4 != L4::Later => {}
        Fragment::Later => {
            if let Some(ports) = known(&key(headers), tables) {
                headers.tuple.set_ports(u16::from_be_bytes(ports.sport), u16::from_be_bytes(ports.dport));
                headers.tuple.protocol = ports.protocol;
                headers.l4 = if ports.is_reply == 0 { Headers::kind_of(ports.protocol) } else { L4::EchoReply };
            }
        }
    }
}

/// As [`resolve`], at a hook that holds later fragments. Returns whether this is a first fragment that others wait for:
/// then all of them are reinjected ([`crate::abi::Verdict::FragmentsReleased`]), and decided when they arrive again.
///
/// Out of line: rare, and its keys would crowd the caller's stack frame.
#[inline(never)]
pub fn resolve_kept<T: Tables>(headers: &mut Headers, tables: &T) -> bool {
    resolve(headers, tables);
    // After the ports are written, because a CPU that holds a later fragment looks for them afterwards.
    headers.fragment == Fragment::First && slots::translatable(headers).is_ok() && tables.is_awaited(&key(headers))
}

/// The ports of a datagram whose first fragment has been seen.
#[inline(always)]
pub fn known<'t, T: Tables>(key: &FragKey, tables: &'t T) -> Option<&'t FragPorts> {
    let is_fresh = |ports: &&FragPorts| tables.now_ns().saturating_sub(ports.seen_ns) <= FRAGMENT_NS;
    tables.fragment(key).filter(is_fresh)
}

/// A first fragment of the host: its later fragments must not match a translated datagram with the same identification.
///
/// Out of line: rare, and its key would crowd the caller's stack frame.
#[inline(never)]
pub fn supersede<T: Tables>(headers: &Headers, tables: &T) {
    if headers.fragment == Fragment::First && tables.fragment(&key(headers)).is_some() {
        remember(headers, tables);
    }
}

/// Out of line: the value that it makes would crowd the caller's stack frame.
#[inline(never)]
fn remember<T: Tables>(headers: &Headers, tables: &T) {
    let ports = FragPorts {
        sport: headers.tuple.sport().to_be_bytes(),
        dport: headers.tuple.dport().to_be_bytes(),
        protocol: headers.tuple.protocol,
        is_reply: (headers.l4 == L4::EchoReply) as u8,
        reserved: [0; 2],
        seen_ns: tables.now_ns(),
    };
    tables.put_fragment(&key(headers), &ports);
}

/// IPv6 identifies a datagram by its addresses and identification only: the protocol in a later fragment's header may
/// differ from that of the first one (RFC 8200 section 4.5).
#[inline(always)]
pub fn key(headers: &Headers) -> FragKey {
    let protocol = match headers.family {
        Family::V4 => headers.tuple.protocol,
        Family::V6 => 0,
    };
    FragKey {
        saddr: headers.tuple.saddr,
        daddr: headers.tuple.daddr,
        id: headers.fragment_id,
        protocol,
        reserved: [0; 3],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decide::cast::both;
    use crate::decide::packets::packet;
    use crate::wire::{PROTO_TCP, PROTO_UDP};

    #[test]
    fn a_datagram_is_identified_by_addresses_id_and_protocol() {
        both(|cast, maps| {
            resolve(&mut packet(cast.pod, cast.world, 4000, 80).fragment(0, true).headers(), maps);
            let mut later = packet(cast.pod, cast.world, 0, 0).fragment(100, true).headers();
            resolve(&mut later, maps);
            assert_eq!((later.l4, later.tuple.sport(), later.tuple.dport()), (L4::Udp, 4000, 80));
            assert!(!later.has_l4(), "its checksum is not here");
            for other in [
                packet(cast.known_pod, cast.world, 0, 0).fragment(100, true),
                packet(cast.pod, cast.service, 0, 0).fragment(100, true),
            ] {
                let mut headers = other.headers();
                resolve(&mut headers, maps);
                assert_eq!((headers.l4, headers.tuple.sport()), (L4::Later, 0));
            }
            // The protocol distinguishes IPv4 datagrams; for IPv6 only the first fragment has it.
            let mut tcp = packet(cast.pod, cast.world, 0, 0).protocol(PROTO_TCP).fragment(100, true).headers();
            resolve(&mut tcp, maps);
            let expected = if cast.family == Family::V4 { (L4::Later, PROTO_TCP) } else { (L4::Udp, PROTO_UDP) };
            assert_eq!((tcp.l4, tcp.tuple.protocol), expected);
            let mut another = packet(cast.pod, cast.world, 0, 0).fragment(100, true).headers();
            another.fragment_id = [1, 2, 3, 4];
            resolve(&mut another, maps);
            assert_eq!(another.l4, L4::Later);
        });
    }

    #[test]
    fn remembered_ports_expire() {
        both(|cast, maps| {
            let begun = maps.now.get();
            resolve(&mut packet(cast.pod, cast.world, 4000, 80).fragment(0, true).headers(), maps);
            for (after_ns, known) in [(FRAGMENT_NS, true), (FRAGMENT_NS + 1, false)] {
                maps.now.set(begun + after_ns);
                let mut later = packet(cast.pod, cast.world, 0, 0).fragment(100, false).headers();
                resolve(&mut later, maps);
                assert_eq!(later.l4 == L4::Udp, known, "the identification belongs to another datagram by now");
            }
        });
    }

    #[test]
    fn whole_packets_and_first_fragments_stay_as_they_are() {
        both(|cast, maps| {
            for packet in [packet(cast.pod, cast.world, 1, 2), packet(cast.pod, cast.world, 1, 2).fragment(0, true)] {
                let before = packet.headers();
                let mut headers = before;
                resolve(&mut headers, maps);
                assert_eq!(headers, before);
            }
        });
    }

    #[test]
    fn only_translated_datagrams_are_remembered() {
        both(|cast, maps| {
            let whole = packet(cast.pod, cast.world, 1, 2);
            for first in [whole.clone().cut(4), whole.unreachable()] {
                resolve(&mut first.clone().fragment(0, true).headers(), maps);
                let mut later = first.fragment(50, false).headers();
                resolve(&mut later, maps);
                assert_eq!(later.l4, L4::Later);
            }
        });
    }

    #[test]
    fn a_protocol_without_ports_needs_no_first_fragment() {
        both(|cast, maps| {
            let mut gre = packet(cast.pod, cast.world, 0, 0).protocol(47).fragment(100, false).headers();
            assert_eq!(gre.l4, L4::Other);
            let before = gre;
            resolve(&mut gre, maps);
            assert_eq!(gre, before);
        });
    }
}
