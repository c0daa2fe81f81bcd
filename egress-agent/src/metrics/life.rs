//! Do the agent's loops live? `/healthz` fails where one does not, and the process is started anew.
//!
//! The node's half is asked, as `egress-agent status` asks it: it may be busy for a while, with claims above all, so what
//! counts is how long ago the first question was asked that is not answered yet. The fence looks each second at least, and
//! notes it.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// How long each may be silent.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// A busy node's half answers within this time.
    pub answers: Duration,
    /// The fence looks again within a second.
    pub beats: Duration,
    /// The verifier has its time on a slow machine.
    pub starts: Duration,
}

pub const LIMITS: Limits =
    Limits { answers: Duration::from_secs(60), beats: Duration::from_secs(10), starts: Duration::from_secs(300) };

/// When a loop was last seen.
#[derive(Clone, Debug)]
pub struct Beat(Arc<Mutex<Instant>>);

impl Default for Beat {
    fn default() -> Self {
        Self(Arc::new(Mutex::new(Instant::now())))
    }
}

impl Beat {
    pub fn note(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
    }

    pub fn age(&self) -> Duration {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).elapsed()
    }
}

/// Questions to the node's half that are not answered yet.
#[derive(Debug, Default)]
pub struct Waiting(Mutex<Option<Instant>>);

impl Waiting {
    /// One is asked.
    pub fn asked(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_with(Instant::now);
    }

    pub fn answered(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// For how long there has been no answer, where one is waited for.
    pub fn age(&self) -> Option<Duration> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).map(|since| since.elapsed())
    }
}

/// What does not live, in one line.
pub fn judge(limits: &Limits, waiting: Option<Duration>, fence: Duration) -> Result<(), String> {
    if let Some(waiting) = waiting.filter(|waiting| *waiting >= limits.answers) {
        return Err(format!("the node's half has not answered for {} s", waiting.as_secs()));
    }
    if fence >= limits.beats {
        return Err(format!("the fence has not looked for {} s", fence.as_secs()));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_loop_has_its_time() {
        let seconds = Duration::from_secs;
        let said = |waiting, fence| judge(&LIMITS, waiting, fence).err().unwrap_or_default();
        assert_eq!(said(None, seconds(1)), "");
        assert_eq!(said(Some(seconds(59)), seconds(9)), "", "busy");
        assert_eq!(said(Some(seconds(60)), seconds(1)), "the node's half has not answered for 60 s");
        assert_eq!(said(None, seconds(10)), "the fence has not looked for 10 s");
    }

    #[test]
    fn the_first_question_without_an_answer_counts() {
        let waiting = Waiting::default();
        assert_eq!(waiting.age(), None);
        waiting.asked();
        let first = waiting.age().expect("one is asked");
        waiting.asked();
        assert!(waiting.age().is_some_and(|age| age >= first));
        waiting.answered();
        assert_eq!(waiting.age(), None);
    }
}
