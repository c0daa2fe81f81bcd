//! Hand-overs between two working nodes: no address is released before the new owner is ready.

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

/// Another node is ready to take over from this one.
fn ready(i: u8, number: u64) -> Change {
    let (name, node) = node(i);
    let prepared = BTreeMap::from([(ip(A), Prepared(number, "n1".into(), false))]);
    Change::Nodes(Update::Changed(name, Arc::new(Node { prepared, ..Arc::unwrap_or_clone(node) })))
}

/// Another node has released the address and handed it over to this one.
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

struct Handover {
    reconciler: Reconciler<Recorder>,
    recorder: Recorder,
    released: watch::Receiver<Acknowledgements>,
    ready: watch::Receiver<Readiness>,
    orders: watch::Sender<Acknowledgements>,
    lease_state: watch::Sender<LeaseState>,
    demand: watch::Receiver<LeaseDemand>,
}

impl Handover {
    async fn start(changes: Vec<Change>) -> Self {
        let recorder = Recorder::default();
        let ((acknowledgements, released), (ready_for, readiness)) =
            (watch::channel(Acknowledgements::new()), watch::channel(Readiness::default()));
        let (orders, orders_seen) = watch::channel(Acknowledgements::new());
        let no_answer: FreshRead = Box::new(|_| Box::pin(std::future::ready(BTreeSet::new())));
        let (lease_state, lease_state_seen) = watch::channel(LeaseState::Holds);
        let (demand, demanded) = watch::channel(LeaseDemand::default());
        let reports = (demand, acknowledgements);
        let coordination =
            Coordination::new("n1", (lease_state_seen, orders_seen), reports, no_answer).with_readiness(ready_for);
        let ready = watch::channel(Ready::default()).0;
        let mut reconciler = Reconciler::new(settings(), recorder.clone(), None, ready).with_coordination(coordination);
        changes.into_iter().for_each(|change| reconciler.apply(change));
        let mut handover =
            Self { reconciler, recorder, released, ready: readiness, orders, lease_state, demand: demanded };
        handover.reconcile().await;
        handover
    }

    async fn reconcile(&mut self) -> Vec<Action> {
        self.reconciler.reconcile().await.expect("the recorder does not fail");
        std::mem::take(&mut *self.recorder.log.lock().expect("not poisoned"))
    }

    async fn apply(&mut self, change: Change) -> Vec<Action> {
        self.reconciler.apply(change);
        self.reconcile().await
    }

    /// Whether the kernel owns the address, and the stage of its hand-over.
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
    HandoverState { stage, address: ip(A), peer: peer(), shared_with: None }
}

#[tokio::test]
async fn an_address_is_served_until_the_new_owner_is_ready_and_handed_over_in_one_step() {
    let mut handover = Handover::start(held()).await;
    assert_eq!(handover.apply(open(7, "n1", "n2")).await, []);
    assert_eq!(handover.apply(ready(2, 6)).await, [], "it is about another hand-over");
    assert!(!handover.released() && handover.reconciler.incomplete, "the wait has a limit");

    let done = handover.apply(ready(2, 7)).await;
    assert_eq!(done[0], Action::PutHandover(ID, moving(HandoverStage::Leaving)));
    let there = [Slot { address: ip(A), place: Place::Remote(peer()) }];
    assert!(matches!(&done[1..], [Action::PutPolicy(_, _, policy)] if policy.slots == there), "{done:?}");
    assert_eq!(*handover.released.borrow(), BTreeMap::from([(ip(A), 7)]));

    assert_eq!(handover.apply(assigned_to("n2")).await, [], "it is in the desired state already");
    assert_eq!(handover.apply(Change::Ledger(Arc::default())).await, [Action::EndHandover(ID, ip(A))]);
    assert!(!handover.released());
}

/// No leader may have confirmed a node without addresses for a while.
#[tokio::test]
async fn a_node_asks_for_a_lease_before_it_takes_an_address_over() {
    let mut handover = Handover::start(vec![Change::Nodes(Update::Replaced(BTreeMap::from([node(1), node(2)])))]).await;
    let wants = |handover: &Handover| handover.demand.borrow().has_addresses;
    assert!(!wants(&handover));
    handover.apply(open(7, "n2", "n3")).await;
    assert!(!wants(&handover), "other nodes' hand-over");
    handover.apply(open(8, "n2", "n1")).await;
    assert!(wants(&handover));
    handover.apply(Change::Ledger(Arc::default())).await;
    assert!(!wants(&handover), "it has ended, and the address is not this node's");
}

#[tokio::test]
async fn a_new_owner_that_is_not_ready_in_time_is_not_waited_for() {
    let mut handover = Handover::start(held()).await;
    assert_eq!(handover.apply(open(7, "n1", "n2")).await, []);
    // Longer than the new owner's limit.
    tokio::time::sleep(Duration::from_millis(1_010)).await;
    let done = handover.reconcile().await;
    assert!(done.contains(&Action::Disown(ID, ip(A))), "{done:?}");
    assert!(handover.released());
    assert_eq!(handover.apply(ready(2, 7)).await, [], "a released address is not forwarded");
}

#[tokio::test]
async fn an_address_without_a_new_owner_is_released_at_once() {
    let mut handover = Handover::start(held()).await;
    let done = handover.apply(hand_over(7, "n1", None)).await;
    assert!(done.contains(&Action::Disown(ID, ip(A))), "{done:?}");
}

#[tokio::test]
async fn a_new_owner_is_ready_before_it_answers_for_the_address() {
    let mut changes = held();
    changes.push(assigned_to("n2"));
    let mut handover = Handover::start(changes).await;
    assert_eq!(handover.apply(open(7, "n2", "n1")).await, [Action::PutHandover(ID, moving(HandoverStage::Arriving))]);
    let published = |open| BTreeMap::from([(ip(A), Prepared(7, "n2".into(), open))]);
    assert_eq!(handover.ready.borrow().prepared, published(false));
    assert_eq!(handover.apply(released(2, 6)).await, [], "it is about another hand-over");
    assert_eq!(handover.apply(released(2, 7)).await, [Action::PutHandover(ID, moving(HandoverStage::Open))]);
    assert_eq!(handover.ready.borrow().prepared, published(true));
    let done = handover.apply(assigned_to("n1")).await;
    assert_eq!(done[0], Action::Own(ID, ip(A)), "{done:?}");
    assert!(!done.contains(&Action::EndHandover(ID, ip(A))), "late packets are still forwarded");
    assert_eq!(handover.apply(Change::Ledger(Arc::default())).await, [Action::EndHandover(ID, ip(A))]);
    assert!(handover.ready.borrow().prepared.is_empty());
}

/// It held the address before, so it needs a fresh read; until then its pods' packets go by the old owner.
#[tokio::test]
async fn pods_of_a_new_owner_that_waits_for_a_fresh_read_use_the_old_owner() {
    let mut handover = Handover::start(held()).await;
    handover.apply(open(6, "n1", "n2")).await;
    handover.apply(ready(2, 6)).await;
    handover.apply(assigned_to("n2")).await;
    handover.apply(Change::Ledger(Arc::default())).await;
    handover.apply(open(7, "n2", "n1")).await;
    handover.apply(released(2, 7)).await;
    assert_eq!(handover.apply(assigned_to("n1")).await, [], "the fresh read gets no answer");
    assert!(handover.reconciler.incomplete);
}

#[tokio::test]
async fn a_node_with_another_address_of_the_object_does_not_get_ready() {
    let both = |first, second| {
        let (name, object) = policy("a", 1, 1, &[(first, A), (second, "172.18.0.101")]);
        Change::Policies(Update::Changed(name, object))
    };
    let mut changes = held();
    changes.push(both("n2", "n1"));
    let mut handover = Handover::start(changes).await;
    assert_eq!(handover.apply(open(7, "n2", "n1")).await, []);
    assert!(handover.ready.borrow().prepared.is_empty());
}

/// It releases one before it takes over the other, since the kernel has one hand-over for each object.
#[tokio::test]
async fn a_node_that_loses_one_address_of_the_object_and_gets_another_does_so_in_order() {
    let items = |items: &[(&str, &str)]| {
        let (name, object) = policy("a", 1, 1, items);
        Change::Policies(Update::Changed(name, object))
    };
    let mut changes = held();
    changes.push(items(&[("n2", A), ("n1", "172.18.0.101")]));
    let mut handover = Handover::start(changes).await;
    handover.reconciler.apply(open(7, "n2", "n1"));
    let done = handover.apply(items(&[("n2", A)])).await;
    assert!(done.contains(&Action::Disown(ID, ip("172.18.0.101"))), "{done:?}");
    assert!(!done.iter().any(|action| matches!(action, Action::PutHandover(..))), "{done:?}");
}

/// The new owner may already send with the address, even if another node is to get it now.
#[tokio::test]
async fn a_handed_over_address_is_not_handed_over_again_under_the_same_number() {
    let mut changes = held();
    changes.push(Change::Nodes(Update::Changed(node(3).0, node(3).1)));
    let mut handover = Handover::start(changes).await;
    handover.apply(open(7, "n1", "n2")).await;
    handover.apply(ready(2, 7)).await;
    let given = |handover: &Handover| handover.ready.borrow().given.clone();
    let to_n2 = BTreeMap::from([(ip(A), "n2".to_owned())]);
    assert_eq!(given(&handover), to_n2);
    handover.apply(open(7, "n1", "n3")).await;
    handover.apply(ready(3, 7)).await;
    let Change::Ledger(no_owner) = open(7, "n1", "n3") else { unreachable!("a ledger") };
    let mut no_owner = Arc::unwrap_or_clone(no_owner);
    no_owner.records.open.values_mut().for_each(|record| record.to = None);
    handover.apply(Change::Ledger(Arc::new(no_owner))).await;
    handover.apply(open(7, "n1", "n3")).await;
    assert_eq!(handover.recorder.state.lock().expect("not poisoned").handovers[&ID], moving(HandoverStage::Leaving));
    assert_eq!((given(&handover), handover.released()), (to_n2, true));
    // Another number, from the node that has it: nothing is forwarded.
    assert_eq!(handover.apply(open(8, "n2", "n3")).await.last(), Some(&Action::EndHandover(ID, ip(A))));
    assert!(given(&handover).is_empty() && !handover.released());
}

#[tokio::test]
async fn only_the_new_owner_that_the_old_owner_names_translates_packets_of_other_nodes() {
    let mut changes = held();
    changes.push(assigned_to("n2"));
    let mut handover = Handover::start(changes).await;
    handover.apply(open(7, "n2", "n1")).await;
    for to in [None, Some("n3")] {
        assert_eq!(handover.apply(given(2, 7, to)).await, []);
        assert_eq!(handover.held(), (false, Some(HandoverStage::Arriving)));
    }
    handover.apply(given(2, 7, Some("n1"))).await;
    assert_eq!(handover.held(), (false, Some(HandoverStage::Open)));
}

/// This node has taken over the address by hand-over 6, which is still open; its ledger has nothing newer.
async fn taken_over(answers: bool) -> Handover {
    let mut changes = held();
    changes.push(assigned_to("n2"));
    let mut handover = Handover::start(changes).await;
    handover.apply(open(6, "n2", "n1")).await;
    handover.apply(released(2, 6)).await;
    if answers {
        handover.apply(assigned_to("n1")).await;
    }
    assert_eq!(handover.held(), (answers, Some(HandoverStage::Open)));
    handover
}

#[tokio::test]
async fn an_order_that_is_newer_than_the_ledger_ends_the_hand_over_before_it_is_acknowledged() {
    for (answers, first) in [(true, Action::Disown(ID, ip(A))), (false, Action::EndHandover(ID, ip(A)))] {
        let mut handover = taken_over(answers).await;
        handover.orders.send_replace(BTreeMap::from([(ip(A), 8)]));
        assert_eq!(handover.reconcile().await[0], first);
        assert_eq!(handover.held(), (false, None));
        assert_eq!(*handover.released.borrow(), BTreeMap::from([(ip(A), 8)]));
        assert_eq!(handover.reconcile().await, [], "it does not begin again");
        assert!(handover.ready.borrow().prepared.is_empty());
    }
}

#[tokio::test]
async fn an_unannounced_hand_over_is_not_acknowledged_until_it_has_ended() {
    let mut handover = taken_over(false).await;
    *handover.recorder.fails.lock().expect("not poisoned") = Some(Action::EndHandover(ID, ip(A)));
    handover.reconciler.apply(open(7, "n1", "n2"));
    handover.reconciler.reconcile().await.expect_err("it cannot be ended");
    assert!(!handover.released());
    assert_eq!(handover.reconcile().await[0], Action::EndHandover(ID, ip(A)));
    assert_eq!(*handover.released.borrow(), BTreeMap::from([(ip(A), 7)]));
}

#[tokio::test]
async fn without_a_lease_nothing_is_taken_over_and_an_old_record_starts_no_hand_over_later() {
    for observed in [false, true] {
        let mut handover = taken_over(false).await;
        if observed {
            // The last reconcile was interrupted, and the maps are being walked.
            handover.reconciler.actual = None;
            handover.recorder.is_walked.store(true, std::sync::atomic::Ordering::Relaxed);
        }
        handover.lease_state.send_replace(LeaseState::Expired(1));
        let round = tokio::time::timeout(Duration::from_millis(20), handover.reconciler.reconcile()).await;
        assert_eq!(round.is_err(), observed);
        assert_eq!(handover.held(), (false, None));
        handover.recorder.is_walked.store(false, std::sync::atomic::Ordering::Relaxed);
        handover.reconcile().await;
        handover.lease_state.send_replace(LeaseState::Holds);
        handover.reconciler.incomplete = true;
        handover.reconcile().await;
        assert_eq!(handover.held(), (false, None));
        let taken = Action::PutHandover(ID, moving(HandoverStage::Arriving));
        assert_eq!(handover.apply(open(9, "n2", "n1")).await, [taken], "a newer hand-over");
    }
}

/// A node without addresses needs no fresh read.
#[tokio::test]
async fn a_node_without_addresses_takes_part_in_a_hand_over_that_began_while_its_lease_had_expired() {
    let mut changes = held();
    changes.push(assigned_to("n2"));
    let mut handover = Handover::start(changes).await;
    handover.lease_state.send_replace(LeaseState::Expired(1));
    assert_eq!(handover.apply(open(7, "n2", "n1")).await, []);
    handover.lease_state.send_replace(LeaseState::Holds);
    handover.reconciler.incomplete = true;
    assert_eq!(handover.reconcile().await, [Action::PutHandover(ID, moving(HandoverStage::Arriving))]);
}

#[tokio::test]
async fn a_hand_over_that_cannot_be_prepared_affects_nothing_else() {
    let mut handover = Handover::start(held()).await;
    handover.apply(open(7, "n1", "n2")).await;
    *handover.recorder.fails.lock().expect("not poisoned") =
        Some(Action::PutHandover(ID, moving(HandoverStage::Leaving)));
    let done = handover.apply(ready(2, 7)).await;
    assert_eq!(done[..2], [Action::Disown(ID, ip(A)), Action::EndHandover(ID, ip(A))]);
    assert!(matches!(done[2..], [Action::PutPolicy(..), ..]), "the rest continues: {done:?}");
    assert!(handover.released());

    let mut changes = held();
    changes.push(assigned_to("n2"));
    let mut handover = Handover::start(changes).await;
    *handover.recorder.fails.lock().expect("not poisoned") =
        Some(Action::PutHandover(ID, moving(HandoverStage::Arriving)));
    assert_eq!(handover.apply(open(7, "n2", "n1")).await, []);
    assert!(handover.ready.borrow().prepared.is_empty() && handover.reconciler.incomplete);
    assert_eq!(handover.reconcile().await, [Action::PutHandover(ID, moving(HandoverStage::Arriving))], "it is retried");
}

#[tokio::test]
async fn only_the_acknowledgement_of_the_old_owner_spares_a_probe() {
    let link = [2, 0, 0, 0, 0, 2];
    let with_link = |change| {
        let Change::Nodes(Update::Changed(name, node)) = change else { unreachable!("a node") };
        let mut node = Arc::unwrap_or_clone(node);
        node.uplink.mac = Some(link);
        Change::Nodes(Update::Changed(name, Arc::new(node)))
    };
    let holders = BTreeMap::from([(ip(A), ip("172.18.0.2"))]);
    for (acknowledgement, number, is_handed_over) in [
        (released(2, 7), 7, true),
        (released(2, 6), 7, false),
        // It has released the address, and may never have held it.
        (given(2, 7, None), 7, false),
        (given(2, 7, Some("n3")), 7, false),
    ] {
        let mut handover = Handover::start(held()).await;
        handover.apply(with_link(acknowledgement)).await;
        let expected =
            |handover: &Handover| handover.reconciler.coordination.expected(handover.reconciler.compiler.view());
        assert_eq!(expected(&handover).links, BTreeMap::from([(link, ip("172.18.0.2"))]));
        assert_eq!(expected(&handover).holders, BTreeMap::new(), "no hand-over is open");
        handover.apply(open(number, "n2", "n1")).await;
        let Expected { handed_over, holders: named, .. } = expected(&handover);
        assert_eq!((handed_over.contains(&ip(A)), named), (is_handed_over, holders.clone()));
    }
    // An address that this node held before a fresh read may be another host's now.
    let mut handover = Handover::start(held()).await;
    handover.apply(open(7, "n1", "n2")).await;
    handover.apply(Change::Ledger(Arc::new(Ledger { ..Ledger::default() }))).await;
    handover.reconciler.coordination.ownership.confirm(&BTreeSet::from([ip(A)]));
    assert_eq!(
        handover.reconciler.coordination.expected(handover.reconciler.compiler.view()).handed_over,
        BTreeSet::new()
    );
}
