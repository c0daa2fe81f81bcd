//! A plan, action by action.

use std::net::IpAddr;

use tracing::warn;

use super::Reconciler;
use super::log::log;
use crate::model::executor::{DataplaneError, Executor};
use crate::model::state::{Action, Course, EgressId, KernelState, Moving};
use crate::model::step::step;

impl<E: Executor> Reconciler<E> {
    /// Performs the plan up to a claim that fails, which is returned. Cuts that stand one behind the other are one walk.
    pub(super) async fn perform(
        &mut self,
        actual: &mut KernelState,
        plan: &[Action],
    ) -> Result<Option<(EgressId, IpAddr, DataplaneError)>, DataplaneError> {
        if plan.iter().any(|action| matches!(action, Action::Own(..))) {
            self.executor.expect(&self.ties.tenure.arriving());
            self.executor.prepare(plan).await;
        }
        for group in plan.chunk_by(|one, next| one.is_cut() && next.is_cut()) {
            let [action] = group else {
                self.executor.cut(group.to_vec()).await?;
                self.beat.note();
                group.iter().for_each(log);
                continue;
            };
            match (self.act(action).await, action) {
                (Ok(()), _) => {
                    log(action);
                    step(actual, action);
                }
                (Err(error), Action::Own(id, address)) => return Ok(Some((*id, *address, error))),
                (Err(error), Action::PutMoving(id, moving)) => self.do_without(actual, (*id, *moving), &error).await?,
                (Err(error), _) => return Err(error),
            }
        }
        Ok(None)
    }

    pub(super) async fn act(&mut self, action: &Action) -> Result<(), DataplaneError> {
        let outcome = self.executor.apply(action).await;
        self.beat.note();
        outcome
    }

    /// A hand-over that cannot be begun is done without: what comes between is dropped, but all else goes on.
    async fn do_without(
        &mut self,
        actual: &mut KernelState,
        (id, moving): (EgressId, Moving),
        error: &DataplaneError,
    ) -> Result<(), DataplaneError> {
        let Moving { course, address, .. } = moving;
        warn!(id = id.0, %address, %error, "cannot prepare the hand-over of an egress IP: going on without");
        self.unprepared = true;
        if course == Course::Leaving {
            // Half of it may be done.
            for action in [Action::Disown(id, address), Action::EndMoving(id, address)] {
                self.act(&action).await?;
                log(&action);
                step(actual, &action);
            }
        }
        Ok(())
    }
}
