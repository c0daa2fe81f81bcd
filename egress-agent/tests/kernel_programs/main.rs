//! The programs on the kernel, one packet at a time (`BPF_PROG_TEST_RUN`): bytes in, action and bytes out, and exactly
//! one counter that moved.
//!
//! Every expected frame is built anew with checksums computed from scratch (`frames`), so equality proves each rewritten
//! byte outside of the programs' own arithmetic. Test bodies are shared by both families (`stage::both`). A redirect is
//! not carried out by a test run: what the kernel does behind it belongs to the tests of the lab. They need root; without
//! it each test says so and passes, and `cargo xtask test` does not start them at all but counts them as skipped.

mod ages;
mod answers;
mod cast;
mod cut;
mod devices;
mod dumps;
mod emptied;
mod encapsulation;
mod errors;
mod figures;
mod fragments;
mod frames;
mod guard;
mod hairpin;
mod kept;
mod lease;
mod life;
mod limits;
mod mapped;
mod moving;
mod mutants;
mod neighbours;
mod object;
mod oracle;
mod overlay;
mod pace;
mod pieces;
mod pods;
mod protocols;
mod races;
mod recent;
mod replies;
mod reuse;
mod runs;
mod sctp;
#[path = "../skips/mod.rs"]
mod skips;
mod stage;
mod traces;
mod vlan;
mod ways;
