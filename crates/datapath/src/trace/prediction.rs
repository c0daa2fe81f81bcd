//! Predicts the verdict of a packet by the decision.
//!
//! The decision has neither routes and neighbours nor the rate limit of generated packets. In these cases the prediction is
//! a list of possible verdicts.

use egress_common::abi::{Addr, Config, HandoverStage, Origin, PolicySlot, SlotPlace, Verdict};
use egress_common::decide::from_pod::{self, FromPod};
use egress_common::decide::memory_maps::MemoryMaps;
use egress_common::decide::mtu::{self, Fit};
use egress_common::decide::snat::{self, SnatSource};
use egress_common::decide::{NatOwner, Tables};
use egress_common::wire::{Headers, Quote};

use crate::trace::recorder::{MapRecorder, RecordedLookup};

/// Possible outcomes of the packet.
#[derive(Clone, Debug, PartialEq)]
pub struct Prediction {
    /// The most likely first.
    pub verdicts: Vec<Verdict>,
    /// The flow's address, if the policy has one for it.
    pub slot: Option<(u32, PolicySlot)>,
    pub asked: Vec<RecordedLookup>,
}

impl Prediction {
    pub fn holds(&self, verdict: Verdict) -> bool {
        self.verdicts.contains(&verdict)
    }
}

/// Possible verdicts of the FIB lookup at the uplink.
pub(super) const FIB_VERDICTS: [Verdict; 4] =
    [Verdict::NoRoute, Verdict::NoNeighbour, Verdict::MtuAnswered, Verdict::MtuExceeded];
/// The same for the overlay.
const OVERLAY: [Verdict; 3] = [Verdict::NoRoute, Verdict::NoNeighbour, Verdict::EncapFailed];

/// Runs the decision of `from_pod` on a packet, and SNAT if this node is the gateway. `frame_len` is the length of the
/// frame (bytes).
pub fn predict(mut headers: Headers, frame_len: u32, maps: &MemoryMaps) -> Prediction {
    let config = maps.config.get();
    let recorder = MapRecorder::new(maps);
    if config.generation == 0 {
        return Prediction { verdicts: vec![Verdict::NotConfigured], slot: None, asked: Vec::new() };
    }
    let decision = from_pod::decide(&mut headers, &Quote::NONE, &recorder, &config);
    let (verdicts, slot) = match decision {
        FromPod::Done(verdict) => (vec![verdict], None),
        FromPod::Hairpin => (vec![Verdict::HairpinAnswered, Verdict::Hairpin], None),
        FromPod::Reset(verdict) => (vec![Verdict::CutAnswered, verdict], None),
        FromPod::Mark => (vec![Verdict::MarkedNode], None),
        FromPod::Send { egress_id, slot } => {
            let slot = *slot;
            let verdicts = match slot.place() {
                SlotPlace::Here => here(&headers, (&recorder, &config), egress_id, &slot),
                SlotPlace::Remote => remote(&headers, frame_len, &config, &slot.endpoint),
            };
            (verdicts, Some((egress_id, slot)))
        }
    };
    Prediction { verdicts, slot, asked: recorder.asked() }
}

/// As `snat_here` of the programs.
fn here(
    headers: &Headers,
    (recorder, config): (&MapRecorder<'_>, &Config),
    egress_id: u32,
    slot: &PolicySlot,
) -> Vec<Verdict> {
    let owned = recorder.owned(egress_id).filter(|owned| owned.address == slot.address);
    let Some(owned) = owned else {
        let leaves = recorder.handover(egress_id).is_some_and(|moving| moving.stage() == Some(HandoverStage::Leaving));
        return match leaves && headers.ttl > 1 {
            true => [&[Verdict::HandedOver, Verdict::OverlayTooNarrow], OVERLAY.as_slice()].concat(),
            false => vec![Verdict::NotGateway],
        };
    };
    let pool = SnatSource::of(owned, config);
    let owner = NatOwner { origin: Origin::Here, source_node: Addr::UNSPECIFIED, egress_id };
    match snat::translate(headers, &Quote::NONE, recorder, &pool, &owner) {
        Ok(_) => [&[Verdict::SnatHere], FIB_VERDICTS.as_slice()].concat(),
        Err(Verdict::PortTaken) => vec![Verdict::CutAnswered, Verdict::PortTaken],
        Err(verdict) => vec![verdict],
    }
}

/// As `to_gateway` of the programs.
fn remote(headers: &Headers, frame_len: u32, config: &Config, endpoint: &Addr) -> Vec<Verdict> {
    let length = mtu::wire_length(frame_len, 0, headers);
    match mtu::fit(length, config.overlay_mtu, headers, endpoint) {
        Fit::Tell(_) => vec![Verdict::MtuAnswered, Verdict::MtuExceeded],
        Fit::Lost => vec![Verdict::OverlayTooNarrow],
        Fit::Whole | Fit::Cut => [&[Verdict::ToGateway], OVERLAY.as_slice()].concat(),
    }
}
