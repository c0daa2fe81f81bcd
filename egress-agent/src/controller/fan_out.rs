//! Distributes the changes of the cluster to the parts of a controller.

use std::sync::Arc;

use futures::{Stream, StreamExt};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::change_queue::ChangeSender;
use egress_core::model::policy::{EgressPolicy, PolicyKey};
use egress_core::model::view::{Change, Update};
use egress_datapath::overlay::endpoints::Endpoints;

/// Where changes go.
pub(super) struct Receivers {
    pub(super) reconciler: ChangeSender,
    pub(super) prober: ChangeSender,
    pub(super) leader_probe: ChangeSender,
    pub(super) egress_services: ChangeSender,
    pub(super) antrea: Option<ChangeSender>,
    pub(super) cilium: Option<ChangeSender>,
    pub(super) egress_routers: Option<ChangeSender>,
    pub(super) endpoints: Endpoints,
    pub(super) synced_lists: SyncedLists,
    pub(super) synced: watch::Sender<bool>,
}

/// Which lists have arrived.
#[derive(Default)]
pub(super) struct SyncedLists {
    objects: bool,
    nodes: bool,
}

impl Receivers {
    fn send(&mut self, change: Change) {
        let change = match change {
            Change::Policies(update) => Change::Policies(with_addresses(update)),
            other => other,
        };
        match &change {
            Change::Nodes(update) => {
                self.synced_lists.nodes |= matches!(update, Update::Replaced(_));
                self.endpoints.apply(update);
                self.prober.put(change.clone());
                self.leader_probe.put(change.clone());
                self.cilium.iter_mut().for_each(|cilium| cilium.put(change.clone()));
            }
            Change::Ledger(_) => self.prober.put(change.clone()),
            Change::Policies(update) => {
                self.synced_lists.objects |= matches!(update, Update::Replaced(_));
                self.prober.put(change.clone());
                self.egress_services.put(change.clone());
                let kinds = [&mut self.antrea, &mut self.cilium, &mut self.egress_routers];
                kinds.into_iter().flatten().for_each(|kind| kind.put(change.clone()));
            }
            Change::Services(_) | Change::Namespaces(_) | Change::Pods(_) => {}
        }
        self.reconciler.put(change);
        let is_synced = self.synced_lists.objects && self.synced_lists.nodes;
        self.synced.send_if_modified(|known| std::mem::replace(known, is_synced) != is_synced);
    }
}

/// Without policies whose pods leave by their own nodes: there is nothing to assign.
fn with_addresses(update: Update<PolicyKey, Arc<EgressPolicy>>) -> Update<PolicyKey, Arc<EgressPolicy>> {
    match update {
        Update::Replaced(all) => {
            Update::Replaced(all.into_iter().filter(|(_, policy)| !policy.is_by_own_nodes()).collect())
        }
        Update::Changed(key, policy) if policy.is_by_own_nodes() => Update::Removed(key),
        other => other,
    }
}

/// Sends every change to all receivers; none waits for another.
pub(super) async fn fan_out(changes: impl Stream<Item = Change>, mut receivers: Receivers, stop: CancellationToken) {
    let mut changes = std::pin::pin!(changes.take_until(stop.cancelled_owned()));
    while let Some(change) = changes.next().await {
        receivers.send(change);
    }
}
