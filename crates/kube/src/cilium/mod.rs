//! Cilium's CiliumEgressGatewayPolicy (`cilium.io/v2`): what the controller reads and writes for it. Which gateways follow from a
//! policy, [`egress_core::cilium`] says.
//!
//! **Gateways change without a gap.** Each address has an assignment of its own, so another gateway is a rule that comes to one
//! object and goes from another. Pods without a rule would leave with their nodes' addresses, so rules come first, then others
//! change, and what is left goes, each once the watch has shown the step before. By rendezvous hashing a pod that changes to a new
//! address is covered by the old rules until then, and one that does not keeps its rule in its old form or its new one. A spec that
//! can no longer be read keeps the rules that it had.

pub mod crd;

use std::collections::{BTreeMap, BTreeSet};
use std::iter;
use std::net::IpAddr;

use futures::{Stream, StreamExt, stream};
use ipnet::IpNet;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, LabelSelectorRequirement};
use kube::api::{Api, ApiResource, DeleteParams, DynamicObject, Patch};
use kube::{Client, ResourceExt};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::api_outage::ApiOutages;
use crate::assignments::{self, StoredAssignment, ignored, patch_params, put};
use crate::convert::{MOST_OF_PROBLEM, created};
use crate::crd::{AddressesOf, gateway_policy_resource};
use crate::policy::selector;
use crate::policy::status::{WriteError, condition_values};
use crate::post_params;
use crate::watches::{config, updates};
use egress_core::cilium::{
    ASSIGNMENT_PREFIX, GatewayAddress, GatewayOutcome, GatewayPolicy, GatewayRequest, GatewayRule, PolicyGateways,
    WITHOUT_GATEWAY, assignment_name,
};
use egress_core::keys;
use egress_core::model::policy::SourceKind;
use egress_core::model::state::{Family, family_of};
use egress_core::model::view::Update;
use egress_core::text::quoted;

/// Cilium's label of a pod's namespace in the labels of the pod.
const POD_NAMESPACE: &str = "io.kubernetes.pod.namespace";
/// The labels of its namespace, likewise.
const NAMESPACE_LABELS: &str = "io.cilium.k8s.namespace.labels.";
/// What else Cilium puts among the labels of a pod.
const UNSUPPORTED_LABELS: &str = "io.cilium.k8s.";

/// Bytes of the rules and selectors of one assignment: the API server takes objects of 1.5 MiB.
const MOST_BYTES: usize = 1 << 20;
/// Bytes of the spec of one policy.
const MOST_SPEC_BYTES: usize = 1 << 18;

/// One change of what gateways follow from, apart from nodes.
#[derive(Clone, Debug)]
pub enum CiliumChange {
    Policies(Update<String, StoredGatewayPolicy>),
    Statuses(Update<String, Value>),
    Assignments(Update<String, StoredAssignment>),
}

/// A CiliumEgressGatewayPolicy as the API server has it.
#[derive(Clone, Debug, PartialEq)]
pub struct StoredGatewayPolicy {
    pub object: GatewayPolicy,
    generation: Option<i64>,
    /// The parts of its rules, without those of the other family.
    selectors: Vec<Value>,
    destinations: Vec<IpNet>,
    excluded: Vec<IpNet>,
    /// Selectors of nodes, as written.
    gateways: Vec<Value>,
}

fn status_resource() -> ApiResource {
    ApiResource::erase::<crd::EgressGatewayPolicyStatus>(&())
}

/// Everything that gateways follow from, apart from nodes.
pub fn watches(client: &Client, outages: &ApiOutages) -> impl Stream<Item = CiliumChange> + Send + use<> {
    let policies = Api::all_with(client.clone(), &gateway_policy_resource());
    let statuses = Api::all_with(client.clone(), &status_resource());
    let of = |what| (what, outages.clone());
    let status = |object: &DynamicObject| object.data["status"].clone();
    let own = (SourceKind::CiliumEgressGatewayPolicy, ASSIGNMENT_PREFIX);
    stream::select_all([
        updates(of("CiliumEgressGatewayPolicy objects"), policies, config(), ResourceExt::name_any, policy)
            .map(CiliumChange::Policies)
            .boxed(),
        updates(of("EgressGatewayPolicyStatus objects"), statuses, config(), ResourceExt::name_any, status)
            .map(CiliumChange::Statuses)
            .boxed(),
        assignments::watch_kind(client, outages, "assignments of gateways", own).map(CiliumChange::Assignments).boxed(),
    ])
}

pub(crate) fn policy(object: &DynamicObject) -> StoredGatewayPolicy {
    let spec = &object.data["spec"];
    let mut stored = StoredGatewayPolicy {
        object: GatewayPolicy {
            uid: object.metadata.uid.clone().unwrap_or_default(),
            created: created(&object.metadata),
            spec: Err(String::new()),
        },
        generation: object.metadata.generation,
        selectors: Vec::new(),
        destinations: Vec::new(),
        excluded: Vec::new(),
        gateways: Vec::new(),
    };
    stored.object.spec = request(spec, &mut stored).map_err(|why| quoted(&why, MOST_OF_PROBLEM).into_owned());
    stored
}

fn request(spec: &Value, stored: &mut StoredGatewayPolicy) -> Result<GatewayRequest, String> {
    let bytes = spec.to_string().len();
    if bytes > MOST_SPEC_BYTES {
        return Err(format!("spec: {bytes} bytes, and at most {MOST_SPEC_BYTES} are served: write several policies"));
    }
    let selectors = spec["selectors"].as_array().ok_or("spec.selectors: no list")?;
    stored.selectors = selectors.iter().map(rule_selector).collect::<Result<_, String>>()?;
    stored.destinations = networks(spec, "destinationCIDRs")?.ok_or("spec.destinationCIDRs: no list")?;
    stored.excluded = networks(spec, "excludedCIDRs")?.unwrap_or_default();
    let gateways: Vec<(String, &Value)> = match spec["egressGateways"].as_array().filter(|all| !all.is_empty()) {
        Some(all) => all.iter().enumerate().map(|(at, one)| (format!("egressGateways[{at}]"), one)).collect(),
        None if spec["egressGateway"].is_object() => vec![("egressGateway".to_owned(), &spec["egressGateway"])],
        None => return Err("spec.egressGateway: no gateway".to_owned()),
    };
    stored.gateways = gateways.iter().map(|(_, one)| one["nodeSelector"].clone()).collect();
    let gateways = gateways.into_iter().map(|(field, one)| gateway(field, one)).collect::<Result<_, String>>()?;
    Ok(GatewayRequest { families: stored.destinations.iter().map(|net| family_of(net.addr())).collect(), gateways })
}

fn networks(spec: &Value, field: &str) -> Result<Option<Vec<IpNet>>, String> {
    let one = |text: &Value| {
        let text = text.as_str().unwrap_or_default();
        text.parse::<IpNet>().map(|net| net.trunc()).map_err(|_| format!("spec.{field}: {text:?} is no CIDR"))
    };
    spec[field].as_array().map(|all| all.iter().map(one).collect()).transpose()
}

fn gateway(field: String, gateway: &Value) -> Result<GatewayRule, String> {
    let text = |name: &str| gateway[name].as_str().filter(|text| !text.is_empty());
    let address = match (text("interface"), text("egressIP")) {
        (Some(_), Some(_)) => return Err(format!("spec.{field}: both an interface and an egressIP")),
        (Some(interface), None) => GatewayAddress::OfInterface(interface.to_owned()),
        (None, Some(address)) => match address.parse::<IpAddr>() {
            Ok(address) => GatewayAddress::Is(address.to_canonical()),
            Err(_) => return Err(format!("spec.{field}.egressIP: {address:?} is no IP address")),
        },
        (None, None) => GatewayAddress::Default,
    };
    let nodes = selector(&format!("spec.{field}.nodeSelector"), &gateway["nodeSelector"])?;
    Ok(GatewayRule { field, nodes, address })
}

/// The selector of an assignment: what a pod's selector says of the namespace is said of the namespace.
pub(crate) fn rule_selector(one: &Value) -> Result<Value, String> {
    let read = |field: &str| -> Result<Option<LabelSelector>, String> {
        if one[field].is_null() {
            return Ok(None);
        }
        let path = format!("spec.selectors.{field}");
        selector(&path, &one[field])?;
        LabelSelector::deserialize(&one[field]).map(Some).map_err(|error| format!("{path}: {error}"))
    };
    let (namespaces, pods, nodes) = (read("namespaceSelector")?, read("podSelector")?, read("nodeSelector")?);
    if namespaces.is_none() && pods.is_none() {
        return Err("spec.selectors: neither a namespaceSelector nor a podSelector".to_owned());
    }
    let (mut namespaces, pods) = (namespaces.unwrap_or_default(), pods.unwrap_or_default());
    let mut of_pods = LabelSelector::default();
    for (key, value) in pods.match_labels.into_iter().flatten() {
        match namespace_label(&key)? {
            // Both must hold, so a second one for a key is an expression.
            Some(key) => namespaces.match_expressions.get_or_insert_default().push(LabelSelectorRequirement {
                key,
                operator: "In".to_owned(),
                values: Some(vec![value]),
            }),
            None => drop(of_pods.match_labels.get_or_insert_default().insert(key, value)),
        }
    }
    for mut expression in pods.match_expressions.into_iter().flatten() {
        match namespace_label(&expression.key)? {
            Some(key) => {
                expression.key = key;
                namespaces.match_expressions.get_or_insert_default().push(expression);
            }
            None => of_pods.match_expressions.get_or_insert_default().push(expression),
        }
    }
    let mut selector = json!({"namespaces": namespaces, "pods": of_pods});
    if let (Some(nodes), Some(fields)) = (nodes, selector.as_object_mut()) {
        fields.insert("nodes".to_owned(), json!(nodes));
    }
    Ok(selector)
}

/// The label of the namespace that a label of pods stands for.
fn namespace_label(key: &str) -> Result<Option<String>, String> {
    if key == POD_NAMESPACE {
        return Ok(Some(keys::NAMESPACE_NAME.to_owned()));
    }
    if let Some(label) = key.strip_prefix(NAMESPACE_LABELS) {
        return Ok(Some(label.to_owned()));
    }
    if key.starts_with(UNSUPPORTED_LABELS) {
        return Err(format!("spec.selectors.podSelector: the label {key} is not supported"));
    }
    Ok(None)
}

impl StoredGatewayPolicy {
    /// The rule in the assignment of an address, or in the one without an address.
    fn rule(&self, name: &str, families: &BTreeSet<Family>, among: &BTreeSet<IpAddr>) -> Value {
        let of_family = |nets: &[IpNet]| -> Vec<IpNet> {
            nets.iter().copied().filter(|net| families.contains(&family_of(net.addr()))).collect()
        };
        let GatewayPolicy { uid, created, .. } = &self.object;
        let mut rule = json!({
            "from": {"kind": SourceKind::CiliumEgressGatewayPolicy, "name": name, "uid": uid, "created": created},
            "selectors": self.selectors,
            "destinations": of_family(&self.destinations),
        });
        let Some(fields) = rule.as_object_mut() else { return rule };
        let excluded = of_family(&self.excluded);
        if !excluded.is_empty() {
            fields.insert("excluded".to_owned(), json!(excluded));
        }
        if among.len() > 1 {
            fields.insert("among".to_owned(), json!(among));
        }
        rule
    }
}

/// Writes what becomes of policies.
#[derive(Clone)]
pub struct CiliumWriter {
    statuses: Api<DynamicObject>,
}

impl CiliumWriter {
    pub fn new(client: &Client) -> Self {
        Self { statuses: Api::all_with(client.clone(), &status_resource()) }
    }

    /// Creates the object that says what has become of a policy; it is deleted with the policy.
    pub async fn create_status(&self, name: &str, policy: &StoredGatewayPolicy) -> Result<(), WriteError> {
        let mut object = DynamicObject::new(name, &status_resource());
        object.data = json!({"spec": {}});
        let resource = gateway_policy_resource();
        object.metadata.owner_references = Some(vec![serde_json::from_value(json!({
            "apiVersion": resource.api_version, "kind": resource.kind, "name": name, "uid": policy.object.uid,
        }))?]);
        ignored(self.statuses.create(&post_params(), &object).await, 409)
    }

    /// Writes a status.
    pub async fn set_status(&self, name: &str, status: &Value) -> Result<(), WriteError> {
        let patch = Patch::Merge(json!({"status": status}));
        ignored(self.statuses.patch_status(name, &patch_params(), &patch).await, 404)
    }

    /// Deletes that of a policy that is gone.
    pub async fn delete_status(&self, name: &str) -> Result<(), WriteError> {
        ignored(self.statuses.delete(name, &DeleteParams::default()).await, 404)
    }
}

/// A status as it is written, with the times of conditions that have not changed.
pub fn status_value(status: &GatewayOutcome, policy: &StoredGatewayPolicy, stored: Option<&Value>) -> Value {
    let conditions = condition_values(&status.conditions, stored.unwrap_or(&Value::Null));
    let gateways = status.gateways.iter().map(|(node, addresses)| json!({"node": node, "addresses": addresses}));
    let gateways: Vec<_> = gateways.collect();
    let nodes = status.gateways.keys().map(String::as_str).collect::<Vec<_>>().join(",");
    let mut value = json!({"nodes": nodes, "gateways": gateways, "conditions": conditions});
    if let (Some(generation), Some(fields)) = (policy.generation, value.as_object_mut()) {
        fields.insert("observedGeneration".to_owned(), json!(generation));
    }
    value
}

/// What the watches have brought so far.
#[derive(Default)]
pub struct CiliumView {
    pub policies: BTreeMap<String, StoredGatewayPolicy>,
    /// By the name of the policy.
    pub statuses: BTreeMap<String, Value>,
    pub assignments: BTreeMap<String, StoredAssignment>,
    listed: BTreeSet<u8>,
}

impl CiliumView {
    /// Takes a change. Returns whether it says anything new.
    pub fn apply(&mut self, change: CiliumChange) -> bool {
        let listed = &mut self.listed;
        match change {
            CiliumChange::Policies(update) => put(&mut self.policies, update, (listed, 0)),
            CiliumChange::Statuses(update) => put(&mut self.statuses, update, (listed, 1)),
            CiliumChange::Assignments(update) => put(&mut self.assignments, update, (listed, 2)),
        }
    }

    /// Whether every kind has been listed.
    pub fn is_whole(&self) -> bool {
        self.listed.len() == 3
    }

    /// The assignments of gateways.
    pub fn own_assignments(&self) -> impl Iterator<Item = (&String, &StoredAssignment)> {
        self.assignments.iter().filter(|(_, stored)| stored.kind() == Some(SourceKind::CiliumEgressGatewayPolicy))
    }

    /// The rules of the assignments of gateways, with the UIDs of their policies.
    fn rules(&self) -> impl Iterator<Item = (&String, &str, &Value)> {
        self.own_assignments().flat_map(|(name, stored)| {
            let rules = stored.spec["rules"].as_array().into_iter().flatten();
            rules.map(move |rule| (name, rule["from"]["uid"].as_str().unwrap_or_default(), rule))
        })
    }

    /// The addresses that each policy leaves with so far, by its UID.
    pub fn current(&self) -> BTreeMap<String, BTreeSet<IpAddr>> {
        let mut current = BTreeMap::<String, BTreeSet<IpAddr>>::new();
        for (name, uid, _) in self.rules() {
            let addresses = self.assignments.get(name).and_then(|stored| stored.spec["egressIPs"].as_array());
            let addresses = addresses.into_iter().flatten().filter_map(|text| text.as_str()?.parse::<IpAddr>().ok());
            current.entry(uid.to_owned()).or_default().extend(addresses);
        }
        current
    }

    /// The specs of all assignments of gateways, with rules that wait until others have come.
    pub fn assignment_specs(&self, chosen: &BTreeMap<String, PolicyGateways>) -> GatewayAssignments {
        let mut wanted = GatewayAssignments::default();
        let mut stored = BTreeMap::<&str, Vec<(&String, &Value)>>::new();
        for (name, uid, rule) in self.rules() {
            stored.entry(uid).or_default().push((name, rule));
        }
        // By age: where there is no room for all, the older ones have it.
        let mut policies: Vec<_> = self.policies.iter().collect();
        policies.sort_by_key(|(name, policy)| (policy.object.created, *name));
        for (name, policy) in policies {
            let known = stored.get(policy.object.uid.as_str()).map(Vec::as_slice).unwrap_or_default();
            let new = match &policy.object.spec {
                Ok(spec) => wanted.rules(name, policy, spec, chosen.get(name)),
                Err(_) => Vec::new(),
            };
            let known_in =
                |assignment: &String| known.iter().find(|(name, _)| *name == assignment).map(|(_, rule)| *rule);
            // First what comes, then what changes, then what goes: every pod has a rule all the time.
            let comes = new.iter().any(|(assignment, ..)| known_in(assignment).is_none());
            let is_done = new.iter().all(|(assignment, _, rule)| known_in(assignment) == Some(rule));
            let keeps = policy.object.spec.is_err() || !is_done;
            let kept = known.iter().filter(|(assignment, _)| keeps && new.iter().all(|(name, ..)| name != *assignment));
            let kept = kept.map(|(assignment, rule)| {
                let stored = self.assignments.get(*assignment);
                let address = stored.and_then(|one| one.spec["egressIPs"][0].as_str()?.parse().ok());
                ((*assignment).clone(), address, (*rule).clone())
            });
            let kept: Vec<NamedRule> = kept.collect();
            let new = new.into_iter().map(|(assignment, address, rule)| {
                let rule = known_in(&assignment).filter(|_| comes).cloned().unwrap_or(rule);
                (assignment, address, rule)
            });
            new.chain(kept).for_each(|rule| wanted.add(rule, &policy.gateways));
        }
        wanted
    }
}

/// A rule with the name of its assignment, and the address there.
type NamedRule = (String, Option<IpAddr>, Value);

/// The assignments that should be.
#[derive(Default)]
pub struct GatewayAssignments {
    assignments: BTreeMap<String, GatewayAssignment>,
    /// The policies whose rules have no room in the assignment of an address: their packets are dropped.
    pub without_room: BTreeSet<String>,
}

impl GatewayAssignments {
    pub fn specs(self) -> BTreeMap<String, Value> {
        self.assignments.into_iter().map(|(name, one)| (name, one.spec())).collect()
    }

    /// The rules of a policy with these gateways.
    fn rules(
        &mut self,
        name: &str,
        policy: &StoredGatewayPolicy,
        spec: &GatewayRequest,
        chosen: Option<&PolicyGateways>,
    ) -> Vec<NamedRule> {
        let (mut rules, mut without) = (Vec::new(), BTreeSet::new());
        for family in &spec.families {
            let among = chosen.map(|chosen| chosen.addresses(*family)).unwrap_or_default();
            let rule = policy.rule(name, &[*family].into(), &among);
            let size = rule.to_string().len() + policy.gateways.iter().map(|one| one.to_string().len()).sum::<usize>();
            let has_room = among.iter().all(|address| self.has_room(&assignment_name(*address), size));
            if !has_room {
                self.without_room.insert(name.to_owned());
            }
            match !among.is_empty() && has_room {
                true => rules.extend(among.iter().map(|one| (assignment_name(*one), Some(*one), rule.clone()))),
                false => drop(without.insert(*family)),
            }
        }
        if !without.is_empty() {
            let rule = policy.rule(name, &without, &BTreeSet::new());
            let size = rule.to_string().len();
            // As many as are needed: they have no address to share.
            let mut names =
                iter::once(WITHOUT_GATEWAY.to_owned()).chain((2..).map(|n| format!("{WITHOUT_GATEWAY}-{n}")));
            let free = names.find(|name| self.has_room(name, size)).unwrap_or_else(|| WITHOUT_GATEWAY.to_owned());
            rules.push((free, None, rule));
        }
        rules
    }

    fn has_room(&self, assignment: &str, size: usize) -> bool {
        self.assignments.get(assignment).is_none_or(|one| one.size + size <= MOST_BYTES)
    }

    fn add(&mut self, (assignment, address, rule): NamedRule, candidates: &[Value]) {
        let one = self.assignments.entry(assignment).or_default();
        one.address = one.address.or(address);
        one.size += rule.to_string().len();
        one.rules.push(rule);
        for candidate in candidates {
            if !one.candidates.contains(candidate) {
                one.size += candidate.to_string().len();
                one.candidates.push(candidate.clone());
            }
        }
    }
}

/// What becomes of the policies with one address, or of those without any.
#[derive(Default)]
struct GatewayAssignment {
    address: Option<IpAddr>,
    rules: Vec<Value>,
    /// Bytes of rules and selectors.
    size: usize,
    /// Selectors of nodes.
    candidates: Vec<Value>,
}

impl GatewayAssignment {
    fn spec(self) -> Value {
        json!({
            "egressIPs": self.address.into_iter().collect::<Vec<_>>(),
            "addressesOf": AddressesOf::Host,
            "rules": self.rules,
            "candidates": self.candidates,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use egress_core::cilium::ChosenGateway;
    use egress_core::model::samples::ip;

    fn read(name: &str, spec: Value) -> StoredGatewayPolicy {
        let meta = json!({"name": name, "uid": name, "creationTimestamp": "2024-01-01T00:00:10Z", "generation": 1});
        policy(&serde_json::from_value(json!({"metadata": meta, "spec": spec})).expect("an object"))
    }

    fn spec(change: &Value) -> Value {
        let mut spec = json!({
            "selectors": [{"podSelector": {"matchLabels": {"app": "web"}}}],
            "destinationCIDRs": ["198.51.100.0/24", "2001:db8::/32"],
            "excludedCIDRs": ["198.51.100.7/32"],
            "egressGateway": {"nodeSelector": {"matchLabels": {"egress": "yes"}}},
        });
        let fields = spec.as_object_mut().expect("an object");
        fields.extend(change.as_object().expect("fields").clone());
        fields.retain(|_, value| !value.is_null());
        spec
    }

    #[test]
    fn a_policy_is_read_as_cilium_means_it() {
        let gateways = |change: Value| {
            let spec = read("a", spec(&change)).object.spec;
            spec.map(|spec| spec.gateways.into_iter().map(|one| (one.field, one.address)).collect::<Vec<_>>())
        };
        let single = ("egressGateway".to_owned(), GatewayAddress::Default);
        assert_eq!(gateways(json!({})), Ok(vec![single.clone()]));
        assert_eq!(gateways(json!({"egressGateways": []})), Ok(vec![single]), "an empty list counts as none");
        let several = json!({"egressGateways": [
            {"nodeSelector": {}, "interface": "eth1"}, {"nodeSelector": {}, "egressIP": "10.0.0.8"},
        ]});
        let expected = vec![
            ("egressGateways[0]".to_owned(), GatewayAddress::OfInterface("eth1".into())),
            ("egressGateways[1]".to_owned(), GatewayAddress::Is(ip("10.0.0.8"))),
        ];
        assert_eq!(gateways(several), Ok(expected));
        assert_eq!(read("a", spec(&json!({}))).object.spec.expect("readable").families.len(), 2);
        assert_eq!(read("a", spec(&json!({"destinationCIDRs": []}))).object.spec.expect("readable").families.len(), 0);
        for broken in [
            json!({"selectors": null}),
            json!({"selectors": [{}]}),
            json!({"selectors": [{"nodeSelector": {}}]}),
            json!({"selectors": [{"podSelector": {"matchLabels": {"io.cilium.k8s.policy.serviceaccount": "a"}}}]}),
            json!({"destinationCIDRs": null}),
            json!({"destinationCIDRs": ["10.0.0.0"]}),
            json!({"egressGateway": null}),
            json!({"egressGateway": {"nodeSelector": {}, "interface": "eth1", "egressIP": "10.0.0.8"}}),
            json!({"egressGateway": {"nodeSelector": {}, "egressIP": "x"}}),
            json!({"destinationCIDRs": (0..20_000).map(|n| format!("10.{}.{}.0/24", n / 256, n % 256)).collect::<Vec<_>>()}),
        ] {
            let outcome = read("a", spec(&broken)).object.spec;
            assert!(outcome.as_ref().is_err_and(|why| why.starts_with("spec")), "{broken}: {outcome:?}");
        }
    }

    #[test]
    fn labels_of_the_namespace_in_a_selector_of_pods_select_namespaces() {
        let one = json!({
            "namespaceSelector": {"matchLabels": {"team": "a"}},
            "podSelector": {
                "matchLabels": {"app": "web", "io.kubernetes.pod.namespace": "shop"},
                "matchExpressions": [
                    {"key": "io.cilium.k8s.namespace.labels.tier", "operator": "Exists"},
                    {"key": "job", "operator": "DoesNotExist"},
                ],
            },
            "nodeSelector": {"matchLabels": {"zone": "a"}},
        });
        let expected = json!({
            "namespaces": {
                "matchLabels": {"team": "a"},
                "matchExpressions": [
                    {"key": "kubernetes.io/metadata.name", "operator": "In", "values": ["shop"]},
                    {"key": "tier", "operator": "Exists"},
                ],
            },
            "pods": {
                "matchLabels": {"app": "web"},
                "matchExpressions": [{"key": "job", "operator": "DoesNotExist"}],
            },
            "nodes": {"matchLabels": {"zone": "a"}},
        });
        assert_eq!(rule_selector(&one), Ok(expected));
        let all = json!({"namespaces": {}, "pods": {}});
        assert_eq!(rule_selector(&json!({"podSelector": {}})), Ok(all), "all pods of all namespaces");
    }

    fn by(addresses: &[(&str, &[&str])]) -> PolicyGateways {
        let gateway = |(node, addresses): &(&str, &[&str])| {
            Ok(ChosenGateway { node: (*node).to_owned(), addresses: addresses.iter().map(|text| ip(text)).collect() })
        };
        PolicyGateways { gateways: addresses.iter().map(gateway).collect() }
    }

    /// Each assignment with the names of its policies, and whether the rule of each is for some pods.
    fn specs(view: &CiliumView, chosen: &BTreeMap<String, PolicyGateways>) -> Vec<(String, Vec<String>)> {
        let text = |rule: &Value| {
            let name = rule["from"]["name"].as_str().unwrap_or_default();
            let among = rule["among"].as_array().map_or(0, Vec::len);
            format!("{name}/{}/{among}", rule["destinations"].as_array().map_or(0, Vec::len))
        };
        let all = view.assignment_specs(chosen).specs().into_iter();
        all.map(|(name, spec)| (name, spec["rules"].as_array().into_iter().flatten().map(text).collect())).collect()
    }

    fn store(view: &mut CiliumView, chosen: &BTreeMap<String, PolicyGateways>) {
        let specs = view.assignment_specs(chosen).specs();
        let stored = |(name, spec)| (name, StoredAssignment { uid: "u".into(), spec });
        view.assignments = specs.into_iter().map(stored).collect();
    }

    fn expected(all: &[(&str, &[&str])]) -> Vec<(String, Vec<String>)> {
        let texts = |rules: &[&str]| rules.iter().map(|text| (*text).to_owned()).collect();
        all.iter().map(|(name, rules)| ((*name).to_owned(), texts(rules))).collect()
    }

    #[test]
    fn each_address_has_an_assignment_with_a_rule_of_each_policy() {
        let mut view = CiliumView::default();
        for name in ["a", "b", "c"] {
            view.policies.insert(name.into(), read(name, spec(&json!({}))));
        }
        let chosen = BTreeMap::from([
            ("a".to_owned(), by(&[("n1", &["172.18.0.1", "fd00::1"])])),
            ("b".to_owned(), by(&[("n1", &["172.18.0.1"]), ("n2", &["172.18.0.2"])])),
            ("c".to_owned(), by(&[])),
        ]);
        let found = specs(&view, &chosen);
        let names = [
            ("gateway-172.18.0.1", &["a/1/0", "b/1/2"][..]),
            ("gateway-172.18.0.2", &["b/1/2"]),
            ("gateway-fd00-0-0-0-0-0-0-1", &["a/1/0"]),
            // Of one policy a family, of the other both.
            ("gateway-none", &["b/1/0", "c/2/0"]),
        ];
        assert_eq!(found, expected(&names));
        let all = view.assignment_specs(&chosen).specs();
        let one = &all["gateway-172.18.0.1"];
        assert_eq!((&one["egressIPs"], &one["addressesOf"]), (&json!(["172.18.0.1"]), &json!("Host")));
        assert_eq!(one["candidates"], json!([{"matchLabels": {"egress": "yes"}}]));
        assert_eq!(one["rules"][0]["excluded"], json!(["198.51.100.7/32"]));
        assert_eq!(all["gateway-none"]["egressIPs"], json!([]));
        view.assignments =
            all.into_iter().map(|(name, spec)| (name, StoredAssignment { uid: "u".into(), spec })).collect();
        assert_eq!(view.current()["b"], [ip("172.18.0.1"), ip("172.18.0.2")].into());
    }

    #[test]
    fn a_rule_goes_after_another_has_come() {
        let mut view = CiliumView::default();
        view.policies.insert("a".into(), read("a", spec(&json!({"destinationCIDRs": ["198.51.100.0/24"]}))));
        let at = |address: &str| BTreeMap::from([("a".to_owned(), by(&[("n", &[address])]))]);
        store(&mut view, &at("172.18.0.1"));
        let (first, second) = ("gateway-172.18.0.1", "gateway-172.18.0.2");
        let both = expected(&[(first, &["a/1/0"]), (second, &["a/1/0"])]);
        assert_eq!(specs(&view, &at("172.18.0.2")), both, "the new one first");
        store(&mut view, &at("172.18.0.2"));
        assert_eq!(specs(&view, &at("172.18.0.2")), expected(&[(second, &["a/1/0"])]));
        store(&mut view, &at("172.18.0.2"));
        println!("of one gateway two are made: the second comes, and the pods of the first become fewer");
        let two = BTreeMap::from([("a".to_owned(), by(&[("n", &["172.18.0.2"]), ("m", &["172.18.0.3"])]))]);
        let third = "gateway-172.18.0.3";
        assert_eq!(specs(&view, &two), expected(&[(second, &["a/1/0"]), (third, &["a/1/2"])]));
        store(&mut view, &two);
        assert_eq!(specs(&view, &two), expected(&[(second, &["a/1/2"]), (third, &["a/1/2"])]));
        store(&mut view, &two);
        store(&mut view, &two);
        let back = at("172.18.0.2");
        assert_eq!(specs(&view, &back), expected(&[(second, &["a/1/0"]), (third, &["a/1/2"])]));
        store(&mut view, &back);
        store(&mut view, &back);
        // Without any gateway too.
        let none = BTreeMap::from([("a".to_owned(), by(&[]))]);
        assert_eq!(specs(&view, &none), expected(&[(second, &["a/1/0"]), ("gateway-none", &["a/1/0"])]));
        // Unreadable: what was read last holds.
        view.policies.insert("a".into(), read("a", spec(&json!({"destinationCIDRs": ["x"]}))));
        assert_eq!(specs(&view, &none), expected(&[(second, &["a/1/0"])]));
        // A policy of the same name is another one.
        view.policies.get_mut("a").expect("a policy").object.uid = "other".into();
        assert_eq!(specs(&view, &none), []);
    }

    #[test]
    fn a_policy_without_room_beside_older_ones_is_dropped_alone() {
        let mut view = CiliumView::default();
        let many: Vec<String> = (0..256).map(|n| format!("10.{n}.0.0/16")).collect();
        let names: Vec<String> = (0..400).map(|n| format!("p{n:03}")).collect();
        for name in &names {
            view.policies.insert(name.clone(), read(name, spec(&json!({"destinationCIDRs": many}))));
        }
        let chosen: BTreeMap<_, _> = names.iter().map(|name| (name.clone(), by(&[("n", &["172.18.0.1"])]))).collect();
        let wanted = view.assignment_specs(&chosen);
        let without = wanted.without_room.clone();
        let specs = wanted.specs();
        let rules = |name: &str| specs[name]["rules"].as_array().map_or(0, Vec::len);
        assert!(!without.is_empty() && !without.contains("p000"), "{} without room", without.len());
        assert_eq!(rules("gateway-172.18.0.1") + without.len(), names.len());
        let dropped: usize =
            specs.keys().filter(|name| name.starts_with(WITHOUT_GATEWAY)).map(|name| rules(name)).sum();
        assert_eq!(dropped, without.len());
        assert!(specs.values().all(|spec| spec.to_string().len() < 1_400_000));
        let text: Vec<String> = specs.values().map(Value::to_string).collect();
        store(&mut view, &chosen);
        let again: Vec<String> = view.assignment_specs(&chosen).specs().values().map(Value::to_string).collect();
        assert_eq!(again, text, "it comes to rest");
    }
}
