//! Keeps the desired state up to date. A change of pods or services recomputes their entries only; any other change
//! recomputes everything: objects, namespaces and nodes change rarely, and it costs as much as a map dump.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use crate::model::node::Node;
use crate::model::policy::PolicyKey;
use crate::model::reserved::Reservations;
use crate::model::services::ServiceKey;
use crate::model::settings::NodeSettings;
use crate::model::state::{KernelState, PodOwner};
use crate::model::view::{Addresses, Attach, Change, ClusterView, PodKey, Touched, Update};
use crate::networks::{RoutedNetworks, networks};
use crate::plan::capacity::ServiceRoom;
use crate::plan::desired::{Desired, Refusals, desired, on_unknown_pod, put_pod, put_service_ports};
use crate::selection::pod_addresses::{PodAddressSpace, Refusal};
use crate::selection::{Selection, Standby};
use crate::vlans::{Vlans, vlans};

/// The view, the desired state, and what has changed since the last plan.
#[derive(Debug)]
pub struct Compiler {
    settings: NodeSettings,
    view: ClusterView,
    selection: Selection,
    desired: Option<KernelState>,
    refused: Refusals,
    room: ServiceRoom,
    beyond: BTreeMap<PolicyKey, usize>,
    /// Whether any policy has a network of its own: asked for each event of a pod.
    has_networks: bool,
    touched: Touched,
    standby: BTreeSet<Standby>,
    stale_standby: StaleStandby,
}

/// The pods whose standby objects are stale. With hundreds of pods that costs more than the rest of a pod event.
#[derive(Debug)]
enum StaleStandby {
    All,
    Of(BTreeSet<PodKey>),
}

impl Compiler {
    pub fn new(settings: NodeSettings) -> Self {
        let view = ClusterView::default();
        let (selection, refused) = (Selection::default(), Refusals::new());
        let (standby, stale_standby) = (BTreeSet::new(), StaleStandby::All);
        let (room, beyond) = (ServiceRoom::default(), BTreeMap::new());
        let (desired, has_networks, touched) = (None, false, Touched::Everything);
        Self {
            settings,
            view,
            selection,
            desired,
            refused,
            room,
            beyond,
            has_networks,
            touched,
            standby,
            stale_standby,
        }
    }

    pub fn view(&self) -> &ClusterView {
        &self.view
    }

    /// This node.
    pub fn own_node(&self) -> Option<&Node> {
        self.view.nodes.get(&self.settings.node_name).map(Arc::as_ref)
    }

    /// Addresses that this node must not claim. Addresses of Services are left to the controller: one may appear after
    /// the egress IP, and would take it from its object.
    pub fn reservations(&self) -> Reservations {
        let nodes = self.view.nodes.iter().map(|(name, node)| (name.as_str(), node.as_ref()));
        Reservations::new(nodes, &self.settings.networks(), [], Some(&self.settings.node_name))
    }

    /// The last desired state.
    pub fn desired(&self) -> Option<&KernelState> {
        self.desired.as_ref()
    }

    /// Records the first observation of the kernel; later calls change nothing.
    pub fn remember(&mut self, kernel: &KernelState) {
        let own = self.view.nodes.get(&self.settings.node_name);
        if let (None, Some(own)) = (&self.desired, own) {
            let network = PodAddressSpace::new(own, &self.settings.service_cidrs);
            self.view.recall(&network, kernel);
        }
    }

    /// Applies a change; several may be applied before one compilation.
    pub fn apply(&mut self, change: Change) {
        let pod = match &change {
            Change::Pods(Update::Changed(key, _) | Update::Removed(key)) => Some(key.clone()),
            _ => None,
        };
        let touched = self.view.apply(change);
        self.touch(pod, touched);
    }

    /// Records the addresses that the CNI gave a pod.
    pub fn attach(&mut self, attach: &Attach) {
        let pods = self.view.attach(attach);
        self.touch(Some(attach.pod.clone()), Touched::Addresses(Addresses { pods, ..Addresses::default() }));
    }

    fn touch(&mut self, pod: Option<PodKey>, touched: Touched) {
        match (pod, &touched, &mut self.stale_standby) {
            (_, Touched::Everything, stale_standby) => *stale_standby = StaleStandby::All,
            (Some(pod), _, StaleStandby::Of(pods)) => drop(pods.insert(pod)),
            // A change of all pods, or one that affects no pod.
            (None, Touched::Addresses(addresses), stale_standby) if !addresses.pods.is_empty() => {
                *stale_standby = StaleStandby::All
            }
            _ => {}
        }
        self.touched = std::mem::take(&mut self.touched).and(touched);
    }

    /// Brings the desired state up to the view and returns what changed. `None` while this node's own Node object is
    /// unknown; the former desired state stays then.
    pub fn compile(&mut self) -> Option<(&KernelState, Touched)> {
        let mut touched = std::mem::take(&mut self.touched);
        if self.unknown_pods_change(&touched) {
            touched = Touched::Everything;
        }
        match (&mut touched, &mut self.desired) {
            (Touched::Addresses(Addresses { pods, services }), Some(desired)) => {
                if !services.is_empty() {
                    *services = self.room.follow(&self.view.services, &desired.nodes, &mut desired.cluster);
                    services.extend(put_service_ports(&self.view, desired));
                }
                for address in pods.iter() {
                    put_pod(&self.view, &mut self.selection, desired, &mut self.refused, *address);
                    self.view.remember_one(self.selection.network(), *address, desired);
                }
                desired.drop_unused_classes();
                self.selection.forget_surplus_classes(desired);
            }
            (Touched::Everything, former) | (_, former @ None) => {
                if former.is_some() {
                    self.view.classes = self.selection.class_numbers().clone();
                }
                let Some(Desired { state, selection, refused, room, beyond }) = desired(&self.view, &self.settings)
                else {
                    self.touched = Touched::Everything;
                    return None;
                };
                self.view.remember(selection.network(), &state);
                (self.selection, self.refused, self.room, self.beyond) = (selection, refused, room, beyond);
                self.selection.forget_classes(&state);
                self.has_networks = self.view.policies.values().any(|policy| policy.network.is_some());
                self.desired = Some(state);
                return self.desired.as_ref().map(|desired| (desired, Touched::Everything));
            }
        }
        self.desired.as_ref().map(|desired| (desired, touched))
    }

    /// A selected pod without an address has appeared, or the last one has got its address.
    fn unknown_pods_change(&mut self, touched: &Touched) -> bool {
        let (Touched::Addresses(_), Some(desired)) = (touched, &self.desired) else { return false };
        let Some(own) = self.view.nodes.get(&self.settings.node_name) else { return false };
        desired.on_unknown_pod != Some(on_unknown_pod(&self.view, &self.settings, own, &mut self.selection))
    }

    /// The pod that has the address, as of the last compilation.
    pub fn holder(&self, address: IpAddr) -> Option<&PodKey> {
        self.selection.network().holder(&self.view, address).map(|(key, _)| key)
    }

    /// What follows routing tables of EgressServices on this node, as of the last compilation.
    pub fn networks(&self) -> RoutedNetworks {
        let of = |desired| networks(&self.view, self.selection.network(), desired);
        self.desired.as_ref().filter(|_| self.has_networks).map(of).unwrap_or_default()
    }

    /// The VLANs that this node needs devices for. `None` while its Node is not known.
    pub fn vlans(&self) -> Option<Vlans> {
        let own = self.view.nodes.get(&self.settings.node_name)?;
        Some(vlans(&self.view, own))
    }

    /// Whether the pod has these addresses, as of the last compilation, or why it never gets one of them. `None` while
    /// that is unknown.
    pub fn attached(&self, Attach { pod: key, uid, addresses }: &Attach) -> Option<Result<(), Refusal>> {
        let pod = self.view.pods.get(key).filter(|pod| pod.uid == *uid)?;
        let refused = addresses.iter().filter_map(|address| self.refused.get(address)).flatten();
        if let Some(refusal) = refused.into_iter().find(|refusal| refusal.uid == *uid) {
            return Some(Err(refusal.clone()));
        }
        let desired = self.desired.as_ref()?;
        let owner = Some(PodOwner::of(uid));
        let has = |address: &IpAddr| desired.owners.get(address).copied() == owner;
        (!pod.is_endpoint() || addresses.iter().all(has)).then_some(Ok(()))
    }

    /// Claims of pods that were refused by the last compilation.
    pub fn refused(&self) -> BTreeSet<Refusal> {
        let surplus = self.selection.network().surplus(&self.view);
        self.refused.values().flatten().cloned().chain(surplus).collect()
    }

    /// The number of addresses of each Service without an entry, as of the last compilation.
    pub fn left_out(&self) -> &BTreeMap<ServiceKey, usize> {
        self.room.left_out()
    }

    /// The number of egress IPs of each EgressIP object without an entry, as of the last compilation.
    pub fn beyond(&self) -> &BTreeMap<PolicyKey, usize> {
        &self.beyond
    }

    /// The objects that select pods which other objects serve, as of the last compilation.
    pub fn standby(&mut self) -> &BTreeSet<Standby> {
        match std::mem::replace(&mut self.stale_standby, StaleStandby::Of(BTreeSet::new())) {
            StaleStandby::All => self.standby = self.selection.standby(&self.view, self.view.pods.keys()),
            StaleStandby::Of(pods) if !pods.is_empty() => {
                self.standby.retain(|standby| !pods.contains(&standby.pod));
                self.standby.extend(self.selection.standby(&self.view, &pods));
            }
            StaleStandby::Of(_) => {}
        }
        &self.standby
    }
}
