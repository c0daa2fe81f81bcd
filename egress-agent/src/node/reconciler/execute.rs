//! Performs a plan, action by action.

use std::net::IpAddr;

use tokio::time::Instant;
use tracing::{debug, warn};

use crate::node::reconciler::Reconciler;
use crate::node::reconciler::action_log::log;
use egress_core::model::state::{Action, EgressId, HandoverStage, HandoverState, KernelState};
use egress_core::plan::executor::{DataplaneError, Executor};
use egress_core::plan::refusal::{KernelEntry, instead, waits};

/// A claim that failed, and why.
pub(super) type FailedClaim = (EgressId, IpAddr, DataplaneError);

/// Whether a failure concerns the claimed address only.
const fn is_claim(action: &Action) -> bool {
    matches!(action, Action::Own(..) | Action::Share(..))
}

impl<E: Executor> Reconciler<E> {
    /// Performs the plan. Refused entries are left out. Failed claims are returned; the actions after them depend on them and
    /// are skipped. Consecutive cuts share one walk.
    pub(super) async fn perform(
        &mut self,
        actual: &mut KernelState,
        plan: &[Action],
    ) -> Result<Vec<FailedClaim>, DataplaneError> {
        let begins = |action: &Action| {
            matches!(action, Action::PutHandover(_, HandoverState { stage: HandoverStage::Arriving, .. }))
        };
        let claims = plan.iter().any(is_claim);
        if claims || plan.iter().any(begins) {
            self.executor.expect(self.coordination.expected(self.compiler.view()));
        }
        if claims {
            self.executor.prepare(plan).await;
        }
        let mut failed = Vec::new();
        for group in plan.chunk_by(|one, next| one.is_cut() && next.is_cut()) {
            if !failed.is_empty() && !matches!(group, [action] if is_claim(action)) {
                break;
            }
            let [action] = group else {
                self.executor.cut(group.to_vec()).await?;
                self.heartbeat.note();
                group.iter().for_each(log);
                continue;
            };
            if waits(actual, self.left_out.actions(), action) {
                continue;
            }
            match (self.act(action).await, action) {
                (Ok(()), _) => {
                    log(action);
                    actual.apply(action);
                    self.left_out.done(action, Instant::now());
                }
                (Err(error), Action::Own(id, address) | Action::Share(id, address, _)) => {
                    if error.is_of_entry() {
                        self.count_refusal(action);
                    }
                    failed.push((*id, *address, error));
                }
                (Err(error), Action::PutHandover(id, moving)) => {
                    if error.is_of_entry() {
                        self.note_refusal(action, &error);
                    }
                    self.skip_handover(actual, (*id, *moving), &error).await?;
                }
                (Err(error), _) if error.is_of_entry() && KernelEntry::of(action).is_some() => {
                    self.leave_out(actual, action, &error).await?;
                }
                (Err(error), _) => return Err(error),
            }
        }
        Ok(failed)
    }

    pub(super) async fn act(&mut self, action: &Action) -> Result<(), DataplaneError> {
        let outcome = self.executor.apply(action).await;
        self.heartbeat.note();
        outcome
    }

    /// Performs the actions that replace a refused one.
    async fn leave_out(
        &mut self,
        actual: &mut KernelState,
        refused: &Action,
        error: &DataplaneError,
    ) -> Result<(), DataplaneError> {
        self.note_refusal(refused, error);
        for action in instead(actual, refused) {
            self.act(&action).await?;
            log(&action);
            actual.apply(&action);
        }
        Ok(())
    }

    /// Warns once for each map when it begins to refuse.
    fn note_refusal(&mut self, refused: &Action, error: &DataplaneError) {
        self.count_refusal(refused);
        let Some(entry) = KernelEntry::of(refused) else { return };
        if self.left_out.note(entry, refused, error, Instant::now()) {
            warn!(%entry, %error, "the kernel refuses an entry: it is left out and retried");
        } else {
            debug!(%entry, %error, "the kernel refuses an entry");
        }
    }

    fn count_refusal(&self, refused: &Action) {
        if let Some(map) = KernelEntry::of(refused).and_then(|entry| entry.map()) {
            self.meters.entry_refused(map);
        }
    }

    /// Continues without a hand-over that cannot be prepared; packets in between are dropped.
    async fn skip_handover(
        &mut self,
        actual: &mut KernelState,
        (id, moving): (EgressId, HandoverState),
        error: &DataplaneError,
    ) -> Result<(), DataplaneError> {
        let HandoverState { stage, address, .. } = moving;
        warn!(id = id.0, %address, %error, "cannot prepare the hand-over of an egress IP: continuing without it");
        self.unprepared = true;
        if stage == HandoverStage::Leaving {
            // It may be half done.
            for action in [Action::Disown(id, address), Action::EndHandover(id, address)] {
                self.act(&action).await?;
                log(&action);
                actual.apply(&action);
            }
        }
        Ok(())
    }
}
