//! Metrics of the reconciler, and its answers to scrapes.

use tokio::sync::{mpsc, oneshot, watch};

use super::*;
use crate::change_queue::{ChangeSender, inbox};
use crate::debug::{Question, ReconcilerReport};
use crate::metrics::meters::count_and_sum;
use crate::metrics::snapshot::{InKernel, ReconcilerSnapshot, ServedAddress};

struct RunningReconciler {
    sender: ChangeSender,
    questions: mpsc::Sender<Question>,
    meters: Meters,
}

fn start(recorder: &Recorder) -> RunningReconciler {
    let ((sender, receiver), meters) = (inbox(), Meters::default());
    let (questions, questions_in) = mpsc::channel(4);
    let coordination = Coordination::none("n1").with_questions(questions_in);
    let reconciler = Reconciler::new(settings(), recorder.clone(), None, watch::channel(Ready::default()).0);
    let reconciler = reconciler.with_coordination(coordination).with_meters(meters.clone());
    tokio::spawn(reconciler.run(receiver, CancellationToken::new()));
    RunningReconciler { sender, questions, meters }
}

impl RunningReconciler {
    fn count(&self) -> u64 {
        count_and_sum(&self.meters.reconcile()).0
    }

    /// Answered between two cycles: earlier changes are in the kernel, or have failed.
    async fn snapshot(&self) -> ReconcilerSnapshot {
        let (reply, answer) = oneshot::channel();
        self.questions.send(Question::Snapshot(reply)).await.expect("it runs");
        answer.await.expect("it answers")
    }

    async fn report(&self) -> ReconcilerReport {
        let (reply, answer) = oneshot::channel();
        self.questions.send(Question::Status(reply)).await.expect("it runs");
        answer.await.expect("it answers")
    }

    async fn until(&self, what: &str, condition: impl Fn(&ReconcilerSnapshot) -> bool) -> ReconcilerSnapshot {
        for _ in 0..500 {
            let snapshot = self.snapshot().await;
            if condition(&snapshot) {
                return snapshot;
            }
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
        panic!("not within five seconds: {what}");
    }
}

fn in_kernel(snapshot: &ReconcilerSnapshot) -> Option<&InKernel> {
    snapshot.in_kernel.as_ref()
}

fn entries(snapshot: &ReconcilerSnapshot, map: &str) -> usize {
    in_kernel(snapshot).map_or(0, |in_kernel| in_kernel.entries[map])
}

#[tokio::test]
async fn each_batch_is_timed_from_its_arrival_once_all_lists_have_arrived() {
    let running = start(&Recorder::default());
    let items = [("n1", "172.18.0.100")];
    world(&items).into_iter().for_each(|change| running.sender.put(change));
    let snapshot = running.until("the first lists are applied", |snapshot| {
        snapshot.missing.as_ref().is_some_and(|missing| !missing.contains("nodes"))
    });
    assert_eq!(snapshot.await.missing.as_deref(), Some("waiting for lists from the API server: pods"));
    assert_eq!(running.count(), 0);
    running.sender.put(Change::Pods(Update::Replaced([(key("p"), pod("10.244.1.10", "web"))].into())));
    let snapshot = running
        .until("it is served", |snapshot| in_kernel(snapshot).is_some_and(|in_kernel| !in_kernel.served.is_empty()))
        .await;
    let now = in_kernel(&snapshot).expect("the kernel is known");
    assert_eq!(
        now.served,
        BTreeMap::from([(
            EgressId(1),
            ServedAddress { address: ip("172.18.0.100"), policy: Some(("a".into(), "a".into())) }
        )])
    );
    assert_eq!((now.entries["pods"], now.entries["owned"], now.unclaimed), (1, 1, 0));
    assert_eq!(running.count(), 1, "the wait for lists does not count");
    running.sender.put(Change::Pods(Update::Changed(key("q"), pod("10.244.1.11", "web"))));
    running.until("the other pod is known", |snapshot| entries(snapshot, "pods") == 2).await;
    assert_eq!((running.count(), running.meters.failures()), (2, 0));
}

#[tokio::test]
async fn a_failed_batch_is_counted_and_timed_until_it_succeeds() {
    let fails = Action::PutPod(ip("10.244.1.10"), PodState::Selected(EgressId(1)));
    let recorder =
        Recorder { fails: Arc::new(Mutex::new(Some(fails))), in_use: Some(ip("172.18.0.100")), ..Recorder::default() };
    let running = start(&recorder);
    world(&[("n1", "172.18.0.100")]).into_iter().for_each(|change| running.sender.put(change));
    running.sender.put(Change::Pods(Update::Replaced([(key("p"), pod("10.244.1.10", "web"))].into())));
    let snapshot = running.until("the pod is known at last", |snapshot| entries(snapshot, "pods") == 1).await;
    assert_eq!((running.count(), running.meters.failures()), (1, 1));
    assert!(
        count_and_sum(&running.meters.reconcile()).1 >= FIRST_RETRY.as_secs_f64(),
        "with the time until the next attempt"
    );
    let now = in_kernel(&snapshot).expect("the kernel is known");
    assert_eq!((now.unclaimed, now.served.len()), (1, 0), "another host has the address");
}

#[tokio::test]
async fn an_unknown_kernel_state_is_absent_and_the_last_known_one_is_reported_until_the_next_read() {
    let always = Action::PutPod(ip("10.244.1.10"), PodState::Selected(EgressId(1)));
    let recorder = Recorder { never: Some(always), ..Recorder::default() };
    let running = start(&recorder);
    assert_eq!(running.snapshot().await.in_kernel, None, "the kernel's state has not been read");
    assert!(running.report().await.unobserved.is_some(), "status reads the pins");
    world(&[("n1", "172.18.0.100")]).into_iter().for_each(|change| running.sender.put(change));
    assert_eq!(running.snapshot().await.in_kernel, None, "nor is it before all lists have arrived");
    running.sender.put(Change::Pods(Update::Replaced(BTreeMap::new())));
    running.until("it is served", |snapshot| entries(snapshot, "owned") == 1).await;
    assert!(running.report().await.unobserved.is_none());
    running.sender.put(Change::Pods(Update::Changed(key("p"), pod("10.244.1.10", "web"))));
    running.until("an action fails for good", |_| running.meters.failures() >= 1).await;
    let snapshot = running.snapshot().await;
    let now = in_kernel(&snapshot).expect("the last known state");
    assert_eq!((now.entries["owned"], now.served.len(), now.unclaimed), (1, 1, 0), "it is served as before");
    let status = running.report().await.status;
    let states: Vec<_> = status.addresses.iter().map(|one| (one.state.as_str(), one.object.as_deref())).collect();
    assert_eq!(states, [("served", Some("a"))]);
    assert!(status.problems.iter().any(|line| line.contains("could not be brought")), "{:?}", status.problems);
}

#[tokio::test]
async fn the_heartbeat_is_noted_after_each_action_and_while_idle() {
    let recorder = Recorder { in_use: Some(ip("172.18.0.101")), ..Recorder::default() };
    let ((sender, receiver), heartbeat) = (inbox(), recorder.heartbeat.clone());
    let ready = watch::channel(Ready::default()).0;
    let mut reconciler = Reconciler::new(settings(), recorder.clone(), None, ready).with_heartbeat(heartbeat.clone());
    reconciler.idle_interval = Duration::from_millis(10);
    let stop = CancellationToken::new();
    let running = tokio::spawn(reconciler.run(receiver, stop.clone()));
    for _ in 0..3 {
        let before = heartbeat.at();
        let noted = async {
            while heartbeat.at() == before {
                tokio::time::sleep(Duration::from_millis(1)).await
            }
        };
        tokio::time::timeout(Duration::from_secs(5), noted).await.expect("it runs while idle");
    }
    world(&[("n1", "172.18.0.100"), ("n1", "172.18.0.101")]).into_iter().for_each(|change| sender.put(change));
    sender.put(Change::Pods(Update::Replaced([(key("p"), pod("10.244.1.10", "web"))].into())));
    let owns = async {
        while recorder.state.lock().expect("not poisoned").pods.is_empty() {
            tokio::task::yield_now().await
        }
    };
    tokio::time::timeout(Duration::from_secs(5), owns).await.expect("it works");
    stop.cancel();
    drop(running.await.expect("no panic"));
    let noted = recorder.noted.lock().expect("not poisoned").clone();
    assert!(noted.len() > 4 && noted.is_sorted_by(|one, next| one < next), "once between any two actions: {noted:?}");
}

#[tokio::test]
async fn a_wait_for_lists_names_them() {
    let no_answer: FreshRead = Box::new(|_| Box::pin(std::future::pending()));
    let lease_state_seen = watch::channel(LeaseState::Holds).1;
    let demands = (watch::channel(LeaseDemand::default()).0, watch::channel(BTreeMap::new()).0);
    let coordination =
        Coordination::new("n1", (lease_state_seen, watch::channel(BTreeMap::new()).1), demands, no_answer);
    let ready = watch::channel(Ready::default()).0;
    let mut reconciler = Reconciler::new(settings(), Recorder::default(), None, ready).with_coordination(coordination);
    let assert_missing = async |reconciler: &mut Reconciler<Recorder>, what: &str| {
        let (reply, answer) = oneshot::channel();
        reconciler.answer(Question::Snapshot(reply));
        let missing = answer.await.expect("it answers").missing;
        assert!(missing.as_ref().is_some_and(|missing| missing.contains(what)), "{what}: {missing:?}");
    };
    world(&[]).into_iter().for_each(|change| reconciler.apply(change));
    assert_missing(&mut reconciler, "pods").await;
    reconciler.apply(Change::Pods(Update::Replaced(BTreeMap::new())));
    let (name, of_none) = (node(1).0, Node { name: "n1".into(), ..Node::default() });
    reconciler.apply(Change::Nodes(Update::Changed(name, Arc::new(of_none))));
    assert_missing(&mut reconciler, "its networks").await;
    reconciler.apply(Change::Nodes(Update::Removed("n1".into())));
    assert_missing(&mut reconciler, "own Node object").await;
    let (name, known) = node(1);
    reconciler.apply(Change::Nodes(Update::Changed(name, known)));
    let (reply, answer) = oneshot::channel();
    reconciler.answer(Question::Snapshot(reply));
    assert_eq!(answer.await.expect("it answers").missing, None);
}
