//! An error with its causes, for people. The API client's own text often omits the cause, and repeats a refusal of the API server
//! at length.

use std::error::Error;
use std::fmt::{Display, Formatter, Result};

/// Displays the error, and each cause that the text so far does not contain.
pub struct ErrorText<'a>(pub &'a (dyn Error + 'static));

impl Display for ErrorText<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        if let Some(refusal) = refusal(self.0) {
            return f.write_str(&refusal);
        }
        let mut text_so_far = self.0.to_string();
        f.write_str(&text_so_far)?;
        let mut cause = self.0.source();
        while let Some(error) = cause {
            let text = refusal(error).unwrap_or_else(|| error.to_string());
            if !text_so_far.contains(&text) {
                write!(f, ": {text}")?;
                text_so_far.push_str(&text);
            }
            cause = error.source();
        }
        Ok(())
    }
}

/// A refusal of the API server: its own message and code.
fn refusal(error: &(dyn Error + 'static)) -> Option<String> {
    match error.downcast_ref()? {
        kube::Error::Api(status) if status.message.is_empty() => Some(format!("{} {}", status.code, status.reason)),
        kube::Error::Api(status) => Some(format!("{} ({})", status.message, status.code)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("cannot connect")]
    struct ConnectError(#[source] io::Error);

    #[derive(Debug, thiserror::Error)]
    #[error("it failed: {0}")]
    struct WithCause(#[source] io::Error);

    #[test]
    fn every_cause_is_shown_once() {
        let refused = || io::Error::other("refused");
        assert_eq!(ErrorText(&ConnectError(refused())).to_string(), "cannot connect: refused");
        assert_eq!(ErrorText(&WithCause(refused())).to_string(), "it failed: refused");
    }

    #[test]
    fn a_refusal_is_shown_by_the_servers_own_message() {
        let refused = |message| {
            let status = kube::core::Status::failure(message, "Forbidden").with_code(403);
            ErrorText(&kube::Error::Api(status.boxed())).to_string()
        };
        assert_eq!(refused("egressips \"a\" is forbidden"), "egressips \"a\" is forbidden (403)");
        assert_eq!(refused(""), "403 Forbidden");
    }
}
