//! What is played on the test cluster of `egress-lab`, with real agents.
//!
//! | folder | what |
//! |---|---|
//! | `cases` | the life of the product: restarts, selection, hand-overs, bad input, kubectl, cleanup |
//! | `paths` | what must hold for every packet on both paths |
//! | `soak` | randomised fault injection (seeded), what faults cost and that they break no promise |
//! | `faults` | the faults of ownership, and which node emitted an egress IP during each |
//! | `bench` | the speed of the datapath and of the control plane |
//! | `story` | the walkthrough that `cargo xtask run` plays |
//! | `nodes` | the product on two real Kubernetes nodes |

pub mod bench;
pub mod cases;
pub mod faults;
pub mod nodes;
pub mod paths;
mod prelude;
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
