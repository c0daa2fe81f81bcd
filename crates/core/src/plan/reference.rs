//! A reference model of a kernel with a prefix of a plan, and random states: what tests judge plans by.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use egress_common::random::Random;

use super::*;
use crate::model::samples::{ip, net};
use crate::model::state::{ClassPolicies, NodeAddress, PodOwner, Prefix, PrefixKind, SharedWith, TunnelEndpoint};

/// What may happen to a new flow of a pod to the outside.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum FlowFate {
    Dropped,
    NodeAddress,
    Leaves(IpAddr),
}

/// All possible fates of the pod's flows to this destination.
pub fn fates(state: &KernelState, pod: IpAddr, to: IpAddr) -> BTreeSet<FlowFate> {
    let policy = state.policies_of(pod).of(to);
    let fate = match state.pods.get(&pod) {
        None if matches!(state.on_unknown_pod, Some(OnUnknownPod::Pass | OnUnknownPod::PassWhileFollowed)) => {
            FlowFate::NodeAddress
        }
        None => FlowFate::Dropped,
        Some(_) => match policy.map(|id| (id, state.policy.get(&(id, family_of(pod))))) {
            None => FlowFate::NodeAddress,
            Some((_, None)) => FlowFate::Dropped,
            Some((_, Some(policy))) if policy.slots.is_empty() => match policy.when_empty {
                WhenEmpty::Drop => FlowFate::Dropped,
                WhenEmpty::NodeAddress | WhenEmpty::NotListed => FlowFate::NodeAddress,
            },
            Some((id, Some(policy))) => {
                let served = |slot: &&Slot| slot.place != Place::Here || state.owned.get(&id) == Some(&slot.address);
                return policy.slots.iter().filter(served).map(|slot| FlowFate::Leaves(slot.address)).collect();
            }
        },
    };
    BTreeSet::from([fate])
}

pub fn family_of(address: IpAddr) -> Family {
    crate::model::state::family_of(address)
}

pub const PODS: [&str; 4] = ["10.244.1.10", "10.244.1.11", "fd00:10:244:1::10", "fd00:10:244:1::11"];
/// Destinations of each family.
pub const OUTSIDE: [&str; 4] = ["198.51.100.10", "192.0.2.1", "2001:db8::10", "2001:db8:1::1"];
/// Prefixes of destinations, those of all first.
pub const TARGETS: [&str; 6] =
    ["0.0.0.0/0", "::/0", "198.51.100.0/24", "198.51.100.10/32", "2001:db8::/32", "2001:db8:1::/48"];
pub const ADDRESSES: [&str; 6] =
    ["172.18.0.100", "172.18.0.101", "172.18.0.102", "172.18.0.103", "fd00:172:18::100", "fd00:172:18::101"];
pub const PREFIXES: [&str; 4] = ["203.0.0.0/8", "203.0.113.0/24", "203.0.113.10/32", "203.0.0.0/16"];
pub const ENDPOINTS: [&str; 2] = ["172.18.0.3", "172.18.0.4"];

/// A random valid desired state: one object per address, one address per object here, and that one owned.
pub fn random_state(random: &mut Random) -> KernelState {
    let mut state = KernelState {
        on_unknown_pod: Some(random.one_of(&[OnUnknownPod::Drop, OnUnknownPod::Pass, OnUnknownPod::PassWhileFollowed])),
        ..KernelState::default()
    };
    let ids = [EgressId(1), EgressId(2), EgressId(3)];
    for id in ids.into_iter().filter(|_| random.below(4) > 0).collect::<Vec<_>>() {
        for family in [Family::V4, Family::V6] {
            let when_empty = random.one_of(&[WhenEmpty::Drop, WhenEmpty::NodeAddress, WhenEmpty::NotListed]);
            state.policy.insert((id, family), Policy::new(Vec::new(), Vec::new(), when_empty));
        }
    }
    for address in ADDRESSES.map(ip) {
        let id = random.one_of(&ids);
        let here = random.below(2) == 0 && !state.owned.contains_key(&id);
        let remote = Place::Remote(TunnelEndpoint(ip(random.one_of(&ENDPOINTS))));
        let Some(policy) = state.policy.get_mut(&(id, family_of(address))) else { continue };
        match random.below(6) {
            0 => continue,
            1 => {
                policy.pending.push(address);
                continue;
            }
            _ => {}
        }
        if here {
            state.owned.insert(id, address);
            let with = if random.one_in(2) { SharedWith::Service } else { SharedWith::Host };
            state.shared.extend((random.below(3) == 0).then_some((id, with)));
        }
        policy.slots.push(Slot { address, place: if here { Place::Here } else { remote } });
    }
    for pod in PODS.map(ip) {
        let id = |random: &mut Random| random.one_of(&[ids[0], ids[1], ids[2], NOT_NUMBERED]);
        let selected = match random.below(2) {
            0 => PodState::Selected(id(random)),
            _ => {
                let of_family = TARGETS.map(net).into_iter().filter(|target| target.addr().is_ipv4() == pod.is_ipv4());
                let chosen = of_family.filter(|target| target.prefix_len() == 0 || random.below(2) > 0);
                let chosen: Vec<IpNet> = chosen.collect();
                let policies = chosen.into_iter().map(|to| (to, (random.below(4) > 0).then(|| id(random))));
                let policies = Arc::new(ClassPolicies::new(policies.collect()));
                // A number means the same policies in every state.
                let class = PodClass(number_of(&policies));
                state.classes.insert(class, policies);
                PodState::ByDestination(class)
            }
        };
        if random.below(4) > 0 {
            state.pods.insert(pod, if random.below(4) > 0 { selected } else { PodState::Known });
        }
    }
    state.drop_unused_classes();
    for pod in state.pods.keys() {
        state.owners.insert(*pod, random.one_of(&[PodOwner(1), PodOwner(2)]));
    }
    for prefix in PREFIXES.map(net) {
        let kind = random.one_of(&[PrefixKind::Excluded, PrefixKind::Service, PrefixKind::Join]);
        if random.below(2) > 0 {
            state.cluster.insert(prefix, Prefix { kind, node: None });
        }
    }
    for endpoint in ENDPOINTS.map(ip) {
        if random.below(2) > 0 {
            let own = random.below(2) > 0;
            state.nodes.insert(endpoint, NodeAddress { own, node: TunnelEndpoint(endpoint) });
        }
    }
    state
}

/// FNV-1a.
fn number_of(policies: &ClassPolicies) -> u32 {
    let text = format!("{policies:?}");
    text.bytes().fold(0x811c_9dc5, |hash: u32, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193))
}

pub fn lookup(cluster: &BTreeMap<IpNet, Prefix>, address: IpAddr) -> Option<Prefix> {
    let hits = cluster.iter().filter(|(prefix, _)| prefix.contains(&address));
    hits.max_by_key(|(prefix, _)| prefix.prefix_len()).map(|(_, value)| *value)
}

/// Invariants of every state that a plan passes through.
pub fn check(old: &KernelState, now: &KernelState, new: &KernelState) {
    let pairs = PODS.iter().flat_map(|pod| OUTSIDE.map(|to| (ip(pod), ip(to))));
    for (pod, to) in pairs.filter(|(pod, to)| pod.is_ipv4() == to.is_ipv4()) {
        let mut allowed = fates(old, pod, to);
        allowed.extend(fates(new, pod, to));
        allowed.insert(FlowFate::Dropped);
        let fates = fates(now, pod, to);
        assert!(fates.is_subset(&allowed), "{pod} to {to} gets {fates:?}, allowed {allowed:?}");
    }
    for (class, policies) in &now.classes {
        let known = [old, new].into_iter().find_map(|state| state.classes.get(class));
        assert_eq!(known, Some(policies), "{class:?} means one thing");
    }
    for address in ["203.0.113.10", "203.0.113.11", "203.0.5.5", "203.5.5.5"].map(ip) {
        let found = lookup(&now.cluster, address);
        assert!([lookup(&old.cluster, address), lookup(&new.cluster, address)].contains(&found), "{address}");
    }
    let owned: BTreeSet<_> = now.owned.values().collect();
    assert_eq!(owned.len(), now.owned.len(), "two objects own one address");
    for (id, with) in &now.shared {
        let has = |state: &KernelState| state.owned.get(id) == now.owned.get(id) && state.shared.get(id) == Some(with);
        assert!(has(old) || has(new), "{id:?} is shared in neither state");
    }
    for ((id, _), policy) in &now.policy {
        let here = policy.slots.iter().filter(|slot| slot.place == Place::Here);
        for slot in here {
            assert_eq!(now.owned.get(id), Some(&slot.address), "routed here before it is owned");
        }
    }
}

/// Invariants of single actions.
pub fn check_action(now: &KernelState, action: &Action, cut: &BTreeSet<(EgressId, IpAddr)>, old: &KernelState) {
    match action {
        Action::Own(id, address) | Action::Share(id, address, _) => {
            assert!(!now.owned.contains_key(id), "{id:?} must give up its address first");
            assert!(!now.owned.values().any(|owned| owned == address), "{address} is still owned");
        }
        Action::Disown(id, address) => assert_eq!(now.owned.get(id), Some(address)),
        Action::PutPolicy(id, family, policy) => {
            for slot in &policy.slots {
                let others = old.policy.iter().filter(|(key, _)| **key != (*id, *family));
                for ((other, _), _) in others.filter(|(_, p)| p.slots.iter().any(|s| s.address == slot.address)) {
                    assert!(cut.contains(&(*other, slot.address)), "{} comes before it is cut", slot.address);
                }
            }
        }
        _ => {}
    }
}

/// A flow of a pod of this node to a destination (or of a pod of another node if `None`), with its object and its address.
pub type PodFlow = (Option<(IpAddr, IpAddr)>, EgressId, IpAddr);

/// Flows that pods of another node may have begun here: that node's policy may be ahead of this one's, or behind it.
pub fn begun_from_elsewhere(state: &KernelState) -> BTreeSet<PodFlow> {
    state.owned.iter().map(|(id, address)| (None, *id, *address)).collect()
}

/// Every flow that is permitted in this state.
pub fn running(state: &KernelState) -> BTreeSet<PodFlow> {
    let slots = || state.policy.iter().flat_map(|((id, _), policy)| policy.addresses().map(|address| (*id, address)));
    let pods = || PODS.iter().flat_map(|pod| OUTSIDE.map(|to| Some((ip(pod), ip(to))))).chain([None]);
    let all = slots().flat_map(|(id, address)| pods().map(move |pod| (pod, id, address)));
    let is_one_family = |flow: &PodFlow| {
        flow.0.is_none_or(|(pod, to)| pod.is_ipv4() == flow.2.is_ipv4() && to.is_ipv4() == flow.2.is_ipv4())
    };
    all.filter(|flow| is_one_family(flow) && state.permits(flow.0, flow.1, flow.2)).collect()
}

/// Performs an action on state and flows.
pub fn perform(state: &mut KernelState, flows: &mut BTreeSet<PodFlow>, action: &Action) {
    flows.retain(|(pod, id, address)| match action {
        Action::CutFlows(of, lost) => of != id || !lost.contains(address),
        Action::CutPodFlows(of, lost) => pod.is_none_or(|(pod, to)| *of != pod || !lost.contains(*id, to)),
        Action::CutPod(of) => pod.is_none_or(|(pod, _)| *of != pod),
        Action::CutOrphans => state.permits(*pod, *id, *address),
        _ => true,
    });
    state.apply(action);
}
