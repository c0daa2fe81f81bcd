//! Hand-overs between two nodes that are both well: nothing is let go of before it is taken over.

use super::*;
use egress_core::model::ledger::Acknowledgements;
use egress_core::model::node::{Prepared, Readiness};
use egress_core::model::state::{HandoverStage, HandoverState, Place, Slot, TunnelEndpoint};
use egress_core::plan::executor::Expected;

const A: &str = "172.18.0.100";
const ID: EgressId = EgressId(1);

fn open(number: u64, from: &str, to: &str) -> Change {
    let Change::Ledger(ledger) = hand_over(number, from, Some(to)) else { unreachable!("a ledger") };
    let mut ledger = Arc::unwrap_or_clone(ledger);
    ledger.records.last = number;
    Change::Ledger(Arc::new(ledger))
}

/// This node's word about another one.
fn ready(i: u8, number: u64) -> Change {
    let (name, node) = node(i);
    let prepared = BTreeMap::from([(ip(A), Prepared(number, "n1".into(), false))]);
    Change::Nodes(Update::Changed(name, Arc::new(Node { prepared, ..Arc::unwrap_or_clone(node) })))
}

/// Another node's word that it has let go, and handed over to this one.
fn released(i: u8, number: u64) -> Change {
    given(i, number, Some("n1"))
}

fn given(i: u8, number: u64, to: Option<&str>) -> Change {
    let (name, node) = node(i);
    let released = BTreeMap::from([(ip(A), number)]);
    let given = to.map(|to| (ip(A), to.to_owned())).into_iter().collect();
    Change::Nodes(Update::Changed(name, Arc::new(Node { released, given, ..Arc::unwrap_or_clone(node) })))
}

fn assigned_to(node: &str) -> Change {
    let (name, object) = policy("a", 1, 1, &[(node, A)]);
    Change::Policies(Update::Changed(name, object))
}

struct Stage {
    reconciler: Reconciler<Recorder>,
    recorder: Recorder,
    released: watch::Receiver<Acknowledgements>,
    ready: watch::Receiver<Readiness>,
    orders: watch::Sender<Acknowledgements>,
    lease_state: watch::Sender<LeaseState>,
}

impl Stage {
    async fn begin(changes: Vec<Change>) -> Self {
        let recorder = Recorder::default();
        let ((said, released), (ready_for, readiness)) =
            (watch::channel(Acknowledgements::new()), watch::channel(Readiness::default()));
        let (orders, is_ordered) = watch::channel(Acknowledgements::new());
        let nobody: Ask = Box::new(|_| Box::pin(std::future::ready(BTreeSet::new())));
        let (lease_state, lease_state_seen) = watch::channel(LeaseState::Holds);
        let tells = (watch::channel(LeaseDemand::default()).0, said);
        let ties = Coordination::new("n1", (lease_state_seen, is_ordered), tells, nobody).preparing(ready_for);
        let ready = watch::channel(Ready::default()).0;
        let mut reconciler = Reconciler::new(settings(), recorder.clone(), None, ready).tied(ties);
        changes.into_iter().for_each(|change| reconciler.apply(change));
        let mut stage = Self { reconciler, recorder, released, ready: readiness, orders, lease_state };
        stage.go_on().await;
        stage
    }

    async fn go_on(&mut self) -> Vec<Action> {
        self.reconciler.reconcile().await.expect("a recorder does not fail");
        std::mem::take(&mut *self.recorder.log.lock().expect("not poisoned"))
    }

    async fn hear(&mut self, change: Change) -> Vec<Action> {
        self.reconciler.apply(change);
        self.go_on().await
    }

    /// Whether the kernel owns the address, and what it takes by a hand-over.
    fn held(&self) -> (bool, Option<HandoverStage>) {
        let state = self.recorder.state.lock().expect("not poisoned");
        (state.owned.contains_key(&ID), state.handovers.get(&ID).map(|moving| moving.stage))
    }

    fn released(&self) -> bool {
        !self.released.borrow().is_empty()
    }
}

fn peer() -> TunnelEndpoint {
    TunnelEndpoint(ip("172.18.0.2"))
}

fn moving(stage: HandoverStage) -> HandoverState {
    HandoverState { stage, address: ip(A), peer: peer() }
}

#[tokio::test]
async fn an_address_is_served_until_its_heir_is_ready_and_is_handed_over_in_one_step() {
    let mut stage = Stage::begin(held()).await;
    assert_eq!(stage.hear(open(7, "n1", "n2")).await, []);
    assert_eq!(stage.hear(ready(2, 6)).await, [], "a word about another hand-over");
    assert!(!stage.released() && stage.reconciler.incomplete, "it is not waited for without end");

    let done = stage.hear(ready(2, 7)).await;
    assert_eq!(done[0], Action::PutHandover(ID, moving(HandoverStage::Leaving)));
    let there = [Slot { address: ip(A), place: Place::Remote(peer()) }];
    assert!(matches!(&done[1..], [Action::PutPolicy(_, _, policy)] if policy.slots == there), "{done:?}");
    assert_eq!(*stage.released.borrow(), BTreeMap::from([(ip(A), 7)]));

    assert_eq!(stage.hear(assigned_to("n2")).await, [], "it is as it should be already");
    assert_eq!(stage.hear(Change::Ledger(Arc::default())).await, [Action::EndHandover(ID, ip(A))]);
    assert!(!stage.released());
}

#[tokio::test]
async fn an_heir_that_is_not_ready_in_time_is_not_waited_for() {
    let mut stage = Stage::begin(held()).await;
    assert_eq!(stage.hear(open(7, "n1", "n2")).await, []);
    // Longer than an heir has time.
    tokio::time::sleep(Duration::from_millis(1_010)).await;
    let done = stage.go_on().await;
    assert!(done.contains(&Action::Disown(ID, ip(A))), "{done:?}");
    assert!(stage.released());
    assert_eq!(stage.hear(ready(2, 7)).await, [], "what was let go of is not passed on");
}

#[tokio::test]
async fn an_address_that_no_node_is_to_have_is_given_up_at_once() {
    let mut stage = Stage::begin(held()).await;
    let done = stage.hear(hand_over(7, "n1", None)).await;
    assert!(done.contains(&Action::Disown(ID, ip(A))), "{done:?}");
}

#[tokio::test]
async fn an_heir_is_ready_before_it_answers_for_the_address() {
    let mut changes = held();
    changes.push(assigned_to("n2"));
    let mut stage = Stage::begin(changes).await;
    assert_eq!(stage.hear(open(7, "n2", "n1")).await, [Action::PutHandover(ID, moving(HandoverStage::Arriving))]);
    let says = |open| BTreeMap::from([(ip(A), Prepared(7, "n2".into(), open))]);
    assert_eq!(stage.ready.borrow().prepared, says(false));
    assert_eq!(stage.hear(released(2, 6)).await, [], "a word about another hand-over");
    assert_eq!(stage.hear(released(2, 7)).await, [Action::PutHandover(ID, moving(HandoverStage::Open))]);
    assert_eq!(stage.ready.borrow().prepared, says(true));
    let done = stage.hear(assigned_to("n1")).await;
    assert_eq!(done[0], Action::Own(ID, ip(A)), "{done:?}");
    assert!(!done.contains(&Action::EndHandover(ID, ip(A))), "late ones are taken still");
    assert_eq!(stage.hear(Change::Ledger(Arc::default())).await, [Action::EndHandover(ID, ip(A))]);
    assert!(stage.ready.borrow().prepared.is_empty());
}

/// It has had the address before, so it asks whether that is its own, and meanwhile its pods' packets go by the old node.
#[tokio::test]
async fn pods_of_an_heir_that_still_asks_go_by_the_old_node() {
    let mut stage = Stage::begin(held()).await;
    stage.hear(open(6, "n1", "n2")).await;
    stage.hear(ready(2, 6)).await;
    stage.hear(assigned_to("n2")).await;
    stage.hear(Change::Ledger(Arc::default())).await;
    stage.hear(open(7, "n2", "n1")).await;
    stage.hear(released(2, 7)).await;
    assert_eq!(stage.hear(assigned_to("n1")).await, [], "nobody answers here");
    assert!(stage.reconciler.incomplete);
}

#[tokio::test]
async fn a_node_with_another_address_of_the_object_gets_not_ready() {
    let both = |first, second| {
        let (name, object) = policy("a", 1, 1, &[(first, A), (second, "172.18.0.101")]);
        Change::Policies(Update::Changed(name, object))
    };
    let mut changes = held();
    changes.push(both("n2", "n1"));
    let mut stage = Stage::begin(changes).await;
    assert_eq!(stage.hear(open(7, "n2", "n1")).await, []);
    assert!(stage.ready.borrow().prepared.is_empty());
}

/// It lets go of the one before it takes the other, since a kernel knows one hand-over of an object.
#[tokio::test]
async fn a_node_that_loses_one_address_of_the_object_and_gets_another_does_one_behind_the_other() {
    let items = |items: &[(&str, &str)]| {
        let (name, object) = policy("a", 1, 1, items);
        Change::Policies(Update::Changed(name, object))
    };
    let mut changes = held();
    changes.push(items(&[("n2", A), ("n1", "172.18.0.101")]));
    let mut stage = Stage::begin(changes).await;
    stage.reconciler.apply(open(7, "n2", "n1"));
    let done = stage.hear(items(&[("n2", A)])).await;
    assert!(done.contains(&Action::Disown(ID, ip("172.18.0.101"))), "{done:?}");
    assert!(!done.iter().any(|action| matches!(action, Action::PutHandover(..))), "{done:?}");
}

/// The node that has been handed the address over to may have begun to send by it, whoever is to have it by now.
#[tokio::test]
async fn what_has_been_handed_over_is_handed_over_to_nobody_else_under_the_same_number() {
    let mut changes = held();
    changes.push(Change::Nodes(Update::Changed(node(3).0, node(3).1)));
    let mut stage = Stage::begin(changes).await;
    stage.hear(open(7, "n1", "n2")).await;
    stage.hear(ready(2, 7)).await;
    let says = |stage: &Stage| stage.ready.borrow().given.clone();
    let to_n2 = BTreeMap::from([(ip(A), "n2".to_owned())]);
    assert_eq!(says(&stage), to_n2);
    stage.hear(open(7, "n1", "n3")).await;
    stage.hear(ready(3, 7)).await;
    let Change::Ledger(nobody) = open(7, "n1", "n3") else { unreachable!("a ledger") };
    let mut nobody = Arc::unwrap_or_clone(nobody);
    nobody.records.open.values_mut().for_each(|record| record.to = None);
    stage.hear(Change::Ledger(Arc::new(nobody))).await;
    stage.hear(open(7, "n1", "n3")).await;
    assert_eq!(stage.recorder.state.lock().expect("not poisoned").handovers[&ID], moving(HandoverStage::Leaving));
    assert_eq!((says(&stage), stage.released()), (to_n2, true));
    // Another number, from the node that has it: nothing is passed on to anybody.
    assert_eq!(stage.hear(open(8, "n2", "n3")).await.last(), Some(&Action::EndHandover(ID, ip(A))));
    assert!(says(&stage).is_empty() && !stage.released());
}

#[tokio::test]
async fn only_the_heir_that_the_old_node_names_takes_what_others_send() {
    let mut changes = held();
    changes.push(assigned_to("n2"));
    let mut stage = Stage::begin(changes).await;
    stage.hear(open(7, "n2", "n1")).await;
    for to in [None, Some("n3")] {
        assert_eq!(stage.hear(given(2, 7, to)).await, []);
        assert_eq!(stage.held(), (false, Some(HandoverStage::Arriving)));
    }
    stage.hear(given(2, 7, Some("n1"))).await;
    assert_eq!(stage.held(), (false, Some(HandoverStage::Open)));
}

/// This node has the address by hand-over 6 and still takes what comes late; its ledger tells it of nothing newer.
async fn taken_over(answers: bool) -> Stage {
    let mut changes = held();
    changes.push(assigned_to("n2"));
    let mut stage = Stage::begin(changes).await;
    stage.hear(open(6, "n2", "n1")).await;
    stage.hear(released(2, 6)).await;
    if answers {
        stage.hear(assigned_to("n1")).await;
    }
    assert_eq!(stage.held(), (answers, Some(HandoverStage::Open)));
    stage
}

#[tokio::test]
async fn an_order_that_is_newer_than_the_ledger_ends_what_was_taken_over_before_it_is_said() {
    for (answers, first) in [(true, Action::Disown(ID, ip(A))), (false, Action::EndHandover(ID, ip(A)))] {
        let mut stage = taken_over(answers).await;
        stage.orders.send_replace(BTreeMap::from([(ip(A), 8)]));
        assert_eq!(stage.go_on().await[0], first);
        assert_eq!(stage.held(), (false, None));
        assert_eq!(*stage.released.borrow(), BTreeMap::from([(ip(A), 8)]));
        assert_eq!(stage.go_on().await, [], "nor is it begun anew");
        assert!(stage.ready.borrow().prepared.is_empty());
    }
}

#[tokio::test]
async fn what_was_taken_over_and_never_answered_for_is_held_until_that_is_ended() {
    let mut stage = taken_over(false).await;
    *stage.recorder.fails.lock().expect("not poisoned") = Some(Action::EndHandover(ID, ip(A)));
    stage.reconciler.apply(open(7, "n1", "n2"));
    stage.reconciler.reconcile().await.expect_err("it cannot be ended");
    assert!(!stage.released());
    assert_eq!(stage.go_on().await[0], Action::EndHandover(ID, ip(A)));
    assert_eq!(*stage.released.borrow(), BTreeMap::from([(ip(A), 7)]));
}

#[tokio::test]
async fn behind_the_fence_nothing_is_taken_over_and_the_ledger_of_before_begins_nothing_anew() {
    for observed in [false, true] {
        let mut stage = taken_over(false).await;
        if observed {
            // What it was at was ended, and somebody walks the maps.
            stage.reconciler.actual = None;
            stage.recorder.is_walked.store(true, std::sync::atomic::Ordering::Relaxed);
        }
        stage.lease_state.send_replace(LeaseState::Expired(1));
        let round = tokio::time::timeout(Duration::from_millis(20), stage.reconciler.reconcile()).await;
        assert_eq!(round.is_err(), observed);
        assert_eq!(stage.held(), (false, None));
        stage.recorder.is_walked.store(false, std::sync::atomic::Ordering::Relaxed);
        stage.go_on().await;
        stage.lease_state.send_replace(LeaseState::Holds);
        stage.reconciler.incomplete = true;
        stage.go_on().await;
        assert_eq!(stage.held(), (false, None));
        let taken = Action::PutHandover(ID, moving(HandoverStage::Arriving));
        assert_eq!(stage.hear(open(9, "n2", "n1")).await, [taken], "a hand-over of after that");
    }
}

/// Who has nothing asks nobody whether it may.
#[tokio::test]
async fn a_node_that_had_nothing_to_lose_behind_the_fence_takes_what_it_has_heard_of_there() {
    let mut changes = held();
    changes.push(assigned_to("n2"));
    let mut stage = Stage::begin(changes).await;
    stage.lease_state.send_replace(LeaseState::Expired(1));
    assert_eq!(stage.hear(open(7, "n2", "n1")).await, []);
    stage.lease_state.send_replace(LeaseState::Holds);
    stage.reconciler.incomplete = true;
    assert_eq!(stage.go_on().await, [Action::PutHandover(ID, moving(HandoverStage::Arriving))]);
}

#[tokio::test]
async fn a_hand_over_that_cannot_be_prepared_costs_nothing_else() {
    let mut stage = Stage::begin(held()).await;
    stage.hear(open(7, "n1", "n2")).await;
    *stage.recorder.fails.lock().expect("not poisoned") = Some(Action::PutHandover(ID, moving(HandoverStage::Leaving)));
    let done = stage.hear(ready(2, 7)).await;
    assert_eq!(done[..2], [Action::Disown(ID, ip(A)), Action::EndHandover(ID, ip(A))]);
    assert!(matches!(done[2..], [Action::PutPolicy(..), ..]), "the rest goes on: {done:?}");
    assert!(stage.released());

    let mut changes = held();
    changes.push(assigned_to("n2"));
    let mut stage = Stage::begin(changes).await;
    *stage.recorder.fails.lock().expect("not poisoned") =
        Some(Action::PutHandover(ID, moving(HandoverStage::Arriving)));
    assert_eq!(stage.hear(open(7, "n2", "n1")).await, []);
    assert!(stage.ready.borrow().prepared.is_empty() && stage.reconciler.incomplete);
    assert_eq!(stage.go_on().await, [Action::PutHandover(ID, moving(HandoverStage::Arriving))], "it is tried again");
}

#[tokio::test]
async fn only_the_word_of_the_node_that_has_handed_over_spares_a_probe() {
    let link = [2, 0, 0, 0, 0, 2];
    let with_link = |change| {
        let Change::Nodes(Update::Changed(name, node)) = change else { unreachable!("a node") };
        let mut node = Arc::unwrap_or_clone(node);
        node.uplink.mac = Some(link);
        Change::Nodes(Update::Changed(name, Arc::new(node)))
    };
    let holders = BTreeMap::from([(ip(A), ip("172.18.0.2"))]);
    for (word, number, is_handed_over) in [
        (released(2, 7), 7, true),
        (released(2, 6), 7, false),
        // It has let go, and perhaps never had it.
        (given(2, 7, None), 7, false),
        (given(2, 7, Some("n3")), 7, false),
    ] {
        let mut stage = Stage::begin(held()).await;
        stage.hear(with_link(word)).await;
        let expected = |stage: &Stage| stage.reconciler.ties.expected(stage.reconciler.compiler.view());
        assert_eq!(expected(&stage).links, BTreeMap::from([(link, ip("172.18.0.2"))]));
        assert_eq!(expected(&stage).holders, BTreeMap::new(), "no hand-over is open");
        stage.hear(open(number, "n2", "n1")).await;
        let Expected { handed_over, holders: named, .. } = expected(&stage);
        assert_eq!((handed_over.contains(&ip(A)), named), (is_handed_over, holders.clone()));
    }
    // What this node had itself, and has read anew, may be another host's by now.
    let mut stage = Stage::begin(held()).await;
    stage.hear(open(7, "n1", "n2")).await;
    stage.hear(Change::Ledger(Arc::new(Ledger { ..Ledger::default() }))).await;
    stage.reconciler.ties.ownership.confirm(&BTreeSet::from([ip(A)]));
    assert_eq!(stage.reconciler.ties.expected(stage.reconciler.compiler.view()).handed_over, BTreeSet::new());
}
