//! Adapts tests to slow guests (`cargo xtask test --kernel`): more time, and fewer repetitions. The variables are set
//! only there.

use std::sync::Once;
use std::time::Duration;

fn factor(variable: &str) -> u32 {
    std::env::var(variable).map_or(1, |factor| factor.parse().expect("a factor"))
}

/// Time limit in this environment for something that takes at most `here` otherwise.
pub(crate) fn patience(here: Duration) -> Duration {
    here * factor("EGRESS_TEST_PATIENCE")
}

/// Number of repetitions in this environment. A guest logs it once.
pub(crate) fn rounds(here: u32) -> u32 {
    static SAID: Once = Once::new();
    let rounds = (here / factor("EGRESS_TEST_THINNED")).max(1);
    if rounds < here {
        SAID.call_once(|| println!("reduced: {rounds} rounds in a guest, {here} elsewhere"));
    }
    rounds
}
