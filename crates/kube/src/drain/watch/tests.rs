//! A drain, second by second.

use std::sync::Arc;

use super::*;
use egress_core::allocation::samples::{node, policy};
use egress_core::model::node::Prepared;

const A: &str = "172.18.0.100";

fn ip(text: &str) -> IpAddr {
    text.parse().expect("a literal")
}

/// The policy's address is on `place`; the node is marked, and no hand-over is open.
fn at(place: &str) -> DrainSnapshot {
    let drained = Node { drained: true, ..Arc::unwrap_or_clone(node("n1", "172.18.0.1/16").1) };
    DrainSnapshot { node: Some(drained), nodes: None, policies: [policy("a", 1, &[A], &[(place, A)])].into() }
}

fn changed(mut state: DrainSnapshot, change: impl Fn(&mut Node)) -> DrainSnapshot {
    state.node.iter_mut().for_each(change);
    state
}

fn released(state: DrainSnapshot) -> DrainSnapshot {
    changed(state, |node| node.released = [(ip(A), 7)].into())
}

fn prepared(state: DrainSnapshot) -> DrainSnapshot {
    changed(state, |node| node.prepared = [(ip(A), Prepared(7, "n2".into(), false))].into())
}

/// One state after another: the lines, and how the drain ends with the last state, but not before.
fn play<'a>(
    before: &DrainSnapshot,
    states: impl IntoIterator<Item = DrainSnapshot>,
) -> (Vec<String>, Option<Result<String, String>>, DrainWatch<'a>) {
    let mut now = Instant::now();
    let (mut watch, line) = DrainWatch::start("n1", &before.policies, now);
    let (mut all, mut ended) = (vec![line], None);
    for state in states {
        assert!(ended.is_none(), "it has ended: {ended:?}");
        now += Duration::from_millis(700);
        let DrainProgress { lines, end } = watch.update(&state, now);
        all.extend(lines);
        ended = end.map(|end| end.map_err(|error| error.to_string()));
    }
    (all, ended, watch)
}

#[test]
fn a_node_is_drained_once_it_has_released_everything_and_has_no_open_hand_over() {
    let (lines, end, _) = play(&at("n1"), [released(at("n1")), released(at("n2")), released(at("n2")), at("n2")]);
    assert_eq!(lines, ["n1 has 1 egress IP", "172.18.0.100 (a): moved to n2, after 1.4 s"]);
    let drained = "n1 is drained: no egress IP is served there";
    assert_eq!(end, Some(Ok(drained.to_owned())));
}

/// The drain starts while the node is the new owner of a hand-over.
#[test]
fn a_hand_over_to_the_node_is_waited_for() {
    let (_, end, _) = play(&at("n2"), [at("n2")]);
    assert_eq!(end, None, "one state is not enough");
    let (_, end, _) = play(&at("n2"), [at("n2"), at("n2")]);
    assert!(end.is_some_and(|end| end.is_ok_and(|lines| lines.contains("it has no egress IPs"))));
    let ready = || prepared(at("n2"));
    let (_, end, _) = play(&at("n2"), [ready(), ready(), ready()]);
    assert_eq!(end, None, "it is ready to take one over");
    let (lines, end, _) = play(&at("n2"), [ready(), at("n1"), released(at("n2")), at("n2")]);
    assert_eq!(lines[1..2], ["172.18.0.100 (a): assigned to n1"]);
    assert!(end.is_some_and(|end| end.is_ok()));
}

#[test]
fn addresses_without_a_confirmed_release_are_named() {
    let nine = || (0..9).map(|_| at("n2"));
    let (_, end, watch) = play(&at("n1"), nine());
    assert_eq!(end, None, "it may still confirm");
    let (_, error) = watch.timed_out(6);
    assert!(matches!(error, DrainError::Unconfirmed { .. }), "nor is it drained at the timeout: {error}");
    let (_, end, _) = play(&at("n1"), nine().chain([released(at("n2"))]));
    let Some(Ok(_)) = end else { panic!("it has confirmed at last: {end:?}") };
    let (_, end, _) = play(&at("n1"), nine().chain([at("n2")]));
    let Some(Err(error)) = end else { panic!("it is not drained: {end:?}") };
    assert!(error.contains("not confirmed the release of 172.18.0.100"), "{error}");
    // An agent that died after it was ready to take over.
    let (_, end, _) = play(&at("n2"), (0..10).map(|_| prepared(at("n2"))));
    let Some(Err(error)) = end else { panic!("it is not drained: {end:?}") };
    assert!(error.contains("not confirmed the release of 172.18.0.100"), "{error}");
}

#[test]
fn an_address_whose_object_was_deleted_is_not_waited_for() {
    let deleted = || DrainSnapshot { policies: Policies::new(), ..at("n1") };
    let (lines, end, _) = play(&at("n1"), [at("n1"), deleted()]);
    assert_eq!(lines[1], "172.18.0.100 (a): the object was deleted, after 1.4 s");
    assert!(matches!(end, Some(Ok(_))), "{end:?}");
    let nine = || (0..9).map(|_| at("n2"));
    let (_, end, _) = play(&at("n1"), nine().chain([deleted()]));
    assert!(matches!(end, Some(Ok(_))), "nor one that had moved: {end:?}");
    // Another policy has the address now: two nodes might serve it.
    let taken = || DrainSnapshot { policies: [policy("b", 2, &[A], &[("n2", A)])].into(), ..at("n1") };
    let (_, end, watch) = play(&at("n1"), [at("n1"), taken(), taken()]);
    assert_eq!(end, None);
    assert!(matches!(watch.timed_out(3).1, DrainError::Unconfirmed { .. }));
}

/// The acknowledgement of an earlier hand-over does not count for the next one.
#[test]
fn an_acknowledgement_counts_for_one_hand_over() {
    let (_, end, watch) = play(&at("n1"), [released(at("n2")), at("n1"), at("n2"), at("n2")]);
    assert_eq!(end, None);
    assert!(matches!(watch.timed_out(3).1, DrainError::Unconfirmed { .. }));
}

#[test]
fn undoing_the_drain_or_deleting_the_node_ends_it() {
    let (_, end, _) = play(&at("n1"), [at("n1"), changed(at("n2"), |node| node.drained = false)]);
    let Some(Err(error)) = end else { panic!("{end:?}") };
    assert!(error.contains("the drain of n1 was undone"), "{error}");
    let (_, end, _) = play(&at("n1"), [at("n1"), DrainSnapshot { node: None, ..at("n2") }]);
    let Some(Err(error)) = end else { panic!("{end:?}") };
    assert!(error.contains("n1 was deleted"), "{error}");
}

/// The nodes are listed with every second state.
#[test]
fn an_address_stays_once_two_lists_of_the_nodes_agree() {
    let own = |state: &DrainSnapshot| ("n1".to_owned(), Arc::new(state.node.clone().expect("a node")));
    let alone = || {
        let state = at("n1");
        DrainSnapshot { nodes: Some([own(&state)].into()), ..state }
    };
    let with_another = || {
        let state = at("n1");
        DrainSnapshot { nodes: Some([own(&state), node("n2", "172.18.0.2/16")].into()), ..state }
    };
    let (_, end, _) = play(&at("n1"), [alone(), at("n1")]);
    assert_eq!(end, None);
    let (lines, end, _) = play(&at("n1"), [alone(), at("n1"), alone()]);
    assert!(lines[1].starts_with("172.18.0.100 (a) stays: no other node"), "{lines:?}");
    assert_eq!(end, Some(Err("n1 is drained as far as possible; 1 egress IP stays and is served".to_owned())));
    let (_, end, watch) = play(&at("n1"), [alone(), with_another(), alone()]);
    assert_eq!(end, None, "it could move in between");
    assert!(watch.timed_out(3).0[0].contains("stays"));
    let (_, end, watch) = play(&at("n1"), [with_another(), with_another(), with_another()]);
    assert_eq!(end, None);
    let (lines, error) = watch.timed_out(3);
    assert_eq!(lines, ["172.18.0.100 (a): not moved yet"]);
    assert!(error.to_string().contains("1 egress IP not moved yet"), "{error}");
}

#[test]
fn a_short_timeout_reports_no_staying_addresses() {
    let (_, _, watch) = play(&at("n2"), [at("n2")]);
    let (lines, error) = watch.timed_out(1);
    assert!(lines.is_empty(), "{lines:?}");
    assert!(error.to_string().contains("1 s were too short"), "{error}");
}
