//! The messages of the simulation, and its random source.

use super::*;

/// The random source for delays and faults.
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        let number = self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33;
        usize::try_from(number).expect("31 bits") % bound
    }

    pub(super) fn milliseconds(&mut self, below: usize) -> Duration {
        TICK * u32::try_from(self.below(below)).expect("few") / 10
    }

    pub(super) fn delay(&mut self, quiet: bool) -> Duration {
        let most = if !quiet && self.below(20) == 0 { 400 } else { 40 };
        self.milliseconds(most) + TICK / 10
    }
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
