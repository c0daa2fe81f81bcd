//! The data plane on the kernel: loading, attaching, pinning, adopting, acting, following devices, cleaning up.
//!
//! Every test runs in namespaces of its own (see `node`), which vanish with it however it ends. They need root; without
//! it each test says so and passes, and `cargo xtask test` does not start them at all but counts them as skipped.

mod actions;
mod announce;
mod bad_input;
mod clsact;
mod devices;
mod handing;
mod killed;
mod lifecycle;
mod metering;
mod node;
mod owned;
mod ports;
mod rights;
mod second_line;
#[path = "../skips/mod.rs"]
mod skips;
mod succession;
mod told;
