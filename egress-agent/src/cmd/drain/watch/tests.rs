//! A node that is drained, as one sees it second by second.

use std::sync::Arc;

use super::*;
use egress_core::allocation::samples::{node, policy};
use egress_core::model::node::Prepared;

const A: &str = "172.18.0.100";

fn ip(text: &str) -> IpAddr {
    text.parse().expect("a literal")
}

/// The policy's address is where it says; the node is drained, and nothing is said of hand-overs.
fn at(place: &str) -> Look {
    let drained = Node { drained: true, ..Arc::unwrap_or_clone(node("n1", "172.18.0.1/16").1) };
    Look { node: Some(drained), nodes: None, policies: [policy("a", 1, &[A], &[(place, A)])].into() }
}

fn changed(mut look: Look, change: impl Fn(&mut Node)) -> Look {
    look.node.iter_mut().for_each(change);
    look
}

fn released(look: Look) -> Look {
    changed(look, |node| node.released = [(ip(A), 7)].into())
}

fn prepared(look: Look) -> Look {
    changed(look, |node| node.prepared = [(ip(A), Prepared(7, "n2".into(), false))].into())
}

/// One second after the other; what is said, and how it ends with the last, but not before.
fn see<'a>(
    begin: &Look,
    looks: impl IntoIterator<Item = Look>,
) -> (Vec<String>, Option<Result<String, String>>, Watch<'a>) {
    let mut now = Instant::now();
    let (mut watch, said) = Watch::begin("n1", &begin.policies, now);
    let (mut all, mut ended) = (vec![said], None);
    for look in looks {
        assert!(ended.is_none(), "it has ended: {ended:?}");
        now += Duration::from_millis(700);
        let Seen { said, end } = watch.see(&look, now);
        all.extend(said);
        ended = end.map(|end| end.map_err(|error| error.to_string()));
    }
    (all, ended, watch)
}

#[test]
fn a_node_is_drained_when_it_has_let_go_and_says_nothing_more() {
    let (said, end, _) = see(&at("n1"), [released(at("n1")), released(at("n2")), released(at("n2")), at("n2")]);
    assert_eq!(said, ["n1 has 1 egress IP", "172.18.0.100 (a): moved to n2, after 1.4 s"]);
    let drained = "n1 is drained: no egress IP is served there, and none comes until `egress-agent drain --undo n1`";
    assert_eq!(end, Some(Ok(drained.to_owned())));
}

/// Somebody drains it while it is the heir of a hand-over.
#[test]
fn what_is_on_its_way_to_the_node_is_waited_for() {
    let (_, end, _) = see(&at("n2"), [at("n2")]);
    assert_eq!(end, None, "one look says nothing");
    let (_, end, _) = see(&at("n2"), [at("n2"), at("n2")]);
    assert!(end.is_some_and(|end| end.is_ok_and(|said| said.contains("it has no egress IPs"))));
    let ready = || prepared(at("n2"));
    let (_, end, _) = see(&at("n2"), [ready(), ready(), ready()]);
    assert_eq!(end, None, "it is ready to take one over");
    let (said, end, _) = see(&at("n2"), [ready(), at("n1"), released(at("n2")), at("n2")]);
    assert_eq!(said[1..2], ["172.18.0.100 (a) has come to n1"]);
    assert!(end.is_some_and(|end| end.is_ok()));
}

#[test]
fn where_the_agent_has_not_said_that_it_let_go_the_addresses_are_named() {
    let nine = || (0..9).map(|_| at("n2"));
    let (_, end, watch) = see(&at("n1"), nine());
    assert_eq!(end, None, "it may say it yet");
    let (_, error) = watch.late(6);
    assert!(matches!(error, DrainError::Unsaid { .. }), "nor is it drained when there is no more time: {error}");
    let (_, end, _) = see(&at("n1"), nine().chain([released(at("n2"))]));
    let Some(Ok(_)) = end else { panic!("it has said so at last: {end:?}") };
    let (_, end, _) = see(&at("n1"), nine().chain([at("n2")]));
    let Some(Err(error)) = end else { panic!("it is not drained: {end:?}") };
    assert!(error.contains("not heard to let go of 172.18.0.100"), "{error}");
    // An agent that died when it had got ready.
    let (_, end, _) = see(&at("n2"), (0..10).map(|_| prepared(at("n2"))));
    let Some(Err(error)) = end else { panic!("it is not drained: {end:?}") };
    assert!(error.contains("not heard to let go of 172.18.0.100"), "{error}");
}

#[test]
fn an_address_whose_object_was_deleted_is_not_waited_for() {
    let deleted = || Look { policies: Policies::new(), ..at("n1") };
    let (said, end, _) = see(&at("n1"), [at("n1"), deleted()]);
    assert_eq!(said[1], "172.18.0.100 (a): the object has been deleted, after 1.4 s");
    assert!(matches!(end, Some(Ok(_))), "{end:?}");
    let nine = || (0..9).map(|_| at("n2"));
    let (_, end, _) = see(&at("n1"), nine().chain([deleted()]));
    assert!(matches!(end, Some(Ok(_))), "nor one that had moved: {end:?}");
    // Another policy has the address by now: two might serve it.
    let taken = || Look { policies: [policy("b", 2, &[A], &[("n2", A)])].into(), ..at("n1") };
    let (_, end, watch) = see(&at("n1"), [at("n1"), taken(), taken()]);
    assert_eq!(end, None);
    assert!(matches!(watch.late(3).1, DrainError::Unsaid { .. }));
}

/// What was said of an earlier hand-over does not count for the next one.
#[test]
fn a_word_counts_for_one_hand_over() {
    let (_, end, watch) = see(&at("n1"), [released(at("n2")), at("n1"), at("n2"), at("n2")]);
    assert_eq!(end, None);
    assert!(matches!(watch.late(3).1, DrainError::Unsaid { .. }));
}

#[test]
fn who_takes_it_back_or_deletes_the_node_ends_it() {
    let (_, end, _) = see(&at("n1"), [at("n1"), changed(at("n2"), |node| node.drained = false)]);
    let Some(Err(error)) = end else { panic!("{end:?}") };
    assert!(error.contains("taken the draining of n1 back"), "{error}");
    let (_, end, _) = see(&at("n1"), [at("n1"), Look { node: None, ..at("n2") }]);
    let Some(Err(error)) = end else { panic!("{end:?}") };
    assert!(error.contains("n1 has been deleted meanwhile"), "{error}");
}

/// With every second look the nodes are listed.
#[test]
fn what_stays_is_said_when_two_lists_of_the_nodes_have_said_so() {
    let own = |look: &Look| ("n1".to_owned(), Arc::new(look.node.clone().expect("a node")));
    let alone = || {
        let look = at("n1");
        Look { nodes: Some([own(&look)].into()), ..look }
    };
    let with_another = || {
        let look = at("n1");
        Look { nodes: Some([own(&look), node("n2", "172.18.0.2/16")].into()), ..look }
    };
    let (_, end, _) = see(&at("n1"), [alone(), at("n1")]);
    assert_eq!(end, None);
    let (said, end, _) = see(&at("n1"), [alone(), at("n1"), alone()]);
    assert!(said[1].starts_with("172.18.0.100 (a) stays: no other node"), "{said:?}");
    assert_eq!(end, Some(Err("n1 is drained as far as can be; 1 egress IP stays, and served".to_owned())));
    let (_, end, watch) = see(&at("n1"), [alone(), with_another(), alone()]);
    assert_eq!(end, None, "it could go in between");
    assert!(watch.late(3).0[0].contains("stays"));
    let (_, end, watch) = see(&at("n1"), [with_another(), with_another(), with_another()]);
    assert_eq!(end, None);
    let (said, error) = watch.late(3);
    assert_eq!(said, ["172.18.0.100 (a): not moved yet"]);
    assert!(error.to_string().contains("1 egress IP not moved yet"), "{error}");
}

#[test]
fn too_short_a_time_says_nothing_of_addresses_that_stay() {
    let (_, _, watch) = see(&at("n2"), [at("n2")]);
    let (said, error) = watch.late(1);
    assert!(said.is_empty(), "{said:?}");
    assert!(error.to_string().contains("1 s were too short"), "{error}");
}
