//! The second half of a packet's path: what this node does, as the gateway, with a packet that another node sends by the overlay.
//!
//! The decision of `from_overlay` and the choice of the port run on the host, over copies of the map entries that concern the
//! packet. The programs are not run: a test run cannot carry a tunnel header. The route and the next hop at the egress
//! interface are not looked up either, so their verdicts are listed as possible.

use std::path::Path;

use egress_common::abi::{Addr, Config, NatEntry, Owned, Verdict};
use egress_common::decide::from_overlay::{self, FromOverlay, Outer};
use egress_common::decide::memory_maps::MemoryMaps;
use egress_common::wire::{Headers, Quote};

use crate::attach::listing;
use crate::names::{Hook, Pins};
use crate::trace::TraceError;
use crate::trace::copy::CopiedMaps;
use crate::trace::prediction::FIB_VERDICTS;
use crate::trace::recorder::{MapRecorder, RecordedLookup};
use crate::trace::test_packet::TestPacket;

/// What becomes of the packet here.
#[derive(Debug)]
pub struct TracedArrival {
    pub outer: Outer,
    pub headers: Headers,
    pub decided: ArrivalDecision,
    /// Whether the flow has a NAT entry already.
    pub is_known: bool,
    /// Whether the program that receives packets of the overlay is on its hook.
    pub is_attached: bool,
}

#[derive(Clone, Debug, PartialEq)]
pub struct ArrivalDecision {
    /// The most likely first.
    pub verdicts: Vec<Verdict>,
    /// The NAT entry, existing or new. The port is random if the source port is taken.
    pub mapping: Option<NatEntry>,
    /// The node that a hand-over passes the packet on to.
    pub passed_to: Option<Addr>,
    pub asked: Vec<RecordedLookup>,
}

/// Follows the packet on the gateway; changes no map.
pub fn trace_arrival(bpffs: &Path, packet: &TestPacket, outer: Outer) -> Result<TracedArrival, TraceError> {
    let pins = Pins::new(bpffs);
    if !pins.map("config").try_exists()? {
        return Err(TraceError::NoPrograms(bpffs.to_owned()));
    }
    let headers = packet.headers().ok_or(TraceError::TwoFamilies)?;
    let copied = CopiedMaps::of_arrival(&pins, &headers, &outer)?;
    let config = copied.maps.config.get();
    let hook = if config.is_overlay_in_program() { Hook::FromNetdev } else { Hook::FromOverlay };
    let is_attached = listing::attached(&pins, &config, hook)?.is_some();
    let is_known = copied.maps.nat.get(&headers.tuple).is_some();
    let decided = decide(headers, &outer, &copied.maps);
    Ok(TracedArrival { outer, headers, decided, is_known, is_attached })
}

/// As `from_overlay` of the programs.
pub fn decide(mut headers: Headers, outer: &Outer, maps: &MemoryMaps) -> ArrivalDecision {
    let config = maps.config.get();
    let recorder = MapRecorder::new(maps);
    let (verdicts, mapping, passed_to) = if config.generation == 0 {
        (vec![Verdict::NotConfigured], None, None)
    } else {
        match from_overlay::decide(&mut headers, &Quote::NONE, outer, &recorder, &config) {
            FromOverlay::Done(verdict) => (vec![verdict], None, None),
            FromOverlay::Deliver => (vec![Verdict::ReplyDelivered], None, None),
            FromOverlay::Answer => (vec![Verdict::ReplyHere, Verdict::ReplyToNode, Verdict::NoNatEntry], None, None),
            FromOverlay::PassOn => {
                let peer = maps.handovers.borrow().get(&outer.egress_id).map(|moving| moving.peer);
                (vec![Verdict::HandedOver, Verdict::OverlayTooNarrow], None, peer)
            }
            FromOverlay::Translate { owned, source_node } => {
                let (verdicts, mapping) = translated(&headers, &recorder, (owned, source_node), outer, &config);
                (verdicts, mapping, None)
            }
        }
    };
    ArrivalDecision { verdicts, mapping, passed_to, asked: recorder.asked() }
}

fn translated(
    headers: &Headers,
    recorder: &MapRecorder<'_>,
    (owned, source_node): (&Owned, &Addr),
    outer: &Outer,
    config: &Config,
) -> (Vec<Verdict>, Option<NatEntry>) {
    match from_overlay::translate(headers, &Quote::NONE, recorder, owned, outer.egress_id, source_node, config) {
        Ok(mapping) => ([&[Verdict::SnatForNode], FIB_VERDICTS.as_slice()].concat(), Some(*mapping)),
        Err(Verdict::PortTaken) => (vec![Verdict::CutAnswered, Verdict::PortTaken], None),
        Err(verdict) => (vec![verdict], None),
    }
}
