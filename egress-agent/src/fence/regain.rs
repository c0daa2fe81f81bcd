//! Having addresses back that this node has lost by its leases, while the API server is away.
//!
//! A node that did not run, or was cut off, for longer than the total timeout gives up its addresses, and takes them up
//! again when ledger and object have been read anew (`crate::model::tenure`). While the API server is away nothing can be
//! read; and nothing needs to have happened. So the egress nodes are asked instead, by the leader's probes, or those of the
//! former leader, which goes on probing:
//!
//! ```text
//! node ----- would have A back ----------> leader        in its answers
//! leader --- promise not to take A ------> every other   in probes that are sent from then on
//! every other --- promised --------------> leader        in their answers
//! leader --- A is given back, as of k ---> node          in the next probe
//! ```
//!
//! - Whoever promises has not got the address, is not about to take it, and takes it in no way for the total timeout that
//!   the probe names and [`MARGIN`]; whoever has it, or does not know yet what its kernel has, does not promise. Nor does
//!   whoever waits to take it: what the API server has given a node goes before what another has lost.
//! - Promises end with the process. So one that has just begun takes nothing new for as long as one of its former could
//!   last, once a probe has asked it to promise anything.
//! - The leader gives an address back as of the latest of the node's answers behind whose coming in it has *sent* each
//!   other node a probe that was answered by the promise (`crate::controller::reach`, `recall`).
//! - The node holds the address by that for the total timeout from when the probe came in here that this was the answer
//!   to, and renews it in this way; it gives the address up again when that has run out.
//!
//! **Why no two nodes hold an address.** Let the node hold A by what is given back as of its probe `k`, which came in at
//! `t`: it holds A by that until `t + T`, at most. The answer to `k` came in at the leader behind `t`, the probe that
//! another node has promised by was sent behind that, and came in there, at `p`, behind that again: `t < p`. At `p` the
//! other node has not got A, and it does not take it before `p + T + MARGIN`, which is later than `t + T`. Each of the
//! times `T` runs on one clock, and none of this hangs on who leads, on what the API server says to whom, or on which
//! messages are lost: lost ones make `t` earlier, or end in nothing. What a node asks back it may never have had: then
//! whoever has it does not promise.
//!
//! Every other node is every one that the leader asks: those with the label, and for a minute those that had it. A node
//! that has got its label since, from somebody who reaches the API server, can have been given an address only by another
//! leader that none of the egress nodes here has heard (docs/adr/0012-ledger-and-leases.md).
//!
//! Where any of the others does not answer nothing is given back. Nor is anything to a node that has the address on its
//! way in the ledger: that is for the API server to say.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::watch;

/// What the other node may take to fall silent once what was given back to it has run out.
const MARGIN: Duration = Duration::from_millis(250);
/// Promised at a time: several times what one probe can ask for.
const MOST_PROMISED: usize = 1024;

pub type Addresses = BTreeSet<IpAddr>;

/// What was given back, and until when.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Given {
    pub addresses: Addresses,
    pub until: Option<Instant>,
}

/// One node's part: what it would have back, what it has promised, what was given back to it. Shared by whoever answers
/// probes and whoever brings the kernel to what is desired.
#[derive(Clone, Debug)]
pub struct Regain {
    state: Arc<Mutex<State>>,
    given: watch::Sender<Given>,
}

#[derive(Debug, Default)]
struct State {
    /// What the kernel has; `None` before it is known.
    held: Option<Addresses>,
    /// What is about to be taken.
    taking: Addresses,
    /// Until when.
    promised: BTreeMap<IpAddr, Instant>,
    /// These were to be taken, and are not for a promise's sake.
    awaited: Addresses,
    /// When the process began, where that is known, and until when it is bound by what its former may have promised.
    began: Option<Instant>,
    bound: Option<Instant>,
    wanted: Addresses,
}

impl Default for Regain {
    fn default() -> Self {
        Self { state: Arc::default(), given: watch::Sender::new(Given::default()) }
    }
}

impl Regain {
    /// Of a process that has begun then: another may have run here just before.
    pub fn beginning(now: Instant) -> Self {
        let regain = Self::default();
        regain.state().began = Some(now);
        regain
    }

    /// Promises not to take these, as far as they are not here. `at` is when the probe came in that asks for it, `total` the
    /// total timeout that it names.
    pub fn promise(&self, addresses: &Addresses, total: Duration, at: Instant) -> Addresses {
        let mut state = self.state();
        if !addresses.is_empty() {
            state.bound = state.bound.max(state.began.map(|began| began + total + MARGIN));
        }
        let State { held: Some(held), taking, promised, awaited, .. } = &mut *state else { return Addresses::new() };
        promised.retain(|_, until| at < *until);
        let until = at + total + MARGIN;
        let mut said = Addresses::new();
        let is_free = |one: &&IpAddr| ![&*held, &*taking, &*awaited].iter().any(|all| all.contains(*one));
        for address in addresses.iter().filter(is_free) {
            if promised.len() == MOST_PROMISED && !promised.contains_key(address) {
                continue;
            }
            let end = promised.entry(*address).or_insert(until);
            *end = until.max(*end);
            said.insert(*address);
        }
        said
    }

    /// These are about to be taken. Those that must not be, because that was promised, are returned, and are not.
    pub fn take(&self, addresses: impl Iterator<Item = IpAddr>, now: Instant) -> Addresses {
        let mut state = self.state();
        state.promised.retain(|_, until| now < *until);
        let is_bound = state.bound.is_some_and(|bound| now < bound);
        let (promised, free): (Addresses, Addresses) =
            addresses.partition(|address| is_bound || state.promised.contains_key(address));
        state.taking.extend(free);
        state.awaited.clone_from(&promised);
        promised
    }

    /// What the kernel has now, and nothing is under way.
    pub fn settle(&self, held: Addresses) {
        let mut state = self.state();
        state.taking.clear();
        state.held = Some(held);
    }

    pub fn want(&self, wanted: Addresses) {
        self.state().wanted = wanted;
    }

    pub fn wanted(&self) -> Addresses {
        self.state().wanted.clone()
    }

    /// `as_of` is when the probe came in as of which it is given, `total` the total timeout of the leader: its promises are
    /// for that long.
    pub fn give(&self, addresses: Addresses, as_of: Instant, total: Duration) {
        let until = as_of + total;
        self.given.send_if_modified(|given| {
            let is_news = given.until.is_none_or(|known| until > known);
            if is_news {
                *given = Given { addresses, until: Some(until) };
            }
            is_news
        });
    }

    pub fn given(&self) -> watch::Receiver<Given> {
        self.given.subscribe()
    }

    /// No step leaves the state half changed.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(last: &[u8]) -> Addresses {
        last.iter().map(|last| IpAddr::from([10, 0, 0, *last])).collect()
    }

    #[test]
    fn what_is_here_or_about_to_be_is_not_promised_and_what_is_promised_is_not_taken() {
        let (regain, total, now) = (Regain::default(), Duration::from_secs(1), Instant::now());
        assert_eq!(regain.promise(&all(&[1]), total, now), all(&[]), "it does not know what it has");
        regain.settle(all(&[1]));
        assert_eq!(regain.take(all(&[2]).into_iter(), now), all(&[]));
        assert_eq!(regain.promise(&all(&[1, 2, 3]), total, now), all(&[3]));
        assert_eq!(regain.take(all(&[2, 3, 4]).into_iter(), now), all(&[3]));
        regain.settle(all(&[2]));
        assert_eq!(regain.promise(&all(&[1, 2, 4]), total / 2, now), all(&[1, 4]), "what it had it may promise");
        assert_eq!(regain.promise(&all(&[3]), total * 2, now), all(&[]), "what waits is not promised for longer");
        let end = now + total + MARGIN;
        assert_eq!(regain.take(all(&[1, 3, 4]).into_iter(), end - MARGIN / 2), all(&[3]), "it does not end sooner");
        assert_eq!(regain.take(all(&[3]).into_iter(), end), all(&[]), "promises end");
    }

    #[test]
    fn a_promise_outlives_the_process_where_anybody_asks_for_promises() {
        let (total, now) = (Duration::from_secs(1), Instant::now());
        let regain = Regain::beginning(now);
        regain.settle(all(&[]));
        assert_eq!(regain.take(all(&[1]).into_iter(), now), all(&[]), "nobody asks");
        regain.promise(&all(&[9]), total, now + total / 2);
        let end = now + total + MARGIN;
        assert_eq!(regain.take(all(&[2, 3]).into_iter(), end - MARGIN / 2), all(&[2, 3]));
        assert_eq!(regain.take(all(&[2, 3]).into_iter(), end), all(&[]));
    }

    #[test]
    fn promises_are_as_many_as_fit_and_make_room_when_they_end() {
        let (regain, total, now) = (Regain::default(), Duration::from_secs(1), Instant::now());
        regain.settle(all(&[]));
        let random = |i: u128| Addresses::from([IpAddr::from(i.to_be_bytes())]);
        for i in 0..MOST_PROMISED as u128 {
            assert_eq!(regain.promise(&random(i), total, now), random(i));
        }
        assert_eq!(regain.promise(&all(&[1]), total, now), all(&[]), "there is no room");
        assert_eq!(regain.promise(&random(7), total, now), random(7), "what is promised already is again");
        let end = now + total + MARGIN;
        // Whoever asks for less ends nothing of it.
        assert_eq!(regain.promise(&random(8), total / 4, now), random(8));
        let still = end - MARGIN / 2;
        assert_eq!(regain.take(random(8).into_iter(), still), random(8));
        assert_eq!(regain.promise(&all(&[1]), total, end), all(&[1]));
        assert_eq!(regain.state().promised.len(), 1, "what has ended is forgotten");
    }

    #[test]
    fn what_is_given_never_goes_back() {
        let (regain, now) = (Regain::default(), Instant::now());
        let total = Duration::from_secs(1);
        regain.give(all(&[1]), now, total);
        regain.give(all(&[2]), now, total / 2);
        assert_eq!(*regain.given().borrow(), Given { addresses: all(&[1]), until: Some(now + total) });
    }
}
