//! The rights of service accounts.

use anyhow::{Context, Result};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Namespace, Node, ServiceAccount};
use k8s_openapi::api::rbac::v1::{ClusterRole, ClusterRoleBinding, Role, RoleBinding};
use kube::api::{Api, ListParams, PostParams};
use kube::{Client, Error};
use serde_json::json;

use crate::objects::from_json;
use crate::server::TestedServer;
use crate::verbs::refused;

async fn grant(client: &Client) -> Result<()> {
    let new = PostParams::default();
    let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), "kube-system");
    accounts.create(&new, &from_json(json!({"metadata": {"name": "reader"}}))?).await?;
    let subjects = json!([{"kind": "ServiceAccount", "name": "reader", "namespace": "kube-system"}]);
    let reference = |kind: &str| json!({"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": "reader"});
    let roles: Api<ClusterRole> = Api::all(client.clone());
    let rules = json!([{"apiGroups": [""], "resources": ["nodes"], "verbs": ["list", "watch"]}]);
    roles.create(&new, &from_json(json!({"metadata": {"name": "reader"}, "rules": rules}))?).await?;
    let bindings: Api<ClusterRoleBinding> = Api::all(client.clone());
    let binding = json!({"metadata": {"name": "reader"}, "roleRef": reference("ClusterRole"), "subjects": subjects});
    bindings.create(&new, &from_json(binding)?).await?;
    let roles: Api<Role> = Api::namespaced(client.clone(), "kube-system");
    let rules = json!([
        {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["create"]},
        {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "resourceNames": ["mine"], "verbs": ["get"]},
    ]);
    roles.create(&new, &from_json(json!({"metadata": {"name": "reader"}, "rules": rules}))?).await?;
    let bindings: Api<RoleBinding> = Api::namespaced(client.clone(), "kube-system");
    let binding = json!({"metadata": {"name": "reader"}, "roleRef": reference("Role"), "subjects": subjects});
    bindings.create(&new, &from_json(binding)?).await?;
    Ok(())
}

#[tokio::test]
async fn an_account_may_what_its_bindings_allow() -> Result<()> {
    let server = TestedServer::start()?;
    let client = server.client().await?;
    grant(&client).await?;
    let reader = server.client_of("kube-system", "reader").await?;
    let nodes: Api<Node> = Api::all(reader.clone());
    // A real server learns of a binding some moments later.
    let mut listed = nodes.list(&ListParams::default()).await;
    for _ in 0..100 {
        if listed.is_ok() {
            break;
        }
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        listed = nodes.list(&ListParams::default()).await;
    }
    listed?;
    let Err(Error::Api(refusal)) = nodes.get("n").await else { anyhow::bail!("no rule allows to get nodes") };
    let words = "User \"system:serviceaccount:kube-system:reader\" cannot get resource \"nodes\" in API group \"\" at the cluster scope";
    assert_eq!((refusal.code, refusal.message.as_str()), (403, format!("nodes \"n\" is forbidden: {words}").as_str()));
    let namespaces: Api<Namespace> = Api::all(reader.clone());
    assert_eq!(refused(namespaces.list(&ListParams::default()).await)?, (403, "Forbidden".into()));
    let lease = |name: &str| from_json::<Lease>(json!({"metadata": {"name": name}}));
    let leases: Api<Lease> = Api::namespaced(reader.clone(), "kube-system");
    for name in ["mine", "another"] {
        leases.create(&PostParams::default(), &lease(name)?).await?;
    }
    leases.get("mine").await?;
    assert_eq!(refused(leases.get("another").await)?.0, 403, "only the named one");
    assert_eq!(refused(leases.replace("mine", &PostParams::default(), &lease("mine")?).await)?.0, 403);
    let elsewhere: Api<Lease> = Api::namespaced(reader, "default");
    assert_eq!(refused(elsewhere.create(&PostParams::default(), &lease("mine")?).await)?.0, 403);
    let unknown = server.client_with("nonsense").await?;
    let refusal = refused(Api::<Node>::all(unknown).list(&ListParams::default()).await).context("no token")?;
    assert_eq!(refusal, (401, "Unauthorized".into()));
    Ok(())
}
