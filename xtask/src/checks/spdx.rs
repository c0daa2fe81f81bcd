//! Licence expressions (SPDX): does a list of accepted licences satisfy this one?
//!
//! `AND` needs both sides, `OR` one, `WITH` names an exception that only grants more; `/` is Cargo's older `OR`.

use std::iter::Peekable;
use std::vec::IntoIter;

/// Whether the expression can be satisfied with accepted licences only. An expression that cannot be read cannot.
pub(super) fn satisfied(expression: &str, accepted: &[&str]) -> bool {
    let mut tokens = tokens(expression).into_iter().peekable();
    let outcome = either(&mut tokens, accepted);
    outcome.unwrap_or(false) && tokens.peek().is_none()
}

type Tokens = Peekable<IntoIter<String>>;

fn tokens(expression: &str) -> Vec<String> {
    expression
        .replace('(', " ( ")
        .replace(')', " ) ")
        .replace('/', " OR ")
        .split_whitespace()
        .map(str::to_owned)
        .collect()
}

fn either(tokens: &mut Tokens, accepted: &[&str]) -> Option<bool> {
    let mut outcome = both(tokens, accepted)?;
    while tokens.next_if(|token| token == "OR").is_some() {
        outcome |= both(tokens, accepted)?;
    }
    Some(outcome)
}

fn both(tokens: &mut Tokens, accepted: &[&str]) -> Option<bool> {
    let mut outcome = one(tokens, accepted)?;
    while tokens.next_if(|token| token == "AND").is_some() {
        outcome &= one(tokens, accepted)?;
    }
    Some(outcome)
}

fn one(tokens: &mut Tokens, accepted: &[&str]) -> Option<bool> {
    let token = tokens.next()?;
    if token == "(" {
        let outcome = either(tokens, accepted)?;
        return (tokens.next()? == ")").then_some(outcome);
    }
    if [")", "AND", "OR", "WITH"].contains(&token.as_str()) {
        return None;
    }
    if tokens.next_if(|token| token == "WITH").is_some() {
        tokens.next()?;
    }
    Some(accepted.contains(&token.as_str()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ACCEPTED: [&str; 3] = ["MIT", "Apache-2.0", "ISC"];

    #[test]
    fn expressions_are_judged_as_they_read() {
        for good in [
            "MIT",
            "MIT OR GPL-3.0",
            "GPL-3.0 OR MIT",
            "MIT/Apache-2.0",
            "Apache-2.0 WITH LLVM-exception",
            "ISC AND (Apache-2.0 OR GPL-2.0)",
            "(MIT OR Zlib) AND ISC",
        ] {
            assert!(satisfied(good, &ACCEPTED), "{good}");
        }
        for bad in ["GPL-3.0", "MIT AND GPL-3.0", "GPL-2.0 OR MIT AND Zlib", "", "MIT OR", "(MIT", "MIT)", "MIT MIT"] {
            assert!(!satisfied(bad, &ACCEPTED), "{bad}");
        }
    }
}
