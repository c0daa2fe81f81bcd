//! Who may do what: RBAC as a real server reads it, for those who come with the token of a service account.
//!
//! Who brings no token is the administrator; so are the lab's own calls. A token is the account's name in plain sight:
//! what is tested here is whether an account's rights suffice for what is done with them, not whether it can be forged.
//! Left out: users and groups other than all accounts, aggregated roles, rules about paths that are no resources (a real
//! server lets every account read those that this one has), and the ban on handing out more than one has.

use serde_json::{Value, json};

use super::kind::Kind;
use super::meta::{self, text};
use super::status::ApiError;
use super::store::{ObjectKey, StoreState};

pub(super) const CLUSTER_ROLES: &str = "clusterroles.rbac.authorization.k8s.io";
pub(super) const CLUSTER_ROLE_BINDINGS: &str = "clusterrolebindings.rbac.authorization.k8s.io";
pub(super) const ROLES: &str = "roles.rbac.authorization.k8s.io";
pub(super) const ROLE_BINDINGS: &str = "rolebindings.rbac.authorization.k8s.io";

const SCHEME: &str = "Bearer ";
const TOKEN: &str = "serviceaccount:";

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Caller<'a> {
    Administrator,
    Account { namespace: &'a str, name: &'a str },
}

/// What is to be done; `resource` has its subresource after a slash.
pub(super) struct Attempt<'a> {
    pub verb: &'static str,
    pub kind: &'a Kind,
    pub resource: String,
    pub namespace: Option<&'a str>,
    pub name: Option<&'a str>,
}

impl<'a> Caller<'a> {
    /// By the Authorization header.
    pub(super) fn of(header: &'a str) -> Result<Self, ApiError> {
        if header.is_empty() {
            return Ok(Self::Administrator);
        }
        let account = header.strip_prefix(SCHEME).and_then(|token| token.strip_prefix(TOKEN));
        let (namespace, name) = account.and_then(|both| both.split_once(':')).ok_or_else(ApiError::unauthorized)?;
        Ok(Self::Account { namespace, name })
    }

    /// Refuses what no binding allows.
    pub(super) fn check(&self, state: &StoreState, attempt: &Attempt<'_>) -> Result<(), ApiError> {
        let Self::Account { namespace, name } = self else { return Ok(()) };
        let bindings = state.list(CLUSTER_ROLE_BINDINGS).into_values();
        let here = |binding: &Value| attempt.namespace.is_some_and(|namespace| meta::namespace(binding) == namespace);
        let bindings = bindings.chain(state.list(ROLE_BINDINGS).into_values().filter(|binding| here(binding)));
        let allowed = bindings
            .filter(|binding| items(binding, "/subjects").any(|subject| self.is(subject)))
            .filter_map(|binding| role_of(state, &binding))
            .any(|role| items(&role, "/rules").any(|rule| allows(rule, attempt)));
        if allowed {
            return Ok(());
        }
        let user = format!("system:serviceaccount:{namespace}:{name}");
        Err(ApiError::forbidden(attempt.kind, attempt.name.unwrap_or_default(), &forbidden(&user, attempt)))
    }

    fn is(&self, subject: &Value) -> bool {
        let Self::Account { namespace, name } = self else { return true };
        match text(subject, "/kind") {
            "ServiceAccount" => text(subject, "/namespace") == *namespace && text(subject, "/name") == *name,
            "Group" => matches!(text(subject, "/name"), "system:serviceaccounts" | "system:authenticated"),
            _ => false,
        }
    }
}

/// The answer to a TokenRequest.
pub(super) fn token(namespace: &str, account: &str) -> Value {
    json!({
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenRequest",
        "metadata": {"name": account, "namespace": namespace},
        "status": {"token": format!("{TOKEN}{namespace}:{account}"), "expirationTimestamp": "2999-01-01T00:00:00Z"},
    })
}

fn forbidden(user: &str, attempt: &Attempt<'_>) -> String {
    let Attempt { verb, kind, resource, namespace, .. } = attempt;
    let place = namespace.map_or("at the cluster scope".to_owned(), |name| format!("in the namespace {name:?}"));
    format!("User {user:?} cannot {verb} resource {resource:?} in API group {:?} {place}", kind.group)
}

fn role_of(state: &StoreState, binding: &Value) -> Option<std::sync::Arc<Value>> {
    let name = text(binding, "/roleRef/name").to_owned();
    match text(binding, "/roleRef/kind") {
        "ClusterRole" => state.get(CLUSTER_ROLES, &ObjectKey { namespace: String::new(), name }),
        "Role" => state.get(ROLES, &ObjectKey { namespace: meta::namespace(binding).to_owned(), name }),
        _ => None,
    }
}

fn items<'a>(object: &'a Value, pointer: &str) -> impl Iterator<Item = &'a Value> {
    object.pointer(pointer).and_then(Value::as_array).into_iter().flatten()
}

fn allows(rule: &Value, attempt: &Attempt<'_>) -> bool {
    let lists = |field: &str, wanted: &str| items(rule, field).any(|item| item == wanted || item == "*");
    let named = || items(rule, "/resourceNames").any(|item| Some(item.as_str().unwrap_or_default()) == attempt.name);
    lists("/verbs", attempt.verb)
        && lists("/apiGroups", &attempt.kind.group)
        && lists("/resources", &attempt.resource)
        && (items(rule, "/resourceNames").next().is_none() || named())
}

#[cfg(test)]
mod tests {
    use super::super::kind;
    use super::*;

    #[test]
    fn callers_are_known_by_their_tokens() {
        assert_eq!(Caller::of("").ok(), Some(Caller::Administrator));
        let header = format!("Bearer {}", token("a", "b")["status"]["token"].as_str().expect("a token"));
        assert_eq!(Caller::of(&header).ok(), Some(Caller::Account { namespace: "a", name: "b" }));
        assert_eq!(Caller::of("Bearer x").map_err(|refusal| refusal.code()), Err(401));
    }

    #[test]
    fn a_rule_allows_what_it_lists() {
        let leases = kind::builtin("coordination.k8s.io", "leases").expect("leases are built in");
        let may = |rule: &Value, verb: &'static str, resource: &str, name: Option<&str>| {
            let resource = resource.to_owned();
            allows(rule, &Attempt { verb, kind: &leases, resource, namespace: Some("n"), name })
        };
        let rule = json!({"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["get"]});
        assert!(may(&rule, "get", "leases", Some("x")));
        assert!(!may(&rule, "update", "leases", Some("x")));
        assert!(!may(&rule, "get", "leases/status", Some("x")), "a subresource is a resource of its own");
        let mut rule = rule;
        rule["resourceNames"] = json!(["x"]);
        assert!(may(&rule, "get", "leases", Some("x")));
        assert!(!may(&rule, "get", "leases", Some("y")));
        assert!(!may(&rule, "get", "leases", None), "a list has no name");
        rule["apiGroups"] = json!([""]);
        assert!(!may(&rule, "get", "leases", Some("x")));
    }
}
