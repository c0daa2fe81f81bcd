//! Packets from pods, by the management port.

use egress_common::abi::{Addr, Direction, NODE_MARK, Origin, PolicySlot, SlotPlace, Verdict};
use egress_common::decide::from_netdev;
use egress_common::decide::from_pod::{self, FromPod};
use egress_common::decide::mtu::Fit;
use egress_common::decide::{NatOwner, Tables as _, mtu};
use egress_common::wire::icmp::GeneratedError;
use egress_common::wire::{Headers, Quote, Segment, tcp};

use super::{ModelNode, PacketOutcome, Skb, TooBig, quoted};
use crate::rewrite;

impl ModelNode {
    pub(super) fn run_from_pod(&mut self, skb: &Skb<'_>) -> PacketOutcome {
        let (frame, config) = (skb.frame, self.config());
        if skb.foreign {
            return PacketOutcome::done(Verdict::NotPod, frame, 0);
        }
        let mut headers = match Self::headers(frame, Direction::Egress) {
            Ok(headers) => headers,
            Err(why) => return PacketOutcome::done(from_pod::unread(why, frame), frame, 0),
        };
        let quote = quoted(frame, &headers);
        let node = from_netdev::node_address(&config, headers.family);
        let outcome = match from_pod::decide(&mut headers, &quote, &self.maps, &config) {
            FromPod::Done(verdict) => PacketOutcome::done(verdict, frame, 0),
            FromPod::Hairpin => {
                let answer = rewrite::error(frame, &headers, GeneratedError::Prohibited.head(headers.family), &node);
                PacketOutcome::answered(Verdict::HairpinAnswered, answer, Verdict::Hairpin)
            }
            FromPod::Reset(verdict) => self.reset(&headers, frame, verdict),
            FromPod::Mark => PacketOutcome::Passed(Verdict::MarkedNode, frame.to_vec(), NODE_MARK),
            FromPod::Send { egress_id, slot } => {
                let slot = *slot;
                self.judge_slot(&headers, egress_id, &slot);
                match self.send(skb, &headers, &quote, egress_id, &slot) {
                    Ok(PacketOutcome::Dropped(Verdict::PortTaken)) => self.reset(&headers, frame, Verdict::PortTaken),
                    Ok(outcome) => outcome,
                    Err(TooBig(mtu)) => {
                        let answer =
                            rewrite::error(frame, &headers, GeneratedError::TooBig(mtu).head(headers.family), &node);
                        PacketOutcome::answered(Verdict::MtuAnswered, answer, Verdict::MtuExceeded)
                    }
                }
            }
        };
        self.judge_stack(&headers, &outcome);
        self.kept(skb, &headers, outcome)
    }

    /// The pod gets a reset.
    fn reset(&self, headers: &Headers, frame: &[u8], otherwise: Verdict) -> PacketOutcome {
        let answer = rewrite::reset(frame, headers);
        if answer.is_some() {
            self.maps.flow_answered(&headers.tuple, Segment { flags: tcp::RST, number: headers.tcp_ack });
        }
        PacketOutcome::answered(Verdict::CutAnswered, answer, otherwise)
    }

    fn send(
        &mut self,
        skb: &Skb<'_>,
        headers: &Headers,
        quote: &Quote,
        egress_id: u32,
        slot: &PolicySlot,
    ) -> Result<PacketOutcome, TooBig> {
        match slot.place() {
            SlotPlace::Here => {
                let owner = NatOwner { origin: Origin::Here, source_node: Addr::UNSPECIFIED, egress_id };
                let owned = self.maps.owned(egress_id).filter(|owned| owned.address == slot.address).copied();
                match owned {
                    Some(owned) => self.out_by_uplink(skb, headers, quote, &owned, &owner),
                    None => Ok(self.handed_over(skb, headers, egress_id)),
                }
            }
            SlotPlace::Remote => {
                let length = Self::wire_length(skb, headers);
                match mtu::fit(length, self.config().overlay_mtu, headers, &slot.endpoint) {
                    Fit::Tell(limit) => return Err(TooBig(limit)),
                    Fit::Lost => return Ok(PacketOutcome::Dropped(Verdict::OverlayTooNarrow)),
                    Fit::Whole | Fit::Cut => {}
                }
                let mut frame = skb.frame.to_vec();
                let less = rewrite::decrement_ttl(&mut frame, headers.family);
                Ok(PacketOutcome::changed(Verdict::ToGateway, less.map(|()| frame)))
            }
        }
    }
}
