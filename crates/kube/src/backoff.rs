//! Pauses between the tries of a watch or of an event. By hand, because `WatchStreamExt::backoff` of kube cannot end a
//! pause when the server answers again, has one maximum for outages and refusals, and resets the pause when a list
//! merely begins.
//!
//! During an outage the pause doubles up to half a minute. When any failed request of this agent is answered, all
//! watches retry within a second, at random: a thousand agents with eight watches each detect the server's return at
//! the same moment. What the server refuses is retried every five seconds at least, because an administrator who grants
//! a right or installs a definition waits for the effect.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::time::{Duration, Instant};

use futures::stream::BoxStream;
use futures::{Stream, StreamExt, stream};
use kube::Error;
use kube::runtime::watcher::{self, Event};
use tokio::sync::watch;
use tokio::time::sleep;

use crate::api_outage::{ApiOutages, is_outage, is_outage_code};

/// The first pause, doubled up to the maximum; each is shortened by up to half, at random.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const MAX_PAUSE: Duration = Duration::from_secs(30);
const MAX_PAUSE_REFUSED: Duration = Duration::from_secs(5);
/// Requests of all agents at the return of the server are spread over this time.
const MAX_RANDOM_DELAY: Duration = Duration::from_secs(1);

/// The pauses of one task that retries.
#[derive(Debug)]
pub(super) struct Backoff {
    tries: u32,
    ends: watch::Receiver<Option<Instant>>,
}

/// Why a try failed.
#[derive(Clone, Copy, Debug)]
pub(super) enum Failure {
    /// The server is unreachable, or cannot answer now.
    Outage,
    Refusal,
}

impl Failure {
    pub(super) fn of(error: &Error) -> Self {
        if is_outage(error) { Self::Outage } else { Self::Refusal }
    }
}

impl Backoff {
    pub(super) fn new(outages: &ApiOutages) -> Self {
        Self { tries: 0, ends: outages.ends() }
    }

    /// A try has succeeded: the next pause is short.
    pub(super) fn reset(&mut self) {
        self.tries = 0;
    }

    /// A try begins: an end of an outage after this point ends the next pause.
    pub(super) fn note_try(&mut self) {
        self.ends.mark_unchanged();
    }

    pub(super) async fn pause(&mut self, failure: Failure) {
        match failure {
            Failure::Refusal => sleep(self.next_pause(MAX_PAUSE_REFUSED, random())).await,
            Failure::Outage => {
                let pause = sleep(self.next_pause(MAX_PAUSE, random()));
                tokio::select! {
                    () = pause => {}
                    // Also if the outage ended during the try.
                    Ok(()) = self.ends.changed() => {
                        self.tries = 0;
                        sleep(random_delay()).await;
                    }
                }
            }
        }
    }

    /// `random` is from 0 to 1.
    fn next_pause(&mut self, longest: Duration, random: f64) -> Duration {
        let pause = FIRST_PAUSE.saturating_mul(1 << self.tries.min(10)).min(longest);
        self.tries += 1;
        pause.mul_f64(1.0 - random / 2.0)
    }
}

/// A random number from 0 to 1: the standard library seeds its hashers at random.
fn random() -> f64 {
    let number = RandomState::new().build_hasher().finish() >> 32;
    f64::from(u32::try_from(number).unwrap_or_default()) / f64::from(u32::MAX)
}

/// A random delay before requests that all agents send at the same event.
pub(super) fn random_delay() -> Duration {
    MAX_RANDOM_DELAY.mul_f64(random())
}

struct WatchWithBackoff<T> {
    watch: BoxStream<'static, watcher::Result<Event<T>>>,
    backoff: Backoff,
    failure: Option<Failure>,
}

/// The watch, with a pause after each failure.
pub(super) fn with_backoff<T: Send + 'static>(
    watch: BoxStream<'static, watcher::Result<Event<T>>>,
    outages: &ApiOutages,
) -> impl Stream<Item = watcher::Result<Event<T>>> + Send + use<T> {
    let watch = WatchWithBackoff { watch, backoff: Backoff::new(outages), failure: None };
    stream::unfold(watch, |mut watch| async move {
        if let Some(failure) = watch.failure.take() {
            watch.backoff.pause(failure).await;
        }
        watch.backoff.note_try();
        let event = watch.watch.next().await?;
        match &event {
            // A list that begins may still fail.
            Ok(Event::Init) => {}
            Ok(_) => watch.backoff.reset(),
            Err(error) => watch.failure = Some(failure(error)),
        }
        Some((event, watch))
    })
}

fn failure(error: &watcher::Error) -> Failure {
    match error {
        watcher::Error::InitialListFailed(error)
        | watcher::Error::WatchStartFailed(error)
        | watcher::Error::WatchFailed(error) => Failure::of(error),
        watcher::Error::WatchError(status) if is_outage_code(status.code) => Failure::Outage,
        watcher::Error::WatchError(_) | watcher::Error::NoResourceVersion => Failure::Refusal,
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future;

    use kube::core::Status;

    use super::*;

    #[test]
    fn pauses_grow_to_the_longest_and_vary_at_random() {
        let mut backoff = Backoff::new(&ApiOutages::new("here"));
        let whole: Vec<u64> = (0..8).map(|_| backoff.next_pause(MAX_PAUSE, 0.0).as_secs()).collect();
        assert_eq!(whole, [1, 2, 4, 8, 16, 30, 30, 30]);
        assert_eq!(backoff.next_pause(MAX_PAUSE, 1.0).as_secs(), 15);
        assert_eq!(backoff.next_pause(MAX_PAUSE_REFUSED, 0.0).as_secs(), 5);
        let all: Vec<f64> = (0..400).map(|_| random()).collect();
        for from in [0.0, 0.25, 0.5, 0.75] {
            let some = all.iter().filter(|one| (from..=from + 0.25).contains(*one)).count();
            assert!((50..=150).contains(&some), "{some} of 400 from {from}");
        }
    }

    /// The pauses of a watch in a long outage.
    fn in_outage(outages: &ApiOutages) -> Backoff {
        Backoff { tries: 9, ends: outages.ends() }
    }

    async fn ends_soon(pause: impl Future<Output = ()>) -> bool {
        tokio::time::timeout(MAX_RANDOM_DELAY + Duration::from_millis(500), pause).await.is_ok()
    }

    #[tokio::test]
    async fn one_answered_request_ends_the_pauses_of_all_watches() {
        let outages = ApiOutages::new("here");
        let (mut one, mut other) = (in_outage(&outages), in_outage(&outages));
        outages.unanswered("the Lease", "refused");
        let end = async {
            // A request that had not failed ends no outage.
            outages.answered("something else");
            tokio::time::sleep(Duration::from_millis(50)).await;
            outages.answered("the Lease");
        };
        let ((), one_is, other_is) =
            tokio::join!(end, ends_soon(one.pause(Failure::Outage)), ends_soon(other.pause(Failure::Outage)));
        assert!(one_is && other_is);
        assert_eq!(one.tries, 0, "pauses start short again");
        one.note_try();
        one.tries = 9;
        assert!(!ends_soon(one.pause(Failure::Outage)).await, "an end counts once");
    }

    #[tokio::test]
    async fn an_outage_that_ended_during_a_try_counts_and_a_refusal_keeps_its_pause() {
        let outages = ApiOutages::new("here");
        let (mut tried, mut refused) = (in_outage(&outages), in_outage(&outages));
        outages.unanswered("the Lease", "refused");
        outages.answered("the Lease");
        let (tried, refused) =
            tokio::join!(ends_soon(tried.pause(Failure::Outage)), ends_soon(refused.pause(Failure::Refusal)));
        assert!(tried && !refused);
    }

    #[tokio::test]
    async fn pauses_are_reset_by_an_event_and_not_by_the_beginning_of_a_list() {
        let outages = ApiOutages::new("here");
        let error = || {
            let status = Status::failure("no", "Unavailable").with_code(503).boxed();
            Err(watcher::Error::InitialListFailed(Error::Api(status)))
        };
        let events =
            vec![Ok(Event::Init), error(), Ok(Event::Init), Ok(Event::InitApply(7)), Ok(Event::InitDone), error()];
        let begin = tokio::time::Instant::now();
        let events: Vec<_> = with_backoff(futures::stream::iter(events).boxed(), &outages).collect().await;
        assert_eq!(events.len(), 6);
        // Two first pauses; the second would be the second pause otherwise, of a second at least.
        let took = begin.elapsed();
        assert!((FIRST_PAUSE..FIRST_PAUSE * 2 + Duration::from_millis(400)).contains(&took), "{took:?}");
    }
}
