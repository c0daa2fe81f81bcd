//! A node: the decisions joined as the programs join them (egress-ebpf/src/roads.rs), and what must hold after each packet.
//!
//! It is the model that the fuzz targets judge and the oracle that the programs on the kernel are compared with
//! (egress-agent/tests/kernel_programs/oracle): one packet at a time, bytes in, verdict and bytes out, state kept.

use std::collections::HashMap;

use egress_common::abi::{
    Addr, Class, Config, Direction, Family, Mapping, NODE_MARK, OnUnknownPod, Origin, Owned, PolicyKey, PortRange,
    PrefixKind, Slot, SlotPlace, Tuple, Verdict,
};
use egress_common::decide::accept::{self, Accept, Outer};
use egress_common::decide::enter::{self, Enter};
use egress_common::decide::expiry::FRAGMENT_NS;
use egress_common::decide::leave::{self, Leave, Meta};
use egress_common::decide::mtu::Fit;
use egress_common::decide::snat::{self, Face};
use egress_common::decide::steer::{self, Steer};
use egress_common::decide::world::World;
use egress_common::decide::{Owner, Rewrite, Tables as _, fragments, mtu, notice};
use egress_common::wire::icmp::Answer;
use egress_common::wire::nd::{ADVERTISEMENT_LEN, Solicitation};
use egress_common::wire::{ETH_LEN, Frame as _, Heads, L4, PROTO_ICMPV6, Quote, arp, ethertype, ipv4, tcp};

use crate::edge;
use crate::frame;

/// Marks that a packet can come with.
pub(crate) const MARKS: [u32; 2] = [0, NODE_MARK];

/// Where the packet is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hook {
    /// Management port, ingress and egress.
    Steer,
    Notice,
    /// Overlay, ingress.
    Accept(Outer),
    /// Uplink, ingress and egress.
    Enter,
    Leave(Meta),
}

/// A packet as the kernel holds it.
#[derive(Clone, Copy, Debug)]
pub struct Skb<'a> {
    pub frame: &'a [u8],
    /// Zero for a packet that is none of several.
    pub gso_size: u32,
    /// For another host, by its link address.
    pub foreign: bool,
}

impl<'a> Skb<'a> {
    #[must_use]
    pub const fn plain(frame: &'a [u8]) -> Self {
        Self { frame, gso_size: 0, foreign: false }
    }
}

/// What became of a packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Goes on to the stack, perhaps rewritten, and with this mark.
    Passed(Verdict, Vec<u8>, u32),
    /// Leaves by another device, whatever its link addresses will be. What goes into the overlay is without outer headers.
    Sent(Verdict, Vec<u8>),
    /// Likewise, in two fragments that are not modelled.
    Split(Verdict),
    /// Turned into the answer.
    Answered(Verdict, Vec<u8>),
    Dropped(Verdict),
}

impl Outcome {
    #[must_use]
    pub const fn verdict(&self) -> Verdict {
        match self {
            Self::Passed(verdict, ..)
            | Self::Sent(verdict, _)
            | Self::Split(verdict)
            | Self::Answered(verdict, _)
            | Self::Dropped(verdict) => *verdict,
        }
    }

    fn done(verdict: Verdict, frame: &[u8], mark: u32) -> Self {
        match verdict.class() {
            Class::Pass => Self::Passed(verdict, frame.to_vec(), mark),
            Class::Drop | Class::Hold => Self::Dropped(verdict),
            Class::Redirect | Class::Answer => panic!("{verdict:?} is no end of a decision"),
        }
    }

    fn changed(verdict: Verdict, changed: Option<Vec<u8>>) -> Self {
        match changed {
            Some(frame) => Self::Sent(verdict, frame),
            None => Self::Dropped(Verdict::RewriteFailed),
        }
    }

    /// `mtu` is what the way takes.
    fn told(verdict: Verdict, answer: Option<Vec<u8>>, otherwise: Verdict) -> Self {
        match answer {
            Some(frame) => Self::Answered(verdict, frame),
            None => Self::Dropped(otherwise),
        }
    }
}

/// The way was too narrow for the packet, which is as it was: takes no more than this.
struct TooBig(u32);

pub struct Node {
    pub world: World,
    /// Where routes lead by the uplink.
    pub routed: fn(&Addr) -> bool,
    /// Pods whose link address is known.
    pub resolved: fn(&Addr) -> bool,
    /// Whom the answer to a reverse key is for, as packets went out.
    asked: HashMap<Tuple, Tuple>,
}

impl Node {
    #[must_use]
    pub fn new(world: World) -> Self {
        Self { world, routed: |_| true, resolved: |_| true, asked: HashMap::new() }
    }

    /// As the agent does after every change of what `steer` asks.
    pub fn decide_anew(&self) {
        self.world.configure(|config| config.decisions += 1);
    }

    fn config(&self) -> Config {
        self.world.config.get()
    }

    fn heads(frame: &[u8], direction: Direction) -> Option<Heads> {
        Heads::parse(frame, direction)
    }

    fn wire_length(skb: &Skb<'_>, heads: &Heads) -> u32 {
        mtu::wire_length(u32::try_from(skb.frame.len()).unwrap_or(u32::MAX), skb.gso_size, heads)
    }

    pub fn run(&mut self, hook: &Hook, skb: &Skb<'_>) -> Outcome {
        self.world.next_packet();
        let outcome = match hook {
            Hook::Steer => self.steered(skb),
            Hook::Notice => self.noticed(skb),
            Hook::Accept(outer) => self.accepted(outer, skb),
            Hook::Enter => self.entered(skb),
            Hook::Leave(meta) => self.left(skb, meta),
        };
        self.world.assert_paired();
        outcome
    }

    pub fn steer(&mut self, frame: &[u8]) -> Outcome {
        self.run(&Hook::Steer, &Skb::plain(frame))
    }

    pub fn accept(&mut self, outer: &Outer, frame: &[u8]) -> Outcome {
        self.run(&Hook::Accept(*outer), &Skb::plain(frame))
    }

    pub fn enter(&mut self, frame: &[u8]) -> Outcome {
        self.run(&Hook::Enter, &Skb::plain(frame))
    }

    pub fn leave(&mut self, frame: &[u8], meta: &Meta) -> Outcome {
        self.run(&Hook::Leave(*meta), &Skb::plain(frame))
    }

    /// Only remembers.
    pub fn notice(&mut self, frame: &[u8]) -> Outcome {
        self.run(&Hook::Notice, &Skb::plain(frame))
    }

    fn steered(&mut self, skb: &Skb<'_>) -> Outcome {
        let (frame, config) = (skb.frame, self.config());
        if skb.foreign {
            return Outcome::done(Verdict::NotPod, frame, 0);
        }
        let Some(mut heads) = Self::heads(frame, Direction::Egress) else {
            return Outcome::done(Verdict::NotIp, frame, 0);
        };
        let quote = quoted(frame, &heads);
        let node = enter::node_address(&config, heads.family);
        let outcome = match steer::steer(&mut heads, &quote, &self.world, &config) {
            Steer::Done(verdict) => Outcome::done(verdict, frame, 0),
            Steer::Hairpin => {
                let answer = edge::error(frame, &heads, Answer::Prohibited.head(heads.family), &node);
                Outcome::told(Verdict::HairpinAnswered, answer, Verdict::Hairpin)
            }
            Steer::Reset(verdict) => self.reset(&heads, frame, verdict),
            Steer::Mark => Outcome::Passed(Verdict::MarkedNode, frame.to_vec(), NODE_MARK),
            Steer::Send { egress_id, slot } => {
                let slot = *slot;
                self.judge_slot(&heads, egress_id, &slot);
                match self.send(skb, &heads, &quote, egress_id, &slot) {
                    Ok(Outcome::Dropped(Verdict::PortTaken)) => self.reset(&heads, frame, Verdict::PortTaken),
                    Ok(outcome) => outcome,
                    Err(TooBig(mtu)) => {
                        let answer = edge::error(frame, &heads, Answer::TooBig(mtu).head(heads.family), &node);
                        Outcome::told(Verdict::MtuAnswered, answer, Verdict::MtuExceeded)
                    }
                }
            }
        };
        self.judge_stack(&heads, &outcome);
        self.kept(skb, &heads, outcome)
    }

    /// As egress-ebpf/src/hold.rs does it, but what begins anew is not run again.
    fn kept(&self, skb: &Skb<'_>, heads: &Heads, outcome: Outcome) -> Outcome {
        const MOST: u32 = 64;
        const FRAME: usize = 1992;
        let (key, now, mut awaited) = (fragments::key(heads), self.world.now.get(), self.world.awaited.borrow_mut());
        match outcome.verdict() {
            Verdict::FragmentUnknown if skb.gso_size == 0 && skb.frame.len() <= FRAME => {
                let entry = awaited.entry(key).or_insert((now, 0));
                if now - entry.0 > FRAGMENT_NS {
                    *entry = (now, 0);
                }
                entry.1 += 1;
                if entry.1 > MOST { outcome } else { Outcome::Dropped(Verdict::FragmentHeld) }
            }
            Verdict::FragmentsReleased => {
                awaited.remove(&key);
                outcome
            }
            _ => outcome,
        }
    }

    /// The pod is told that its connection has ended.
    fn reset(&self, heads: &Heads, frame: &[u8], otherwise: Verdict) -> Outcome {
        let answer = edge::reset(frame, heads);
        if answer.is_some() {
            self.world.flow_answered(&heads.tuple, tcp::RST);
        }
        Outcome::told(Verdict::CutAnswered, answer, otherwise)
    }

    fn send(
        &mut self,
        skb: &Skb<'_>,
        heads: &Heads,
        quote: &Quote,
        egress_id: u32,
        slot: &Slot,
    ) -> Result<Outcome, TooBig> {
        match slot.place() {
            SlotPlace::Here => {
                let owner = Owner { origin: Origin::Here, source_node: Addr::UNSPECIFIED, egress_id };
                let owned = self.world.owned(egress_id).filter(|owned| owned.address == slot.address).copied();
                match owned {
                    Some(owned) => self.out_by_uplink(skb, heads, quote, &owned, &owner),
                    None => Ok(Outcome::Dropped(Verdict::NotGateway)),
                }
            }
            SlotPlace::Remote => {
                let length = Self::wire_length(skb, heads);
                match mtu::fit(length, self.config().overlay_mtu, heads, &slot.endpoint) {
                    Fit::Tell(limit) => return Err(TooBig(limit)),
                    Fit::Lost => return Ok(Outcome::Dropped(Verdict::OverlayTooNarrow)),
                    Fit::Whole | Fit::Cut => {}
                }
                let mut frame = skb.frame.to_vec();
                let less = edge::decrement_ttl(&mut frame, heads.family);
                Ok(Outcome::changed(Verdict::Steered, less.map(|()| frame)))
            }
        }
    }

    /// The mapping of the packet, made if need be, and the packet out with it.
    fn out_by_uplink(
        &mut self,
        skb: &Skb<'_>,
        heads: &Heads,
        quote: &Quote,
        owned: &Owned,
        owner: &Owner,
    ) -> Result<Outcome, TooBig> {
        let face = Face { address: owned.address, ports: snat::EGRESS_PORTS };
        let mapping = match snat::translate(heads, quote, &self.world, &face, owner) {
            Ok(mapping) => *mapping,
            Err(verdict) => {
                assert_eq!(verdict.class(), Class::Drop, "no mapping, so no packet");
                return Ok(Outcome::Dropped(verdict));
            }
        };
        let source = Rewrite::snat(&mapping);
        if source.addr != owned.address {
            return Ok(Outcome::Dropped(Verdict::ClaimLost));
        }
        if heads.l4 != L4::IcmpError {
            assert_eq!((mapping.egress_id, mapping.origin()), (owner.egress_id, Some(owner.origin)), "{mapping:?}");
        }
        if !(self.routed)(&heads.tuple.daddr) {
            return Ok(Outcome::Dropped(Verdict::NoRoute));
        }
        let limit = self.config().uplink_mtu;
        if Self::wire_length(skb, heads) > limit {
            return Err(TooBig(limit));
        }
        let mut frame = skb.frame.to_vec();
        let here = mapping.origin() == Some(Origin::Here);
        let less = if here { edge::decrement_ttl(&mut frame, heads.family) } else { Some(()) };
        if less.is_none() {
            return Ok(Outcome::Dropped(Verdict::RewriteFailed));
        }
        Ok(match self.translated(heads, quote, frame, face.ports, &mapping) {
            Ok(out) => Outcome::Sent(if here { Verdict::SnatHere } else { Verdict::SnatForNode }, out),
            Err(verdict) => Outcome::Dropped(verdict),
        })
    }

    fn accepted(&mut self, outer: &Outer, skb: &Skb<'_>) -> Outcome {
        let Some(mut heads) = Self::heads(skb.frame, Direction::Egress) else {
            return Outcome::Dropped(Verdict::Malformed);
        };
        let (config, quote) = (self.config(), quoted(skb.frame, &heads));
        let outcome = match accept::accept(&mut heads, outer, &self.world, &config) {
            Accept::Done(verdict) => Outcome::done(verdict, skb.frame, 0),
            Accept::Deliver => match Self::wire_length(skb, &heads) > config.pod_mtu {
                true if !fits_in_two(skb, &heads, config.pod_mtu) => Outcome::Dropped(Verdict::MtuExceeded),
                true => self.split(Verdict::ReplyDelivered, skb.frame, config.pod_mtu),
                false => Outcome::Sent(Verdict::ReplyDelivered, skb.frame.to_vec()),
            },
            Accept::Translate { owned, source_node } => {
                assert_eq!(*source_node, outer.source, "answers go back to who sent it");
                let inner = self.world.prefix(&heads.tuple.saddr).map(|prefix| (prefix.kind(), prefix.node));
                assert_eq!(inner, Some((Some(PrefixKind::PodSubnet), outer.source)), "a pod of the sender");
                let owner = Owner { origin: Origin::Remote, source_node: *source_node, egress_id: outer.egress_id };
                let owned = *owned;
                match self.out_by_uplink(skb, &heads, &quote, &owned, &owner) {
                    Ok(Outcome::Dropped(Verdict::PortTaken)) => {
                        Outcome::told(Verdict::CutAnswered, edge::reset(skb.frame, &heads), Verdict::PortTaken)
                    }
                    Ok(outcome) => outcome,
                    Err(TooBig(mtu)) => {
                        let (head, node) = (Answer::TooBig(mtu).head(heads.family), &config);
                        let answer = edge::error(skb.frame, &heads, head, &enter::node_address(node, heads.family));
                        Outcome::told(Verdict::MtuAnswered, answer, Verdict::MtuExceeded)
                    }
                }
            }
        };
        assert!(!matches!(outcome, Outcome::Passed(..)), "nothing from the overlay meets the stack: {outcome:?}");
        outcome
    }

    fn entered(&mut self, skb: &Skb<'_>) -> Outcome {
        let (frame, config) = (skb.frame, self.config());
        if skb.foreign {
            return Outcome::done(Verdict::NotOurs, frame, 0);
        }
        if frame.load(ETH_LEN - 2).map(u16::from_be_bytes) == Some(ethertype::ARP) {
            return self.asked_for_address(frame);
        }
        let Some(mut heads) = Self::heads(frame, Direction::Ingress) else {
            return Outcome::done(Verdict::NotIp, frame, 0);
        };
        if skb.gso_size == 0
            && let Some((outer, inner)) = edge::decapsulated(frame, &heads, &config)
        {
            return self.accepted(&outer, &Skb::plain(&inner));
        }
        if heads.tuple.protocol == PROTO_ICMPV6
            && let Some(outcome) = self.solicited(frame, &heads)
        {
            return outcome;
        }
        let outcome = self.came_from_world(skb, &mut heads);
        self.kept(skb, &heads, outcome)
    }

    fn asked_for_address(&self, frame: &[u8]) -> Outcome {
        let request = arp::Request::parse(frame);
        let Some((request, owned)) =
            request.and_then(|request| self.world.owned_addr(&request.target()).map(|owned| (request, owned)))
        else {
            return Outcome::done(Verdict::NotOurs, frame, 0);
        };
        let answer = request.answer(owned.mac);
        let rest = frame.get(answer.len()..).unwrap_or_default();
        Outcome::Answered(Verdict::ArpAnswered, [answer.as_slice(), rest].concat())
    }

    fn solicited(&self, frame: &[u8], heads: &Heads) -> Option<Outcome> {
        let solicitation = Solicitation::parse(frame, &heads.tuple.saddr)?;
        let owned = self.world.owned_addr(&solicitation.target)?;
        let mut answer = [0; ADVERTISEMENT_LEN];
        solicitation.answer(owned.mac, &mut answer);
        Some(Outcome::Answered(Verdict::NeighbourAnswered, answer.to_vec()))
    }

    fn came_from_world(&mut self, skb: &Skb<'_>, heads: &mut Heads) -> Outcome {
        let (frame, config) = (skb.frame, self.config());
        let quote = quoted(frame, heads);
        let is_for_egress_ip = self.world.owned_addr.borrow().contains_key(&heads.tuple.daddr);
        let (verdict, mapping) = match enter::enter(heads, &quote, &self.world, &config) {
            Enter::Done(verdict) => {
                assert!(
                    !is_for_egress_ip
                        || matches!(verdict.class(), Class::Drop | Class::Hold)
                        || verdict == Verdict::TtlExpired,
                    "unasked, and left to the host: {verdict:?} {heads:?}"
                );
                return Outcome::done(verdict, frame, 0);
            }
            Enter::ReplyHere { mapping } => (Verdict::ReplyHere, *mapping),
            Enter::ReplyRemote { mapping } => (Verdict::ReplySteered, *mapping),
            Enter::NodeReply { mapping } => (Verdict::NodeReply, *mapping),
        };
        self.judge_answer(heads, &quote, &mapping);
        let (length, mut in_two) = (Self::wire_length(skb, heads), false);
        let too_big = match verdict {
            Verdict::ReplyHere if length > config.pod_mtu => {
                in_two = fits_in_two(skb, heads, config.pod_mtu);
                (!in_two).then_some(config.pod_mtu)
            }
            Verdict::ReplySteered => match mtu::fit(length, config.overlay_mtu, heads, &mapping.source_node) {
                Fit::Tell(limit) => Some(limit.min(config.pod_mtu)),
                Fit::Lost => return Outcome::Dropped(Verdict::OverlayTooNarrow),
                Fit::Whole | Fit::Cut => (length > config.pod_mtu && heads.dont_fragment).then_some(config.pod_mtu),
            },
            _ => None,
        };
        if let Some(mtu) = too_big {
            let answer = edge::error(frame, heads, Answer::TooBig(mtu).head(heads.family), &heads.tuple.daddr);
            return Outcome::told(Verdict::MtuAnswered, answer, Verdict::MtuExceeded);
        }
        let mut out = frame.to_vec();
        let by_stack = verdict == Verdict::NodeReply;
        let less = if by_stack { Some(()) } else { edge::decrement_ttl(&mut out, heads.family) };
        let sender = if heads.l4 == L4::IcmpError { quote.tuple().daddr } else { heads.tuple.saddr };
        if mapping.other.daddr != sender {
            return Outcome::Dropped(Verdict::ClaimLost);
        }
        let less = less.ok_or(Verdict::RewriteFailed);
        let out = match less.and_then(|()| rewritten(heads, &quote, out, &Rewrite::reverse(&mapping))) {
            Ok(out) => out,
            Err(verdict) => return Outcome::Dropped(verdict),
        };
        let after = Self::heads(&out, Direction::Ingress).expect("still IP");
        assert_eq!(after.tuple.daddr, mapping.other.saddr, "for the pod");
        match verdict {
            Verdict::NodeReply => Outcome::Passed(verdict, out, 0),
            _ if in_two => self.split(verdict, &out, config.pod_mtu),
            _ => Outcome::Sent(verdict, out),
        }
    }

    /// For a pod in two fragments, if the length that the packet says of itself is one that it has.
    fn split(&self, verdict: Verdict, frame: &[u8], mtu: u32) -> Outcome {
        let heads = Self::heads(frame, Direction::Ingress).expect("still IP");
        if !(self.resolved)(&heads.tuple.daddr) {
            return Outcome::Dropped(Verdict::NoNeighbour);
        }
        let header = usize::from(heads.l4_offset) - ETH_LEN;
        let first = (mtu as usize - header) & !7;
        let total = frame.load(ETH_LEN + ipv4::TOTAL_LEN).map_or(0, |total| usize::from(u16::from_be_bytes(total)));
        let is_there = total > header + first && total <= header + first + 2048 && ETH_LEN + total <= frame.len();
        if is_there { Outcome::Split(verdict) } else { Outcome::Dropped(Verdict::RewriteFailed) }
    }

    fn left(&mut self, skb: &Skb<'_>, meta: &Meta) -> Outcome {
        let (frame, config) = (skb.frame, self.config());
        let Some(mut heads) = Self::heads(frame, Direction::Egress) else {
            return Outcome::done(Verdict::NotIp, frame, meta.mark);
        };
        if edge::is_own_overlay(frame, &heads, &config) {
            return Outcome::done(Verdict::NotOurs, frame, meta.mark);
        }
        let quote = quoted(frame, &heads);
        let outcome = match leave::leave(&mut heads, &quote, meta, &self.world, &config) {
            Leave::Done(verdict) => Outcome::done(verdict, frame, meta.mark),
            Leave::Unmark => Outcome::Passed(Verdict::NodeSnatDone, frame.to_vec(), 0),
            Leave::NodeSnat => self.node_snat(&heads, &quote, frame),
        };
        self.judge_wire(&heads, meta, &outcome);
        outcome
    }

    fn node_snat(&mut self, heads: &Heads, quote: &Quote, frame: &[u8]) -> Outcome {
        let config = self.config();
        let mapping = match leave::translate(heads, quote, &self.world, &config) {
            Ok(mapping) => *mapping,
            Err(verdict) => return Outcome::Dropped(verdict),
        };
        if Rewrite::snat(&mapping).addr != enter::node_address(&config, heads.family) {
            return Outcome::Dropped(Verdict::ClaimLost);
        }
        match self.translated(heads, quote, frame.to_vec(), config.node_ports, &mapping) {
            Ok(out) => Outcome::Passed(Verdict::NodeSnat, out, 0),
            Err(verdict) => Outcome::Dropped(verdict),
        }
    }

    fn noticed(&mut self, skb: &Skb<'_>) -> Outcome {
        let Some(heads) = Self::heads(skb.frame, Direction::Ingress) else {
            return Outcome::done(Verdict::NotIp, skb.frame, 0);
        };
        let verdict = notice::notice(&heads, &self.world, &self.config());
        assert_eq!(verdict.class(), Class::Pass, "it guards nothing");
        Outcome::done(verdict, skb.frame, 0)
    }

    /// Writes what the mapping shows, and sees that nobody else shows the same.
    fn translated(
        &mut self,
        heads: &Heads,
        quote: &Quote,
        frame: Vec<u8>,
        ports: PortRange,
        mapping: &Mapping,
    ) -> Result<Vec<u8>, Verdict> {
        let reverse = &mapping.other;
        let keeps_port = matches!(heads.l4, L4::Other | L4::IcmpError);
        assert!(keeps_port || (ports.first..=ports.last).contains(&reverse.dport()), "not one of them: {reverse:?}");
        if heads.l4 != L4::IcmpError
            && let Some(old) = self.asked.insert(*reverse, heads.tuple).filter(|old| *old != heads.tuple)
        {
            let holds = self.world.nat.get(&old).is_some_and(|mapping| mapping.other == *reverse);
            assert!(!holds, "two flows show the same: {old:?} and {:?}", heads.tuple);
        }
        let out = rewritten(heads, quote, frame, &Rewrite::snat(mapping))?;
        let after = Self::heads(&out, Direction::Egress).expect("still IP");
        assert_eq!((after.tuple.saddr, after.tuple.daddr), (reverse.daddr, heads.tuple.daddr));
        Ok(out)
    }

    fn judge_slot(&self, heads: &Heads, egress_id: u32, slot: &Slot) {
        let pod = self.world.pods.borrow().get(&heads.tuple.saddr).and_then(|pod| pod.egress_id());
        assert_eq!(pod, Some(egress_id), "sent for an object that does not select the pod");
        assert_eq!(slot.address.family(), heads.family);
        let policies = self.world.policies.borrow();
        let policy = policies.get(&PolicyKey::new(egress_id, heads.family)).expect("asked");
        assert!(policy.slots.iter().take(policy.count() as usize).any(|now| now == slot), "a slot of old");
    }

    fn judge_answer(&self, heads: &Heads, quote: &Quote, mapping: &Mapping) {
        let reverse = if heads.l4 == L4::IcmpError { *quote.flow() } else { heads.tuple };
        assert_eq!(self.asked.get(&reverse), Some(&mapping.other), "an answer for somebody else: {reverse:?}");
        let asked_by = if heads.l4 == L4::IcmpError { quote.tuple().saddr } else { heads.tuple.daddr };
        assert_eq!(asked_by, heads.tuple.daddr, "an error about another address");
    }

    /// Outside of everything that the cluster knows.
    fn is_world(&self, addr: &Addr) -> bool {
        self.world.prefix(addr).is_none() && self.world.node(addr).is_none()
    }

    /// A selected pod's packet to the world is left to the stack by these rules only.
    fn judge_stack(&self, heads: &Heads, outcome: &Outcome) {
        let Outcome::Passed(verdict, ..) = outcome else { return };
        let selected = self.world.pods.borrow().get(&heads.tuple.saddr).is_some_and(|pod| pod.egress_id().is_some());
        if selected && self.is_world(&heads.tuple.daddr) {
            let allowed = [
                Verdict::InboundReply,
                Verdict::NodeAddress,
                Verdict::FamilyNotListed,
                // The stack does not forward it.
                Verdict::TtlExpired,
            ];
            assert!(allowed.contains(verdict), "{verdict:?}: {heads:?}");
        }
    }

    /// What goes to the world from a pod's address does so by these rules only.
    fn judge_wire(&self, heads: &Heads, meta: &Meta, outcome: &Outcome) {
        let Outcome::Passed(verdict, out, _) = outcome else { return };
        let source = Self::heads(out, Direction::Egress).expect("still IP").tuple.saddr;
        let of_pods = [Some(PrefixKind::PodSubnet), Some(PrefixKind::PodNetwork)];
        let is_pod = self.world.pods.borrow().contains_key(&source)
            || self.world.prefix(&source).is_some_and(|prefix| of_pods.contains(&prefix.kind()));
        if !is_pod || !self.is_world(&heads.tuple.daddr) {
            return;
        }
        let allowed =
            [Verdict::NotSelected, Verdict::UnknownPodPassed, Verdict::InboundReply, Verdict::FamilyNotListed];
        let passes = self.config().on_unknown_pod() == OnUnknownPod::Pass;
        let unknown_pass = *verdict == Verdict::NodeSnatDone && passes;
        assert!(unknown_pass || allowed.contains(verdict), "{verdict:?} with mark {:#x}: {heads:?}", meta.mark);
        let known = self.world.inbound.get(&heads.tuple).is_some();
        // An error answers for what it quotes.
        let is_known = known || heads.l4 == L4::IcmpError;
        assert!(*verdict != Verdict::InboundReply || is_known, "an answer to nobody: {heads:?}");
        let selected = self.world.pods.borrow().get(&source).is_some_and(|pod| pod.egress_id().is_some());
        assert!(!selected || *verdict != Verdict::NotSelected, "{heads:?}");
    }
}

/// With its other end; checksums that were right are right.
fn rewritten(heads: &Heads, quote: &Quote, frame: Vec<u8>, rewrite: &Rewrite) -> Result<Vec<u8>, Verdict> {
    let mut out = frame.clone();
    let written = match heads.l4 {
        L4::IcmpError => edge::rewrite_error(&mut out, heads, quote, rewrite),
        _ => rewrite.check(heads).map(|()| edge::rewrite(&mut out, heads, rewrite))?,
    };
    written.ok_or(Verdict::RewriteFailed)?;
    if frame::is_summed_right(&frame) == Some(true) {
        assert_eq!(frame::is_summed_right(&out), Some(true), "{frame:02x?} became {out:02x?}");
    }
    if heads.l4 == L4::IcmpError {
        let (before, after) = (frame::is_quote_summed_right(&frame, quote), frame::is_quote_summed_right(&out, quote));
        for (before, after) in before.into_iter().zip(after) {
            assert!(before != Some(true) || after == Some(true), "{frame:02x?} became {out:02x?}");
        }
    }
    Ok(out)
}

/// As egress-ebpf/src/fragment.rs asks it.
fn fits_in_two(skb: &Skb<'_>, heads: &Heads, mtu: u32) -> bool {
    let header = u32::from(heads.l4_offset) - u32::try_from(ETH_LEN).unwrap_or_default();
    let first = mtu.saturating_sub(header) & !7;
    let rest = Node::wire_length(skb, heads).saturating_sub(header + first);
    heads.family == Family::V4
        && !heads.dont_fragment
        && skb.gso_size == 0
        && first > 0
        && rest <= 2048
        && rest + header <= mtu
}

/// What an ICMP error quotes; nothing of any other packet.
fn quoted(frame: &[u8], heads: &Heads) -> Quote {
    let mut quote = Quote::NONE;
    if heads.l4 == L4::IcmpError && quote.read(frame, heads).is_none() {
        quote = Quote::NONE;
    }
    quote
}
