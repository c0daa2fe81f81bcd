//! Between the two nodes of a hand-over (egress-ebpf/src/overlay.rs).

use egress_common::abi::{Class, Direction, HandoverStage, Verdict};
use egress_common::decide::mtu::{self, Fit};
use egress_common::decide::{Tables as _, from_netdev, from_overlay};
use egress_common::wire::Headers;

use super::{ModelNode, PacketOutcome, Skb, TooBig, quoted};
use crate::rewrite;

impl ModelNode {
    /// A pod's packet for an address that this node does not own.
    pub(super) fn handed_over(&self, skb: &Skb<'_>, headers: &Headers, egress_id: u32) -> PacketOutcome {
        let handover =
            self.maps.handover(egress_id).filter(|handover| handover.stage() == Some(HandoverStage::Leaving));
        match handover {
            Some(_) => self.pass_on(skb, headers, egress_id),
            None => PacketOutcome::Dropped(Verdict::NotGateway),
        }
    }

    pub(super) fn pass_on(&self, skb: &Skb<'_>, headers: &Headers, egress_id: u32) -> PacketOutcome {
        let mut frame = skb.frame.to_vec();
        if headers.ttl <= 1 {
            return PacketOutcome::Dropped(Verdict::NotGateway);
        }
        if rewrite::decrement_ttl(&mut frame, headers.family).is_none() {
            return PacketOutcome::Dropped(Verdict::RewriteFailed);
        }
        let Some(handover) = self.maps.handover(egress_id) else { return PacketOutcome::Dropped(Verdict::NotGateway) };
        self.judge_passed(headers, egress_id, handover);
        match mtu::fit(Self::wire_length(skb, headers), self.config().overlay_mtu, headers, &handover.peer) {
            Fit::Tell(_) | Fit::Lost => PacketOutcome::Dropped(Verdict::OverlayTooNarrow),
            Fit::Whole | Fit::Cut => PacketOutcome::Sent(Verdict::HandedOver, frame),
        }
    }

    /// A reply that the other node received for the egress IP.
    pub(super) fn came_back(&mut self, skb: &Skb<'_>, egress_id: u32) -> PacketOutcome {
        let mut headers = match Self::headers(skb.frame, Direction::Ingress) {
            Ok(headers) => headers,
            Err(why) => return PacketOutcome::Dropped(from_overlay::unread(why)),
        };
        let quote = quoted(skb.frame, &headers);
        let decision = from_netdev::passed(&mut headers, &quote, &self.maps, egress_id);
        let decision = super::from_netdev::Back::of(&decision);
        match self.back(skb, &headers, &quote, &decision) {
            // No answer is sent, and the stack does not get it.
            Ok(outcome) if outcome.verdict().class() == Class::Pass => PacketOutcome::Dropped(Verdict::BadState),
            Ok(outcome) => outcome,
            Err(TooBig(_)) => PacketOutcome::Dropped(Verdict::MtuExceeded),
        }
    }
}
