//! Failed claims, and when to send an event about them. Pure.
//!
//! A short failure is part of a hand-over. A lasting one is reported once; sooner if another node keeps answering, since this
//! node then takes the address over. A claim that succeeds between two attempts is reported too if its event was due, since
//! a node still answers for an address that it no longer owns.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Duration;

use tokio::time::Instant;

use egress_core::model::node::{Unserved, UnservedAddresses};
use egress_core::model::state::{AddressByPolicy, EgressId, KernelState};
use egress_core::plan::executor::DataplaneError;

type ClaimKey = (EgressId, IpAddr);

/// A claim that fails for this long is reported.
const REPORT_AFTER: Duration = Duration::from_secs(5);
/// A claim that fails for this long is not part of a hand-over: the address counts as not served.
const UNSERVED_AFTER: Duration = Duration::from_millis(500);
/// The same if another node keeps answering; it is reported before the address is taken over.
const REPORT_NODE_AFTER: Duration = Duration::from_secs(2);

#[derive(Debug, Default)]
pub(super) struct FailedClaims {
    claims: BTreeMap<ClaimKey, ClaimFailure>,
    /// Held addresses that another host answers for.
    contested: BTreeSet<IpAddr>,
}

#[derive(Debug)]
struct ClaimFailure {
    since: Instant,
    why: Unserved,
    /// `None` once it is reported.
    unreported: Option<Unreported>,
}

#[derive(Debug)]
struct Unreported {
    due: Instant,
    message: String,
}

impl ClaimFailure {
    /// The message, if it is due.
    fn take_due(&mut self, now: Instant) -> Option<String> {
        self.unreported.take_if(|unreported| now >= unreported.due).map(|unreported| unreported.message)
    }
}

impl FailedClaims {
    /// Notes a failure. Returns whether it is new, and the message if it is due.
    pub(super) fn note(&mut self, claim: ClaimKey, error: &DataplaneError, now: Instant) -> (bool, Option<String>) {
        let is_new = !self.claims.contains_key(&claim);
        let message = || format!("cannot claim egress IP {}: {error}", claim.1);
        let unreported = |since| Unreported { due: since + report_after(error), message: message() };
        let why = Unserved::from(error);
        let new = || ClaimFailure { since: now, why: why.clone(), unreported: Some(unreported(now)) };
        let failure = self.claims.entry(claim).or_insert_with(new);
        failure.why = why.clone();
        if failure.unreported.is_some() {
            failure.unreported = Some(unreported(failure.since));
        }
        (is_new, failure.take_due(now))
    }

    /// Notes that another host answers for a held address. Returns whether that is new.
    pub(super) fn note_contested(&mut self, address: IpAddr) -> bool {
        self.contested.insert(address)
    }

    /// Forgets claims that no longer fail. Returns the due messages of those that have succeeded.
    pub(super) fn settle(
        &mut self,
        refused: &AddressByPolicy,
        held: &KernelState,
        now: Instant,
    ) -> Vec<(EgressId, String)> {
        self.contested.retain(|address| held.owned.values().any(|other| other == address));
        let is_refused = |(id, address): &ClaimKey| refused.get(id) == Some(address);
        let ended = self.claims.extract_if(.., |claim, _| !is_refused(claim));
        let claimed = ended.filter(|((id, address), _)| held.owned.get(id) == Some(address));
        claimed.filter_map(|((id, _), mut failure)| Some((id, failure.take_due(now)?))).collect()
    }

    /// One line for each failing claim and each contested address.
    pub(super) fn lines(&self) -> impl Iterator<Item = String> {
        let contested = self.contested.iter().map(|address| {
            format!("another host answers for {address}, which this node holds; see the events of its object")
        });
        let claims = self.claims.iter().map(|((_, address), failure)| {
            format!(
                "{address} has not been claimed for {} s; see the events of its object",
                failure.since.elapsed().as_secs()
            )
        });
        claims.chain(contested)
    }

    /// Addresses whose claims have failed for longer than a hand-over takes.
    pub(super) fn unserved(&self, now: Instant) -> UnservedAddresses {
        let lasting = self.claims.iter().filter(|(_, failure)| now >= failure.since + UNSERVED_AFTER);
        lasting.map(|((_, address), failure)| (*address, failure.why.clone())).collect()
    }

    /// When the next claim is reported or counts as not served, if it keeps failing.
    pub(super) fn due(&self, now: Instant) -> Option<Instant> {
        let unreported =
            self.claims.values().filter_map(|failure| failure.unreported.as_ref()).map(|unreported| unreported.due);
        let unserved = self.claims.values().map(|failure| failure.since + UNSERVED_AFTER);
        unreported.chain(unserved).filter(|due| *due > now).min()
    }
}

fn report_after(error: &DataplaneError) -> Duration {
    match error {
        // Waiting does not help.
        DataplaneError::Reserved { .. } | DataplaneError::NoNetwork { .. } => Duration::ZERO,
        DataplaneError::HeldByNode { .. } => REPORT_NODE_AFTER,
        DataplaneError::Kernel { .. }
        | DataplaneError::Full { .. }
        | DataplaneError::Refused { .. }
        | DataplaneError::AddressInUse { .. } => REPORT_AFTER,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: EgressId = EgressId(3);

    fn claim() -> ClaimKey {
        (ID, [172, 18, 0, 100].into())
    }

    fn by_node() -> DataplaneError {
        DataplaneError::HeldByNode { address: claim().1, node: [172, 18, 0, 3].into(), mac: "m".into() }
    }

    fn by_other_host() -> DataplaneError {
        DataplaneError::AddressInUse { address: claim().1, mac: "m".into() }
    }

    fn message(error: &DataplaneError) -> String {
        format!("cannot claim egress IP 172.18.0.100: {error}")
    }

    fn refused() -> AddressByPolicy {
        BTreeMap::from([claim()])
    }

    fn held() -> KernelState {
        KernelState { owned: BTreeMap::from([claim()]), ..KernelState::default() }
    }

    #[test]
    fn a_lasting_failure_is_reported_once_when_it_is_due() {
        let start = Instant::now();
        let at = |millis| start + Duration::from_millis(millis);
        for (error, due) in [(by_node(), 2000), (by_other_host(), 5000)] {
            let mut failed_claims = FailedClaims::default();
            assert_eq!(failed_claims.note(claim(), &error, at(0)), (true, None));
            assert_eq!((failed_claims.due(at(0)), failed_claims.due(at(500))), (Some(at(500)), Some(at(due))));
            assert_eq!((failed_claims.unserved(at(499)).len(), failed_claims.unserved(at(500)).len()), (0, 1));
            assert_eq!(failed_claims.note(claim(), &error, at(due - 1)), (false, None));
            assert_eq!(failed_claims.note(claim(), &error, at(due)), (false, Some(message(&error))));
            assert_eq!(
                (failed_claims.due(at(due)), failed_claims.note(claim(), &error, at(due + 1))),
                (None, (false, None))
            );
            assert!(failed_claims.settle(&refused(), &KernelState::default(), at(due + 2)).is_empty());
            assert!(failed_claims.settle(&BTreeMap::new(), &held(), at(due + 3)).is_empty(), "already reported");
            assert_eq!(failed_claims.note(claim(), &error, at(due + 4)), (true, None), "a new failure");
        }
    }

    #[test]
    fn a_success_between_two_attempts_is_reported_if_it_was_due() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        for (after, reported) in [(1, false), (2, true), (9, true)] {
            let mut failed_claims = FailedClaims::default();
            failed_claims.note(claim(), &by_node(), at(0));
            let expected = if reported { vec![(ID, message(&by_node()))] } else { Vec::new() };
            assert_eq!(failed_claims.settle(&BTreeMap::new(), &held(), at(after)), expected, "after {after} s");
        }
        let mut failed_claims = FailedClaims::default();
        failed_claims.note(claim(), &by_node(), at(0));
        let not_desired = failed_claims.settle(&BTreeMap::new(), &KernelState::default(), at(9));
        assert!(not_desired.is_empty());
    }

    #[test]
    fn a_contested_address_is_new_once_for_each_time_that_it_is_held() {
        let (mut failed_claims, now) = (FailedClaims::default(), Instant::now());
        assert!(failed_claims.note_contested(claim().1));
        failed_claims.settle(&BTreeMap::new(), &held(), now);
        assert!(!failed_claims.note_contested(claim().1));
        failed_claims.settle(&BTreeMap::new(), &KernelState::default(), now);
        assert!(failed_claims.note_contested(claim().1));
    }

    #[test]
    fn a_host_that_turns_out_to_be_a_node_is_reported_as_a_node() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut failed_claims = FailedClaims::default();
        failed_claims.note(claim(), &by_other_host(), at(0));
        assert_eq!(failed_claims.note(claim(), &by_node(), at(3)), (false, Some(message(&by_node()))));
    }
}
