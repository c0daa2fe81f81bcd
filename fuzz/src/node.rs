//! A node: the decisions joined as the programs join them (egress-ebpf/src/roads.rs), and what must hold after each packet.

use std::collections::HashMap;

use egress_common::abi::{
    Addr, Class, Config, Direction, Family, NODE_MARK, OnUnknownPod, Origin, PolicyKey, PortRange, PrefixKind,
    SlotPlace, Tuple, Verdict,
};
use egress_common::decide::accept::{self, Accept, Outer};
use egress_common::decide::enter::{self, Enter};
use egress_common::decide::leave::{self, Leave, Meta};
use egress_common::decide::snat::{self, Face};
use egress_common::decide::steer::{self, Steer};
use egress_common::decide::{Owner, Rewrite, Tables, notice};
use egress_common::wire::{Heads, L4, Quote};

use crate::frame;
use crate::places;
use crate::world::World;

/// Few, so that stories run out of them.
const NODE_PORTS: PortRange = PortRange { first: 61_000, last: 61_003 };

/// What became of a packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Goes on to the stack, perhaps rewritten.
    Passed(Verdict, Vec<u8>),
    /// Leaves by another device.
    Sent(Verdict, Vec<u8>),
    Dropped(Verdict),
}

impl Outcome {
    fn done(verdict: Verdict, frame: &[u8]) -> Self {
        match verdict.class() {
            Class::Pass => Self::Passed(verdict, frame.to_vec()),
            Class::Drop => Self::Dropped(verdict),
            Class::Redirect | Class::Answer => panic!("{verdict:?} is no end of a decision"),
        }
    }
}

pub struct Node {
    pub world: World,
    pub config: Config,
    /// Whom the answer to a reverse key is for, as packets went out.
    asked: HashMap<Tuple, Tuple>,
}

impl Node {
    #[must_use]
    pub fn new() -> Self {
        let mut config = Config::EMPTY;
        config.generation = 1;
        config.tunnel_port = 4794;
        config.self_node = places::SELF;
        (config.node_v4, config.node_v6) = (places::node(Family::V4), places::node(Family::V6));
        config.node_ports = NODE_PORTS;
        let world = World::new();
        config.decisions = world.decisions;
        Self { world, config, asked: HashMap::new() }
    }

    /// As the agent does after every change of what `steer` asks.
    pub fn decide_anew(&mut self) {
        self.world.decisions += 1;
        self.config.decisions = self.world.decisions;
    }

    fn heads(frame: &[u8], direction: Direction) -> Option<Heads> {
        Heads::parse(frame, direction)
    }

    /// Management port, ingress.
    pub fn steer(&mut self, frame: &[u8]) -> Outcome {
        self.world.next_packet();
        let Some(mut heads) = Self::heads(frame, Direction::Egress) else {
            return Outcome::done(Verdict::NotIp, frame);
        };
        let quote = quoted(frame, &heads);
        let outcome = match steer::steer(&mut heads, &quote, &self.world, &self.config) {
            Steer::Done(verdict) => Outcome::done(verdict, frame),
            Steer::Hairpin => Outcome::Dropped(Verdict::Hairpin),
            Steer::Mark => Outcome::Passed(Verdict::MarkedNode, frame.to_vec()),
            Steer::Send { egress_id, slot } => {
                let pod = self.world.pods.get(&heads.tuple.saddr).and_then(|pod| pod.egress_id());
                assert_eq!(pod, Some(egress_id), "sent for an object that does not select the pod");
                assert_eq!(slot.address.family(), heads.family);
                let policy = self.world.policies.get(&PolicyKey::new(egress_id, heads.family)).expect("asked");
                assert!(policy.slots.iter().take(policy.count() as usize).any(|now| now == slot), "a slot of old");
                match slot.place() {
                    SlotPlace::Here => {
                        let owner = Owner { origin: Origin::Here, source_node: Addr::UNSPECIFIED, egress_id };
                        match self.world.owned.get(&egress_id).filter(|owned| owned.address == slot.address) {
                            Some(owned) => {
                                let face = Face { address: owned.address, ports: snat::EGRESS_PORTS };
                                self.translate(&heads, &quote, frame, face, &owner, Verdict::SnatHere)
                            }
                            None => Outcome::Dropped(Verdict::NotGateway),
                        }
                    }
                    SlotPlace::Remote => Outcome::Sent(Verdict::Steered, frame.to_vec()),
                }
            }
        };
        self.settle();
        self.judge_stack(&heads, &outcome);
        outcome
    }

    /// Overlay, ingress.
    pub fn accept(&mut self, outer: &Outer, frame: &[u8]) -> Outcome {
        self.world.next_packet();
        let Some(mut heads) = Self::heads(frame, Direction::Egress) else {
            return Outcome::Dropped(Verdict::Malformed);
        };
        let quote = quoted(frame, &heads);
        let outcome = match accept::accept(&mut heads, outer, &self.world, &self.config) {
            Accept::Done(verdict) => Outcome::done(verdict, frame),
            Accept::Deliver => Outcome::Sent(Verdict::ReplyDelivered, frame.to_vec()),
            Accept::Translate { owned, source_node } => {
                assert_eq!(*source_node, outer.source, "answers go back to who sent it");
                let inner = self.world.prefix(&heads.tuple.saddr).map(|prefix| (prefix.kind(), prefix.node));
                assert_eq!(inner, Some((Some(PrefixKind::PodSubnet), outer.source)), "a pod of the sender");
                let owner = Owner { origin: Origin::Remote, source_node: *source_node, egress_id: outer.egress_id };
                let face = Face { address: owned.address, ports: snat::EGRESS_PORTS };
                self.translate(&heads, &quote, frame, face, &owner, Verdict::SnatForNode)
            }
        };
        assert!(!matches!(outcome, Outcome::Passed(..)), "nothing from the overlay meets the stack: {outcome:?}");
        self.settle();
        outcome
    }

    /// Uplink, ingress.
    pub fn enter(&mut self, frame: &[u8]) -> Outcome {
        self.world.next_packet();
        let Some(mut heads) = Self::heads(frame, Direction::Ingress) else {
            return Outcome::done(Verdict::NotIp, frame);
        };
        let quote = quoted(frame, &heads);
        let is_for_egress_ip = self.world.owned_addr.contains_key(&heads.tuple.daddr);
        let (verdict, mapping) = match enter::enter(&mut heads, &quote, &self.world, &self.config) {
            Enter::Done(verdict) => {
                assert!(
                    !is_for_egress_ip || verdict.class() == Class::Drop || verdict == Verdict::TtlExpired,
                    "unasked, and left to the host: {verdict:?} {heads:?}"
                );
                return Outcome::done(verdict, frame);
            }
            Enter::ReplyHere { mapping } => (Verdict::ReplyHere, *mapping),
            Enter::ReplyRemote { mapping } => (Verdict::ReplySteered, *mapping),
            Enter::NodeReply { mapping } => (Verdict::NodeReply, *mapping),
        };
        let reverse = if heads.l4 == L4::IcmpError { *quote.flow() } else { heads.tuple };
        assert_eq!(self.asked.get(&reverse), Some(&mapping.other), "an answer for somebody else: {reverse:?}");
        let asked_by = if heads.l4 == L4::IcmpError { quote.tuple().saddr } else { heads.tuple.daddr };
        assert_eq!(asked_by, heads.tuple.daddr, "an error about another address");
        let before = frame::is_summed_right(frame);
        let mut out = frame.to_vec();
        // What an error quotes is rewritten with it, which is not modelled.
        if heads.l4 == L4::IcmpError {
            self.settle();
            return Outcome::Sent(verdict, out);
        }
        if frame::rewrite(&mut out, &heads, &Rewrite::reverse(&mapping)).is_none() {
            return Outcome::Dropped(Verdict::RewriteFailed);
        }
        let after = Self::heads(&out, Direction::Ingress).expect("still IP");
        assert_eq!(after.tuple.daddr, mapping.other.saddr, "for the pod");
        if before == Some(true) {
            assert_eq!(frame::is_summed_right(&out), Some(true), "{frame:02x?} became {out:02x?}");
        }
        self.settle();
        match verdict.class() {
            Class::Pass => Outcome::Passed(verdict, out),
            _ => Outcome::Sent(verdict, out),
        }
    }

    /// Uplink, egress.
    pub fn leave(&mut self, frame: &[u8], meta: &Meta) -> Outcome {
        self.world.next_packet();
        let Some(mut heads) = Self::heads(frame, Direction::Egress) else {
            return Outcome::done(Verdict::NotIp, frame);
        };
        let quote = quoted(frame, &heads);
        let outcome = match leave::leave(&mut heads, &quote, meta, &self.world, &self.config) {
            Leave::Done(verdict) => Outcome::done(verdict, frame),
            Leave::Unmark => Outcome::Passed(Verdict::NodeSnatDone, frame.to_vec()),
            Leave::NodeSnat => self.node_snat(&heads, &quote, frame),
        };
        self.settle();
        self.judge_wire(&heads, meta, &outcome);
        outcome
    }

    fn node_snat(&mut self, heads: &Heads, quote: &Quote, frame: &[u8]) -> Outcome {
        let mapping = match leave::translate(heads, quote, &self.world, &self.config) {
            Ok(mapping) => *mapping,
            Err(verdict) => return Outcome::Dropped(verdict),
        };
        let node = enter::node_address(&self.config, heads.family);
        match self.out(heads, frame, node, NODE_PORTS, &mapping.other) {
            Some(out) => Outcome::Passed(Verdict::NodeSnat, out),
            None => Outcome::Dropped(Verdict::RewriteFailed),
        }
    }

    /// Management port, egress: only remembers.
    pub fn notice(&mut self, frame: &[u8]) -> Outcome {
        self.world.next_packet();
        let Some(heads) = Self::heads(frame, Direction::Ingress) else {
            return Outcome::done(Verdict::NotIp, frame);
        };
        let verdict = notice::notice(&heads, &self.world, &self.config);
        assert_eq!(verdict.class(), Class::Pass, "it guards nothing");
        Outcome::done(verdict, frame)
    }

    fn translate(
        &mut self,
        heads: &Heads,
        quote: &Quote,
        frame: &[u8],
        face: Face,
        owner: &Owner,
        sent: Verdict,
    ) -> Outcome {
        let mapping = match snat::translate(heads, quote, &self.world, &face, owner) {
            Ok(mapping) => *mapping,
            Err(verdict) => {
                assert_eq!(verdict.class(), Class::Drop, "no mapping, so no packet");
                return Outcome::Dropped(verdict);
            }
        };
        assert_eq!((mapping.egress_id, mapping.origin()), (owner.egress_id, Some(owner.origin)), "{mapping:?}");
        match self.out(heads, frame, face.address, face.ports, &mapping.other) {
            Some(out) => Outcome::Sent(sent, out),
            None => Outcome::Dropped(Verdict::RewriteFailed),
        }
    }

    /// Rewrites what leaves with the face, and sees that nobody else has the same.
    fn out(&mut self, heads: &Heads, frame: &[u8], shown: Addr, ports: PortRange, reverse: &Tuple) -> Option<Vec<u8>> {
        assert_eq!(reverse.daddr, shown, "another source than the object's");
        assert!((ports.first..=ports.last).contains(&reverse.dport()), "not one of the ports: {reverse:?}");
        if let Some(old) = self.asked.insert(*reverse, heads.tuple).filter(|old| *old != heads.tuple) {
            let nat = self.world.nat.borrow();
            let holds = nat.get(&old).is_some_and(|mapping| mapping.other == *reverse);
            assert!(!holds, "two flows show the same: {old:?} and {:?}", heads.tuple);
        }
        let before = frame::is_summed_right(frame);
        let (mut out, rewrite) =
            (frame.to_vec(), Rewrite { end: egress_common::decide::End::Source, addr: shown, port: reverse.dport() });
        frame::rewrite(&mut out, heads, &rewrite)?;
        let after = Self::heads(&out, Direction::Egress).expect("still IP");
        assert_eq!((after.tuple.saddr, after.tuple.daddr), (shown, heads.tuple.daddr));
        if before == Some(true) {
            assert_eq!(frame::is_summed_right(&out), Some(true), "{frame:02x?} became {out:02x?}");
        }
        Some(out)
    }

    /// After every packet.
    fn settle(&self) {
        self.world.assert_paired();
    }

    /// Outside of everything that the cluster knows.
    fn is_world(&self, addr: &Addr) -> bool {
        self.world.prefix(addr).is_none() && self.world.node(addr).is_none()
    }

    /// A selected pod's packet to the world is left to the stack by these rules only.
    fn judge_stack(&self, heads: &Heads, outcome: &Outcome) {
        let Outcome::Passed(verdict, _) = outcome else { return };
        let selected = self.world.pods.get(&heads.tuple.saddr).is_some_and(|pod| pod.egress_id().is_some());
        if selected && self.is_world(&heads.tuple.daddr) {
            let allowed = [
                Verdict::InboundReply,
                Verdict::NodeAddress,
                Verdict::FamilyNotListed,
                // The stack does not forward it.
                Verdict::TtlExpired,
            ];
            let unknown_pass = *verdict == Verdict::NodeSnatDone && self.config.on_unknown_pod() == OnUnknownPod::Pass;
            assert!(unknown_pass || allowed.contains(verdict), "{verdict:?}: {heads:?}");
        }
    }

    /// What goes to the world from a pod's address does so by these rules only.
    fn judge_wire(&self, heads: &Heads, meta: &Meta, outcome: &Outcome) {
        let Outcome::Passed(verdict, out) = outcome else { return };
        let source = Self::heads(out, Direction::Egress).expect("still IP").tuple.saddr;
        let of_pods = [Some(PrefixKind::PodSubnet), Some(PrefixKind::PodNetwork)];
        let is_pod = self.world.pods.contains_key(&source)
            || self.world.prefix(&source).is_some_and(|prefix| of_pods.contains(&prefix.kind()));
        if !is_pod || !self.is_world(&heads.tuple.daddr) {
            return;
        }
        let allowed =
            [Verdict::NotSelected, Verdict::UnknownPodPassed, Verdict::InboundReply, Verdict::FamilyNotListed];
        let unknown_pass = *verdict == Verdict::NodeSnatDone && self.config.on_unknown_pod() == OnUnknownPod::Pass;
        assert!(unknown_pass || allowed.contains(verdict), "{verdict:?} with mark {:#x}: {heads:?}", meta.mark);
        let is_known = self.world.inbound.borrow().contains_key(&heads.tuple);
        assert!(*verdict != Verdict::InboundReply || is_known, "an answer to nobody: {heads:?}");
        let selected = self.world.pods.get(&source).is_some_and(|pod| pod.egress_id().is_some());
        assert!(!selected || *verdict != Verdict::NotSelected, "{heads:?}");
    }
}

impl Default for Node {
    fn default() -> Self {
        Self::new()
    }
}

/// What an ICMP error quotes; nothing of any other packet.
fn quoted(frame: &[u8], heads: &Heads) -> Quote {
    let mut quote = Quote::NONE;
    if heads.l4 == L4::IcmpError && quote.read(frame, heads).is_none() {
        quote = Quote::NONE;
    }
    quote
}

/// Marks that packets on the uplink can have.
pub(crate) const MARKS: [u32; 2] = [0, NODE_MARK];
