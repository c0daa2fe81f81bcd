//! The leader's part where nodes would have addresses back without the API server: what it has been told of, and what it
//! may say by that. `crate::fence::regain` has the rule, and why it is safe. Pure: every time is an argument.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::IpAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::fence::regain::Addresses;
use crate::health::regain::MOST;

/// What nodes have lost they read anew within that time, where they reach the API server. Who leads again goes on giving back
/// for so long, and who leads gives back to nodes that have asked for longer: they do not reach it.
pub(crate) const READ_ANEW: Duration = Duration::from_secs(5);

/// Who has anything given back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Whom {
    #[default]
    Nobody,
    /// The API server is there: those that do not reach it.
    Stranded,
    Everybody,
}

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
    whom: Whom,
    /// All that are asked.
    nodes: BTreeSet<String>,
    /// What is on its way by the ledger.
    moving: Addresses,
    /// By node, and since when it has wanted any.
    wanted: BTreeMap<String, (Instant, Addresses)>,
    /// By node: when the latest probe was sent that was answered by the promise.
    promised: BTreeMap<String, BTreeMap<IpAddr, Instant>>,
}

impl Recall {
    pub(crate) fn set(&self, whom: Whom) {
        self.state().whom = whom;
    }

    /// All that are asked, or should be.
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
            let since = state.wanted.get(node).map_or(sent, |(since, _)| *since);
            state.wanted.insert(node.to_owned(), (since, wanted));
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
        let wanters = state.wanters(now);
        if wanters.is_empty() {
            state.promised.clear();
            return Saying::default();
        }
        // The same ones for everybody, or each would be promised by some.
        let all = wanters.iter().take(MOST);
        let to_promise = all.filter(|(_, wanter)| **wanter != node).map(|(address, _)| *address).collect();
        let wanted = wanters.iter().filter(|(_, wanter)| **wanter == node).map(|(address, _)| *address);
        Saying { to_promise, given: state.given(node, wanted, (answered, total), now) }
    }

    /// No step leaves the state half changed.
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Who would have each address back. Two would have each other promise it for ever: it is for whoever asked first.
    fn wanters(&self, now: Instant) -> BTreeMap<IpAddr, &str> {
        let is_served = |since: Instant| match self.whom {
            Whom::Nobody => false,
            Whom::Stranded => now >= since + READ_ANEW,
            Whom::Everybody => true,
        };
        let mut nodes: Vec<_> = self.wanted.iter().filter(|(_, (since, _))| is_served(*since)).collect();
        nodes.sort_by_key(|(_, (since, _))| *since);
        let mut wanters = BTreeMap::new();
        for (node, (_, addresses)) in nodes {
            for address in addresses.iter().filter(|address| !self.moving.contains(address)) {
                wanters.entry(*address).or_insert(node.as_str());
            }
        }
        wanters
    }

    fn given(
        &self,
        node: &str,
        wanted: impl Iterator<Item = IpAddr>,
        (answered, total): (&Answered, Duration),
        now: Instant,
    ) -> Option<(u64, Addresses)> {
        let since = |address: &IpAddr| self.promised_since(node, address, now).filter(|since| now < *since + total);
        let all: BTreeMap<IpAddr, Instant> = wanted.filter_map(|address| Some((address, since(&address)?))).collect();
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
        recall.set(Whom::Everybody);
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
        recall.set(Whom::Nobody);
        assert_eq!(say("a", 1360), Saying::default());
    }

    #[test]
    fn a_node_that_is_asked_alone_has_its_addresses_back() {
        let (recall, now) = (Recall::default(), Instant::now());
        recall.set(Whom::Everybody);
        recall.set_nodes(["a".to_owned()].iter());
        recall.note("a", all(&[1]), all(&[]), now);
        let answered = Answered::from([(4, now)]);
        assert_eq!(recall.say("a", &answered, Duration::from_secs(1), now).given, Some((4, all(&[1]))));
    }

    /// Its road to the API server alone is cut.
    #[test]
    fn a_node_that_asks_for_long_has_its_addresses_back_while_the_leader_leads() {
        let (recall, start, total) = (Recall::default(), Instant::now(), Duration::from_secs(1));
        recall.set(Whom::Stranded);
        recall.set_nodes(["a", "b"].map(str::to_owned).iter());
        let to_promise = |now| recall.say("b", &Answered::new(), total, now).to_promise;
        recall.note("a", all(&[1]), all(&[]), start);
        let long = start + READ_ANEW;
        assert_eq!(to_promise(long - total), all(&[]), "it is reading");
        recall.note("a", all(&[1, 2]), all(&[]), long - total);
        assert_eq!(to_promise(long), all(&[1, 2]));
        recall.note("a", all(&[]), all(&[]), long);
        recall.note("a", all(&[1]), all(&[]), long);
        assert_eq!(to_promise(long), all(&[]), "it has read meanwhile");
    }

    #[test]
    fn what_two_want_is_given_to_the_one_that_asked_first() {
        let (recall, start, total) = (Recall::default(), Instant::now(), Duration::from_secs(1));
        let at = |milliseconds| start + Duration::from_millis(milliseconds);
        recall.set(Whom::Everybody);
        recall.set_nodes(["a", "b"].map(str::to_owned).iter());
        recall.note("b", all(&[1, 2]), all(&[]), at(0));
        recall.note("a", all(&[1, 3]), all(&[1, 2]), at(100));
        recall.note("b", all(&[1, 2]), all(&[3]), at(200));
        let answered = Answered::from([(1, at(50))]);
        let say = |node| recall.say(node, &answered, total, at(300));
        assert_eq!(say("a"), Saying { to_promise: all(&[1, 2]), given: Some((1, all(&[3]))) });
        assert_eq!(say("b"), Saying { to_promise: all(&[3]), given: Some((1, all(&[1, 2]))) });
    }
}
