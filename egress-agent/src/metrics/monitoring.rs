//! Checks that the metrics in deploy/monitoring exist: names, labels, and values of labels with a closed list of values.

use std::collections::BTreeSet;
use std::path::Path;

use egress_common::abi::Verdict;
use serde::Deserialize;

use crate::metrics::catalogue::{ALL, Metric, MetricKind};
use crate::metrics::meters::{NodeState, Probed};

const ALERTS: &str = include_str!("../../../deploy/monitoring/alerts.yaml");
const ALERTS_TEST: &str = include_str!("../../../deploy/monitoring/alerts_test.yaml");
const DASHBOARD: &str = include_str!("../../../deploy/monitoring/dashboard.json");

/// Labels that Prometheus adds.
const SCRAPED: [&str; 2] = ["instance", "job"];

#[derive(Deserialize)]
struct Rules {
    groups: Vec<Group>,
}

#[derive(Deserialize)]
struct Group {
    rules: Vec<AnyRule>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum AnyRule {
    Alert(Rule),
    Recording(RecordingRule),
}

#[derive(Deserialize)]
struct RecordingRule {
    record: String,
    expr: String,
}

#[derive(Deserialize)]
struct Rule {
    alert: String,
    expr: String,
    labels: std::collections::BTreeMap<String, String>,
    annotations: std::collections::BTreeMap<String, String>,
}

fn all_rules() -> (Vec<Rule>, Vec<RecordingRule>) {
    let rules: Rules = serde_yaml::from_str(ALERTS).expect("a rule file");
    let (mut alerts, mut recordings) = (Vec::new(), Vec::new());
    for rule in rules.groups.into_iter().flat_map(|group| group.rules) {
        match rule {
            AnyRule::Alert(alert) => alerts.push(alert),
            AnyRule::Recording(recording) => recordings.push(recording),
        }
    }
    (alerts, recordings)
}

fn rules() -> Vec<Rule> {
    all_rules().0
}

/// Every expression of the dashboard.
fn expressions(value: &serde_json::Value, into: &mut Vec<String>) {
    match value {
        serde_json::Value::Object(fields) => {
            for (name, value) in fields {
                match value.as_str().filter(|text| matches!(name.as_str(), "expr" | "query") && text.contains('_')) {
                    Some(text) => into.push(text.to_owned()),
                    None => expressions(value, into),
                }
            }
        }
        serde_json::Value::Array(values) => values.iter().for_each(|value| expressions(value, into)),
        _ => {}
    }
}

fn dashboard() -> Vec<String> {
    let mut all = Vec::new();
    expressions(&serde_json::from_str(DASHBOARD).expect("JSON"), &mut all);
    all
}

/// The series names of a metric.
fn names(metric: &Metric) -> Vec<String> {
    match metric.kind {
        MetricKind::Histogram => ["_bucket", "_sum", "_count"].map(|part| format!("{}{part}", metric.name)).into(),
        MetricKind::Counter | MetricKind::Gauge => vec![metric.series()],
    }
}

/// The names of our metrics in an expression, each with its matchers.
fn selectors(expression: &str) -> Vec<(String, String)> {
    let is_name = |c: char| c.is_ascii_lowercase() || c == '_';
    let mut found = Vec::new();
    let mut rest = expression;
    while let Some(at) = rest.find("egress_agent_") {
        let from_name = rest.get(at..).unwrap_or_default();
        let length = from_name.find(|c| !is_name(c)).unwrap_or(from_name.len());
        let (name, after) = from_name.split_at(length);
        let matchers = after.strip_prefix('{').and_then(|after| after.split_once('}')).map_or("", |(inner, _)| inner);
        found.push((name.to_owned(), matchers.to_owned()));
        rest = after;
    }
    found
}

/// What is wrong with an expression.
fn faults(expression: &str) -> Vec<String> {
    let mut faults = Vec::new();
    let selectors = selectors(expression);
    if selectors.is_empty() {
        faults.push("it has none of our metrics".to_owned());
    }
    let mut labels: BTreeSet<&str> = SCRAPED.into();
    for (name, matchers) in &selectors {
        let Some(metric) = ALL.iter().find(|metric| names(metric).contains(name)) else {
            faults.push(format!("there is no {name}"));
            continue;
        };
        let own = metric.labels.names();
        labels.extend(own);
        for matcher in matchers.split(',').filter(|matcher| !matcher.is_empty()) {
            let (label, value) = matcher.split_once('=').unwrap_or((matcher, ""));
            if !own.contains(&label) && !SCRAPED.contains(&label) {
                faults.push(format!("{name} has no label {label}"));
            }
            for value in value.trim_start_matches('~').trim_matches('"').split('|') {
                if !is_value(label, value) {
                    faults.push(format!("{label} is never {value}"));
                }
            }
        }
    }
    if selectors.iter().any(|(name, _)| name.ends_with("_bucket")) {
        labels.insert("le");
    }
    for group in expression.split("by (").skip(1) {
        let group = group.split(')').next().unwrap_or_default();
        faults.extend(
            group
                .split(", ")
                .filter(|label| !labels.contains(label))
                .map(|label| format!("nothing has the label {label}")),
        );
    }
    faults
}

fn is_value(label: &str, value: &str) -> bool {
    match label {
        "verdict" => Verdict::ALL.iter().any(|verdict| verdict.label() == value),
        "class" => Verdict::ALL.iter().any(|verdict| crate::metrics::expose::class(verdict.class()) == value),
        "answer" => Probed::ALL.iter().any(|probed| probed.label() == value),
        "role" => ["from", "to"].contains(&value),
        "direction" => ["egress", "ingress"].contains(&value),
        "state" => {
            let nodes = [NodeState::Answers, NodeState::AgentAway, NodeState::Unreachable].map(NodeState::label);
            nodes.contains(&value) || ["assigned", "unassigned"].contains(&value)
        }
        _ => true,
    }
}

#[test]
fn every_expression_uses_existing_metrics() {
    let (alerts, recordings) = all_rules();
    let used = |name: &str| alerts.iter().any(|alert| alert.expr.contains(name));
    assert!(recordings.iter().all(|recording| used(&recording.record)), "each is for an alert");
    let recorded = recordings.iter().map(|recording| recording.expr.clone());
    let alerts: Vec<String> = alerts.iter().map(|rule| rule.expr.clone()).chain(recorded).collect();
    let dashboard = dashboard();
    assert!(alerts.len() >= 10 && dashboard.len() >= 20, "{} and {}", alerts.len(), dashboard.len());
    for expression in alerts.iter().chain(&dashboard) {
        assert_eq!(faults(expression), Vec::<String>::new(), "{expression}");
    }
}

#[test]
fn unknown_names_labels_and_values_are_found() {
    for (expression, fault) in [
        ("sum(egress_agent_leaders)", "there is no egress_agent_leaders"),
        ("egress_agent_packets", "there is no egress_agent_packets"),
        ("rate(egress_agent_probe_duration_seconds[5m])", "there is no egress_agent_probe_duration_seconds"),
        ("egress_agent_packets_total{reason=\"x\"}", "egress_agent_packets_total has no label reason"),
        ("egress_agent_packets_total{class=\"drop\",verdict=~\"no_gateway|no_such\"}", "verdict is never no_such"),
        ("sum by (instance, pod) (egress_agent_ready)", "nothing has the label pod"),
        ("up == 0", "it has none of our metrics"),
    ] {
        assert_eq!(faults(expression), [fault], "{expression}");
    }
}

#[test]
fn every_alert_has_a_text_a_severity_and_a_test() {
    for Rule { alert, labels, annotations, .. } in rules() {
        assert!(["warning", "critical"].contains(&labels["severity"].as_str()), "{alert}");
        assert!(!annotations["summary"].is_empty() && !annotations["description"].is_empty(), "{alert}");
        let is_fired = ALERTS_TEST.contains(&format!("alertname: {alert}\n"));
        let is_silent = ALERTS_TEST.contains(&format!("{{alertname: {alert}, eval_time: 60m}}"));
        assert!(is_fired && is_silent, "{alert} is not tested");
    }
}

/// The pages of `docs/operations/runbooks`, by the alert in their names.
fn runbooks() -> BTreeSet<String> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/operations/runbooks");
    let files = std::fs::read_dir(folder).expect("the folder of runbooks");
    let names = files.map(|file| file.expect("a file").file_name().into_string().expect("a name"));
    names.filter(|name| name != "README.md").map(|name| name.trim_end_matches(".md").to_owned()).collect()
}

fn runbook(alert: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/operations/runbooks").join(format!("{alert}.md"));
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

#[test]
fn every_alert_has_a_runbook_and_every_runbook_an_alert() {
    let rules = rules();
    assert_eq!(runbooks(), rules.iter().map(|rule| rule.alert.clone()).collect());
    for rule in &rules {
        let alert = &rule.alert;
        assert_eq!(rule.annotations["runbook_url"], format!("docs/operations/runbooks/{alert}.md"));
        let page = runbook(alert);
        let severity = format!("\nSeverity `{}`: ", rule.labels["severity"]);
        assert!(page.starts_with(&format!("# {alert}\n")) && page.contains(&severity), "{alert}: title or severity");
        let titles: Vec<&str> = page.lines().filter_map(|line| line.strip_prefix("## ")).collect();
        assert_eq!(titles, ["What it means", "Look", "Do", "When it is no problem"], "{alert}");
        for (metric, _) in selectors(&rule.expr) {
            assert!(page.contains(&metric), "{alert}: its runbook does not name {metric}");
        }
    }
    let index = runbook("README");
    for Rule { alert, labels, .. } in &rules {
        assert!(index.contains(&format!("| [{alert}]({alert}.md) | {} |", labels["severity"])), "{alert}");
    }
}

#[test]
fn runbooks_name_existing_metrics() {
    for alert in runbooks() {
        for (name, _) in selectors(&runbook(&alert)) {
            let exists = |metric: &Metric| metric.name == name || names(metric).contains(&name);
            assert!(ALL.iter().any(exists), "{alert}: there is no {name}");
        }
    }
}

#[test]
fn the_dashboard_names_existing_runbooks() {
    let mut named = BTreeSet::new();
    for rest in DASHBOARD.split("docs/operations/runbooks/").skip(1) {
        named.insert(rest.split(".md").next().unwrap_or_default().to_owned());
    }
    assert!(named.len() >= 10 && named.is_subset(&runbooks()), "{named:?}");
}
