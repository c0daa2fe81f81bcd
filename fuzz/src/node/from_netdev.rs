//! Packets from outside, by the uplink.

use egress_common::abi::{Addr, Class, Direction, NatEntry, Owned, OwnedAddr, Verdict};
use egress_common::decide::from_netdev::{self, FromNetdev};
use egress_common::decide::mtu::Fit;
use egress_common::decide::{Rewrite, Tables as _, mtu};
use egress_common::wire::icmp::GeneratedError;
use egress_common::wire::nd::{self, ADVERTISEMENT_LEN, Solicitation};
use egress_common::wire::{ETH_LEN, Frame as _, Headers, L4, PROTO_ICMPV6, Quote, arp, ethertype, icmp, ipv4};

use super::{ModelNode, PacketOutcome, Skb, TooBig, fits_in_two, quoted, rewritten};
use crate::rewrite;

/// The decision about an answer, with a copy of the NAT entry.
pub(super) enum Back {
    Done(Verdict),
    To(Verdict, NatEntry),
    PassOn(u32),
}

impl Back {
    pub(super) const fn of(decision: &FromNetdev<'_>) -> Self {
        match decision {
            FromNetdev::Done(verdict) => Self::Done(*verdict),
            FromNetdev::ReplyHere { nat_entry } => Self::To(Verdict::ReplyHere, **nat_entry),
            FromNetdev::ReplyRemote { nat_entry } => Self::To(Verdict::ReplyToNode, **nat_entry),
            FromNetdev::NodeReply { nat_entry } => Self::To(Verdict::NodeReply, **nat_entry),
            FromNetdev::PassOn { egress_id } => Self::PassOn(*egress_id),
        }
    }
}

impl ModelNode {
    pub(super) fn run_from_netdev(&mut self, ifindex: u32, skb: &Skb<'_>) -> PacketOutcome {
        let (frame, config) = (skb.frame, self.config());
        if skb.foreign {
            return PacketOutcome::done(Verdict::NotOurs, frame, 0);
        }
        if frame.load(ETH_LEN - 2).map(u16::from_be_bytes) == Some(ethertype::ARP) {
            return self.asked_for_address(ifindex, frame);
        }
        let mut headers = match Self::headers(frame, Direction::Ingress) {
            Ok(headers) => headers,
            Err(verdict) => return PacketOutcome::done(verdict, frame, 0),
        };
        if skb.gso_size == 0
            && let Some((outer, inner)) = rewrite::decapsulated(frame, &headers, &config)
        {
            return self.run_from_overlay(&outer, &Skb::plain(&inner));
        }
        if headers.tuple.protocol == PROTO_ICMPV6
            && let Some(outcome) = self.solicited(ifindex, frame, &headers)
        {
            return outcome;
        }
        let outcome = self.came_from_world(ifindex, skb, &mut headers);
        self.kept(skb, &headers, outcome)
    }

    fn asked_for_address(&self, ifindex: u32, frame: &[u8]) -> PacketOutcome {
        let Some(message) = arp::ArpMessage::parse(frame) else {
            return PacketOutcome::done(Verdict::NotOurs, frame, 0);
        };
        let claimed = self.held(&message.sender()).filter(|owned| owned.ifindex == ifindex);
        let is_contested = claimed.is_some_and(|owned| owned.mac != message.sender_mac);
        let owned = if message.is_request() { self.held(&message.target()) } else { None };
        let Some(owned) = owned else {
            let verdict = if is_contested { Verdict::AddressConflict } else { Verdict::NotOurs };
            return PacketOutcome::done(verdict, frame, 0);
        };
        if owned.ifindex != ifindex {
            return PacketOutcome::Dropped(Verdict::WrongInterface);
        }
        let answer = message.answer(owned.mac);
        let rest = frame.get(answer.len()..).unwrap_or_default();
        PacketOutcome::Answered(Verdict::ArpAnswered, [answer.as_slice(), rest].concat())
    }

    /// The new owner answers for a handed-over address, and the provider of a Service for an address of both.
    fn held(&self, address: &Addr) -> Option<&OwnedAddr> {
        let answers = |held: &Owned| held.address == *address && !held.is_shared();
        self.maps.owned_addr(address).filter(|owned| self.maps.owned(owned.egress_id).is_some_and(answers))
    }

    fn solicited(&self, ifindex: u32, frame: &[u8], headers: &Headers) -> Option<PacketOutcome> {
        let sender = &headers.tuple.saddr;
        let (kind, target) = nd::about(frame)?;
        let owned = self.held(&target)?;
        let message = nd::NdMessage::parse(frame)?;
        if owned.ifindex != ifindex {
            let is_asked = kind == icmp::v6::NEIGHBOUR_SOLICITATION;
            return is_asked.then_some(PacketOutcome::Dropped(Verdict::WrongInterface));
        }
        if kind == icmp::v6::NEIGHBOUR_ADVERTISEMENT {
            let is_contested = message.overrides() && message.link(frame)? != owned.mac;
            return is_contested.then(|| PacketOutcome::done(Verdict::AddressConflict, frame, 0));
        }
        let solicitation = Solicitation { sender_mac: frame.load(6)?, sender, target };
        let mut answer = [0; ADVERTISEMENT_LEN];
        solicitation.answer(owned.mac, &mut answer);
        Some(PacketOutcome::Answered(Verdict::NeighbourAnswered, answer.to_vec()))
    }

    fn came_from_world(&mut self, ifindex: u32, skb: &Skb<'_>, headers: &mut Headers) -> PacketOutcome {
        let (frame, config) = (skb.frame, self.config());
        let quote = quoted(frame, headers);
        let owned = self.maps.owned_addr.borrow().get(&headers.tuple.daddr).copied();
        let decision = Back::of(&from_netdev::decide(headers, &quote, ifindex, &self.maps, &config));
        let is_elsewhere = owned.is_some_and(|owned| owned.is_elsewhere(ifindex));
        assert_eq!(is_elsewhere, matches!(decision, Back::Done(Verdict::WrongInterface)), "{headers:?}");
        if let (Back::Done(verdict), Some(owned)) = (&decision, owned) {
            let is_expected = match owned.is_shared() {
                true => *verdict == Verdict::NotOurs,
                false => matches!(verdict.class(), Class::Drop | Class::Hold),
            };
            assert!(
                is_expected || *verdict == Verdict::TtlExpired,
                "shared {}: {verdict:?} {headers:?}",
                owned.is_shared()
            );
        }
        match self.back(skb, headers, &quote, &decision) {
            Ok(outcome) => outcome,
            Err(TooBig(mtu)) => {
                let answer = rewrite::error(
                    frame,
                    headers,
                    GeneratedError::TooBig(mtu).head(headers.family),
                    &headers.tuple.daddr,
                );
                PacketOutcome::answered(Verdict::MtuAnswered, answer, Verdict::MtuExceeded)
            }
        }
    }

    /// The outcome of a packet for an address of this node.
    pub(super) fn back(
        &mut self,
        skb: &Skb<'_>,
        headers: &Headers,
        quote: &Quote,
        decision: &Back,
    ) -> Result<PacketOutcome, TooBig> {
        let (frame, config) = (skb.frame, self.config());
        let (verdict, nat_entry) = match decision {
            Back::Done(verdict) => return Ok(PacketOutcome::done(*verdict, frame, 0)),
            Back::PassOn(egress_id) => return Ok(self.pass_on(skb, headers, *egress_id)),
            Back::To(verdict, nat_entry) => (*verdict, *nat_entry),
        };
        self.judge_answer(headers, quote, &nat_entry);
        let (length, mut in_two) = (Self::wire_length(skb, headers), false);
        let too_big = match verdict {
            Verdict::ReplyHere if length > config.pod_mtu => {
                in_two = fits_in_two(skb, headers, config.pod_mtu);
                (!in_two).then_some(config.pod_mtu)
            }
            Verdict::ReplyToNode => match mtu::fit(length, config.overlay_mtu, headers, &nat_entry.source_node) {
                Fit::Tell(limit) => Some(limit.min(config.pod_mtu)),
                Fit::Lost => return Ok(PacketOutcome::Dropped(Verdict::OverlayTooNarrow)),
                Fit::Whole | Fit::Cut => {
                    (length > config.pod_mtu && !headers.may_be_fragmented()).then_some(config.pod_mtu)
                }
            },
            _ => None,
        };
        if let Some(mtu) = too_big {
            return Err(TooBig(mtu));
        }
        let mut out = frame.to_vec();
        let by_stack = verdict == Verdict::NodeReply;
        let less = if by_stack { Some(()) } else { rewrite::decrement_ttl(&mut out, headers.family) };
        let sender = if headers.l4 == L4::IcmpError { quote.tuple().daddr } else { headers.tuple.saddr };
        if nat_entry.other.daddr != sender {
            return Ok(PacketOutcome::Dropped(Verdict::ClaimLost));
        }
        let less = less.ok_or(Verdict::RewriteFailed);
        let out = match less.and_then(|()| rewritten(headers, quote, out, &Rewrite::reverse(&nat_entry))) {
            Ok(out) => out,
            Err(verdict) => return Ok(PacketOutcome::Dropped(verdict)),
        };
        let after = Self::headers(&out, Direction::Ingress).expect("still IP");
        assert_eq!(after.tuple.daddr, nat_entry.other.saddr, "for the pod");
        Ok(match verdict {
            Verdict::NodeReply => PacketOutcome::Passed(verdict, out, 0),
            _ if in_two => self.split(verdict, &out, config.pod_mtu),
            _ => PacketOutcome::Sent(verdict, out),
        })
    }

    /// For a pod in two fragments, if the packet's length field is valid.
    pub(super) fn split(&self, verdict: Verdict, frame: &[u8], mtu: u32) -> PacketOutcome {
        let headers = Self::headers(frame, Direction::Ingress).expect("still IP");
        if !(self.resolved)(&headers.tuple.daddr) {
            return PacketOutcome::Dropped(Verdict::NoNeighbour);
        }
        let header = usize::from(headers.l4_offset) - ETH_LEN;
        let first = (mtu as usize - header) & !7;
        let total = frame.load(ETH_LEN + ipv4::TOTAL_LEN).map_or(0, |total| usize::from(u16::from_be_bytes(total)));
        let is_there = total > header + first && total <= header + first + 2048 && ETH_LEN + total <= frame.len();
        if is_there { PacketOutcome::Split(verdict) } else { PacketOutcome::Dropped(Verdict::RewriteFailed) }
    }
}
