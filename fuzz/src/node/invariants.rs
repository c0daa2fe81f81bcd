//! Invariants after each packet.

use egress_common::abi::{
    Addr, Direction, HandoverEntry, HandoverStage, NatEntry, OnUnknownPod, PolicyEntryKey, PolicySlot, PrefixKind,
    Verdict,
};
use egress_common::decide::Tables as _;
use egress_common::decide::from_overlay::Outer;
use egress_common::decide::to_netdev::Meta;
use egress_common::decide::{policy_of, to_pod};
use egress_common::wire::{Headers, L4, Quote};

use super::{ModelNode, PacketOutcome};

impl ModelNode {
    pub(super) fn judge_slot(&self, headers: &Headers, egress_id: u32, slot: &PolicySlot) {
        assert_eq!(self.policy_of(headers), Some(egress_id), "sent for an object that does not select the pod");
        assert_eq!(slot.address.family(), headers.family);
        let policies = self.maps.policies.borrow();
        let policy = policies.get(&PolicyEntryKey::new(egress_id, headers.family)).expect("asked");
        assert!(policy.slots.iter().take(policy.count() as usize).any(|now| now == slot), "a slot of old");
    }

    /// A translated packet belongs to a pod of its sending node, or was passed on by the other node of a hand-over; its
    /// replies go to the pod's node.
    pub(super) fn judge_sender(&self, headers: &Headers, outer: &Outer, source_node: &Addr) {
        let inner = self.maps.prefix(&headers.tuple.saddr).map(|prefix| (prefix.kind(), prefix.node));
        assert_eq!(inner, Some((Some(PrefixKind::PodSubnet), *source_node)), "of a pod, and back to its node");
        let handover = self.maps.handovers.borrow().get(&outer.egress_id).copied();
        let is_passed = handover.is_some_and(|handover| {
            handover.peer == outer.source
                && matches!(handover.stage(), Some(HandoverStage::Arriving | HandoverStage::Open))
        });
        assert!(is_passed || *source_node == outer.source, "a pod of the sender: {headers:?}");
    }

    /// Only packets for an address that this node does not own are passed on, to the other node of the hand-over.
    pub(super) fn judge_passed(&self, headers: &Headers, egress_id: u32, handover: &HandoverEntry) {
        let held = self.maps.owned.borrow().get(&egress_id).map(|owned| owned.address);
        let is_leaving = handover.stage() == Some(HandoverStage::Leaving);
        assert!(!is_leaving || held != Some(handover.owned.address), "passed on, and held: {headers:?}");
    }

    pub(super) fn judge_answer(&self, headers: &Headers, quote: &Quote, nat_entry: &NatEntry) {
        let reverse = if headers.l4 == L4::IcmpError { *quote.flow() } else { headers.tuple };
        assert_eq!(self.asked.get(&reverse), Some(&nat_entry.other), "an answer for another flow: {reverse:?}");
        let asked_by = if headers.l4 == L4::IcmpError { quote.tuple().saddr } else { headers.tuple.daddr };
        assert_eq!(asked_by, headers.tuple.daddr, "an error about another address");
    }

    /// The policy of a packet of a pod.
    fn policy_of(&self, headers: &Headers) -> Option<u32> {
        let pod = self.maps.pods.borrow().get(&headers.tuple.saddr).copied();
        pod.and_then(|pod| policy_of(&pod, &headers.tuple.daddr, &self.maps))
    }

    /// An address outside of the cluster.
    fn is_world(&self, addr: &Addr) -> bool {
        self.maps.prefix(addr).is_none() && self.maps.node(addr).is_none()
    }

    /// A selected pod's packet to the world is left to the stack by these rules only.
    pub(super) fn judge_stack(&self, headers: &Headers, outcome: &PacketOutcome) {
        let PacketOutcome::Passed(verdict, ..) = outcome else { return };
        if self.policy_of(headers).is_some() && self.is_world(&headers.tuple.daddr) {
            let allowed = [
                Verdict::InboundReply,
                Verdict::NodeAddress,
                Verdict::FamilyNotListed,
                // The stack does not forward it.
                Verdict::TtlExpired,
            ];
            assert!(allowed.contains(verdict), "{verdict:?}: {headers:?}");
        }
    }

    /// A packet leaves with a pod's address by these rules only.
    pub(super) fn judge_wire(&self, headers: &Headers, meta: &Meta, outcome: &PacketOutcome) {
        let PacketOutcome::Passed(verdict, out, _) = outcome else { return };
        let source = Self::headers(out, Direction::Egress).expect("still IP").tuple.saddr;
        // Translated packets are redirected, and not checked here.
        let is_egress_ip = self.maps.prefix(&source).is_some_and(|p| p.kind() == Some(PrefixKind::EgressIp));
        assert!(!is_egress_ip || !meta.forwarded || meta.returning, "a spoofed egress IP: {headers:?}");
        let is_elsewhere = self.maps.owned_addr(&source).is_some_and(|owned| owned.is_elsewhere(meta.ifindex));
        assert!(!is_elsewhere, "the egress IP of another interface: {headers:?}");
        let of_pods = [Some(PrefixKind::PodSubnet), Some(PrefixKind::PodNetwork)];
        let is_pod = self.maps.pods.borrow().contains_key(&source)
            || self.maps.prefix(&source).is_some_and(|prefix| of_pods.contains(&prefix.kind()));
        // An address of the node itself is never blocked, also in its own pod subnet.
        if !is_pod || self.maps.node(&source).is_some() || !self.is_world(&headers.tuple.daddr) {
            return;
        }
        let allowed =
            [Verdict::NotSelected, Verdict::UnknownPodPassed, Verdict::InboundReply, Verdict::FamilyNotListed];
        let passes = self.config().on_unknown_pod() == OnUnknownPod::Pass;
        let unknown_pass = *verdict == Verdict::NodeSnatDone && passes;
        assert!(unknown_pass || allowed.contains(verdict), "{verdict:?} with mark {:#x}: {headers:?}", meta.mark);
        let known = self.maps.inbound.get(&headers.tuple).is_some();
        // An error counts as its quoted packet.
        let is_known = known || headers.l4 == L4::IcmpError;
        assert!(*verdict != Verdict::InboundReply || is_known, "an unsolicited answer: {headers:?}");
        let is_called =
            headers.l4 == L4::IcmpError || to_pod::may_be_called(&headers.tuple, &self.maps, &self.config());
        let is_selected = self.policy_of(headers).is_some();
        assert!(*verdict != Verdict::InboundReply || is_called || !is_selected, "nothing exposes it: {headers:?}");
        assert!(!is_selected || *verdict != Verdict::NotSelected, "{headers:?}");
    }
}
