//! Claims that fail, and when their owners are to know. Pure.
//!
//! A short failure is a hand-over. One that lasts is told, once; that another node does not let go sooner, since the address
//! is taken over from there and the owner is to know why. A claim that succeeds late, between two tries, is told too: nobody
//! would know otherwise that a node still answers for what is another's.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Duration;

use tokio::time::Instant;

use egress_core::model::node::{Unserved, UnservedAddresses};
use egress_core::model::state::{EgressId, KernelState};
use egress_core::plan::executor::DataplaneError;

type Claim = (EgressId, IpAddr);

/// A claim that fails for this long is told.
const TELL_AFTER: Duration = Duration::from_secs(5);
/// A claim that fails for this long is no hand-over: the address counts as not served.
const UNSERVED_AFTER: Duration = Duration::from_millis(500);
/// Likewise where another node does not let go: said before the address is taken over.
const TELL_OF_NODE_AFTER: Duration = Duration::from_secs(2);

#[derive(Debug, Default)]
pub(super) struct Failing {
    claims: BTreeMap<Claim, Failure>,
    /// Addresses that are held, and that somebody else was heard answering for.
    contested: BTreeSet<IpAddr>,
}

#[derive(Debug)]
struct Failure {
    since: Instant,
    why: Unserved,
    /// `None` when it has been told.
    untold: Option<Untold>,
}

#[derive(Debug)]
struct Untold {
    due: Instant,
    message: String,
}

impl Failure {
    /// What is to be told now, if anything is.
    fn take_due(&mut self, now: Instant) -> Option<String> {
        self.untold.take_if(|untold| now >= untold.due).map(|untold| untold.message)
    }
}

impl Failing {
    /// It fails now: whether it has only begun to, and what is to be told of it.
    pub(super) fn note(&mut self, claim: Claim, error: &DataplaneError, now: Instant) -> (bool, Option<String>) {
        let is_new = !self.claims.contains_key(&claim);
        let message = || format!("cannot claim egress IP {}: {error}", claim.1);
        let untold = |since| Untold { due: since + patience(error), message: message() };
        let why = Unserved::from(error);
        let begun = || Failure { since: now, why: why.clone(), untold: Some(untold(now)) };
        let failure = self.claims.entry(claim).or_insert_with(begun);
        failure.why = why.clone();
        if failure.untold.is_some() {
            failure.untold = Some(untold(failure.since));
        }
        (is_new, failure.take_due(now))
    }

    /// Somebody else answers for an address that is held: whether that is news.
    pub(super) fn hear(&mut self, address: IpAddr) -> bool {
        self.contested.insert(address)
    }

    /// Forgets those that are not refused any more. What is to be told of those among them that the kernel holds by now.
    pub(super) fn settle(
        &mut self,
        refused: &BTreeMap<EgressId, IpAddr>,
        held: &KernelState,
        now: Instant,
    ) -> Vec<(EgressId, String)> {
        self.contested.retain(|address| held.owned.values().any(|other| other == address));
        let is_refused = |(id, address): &Claim| refused.get(id) == Some(address);
        let ended = self.claims.extract_if(.., |claim, _| !is_refused(claim));
        let claimed = ended.filter(|((id, address), _)| held.owned.get(id) == Some(address));
        claimed.filter_map(|((id, _), mut failure)| Some((id, failure.take_due(now)?))).collect()
    }

    /// What fails now, and since when.
    pub(super) fn lines(&self) -> impl Iterator<Item = String> {
        let contested = self.contested.iter().map(|address| {
            format!("somebody else answers for {address}, which this node holds; see the events of its object")
        });
        let claims = self.claims.iter().map(|((_, address), failure)| {
            format!(
                "{address} cannot be claimed, for {} s by now; see the events of its object",
                failure.since.elapsed().as_secs()
            )
        });
        claims.chain(contested)
    }

    /// What has failed for longer than a hand-over takes.
    pub(super) fn unserved(&self, now: Instant) -> UnservedAddresses {
        let lasting = self.claims.iter().filter(|(_, failure)| now >= failure.since + UNSERVED_AFTER);
        lasting.map(|((_, address), failure)| (*address, failure.why.clone())).collect()
    }

    /// When the next is to be told, or counts as not served, if it fails until then.
    pub(super) fn due(&self, now: Instant) -> Option<Instant> {
        let untold = self.claims.values().filter_map(|failure| failure.untold.as_ref()).map(|untold| untold.due);
        let unserved = self.claims.values().map(|failure| failure.since + UNSERVED_AFTER);
        untold.chain(unserved).filter(|due| *due > now).min()
    }
}

fn patience(error: &DataplaneError) -> Duration {
    match error {
        // It will not change by waiting.
        DataplaneError::Reserved { .. } => Duration::ZERO,
        DataplaneError::HeldByNode { .. } => TELL_OF_NODE_AFTER,
        DataplaneError::Kernel { .. }
        | DataplaneError::Full { .. }
        | DataplaneError::Refused { .. }
        | DataplaneError::AddressInUse { .. } => TELL_AFTER,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: EgressId = EgressId(3);

    fn claim() -> Claim {
        (ID, [172, 18, 0, 100].into())
    }

    fn by_node() -> DataplaneError {
        DataplaneError::HeldByNode { address: claim().1, node: [172, 18, 0, 3].into(), mac: "m".into() }
    }

    fn by_stranger() -> DataplaneError {
        DataplaneError::AddressInUse { address: claim().1, mac: "m".into() }
    }

    fn message(error: &DataplaneError) -> String {
        format!("cannot claim egress IP 172.18.0.100: {error}")
    }

    fn refused() -> BTreeMap<EgressId, IpAddr> {
        BTreeMap::from([claim()])
    }

    fn held() -> KernelState {
        KernelState { owned: BTreeMap::from([claim()]), ..KernelState::default() }
    }

    #[test]
    fn what_lasts_is_told_once_and_when_it_is_due() {
        let start = Instant::now();
        let at = |millis| start + Duration::from_millis(millis);
        for (error, due) in [(by_node(), 2000), (by_stranger(), 5000)] {
            let mut failing = Failing::default();
            assert_eq!(failing.note(claim(), &error, at(0)), (true, None));
            assert_eq!((failing.due(at(0)), failing.due(at(500))), (Some(at(500)), Some(at(due))));
            assert_eq!((failing.unserved(at(499)).len(), failing.unserved(at(500)).len()), (0, 1));
            assert_eq!(failing.note(claim(), &error, at(due - 1)), (false, None));
            assert_eq!(failing.note(claim(), &error, at(due)), (false, Some(message(&error))));
            assert_eq!((failing.due(at(due)), failing.note(claim(), &error, at(due + 1))), (None, (false, None)));
            assert!(failing.settle(&refused(), &KernelState::default(), at(due + 2)).is_empty());
            assert!(failing.settle(&BTreeMap::new(), &held(), at(due + 3)).is_empty(), "it has been told");
            assert_eq!(failing.note(claim(), &error, at(due + 4)), (true, None), "and begins anew");
        }
    }

    #[test]
    fn what_succeeds_between_two_tries_is_told_where_it_was_due() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        for (after, told) in [(1, false), (2, true), (9, true)] {
            let mut failing = Failing::default();
            failing.note(claim(), &by_node(), at(0));
            let expected = if told { vec![(ID, message(&by_node()))] } else { Vec::new() };
            assert_eq!(failing.settle(&BTreeMap::new(), &held(), at(after)), expected, "after {after} s");
        }
        let mut failing = Failing::default();
        failing.note(claim(), &by_node(), at(0));
        let nobody_wants_it = failing.settle(&BTreeMap::new(), &KernelState::default(), at(9));
        assert!(nobody_wants_it.is_empty());
    }

    #[test]
    fn who_answers_for_what_is_held_is_news_once_for_each_time_that_it_is_held() {
        let (mut failing, now) = (Failing::default(), Instant::now());
        assert!(failing.hear(claim().1));
        failing.settle(&BTreeMap::new(), &held(), now);
        assert!(!failing.hear(claim().1));
        failing.settle(&BTreeMap::new(), &KernelState::default(), now);
        assert!(failing.hear(claim().1));
    }

    #[test]
    fn a_stranger_that_turns_out_to_be_a_node_is_told_as_a_node() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut failing = Failing::default();
        failing.note(claim(), &by_stranger(), at(0));
        assert_eq!(failing.note(claim(), &by_node(), at(3)), (false, Some(message(&by_node()))));
    }
}
