//! Until when the leader has surely heard this agent. Pure: every time is an argument.
//!
//! An agent that holds addresses must know when the leader may give them away. That a probe arrived proves nothing: the
//! answer may have been lost. So each probe bears a number and, beside it, the number of the latest probe whose answer the
//! prober has received. When a probe confirms number `k`, the leader has heard this agent at some time after probe `k` came
//! in here. That time, on this agent's own clock, is what it counts from: it is always earlier than what the leader counts
//! from.
//!
//! With a probe every 250 ms, what is confirmed is between 250 and 500 ms old when all is well.
//!
//! Numbers belong to a session, which is one prober asking by one address. Connections may break within it. A probe also
//! bears the term of its leader, which is greater for each that takes over: where a newer leader has been heard, the word of
//! an older one proves nothing any more, and the answers tell it so.

use std::collections::{BTreeMap, VecDeque};
use std::ops::RangeInclusive;
use std::time::{Duration, Instant};

use tonic::metadata::{AsciiMetadataValue, MetadataMap};

/// Of a probe: session, number, the latest number that was answered, the leader's term.
const PROBE: &str = "egress-agent-probe";
/// Of probe and answer: the total timeout in milliseconds that the sender goes by.
const TIMEOUT: &str = "egress-agent-total-timeout";
/// Of an answer: the port of the overlay, where the agent answers questions that come through it.
const OVERLAY: &str = "egress-agent-overlay-port";
/// Of an answer: the number of the latest end of an endless lease that the agent's programs have obeyed.
const BOUNDED: &str = "egress-agent-lease-bounded";
/// Of a probe: milliseconds since the controller found that the API server knows less than it did.
const RETURNED: &str = "egress-agent-api-returned-age";
/// Of an answer: milliseconds since a next hop of the node answered last.
const NEXT_HOP: &str = "egress-agent-next-hop-age";
/// Of an answer: the greatest term that has been heard of.
const TERM: &str = "egress-agent-term";

/// What the flag takes beside zero.
const TIMEOUTS: RangeInclusive<Duration> = Duration::from_millis(200)..=Duration::from_secs(3600);
/// Probers that are remembered at a time: a leader and a former one, by each address.
const SESSIONS: usize = 16;
/// Probes of a session that are remembered: their answers may be on their way.
const PROBES: usize = 64;
/// A term that nobody has named for so long counts no more: the Lease may have been made anew.
const TERM_FORGOTTEN_AFTER: Duration = Duration::from_secs(30);

/// What a probe of a leader bears.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Probe {
    pub session: u64,
    pub number: u64,
    /// The latest probe of the session whose answer has been received; zero for none.
    pub confirmed: u64,
    pub term: u64,
}

impl Probe {
    /// `None` for a probe of anybody else.
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

/// The total timeout that the other side goes by, where it says so. What no flag can say is nothing.
pub fn timeout(metadata: &MetadataMap) -> Option<Duration> {
    number(metadata, TIMEOUT).map(Duration::from_millis).filter(|timeout| TIMEOUTS.contains(timeout))
}

pub fn set_timeout(metadata: &mut MetadataMap, timeout: Duration) {
    put(metadata, TIMEOUT, &timeout.as_millis().to_string());
}

/// The greatest term that the answering agent has heard of.
pub fn term(metadata: &MetadataMap) -> Option<u64> {
    number(metadata, TERM)
}

pub fn set_term(metadata: &mut MetadataMap, term: u64) {
    put(metadata, TERM, &term.to_string());
}

/// The port of the overlay, where the agent answers there.
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

/// How long ago the controller found that the API server knows less than it did, where it has.
pub fn returned_age(metadata: &MetadataMap) -> Option<Duration> {
    number(metadata, RETURNED).map(Duration::from_millis)
}

pub fn set_returned_age(metadata: &mut MetadataMap, age: Duration) {
    put(metadata, RETURNED, &age.as_millis().to_string());
}

/// How long ago a next hop of the node answered last, where one has.
pub fn next_hop_age(metadata: &MetadataMap) -> Option<Duration> {
    number(metadata, NEXT_HOP).map(Duration::from_millis)
}

pub fn set_next_hop_age(metadata: &mut MetadataMap, age: Duration) {
    // Rounded up: one that is older than it was says less.
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

/// What is remembered of probes.
#[derive(Debug, Default)]
pub struct Touch {
    sessions: BTreeMap<u64, Session>,
    /// The greatest term, and when it was named last.
    term: Option<(u64, Instant)>,
    heard: Option<Instant>,
}

#[derive(Debug)]
struct Session {
    /// Number and arrival, oldest first.
    probes: VecDeque<(u64, Instant)>,
    latest: Instant,
}

impl Touch {
    /// A probe has come in.
    pub fn probed(&mut self, probe: Probe, at: Instant) {
        match self.term {
            Some((term, named)) if probe.term < term && at < named + TERM_FORGOTTEN_AFTER => return,
            _ => self.term = Some((probe.term, at)),
        }
        if !self.sessions.contains_key(&probe.session) {
            self.make_room();
        }
        let session = self
            .sessions
            .entry(probe.session)
            .or_insert_with(|| Session { probes: VecDeque::with_capacity(PROBES), latest: at });
        session.latest = at;
        let confirmed = session.probes.iter().find(|(number, _)| *number == probe.confirmed);
        if let Some((_, arrived)) = confirmed {
            self.heard = self.heard.max(Some(*arrived));
        }
        if session.probes.len() == PROBES {
            session.probes.pop_front();
        }
        session.probes.push_back((probe.number, at));
    }

    /// The leader has surely heard this agent then, or later.
    pub fn heard(&self) -> Option<Instant> {
        self.heard
    }

    /// The greatest term that a probe has named.
    pub fn term(&self) -> u64 {
        self.term.map_or(0, |(term, _)| term)
    }

    fn make_room(&mut self) {
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

    struct Play {
        touch: Touch,
        start: Instant,
    }

    impl Play {
        fn new() -> Self {
            Self { touch: Touch::default(), start: Instant::now() }
        }

        fn probe(&mut self, millis: u64, session: u64, number: u64, confirmed: u64, term: u64) -> Option<u64> {
            let at = self.start + Duration::from_millis(millis);
            self.touch.probed(Probe { session, number, confirmed, term }, at);
            let heard = self.touch.heard()?.duration_since(self.start);
            u64::try_from(heard.as_millis()).ok()
        }
    }

    #[test]
    fn only_what_is_confirmed_counts_and_from_its_arrival() {
        let mut play = Play::new();
        assert_eq!(play.probe(0, 7, 1, 0, 1), None, "the answer may be lost");
        assert_eq!(play.probe(250, 7, 2, 0, 1), None, "it was");
        assert_eq!(play.probe(500, 7, 3, 2, 1), Some(250));
        assert_eq!(play.probe(750, 7, 4, 2, 1), Some(250), "nothing new");
        assert_eq!(play.probe(1000, 7, 5, 4, 1), Some(750));
        assert_eq!(play.probe(1010, 7, 6, 3, 1), Some(750), "it never goes back");
        assert_eq!(play.probe(1020, 7, 7, 99, 1), Some(750), "a number that never came");
    }

    #[test]
    fn sessions_have_numbers_of_their_own_and_any_of_them_will_do() {
        let mut play = Play::new();
        play.probe(0, 7, 1, 0, 1);
        assert_eq!(play.probe(100, 8, 2, 1, 1), None, "1 was another's");
        assert_eq!(play.probe(200, 7, 2, 1, 1), Some(0));
        assert_eq!(play.probe(300, 8, 3, 2, 1), Some(100));
        // Who comes and goes does not fill the memory, and the one that stays is remembered.
        for session in 100..1000 {
            play.probe(300 + session, session, 1, 0, 1);
            play.probe(300 + session, 7, session, 0, 1);
        }
        assert!(play.touch.sessions.len() <= SESSIONS);
        assert!(play.touch.sessions.values().all(|session| session.probes.len() <= PROBES));
        assert_eq!(play.probe(2000, 7, 2000, 999, 1), Some(1299));
    }

    #[test]
    fn the_word_of_a_former_leader_proves_nothing() {
        let mut play = Play::new();
        play.probe(0, 7, 1, 0, 4);
        assert_eq!(play.probe(250, 7, 2, 1, 4), Some(0));
        play.probe(300, 9, 1, 0, 5);
        assert_eq!(play.probe(500, 7, 3, 2, 4), Some(0));
        assert_eq!(play.touch.term(), 5);
        assert_eq!(play.probe(550, 9, 2, 1, 5), Some(300));
        // Terms begin anew with another Lease.
        play.probe(40_000, 11, 1, 0, 0);
        assert_eq!(play.probe(40_250, 11, 2, 1, 0), Some(40_000));
    }

    #[test]
    fn what_is_written_is_read_and_nonsense_is_nobodys() {
        let probe = Probe { session: u64::MAX, number: 2, confirmed: 1, term: 3 };
        let mut metadata = MetadataMap::new();
        assert_eq!(Probe::read(&metadata), None);
        probe.write(&mut metadata);
        set_timeout(&mut metadata, Duration::from_secs(1));
        set_term(&mut metadata, 9);
        assert_eq!(Probe::read(&metadata), Some(probe));
        assert_eq!((timeout(&metadata), term(&metadata)), (Some(Duration::from_secs(1)), Some(9)));
        for nonsense in ["", "1", "1 2 3", "1 2 -3 4", "1 2 3 x"] {
            put(&mut metadata, PROBE, nonsense);
            assert_eq!(Probe::read(&metadata), None, "{nonsense:?}");
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
