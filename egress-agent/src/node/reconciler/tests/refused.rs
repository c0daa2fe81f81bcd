//! Entries that the kernel refuses, at any step of any plan.

use super::*;
use egress_common::random::Random;
use egress_core::model::state::TunnelEndpoint;
use egress_core::plan::reference::{PodFlow, check, perform as flow_step, random_state, running};
use egress_core::plan::refusal::KernelEntry;

/// A model of the kernel that refuses entries at random (seeded) and checks every intermediate state.
struct RandomRefusals {
    random: Random,
    refuses: bool,
    state: KernelState,
    flows: BTreeSet<PodFlow>,
    /// The states before and after the plan.
    before: KernelState,
    new: KernelState,
    /// Entries that were refused during this plan.
    refused: BTreeSet<KernelEntry>,
}

impl RandomRefusals {
    /// The state after the plan, with refused prefixes as before.
    fn expected(&self) -> KernelState {
        let mut expected = self.new.clone();
        for entry in &self.refused {
            let KernelEntry::Prefix(prefix) = entry else { continue };
            match self.before.cluster.get(prefix) {
                Some(value) => drop(expected.cluster.insert(*prefix, *value)),
                None => drop(expected.cluster.remove(prefix)),
            }
        }
        expected
    }
}

impl Executor for RandomRefusals {
    async fn observe(&mut self) -> Result<KernelState, DataplaneError> {
        Ok(self.state.clone())
    }

    async fn held(&mut self) -> Result<KernelState, DataplaneError> {
        Ok(self.state.clone())
    }

    fn cut(&mut self, cuts: Vec<Action>) -> BoxFuture<'static, Result<(), DataplaneError>> {
        cuts.iter().for_each(|cut| flow_step(&mut self.state, &mut self.flows, cut));
        Box::pin(std::future::ready(Ok(())))
    }

    async fn apply(&mut self, action: &Action) -> Result<(), DataplaneError> {
        // Writes that are not entries always succeed.
        let entry = KernelEntry::of(action).filter(|entry| *entry != KernelEntry::UnknownPods);
        if let Some(entry) = entry
            && self.refuses
            && self.random.below(3) == 0
        {
            self.refused.insert(entry);
            let (map, source) = ("of a test", std::io::Error::from_raw_os_error(libc::ENOMEM));
            return Err(match self.random.below(2) {
                0 => DataplaneError::Full { map, limit: 0 },
                _ => DataplaneError::Refused { map, source },
            });
        }
        flow_step(&mut self.state, &mut self.flows, action);
        check(&self.before, &self.state, &self.expected());
        Ok(())
    }
}

/// Plans and performs until no claim fails, and returns the last planned state.
async fn round(
    reconciler: &mut Reconciler<RandomRefusals>,
    actual: &mut KernelState,
    desired: &KernelState,
) -> KernelState {
    let mut refused = BTreeMap::new();
    loop {
        let mut planned = desired.clone();
        withhold(&mut planned, &refused);
        let actions = plan(actual, &planned);
        reconciler.executor.before.clone_from(actual);
        reconciler.executor.refused.retain(|entry| matches!(entry, KernelEntry::Claim(_)));
        let failed = reconciler.perform(actual, &actions).await.expect("a refused entry does not stop the plan");
        assert_eq!(*actual, reconciler.executor.state, "the tracked state is the kernel's");
        if failed.is_empty() {
            reconciler.left_out.settle(actual, &planned, true, Instant::now());
            return planned;
        }
        refused.extend(failed.into_iter().map(|(id, address, _)| (id, address)));
    }
}

#[tokio::test]
async fn any_entries_may_be_refused_and_nothing_leaves_with_another_address() {
    for seed in 1..=1_500_u64 {
        let mut random = Random::new(seed);
        let [old, new] = [(); 2].map(|()| random_state(&mut random));
        let (state, before, flows) = (old.clone(), old.clone(), running(&old));
        let kernel =
            RandomRefusals { random, refuses: true, state, flows, before, new: new.clone(), refused: BTreeSet::new() };
        let mut reconciler = Reconciler::new(settings(), kernel, None, watch::channel(Ready::default()).0);
        let mut actual = old.clone();
        let planned = round(&mut reconciler, &mut actual, &new).await;

        // Everything else is in the desired state.
        let refused = &reconciler.executor.refused;
        assert_eq!(actual.cluster, reconciler.executor.expected().cluster, "seed {seed}");
        let untouched = |entry: &KernelEntry| !refused.contains(entry);
        for address in new.pods.keys().chain(old.pods.keys()).filter(|address| untouched(&KernelEntry::Pod(**address)))
        {
            assert_eq!(actual.pods.get(address), new.pods.get(address), "seed {seed}");
        }
        for address in new.nodes.keys().filter(|address| untouched(&KernelEntry::Node(**address))) {
            assert_eq!(actual.nodes.get(address), new.nodes.get(address), "seed {seed}");
        }
        for (id, address) in new.owned.iter().filter(|(id, _)| untouched(&KernelEntry::Claim(**id))) {
            assert_eq!(actual.owned.get(id), Some(address), "seed {seed}");
        }
        for (key, policy) in &new.policy {
            let is_whole = untouched(&KernelEntry::Policy(key.0, key.1)) && untouched(&KernelEntry::Claim(key.0));
            assert!(!is_whole || actual.policy.get(key) == Some(policy), "seed {seed}: {key:?}");
        }
        let all = refused.iter().chain([&KernelEntry::UnknownPods]).all(|entry| entry.is_same(&actual, &planned));
        assert_eq!(reconciler.left_out.retry_at().is_none(), all, "seed {seed}: retried while anything is left out");

        // A retry without refusals reaches the desired state, and leaves no other flow.
        reconciler.executor.refuses = false;
        round(&mut reconciler, &mut actual, &new).await;
        assert_eq!(actual, new, "seed {seed}");
        assert!(reconciler.executor.flows.is_subset(&running(&new)), "seed {seed}");
        assert_eq!(reconciler.left_out.retry_at(), None, "seed {seed}");
    }
}

/// A node whose kernel refuses these actions.
async fn node_that_refuses(full: Vec<Action>) -> (Reconciler<Recorder>, Recorder, watch::Receiver<Ready>) {
    let recorder = Recorder { full: Arc::new(Mutex::new(full)), ..Recorder::default() };
    let (ready, is_ready) = watch::channel(Ready::default());
    let mut reconciler = Reconciler::new(settings(), recorder.clone(), None, ready);
    let pods = [(key("p"), pod("10.244.1.10", "web")), (key("q"), pod("10.244.1.11", "web"))];
    let pods = Change::Pods(Update::Replaced(pods.into()));
    world(&[("n1", "172.18.0.100")]).into_iter().chain([pods]).for_each(|change| reconciler.apply(change));
    reconciler.reconcile().await.expect("a refused entry is not a failure");
    (reconciler, recorder, is_ready)
}

#[tokio::test]
async fn a_node_that_cannot_write_one_entry_serves_all_others() {
    let subnet = Prefix { kind: PrefixKind::PodSubnet, node: Some(TunnelEndpoint(ip("172.18.0.2"))) };
    let refused = [
        Action::PutPod(ip("10.244.1.10"), PodState::Selected(EgressId(1))),
        Action::PutPrefix(net("10.244.2.0/24"), subnet),
    ];
    let (mut reconciler, recorder, is_ready) = node_that_refuses(refused.to_vec()).await;
    assert!(is_ready.borrow().serving, "it carries traffic");
    let state = || recorder.state.lock().expect("not poisoned").clone();
    assert_eq!(state().owned[&EgressId(1)], ip("172.18.0.100"));
    assert_eq!(state().pods.keys().copied().collect::<Vec<_>>(), [ip("10.244.1.11")]);
    assert!(
        !state().cluster.contains_key(&net("10.244.2.0/24")) && state().cluster.contains_key(&net("10.244.1.0/24"))
    );
    assert_eq!(reconciler.left_out.count(), BTreeMap::from([("cluster", 1), ("pods", 1)]));
    let refusals = reconciler.meters.refusals();
    assert_eq!((refusals.iter().sum::<u64>(), reconciler.meters.failures()), (2, 0));

    // The map has space again.
    recorder.full.lock().expect("not poisoned").clear();
    assert!(reconciler.left_out.retry_at().is_some_and(|at| at <= Instant::now() + FIRST_RETRY));
    tokio::time::sleep(FIRST_RETRY).await;
    reconciler.reconcile().await.expect("nothing fails");
    assert_eq!((state().pods.len(), reconciler.left_out.retry_at()), (2, None));
    assert!(state().cluster.contains_key(&net("10.244.2.0/24")));
}

/// The kernel may refuse a write also if the entry exists.
#[tokio::test]
async fn a_pod_entry_that_cannot_be_changed_is_removed() {
    let (address, known) = (ip("10.244.1.10"), Action::PutPod(ip("10.244.1.10"), PodState::Known));
    let (mut reconciler, recorder, _) = node_that_refuses(Vec::new()).await;
    recorder.full.lock().expect("not poisoned").push(known.clone());
    recorder.log.lock().expect("not poisoned").clear();
    reconciler.apply(Change::Pods(Update::Changed(key("p"), pod("10.244.1.10", "db"))));
    reconciler.reconcile().await.expect("a refused entry is not a failure");
    let done = std::mem::take(&mut *recorder.log.lock().expect("not poisoned"));
    assert_eq!(done, [Action::RemovePod(address), Action::CutPod(address)]);
    reconciler.cut_all().await.expect("the recorder does not fail");
    recorder.full.lock().expect("not poisoned").clear();
    tokio::time::sleep(FIRST_RETRY).await;
    reconciler.reconcile().await.expect("nothing fails");
    assert_eq!(recorder.state.lock().expect("not poisoned").pods[&address], PodState::Known);
    assert_eq!(reconciler.left_out.retry_at(), None);
}
