//! Networks of EgressServices: addresses that cannot leave by their network are not served, and pods that cannot send nothing.

use std::collections::BTreeMap;

use tracing::{info, warn};

use crate::node::reconciler::{NO_NETWORK, Reconciler};
use egress_core::model::policy::{EgressPolicy, PolicyKey};
use egress_core::model::state::KernelState;
use egress_core::networks::{MOST_ADDRESSES, MOST_TABLES, RoutedNetworks};
use egress_core::plan::executor::{DataplaneError, Executor};

/// What the kernel routes by tables, and what it does not.
#[derive(Default)]
pub(super) struct Routing {
    /// `None` before the first attempt: rules of a former agent may be there.
    followed: Option<RoutedNetworks>,
    /// Why nothing follows a table, by its name.
    pub(super) unrouted: BTreeMap<String, String>,
    /// What events have said of policies.
    reported: BTreeMap<PolicyKey, String>,
}

impl Routing {
    /// Why the policy's network is not followed.
    fn refusal(&self, policy: &EgressPolicy) -> Option<String> {
        let network = policy.network.as_ref()?;
        let is_left_out = self.followed.as_ref().is_some_and(|followed| followed.left_out.contains(policy.key()));
        let no_room = || {
            format!(
                "a node follows {MOST_TABLES} networks of EgressServices and {MOST_ADDRESSES} addresses in them at most, those \
                 of the oldest"
            )
        };
        is_left_out.then(no_room).or_else(|| self.unrouted.get(&network.table).cloned())
    }

    /// Brings the kernel's routing up to these networks. Whether addresses may be served, or must not be, that were not before.
    pub(super) async fn follow<E: Executor>(&mut self, executor: &mut E, networks: RoutedNetworks) -> bool {
        if self.unrouted.is_empty() && self.followed.as_ref() == Some(&networks) {
            return false;
        }
        let unrouted = executor.route(&networks).await;
        for (table, why) in unrouted.iter().filter(|(table, _)| !self.unrouted.contains_key(*table)) {
            warn!(table, why, "the network of an EgressService cannot be used on this node; trying again");
        }
        for table in self.unrouted.keys().filter(|table| !unrouted.contains_key(*table)) {
            info!(table, "the network of an EgressService is used, or needed no more");
        }
        let left_out = networks.left_out.clone();
        let former = self.followed.replace(networks);
        let is_same = former.is_some_and(|former| former.left_out == left_out);
        std::mem::replace(&mut self.unrouted, unrouted) != self.unrouted || !is_same
    }
}

impl<E: Executor> Reconciler<E> {
    /// Tells the users of pods that leave by their own nodes, which have no address that is not served. Once for each policy and
    /// cause.
    pub(super) fn report_unrouted(&mut self) {
        let node = self.coordination.ownership.node_name();
        let mut reported = BTreeMap::new();
        for policy in self.compiler.view().policies.values().filter(|policy| policy.is_by_own_nodes()) {
            let Some(why) = self.routing.refusal(policy) else { continue };
            if self.routing.reported.get(policy.key()) != Some(&why)
                && let Some(events) = &self.events
            {
                events.warn(&**policy, NO_NETWORK, &format!("its pods on node {node} send nothing: {why}"));
            }
            reported.insert(policy.key().clone(), why);
        }
        self.routing.reported = reported;
    }

    /// Removes addresses from the desired state whose network is not followed.
    pub(super) fn refuse_unrouted(&mut self, desired: &mut KernelState) {
        let mut refused = Vec::new();
        for policy in self.compiler.view().policies.values() {
            let Some(why) = self.routing.refusal(policy) else { continue };
            let is_of_policy = |id| policy.published.ids.contains(id);
            desired.handovers.retain(|id, moving| !moving.is_taken() || !is_of_policy(*id));
            let owned = desired.owned.iter().filter(|(id, _)| is_of_policy(**id));
            refused.extend(owned.map(|(id, address)| (*id, *address, why.clone())));
        }
        for (id, address, why) in refused {
            self.refused.insert(id, address);
            self.note_failure(id, address, &DataplaneError::NoNetwork { address, why });
        }
    }
}
