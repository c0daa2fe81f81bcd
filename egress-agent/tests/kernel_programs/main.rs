//! The programs on the kernel, one packet at a time (`BPF_PROG_TEST_RUN`): bytes in, action and bytes out, and exactly
//! one counter that moved.
//!
//! Every expected frame is built anew with checksums computed from scratch (`frames`), so equality proves each rewritten
//! byte outside of the programs' own arithmetic. Test bodies are shared by both families (`stage::both`). A redirect is
//! not carried out by a test run: what the kernel does behind it belongs to the tests of the lab. They need root; without
//! it each test says so and passes, and `cargo xtask test` does not start them at all but counts them as skipped.

mod aging;
mod cast;
mod clean_maps;
mod devices;
mod dumps;
mod encapsulation;
mod expiry;
mod flow_cache;
mod fragmentation;
mod fragments;
mod frames;
mod from_overlay;
mod from_pod;
mod generated_errors;
mod hairpin;
mod handover;
mod icmp_errors;
mod lease;
mod limits;
mod mutants;
mod neighbours;
mod next_hops;
mod object;
mod object_pool;
mod oracle;
mod protocols;
mod races;
mod replies;
mod resets;
mod reuse;
mod sctp;
#[path = "../skips/mod.rs"]
mod skips;
mod slow_guest;
mod stage;
mod test_run;
mod to_netdev;
mod traces;
mod v4_mapped;
mod verifier;
mod vlan;
