//! The data plane on the kernel: loading, attaching, pinning, adopting, acting, following devices, cleaning up.
//!
//! Every test runs in its own namespaces (see `node`), which end with it. The tests need root; without it they are skipped
//! with a note.

mod abi_migration;
mod actions;
mod announce;
mod bad_input;
mod blocks;
mod bpffs;
mod clsact;
mod devices;
mod handover;
mod idle_reset;
mod interfaces;
mod killed;
mod kinds;
mod leak_guard;
mod lifecycle;
mod metering;
mod networks;
mod node;
mod ownership;
mod pacing;
mod ports;
mod records;
mod rights;
#[path = "../skips/mod.rs"]
mod skips;
