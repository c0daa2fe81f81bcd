//! What the kernel held when it was last known, for whoever asks while it must be observed anew. Pure.

use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use egress_core::model::state::KernelState;

/// `None` before the first look, and while it is known.
#[derive(Clone, Debug, Default)]
pub(super) struct Last(Arc<Mutex<Option<KernelState>>>);

impl Last {
    /// For a round that may fail, or be ended, at any of its steps.
    pub(super) fn hold(&self, state: KernelState) -> InHand {
        *self.get() = None;
        InHand { state, last: Some(self.clone()) }
    }

    pub(super) fn get(&self) -> MutexGuard<'_, Option<KernelState>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Goes back to where it is asked for, however the round ends.
#[derive(Debug)]
pub(super) struct InHand {
    state: KernelState,
    last: Option<Last>,
}

impl InHand {
    /// The round has come to its end.
    pub(super) fn done(mut self) -> KernelState {
        self.last = None;
        std::mem::take(&mut self.state)
    }
}

impl Drop for InHand {
    fn drop(&mut self) {
        if let Some(last) = self.last.take() {
            *last.get() = Some(std::mem::take(&mut self.state));
        }
    }
}

impl Deref for InHand {
    type Target = KernelState;

    fn deref(&self) -> &KernelState {
        &self.state
    }
}

impl DerefMut for InHand {
    fn deref_mut(&mut self) -> &mut KernelState {
        &mut self.state
    }
}
