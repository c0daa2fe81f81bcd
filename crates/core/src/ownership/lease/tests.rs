use super::*;

const TOTAL: Duration = Duration::from_secs(10);

fn at(start: Instant, tenths: u32) -> Instant {
    start + TOTAL * tenths / 100
}

fn stake(wants: bool) -> LeaseDemand {
    LeaseDemand { wants, ..LeaseDemand::default() }
}

#[test]
fn what_was_heard_holds_for_the_whole_timeout_and_what_was_read_for_less() {
    let start = Instant::now();
    let at = |percent| at(start, percent);
    let mut fence = LeaseHolder::new(TOTAL, at(0), false);
    fence.set_stake(stake(true));
    fence.note_heard(at(0));
    fence.note_heard(at(50));
    fence.note_heard(at(40));
    assert_eq!((fence.by_lease(at(149)), fence.by_lease(at(150))), (ByLease::Held, ByLease::Lost));
    assert_eq!(fence.ask_at(), Some(at(110)), "before it runs out");
    fence.note_asked(at(110));
    assert_eq!(fence.ask_at(), Some(at(130)));
    fence.note_read(at(110), false, LeaseTerms::default());
    assert_eq!((fence.by_lease(at(169)), fence.by_lease(at(170))), (ByLease::Held, ByLease::Lost));
    fence.note_read(at(130), true, LeaseTerms::default());
    assert_eq!(fence.by_lease(at(170)), ByLease::Lost, "suspected");
    fence.note_heard(at(160));
    assert_eq!(fence.by_lease(at(172)), ByLease::Held);
    fence.set_stake(stake(false));
    assert_eq!(fence.ask_at(), None, "there is nothing to hold");
}

#[test]
fn a_restart_is_decided_by_the_first_answer_or_when_none_comes() {
    let start = Instant::now();
    let at = |percent| at(start, percent);
    let mut fence = LeaseHolder::new(TOTAL, at(0), false);
    fence.set_stake(stake(true));
    assert_eq!((fence.by_lease(at(0)), fence.ask_at()), (ByLease::Starting, Some(at(0))));
    fence.note_asked(at(0));
    assert_eq!((fence.by_lease(at(99)), fence.by_lease(at(100))), (ByLease::Starting, ByLease::Lost));
    assert_eq!(fence.next(at(1)), Some(at(20)));
    fence.note_read(at(0), false, LeaseTerms::default());
    assert_eq!((fence.by_lease(at(59)), fence.by_lease(at(60))), (ByLease::Held, ByLease::Lost));
    // Cut off for long: it asks less often.
    (0..=54).for_each(|time| fence.note_asked(at(20 * time)));
    assert_eq!(fence.ask_at(), Some(at(1180)));
}

/// Answers take half of the time between two readings: a node that has wanted nothing for long holds from the first one on.
#[test]
fn a_node_that_has_wanted_nothing_for_long_reads_as_often_as_one_that_holds() {
    let start = Instant::now();
    let at = |percent| at(start, percent);
    let mut fence = LeaseHolder::new(TOTAL, at(0), false);
    fence.set_stake(stake(true));
    fence.note_asked(at(0));
    fence.note_read(at(0), false, LeaseTerms::default());
    fence.set_stake(stake(false));
    assert_eq!(fence.ask_at(), None);
    fence.set_stake(stake(true));
    fence.note_asked(at(9000));
    assert_eq!(fence.ask_at(), Some(at(9020)), "before the first one is answered");
    fence.note_asked(at(9020));
    assert_eq!(fence.ask_at(), Some(at(9040)));
}

#[test]
fn a_machine_that_stood_still_gives_up_before_it_asks() {
    let start = Instant::now();
    let at = |percent| at(start, percent);
    let mut fence = LeaseHolder::new(TOTAL, at(0), false);
    fence.set_stake(stake(true));
    fence.note_heard(at(0));
    assert_eq!(fence.emits(at(900)), Deadline::Passed, "it could not be fenced before");
    let mut fence = LeaseHolder::new(TOTAL, at(0), false);
    fence.set_stake(stake(true));
    fence.note_heard(at(0));
    // Of these ten seconds this clock knows nothing.
    fence.note_suspended(at(10));
    // The same word once more, from before.
    fence.note_heard(at(0));
    assert_eq!((fence.by_lease(at(10)), fence.ask_at()), (ByLease::Lost, Some(at(10))));
    assert_eq!(fence.emits(at(10)), Deadline::Passed);
    fence.note_asked(at(10));
    fence.note_read(at(10), true, LeaseTerms::default());
    assert_eq!(fence.by_lease(at(12)), ByLease::Lost, "suspected by now");
    fence.note_heard(at(15));
    assert_eq!(fence.by_lease(at(40)), ByLease::Held);
}

#[test]
fn leases_last_as_long_as_the_leader_says() {
    let start = Instant::now();
    let at = |percent| at(start, percent);
    let terms = |total| LeaseTerms { total, ..LeaseTerms::default() };
    let says = |total| LeaseDemand { terms: terms(total), ..stake(true) };
    // This node's flag says ten seconds, or five; the leader goes by one, or by forty.
    for own in [TOTAL, TOTAL / 2] {
        let mut fence = LeaseHolder::new(own, at(0), false);
        fence.set_stake(says(Some(TOTAL / 10)));
        fence.note_heard(at(0));
        assert_eq!((fence.by_lease(at(9)), fence.by_lease(at(10))), (ByLease::Held, ByLease::Lost), "{own:?}");
        fence.note_read(at(20), false, terms(Some(TOTAL / 10)));
        assert_eq!((fence.by_lease(at(25)), fence.by_lease(at(26))), (ByLease::Held, ByLease::Lost), "{own:?}");
        let mut fence = LeaseHolder::new(own, at(0), false);
        fence.set_stake(says(Some(TOTAL * 4)));
        fence.note_heard(at(0));
        assert_eq!((fence.by_lease(at(399)), fence.by_lease(at(400))), (ByLease::Held, ByLease::Lost), "{own:?}");
    }
    // The next leader goes by less, and the ledger has not told it yet: a probe or a reading does.
    let mut fence = LeaseHolder::new(TOTAL, at(0), false);
    fence.set_stake(says(Some(TOTAL)));
    fence.note_probed(Some(TOTAL / 10));
    fence.note_heard(at(0));
    assert_eq!(fence.by_lease(at(10)), ByLease::Lost);
    let mut fence = LeaseHolder::new(TOTAL, at(0), false);
    fence.set_stake(says(Some(TOTAL)));
    fence.note_read(at(0), false, terms(Some(TOTAL / 10)));
    assert_eq!(fence.by_lease(at(6)), ByLease::Lost);
    // By more, and only its probes say so.
    let mut fence = LeaseHolder::new(TOTAL, at(0), false);
    fence.set_stake(says(Some(TOTAL)));
    fence.note_probed(Some(TOTAL * 4));
    fence.note_heard(at(0));
    assert_eq!(fence.by_lease(at(100)), ByLease::Lost, "the shorter one is safe");
}

/// Both sides of a change that the schedule's chance hardly ever meets: the node falls silent just before it.
#[test]
fn a_leader_with_a_shorter_timeout_waits_for_the_leases_of_its_former() {
    use std::collections::BTreeSet;

    use crate::model::ledger::Ledger;
    use crate::node_health::NodeHealth;
    use crate::ownership::suspicion::{Longest, Suspicions, TermStart, Terms};
    let start = Instant::now();
    let (at, own) = (|percent| at(start, percent), TOTAL / 4);
    let mut fence = LeaseHolder::new(own, at(0), false);
    let terms = LeaseTerms { total: Some(TOTAL), ..LeaseTerms::default() };
    fence.set_stake(LeaseDemand { terms, ..stake(true) });
    fence.note_heard(at(0));
    let ledger = |suspects: &[(&str, u64)]| {
        let suspects = suspects.iter().map(|(node, number)| ((*node).to_owned(), *number)).collect();
        Ledger { suspects, ..Ledger::default() }
    };
    let (mut longest, mut suspicions) = (Longest::default(), Suspicions::default());
    let reach = NodeHealth { silent: ["n".to_owned()].into(), ..NodeHealth::by(own) };
    for (ledger, total, now) in [(ledger(&[]), TOTAL, at(5)), (ledger(&[("n", 1)]), own, at(15))] {
        longest.note((Some(total), None), own, (now, now));
        suspicions.note(&ledger, now);
    }
    let beginning = TermStart { since: at(5), former: None, others: &BTreeSet::new() };
    let end = |lease| suspicions.ends(&reach, Terms { lease, programs: lease }, beginning)["n"];
    assert_eq!(fence.by_lease(end(own)), ByLease::Held, "its own timeout would be too short");
    assert_eq!(fence.by_lease(end(longest.of(own, at(15)))), ByLease::Lost);
    assert_eq!(longest.of(own, end(longest.of(own, at(15)))), TOTAL, "not before that");
    // It dies behind its write. The next one has never seen the longer timeout.
    let mut fresh = Longest::default();
    fresh.note((Some(own), longest.to_tell(own, at(15))), own, (at(20), at(20)));
    assert_eq!(fence.by_lease(end(fresh.of(own, at(20)))), ByLease::Lost);
}

const GRACE: Duration = Duration::from_secs(300);

/// A holder by the ledger's terms, which has been heard.
fn holder(now: Instant) -> LeaseHolder {
    let mut fence = LeaseHolder::new(TOTAL, now, false);
    let terms = LeaseTerms { total: Some(TOTAL), programs: Some(TOTAL + GRACE), ..LeaseTerms::default() };
    fence.set_stake(LeaseDemand { terms, ..stake(true) });
    fence.note_heard(now);
    fence
}

#[test]
fn programs_go_on_for_the_grace_behind_the_last_confirmation_and_not_behind_a_reading() {
    let start = Instant::now();
    let at = |percent| at(start, percent);
    let mut fence = holder(at(0));
    assert_eq!(fence.emits(at(10)), Deadline::At(at(0) + TOTAL + GRACE));
    let mut reader = LeaseHolder::new(TOTAL, at(0), false);
    reader.set_stake(stake(true));
    assert_eq!(reader.emits(at(0)), Deadline::AsItIs, "as the former agent left it");
    reader.note_read(at(0), false, LeaseTerms { programs: Some(TOTAL + GRACE), ..LeaseTerms::default() });
    assert_eq!(reader.emits(at(10)), Deadline::At(at(160)));
    // A leader that says nothing of it gives no grace, whatever this node's flags say.
    let mut silent = LeaseHolder::new(TOTAL, at(0), false);
    silent.set_stake(stake(true));
    silent.note_heard(at(0));
    assert_eq!(silent.emits(at(10)), Deadline::At(at(100)));
}

/// However short it was: another node may have been given the addresses, and the node's half may have missed it.
#[test]
fn what_has_passed_is_not_renewed_before_the_kernel_was_emptied() {
    let start = Instant::now();
    let at = |percent| at(start, percent);
    let mut fence = holder(at(0));
    assert_eq!(fence.stand(at(100), false), LeaseState::Fenced(1));
    assert_eq!(fence.deadline(LeaseState::Fenced(1)), Deadline::Passed);
    fence.note_heard(at(100));
    assert_eq!(fence.stand(at(101), true), LeaseState::Fenced(1), "heard again at once");
    let obeys = |fence: &mut LeaseHolder, obeyed| fence.set_stake(LeaseDemand { obeyed, ..fence.stake });
    obeys(&mut fence, 1);
    assert_eq!(fence.stand(at(101), true), LeaseState::Holds);
    assert_eq!(fence.stand(at(102), false), LeaseState::Holds);
    // The deadline of a former process: this one has heard at once, and the kernel holds what that one did.
    let mut next = holder(at(0));
    assert_eq!(next.stand(at(0), true), LeaseState::Fenced(1));
    obeys(&mut next, 1);
    assert_eq!(next.stand(at(1), true), LeaseState::Holds);
    assert_eq!(next.stand(at(150), false), LeaseState::Fenced(2), "it has lost it again");
    next.note_heard(at(150));
    assert_eq!(next.stand(at(151), true), LeaseState::Fenced(2), "an earlier word is none about this");
}

#[test]
fn a_lease_without_an_end_is_believed_of_a_reading_and_ends_by_any_word() {
    let start = Instant::now();
    let at = |percent| at(start, percent);
    let mut fence = holder(at(0));
    let told = |fence: &mut LeaseHolder, endless, ending| {
        let terms = LeaseTerms { endless, ending, ..fence.stake.terms };
        fence.set_stake(LeaseDemand { terms, ..fence.stake });
    };
    told(&mut fence, Some(7), None);
    assert_eq!((fence.stand(at(10), false), fence.ask_at()), (LeaseState::Holds, Some(at(0))), "it is to be read");
    assert_eq!(fence.deadline(LeaseState::Holds), Deadline::At(at(0) + TOTAL + GRACE));
    let endless = LeaseTerms { endless: Some(7), ..fence.stake.terms };
    fence.note_read(at(10), false, endless);
    assert_eq!((fence.deadline(LeaseState::Holds), fence.ask_at()), (Deadline::Never, None));
    assert_eq!(fence.stand(at(9999), false), LeaseState::Holds, "cut off from all");
    assert_eq!(fence.bounded(), None);
    told(&mut fence, None, Some(8));
    assert_eq!(fence.stand(at(9999), false), LeaseState::Fenced(1));
    assert_eq!(fence.bounded(), Some(8));
    // A reading that was served before.
    fence.note_read(at(20), false, endless);
    assert_eq!(fence.bounded(), Some(8));
    fence.note_read(at(30), false, LeaseTerms { endless: Some(9), ..endless });
    assert_eq!(fence.bounded(), None, "it is alone again");
}

/// A restart: the former agent has left a deadline without an end. Nothing of it was given away, for this node has not said
/// that its lease has one.
#[test]
fn a_lease_without_an_end_outlives_an_agent_that_reaches_nothing() {
    let start = Instant::now();
    let at = |percent| at(start, percent);
    let mut fence = LeaseHolder::new(TOTAL, at(0), true);
    fence.set_stake(stake(true));
    assert_eq!(fence.ask_at(), Some(at(0)), "it is to be read");
    assert_eq!(fence.stand(at(9999), false), LeaseState::Holds);
    assert_eq!((fence.deadline(LeaseState::Holds), fence.bounded()), (Deadline::Never, None));
    let terms = LeaseTerms { ending: Some(8), ..LeaseTerms::default() };
    let mut ended = LeaseHolder::new(TOTAL, at(0), true);
    ended.set_stake(LeaseDemand { terms, ..stake(true) });
    assert_eq!((ended.stand(at(100), false), ended.bounded()), (LeaseState::Fenced(1), Some(8)));
    fence.note_read(at(9990), false, LeaseTerms::default());
    assert_eq!(fence.emits(at(9999)), Deadline::At(at(9990) + TOTAL * 16 / 10), "the ledger knows nothing of it");
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ByLease {
    /// The former agent's deadline runs on.
    Starting,
    Held,
    Lost,
}

impl LeaseHolder {
    fn by_lease(&self, now: Instant) -> ByLease {
        match self.is_confirmed(now) {
            true => ByLease::Held,
            false if self.is_starting(now) => ByLease::Starting,
            false => ByLease::Lost,
        }
    }

    /// Until when the programs emit, as of now.
    fn emits(&mut self, now: Instant) -> Deadline {
        let standing = self.stand(now, false);
        self.deadline(standing)
    }
}
