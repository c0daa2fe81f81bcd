use super::*;
use crate::model::ledger::{HandOver, Records};
use crate::model::samples::ip;
use crate::model::state::{Policy, Slot, WhenEmpty};

const A: &str = "172.18.0.100";
const B: &str = "172.18.0.101";

fn ledger(records: &[(&str, u64, &str, Option<&str>)]) -> Arc<Ledger> {
    let record = |(address, number, from, to): &(&str, u64, &str, Option<&str>)| {
        (ip(address), HandOver { number: *number, from: (*from).into(), to: to.map(str::to_owned) })
    };
    let records = Records { last: 9, open: records.iter().map(record).collect() };
    Arc::new(Ledger { records, ..Ledger::default() })
}

fn owned(all: &[(u32, &str)]) -> Owned {
    all.iter().map(|(id, address)| (EgressId(*id), ip(address))).collect()
}

fn me() -> Ownership {
    Ownership::new("me".into())
}

#[test]
fn only_the_new_node_may_hold_what_is_on_its_way() {
    let mut tenure = me();
    let both = owned(&[(1, A), (2, B)]);
    assert_eq!(tenure.barred(&both, &both), Barred::default());
    tenure.follow(ledger(&[(A, 3, "me", Some("other"))]));
    assert_eq!(tenure.barred(&both, &both).all, owned(&[(1, A)]));
    assert!(tenure.barred(&both, &both).doubtful.is_empty(), "there is nothing to ask");
    assert!(tenure.released(&both, &BTreeMap::new()).is_empty(), "it is held still");
    assert_eq!(tenure.released(&owned(&[(2, B)]), &BTreeMap::new()), BTreeMap::from([(ip(A), 3)]));

    // A status that is late, or a stranger's.
    let mut tenure = me();
    for to in [Some("third"), None] {
        tenure.follow(ledger(&[(A, 3, "other", to)]));
        assert_eq!(tenure.barred(&both, &Owned::new()).all, owned(&[(1, A)]));
        assert_eq!(tenure.arriving().count(), 0);
    }
    tenure.follow(ledger(&[(A, 3, "other", Some("me"))]));
    assert_eq!(tenure.barred(&both, &Owned::new()), Barred::default());
    assert_eq!(tenure.arriving().map(|(address, _)| *address).collect::<Vec<_>>(), [ip(A)]);
}

#[test]
fn what_was_given_up_is_taken_up_only_when_it_was_read_anew() {
    let mut tenure = me();
    let one = owned(&[(1, A)]);
    tenure.follow(ledger(&[(A, 3, "me", Some("other"))]));
    tenure.follow(ledger(&[]));
    // The status that this node knows may be from before.
    let barred = tenure.barred(&one, &Owned::new());
    assert_eq!((&barred.all, &barred.doubtful), (&one, &one));
    assert!(tenure.released(&Owned::new(), &BTreeMap::new()).is_empty(), "there is nothing open to speak of");

    tenure.confirm(&BTreeSet::from([ip(A)]));
    assert_eq!(tenure.barred(&one, &Owned::new()), Barred::default());
    // It could not be claimed: the next attempt asks anew.
    tenure.settle(&Owned::new());
    assert_eq!(tenure.barred(&one, &Owned::new()).doubtful, one);
    // What was read before the node is told to let go once more is old.
    tenure.confirm(&BTreeSet::from([ip(A)]));
    tenure.order(&Acknowledgements::from([(ip(A), 4)]));
    assert_eq!(tenure.barred(&one, &Owned::new()).doubtful, one);
    tenure.confirm(&BTreeSet::from([ip(A)]));
    tenure.settle(&one);
    assert_eq!(tenure.barred(&one, &one), Barred::default());
}

#[test]
fn behind_the_fence_nothing_is_held_and_after_it_everything_is_asked_for() {
    let mut tenure = me();
    let both = owned(&[(1, A), (2, B)]);
    tenure.set_fenced(true, &owned(&[(1, A)]));
    tenure.set_fenced(true, &Owned::new());
    assert_eq!(tenure.barred(&both, &Owned::new()), Barred { all: both.clone(), doubtful: Owned::new() });
    tenure.set_fenced(false, &Owned::new());
    let barred = tenure.barred(&both, &Owned::new());
    assert_eq!((&barred.all, &barred.doubtful), (&both, &both), "also what is new: the news may be old");
    tenure.confirm(&BTreeSet::from([ip(B)]));
    assert_eq!(tenure.barred(&both, &Owned::new()).all, owned(&[(1, A)]));
    tenure.settle(&owned(&[(2, B)]));
    assert_eq!(tenure.barred(&both, &owned(&[(2, B)])).all, owned(&[(1, A)]));
    // What the kernel could not let go of is no exception.
    assert_eq!(tenure.barred(&both, &both).all, owned(&[(1, A)]));
}

#[test]
fn what_is_withheld_is_waited_for() {
    let slot = |address, place| Slot { address: ip(address), place };
    let elsewhere = Place::Remote(crate::model::state::TunnelEndpoint(ip("172.18.0.9")));
    let slots = vec![slot(A, Place::Here), slot(B, elsewhere)];
    let policy = Policy { slots, pending: vec![ip("172.18.0.7")], when_empty: WhenEmpty::Drop };
    let key = (EgressId(1), family_of(ip(A)));
    let mut state = KernelState { owned: owned(&[(1, A)]), ..KernelState::default() };
    state.policy.insert(key, policy);
    withhold(&mut state, &owned(&[(1, "172.18.0.8")]));
    assert_eq!(state.owned.len(), 1, "another address");
    withhold(&mut state, &owned(&[(1, A)]));
    assert!(state.owned.is_empty());
    assert_eq!(state.policy[&key].slots, [slot(B, elsewhere)]);
    assert_eq!(state.policy[&key].pending, [ip("172.18.0.7"), ip(A)]);
}
