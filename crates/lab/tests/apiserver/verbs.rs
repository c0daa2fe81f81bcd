//! Writes as the product does them, through kube's client.

use anyhow::{Context, Result};
use egress_lab::kube_api::objects::{LabLoadBalancer, endpoint_slice, load_balancer, load_balancer_status};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Event as CoreEvent, Namespace, Node, ObjectReference, Pod, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::api::events::v1::Event;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams, Preconditions};
use kube::runtime::events::{Event as Report, EventType, Recorder, Reporter};
use serde_json::{Value, json};

use crate::objects::{DEFINITION, egress_ip, egress_ips, establish, from_json, node, pod};
use crate::server::{TestedServer, has_controllers};

/// Code and reason of a refusal.
pub(crate) fn refused<T: std::fmt::Debug>(outcome: Result<T, kube::Error>) -> Result<(u16, String)> {
    match outcome {
        Err(kube::Error::Api(status)) => Ok((status.code, status.reason.clone())),
        other => anyhow::bail!("not refused: {other:?}"),
    }
}

#[tokio::test]
async fn a_lease_has_one_holder() -> Result<()> {
    let server = TestedServer::start()?;
    let leases: Api<Lease> = Api::namespaced(server.client().await?, "kube-system");
    let lease = |holder: &str| -> Result<Lease> {
        from_json(json!({
            "metadata": {"name": "leader"},
            "spec": {"holderIdentity": holder, "leaseDurationSeconds": 15, "renewTime": "2024-01-01T00:00:00.000000Z"},
        }))
    };
    let first = leases.create(&PostParams::default(), &lease("one")?).await?;
    assert_eq!(refused(leases.create(&PostParams::default(), &lease("two")?).await)?, (409, "AlreadyExists".into()));
    let mut stale = first.clone();
    let mut renewed = first;
    renewed.spec.as_mut().context("a spec")?.holder_identity = Some("two".into());
    leases.replace("leader", &PostParams::default(), &renewed).await?;
    stale.spec.as_mut().context("a spec")?.holder_identity = Some("three".into());
    assert_eq!(refused(leases.replace("leader", &PostParams::default(), &stale).await)?, (409, "Conflict".into()));
    let held = leases.get("leader").await?.spec.context("a spec")?;
    assert_eq!(held.holder_identity.as_deref(), Some("two"));
    assert_eq!(refused(leases.replace("leader", &PostParams::default(), &lease("x")?).await)?.0, 422, "no version");
    leases.replace("other", &PostParams::default(), &from_json(json!({"metadata": {"name": "other"}}))?).await?;
    let zero = json!({"metadata": {"name": "zero"}, "spec": {"leaseDurationSeconds": 0}});
    assert_eq!(refused(leases.create(&PostParams::default(), &from_json(zero)?).await)?, (422, "Invalid".into()));
    Ok(())
}

#[tokio::test]
async fn status_is_a_subresource() -> Result<()> {
    let server = TestedServer::with_egress_ips().await?;
    let api = egress_ips(server.client().await?);
    let mut new = egress_ip()?;
    new.data["status"] = json!({"items": [{"node": "n", "egressIP": "1"}]});
    let made = api.create(&PostParams::default(), &new).await?;
    assert_eq!(made.data.get("status"), None, "a new object has no status");
    assert_eq!(made.metadata.generation, Some(1));
    let change = json!({"status": {"items": [{"node": "n", "egressIP": "1"}]}, "spec": {"egressIPs": ["9.9.9.9"]}});
    let params = PatchParams::default();
    let with_status = api.patch_status("eip-prod", &params, &Patch::Merge(&change)).await?;
    assert_eq!(with_status.data["spec"], made.data["spec"], "only the status changes there");
    assert_eq!(with_status.metadata.generation, Some(1));
    let elsewhere = json!({"status": null, "spec": {"egressIPs": ["9.9.9.9"]}});
    let changed = api.patch("eip-prod", &params, &Patch::Merge(&elsewhere)).await?;
    assert_eq!(changed.data["status"], with_status.data["status"], "the status does not change here");
    assert_eq!(changed.metadata.generation, Some(2));
    let same = api.patch("eip-prod", &params, &Patch::Merge(&elsewhere)).await?;
    assert_eq!(
        same.metadata.resource_version, changed.metadata.resource_version,
        "nothing changed, nothing is written"
    );
    Ok(())
}

/// The definition that OVN-Kubernetes installs has no status subresource.
#[tokio::test]
async fn without_the_subresource_a_status_is_part_of_the_object() -> Result<()> {
    let server = TestedServer::start()?;
    let definition = DEFINITION.replace("subresources: {status: {}}", "subresources: {}");
    establish(server.client().await?, &definition).await?;
    let api = egress_ips(server.client().await?);
    api.create(&PostParams::default(), &egress_ip()?).await?;
    let status = Patch::Merge(json!({"status": {"items": [{"node": "n", "egressIP": "1"}]}}));
    let params = PatchParams::default();
    assert_eq!(refused(api.patch_status("eip-prod", &params, &status).await)?, (404, "NotFound".into()));
    let patched = api.patch("eip-prod", &params, &status).await?;
    assert_eq!(patched.data["status"]["items"][0]["node"], "n");
    assert_eq!(patched.metadata.generation, Some(2), "a status counts as a change");
    let labelled = Patch::Merge(json!({"metadata": {"labels": {"a": "b"}}}));
    assert_eq!(api.patch("eip-prod", &params, &labelled).await?.metadata.generation, Some(2));
    Ok(())
}

#[tokio::test]
async fn a_json_patch_tests_uid_and_version() -> Result<()> {
    let server = TestedServer::with_egress_ips().await?;
    let api = egress_ips(server.client().await?);
    let made = api.create(&PostParams::default(), &egress_ip()?).await?;
    let (uid, version) = (made.metadata.uid.context("a uid")?, made.metadata.resource_version.context("a version")?);
    let patch = |uid: &str, version: &str, node: &str| -> Result<Patch<Value>> {
        Ok(Patch::Json(from_json(json!([
            {"op": "test", "path": "/metadata/uid", "value": uid},
            {"op": "test", "path": "/metadata/resourceVersion", "value": version},
            {"op": "add", "path": "/status", "value": {"items": [{"node": node, "egressIP": "172.18.0.100"}]}},
        ]))?))
    };
    let params = PatchParams::default();
    let done = api.patch_status("eip-prod", &params, &patch(&uid, &version, "one")?).await?;
    assert_eq!(done.data["status"]["items"][0]["node"], "one");
    let stale = api.patch_status("eip-prod", &params, &patch(&uid, &version, "two")?).await;
    assert_eq!(refused(stale)?, (422, "Invalid".into()));
    let other = api.patch_status("eip-prod", &params, &patch("x", &version, "two")?).await;
    assert_eq!(refused(other)?, (422, "Invalid".into()));
    let held = json!({"metadata": {"resourceVersion": version}, "spec": {"egressIPs": ["1.1.1.1"]}});
    assert_eq!(refused(api.patch("eip-prod", &params, &Patch::Merge(held)).await)?, (409, "Conflict".into()));
    let wrong = json!({"status": {"items": [{"node": "n"}]}});
    assert_eq!(refused(api.patch_status("eip-prod", &params, &Patch::Merge(wrong)).await)?, (422, "Invalid".into()));
    Ok(())
}

#[tokio::test]
async fn the_applier_of_a_status_owns_it() -> Result<()> {
    let server = TestedServer::with_egress_ips().await?;
    let api = egress_ips(server.client().await?);
    api.create(&PostParams::default(), &egress_ip()?).await?;
    let status = |node: &str| json!({"apiVersion": "k8s.ovn.org/v1", "kind": "EgressIP", "status": {"items": [{"node": node, "egressIP": "1"}]}});
    api.patch_status("eip-prod", &PatchParams::apply("one"), &Patch::Apply(status("a"))).await?;
    let other = api.patch_status("eip-prod", &PatchParams::apply("two"), &Patch::Apply(status("b"))).await;
    assert_eq!(refused(other)?, (409, "Conflict".into()));
    let forced = api.patch_status("eip-prod", &PatchParams::apply("two").force(), &Patch::Apply(status("b"))).await?;
    assert_eq!(forced.data["status"]["items"][0]["node"], "b");
    let unknown = json!({"apiVersion": "k8s.ovn.org/v1", "kind": "EgressIP", "spec": {"extra": 1}});
    assert_eq!(refused(api.patch("eip-prod", &PatchParams::apply("one"), &Patch::Apply(unknown)).await)?.0, 500);
    Ok(())
}

#[tokio::test]
async fn deletion_waits_for_finalizers() -> Result<()> {
    let server = TestedServer::with_egress_ips().await?;
    let api = egress_ips(server.client().await?);
    let mut new = egress_ip()?;
    new.metadata.finalizers = Some(vec!["k8s.ovn.org/cleanup".into()]);
    let made = api.create(&PostParams::default(), &new).await?;
    let wrong = DeleteParams {
        preconditions: Some(Preconditions { uid: Some("x".into()), resource_version: None }),
        ..DeleteParams::default()
    };
    assert_eq!(refused(api.delete("eip-prod", &wrong).await)?, (409, "Conflict".into()));
    let marked = api.delete("eip-prod", &DeleteParams::default()).await?.left().context("the object")?;
    assert!(marked.metadata.deletion_timestamp.is_some());
    assert_eq!(marked.metadata.generation, made.metadata.generation.map(|generation| generation + 1));
    let add = Patch::Merge(json!({"metadata": {"finalizers": ["k8s.ovn.org/cleanup", "k8s.ovn.org/more"]}}));
    assert_eq!(refused(api.patch("eip-prod", &PatchParams::default(), &add).await)?.0, 422);
    api.patch("eip-prod", &PatchParams::default(), &Patch::Merge(json!({"metadata": {"finalizers": null}}))).await?;
    assert_eq!(refused(api.get("eip-prod").await)?, (404, "NotFound".into()));
    api.create(&PostParams::default(), &egress_ip()?).await?;
    let done = api.delete("eip-prod", &DeleteParams::default()).await?.right().context("a status")?;
    assert!(done.is_success());
    Ok(())
}

#[tokio::test]
async fn a_pod_is_made_pending_and_in_a_namespace() -> Result<()> {
    let server = TestedServer::start()?;
    let pods: Api<Pod> = Api::default_namespaced(server.client().await?);
    pods.create(&PostParams::default(), &pod("p", "n", json!({}))?).await?;
    let made = pods.get("p").await?;
    assert_eq!(made.status.as_ref().and_then(|status| status.phase.as_deref()), Some("Pending"));
    let nowhere: Api<Pod> = Api::namespaced(server.client().await?, "nowhere");
    assert_eq!(
        refused(nowhere.create(&PostParams::default(), &pod("p", "n", json!({}))?).await)?,
        (404, "NotFound".into())
    );
    Ok(())
}

#[tokio::test]
async fn a_load_balancer_has_addresses_and_endpoints() -> Result<()> {
    let server = TestedServer::start()?;
    let client = server.client().await?;
    let services: Api<Service> = Api::default_namespaced(client.clone());
    let slices: Api<EndpointSlice> = Api::default_namespaced(client);
    let create = PostParams::default();
    let balancer = LabLoadBalancer::new("default", "web", 0);
    let made = services.create(&create, &from_json(load_balancer(&balancer))?).await?;
    let addresses = |service: Service| service.status?.load_balancer?.ingress;
    assert_eq!(addresses(made), None);
    let status = Patch::Merge(load_balancer_status(&balancer));
    let patched = services.patch_status("web", &PatchParams::default(), &status).await?;
    assert_eq!(addresses(patched).context("addresses")?.len(), 2);
    for is_v4 in [true, false] {
        slices.create(&create, &from_json(endpoint_slice(&balancer, &[], is_v4))?).await?;
    }
    let of = |service: &str| ListParams::default().labels(&format!("kubernetes.io/service-name={service}"));
    let listed = slices.list(&of("web")).await?;
    let types: Vec<&str> = listed.items.iter().map(|slice| slice.address_type.as_str()).collect();
    assert_eq!(types, ["IPv4", "IPv6"]);
    assert_eq!(slices.list(&of("other")).await?.items.len(), 0);
    Ok(())
}

#[tokio::test]
async fn an_object_can_be_too_large() -> Result<()> {
    let server = TestedServer::start()?;
    let nodes: Api<Node> = Api::all(server.client().await?);
    nodes.create(&PostParams::default(), &node("n")?).await?;
    let large = json!({"metadata": {"annotations": {"a": "x".repeat(4 << 20)}}});
    let outcome = nodes.patch("n", &PatchParams::default(), &Patch::Merge(large)).await;
    assert_eq!(refused(outcome)?, (413, "RequestEntityTooLarge".into()));
    Ok(())
}

#[tokio::test]
async fn node_status_and_annotations() -> Result<()> {
    let server = TestedServer::start()?;
    let nodes: Api<Node> = Api::all(server.client().await?);
    nodes.create(&PostParams::default(), &node("n")?).await?;
    let not_ready = json!({"status": {"conditions": [{"type": "Ready", "status": "False"}]}});
    let patched = nodes.patch_status("n", &PatchParams::default(), &Patch::Merge(not_ready)).await?;
    let status = patched.status.context("a status")?;
    assert_eq!(status.conditions.context("conditions")?[0].status, "False");
    assert_eq!(status.addresses.map(|all| all.len()), Some(1), "the rest stays");
    let annotate = Patch::Merge(json!({"metadata": {"annotations": {"k8s.ovn.org/host-cidrs": "[]"}}}));
    let partial = nodes.patch_metadata("n", &PatchParams::default(), &annotate).await?;
    assert!(partial.metadata.annotations.is_some_and(|all| all.contains_key("k8s.ovn.org/host-cidrs")));
    Ok(())
}

#[tokio::test]
async fn events_show_in_both_groups() -> Result<()> {
    let server = TestedServer::with_egress_ips().await?;
    let client = server.client().await?;
    let about = egress_ips(client.clone()).create(&PostParams::default(), &egress_ip()?).await?;
    let reference = ObjectReference {
        api_version: Some("k8s.ovn.org/v1".into()),
        kind: Some("EgressIP".into()),
        name: about.metadata.name,
        uid: about.metadata.uid,
        ..ObjectReference::default()
    };
    let reporter = Reporter { controller: "egress-agent".into(), instance: Some("node1".into()) };
    let recorder = Recorder::new(client.clone(), reporter);
    let report = Report {
        type_: EventType::Warning,
        reason: "NoMatchingNodeFound".into(),
        note: Some("no node".into()),
        action: "Assign".into(),
        secondary: None,
    };
    recorder.publish(&report, &reference).await?;
    recorder.publish(&report, &reference).await?;
    let core: Api<CoreEvent> = Api::default_namespaced(client.clone());
    let found = core.list(&ListParams::default().fields("involvedObject.name=eip-prod,type=Warning")).await?;
    assert_eq!(found.items.len(), 1, "the second is counted in the first");
    assert_eq!(found.items[0].message.as_deref(), Some("no node"));
    let new: Api<Event> = Api::default_namespaced(client.clone());
    let shown = &new.list(&ListParams::default()).await?.items[0];
    assert_eq!(shown.note.as_deref(), Some("no node"));
    assert_eq!(shown.series.as_ref().map(|series| series.count), Some(2));
    assert_eq!(shown.reporting_controller.as_deref(), Some("egress-agent"));
    let misplaced = json!({"metadata": {"name": "e", "namespace": "kube-public"}, "involvedObject": {"kind": "EgressIP", "name": "x"}});
    let elsewhere: Api<CoreEvent> = Api::namespaced(client, "kube-public");
    assert_eq!(
        refused(elsewhere.create(&PostParams::default(), &from_json(misplaced)?).await)?,
        (422, "Invalid".into())
    );
    Ok(())
}

#[tokio::test]
async fn a_namespace_takes_its_content_along() -> Result<()> {
    if !has_controllers("a_namespace_takes_its_content_along") {
        return Ok(());
    }
    let server = TestedServer::start()?;
    let namespaces: Api<Namespace> = Api::all(server.client().await?);
    namespaces.create(&PostParams::default(), &from_json(json!({"metadata": {"name": "prod"}}))?).await?;
    let pods: Api<Pod> = Api::namespaced(server.client().await?, "prod");
    let mut held = pod("held", "n", json!({}))?;
    held.metadata.finalizers = Some(vec!["example.org/hold".into()]);
    pods.create(&PostParams::default(), &held).await?;
    pods.create(&PostParams::default(), &pod("free", "n", json!({}))?).await?;
    namespaces.delete("prod", &DeleteParams::default()).await?;
    let waiting = namespaces.get("prod").await?;
    assert_eq!(waiting.status.and_then(|status| status.phase).as_deref(), Some("Terminating"));
    let left = pods.list(&ListParams::default()).await?;
    assert_eq!(left.items.iter().filter_map(|pod| pod.metadata.name.as_deref()).collect::<Vec<_>>(), ["held"]);
    assert_eq!(
        refused(pods.create(&PostParams::default(), &pod("late", "n", json!({}))?).await)?,
        (403, "Forbidden".into())
    );
    pods.patch("held", &PatchParams::default(), &Patch::Merge(json!({"metadata": {"finalizers": []}}))).await?;
    assert!(namespaces.get_opt("prod").await?.is_none(), "the last pod was what it waited for");
    Ok(())
}
