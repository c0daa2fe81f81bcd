//! Cuts in the background: which changes wait for them.

use super::*;

impl<E: Executor> Reconciler<E> {
    /// Reconciles until no cut is left.
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

struct Flush {
    recorder: Recorder,
    reconciler: Reconciler<Recorder>,
}

fn selected() -> PodState {
    PodState::Selected(EgressId(1))
}

fn cut(address: &str) -> Action {
    Action::CutPodFlows(ip(address), LostFlows::of_policy(EgressId(1)))
}

impl Flush {
    /// Two pods that an object selects, and another object.
    async fn new() -> Self {
        let recorder = Recorder::default();
        let mut reconciler = Reconciler::new(settings(), recorder.clone(), None, watch::channel(Ready::default()).0);
        let pods = [(key("p"), pod(P, "web")), (key("q"), pod(Q, "web"))];
        let pods = Change::Pods(Update::Replaced(pods.into()));
        world(&[("n1", "172.18.0.100")]).into_iter().chain([pods]).for_each(|change| reconciler.apply(change));
        let (name, other) = policy("b", 2, 2, &[]);
        let other = Arc::new(other.with_rules(|rule| rule.selects[0].pods = equals("app", "mail")));
        reconciler.apply(Change::Policies(Update::Changed(name, other)));
        reconciler.reconcile().await.expect("the recorder does not fail");
        let flush = Self { recorder, reconciler };
        flush.done();
        flush
    }

    async fn change(&mut self, name: &str, address: &str, app: &str) {
        self.reconciler.apply(Change::Pods(Update::Changed(key(name), pod(address, app))));
        self.reconcile().await;
    }

    async fn reconcile(&mut self) {
        self.reconciler.reconcile().await.expect("the recorder does not fail");
    }

    /// The actions since the last call.
    fn done(&self) -> Vec<Action> {
        std::mem::take(&mut *self.recorder.log.lock().expect("not poisoned"))
    }

    fn walks(&self) -> Vec<Vec<Action>> {
        self.recorder.walks.lock().expect("not poisoned").clone()
    }
}

#[tokio::test]
async fn a_cut_delays_changes_of_its_own_pod_only() {
    let mut flush = Flush::new().await;
    let walking = flush.recorder.walking.clone().lock_owned().await;
    flush.change("p", P, "db").await;
    assert_eq!(flush.done(), [Action::PutPod(ip(P), PodState::Known)]);
    flush.change("q", Q, "db").await;
    assert_eq!(flush.done(), [Action::PutPod(ip(Q), PodState::Known)], "while the cut of the other is running");
    flush.change("p", P, "web").await;
    assert_eq!(flush.done(), [], "new flows would be cut");
    assert!(flush.reconciler.background.puts_off());

    drop(walking);
    flush.reconciler.background.next().await;
    flush.reconcile().await;
    assert_eq!(flush.done(), [cut(P), Action::PutPod(ip(P), selected())]);
    assert!(!flush.reconciler.background.puts_off());
    flush.reconciler.cut_all().await.expect("the recorder does not fail");
    assert_eq!(flush.done(), [cut(Q)]);
}

#[tokio::test]
async fn a_pod_selected_again_before_its_cut_begins_is_not_cut_and_another_object_does_not_wait() {
    let mut flush = Flush::new().await;
    let walking = flush.recorder.walking.clone().lock_owned().await;
    flush.change("p", P, "db").await;
    flush.change("q", Q, "db").await;
    flush.done();
    flush.change("q", Q, "web").await;
    assert_eq!(flush.done(), [Action::PutPod(ip(Q), selected())], "its flows are valid again");
    flush.change("p", P, "mail").await;
    let by_another = PodState::Selected(EgressId(2));
    let done = flush.done();
    assert!(matches!(done[..2], [Action::PutPolicy(EgressId(2), ..), Action::PutPolicy(EgressId(2), ..)]), "{done:?}");
    assert_eq!(done[2..], [Action::PutPod(ip(P), by_another)], "none of its flows is cut");
    drop(walking);
    flush.reconciler.cut_all().await.expect("the recorder does not fail");
    assert_eq!(flush.done(), [cut(P)]);
}

#[tokio::test]
async fn queued_cuts_share_one_walk() {
    let mut flush = Flush::new().await;
    let walking = flush.recorder.walking.clone().lock_owned().await;
    flush.change("r", "10.244.1.12", "db").await;
    for (name, address) in [("r", "10.244.1.12"), ("p", P), ("q", Q)] {
        flush.reconciler.apply(Change::Pods(Update::Removed(key(name))));
        flush.reconcile().await;
        // Starts the walk.
        assert!(
            tokio::time::timeout(Duration::from_millis(1), flush.reconciler.background.next()).await.is_err(),
            "{address}"
        );
    }
    let parked = |address| Action::PutPod(ip(address), PodState::Selected(EgressId(0)));
    assert_eq!(flush.done()[2..], [parked(P), parked(Q)], "after the actions of the third pod");
    drop(walking);
    flush.reconciler.cut_all().await.expect("the recorder does not fail");
    let gone = |address| Action::CutPod(ip(address));
    let goes = Action::RemovePod(ip("10.244.1.12"));
    assert_eq!(flush.walks(), [vec![gone("10.244.1.12")], vec![gone(P), gone(Q)]]);
    let expected = [gone("10.244.1.12"), goes, gone(P), gone(Q)];
    assert_eq!(flush.done(), expected, "no entry is removed before its cut, and those of selected pods stay parked");
}

/// The action after a cut removes the entry, even if another pod has the address by then.
#[tokio::test]
async fn the_next_pod_with_an_address_waits_for_the_cut_of_the_former_one() {
    let (running, queued) = ("10.244.1.12", "10.244.1.13");
    let mut flush = Flush::new().await;
    flush.change("r", running, "db").await;
    flush.change("s", queued, "db").await;
    let walking = flush.recorder.walking.clone().lock_owned().await;
    for name in ["r", "s"] {
        flush.reconciler.apply(Change::Pods(Update::Removed(key(name))));
        flush.reconcile().await;
    }
    flush.done();
    flush.change("t", running, "web").await;
    flush.change("u", queued, "web").await;
    assert_eq!(flush.done(), [], "one cut is running, and one is queued");
    drop(walking);
    flush.reconciler.cut_all().await.expect("the recorder does not fail");
    let state = flush.recorder.state.lock().expect("not poisoned").clone();
    assert_eq!([running, queued].map(|address| state.pods.get(&ip(address)).copied()), [Some(selected()); 2]);
}

#[tokio::test]
async fn a_full_plan_waits_for_cuts() {
    let mut flush = Flush::new().await;
    let walking = flush.recorder.walking.clone().lock_owned().await;
    flush.change("p", P, "db").await;
    flush.done();
    flush.reconciler.apply(Change::Policies(Update::Removed("a".into())));
    let waits = tokio::time::timeout(Duration::from_millis(20), flush.reconciler.reconcile()).await;
    assert!(waits.is_err() && flush.done().is_empty());
    drop(walking);
    // An interrupted reconcile reads the kernel's state again.
    flush.reconciler.actual = None;
    flush.reconcile().await;
    let done = flush.done();
    assert_eq!(done[..2], [cut(P), Action::CutOrphans]);
    assert!(done.contains(&Action::Disown(EgressId(1), ip("172.18.0.100"))), "{done:?}");
    assert!(flush.reconciler.background.is_idle());
}

#[tokio::test]
async fn a_full_plan_finishes_the_cuts_first() {
    let mut flush = Flush::new().await;
    flush.change("p", P, "db").await;
    flush.reconciler.apply(Change::Pods(Update::Removed(key("q"))));
    flush.reconcile().await;
    flush.done();
    flush.reconciler.apply(Change::Policies(Update::Removed("a".into())));
    flush.reconcile().await;
    assert_eq!(flush.done()[..2], [cut(P), Action::CutPod(ip(Q))]);
}

#[tokio::test]
async fn queued_cuts_are_done_before_the_agent_ends() {
    let recorder = Recorder::default();
    let (sender, receiver) = crate::change_queue::inbox();
    let reconciler = Reconciler::new(settings(), recorder.clone(), None, watch::channel(Ready::default()).0);
    let pods = Change::Pods(Update::Replaced([(key("p"), pod(P, "web"))].into()));
    world(&[("n1", "172.18.0.100")]).into_iter().chain([pods]).for_each(|change| sender.put(change));
    let stop = CancellationToken::new();
    let runs = tokio::spawn(reconciler.run(receiver, stop.clone()));
    let log = |action: &Action| recorder.log.lock().expect("not poisoned").contains(action);
    let walking = recorder.walking.clone().lock_owned().await;
    for (app, state) in [("web", selected()), ("db", PodState::Known)] {
        sender.put(Change::Pods(Update::Changed(key("p"), pod(P, app))));
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
    assert!(log(&cut(P)), "flows of a deselected pod stay");
}
