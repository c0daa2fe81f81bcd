//! What is counted of the way from a change to the kernel, and what the node's half says to a scrape.

use tokio::sync::{mpsc, oneshot, watch};

use super::*;
use crate::change_queue::{ChangeSender, inbox};
use crate::debug::{Question, Report};
use crate::metrics::facts::{Held, NodeFacts, Served};
use crate::metrics::meters::count_and_sum;

struct Running {
    giver: ChangeSender,
    asks: mpsc::Sender<Question>,
    meters: Meters,
}

fn start(recorder: &Recorder) -> Running {
    let ((giver, taker), meters) = (inbox(), Meters::default());
    let (asks, asked) = mpsc::channel(4);
    let ties = Coordination::none("n1").asked(asked);
    let reconciler = Reconciler::new(settings(), recorder.clone(), None, watch::channel(Ready::default()).0);
    let reconciler = reconciler.tied(ties).metered(meters.clone());
    tokio::spawn(reconciler.run(taker, CancellationToken::new()));
    Running { giver, asks, meters }
}

impl Running {
    fn count(&self) -> u64 {
        count_and_sum(&self.meters.reconcile()).0
    }

    /// Answered between two rounds: what came before is in the kernel, or has failed.
    async fn facts(&self) -> NodeFacts {
        let (asker, answer) = oneshot::channel();
        self.asks.send(Question::Facts(asker)).await.expect("it runs");
        answer.await.expect("it answers")
    }

    async fn report(&self) -> Report {
        let (asker, answer) = oneshot::channel();
        self.asks.send(Question::Status(asker)).await.expect("it runs");
        answer.await.expect("it answers")
    }

    async fn until(&self, what: &str, is_so: impl Fn(&NodeFacts) -> bool) -> NodeFacts {
        for _ in 0..500 {
            let facts = self.facts().await;
            if is_so(&facts) {
                return facts;
            }
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
        panic!("not within five seconds: {what}");
    }
}

fn held(facts: &NodeFacts) -> Option<&Held> {
    facts.held.as_ref()
}

fn entries(facts: &NodeFacts, map: &str) -> usize {
    held(facts).map_or(0, |held| held.entries[map])
}

#[tokio::test]
async fn each_batch_is_timed_from_its_arrival_and_only_when_all_is_known() {
    let running = start(&Recorder::default());
    let items = [("n1", "172.18.0.100")];
    world(&items).into_iter().for_each(|change| running.giver.put(change));
    let facts = running.until("the first lists are taken", |facts| {
        facts.missing.as_ref().is_some_and(|missing| !missing.contains("nodes"))
    });
    assert_eq!(facts.await.missing.as_deref(), Some("waiting for the API server to say: pods"));
    assert_eq!(running.count(), 0);
    running.giver.put(Change::Pods(Update::Replaced([(key("p"), pod("10.244.1.10", "web"))].into())));
    let facts = running.until("it is served", |facts| held(facts).is_some_and(|held| !held.served.is_empty())).await;
    let now = held(&facts).expect("the kernel is known");
    assert_eq!(
        now.served,
        BTreeMap::from([(EgressId(1), Served { address: ip("172.18.0.100"), policy: Some(("a".into(), "a".into())) })])
    );
    assert_eq!((now.entries["pods"], now.entries["owned"], now.unclaimed), (1, 1, 0));
    assert_eq!(running.count(), 1, "what was waited for before is not the kernel's");
    running.giver.put(Change::Pods(Update::Changed(key("q"), pod("10.244.1.11", "web"))));
    running.until("the other pod is known", |facts| entries(facts, "pods") == 2).await;
    assert_eq!((running.count(), running.meters.failures()), (2, 0));
}

#[tokio::test]
async fn what_fails_is_counted_and_timed_when_it_is_done() {
    let fails = Action::PutPod(ip("10.244.1.10"), PodState::Selected(EgressId(1)));
    let recorder =
        Recorder { fails: Arc::new(Mutex::new(Some(fails))), in_use: Some(ip("172.18.0.100")), ..Recorder::default() };
    let running = start(&recorder);
    world(&[("n1", "172.18.0.100")]).into_iter().for_each(|change| running.giver.put(change));
    running.giver.put(Change::Pods(Update::Replaced([(key("p"), pod("10.244.1.10", "web"))].into())));
    let facts = running.until("the pod is known at last", |facts| entries(facts, "pods") == 1).await;
    assert_eq!((running.count(), running.meters.failures()), (1, 1));
    assert!(
        count_and_sum(&running.meters.reconcile()).1 >= FIRST_RETRY.as_secs_f64(),
        "with the time until the next attempt"
    );
    let now = held(&facts).expect("the kernel is known");
    assert_eq!((now.unclaimed, now.served.len()), (1, 0), "somebody else has the address");
}

#[tokio::test]
async fn what_is_not_known_yet_is_not_said_to_be_nothing_and_what_was_known_is_said_until_it_is_known_anew() {
    let always = Action::PutPod(ip("10.244.1.10"), PodState::Selected(EgressId(1)));
    let recorder = Recorder { never: Some(always), ..Recorder::default() };
    let running = start(&recorder);
    assert_eq!(running.facts().await.held, None, "nobody has looked");
    assert!(running.report().await.blind.is_some(), "the pins tell");
    world(&[("n1", "172.18.0.100")]).into_iter().for_each(|change| running.giver.put(change));
    assert_eq!(running.facts().await.held, None, "and does not before all is known");
    running.giver.put(Change::Pods(Update::Replaced(BTreeMap::new())));
    running.until("it is served", |facts| entries(facts, "owned") == 1).await;
    assert!(running.report().await.blind.is_none());
    running.giver.put(Change::Pods(Update::Changed(key("p"), pod("10.244.1.10", "web"))));
    running.until("an action fails for good", |_| running.meters.failures() >= 1).await;
    let facts = running.facts().await;
    let now = held(&facts).expect("it was known");
    assert_eq!((now.entries["owned"], now.served.len(), now.unclaimed), (1, 1, 0), "it is served as before");
    let status = running.report().await.status;
    let states: Vec<_> = status.addresses.iter().map(|one| (one.state.as_str(), one.object.as_deref())).collect();
    assert_eq!(states, [("served", Some("a"))]);
    assert!(status.problems.iter().any(|line| line.contains("could not be brought")), "{:?}", status.problems);
}

#[tokio::test]
async fn who_is_busy_moves_with_each_action_and_so_does_who_has_nothing_to_do() {
    let recorder = Recorder { in_use: Some(ip("172.18.0.101")), ..Recorder::default() };
    let ((giver, taker), beat) = (inbox(), recorder.beat.clone());
    let ready = watch::channel(Ready::default()).0;
    let mut reconciler = Reconciler::new(settings(), recorder.clone(), None, ready).beating(beat.clone());
    reconciler.turn = Duration::from_millis(10);
    let stop = CancellationToken::new();
    let running = tokio::spawn(reconciler.run(taker, stop.clone()));
    for _ in 0..3 {
        let before = beat.at();
        let moves = async {
            while beat.at() == before {
                tokio::time::sleep(Duration::from_millis(1)).await
            }
        };
        tokio::time::timeout(Duration::from_secs(5), moves).await.expect("it turns with nothing to do");
    }
    world(&[("n1", "172.18.0.100"), ("n1", "172.18.0.101")]).into_iter().for_each(|change| giver.put(change));
    giver.put(Change::Pods(Update::Replaced([(key("p"), pod("10.244.1.10", "web"))].into())));
    let owns = async {
        while recorder.state.lock().expect("not poisoned").pods.is_empty() {
            tokio::task::yield_now().await
        }
    };
    tokio::time::timeout(Duration::from_secs(5), owns).await.expect("it works");
    stop.cancel();
    drop(running.await.expect("no panic"));
    let moved = recorder.moved.lock().expect("not poisoned").clone();
    assert!(moved.len() > 4 && moved.is_sorted_by(|one, next| one < next), "once between any two: {moved:?}");
}

#[tokio::test]
async fn who_waits_says_for_what() {
    let nobody: Ask = Box::new(|_| Box::pin(std::future::pending()));
    let lease_state_seen = watch::channel(LeaseState::Holds).1;
    let tells = (watch::channel(LeaseDemand::default()).0, watch::channel(BTreeMap::new()).0);
    let ties = Coordination::new("n1", (lease_state_seen, watch::channel(BTreeMap::new()).1), tells, nobody);
    let ready = watch::channel(Ready::default()).0;
    let mut reconciler = Reconciler::new(settings(), Recorder::default(), None, ready).tied(ties);
    let said = async |reconciler: &mut Reconciler<Recorder>, what: &str| {
        let (asker, answer) = oneshot::channel();
        reconciler.answer(Question::Facts(asker));
        let missing = answer.await.expect("it answers").missing;
        assert!(missing.as_ref().is_some_and(|missing| missing.contains(what)), "{what}: {missing:?}");
    };
    world(&[]).into_iter().for_each(|change| reconciler.apply(change));
    said(&mut reconciler, "pods").await;
    reconciler.apply(Change::Pods(Update::Replaced(BTreeMap::new())));
    let (name, of_none) = (node(1).0, Node { name: "n1".into(), ..Node::default() });
    reconciler.apply(Change::Nodes(Update::Changed(name, Arc::new(of_none))));
    said(&mut reconciler, "its networks").await;
    reconciler.apply(Change::Nodes(Update::Removed("n1".into())));
    said(&mut reconciler, "own Node object").await;
    let (name, known) = node(1);
    reconciler.apply(Change::Nodes(Update::Changed(name, known)));
    let (asker, answer) = oneshot::channel();
    reconciler.answer(Question::Facts(asker));
    assert_eq!(answer.await.expect("it answers").missing, None);
}
