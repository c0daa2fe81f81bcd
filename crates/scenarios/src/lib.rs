//! What runs on the test cluster of `egress-lab`, with real agents: test cases of the product's life (`cases`) and of packets
//! (`paths`), randomised fault injection (`soak`), faults of ownership (`faults`), benchmarks (`bench`), the walkthrough of
//! `cargo xtask run` (`story`), and two real Kubernetes nodes (`nodes`).

pub mod bench;
pub mod cases;
mod connections;
pub mod faults;
pub mod nodes;
pub mod paths;
mod prelude;
mod received;
pub mod soak;
pub mod story;

use egress_lab::test::LabTest;

/// Every test on the lab, in the order in which they run.
pub fn tests() -> Vec<LabTest> {
    let mut tests = cases::tests();
    tests.extend(paths::tests());
    tests.extend(soak::tests());
    tests.extend(faults::tests());
    tests.extend(bench::tests());
    tests
}
