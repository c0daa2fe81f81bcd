//! What the kernel holds and this node may not, because its leases have run out or another is to have it.

use crate::node::reconciler::action_log::log;
use crate::node::reconciler::{Reconciler, withhold};
use egress_core::model::state::{Action, KernelState};
use egress_core::ownership::kernel_handovers::handovers;
use egress_core::plan::executor::{DataplaneError, Executor};
use egress_core::plan::plan;

impl<E: Executor> Reconciler<E> {
    /// Gives up what this node may not hold before anything is looked at that a walk of the maps may be keeping: leases do
    /// not wait, and hand-overs have an order of their own. What steers to it here finds nobody who holds it, and drops.
    pub(super) async fn let_go(&mut self) -> Result<(), DataplaneError> {
        if !self.ties.is_or_was_lease_expired() {
            return Ok(());
        }
        let fall = self.ties.fall();
        let held = self.executor.held().await?;
        let owned = self.ties.barred(&held.owned).into_iter().map(|(id, address)| Action::Disown(id, address));
        for action in owned.chain(self.overtaken(&held)).collect::<Vec<_>>() {
            self.act(&action).await?;
            log(&action);
        }
        self.ties.obey(fall);
        Ok(())
    }

    /// Likewise where the cluster is not known yet, and may not be for long: what is seen of the kernel is old then.
    pub(super) async fn let_go_unsynced(&mut self) -> Result<(), DataplaneError> {
        if self.ties.is_lease_expired() {
            self.actual = None;
            self.let_go().await?;
        }
        Ok(())
    }

    /// Ends what this node has begun to take over and may not any more. What it owns too goes with that, or is handed over.
    fn overtaken(&mut self, actual: &KernelState) -> Vec<Action> {
        let overtaken = self.ties.ownership.overtaken(actual).into_iter();
        let alone = overtaken.filter(|(id, address)| actual.owned.get(id) != Some(address));
        alone.map(|(id, address)| Action::EndHandover(id, address)).collect()
    }

    /// What the kernel holds and this node may not goes first, also while it is not known what the node should hold.
    pub(super) async fn give_up(&mut self, actual: &mut KernelState) -> Result<(), DataplaneError> {
        let fall = self.ties.fall();
        let barred = self.ties.barred(&actual.owned);
        let overtaken = self.overtaken(actual);
        self.perform(actual, &overtaken).await?;
        if !barred.is_empty() {
            let mut desired = actual.clone();
            desired.handovers = handovers(&self.ties.ownership, self.compiler.view(), actual, actual);
            withhold(&mut desired, &barred);
            let mut plan = plan(actual, &desired);
            // Policies wait for a walk of the maps, where there is one.
            plan.sort_by_key(|action| !matches!(action, Action::Disown(..)));
            self.perform(actual, &plan).await?;
        }
        self.ties.obey(fall);
        self.ties.say(self.compiler.view(), actual);
        Ok(())
    }
}
