//! EgressServices, while this controller leads: writes an assignment for each that can have one, and says in `status.host` and
//! by the label of a node which node the leader has chosen for it.
//!
//! The order of writes: assignments, statuses, labels that go, labels that come. So a load balancer never announces by two
//! nodes, and by none before its programs translate: a label is set once the assignment is served.

use std::collections::BTreeMap;

use kube::Client;
use tokio_util::sync::CancellationToken;
use tracing::info;

use crate::change_queue::ChangeReceiver;
use crate::controller::conversion::{self, Conversion, KnownCluster, all, timed};
use egress_core::egress_service::{
    ALL_HOSTS, NotAssigned, WantedAssignment, assignment_name, host, host_label, label_changes,
};
use egress_core::model::policy::SourceKind;
use egress_core::model::services::ServiceKey;
use egress_core::status::conditions::ASSIGNED;
use egress_kube::api_outage::ApiOutages;
use egress_kube::assignments::AssignmentWriter;
use egress_kube::egress_service::{
    EgressServiceChange, EgressServiceView, EgressServiceWriter, assignment_spec, watches,
};
use egress_kube::events::Events;
use egress_kube::leader_election::Leadership;
use egress_kube::policy::status::WriteError;

/// What the task needs.
pub(super) struct EgressServiceTask {
    pub(super) client: Client,
    pub(super) outages: ApiOutages,
    pub(super) events: Events,
    pub(super) leadership: Leadership,
    /// The other kinds that this controller serves. Assignments of kinds that it does not serve are removed: a former one did.
    pub(super) others: Vec<SourceKind>,
}

impl EgressServiceTask {
    /// Runs until stopped.
    pub(super) async fn run(self, policies: ChangeReceiver, stop: CancellationToken) {
        let Self { client, outages, events, leadership, others } = self;
        let watches = watches(&client, &outages, others);
        let (assignments, writer) = (AssignmentWriter::new(&client), EgressServiceWriter::new(client));
        let (view, reported) = (EgressServiceView::default(), BTreeMap::new());
        let conversion = EgressServiceConversion { view, reported, assignments, writer, events };
        conversion::run(conversion, "what becomes of EgressServices", watches, (policies, leadership), stop).await;
    }
}

/// What is known, and what has been said.
struct EgressServiceConversion {
    view: EgressServiceView,
    /// The events that have been published, by the UID of the EgressService.
    reported: BTreeMap<String, NotAssigned>,
    assignments: AssignmentWriter,
    writer: EgressServiceWriter,
    events: Events,
}

impl Conversion for EgressServiceConversion {
    type Change = EgressServiceChange;

    fn apply(&mut self, change: EgressServiceChange) -> bool {
        self.view.apply(change)
    }

    fn has_assignment(&self, name: &str) -> bool {
        self.view.assignments.contains_key(name)
    }

    fn is_whole(&self) -> bool {
        self.view.is_whole()
    }

    fn forget_reported(&mut self) {
        self.reported.clear();
    }

    async fn pass(&mut self, cluster: &KnownCluster, leadership: &Leadership) -> Vec<WriteError> {
        let wanted = self.view.inputs.wanted();
        self.report(&wanted);
        let mut errors = Vec::new();
        self.write_assignments(&wanted, leadership, &mut errors).await;
        let (mut hosts, mut changed) = (BTreeMap::new(), Vec::new());
        for (key, outcome) in &wanted {
            let known = self.view.inputs.egress_services.get(key).and_then(|service| service.host.as_deref());
            let policy = cluster.policy(assignment_name(key)).filter(|_| outcome.is_ok());
            let items = policy.map(|policy| policy.published.items.as_slice()).unwrap_or_default();
            let host = match self.view.inputs.is_by_own_nodes(key) {
                true => ALL_HOSTS.to_owned(),
                false => host(known.unwrap_or_default(), items),
            };
            let is_served = policy
                .and_then(|policy| policy.published.conditions.get(ASSIGNED))
                .is_some_and(|(_, assigned)| assigned.status);
            if known.is_none() || known != Some(&host) {
                changed.push((key, host.clone(), known.is_some() || !host.is_empty()));
            }
            // Without a host there is nothing to announce; one that does not serve for a moment stays announced.
            let labelled = self.view.inputs.nodes.get(&host);
            let is_labelled = labelled.is_some_and(|labels| labels.contains_key(&host_label(key)));
            if !host.is_empty() && (is_served || is_labelled) {
                hosts.insert(key.clone(), host);
            }
        }
        self.write_hosts(changed, leadership, &mut errors).await;
        let (remove, set) = label_changes(&self.view.inputs.nodes, &hosts);
        let before = errors.len();
        self.write_labels(&remove, None, leadership, &mut errors).await;
        // The new nodes must wait: two would announce the addresses.
        if errors.len() == before {
            self.write_labels(&set, Some(""), leadership, &mut errors).await;
        }
        errors
    }
}

impl EgressServiceConversion {
    /// Each with whether it is worth a line in the log.
    async fn write_hosts(
        &self,
        changed: Vec<(&ServiceKey, String, bool)>,
        leadership: &Leadership,
        errors: &mut Vec<WriteError>,
    ) {
        let writes = changed.into_iter().map(|(key, host, is_news)| async move {
            let written = timed(leadership, self.writer.set_host(key, &host)).await;
            if written.is_ok() && is_news {
                info!(namespace = key.namespace, egressservice = key.name, host, "host written");
            }
            written.err()
        });
        errors.extend(all(writes.collect()).await.into_iter().flatten());
    }

    /// Sets or removes these labels of nodes.
    async fn write_labels(
        &self,
        labels: &[(String, String)],
        value: Option<&str>,
        leadership: &Leadership,
        errors: &mut Vec<WriteError>,
    ) {
        let writes = labels.iter().map(|(node, label)| async move {
            let written = timed(leadership, self.writer.label(node, label, value)).await;
            if written.is_ok() {
                info!(node, label, set = value.is_some(), "label of a node written");
            }
            written.err()
        });
        errors.extend(all(writes.collect()).await.into_iter().flatten());
    }

    async fn write_assignments(
        &self,
        wanted: &BTreeMap<ServiceKey, Result<WantedAssignment, NotAssigned>>,
        leadership: &Leadership,
        errors: &mut Vec<WriteError>,
    ) {
        let specs: BTreeMap<String, _> = wanted
            .iter()
            .filter_map(|(key, outcome)| {
                let service = self.view.inputs.egress_services.get(key)?;
                Some((assignment_name(key), assignment_spec(key, service, outcome.as_ref().ok()?)))
            })
            .collect();
        for (name, stored) in self.view.assignments.iter().filter(|(name, _)| !specs.contains_key(*name)) {
            errors.extend(timed(leadership, self.assignments.unassign(name, stored)).await.err());
        }
        let known = &self.view.assignments;
        let changed = specs.iter().map(|(name, spec)| (name, spec, known.get(name)));
        let changed = changed.filter(|(_, spec, stored)| stored.is_none_or(|stored| stored.spec != **spec));
        let writes = changed.map(|(name, spec, stored)| async move {
            // One whose addresses are assigned does not become one that has none, nor the other way round: it is deleted
            // first, so that its addresses are released.
            match stored.filter(|stored| stored.spec["sourceIPBy"] != spec["sourceIPBy"]) {
                Some(other) => timed(leadership, self.assignments.unassign(name, other)).await.err(),
                None => timed(leadership, self.assignments.assign(name, spec, stored)).await.err(),
            }
        });
        errors.extend(all(writes.collect()).await.into_iter().flatten());
    }

    /// Publishes why EgressServices have no assignment, once each.
    fn report(&mut self, wanted: &BTreeMap<ServiceKey, Result<WantedAssignment, NotAssigned>>) {
        let mut reported = BTreeMap::new();
        for (key, outcome) in wanted {
            let (Err(why), Some(service)) = (outcome, self.view.inputs.egress_services.get(key)) else { continue };
            let Some(reason) = why.reason() else { continue };
            if self.reported.get(&service.uid) != Some(why) {
                self.events.warn_of_egress_service((key, &service.uid), reason, &why.to_string());
            }
            reported.insert(service.uid.clone(), why.clone());
        }
        self.reported = reported;
    }
}
