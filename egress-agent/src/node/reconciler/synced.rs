//! Which lists the API server has delivered. Pure.

use egress_core::model::view::{Change, Update};

/// Which watches have delivered their first list.
#[derive(Debug, Default)]
pub(super) struct Synced {
    objects: bool,
    namespaces: bool,
    pods: bool,
    nodes: bool,
    services: bool,
    ledger: bool,
}

impl Synced {
    pub(super) fn note(&mut self, change: &Change) {
        match change {
            Change::Policies(Update::Replaced(_)) => self.objects = true,
            Change::Namespaces(Update::Replaced(_)) => self.namespaces = true,
            Change::Pods(Update::Replaced(_)) => self.pods = true,
            Change::Nodes(Update::Replaced(_)) => self.nodes = true,
            Change::Services(Update::Replaced(_)) => self.services = true,
            Change::Ledger(_) => self.ledger = true,
            Change::Policies(_) | Change::Namespaces(_) | Change::Pods(_) | Change::Nodes(_) | Change::Services(_) => {}
        }
    }

    pub(super) fn all(&self) -> bool {
        self.waiting_for().is_none()
    }

    /// The lists that are missing.
    pub(super) fn waiting_for(&self) -> Option<String> {
        let Self { objects, namespaces, pods, nodes, services, ledger } = *self;
        let lists = [(objects, "EgressIP objects"), (namespaces, "namespaces"), (pods, "pods"), (nodes, "nodes")];
        let lists = lists.into_iter().chain([(services, "services"), (ledger, "hand-overs")]);
        let missing: Vec<&str> = lists.filter(|(is_there, _)| !is_there).map(|(_, name)| name).collect();
        (!missing.is_empty()).then(|| missing.join(", "))
    }
}
