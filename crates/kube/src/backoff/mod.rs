//! How long a watch, or an event to be written, waits before it is tried again.
//!
//! While the API server is away, twice as long each time, up to half a minute. When any request of this agent that had
//! failed is answered, all watches try again, each within a second: a thousand agents see the server come back at the same
//! moment, and have seven watches each. What the server refuses is tried every five seconds at least: a right is granted, or a
//! definition installed, while somebody looks on.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::time::{Duration, Instant};

use futures::stream::BoxStream;
use futures::{Stream, StreamExt, stream};
use kube::Error;
use kube::runtime::watcher::{self, Event};
use tokio::sync::watch;
use tokio::time::sleep;

use crate::api_outage::{ApiOutages, is_absence, is_absence_code};

/// The first pause, doubled up to the longest; each is shortened by up to half, by chance.
const FIRST: Duration = Duration::from_secs(1);
const LONGEST: Duration = Duration::from_secs(30);
const LONGEST_REFUSED: Duration = Duration::from_secs(5);
/// What is done by all agents when the server is back is spread over this time.
const SPREAD: Duration = Duration::from_secs(1);

/// Who has failed waits here. One for each who tries again.
#[derive(Debug)]
pub(super) struct Backoff {
    tries: u32,
    ends: watch::Receiver<Option<Instant>>,
}

/// Why a try failed.
#[derive(Clone, Copy, Debug)]
pub(super) enum Failure {
    /// The server is not there, or cannot answer now.
    Absence,
    Refusal,
}

impl Failure {
    pub(super) fn of(error: &Error) -> Self {
        if is_absence(error) { Self::Absence } else { Self::Refusal }
    }
}

impl Backoff {
    pub(super) fn new(outages: &ApiOutages) -> Self {
        Self { tries: 0, ends: outages.ends() }
    }

    /// A try has succeeded: the next pause is a short one.
    pub(super) fn succeed(&mut self) {
        self.tries = 0;
    }

    /// From here on an end of an outage is one that a try that begins now may have missed.
    pub(super) fn begin(&mut self) {
        self.ends.mark_unchanged();
    }

    pub(super) async fn rest(&mut self, failure: Failure) {
        match failure {
            Failure::Refusal => sleep(self.next(LONGEST_REFUSED, chance())).await,
            Failure::Absence => {
                let pause = sleep(self.next(LONGEST, chance()));
                tokio::select! {
                    () = pause => {}
                    // Also where it has ended while the try was under way.
                    Ok(()) = self.ends.changed() => {
                        self.tries = 0;
                        sleep(spread()).await;
                    }
                }
            }
        }
    }

    /// `chance` is from 0 to 1.
    fn next(&mut self, longest: Duration, chance: f64) -> Duration {
        let pause = FIRST.saturating_mul(1 << self.tries.min(10)).min(longest);
        self.tries += 1;
        pause.mul_f64(1.0 - chance / 2.0)
    }
}

/// A number from 0 to 1 that no other agent has: the standard library seeds its hashers by chance.
fn chance() -> f64 {
    let number = RandomState::new().build_hasher().finish() >> 32;
    f64::from(u32::try_from(number).unwrap_or_default()) / f64::from(u32::MAX)
}

/// How long to wait for what all agents do at once.
pub(super) fn spread() -> Duration {
    SPREAD.mul_f64(chance())
}

struct Paced<T> {
    watch: BoxStream<'static, watcher::Result<Event<T>>>,
    pace: Backoff,
    failure: Option<Failure>,
}

/// The watch, with its pauses.
pub(super) fn paced<T: Send + 'static>(
    watch: BoxStream<'static, watcher::Result<Event<T>>>,
    outages: &ApiOutages,
) -> impl Stream<Item = watcher::Result<Event<T>>> + Send + use<T> {
    let paced = Paced { watch, pace: Backoff::new(outages), failure: None };
    stream::unfold(paced, |mut paced| async move {
        if let Some(failure) = paced.failure.take() {
            paced.pace.rest(failure).await;
        }
        paced.pace.begin();
        let event = paced.watch.next().await?;
        match &event {
            // A list that begins may still fail.
            Ok(Event::Init) => {}
            Ok(_) => paced.pace.succeed(),
            Err(error) => paced.failure = Some(failure(error)),
        }
        Some((event, paced))
    })
}

fn failure(error: &watcher::Error) -> Failure {
    match error {
        watcher::Error::InitialListFailed(error)
        | watcher::Error::WatchStartFailed(error)
        | watcher::Error::WatchFailed(error) => Failure::of(error),
        watcher::Error::WatchError(status) if is_absence_code(status.code) => Failure::Absence,
        watcher::Error::WatchError(_) | watcher::Error::NoResourceVersion => Failure::Refusal,
    }
}

#[cfg(test)]
mod tests;
