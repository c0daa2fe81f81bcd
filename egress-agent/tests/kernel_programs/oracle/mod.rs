//! The host build of the decisions as the oracle of the programs: stories of random and bent packets, each packet through
//! the program of its hook on the kernel and through the model of a node (egress-fuzz), with the state of both kept for the
//! whole story. Verdict, bytes out, mark and the contents of the maps must be the same; only a port that had to be searched
//! for is the kernel's to choose, and it must be one that is free in the model too.
//!
//! Stories follow from their number. One that fails is told again with steps left out for as long as it still fails, and
//! what remains is printed with its number. `EGRESS_ORACLE_SEED` tells one story only; `EGRESS_ORACLE_SECONDS` goes on for
//! so long, with stories that no run before had (`cargo xtask fuzz kernel`).

mod compare;
mod derived_frames;
mod initial_maps;
mod runner;
mod story;

use std::time::{Duration, Instant};

use egress_common::abi::Verdict;
use runner::Rig;
use story::{Step, story};

use crate::slow_guest::rounds;
use crate::stage::{Stage, on_stage_with};

/// Stories of an ordinary test run, per variety.
const STORIES: u32 = 200;
/// How often a failing story is told again to make it shorter, and for how long.
const RETELLINGS: usize = 300;
const SHORTENING: Duration = Duration::from_secs(60);
/// How often a long run says how far it is.
const SAY_EVERY: Duration = Duration::from_secs(10);

/// Without these the stories would be about nothing.
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

/// Mappings and flows are refused where the maps are full, and nothing else goes wrong.
#[test]
fn programs_do_what_the_model_does_when_maps_are_full() {
    on_stage_with(&[("nat", 14), ("flows", 9), ("inbound", 5)], |stage| tell(stage, 1 << 32));
}

fn number(variable: &str) -> Option<u64> {
    let text = std::env::var(variable).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{variable} is no number: {text}")))
}

fn tell(stage: &mut Stage, first: u64) {
    let mut rig = Rig::new(stage);
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
    // Another place to begin in every run.
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

fn one(rig: &mut Rig, seed: u64) {
    let steps = story(seed);
    let Err(first) = rig.tell(&steps) else { return };
    let shortest = shortened(rig, steps);
    let last = rig.tell(&shortest);
    let lines: Vec<String> = shortest.iter().map(|(id, step)| format!("  {id}: {step:?}")).collect();
    let last = last.err().unwrap_or_else(|| format!("it does not fail again; at first it was\n{first}"));
    panic!("story {seed} (EGRESS_ORACLE_SEED={seed}), made shorter:\n{}\n{last}", lines.join("\n"));
}

/// Without the steps that it fails without.
fn shortened(rig: &mut Rig, mut steps: Vec<(usize, Step)>) -> Vec<(usize, Step)> {
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
