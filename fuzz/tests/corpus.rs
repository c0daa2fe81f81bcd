//! Replays the committed inputs of every fuzz target, and short random ones (seeded).

use std::fs;
use std::path::Path;

/// Inputs per target that are not from the corpus.
const RANDOM: u64 = 500;

fn replay(name: &str) {
    let target = egress_fuzz::target(name).expect("a target");
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(name);
    let mut replayed = 0;
    for entry in fs::read_dir(&folder).expect("the corpus") {
        let path = entry.expect("an entry").path();
        // Printed only with a failure.
        println!("{}", path.display());
        target(&fs::read(&path).expect("an input"));
        replayed += 1;
    }
    assert!(replayed > 0, "{} is empty", folder.display());
    for seed in 1..=RANDOM {
        println!("seed {seed}");
        target(&random(seed));
    }
}

/// Up to 512 bytes by xorshift64*.
fn random(seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let length = 16 + seed % 497;
    (0..length)
        .map(|_| {
            state ^= state >> 12;
            state ^= state << 25;
            state ^= state >> 27;
            state.wrapping_mul(0x2545_f491_4f6c_dd1d).to_be_bytes()[0]
        })
        .collect()
}

#[test]
fn parsing_holds_for_the_corpus() {
    replay("parsing");
}

#[test]
fn decisions_hold_for_the_corpus() {
    replay("decision");
}

#[test]
fn nat_holds_for_the_corpus() {
    replay("nat");
}

#[test]
fn routers_hold_for_the_corpus() {
    replay("router");
}
