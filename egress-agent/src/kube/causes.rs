//! An error with its causes, for people: the API client's own text often ends where it becomes interesting.

use std::error::Error;
use std::fmt::{Display, Formatter, Result};

/// Shows the error and each cause that the text so far does not say.
pub struct Causes<'a>(pub &'a (dyn Error + 'static));

impl Display for Causes<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        let mut said = self.0.to_string();
        f.write_str(&said)?;
        let mut cause = self.0.source();
        while let Some(error) = cause {
            let text = error.to_string();
            if !said.contains(&text) {
                write!(f, ": {text}")?;
                said.push_str(&text);
            }
            cause = error.source();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("cannot connect")]
    struct Outer(#[source] io::Error);

    #[derive(Debug, thiserror::Error)]
    #[error("it failed: {0}")]
    struct Said(#[source] io::Error);

    #[test]
    fn every_cause_is_said_once() {
        let refused = || io::Error::other("refused");
        assert_eq!(Causes(&Outer(refused())).to_string(), "cannot connect: refused");
        assert_eq!(Causes(&Said(refused())).to_string(), "it failed: refused");
    }
}
