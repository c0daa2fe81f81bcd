//! Tests that can show nothing where they run. Such a test passes, as `cargo test` knows nothing else; `cargo xtask test` gives
//! the name of a file, counts what is noted there as skipped, and fails unless it is on its list (xtask/src/testing/skips.rs).

use std::fs::OpenOptions;
use std::io::Write;

/// Names the file.
const VARIABLE: &str = "EGRESS_TEST_SKIPS";

/// Notes that the test of this thread ends here, or leaves a part out, and why.
pub(crate) fn skipped(reason: &str) {
    println!("skipped: {reason}");
    let Some(file) = std::env::var_os(VARIABLE) else { return };
    let name = std::thread::current().name().unwrap_or("a thread without a name").to_owned();
    let file = OpenOptions::new().create(true).append(true).open(file);
    // One write for one line, since tests run beside one another.
    let noted = file.and_then(|mut file| file.write_all(format!("{name}\t{reason}\n").as_bytes()));
    noted.expect("note that a test is skipped");
}
