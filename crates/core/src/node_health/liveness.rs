//! Signs of life of one node, and its liveness. Pure: every time is an argument.
//!
//! There are two kinds of signs. An *answer* comes from the agent. A connection that is accepted or refused comes from
//! the node's *kernel*: its agent is killed, stopped or being replaced, and its programs continue without it. Such a
//! node gets a grace period. Only a node without any sign for the total timeout is gone.
//!
//! The address that a sign came from does not matter: one working path is enough.

use std::time::{Duration, Instant};

/// Durations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProbeTiming {
    /// A node without a sign of life for that long is gone.
    pub total: Duration,
    /// Between two probes of one address.
    pub interval: Duration,
    /// How long a node keeps its addresses while its kernel answers and its agent does not.
    pub grace: Duration,
}

impl ProbeTiming {
    /// How long a missing answer is waited for. The grace begins when a silence is detected, and an agent that returns
    /// at its end has the usual time to answer.
    fn agent_silence_limit(&self) -> Duration {
        self.total + self.grace + self.total
    }
}

/// A sign of life. Silence is no sign.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    AgentAnswer(AgentAnswer),
    /// A connection was accepted or refused.
    Kernel,
}

/// What an agent reports of its node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AgentAnswer {
    Serving,
    /// It could serve, but its next hop is silent.
    NextHopLost,
    /// It could serve, but does not answer through the overlay.
    OverlayLost,
    NotServing,
}

/// The liveness of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Liveness {
    /// It had no time to answer yet.
    Unknown,
    Answers(AgentAnswer),
    /// The kernel answers, the agent does not: in its grace period.
    AgentSilent,
    /// The same after the grace period.
    AgentGone,
    Silent,
}

#[derive(Clone, Copy, Debug)]
pub struct NodeSigns {
    /// The latest sign of any kind, or the start of probing.
    last_sign: Instant,
    last_answer: Option<(Instant, AgentAnswer)>,
    /// Since when the answer is unchanged; before the first, the start of probing.
    since: Instant,
    /// It was probed before, and counted as gone.
    was_gone: bool,
}

impl NodeSigns {
    pub fn new(now: Instant) -> Self {
        Self { last_sign: now, last_answer: None, since: now, was_gone: false }
    }

    /// Starts again without earlier signs, except that its agent may have ended before, so that it did not end its
    /// lease.
    pub fn restart(now: Instant) -> Self {
        Self { was_gone: true, ..Self::new(now) }
    }

    /// Signs may arrive out of order.
    pub fn note(&mut self, signal: Signal, at: Instant) {
        self.last_sign = self.last_sign.max(at);
        let Signal::AgentAnswer(answer) = signal else { return };
        if self.last_answer.is_some_and(|(latest, _)| at < latest) {
            return;
        }
        if self.last_answer.is_none_or(|(_, known)| known != answer) {
            self.since = at;
        }
        self.last_answer = Some((at, answer));
    }

    /// Excuses its silence up to now, which had another cause: its last answer stays valid.
    pub fn excuse_silence(&mut self, now: Instant) {
        self.last_sign = self.last_sign.max(now);
        match &mut self.last_answer {
            Some((at, _)) => *at = now.max(*at),
            None => self.since = now,
        }
    }

    pub fn last_sign(&self) -> Instant {
        self.last_sign
    }

    /// When it last reported that it serves; before that, the start of probing.
    pub fn last_serving(&self) -> Instant {
        match self.last_answer {
            Some((at, AgentAnswer::Serving)) => at,
            _ => self.since,
        }
    }

    /// No answer for half the total timeout: its agent may have restarted.
    pub fn has_paused(&self, rules: &ProbeTiming, now: Instant) -> bool {
        self.last_answer.is_none_or(|(at, _)| now >= at + rules.total / 2)
    }

    /// Whether the node's kernel has answered for a total timeout after the last answer of its agent: the agent fell
    /// silent first, and did not end the node's lease.
    pub fn agent_stopped_first(&self, rules: &ProbeTiming) -> bool {
        let never_answered = self.was_gone && self.last_answer.is_none();
        never_answered || self.last_sign >= self.last_answer.map_or(self.since, |(at, _)| at) + rules.total
    }

    /// Since when the answer is unchanged.
    pub fn since(&self) -> Instant {
        self.since
    }

    pub fn is_suspect(&self, rules: &ProbeTiming, now: Instant) -> bool {
        now >= self.last_sign + rules.total / 2
    }

    /// Its agent is silent, and its programs, which depend on the last confirmation, have stopped. Suspecting the node
    /// costs nothing then, and its addresses need not wait for it when it counts as gone.
    pub fn is_agent_overdue(&self, rules: &ProbeTiming, now: Instant) -> bool {
        let answered = self.last_answer.map_or(self.since, |(at, _)| at);
        now >= answered + rules.total + rules.grace
            && matches!(self.liveness(rules, now), Liveness::AgentSilent | Liveness::AgentGone)
    }

    pub fn liveness(&self, rules: &ProbeTiming, now: Instant) -> Liveness {
        if now >= self.last_sign + rules.total {
            return Liveness::Silent;
        }
        match self.last_answer {
            Some((at, answer)) if now < at + rules.total => Liveness::Answers(answer),
            Some((at, _)) if now < at + rules.agent_silence_limit() => Liveness::AgentSilent,
            None if now < self.since + rules.total => Liveness::Unknown,
            None if now < self.since + rules.agent_silence_limit() => Liveness::AgentSilent,
            _ => Liveness::AgentGone,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RULES: ProbeTiming = ProbeTiming {
        total: Duration::from_secs(1),
        interval: Duration::from_millis(250),
        grace: Duration::from_secs(30),
    };
    const OK: Signal = Signal::AgentAnswer(AgentAnswer::Serving);
    const BAD: Signal = Signal::AgentAnswer(AgentAnswer::NotServing);

    /// Signs by milliseconds, then the liveness at each time.
    fn story(name: &str, given: &[(u64, Signal)], stands: &[(u64, Liveness)]) {
        let start = Instant::now();
        let at = |millis| start + Duration::from_millis(millis);
        for (time, liveness) in stands {
            let mut signs = NodeSigns::new(start);
            given.iter().filter(|(when, _)| when <= time).for_each(|(when, signal)| signs.note(*signal, at(*when)));
            assert_eq!(signs.liveness(&RULES, at(*time)), *liveness, "{name}, after {time} ms");
        }
    }

    /// The kernel answers every quarter of a second.
    fn kernel(from: u64, to: u64) -> Vec<(u64, Signal)> {
        (from..=to).step_by(250).map(|time| (time, Signal::Kernel)).collect()
    }

    #[test]
    fn a_dead_agents_node_is_suspected_when_its_programs_have_stopped() {
        let start = Instant::now();
        let at = |millis| start + Duration::from_millis(millis);
        let mut signs = NodeSigns::new(start);
        signs.note(OK, at(0));
        kernel(250, 40_000).into_iter().for_each(|(time, signal)| signs.note(signal, at(time)));
        assert!(!signs.is_agent_overdue(&RULES, at(30_999)), "its grace");
        assert!(signs.is_agent_overdue(&RULES, at(31_000)) && signs.is_agent_overdue(&RULES, at(40_000)));
        signs.note(OK, at(31_300));
        assert!(!signs.is_agent_overdue(&RULES, at(31_300)), "it is back");
    }

    /// Otherwise the deadline of its programs would not be waited for.
    #[test]
    fn an_agent_that_has_not_answered_since_the_beginning_may_have_ended_before() {
        let start = Instant::now();
        let mut signs = NodeSigns::restart(start);
        assert!(signs.agent_stopped_first(&RULES));
        signs.note(OK, start);
        assert!(!signs.agent_stopped_first(&RULES));
    }

    #[test]
    fn where_a_node_stands() {
        use Liveness::{AgentGone, AgentSilent, Answers, Silent, Unknown};
        let (serves, refuses) = (Answers(AgentAnswer::Serving), Answers(AgentAnswer::NotServing));
        story("never anything", &[], &[(0, Unknown), (999, Unknown), (1000, Silent)]);
        story("one answer", &[(200, OK)], &[(199, Unknown), (200, serves), (1199, serves), (1200, Silent)]);
        story("a slow answer is one", &[(0, OK), (900, OK)], &[(950, serves), (1899, serves), (1900, Silent)]);
        story("it refuses", &[(0, OK), (250, BAD)], &[(249, serves), (250, refuses), (1250, Silent)]);
        story("it serves again", &[(0, BAD), (250, OK)], &[(250, serves)]);
        story("an older answer comes late", &[(300, BAD), (250, OK)], &[(300, refuses)]);

        let bounce = [vec![(0, OK)], kernel(250, 60_000)].concat();
        let stands = [(999, serves), (1000, AgentSilent), (31_999, AgentSilent), (32_000, AgentGone)];
        story("the agent is killed or stopped", &bounce, &stands);
        let powered_off = [vec![(0, OK)], kernel(250, 5000)].concat();
        story("then the node dies", &powered_off, &[(5999, AgentSilent), (6000, Silent)]);
        let restarted = [vec![(0, OK)], kernel(250, 5000), vec![(5100, OK)]].concat();
        story("a new agent comes", &restarted, &[(5000, AgentSilent), (5100, serves)]);
        let no_agent = kernel(0, 60_000);
        let stands = [(999, Unknown), (1000, AgentSilent), (32_000, AgentGone)];
        story("there has never been an agent", &no_agent, &stands);
    }

    #[test]
    fn the_age_of_an_answer_is_that_of_the_first_of_its_kind() {
        let start = Instant::now();
        let mut signs = NodeSigns::new(start);
        for millis in [0, 250, 500] {
            signs.note(BAD, start + Duration::from_millis(millis));
        }
        assert_eq!(signs.since(), start);
        signs.note(OK, start + Duration::from_millis(750));
        assert_eq!(signs.since(), start + Duration::from_millis(750));
        assert!(!signs.is_suspect(&RULES, start + Duration::from_millis(1249)));
        assert!(signs.is_suspect(&RULES, start + Duration::from_millis(1250)));
    }
}
