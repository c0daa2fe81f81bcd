//! Writes the leader's decisions into EgressIP objects, and into assignments of EgressServices.
//!
//! Two JSON patches, each guarded by `test` on UID and resource version: first the annotations (the egress ID, and the list of
//! addresses that no node can host), then the status. The order matters: agents act on the status and need the ID for it, and an
//! exception that no longer holds must be removed before anything else changes.
//!
//! Only our own fields are written, and only where they differ. Whether the CRD has a status subresource, and whether it keeps
//! conditions, shows in the server's answers: OVN-Kubernetes' CRD has neither.

use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};

use futures::FutureExt;
use futures::future::BoxFuture;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Api, DynamicObject, Patch, PatchParams};
use kube::core::Status;
use kube::{Client, Error};
use serde_json::{Value, json};

use crate::policy::StatusWriter;
use crate::policy::egress_ip::read;
use crate::policy::status::{DesiredStatus, WriteError};
use crate::{FIELD_MANAGER, policy};
use egress_core::keys;
use egress_core::model::policy::{EgressPolicy, PolicyKind};
use egress_core::status::conditions::{ASSIGNED, DesiredCondition};

/// Writes to objects of one kind, and learns which fields its CRD has.
pub(in crate::policy) struct Writer {
    kind: PolicyKind,
    api: Api<DynamicObject>,
    subresource: AtomicBool,
    conditions: AtomicBool,
    /// The CRD keeps the number of selected pods: an older version does not.
    counts: AtomicBool,
}

impl Writer {
    pub(in crate::policy) fn new(client: &Client, kind: PolicyKind) -> Self {
        Self {
            kind,
            api: policy::requests(client, kind),
            subresource: AtomicBool::new(true),
            conditions: AtomicBool::new(true),
            counts: AtomicBool::new(true),
        }
    }

    async fn write(&self, object: &EgressPolicy, desired: &DesiredStatus) -> Result<EgressPolicy, WriteError> {
        let mut object = object.clone();
        let ops = annotation_ops(&object, desired);
        if !ops.is_empty() {
            object = self.patch(&object, ops, false).await?;
        }
        let ops = self.status_ops(&object, desired);
        if ops.is_empty() {
            return Ok(object);
        }
        if !self.subresource.load(Ordering::Relaxed) {
            let answer = self.patch(&object, ops, false).await?;
            // A CRD with the subresource ignores the status of a plain write.
            self.subresource.store(answer.published.items != desired.items, Ordering::Relaxed);
            return Ok(answer);
        }
        match self.patch(&object, ops, true).await {
            Err(WriteError::Api(Error::Api(status))) if status.code == 404 => {
                // No such object, or no such subresource: a plain write tells them apart.
                self.without_subresource(&object, desired).await
            }
            answer => {
                let answer = answer?;
                self.conditions.store(answer.published.conditions.get(ASSIGNED).is_some(), Ordering::Relaxed);
                if desired.selected_pods.is_some() {
                    self.counts.store(answer.published.selected_pods == desired.selected_pods, Ordering::Relaxed);
                }
                Ok(answer)
            }
        }
    }

    async fn without_subresource(
        &self,
        object: &EgressPolicy,
        desired: &DesiredStatus,
    ) -> Result<EgressPolicy, WriteError> {
        let answer = match self.patch(object, item_ops(object, desired), false).await {
            Err(WriteError::Api(Error::Api(status))) if status.code == 404 => return Err(WriteError::Stale),
            answer => answer?,
        };
        self.subresource.store(false, Ordering::Relaxed);
        Ok(answer)
    }

    fn status_ops(&self, object: &EgressPolicy, desired: &DesiredStatus) -> Vec<Value> {
        let subresource = self.subresource.load(Ordering::Relaxed);
        if subresource && self.conditions.load(Ordering::Relaxed) {
            let counted = desired.selected_pods.filter(|_| self.counts.load(Ordering::Relaxed));
            status_ops(object, desired, counted, &Timestamp::now())
        } else if object.published.items == desired.items && object.published.has_items {
            Vec::new()
        } else {
            item_ops(object, desired)
        }
    }

    async fn patch(&self, object: &EgressPolicy, ops: Vec<Value>, status: bool) -> Result<EgressPolicy, WriteError> {
        let patch = Patch::Json::<()>(serde_json::from_value(Value::Array(guarded(object, ops)))?);
        let params = PatchParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PatchParams::default() };
        let answer = if status {
            self.api.patch_status(object.name(), &params, &patch).await
        } else {
            self.api.patch(object.name(), &params, &patch).await
        };
        match answer {
            Ok(answer) => Ok(read::policy(self.kind, &answer)),
            Err(Error::Api(status)) if is_stale(&status) => {
                tracing::debug!(egressip = object.name(), message = status.message, "a guarded write was refused");
                Err(WriteError::Stale)
            }
            Err(error) => Err(error.into()),
        }
    }
}

impl StatusWriter for Writer {
    fn is_current(&self, object: &EgressPolicy, desired: &DesiredStatus) -> bool {
        annotation_ops(object, desired).is_empty() && self.status_ops(object, desired).is_empty()
    }

    fn write<'a>(
        &'a self,
        policy: &'a EgressPolicy,
        desired: &'a DesiredStatus,
    ) -> BoxFuture<'a, Result<EgressPolicy, WriteError>> {
        self.write(policy, desired).boxed()
    }
}

/// Adds guards: the patch applies only to the object as it was read, and to no other of its name.
fn guarded(object: &EgressPolicy, ops: Vec<Value>) -> Vec<Value> {
    let mut guarded = vec![
        json!({"op": "test", "path": "/metadata/uid", "value": object.origin.uid}),
        json!({"op": "test", "path": "/metadata/resourceVersion", "value": object.origin.resource_version}),
    ];
    guarded.extend(ops);
    guarded
}

/// A conflict, or a `test` that failed. A refusal by validation has the same code as the latter and names causes: there is no
/// other writer then, and a retry would hide the error.
fn is_stale(status: &Status) -> bool {
    let names_causes = status.details.as_ref().is_some_and(|details| !details.causes.is_empty());
    status.code == 409 || (status.code == 422 && !names_causes)
}

fn annotation_ops(object: &EgressPolicy, desired: &DesiredStatus) -> Vec<Value> {
    let mut changes = Vec::new();
    if object.published.ids != desired.ids {
        changes.push((keys::EGRESS_ID, desired.ids.to_string()));
    }
    let unhosted = desired.no_eligible_node.as_ref().map(|addresses| addresses.iter().copied().collect());
    if object.published.no_eligible_node != unhosted
        && let Some(addresses) = &desired.no_eligible_node
    {
        let texts: Vec<String> = addresses.iter().map(IpAddr::to_string).collect();
        changes.push((keys::NO_ELIGIBLE_NODE, texts.join(",")));
    }
    let mut ops: Vec<Value> = if object.published.has_annotations {
        let path = |key: &str| format!("/metadata/annotations/{}", escape(key));
        changes.iter().map(|(key, value)| json!({"op": "add", "path": path(key), "value": value})).collect()
    } else if changes.is_empty() {
        Vec::new()
    } else {
        let map: serde_json::Map<String, Value> = changes.into_iter().map(|(k, v)| (k.to_owned(), v.into())).collect();
        vec![json!({"op": "add", "path": "/metadata/annotations", "value": map})]
    };
    if object.published.no_eligible_node.is_some() && unhosted.is_none() {
        let path = format!("/metadata/annotations/{}", escape(keys::NO_ELIGIBLE_NODE));
        ops.push(json!({"op": "remove", "path": path}));
    }
    ops
}

fn item_ops(object: &EgressPolicy, desired: &DesiredStatus) -> Vec<Value> {
    let items = items(desired);
    if object.published.has_status {
        vec![json!({"op": "add", "path": "/status/items", "value": items})]
    } else {
        vec![json!({"op": "add", "path": "/status", "value": {"items": items}})]
    }
}

fn items(desired: &DesiredStatus) -> Vec<Value> {
    desired.items.iter().map(|item| json!({"node": item.node, "egressIP": item.egress_ip})).collect()
}

fn status_ops(object: &EgressPolicy, desired: &DesiredStatus, counted: Option<u32>, now: &Timestamp) -> Vec<Value> {
    let value = |statement: &DesiredCondition| condition(object, statement, now);
    if !object.published.has_status {
        let conditions: Vec<Value> = desired.conditions.iter().map(value).collect();
        let mut status = json!({
            "items": items(desired), "conditions": conditions, "observedGeneration": object.origin.generation
        });
        counted.into_iter().for_each(|count| status["selectedPods"] = count.into());
        return vec![json!({"op": "add", "path": "/status", "value": status})];
    }
    let mut ops = Vec::new();
    if object.published.items != desired.items || !object.published.has_items {
        ops.extend(item_ops(object, desired));
    }
    if let Some(count) = counted.filter(|count| object.published.selected_pods != Some(*count)) {
        ops.push(json!({"op": "add", "path": "/status/selectedPods", "value": count}));
    }
    let mut conditions = Vec::new();
    for statement in desired.conditions.iter().filter(|statement| !statement.is_published(object)) {
        let value = value(statement);
        conditions.push(match object.published.conditions.get(statement.kind) {
            Some((index, _)) => json!({"op": "replace", "path": format!("/status/conditions/{index}"), "value": value}),
            None => json!({"op": "add", "path": "/status/conditions/-", "value": value}),
        });
    }
    if conditions.is_empty() {
        return ops;
    }
    if !object.published.conditions.listed {
        ops.push(json!({"op": "add", "path": "/status/conditions", "value": []}));
    }
    ops.extend(conditions);
    ops.push(json!({"op": "add", "path": "/status/observedGeneration", "value": object.origin.generation}));
    ops
}

fn condition(object: &EgressPolicy, desired: &DesiredCondition, now: &Timestamp) -> Value {
    // The time of the last change of the status, not of the last write.
    let since = match object.published.conditions.get(desired.kind) {
        Some((_, found)) if found.status == desired.status && !found.last_transition.is_empty() => {
            found.last_transition.clone()
        }
        _ => now.strftime("%Y-%m-%dT%H:%M:%SZ").to_string(),
    };
    let mut value = json!({
        "type": desired.kind,
        "status": if desired.status { "True" } else { "False" },
        "reason": desired.reason,
        "message": desired.message,
        "lastTransitionTime": since,
    });
    if let Some(generation) = object.origin.generation {
        value["observedGeneration"] = generation.into();
    }
    value
}

/// RFC 6901: `~` and `/` inside a reference token.
fn escape(key: &str) -> String {
    key.replace('~', "~0").replace('/', "~1")
}

#[cfg(test)]
mod tests {
    use super::*;
    use egress_core::model::policy::Item;
    use egress_core::model::state::{EgressId, EgressIds};
    use egress_core::status::conditions::DEGRADED;

    fn object(value: Value) -> EgressPolicy {
        read::policy(PolicyKind::EgressIp, &serde_json::from_value(value).expect("an object"))
    }

    fn statement(kind: &'static str, status: bool, reason: &'static str, message: &str) -> DesiredCondition {
        DesiredCondition { kind, status, reason, message: message.into() }
    }

    fn desired() -> DesiredStatus {
        DesiredStatus {
            ids: EgressIds::both(EgressId(3)),
            no_eligible_node: None,
            items: vec![Item { node: "n1".into(), egress_ip: "172.18.0.100".into() }],
            selected_pods: Some(2),
            conditions: vec![
                statement(ASSIGNED, true, "Assigned", "every egress IP has a node"),
                statement(DEGRADED, false, "AllAssigned", "every egress IP has a node"),
            ],
        }
    }

    const SPEC: &str = r#"{"egressIPs": ["172.18.0.100"], "namespaceSelector": {}}"#;

    fn with(metadata: Value, status: Value) -> EgressPolicy {
        let spec: Value = serde_json::from_str(SPEC).expect("a literal");
        object(json!({"metadata": metadata, "spec": spec, "status": status}))
    }

    #[test]
    fn a_new_object_gets_the_whole_map_and_the_whole_status() {
        let fresh = with(json!({"name": "a", "generation": 1}), Value::Null);
        let ops = annotation_ops(&fresh, &desired());
        let map = json!({"k8s.ovn.org/egressip-tunnel-id": "3"});
        assert_eq!(ops, [json!({"op": "add", "path": "/metadata/annotations", "value": map})]);
        let ops = status_ops(&fresh, &desired(), Some(2), &Timestamp::UNIX_EPOCH);
        assert_eq!(ops[0]["path"], "/status");
        assert_eq!(ops[0]["value"]["conditions"][0]["lastTransitionTime"], "1970-01-01T00:00:00Z");
        assert_eq!(ops[0]["value"]["conditions"][1]["type"], "Degraded");
        assert_eq!(ops[0]["value"]["observedGeneration"], 1);
        assert_eq!(ops[0]["value"]["selectedPods"], 2);
    }

    #[test]
    fn a_refused_status_is_no_stale_write() {
        let answer = |code: u16, details: Value| -> Status {
            serde_json::from_value(json!({"status": "Failure", "code": code, "reason": "x", "details": details}))
                .expect("a status")
        };
        assert!(is_stale(&answer(409, json!({}))));
        assert!(is_stale(&answer(422, json!({"name": "a"}))), "a failed test");
        let causes = json!({"causes": [{"field": "status.items", "reason": "FieldValueInvalid", "message": "m"}]});
        assert!(!is_stale(&answer(422, causes)), "a schema's refusal");
        assert!(!is_stale(&answer(403, json!({}))));
    }

    #[test]
    fn annotations_of_others_are_not_touched() {
        let mine =
            with(json!({"name": "a", "annotations": {"team": "x", keys::NO_ELIGIBLE_NODE: "1.2.3.4"}}), json!({}));
        let ops = annotation_ops(&mine, &desired());
        let paths: Vec<&str> = ops.iter().filter_map(|op| op["path"].as_str()).collect();
        assert_eq!(
            paths,
            [
                "/metadata/annotations/k8s.ovn.org~1egressip-tunnel-id",
                "/metadata/annotations/k8s.ovn.org~1egressip-no-eligible-node"
            ]
        );
        assert_eq!(ops[1]["op"], "remove");
    }

    #[test]
    fn nothing_is_written_when_nothing_changed_and_conditions_of_others_stay() {
        let condition = json!({
            "type": "Assigned", "status": "True", "reason": "Assigned", "message": "every egress IP has a node",
            "observedGeneration": 1, "lastTransitionTime": "2024-01-01T00:00:00Z"
        });
        let item = json!({"node": "n1", "egressIP": "172.18.0.100"});
        let meta = json!({"name": "a", "generation": 1, "annotations": {keys::EGRESS_ID: "3"}});
        let degraded = json!({
            "type": "Degraded", "status": "False", "reason": "AllAssigned", "message": "every egress IP has a node",
            "observedGeneration": 1, "lastTransitionTime": "2024-01-01T00:00:00Z"
        });
        let status = json!({"items": [item], "conditions": [{"type": "Other"}, condition, degraded]});
        let right = with(meta.clone(), status);
        assert_eq!(annotation_ops(&right, &desired()), Vec::<Value>::new());
        assert_eq!(status_ops(&right, &desired(), None, &Timestamp::UNIX_EPOCH), Vec::<Value>::new());

        let count = json!({"op": "add", "path": "/status/selectedPods", "value": 2});
        assert_eq!(status_ops(&right, &desired(), Some(2), &Timestamp::UNIX_EPOCH), [count]);
        let counted = right.published_as(|published| published.selected_pods = Some(2));
        assert_eq!(status_ops(&counted, &desired(), Some(2), &Timestamp::UNIX_EPOCH), Vec::<Value>::new());

        let newer = right.from_origin(|origin| origin.generation = Some(2));
        let ops = status_ops(&newer, &desired(), None, &Timestamp::UNIX_EPOCH);
        let paths: Vec<&str> = ops.iter().filter_map(|op| op["path"].as_str()).collect();
        assert_eq!(paths, ["/status/conditions/1", "/status/conditions/2", "/status/observedGeneration"]);
        assert_eq!((&ops[0]["op"], &ops[0]["value"]["type"]), (&json!("replace"), &json!("Assigned")));
        assert_eq!(ops[0]["value"]["lastTransitionTime"], "2024-01-01T00:00:00Z");

        // A condition whose status changes gets the current time.
        let turned = Timestamp::from_second(1_700_000_000).expect("a time");
        let mut changed = desired();
        changed.conditions.iter_mut().for_each(|statement| statement.status = !statement.status);
        let ops = status_ops(&newer, &changed, None, &turned);
        assert_eq!(ops[0]["value"]["lastTransitionTime"], "2023-11-14T22:13:20Z");

        let guards = guarded(&newer, Vec::new());
        let versions: Vec<&Value> = guards.iter().filter(|op| op["op"] == "test").map(|op| &op["path"]).collect();
        assert_eq!(versions, ["/metadata/uid", "/metadata/resourceVersion"]);

        // As written by an older agent.
        let older = with(meta, json!({"items": [item], "conditions": [{"type": "Other"}, condition]}));
        let ops = status_ops(&older, &desired(), None, &Timestamp::UNIX_EPOCH);
        assert_eq!((&ops[0]["op"], &ops[0]["path"]), (&json!("add"), &json!("/status/conditions/-")));
        assert_eq!((&ops[0]["value"]["type"], ops.len()), (&json!("Degraded"), 2));
    }
}
