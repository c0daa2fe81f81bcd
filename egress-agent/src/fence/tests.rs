use super::*;

const TOTAL: Duration = Duration::from_secs(10);

fn at(start: Instant, tenths: u32) -> Instant {
    start + TOTAL * tenths / 100
}

fn stake(wants: bool, leases: bool) -> Stake {
    Stake { wants, leases: Some(leases), total: None }
}

#[test]
fn who_holds_no_leases_is_not_fenced() {
    let now = Instant::now();
    let mut fence = Fence::new(TOTAL);
    assert_eq!(fence.standing(now), Standing::Undecided, "the ledger is not known");
    fence.set_stake(stake(true, false), now);
    assert_eq!(fence.standing(now + TOTAL * 99), Standing::Holds);
    assert_eq!((fence.ask_at(), fence.next(now)), (None, None));
    let mut off = Fence::new(Duration::ZERO);
    assert_eq!(off.standing(now), Standing::Holds);
    off.set_stake(stake(true, true), now);
    assert_eq!(off.standing(now), Standing::Holds);
}

#[test]
fn what_was_heard_holds_for_the_whole_timeout_and_what_was_read_for_less() {
    let start = Instant::now();
    let at = |percent| at(start, percent);
    let mut fence = Fence::new(TOTAL);
    fence.set_stake(stake(true, true), at(0));
    fence.note_heard(at(0));
    fence.note_heard(at(50));
    fence.note_heard(at(40));
    assert_eq!((fence.standing(at(149)), fence.standing(at(150))), (Standing::Holds, Standing::Fenced));
    assert_eq!(fence.ask_at(), Some(at(110)), "before it runs out");
    fence.note_asked(at(110));
    assert_eq!(fence.ask_at(), Some(at(130)));
    fence.note_read(at(110), false, None);
    assert_eq!((fence.standing(at(169)), fence.standing(at(170))), (Standing::Holds, Standing::Fenced));
    fence.note_read(at(130), true, None);
    assert_eq!(fence.standing(at(170)), Standing::Fenced, "suspected");
    fence.note_heard(at(160));
    assert_eq!(fence.standing(at(172)), Standing::Holds);
    fence.set_stake(stake(false, true), at(172));
    assert_eq!(fence.ask_at(), None, "there is nothing to hold");
}

#[test]
fn a_restart_is_decided_by_the_first_answer_or_when_none_comes() {
    let start = Instant::now();
    let at = |percent| at(start, percent);
    let mut fence = Fence::new(TOTAL);
    fence.set_stake(stake(true, true), at(0));
    assert_eq!((fence.standing(at(0)), fence.ask_at()), (Standing::Undecided, Some(at(0))));
    fence.note_asked(at(0));
    assert_eq!((fence.standing(at(99)), fence.standing(at(100))), (Standing::Undecided, Standing::Fenced));
    assert_eq!(fence.next(at(1)), Some(at(20)));
    fence.note_read(at(0), false, None);
    assert_eq!((fence.standing(at(59)), fence.standing(at(60))), (Standing::Holds, Standing::Fenced));
    // Cut off for long: it asks less often.
    fence.note_asked(at(600));
    assert_eq!(fence.ask_at(), Some(at(700)));
}

#[test]
fn a_process_that_was_stopped_asks_before_it_gives_up() {
    let start = Instant::now();
    let at = |percent| at(start, percent);
    let mut fence = Fence::new(TOTAL);
    fence.set_stake(stake(true, true), at(0));
    fence.note_heard(at(0));
    fence.wake(at(900));
    // The same word once more, from before.
    fence.note_heard(at(0));
    assert_eq!((fence.standing(at(900)), fence.ask_at()), (Standing::Undecided, Some(at(900))));
    fence.note_asked(at(900));
    fence.note_read(at(899), true, None);
    assert_eq!(fence.standing(at(901)), Standing::Undecided, "asked before");
    fence.note_read(at(900), true, None);
    assert_eq!(fence.standing(at(902)), Standing::Fenced, "suspected by now");
    fence.note_heard(at(905));
    assert_eq!(fence.standing(at(930)), Standing::Holds);
    // One that holds no leases has none to lose.
    let mut other = Fence::new(TOTAL);
    other.set_stake(stake(true, false), at(0));
    other.wake(at(900));
    assert_eq!(other.standing(at(999)), Standing::Holds);
}

#[test]
fn leases_last_as_long_as_the_leader_says() {
    let start = Instant::now();
    let at = |percent| at(start, percent);
    let says = |total| Stake { total, ..stake(true, true) };
    // This node's flag says ten seconds, or zero; the leader goes by one, or by forty.
    for own in [TOTAL, Duration::ZERO] {
        let mut fence = Fence::new(own);
        fence.set_stake(says(Some(TOTAL / 10)), at(0));
        fence.note_heard(at(0));
        assert_eq!((fence.standing(at(9)), fence.standing(at(10))), (Standing::Holds, Standing::Fenced), "{own:?}");
        fence.note_read(at(20), false, Some(TOTAL / 10));
        assert_eq!((fence.standing(at(25)), fence.standing(at(26))), (Standing::Holds, Standing::Fenced), "{own:?}");
        let mut fence = Fence::new(own);
        fence.set_stake(says(Some(TOTAL * 4)), at(0));
        fence.note_heard(at(0));
        assert_eq!((fence.standing(at(399)), fence.standing(at(400))), (Standing::Holds, Standing::Fenced), "{own:?}");
    }
    // The next leader goes by less, and the ledger has not told it yet: a probe or a reading does.
    let mut fence = Fence::new(TOTAL);
    fence.set_stake(says(Some(TOTAL)), at(0));
    fence.note_probed(Some(TOTAL / 10));
    fence.note_heard(at(0));
    assert_eq!(fence.standing(at(10)), Standing::Fenced);
    let mut fence = Fence::new(TOTAL);
    fence.set_stake(says(Some(TOTAL)), at(0));
    fence.note_read(at(0), false, Some(TOTAL / 10));
    assert_eq!(fence.standing(at(6)), Standing::Fenced);
    // By more, and only its probes say so.
    let mut fence = Fence::new(TOTAL);
    fence.set_stake(says(Some(TOTAL)), at(0));
    fence.note_probed(Some(TOTAL * 4));
    fence.note_heard(at(0));
    assert_eq!(fence.standing(at(100)), Standing::Fenced, "the shorter one is safe");
}

/// Both sides of a change that the schedule's chance hardly ever meets: the node falls silent just before it.
#[test]
fn a_leader_with_a_shorter_timeout_waits_for_the_leases_of_its_former() {
    use crate::controller::reach::Reach;
    use crate::controller::suspicion::{Longest, Suspicions};
    use crate::model::ledger::Ledger;
    let start = Instant::now();
    let (at, own) = (|percent| at(start, percent), TOTAL / 4);
    let mut fence = Fence::new(own);
    fence.set_stake(Stake { total: Some(TOTAL), ..stake(true, true) }, at(0));
    fence.note_heard(at(0));
    let ledger = |total, suspects: &[(&str, u64)]| {
        let suspects = suspects.iter().map(|(node, number)| ((*node).to_owned(), *number)).collect();
        Ledger { leases: true, total: Some(total), suspects, ..Ledger::default() }
    };
    let (mut longest, mut suspicions) = (Longest::default(), Suspicions::default());
    let reach = Reach::by(own);
    for (ledger, now) in [(ledger(TOTAL, &[]), at(5)), (ledger(own, &[("n", 1)]), at(15))] {
        longest.note(&ledger, own, now);
        suspicions.note(&ledger, now);
    }
    let end = |lease| suspicions.ends(&reach, lease, at(5))["n"];
    assert_eq!(fence.standing(end(own)), Standing::Holds, "its own timeout would be too short");
    assert_eq!(fence.standing(end(longest.of(own, at(15)))), Standing::Fenced);
    assert_eq!(longest.of(own, end(longest.of(own, at(15)))), TOTAL, "not before that");
    // It dies behind its write. The next one has never seen the longer timeout.
    let told = Ledger { former_total: longest.to_tell(own, at(15)), ..ledger(own, &[("n", 1)]) };
    let mut fresh = Longest::default();
    fresh.note(&told, own, at(20));
    assert_eq!(fence.standing(end(fresh.of(own, at(20)))), Standing::Fenced);
}
