//! The target `parsing`.

use egress_common::abi::{Addr, Direction, Family};
use egress_common::wire::{
    ETH_LEN, Fragment, Frame, Headers, IPV4_LEN, IPV6_LEN, L3, L4, Quote, arp, ethertype, icmp, nd,
};

/// Maximum frame length: later bytes are not read.
const LONGEST: usize = 2048;

/// The first byte selects the EtherType (IPv4, IPv6, ARP or unchanged), the rest is the frame.
pub fn parsing(data: &[u8]) {
    let Some((kind, rest)) = data.split_first() else { return };
    let mut frame = rest[..rest.len().min(LONGEST)].to_vec();
    if let Some(place) = frame.get_mut(ETH_LEN - 2..ETH_LEN) {
        let named = [Some(ethertype::IPV4), Some(ethertype::IPV6), Some(ethertype::ARP), None][usize::from(kind % 4)];
        if let Some(number) = named {
            place.copy_from_slice(&number.to_be_bytes());
        }
    }
    for direction in [Direction::Egress, Direction::Ingress] {
        if let Some(headers) = Headers::parse(frame.as_slice(), direction) {
            assert_eq!(headers.tuple.direction(), direction);
            stand_where_they_were_read(&frame, &headers);
            hold_for_every_cut(&frame, &headers, direction);
            quote_stands_where_it_was_read(&frame, &headers);
        }
    }
    asks_for_addresses(&frame);
}

fn stand_where_they_were_read(frame: &[u8], headers: &Headers) {
    let (least, family) = match u16::from_be_bytes([frame[12], frame[13]]) {
        ethertype::IPV4 => (L3 + IPV4_LEN, Family::V4),
        ethertype::IPV6 => (L3 + IPV6_LEN, Family::V6),
        other => panic!("{other:04x} is not IP"),
    };
    assert_eq!(headers.family, family);
    assert!(usize::from(headers.l4_offset) >= least, "{headers:?}");
    if family == Family::V4 {
        assert_eq!((headers.tuple.saddr.family(), headers.tuple.daddr.family()), (Family::V4, Family::V4));
    }
    assert!(headers.header_len() >= 20, "no underflow: {headers:?}");
    let ports = (headers.tuple.sport(), headers.tuple.dport());
    match headers.l4 {
        L4::Tcp | L4::Udp | L4::EchoRequest | L4::EchoReply => {
            assert_ne!(headers.fragment, Fragment::Later, "a later fragment shows no transport header");
            let head: [u8; 8] = frame.load(usize::from(headers.l4_offset)).expect("read, so there");
            let word = |at: usize| u16::from_be_bytes([head[at], head[at + 1]]);
            let shown = if matches!(headers.l4, L4::Tcp | L4::Udp) { (word(0), word(2)) } else { (word(4), word(4)) };
            assert_eq!(ports, shown, "{headers:?}");
        }
        L4::IcmpError | L4::Other | L4::Short | L4::Later => assert_eq!(ports, (0, 0), "{headers:?}"),
        L4::Sctp | L4::Refused | L4::Unread => {}
    }
}

/// A truncated frame shows fewer fields, and no other values.
fn hold_for_every_cut(frame: &[u8], headers: &Headers, direction: Direction) {
    for length in 0..frame.len().min(160) {
        if let Some(cut) = Headers::parse(&frame[..length], direction)
            && matches!(cut.l4, L4::Tcp | L4::Udp | L4::EchoRequest | L4::EchoReply | L4::IcmpError)
        {
            assert_eq!(cut, *headers, "cut to {length} bytes");
        }
    }
}

fn quote_stands_where_it_was_read(frame: &[u8], headers: &Headers) {
    let mut quote = Quote::NONE;
    if headers.l4 != L4::IcmpError || quote.read(frame, headers).is_none() {
        return;
    }
    let header = if headers.family == Family::V4 { IPV4_LEN } else { IPV6_LEN };
    assert!(quote.network_at() + header <= frame.len(), "{quote:?}");
    assert!(quote.network_at() >= usize::from(headers.l4_offset) + 8, "{quote:?}");
    assert!(quote.transport_at() >= quote.network_at() + header, "{quote:?}");
}

fn asks_for_addresses(frame: &[u8]) {
    if let Some(request) = arp::ArpMessage::parse(frame).filter(arp::ArpMessage::is_request) {
        let mac = [2, 0, 0, 0, 0, 7];
        let answer = request.answer(mac);
        assert_eq!((&answer[..6], &answer[6..12]), (&request.sender_mac[..], &mac[..]));
        assert_eq!((&answer[22..28], &answer[28..32]), (&mac[..], &request.target_ip[..]));
        let read = arp::ArpMessage::parse(answer.as_slice()).expect("ARP");
        assert_eq!((read.is_request(), read.sender()), (false, request.target()), "an answer asks nothing");
    }
    let Some(headers) = Headers::parse(frame, Direction::Ingress) else { return };
    let sender = &headers.tuple.saddr;
    if let Some((icmp::v6::NEIGHBOUR_SOLICITATION, target)) = nd::about(frame)
        && nd::NdMessage::parse(frame).is_some()
    {
        let sender_mac = frame.load(6).expect("a whole message has a frame");
        let solicitation = nd::Solicitation { sender_mac, sender, target };
        let mut answer = [0; nd::ADVERTISEMENT_LEN];
        solicitation.answer([2, 0, 0, 0, 0, 7], &mut answer);
        let back = Headers::parse(answer.as_slice(), Direction::Egress).expect("IPv6");
        assert_eq!(back.tuple.saddr, solicitation.target);
        if headers.tuple.saddr != Addr::UNSPECIFIED {
            assert_eq!(back.tuple.daddr, headers.tuple.saddr);
        }
        assert_eq!(crate::frame::is_summed_right(&answer), Some(true));
        assert!(nd::about(answer.as_slice()).is_some(), "neighbour discovery");
        let believed = nd::NdMessage::parse(answer.as_slice());
        let is_nobodys = target == Addr::UNSPECIFIED;
        assert!(is_nobodys || believed.is_some_and(|answer| answer.overrides()), "what we say can be believed");
    }
}
