//! Nodes that answer health checks, and do not answer through the overlay.

use super::*;

#[test]
fn a_node_that_has_lost_only_the_overlay_is_gone_although_it_answers() {
    let mut play = Play::new(&["a", "b", "c", "own"]);
    play.overlay(&["a", "b", "own"], true);
    // One of another version, which is not probed there.
    play.until(10_000);
    assert_eq!(play.changes, []);
    play.overlay(&["a"], false);
    play.until(11_900);
    assert_eq!(play.changes, [], "datagrams may be lost");
    play.until(12_100);
    assert_eq!(play.gone(), ["a"]);
    play.overlay(&["a"], true);
    play.until(13_900);
    assert_eq!(play.gone(), ["a"], "the hold-down is not over");
    play.until(14_500);
    assert_eq!(play.gone(), Vec::<String>::new());
}

#[test]
fn an_overlay_without_any_answer_is_not_the_nodes_fault() {
    let mut play = Play::new(&["a", "b", "own"]);
    play.overlay(&["a", "b", "own"], true);
    play.until(10_000);
    play.overlay(&["a", "b"], false);
    play.until(60_000);
    assert_eq!((play.changes.len(), play.absent.len()), (0, 0), "the fault is on the asking side");
    play.overlay(&["b"], true);
    play.until(60_300);
    assert_eq!(play.gone(), ["a"], "now another answers");
}

#[test]
fn a_missing_overlay_is_detected_and_a_starting_agent_gets_its_time() {
    let mut play = Play::new(&["a", "b"]);
    play.overlay(&["a"], false);
    play.overlay(&["b"], true);
    play.until(1900);
    assert_eq!(play.changes, []);
    play.until(2300);
    assert_eq!(play.gone(), ["a"]);
    let mut play = Play::new(&["a", "b"]);
    play.overlay(&["a", "b"], true);
    play.until(10_000);
    // Its agent is stopped: its kernel answers, and the overlay does not.
    play.set("a", Some(Signal::Kernel));
    play.overlay(&["a"], false);
    play.until(30_000);
    play.set("a", Some(OK));
    play.until(31_800);
    play.overlay(&["a"], true);
    play.until(60_000);
    assert_eq!(play.changes, []);
}

#[test]
fn an_agent_that_is_started_twice_in_a_moment_has_lost_nothing() {
    let mut play = Play::new(&["a", "b", "own"]);
    play.overlay(&["a", "b", "own"], true);
    play.until(10_000);
    // Half a second between two starts is too short for an answer by that path.
    play.overlay(&["a"], false);
    for (sign, until) in [(Signal::Kernel, 10_700), (OK, 11_300), (Signal::Kernel, 12_200), (OK, 12_500)] {
        play.set("a", Some(sign));
        play.until(until);
    }
    play.overlay(&["a"], true);
    play.until(60_000);
    assert_eq!(play.changes, []);
}

#[test]
fn where_fewer_answer_through_the_overlay_than_have_lost_it_nothing_moves() {
    let mut play = Play::new(&["a", "b", "c", "d", "own"]);
    play.overlay(&["a", "b", "c", "d"], true);
    play.until(10_000);
    // Their last answers do not arrive at the same moment.
    play.overlay(&["a"], false);
    play.until(10_300);
    play.overlay(&["b", "c"], false);
    play.until(60_000);
    assert_eq!(play.changes, [], "the asker is in the smaller part");
    play.overlay(&["c"], true);
    play.until(60_300);
    assert_eq!(play.gone(), ["a", "b"], "as many as have not");
}
