//! What the fuzz targets check. Each target is a function of bytes that panics where something does not hold:
//!
//! - [`parsing`]: whatever the frame, reading its heads and the quote of an ICMP error panics nowhere, and what was read
//!   stands where it was read from.
//! - [`decision`]: whatever the packets and the state of the maps, no packet is sent with a source that is not its object's,
//!   and none of a selected pod is left to the stack but where the rules say so.
//! - [`nat`]: sequences of packets, answers, errors, sweeps and changes on one node: both keys of a mapping live and die
//!   together, no two flows share a face, an answer comes to who asked, checksums that were right are right.
//!
//! The decisions are those of `egress-common`, and so are the maps as hash maps; the rewriting of bytes is a model
//! ([`edge`]), and [`node`] joins them as the programs do. The program tests of egress-agent hold that model to the
//! programs on the kernel, packet by packet. `cargo xtask fuzz` runs a target for a long time, from `libfuzzer/`, a workspace
//! of its own; `tests/corpus.rs` replays the committed inputs in the ordinary test run.

pub mod decision;
pub mod edge;
pub mod frame;
mod input;
pub mod nat;
pub mod node;
pub mod parsing;
mod places;

pub use decision::decision;
pub use nat::nat;
pub use parsing::parsing;

/// A target by its name.
#[must_use]
pub fn target(name: &str) -> Option<fn(&[u8])> {
    Some(match name {
        "parsing" => parsing,
        "decision" => decision,
        "nat" => nat,
        _ => return None,
    })
}
