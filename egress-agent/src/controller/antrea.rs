//! Antrea's Egresses and ExternalIPPools, while this controller leads: allocates addresses, writes an assignment for all Egresses
//! with the same addresses, and says in the status of both kinds what has become of them.
//!
//! The order of writes: addresses that Egresses lack, assignments, statuses. An assignment follows what specs have, so an address
//! is in its Egress before a node gets it.

use std::collections::BTreeMap;
use std::net::IpAddr;

use kube::Client;
use tokio_util::sync::CancellationToken;
use tracing::info;

use crate::change_queue::ChangeReceiver;
use crate::controller::conversion::{self, Conversion, KnownCluster, all, timed};
use egress_core::antrea::{Allocation, NotAllocated, PoolProblem, assignment_name, status};
use egress_core::model::policy::{EgressPolicy, RuleSource, SourceKind};
use egress_kube::antrea::{AntreaChange, AntreaView, AntreaWriter, StoredEgress, assignment_spec, watches};
use egress_kube::api_outage::ApiOutages;
use egress_kube::assignments::AssignmentWriter;
use egress_kube::events::{Events, Regarding};
use egress_kube::leader_election::Leadership;
use egress_kube::policy::status::WriteError;

/// What the task needs.
pub(super) struct AntreaTask {
    pub(super) client: Client,
    pub(super) outages: ApiOutages,
    pub(super) events: Events,
    pub(super) leadership: Leadership,
}

impl AntreaTask {
    /// Runs until stopped.
    pub(super) async fn run(self, policies: ChangeReceiver, stop: CancellationToken) {
        let Self { client, outages, events, leadership } = self;
        let conversion = AntreaConversion {
            view: AntreaView::default(),
            reported: BTreeMap::new(),
            reported_pools: BTreeMap::new(),
            written_from: BTreeMap::new(),
            assignments: AssignmentWriter::new(&client),
            writer: AntreaWriter::new(&client),
            events,
        };
        let watches = watches(&client, &outages);
        conversion::run(conversion, "what becomes of Egresses", watches, (policies, leadership), stop).await;
    }
}

/// What is known, and what has been said.
struct AntreaConversion {
    view: AntreaView,
    /// The events that have been published, by the UID of the Egress.
    reported: BTreeMap<String, NotAllocated>,
    /// The same of pools.
    reported_pools: BTreeMap<String, PoolProblem>,
    /// The versions of Egresses that this leader has written to. Until the watch shows another one, it knows no more than
    /// before, and would write the same again.
    written_from: BTreeMap<String, String>,
    assignments: AssignmentWriter,
    writer: AntreaWriter,
    events: Events,
}

impl Conversion for AntreaConversion {
    type Change = AntreaChange;

    fn apply(&mut self, change: AntreaChange) -> bool {
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
        self.reported_pools.clear();
        self.written_from.clear();
    }

    async fn pass(&mut self, cluster: &KnownCluster, leadership: &Leadership) -> Vec<WriteError> {
        let allocation = self.view.inputs().allocate();
        self.report(&allocation);
        let egresses = &self.view.egresses;
        self.written_from.retain(|name, from| egresses.get(name).is_some_and(|stored| stored.version() == from));
        let mut errors = Vec::new();
        self.write_addresses(&allocation, leadership, &mut errors).await;
        self.write_assignments(&allocation, leadership, &mut errors).await;
        self.write_statuses(&allocation, (cluster, leadership), &mut errors).await;
        errors
    }
}

impl AntreaConversion {
    async fn write_addresses(
        &mut self,
        allocation: &Allocation,
        leadership: &Leadership,
        errors: &mut Vec<WriteError>,
    ) {
        let chosen = allocation.chosen.iter().filter_map(|(name, addresses)| {
            let stored = self.current(name)?;
            let writer = &self.writer;
            Some(async move {
                let written = timed(leadership, writer.allocate(name, stored, addresses)).await;
                if written.is_ok() {
                    info!(egress = name, ?addresses, "address allocated");
                }
                (name, written.map(|()| true))
            })
        });
        let outcomes = all(chosen.collect()).await;
        for (name, _) in outcomes.iter().filter(|(_, written)| written.is_ok()) {
            let addresses = allocation.chosen.get(*name).map(Vec::as_slice).unwrap_or_default();
            self.view.note_allocated(name, addresses);
        }
        self.note(outcomes, errors);
    }

    /// The Egress, if the watch has shown what this leader last wrote to it.
    fn current(&self, name: &str) -> Option<&StoredEgress> {
        self.view.egresses.get(name).filter(|_| !self.written_from.contains_key(name))
    }

    /// Notes the writes of Egresses: whether each has changed it.
    fn note(&mut self, outcomes: Vec<(&String, Result<bool, WriteError>)>, errors: &mut Vec<WriteError>) {
        for (name, written) in outcomes {
            match written {
                Ok(true) => {
                    let version = self.view.egresses.get(name).map(|stored| stored.version().to_owned());
                    self.written_from.extend(version.map(|version| (name.clone(), version)));
                }
                Ok(false) => {}
                Err(error) => errors.push(error),
            }
        }
    }

    async fn write_assignments(&self, allocation: &Allocation, leadership: &Leadership, errors: &mut Vec<WriteError>) {
        let groups = allocation.groups.iter();
        let specs: BTreeMap<String, _> =
            groups.map(|(first, group)| (assignment_name(*first), assignment_spec(group, &self.view))).collect();
        let own = self.view.assignments.iter().filter(|(_, stored)| stored.kind() == Some(SourceKind::Egress));
        for (name, stored) in own.filter(|(name, _)| !specs.contains_key(*name)) {
            errors.extend(timed(leadership, self.assignments.unassign(name, stored)).await.err());
        }
        let changed = specs.iter().filter_map(|(name, spec)| {
            let stored = self.view.assignments.get(name);
            let differs = stored.is_none_or(|stored| stored.spec != *spec);
            differs.then(|| timed(leadership, self.assignments.assign(name, spec, stored)))
        });
        errors.extend(all(changed.collect()).await.into_iter().filter_map(Result::err));
    }

    async fn write_statuses(
        &mut self,
        allocation: &Allocation,
        (cluster, leadership): (&KnownCluster, &Leadership),
        errors: &mut Vec<WriteError>,
    ) {
        let statuses = allocation.egresses.iter().filter_map(|(name, outcome)| {
            let stored = self.current(name)?;
            let policy = outcome.as_ref().ok().and_then(|addresses| policy(cluster, allocation, addresses));
            // Another Egress may have had the addresses a moment ago.
            let has_rule =
                |policy: &&EgressPolicy| policy.rules.iter().flatten().any(|rule| rule.source.uid == stored.object.uid);
            let policy = policy.filter(has_rule);
            let status = status(&stored.object, outcome, policy);
            let this = &*self;
            Some(async move {
                let written = timed(leadership, this.writer.set_status(name, stored, &status)).await;
                if matches!(written, Ok(true)) && stored.node() != status.node {
                    this.note_node(name, stored, (&status.node, &status.address));
                }
                (name, written)
            })
        });
        let outcomes = all(statuses.collect()).await;
        self.note(outcomes, errors);
        for (name, stored) in &self.view.pools {
            let used = allocation.used.get(name).copied().unwrap_or_default();
            errors.extend(timed(leadership, self.writer.set_usage(name, stored, used)).await.err());
        }
    }

    /// As Antrea's agents do.
    fn note_node(&self, name: &str, stored: &StoredEgress, (node, address): (&str, &str)) {
        let about = Regarding::source(&source(name, stored));
        match node.is_empty() {
            true => {
                let message = format!("Unassigned Egress {name} from Node {}", stored.node());
                self.events.note(about, "IPUnassigned", &message);
            }
            false => {
                let message = format!("Assigned Egress {name} with IP {address} on Node {node}");
                self.events.note(about, "IPAssigned", &message);
            }
        }
    }

    /// Publishes why Egresses have no address, and why pools give none, once each.
    fn report(&mut self, allocation: &Allocation) {
        let mut reported = BTreeMap::new();
        for (name, outcome) in &allocation.egresses {
            let (Err(why), Some(stored)) = (outcome, self.view.egresses.get(name)) else { continue };
            if *why == NotAllocated::Allocating {
                continue;
            }
            let uid = &stored.object.uid;
            if self.reported.get(uid) != Some(why) {
                self.events.warn(Regarding::source(&source(name, stored)), "AllocationError", &why.to_string());
            }
            reported.insert(uid.clone(), why.clone());
        }
        self.reported = reported;
        let mut reported = BTreeMap::new();
        for (name, problem) in &allocation.problems {
            let Some(stored) = self.view.pools.get(name) else { continue };
            let uid = &stored.object.uid;
            if self.reported_pools.get(uid) != Some(problem) {
                let message = format!("it gives no addresses: {problem}");
                self.events.warn(Regarding::pool(name, uid), "InvalidPool", &message);
            }
            reported.insert(uid.clone(), problem.clone());
        }
        self.reported_pools = reported;
    }
}

/// The policy of the assignment that has these addresses.
fn policy<'a>(cluster: &'a KnownCluster, allocation: &Allocation, addresses: &[IpAddr]) -> Option<&'a EgressPolicy> {
    let group = |address: &IpAddr| allocation.groups.values().find(|group| group.addresses.contains(address));
    let first = addresses.first().and_then(|first| {
        if allocation.groups.contains_key(first) { Some(*first) } else { group(first)?.addresses.first().copied() }
    })?;
    cluster.policy(assignment_name(first))
}

fn source(name: &str, stored: &StoredEgress) -> RuleSource {
    let (created, uid) = (stored.object.created, stored.object.uid.clone());
    RuleSource { kind: SourceKind::Egress, created, namespace: String::new(), name: name.to_owned(), uid }
}
