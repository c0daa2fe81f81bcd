//! Distributes the changes of the cluster to the parts of a controller.

use futures::{Stream, StreamExt};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::change_queue::ChangeSender;
use egress_core::model::view::{Change, Update};
use egress_datapath::overlay::endpoints::Endpoints;

/// Where changes go.
pub(super) struct Receivers {
    pub(super) reconciler: ChangeSender,
    pub(super) prober: ChangeSender,
    pub(super) leader_probe: ChangeSender,
    pub(super) egress_services: ChangeSender,
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
        match &change {
            Change::Nodes(update) => {
                self.synced_lists.nodes |= matches!(update, Update::Replaced(_));
                self.endpoints.apply(update);
                self.prober.put(change.clone());
                self.leader_probe.put(change.clone());
            }
            Change::Ledger(_) => self.prober.put(change.clone()),
            Change::Policies(update) => {
                self.synced_lists.objects |= matches!(update, Update::Replaced(_));
                self.prober.put(change.clone());
                self.egress_services.put(change.clone());
            }
            Change::Services(_) | Change::Namespaces(_) | Change::Pods(_) => {}
        }
        self.reconciler.put(change);
        let is_synced = self.synced_lists.objects && self.synced_lists.nodes;
        self.synced.send_if_modified(|known| std::mem::replace(known, is_synced) != is_synced);
    }
}

/// Sends every change to all receivers; none waits for another.
pub(super) async fn fan_out(changes: impl Stream<Item = Change>, mut receivers: Receivers, stop: CancellationToken) {
    let mut changes = std::pin::pin!(changes.take_until(stop.cancelled_owned()));
    while let Some(change) = changes.next().await {
        receivers.send(change);
    }
}
