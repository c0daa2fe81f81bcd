//! Keeps the desired state up to date: a change of pods or services computes their entries only, any other change the
//! whole (objects, namespaces and nodes change rarely, and a whole compilation costs what a map dump costs).

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use super::desired::{Settings, desired, put_service};
use super::selection::{Selection, Standby};
use super::state::{KernelState, PodState};
use super::view::{Addresses, Change, ClusterView, Node, PodKey, Touched, Update};

/// The view, what it means, and what has been touched since the last plan.
#[derive(Debug)]
pub struct Compiler {
    settings: Settings,
    view: ClusterView,
    selection: Selection,
    desired: Option<KernelState>,
    touched: Touched,
    standby: BTreeSet<Standby>,
    unsaid: Unsaid,
}

/// Whose standby objects are to be found anew: with hundreds of pods that is more work than all else a pod's event asks for.
#[derive(Debug)]
enum Unsaid {
    All,
    Of(BTreeSet<PodKey>),
}

impl Compiler {
    pub fn new(settings: Settings) -> Self {
        let view = ClusterView::default();
        let selection = Selection::new(&view);
        let (standby, unsaid) = (BTreeSet::new(), Unsaid::All);
        Self { settings, view, selection, desired: None, touched: Touched::Everything, standby, unsaid }
    }

    pub fn view(&self) -> &ClusterView {
        &self.view
    }

    /// This node as the cluster knows it.
    pub fn own_node(&self) -> Option<&Node> {
        self.view.nodes.get(&self.settings.node_name).map(Arc::as_ref)
    }

    /// What was desired last.
    pub fn desired(&self) -> Option<&KernelState> {
        self.desired.as_ref()
    }

    /// What the kernel held when it was first observed; later calls change nothing.
    pub fn remember(&mut self, pods: &BTreeMap<IpAddr, PodState>) {
        if self.desired.is_none() {
            self.view.remember(pods);
        }
    }

    /// Enters a change; several may be entered before one compilation.
    pub fn apply(&mut self, change: Change) {
        let pod = match &change {
            Change::Pods(Update::Changed(key, _) | Update::Removed(key)) => Some(key.clone()),
            _ => None,
        };
        let touched = self.view.apply(change);
        match (pod, &touched, &mut self.unsaid) {
            (_, Touched::Everything, unsaid) => *unsaid = Unsaid::All,
            (Some(pod), _, Unsaid::Of(pods)) => drop(pods.insert(pod)),
            // All pods at once, or something that selects nobody.
            (None, Touched::Addresses(addresses), unsaid) if !addresses.pods.is_empty() => *unsaid = Unsaid::All,
            _ => {}
        }
        self.touched = std::mem::take(&mut self.touched).and(touched);
    }

    /// Brings the desired state up to the view and says what that concerned. `None` while this node's own Node object
    /// is not known; what was desired before then stays.
    pub fn compile(&mut self) -> Option<(&KernelState, Touched)> {
        let touched = std::mem::take(&mut self.touched);
        match (&touched, &mut self.desired) {
            (Touched::Addresses(Addresses { pods, services }), Some(desired)) => {
                for address in services {
                    put_service(&self.view, &self.settings, &desired.nodes, &mut desired.cluster, *address);
                }
                for address in pods {
                    let Some(state) = self.selection.pod_state(&self.view, *address) else {
                        desired.pods.remove(address);
                        desired.owners.remove(address);
                        continue;
                    };
                    desired.pods.insert(*address, state);
                    desired.owners.extend(Selection::pod_owner(&self.view, *address).map(|owner| (*address, owner)));
                }
            }
            (Touched::Everything, _) | (_, None) => {
                let mut selection = Selection::new(&self.view);
                let Some(whole) = desired(&self.view, &self.settings, &mut selection) else {
                    self.touched = Touched::Everything;
                    return None;
                };
                self.selection = selection;
                self.desired = Some(whole);
                return self.desired.as_ref().map(|desired| (desired, Touched::Everything));
            }
        }
        self.desired.as_ref().map(|desired| (desired, touched))
    }

    /// Everybody who must be told that another object serves, as of the last compilation.
    pub fn standby(&mut self) -> &BTreeSet<Standby> {
        match std::mem::replace(&mut self.unsaid, Unsaid::Of(BTreeSet::new())) {
            Unsaid::All => self.standby = self.selection.standby(&self.view, self.view.pods.keys()),
            Unsaid::Of(pods) if !pods.is_empty() => {
                self.standby.retain(|standby| !pods.contains(&standby.pod));
                self.standby.extend(self.selection.standby(&self.view, &pods));
            }
            Unsaid::Of(_) => {}
        }
        &self.standby
    }
}
