//! The kernel's last known state, for answers while it must be read again. Pure.

use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use egress_core::model::state::KernelState;

/// `None` before the first read, and while the current state is known.
#[derive(Clone, Debug, Default)]
pub(super) struct LastKnown(Arc<Mutex<Option<KernelState>>>);

impl LastKnown {
    /// For a reconcile that may fail or be cancelled at any step.
    pub(super) fn hold(&self, state: KernelState) -> LastKnownGuard {
        *self.get() = None;
        LastKnownGuard { state, last: Some(self.clone()) }
    }

    pub(super) fn get(&self) -> MutexGuard<'_, Option<KernelState>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Stores the state as the last known one when a failed or cancelled reconcile drops it.
#[derive(Debug)]
pub(super) struct LastKnownGuard {
    state: KernelState,
    last: Option<LastKnown>,
}

impl LastKnownGuard {
    /// The reconcile has succeeded.
    pub(super) fn done(mut self) -> KernelState {
        self.last = None;
        std::mem::take(&mut self.state)
    }
}

impl Drop for LastKnownGuard {
    fn drop(&mut self) {
        if let Some(last) = self.last.take() {
            *last.get() = Some(std::mem::take(&mut self.state));
        }
    }
}

impl Deref for LastKnownGuard {
    type Target = KernelState;

    fn deref(&self) -> &KernelState {
        &self.state
    }
}

impl DerefMut for LastKnownGuard {
    fn deref_mut(&mut self) -> &mut KernelState {
        &mut self.state
    }
}
