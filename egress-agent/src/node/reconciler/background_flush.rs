//! Cuts that go on beside the turns.
//!
//! A cut walks whole maps, and most changes of a pod ask for one. Were a turn to wait for it, so would the next events of all
//! other pods. So of what changes of pods ask for ([`Disconnected`]) the turn does the first part; the cuts, and what must find them
//! done, are left here.
//!
//! - **For each address the order is the plan's.** Where a pod is gone, its address changes no further before the cut is over
//!   and what waited for it is done. Where an object selects a pod no more, that object selects it again only behind the cut,
//!   which would take what is begun now; a cut that has not begun is spared then, since its flows are right again. Other
//!   objects have no part in it, and other addresses none in either.
//! - **A plan of the whole waits** for all that is here.
//! - **One walk** serves all the cuts that wait for it, and walks take a quarter of a CPU at most. The first begins at once.
//! - A cut that fails is an error of the turn that hears of it: the kernel is observed anew, and what is due is cut then.

use std::collections::BTreeSet;
use std::net::IpAddr;

use futures::future::BoxFuture;
use tokio::time::Instant;

use crate::node::reconciler::Reconciler;
use crate::node::reconciler::action_log::log;
use egress_core::model::state::{Action, EgressId, KernelState, PodState};
use egress_core::model::view::Addresses;
use egress_core::plan::Disconnected;
use egress_core::plan::executor::{DataplaneError, Executor};

/// How much longer than a walk the pause behind it is.
const REST: u32 = 3;

/// Cuts that one walk serves.
#[derive(Debug, Default)]
struct Batch {
    cuts: Vec<Action>,
    /// What must find them done.
    behind: Vec<Action>,
    /// Addresses that change no further.
    whole: BTreeSet<IpAddr>,
    /// Pods' addresses, and the objects that do not select them.
    left: BTreeSet<(IpAddr, EgressId)>,
}

impl Batch {
    fn enter(&mut self, parted: Disconnected) {
        let Disconnected { cuts, after_cuts: behind, at_once: _ } = parted;
        for (address, cut) in cuts {
            match &cut {
                Action::CutPodFlows(_, id) => drop(self.left.insert((address, *id))),
                _ => drop(self.whole.insert(address)),
            }
            self.cuts.push(cut);
        }
        for (address, action) in behind {
            self.whole.insert(address);
            self.behind.push(action);
        }
    }

    fn keeps(&self, address: IpAddr, wanted: Option<EgressId>) -> bool {
        self.whole.contains(&address) || wanted.is_some_and(|id| self.left.contains(&(address, id)))
    }

    fn spare(&mut self, address: IpAddr, id: EgressId) {
        if self.left.remove(&(address, id)) {
            self.cuts.retain(|cut| *cut != Action::CutPodFlows(address, id));
        }
    }
}

struct Walk {
    of: Batch,
    begun: Instant,
    /// Taken when it is over.
    ends: BoxFuture<'static, Result<(), DataplaneError>>,
    outcome: Option<Result<(), DataplaneError>>,
}

#[derive(Default)]
pub(super) struct Behind {
    walk: Option<Walk>,
    waiting: Batch,
    rest_until: Option<Instant>,
    /// Pods' addresses that have changed while a cut of theirs was here.
    put_off: BTreeSet<IpAddr>,
}

impl Behind {
    /// Takes the addresses that must wait out, and puts those in that have waited long enough.
    pub(super) fn admit(&mut self, addresses: &mut Addresses, desired: &KernelState) {
        let come = std::mem::take(&mut addresses.pods);
        for address in come.into_iter().chain(std::mem::take(&mut self.put_off)) {
            let wanted = match desired.pods.get(&address) {
                Some(PodState::Selected(id)) => Some(*id),
                Some(PodState::Known) | None => None,
            };
            let is_walked = self.walk.as_ref().is_some_and(|walk| walk.of.keeps(address, wanted));
            if is_walked || self.waiting.whole.contains(&address) {
                self.put_off.insert(address);
                continue;
            }
            if let Some(id) = wanted {
                self.waiting.spare(address, id);
            }
            addresses.pods.insert(address);
        }
    }

    /// Whether a change that has come waits here.
    pub(super) fn puts_off(&self) -> bool {
        !self.put_off.is_empty()
    }

    #[cfg(test)]
    pub(super) fn is_idle(&self) -> bool {
        self.walk.is_none() && self.waiting.cuts.is_empty()
    }

    /// Leaves cuts here, and what must find them done.
    pub(super) fn leave(&mut self, parted: Disconnected) {
        self.waiting.enter(parted);
    }

    /// Waits until a walk is over, or one may begin; for ever where nothing is here. May be dropped and asked again.
    pub(super) async fn next(&mut self) {
        match &mut self.walk {
            Some(Walk { outcome: Some(_), .. }) => {}
            Some(walk) => {
                walk.outcome = Some((&mut walk.ends).await);
                let now = Instant::now();
                self.rest_until = Some(now + (now - walk.begun) * REST);
            }
            None if self.waiting.cuts.is_empty() => std::future::pending().await,
            None => {
                if let Some(until) = self.rest_until {
                    tokio::time::sleep_until(until).await;
                }
            }
        }
    }

    /// The walk that is over.
    fn take_over(&mut self) -> Option<(Batch, Result<(), DataplaneError>)> {
        let over = self.walk.take_if(|walk| walk.outcome.is_some())?;
        over.outcome.map(|outcome| (over.of, outcome))
    }

    fn is_resting(&self) -> bool {
        self.rest_until.is_some_and(|until| Instant::now() < until)
    }

    /// Waits for a walk that is under way, and forgets everything: whoever observes the kernel finds what is due.
    pub(super) async fn forget(&mut self) {
        if self.walk.is_some() {
            self.next().await;
        }
        *self = Self::default();
    }
}

impl<E: Executor> Reconciler<E> {
    /// Begins a walk where cuts wait for one and may have it.
    pub(super) fn begin_cuts(&mut self) {
        if !self.behind.is_resting() {
            self.walk();
        }
    }

    fn walk(&mut self) {
        if self.behind.walk.is_some() || self.behind.waiting.cuts.is_empty() {
            return;
        }
        let of = std::mem::take(&mut self.behind.waiting);
        let ends = self.executor.cut(of.cuts.clone());
        self.behind.walk = Some(Walk { of, begun: Instant::now(), ends, outcome: None });
    }

    /// Does what waited for a walk that is over.
    pub(super) async fn end_cuts(&mut self, actual: &mut KernelState) -> Result<(), DataplaneError> {
        let Some((done, outcome)) = self.behind.take_over() else { return Ok(()) };
        outcome?;
        done.cuts.iter().for_each(log);
        self.perform(actual, &done.behind).await.map(drop)
    }

    /// Has everything done that is here, for a plan of the whole.
    pub(super) async fn finish_cuts(&mut self, actual: &mut KernelState) -> Result<(), DataplaneError> {
        loop {
            self.end_cuts(actual).await?;
            self.walk();
            if self.behind.walk.is_none() {
                break;
            }
            self.behind.next().await;
            self.beat.note();
        }
        self.behind.put_off.clear();
        Ok(())
    }
}
