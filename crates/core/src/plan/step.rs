//! What one action does to a state: the reference for plans, and how the agent remembers what the kernel holds without
//! reading it again.

use crate::model::state::{Action, HandoverStage, KernelState};

/// The state after the action. Cutting flows changes no map that the model speaks of.
pub fn step(state: &mut KernelState, action: &Action) {
    match action {
        Action::SetUnknownPods(on) => state.on_unknown_pod = Some(*on),
        Action::PutNode(address, node) => {
            state.nodes.insert(*address, *node);
        }
        Action::RemoveNode(address) => {
            state.nodes.remove(address);
        }
        Action::PutPrefix(prefix, value) => {
            state.cluster.insert(*prefix, *value);
        }
        Action::RemovePrefix(prefix) => {
            state.cluster.remove(prefix);
        }
        Action::Own(id, address) => {
            state.owned.insert(*id, *address);
        }
        Action::Disown(id, address) => {
            state.owned.remove(id);
            if state.moving.get(id).is_some_and(|moving| moving.is_taken() && moving.address == *address) {
                state.moving.remove(id);
            }
        }
        Action::PutMoving(id, moving) => {
            state.moving.insert(*id, *moving);
            if moving.course == HandoverStage::Leaving {
                state.owned.remove(id);
            }
        }
        Action::EndMoving(id, _) => {
            state.moving.remove(id);
        }
        Action::PutPolicy(id, family, policy) => {
            state.policy.insert((*id, *family), policy.clone());
        }
        Action::RemovePolicy(id, family) => {
            state.policy.remove(&(*id, *family));
        }
        Action::PutPod(address, pod) => {
            state.pods.insert(*address, *pod);
        }
        Action::RemovePod(address) => {
            state.pods.remove(address);
            state.owners.remove(address);
        }
        Action::PutOwner(address, owner) => {
            state.owners.insert(*address, *owner);
        }
        Action::Expose(address, port) => {
            state.exposed.entry(*address).or_default().insert(*port);
        }
        Action::Conceal(address, port) => {
            if let Some(ports) = state.exposed.get_mut(address) {
                ports.remove(port);
            }
            state.exposed.retain(|_, ports| !ports.is_empty());
        }
        Action::CutFlows(..) | Action::CutPodFlows(..) | Action::CutPod(_) | Action::CutOrphans => {}
    }
}
