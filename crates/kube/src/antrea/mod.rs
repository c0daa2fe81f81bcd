//! Antrea's Egress and ExternalIPPool (`crd.antrea.io/v1beta1`): what the controller reads and writes for them. What follows
//! from what, [`egress_core::antrea`] says.

pub mod crd;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use futures::{Stream, StreamExt, stream};
use ipnet::IpNet;
use kube::api::{Api, ApiResource, DynamicObject, Patch};
use kube::{Client, ResourceExt};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::api_outage::ApiOutages;
use crate::assignments::{self, StoredAssignment, ignored, patch_params, put};
use crate::convert::{created, quantity};
use crate::crd::{AddressesOf, AssignedBandwidth, AssignedVlanNetwork, MOST_BITS, egress_resource};
use crate::policy::selector;
use crate::policy::status::{WriteError, condition_values};
use crate::watches::{config, updates};
use egress_core::antrea::{
    ASSIGNMENT_PREFIX, AddressGroup, AntreaInputs, Bandwidth, EgressObject, EgressRequest, EgressStatus, PoolObject,
    PoolRange, PoolRequest, PoolSubnet, RequestedAddress,
};
use egress_core::model::interface::VlanNetwork;
use egress_core::model::policy::{Selects, SourceKind};
use egress_core::model::selector::Selector;
use egress_core::model::view::Update;

/// One change of what Egresses follow from.
#[derive(Clone, Debug)]
pub enum AntreaChange {
    Egresses(Update<String, StoredEgress>),
    Pools(Update<String, StoredPool>),
    Assignments(Update<String, StoredAssignment>),
}

/// An Egress as the API server has it.
#[derive(Clone, Debug, PartialEq)]
pub struct StoredEgress {
    pub object: EgressObject,
    resource_version: String,
    /// The selectors as written.
    applied_to: Value,
    is_plural: bool,
    status: Value,
}

/// An ExternalIPPool as the API server has it.
#[derive(Clone, Debug, PartialEq)]
pub struct StoredPool {
    pub object: PoolObject,
    /// As written.
    node_selector: Value,
    /// Total and used addresses, if it says them.
    usage: Option<(u64, u64)>,
}

/// The kind ExternalIPPool, untyped.
pub(crate) fn pool_resource() -> ApiResource {
    ApiResource::erase::<crd::ExternalIPPool>(&())
}

/// Everything that Egresses follow from.
pub fn watches(client: &Client, outages: &ApiOutages) -> impl Stream<Item = AntreaChange> + Send + use<> {
    let egresses = Api::all_with(client.clone(), &egress_resource());
    let pools = Api::all_with(client.clone(), &pool_resource());
    let of = |what| (what, outages.clone());
    stream::select_all([
        updates(of("Egress objects"), egresses, config(), ResourceExt::name_any, egress)
            .map(AntreaChange::Egresses)
            .boxed(),
        updates(of("ExternalIPPool objects"), pools, config(), ResourceExt::name_any, pool)
            .map(AntreaChange::Pools)
            .boxed(),
        assignments::watch_kind(client, outages, "assignments of Egresses", (SourceKind::Egress, ASSIGNMENT_PREFIX))
            .map(AntreaChange::Assignments)
            .boxed(),
    ])
}

fn egress(object: &DynamicObject) -> StoredEgress {
    let spec = &object.data["spec"];
    StoredEgress {
        object: EgressObject {
            uid: object.metadata.uid.clone().unwrap_or_default(),
            created: created(&object.metadata),
            served: object.data["status"]["egressIP"].as_str().and_then(|address| address.parse().ok()),
            size: spec["appliedTo"].to_string().len(),
            spec: request(spec),
        },
        resource_version: object.metadata.resource_version.clone().unwrap_or_default(),
        applied_to: spec["appliedTo"].clone(),
        is_plural: is_plural(spec),
        status: object.data["status"].clone(),
    }
}

fn is_plural(spec: &Value) -> bool {
    !spec["egressIPs"].is_null() || !spec["externalIPPools"].is_null()
}

fn request(spec: &Value) -> Result<EgressRequest, String> {
    let applied_to = &spec["appliedTo"];
    let part = |field: &str| {
        let value = &applied_to[field];
        (!value.is_null()).then(|| selector(&format!("spec.appliedTo.{field}"), value)).transpose()
    };
    let applied_to = match (part("namespaceSelector")?, part("podSelector")?) {
        (None, None) => None,
        (namespaces, pods) => {
            let all = |selector: Option<Selector>| selector.unwrap_or_default();
            Some(Selects { namespaces: all(namespaces), pods: all(pods), ..Selects::default() })
        }
    };
    let (singular, plural) = (["egressIP", "externalIPPool"], ["egressIPs", "externalIPPools"]);
    let list = |field: &str| match &spec[field] {
        Value::Null => Ok(Vec::new()),
        // As Antrea writes it when it takes an address back.
        Value::String(text) if text.is_empty() => Ok(Vec::new()),
        Value::String(text) => Ok(vec![text.clone()]),
        list => Vec::<String>::deserialize(list).map_err(|error| format!("spec.{field}: {error}")),
    };
    let [addresses, pools] = if is_plural(spec) { plural } else { singular };
    let (addresses, names) = (list(addresses)?, list(pools)?);
    let address = |text: &String| {
        let parsed = text.parse::<IpAddr>().map(|address| address.to_canonical());
        parsed.map_err(|_| format!("spec: {text:?} is no IP address"))
    };
    let addresses = addresses.iter().map(address).collect::<Result<Vec<_>, String>>()?;
    if addresses.is_empty() && names.is_empty() {
        return Err("spec: neither an egressIP nor an externalIPPool".to_owned());
    }
    if !names.is_empty() && addresses.len() > names.len() {
        return Err("spec: more egressIPs than externalIPPools".to_owned());
    }
    let count = addresses.len().max(names.len());
    let one =
        |index: usize| RequestedAddress { address: addresses.get(index).copied(), pool: names.get(index).cloned() };
    let bandwidth = bandwidth(&spec["bandwidth"])?;
    Ok(EgressRequest { applied_to, addresses: (0..count).map(one).collect(), bandwidth })
}

fn bandwidth(value: &Value) -> Result<Option<Bandwidth>, String> {
    if value.is_null() {
        return Ok(None);
    }
    let bits = |field: &str| {
        let text = value[field].as_str().ok_or_else(|| format!("spec.bandwidth.{field}: no quantity"))?;
        let bits = quantity(text).map(|bits| bits.min(MOST_BITS));
        bits.ok_or_else(|| format!("spec.bandwidth.{field}: {text:?} is no quantity, as 300k, 100M or 2G"))
    };
    let (rate, burst) = (bits("rate")?, bits("burst")?);
    if rate == 0 {
        return Err("spec.bandwidth.rate: zero lets nothing pass".to_owned());
    }
    Ok(Some(Bandwidth { rate, burst }))
}

fn pool(object: &DynamicObject) -> StoredPool {
    let usage = &object.data["status"]["usage"];
    StoredPool {
        object: PoolObject {
            uid: object.metadata.uid.clone().unwrap_or_default(),
            created: created(&object.metadata),
            spec: pool_request(&object.data["spec"]),
        },
        node_selector: object.data["spec"]["nodeSelector"].clone(),
        usage: usage["total"].as_u64().zip(usage["used"].as_u64()),
    }
}

fn pool_request(spec: &Value) -> Result<PoolRequest, String> {
    let ranges = spec["ipRanges"].as_array().ok_or("spec.ipRanges: no list")?;
    let ranges = ranges.iter().map(range).collect::<Result<Vec<_>, String>>()?;
    let subnet = &spec["subnetInfo"];
    let subnet = (!subnet.is_null()).then(|| subnet_info(subnet)).transpose()?;
    let nodes = match &spec["nodeSelector"] {
        Value::Null => Selector::default(),
        nodes => selector("spec.nodeSelector", nodes)?,
    };
    Ok(PoolRequest { ranges, subnet, selects_nodes: nodes != Selector::default() })
}

fn range(range: &Value) -> Result<PoolRange, String> {
    let address = |field: &str| {
        let text = range[field].as_str().ok_or("spec.ipRanges: neither cidr nor start and end")?;
        let parsed = text.parse::<IpAddr>().map(|address| address.to_canonical());
        parsed.map_err(|_| format!("spec.ipRanges: {text:?} is no IP address"))
    };
    if let Some(cidr) = range["cidr"].as_str() {
        let net: IpNet = cidr.parse().map_err(|_| format!("spec.ipRanges: {cidr:?} is no CIDR"))?;
        return Ok(PoolRange::of_network(net));
    }
    let (start, end) = (address("start")?, address("end")?);
    PoolRange::between(start, end).ok_or_else(|| format!("spec.ipRanges: {start} to {end} is no range"))
}

/// The largest number of a VLAN (IEEE 802.1Q).
const MOST_VLAN: u16 = 4094;

fn subnet_info(subnet: &Value) -> Result<PoolSubnet, String> {
    let gateway = subnet["gateway"].as_str().unwrap_or_default();
    let number = |field: &str| subnet[field].as_u64().unwrap_or_default();
    let vlan = u16::try_from(number("vlan")).ok().filter(|vlan| *vlan <= MOST_VLAN);
    Ok(PoolSubnet {
        gateway: gateway.parse().map_err(|_| format!("spec.subnetInfo.gateway: {gateway:?} is no IP address"))?,
        prefix_length: u8::try_from(number("prefixLength")).unwrap_or(u8::MAX),
        vlan: vlan.ok_or("spec.subnetInfo.vlan: not between 0 and 4094")?,
    })
}

/// The spec of the assignment of a group of Egresses. It has the selectors of nodes as the pools have them: it need not change
/// when nodes do.
pub fn assignment_spec(group: &AddressGroup, view: &AntreaView) -> Value {
    let AntreaView { egresses: sharing, pools: sources, .. } = view;
    let rules = group.egresses.iter().filter_map(|name| {
        let StoredEgress { object, applied_to, .. } = sharing.get(name)?;
        let EgressObject { uid, created, .. } = object;
        let part = |field: &str| if applied_to[field].is_null() { json!({}) } else { applied_to[field].clone() };
        let selects = object.spec.as_ref().is_ok_and(|spec| spec.applied_to.is_some());
        let selector = json!({"namespaces": part("namespaceSelector"), "pods": part("podSelector")});
        Some(json!({
            "from": {"kind": SourceKind::Egress, "name": name, "uid": uid, "created": created},
            "selectors": if selects { vec![selector] } else { Vec::new() },
        }))
    });
    let mut spec = json!({"egressIPs": group.addresses, "rules": rules.collect::<Vec<_>>()});
    if let Some(spec) = spec.as_object_mut().filter(|_| group.is_of_hosts) {
        spec.insert("addressesOf".to_owned(), json!(AddressesOf::Host));
    }
    let asked = group.egresses.iter().filter_map(|name| sharing.get(name)?.object.spec.as_ref().ok()?.bandwidth);
    if let (Some(spec), Some(Bandwidth { rate, burst })) = (spec.as_object_mut(), asked.into_iter().next()) {
        spec.insert("bandwidth".to_owned(), json!(AssignedBandwidth { rate, burst }));
    }
    if let Some(spec) = spec.as_object_mut().filter(|_| !group.vlans.is_empty()) {
        let network = |VlanNetwork { vlan, gateway }: &VlanNetwork| AssignedVlanNetwork {
            vlan: *vlan,
            gateway: gateway.addr().to_string(),
            prefix_length: gateway.prefix_len(),
        };
        spec.insert("vlanNetworks".to_owned(), json!(group.vlans.iter().map(network).collect::<Vec<_>>()));
    }
    let selectors = group.pools.iter().filter_map(|pool| Some(&sources.get(pool)?.node_selector));
    if let Some(spec) = spec.as_object_mut().filter(|_| !group.pools.is_empty()) {
        spec.insert("nodeSelectors".to_owned(), json!(selectors.collect::<Vec<_>>()));
    }
    spec
}

/// Writes allocated addresses, and the status of both kinds.
#[derive(Clone)]
pub struct AntreaWriter {
    egresses: Api<DynamicObject>,
    pools: Api<DynamicObject>,
}

impl AntreaWriter {
    pub fn new(client: &Client) -> Self {
        let egresses = Api::all_with(client.clone(), &egress_resource());
        Self { egresses, pools: Api::all_with(client.clone(), &pool_resource()) }
    }

    /// Writes allocated addresses into the spec, if the object is still the one that was read.
    pub async fn allocate(&self, name: &str, stored: &StoredEgress, addresses: &[IpAddr]) -> Result<(), WriteError> {
        let (path, value) = match (stored.is_plural, addresses.first()) {
            (false, Some(address)) => ("/spec/egressIP", json!(address)),
            (_, _) => ("/spec/egressIPs", json!(addresses)),
        };
        let ops = json!([
            {"op": "test", "path": "/metadata/resourceVersion", "value": stored.resource_version},
            {"op": "add", "path": path, "value": value},
        ]);
        let patch = Patch::Json::<()>(serde_json::from_value(ops)?);
        ignored(self.egresses.patch(name, &patch_params(), &patch).await, 404)
    }

    /// Writes the status of an Egress where it differs. Returns whether that has changed the object.
    pub async fn set_status(
        &self,
        name: &str,
        stored: &StoredEgress,
        status: &EgressStatus,
    ) -> Result<bool, WriteError> {
        let EgressStatus { node, address, conditions } = status;
        let conditions = condition_values(conditions, &stored.status);
        let said = |field: &str| stored.status[field].as_str().unwrap_or_default();
        let known = stored.status["conditions"].as_array().map(Vec::as_slice).unwrap_or_default();
        if (said("egressNode"), said("egressIP"), known) == (node.as_str(), address.as_str(), conditions.as_slice()) {
            return Ok(false);
        }
        let patch =
            Patch::Merge(json!({"status": {"egressNode": node, "egressIP": address, "conditions": conditions}}));
        match self.egresses.patch_status(name, &patch_params(), &patch).await {
            Ok(object) => Ok(object.metadata.resource_version.as_deref() != Some(stored.version())),
            answer => ignored(answer, 404).map(|()| false),
        }
    }

    /// Writes the usage of a pool where it differs.
    pub async fn set_usage(&self, name: &str, stored: &StoredPool, used: u64) -> Result<(), WriteError> {
        // The field is signed.
        let total = stored.object.spec.as_ref().map_or(0, PoolRequest::total).min(i64::MAX.unsigned_abs());
        if stored.usage == Some((total, used)) {
            return Ok(());
        }
        let patch = Patch::Merge(json!({"status": {"usage": {"total": total, "used": used}}}));
        ignored(self.pools.patch_status(name, &patch_params(), &patch).await, 404)
    }
}

impl StoredEgress {
    /// As the API server counts it.
    pub fn version(&self) -> &str {
        &self.resource_version
    }

    /// The node that its status names.
    pub fn node(&self) -> &str {
        self.status["egressNode"].as_str().unwrap_or_default()
    }
}

/// What the watches have brought so far.
#[derive(Default)]
pub struct AntreaView {
    pub egresses: BTreeMap<String, StoredEgress>,
    pub pools: BTreeMap<String, StoredPool>,
    pub assignments: BTreeMap<String, StoredAssignment>,
    listed: BTreeSet<u8>,
}

impl AntreaView {
    /// Takes a change. Returns whether it says anything new.
    pub fn apply(&mut self, change: AntreaChange) -> bool {
        let listed = &mut self.listed;
        match change {
            AntreaChange::Egresses(update) => put(&mut self.egresses, update, (listed, 0)),
            AntreaChange::Pools(update) => put(&mut self.pools, update, (listed, 1)),
            AntreaChange::Assignments(update) => put(&mut self.assignments, update, (listed, 2)),
        }
    }

    /// Notes addresses that have been written to the spec, until the watch shows them: no other Egress may get them.
    pub fn note_allocated(&mut self, name: &str, addresses: &[IpAddr]) {
        let Some(Ok(spec)) = self.egresses.get_mut(name).map(|stored| stored.object.spec.as_mut()) else { return };
        spec.addresses.iter_mut().zip(addresses).for_each(|(one, address)| one.address = Some(*address));
    }

    /// Whether every kind has been listed.
    pub fn is_whole(&self) -> bool {
        self.listed.len() == 3
    }

    pub fn inputs(&self) -> AntreaInputs {
        AntreaInputs {
            egresses: self.egresses.iter().map(|(name, one)| (name.clone(), one.object.clone())).collect(),
            pools: self.pools.iter().map(|(name, one)| (name.clone(), one.object.clone())).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use egress_core::model::view::Labels;

    fn stored(spec: Value) -> StoredEgress {
        let object =
            json!({"metadata": {"name": "a", "uid": "u", "creationTimestamp": "2024-01-01T00:00:10Z"}, "spec": spec});
        egress(&serde_json::from_value(object).expect("an object"))
    }

    #[test]
    fn an_egress_is_read_as_antrea_means_it() {
        let applied = |applied_to: Value| {
            let spec = stored(json!({"appliedTo": applied_to, "externalIPPool": "p"})).object.spec.expect("readable");
            spec.applied_to
        };
        let labels = |key: &str| Labels::from([(key.to_owned(), String::new())]);
        let by = |key: &str| json!({"matchLabels": {key: ""}});
        assert_eq!(applied(json!({})), None, "selects nothing");
        let pods = applied(json!({"podSelector": by("web")})).expect("selectors");
        assert!(pods.namespaces.matches(&Labels::new()) && pods.pods.matches(&labels("web")));
        let namespaces = applied(json!({"namespaceSelector": by("prod")})).expect("selectors");
        assert!(namespaces.pods.matches(&Labels::new()) && !namespaces.namespaces.matches(&Labels::new()));
        assert!(applied(json!({"podSelector": {}})).is_some_and(|all| all.pods.matches(&Labels::new())));

        let addresses = |spec: Value| stored(spec).object.spec.map(|spec| spec.addresses);
        let of = |address: Option<&str>, pool: Option<&str>| RequestedAddress {
            address: address.map(|text| text.parse().expect("a literal")),
            pool: pool.map(str::to_owned),
        };
        assert_eq!(addresses(json!({"egressIP": "", "externalIPPool": "p"})), Ok(vec![of(None, Some("p"))]));
        assert_eq!(addresses(json!({"egressIP": "10.0.0.8"})), Ok(vec![of(Some("10.0.0.8"), None)]));
        let plural = json!({"egressIPs": ["10.0.0.8"], "externalIPPools": ["p", "q"]});
        assert_eq!(addresses(plural), Ok(vec![of(Some("10.0.0.8"), Some("p")), of(None, Some("q"))]));
        for broken in [
            json!({}),
            json!({"egressIP": "x"}),
            json!({"egressIPs": ["10.0.0.8", "10.0.0.9"], "externalIPPools": ["p"]}),
        ] {
            assert!(addresses(broken.clone()).is_err(), "{broken}");
        }
    }

    #[test]
    fn a_bandwidth_is_read_in_bits() {
        let read = |bandwidth: Value| {
            let spec = json!({"appliedTo": {}, "externalIPPool": "p", "bandwidth": bandwidth});
            stored(spec).object.spec.map(|spec| spec.bandwidth)
        };
        assert_eq!(read(Value::Null), Ok(None));
        let limited = Bandwidth { rate: 800_000_000, burst: 2_000_000_000 };
        assert_eq!(read(json!({"rate": "800M", "burst": "2G"})), Ok(Some(limited)));
        let boundless = Bandwidth { rate: MOST_BITS, burst: MOST_BITS };
        assert_eq!(read(json!({"rate": "7E", "burst": "1e16"})), Ok(Some(boundless)));
        for broken in [
            json!({"rate": "800M"}),
            json!({"burst": "2G"}),
            json!({"rate": "0", "burst": "1M"}),
            json!({"rate": "fast", "burst": "1M"}),
            json!({"rate": 8, "burst": "1M"}),
        ] {
            assert!(read(broken.clone()).is_err_and(|why| why.starts_with("spec.bandwidth.")), "{broken}");
        }
    }

    #[test]
    fn the_oldest_egress_with_a_bandwidth_limits_those_that_share_the_address() {
        let egress = |bandwidth: Value| {
            stored(json!({"appliedTo": {"podSelector": {}}, "egressIP": "10.0.0.8", "bandwidth": bandwidth}))
        };
        let limited = |rate: &str| egress(json!({"rate": rate, "burst": "1M"}));
        let sharing = [("a", egress(Value::Null)), ("b", limited("1M")), ("c", limited("2M"))];
        let view = AntreaView {
            egresses: sharing.map(|(name, stored)| (name.to_owned(), stored)).into(),
            ..AntreaView::default()
        };
        let spec = |egresses: &[&str]| {
            let group = AddressGroup {
                addresses: vec!["10.0.0.8".parse().expect("a literal")],
                egresses: egresses.iter().map(|name| (*name).to_owned()).collect(),
                pools: BTreeSet::new(),
                vlans: BTreeSet::new(),
                is_of_hosts: true,
            };
            assignment_spec(&group, &view)
        };
        assert_eq!(spec(&["a", "b", "c"])["bandwidth"], json!({"rate": 1_000_000, "burst": 1_000_000}));
        assert_eq!(spec(&["c", "b"])["bandwidth"]["rate"], json!(2_000_000));
        assert!(spec(&["a"])["bandwidth"].is_null());
    }

    #[test]
    fn a_pool_is_read_with_its_subnet() {
        let read = |spec: Value| pool_request(&spec);
        let whole = json!({
            "ipRanges": [{"start": "10.10.0.2", "end": "10.10.0.10"}, {"cidr": "10.10.1.0/28"}],
            "subnetInfo": {"gateway": "10.10.0.1", "prefixLength": 16, "vlan": 7},
            "nodeSelector": {"matchLabels": {"network-role": "egress-gateway"}},
        });
        let spec = read(whole).expect("readable");
        assert_eq!((spec.total(), spec.subnet.map(|subnet| (subnet.prefix_length, subnet.vlan))), (23, Some((16, 7))));
        for broken in [
            json!({}),
            json!({"ipRanges": [{"start": "10.10.0.2"}]}),
            json!({"ipRanges": [{"start": "10.10.0.3", "end": "10.10.0.2"}]}),
            json!({"ipRanges": [{"cidr": "10.10.0.0"}]}),
            json!({"ipRanges": [], "subnetInfo": {"gateway": "10.10.0.1", "prefixLength": 16, "vlan": 4095}}),
        ] {
            assert!(read(broken.clone()).is_err(), "{broken}");
        }
    }

    #[test]
    fn what_was_written_is_not_free_before_the_watch_shows_it() {
        let mut view = AntreaView::default();
        for name in ["a", "b"] {
            view.egresses.insert(name.into(), stored(json!({"externalIPPool": "p"})));
        }
        let spec = json!({"ipRanges": [{"start": "10.0.0.8", "end": "10.0.0.9"}]});
        let object = json!({"metadata": {"name": "p"}, "spec": spec});
        view.pools.insert("p".into(), pool(&serde_json::from_value(object).expect("an object")));
        let [first, second] = ["10.0.0.8", "10.0.0.9"].map(|text| text.parse::<IpAddr>().expect("a literal"));
        assert_eq!(view.inputs().allocate().chosen["a"], [first]);
        view.note_allocated("b", &[first]);
        let found = view.inputs().allocate();
        assert_eq!((&found.egresses["b"], &found.chosen["a"]), (&Ok(vec![first]), &vec![second]));
    }

    #[test]
    fn an_assignment_has_a_rule_for_each_egress() {
        let web = json!({"appliedTo": {"podSelector": {"matchLabels": {"app": "web"}}}, "externalIPPool": "p"});
        let mut view = AntreaView::default();
        view.egresses.insert("a".into(), stored(web));
        view.egresses.insert("b".into(), stored(json!({"appliedTo": {}, "egressIP": "10.0.0.8"})));
        let nodes = json!({"matchLabels": {"network-role": "egress-gateway"}});
        let spec = json!({"ipRanges": [{"cidr": "10.0.0.0/24"}], "nodeSelector": nodes});
        let object = json!({"metadata": {"name": "p"}, "spec": spec});
        view.pools.insert("p".into(), pool(&serde_json::from_value(object).expect("an object")));
        let mut group = AddressGroup {
            addresses: vec!["10.0.0.8".parse().expect("a literal")],
            egresses: vec!["a".into(), "b".into()],
            pools: ["p".to_owned()].into(),
            vlans: [VlanNetwork { vlan: 7, gateway: "10.0.0.1/24".parse().expect("a literal") }].into(),
            is_of_hosts: false,
        };
        let spec = assignment_spec(&group, &view);
        assert_eq!((&spec["egressIPs"], &spec["nodeSelectors"]), (&json!(["10.0.0.8"]), &json!([nodes])));
        assert_eq!(spec["vlanNetworks"], json!([{"vlan": 7, "gateway": "10.0.0.1", "prefixLength": 24}]));
        let rule = json!({
            "from": {"kind": "Egress", "name": "a", "uid": "u", "created": 1_704_067_210},
            "selectors": [{"namespaces": {}, "pods": {"matchLabels": {"app": "web"}}}],
        });
        assert_eq!(spec["rules"][0], rule);
        assert_eq!(spec["rules"][1]["selectors"], json!([]), "it selects nothing");
        group.pools.clear();
        assert!(assignment_spec(&group, &view).get("nodeSelectors").is_none(), "all nodes");
        assert!(assignment_spec(&group, &view).get("addressesOf").is_none());
        group.is_of_hosts = true;
        assert_eq!(assignment_spec(&group, &view)["addressesOf"], "Host");
    }
}
