//! Cuts beside the turns: who waits for them, and who does not.

use super::*;

impl<E: Executor> Reconciler<E> {
    /// Turns until no cut is left.
    pub(super) async fn cut_all(&mut self) -> Result<(), DataplaneError> {
        while !self.background.is_idle() {
            self.background.next().await;
            self.reconcile().await?;
        }
        Ok(())
    }
}

const P: &str = "10.244.1.10";
const Q: &str = "10.244.1.11";

struct Stage {
    recorder: Recorder,
    reconciler: Reconciler<Recorder>,
}

fn selected() -> PodState {
    PodState::Selected(EgressId(1))
}

fn cut(address: &str) -> Action {
    Action::CutPodFlows(ip(address), EgressId(1))
}

impl Stage {
    /// Two pods that an object selects; there is another one.
    async fn new() -> Self {
        let recorder = Recorder::default();
        let mut reconciler = Reconciler::new(settings(), recorder.clone(), None, watch::channel(Ready::default()).0);
        let pods = [(key("p"), pod(P, "web")), (key("q"), pod(Q, "web"))];
        let pods = Change::Pods(Update::Replaced(pods.into()));
        world(&[("n1", "172.18.0.100")]).into_iter().chain([pods]).for_each(|change| reconciler.apply(change));
        let (name, mut other) = policy("b", 2, 2, &[]);
        Arc::make_mut(&mut other).selects.as_mut().expect("selectors").pods = equals("app", "mail");
        reconciler.apply(Change::Policies(Update::Changed(name, other)));
        reconciler.reconcile().await.expect("a recorder does not fail");
        let stage = Self { recorder, reconciler };
        stage.done();
        stage
    }

    async fn change(&mut self, name: &str, address: &str, app: &str) {
        self.reconciler.apply(Change::Pods(Update::Changed(key(name), pod(address, app))));
        self.turn().await;
    }

    async fn turn(&mut self) {
        self.reconciler.reconcile().await.expect("a recorder does not fail");
    }

    /// What was done since the last time.
    fn done(&self) -> Vec<Action> {
        std::mem::take(&mut *self.recorder.log.lock().expect("not poisoned"))
    }

    fn walks(&self) -> Vec<Vec<Action>> {
        self.recorder.walks.lock().expect("not poisoned").clone()
    }
}

#[tokio::test]
async fn a_cut_keeps_no_other_pod_waiting_and_its_own_pod_until_it_is_over() {
    let mut stage = Stage::new().await;
    let walking = stage.recorder.walking.clone().lock_owned().await;
    stage.change("p", P, "db").await;
    assert_eq!(stage.done(), [Action::PutPod(ip(P), PodState::Known)]);
    stage.change("q", Q, "db").await;
    assert_eq!(stage.done(), [Action::PutPod(ip(Q), PodState::Known)], "while the cut of the other is under way");
    stage.change("p", P, "web").await;
    assert_eq!(stage.done(), [], "what is begun now would be cut");
    assert!(stage.reconciler.background.puts_off());

    drop(walking);
    stage.reconciler.background.next().await;
    stage.turn().await;
    assert_eq!(stage.done(), [cut(P), Action::PutPod(ip(P), selected())]);
    assert!(!stage.reconciler.background.puts_off());
    stage.reconciler.cut_all().await.expect("a recorder does not fail");
    assert_eq!(stage.done(), [cut(Q)]);
}

#[tokio::test]
async fn what_is_selected_again_before_its_cut_has_begun_is_not_cut_and_another_object_waits_for_none() {
    let mut stage = Stage::new().await;
    let walking = stage.recorder.walking.clone().lock_owned().await;
    stage.change("p", P, "db").await;
    stage.change("q", Q, "db").await;
    stage.done();
    stage.change("q", Q, "web").await;
    assert_eq!(stage.done(), [Action::PutPod(ip(Q), selected())], "its flows are right again");
    stage.change("p", P, "mail").await;
    let by_another = PodState::Selected(EgressId(2));
    let done = stage.done();
    assert!(matches!(done[..2], [Action::PutPolicy(EgressId(2), ..), Action::PutPolicy(EgressId(2), ..)]), "{done:?}");
    assert_eq!(done[2..], [Action::PutPod(ip(P), by_another)], "none of its flows is cut");
    drop(walking);
    stage.reconciler.cut_all().await.expect("a recorder does not fail");
    assert_eq!(stage.done(), [cut(P)]);
}

#[tokio::test]
async fn cuts_that_wait_are_one_walk() {
    let mut stage = Stage::new().await;
    let walking = stage.recorder.walking.clone().lock_owned().await;
    stage.change("r", "10.244.1.12", "db").await;
    for (name, address) in [("r", "10.244.1.12"), ("p", P), ("q", Q)] {
        stage.reconciler.apply(Change::Pods(Update::Removed(key(name))));
        stage.turn().await;
        // So that the walk is under way.
        assert!(
            tokio::time::timeout(Duration::from_millis(1), stage.reconciler.background.next()).await.is_err(),
            "{address}"
        );
    }
    let parked = |address| Action::PutPod(ip(address), PodState::Selected(EgressId(0)));
    assert_eq!(stage.done()[2..], [parked(P), parked(Q)], "known, with its owner, is the third one before");
    drop(walking);
    stage.reconciler.cut_all().await.expect("a recorder does not fail");
    let gone = |address| Action::CutPod(ip(address));
    let goes = Action::RemovePod(ip("10.244.1.12"));
    assert_eq!(stage.walks(), [vec![gone("10.244.1.12")], vec![gone(P), gone(Q)]]);
    let expected = [gone("10.244.1.12"), goes, gone(P), gone(Q)];
    assert_eq!(stage.done(), expected, "no entry goes before its cut, and those of selected pods stay parked");
}

/// What waits for a cut removes the entry, whoever has it by then.
#[tokio::test]
async fn the_next_pod_with_an_address_waits_for_the_cut_of_the_former_one() {
    let (under_way, waits) = ("10.244.1.12", "10.244.1.13");
    let mut stage = Stage::new().await;
    stage.change("r", under_way, "db").await;
    stage.change("s", waits, "db").await;
    let walking = stage.recorder.walking.clone().lock_owned().await;
    for name in ["r", "s"] {
        stage.reconciler.apply(Change::Pods(Update::Removed(key(name))));
        stage.turn().await;
    }
    stage.done();
    stage.change("t", under_way, "web").await;
    stage.change("u", waits, "web").await;
    assert_eq!(stage.done(), [], "one cut is under way, and one waits");
    drop(walking);
    stage.reconciler.cut_all().await.expect("a recorder does not fail");
    let state = stage.recorder.state.lock().expect("not poisoned").clone();
    assert_eq!([under_way, waits].map(|address| state.pods.get(&ip(address)).copied()), [Some(selected()); 2]);
}

#[tokio::test]
async fn a_plan_of_the_whole_waits_for_cuts() {
    let mut stage = Stage::new().await;
    let walking = stage.recorder.walking.clone().lock_owned().await;
    stage.change("p", P, "db").await;
    stage.done();
    stage.reconciler.apply(Change::Policies(Update::Removed("a".into())));
    let waits = tokio::time::timeout(Duration::from_millis(20), stage.reconciler.reconcile()).await;
    assert!(waits.is_err() && stage.done().is_empty());
    drop(walking);
    // Whoever is interrupted has the kernel observed anew.
    stage.reconciler.actual = None;
    stage.turn().await;
    let done = stage.done();
    assert_eq!(done[..2], [cut(P), Action::CutOrphans]);
    assert!(done.contains(&Action::Disown(EgressId(1), ip("172.18.0.100"))), "{done:?}");
    assert!(stage.reconciler.background.is_idle());
}

#[tokio::test]
async fn a_plan_of_the_whole_finds_cuts_done() {
    let mut stage = Stage::new().await;
    stage.change("p", P, "db").await;
    stage.reconciler.apply(Change::Pods(Update::Removed(key("q"))));
    stage.turn().await;
    stage.done();
    stage.reconciler.apply(Change::Policies(Update::Removed("a".into())));
    stage.turn().await;
    assert_eq!(stage.done()[..2], [cut(P), Action::CutPod(ip(Q))]);
}

#[tokio::test]
async fn what_is_due_is_cut_before_the_agent_ends() {
    let recorder = Recorder::default();
    let (giver, taker) = crate::change_queue::inbox();
    let reconciler = Reconciler::new(settings(), recorder.clone(), None, watch::channel(Ready::default()).0);
    let pods = Change::Pods(Update::Replaced([(key("p"), pod(P, "web"))].into()));
    world(&[("n1", "172.18.0.100")]).into_iter().chain([pods]).for_each(|change| giver.put(change));
    let stop = CancellationToken::new();
    let runs = tokio::spawn(reconciler.run(taker, stop.clone()));
    let log = |action: &Action| recorder.log.lock().expect("not poisoned").contains(action);
    let walking = recorder.walking.clone().lock_owned().await;
    for (app, state) in [("web", selected()), ("db", PodState::Known)] {
        giver.put(Change::Pods(Update::Changed(key("p"), pod(P, app))));
        for _ in 0..500 {
            if log(&Action::PutPod(ip(P), state)) {
                break;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
    stop.cancel();
    tokio::task::yield_now().await;
    assert!(!log(&cut(P)));
    drop(walking);
    runs.await.expect("no panic");
    assert!(log(&cut(P)), "flows of whom nothing selects live on");
}
