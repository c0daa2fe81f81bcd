//! Hand-over of an address between two nodes: see `egress_common::abi::HandoverEntry`.
//!
//! The old owner writes its entry first and then removes the address from `owned`, so that no packet is translated here after
//! the step, none is lost for lack of an entry, and no flow keeps the former decision. `owned_addr` stays until the end:
//! replies that still arrive here are accepted, but ARP and neighbour discovery are not answered. An agent that ends between
//! the two steps leaves an owned address, which takes precedence.

use std::io;
use std::net::IpAddr;

use egress_common::abi::{self, Owned};
use tracing::info;

use crate::clock::now_ns;
use crate::executor::{kernel, put as put_entry, remove};
use crate::maps::convert;
use crate::node_state::State;
use egress_core::model::state::{EgressId, HandoverStage, HandoverState};
use egress_core::plan::executor::DataplaneError;

/// A flow may appear idle for half a second after a packet (`flow_cache` of the programs).
const NOTED_NS: u64 = 500_000_000;

pub fn put(state: &mut State, id: EgressId, handover: HandoverState) -> Result<(), DataplaneError> {
    let HandoverState { stage, address, peer, shared_with } = handover;
    let owned = entry(state, id, &handover)?;
    let before = state.maps.handovers.get(&id.0).map_err(kernel("read map handovers"))?;
    // Ends an earlier hand-over of the same policy, which no other action ends.
    if let Some(other) = before.filter(|before| before.owned.address != owned.address) {
        end(state, id, other.owned.address.to_ip())?;
    }
    let goes_on = before.filter(|before| before.peer == peer.0.into() && before.owned.address == owned.address);
    let since_ns = match goes_on {
        Some(before) => before.since_ns,
        None => now_ns().map_err(kernel("read the clock"))?.saturating_sub(NOTED_NS),
    };
    let entry = abi::HandoverEntry::new(id.0, stage, since_ns, peer.0.into(), owned);
    put_entry("handovers", &mut state.maps.handovers, &id.0, &entry)?;
    if stage == HandoverStage::Leaving {
        let given_up = state.with_decisions_suspended(|maps| maps.owned.remove(&id.0));
        given_up.map_err(kernel("remove from map owned"))?;
        // Ends the announcements. After the step, because a busy kernel may be slow to change a filter.
        if shared_with.is_none() {
            state.claims.leave(owned.ifindex, address);
        }
        info!(%address, id = id.0, "egress IP is no longer served here");
    }
    Ok(())
}

/// The owned entry, current or future.
fn entry(state: &State, id: EgressId, handover: &HandoverState) -> Result<Owned, DataplaneError> {
    if handover.stage == HandoverStage::Leaving {
        // Independent of the interface: a node that cannot send releases the address too.
        let owned = state.maps.owned.get(&id.0).map_err(kernel("read map owned"))?;
        if let Some(owned) = owned.filter(|owned| owned.address == handover.address.into()) {
            return Ok(owned);
        }
    }
    let no_interface = || kernel("hand an egress IP over")(io::Error::from_raw_os_error(libc::ENETDOWN));
    let interface = state.interface_of_owned(handover.address, handover.shared_with).ok_or_else(no_interface)?;
    Ok(convert::owned(id, handover.address, interface, handover.shared_with))
}

pub fn end(state: &mut State, id: EgressId, address: IpAddr) -> Result<(), DataplaneError> {
    remove("remove from map handovers", &mut state.maps.handovers, &id.0)?;
    let owned = state.maps.owned.get(&id.0).map_err(kernel("read map owned"))?;
    let key = address.into();
    let answers = state.maps.owned_addr.get(&key).map_err(kernel("read map owned_addr"))?;
    // The address may be owned here again, or by another policy.
    let is_over = owned.is_none_or(|owned| owned.address != key);
    if is_over && answers.is_some_and(|entry| entry.egress_id == id.0) {
        remove("remove from map owned_addr", &mut state.maps.owned_addr, &key)?;
        state.rebuild_owned_filter().map_err(kernel("write map config"))?;
    }
    Ok(())
}
