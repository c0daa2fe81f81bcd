//! The host build of the decisions as the oracle of the programs: stories of random and malformed packets. Each packet
//! runs through the program of its hook on the kernel and through the model of a node (egress-fuzz), with state kept
//! for the whole story. Verdict, bytes out, mark and map contents must be equal; only a searched port is the kernel's
//! choice, and it must be free in the model too.
//!
//! A story follows from its number. A failing one is minimised by removing steps, and printed with its number.
//! `EGRESS_ORACLE_SEED` runs one story only; `EGRESS_ORACLE_SECONDS` runs new stories for this time (`cargo xtask fuzz
//! kernel`).

mod compare;
mod derived_frames;
mod initial_maps;
mod runner;
mod story;

use std::time::{Duration, Instant};

use egress_common::abi::Verdict;
use runner::OracleRig;
use story::{Step, story};

use crate::slow_guest::rounds;
use crate::stage::{Stage, on_stage_with};

/// Stories of an ordinary test run, per variety.
const STORIES: u32 = 200;
/// Attempts at minimising a failing story, and their time limit.
const RETELLINGS: usize = 300;
const SHORTENING: Duration = Duration::from_secs(60);
/// Interval of progress reports in a long run.
const SAY_EVERY: Duration = Duration::from_secs(10);

/// Verdicts that the stories must reach.
const REACHED: [Verdict; 21] = [
    Verdict::SnatHere,
    Verdict::ToGateway,
    Verdict::SnatForNode,
    Verdict::ReplyHere,
    Verdict::ReplyToNode,
    Verdict::ReplyDelivered,
    Verdict::MarkedNode,
    Verdict::NodeSnat,
    Verdict::NodeReply,
    Verdict::InboundRemembered,
    Verdict::InboundReply,
    Verdict::MtuAnswered,
    Verdict::HairpinAnswered,
    Verdict::IcmpUnmatched,
    Verdict::NoNatEntry,
    Verdict::FragmentUnknown,
    Verdict::CutAnswered,
    Verdict::PortsExhausted,
    Verdict::SctpFragment,
    Verdict::ProtocolTaken,
    Verdict::HandedOver,
];

#[test]
fn programs_do_what_the_model_does() {
    on_stage_with(&[], |stage| tell(stage, 0));
}

/// Full maps refuse NAT entries and flows, without other differences.
#[test]
fn programs_do_what_the_model_does_when_maps_are_full() {
    on_stage_with(&[("nat", 14), ("flows", 9), ("inbound", 5)], |stage| tell(stage, 1 << 32));
}

fn number(variable: &str) -> Option<u64> {
    let text = std::env::var(variable).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{variable} is no number: {text}")))
}

fn tell(stage: &mut Stage, first: u64) {
    let mut rig = OracleRig::new(stage);
    if let Some(seed) = number("EGRESS_ORACLE_SEED") {
        return one(&mut rig, seed);
    }
    let Some(seconds) = number("EGRESS_ORACLE_SECONDS") else {
        let stories = rounds(STORIES);
        (first..first + u64::from(stories)).for_each(|seed| one(&mut rig, seed));
        if stories == STORIES {
            rig.assert_reached(&REACHED);
        }
        return;
    };
    let (start, mut said) = (Instant::now(), Instant::now());
    // Another start in every run.
    let clock = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("a clock that is set");
    let first = first + (clock.as_secs() << 33);
    let mut played = 0;
    while start.elapsed() < Duration::from_secs(seconds) {
        one(&mut rig, first + played);
        played += 1;
        if said.elapsed() >= SAY_EVERY {
            println!("{played} stories, {} packets, {} s", rig.packets, start.elapsed().as_secs());
            said = Instant::now();
        }
    }
    println!("{played} stories, {} packets; the first was {first}", rig.packets);
}

fn one(rig: &mut OracleRig, seed: u64) {
    let steps = story(seed);
    let Err(first) = rig.tell(&steps) else { return };
    let shortest = shortened(rig, steps);
    let last = rig.tell(&shortest);
    let lines: Vec<String> = shortest.iter().map(|(id, step)| format!("  {id}: {step:?}")).collect();
    let last = last.err().unwrap_or_else(|| format!("it does not fail again; at first it was\n{first}"));
    panic!("story {seed} (EGRESS_ORACLE_SEED={seed}), made shorter:\n{}\n{last}", lines.join("\n"));
}

/// Minimises the story: removes steps that are not needed for the failure.
fn shortened(rig: &mut OracleRig, mut steps: Vec<(usize, Step)>) -> Vec<(usize, Step)> {
    let (mut size, mut left, start) = (steps.len() / 2, RETELLINGS, Instant::now());
    while size > 0 {
        let mut at = 0;
        while at < steps.len() && left > 0 && start.elapsed() < SHORTENING {
            let mut fewer = steps.clone();
            fewer.drain(at..(at + size).min(steps.len()));
            left -= 1;
            if rig.tell(&fewer).is_err() {
                steps = fewer;
            } else {
                at += size;
            }
        }
        size /= 2;
    }
    steps
}
