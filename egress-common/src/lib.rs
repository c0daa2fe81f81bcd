//! What the kernel programs and the agent share: the ABI of the maps and the packet decisions.
//!
//! - [`abi`]: keys and values of every map, the config, the verdicts. Layouts are asserted at compile time.
//! - [`wire`]: views of packet headers; the length is checked once, then accessors cannot fail.
//! - [`decide`]: the decisions, values in and values out. They know no map and no packet buffer, only the traits that
//!   the eBPF programs and the host tests implement.
//!
//! Nothing here allocates, does I/O or knows the time: those are arguments.
#![no_std]
#![expect(
    clippy::cast_possible_truncation,
    reason = "lengths and offsets of packets are bounded where they stand; a checked conversion would bring a panic to programs that may not have one"
)]

#[cfg(any(test, feature = "model"))]
extern crate std;

pub mod abi;
pub mod decide;
pub mod wire;
