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

fn owned(all: &[(u32, &str)]) -> AddressByPolicy {
    all.iter().map(|(id, address)| (EgressId(*id), ip(address))).collect()
}

fn me() -> NodeOwnership {
    NodeOwnership::new("me".into())
}

#[test]
fn only_the_new_node_may_hold_an_address_during_its_hand_over() {
    let mut ownership = me();
    let both = owned(&[(1, A), (2, B)]);
    assert_eq!(ownership.withheld(&both, &both), Withheld::default());
    ownership.observe_ledger(ledger(&[(A, 3, "me", Some("other"))]));
    assert_eq!(ownership.withheld(&both, &both).all, owned(&[(1, A)]));
    assert!(ownership.withheld(&both, &both).unconfirmed.is_empty(), "there is nothing to ask");
    assert!(ownership.released(&both, &BTreeMap::new()).is_empty(), "it is held still");
    assert_eq!(ownership.released(&owned(&[(2, B)]), &BTreeMap::new()), BTreeMap::from([(ip(A), 3)]));

    // A late status, or one by a foreign writer.
    let mut ownership = me();
    for to in [Some("third"), None] {
        ownership.observe_ledger(ledger(&[(A, 3, "other", to)]));
        assert_eq!(ownership.withheld(&both, &AddressByPolicy::new()).all, owned(&[(1, A)]));
        assert_eq!(ownership.arriving().count(), 0);
    }
    ownership.observe_ledger(ledger(&[(A, 3, "other", Some("me"))]));
    assert_eq!(ownership.withheld(&both, &AddressByPolicy::new()), Withheld::default());
    assert_eq!(ownership.arriving().map(|(address, _)| *address).collect::<Vec<_>>(), [ip(A)]);
}

#[test]
fn a_released_address_is_held_again_only_after_a_fresh_read() {
    let mut ownership = me();
    let one = owned(&[(1, A)]);
    ownership.observe_ledger(ledger(&[(A, 3, "me", Some("other"))]));
    ownership.observe_ledger(ledger(&[]));
    // The status that this node knows may be outdated.
    let barred = ownership.withheld(&one, &AddressByPolicy::new());
    assert_eq!((&barred.all, &barred.unconfirmed), (&one, &one));
    assert!(
        ownership.released(&AddressByPolicy::new(), &BTreeMap::new()).is_empty(),
        "there is nothing open to speak of"
    );

    ownership.confirm(&BTreeSet::from([ip(A)]));
    assert_eq!(ownership.withheld(&one, &AddressByPolicy::new()), Withheld::default());
    // It could not be claimed: the next attempt reads again.
    ownership.note_settled(&AddressByPolicy::new());
    assert_eq!(ownership.withheld(&one, &AddressByPolicy::new()).unconfirmed, one);
    // A read from before another release request is outdated.
    ownership.confirm(&BTreeSet::from([ip(A)]));
    ownership.set_orders(&Acknowledgements::from([(ip(A), 4)]));
    assert_eq!(ownership.withheld(&one, &AddressByPolicy::new()).unconfirmed, one);
    ownership.confirm(&BTreeSet::from([ip(A)]));
    ownership.note_settled(&one);
    assert_eq!(ownership.withheld(&one, &one), Withheld::default());
}

#[test]
fn nothing_is_held_with_an_expired_lease_and_everything_is_read_after_it() {
    let mut ownership = me();
    let both = owned(&[(1, A), (2, B)]);
    ownership.set_lease_expired(true, &owned(&[(1, A)]));
    ownership.set_lease_expired(true, &AddressByPolicy::new());
    assert_eq!(
        ownership.withheld(&both, &AddressByPolicy::new()),
        Withheld { all: both.clone(), unconfirmed: AddressByPolicy::new() }
    );
    ownership.set_lease_expired(false, &AddressByPolicy::new());
    let barred = ownership.withheld(&both, &AddressByPolicy::new());
    assert_eq!((&barred.all, &barred.unconfirmed), (&both, &both), "also what is new: the news may be old");
    ownership.confirm(&BTreeSet::from([ip(B)]));
    assert_eq!(ownership.withheld(&both, &AddressByPolicy::new()).all, owned(&[(1, A)]));
    ownership.note_settled(&owned(&[(2, B)]));
    assert_eq!(ownership.withheld(&both, &owned(&[(2, B)])).all, owned(&[(1, A)]));
    // Addresses that the kernel could not release are no exception.
    assert_eq!(ownership.withheld(&both, &both).all, owned(&[(1, A)]));
}

#[test]
fn flows_of_withheld_addresses_wait() {
    let slot = |address, place| Slot { address: ip(address), place };
    let elsewhere = Place::Remote(crate::model::state::TunnelEndpoint(ip("172.18.0.9")));
    let slots = vec![slot(A, Place::Here), slot(B, elsewhere)];
    let policy = Policy::new(slots, vec![ip("172.18.0.7")], WhenEmpty::Drop);
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
