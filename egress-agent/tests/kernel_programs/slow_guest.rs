//! What a guest's slowness makes of a test (`cargo xtask test --kernel`): more time, and less to repeat. Each variable is
//! set there and nowhere else.

use std::sync::Once;
use std::time::Duration;

fn factor(variable: &str) -> u32 {
    std::env::var(variable).map_or(1, |factor| factor.parse().expect("a factor"))
}

/// How long something may take that takes at most `here` on a machine of its own.
pub(crate) fn patience(here: Duration) -> Duration {
    here * factor("EGRESS_TEST_PATIENCE")
}

/// How often something is repeated that is repeated so often here. A guest says so once.
pub(crate) fn rounds(here: u32) -> u32 {
    static SAID: Once = Once::new();
    let rounds = (here / factor("EGRESS_TEST_THINNED")).max(1);
    if rounds < here {
        SAID.call_once(|| println!("reduced: {rounds} rounds in a guest, {here} elsewhere"));
    }
    rounds
}
