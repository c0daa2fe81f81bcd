//! What the start of an agent waits for, shown by `/readyz`.

use std::sync::{Mutex, PoisonError};

use tokio::time::Instant;

#[derive(Debug, Default)]
pub struct StartupWait(Mutex<StartupWaitState>);

#[derive(Debug, Default)]
struct StartupWaitState {
    reason: Option<String>,
    ended: Option<Instant>,
}

impl StartupWait {
    /// One line; `None` if the start waits for nothing.
    pub fn reason(&self) -> Option<String> {
        self.with_state(|state| state.reason.clone())
    }

    /// When the last wait ended; `None` if there was none, or one lasts.
    pub fn ended(&self) -> Option<Instant> {
        self.with_state(|state| state.ended)
    }

    pub fn set(&self, reason: Option<String>) {
        self.with_state(|state| {
            state.ended = reason.is_none().then(Instant::now);
            state.reason = reason;
        });
    }

    fn with_state<T>(&self, read: impl FnOnce(&mut StartupWaitState) -> T) -> T {
        read(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
