//! Shared by the kernel programs and the agent: the ABI of the maps and the packet decisions.
//!
//! - [`abi`]: keys and values of every map, the config, the verdicts. Layouts are asserted at compile time.
//! - [`wire`]: views of packet headers; the length is checked once, then accessors cannot fail.
//! - [`decide`]: the decisions, values in and values out. They use no map and no packet buffer, only traits that the
//!   eBPF programs and the host tests implement.
//! - `random`: random numbers from a seed, for tests.
//!
//! This crate does not allocate and does no I/O. Time and randomness are arguments.
#![no_std]
#![expect(
    clippy::cast_possible_truncation,
    reason = "lengths and offsets of packets are bounded where they stand; a checked conversion would bring a panic to programs that may not have one"
)]

#[cfg(any(test, feature = "model"))]
extern crate std;

pub mod abi;
pub mod decide;
#[cfg(any(test, feature = "model"))]
pub mod random;
pub mod wire;
