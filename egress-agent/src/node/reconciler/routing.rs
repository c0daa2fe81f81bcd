//! Networks of EgressServices: an address that cannot leave by its network is not served.

use std::collections::BTreeMap;

use std::time::Duration;

use tokio::time::Instant;
use tracing::{info, warn};

use crate::node::reconciler::{MAX_EVENTS, NO_NETWORK, Reconciler};
use egress_core::model::policy::{EgressPolicy, PolicyKey};
use egress_core::model::state::KernelState;
use egress_core::networks::{MOST_ADDRESSES, MOST_TABLES, RoutedNetworks};
use egress_core::plan::executor::{DataplaneError, Executor};

/// How often a table is looked for that the node does not have: users name tables, and changes of pods must not wait for them.
const RETRY: Duration = Duration::from_secs(30);

/// What the kernel routes by tables, and what it does not.
#[derive(Default)]
pub(super) struct Routing {
    /// `None` before the first attempt: rules of a former agent may be there.
    followed: Option<RoutedNetworks>,
    /// Why nothing follows a table, by its name.
    unrouted: BTreeMap<String, String>,
    /// When to try again, while there are any, although nothing has changed.
    pub(super) retry_at: Option<Instant>,
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

    /// Whether nothing follows a table, or should.
    fn is_idle(&self) -> bool {
        self.followed.as_ref().is_none_or(|followed| *followed == RoutedNetworks::default())
    }

    /// Whether pods of this node should follow the policy's table.
    fn concerns_pods(&self, policy: &EgressPolicy) -> bool {
        let table = policy.network.as_ref().filter(|network| network.pods.is_some()).map(|network| &network.table);
        let Some((followed, table)) = self.followed.as_ref().zip(table) else { return false };
        !followed.tables.get(table).unwrap_or(&followed.dropped).pods.is_empty()
    }

    /// Brings the kernel's routing up to these networks. Whether addresses may be served, or must not be, that were not before.
    pub(super) async fn follow<E: Executor>(&mut self, executor: &mut E, networks: RoutedNetworks) -> bool {
        let now = Instant::now();
        if self.followed.as_ref() == Some(&networks) && self.retry_at.is_none_or(|at| now < at) {
            return false;
        }
        let unrouted = executor.route(&networks).await;
        for (table, why) in unrouted.iter().filter(|(table, _)| !self.unrouted.contains_key(*table)) {
            let condition = format!("network/{table}");
            warn!(table, why, condition, "the network of an EgressService cannot be used on this node; trying again");
        }
        for table in self.unrouted.keys().filter(|table| !unrouted.contains_key(*table)) {
            let condition = format!("network/{table}");
            info!(table, condition, "the network of an EgressService is used, or needed no more");
        }
        self.retry_at = (!unrouted.is_empty()).then(|| now + RETRY);
        let left_out = networks.left_out.clone();
        let former = self.followed.replace(networks);
        let is_same = former.is_some_and(|former| former.left_out == left_out);
        std::mem::replace(&mut self.unrouted, unrouted) != self.unrouted || !is_same
    }
}

impl<E: Executor> Reconciler<E> {
    /// Tells of pods here that should leave by their own node, which have no address that is not served. Once for each policy
    /// and cause.
    pub(super) fn report_unrouted(&mut self) {
        // The policies are many, and this follows each event of a pod.
        if self.routing.is_idle() {
            self.routing.reported.clear();
            return;
        }
        let node = self.coordination.ownership.node_name();
        let mut reported = BTreeMap::new();
        let concerned = self.compiler.view().policies.values().filter(|policy| self.routing.concerns_pods(policy));
        for policy in concerned.take(MAX_EVENTS) {
            let Some(why) = self.routing.refusal(policy) else { continue };
            if self.routing.reported.get(policy.key()) != Some(&why)
                && let Some(events) = &self.events
            {
                events.warn(
                    &**policy,
                    NO_NETWORK,
                    &format!("its pods on node {node} cannot leave by its network: {why}"),
                );
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
