//! The target `nat`: pods of two nodes exchange packets with a few hosts through two egress IPs, while entries expire
//! and addresses change. [`crate::node`] asserts the invariants; this file asserts that outbound packets are answered.

use egress_common::abi::{
    Addr, Direction, Family, HandoverEntry, HandoverStage, PodEntry, PolicyEntry, PolicySlot, Verdict, WhenEmpty,
};
use egress_common::decide::from_overlay::Outer;
use egress_common::decide::to_netdev::Meta;
use egress_common::wire::{Headers, PROTO_ICMP, PROTO_ICMPV6, PROTO_TCP, PROTO_UDP, tcp};

use crate::addresses::{self, FAMILIES, policy_key};
use crate::frame::{self, FuzzPacket};
use crate::input::Input;
use crate::node::{MARKS, ModelNode, PacketOutcome};

const STEPS: usize = 96;
const SECOND_NS: u64 = 1_000_000_000;

pub fn nat(data: &[u8]) {
    let mut story = NatStory { input: Input::new(data), node: addresses::node_of_stories(), sent: Vec::new() };
    story.begin();
    for _ in 0..STEPS {
        if story.input.is_empty() {
            return;
        }
        story.step();
    }
}

struct NatStory<'a> {
    input: Input<'a>,
    node: ModelNode,
    /// An outbound packet with an egress IP or node address.
    sent: Vec<Vec<u8>>,
}

/// By family and index of the egress IP: two policies per family.
const fn id(family: Family, index: u8) -> u32 {
    match family {
        Family::V4 => 1 + index as u32,
        Family::V6 => 3 + index as u32,
    }
}

impl NatStory<'_> {
    fn begin(&mut self) {
        for family in FAMILIES {
            self.give(family, false);
            for pod in 0..4 {
                let entry = PodEntry::selected(id(family, pod % 2), 0);
                self.node.maps.pods.borrow_mut().insert(addresses::pod(family, pod), entry);
            }
        }
    }

    /// Assigns the two addresses of the family to its policies, in either order.
    fn give(&mut self, family: Family, crosswise: bool) {
        let maps = &self.node.maps;
        for index in 0..2 {
            maps.disown(id(family, index));
            maps.handovers.borrow_mut().remove(&id(family, index));
        }
        for index in 0..2 {
            let address = addresses::egress(family, index ^ u8::from(crosswise));
            addresses::own(maps, id(family, index), address);
            if let Some(policy) = PolicyEntry::with_slots(WhenEmpty::Drop, &[PolicySlot::here(address)]) {
                maps.put_policy(policy_key(id(family, index), family), policy);
            }
        }
        self.node.renew_decision_number();
    }

    /// A hand-over of one address to or from the other node, in any state of the agent.
    fn hand_over(&mut self) {
        let (family, index) = (self.input.pick(&FAMILIES), u8::from(self.input.flag()));
        let (id, maps) = (id(family, index), &self.node.maps);
        let Some(policy) = maps.policies.borrow().get(&policy_key(id, family)).copied() else { return };
        addresses::own(maps, id, policy.slots[0].address);
        let owned = maps.owned.borrow()[&id];
        let stage = self.input.pick(&[HandoverStage::Leaving, HandoverStage::Arriving, HandoverStage::Open]);
        let handover = HandoverEntry::new(id, stage, maps.now.get(), addresses::OTHER, owned);
        maps.handovers.borrow_mut().insert(id, handover);
        if !self.input.flag() {
            maps.owned.borrow_mut().remove(&id);
        }
        self.node.renew_decision_number();
    }

    fn step(&mut self) {
        match self.input.below(16) {
            0..=4 => self.pod_sends(),
            5 | 6 => self.remote_pod_sends(),
            7 | 8 => self.pod_calls_a_node(),
            9 => self.world_answers(),
            10 => self.router_complains(),
            11 => {
                let later = self.input.pick(&[1, 15, 70, 250, 400, 8000]) * SECOND_NS;
                self.node.maps.now.set(self.node.maps.now.get() + later);
            }
            12 => drop(self.node.maps.sweep(self.input.flag())),
            13 if self.input.flag() => self.hand_over(),
            13 => {
                let (family, crosswise) = (self.input.pick(&FAMILIES), self.input.flag());
                self.give(family, crosswise);
            }
            14 => self.node.maps.nat.limit(self.input.pick(&[4096, 3, 6])),
            _ => self.stranger_sends(),
        }
        self.node.maps.assert_paired();
    }

    /// From and to a few ports, so that flows conflict.
    fn packet(&mut self, family: Family, saddr: Addr, daddr: Addr) -> FuzzPacket {
        let (icmp, echo) = if family == Family::V4 { (PROTO_ICMP, 8) } else { (PROTO_ICMPV6, 128) };
        let protocol = self.input.pick(&[PROTO_UDP, PROTO_TCP, icmp]);
        let flags = self.input.pick(&[tcp::SYN, tcp::ACK, tcp::FIN | tcp::ACK, tcp::RST]);
        FuzzPacket {
            saddr,
            daddr,
            protocol,
            sport: self.input.pick(&[4000, 4001, 80, 61_001]),
            dport: self.input.pick(&[80, 443]),
            kind: if protocol == icmp { echo } else { flags },
            ttl: 64,
            fragment: (0, false, 0),
            data: self.input.below(40),
            unsummed: self.input.below(8) == 0 && protocol == PROTO_UDP,
        }
    }

    fn who(&mut self, family: Family) -> (u8, Addr) {
        let (pod, peer) = (self.input.byte() % 4, self.input.byte() % 2);
        (pod, addresses::world(family, peer))
    }

    fn pod_sends(&mut self) {
        let family = self.input.pick(&FAMILIES);
        let (pod, peer) = self.who(family);
        let packet = self.packet(family, addresses::pod(family, pod), peer);
        let outcome = self.node.from_pod(&packet.frame());
        self.went(&packet, outcome, Verdict::ReplyHere);
    }

    fn remote_pod_sends(&mut self) {
        let family = self.input.pick(&FAMILIES);
        let (pod, peer) = self.who(family);
        let packet = self.packet(family, addresses::remote_pod(family, pod), peer);
        let outer = Outer { source: addresses::OTHER, egress_id: id(family, pod % 2) };
        let outcome = self.node.from_overlay(&outer, &packet.frame());
        self.went(&packet, outcome, Verdict::ReplyToNode);
    }

    /// By mark 1008, through the few ports of the node's own address.
    fn pod_calls_a_node(&mut self) {
        let family = self.input.pick(&FAMILIES);
        let (pod, _) = self.who(family);
        let packet = self.packet(family, addresses::pod(family, pod), addresses::other_node(family));
        let meta = Meta { mark: MARKS[1], ifindex: addresses::UPLINK, forwarded: true, returning: false };
        if let PacketOutcome::Passed(Verdict::NodeSnat, out, _) = self.node.to_netdev(&packet.frame(), &meta) {
            self.went(&packet, PacketOutcome::Sent(Verdict::NodeSnat, out), Verdict::NodeReply);
        }
    }

    /// Records an outbound packet and answers it at once: the answer must reach the pod, byte for byte as expected.
    fn went(&mut self, packet: &FuzzPacket, outcome: PacketOutcome, by: Verdict) {
        let out = match outcome {
            // The other node answers it.
            PacketOutcome::Sent(Verdict::HandedOver, _) => return,
            PacketOutcome::Sent(_, out) => out,
            PacketOutcome::Dropped(_) => return,
            // Another flow has its port by now, and the pod gets a reset.
            PacketOutcome::Answered(Verdict::CutAnswered, answer) => {
                let answer = Headers::parse(answer.as_slice(), Direction::Ingress).expect("it is IP");
                assert_eq!((answer.tuple.saddr, answer.tuple.daddr), (packet.daddr, packet.saddr));
                assert_eq!(answer.tcp_flags & tcp::RST, tcp::RST, "{packet:?}");
                return;
            }
            other => panic!("left to others: {other:?}: {packet:?}"),
        };
        let answer = answer_to(&out);
        let expected = FuzzPacket { saddr: packet.daddr, daddr: packet.saddr, ..*packet };
        let headers = Headers::parse(out.as_slice(), Direction::Egress).expect("it is IP");
        match self.node.from_netdev(&answer) {
            PacketOutcome::Sent(verdict, back) | PacketOutcome::Passed(verdict, back, _) if verdict == by => {
                let back = Headers::parse(back.as_slice(), Direction::Ingress).expect("it is IP");
                assert_eq!((back.tuple.saddr, back.tuple.daddr), (expected.saddr, expected.daddr));
                assert_eq!(back.tuple.dport(), packet.sport, "{packet:?}");
            }
            other => panic!("{packet:?} went as {headers:?}, and its answer: {other:?}"),
        }
        if self.sent.len() < 32 {
            self.sent.push(out);
        }
    }

    fn old(&mut self) -> Option<Vec<u8>> {
        if self.sent.is_empty() {
            return None;
        }
        let index = self.input.below(self.sent.len());
        self.sent.get(index).cloned()
    }

    /// A late answer, perhaps to an expired flow; also passed on by the other node, with or without a hand-over.
    fn world_answers(&mut self) {
        let Some(sent) = self.old() else { return };
        let answer = answer_to(&sent);
        match self.input.below(4) {
            0 => {
                let outer = Outer { source: addresses::OTHER, egress_id: 1 + u32::from(self.input.byte() % 4) };
                self.node.from_overlay(&outer, &answer);
            }
            _ => drop(self.node.from_netdev(&answer)),
        }
    }

    fn router_complains(&mut self) {
        let Some(sent) = self.old() else { return };
        let headers = Headers::parse(sent.as_slice(), Direction::Egress).expect("it is IP");
        let quoted = self.input.pick(&[1500, 28, 48, 20]);
        let router = addresses::world(headers.family, 7);
        let to = self.input.pick(&[
            headers.tuple.saddr,
            addresses::egress(headers.family, 0),
            addresses::egress(headers.family, 1),
        ]);
        let kind = self.input.pick(&frame::error_kinds(headers.family));
        let error = frame::error_about(&sent, router, to, kind, quoted);
        assert_eq!(frame::is_summed_right(&error), Some(true));
        self.node.from_netdev(&error);
    }

    /// An unsolicited packet for an egress IP.
    fn stranger_sends(&mut self) {
        let family = self.input.pick(&FAMILIES);
        let (to, peer) = self.who(family);
        let packet = self.packet(family, peer, addresses::egress(family, to % 2));
        self.node.from_netdev(&packet.frame());
    }
}

/// The answer of a packet's peer.
fn answer_to(sent: &[u8]) -> Vec<u8> {
    let headers = Headers::parse(sent, Direction::Egress).expect("it is IP");
    let (tuple, family) = (headers.tuple, headers.family);
    let kind = match (tuple.protocol, family) {
        (PROTO_TCP, _) => tcp::ACK,
        (_, Family::V4) => 0,
        (_, Family::V6) => 129,
    };
    FuzzPacket {
        saddr: tuple.daddr,
        daddr: tuple.saddr,
        protocol: tuple.protocol,
        // An echo message has its identifier in both fields.
        sport: tuple.dport(),
        dport: tuple.sport(),
        kind,
        ttl: 60,
        fragment: (0, false, 0),
        data: 9,
        unsummed: false,
    }
    .frame()
}
