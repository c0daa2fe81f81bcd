//! EgressIP objects, and assignments, whose status has the same form, from their untyped form.

use std::collections::BTreeSet;

use egress_core::model::selector::{LabelValues, Requirement, Selector};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube::core::DynamicObject;
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::convert::{MOST_OF_PROBLEM, annotation};
use crate::policy::{assignment, origin};
use egress_core::keys;
use egress_core::model::policy::{
    AddressUse, Condition, Conditions, EgressPolicy, EligibleNodes, Item, PolicyKind, PolicyPart, Published, Selects,
    Unreadable, parse_egress_ip,
};
use egress_core::model::state::{BandwidthLimit, EgressId, EgressIds};
use egress_core::status::conditions::{ASSIGNED, DEGRADED};
use egress_core::text::quoted;

#[derive(Deserialize)]
struct StatusItem {
    node: String,
    #[serde(rename = "egressIP")]
    egress_ip: String,
}

/// What cannot be read is named in the value: an object that violates the schema hides no other object.
pub(in crate::policy) fn policy(kind: PolicyKind, object: &DynamicObject) -> EgressPolicy {
    let meta = &object.metadata;
    let origin = origin(kind, meta);
    let spec = &object.data["spec"];
    let status = object.data.get("status").filter(|status| status.is_object());
    let mut unreadable = Vec::new();
    let listed = read(PolicyPart::Addresses, listed(spec), &mut unreadable);
    let rules = match kind {
        PolicyKind::EgressIp => selects(spec).map(|selects| vec![EgressPolicy::own_rule(&origin, selects)]),
        PolicyKind::Assignment => assignment::rules(spec),
    };
    let rules = read(PolicyPart::Selectors, rules, &mut unreadable);
    let items = read(PolicyPart::Items, items(status), &mut unreadable);
    let is_assignment = kind == PolicyKind::Assignment;
    let network = is_assignment.then(|| assignment::network(spec, listed.as_deref(), rules.as_deref())).flatten();
    let by_own_nodes = network.as_ref().is_some_and(|network| network.pods.is_some());
    let address_use = if is_assignment { assignment::address_use(spec) } else { AddressUse::EgressOnly };
    EgressPolicy {
        rules: rules.map(|rules| assignment::selecting(address_use, rules, items.as_deref())),
        network,
        eligible_nodes: if is_assignment {
            assignment::eligible_nodes(spec, address_use)
        } else {
            EligibleNodes::Labelled
        },
        address_use,
        limit: if is_assignment { assignment::limit(spec) } else { BandwidthLimit::NONE },
        listed: if by_own_nodes { Vec::new() } else { listed.unwrap_or_else(|| assigned(items.as_deref())) },
        drop_unassigned: annotation(meta, keys::ON_UNASSIGNED).is_some_and(|value| value == "drop"),
        published: Published {
            ids: annotation(meta, keys::EGRESS_ID).map(|text| egress_ids(kind, text)).unwrap_or_default(),
            no_eligible_node: annotation(meta, keys::NO_ELIGIBLE_NODE).map(addresses),
            has_annotations: meta.annotations.is_some(),
            has_status: status.is_some(),
            has_items: items.is_some() && status.is_some_and(|status| status["items"].is_array()),
            items: items.unwrap_or_default(),
            selected_pods: status.and_then(|status| u32::try_from(status["selectedPods"].as_u64()?).ok()),
            conditions: status.map(conditions).unwrap_or_default(),
        },
        unreadable,
        origin,
    }
}

fn read<T>(part: PolicyPart, value: Result<T, String>, unreadable: &mut Vec<Unreadable>) -> Option<T> {
    let of_part = |why: String| Unreadable { part, why: quoted(&why, MOST_OF_PROBLEM).into_owned(), is_known: false };
    value.map_err(|why| unreadable.push(of_part(why))).ok()
}

/// The addresses that an object had when its spec could still be read.
fn assigned(items: Option<&[Item]>) -> Vec<String> {
    items.into_iter().flatten().map(|item| item.egress_ip.clone()).collect()
}

fn listed(spec: &Value) -> Result<Vec<String>, String> {
    Vec::deserialize(&spec["egressIPs"]).map_err(|error| format!("spec.egressIPs: {error}"))
}

fn selects(spec: &Value) -> Result<Selects, String> {
    let pods = if spec["podSelector"].is_null() { &Value::Object(Map::new()) } else { &spec["podSelector"] };
    Ok(Selects {
        namespaces: selector("namespaceSelector", &spec["namespaceSelector"])?,
        pods: selector("podSelector", pods)?,
        nodes: Selector::default(),
    })
}

/// Checks a selector as the API server does for its own kinds: a set operator without values, and values that the operator
/// ignores, are errors.
pub(crate) fn selector(field: &str, value: &Value) -> Result<Selector, String> {
    let selector = LabelSelector::deserialize(value).map_err(|error| format!("{field}: {error}"))?;
    let one = |(key, value): (String, String)| Ok(Requirement::In(key, LabelValues::from_iter([value])));
    let equal = selector.match_labels.into_iter().flatten().map(one);
    let expressions = selector.match_expressions.into_iter().flatten().map(|expression| {
        let (key, operator) = (expression.key, expression.operator.as_str());
        let values: LabelValues = expression.values.into_iter().flatten().collect();
        match operator {
            _ if key.is_empty() => Err(format!("{field}: an expression without a key")),
            "In" | "NotIn" if values.is_empty() => Err(format!("{field}: {key}: {operator} without values")),
            "Exists" | "DoesNotExist" if !values.is_empty() => Err(format!("{field}: {key}: {operator} with values")),
            "In" => Ok(Requirement::In(key, values)),
            "NotIn" => Ok(Requirement::NotIn(key, values)),
            "Exists" => Ok(Requirement::Exists(key)),
            "DoesNotExist" => Ok(Requirement::DoesNotExist(key)),
            _ => Err(format!("{field}: {key}: unknown operator {operator:?}")),
        }
    });
    equal.chain(expressions).collect()
}

/// One for both families, or, where both have addresses on one node, one for each.
fn egress_ids(kind: PolicyKind, text: &str) -> EgressIds {
    match text.split_once(',') {
        Some((v4, v6)) if kind == PolicyKind::Assignment => EgressIds::new(egress_id(v4), egress_id(v6)),
        _ => egress_id(text).map_or(EgressIds::NONE, EgressIds::both),
    }
}

fn egress_id(text: &str) -> Option<EgressId> {
    let id: u32 = text.parse().ok()?;
    (1..=egress_common::abi::MAX_EGRESS_ID).contains(&id).then_some(EgressId(id))
}

fn addresses(text: &str) -> BTreeSet<std::net::IpAddr> {
    text.split(',').filter_map(parse_egress_ip).collect()
}

fn items(status: Option<&Value>) -> Result<Vec<Item>, String> {
    let Some(items) = status.and_then(|status| status.get("items")).filter(|items| !items.is_null()) else {
        return Ok(Vec::new());
    };
    let items = Vec::<StatusItem>::deserialize(items).map_err(|error| format!("status.items: {error}"))?;
    Ok(items.into_iter().map(|item| Item { node: item.node, egress_ip: item.egress_ip }).collect())
}

fn conditions(status: &Value) -> Conditions {
    let Some(list) = status.get("conditions").and_then(Value::as_array) else { return Conditions::default() };
    Conditions::of(
        &[ASSIGNED, DEGRADED],
        list.iter().map(|condition| {
            let text = |field: &str| condition[field].as_str().unwrap_or_default().to_owned();
            let read = Condition {
                status: text("status") == "True",
                reason: text("reason"),
                message: text("message"),
                observed_generation: condition["observedGeneration"].as_i64(),
                last_transition: text("lastTransitionTime"),
            };
            (text("type"), read)
        }),
    )
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use egress_core::model::view::Labels;

    fn convert(value: Value) -> EgressPolicy {
        policy(PolicyKind::EgressIp, &serde_json::from_value(value).expect("an object"))
    }

    fn with_selector(selector: Value) -> EgressPolicy {
        let spec = json!({"egressIPs": ["172.18.0.100"], "namespaceSelector": selector});
        convert(json!({"metadata": {"name": "a"}, "spec": spec}))
    }

    #[test]
    fn selectors_match_as_in_kubernetes() {
        let matches = |selector: Value, labels: &[(&str, &str)]| {
            let labels: Labels = labels.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
            with_selector(selector).rules.map(|rules| rules[0].selects[0].namespaces.matches(&labels))
        };
        let expression = |operator: &str, values: Value| json!({"matchExpressions": [{"key": "env", "operator": operator, "values": values}]});
        assert_eq!(matches(json!({}), &[]), Some(true));
        assert_eq!(matches(json!({"matchLabels": {"env": "prod"}}), &[("env", "prod")]), Some(true));
        assert_eq!(matches(json!({"matchLabels": {"env": "prod"}}), &[("env", "dev")]), Some(false));
        assert_eq!(matches(expression("In", json!(["a", "b"])), &[("env", "b")]), Some(true));
        assert_eq!(matches(expression("NotIn", json!(["a"])), &[]), Some(true));
        assert_eq!(matches(expression("NotIn", json!(["a"])), &[("env", "a")]), Some(false));
        assert_eq!(matches(expression("Exists", json!(null)), &[("env", "")]), Some(true));
        assert_eq!(matches(expression("DoesNotExist", json!([])), &[]), Some(true));
        for (operator, values) in [("In", json!([])), ("Exists", json!(["a"])), ("Like", json!(["a"]))] {
            assert_eq!(matches(expression(operator, values), &[]), None, "{operator}");
        }
    }

    #[test]
    fn annotations_and_status_are_read() {
        let object = convert(json!({
            "metadata": {"name": "a", "uid": "u", "creationTimestamp": "2024-01-01T00:00:10Z", "annotations": {
                "k8s.ovn.org/egressip-tunnel-id": "7",
                "k8s.ovn.org/egressip-no-eligible-node": "172.18.0.100,fd00::1",
                "k8s.ovn.org/egressip-on-unassigned": "drop"}},
            "spec": {"egressIPs": ["172.18.0.100", "FD00:0::1", "bad"], "namespaceSelector": {}},
            "status": {"items": [{"node": "n", "egressIP": "172.18.0.100"}], "conditions": [
                {"type": "Other"}, {"type": "Assigned", "status": "False", "reason": "PartiallyAssigned"}]}
        }));
        assert_eq!(object.published.ids, EgressIds::both(EgressId(7)));
        assert_eq!(object.origin.created, 1_704_067_210);
        assert_eq!(object.published.no_eligible_node.as_ref(), Some(&object.addresses()));
        assert!(object.drop_unassigned && object.published.has_status);
        assert_eq!(object.published.items.len(), 1);
        let (index, assigned) = object.published.conditions.get("Assigned").expect("the condition");
        assert_eq!((index, assigned.status, assigned.reason.as_str()), (1, false, "PartiallyAssigned"));
    }

    #[test]
    fn an_unreadable_part_is_named_and_hides_nothing_else() {
        let metadata = json!({"name": "a", "annotations": {"k8s.ovn.org/egressip-tunnel-id": "7"}});
        let item = json!({"node": "n", "egressIP": "172.18.0.100"});
        let status = json!({"items": [item]});
        let parts = |object: &EgressPolicy| object.unreadable.iter().map(|one| one.part).collect::<Vec<_>>();

        let no_spec = convert(json!({"metadata": metadata, "spec": "nonsense", "status": status}));
        assert_eq!(parts(&no_spec), [PolicyPart::Addresses, PolicyPart::Selectors]);
        assert_eq!((no_spec.name(), no_spec.published.ids), ("a", EgressIds::both(EgressId(7))));
        assert_eq!(no_spec.listed, ["172.18.0.100"], "what it was assigned");
        let spec = json!({"egressIPs": ["172.18.0.100"], "namespaceSelector": {}, "podSelector": 7});
        let odd = convert(json!({"metadata": metadata, "spec": spec, "status": {"items": [{"node": 7}]}}));
        assert_eq!(parts(&odd), [PolicyPart::Selectors, PolicyPart::Items]);
        assert!(!odd.published.has_items, "so that they are written again");
        assert!(odd.unreadable[0].why.starts_with("podSelector: "), "{:?}", odd.unreadable);
        let long = convert(json!({"spec": {"egressIPs": "x".repeat(12_000), "namespaceSelector": {}}}));
        assert!(long.unreadable[0].why.len() < MOST_OF_PROBLEM + 32, "{} bytes", long.unreadable[0].why.len());
    }

    #[test]
    fn an_egress_id_out_of_range_is_ignored() {
        assert_eq!(["0", "16777216", "x", "-1"].map(egress_id), [None; 4]);
        assert_eq!(egress_id("16777215"), Some(EgressId(16_777_215)));
    }
}
