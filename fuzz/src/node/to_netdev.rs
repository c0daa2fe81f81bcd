//! Out by the uplink.

use egress_common::abi::{Direction, NODE_MARK, Verdict};
use egress_common::decide::Rewrite;
use egress_common::decide::from_netdev;
use egress_common::decide::to_netdev::{self, Meta, ToNetdev};
use egress_common::wire::{Headers, Quote};

use super::{Node, Outcome, Skb, quoted};
use crate::edge;

impl Node {
    pub(super) fn run_to_netdev(&mut self, skb: &Skb<'_>, meta: &Meta) -> Outcome {
        let (frame, config) = (skb.frame, self.config());
        let mut heads = match Self::heads(frame, Direction::Egress) {
            Ok(heads) => heads,
            Err(verdict) => return Outcome::done(verdict, frame, meta.mark),
        };
        let quote = quoted(frame, &heads);
        let outcome = match to_netdev::decide(&mut heads, &quote, meta, &self.world, &config) {
            ToNetdev::Done(verdict) => Outcome::done(verdict, frame, meta.mark),
            ToNetdev::Unmark => Outcome::Passed(Verdict::NodeSnatDone, frame.to_vec(), meta.mark & !NODE_MARK),
            ToNetdev::NodeSnat => self.node_snat(&heads, &quote, frame, meta.mark & !NODE_MARK),
        };
        self.judge_wire(&heads, meta, &outcome);
        outcome
    }

    /// `mark` is what is left of it.
    fn node_snat(&mut self, heads: &Headers, quote: &Quote, frame: &[u8], mark: u32) -> Outcome {
        let config = self.config();
        let mapping = match to_netdev::translate(heads, quote, &self.world, &config) {
            Ok(mapping) => *mapping,
            Err(Verdict::PortTaken) => return self.reset_from_uplink(heads, frame),
            Err(verdict) => return Outcome::Dropped(verdict),
        };
        if Rewrite::snat(&mapping).addr != from_netdev::node_address(&config, heads.family) {
            return Outcome::Dropped(Verdict::ClaimLost);
        }
        match self.translated(heads, quote, frame.to_vec(), config.node_ports, &mapping) {
            Ok(out) => Outcome::Passed(Verdict::NodeSnat, out, mark),
            Err(verdict) => Outcome::Dropped(verdict),
        }
    }

    /// The pod is told by the management port.
    fn reset_from_uplink(&self, heads: &Headers, frame: &[u8]) -> Outcome {
        match edge::reset(frame, heads) {
            Some(_) if !(self.resolved)(&heads.tuple.saddr) => Outcome::Dropped(Verdict::NoNeighbour),
            Some(frame) => Outcome::Sent(Verdict::CutAnswered, frame),
            None => Outcome::Dropped(Verdict::PortTaken),
        }
    }
}
