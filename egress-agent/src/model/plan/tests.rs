//! Every prefix of plans between random states, judged by a small reference of what a kernel with that prefix does.

use std::collections::BTreeMap;

use super::*;
use crate::model::samples::{ip, net};
use crate::model::state::{NodeAddress, PodOwner, Prefix, PrefixKind, TunnelEndpoint};

/// What may happen to a new flow of a pod towards the world.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Fate {
    Dropped,
    NodeAddress,
    Leaves(IpAddr),
}

/// The kernel in miniature: all fates that flows of the pod may have.
fn fates(state: &KernelState, pod: IpAddr) -> BTreeSet<Fate> {
    let fate = match state.pods.get(&pod) {
        None if matches!(state.on_unknown_pod, Some(OnUnknownPod::Pass | OnUnknownPod::PassWhileFollowed)) => {
            Fate::NodeAddress
        }
        None => Fate::Dropped,
        Some(PodState::Known) => Fate::NodeAddress,
        Some(PodState::Selected(id)) => match state.policy.get(&(*id, family_of(pod))) {
            None => Fate::Dropped,
            Some(policy) if policy.slots.is_empty() => match policy.when_empty {
                WhenEmpty::Drop => Fate::Dropped,
                WhenEmpty::NodeAddress | WhenEmpty::NotListed => Fate::NodeAddress,
            },
            Some(policy) => {
                let served = |slot: &&Slot| slot.place != Place::Here || state.owned.get(id) == Some(&slot.address);
                return policy.slots.iter().filter(served).map(|slot| Fate::Leaves(slot.address)).collect();
            }
        },
    };
    BTreeSet::from([fate])
}

fn family_of(address: IpAddr) -> Family {
    crate::model::desired::family_of(address)
}

/// Marsaglia's xorshift: small, and the seed replays the case.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % n
    }

    fn one_of<T: Copy>(&mut self, items: &[T]) -> T {
        let n = self.below(items.len() as u64);
        items[usize::try_from(n).expect("a small number")]
    }
}

pub(crate) const PODS: [&str; 4] = ["10.244.1.10", "10.244.1.11", "fd00:10:244:1::10", "fd00:10:244:1::11"];
const ADDRESSES: [&str; 6] =
    ["172.18.0.100", "172.18.0.101", "172.18.0.102", "172.18.0.103", "fd00:172:18::100", "fd00:172:18::101"];
const PREFIXES: [&str; 4] = ["203.0.0.0/8", "203.0.113.0/24", "203.0.113.10/32", "203.0.0.0/16"];
const ENDPOINTS: [&str; 2] = ["172.18.0.3", "172.18.0.4"];

/// A state as a desired state may be: one object per address, one address per object here, and that one owned.
pub(crate) fn random_state(random: &mut Random) -> KernelState {
    let mut state = KernelState {
        on_unknown_pod: Some(random.one_of(&[OnUnknownPod::Drop, OnUnknownPod::Pass, OnUnknownPod::PassWhileFollowed])),
        ..KernelState::default()
    };
    let ids = [EgressId(1), EgressId(2), EgressId(3)];
    for id in ids.into_iter().filter(|_| random.below(4) > 0).collect::<Vec<_>>() {
        for family in [Family::V4, Family::V6] {
            let when_empty = random.one_of(&[WhenEmpty::Drop, WhenEmpty::NodeAddress, WhenEmpty::NotListed]);
            state.policy.insert((id, family), Policy { slots: Vec::new(), pending: Vec::new(), when_empty });
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
        }
        policy.slots.push(Slot { address, place: if here { Place::Here } else { remote } });
    }
    for pod in PODS.map(ip) {
        let selected = PodState::Selected(random.one_of(&[ids[0], ids[1], ids[2], NOT_NUMBERED]));
        if random.below(4) > 0 {
            state.pods.insert(pod, if random.below(4) > 0 { selected } else { PodState::Known });
        }
    }
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

pub(crate) fn lookup(cluster: &BTreeMap<IpNet, Prefix>, address: IpAddr) -> Option<Prefix> {
    let hits = cluster.iter().filter(|(prefix, _)| prefix.contains(&address));
    hits.max_by_key(|(prefix, _)| prefix.prefix_len()).map(|(_, value)| *value)
}

/// What holds in every state that a plan passes through.
pub(crate) fn check(old: &KernelState, now: &KernelState, new: &KernelState) {
    for pod in PODS.map(ip) {
        let mut allowed = fates(old, pod);
        allowed.extend(fates(new, pod));
        allowed.insert(Fate::Dropped);
        let fates = fates(now, pod);
        assert!(fates.is_subset(&allowed), "{pod} gets {fates:?}, allowed {allowed:?}");
    }
    for address in ["203.0.113.10", "203.0.113.11", "203.0.5.5", "203.5.5.5"].map(ip) {
        let found = lookup(&now.cluster, address);
        assert!([lookup(&old.cluster, address), lookup(&new.cluster, address)].contains(&found), "{address}");
    }
    let owned: BTreeSet<_> = now.owned.values().collect();
    assert_eq!(owned.len(), now.owned.len(), "two objects own one address");
    for ((id, _), policy) in &now.policy {
        let here = policy.slots.iter().filter(|slot| slot.place == Place::Here);
        for slot in here {
            assert_eq!(now.owned.get(id), Some(&slot.address), "steered here before it is owned");
        }
    }
}

/// What holds for single actions.
fn check_action(now: &KernelState, action: &Action, cut: &BTreeSet<(EgressId, IpAddr)>, old: &KernelState) {
    match action {
        Action::Own(id, address) => {
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

fn check_plan(old: &KernelState, new: &KernelState) -> Vec<Action> {
    let actions = plan(old, new);
    let (mut now, mut cut, mut cut_pods, mut gone) = (old.clone(), BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
    for action in &actions {
        check_action(&now, action, &cut, old);
        step(&mut now, action);
        if let Action::CutFlows(id, addresses) = action {
            cut.extend(addresses.iter().map(|address| (*id, *address)));
            let still = now.policy.iter().filter(|((i, _), _)| i == id).flat_map(|(_, p)| p.addresses());
            assert!(!{ still }.any(|a| addresses.contains(&a)), "cut while it is still steered");
        }
        if let Action::CutPodFlows(pod, id) = action {
            assert_ne!(now.pods.get(pod), Some(&PodState::Selected(*id)), "cut while it is still selected");
            cut_pods.insert((*pod, *id));
        }
        if let Action::CutPod(pod) = action {
            gone.insert(*pod);
        }
        check(old, &now, new);
    }
    assert_eq!(&now, new, "the plan leads elsewhere");
    for (pod, state) in &old.pods {
        if let PodState::Selected(id) = state
            && *id != NOT_NUMBERED
            && new.pods.get(pod) != Some(state)
        {
            assert!(cut_pods.contains(&(*pod, *id)) || gone.contains(pod), "{pod} keeps the flows of {id:?}");
        }
        let owners = (old.owners.get(pod), new.owners.get(pod));
        let is_gone = !new.pods.contains_key(pod) || matches!(owners, (Some(old), Some(new)) if old != new);
        assert_eq!(gone.contains(pod), is_gone, "what is left of {pod} goes when it does");
    }
    actions
}

#[test]
fn every_prefix_of_every_plan_is_safe() {
    for seed in 1..=2_000_u64 {
        let mut random = Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        let (mut old, new) = (random_state(&mut random), random_state(&mut random));
        // Of some it has not been noted yet.
        old.owners.retain(|_, _| random.below(4) > 0);
        let outcome = std::panic::catch_unwind(|| {
            let actions = check_plan(&old, &new);
            assert_eq!(plan(&new, &new), [], "nothing is to do when nothing differs");
            actions
        });
        let actions = outcome.unwrap_or_else(|_| panic!("seed {seed}\nold {old:#?}\nnew {new:#?}"));

        // A new agent starts from what an interrupted plan has left.
        let mut interrupted = old.clone();
        let steps = usize::try_from(random.below(actions.len() as u64 + 1)).expect("a small number");
        actions.iter().take(steps).for_each(|action| step(&mut interrupted, action));
        check_plan(&interrupted, &random_state(&mut random));
    }
}

/// A flow of a pod of this node, or, where that is `None`, of another's: with this object, and this address.
pub(crate) type Flow = (Option<IpAddr>, EgressId, IpAddr);

/// What a pod of another node may have begun here by now: that node's policy may be ahead of this one's, or behind it.
fn begun_from_elsewhere(state: &KernelState) -> BTreeSet<Flow> {
    state.owned.iter().map(|(id, address)| (None, *id, *address)).collect()
}

/// Everything that goes on in this state.
pub(crate) fn running(state: &KernelState) -> BTreeSet<Flow> {
    let slots = || state.policy.iter().flat_map(|((id, _), policy)| policy.addresses().map(|address| (*id, address)));
    let pods = || PODS.map(ip).into_iter().map(Some).chain([None]);
    let all = slots().flat_map(|(id, address)| pods().map(move |pod| (pod, id, address)));
    let is_one_family = |flow: &Flow| flow.0.is_none_or(|pod| pod.is_ipv4() == flow.2.is_ipv4());
    all.filter(|flow| is_one_family(flow) && state.permits(flow.0, flow.1, flow.2)).collect()
}

/// Performs an action on state and flows.
pub(crate) fn perform(state: &mut KernelState, flows: &mut BTreeSet<Flow>, action: &Action) {
    flows.retain(|(pod, id, address)| match action {
        Action::CutFlows(of, lost) => of != id || !lost.contains(address),
        Action::CutPodFlows(of, from) => Some(*of) != *pod || from != id,
        Action::CutPod(of) => Some(*of) != *pod,
        Action::CutOrphans => state.permits(*pod, *id, *address),
        _ => true,
    });
    step(state, action);
}

/// As who starts without a memory does it.
fn begin_anew(state: &mut KernelState, flows: &mut BTreeSet<Flow>, desired: &KernelState) {
    perform(state, flows, &Action::CutOrphans);
    for action in plan(state, desired) {
        perform(state, flows, &action);
    }
}

#[test]
fn an_agent_that_is_killed_at_any_step_leaves_no_cut_undone() {
    for seed in 1..=300_u64 {
        let mut random = Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        let [old, new, newer] = [(); 3].map(|()| random_state(&mut random));
        let actions = plan(&old, &new);
        let (mut now, mut flows) = (old.clone(), running(&old));
        actions.iter().for_each(|action| perform(&mut now, &mut flows, action));
        let expected = flows;
        assert!(expected.is_subset(&running(&new)), "seed {seed}: by a plan that nobody interrupts");
        let (mut now, mut flows) = (old.clone(), running(&old));
        for action in &actions {
            flows.extend(begun_from_elsewhere(&now));
            perform(&mut now, &mut flows, action);
        }
        assert!(flows.is_subset(&running(&new)), "seed {seed}: and while other nodes go on sending");
        for steps in 0..=actions.len() {
            let (mut now, mut flows) = (old.clone(), running(&old));
            actions.iter().take(steps).for_each(|action| perform(&mut now, &mut flows, action));
            let begun = begun_from_elsewhere(&now);
            flows.extend(&begun);
            let (mut other, mut others) = (now.clone(), flows.clone());
            begin_anew(&mut now, &mut flows, &new);
            let mut expected = expected.clone();
            expected.extend(begun.intersection(&running(&new)));
            assert_eq!(flows, expected, "seed {seed}, killed after {steps} of {actions:#?}");
            // The cluster may have changed meanwhile.
            begin_anew(&mut other, &mut others, &newer);
            assert!(others.is_subset(&running(&newer)), "seed {seed}, killed after {steps}, then another change");
        }
    }
}

#[test]
fn a_claim_permits_what_other_nodes_send_by_it() {
    let (id, address, pod) = (EgressId(1), ip("172.18.0.100"), ip("10.244.1.10"));
    let pods = BTreeMap::from([(pod, PodState::Selected(id))]);
    let claimed = KernelState { pods, owned: BTreeMap::from([(id, address)]), ..KernelState::default() };
    assert!(claimed.permits(None, id, address), "whose policy lists it");
    assert!(!claimed.permits(Some(pod), id, address), "this node's does not");
    assert!(!claimed.permits(None, EgressId(2), address) && !claimed.permits(None, id, ip("172.18.0.101")));
    let released = KernelState { owned: BTreeMap::new(), ..claimed };
    assert!(!released.permits(None, id, address), "neither stands");
}

#[test]
fn an_address_that_moves_between_objects_here_is_given_up_first() {
    let (address, here) = (ip("172.18.0.100"), Place::Here);
    let with = |id: u32| KernelState {
        owned: BTreeMap::from([(EgressId(id), address)]),
        policy: [1, 2]
            .map(|i| {
                let slots = if i == id { vec![Slot { address, place: here }] } else { Vec::new() };
                ((EgressId(i), Family::V4), Policy { slots, pending: Vec::new(), when_empty: WhenEmpty::Drop })
            })
            .into(),
        ..KernelState::default()
    };
    let empty = Policy { slots: Vec::new(), pending: Vec::new(), when_empty: WhenEmpty::Drop };
    let full = Policy { slots: vec![Slot { address, place: here }], pending: Vec::new(), when_empty: WhenEmpty::Drop };
    let expected = [
        Action::PutPolicy(EgressId(1), Family::V4, empty),
        Action::Disown(EgressId(1), address),
        Action::CutFlows(EgressId(1), BTreeSet::from([address])),
        Action::Own(EgressId(2), address),
        Action::PutPolicy(EgressId(2), Family::V4, full),
    ];
    assert_eq!(plan(&with(1), &with(2)), expected);
}

#[test]
fn a_pod_event_is_one_write() {
    let pod = ip(PODS[0]);
    let mut random = Random(7);
    let actual = random_state(&mut random);
    let mut desired = actual.clone();
    desired.pods.insert(pod, PodState::Known);
    let expected = if actual.pods.contains_key(&pod) { 2 } else { 1 };
    let one = Addresses { pods: BTreeSet::from([pod]), ..Addresses::default() };
    let parts = || plan_addresses(&actual, &desired, &one).into_actions().collect::<Vec<_>>();
    assert!(parts().len() <= expected);
    assert_eq!(parts(), plan(&actual, &desired));
}

/// One walk serves all cuts that stand one behind the other.
#[test]
fn cuts_of_many_pods_stand_together() {
    let pods: Vec<IpAddr> = (10..60).map(|last| ip(&format!("10.244.1.{last}"))).collect();
    let all = |state| KernelState { pods: pods.iter().map(|pod| (*pod, state)).collect(), ..KernelState::default() };
    let selected = PodState::Selected(EgressId(1));
    for desired in [all(PodState::Known), all(PodState::Selected(EgressId(2))), KernelState::default()] {
        let plan = plan(&all(selected), &desired);
        let groups = plan.chunk_by(|one, next| one.is_cut() == next.is_cut());
        let cuts: Vec<_> = groups.filter(|group| group.iter().any(Action::is_cut)).map(<[Action]>::len).collect();
        assert_eq!(cuts, [pods.len()], "{desired:?}");
    }
}

#[test]
fn new_pods_that_nothing_selects_wait_for_nothing() {
    let mut random = Random(11);
    for _ in 0..200 {
        let mut desired = random_state(&mut random);
        desired.on_unknown_pod = Some(OnUnknownPod::Drop);
        let known: Vec<_> = desired.pods.iter().filter(|(_, pod)| **pod == PodState::Known).collect();
        let first = plan(&KernelState::default(), &desired).into_iter().take(known.len());
        let expected = known.into_iter().map(|(address, pod)| Action::PutPod(*address, *pod));
        assert!(first.eq(expected), "they would be dropped as unknown until the rest is there");
    }
}

#[test]
fn a_pod_that_goes_or_hands_its_address_on_leaves_nothing_behind() {
    let address = ip("10.244.1.10");
    let with = |state: PodState, owner: &str| KernelState {
        pods: BTreeMap::from([(address, state)]),
        owners: BTreeMap::from([(address, PodOwner::of(owner))]),
        ..KernelState::default()
    };
    let (id, owner) = (EgressId(1), PodOwner::of("b"));
    let selected = PodState::Selected(id);
    for (actual, desired, expected) in [
        (with(selected, "a"), with(selected, "a"), vec![]),
        (with(selected, "a"), with(selected, "b"), vec![Action::CutPod(address), Action::PutOwner(address, owner)]),
        (
            with(PodState::Known, "a"),
            with(selected, "b"),
            vec![Action::PutPod(address, selected), Action::CutPod(address), Action::PutOwner(address, owner)],
        ),
        (
            with(selected, "b"),
            with(PodState::Known, "b"),
            vec![Action::PutPod(address, PodState::Known), Action::CutPodFlows(address, id)],
        ),
        (with(PodState::Known, "a"), KernelState::default(), vec![Action::CutPod(address), Action::RemovePod(address)]),
        (
            with(selected, "a"),
            KernelState::default(),
            vec![
                Action::PutPod(address, PodState::Selected(NOT_NUMBERED)),
                Action::CutPod(address),
                Action::RemovePod(address),
            ],
        ),
        (
            KernelState::default(),
            with(selected, "b"),
            vec![Action::PutPod(address, selected), Action::PutOwner(address, owner)],
        ),
    ] {
        let actions = plan(&actual, &desired);
        assert_eq!(actions, expected, "{actual:?} {desired:?}");
        // An agent that is killed, or a cut that fails, is made up for.
        let mut now = actual.clone();
        let due = actions.contains(&Action::CutPod(address));
        for action in actions.into_iter().take_while(|action| *action != Action::CutPod(address)) {
            step(&mut now, &action);
        }
        assert_eq!(plan(&now, &desired).contains(&Action::CutPod(address)), due, "{actual:?} {desired:?}");
    }
}
