//! Initial maps of a story, for the programs and for the model.

use aya::Pod;
use aya::maps::{HashMap as KernelMap, Map, MapData};
use egress_common::abi::{Addr, ClassPolicy, Exposure, Family, PodEntry, PortRange, Tuple, Usage};
use egress_common::decide::memory_maps::MemoryMaps;
use egress_fuzz::node::ModelNode;

use super::derived_frames::SECRET;
use crate::cast::{V4, V6, addr};
use crate::clean_maps::ClearableMap as _;
use crate::stage::Stage;

/// A single port, so that stories exhaust the range.
const NODE_PORTS: PortRange = PortRange { first: 61_000, last: 61_000 };

/// Ports by which pods are reached from outside, in their order.
const EXPOSED: [u16; 3] = [4000, 80, 443];

/// Clears the state of the programs, fills the other maps, and creates the same model.
pub(super) fn begin(stage: &mut Stage, decisions: u32) -> ModelNode {
    stage.nat.empty();
    stage.flows.empty();
    stage.inbound.empty();
    stage.exposed.empty();
    stage.frags.empty();
    stage.awaited.empty();
    stage.datagrams.empty();
    stage.exhausted.empty();
    stage.handovers.empty();
    stage.shares.empty();
    stage.usage.set(0, Usage::default(), 0).expect("write the usage");
    // Outcomes of the last story.
    stage.turn();
    stage.refill_answers();
    stage.configure(|config| {
        config.decisions = decisions;
        config.overlay_secret = SECRET;
        config.node_ports = NODE_PORTS;
        // Exposed ports, as one of the two kinds of evidence.
        config.direct_routing = 0;
    });
    for cast in [V4, V6] {
        // It may not exist.
        let _gone = stage.pods.remove(&addr(cast.unknown_pod));
        stage.fill(&cast);
        stage.put_pod(cast.pending_pod, PodEntry::selected(cast.here, 0));
    }
    stage.classes.empty();
    for cast in [V4, V6] {
        let (here, away) = (ClassPolicy::new(cast.here), ClassPolicy::new(cast.away));
        let all = if cast.family == Family::V4 { "0.0.0.0" } else { "::" };
        // One host, and a network around it; everything but the host.
        for (class, policies) in [(2, [ClassPolicy::NONE, away, here]), (3, [here, away, ClassPolicy::NONE])] {
            let prefixes = [(all, Some(0)), (cast.world, Some(16)), (cast.world, None)];
            prefixes
                .into_iter()
                .zip(policies)
                .for_each(|((to, length), policy)| stage.put_class(class, to, length, policy));
        }
        for (pod, port) in [cast.pod, cast.known_pod, cast.away_pod].into_iter().zip(EXPOSED) {
            [6, 17, 132].into_iter().for_each(|protocol| stage.expose(pod, protocol, port));
        }
        // Of a Service, while it shares the address.
        [6, 17, 132].into_iter().for_each(|protocol| stage.expose(cast.egress, protocol, 4001));
    }
    let maps = MemoryMaps::empty(stage.config.get(&0, 0).expect("the configuration"));
    maps.pods.borrow_mut().extend(all(&stage.pods));
    maps.nodes.borrow_mut().extend(all(&stage.nodes));
    let classes = stage.classes.iter().map(|entry| entry.expect("a class"));
    maps.classes.borrow_mut().extend(classes.map(|(key, policy)| (key.data(), key.prefix_len() - 32, policy)));
    maps.policies.borrow_mut().extend(all(&stage.policy));
    maps.owned.borrow_mut().extend(all(&stage.owned));
    maps.owned_addr.borrow_mut().extend(all(&stage.owned_addr));
    let counted = |exposure: Exposure| u32::try_from(exposure.inbound).expect("a count");
    maps.exposed.borrow_mut().extend(all(&stage.exposed).into_iter().map(|(port, exposure)| (port, counted(exposure))));
    let prefixes = stage.cluster.iter().map(|entry| entry.expect("a prefix"));
    maps.prefixes.borrow_mut().extend(prefixes.map(|(key, prefix)| (key.data(), key.prefix_len(), prefix)));
    let limit = |name: &str| usize::try_from(stage.sizes[name]).expect("a size");
    maps.nat.limit(limit("nat"));
    maps.flows.limit(limit("flows"));
    maps.inbound.limit(limit("inbound"));
    let nat = MapData::from_id(stage.ids["nat"]).expect("the map nat again");
    let nat = KernelMap::<_, Tuple, egress_common::abi::NatEntry>::try_from(Map::HashMap(nat)).expect("its shape");
    maps.adopt
        .replace(Some(Box::new(move |forward: &Tuple| nat.get(forward, 0).ok().map(|mapping| mapping.other.dport()))));
    let mut node = ModelNode::new(maps);
    (node.routed, node.resolved) = (is_routed, is_resolved);
    node
}

fn all<K: Pod, V: Pod>(map: &KernelMap<MapData, K, V>) -> Vec<(K, V)> {
    map.iter().map(|entry| entry.expect("an entry")).collect()
}

fn is_resolved(pod: &Addr) -> bool {
    [V4, V6].iter().any(|cast| {
        let known = [cast.pod, cast.away_pod, cast.pending_pod, cast.early_pod, cast.known_pod, cast.unknown_pod];
        known.iter().any(|known| addr(known) == *pod)
    })
}

/// By the uplink of the stage.
fn is_routed(to: &Addr) -> bool {
    let octets = to.octets();
    match to.family() {
        Family::V4 => octets[12..15] == [198, 51, 100] || octets[12..14] == [172, 18],
        Family::V6 => {
            octets[..8] == [0x20, 1, 0xd, 0xb8, 0, 0, 0, 0] || octets[..8] == [0xfd, 0, 1, 0x72, 0, 0x18, 0, 0]
        }
    }
}
