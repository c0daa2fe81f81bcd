//! The messages of the simulation, and their random delays.

use super::*;

pub(super) fn milliseconds(random: &mut Random, below: usize) -> Duration {
    TICK * u32::try_from(random.below(below)).expect("few") / 10
}

pub(super) fn delay(random: &mut Random, quiet: bool) -> Duration {
    let most = if !quiet && random.one_in(20) { 400 } else { 40 };
    milliseconds(random, most) + TICK / 10
}

/// Messages between leaders, nodes and the API server; any may be late or lost.
pub(super) enum SimulatedMessage {
    Probe {
        leader: usize,
        node: usize,
        number: u64,
        confirmed: u64,
        term: u64,
        orders: Acknowledgements,
    },
    Answer {
        leader: usize,
        node: usize,
        number: u64,
        term: u64,
        /// The greatest term that the node knows of.
        greatest: u64,
        released: Acknowledgements,
    },
    /// The node's kernel refuses a probe: its agent is dead.
    Alive {
        leader: usize,
        node: usize,
    },
    ReadLedger {
        node: usize,
        began: Instant,
    },
    HasRead {
        node: usize,
        began: Instant,
        suspected: bool,
        terms: LeaseTerms,
    },
    ReadObjects {
        node: usize,
        ask: u64,
    },
    HasObjects {
        node: usize,
        ask: u64,
        ledger: Arc<Ledger>,
        policies: Arc<Policies>,
    },
    Acknowledge {
        node: usize,
        acknowledgements: Acknowledgements,
    },
    WriteLedger {
        leader: usize,
        base: usize,
        ledger: Ledger,
    },
    WriteObject {
        leader: usize,
        base: Arc<EgressPolicy>,
        policy: EgressPolicy,
    },
    Written {
        leader: usize,
        done: bool,
    },
}
