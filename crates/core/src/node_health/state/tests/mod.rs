pub(super) mod overlay;

use super::*;

const RULES: ProbeTiming =
    ProbeTiming { total: Duration::from_secs(1), interval: Duration::from_millis(250), grace: Duration::from_secs(30) };
const OK: Signal = Signal::AgentAnswer(AgentAnswer::Serving);
const LOST: Signal = Signal::AgentAnswer(AgentAnswer::NextHopLost);
const BAD: Signal = Signal::AgentAnswer(AgentAnswer::NotServing);

/// Nodes that give signs at their own moments of each quarter of a second, evaluated every 50 ms.
struct Play {
    states: NodeStates,
    start: Instant,
    now: u64,
    signs: BTreeMap<&'static str, Option<Signal>>,
    /// Nodes that report that they answer through the overlay, and whether they do.
    overlay: BTreeMap<&'static str, bool>,
    /// Whether the own next hop answers.
    next_hop: bool,
    /// Every change of the set of gone nodes.
    changes: Vec<(u64, Vec<String>)>,
    suspects: BTreeSet<String>,
    absent: BTreeSet<String>,
    /// When those that are gone were last well.
    last_serving: BTreeMap<String, Instant>,
    cut_off: bool,
    no_node_answers: bool,
}

impl Play {
    /// The first node is the controller's own if it has that name.
    fn new(nodes: &[&'static str]) -> Self {
        let start = Instant::now();
        let mut states = NodeStates::new(RULES);
        for node in nodes {
            states.add(node, Traits { own: *node == "own", network: None }, start);
        }
        let signs = nodes.iter().map(|node| (*node, Some(OK))).collect();
        Self {
            states,
            start,
            now: 0,
            signs,
            overlay: BTreeMap::new(),
            next_hop: false,
            changes: Vec::new(),
            suspects: BTreeSet::new(),
            absent: BTreeSet::new(),
            last_serving: BTreeMap::new(),
            cut_off: false,
            no_node_answers: false,
        }
    }

    fn all(&mut self, sign: Option<Signal>) {
        self.signs.values_mut().for_each(|known| *known = sign);
    }

    fn begin_again(&mut self) {
        self.states.reset(self.start + Duration::from_millis(self.now));
    }

    fn set(&mut self, node: &'static str, sign: Option<Signal>) {
        self.signs.insert(node, sign);
    }

    /// These report that they answer through the overlay, and do or do not.
    fn overlay(&mut self, nodes: &[&'static str], answers: bool) {
        for node in nodes {
            self.overlay.insert(node, answers);
            self.states.set_has_overlay(node, true);
        }
    }

    /// These have been reached at their own addresses.
    fn direct(&mut self, nodes: &[&str]) {
        let now = self.start + Duration::from_millis(self.now);
        nodes.iter().for_each(|node| self.states.note_reached_directly(node, now));
    }

    fn gone(&self) -> Vec<String> {
        self.changes.last().map(|(_, gone)| gone.clone()).unwrap_or_default()
    }

    /// Runs until then.
    fn until(&mut self, end: u64) {
        while self.now < end {
            self.now += 10;
            let now = self.start + Duration::from_millis(self.now);
            for (place, (node, sign)) in self.signs.iter().enumerate() {
                let moment = place as u64 * 70 % 250;
                if self.now % 250 == moment
                    && let Some(sign) = sign
                {
                    self.states.note(node, *sign, now);
                }
            }
            if self.now.is_multiple_of(250) {
                for (node, _) in self.overlay.iter().filter(|(_, answers)| **answers) {
                    self.states.note_echo(node, now);
                }
            }
            if self.next_hop && self.now % 250 == 110 {
                self.states.note_next_hop(now);
            }
            if !self.now.is_multiple_of(50) {
                continue;
            }
            let report = self.states.evaluate(now);
            let gone: Vec<String> = report.unreachable.into_iter().collect();
            if gone != self.gone() {
                self.changes.push((self.now, gone));
            }
            self.suspects = report.suspects;
            self.absent = report.absent;
            self.last_serving = report.last_serving;
            (self.cut_off, self.no_node_answers) = (report.cut_off, report.no_node_answers);
        }
    }
}

#[test]
fn a_silent_node_is_gone_within_the_time_and_comes_back_after_its_hold_down() {
    let mut play = Play::new(&["a", "b", "own"]);
    play.until(10_000);
    assert_eq!(play.changes, []);
    play.set("a", None);
    play.until(10_450);
    assert!(play.suspects.is_empty(), "{:?}", play.suspects);
    play.until(10_600);
    assert_eq!(play.suspects, BTreeSet::from(["a".to_owned()]));
    play.until(20_000);
    let [(when, gone)] = &play.changes[..] else { panic!("{:?}", play.changes) };
    assert_eq!(gone, &["a"]);
    assert!((10_750..=11_250).contains(when), "{when}");
    let well = play.last_serving["a"].duration_since(play.start);
    assert!((9_750..=10_000).contains(&well.as_millis()), "it counts from the last good sign: {well:?}");
    play.set("a", Some(OK));
    play.until(21_900);
    assert_eq!((play.gone(), play.suspects.len()), (vec!["a".to_owned()], 0), "the hold-down is not over");
    play.until(22_300);
    assert_eq!(play.gone(), Vec::<String>::new());
}

#[test]
fn hold_downs_grow_with_flapping_and_shrink_in_peace() {
    let mut play = Play::new(&["a", "b", "c"]);
    let mut waits = Vec::new();
    for _ in 0..4 {
        play.set("a", None);
        play.until(play.now + 2000);
        assert_eq!(play.gone(), ["a"]);
        play.set("a", Some(OK));
        let begin = play.now;
        while !play.gone().is_empty() {
            play.until(play.now + 50);
        }
        waits.push((play.now - begin + 250) / 1000);
    }
    assert_eq!(waits, [2, 4, 8, 16]);
    // Four failures expire in twenty minutes.
    play.until(play.now + 4 * 300_000 + 1000);
    play.set("a", None);
    play.until(play.now + 2000);
    play.set("a", Some(OK));
    play.until(play.now + 2500);
    assert_eq!(play.gone(), Vec::<String>::new());
}

#[test]
fn nothing_moves_if_no_node_answers() {
    for own in [true, false] {
        let mut play = Play::new(if own { &["a", "b", "c", "own"] } else { &["a", "b", "c"] });
        play.until(5000);
        for node in ["a", "b", "c"] {
            play.set(node, None);
        }
        while play.now < 60_000 {
            play.until(play.now + 50);
            assert!(play.suspects.is_empty(), "{:?} after {} ms", play.suspects, play.now);
        }
        assert!(play.cut_off && play.no_node_answers);
        // One recovers much earlier than the others, which then have their time.
        play.set("b", Some(OK));
        play.until(60_800);
        assert!(!play.cut_off && !play.no_node_answers);
        play.set("a", Some(OK));
        play.set("c", Some(OK));
        play.until(70_000);
        assert_eq!(play.changes, [], "own: {own}");
        // And one that stays away is gone.
        play.set("c", None);
        play.until(72_000);
        assert_eq!(play.gone(), ["c"]);
    }
}

#[test]
fn nodes_that_die_together_are_gone_if_another_node_answers() {
    let names: [&'static str; 8] = ["a", "b", "c", "d", "e", "f", "g", "own"];
    for dead in 1..7 {
        let mut play = Play::new(&names);
        play.until(5000);
        names[..dead].iter().for_each(|node| play.set(node, None));
        play.until(6300);
        assert_eq!(play.gone(), names[..dead], "{dead} of eight");
    }
}

#[test]
fn all_other_nodes_that_die_together_are_gone_if_the_own_next_hop_answers() {
    for names in [&["a", "b", "own"] as &[&'static str], &["a", "b", "c", "d", "e", "own"]] {
        let others = &names[..names.len() - 1];
        let mut play = Play::new(names);
        play.next_hop = true;
        play.direct(others);
        play.until(5000);
        others.iter().for_each(|node| play.set(node, None));
        play.until(5800);
        assert_eq!(play.suspects.len(), others.len(), "in time for their leases");
        assert!(play.no_node_answers);
        play.until(6400);
        assert_eq!(play.gone(), others);
        assert!(!play.cut_off);
    }
}

#[test]
fn a_next_hop_proves_nothing_about_a_path_that_was_never_used() {
    let together = |next_hop: bool, direct: &[&str], since: u64| {
        let mut play = Play::new(&["a", "b", "own"]);
        play.next_hop = next_hop;
        play.direct(direct);
        play.until(since);
        play.set("a", None);
        play.set("b", None);
        play.until(since + 30_000);
        (play.gone().len(), play.suspects.len(), play.cut_off)
    };
    assert_eq!(together(true, &["a", "b"], 5000), (2, 2, false));
    assert_eq!(together(false, &["a", "b"], 5000), (0, 0, true), "no sign that the own path works");
    assert_eq!(together(true, &["a"], 5000), (0, 0, true), "a firewall may hide b");
    assert_eq!(together(true, &["a", "b"], 120_000), (0, 0, true), "long ago");
    // A leader that loses all its paths at once: its next hop may answer a moment longer.
    let mut play = Play::new(&["a", "b", "own"]);
    play.next_hop = true;
    play.direct(&["a", "b"]);
    play.until(5000);
    play.set("a", None);
    play.set("b", None);
    play.until(5300);
    play.next_hop = false;
    play.until(30_000);
    assert_eq!((play.changes.len(), play.suspects.len(), play.cut_off), (0, 0, true));
    // Its paths recover, and the next hop answers first.
    play.direct(&["a", "b"]);
    play.next_hop = true;
    play.until(30_700);
    play.set("a", Some(OK));
    play.set("b", Some(OK));
    play.until(40_000);
    assert_eq!((play.changes.len(), play.cut_off), (0, false));
}

#[test]
fn two_nodes_that_die_one_after_the_other_are_both_gone() {
    let mut play = Play::new(&["a", "b", "c"]);
    play.until(5000);
    play.set("a", None);
    play.until(6500);
    play.set("b", None);
    play.until(9000);
    assert_eq!(play.gone(), ["a", "b"]);
    // Nothing can move away from the last one.
    play.set("c", None);
    play.until(20_000);
    assert_eq!(play.gone(), ["a", "b"]);
    assert!(!play.suspects.contains("c"));
    // The first that serves again takes over at once.
    play.set("a", Some(OK));
    play.until(21_000);
    assert_eq!(play.gone(), ["b", "c"]);
}

#[test]
fn the_other_of_two_nodes_is_gone_when_it_is_silent() {
    let mut play = Play::new(&["a", "own"]);
    play.until(5000);
    play.set("a", None);
    play.until(6250);
    assert_eq!(play.gone(), ["a"]);
}

#[test]
fn a_dead_agent_has_its_grace_and_is_not_suspected_during_it() {
    let mut play = Play::new(&["a", "b", "c"]);
    play.until(5000);
    play.set("a", Some(Signal::Kernel));
    // Stopped for thirty seconds: answers must arrive first.
    play.until(35_500);
    assert_eq!((play.changes.len(), play.suspects.len()), (0, 0));
    play.until(36_500);
    assert_eq!((play.changes.len(), play.suspects.len()), (0, 1), "its programs have stopped");
    assert_eq!(play.absent, BTreeSet::from(["a".to_owned()]), "it gets nothing more");
    play.until(37_500);
    assert_eq!((play.gone(), play.suspects.len()), (vec!["a".to_owned()], 1));
    // All agents at once: no node could take anything.
    play.all(Some(Signal::Kernel));
    play.until(100_000);
    assert_eq!(play.gone(), ["a"]);
}

/// A controller that could not write for a while, and gets answers of all nodes when it can, moves nothing.
#[test]
fn findings_from_a_time_without_decisions_are_discarded() {
    let mut play = Play::new(&["a", "b", "c"]);
    play.until(5000);
    play.set("a", None);
    play.until(8000);
    assert_eq!(play.gone(), ["a"]);
    play.begin_again();
    play.until(8500);
    assert!(play.gone().is_empty(), "it has its time");
    play.until(9500);
    assert_eq!(play.gone(), ["a"], "it is lost indeed");
    play.begin_again();
    play.set("a", Some(OK));
    play.until(20_000);
    assert!(play.gone().is_empty());
}

#[test]
fn a_node_that_reports_it_cannot_serve_is_gone_at_once() {
    let mut play = Play::new(&["a", "b", "c"]);
    play.until(5000);
    play.set("a", Some(BAD));
    play.until(5300);
    assert_eq!((play.gone(), play.suspects.len()), (vec!["a".to_owned()], 0));
}

#[test]
fn a_next_hop_lost_by_all_moves_nothing() {
    let mut play = Play::new(&["a", "b", "c"]);
    play.until(5000);
    // They notice one after the other.
    play.set("a", Some(LOST));
    play.until(5250);
    play.set("b", Some(LOST));
    play.until(5400);
    play.set("c", Some(LOST));
    play.until(30_000);
    // The same again.
    play.set("b", Some(OK));
    play.until(30_250);
    play.set("a", Some(OK));
    play.until(30_400);
    play.set("c", Some(OK));
    play.until(40_000);
    assert_eq!(play.changes, []);
    play.set("a", Some(LOST));
    play.until(41_000);
    assert_eq!(play.gone(), ["a"]);
}

#[test]
fn networks_are_evaluated_separately() {
    let mut play = Play::new(&["a", "b", "c", "d"]);
    let other: IpNet = "10.0.0.0/24".parse().expect("a literal");
    for node in ["c", "d"] {
        play.states.add(node, Traits { own: false, network: Some(other) }, play.start);
    }
    play.until(5000);
    play.set("a", Some(LOST));
    play.set("b", Some(LOST));
    play.set("c", Some(LOST));
    play.until(6000);
    assert_eq!(play.gone(), ["c"]);
    // The last of its network stays, whatever the others do.
    play.set("d", None);
    play.until(9000);
    assert_eq!(play.gone(), ["c"]);
}

/// A node is probed for a minute after it has lost its label. It must not count as a target: otherwise the others would
/// wait out their time after a failure while no address has a node.
#[test]
fn a_node_that_may_not_host_is_no_target() {
    let mut play = Play::new(&["a", "b", "drained"]);
    play.states.set_may_host("drained", false);
    play.until(2000);
    play.set("a", None);
    play.until(4000);
    assert_eq!(play.gone(), ["a"], "to b");
    play.set("b", None);
    play.until(6000);
    assert_eq!(play.gone(), ["a"], "there is no other");
    play.set("a", Some(OK));
    play.until(6500);
    assert_eq!(play.gone(), ["b"], "a is taken back at once, and not when it has proven itself");
}

#[test]
fn a_thousand_nodes_are_evaluated_in_moments() {
    let start = Instant::now();
    let mut states = NodeStates::new(RULES);
    for node in 0..1000 {
        states.add(&format!("node{node}"), Traits::default(), start);
    }
    let begin = Instant::now();
    for round in 1..=20 {
        let now = start + Duration::from_millis(round * 50);
        (0..1000).for_each(|node| states.note(&format!("node{node}"), OK, now));
        assert!(states.evaluate(now).unreachable.is_empty());
    }
    println!("a second of 1,000 nodes: {:?}", begin.elapsed());
}
