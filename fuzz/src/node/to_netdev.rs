//! Packets that leave by the uplink.

use egress_common::abi::{Direction, NODE_MARK, Verdict};
use egress_common::decide::from_netdev;
use egress_common::decide::to_netdev::{self, Meta, ToNetdev};
use egress_common::decide::{Rewrite, Tables};
use egress_common::wire::{Headers, Quote};

use super::{ModelNode, PacketOutcome, Skb, quoted};
use crate::rewrite;

impl ModelNode {
    pub(super) fn run_to_netdev(&mut self, skb: &Skb<'_>, meta: &Meta) -> PacketOutcome {
        let (frame, config) = (skb.frame, self.config());
        let mut headers = match Self::headers(frame, Direction::Egress) {
            Ok(headers) => headers,
            Err(verdict) => return PacketOutcome::done(verdict, frame, meta.mark),
        };
        if to_netdev::is_misdirected(&headers.tuple.saddr, meta, &self.maps, &config) {
            return PacketOutcome::Dropped(Verdict::WrongInterface);
        }
        let quote = quoted(frame, &headers);
        let outcome = match to_netdev::decide(&mut headers, &quote, meta, &self.maps, &config) {
            ToNetdev::Done(verdict) => PacketOutcome::done(verdict, frame, meta.mark),
            ToNetdev::Unmark => PacketOutcome::Passed(Verdict::NodeSnatDone, frame.to_vec(), meta.mark & !NODE_MARK),
            ToNetdev::NodeSnat => self.node_snat(&headers, &quote, frame, meta),
        };
        self.judge_wire(&headers, meta, &outcome);
        outcome
    }

    fn node_snat(&mut self, headers: &Headers, quote: &Quote, frame: &[u8], meta: &Meta) -> PacketOutcome {
        let (config, mark) = (self.config(), meta.mark & !NODE_MARK);
        let nat_entry = match to_netdev::translate(headers, quote, meta.ifindex, &self.maps, &config) {
            Ok(nat_entry) => *nat_entry,
            Err(Verdict::PortTaken) => return self.reset_from_uplink(headers, frame),
            Err(verdict) => return PacketOutcome::Dropped(verdict),
        };
        let own = match self.maps.interface(meta.ifindex) {
            Some(addresses) => addresses.of(headers.family),
            None => from_netdev::node_address(&config, headers.family),
        };
        if Rewrite::snat(&nat_entry).addr != own {
            return PacketOutcome::Dropped(Verdict::ClaimLost);
        }
        self.note_flow(headers, &nat_entry);
        match Self::translated(headers, quote, frame.to_vec(), config.node_ports, &nat_entry) {
            Ok(out) => PacketOutcome::Passed(Verdict::NodeSnat, out, mark),
            Err(verdict) => PacketOutcome::Dropped(verdict),
        }
    }

    /// The pod gets a reset by the management port.
    fn reset_from_uplink(&self, headers: &Headers, frame: &[u8]) -> PacketOutcome {
        match rewrite::reset(frame, headers) {
            Some(_) if !(self.resolved)(&headers.tuple.saddr) => PacketOutcome::Dropped(Verdict::NoNeighbour),
            Some(frame) => PacketOutcome::Sent(Verdict::CutAnswered, frame),
            None => PacketOutcome::Dropped(Verdict::PortTaken),
        }
    }
}
