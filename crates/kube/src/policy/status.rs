//! The status that the controller wants an object to have, and why a write of it fails.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use k8s_openapi::jiff::Timestamp;
use kube::Error;
use serde_json::{Value, json};

use crate::error_text::ErrorText;
use egress_core::model::policy::Item;
use egress_core::model::state::EgressIds;
use egress_core::status::conditions::DesiredCondition;

/// The desired annotations and status of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DesiredStatus {
    pub ids: EgressIds,
    /// The addresses, if no node can host any of them.
    pub no_eligible_node: Option<Vec<IpAddr>>,
    pub items: Vec<Item>,
    /// `None` while it is not known.
    pub selected_pods: Option<u32>,
    pub conditions: Vec<DesiredCondition>,
}

/// Conditions as an object's status has them, with the times of those whose status has not changed.
pub(crate) fn condition_values(conditions: &[DesiredCondition], stored: &Value) -> Vec<Value> {
    // To the second, as the API server's own times.
    let now = Timestamp::from_second(Timestamp::now().as_second()).unwrap_or_default().to_string();
    let known = |kind: &str| stored["conditions"].as_array()?.iter().find(|one| one["type"] == kind);
    let value = |one: &DesiredCondition| {
        let text = if one.status { "True" } else { "False" };
        let since = known(one.kind).filter(|known| known["status"] == text).map(|known| &known["lastTransitionTime"]);
        let since = since.filter(|since| since.is_string()).cloned().unwrap_or_else(|| json!(now));
        json!({"type": one.kind, "status": text, "reason": one.reason, "message": one.message,
               "lastTransitionTime": since})
    };
    conditions.iter().map(value).collect()
}

#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    /// Another writer was faster, or the object is gone: read it again.
    #[error("the object has changed since it was read")]
    Stale,
    #[error("the API server does not answer")]
    Timeout,
    #[error("{}", ErrorText(.0))]
    Api(Error),
    #[error("the patch cannot be expressed: {0}")]
    Patch(#[from] serde_json::Error),
}

impl From<Error> for WriteError {
    fn from(error: Error) -> Self {
        Self::Api(error)
    }
}

impl WriteError {
    /// The status code of a refusal; zero for other errors.
    pub fn code(&self) -> u16 {
        match self {
            Self::Api(Error::Api(status)) => status.code,
            _ => 0,
        }
    }
}

/// Interval of log lines about one error.
const LOG_INTERVAL: Duration = Duration::from_secs(10 * 60);

/// Limits log lines about failed writes: a missing right fails for every object at every attempt, one a second, and one line
/// reports all of it.
#[derive(Debug, Default)]
pub struct WriteErrorLog {
    logged: Option<(u16, Instant)>,
}

impl WriteErrorLog {
    /// Whether to log a failure with this code: at once if it differs from the last one, else rarely.
    pub fn is_due(&mut self, code: u16, now: Instant) -> bool {
        let due = self.logged.is_none_or(|(logged, at)| logged != code || now.duration_since(at) >= LOG_INTERVAL);
        if due {
            self.logged = Some((code, now));
        }
        due
    }

    /// Writing succeeds. Whether to log that.
    pub fn ends(&mut self) -> bool {
        self.logged.take().is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lasting_error_is_logged_rarely_and_its_end_once() {
        let (mut errors, start) = (WriteErrorLog::default(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        assert!(!errors.ends(), "nothing was wrong");
        let failures = [(403, 0), (403, 1), (403, 599), (403, 600), (403, 601), (500, 602), (403, 603)];
        let due = failures.map(|(code, second)| errors.is_due(code, at(second)));
        assert_eq!(due, [true, false, false, true, false, true, true]);
        assert_eq!([errors.ends(), errors.ends()], [true, false]);
        assert!(errors.is_due(403, at(604)));
    }
}
