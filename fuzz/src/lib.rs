//! The fuzz targets. Each target is a function of bytes that panics if an invariant does not hold:
//!
//! - [`parsing`]: parsing any frame and the quote of an ICMP error does not panic, and parsed fields match the bytes.
//! - [`decision`]: for any packets and maps, no packet gets a source of another policy, and selected pods' packets are
//!   left to the stack only where the rules allow it.
//! - [`nat`]: sequences of packets, answers, errors, sweeps and changes on one node: both keys of a NAT entry exist
//!   together, no two flows share a translated source, answers reach their flow, valid checksums stay valid.
//! - [`router`]: any configuration of an egress router is refused or can be planned, with what administrators rely on, and an
//!   entry of its lists means the same however it is written.
//!
//! The decisions are those of `egress-common`, and so are the maps as hash maps; the rewriting of bytes is a model
//! ([`rewrite`]), and [`node`] joins them as the programs do. The program tests of egress-agent hold that model to the
//! programs on the kernel, packet by packet. `cargo xtask fuzz` runs a target for a long time, from `libfuzzer/`, a workspace
//! of its own; `tests/corpus.rs` replays the committed inputs in the ordinary test run.

mod addresses;
pub mod decision;
pub mod frame;
mod input;
pub mod nat;
pub mod node;
pub mod parsing;
pub mod rewrite;
mod router;

pub use decision::decision;
pub use nat::nat;
pub use parsing::parsing;
pub use router::router;

/// A target by name.
#[must_use]
pub fn target(name: &str) -> Option<fn(&[u8])> {
    Some(match name {
        "parsing" => parsing,
        "decision" => decision,
        "nat" => nat,
        "router" => router,
        _ => return None,
    })
}
