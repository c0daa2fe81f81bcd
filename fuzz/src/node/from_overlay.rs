//! Packets from the overlay, and SNAT to the outside, which local pods use too.

use egress_common::abi::{Addr, Class, Direction, Origin, Owned, Verdict};
use egress_common::decide::from_netdev;
use egress_common::decide::from_overlay::{self, FromOverlay, Outer};
use egress_common::decide::snat::{self, SnatSource};
use egress_common::decide::{NatOwner, Rewrite};
use egress_common::wire::icmp::GeneratedError;
use egress_common::wire::{Headers, L4, Quote};

use super::{ModelNode, PacketOutcome, Skb, TooBig, fits_in_two, quoted};
use crate::rewrite;

impl ModelNode {
    pub(super) fn run_from_overlay(&mut self, outer: &Outer, skb: &Skb<'_>) -> PacketOutcome {
        let mut headers = match Self::headers(skb.frame, Direction::Egress) {
            Ok(headers) => headers,
            Err(why) => return PacketOutcome::Dropped(from_overlay::unread(why)),
        };
        let (config, quote) = (self.config(), quoted(skb.frame, &headers));
        let outcome = match from_overlay::decide(&mut headers, &quote, outer, &self.maps, &config) {
            FromOverlay::Done(verdict) => PacketOutcome::done(verdict, skb.frame, 0),
            FromOverlay::Deliver => match Self::wire_length(skb, &headers) > config.pod_mtu {
                true if !fits_in_two(skb, &headers, config.pod_mtu) => PacketOutcome::Dropped(Verdict::MtuExceeded),
                true => self.split(Verdict::ReplyDelivered, skb.frame, config.pod_mtu),
                false => PacketOutcome::Sent(Verdict::ReplyDelivered, skb.frame.to_vec()),
            },
            FromOverlay::PassOn => self.pass_on(skb, &headers, outer.egress_id),
            FromOverlay::Answer => self.came_back(skb, outer.egress_id),
            FromOverlay::Translate { owned, source_node } => {
                self.judge_sender(&headers, outer, source_node);
                let owner = match *source_node == config.self_node {
                    true => {
                        NatOwner { origin: Origin::Here, source_node: Addr::UNSPECIFIED, egress_id: outer.egress_id }
                    }
                    false => NatOwner { origin: Origin::Remote, source_node: *source_node, egress_id: outer.egress_id },
                };
                let owned = *owned;
                match self.out_by_uplink(skb, &headers, &quote, &owned, &owner) {
                    Ok(PacketOutcome::Dropped(Verdict::PortTaken)) => PacketOutcome::answered(
                        Verdict::CutAnswered,
                        rewrite::reset(skb.frame, &headers),
                        Verdict::PortTaken,
                    ),
                    Ok(outcome) => outcome,
                    Err(TooBig(mtu)) => {
                        let (head, node) = (GeneratedError::TooBig(mtu).head(headers.family), &config);
                        let answer =
                            rewrite::error(skb.frame, &headers, head, &from_netdev::node_address(node, headers.family));
                        PacketOutcome::answered(Verdict::MtuAnswered, answer, Verdict::MtuExceeded)
                    }
                }
            }
        };
        assert!(!matches!(outcome, PacketOutcome::Passed(..)), "nothing from the overlay meets the stack: {outcome:?}");
        outcome
    }

    /// Finds or creates the NAT entry, and sends the packet.
    pub(super) fn out_by_uplink(
        &mut self,
        skb: &Skb<'_>,
        headers: &Headers,
        quote: &Quote,
        owned: &Owned,
        owner: &NatOwner,
    ) -> Result<PacketOutcome, TooBig> {
        let pool = SnatSource::of(owned, &self.config());
        let nat_entry = match snat::translate(headers, quote, &self.maps, &pool, owner) {
            Ok(nat_entry) => *nat_entry,
            Err(verdict) => {
                assert_eq!(verdict.class(), Class::Drop, "no mapping, so no packet");
                return Ok(PacketOutcome::Dropped(verdict));
            }
        };
        let source = Rewrite::snat(&nat_entry);
        if source.addr != owned.address {
            return Ok(PacketOutcome::Dropped(Verdict::ClaimLost));
        }
        if headers.l4 != L4::IcmpError {
            assert_eq!(
                (nat_entry.egress_id, nat_entry.origin()),
                (owner.egress_id, Some(owner.origin)),
                "{nat_entry:?}"
            );
        }
        self.note_flow(headers, &nat_entry);
        if !(self.routed)(&headers.tuple.daddr) {
            return Ok(PacketOutcome::Dropped(Verdict::NoRoute));
        }
        let limit = owned.mtu;
        if Self::wire_length(skb, headers) > limit {
            return Err(TooBig(limit));
        }
        let mut frame = skb.frame.to_vec();
        let here = nat_entry.origin() == Some(Origin::Here);
        let less = if here { rewrite::decrement_ttl(&mut frame, headers.family) } else { Some(()) };
        if less.is_none() {
            return Ok(PacketOutcome::Dropped(Verdict::RewriteFailed));
        }
        Ok(match Self::translated(headers, quote, frame, pool.ports, &nat_entry) {
            Ok(out) => PacketOutcome::Sent(if here { Verdict::SnatHere } else { Verdict::SnatForNode }, out),
            Err(verdict) => PacketOutcome::Dropped(verdict),
        })
    }
}
