//! Which connections have been told of their cut already.
//!
//! A plan that fails is tried again and again, each time behind a cut of everything that the state does not permit
//! (`Action::CutOrphans`). Of a TCP connection the flow stays until it has aged, so each of these cuts finds it anew; its pod
//! was told the first time (`nudge`), and is told again when something has changed for it in between.

use std::collections::HashMap;

use egress_common::abi::{Addr, Tuple};

use egress_core::model::state::{Action, EgressId};

/// Connections whose pods are to be told, as the pods send them, and the objects whose addresses they show.
pub type Cut = Vec<(Tuple, EgressId)>;

/// The connections, and whose addresses they show. Between two changes for a pod no more of its connections become cut, so
/// there are never more than `flows` held.
#[derive(Debug, Default)]
pub struct ResetHistory {
    objects: HashMap<Tuple, EgressId>,
}

impl ResetHistory {
    /// Those that are to be history: they count as told from now on.
    pub fn take_new(&mut self, cut: Cut) -> Vec<Tuple> {
        let is_news = |(connection, id): &(Tuple, EgressId)| self.objects.insert(*connection, *id).is_none();
        cut.into_iter().filter(is_news).map(|(connection, _)| connection).collect()
    }

    /// This has been done: what it changes may be cut anew.
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
            | Action::Disown(..)
            | Action::PutHandover(..)
            | Action::EndHandover(..)
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
    fn a_change_for_the_pod_or_its_object_has_the_pod_told_anew() {
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
