//! Answers to the questions of one test: each is printed as it is found, and the test continues, so that one run shows
//! everything that is wrong.

use std::fmt;

use anyhow::{Result, ensure};
use egress_lab::capture::{AddressKind, Capture, CaptureKey, Seen};

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
    pub(super) fn conclude_with(self, capture: Capture) -> Result<()> {
        self.conclude_seen(&capture.finish()?)
    }

    /// The same, where selected pods alone have sent to the world: no node's address is outside either.
    pub(super) fn conclude_with_selected(mut self, capture: Capture) -> Result<()> {
        let seen = capture.finish()?;
        // Destination unreachable (RFC 792, RFC 4443) is the node's own word about an answer that it could not deliver.
        let is_unreachable = |key: &CaptureKey| matches!((key.protocol, key.to_port), (1, 3) | (58, 1));
        let nodes = seen.packets(|key| seen.is_to_the_world(key, AddressKind::Node) && !is_unreachable(key));
        self.equal("packets to the world with a node's address", &0, &nodes);
        let egress = seen.to_the_world(AddressKind::Egress);
        self.note(egress > 0, &format!("{egress} packets to the world with an egress IP"));
        self.conclude_seen(&seen)
    }

    fn conclude_seen(mut self, seen: &Seen) -> Result<()> {
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
