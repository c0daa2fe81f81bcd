//! The programs on the kernel, one packet at a time (`BPF_PROG_TEST_RUN`): bytes in, action and bytes out, and exactly
//! one counter that moved.
//!
//! Every expected frame is built with checksums over the whole packet (`frames`), so equality proves each rewritten
//! byte independently of the programs' arithmetic. Both families share test bodies (`stage::both`). A test run does not
//! perform a redirect: lab tests cover that. The tests need root; without it each one reports that and passes, and
//! `cargo xtask test` counts them as skipped.

mod aging;
mod answers;
mod bandwidth;
mod blocks;
mod cast;
mod classes;
mod clean_maps;
mod devices;
mod dumps;
mod encapsulation;
mod expiry;
mod fib_helper;
mod flow_cache;
mod fragmentation;
mod fragments;
mod frames;
mod from_overlay;
mod from_pod;
mod further_routes;
mod generated_errors;
mod hairpin;
mod handover;
mod host_addresses;
mod host_routes;
mod icmp_errors;
mod interfaces;
mod lease;
mod limits;
mod mixed_objects;
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
mod shared_addresses;
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
