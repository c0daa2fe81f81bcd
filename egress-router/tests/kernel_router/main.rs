//! The plugin on the running kernel: called as a runtime calls it, in namespaces of a small world, with packets that are really
//! sent. Needs root.

mod calls;
mod chain;
mod failures;
mod traffic;
mod world;

#[path = "../../../egress-agent/tests/skips/mod.rs"]
mod skips;
