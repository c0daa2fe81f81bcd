//! Reads the state of the maps.

use std::collections::BTreeMap;

use egress_common::abi::{self, Addr, ExposedPort, Exposure, Owned, PolicyEntryKey};

use crate::executor::kernel;
use crate::maps::convert;
use crate::node_state::State;
use crate::node_state::shared::Shared;
use egress_core::model::state::{EgressId, KernelState, PodPort};
use egress_core::plan::executor::DataplaneError;

pub fn observe(shared: &Shared) -> Result<KernelState, DataplaneError> {
    let mut seen = {
        let mut state = shared.state();
        state.end_initial_state();
        KernelState { on_unknown_pod: state.on_unknown_pod(), ..held(&state)? }
    };
    let mut guard = shared.policy_maps();
    let maps = &mut *guard;
    maps.pods
        .for_each(|key: &Addr, entry| {
            seen.pods.insert(key.to_ip(), convert::pod_state(entry));
            seen.owners.extend(convert::pod_owner(entry).map(|owner| (key.to_ip(), owner)));
        })
        .map_err(kernel("read map pods"))?;
    maps.exposed
        .for_each(|key: &ExposedPort, _: &Exposure| {
            let port = PodPort { protocol: key.protocol, number: u16::from_be_bytes(key.port) };
            seen.exposed.entry(key.address.to_ip()).or_default().insert(port);
        })
        .map_err(kernel("read map exposed"))?;
    let mut sets = BTreeMap::new();
    maps.policy
        .for_each(|key: &PolicyEntryKey, value| {
            if let Some(family) = key.family() {
                let key = (EgressId(key.egress_id), family);
                seen.policy.insert(key, convert::policy(value));
                sets.extend(value.destinations().map(|set| (key, set)));
            }
        })
        .map_err(kernel("read map policy"))?;
    let destinations = maps.destinations.read().map_err(kernel("read map destinations"))?;
    let used = sets.values().copied().collect();
    maps.destinations.retain(&used).map_err(kernel("remove from map destinations"))?;
    for (key, set) in &sets {
        if let (Some(policy), Some(entries)) = (seen.policy.get_mut(key), destinations.get(set)) {
            *policy = convert::with_candidates(policy.clone(), entries);
        }
    }
    seen.classes = convert::classes(maps.classes.read().map_err(kernel("read map classes"))?);
    maps.nodes
        .for_each(|key: &Addr, entry| {
            seen.nodes.insert(key.to_ip(), convert::node(entry));
        })
        .map_err(kernel("read map nodes"))?;
    let see = |key: &_, value: &_| {
        if let (Some(net), Some(prefix)) = (convert::cluster_net(key), convert::prefix(value)) {
            seen.cluster.insert(net, prefix);
        }
    };
    maps.cluster.for_each(see).map_err(kernel("read map cluster"))?;
    Ok(seen)
}

pub fn held(state: &State) -> Result<KernelState, DataplaneError> {
    let mut held = KernelState::default();
    let see = |id: &u32, entry: &Owned| {
        held.owned.insert(EgressId(*id), entry.address.to_ip());
        held.shared.extend(convert::shared_with(entry).map(|with| (EgressId(*id), with)));
    };
    state.maps.owned.for_each(see).map_err(kernel("read map owned"))?;
    let see = |id: &u32, entry: &abi::HandoverEntry| {
        held.handovers.extend(convert::handover(entry).map(|handover| (EgressId(*id), handover)));
    };
    state.maps.handovers.for_each(see).map_err(kernel("read map handovers"))?;
    Ok(held)
}
