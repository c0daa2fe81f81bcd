//! Compares the rights in `deploy/base/rbac.yaml`, and those of EgressRouters, which are granted apart, with the requests of this crate:
//! none is missing, and none is superfluous.
//!
//! Each request is found by its source text. The lab proves the verbs (`get_opt` is a `get`), since agents have these rights and
//! no others there.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::Value;

use crate::FIELD_MANAGER;
use egress_core::keys;
use egress_core::model::policy::SourceKind;

const CLUSTER: &str = "";
const OWN: &str = "egress-agent";
/// The accounts.
const AGENT: &str = "egress-agent";
const CONTROLLER: &str = "egress-agent-controller";

/// Group and resource, namespace, name (empty where any), verb.
type Right = (&'static str, &'static str, &'static str, &'static str);

/// A file of this crate, a text in it, how often it occurs, and the rights that it needs: those of an agent, and of a controller.
type RightsUse = (&'static str, &'static str, usize, &'static [Right], &'static [Right]);

const LEDGER: &str = crate::ledger::LEDGER_NAME;
const LEASE: &str = crate::leader_election::lease::LEASE_NAME;
const SECRET: &str = crate::health_key::SECRET_NAME;
const TOKEN: &str = crate::metrics_token::SECRET_NAME;
const LEASES: &str = "leases.coordination.k8s.io";
const EGRESS_NODES: &str = "egressnodes.egress-agent.io";
const ASSIGNMENTS: &str = "egressassignments.egress-agent.io";
const GATEWAY_STATUSES: &str = "egressgatewaypolicystatuses.egress-agent.io";
const DEPLOYMENTS: &str = "deployments.apps";
const ATTACHMENTS: &str = "network-attachment-definitions.k8s.cni.cncf.io";
const EGRESSES: &str = "egresses.crd.antrea.io";
const WRITE_EGRESS_IP: &str = "policy/egress_ip/write.rs";
const EVENTS: &[Right] = &[("events.events.k8s.io", CLUSTER, "", "create")];
const READ_SECRET: &[Right] = &[("secrets", OWN, SECRET, "get")];
const READ_LEASE: &[Right] = &[(LEASES, OWN, LEASE, "get")];
const READ_LEDGER: &[Right] = &[("configmaps", OWN, LEDGER, "get")];

const REQUESTS: &[RightsUse] = &[
    (
        "watches.rs",
        "watcher(api, config)",
        1,
        &[
            ("nodes", CLUSTER, "", "list"),
            ("nodes", CLUSTER, "", "watch"),
            ("namespaces", CLUSTER, "", "list"),
            ("namespaces", CLUSTER, "", "watch"),
            ("services", CLUSTER, "", "list"),
            ("services", CLUSTER, "", "watch"),
            ("pods", CLUSTER, "", "list"),
            ("pods", CLUSTER, "", "watch"),
            ("egressips.k8s.ovn.org", CLUSTER, "", "list"),
            ("egressips.k8s.ovn.org", CLUSTER, "", "watch"),
            (ASSIGNMENTS, CLUSTER, "", "list"),
            (ASSIGNMENTS, CLUSTER, "", "watch"),
            (EGRESS_NODES, CLUSTER, "", "list"),
            (EGRESS_NODES, CLUSTER, "", "watch"),
            ("configmaps", OWN, LEDGER, "list"),
            ("configmaps", OWN, LEDGER, "watch"),
        ],
        &[
            ("nodes", CLUSTER, "", "list"),
            ("nodes", CLUSTER, "", "watch"),
            ("services", CLUSTER, "", "list"),
            ("services", CLUSTER, "", "watch"),
            (ASSIGNMENTS, CLUSTER, "", "list"),
            (ASSIGNMENTS, CLUSTER, "", "watch"),
            (EGRESSES, CLUSTER, "", "list"),
            (EGRESSES, CLUSTER, "", "watch"),
            ("externalippools.crd.antrea.io", CLUSTER, "", "list"),
            ("externalippools.crd.antrea.io", CLUSTER, "", "watch"),
            ("ciliumegressgatewaypolicies.cilium.io", CLUSTER, "", "list"),
            ("ciliumegressgatewaypolicies.cilium.io", CLUSTER, "", "watch"),
            (GATEWAY_STATUSES, CLUSTER, "", "list"),
            (GATEWAY_STATUSES, CLUSTER, "", "watch"),
            ("egressservices.k8s.ovn.org", CLUSTER, "", "list"),
            ("egressservices.k8s.ovn.org", CLUSTER, "", "watch"),
            ("egressrouters.network.operator.openshift.io", CLUSTER, "", "list"),
            ("egressrouters.network.operator.openshift.io", CLUSTER, "", "watch"),
            (DEPLOYMENTS, CLUSTER, "", "list"),
            (DEPLOYMENTS, CLUSTER, "", "watch"),
            ("endpointslices.discovery.k8s.io", CLUSTER, "", "list"),
            ("endpointslices.discovery.k8s.io", CLUSTER, "", "watch"),
            ("egressips.k8s.ovn.org", CLUSTER, "", "list"),
            ("egressips.k8s.ovn.org", CLUSTER, "", "watch"),
            (EGRESS_NODES, CLUSTER, "", "list"),
            (EGRESS_NODES, CLUSTER, "", "watch"),
            ("configmaps", OWN, LEDGER, "list"),
            ("configmaps", OWN, LEDGER, "watch"),
        ],
    ),
    ("node_facts.rs", "api.get_opt(place.node_name)", 1, &[("nodes", CLUSTER, "", "get")], &[]),
    ("node_object.rs", "self.api.get_opt(&self.name)", 1, &[(EGRESS_NODES, CLUSTER, "", "get")], &[]),
    ("node_object.rs", "self.api.create(&post_params(),", 1, &[(EGRESS_NODES, CLUSTER, "", "create")], &[]),
    (
        "node_object.rs",
        "self.api.patch_status(&self.name,",
        1,
        &[("egressnodes.egress-agent.io/status", CLUSTER, "", "patch")],
        &[],
    ),
    // With the rights of the user who runs the command.
    ("admin.rs", "self.nodes.patch(node,", 1, &[], &[]),
    ("admin.rs", "self.nodes.get_opt(name)", 1, &[], &[]),
    ("admin.rs", "self.egress_nodes.get_opt(name)", 1, &[], &[]),
    ("admin.rs", "api.list(&page)", 1, &[], &[]),
    ("admin.rs", "api.list(&one)", 1, &[("pods", CLUSTER, "", "list")], &[]),
    ("migrate/cluster.rs", "api.list(&page)", 1, &[], &[]),
    ("migrate/cluster.rs", "api.patch(&object.name_any(),", 1, &[], &[]),
    (
        "fresh_read.rs",
        "api.get(&name)",
        1,
        &[("egressips.k8s.ovn.org", CLUSTER, "", "get"), (ASSIGNMENTS, CLUSTER, "", "get")],
        &[],
    ),
    (
        WRITE_EGRESS_IP,
        "self.api.patch(object.name(),",
        1,
        &[],
        &[("egressips.k8s.ovn.org", CLUSTER, "", "patch"), (ASSIGNMENTS, CLUSTER, "", "patch")],
    ),
    ("assignments.rs", "self.assignments.create(&post_params(),", 1, &[], &[(ASSIGNMENTS, CLUSTER, "", "create")]),
    ("assignments.rs", "self.assignments.patch(name,", 1, &[], &[(ASSIGNMENTS, CLUSTER, "", "patch")]),
    ("assignments.rs", "self.assignments.delete(name,", 1, &[], &[(ASSIGNMENTS, CLUSTER, "", "delete")]),
    ("antrea/mod.rs", "self.egresses.patch(name,", 1, &[], &[(EGRESSES, CLUSTER, "", "patch")]),
    (
        "antrea/mod.rs",
        "self.egresses.patch_status(name,",
        1,
        &[],
        &[("egresses.crd.antrea.io/status", CLUSTER, "", "patch")],
    ),
    (
        "antrea/mod.rs",
        "self.pools.patch_status(name,",
        1,
        &[],
        &[("externalippools.crd.antrea.io/status", CLUSTER, "", "patch")],
    ),
    ("cilium/mod.rs", "self.statuses.create(&post_params(),", 1, &[], &[(GATEWAY_STATUSES, CLUSTER, "", "create")]),
    (
        "cilium/mod.rs",
        "self.statuses.patch_status(name,",
        1,
        &[],
        &[("egressgatewaypolicystatuses.egress-agent.io/status", CLUSTER, "", "patch")],
    ),
    ("cilium/mod.rs", "self.statuses.delete(name,", 1, &[], &[(GATEWAY_STATUSES, CLUSTER, "", "delete")]),
    (
        "egress_router.rs",
        "api.create(&post_params(),",
        1,
        &[],
        &[
            (DEPLOYMENTS, CLUSTER, "", "create"),
            (ATTACHMENTS, CLUSTER, "", "create"),
            ("services", CLUSTER, "", "create"),
        ],
    ),
    (
        "egress_router.rs",
        "api.get_opt(&",
        2,
        &[],
        &[(DEPLOYMENTS, CLUSTER, "", "get"), (ATTACHMENTS, CLUSTER, "", "get"), ("services", CLUSTER, "", "get")],
    ),
    (
        "egress_router.rs",
        "api.patch(&name,",
        1,
        &[],
        &[(DEPLOYMENTS, CLUSTER, "", "patch"), (ATTACHMENTS, CLUSTER, "", "patch"), ("services", CLUSTER, "", "patch")],
    ),
    ("egress_router.rs", "api.delete(&key.name,", 1, &[], &[("services", CLUSTER, "", "delete")]),
    (
        "egress_router.rs",
        "api.patch_status(&key.name,",
        1,
        &[],
        &[("egressrouters.network.operator.openshift.io/status", CLUSTER, "", "patch")],
    ),
    (
        "egress_service.rs",
        "api.patch_status(&key.name,",
        1,
        &[],
        &[("egressservices.k8s.ovn.org/status", CLUSTER, "", "patch")],
    ),
    ("egress_service.rs", "nodes.patch(node,", 1, &[], &[("nodes", CLUSTER, "", "patch")]),
    (
        WRITE_EGRESS_IP,
        "self.api.patch_status(object.name(),",
        1,
        &[],
        &[
            ("egressips.k8s.ovn.org/status", CLUSTER, "", "patch"),
            ("egressassignments.egress-agent.io/status", CLUSTER, "", "patch"),
        ],
    ),
    ("leader_election/lease.rs", "self.api.get_opt(LEASE_NAME)", 1, READ_LEASE, READ_LEASE),
    ("leader_election/lease.rs", "self.api.replace(LEASE_NAME,", 1, &[], &[(LEASES, OWN, LEASE, "update")]),
    ("leader_election/lease.rs", "self.api.create(&post_params(),", 1, &[], &[(LEASES, OWN, "", "create")]),
    ("ledger.rs", "self.api.get_opt(LEDGER_NAME)", 1, READ_LEDGER, READ_LEDGER),
    ("ledger.rs", "self.api.replace(LEDGER_NAME,", 1, &[], &[("configmaps", OWN, LEDGER, "update")]),
    ("ledger.rs", "self.api.create(&post_params(),", 1, &[], &[("configmaps", OWN, "", "create")]),
    ("health_key.rs", "self.api.get_opt(SECRET_NAME)", 2, READ_SECRET, READ_SECRET),
    ("health_key.rs", "self.api.create(&post_params(),", 1, &[], &[("secrets", OWN, "", "create")]),
    ("metrics_token.rs", "api.create(&post_params(),", 1, &[], &[("secrets", OWN, "", "create")]),
    ("events/mod.rs", "api.create(&params,", 1, EVENTS, EVENTS),
];

/// Methods of `kube::Api` that make a request, after the name of a handle.
const VERBS: &str = "get|get_opt|get_metadata|get_status|get_scale|list|list_metadata|watch|watch_metadata|create|patch\
                     |patch_status|patch_metadata|patch_subresource|replace|replace_status|replace_subresource|delete\
                     |delete_collection|create_subresource|evict|exec|logs";

fn source(file: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("src").join(file);
    let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    // Requests of tests need no rights.
    text.split("#[cfg(test)]\nmod tests").next().unwrap_or_default().to_owned()
}

/// The sources of all crates without tests and this file, by their paths below the repository.
fn sources() -> Vec<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let crates = ["core", "datapath", "kube", "supervise"].map(|name| root.join("crates").join(name).join("src"));
    let (mut found, mut folders) = (Vec::new(), Vec::from(crates));
    folders.push(root.join("egress-agent/src"));
    while let Some(folder) = folders.pop() {
        let entries = fs::read_dir(&folder).expect("a folder").map(|entry| entry.expect("an entry").path());
        let (below, files): (Vec<PathBuf>, Vec<PathBuf>) = entries.partition(|path| path.is_dir());
        folders.extend(below);
        let is_test = |path: &PathBuf| path.ends_with("kube/src/rights.rs") || path.ends_with("tests.rs");
        found.extend(files.into_iter().filter(|path| !is_test(path)));
    }
    let relative = |path: PathBuf| path.strip_prefix(&root).expect("below it").display().to_string();
    found.into_iter().map(relative).collect()
}

/// The sources of this crate, by their paths in it.
fn own_sources() -> Vec<String> {
    sources().iter().filter_map(|file| Some(file.strip_prefix("crates/kube/src/")?.to_owned())).collect()
}

/// The account, group and resource, namespace, name, verb.
type Granted = (String, String, String, String, String);

/// The manifests with rights, one after the other.
fn manifests() -> String {
    let deploy = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy");
    let texts = ["base/rbac.yaml", "egress-router/controller/rbac.yaml"]
        .map(|path| fs::read_to_string(deploy.join(path)).expect("the manifest"));
    texts.join("---\n")
}

/// The rights that the manifests grant. Roles have the names of their accounts, that for EgressRouters with an end to it.
fn granted() -> BTreeSet<Granted> {
    let text = manifests();
    let list = |value: &Value| -> Vec<String> {
        let items = value.as_array().into_iter().flatten();
        items.map(|item| item.as_str().expect("a string").to_owned()).collect()
    };
    let mut granted = BTreeSet::new();
    for document in serde_yaml::Deserializer::from_str(&text) {
        let object = Value::deserialize(document).expect("YAML");
        let namespace = object["metadata"]["namespace"].as_str().unwrap_or(CLUSTER);
        let name = object["metadata"]["name"].as_str().expect("a name");
        let account = name.strip_suffix("-routers").unwrap_or(name);
        for subject in object["subjects"].as_array().into_iter().flatten() {
            assert_eq!((&subject["name"], &object["roleRef"]["name"]), (&account.into(), &name.into()));
        }
        for rule in object["rules"].as_array().into_iter().flatten() {
            let mut names = list(&rule["resourceNames"]);
            if names.is_empty() {
                names.push(String::new());
            }
            for group in list(&rule["apiGroups"]) {
                for resource in list(&rule["resources"]) {
                    let what = match (group.as_str(), resource.split_once('/')) {
                        ("", _) => resource.clone(),
                        (_, None) => format!("{resource}.{group}"),
                        (_, Some((kind, below))) => format!("{kind}.{group}/{below}"),
                    };
                    for name in &names {
                        for verb in list(&rule["verbs"]) {
                            let account = account.to_owned();
                            granted.insert((account, what.clone(), namespace.to_owned(), name.clone(), verb));
                        }
                    }
                }
            }
        }
    }
    granted
}

#[test]
fn the_manifest_grants_the_needed_rights_and_no_others() {
    let needed: BTreeSet<Granted> = REQUESTS
        .iter()
        .flat_map(|(_, _, _, agent, controller)| [(AGENT, *agent), (CONTROLLER, *controller)])
        .flat_map(|(account, rights)| rights.iter().map(move |right| (account, *right)))
        .map(|(account, (what, namespace, name, verb))| {
            (account.into(), what.into(), namespace.into(), name.into(), verb.into())
        })
        .collect();
    let granted = granted();
    let missing: Vec<_> = needed.difference(&granted).collect();
    let superfluous: Vec<_> = granted.difference(&needed).collect();
    assert!(missing.is_empty() && superfluous.is_empty(), "missing: {missing:?}, superfluous: {superfluous:?}");
}

#[test]
fn every_request_of_the_sources_is_known() {
    let mut by_file: BTreeMap<&str, usize> = BTreeMap::new();
    for (file, text, times, ..) in REQUESTS {
        assert_eq!(source(file).matches(text).count(), *times, "{file}: {text}");
        *by_file.entry(file).or_default() += times;
    }
    let handles = ["api", "assignments", "egresses", "nodes", "objects", "pools"];
    let calls: Vec<String> =
        handles.iter().flat_map(|handle| VERBS.split('|').map(move |verb| format!("{handle}.{verb}("))).collect();
    let others = ["watcher(api", "metadata_watcher(", "reflector(", "client.request"];
    for file in &own_sources() {
        let text = source(file);
        let found =
            calls.iter().map(String::as_str).chain(others).map(|call| text.matches(call).count()).sum::<usize>();
        let known = by_file.get(file.as_str()).copied().unwrap_or_default();
        assert_eq!(found, known, "{file} makes requests that no rule covers");
    }
}

/// Events about all kinds of objects that users write pass the admission policies of agents and of controllers.
#[test]
fn events_about_every_kind_are_admitted() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/base/admission.yaml");
    let text = fs::read_to_string(path).expect("the manifest");
    let lists: Vec<&str> = text.split("regarding.kind.orValue('') in [").skip(1).collect();
    assert_eq!(lists.len(), 2);
    for list in lists {
        let (kinds, _) = list.split_once(']').expect("the end of the list");
        for kind in SourceKind::ALL {
            assert!(kinds.contains(&format!("'{}'", kind.as_str())), "{} is not among {kinds}", kind.as_str());
        }
    }
}

#[test]
fn requests_are_made_in_this_crate_alone() {
    for file in sources().iter().filter(|file| !file.starts_with("crates/kube/")) {
        let text = source(&format!("../../../{file}"));
        for name in ["Api::all", "Api::namespaced", "Api::default_namespaced", "watcher("] {
            assert!(!text.contains(name), "{file}: {name}");
        }
    }
}

#[test]
fn each_rule_names_the_code_that_needs_it() {
    let text = manifests();
    let (mut comment, mut rules) = (String::new(), 0);
    let mut named = BTreeSet::new();
    for line in text.lines() {
        if let Some(words) = line.strip_prefix('#') {
            comment += words;
        } else {
            if line.starts_with("- apiGroups") {
                let files =
                    REQUESTS.iter().map(|(file, ..)| *file).filter(|file| comment.contains(&format!("kube/{file}")));
                let files: Vec<&str> = files.collect();
                assert!(!files.is_empty(), "rule {rules} names no code: {comment}");
                named.extend(files);
                rules += 1;
            }
            comment.clear();
        }
    }
    let granted = REQUESTS.iter().filter(|(.., agent, controller)| !agent.is_empty() || !controller.is_empty());
    let all: BTreeSet<&str> = granted.map(|(file, ..)| *file).collect();
    assert_eq!(named, all);
}

#[test]
fn the_policies_name_the_keys_and_objects_that_are_written() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/base/admission.yaml");
    let text = fs::read_to_string(path).expect("the manifest");
    let lines = || text.lines().filter(|line| !line.trim_start().starts_with('#'));
    let quoted: BTreeSet<&str> = lines().flat_map(|line| line.split('\'').skip(1).step_by(2)).collect();
    let keys: BTreeSet<&str> = quoted.iter().copied().filter(|word| word.starts_with("k8s.ovn.org/")).collect();
    assert_eq!(keys, [keys::EGRESS_ID, keys::NO_ELIGIBLE_NODE].into());
    for word in [LEASE, LEDGER, SECRET, TOKEN, FIELD_MANAGER, "EgressIP"] {
        assert!(quoted.contains(word), "{word} is not among {quoted:?}");
    }
    let conditions = lines().filter(|line| line.contains("request.userInfo.username")).count();
    let of = |account: &str| {
        text.matches(&format!("request.userInfo.username == 'system:serviceaccount:{OWN}:{account}'")).count()
    };
    assert_eq!(of(AGENT) + of(CONTROLLER), conditions);
    assert_eq!(
        text.matches("kind: ValidatingAdmissionPolicy\n").count(),
        conditions,
        "each policy is for agents or for controllers"
    );
}

/// Users read every kind. What `edit` may grant in a namespace is EgressServices alone: the others affect pods of every namespace, or
/// make routers.
#[test]
fn users_read_every_kind_and_write_those_of_their_namespace() {
    let deploy = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy");
    let read = |path: &PathBuf| -> Vec<Value> {
        let text = fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        serde_yaml::Deserializer::from_str(&text).map(|one| Value::deserialize(one).expect("YAML")).collect()
    };
    let mut kinds = BTreeMap::new();
    for folder in ["antrea", "base", "cilium", "crd", "egress-router/controller"] {
        for entry in fs::read_dir(deploy.join(folder)).expect("a folder") {
            let path = entry.expect("an entry").path();
            let is_yaml = path.extension().is_some_and(|one| one == "yaml");
            let objects = if is_yaml { read(&path) } else { Vec::new() };
            for one in objects.iter().filter(|one| one["kind"] == "CustomResourceDefinition") {
                let field = |pointer: &str| one.pointer(pointer).and_then(Value::as_str).expect("a field").to_owned();
                kinds.insert((field("/spec/group"), field("/spec/names/plural")), field("/spec/scope"));
            }
        }
    }
    assert_eq!(kinds.len(), 9, "{kinds:?}");
    let roles = read(&deploy.join("base/roles.yaml"));
    let role = |name: &str| roles.iter().find(|one| one["metadata"]["name"] == name).expect("the role").clone();
    let (view, edit) = (role("egress-agent-view"), role("egress-agent-edit"));
    let label = "rbac.authorization.k8s.io/aggregate-to-view";
    assert_eq!(view["metadata"]["labels"], serde_json::json!({ label: "true" }));
    assert_eq!(edit["metadata"].get("labels"), None, "aggregated-edit alone makes it a part of `edit`");
    let list = |value: &Value| -> BTreeSet<String> {
        value.as_array().into_iter().flatten().filter_map(|one| one.as_str().map(str::to_owned)).collect()
    };
    let of = |role: &Value| {
        let mut all = BTreeSet::new();
        for rule in role["rules"].as_array().into_iter().flatten() {
            for group in list(&rule["apiGroups"]) {
                all.extend(list(&rule["resources"]).into_iter().map(|resource| (group.clone(), resource)));
            }
        }
        all
    };
    for rule in view["rules"].as_array().into_iter().flatten() {
        assert_eq!(list(&rule["verbs"]), ["get", "list", "watch"].map(str::to_owned).into(), "{rule}");
    }
    assert_eq!(of(&view), kinds.keys().cloned().collect());
    assert_eq!(of(&edit), [("k8s.ovn.org".to_owned(), "egressservices".to_owned())].into());
    for kind in of(&edit) {
        assert_eq!(kinds[&kind], "Namespaced", "{kind:?}: a RoleBinding cannot grant it");
    }
}
