//! Log lines about actions.

use tracing::{debug, info};

use egress_core::model::state::{Action, HandoverStage, HandoverState, Place, Policy};

/// Info for changes of pods, policies and addresses; debug for nodes and prefixes.
pub(super) fn log(action: &Action) {
    match action {
        Action::Disown(id, address) => info!(id = id.0, %address, "this node has released an egress IP"),
        Action::PutHandover(id, HandoverState { stage: HandoverStage::Leaving, address, peer, .. }) => {
            info!(id = id.0, %address, to = %peer.0, "an egress IP is handed over: its late packets are forwarded");
        }
        Action::PutHandover(id, HandoverState { stage: HandoverStage::Arriving, address, peer, .. }) => {
            info!(id = id.0, %address, from = %peer.0, "this node is ready to take over an egress IP");
        }
        Action::PutHandover(id, HandoverState { stage: HandoverStage::Open, address, peer, .. }) => {
            info!(id = id.0, %address, from = %peer.0, "this node takes over an egress IP");
        }
        Action::EndHandover(id, address) => info!(id = id.0, %address, "the hand-over of an egress IP has ended"),
        Action::PutPolicy(id, family, policy) => {
            info!(id = id.0, ?family, slots = shown(policy), when_empty = ?policy.when_empty, "policy");
        }
        Action::PutClass(class, policies) => {
            info!(class = class.0, destinations = policies.len(), "a class of pods with destinations");
        }
        Action::RemovePolicy(id, family) => info!(id = id.0, ?family, "policy removed"),
        Action::PutPod(address, state) => info!(%address, ?state, "pod"),
        Action::RemovePod(address) => info!(%address, "pod removed"),
        Action::SetUnknownPods(on) => info!(?on, "unknown pods"),
        Action::CutFlows(id, addresses) => {
            info!(id = id.0, ?addresses, "flows cut: their object no longer has the address")
        }
        Action::CutPodFlows(pod, lost) => {
            let ids: Vec<u32> = lost.of.iter().map(|id| id.0).collect();
            info!(?ids, %pod, "flows cut: other objects serve the pod, or none")
        }
        // The executor logs these with their results.
        Action::Own(..) | Action::Share(..) | Action::CutOrphans => {}
        Action::CutPod(address) => info!(%address, "all state of the former pod with this address removed"),
        Action::RemoveClass(_)
        | Action::PutOwner(..)
        | Action::Expose(..)
        | Action::Conceal(..)
        | Action::PutNode(..)
        | Action::RemoveNode(_)
        | Action::PutPrefix(..)
        | Action::RemovePrefix(_) => {
            debug!(?action, "applied");
        }
    }
}

fn shown(policy: &Policy) -> String {
    let slots = policy.slots.iter().map(|slot| match slot.place {
        Place::Here => format!("{} here", slot.address),
        Place::Remote(node) => format!("{} at {}", slot.address, node.0),
    });
    slots.collect::<Vec<_>>().join(", ")
}
