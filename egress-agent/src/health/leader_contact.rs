//! Until when the leader has certainly heard this agent, and the metadata of probes. Pure: every time is an argument.
//!
//! The arrival of a probe proves nothing, since the answer may be lost. So each probe has a number, and the number of the
//! latest probe whose answer the leader has received. A probe that confirms number `k` proves that the leader heard this
//! agent after probe `k` arrived here. The lease counts from that arrival on this node's clock, which is always earlier than
//! the leader's time. With a probe every 250 ms, it is 250 to 500 ms ago.
//!
//! Numbers belong to a session: one prober and one address, over any number of connections. A probe also has its leader's
//! term. Once a newer leader has probed, an older one confirms nothing, and the answers contain the newer term.

use std::collections::{BTreeMap, VecDeque};
use std::ops::RangeInclusive;
use std::time::{Duration, Instant};

use tonic::metadata::{AsciiMetadataValue, MetadataMap};

/// In a probe: session, number, the latest answered number, the leader's term.
const PROBE: &str = "egress-agent-probe";
/// In probe and answer: the sender's total timeout in milliseconds.
const TIMEOUT: &str = "egress-agent-total-timeout";
/// In an answer: the overlay's port, if the agent answers probes through the overlay.
const OVERLAY: &str = "egress-agent-overlay-port";
/// In an answer: the number of the latest end of an endless lease that the agent's programs have obeyed.
const BOUNDED: &str = "egress-agent-lease-bounded";
/// In a probe: milliseconds since the controller found that the API server was rolled back.
const RETURNED: &str = "egress-agent-api-returned-age";
/// In an answer: milliseconds since a next hop of the node answered last.
const NEXT_HOP: &str = "egress-agent-next-hop-age";
/// In an answer: the greatest known term.
const TERM: &str = "egress-agent-term";

/// The range of the flag.
const TIMEOUTS: RangeInclusive<Duration> = Duration::from_millis(200)..=Duration::from_secs(3600);
/// Sessions that are kept: of a leader and a former one, by each address.
const SESSIONS: usize = 16;
/// Probes of a session that are kept: their answers may be in flight.
const PROBES: usize = 64;
/// A term that no probe has had for this long is forgotten: the Lease may have been recreated.
const TERM_FORGOTTEN_AFTER: Duration = Duration::from_secs(30);

/// The numbers of a leader's probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Probe {
    pub session: u64,
    pub number: u64,
    /// The latest probe of the session whose answer has been received; zero for none.
    pub confirmed: u64,
    pub term: u64,
}

impl Probe {
    /// `None` for any other request.
    pub fn read(metadata: &MetadataMap) -> Option<Self> {
        let text = metadata.get(PROBE)?.to_str().ok()?;
        let mut numbers = text.split(' ').map(|number| number.parse().ok());
        let mut next = || numbers.next().flatten();
        Some(Self { session: next()?, number: next()?, confirmed: next()?, term: next()? })
    }

    pub fn write(&self, metadata: &mut MetadataMap) {
        let Self { session, number, confirmed, term } = self;
        put(metadata, PROBE, &format!("{session} {number} {confirmed} {term}"));
    }
}

/// The other side's total timeout; `None` if it is missing or out of range.
pub fn timeout(metadata: &MetadataMap) -> Option<Duration> {
    number(metadata, TIMEOUT).map(Duration::from_millis).filter(|timeout| TIMEOUTS.contains(timeout))
}

pub fn set_timeout(metadata: &mut MetadataMap, timeout: Duration) {
    put(metadata, TIMEOUT, &timeout.as_millis().to_string());
}

/// The greatest term that the answering agent knows.
pub fn term(metadata: &MetadataMap) -> Option<u64> {
    number(metadata, TERM)
}

pub fn set_term(metadata: &mut MetadataMap, term: u64) {
    put(metadata, TERM, &term.to_string());
}

/// The overlay's port, if the agent answers there.
pub fn overlay_port(metadata: &MetadataMap) -> Option<u16> {
    number(metadata, OVERLAY).and_then(|port| u16::try_from(port).ok())
}

pub fn set_overlay_port(metadata: &mut MetadataMap, port: u16) {
    put(metadata, OVERLAY, &port.to_string());
}

/// The number of the latest end of an endless lease that the agent's programs have obeyed.
pub fn bounded(metadata: &MetadataMap) -> Option<u64> {
    number(metadata, BOUNDED)
}

pub fn set_bounded(metadata: &mut MetadataMap, number: u64) {
    put(metadata, BOUNDED, &number.to_string());
}

/// How long ago the controller found that the API server was rolled back, if it has.
pub fn returned_age(metadata: &MetadataMap) -> Option<Duration> {
    number(metadata, RETURNED).map(Duration::from_millis)
}

pub fn set_returned_age(metadata: &mut MetadataMap, age: Duration) {
    put(metadata, RETURNED, &age.as_millis().to_string());
}

/// How long ago a next hop of the node answered last, if one has.
pub fn next_hop_age(metadata: &MetadataMap) -> Option<Duration> {
    number(metadata, NEXT_HOP).map(Duration::from_millis)
}

pub fn set_next_hop_age(metadata: &mut MetadataMap, age: Duration) {
    // Rounded up: a greater age is the safe side.
    put(metadata, NEXT_HOP, &(age.as_millis() + 1).to_string());
}

fn number(metadata: &MetadataMap, key: &'static str) -> Option<u64> {
    metadata.get(key)?.to_str().ok()?.parse().ok()
}

fn put(metadata: &mut MetadataMap, key: &'static str, value: &str) {
    // Digits and spaces are ASCII.
    if let Ok(value) = AsciiMetadataValue::try_from(value) {
        metadata.insert(key, value);
    }
}

/// The latest probes, and what they confirm.
#[derive(Debug, Default)]
pub struct LeaderContact {
    sessions: BTreeMap<u64, ProbeSession>,
    /// The greatest term, and when a probe last had it.
    term: Option<(u64, Instant)>,
    confirmed: Option<Instant>,
}

#[derive(Debug)]
struct ProbeSession {
    /// Number and arrival, oldest first.
    probes: VecDeque<(u64, Instant)>,
    latest: Instant,
}

impl LeaderContact {
    /// Notes a probe.
    pub fn note(&mut self, probe: Probe, at: Instant) {
        match self.term {
            Some((term, last)) if probe.term < term && at < last + TERM_FORGOTTEN_AFTER => return,
            _ => self.term = Some((probe.term, at)),
        }
        if !self.sessions.contains_key(&probe.session) {
            self.evict_oldest();
        }
        let session = self
            .sessions
            .entry(probe.session)
            .or_insert_with(|| ProbeSession { probes: VecDeque::with_capacity(PROBES), latest: at });
        session.latest = at;
        let confirmed = session.probes.iter().find(|(number, _)| *number == probe.confirmed);
        if let Some((_, arrived)) = confirmed {
            self.confirmed = self.confirmed.max(Some(*arrived));
        }
        if session.probes.len() == PROBES {
            session.probes.pop_front();
        }
        session.probes.push_back((probe.number, at));
    }

    /// The latest time after which the leader has certainly heard this agent.
    pub fn confirmed(&self) -> Option<Instant> {
        self.confirmed
    }

    /// The greatest term that a probe has had.
    pub fn term(&self) -> u64 {
        self.term.map_or(0, |(term, _)| term)
    }

    fn evict_oldest(&mut self) {
        if self.sessions.len() < SESSIONS {
            return;
        }
        let oldest = self.sessions.iter().min_by_key(|(_, session)| session.latest).map(|(id, _)| *id);
        oldest.and_then(|id| self.sessions.remove(&id));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct TimedProbes {
        contact: LeaderContact,
        start: Instant,
    }

    impl TimedProbes {
        fn new() -> Self {
            Self { contact: LeaderContact::default(), start: Instant::now() }
        }

        fn probe(&mut self, millis: u64, session: u64, number: u64, confirmed: u64, term: u64) -> Option<u64> {
            let at = self.start + Duration::from_millis(millis);
            self.contact.note(Probe { session, number, confirmed, term }, at);
            let confirmed = self.contact.confirmed()?.duration_since(self.start);
            u64::try_from(confirmed.as_millis()).ok()
        }
    }

    #[test]
    fn only_confirmed_probes_count_from_their_arrival() {
        let mut probes = TimedProbes::new();
        assert_eq!(probes.probe(0, 7, 1, 0, 1), None, "the answer may be lost");
        assert_eq!(probes.probe(250, 7, 2, 0, 1), None, "it was lost");
        assert_eq!(probes.probe(500, 7, 3, 2, 1), Some(250));
        assert_eq!(probes.probe(750, 7, 4, 2, 1), Some(250), "nothing new");
        assert_eq!(probes.probe(1000, 7, 5, 4, 1), Some(750));
        assert_eq!(probes.probe(1010, 7, 6, 3, 1), Some(750), "it never goes back");
        assert_eq!(probes.probe(1020, 7, 7, 99, 1), Some(750), "an unknown number");
    }

    #[test]
    fn sessions_have_their_own_numbers_and_any_session_confirms() {
        let mut probes = TimedProbes::new();
        probes.probe(0, 7, 1, 0, 1);
        assert_eq!(probes.probe(100, 8, 2, 1, 1), None, "1 is of another session");
        assert_eq!(probes.probe(200, 7, 2, 1, 1), Some(0));
        assert_eq!(probes.probe(300, 8, 3, 2, 1), Some(100));
        // Short sessions do not fill the memory, and the lasting one is kept.
        for session in 100..1000 {
            probes.probe(300 + session, session, 1, 0, 1);
            probes.probe(300 + session, 7, session, 0, 1);
        }
        assert!(probes.contact.sessions.len() <= SESSIONS);
        assert!(probes.contact.sessions.values().all(|session| session.probes.len() <= PROBES));
        assert_eq!(probes.probe(2000, 7, 2000, 999, 1), Some(1299));
    }

    #[test]
    fn probes_of_a_former_leader_confirm_nothing() {
        let mut probes = TimedProbes::new();
        probes.probe(0, 7, 1, 0, 4);
        assert_eq!(probes.probe(250, 7, 2, 1, 4), Some(0));
        probes.probe(300, 9, 1, 0, 5);
        assert_eq!(probes.probe(500, 7, 3, 2, 4), Some(0));
        assert_eq!(probes.contact.term(), 5);
        assert_eq!(probes.probe(550, 9, 2, 1, 5), Some(300));
        // Terms restart with a new Lease.
        probes.probe(40_000, 11, 1, 0, 0);
        assert_eq!(probes.probe(40_250, 11, 2, 1, 0), Some(40_000));
    }

    #[test]
    fn values_survive_a_round_trip_and_invalid_ones_are_ignored() {
        let probe = Probe { session: u64::MAX, number: 2, confirmed: 1, term: 3 };
        let mut metadata = MetadataMap::new();
        assert_eq!(Probe::read(&metadata), None);
        probe.write(&mut metadata);
        set_timeout(&mut metadata, Duration::from_secs(1));
        set_term(&mut metadata, 9);
        assert_eq!(Probe::read(&metadata), Some(probe));
        assert_eq!((timeout(&metadata), term(&metadata)), (Some(Duration::from_secs(1)), Some(9)));
        for invalid in ["", "1", "1 2 3", "1 2 -3 4", "1 2 3 x"] {
            put(&mut metadata, PROBE, invalid);
            assert_eq!(Probe::read(&metadata), None, "{invalid:?}");
        }
        for (milliseconds, is_one) in [("0", false), ("1", false), ("199", false), ("200", true), ("3600000", true)] {
            put(&mut metadata, TIMEOUT, milliseconds);
            assert_eq!(timeout(&metadata).is_some(), is_one, "{milliseconds}");
        }
        for too_long in ["3600001", "18446744073709551615"] {
            put(&mut metadata, TIMEOUT, too_long);
            assert_eq!(timeout(&metadata), None, "{too_long}");
        }
    }
}
