//! What must hold after each packet.

use egress_common::abi::{
    Addr, Direction, HandoverEntry, HandoverStage, NatEntry, OnUnknownPod, PolicyKey, PrefixKind, Slot, Verdict,
};
use egress_common::decide::Tables as _;
use egress_common::decide::from_overlay::Outer;
use egress_common::decide::to_netdev::Meta;
use egress_common::decide::to_pod;
use egress_common::wire::{Headers, L4, Quote};

use super::{Node, Outcome};

impl Node {
    pub(super) fn judge_slot(&self, heads: &Headers, egress_id: u32, slot: &Slot) {
        let pod = self.world.pods.borrow().get(&heads.tuple.saddr).and_then(|pod| pod.egress_id());
        assert_eq!(pod, Some(egress_id), "sent for an object that does not select the pod");
        assert_eq!(slot.address.family(), heads.family);
        let policies = self.world.policies.borrow();
        let policy = policies.get(&PolicyKey::new(egress_id, heads.family)).expect("asked");
        assert!(policy.slots.iter().take(policy.count() as usize).any(|now| now == slot), "a slot of old");
    }

    /// What is translated is of a pod of the node that sent it, or was passed on by the other node of a hand-over; and goes
    /// back to the node of the pod.
    pub(super) fn judge_sender(&self, heads: &Headers, outer: &Outer, source_node: &Addr) {
        let inner = self.world.prefix(&heads.tuple.saddr).map(|prefix| (prefix.kind(), prefix.node));
        assert_eq!(inner, Some((Some(PrefixKind::PodSubnet), *source_node)), "of a pod, and back to its node");
        let handover = self.world.handovers.borrow().get(&outer.egress_id).copied();
        let is_passed = handover.is_some_and(|handover| {
            handover.peer == outer.source
                && matches!(handover.stage(), Some(HandoverStage::Arriving | HandoverStage::Open))
        });
        assert!(is_passed || *source_node == outer.source, "a pod of the sender: {heads:?}");
    }

    /// What is passed on is of an address that this node does not have, to the other node of its hand-over.
    pub(super) fn judge_passed(&self, heads: &Headers, egress_id: u32, handover: &HandoverEntry) {
        let held = self.world.owned.borrow().get(&egress_id).map(|owned| owned.address);
        let is_leaving = handover.stage() == Some(HandoverStage::Leaving);
        assert!(!is_leaving || held != Some(handover.owned.address), "passed on, and held: {heads:?}");
    }

    pub(super) fn judge_answer(&self, heads: &Headers, quote: &Quote, mapping: &NatEntry) {
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
    pub(super) fn judge_stack(&self, heads: &Headers, outcome: &Outcome) {
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
    pub(super) fn judge_wire(&self, heads: &Headers, meta: &Meta, outcome: &Outcome) {
        let Outcome::Passed(verdict, out, _) = outcome else { return };
        let source = Self::heads(out, Direction::Egress).expect("still IP").tuple.saddr;
        // What NAT has written is redirected, and not judged here.
        let is_egress_ip = self.world.prefix(&source).is_some_and(|p| p.kind() == Some(PrefixKind::EgressIp));
        assert!(!is_egress_ip || !meta.forwarded || meta.returning, "a spoofed egress IP: {heads:?}");
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
        let is_called = heads.l4 == L4::IcmpError || to_pod::is_called(&heads.tuple, &self.world, &self.config());
        let is_selected = self.world.pods.borrow().get(&source).is_some_and(|pod| pod.egress_id().is_some());
        assert!(*verdict != Verdict::InboundReply || is_called || !is_selected, "nothing exposes it: {heads:?}");
        let selected = self.world.pods.borrow().get(&source).is_some_and(|pod| pod.egress_id().is_some());
        assert!(!selected || *verdict != Verdict::NotSelected, "{heads:?}");
    }
}
