//! Flow cuts that run in the background of the reconciler.
//!
//! A cut walks whole maps, and most changes of a pod need one. A reconcile that waits for it delays the events of all other pods.
//! So the reconcile performs the first part of a change ([`Disconnected`]) and queues the cuts, with the actions after them, here.
//!
//! - **Each address keeps the plan's order.** The address of a deleted pod does not change until the cut and the actions after
//!   it are done. A policy that stops selecting a pod selects it again only after the cut, which would end its new flows; a
//!   cut that has not begun is cancelled then. Other policies and addresses are unaffected.
//! - **A full plan waits** for everything queued here.
//! - **One walk** serves all queued cuts, and walks use at most a quarter of a CPU. The first begins at once.
//! - A failed cut is an error of the reconcile that takes its outcome: it reads the kernel's state again and cuts what is due.

use std::collections::BTreeSet;
use std::net::IpAddr;

use futures::future::BoxFuture;
use tokio::time::Instant;

use crate::node::reconciler::Reconciler;
use crate::node::reconciler::action_log::log;
use egress_core::model::state::{Action, EgressId, KernelState, LostFlows, PodPolicies};
use egress_core::model::view::Addresses;
use egress_core::plan::Disconnected;
use egress_core::plan::executor::{DataplaneError, Executor};

/// The pause after a walk, as a multiple of its duration.
const REST: u32 = 3;

/// Cuts that one walk serves.
#[derive(Debug, Default)]
struct FlushBatch {
    cuts: Vec<Action>,
    /// Actions to perform after the cuts.
    after_cuts: Vec<Action>,
    /// Addresses that must not change until the cuts are done.
    whole: BTreeSet<IpAddr>,
    /// Pods' addresses, each with a policy that has stopped selecting it.
    left: BTreeSet<(IpAddr, EgressId)>,
}

impl FlushBatch {
    fn add(&mut self, disconnected: Disconnected) {
        let Disconnected { cuts, after_cuts, at_once: _ } = disconnected;
        for (address, cut) in cuts {
            match &cut {
                Action::CutPodFlows(_, lost) => self.left.extend(lost.of.iter().map(|id| (address, *id))),
                _ => drop(self.whole.insert(address)),
            }
            self.cuts.push(cut);
        }
        for (address, action) in after_cuts {
            self.whole.insert(address);
            self.after_cuts.push(action);
        }
    }

    fn keeps(&self, address: IpAddr, wanted: &BTreeSet<EgressId>) -> bool {
        self.whole.contains(&address) || wanted.iter().any(|id| self.left.contains(&(address, *id)))
    }

    /// Cancels a cut of all flows of this policy and no others.
    fn spare(&mut self, address: IpAddr, id: EgressId) {
        let due = Action::CutPodFlows(address, LostFlows::of_policy(id));
        self.cuts.retain(|cut| *cut != due);
        let ends =
            |cut: &Action| matches!(cut, Action::CutPodFlows(of, lost) if *of == address && lost.of.contains(&id));
        if !self.cuts.iter().any(ends) {
            self.left.remove(&(address, id));
        }
    }
}

struct FlushWalk {
    of: FlushBatch,
    started: Instant,
    /// Taken when the walk is over.
    ends: BoxFuture<'static, Result<(), DataplaneError>>,
    outcome: Option<Result<(), DataplaneError>>,
}

#[derive(Default)]
pub(super) struct BackgroundFlush {
    walk: Option<FlushWalk>,
    waiting: FlushBatch,
    rest_until: Option<Instant>,
    /// Pods' addresses that have changed while one of their cuts was queued or running.
    put_off: BTreeSet<IpAddr>,
}

impl BackgroundFlush {
    /// Removes the addresses that must wait, and adds those that have waited long enough.
    pub(super) fn admit(&mut self, addresses: &mut Addresses, desired: &KernelState) {
        let come = std::mem::take(&mut addresses.pods);
        for address in come.into_iter().chain(std::mem::take(&mut self.put_off)) {
            let wanted = desired.policies_of(address);
            let ids = wanted.ids();
            let is_walked = self.walk.as_ref().is_some_and(|walk| walk.of.keeps(address, &ids));
            if let PodPolicies::One(id) = wanted
                && !is_walked
            {
                self.waiting.spare(address, id);
            }
            if is_walked || self.waiting.keeps(address, &ids) {
                self.put_off.insert(address);
            } else {
                addresses.pods.insert(address);
            }
        }
    }

    /// Whether a change waits here.
    pub(super) fn puts_off(&self) -> bool {
        !self.put_off.is_empty()
    }

    #[cfg(test)]
    pub(super) fn is_idle(&self) -> bool {
        self.walk.is_none() && self.waiting.cuts.is_empty()
    }

    /// Queues cuts, and the actions after them.
    pub(super) fn queue(&mut self, disconnected: Disconnected) {
        self.waiting.add(disconnected);
    }

    /// Waits until a walk has ended or may begin; forever if nothing is queued. Cancel-safe.
    pub(super) async fn next(&mut self) {
        match &mut self.walk {
            Some(FlushWalk { outcome: Some(_), .. }) => {}
            Some(walk) => {
                walk.outcome = Some((&mut walk.ends).await);
                let now = Instant::now();
                self.rest_until = Some(now + (now - walk.started) * REST);
            }
            None if self.waiting.cuts.is_empty() => std::future::pending().await,
            None => {
                if let Some(until) = self.rest_until {
                    tokio::time::sleep_until(until).await;
                }
            }
        }
    }

    /// The finished walk.
    fn take_over(&mut self) -> Option<(FlushBatch, Result<(), DataplaneError>)> {
        let over = self.walk.take_if(|walk| walk.outcome.is_some())?;
        over.outcome.map(|outcome| (over.of, outcome))
    }

    fn is_resting(&self) -> bool {
        self.rest_until.is_some_and(|until| Instant::now() < until)
    }

    /// Waits for a running walk, and discards the queue: the next observation of the kernel finds what is due.
    pub(super) async fn forget(&mut self) {
        if self.walk.is_some() {
            self.next().await;
        }
        *self = Self::default();
    }
}

impl<E: Executor> Reconciler<E> {
    /// Begins a walk if cuts are queued and the pause has ended.
    pub(super) fn begin_cuts(&mut self) {
        if !self.background.is_resting() {
            self.walk();
        }
    }

    fn walk(&mut self) {
        if self.background.walk.is_some() || self.background.waiting.cuts.is_empty() {
            return;
        }
        let of = std::mem::take(&mut self.background.waiting);
        let ends = self.executor.cut(of.cuts.clone());
        self.background.walk = Some(FlushWalk { of, started: Instant::now(), ends, outcome: None });
    }

    /// Performs the actions after a finished walk.
    pub(super) async fn end_cuts(&mut self, actual: &mut KernelState) -> Result<(), DataplaneError> {
        let Some((done, outcome)) = self.background.take_over() else { return Ok(()) };
        outcome?;
        done.cuts.iter().for_each(log);
        self.perform(actual, &done.after_cuts).await.map(drop)
    }

    /// Finishes everything queued, before a full plan.
    pub(super) async fn finish_cuts(&mut self, actual: &mut KernelState) -> Result<(), DataplaneError> {
        loop {
            self.end_cuts(actual).await?;
            self.walk();
            if self.background.walk.is_none() {
                break;
            }
            self.background.next().await;
            self.heartbeat.note();
        }
        self.background.put_off.clear();
        Ok(())
    }
}
