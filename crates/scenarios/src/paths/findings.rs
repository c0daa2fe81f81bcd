//! Answers to the questions of one test: each is printed as it is found, and the test continues, so that one run shows
//! everything that is wrong.

use std::fmt;

use anyhow::{Result, ensure};
use egress_lab::capture::{AddressKind, Capture};

#[derive(Debug, Default)]
pub(super) struct Findings {
    asked: usize,
    wrong: Vec<String>,
}

impl Findings {
    /// Notes whether something holds; `what` describes it, with the figures that were counted.
    pub(super) fn note(&mut self, holds: bool, what: &impl fmt::Display) {
        self.asked += 1;
        println!("{} {what}", if holds { "ok    " } else { "WRONG " });
        if !holds {
            self.wrong.push(what.to_string());
        }
    }

    pub(super) fn equal<T: PartialEq + fmt::Debug>(&mut self, what: &str, expected: &T, seen: &T) {
        let text =
            if expected == seen { format!("{what}: {seen:?}") } else { format!("{what}: {seen:?}, not {expected:?}") };
        self.note(expected == seen, &text);
    }

    /// Notes that something was done, or why not.
    pub(super) fn right<T: fmt::Debug>(&mut self, what: &str, outcome: &Result<T>) {
        match outcome {
            Ok(value) => self.note(true, &format!("{what}: {value:?}")),
            Err(error) => self.note(false, &format!("{what}: {error:#}")),
        }
    }

    /// Ends a capture: no packet outside has a pod's address, and all checksums are right.
    pub(super) fn conclude_with(mut self, capture: Capture) -> Result<()> {
        let seen = capture.finish()?;
        self.equal("packets outside with a pod's address", &0, &seen.to_the_world(AddressKind::Pod));
        self.right(&format!("checksums of {} frames", seen.frames), &seen.check());
        self.conclude()
    }

    pub(super) fn conclude(self) -> Result<()> {
        let (wrong, asked) = (self.wrong.len(), self.asked);
        println!("{} of {asked} as expected", asked - wrong);
        ensure!(wrong == 0, "{wrong} of {asked} are wrong:\n  {}", self.wrong.join("\n  "));
        Ok(())
    }
}
