//! The leader's part where nodes would have addresses back without the API server: what it has been told of, and what it
//! may say by that. `crate::fence::regain` has the rule, and why it is safe. Pure: every time is an argument.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::IpAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::fence::regain::Addresses;
use crate::health::regain::MOST;

/// The latest answers of one node by one road: the number of the probe, and when its answer came in. Oldest first.
pub(crate) type Answered = VecDeque<(u64, Instant)>;

/// What a probe is to say.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Saying {
    pub(crate) to_promise: Addresses,
    pub(crate) given: Option<(u64, Addresses)>,
}

#[derive(Debug, Default)]
pub(crate) struct Recall(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    is_on: bool,
    /// All that are asked.
    nodes: BTreeSet<String>,
    /// What is on its way by the ledger.
    moving: Addresses,
    wanted: BTreeMap<String, Addresses>,
    /// By node: when the latest probe was sent that was answered by the promise.
    promised: BTreeMap<String, BTreeMap<IpAddr, Instant>>,
}

impl Recall {
    /// Whether anything is given back.
    pub(crate) fn set(&self, is_on: bool) {
        self.state().is_on = is_on;
    }

    /// All that are asked.
    pub(crate) fn set_nodes<'a>(&self, nodes: impl Iterator<Item = &'a String>) {
        let (mut state, nodes) = (self.state(), nodes.cloned().collect::<BTreeSet<_>>());
        state.wanted.retain(|node, _| nodes.contains(node));
        state.nodes = nodes;
    }

    pub(crate) fn set_moving(&self, moving: Addresses) {
        self.state().moving = moving;
    }

    /// What an answer says. Its probe was sent then.
    pub(crate) fn note(&self, node: &str, wanted: Addresses, promised: Addresses, sent: Instant) {
        let mut state = self.state();
        if wanted.is_empty() {
            state.wanted.remove(node);
        } else {
            state.wanted.insert(node.to_owned(), wanted);
        }
        if promised.is_empty() {
            return;
        }
        let known = state.promised.entry(node.to_owned()).or_default();
        for address in promised {
            let latest = known.entry(address).or_insert(sent);
            *latest = sent.max(*latest);
        }
    }

    /// What the next probe of a node says that has given these answers. `total` is how long promises are worth something.
    pub(crate) fn say(&self, node: &str, answered: &Answered, total: Duration, now: Instant) -> Saying {
        let mut state = self.state();
        if !state.is_on || state.wanted.is_empty() {
            state.promised.clear();
            return Saying::default();
        }
        // The same ones for everybody, or each would be promised by some.
        let all: Addresses =
            state.wanted.values().flatten().filter(|one| !state.moving.contains(one)).copied().collect();
        let is_anothers =
            |address: &IpAddr| state.wanted.iter().any(|(other, wanted)| other != node && wanted.contains(address));
        let to_promise = all.into_iter().take(MOST).filter(is_anothers).collect();
        Saying { to_promise, given: state.given(node, answered, total, now) }
    }

    /// No step leaves the state half changed.
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn given(&self, node: &str, answered: &Answered, total: Duration, now: Instant) -> Option<(u64, Addresses)> {
        let wanted = self.wanted.get(node)?.iter().filter(|address| !self.moving.contains(address));
        let since = |address| self.promised_since(node, address, now).filter(|since| now < *since + total);
        let all: BTreeMap<IpAddr, Instant> = wanted.filter_map(|address| Some((*address, since(address)?))).collect();
        let since = *all.values().min()?;
        let (number, _) = answered.iter().rev().find(|(_, came_in)| *came_in <= since)?;
        Some((*number, all.into_keys().collect()))
    }

    /// When the last of the others was asked that has promised; `None` where one has not.
    fn promised_since(&self, node: &str, address: &IpAddr, now: Instant) -> Option<Instant> {
        let others = self.nodes.iter().filter(|other| *other != node);
        let mut sent = others.map(|other| self.promised.get(other)?.get(address).copied());
        // Where nobody could take anything nobody needs to promise.
        sent.try_fold(now, |least, sent| Some(least.min(sent?)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(last: &[u8]) -> Addresses {
        last.iter().map(|last| IpAddr::from([10, 0, 0, *last])).collect()
    }

    #[test]
    fn an_address_is_given_back_as_of_an_answer_behind_which_all_others_were_asked() {
        let (recall, start, total) = (Recall::default(), Instant::now(), Duration::from_secs(1));
        let at = |milliseconds| start + Duration::from_millis(milliseconds);
        let nodes = ["a", "b", "c"].map(str::to_owned);
        recall.set_nodes(nodes.iter());
        let answered = Answered::from([(1, at(100)), (2, at(350)), (3, at(600))]);
        let say = |node: &str, now| recall.say(node, &answered, total, at(now));
        recall.note("a", all(&[1, 2]), all(&[]), at(90));
        assert_eq!(say("b", 110), Saying::default(), "the API server is there");
        recall.set(true);
        assert_eq!(say("b", 110), Saying { to_promise: all(&[1, 2]), given: None });
        assert_eq!(say("a", 120), Saying::default(), "it need not promise to itself");
        recall.note("b", all(&[]), all(&[1, 2]), at(400));
        assert_eq!(say("a", 450).given, None, "one has not said anything");
        recall.note("c", all(&[]), all(&[1]), at(200));
        assert_eq!(say("a", 610).given, Some((1, all(&[1]))), "one has the other address");
        recall.note("c", all(&[]), all(&[1]), at(360));
        assert_eq!(say("a", 610).given, Some((2, all(&[1]))));
        assert_eq!(say("a", 1360).given, None, "long ago");
        recall.note("c", all(&[]), all(&[1]), at(1300));
        recall.note("b", all(&[]), all(&[1]), at(1300));
        assert_eq!(say("a", 1360).given, Some((3, all(&[1]))));
        recall.set_moving(all(&[1]));
        assert_eq!(say("a", 1360).given, None, "it is on its way");
        assert_eq!(say("b", 1360).to_promise, all(&[2]));
        recall.set_moving(all(&[]));
        recall.set(false);
        assert_eq!(say("a", 1360), Saying::default());
    }

    #[test]
    fn a_node_that_is_asked_alone_has_its_addresses_back() {
        let (recall, now) = (Recall::default(), Instant::now());
        recall.set(true);
        recall.set_nodes(["a".to_owned()].iter());
        recall.note("a", all(&[1]), all(&[]), now);
        let answered = Answered::from([(4, now)]);
        assert_eq!(recall.say("a", &answered, Duration::from_secs(1), now).given, Some((4, all(&[1]))));
    }
}
