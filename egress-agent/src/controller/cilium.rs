//! Cilium's CiliumEgressGatewayPolicies, while this controller leads: chooses the gateways of each, writes an assignment for each
//! of their addresses, and says in an EgressGatewayPolicyStatus what has become of each policy.

use std::collections::{BTreeMap, BTreeSet};

use futures::{StreamExt, stream};
use kube::Client;
use serde_json::Value;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::info;

use crate::change_queue::ChangeReceiver;
use crate::controller::conversion::{self, Conversion, KnownCluster, all, timed};
use egress_core::cilium::{
    ACCEPTED, GatewayChooser, GatewayInputs, GatewayOutcome, PolicyGateways, READY, assignment_name, status,
};
use egress_core::model::policy::{RuleSource, SourceKind};
use egress_core::model::view::Update;
use egress_core::node_health::NodeHealth;
use egress_kube::api_outage::ApiOutages;
use egress_kube::assignments::AssignmentWriter;
use egress_kube::cilium::{CiliumChange, CiliumView, CiliumWriter, StoredGatewayPolicy, status_value, watches};
use egress_kube::events::{Events, Regarding};
use egress_kube::leader_election::Leadership;
use egress_kube::policy::status::WriteError;

/// What the task needs.
pub(super) struct CiliumTask {
    pub(super) client: Client,
    pub(super) outages: ApiOutages,
    pub(super) events: Events,
    pub(super) leadership: Leadership,
    pub(super) node_health: watch::Receiver<NodeHealth>,
}

impl CiliumTask {
    /// Runs until stopped.
    pub(super) async fn run(self, cluster: ChangeReceiver, stop: CancellationToken) {
        let Self { client, outages, events, leadership, node_health } = self;
        let conversion = CiliumConversion {
            view: CiliumView::default(),
            unreachable: BTreeSet::new(),
            absent: BTreeSet::new(),
            written: BTreeSet::new(),
            assignments: AssignmentWriter::new(&client),
            writer: CiliumWriter::new(&client),
            events,
        };
        let health = stream::unfold(node_health, async |mut health| {
            health.changed().await.ok()?;
            let now = health.borrow_and_update();
            let change = CiliumInput::NodeHealth { unreachable: now.unreachable.clone(), absent: now.absent.clone() };
            drop(now);
            Some((change, health))
        });
        let changes = stream::select(watches(&client, &outages).map(CiliumInput::Objects), health);
        let what = "what becomes of CiliumEgressGatewayPolicies";
        conversion::run(conversion, what, changes, (cluster, leadership), stop).await;
    }
}

/// One change of what the task knows.
enum CiliumInput {
    Objects(CiliumChange),
    NodeHealth { unreachable: BTreeSet<String>, absent: BTreeSet<String> },
}

/// What is known, and what has been said.
struct CiliumConversion {
    view: CiliumView,
    unreachable: BTreeSet<String>,
    absent: BTreeSet<String>,
    /// The policies whose statuses this leader has written. Until the watch shows that, it knows no more than before, and would write
    /// the same again with another time.
    written: BTreeSet<String>,
    assignments: AssignmentWriter,
    writer: CiliumWriter,
    events: Events,
}

impl Conversion for CiliumConversion {
    type Change = CiliumInput;

    fn apply(&mut self, change: CiliumInput) -> bool {
        match change {
            CiliumInput::Objects(change) => {
                let was_waited_for = match &change {
                    CiliumChange::Statuses(Update::Replaced(_)) => !std::mem::take(&mut self.written).is_empty(),
                    CiliumChange::Statuses(Update::Changed(name, _) | Update::Removed(name)) => {
                        self.written.remove(name)
                    }
                    CiliumChange::Policies(_) | CiliumChange::Assignments(_) => false,
                };
                self.view.apply(change) || was_waited_for
            }
            CiliumInput::NodeHealth { unreachable, absent } => {
                let former = (&self.unreachable, &self.absent);
                let is_news = former != (&unreachable, &absent);
                (self.unreachable, self.absent) = (unreachable, absent);
                is_news
            }
        }
    }

    fn has_assignment(&self, name: &str) -> bool {
        self.view.assignments.contains_key(name)
    }

    fn is_whole(&self) -> bool {
        self.view.is_whole()
    }

    fn forget_reported(&mut self) {
        self.written.clear();
    }

    async fn pass(&mut self, cluster: &KnownCluster, leadership: &Leadership) -> Vec<WriteError> {
        let Some(nodes) = cluster.nodes() else { return Vec::new() };
        let current = self.view.current();
        let inputs = GatewayInputs { nodes, unreachable: &self.unreachable, absent: &self.absent, current: &current };
        let (mut chooser, policies) = (GatewayChooser::new(inputs), self.view.policies.iter());
        let chosen: BTreeMap<String, PolicyGateways> =
            policies.map(|(name, stored)| (name.clone(), chooser.choose(&stored.object))).collect();
        let wanted = self.view.assignment_specs(&chosen);
        let without_room = wanted.without_room.clone();
        let mut errors = self.write_assignments(wanted.specs(), leadership).await;
        errors.extend(self.write_statuses((&chosen, &without_room), (cluster, leadership)).await);
        errors
    }
}

impl CiliumConversion {
    async fn write_assignments(&self, specs: BTreeMap<String, Value>, leadership: &Leadership) -> Vec<WriteError> {
        let gone = self.view.own_assignments().filter(|(name, _)| !specs.contains_key(*name));
        let removals = gone.map(|(name, stored)| timed(leadership, self.assignments.unassign(name, stored)));
        let mut outcomes = all(removals.collect()).await;
        let changed = specs.iter().filter_map(|(name, spec)| {
            let stored = self.view.assignments.get(name);
            let differs = stored.is_none_or(|stored| stored.spec != *spec);
            differs.then(|| timed(leadership, self.assignments.assign(name, spec, stored)))
        });
        outcomes.extend(all(changed.collect()).await);
        outcomes.into_iter().filter_map(Result::err).collect()
    }

    async fn write_statuses(
        &mut self,
        (chosen, without_room): (&BTreeMap<String, PolicyGateways>, &BTreeSet<String>),
        (cluster, leadership): (&KnownCluster, &Leadership),
    ) -> Vec<WriteError> {
        let statuses: Vec<_> = chosen
            .iter()
            .filter_map(|(name, gateways)| {
                let stored = self.view.policies.get(name)?;
                let uid = &stored.object.uid;
                let has_room = !without_room.contains(name);
                let status = status(&stored.object, gateways, has_room, |address| {
                    let policy = cluster.policy(assignment_name(address))?;
                    // The assignment may not have its rule yet.
                    policy.rules.iter().flatten().any(|rule| rule.source.uid == *uid).then_some(policy)
                });
                Some((name.clone(), status))
            })
            .collect();
        let (view, writer, events) = (&self.view, &self.writer, &self.events);
        let is_known = |name: &str| !self.written.contains(name);
        let changed = statuses.iter().filter_map(|(name, status)| {
            let policy = view.policies.get(name).filter(|_| is_known(name))?;
            let known = view.statuses.get(name);
            let value = status_value(status, policy, known);
            let differs = known != Some(&value);
            differs.then_some(async move {
                // The watch shows it, and the next pass writes its status.
                let written = match known {
                    None => timed(leadership, writer.create_status(name, policy)).await,
                    Some(_) => timed(leadership, writer.set_status(name, &value)).await,
                };
                if let (Ok(()), Some(known)) = (&written, known) {
                    report(events, &source(name, policy), status, known);
                }
                written.map(|()| name.clone())
            })
        });
        let (mut errors, mut written) = (Vec::new(), Vec::new());
        for outcome in all(changed.collect()).await {
            match outcome {
                Ok(name) => written.push(name),
                Err(error) => errors.push(error),
            }
        }
        let gone = view.statuses.keys().filter(|name| !view.policies.contains_key(*name));
        let removals = gone.map(|name| timed(leadership, writer.delete_status(name)));
        errors.extend(all(removals.collect()).await.into_iter().filter_map(Result::err));
        self.written.extend(written);
        errors
    }
}

/// Publishes what a status says that the former one did not.
fn report(events: &Events, about: &RuleSource, status: &GatewayOutcome, former: &Value) {
    let condition = |kind| status.conditions.iter().find(|one| one.kind == kind);
    let refused = condition(ACCEPTED).filter(|accepted| !accepted.status);
    let Some(said) = refused.or_else(|| condition(READY)) else { return };
    let mut known = former["conditions"].as_array().into_iter().flatten();
    let is_known =
        known.any(|one| one["type"] == said.kind && one["reason"] == said.reason && one["message"] == said.message);
    // A gateway begins to serve in a moment; if it does not, the conditions of its assignment say so.
    if is_known || said.reason == "Waiting" {
        return;
    }
    let regarding = Regarding::source(about);
    match said.status {
        true => {
            let nodes: Vec<&str> = status.gateways.keys().map(String::as_str).collect();
            info!(policy = about.name, gateways = nodes.join(","), reason = said.reason, "gateways chosen");
            events.note(regarding, said.reason, &said.message);
        }
        false => events.warn(regarding, said.reason, &said.message),
    }
}

fn source(name: &str, stored: &StoredGatewayPolicy) -> RuleSource {
    let (created, uid) = (stored.object.created, stored.object.uid.clone());
    let kind = SourceKind::CiliumEgressGatewayPolicy;
    RuleSource { kind, created, namespace: String::new(), name: name.to_owned(), uid }
}
