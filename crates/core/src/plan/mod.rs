//! The ordered actions that lead from the actual to the desired state.
//!
//! After every prefix of a plan each flow of a selected pod leaves with an address that its object had before or has
//! after, or is dropped. The order that guarantees this:
//!
//! 1. new pods that nothing selects become known, and unknown pods are dropped, if desired;
//! 2. node addresses and prefixes are added, the longest prefix first, so that no lookup sees a value of neither side;
//! 3. hand-overs to this node that are no longer wanted end; addresses whose new node is ready are handed over, and
//!    this node prepares for those that it takes over;
//! 4. addresses are added that no other object has to give up (the gateway's side before the policy);
//! 5. addresses that block another claim are removed: from the policy first, then the claim, then its flows;
//! 6. the claims that waited for these are added;
//! 7. new classes of pods are written; pods that leave an object whose policy grows are parked, then policies change, those
//!    that lose an address first, and the flows of lost addresses are cut;
//! 8. finished hand-overs end;
//! 9. pods and ports of Services change, and old flows of the pods are cut; classes that no pod has are removed;
//! 10. policies are removed, then the remaining addresses (the policy before the gateway's side), and flows that other
//!     nodes sent by these until then are cut;
//! 11. prefixes are removed, the shortest first, then node addresses;
//! 12. unknown pods pass, if desired.
//!
//! A cut follows the change that makes it due. If a plan ends between the two, the next observation cuts what the
//! kernel's state does not permit (`Action::CutOrphans`) before it plans. A cut walks whole maps, and one walk serves
//! any number of cuts, so cuts of several pods come together, after all writes that make them due.
//!
//! The order concerns this node only; the hand-over ensures that one node at a time answers for a moving address.

pub mod capacity;
pub mod compile;
pub mod desired;
pub mod executor;
#[cfg(any(test, feature = "testing"))]
pub mod reference;
pub mod refusal;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use egress_common::abi::MAX_SLOTS;
use ipnet::IpNet;

use crate::model::state::{
    Action, EgressId, Family, HandoverStage, KernelState, NOT_NUMBERED, OnUnknownPod, Place, PodClass, PodState,
    Policy, Slot, WhenEmpty, family_of,
};
use crate::model::view::Addresses;

/// Plans the whole difference.
pub fn plan(actual: &KernelState, desired: &KernelState) -> Vec<Action> {
    let mut plan = Planner { state: actual.clone(), actual, desired, actions: Vec::new(), cut: BTreeSet::new() };
    plan.introduce_pods();
    plan.unknown_pods(OnUnknownPod::Drop);
    plan.add_places();
    plan.end_taking();
    plan.hand_over();
    plan.own_free();
    plan.disown_blocking();
    plan.own_rest();
    plan.put_classes();
    plan.park_pods();
    plan.put_policies();
    plan.end_handovers();
    let pods = actual.pods.keys().chain(desired.pods.keys());
    let exposed = actual.exposed.keys().chain(desired.exposed.keys());
    plan.change_pods(pods.chain(exposed).copied().collect::<BTreeSet<_>>());
    plan.remove_classes();
    plan.remove_policies();
    plan.disown_rest();
    plan.remove_places();
    plan.unknown_pods(OnUnknownPod::PassWhileFollowed);
    plan.unknown_pods(OnUnknownPod::Pass);
    plan.actions
}

/// Changes of pods: immediate writes, the cuts that they make due, and the writes that follow the cuts.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Disconnected {
    pub at_once: Vec<Action>,
    /// By the pod's address.
    pub cuts: BTreeMap<IpAddr, Action>,
    /// By the pod's address, in order.
    pub after_cuts: Vec<(IpAddr, Action)>,
}

impl Disconnected {
    /// Adds the actions for one address, in order.
    fn enter(&mut self, address: IpAddr, actions: Vec<Action>) {
        for action in actions {
            if action.is_cut() {
                self.cuts.insert(address, action);
            } else if self.cuts.contains_key(&address) {
                self.after_cuts.push((address, action));
            } else {
                self.at_once.push(action);
            }
        }
    }

    /// All actions in a valid order.
    pub fn into_actions(self) -> impl Iterator<Item = Action> {
        let after_cuts = self.after_cuts.into_iter().map(|(_, action)| action);
        self.at_once.into_iter().chain(self.cuts.into_values()).chain(after_cuts)
    }
}

/// Plans the difference of these addresses only; no other difference may concern them.
pub fn plan_addresses(actual: &KernelState, desired: &KernelState, addresses: &Addresses) -> Disconnected {
    let services = addresses.services.iter().filter_map(|address| change_host_prefix(actual, desired, *address));
    let ports = addresses.services.iter().flat_map(|address| change_exposed(actual, desired, *address));
    let policies = missing_policies(actual, desired, &addresses.pods);
    let before = services.chain(ports).chain(policies).chain(new_classes(actual, desired));
    let mut parted = Disconnected { at_once: before.collect(), ..Disconnected::default() };
    for address in &addresses.pods {
        parted.enter(*address, change_pod(actual, desired, *address));
    }
    // A pod leaves a class at once, also where its flows are cut later.
    parted.at_once.extend(unused_classes(actual, desired));
    parted
}

fn new_classes(actual: &KernelState, desired: &KernelState) -> Vec<Action> {
    let differs = |class: &PodClass| actual.classes.get(class) != desired.classes.get(class);
    let new = desired.classes.iter().filter(|(class, _)| differs(class));
    new.map(|(class, policies)| Action::PutClass(*class, Arc::clone(policies))).collect()
}

fn unused_classes(actual: &KernelState, desired: &KernelState) -> Vec<Action> {
    let unused = actual.classes.keys().filter(|class| !desired.classes.contains_key(class));
    unused.map(|class| Action::RemoveClass(*class)).collect()
}

/// Policies of objects that have no pod here yet, before that pod. If the object has an address here, the whole plan
/// adds them.
fn missing_policies(actual: &KernelState, desired: &KernelState, pods: &BTreeSet<IpAddr>) -> Vec<Action> {
    let selecting = pods.iter().flat_map(|address| desired.policies_of(*address).ids());
    let selecting: BTreeSet<EgressId> = selecting.filter(|id| !desired.owned.contains_key(id)).collect();
    let keys = selecting.into_iter().flat_map(|id| [Family::V4, Family::V6].map(|family| (id, family)));
    let missing = keys.filter(|key| !actual.policy.contains_key(key));
    missing.filter_map(|key| Some(Action::PutPolicy(key.0, key.1, desired.policy.get(&key)?.clone()))).collect()
}

fn change_host_prefix(actual: &KernelState, desired: &KernelState, address: IpAddr) -> Option<Action> {
    let host = IpNet::from(address);
    match (actual.cluster.get(&host), desired.cluster.get(&host)) {
        (old, new) if old == new => None,
        (_, Some(new)) => Some(Action::PutPrefix(host, *new)),
        (_, None) => Some(Action::RemovePrefix(host)),
    }
}

/// The ports of a pod, before its other changes: the old ones mean nothing for another pod at this address. Or those of
/// Services at a shared address.
fn change_exposed(actual: &KernelState, desired: &KernelState, address: IpAddr) -> Vec<Action> {
    let of = |state: &'_ KernelState| state.exposed.get(&address).cloned().unwrap_or_default();
    let (old, new) = (of(actual), of(desired));
    let gone = old.difference(&new).map(|port| Action::Conceal(address, *port));
    gone.chain(new.difference(&old).map(|port| Action::Expose(address, *port))).collect()
}

fn change_pod(actual: &KernelState, desired: &KernelState, address: IpAddr) -> Vec<Action> {
    let mut actions = change_exposed(actual, desired, address);
    let old = actual.pods.get(&address);
    let Some(new) = desired.pods.get(&address) else {
        actions.extend(old.into_iter().flat_map(|old| forget_pod(address, *old)));
        return actions;
    };
    let (had, has) = (actual.owners.get(&address), desired.owners.get(&address));
    let is_handed_over = old.is_some() && had.is_some() && has.is_some() && had != has;
    if old != Some(new) {
        actions.push(Action::PutPod(address, *new));
    }
    // A departed pod: its address stays blocked for late senders (`ClusterView::departed`). If the cut fails, the next
    // pod makes it due again, because its owner differs.
    let is_departed = *new == PodState::Selected(NOT_NUMBERED) && has.is_none();
    match old {
        _ if is_handed_over => actions.push(Action::CutPod(address)),
        Some(_) if is_departed && old != Some(new) => actions.push(Action::CutPod(address)),
        _ => {
            let lost = actual.policies_of(address).lost_with(&desired.policies_of(address));
            actions.extend((!lost.of.is_empty()).then_some(Action::CutPodFlows(address, lost)));
        }
    }
    // Last, so that a failed cut becomes due again.
    if let Some(owner) = has.filter(|_| had != has) {
        actions.push(Action::PutOwner(address, *owner));
    }
    actions
}

/// A pod that is gone. Its entry is removed last, so that a cut that failed or was never reached becomes due again.
/// Until then it is parked, so that it begins no flow after the cut.
fn forget_pod(address: IpAddr, old: PodState) -> Vec<Action> {
    let parked = PodState::Selected(NOT_NUMBERED);
    let parks = old.is_selected() && old != parked;
    let park = parks.then_some(Action::PutPod(address, parked));
    park.into_iter().chain([Action::CutPod(address), Action::RemovePod(address)]).collect()
}

struct Planner<'a> {
    actual: &'a KernelState,
    desired: &'a KernelState,
    /// The actual state after the actions so far.
    state: KernelState,
    actions: Vec<Action>,
    /// The policies whose lost addresses have been cut.
    cut: BTreeSet<(EgressId, Family)>,
}

impl Planner<'_> {
    fn push(&mut self, action: Action) {
        self.state.apply(&action);
        self.actions.push(action);
    }

    /// New pods that nothing selects come first: they are independent of the rest, which may wait for the network.
    fn introduce_pods(&mut self) {
        for (address, pod) in &self.desired.pods {
            if *pod == PodState::Known && !self.actual.pods.contains_key(address) {
                self.push(Action::PutPod(*address, *pod));
            }
        }
    }

    fn unknown_pods(&mut self, on: OnUnknownPod) {
        if self.desired.on_unknown_pod == Some(on) && self.state.on_unknown_pod != Some(on) {
            self.push(Action::SetUnknownPods(on));
        }
    }

    fn add_places(&mut self) {
        let desired = self.desired;
        for (address, node) in &desired.nodes {
            if self.state.nodes.get(address) != Some(node) {
                self.push(Action::PutNode(*address, *node));
            }
        }
        for prefix in longest_first(desired.cluster.keys()) {
            let value = desired.cluster[&prefix];
            if self.state.cluster.get(&prefix) != Some(&value) {
                self.push(Action::PutPrefix(prefix, value));
            }
        }
    }

    fn remove_places(&mut self) {
        for prefix in longest_first(self.actual.cluster.keys()).into_iter().rev() {
            if !self.desired.cluster.contains_key(&prefix) {
                self.push(Action::RemovePrefix(prefix));
            }
        }
        for address in self.actual.nodes.keys().filter(|a| !self.desired.nodes.contains_key(*a)) {
            self.push(Action::RemoveNode(*address));
        }
    }

    fn hand_over(&mut self) {
        for (id, handover) in &self.desired.handovers {
            let is_held =
                handover.stage == HandoverStage::Leaving && self.state.owned.get(id) == Some(&handover.address);
            if is_held || self.state.handovers.get(id) != Some(handover) {
                if handover.shared_with.is_some() {
                    self.put_ports(handover.address);
                }
                self.push(Action::PutHandover(*id, *handover));
            }
        }
    }

    /// Ends hand-overs to this node of addresses that it neither owns nor should own.
    fn end_taking(&mut self) {
        for (id, handover) in &self.actual.handovers {
            let has = |state: &KernelState| state.owned.get(id) == Some(&handover.address);
            let goes = !self.desired.handovers.contains_key(id) && !has(self.actual) && !has(self.desired);
            if handover.is_taken() && goes {
                self.push(Action::EndHandover(*id, handover.address));
            }
        }
    }

    fn end_handovers(&mut self) {
        for (id, handover) in &self.actual.handovers {
            if !self.desired.handovers.contains_key(id) && self.state.handovers.contains_key(id) {
                self.push(Action::EndHandover(*id, handover.address));
            }
        }
    }

    /// Claims of objects that own nothing here, on addresses that no other object has here.
    fn own_free(&mut self) {
        let taken: BTreeSet<IpAddr> = self.actual.owned.values().copied().collect();
        for (id, address) in &self.desired.owned {
            if !self.state.owned.contains_key(id) && !taken.contains(address) {
                self.claim(*id, *address);
            }
        }
    }

    fn own_rest(&mut self) {
        for (id, address) in &self.desired.owned {
            if !self.state.has_claim(*id, self.desired) {
                self.claim(*id, *address);
            }
        }
    }

    fn claim(&mut self, id: EgressId, address: IpAddr) {
        let Some(with) = self.desired.shared.get(&id) else { return self.push(Action::Own(id, address)) };
        self.put_ports(address);
        self.push(Action::Share(id, address, *with));
    }

    /// The ports of Services at a shared address, before it is used: no flow of a pod gets one of them, and no packet to
    /// them is passed on.
    fn put_ports(&mut self, address: IpAddr) {
        let ports = change_exposed(&self.state, self.desired, address);
        ports.into_iter().for_each(|action| self.push(action));
    }

    /// Removes claims that block others: the object should own another address, or this one in another way, or another
    /// object this one.
    fn disown_blocking(&mut self) {
        let wanted: BTreeSet<IpAddr> = self.desired.owned.values().copied().collect();
        for (id, address) in &self.actual.owned {
            let wants = self.desired.owned.get(id);
            if self.actual.has_claim(*id, self.desired) || (wants.is_none() && !wanted.contains(address)) {
                continue;
            }
            self.shrink(*id, family_of(*address), Some(*address));
            self.disown(*id, *address);
        }
    }

    /// Other nodes may keep sending until the claim has ended, so a cut follows it, even after an earlier one.
    fn disown(&mut self, id: EgressId, address: IpAddr) {
        self.push(Action::Disown(id, address));
        // Packets that still arrive here are forwarded to the node that has the address.
        if let Some(handover) =
            self.desired.handovers.get(&id).filter(|handover| self.state.handovers.get(&id) != Some(handover))
        {
            self.push(Action::PutHandover(id, *handover));
        }
        self.cut.remove(&(id, family_of(address)));
        self.cut_lost(id, family_of(address));
    }

    /// Reduces a policy to the addresses that the object keeps and that are served now. New addresses wait until pods
    /// that leave the object are parked.
    fn shrink(&mut self, id: EgressId, family: Family, without: Option<IpAddr>) {
        let Some(policy) = self.state.policy.get(&(id, family)) else { return };
        let owned = self.state.owned.get(&id).filter(|owned| Some(**owned) != without);
        let kept = |slot: &&Slot| {
            let served = slot.place != Place::Here || owned == Some(&slot.address);
            served && policy.slots.iter().any(|old| old.address == slot.address)
        };
        let desired = self.desired.policy.get(&(id, family));
        let slots: Vec<Slot> = desired.into_iter().flat_map(|d| d.slots.iter().filter(kept)).copied().collect();
        // The other addresses that the object keeps: their flows wait.
        let is_kept = |address: &IpAddr| !slots.iter().any(|slot| slot.address == *address);
        let pending: BTreeSet<IpAddr> = desired.into_iter().flat_map(Policy::addresses).filter(is_kept).collect();
        let pending: Vec<IpAddr> = pending.into_iter().take(MAX_SLOTS - slots.len().min(MAX_SLOTS)).collect();
        let leaks = slots.is_empty() && policy.when_empty != WhenEmpty::Drop;
        let forgets = policy.pending.iter().any(|address| !pending.contains(address));
        if slots != policy.slots || leaks || forgets {
            // A destination that only other addresses lead to waits for them.
            let mut destinations = desired.map(|desired| desired.destinations.clone()).unwrap_or_default();
            let is_in =
                |address: &IpAddr| slots.iter().any(|slot| slot.address == *address) || pending.contains(address);
            destinations.values_mut().for_each(|addresses| addresses.retain(is_in));
            let limit = policy.limit;
            let policy = Policy { slots, pending, when_empty: WhenEmpty::Drop, limit, destinations };
            self.push(Action::PutPolicy(id, family, policy));
        }
    }

    /// Pods that leave an object must not use its new addresses: its ID may mean another object by now.
    fn park_pods(&mut self) {
        let grows = |id: &EgressId| {
            [Family::V4, Family::V6].iter().any(|family| {
                let key = (*id, *family);
                let (old, new) = (self.actual.policy.get(&key), self.desired.policy.get(&key));
                new.is_some_and(|new| old.is_none_or(|old| gains(old, new)))
            })
        };
        let growing: BTreeSet<EgressId> = self.desired.policy.keys().map(|(id, _)| *id).filter(grows).collect();
        let mut parted = Disconnected::default();
        for (address, pod) in &self.actual.pods {
            if self.desired.pods.get(address) == Some(pod) {
                continue;
            }
            let (had, has) = (self.actual.policies_of(*address), self.desired.policies_of(*address));
            let lost = had.lost_with(&has);
            if !lost.of.is_disjoint(&growing) {
                // An agent that starts while the pod is parked cuts its other flows too, since it cannot know them.
                let park = Action::PutPod(*address, PodState::Selected(NOT_NUMBERED));
                parted.enter(*address, vec![park, Action::CutPodFlows(*address, lost)]);
            }
        }
        parted.into_actions().for_each(|action| self.push(action));
    }

    /// Policies release what another object gets before that object gets it; so does a policy that is to be removed
    /// although a pod joins its ID.
    fn put_policies(&mut self) {
        let desired = self.desired;
        let joined: BTreeSet<EgressId> = desired.pods.keys().flat_map(|pod| desired.policies_of(*pod).ids()).collect();
        let wanted: BTreeSet<IpAddr> = desired.policy.values().flat_map(served).collect();
        for (id, family) in self.actual.policy.keys() {
            let goes = !desired.policy.contains_key(&(*id, *family)) && joined.contains(id);
            if goes || !self.lost(*id, *family).is_disjoint(&wanted) {
                self.shrink(*id, *family, None);
                self.cut_lost(*id, *family);
            }
        }
        for ((id, family), policy) in &desired.policy {
            if self.state.policy.get(&(*id, *family)) != Some(policy) {
                self.push(Action::PutPolicy(*id, *family, policy.clone()));
                self.cut_lost(*id, *family);
            }
        }
    }

    fn change_pods(&mut self, addresses: BTreeSet<IpAddr>) {
        let mut parted = Disconnected::default();
        for address in addresses {
            parted.enter(address, change_pod(&self.state, self.desired, address));
        }
        parted.into_actions().for_each(|action| self.push(action));
    }

    fn put_classes(&mut self) {
        new_classes(&self.state, self.desired).into_iter().for_each(|action| self.push(action));
    }

    fn remove_classes(&mut self) {
        unused_classes(&self.state, self.desired).into_iter().for_each(|action| self.push(action));
    }

    fn remove_policies(&mut self) {
        for (id, family) in self.actual.policy.keys().filter(|key| !self.desired.policy.contains_key(key)) {
            self.push(Action::RemovePolicy(*id, *family));
            self.cut_lost(*id, *family);
        }
    }

    fn disown_rest(&mut self) {
        for (id, address) in &self.actual.owned {
            if !self.desired.owned.contains_key(id) && self.state.owned.contains_key(id) {
                self.disown(*id, *address);
            }
        }
    }

    /// Cuts the flows of addresses that the object has lost, once.
    fn cut_lost(&mut self, id: EgressId, family: Family) {
        let lost = self.lost(id, family);
        if !lost.is_empty() && self.cut.insert((id, family)) {
            self.push(Action::CutFlows(id, lost));
        }
    }

    /// The addresses that the object has in the actual state and not in the desired one. A claim counts too: an earlier
    /// plan may not have reached its policy, or may have removed it.
    fn lost(&self, id: EgressId, family: Family) -> BTreeSet<IpAddr> {
        let of = |state: &KernelState| -> BTreeSet<IpAddr> {
            let listed = state.policy.get(&(id, family)).into_iter().flat_map(Policy::addresses);
            let claimed = state.owned.get(&id).copied().filter(|address| family_of(*address) == family);
            listed.chain(claimed).collect()
        };
        of(self.actual).difference(&of(self.desired)).copied().collect()
    }
}

fn served(policy: &Policy) -> impl Iterator<Item = IpAddr> {
    policy.slots.iter().map(|slot| slot.address)
}

/// Whether the new policy lets traffic do anything that the old one does not.
fn gains(old: &Policy, new: &Policy) -> bool {
    let leaks = |policy: &Policy| policy.slots.is_empty() && policy.when_empty != WhenEmpty::Drop;
    new.slots.iter().any(|slot| !old.slots.contains(slot)) || (leaks(new) && !leaks(old))
}

fn longest_first<'a>(prefixes: impl Iterator<Item = &'a IpNet>) -> Vec<IpNet> {
    let mut prefixes: Vec<IpNet> = prefixes.copied().collect();
    prefixes.sort_by_key(|prefix| std::cmp::Reverse(prefix.prefix_len()));
    prefixes
}

#[cfg(test)]
mod tests;
