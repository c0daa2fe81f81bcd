//! EgressIP objects, from their untyped form.

use std::collections::BTreeSet;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube::core::{DynamicObject, Selector};
use serde::Deserialize;
use serde_json::Value;

use super::{annotation, created};
use crate::kube::crd::EgressIPSpec;
use crate::kube::keys;
use crate::model::state::EgressId;
use crate::model::view::{Condition, Conditions, EgressObject, Item, Selects, parse_egress_ip};

/// An object that no schema should have let through.
#[derive(Debug, thiserror::Error)]
pub enum ObjectError {
    #[error("spec: {0}")]
    Spec(#[source] serde_json::Error),
    #[error("status.items: {0}")]
    Items(#[source] serde_json::Error),
}

#[derive(Deserialize)]
struct StatusItem {
    node: String,
    #[serde(rename = "egressIP")]
    egress_ip: String,
}

pub fn object(object: &DynamicObject) -> Result<EgressObject, ObjectError> {
    let meta = &object.metadata;
    let spec = EgressIPSpec::deserialize(&object.data["spec"]).map_err(ObjectError::Spec)?;
    let status = object.data.get("status").filter(|status| status.is_object());
    Ok(EgressObject {
        name: meta.name.clone().unwrap_or_default(),
        uid: meta.uid.clone().unwrap_or_default(),
        resource_version: meta.resource_version.clone().unwrap_or_default(),
        generation: meta.generation,
        created: created(meta),
        selects: selects(spec.namespace_selector, spec.pod_selector.unwrap_or_default()),
        listed: spec.egress_ips,
        id: annotation(meta, keys::EGRESS_ID).and_then(egress_id),
        no_eligible_node: annotation(meta, keys::NO_ELIGIBLE_NODE).map(addresses),
        drop_unassigned: annotation(meta, keys::ON_UNASSIGNED).is_some_and(|value| value == "drop"),
        has_annotations: meta.annotations.is_some(),
        has_status: status.is_some(),
        has_items: status.is_some_and(|status| status["items"].is_array()),
        items: items(status)?,
        conditions: status.map(conditions).unwrap_or_default(),
    })
}

fn selects(namespaces: LabelSelector, pods: LabelSelector) -> Result<Selects, String> {
    Ok(Selects { namespaces: selector("namespaceSelector", namespaces)?, pods: selector("podSelector", pods)? })
}

/// Stricter than the library: a set operator without values, or values that nobody reads, is a mistake.
fn selector(field: &str, selector: LabelSelector) -> Result<Selector, String> {
    for expression in selector.match_expressions.iter().flatten() {
        let (key, operator) = (&expression.key, expression.operator.as_str());
        let has_values = expression.values.as_ref().is_some_and(|values| !values.is_empty());
        match operator {
            _ if key.is_empty() => return Err(format!("{field}: an expression without a key")),
            "In" | "NotIn" if !has_values => return Err(format!("{field}: {key}: {operator} without values")),
            "Exists" | "DoesNotExist" if has_values => return Err(format!("{field}: {key}: {operator} with values")),
            "In" | "NotIn" | "Exists" | "DoesNotExist" => {}
            _ => return Err(format!("{field}: {key}: unknown operator {operator:?}")),
        }
    }
    Selector::try_from(selector).map_err(|error| format!("{field}: {error}"))
}

fn egress_id(text: &str) -> Option<EgressId> {
    let id: u32 = text.parse().ok()?;
    (1..=egress_common::abi::MAX_EGRESS_ID).contains(&id).then_some(EgressId(id))
}

fn addresses(text: &str) -> BTreeSet<std::net::IpAddr> {
    text.split(',').filter_map(parse_egress_ip).collect()
}

fn items(status: Option<&Value>) -> Result<Vec<Item>, ObjectError> {
    let Some(items) = status.and_then(|status| status.get("items")).filter(|items| !items.is_null()) else {
        return Ok(Vec::new());
    };
    let items = Vec::<StatusItem>::deserialize(items).map_err(ObjectError::Items)?;
    Ok(items.into_iter().map(|item| Item { node: item.node, egress_ip: item.egress_ip }).collect())
}

fn conditions(status: &Value) -> Conditions {
    let Some(list) = status.get("conditions").and_then(Value::as_array) else { return Conditions::default() };
    let assigned = list.iter().position(|condition| condition["type"] == "Assigned").map(|index| {
        let text = |field: &str| list[index][field].as_str().unwrap_or_default().to_owned();
        let condition = Condition {
            status: text("status") == "True",
            reason: text("reason"),
            message: text("message"),
            observed_generation: list[index]["observedGeneration"].as_i64(),
            last_transition: text("lastTransitionTime"),
        };
        (index, condition)
    });
    Conditions { listed: true, assigned }
}

#[cfg(test)]
mod tests {
    use kube::core::SelectorExt;
    use serde_json::json;

    use super::*;
    use crate::model::view::Labels;

    fn convert(value: Value) -> Result<EgressObject, ObjectError> {
        object(&serde_json::from_value(value).expect("an object"))
    }

    fn with_selector(selector: Value) -> EgressObject {
        let spec = json!({"egressIPs": ["172.18.0.100"], "namespaceSelector": selector});
        convert(json!({"metadata": {"name": "a"}, "spec": spec})).expect("a spec")
    }

    #[test]
    fn selectors_mean_what_they_mean_in_kubernetes() {
        let matches = |selector: Value, labels: &[(&str, &str)]| {
            let labels: Labels = labels.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
            with_selector(selector).selects.map(|s| s.namespaces.matches(&labels))
        };
        let expression = |operator: &str, values: Value| json!({"matchExpressions": [{"key": "env", "operator": operator, "values": values}]});
        assert_eq!(matches(json!({}), &[]), Ok(true));
        assert_eq!(matches(json!({"matchLabels": {"env": "prod"}}), &[("env", "prod")]), Ok(true));
        assert_eq!(matches(json!({"matchLabels": {"env": "prod"}}), &[("env", "dev")]), Ok(false));
        assert_eq!(matches(expression("In", json!(["a", "b"])), &[("env", "b")]), Ok(true));
        assert_eq!(matches(expression("NotIn", json!(["a"])), &[]), Ok(true));
        assert_eq!(matches(expression("NotIn", json!(["a"])), &[("env", "a")]), Ok(false));
        assert_eq!(matches(expression("Exists", json!(null)), &[("env", "")]), Ok(true));
        assert_eq!(matches(expression("DoesNotExist", json!([])), &[]), Ok(true));
        for (operator, values) in [("In", json!([])), ("Exists", json!(["a"])), ("Like", json!(["a"]))] {
            assert!(matches(expression(operator, values), &[]).is_err(), "{operator}");
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
        }))
        .expect("an object");
        assert_eq!(object.id, Some(EgressId(7)));
        assert_eq!(object.created, 1_704_067_210);
        assert_eq!(object.no_eligible_node.as_ref(), Some(&object.addresses()));
        assert!(object.drop_unassigned && object.has_status);
        assert_eq!(object.items.len(), 1);
        assert_eq!(object.conditions.assigned.map(|(index, c)| (index, c.status)), Some((1, false)));
    }

    #[test]
    fn an_egress_id_out_of_range_is_none() {
        assert_eq!(["0", "16777216", "x", "-1"].map(egress_id), [None; 4]);
        assert_eq!(egress_id("16777215"), Some(EgressId(16_777_215)));
    }
}
