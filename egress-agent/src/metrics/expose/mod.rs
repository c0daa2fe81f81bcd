//! From facts to the text of a scrape, by the definitions of the [`catalogue`](crate::metrics::catalogue). Pure.
//!
//! The text is OpenMetrics, as the library writes it; Prometheus asks for it and takes it before its own older format, of
//! which it is all but a superset.

use std::fmt;

use egress_common::abi::{Class, EipCount, Verdict};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, MetricEncoder, NoLabelSet, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::exemplar::Exemplar;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use crate::metrics::catalogue::{ALL, Id, Kind, MOST_EGRESS_IPS, MOST_NODES, Metric};
use crate::metrics::facts::Facts;
use crate::metrics::meters::{NodeState, Probed};
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
pub(super) fn page(facts: Facts) -> Result<String, fmt::Error> {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(Scrape(facts)));
    let mut text = String::new();
    text::encode(&mut text, &registry)?;
    Ok(text)
}

#[derive(Debug)]
struct Scrape(Facts);

impl Collector for Scrape {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        for metric in ALL.iter().filter(|metric| self.0.who.says(metric.who)) {
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
        Kind::Counter => MetricType::Counter,
        Kind::Gauge => MetricType::Gauge,
        Kind::Histogram => MetricType::Histogram,
    };
    let help = format!("{}.", metric.help);
    let mut family = encoder.encode_descriptor(metric.name, &help, None, kind)?;
    let names = metric.labels.names();
    if names.is_empty() {
        // One alone, without braces.
        return series.into_iter().next().map_or(Ok(()), |(_, value)| put(family, metric.kind, &value));
    }
    for (labels, value) in series {
        let labels: Vec<(&str, String)> = names.iter().copied().zip(labels).collect();
        put(family.encode_family(&labels)?, metric.kind, &value)?;
    }
    Ok(())
}

fn put(mut one: MetricEncoder<'_>, kind: Kind, value: &Value) -> fmt::Result {
    let none = None::<&Exemplar<NoLabelSet, f64>>;
    match (kind, value) {
        (Kind::Counter, Value::Count(value)) => one.encode_counter(value, none),
        (Kind::Counter, Value::Real(value)) => one.encode_counter(value, none),
        (Kind::Gauge | Kind::Histogram, Value::Count(value)) => one.encode_gauge(value),
        (Kind::Gauge | Kind::Histogram, Value::Real(value)) => one.encode_gauge(value),
        (_, Value::Histogram(value)) => value.encode(one),
    }
}

/// Every metric of the catalogue has its arm; one without a value now has no series.
fn series(metric: Id, facts: &Facts) -> Vec<Series> {
    let alone = |value: Value| vec![(Vec::new(), value)];
    let flag = |on: bool| vec![(Vec::new(), Value::Count(on.into()))];
    let agent =
        |is: fn(&crate::metrics::facts::AgentFacts) -> bool| facts.agent.as_ref().map(is).map_or_else(Vec::new, flag);
    let node = |count: fn(&crate::metrics::facts::NodeFacts) -> usize| {
        facts.node.iter().map(|node| (Vec::new(), Value::Count(wide(count(node))))).collect()
    };
    let held = |count: fn(&crate::metrics::facts::Held) -> usize| {
        facts.held().map(|held| (Vec::new(), Value::Count(wide(count(held))))).into_iter().collect()
    };
    let cluster = || facts.meters.cluster();
    match metric {
        Id::BuildInfo => vec![(vec![facts.version.to_owned()], Value::Count(1))],
        Id::StartTime => alone(Value::Real(facts.started.as_secs_f64())),
        Id::Ready => flag(facts.ready),
        Id::Serving => agent(|agent| agent.serving),
        Id::Fenced => agent(|agent| agent.fenced),
        Id::Lease => facts.kernel.iter().map(|kernel| (Vec::new(), Value::Real(kernel.lease_seconds))).collect(),
        Id::Leader => facts.leads.map_or_else(Vec::new, flag),
        Id::Packets => verdicts(facts, |count| count.packets),
        Id::Bytes => verdicts(facts, |count| count.bytes),
        Id::EipPackets => both_ways(facts, |c| (c.egress_packets, c.ingress_packets)),
        Id::EipBytes => both_ways(facts, |c| (c.egress_bytes, c.ingress_bytes)),
        Id::EipCreated => egress_ips(facts, |id| Some(Value::Count(count_of(facts, id)?.nat_entries))),
        Id::EipRefusals => egress_ips(facts, |id| Some(Value::Count(count_of(facts, id)?.refusals))),
        Id::EipMappings => egress_ips(facts, |id| Some(Value::Count(use_of(facts, id)?.mappings.into()))),
        Id::EipPortUse => egress_ips(facts, |id| Some(Value::Real(use_of(facts, id)?.ratio()))),
        Id::EgressIpsUnshown => held(|held| held.served.len().saturating_sub(MOST_EGRESS_IPS)),
        Id::NodePortUse => {
            let ports = facts.kernel.as_ref().and_then(|kernel| kernel.ports.as_ref());
            ports.map(|ports| (Vec::new(), Value::Real(ports.node.ratio()))).into_iter().collect()
        }
        Id::MapEntries => entries(facts),
        Id::MapCapacity => {
            let limits = facts.kernel.iter().flat_map(|kernel| &kernel.limits);
            limits.map(|(map, limit)| (vec![(*map).to_owned()], Value::Count((*limit).into()))).collect()
        }
        Id::EntriesRefused => {
            let counts = MAPS.into_iter().zip(facts.meters.refusals());
            counts.map(|(map, count)| (vec![map.to_owned()], Value::Count(count))).collect()
        }
        Id::EntriesLeftOut => {
            let counts = facts.held().into_iter().flat_map(|held| {
                MAPS.into_iter().map(|map| (map, held.left_out.get(map).copied().unwrap_or_default()))
            });
            counts.map(|(map, count)| (vec![map.to_owned()], Value::Count(wide(count)))).collect()
        }
        Id::HookAttached => hooks(facts, |hook| Some(Value::Count(hook.attached.into()))),
        Id::HookRuns => hooks(facts, |hook| Some(Value::Count(hook.runs?.0))),
        Id::HookSeconds => hooks(facts, |hook| Some(Value::Real(hook.runs?.1.as_secs_f64()))),
        Id::Reconcile => alone(Value::Histogram(facts.meters.reconcile())),
        Id::ReconcileFailures => alone(Value::Count(facts.meters.failures())),
        Id::AddressConflicts => alone(Value::Count(facts.meters.conflicts())),
        Id::HealthRefused => alone(Value::Count(facts.meters.refused())),
        Id::ApiOutages => alone(Value::Count(facts.outages)),
        Id::Unanswered => alone(Value::Real(facts.unanswered.as_secs_f64())),
        Id::HandOvers => {
            let roles = facts.node.iter().flat_map(|node| [("from", node.from), ("to", node.to)]);
            roles.map(|(role, count)| (vec![role.to_owned()], Value::Count(wide(count)))).collect()
        }
        Id::Standby => node(|node| node.standby),
        Id::Unclaimed => held(|held| held.unclaimed),
        Id::EgressIps => {
            let states =
                cluster().into_iter().flat_map(|of| [("assigned", of.assigned), ("unassigned", of.unassigned)]);
            states.map(|(state, count)| (vec![state.to_owned()], Value::Count(wide(count)))).collect()
        }
        Id::Objects => {
            let reasons = cluster().into_iter().flat_map(|cluster| cluster.objects);
            reasons.map(|(reason, count)| (vec![reason.to_owned()], Value::Count(wide(count)))).collect()
        }
        Id::NodeState => {
            let mut nodes: Vec<_> = cluster().into_iter().flat_map(|cluster| cluster.nodes).collect();
            // What is left out is not what somebody looks for.
            nodes.sort_by_key(|(_, state)| *state == NodeState::Answers);
            nodes
                .into_iter()
                .take(MOST_NODES)
                .map(|(node, state)| (vec![node, state.label().to_owned()], Value::Count(1)))
                .collect()
        }
        // What it has counted as the leader stays while the process lives.
        Id::Probes => {
            let counts = Probed::ALL.into_iter().zip(facts.meters.probes());
            counts.map(|(what, count)| (vec![what.label().to_owned()], Value::Count(count))).collect()
        }
        Id::ProbeSeconds => alone(Value::Histogram(facts.meters.probe())),
        Id::Failover => alone(Value::Histogram(facts.meters.failover())),
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

fn verdicts(facts: &Facts, of: fn(&egress_common::abi::Count) -> u64) -> Vec<Series> {
    let Some(kernel) = &facts.kernel else { return Vec::new() };
    let one = |verdict: &Verdict| {
        let labels = vec![class(verdict.class()).to_owned(), verdict.label().to_owned()];
        (labels, Value::Count(kernel.verdicts.get(verdict).map_or(0, of)))
    };
    Verdict::ALL.iter().map(one).collect()
}

/// Those that are shown.
fn egress_ips(facts: &Facts, value: impl Fn(&EgressId) -> Option<Value>) -> Vec<Series> {
    let served = facts.held().into_iter().flat_map(|held| &held.served).take(MOST_EGRESS_IPS);
    let series = served.filter_map(|(id, served)| {
        value(id).map(|value| {
            (
                vec![
                    served.address.to_string(),
                    served.policy.as_ref().map(|(policy, _)| policy.name.clone()).unwrap_or_default(),
                ],
                value,
            )
        })
    });
    series.collect()
}

fn both_ways(facts: &Facts, of: fn(&EipCount) -> (u64, u64)) -> Vec<Series> {
    let direction = |which: fn((u64, u64)) -> u64, name: &str| {
        let mut series = egress_ips(facts, |id| Some(Value::Count(which(of(&count_of(facts, id)?)))));
        series.iter_mut().for_each(|(labels, _)| labels.push(name.to_owned()));
        series
    };
    let (mut all, back) = (direction(|(out, _)| out, "egress"), direction(|(_, back)| back, "ingress"));
    all.extend(back);
    all
}

/// One that has had no packet yet counts from zero.
fn count_of(facts: &Facts, id: &EgressId) -> Option<EipCount> {
    let kernel = facts.kernel.as_ref()?;
    Some(kernel.egress_ips.get(id).copied().unwrap_or_default())
}

fn use_of(facts: &Facts, id: &EgressId) -> Option<Use> {
    let ports = facts.kernel.as_ref()?.ports.as_ref()?;
    Some(ports.egress_ips.get(id).copied().unwrap_or_default())
}

fn entries(facts: &Facts) -> Vec<Series> {
    let written = facts.held().into_iter().flat_map(|held| &held.entries).map(|(map, count)| (*map, wide(*count)));
    let counted = facts.kernel.iter().flat_map(|kernel| &kernel.entries).map(|(map, count)| (*map, (*count).into()));
    written.chain(counted).map(|(map, count)| (vec![map.to_owned()], Value::Count(count))).collect()
}

fn hooks(facts: &Facts, value: impl Fn(&egress_datapath::maps::facts::HookFacts) -> Option<Value>) -> Vec<Series> {
    let hooks = facts.kernel.iter().flat_map(|kernel| &kernel.hooks);
    hooks.filter_map(|(hook, of)| value(of).map(|value| (vec![(*hook).to_owned()], value))).collect()
}

fn wide(count: usize) -> u64 {
    u64::try_from(count).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
