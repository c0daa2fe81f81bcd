//! What the start of an agent waits for.

use std::sync::{Mutex, PoisonError};

use tokio::time::Instant;

/// For whoever asks meanwhile.
#[derive(Debug, Default)]
pub struct Awaited(Mutex<Moment>);

#[derive(Debug, Default)]
struct Moment {
    what: Option<String>,
    ended: Option<Instant>,
}

impl Awaited {
    /// In one line; `None` where nothing is waited for.
    pub fn what(&self) -> Option<String> {
        self.moment(|moment| moment.what.clone())
    }

    /// When the last wait was over; `None` where there was none, or is one.
    pub fn ended(&self) -> Option<Instant> {
        self.moment(|moment| moment.ended)
    }

    pub fn set(&self, what: Option<String>) {
        self.moment(|moment| {
            moment.ended = what.is_none().then(Instant::now);
            moment.what = what;
        });
    }

    fn moment<T>(&self, read: impl FnOnce(&mut Moment) -> T) -> T {
        read(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
