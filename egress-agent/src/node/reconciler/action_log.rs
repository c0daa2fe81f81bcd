//! What the log says of actions.

use tracing::{debug, info};

use egress_core::model::state::{Action, HandoverStage, HandoverState, Place, Policy};

/// One line per change of the world; facts about nodes and prefixes are details.
pub(super) fn log(action: &Action) {
    match action {
        Action::Disown(id, address) => info!(id = id.0, %address, "this node has given up an egress IP"),
        Action::PutHandover(id, HandoverState { stage: HandoverStage::Leaving, address, peer }) => {
            info!(id = id.0, %address, to = %peer.0, "an egress IP is handed over: what comes for it is passed on");
        }
        Action::PutHandover(id, HandoverState { stage: HandoverStage::Arriving, address, peer }) => {
            info!(id = id.0, %address, from = %peer.0, "this node is ready to take an egress IP over");
        }
        Action::PutHandover(id, HandoverState { stage: HandoverStage::Open, address, peer }) => {
            info!(id = id.0, %address, from = %peer.0, "this node takes an egress IP over");
        }
        Action::EndHandover(id, address) => info!(id = id.0, %address, "the hand-over of an egress IP is over"),
        Action::PutPolicy(id, family, policy) => {
            info!(id = id.0, ?family, slots = shown(policy), when_empty = ?policy.when_empty, "policy");
        }
        Action::RemovePolicy(id, family) => info!(id = id.0, ?family, "policy removed"),
        Action::PutPod(address, state) => info!(%address, ?state, "pod"),
        Action::RemovePod(address) => info!(%address, "pod removed"),
        Action::SetUnknownPods(on) => info!(?on, "unknown pods"),
        Action::CutFlows(id, addresses) => info!(id = id.0, ?addresses, "flows cut: their address was taken away"),
        Action::CutPodFlows(pod, id) => info!(id = id.0, %pod, "flows cut: another object serves the pod, or none"),
        // The executor says it, with what the network answered, or with what was found.
        Action::Own(..) | Action::CutOrphans => {}
        Action::CutPod(address) => info!(%address, "everything of the pod that had this address is forgotten"),
        Action::PutOwner(..)
        | Action::Expose(..)
        | Action::Conceal(..)
        | Action::PutNode(..)
        | Action::RemoveNode(_)
        | Action::PutPrefix(..)
        | Action::RemovePrefix(_) => {
            debug!(?action, "fact");
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
