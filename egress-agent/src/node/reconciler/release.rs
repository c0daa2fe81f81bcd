//! Release of addresses that this node may not hold: its lease has expired, or another node gets them.

use crate::node::reconciler::action_log::log;
use crate::node::reconciler::{Reconciler, withhold};
use egress_core::model::state::{Action, KernelState};
use egress_core::ownership::kernel_handovers::handovers;
use egress_core::plan::executor::{DataplaneError, Executor};
use egress_core::plan::plan;

impl<E: Executor> Reconciler<E> {
    /// Releases these addresses before the full state is read, which may wait for a walk of the maps. Policies that still point
    /// to them drop their packets.
    pub(super) async fn release(&mut self) -> Result<(), DataplaneError> {
        if !self.coordination.is_or_was_lease_expired() {
            return Ok(());
        }
        let expiry = self.coordination.expiry();
        let held = self.executor.held().await?;
        let owned = self.coordination.barred(&held.owned).into_iter().map(|(id, address)| Action::Disown(id, address));
        for action in owned.chain(self.overtaken(&held)).collect::<Vec<_>>() {
            self.act(&action).await?;
            log(&action);
        }
        self.coordination.acknowledge_expiry(expiry);
        Ok(())
    }

    /// The same before all lists have arrived. The kernel's state is then read again.
    pub(super) async fn release_unsynced(&mut self) -> Result<(), DataplaneError> {
        if self.coordination.is_lease_expired() {
            self.actual = None;
            self.release().await?;
        }
        Ok(())
    }

    /// Ends hand-overs to this node that it may not complete. Addresses that it owns already are released or handed over.
    fn overtaken(&mut self, actual: &KernelState) -> Vec<Action> {
        let overtaken = self.coordination.ownership.cancelled_takeovers(actual).into_iter();
        let alone = overtaken.filter(|(id, address)| actual.owned.get(id) != Some(address));
        alone.map(|(id, address)| Action::EndHandover(id, address)).collect()
    }

    /// Releases these addresses before anything else, also while the desired state is unknown.
    pub(super) async fn release_barred(&mut self, actual: &mut KernelState) -> Result<(), DataplaneError> {
        let expiry = self.coordination.expiry();
        let barred = self.coordination.barred(&actual.owned);
        let overtaken = self.overtaken(actual);
        self.perform(actual, &overtaken).await?;
        if !barred.is_empty() {
            let mut desired = actual.clone();
            desired.handovers = handovers(&self.coordination.ownership, self.compiler.view(), actual, actual);
            withhold(&mut desired, &barred);
            let mut plan = plan(actual, &desired);
            // Policies may wait for a walk of the maps.
            plan.sort_by_key(|action| !matches!(action, Action::Disown(..)));
            self.perform(actual, &plan).await?;
        }
        self.coordination.acknowledge_expiry(expiry);
        self.coordination.publish(self.compiler.view(), actual);
        Ok(())
    }
}
