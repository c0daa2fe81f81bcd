//! From a [`Snapshot`] to the text of a scrape, by the definitions of the [`catalogue`](crate::metrics::catalogue). Pure.
//!
//! The text is OpenMetrics, which Prometheus prefers to its own older format.

use std::fmt;

use egress_common::abi::{Class, EipCount, Verdict};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, MetricEncoder, NoLabelSet, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::exemplar::Exemplar;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use crate::metrics::catalogue::{ALL, Id, MOST_EGRESS_IPS, MOST_NODES, Metric, MetricKind};
use crate::metrics::meters::{NodeState, Probed};
use crate::metrics::snapshot::{ServedAddress, Snapshot};
use egress_core::model::state::EgressId;
use egress_core::plan::refusal::MAPS;
use egress_datapath::maps::facts::Use;

/// Content type of what [`page`] writes.
pub(super) const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

enum Value {
    Count(u64),
    Real(f64),
    Histogram(Histogram),
}

/// One series: values of the labels in the order of their names, and its value.
type Series = (Vec<String>, Value);

/// The text of a scrape.
pub(super) fn page(snapshot: Snapshot) -> Result<String, fmt::Error> {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(Scrape(snapshot)));
    let mut text = String::new();
    text::encode(&mut text, &registry)?;
    Ok(text)
}

#[derive(Debug)]
struct Scrape(Snapshot);

impl Collector for Scrape {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        for metric in ALL.iter().filter(|metric| self.0.process.exposes(metric.process)) {
            let series = series(metric.id, &self.0);
            if !series.is_empty() {
                write(&mut encoder, metric, series)?;
            }
        }
        Ok(())
    }
}

fn write(encoder: &mut DescriptorEncoder<'_>, metric: &Metric, series: Vec<Series>) -> fmt::Result {
    let kind = match metric.kind {
        MetricKind::Counter => MetricType::Counter,
        MetricKind::Gauge => MetricType::Gauge,
        MetricKind::Histogram => MetricType::Histogram,
    };
    let help = format!("{}.", metric.help);
    let mut family = encoder.encode_descriptor(metric.name, &help, None, kind)?;
    let names = metric.labels.names();
    if names.is_empty() {
        // Without braces.
        return series.into_iter().next().map_or(Ok(()), |(_, value)| encode_value(family, metric.kind, &value));
    }
    for (labels, value) in series {
        let labels: Vec<(&str, String)> = names.iter().copied().zip(labels).collect();
        encode_value(family.encode_family(&labels)?, metric.kind, &value)?;
    }
    Ok(())
}

fn encode_value(mut one: MetricEncoder<'_>, kind: MetricKind, value: &Value) -> fmt::Result {
    let none = None::<&Exemplar<NoLabelSet, f64>>;
    match (kind, value) {
        (MetricKind::Counter, Value::Count(value)) => one.encode_counter(value, none),
        (MetricKind::Counter, Value::Real(value)) => one.encode_counter(value, none),
        (MetricKind::Gauge | MetricKind::Histogram, Value::Count(value)) => one.encode_gauge(value),
        (MetricKind::Gauge | MetricKind::Histogram, Value::Real(value)) => one.encode_gauge(value),
        (_, Value::Histogram(value)) => value.encode(one),
    }
}

/// The series of a metric; empty if its value is not known.
fn series(metric: Id, snapshot: &Snapshot) -> Vec<Series> {
    let single = |value: Value| vec![(Vec::new(), value)];
    let flag = |on: bool| vec![(Vec::new(), Value::Count(on.into()))];
    let agent = |is: fn(&crate::metrics::snapshot::AgentSnapshot) -> bool| {
        snapshot.agent.as_ref().map(is).map_or_else(Vec::new, flag)
    };
    let reconciler = |count: fn(&crate::metrics::snapshot::ReconcilerSnapshot) -> usize| {
        snapshot.reconciler.iter().map(|from| (Vec::new(), Value::Count(as_u64(count(from))))).collect()
    };
    let in_kernel = |count: fn(&crate::metrics::snapshot::InKernel) -> usize| {
        snapshot.in_kernel().map(|from| (Vec::new(), Value::Count(as_u64(count(from))))).into_iter().collect()
    };
    let cluster = || snapshot.meters.cluster();
    match metric {
        Id::BuildInfo => vec![(vec![snapshot.version.to_owned()], Value::Count(1))],
        Id::StartTime => single(Value::Real(snapshot.started.as_secs_f64())),
        Id::Ready => flag(snapshot.ready),
        Id::Serving => agent(|agent| agent.serving),
        Id::LeaseExpired => agent(|agent| agent.lease_expired),
        Id::Lease => snapshot.kernel.iter().map(|kernel| (Vec::new(), Value::Real(kernel.lease_seconds))).collect(),
        Id::Leader => snapshot.leads.map_or_else(Vec::new, flag),
        Id::Packets => verdicts(snapshot, |count| count.packets),
        Id::Bytes => verdicts(snapshot, |count| count.bytes),
        Id::EipPackets => both_directions(snapshot, |c| (c.egress_packets, c.ingress_packets)),
        Id::EipInfo => interfaces(snapshot),
        Id::EipBytes => both_directions(snapshot, |c| (c.egress_bytes, c.ingress_bytes)),
        Id::EipCreated => egress_ips(snapshot, |id| Some(Value::Count(count_of(snapshot, id)?.nat_entries))),
        Id::EipRefusals => egress_ips(snapshot, |id| Some(Value::Count(count_of(snapshot, id)?.refusals))),
        Id::EipLimited => egress_ips(snapshot, |id| Some(Value::Count(count_of(snapshot, id)?.limited))),
        Id::EipMappings => egress_ips(snapshot, |id| Some(Value::Count(use_of(snapshot, id)?.mappings.into()))),
        Id::EipPortUse => egress_ips(snapshot, |id| Some(Value::Real(use_of(snapshot, id)?.ratio()))),
        Id::EipBlockUse => egress_ips(snapshot, |id| Some(Value::Real(use_of(snapshot, id)?.block_ratio()?))),
        Id::EgressIpsUnshown => in_kernel(|of| of.served.len().saturating_sub(MOST_EGRESS_IPS)),
        Id::NodePortUse => {
            let ports = snapshot.kernel.as_ref().and_then(|kernel| kernel.ports.as_ref());
            ports.map(|ports| (Vec::new(), Value::Real(ports.node.ratio()))).into_iter().collect()
        }
        Id::MapEntries => entries(snapshot),
        Id::MapCapacity => {
            let limits = snapshot.kernel.iter().flat_map(|kernel| &kernel.limits);
            limits.map(|(map, limit)| (vec![(*map).to_owned()], Value::Count((*limit).into()))).collect()
        }
        Id::EntriesRefused => {
            let counts = MAPS.into_iter().zip(snapshot.meters.refusals());
            counts.map(|(map, count)| (vec![map.to_owned()], Value::Count(count))).collect()
        }
        Id::EntriesLeftOut => {
            let counts = snapshot.in_kernel().into_iter().flat_map(|in_kernel| {
                MAPS.into_iter().map(|map| (map, in_kernel.left_out.get(map).copied().unwrap_or_default()))
            });
            counts.map(|(map, count)| (vec![map.to_owned()], Value::Count(as_u64(count)))).collect()
        }
        Id::HookAttached => hooks(snapshot, |hook| Some(Value::Count(hook.attached.into()))),
        Id::HookRuns => hooks(snapshot, |hook| Some(Value::Count(hook.runs?.0))),
        Id::HookSeconds => hooks(snapshot, |hook| Some(Value::Real(hook.runs?.1.as_secs_f64()))),
        Id::Reconcile => single(Value::Histogram(snapshot.meters.reconcile())),
        Id::ReconcileFailures => single(Value::Count(snapshot.meters.failures())),
        Id::AddressConflicts => single(Value::Count(snapshot.meters.conflicts())),
        Id::HealthRefused => single(Value::Count(snapshot.meters.refused())),
        Id::ApiOutages => single(Value::Count(snapshot.outages)),
        Id::Unanswered => single(Value::Real(snapshot.unanswered.as_secs_f64())),
        Id::HandOvers => {
            let roles = snapshot.reconciler.iter().flat_map(|of| [("from", of.from), ("to", of.to)]);
            roles.map(|(role, count)| (vec![role.to_owned()], Value::Count(as_u64(count)))).collect()
        }
        Id::Standby => reconciler(|of| of.standby),
        Id::Unclaimed => in_kernel(|of| of.unclaimed),
        Id::EgressIps => {
            let states =
                cluster().into_iter().flat_map(|of| [("assigned", of.assigned), ("unassigned", of.unassigned)]);
            states.map(|(state, count)| (vec![state.to_owned()], Value::Count(as_u64(count)))).collect()
        }
        Id::Objects => {
            let reasons = cluster().into_iter().flat_map(|cluster| cluster.objects);
            reasons.map(|(reason, count)| (vec![reason.to_owned()], Value::Count(as_u64(count)))).collect()
        }
        Id::NodeState => {
            let mut nodes: Vec<_> = cluster().into_iter().flat_map(|cluster| cluster.nodes).collect();
            // Nodes that do not answer first: `take` below omits the rest.
            nodes.sort_by_key(|(_, state)| *state == NodeState::Answers);
            nodes
                .into_iter()
                .take(MOST_NODES)
                .map(|(node, state)| (vec![node, state.label().to_owned()], Value::Count(1)))
                .collect()
        }
        // A controller keeps its counters when it stops leading.
        Id::Probes => {
            let counts = Probed::ALL.into_iter().zip(snapshot.meters.probes());
            counts.map(|(what, count)| (vec![what.label().to_owned()], Value::Count(count))).collect()
        }
        Id::ProbeSeconds => single(Value::Histogram(snapshot.meters.probe())),
        Id::Failover => single(Value::Histogram(snapshot.meters.failover())),
    }
}
pub(super) const fn class(class: Class) -> &'static str {
    match class {
        Class::Pass => "pass",
        Class::Redirect => "redirect",
        Class::Answer => "answer",
        Class::Hold => "hold",
        Class::Drop => "drop",
    }
}

fn verdicts(snapshot: &Snapshot, of: fn(&egress_common::abi::Count) -> u64) -> Vec<Series> {
    let Some(kernel) = &snapshot.kernel else { return Vec::new() };
    let one = |verdict: &Verdict| {
        let labels = vec![class(verdict.class()).to_owned(), verdict.label().to_owned()];
        (labels, Value::Count(kernel.verdicts.get(verdict).map_or(0, of)))
    };
    Verdict::ALL.iter().map(one).collect()
}

/// The egress IPs that are shown.
fn shown(snapshot: &Snapshot) -> impl Iterator<Item = (&EgressId, &ServedAddress)> {
    snapshot.in_kernel().into_iter().flat_map(|in_kernel| &in_kernel.served).take(MOST_EGRESS_IPS)
}

fn labels(served: &ServedAddress) -> Vec<String> {
    let policy = served.policy.as_ref().map(|(policy, _)| policy.name.clone());
    vec![served.address.to_string(), policy.unwrap_or_default()]
}

/// One series for each egress IP that is shown.
fn egress_ips(snapshot: &Snapshot, value: impl Fn(&EgressId) -> Option<Value>) -> Vec<Series> {
    shown(snapshot).filter_map(|(id, served)| Some((labels(served), value(id)?))).collect()
}

/// With the interface of each egress IP.
fn interfaces(snapshot: &Snapshot) -> Vec<Series> {
    let name = |id: &EgressId| snapshot.kernel.as_ref()?.interfaces.get(id).cloned();
    let series = shown(snapshot).filter_map(|(id, served)| {
        let mut labels = labels(served);
        labels.push(name(id)?);
        Some((labels, Value::Count(1)))
    });
    series.collect()
}

fn both_directions(snapshot: &Snapshot, of: fn(&EipCount) -> (u64, u64)) -> Vec<Series> {
    let direction = |which: fn((u64, u64)) -> u64, name: &str| {
        let mut series = egress_ips(snapshot, |id| Some(Value::Count(which(of(&count_of(snapshot, id)?)))));
        series.iter_mut().for_each(|(labels, _)| labels.push(name.to_owned()));
        series
    };
    let (mut all, ingress) = (direction(|(egress, _)| egress, "egress"), direction(|(_, ingress)| ingress, "ingress"));
    all.extend(ingress);
    all
}

/// Zero for an egress IP without packets so far.
fn count_of(snapshot: &Snapshot, id: &EgressId) -> Option<EipCount> {
    let kernel = snapshot.kernel.as_ref()?;
    Some(kernel.egress_ips.get(id).copied().unwrap_or_default())
}

fn use_of(snapshot: &Snapshot, id: &EgressId) -> Option<Use> {
    let ports = snapshot.kernel.as_ref()?.ports.as_ref()?;
    Some(ports.egress_ips.get(id).copied().unwrap_or_default())
}

fn entries(snapshot: &Snapshot) -> Vec<Series> {
    let written = snapshot
        .in_kernel()
        .into_iter()
        .flat_map(|in_kernel| &in_kernel.entries)
        .map(|(map, count)| (*map, as_u64(*count)));
    let counted = snapshot.kernel.iter().flat_map(|kernel| &kernel.entries).map(|(map, count)| (*map, (*count).into()));
    written.chain(counted).map(|(map, count)| (vec![map.to_owned()], Value::Count(count))).collect()
}

fn hooks(
    snapshot: &Snapshot,
    value: impl Fn(&egress_datapath::maps::facts::HookFacts) -> Option<Value>,
) -> Vec<Series> {
    let hooks = snapshot.kernel.iter().flat_map(|kernel| &kernel.hooks);
    hooks.filter_map(|(hook, of)| value(of).map(|value| (vec![(*hook).to_owned()], value))).collect()
}

fn as_u64(count: usize) -> u64 {
    u64::try_from(count).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
