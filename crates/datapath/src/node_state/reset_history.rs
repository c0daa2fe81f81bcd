//! Reset connections whose pods were already informed.
//!
//! A failing plan is retried, each time with a cut of everything that the state does not permit (`Action::CutOrphans`). A TCP
//! flow stays until it ages, so each of these cuts finds it again. Its pod is woken once (`conntrack::idle_reset`), and again
//! only after a change for the pod or its policy.

use std::collections::HashMap;

use egress_common::abi::{Addr, Tuple};

use egress_core::model::state::{Action, EgressId};

/// Cut connections in the direction of the pod, with the egress ID of the policy that translated them.
pub type Cut = Vec<(Tuple, EgressId)>;

/// The connections and their egress IDs. Bounded by the size of `flows`: between two changes for a pod no further
/// connections of it are cut.
#[derive(Debug, Default)]
pub struct ResetHistory {
    objects: HashMap<Tuple, EgressId>,
}

impl ResetHistory {
    /// Returns the connections that are not in the history yet, and adds them.
    pub fn take_new(&mut self, cut: Cut) -> Vec<Tuple> {
        let is_news = |(connection, id): &(Tuple, EgressId)| self.objects.insert(*connection, *id).is_none();
        cut.into_iter().filter(is_news).map(|(connection, _)| connection).collect()
    }

    /// Forgets the connections that this action may cut again.
    pub fn follow(&mut self, action: &Action) {
        match action {
            Action::PutPod(pod, _) | Action::RemovePod(pod) => {
                let pod = Addr::from(*pod);
                self.objects.retain(|connection, _| connection.saddr != pod);
            }
            Action::PutPolicy(id, ..) | Action::RemovePolicy(id, _) => self.objects.retain(|_, of| of != id),
            Action::SetUnknownPods(_)
            | Action::PutNode(..)
            | Action::RemoveNode(_)
            | Action::PutPrefix(..)
            | Action::RemovePrefix(_)
            | Action::Own(..)
            | Action::Share(..)
            | Action::Disown(..)
            | Action::PutHandover(..)
            | Action::EndHandover(..)
            | Action::PutClass(..)
            | Action::RemoveClass(_)
            | Action::PutOwner(..)
            | Action::Expose(..)
            | Action::Conceal(..)
            | Action::CutPod(_)
            | Action::CutFlows(..)
            | Action::CutPodFlows(..)
            | Action::CutOrphans => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use egress_common::abi::{Direction, Family};
    use egress_common::wire::PROTO_TCP;

    use super::*;
    use egress_core::model::state::PodState;

    #[test]
    fn a_change_for_the_pod_or_its_policy_clears_its_history() {
        let pod = Addr::v4([10, 244, 1, 10]);
        let connection = Tuple::new(Direction::Egress, pod, Addr::v4([198, 51, 100, 10]), 1, 80, PROTO_TCP);
        let cut = || vec![(connection, EgressId(1))];
        let mut history = ResetHistory::default();
        assert_eq!(history.take_new(cut()), [connection]);
        let of = |last| [10, 244, 1, last].into();
        let others = [
            Action::CutOrphans,
            Action::PutPod(of(11), PodState::Known),
            Action::RemovePod(of(11)),
            Action::RemovePolicy(EgressId(2), Family::V4),
        ];
        for action in &others {
            history.follow(action);
            assert!(history.take_new(cut()).is_empty(), "{action:?}");
        }
        let concerning = [
            Action::PutPod(of(10), PodState::Known),
            Action::RemovePod(of(10)),
            Action::RemovePolicy(EgressId(1), Family::V4),
        ];
        for action in &concerning {
            history.follow(action);
            assert_eq!(history.take_new(cut()), [connection], "{action:?}");
        }
    }
}
