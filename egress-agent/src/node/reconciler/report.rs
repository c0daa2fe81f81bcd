//! The reconciler's answers to `egress-agent status` and to scrapes.

use std::collections::{BTreeMap, BTreeSet};

use crate::debug::{Address, ClusterState, OpenHandOver, PodCount, Question, ReconcilerReport, StandbyPod, Status};
use crate::metrics::snapshot::{InKernel, ReconcilerSnapshot, ServedAddress};
use crate::node::reconciler::Reconciler;
use egress_core::display_names::Names;
use egress_core::model::policy::{EgressNodes, parse_egress_ip};
use egress_core::model::state::{EgressId, HandoverStage, KernelState, TunnelEndpoint, family_of};
use egress_core::model::view::{ClusterView, PodKey};
use egress_core::plan::executor::Executor;
use egress_core::selection::Standby;
use egress_core::selection::pod_addresses::Refusal;
use egress_datapath::survey::report::{Gateway, concerning};

/// Limit of a status for lines about refused pod addresses, whose number is under the users' control.
const MOST_REFUSED: usize = 20;

impl<E: Executor> Reconciler<E> {
    /// An answer to a caller that is gone is dropped. Returns whether a reconcile is needed.
    pub(super) fn answer(&mut self, question: Question) -> bool {
        match question {
            Question::Attach(attach, reply) => {
                self.attach(attach, reply);
                return true;
            }
            Question::Status(reply) => drop(reply.send(self.report())),
            Question::Snapshot(reply) => drop(reply.send(self.snapshot())),
            Question::Names(reply) => drop(reply.send(self.names())),
        }
        false
    }

    fn snapshot(&self) -> ReconcilerSnapshot {
        let last = self.last.get();
        let own = self.coordination.ownership.node_name();
        let open = || self.coordination.ownership.ledger().records.open.values();
        ReconcilerSnapshot {
            in_kernel: self.actual.as_ref().or(last.as_ref()).map(|actual| self.in_kernel(actual)),
            standby: self.standby.len(),
            missing: self.missing(),
            from: open().filter(|record| record.from == own).count(),
            to: open().filter(|record| record.to.as_deref() == Some(own)).count(),
        }
    }

    fn in_kernel(&self, actual: &KernelState) -> InKernel {
        let (view, nothing) = (self.compiler.view(), KernelState::default());
        let desired = self.compiler.desired().unwrap_or(&nothing);
        let KernelState { pods, classes, policy, owned, handovers: moving, cluster, nodes, .. } = actual;
        let entries = [
            ("pods", pods.len()),
            ("policy", policy.len()),
            ("classes", classes.values().map(|policies| policies.len()).sum()),
            ("destinations", policy.values().map(|policy| policy.destinations.len()).sum()),
            ("owned", owned.len()),
            ("handovers", moving.len()),
            ("cluster", cluster.len()),
            ("nodes", nodes.len()),
        ];
        let ids = view.policies.values().flat_map(|object| object.published.ids.all().map(move |id| (id, object)));
        let objects: BTreeMap<EgressId, _> = ids.filter(|(id, _)| owned.contains_key(id)).collect();
        let served = owned.iter().map(|(id, address)| {
            // The name is unknown while the object is being deleted.
            let policy = objects.get(id).map(|object| (object.key().clone(), object.origin.uid.clone()));
            (*id, ServedAddress { address: *address, policy })
        });
        InKernel {
            entries: BTreeMap::from(entries),
            served: served.collect(),
            left_out: self.left_out.count(),
            unclaimed: desired.owned.iter().filter(|(id, address)| owned.get(id) != Some(address)).count(),
        }
    }

    /// What the reconciler waits for before it writes anything.
    fn missing(&self) -> Option<String> {
        if let Some(lists) = self.synced.waiting_for() {
            return Some(format!("waiting for lists from the API server: {lists}"));
        }
        let knows_itself = self.compiler.own_node().is_some_and(|own| !own.primary.is_empty());
        (!knows_itself).then(|| {
            "waiting for this node's own Node object, and for its networks there or in its EgressNode object".into()
        })
    }

    fn names(&self) -> Names {
        let view = self.compiler.view();
        let pods = self.compiler.desired().into_iter().flat_map(|desired| desired.pods.keys());
        let pods = pods.filter_map(|address| {
            let PodKey { namespace, name } = self.compiler.holder(*address)?;
            Some((*address, format!("{namespace}/{name}")))
        });
        let policies = view.policies.values();
        let objects = policies.flat_map(|object| object.published.ids.all().map(|id| (id.0, object.written_as())));
        let nodes = view.nodes.iter().filter_map(|(name, node)| Some((node.endpoint()?.0, name.clone())));
        let states = [self.compiler.desired(), self.actual.as_ref()].into_iter().flatten();
        let egress_ips = states.flat_map(|state| {
            let slots =
                state.policy.iter().flat_map(|((id, _), policy)| policy.slots.iter().map(|slot| (slot.address, id.0)));
            slots.chain(state.owned.iter().map(|(id, address)| (*address, id.0)))
        });
        // Also of objects that select no pod here.
        let assigned = view.policies.values().flat_map(|object| {
            let addresses = object.published.items.iter().filter_map(|item| parse_egress_ip(&item.egress_ip));
            addresses.filter_map(|address| Some((address, object.published.ids.of(family_of(address))?.0)))
        });
        Names {
            node: Some(self.coordination.ownership.node_name().to_owned()),
            pods: pods.collect(),
            objects: objects.collect(),
            nodes: nodes.collect(),
            egress_ips: assigned.chain(egress_ips).collect(),
        }
    }

    fn report(&self) -> ReconcilerReport {
        let view = self.compiler.view();
        let mut problems = Vec::new();
        if let Some(missing) = self.missing() {
            problems.push(format!("this node does not serve the desired state: {missing}"));
        } else if self.actual.is_none() {
            problems.push("the kernel could not be brought to the desired state; see the log".to_owned());
        }
        problems.extend(self.failed_claims.lines());
        problems.extend(self.compiler.refused().into_iter().take(MOST_REFUSED).map(|Refusal { pod, why, .. }| {
            format!("pod {}/{} gets no egress IP by one of its addresses: {why}", pod.namespace, pod.name)
        }));
        problems.extend(self.left_out.lines());
        for object in view.policies.values() {
            problems.extend(object.unreadable.iter().map(|one| format!("{}: {}", object.key(), one.why)));
        }
        let mut status = Status { cluster: Some(self.cluster(view)), problems, ..Status::default() };
        let (names, last) = (self.names(), self.last.get());
        let Some(actual) = self.actual.as_ref().or(last.as_ref()) else {
            return ReconcilerReport { status, unobserved: Some(names) };
        };
        let (objects, mut gateways) = concerning(actual, &names);
        gateways.iter_mut().for_each(|gateway| self.add_state(view, gateway));
        (status.objects, status.gateways) = (objects, gateways);
        status.addresses = self.addresses(actual, &names);
        status.pod_addresses = actual.pods.len();
        let selected = || actual.pods.iter().filter(|(_, pod)| pod.is_selected()).map(|(address, _)| *address);
        status.selected_pod_addresses = selected().count();
        let counts = names.pods_of(actual.pods.keys().copied()).zip(names.pods_of(selected()));
        status.pods = counts.map(|(known, selected)| PodCount { known, selected });
        ReconcilerReport { status, unobserved: None }
    }

    /// Adds the state of a gateway by Kubernetes and by the ledger.
    fn add_state(&self, view: &ClusterView, gateway: &mut Gateway) {
        let Some(node) = gateway.node.as_ref().and_then(|name| view.nodes.get(name)) else { return };
        gateway.ready = Some(node.ready);
        let is_suspect = self.coordination.ownership.ledger().suspects.contains_key(&node.name);
        let says = if is_suspect { Some("silent") } else { node.drained.then_some("drained") };
        gateway.leader_says = says.map(str::to_owned);
    }

    fn cluster(&self, view: &ClusterView) -> ClusterState {
        let (ownership, own) = (&self.coordination.ownership, self.compiler.own_node());
        let ledger = ownership.ledger();
        let open = ledger.records.open.iter().map(|(address, record)| OpenHandOver {
            address: *address,
            number: record.number,
            from: record.from.clone(),
            to: record.to.clone(),
        });
        let standby = self.standby.iter().map(|Standby { rule, pod, served_by }| StandbyPod {
            object: rule.full_name(),
            pod: format!("{}/{}", pod.namespace, pod.name),
            served_by: served_by.full_name(),
        });
        let egress_nodes = EgressNodes::of(view.policies.values().map(|policy| &**policy));
        ClusterState {
            node: ownership.node_name().to_owned(),
            egress_node: own.is_some_and(|own| egress_nodes.has(own)),
            drained: own.is_some_and(|own| own.drained),
            hand_overs: open.collect(),
            suspects: ledger.suspects.keys().filter(|name| view.nodes.contains_key(*name)).cloned().collect(),
            standby: standby.collect(),
        }
    }

    fn addresses(&self, actual: &KernelState, names: &Names) -> Vec<Address> {
        // Unknown until the node's networks are known.
        let desired = self.compiler.desired().map(|desired| &desired.owned);
        let wanted = desired.into_iter().flatten().map(|(id, _)| id);
        let ids: BTreeSet<EgressId> =
            actual.owned.keys().chain(wanted).chain(actual.handovers.keys()).copied().collect();
        let mut addresses = Vec::new();
        for id in ids {
            let (owned, moving) = (actual.owned.get(&id), actual.handovers.get(&id));
            let wanted = desired.and_then(|desired| desired.get(&id));
            let Some(address) = owned.or(wanted).or(moving.map(|moving| &moving.address)) else { continue };
            let object = names.objects.get(&id.0).cloned();
            let peer = moving.map(|moving| {
                let TunnelEndpoint(peer) = moving.peer;
                (moving.stage, names.nodes.get(&peer).cloned().unwrap_or_else(|| peer.to_string()))
            });
            let state = match peer {
                Some((HandoverStage::Leaving, peer)) if owned.is_none() => format!("handed over to {peer}"),
                Some((HandoverStage::Arriving | HandoverStage::Open, peer)) if owned.is_none() => {
                    format!("comes from {peer}")
                }
                _ if owned.is_some() && (desired.is_none() || owned == wanted) => "served".to_owned(),
                _ if owned.is_some() => "to be released".to_owned(),
                _ if self.coordination.ownership.is_lease_expired() => "not served: lease expired".to_owned(),
                _ if self.refused.contains_key(&id) => "not claimed yet".to_owned(),
                _ => "not served yet".to_owned(),
            };
            let (owned, wanted) = (owned.is_some(), desired.map(|_| wanted.is_some()));
            let (address, egress_id) = (*address, id.0);
            addresses.push(Address { address, egress_id, object, interface: None, owned, wanted, state });
        }
        addresses.sort_by_key(|one| one.address);
        addresses
    }
}
