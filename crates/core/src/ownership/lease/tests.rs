use super::*;

const TOTAL: Duration = Duration::from_secs(10);

fn at(start: Instant, tenths: u32) -> Instant {
    start + TOTAL * tenths / 100
}

fn demand(wants: bool) -> LeaseDemand {
    LeaseDemand { has_addresses: wants, ..LeaseDemand::default() }
}

#[test]
fn a_confirmation_holds_for_the_whole_timeout_and_a_read_for_less() {
    let start = Instant::now();
    let at = |percent| at(start, percent);
    let mut lease = LeaseHolder::new(TOTAL, at(0), false);
    lease.set_demand(demand(true));
    lease.note_confirmed(at(0));
    lease.note_confirmed(at(50));
    lease.note_confirmed(at(40));
    assert_eq!((lease.by_lease(at(149)), lease.by_lease(at(150))), (ByLease::Held, ByLease::Lost));
    assert_eq!(lease.next_read_at(), Some(at(110)), "before it runs out");
    lease.note_read_started(at(110));
    assert_eq!(lease.next_read_at(), Some(at(130)));
    lease.note_read(at(110), false, LeaseTerms::default());
    assert_eq!((lease.by_lease(at(169)), lease.by_lease(at(170))), (ByLease::Held, ByLease::Lost));
    lease.note_read(at(130), true, LeaseTerms::default());
    assert_eq!(lease.by_lease(at(170)), ByLease::Lost, "suspected");
    lease.note_confirmed(at(160));
    assert_eq!(lease.by_lease(at(172)), ByLease::Held);
    lease.set_demand(demand(false));
    assert_eq!(lease.next_read_at(), None, "there is nothing to hold");
}

#[test]
fn a_restart_is_decided_by_the_first_answer_or_when_none_comes() {
    let start = Instant::now();
    let at = |percent| at(start, percent);
    let mut lease = LeaseHolder::new(TOTAL, at(0), false);
    lease.set_demand(demand(true));
    assert_eq!((lease.by_lease(at(0)), lease.next_read_at()), (ByLease::Starting, Some(at(0))));
    lease.note_read_started(at(0));
    assert_eq!((lease.by_lease(at(99)), lease.by_lease(at(100))), (ByLease::Starting, ByLease::Lost));
    assert_eq!(lease.next_change_at(at(1)), Some(at(20)));
    lease.note_read(at(0), false, LeaseTerms::default());
    assert_eq!((lease.by_lease(at(59)), lease.by_lease(at(60))), (ByLease::Held, ByLease::Lost));
    // After a long isolation it reads less often.
    (0..=54).for_each(|time| lease.note_read_started(at(20 * time)));
    assert_eq!(lease.next_read_at(), Some(at(1180)));
}

/// Answers take half of the time between two reads: a node that had no address for long holds one from the first read
/// on.
#[test]
fn a_node_without_addresses_reads_as_often_as_one_that_holds() {
    let start = Instant::now();
    let at = |percent| at(start, percent);
    let mut lease = LeaseHolder::new(TOTAL, at(0), false);
    lease.set_demand(demand(true));
    lease.note_read_started(at(0));
    lease.note_read(at(0), false, LeaseTerms::default());
    lease.set_demand(demand(false));
    assert_eq!(lease.next_read_at(), None);
    lease.set_demand(demand(true));
    lease.note_read_started(at(9000));
    assert_eq!(lease.next_read_at(), Some(at(9020)), "before the first one is answered");
    lease.note_read_started(at(9020));
    assert_eq!(lease.next_read_at(), Some(at(9040)));
}

#[test]
fn a_suspended_machine_releases_before_it_reads() {
    let start = Instant::now();
    let at = |percent| at(start, percent);
    let mut lease = LeaseHolder::new(TOTAL, at(0), false);
    lease.set_demand(demand(true));
    lease.note_confirmed(at(0));
    assert_eq!(lease.emits(at(900)), Deadline::Passed, "it could not expire before");
    let mut lease = LeaseHolder::new(TOTAL, at(0), false);
    lease.set_demand(demand(true));
    lease.note_confirmed(at(0));
    // This clock misses these ten seconds.
    lease.note_suspended(at(10));
    // The same confirmation again, from before.
    lease.note_confirmed(at(0));
    assert_eq!((lease.by_lease(at(10)), lease.next_read_at()), (ByLease::Lost, Some(at(10))));
    assert_eq!(lease.emits(at(10)), Deadline::Passed);
    lease.note_read_started(at(10));
    lease.note_read(at(10), true, LeaseTerms::default());
    assert_eq!(lease.by_lease(at(12)), ByLease::Lost, "suspected by now");
    lease.note_confirmed(at(15));
    assert_eq!(lease.by_lease(at(40)), ByLease::Held);
}

#[test]
fn leases_last_as_long_as_the_leader_states() {
    let start = Instant::now();
    let at = |percent| at(start, percent);
    let terms = |total| LeaseTerms { total, ..LeaseTerms::default() };
    let with_total = |total| LeaseDemand { terms: terms(total), ..demand(true) };
    // This node's flag is ten seconds, or five; the leader uses one, or forty.
    for own in [TOTAL, TOTAL / 2] {
        let mut lease = LeaseHolder::new(own, at(0), false);
        lease.set_demand(with_total(Some(TOTAL / 10)));
        lease.note_confirmed(at(0));
        assert_eq!((lease.by_lease(at(9)), lease.by_lease(at(10))), (ByLease::Held, ByLease::Lost), "{own:?}");
        lease.note_read(at(20), false, terms(Some(TOTAL / 10)));
        assert_eq!((lease.by_lease(at(25)), lease.by_lease(at(26))), (ByLease::Held, ByLease::Lost), "{own:?}");
        let mut lease = LeaseHolder::new(own, at(0), false);
        lease.set_demand(with_total(Some(TOTAL * 4)));
        lease.note_confirmed(at(0));
        assert_eq!((lease.by_lease(at(399)), lease.by_lease(at(400))), (ByLease::Held, ByLease::Lost), "{own:?}");
    }
    // The next leader uses a shorter one, and a probe or a read reports it before the ledger does.
    let mut lease = LeaseHolder::new(TOTAL, at(0), false);
    lease.set_demand(with_total(Some(TOTAL)));
    lease.note_probed(Some(TOTAL / 10));
    lease.note_confirmed(at(0));
    assert_eq!(lease.by_lease(at(10)), ByLease::Lost);
    let mut lease = LeaseHolder::new(TOTAL, at(0), false);
    lease.set_demand(with_total(Some(TOTAL)));
    lease.note_read(at(0), false, terms(Some(TOTAL / 10)));
    assert_eq!(lease.by_lease(at(6)), ByLease::Lost);
    // A longer one, and only its probes report it.
    let mut lease = LeaseHolder::new(TOTAL, at(0), false);
    lease.set_demand(with_total(Some(TOTAL)));
    lease.note_probed(Some(TOTAL * 4));
    lease.note_confirmed(at(0));
    assert_eq!(lease.by_lease(at(100)), ByLease::Lost, "the shorter one is safe");
}

/// Both sides of a change that the random schedule rarely meets: the node falls silent just before it.
#[test]
fn a_leader_with_a_shorter_timeout_waits_for_the_leases_of_its_predecessor() {
    use std::collections::BTreeSet;

    use crate::model::ledger::Ledger;
    use crate::node_health::NodeHealth;
    use crate::ownership::suspicion::{LeaseDurations, LongestDuration, Suspicions, TermStart};
    let start = Instant::now();
    let (at, own) = (|percent| at(start, percent), TOTAL / 4);
    let mut lease = LeaseHolder::new(own, at(0), false);
    let terms = LeaseTerms { total: Some(TOTAL), ..LeaseTerms::default() };
    lease.set_demand(LeaseDemand { terms, ..demand(true) });
    lease.note_confirmed(at(0));
    let ledger = |suspects: &[(&str, u64)]| {
        let suspects = suspects.iter().map(|(node, number)| ((*node).to_owned(), *number)).collect();
        Ledger { suspects, ..Ledger::default() }
    };
    let (mut longest, mut suspicions) = (LongestDuration::default(), Suspicions::default());
    let node_health = NodeHealth { silent: ["n".to_owned()].into(), ..NodeHealth::with_lease(own) };
    for (ledger, total, now) in [(ledger(&[]), TOTAL, at(5)), (ledger(&[("n", 1)]), own, at(15))] {
        longest.observe((Some(total), None), own, (now, now));
        suspicions.observe(&ledger, now);
    }
    let term_start = TermStart { since: at(5), former: None, others: &BTreeSet::new() };
    let end =
        |lease| suspicions.lease_expiries(&node_health, LeaseDurations { lease, programs: lease }, term_start)["n"];
    assert_eq!(lease.by_lease(end(own)), ByLease::Held, "its own timeout would be too short");
    assert_eq!(lease.by_lease(end(longest.effective(own, at(15)))), ByLease::Lost);
    assert_eq!(longest.effective(own, end(longest.effective(own, at(15)))), TOTAL, "not before that");
    // It dies after its write. The next one has never read the longer timeout.
    let mut fresh = LongestDuration::default();
    fresh.observe((Some(own), longest.to_write(own, at(15))), own, (at(20), at(20)));
    assert_eq!(lease.by_lease(end(fresh.effective(own, at(20)))), ByLease::Lost);
}

const GRACE: Duration = Duration::from_secs(300);

/// A confirmed holder under the ledger's terms.
fn holder(now: Instant) -> LeaseHolder {
    let mut lease = LeaseHolder::new(TOTAL, now, false);
    let terms = LeaseTerms { total: Some(TOTAL), programs: Some(TOTAL + GRACE), ..LeaseTerms::default() };
    lease.set_demand(LeaseDemand { terms, ..demand(true) });
    lease.note_confirmed(now);
    lease
}

#[test]
fn programs_continue_for_the_grace_after_a_confirmation_but_not_after_a_read() {
    let start = Instant::now();
    let at = |percent| at(start, percent);
    let mut lease = holder(at(0));
    assert_eq!(lease.emits(at(10)), Deadline::At(at(0) + TOTAL + GRACE));
    let mut reader = LeaseHolder::new(TOTAL, at(0), false);
    reader.set_demand(demand(true));
    assert_eq!(reader.emits(at(0)), Deadline::Unchanged, "as the former agent left it");
    reader.note_read(at(0), false, LeaseTerms { programs: Some(TOTAL + GRACE), ..LeaseTerms::default() });
    assert_eq!(reader.emits(at(10)), Deadline::At(at(160)));
    // A leader that does not state it gives no grace, whatever this node's flags say.
    let mut silent = LeaseHolder::new(TOTAL, at(0), false);
    silent.set_demand(demand(true));
    silent.note_confirmed(at(0));
    assert_eq!(silent.emits(at(10)), Deadline::At(at(100)));
}

/// However short it was: another node may have received the addresses, and the reconciler may have missed it.
#[test]
fn a_passed_deadline_is_not_renewed_before_the_kernel_is_empty() {
    let start = Instant::now();
    let at = |percent| at(start, percent);
    let mut lease = holder(at(0));
    assert_eq!(lease.state(at(100), false), LeaseState::Expired(1));
    assert_eq!(lease.deadline(LeaseState::Expired(1)), Deadline::Passed);
    lease.note_confirmed(at(100));
    assert_eq!(lease.state(at(101), true), LeaseState::Expired(1), "confirmed again at once");
    let obeys =
        |lease: &mut LeaseHolder, obeyed| lease.set_demand(LeaseDemand { acknowledged_expiry: obeyed, ..lease.demand });
    obeys(&mut lease, 1);
    assert_eq!(lease.state(at(101), true), LeaseState::Holds);
    assert_eq!(lease.state(at(102), false), LeaseState::Holds);
    // The deadline of a former process: this one was confirmed at once, and the kernel holds the former one's
    // addresses.
    let mut next = holder(at(0));
    assert_eq!(next.state(at(0), true), LeaseState::Expired(1));
    obeys(&mut next, 1);
    assert_eq!(next.state(at(1), true), LeaseState::Holds);
    assert_eq!(next.state(at(150), false), LeaseState::Expired(2), "it has expired again");
    next.note_confirmed(at(150));
    assert_eq!(next.state(at(151), true), LeaseState::Expired(2), "an earlier acknowledgement does not count");
}

#[test]
fn an_endless_lease_needs_a_read_and_ends_by_any_source() {
    let start = Instant::now();
    let at = |percent| at(start, percent);
    let mut lease = holder(at(0));
    let terms = |lease: &mut LeaseHolder, endless, ending| {
        let terms = LeaseTerms { endless, ending, ..lease.demand.terms };
        lease.set_demand(LeaseDemand { terms, ..lease.demand });
    };
    terms(&mut lease, Some(7), None);
    assert_eq!(
        (lease.state(at(10), false), lease.next_read_at()),
        (LeaseState::Holds, Some(at(0))),
        "it is to be read"
    );
    assert_eq!(lease.deadline(LeaseState::Holds), Deadline::At(at(0) + TOTAL + GRACE));
    let endless = LeaseTerms { endless: Some(7), ..lease.demand.terms };
    lease.note_read(at(10), false, endless);
    assert_eq!((lease.deadline(LeaseState::Holds), lease.next_read_at()), (Deadline::Never, None));
    assert_eq!(lease.state(at(9999), false), LeaseState::Holds, "cut off from all");
    assert_eq!(lease.bounded(), None);
    terms(&mut lease, None, Some(8));
    assert_eq!(lease.state(at(9999), false), LeaseState::Expired(1));
    assert_eq!(lease.bounded(), Some(8));
    // A read that was answered before.
    lease.note_read(at(20), false, endless);
    assert_eq!(lease.bounded(), Some(8));
    lease.note_read(at(30), false, LeaseTerms { endless: Some(9), ..endless });
    assert_eq!(lease.bounded(), None, "it is alone again");
}

/// A restart: the former agent left a deadline without an end. None of its addresses moved, since this node has not
/// acknowledged an end of its lease.
#[test]
fn an_endless_lease_outlives_an_agent_that_reaches_nothing() {
    let start = Instant::now();
    let at = |percent| at(start, percent);
    let mut lease = LeaseHolder::new(TOTAL, at(0), true);
    lease.set_demand(demand(true));
    assert_eq!(lease.next_read_at(), Some(at(0)), "it is to be read");
    assert_eq!(lease.state(at(9999), false), LeaseState::Holds);
    assert_eq!((lease.deadline(LeaseState::Holds), lease.bounded()), (Deadline::Never, None));
    let terms = LeaseTerms { ending: Some(8), ..LeaseTerms::default() };
    let mut ended = LeaseHolder::new(TOTAL, at(0), true);
    ended.set_demand(LeaseDemand { terms, ..demand(true) });
    assert_eq!((ended.state(at(100), false), ended.bounded()), (LeaseState::Expired(1), Some(8)));
    lease.note_read(at(9990), false, LeaseTerms::default());
    assert_eq!(lease.emits(at(9999)), Deadline::At(at(9990) + TOTAL * 16 / 10), "the ledger knows nothing of it");
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ByLease {
    /// The former agent's deadline still runs.
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
        let state = self.state(now, false);
        self.deadline(state)
    }
}
