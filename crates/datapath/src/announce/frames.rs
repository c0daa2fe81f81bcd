//! Ethernet frames that probe for and announce an address, the recognition of other hosts' claims, and segments that make
//! an idle pod answer. Pure.
//!
//! | | IPv4 (RFC 5227) | IPv6 (RFC 4861, RFC 4862) |
//! |---|---|---|
//! | probe | ARP request, sender address zero | neighbour solicitation from `::` to the solicited-node group |
//! | announce | ARP request, sender and target are the address | unsolicited neighbour advertisement to all nodes, override |

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use bytes::{BufMut, Bytes, BytesMut};
use egress_common::abi::{Addr, Tuple};
use egress_common::wire::{Frame, PROTO_TCP, arp, csum, ipv6, nd};

use egress_core::model::node::Mac;
use egress_core::plan::executor::AddressClaim;

pub const ETHERTYPE_ARP: u16 = 0x0806;
pub const ETHERTYPE_IPV6: u16 = 0x86dd;
pub const ETHERNET_LEN: usize = 14;
pub const IPV6_LEN: usize = 40;
pub const ICMPV6: u8 = 58;
/// A TCP header without options.
const TCP_LEN: u8 = 20;
pub const NEIGHBOUR_SOLICITATION: u8 = 135;
pub const NEIGHBOUR_ADVERTISEMENT: u8 = 136;

const BROADCAST: Mac = [0xff; 6];
const ALL_NODES: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);
const ARP_REQUEST: u16 = 1;
const OPTION_SOURCE_LINK_ADDRESS: u8 = 1;
const OPTION_TARGET_LINK_ADDRESS: u8 = 2;
/// Override flag of an advertisement (RFC 4861 section 4.4).
const OVERRIDE: u32 = 1 << 29;
/// Neighbour discovery is valid with this hop limit only.
const HOP_LIMIT: u8 = 255;

/// The group that solicitations for the address go to (RFC 4291 section 2.7.1).
pub fn solicited_node(address: Ipv6Addr) -> Ipv6Addr {
    let o = address.octets();
    Ipv6Addr::new(0xff02, 0, 0, 0, 0, 1, 0xff00 | u16::from(o[13]), u16::from_be_bytes([o[14], o[15]]))
}

/// The link address of a multicast group (RFC 2464 section 7).
pub fn multicast_mac(group: Ipv6Addr) -> Mac {
    let o = group.octets();
    [0x33, 0x33, o[12], o[13], o[14], o[15]]
}

/// A probe for the address.
pub fn probe(mac: Mac, address: IpAddr) -> Bytes {
    match address {
        IpAddr::V4(address) => arp_request(mac, Ipv4Addr::UNSPECIFIED, address),
        IpAddr::V6(address) => {
            let group = solicited_node(address);
            // No source link address option: the source is unspecified.
            neighbour(mac, Ipv6Addr::UNSPECIFIED, group, NEIGHBOUR_SOLICITATION, 0, address, None)
        }
    }
}

/// Solicits a neighbour's link address from an own address: by unicast to `to` where it is known.
pub fn solicitation(mac: Mac, own: IpAddr, neighbour_address: IpAddr, to: Option<Mac>) -> Bytes {
    match (own, neighbour_address) {
        (IpAddr::V4(own), IpAddr::V4(target)) => {
            let mut frame = BytesMut::from(arp_request(mac, own, target));
            frame[..6].copy_from_slice(&to.unwrap_or(BROADCAST));
            frame.freeze()
        }
        (own, IpAddr::V6(target)) => {
            let own = match own {
                IpAddr::V4(_) => Ipv6Addr::UNSPECIFIED,
                IpAddr::V6(own) => own,
            };
            let group = solicited_node(target);
            neighbour(mac, own, group, NEIGHBOUR_SOLICITATION, 0, target, Some(mac))
        }
        (IpAddr::V6(_), IpAddr::V4(target)) => arp_request(mac, Ipv4Addr::UNSPECIFIED, target),
    }
}

/// An announcement of the address at `mac`.
pub fn announcement(mac: Mac, address: IpAddr) -> Bytes {
    match address {
        IpAddr::V4(address) => arp_request(mac, address, address),
        IpAddr::V6(address) => {
            neighbour(mac, address, ALL_NODES, NEIGHBOUR_ADVERTISEMENT, OVERRIDE, address, Some(mac))
        }
    }
}

/// The claim of another host in this frame, if any: the host answers for the address, uses it, or probes for it.
pub fn claimant(frame: &[u8], ours: Mac) -> Option<AddressClaim> {
    let claimant = match u16::from_be_bytes(frame.load(12)?) {
        ETHERTYPE_ARP => arp_claimant(frame),
        ETHERTYPE_IPV6 => neighbour_claimant(frame),
        _ => None,
    };
    claimant.filter(|claimant| claimant.mac != ours)
}

fn arp_request(mac: Mac, sender: Ipv4Addr, target: Ipv4Addr) -> Bytes {
    let mut frame = BytesMut::with_capacity(42);
    ethernet(&mut frame, BROADCAST, mac, ETHERTYPE_ARP);
    // Ethernet and IPv4, with their address lengths.
    frame.put_u16(1);
    frame.put_u16(0x0800);
    frame.put_u8(6);
    frame.put_u8(4);
    frame.put_u16(ARP_REQUEST);
    frame.put_slice(&mac);
    frame.put_slice(&sender.octets());
    frame.put_bytes(0, 6);
    frame.put_slice(&target.octets());
    frame.freeze()
}

fn neighbour(
    mac: Mac,
    source: Ipv6Addr,
    destination: Ipv6Addr,
    kind: u8,
    flags: u32,
    target: Ipv6Addr,
    link_address: Option<Mac>,
) -> Bytes {
    let mut message = BytesMut::with_capacity(32);
    message.put_u8(kind);
    message.put_u8(0);
    message.put_u16(0);
    message.put_u32(flags);
    message.put_slice(&target.octets());
    if let Some(link_address) = link_address {
        // Length in units of eight bytes.
        let advertises = kind == NEIGHBOUR_ADVERTISEMENT;
        message.put_slice(&[if advertises { OPTION_TARGET_LINK_ADDRESS } else { OPTION_SOURCE_LINK_ADDRESS }, 1]);
        message.put_slice(&link_address);
    }
    let sum = checksum(source, destination, &message);
    message[2..4].copy_from_slice(&sum.to_be_bytes());

    let mut frame = BytesMut::with_capacity(ETHERNET_LEN + IPV6_LEN + message.len());
    ethernet(&mut frame, multicast_mac(destination), mac, ETHERTYPE_IPV6);
    frame.put_u32(6 << 28);
    // At most 32 bytes.
    frame.put_u16(u16::try_from(message.len()).unwrap_or(u16::MAX));
    frame.put_u8(ICMPV6);
    frame.put_u8(HOP_LIMIT);
    frame.put_slice(&source.octets());
    frame.put_slice(&destination.octets());
    frame.put_slice(&message);
    frame.freeze()
}

/// A bare ACK to the pod from its peer. With a number outside its window the pod answers with an ACK (RFC 9293 section
/// 3.10.7.4) and does nothing else.
pub fn segment(to: Mac, from: Mac, connection: &Tuple, sequence: u32) -> Bytes {
    let mut tcp = BytesMut::with_capacity(usize::from(TCP_LEN));
    tcp.put_u16(connection.dport());
    tcp.put_u16(connection.sport());
    tcp.put_u32(sequence);
    // Ignored while the sequence number is outside the pod's window.
    tcp.put_u32(0);
    tcp.put_slice(&[0x50, 0x10, 0, 0, 0, 0, 0, 0]);
    let (source, destination) = (connection.daddr.to_ip(), connection.saddr.to_ip());
    let mut covered = Vec::with_capacity(IPV6_LEN + usize::from(TCP_LEN));
    for address in [source, destination] {
        match address {
            IpAddr::V4(address) => covered.extend(address.octets()),
            IpAddr::V6(address) => covered.extend(address.octets()),
        }
    }
    covered.extend([0, PROTO_TCP, 0, TCP_LEN]);
    covered.extend(&tcp);
    let sum = !csum::fold64(csum::sum(&covered));
    tcp[16..18].copy_from_slice(&sum.to_ne_bytes());

    let mut frame = BytesMut::with_capacity(ETHERNET_LEN + IPV6_LEN + usize::from(TCP_LEN));
    match (source, destination) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            ethernet(&mut frame, to, from, 0x0800);
            let mut header = [0; 20];
            header[..12].copy_from_slice(&[0x45, 0, 0, 20 + TCP_LEN, 0, 0, 0x40, 0, 64, PROTO_TCP, 0, 0]);
            header[12..16].copy_from_slice(&source.octets());
            header[16..].copy_from_slice(&destination.octets());
            let sum = csum::header(&header);
            header[10..12].copy_from_slice(&sum.to_ne_bytes());
            frame.put_slice(&header);
        }
        _ => {
            ethernet(&mut frame, to, from, ETHERTYPE_IPV6);
            frame.put_slice(&[0x60, 0, 0, 0, 0, TCP_LEN, PROTO_TCP, 64]);
            frame.put_slice(&connection.daddr.octets());
            frame.put_slice(&connection.saddr.octets());
        }
    }
    frame.put_slice(&tcp);
    frame.freeze()
}

fn ethernet(frame: &mut BytesMut, destination: Mac, source: Mac, ethertype: u16) {
    frame.put_slice(&destination);
    frame.put_slice(&source);
    frame.put_u16(ethertype);
}

/// Checksum of an ICMPv6 message of even length whose checksum field is zero (RFC 4443 section 2.3).
fn checksum(source: Ipv6Addr, destination: Ipv6Addr, message: &[u8]) -> u16 {
    let words = |bytes: &[u8]| -> u64 {
        bytes.chunks_exact(2).map(|pair| u64::from(u16::from_be_bytes([pair[0], pair[1]]))).sum()
    };
    let pseudo = words(&source.octets()) + words(&destination.octets()) + message.len() as u64 + u64::from(ICMPV6);
    let mut sum = pseudo + words(message);
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !u16::try_from(sum).unwrap_or(u16::MAX)
}

/// RFC 5227 section 2.1.1: any packet whose sender is the address, or another host's probe for it.
fn arp_claimant(frame: &[u8]) -> Option<AddressClaim> {
    let message = arp::ArpMessage::parse(frame)?;
    let (sender, target) = (Ipv4Addr::from(message.sender_ip), Ipv4Addr::from(message.target_ip));
    let address = if sender.is_unspecified() && message.is_request() { target } else { sender };
    Some(AddressClaim { address: address.into(), mac: message.sender_mac })
}

/// RFC 4862 section 5.4: an advertisement of the address, or another host's duplicate address detection, if it is valid by
/// RFC 4861.
fn neighbour_claimant(frame: &[u8]) -> Option<AddressClaim> {
    let (kind, target) = nd::about(frame)?;
    let message = nd::NdMessage::parse(frame)?;
    let sender = frame.load_addr(ETHERNET_LEN + ipv6::SADDR)?;
    let claims = kind == NEIGHBOUR_ADVERTISEMENT || sender == Addr::UNSPECIFIED;
    let mac = message.link(frame)?;
    claims.then(|| AddressClaim { address: target.to_ip(), mac })
}

#[cfg(test)]
fn bytes_at<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..at.checked_add(N)?)?.try_into().ok()
}

#[cfg(test)]
mod tests {
    use egress_common::abi::Direction;
    use egress_common::wire::Headers;

    use super::*;

    const OURS: Mac = [2, 0, 0, 0, 0, 1];
    const THEIRS: Mac = [2, 0, 0, 0, 0, 2];

    fn v4() -> IpAddr {
        "172.18.0.100".parse().expect("a literal")
    }

    fn v6() -> IpAddr {
        "fd00:172:18::1:100".parse().expect("a literal")
    }

    #[test]
    fn solicited_node_groups_have_their_link_address() {
        let group = solicited_node("fd00::1:2:0304".parse().expect("a literal"));
        assert_eq!(group, "ff02::1:ff02:304".parse::<Ipv6Addr>().expect("a literal"));
        assert_eq!(multicast_mac(group), [0x33, 0x33, 0xff, 0x02, 0x03, 0x04]);
    }

    #[test]
    fn arp_frames_are_as_rfc_5227_says() {
        let probe = probe(OURS, v4());
        assert_eq!(probe.len(), 42);
        assert_eq!(probe[..6], BROADCAST);
        assert_eq!(probe[28..32], [0; 4], "a probe names no sender");
        assert_eq!(probe[38..], [172, 18, 0, 100]);
        let announcement = announcement(OURS, v4());
        assert_eq!(announcement[28..32], [172, 18, 0, 100]);
        assert_eq!(announcement[38..], [172, 18, 0, 100]);
    }

    #[test]
    fn a_neighbour_that_is_known_is_asked_by_a_unicast() {
        let own: IpAddr = "172.18.0.2".parse().expect("a literal");
        let [known, unknown] = [Some(THEIRS), None].map(|to| solicitation(OURS, own, v4(), to));
        assert_eq!((&known[..6], &unknown[..6]), (&THEIRS[..], &BROADCAST[..]));
        assert_eq!((&known[6..], &known[28..32]), (&unknown[6..], &[172, 18, 0, 2][..]), "it names who asks");
    }

    #[test]
    fn neighbour_messages_sum_to_zero() {
        let own: IpAddr = "fd00:172:18::2".parse().expect("a literal");
        for frame in [probe(OURS, v6()), announcement(OURS, v6()), solicitation(OURS, own, v6(), None)] {
            let source = Ipv6Addr::from(bytes_at::<16>(&frame, 22).expect("long enough"));
            let destination = Ipv6Addr::from(bytes_at::<16>(&frame, 38).expect("long enough"));
            assert_eq!(checksum(source, destination, &frame[54..]), 0);
            assert_eq!(frame[21], HOP_LIMIT);
            assert_eq!(usize::from(u16::from_be_bytes([frame[18], frame[19]])), frame.len() - 54);
        }
    }

    #[test]
    fn a_segment_is_a_bare_ack_back_to_the_pod() {
        for (pod, world, network) in [("10.244.1.10", "198.51.100.10", 20), ("fd00:10:244:1::10", "2001:db8::10", 40)] {
            let (pod, world): (IpAddr, IpAddr) = (pod.parse().expect("a literal"), world.parse().expect("a literal"));
            let connection = Tuple::new(Direction::Egress, pod.into(), world.into(), 4000, 80, PROTO_TCP);
            let frame = segment(THEIRS, OURS, &connection, 0x0102_0304);
            let heads = Headers::parse(&frame[..], Direction::Ingress).expect("an IP frame");
            assert_eq!((heads.tuple, heads.tcp_flags), (connection.reversed(), 0x10));
            assert_eq!((&frame[..6], &frame[6..12]), (&THEIRS[..], &OURS[..]));
            assert_eq!(frame.len(), ETHERNET_LEN + network + usize::from(TCP_LEN));
            assert_eq!(frame[ETHERNET_LEN + network + 4..][..4], [1, 2, 3, 4]);
            let addresses = &frame[ETHERNET_LEN + network - if pod.is_ipv4() { 8 } else { 32 }..];
            let pseudo = csum::sum(&[0, PROTO_TCP, 0, 20]);
            assert_eq!(csum::fold64(csum::sum(addresses) + pseudo), 0xffff, "the checksum");
            if pod.is_ipv4() {
                assert_eq!(csum::fold64(csum::sum(&frame[ETHERNET_LEN..][..20])), 0xffff, "the header's");
            }
        }
    }

    #[test]
    fn announcements_answers_and_probes_of_other_hosts_are_claims() {
        for address in [v4(), v6()] {
            for frame in [probe(THEIRS, address), announcement(THEIRS, address)] {
                assert_eq!(claimant(&frame, OURS), Some(AddressClaim { address, mac: THEIRS }));
                assert_eq!(claimant(&frame, THEIRS), None, "our own frame");
                for cut in 0..frame.len().min(60) {
                    // A truncated frame must not panic.
                    let _ = claimant(&frame[..cut], OURS);
                }
            }
        }
    }

    /// RFC 4861 sections 7.1.1 and 7.1.2: messages that the program on the uplink refuses are refused here too.
    #[test]
    fn malformed_neighbour_discovery_claims_nothing() {
        let IpAddr::V6(address) = v6() else { panic!("an IPv6 address") };
        let group = solicited_node(address);
        let message = |source: &str, to: Ipv6Addr, kind, flags, link| {
            let source = source.parse().expect("a literal");
            neighbour(THEIRS, source, to, kind, flags, address, link).to_vec()
        };
        let detects = |link| message("::", group, NEIGHBOUR_SOLICITATION, 0, link);
        let advertises = |source: &str, flags| message(source, ALL_NODES, NEIGHBOUR_ADVERTISEMENT, flags, Some(THEIRS));
        // The checksum is corrected after each change.
        let changed = |frame: &[u8], at: usize, byte: u8| {
            let mut frame = frame.to_vec();
            frame[at] = byte;
            frame[56..58].copy_from_slice(&[0, 0]);
            let address_at = |at| Ipv6Addr::from(bytes_at::<16>(&frame, at).expect("long enough"));
            let sum = checksum(address_at(22), address_at(38), &frame[54..]);
            frame[56..58].copy_from_slice(&sum.to_be_bytes());
            frame
        };
        let solicited = 1 << 30 | OVERRIDE;
        let whole = advertises("fe80::2", OVERRIDE);
        for frame in [&detects(None), &whole, &changed(&whole, 58, 0)] {
            assert_eq!(claimant(frame, OURS), Some(AddressClaim { address: v6(), mac: THEIRS }));
        }
        let mut summed_wrongly = whole.clone();
        summed_wrongly[57] ^= 1;
        for (what, frame) in [
            ("DAD with a link address", detects(Some(THEIRS))),
            ("DAD to all nodes", message("::", ALL_NODES, NEIGHBOUR_SOLICITATION, 0, None)),
            ("a multicast sender", advertises("ff02::7", OVERRIDE)),
            ("solicited, and to all", advertises("fe80::2", solicited)),
            ("checksum", summed_wrongly),
            ("hop limit", changed(&whole, 21, 254)),
            ("code", changed(&whole, 55, 1)),
            ("an option without a length", changed(&whole, 79, 0)),
            ("an option that ends behind the message", changed(&whole, 79, 2)),
        ] {
            assert_eq!(claimant(&frame, OURS), None, "{what}");
        }
    }

    /// An ordinary request *for* an address claims only the sender's own.
    #[test]
    fn a_request_claims_its_sender_address() {
        let (asker, asked) = (Ipv4Addr::new(172, 18, 0, 101), Ipv4Addr::new(172, 18, 0, 100));
        let claim = AddressClaim { address: asker.into(), mac: THEIRS };
        assert_eq!(claimant(&arp_request(THEIRS, asker, asked), OURS), Some(claim));
        let question = solicitation(THEIRS, "fd00:172:18::1:101".parse().expect("a literal"), v6(), None);
        assert_eq!(claimant(&question, OURS), None);
    }
}
