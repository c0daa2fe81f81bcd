//! Every prefix of plans between random states, judged by a reference model of a kernel with that prefix.

use std::collections::BTreeMap;

use egress_common::random::Random;

use super::reference::*;
use super::*;
use crate::model::samples::ip;
use crate::model::state::{HandoverState, LostFlows, PodOwner, PodPort, SharedWith, TunnelEndpoint};

fn check_plan(old: &KernelState, new: &KernelState) -> Vec<Action> {
    let actions = plan(old, new);
    let (mut now, mut cut, mut cut_pods, mut gone) = (old.clone(), BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
    for action in &actions {
        check_action(&now, action, &cut, old);
        now.apply(action);
        if let Action::CutFlows(id, addresses) = action {
            cut.extend(addresses.iter().map(|address| (*id, *address)));
            let still = now.policy.iter().filter(|((i, _), _)| i == id).flat_map(|(_, p)| p.addresses());
            assert!(!{ still }.any(|a| addresses.contains(&a)), "cut while it is still routed");
        }
        if let Action::CutPodFlows(pod, lost) = action {
            for (id, to) in lost.of.iter().flat_map(|id| OUTSIDE.map(|to| (*id, ip(to)))) {
                if lost.contains(id, to) && to.is_ipv4() == pod.is_ipv4() {
                    assert_ne!(now.policies_of(*pod).of(to), Some(id), "cut while it is still selected");
                    cut_pods.insert((*pod, id, to));
                }
            }
        }
        if let Action::CutPod(pod) = action {
            gone.insert(*pod);
        }
        check(old, &now, new);
        assert!(now.used_classes().iter().all(|class| now.classes.contains_key(class)), "a pod's class comes first");
    }
    assert_eq!(&now, new, "the plan leads elsewhere");
    for pod in old.pods.keys() {
        for to in OUTSIDE.map(ip).into_iter().filter(|to| to.is_ipv4() == pod.is_ipv4()) {
            let (had, has) = (old.policies_of(*pod).of(to), new.policies_of(*pod).of(to));
            if let Some(id) = had.filter(|id| *id != NOT_NUMBERED && has != had) {
                assert!(cut_pods.contains(&(*pod, id, to)) || gone.contains(pod), "{pod} keeps its flow to {to}");
            }
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
        let mut random = Random::new(seed);
        let (mut old, new) = (random_state(&mut random), random_state(&mut random));
        // Some owners have not been recorded yet.
        old.owners.retain(|_, _| random.below(4) > 0);
        let outcome = std::panic::catch_unwind(|| {
            let actions = check_plan(&old, &new);
            assert_eq!(plan(&new, &new), [], "nothing is to do when nothing differs");
            actions
        });
        let actions = outcome.unwrap_or_else(|_| panic!("seed {seed}\nold {old:#?}\nnew {new:#?}"));

        // A new agent starts from an interrupted plan.
        let mut interrupted = old.clone();
        let steps = random.below(actions.len() + 1);
        actions.iter().take(steps).for_each(|action| interrupted.apply(action));
        check_plan(&interrupted, &random_state(&mut random));
    }
}

/// Starts like an agent without memory.
fn restart(state: &mut KernelState, flows: &mut BTreeSet<PodFlow>, desired: &KernelState) {
    perform(state, flows, &Action::CutOrphans);
    for action in plan(state, desired) {
        perform(state, flows, &action);
    }
}

/// The pods whose entries permit no flow for a moment.
fn parked(state: &KernelState) -> BTreeSet<IpAddr> {
    let parked = state.pods.iter().filter(|(_, pod)| **pod == PodState::Selected(NOT_NUMBERED));
    parked.map(|(address, _)| *address).collect()
}

#[test]
fn an_agent_killed_at_any_step_leaves_no_flow_uncut() {
    for seed in 1..=300_u64 {
        let mut random = Random::new(seed);
        let [old, new, newer] = [(); 3].map(|()| random_state(&mut random));
        let actions = plan(&old, &new);
        let (mut now, mut flows) = (old.clone(), running(&old));
        actions.iter().for_each(|action| perform(&mut now, &mut flows, action));
        let expected = flows;
        assert!(expected.is_subset(&running(&new)), "seed {seed}: by an uninterrupted plan");
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
            let parked = parked(&now);
            restart(&mut now, &mut flows, &new);
            let mut expected = expected.clone();
            expected.retain(|(pod, ..)| pod.is_none_or(|(pod, _)| !parked.contains(&pod)));
            expected.extend(begun.intersection(&running(&new)));
            assert_eq!(flows, expected, "seed {seed}, killed after {steps} of {actions:#?}");
            // The cluster may have changed in the meantime.
            restart(&mut other, &mut others, &newer);
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
    assert!(!claimed.permits(Some((pod, ip(OUTSIDE[0]))), id, address), "this node's does not");
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
                ((EgressId(i), Family::V4), Policy::new(slots, Vec::new(), WhenEmpty::Drop))
            })
            .into(),
        ..KernelState::default()
    };
    let empty = Policy::new(Vec::new(), Vec::new(), WhenEmpty::Drop);
    let full = Policy::new(vec![Slot { address, place: here }], Vec::new(), WhenEmpty::Drop);
    let expected = [
        Action::PutPolicy(EgressId(1), Family::V4, empty),
        Action::Disown(EgressId(1), address),
        Action::CutFlows(EgressId(1), BTreeSet::from([address])),
        Action::Own(EgressId(2), address),
        Action::PutPolicy(EgressId(2), Family::V4, full),
    ];
    assert_eq!(plan(&with(1), &with(2)), expected);
}

/// Its flows wait in between.
#[test]
fn an_address_that_becomes_a_services_too_is_claimed_anew() {
    let (id, address) = (EgressId(1), ip(ADDRESSES[0]));
    let slots = vec![Slot { address, place: Place::Here }];
    let full = Policy::new(slots, Vec::new(), WhenEmpty::Drop);
    let waiting = Policy::new(Vec::new(), vec![address], WhenEmpty::Drop);
    let with = |shared: &[EgressId]| KernelState {
        owned: BTreeMap::from([(id, address)]),
        shared: shared.iter().map(|id| (*id, SharedWith::Service)).collect(),
        policy: BTreeMap::from([((id, Family::V4), full.clone())]),
        ..KernelState::default()
    };
    let (own, shared) = (with(&[]), with(&[id]));
    for (old, new, claim) in
        [(&own, &shared, Action::Share(id, address, SharedWith::Service)), (&shared, &own, Action::Own(id, address))]
    {
        let expected = [
            Action::PutPolicy(id, Family::V4, waiting.clone()),
            Action::Disown(id, address),
            claim,
            Action::PutPolicy(id, Family::V4, full.clone()),
        ];
        assert_eq!(check_plan(old, new), expected);
    }
    assert_eq!(plan(&KernelState::default(), &shared)[0], Action::Share(id, address, SharedWith::Service));
}

/// Flows to them would leave by an address of another network.
#[test]
fn destinations_wait_while_their_address_is_exchanged() {
    let id = EgressId(1);
    let [old, new, further] = [ADDRESSES[0], ADDRESSES[1], ADDRESSES[2]].map(ip);
    let there = Slot { address: further, place: Place::Remote(TunnelEndpoint(ip(ENDPOINTS[0]))) };
    let destinations = |here: &[IpAddr]| {
        let [default, network] = ["0.0.0.0/0", "10.10.0.0/16"].map(|text| text.parse().expect("a literal"));
        BTreeMap::<IpNet, _>::from([(default, here.iter().copied().collect()), (network, [further].into())])
    };
    let with = |address: IpAddr| {
        let slots = vec![Slot { address, place: Place::Here }, there];
        let policy = Policy { destinations: destinations(&[address]), ..Policy::new(slots, vec![], WhenEmpty::Drop) };
        KernelState {
            owned: [(id, address)].into(),
            policy: [((id, Family::V4), policy)].into(),
            ..KernelState::default()
        }
    };
    let steps = check_plan(&with(old), &with(new));
    let written: Vec<&Policy> = steps
        .iter()
        .filter_map(|step| match step {
            Action::PutPolicy(.., policy) => Some(policy),
            _ => None,
        })
        .collect();
    // The new address is pending until it is claimed.
    let waiting = Policy { destinations: destinations(&[new]), ..Policy::new(vec![there], vec![new], WhenEmpty::Drop) };
    assert_eq!(written, [&waiting, &with(new).policy[&(id, Family::V4)]]);
}

/// NAT leaves them to the Service from the first packet on.
#[test]
fn ports_of_a_service_are_known_before_its_address_is_claimed() {
    let (id, address) = (EgressId(1), ip(ADDRESSES[0]));
    let port = |number| PodPort { protocol: 6, number };
    let with = |ports: &[u16]| KernelState {
        owned: BTreeMap::from([(id, address)]),
        shared: BTreeMap::from([(id, SharedWith::Service)]),
        exposed: BTreeMap::from([(address, ports.iter().copied().map(port).collect())]),
        ..KernelState::default()
    };
    let (none, one, two) = (KernelState::default(), with(&[80]), with(&[80, 443]));
    let expose = |number| Action::Expose(address, port(number));
    assert_eq!(check_plan(&none, &two), [expose(80), expose(443), Action::Share(id, address, SharedWith::Service)]);
    assert_eq!(check_plan(&one, &two), [expose(443)]);
    let changed = Addresses { services: BTreeSet::from([address]), ..Addresses::default() };
    let actions: Vec<_> = plan_addresses(&two, &one, &changed).into_actions().collect();
    assert_eq!(actions, [Action::Conceal(address, port(443))]);
    let cut = Action::CutFlows(id, BTreeSet::from([address]));
    assert_eq!(check_plan(&one, &none), [Action::Conceal(address, port(80)), Action::Disown(id, address), cut]);
}

/// Both nodes of a hand-over pass on what is for none of these ports.
#[test]
fn ports_of_a_service_are_known_while_its_address_moves() {
    let (id, address) = (EgressId(1), ip(ADDRESSES[0]));
    let port = PodPort { protocol: 6, number: 80 };
    let exposed = BTreeMap::from([(address, BTreeSet::from([port]))]);
    let handover = |stage| {
        let peer = TunnelEndpoint(ip("172.18.0.3"));
        HandoverState { stage, address, peer, shared_with: Some(SharedWith::Service) }
    };
    let moving = |stage| KernelState {
        handovers: BTreeMap::from([(id, handover(stage))]),
        exposed: exposed.clone(),
        ..KernelState::default()
    };
    let held = KernelState {
        owned: BTreeMap::from([(id, address)]),
        shared: BTreeMap::from([(id, SharedWith::Service)]),
        exposed: exposed.clone(),
        ..KernelState::default()
    };
    let none = KernelState::default();
    let (expose, conceal) = (Action::Expose(address, port), Action::Conceal(address, port));
    let end = Action::EndHandover(id, address);
    let put = |stage| Action::PutHandover(id, handover(stage));
    let (arriving, leaving) = (HandoverStage::Arriving, HandoverStage::Leaving);
    assert_eq!(check_plan(&none, &moving(arriving)), [expose, put(arriving)]);
    assert_eq!(check_plan(&moving(arriving), &held), [Action::Share(id, address, SharedWith::Service), end.clone()]);
    assert_eq!(check_plan(&held, &moving(leaving)), [put(leaving)]);
    for stage in [arriving, leaving] {
        assert_eq!(check_plan(&moving(stage), &none), [end.clone(), conceal.clone()], "{stage:?}");
    }
}

#[test]
fn a_pod_event_is_one_write() {
    let pod = ip(PODS[0]);
    let mut random = Random::new(7);
    let actual = random_state(&mut random);
    let mut desired = actual.clone();
    desired.pods.insert(pod, PodState::Known);
    let expected = if actual.pods.contains_key(&pod) { 2 } else { 1 };
    let one = Addresses { pods: BTreeSet::from([pod]), ..Addresses::default() };
    let parts = || plan_addresses(&actual, &desired, &one).into_actions().collect::<Vec<_>>();
    assert!(parts().len() <= expected);
    assert_eq!(parts(), plan(&actual, &desired));
}

/// One walk serves all consecutive cuts.
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
    let mut random = Random::new(11);
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
fn a_pod_that_goes_or_passes_its_address_on_leaves_no_state() {
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
            vec![Action::PutPod(address, PodState::Known), Action::CutPodFlows(address, LostFlows::of_policy(id))],
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
        // The cut of a killed agent, or a failed one, becomes due again.
        let mut now = actual.clone();
        let due = actions.contains(&Action::CutPod(address));
        for action in actions.into_iter().take_while(|action| *action != Action::CutPod(address)) {
            now.apply(&action);
        }
        assert_eq!(plan(&now, &desired).contains(&Action::CutPod(address)), due, "{actual:?} {desired:?}");
    }
}
