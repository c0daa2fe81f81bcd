//! Report of a node's kernel state: devices, programs, map usage, and the programs' view of egress policies and gateways.
//! The same from a running agent and from the pins.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use egress_core::display_names::Names;
use egress_core::model::state::{EgressId, KernelState, Place};

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kernel {
    /// Remaining seconds of the lease, zero after expiry; absent without an end.
    #[serde(default)]
    pub lease_seconds: Option<u64>,
    pub interfaces: Vec<InterfaceReport>,
    pub programs: Vec<Program>,
    pub maps: Vec<Fill>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct InterfaceReport {
    pub role: String,
    /// Absent without such a device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    pub index: u32,
    /// Largest packet (bytes, from the IP header on); inside, for the overlay.
    pub mtu: u32,
    pub up: bool,
    pub carrier: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Program {
    pub name: String,
    /// Where it is attached; absent if it is not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub interface: Option<String>,
    /// `tcx` or `clsact`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attached: Option<String>,
    /// Since when the hook has had our program; unknown for filters.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub since: Option<String>,
    /// The kernel's hash of its instructions.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tag: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fill {
    pub map: String,
    pub entries: u64,
    pub limit: u32,
}

impl Fill {
    pub fn percent(&self) -> u64 {
        self.entries * 100 / u64::from(self.limit.max(1))
    }
}

/// An egress policy that selects pods of this node, or has an address here.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PolicyReport {
    pub egress_id: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Addresses of the selected pods of this node.
    pub pod_addresses: usize,
    /// The selected pods of this node; unknown if one of the addresses has no name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pods: Option<usize>,
    pub egress_ips: Vec<Served>,
    /// What its pods together may send by each gateway.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<LimitReport>,
}

/// A bandwidth limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LimitReport {
    pub bits_per_second: u64,
    /// How long it takes to send the burst at this rate.
    pub burst_ms: u32,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Served {
    pub address: IpAddr,
    /// `here`, a node, or `nowhere now`.
    pub at: String,
}

/// A gateway of this node's pods.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gateway {
    pub endpoint: IpAddr,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// Egress IPs of policies that select pods here.
    pub egress_ips: usize,
    /// The node's condition in Kubernetes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ready: Option<bool>,
    /// The leader's view, if notable: unresponsive or drained.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub leader_says: Option<String>,
    /// The kernel's neighbour state, if the node is a neighbour: `reachable`, `stale`, `failed`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub neighbour: Option<String>,
}

/// Egress policies and gateways from the maps.
pub fn concerning(state: &KernelState, names: &Names) -> (Vec<PolicyReport>, Vec<Gateway>) {
    let mut selected: BTreeMap<EgressId, Vec<IpAddr>> = BTreeMap::new();
    for pod in state.pods.keys() {
        state.policies_of(*pod).ids().into_iter().for_each(|id| selected.entry(id).or_default().push(*pod));
    }
    let mut objects: BTreeMap<EgressId, PolicyReport> = BTreeMap::new();
    let mut gateways: BTreeMap<IpAddr, BTreeSet<IpAddr>> = BTreeMap::new();
    let of_node = |place: &Place| matches!(place, Place::Here);
    for ((id, _), policy) in &state.policy {
        let pods = selected.get(id).map_or(&[][..], Vec::as_slice);
        let pod_addresses = pods.len();
        let is_here = policy.slots.iter().any(|slot| of_node(&slot.place));
        if pod_addresses == 0 && !is_here && !objects.contains_key(id) {
            continue;
        }
        let object = objects.entry(*id).or_insert_with(|| PolicyReport {
            egress_id: id.0,
            name: names.objects.get(&id.0).cloned(),
            pod_addresses,
            pods: names.pods_of(pods.iter().copied()),
            egress_ips: Vec::new(),
            limit: (!policy.limit.is_none()).then(|| LimitReport {
                bits_per_second: u64::from(policy.limit.kilobits_per_second()) * 1_000,
                burst_ms: policy.limit.burst_us() / 1_000,
            }),
        });
        for slot in &policy.slots {
            let at = match slot.place {
                Place::Here => "here".to_owned(),
                Place::Remote(node) => {
                    if pod_addresses > 0 {
                        gateways.entry(node.0).or_default().insert(slot.address);
                    }
                    names.nodes.get(&node.0).cloned().unwrap_or_else(|| node.0.to_string())
                }
            };
            object.egress_ips.push(Served { address: slot.address, at });
        }
        let pending = policy.pending.iter().map(|address| Served { address: *address, at: "nowhere now".to_owned() });
        object.egress_ips.extend(pending);
    }
    let gateways = gateways.into_iter().map(|(endpoint, addresses)| Gateway {
        endpoint,
        node: names.nodes.get(&endpoint).cloned(),
        egress_ips: addresses.len(),
        ready: None,
        leader_says: None,
        neighbour: None,
    });
    (objects.into_values().collect(), gateways.collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use egress_core::model::state::{
        BandwidthLimit, ClassPolicies, Family, PodClass, PodState, Policy, Slot, TunnelEndpoint, WhenEmpty,
    };

    #[test]
    fn objects_that_concern_the_node_are_those_with_pods_or_addresses_here() {
        let ip = |text: &str| text.parse::<IpAddr>().expect("a literal");
        let far = TunnelEndpoint(ip("172.18.0.3"));
        let policy = |slots: &[(&str, Place)]| {
            let slots = slots.iter().map(|(address, place)| Slot { address: ip(address), place: *place });
            let limit = BandwidthLimit::new(10_000_000, 2_000_000);
            Policy { limit, ..Policy::new(slots.collect(), [ip("172.18.0.109")].into(), WhenEmpty::Drop) }
        };
        let policies = BTreeMap::from([
            ((EgressId(1), Family::V4), policy(&[("172.18.0.100", Place::Remote(far))])),
            ((EgressId(2), Family::V4), policy(&[("172.18.0.101", Place::Here)])),
            ((EgressId(3), Family::V4), policy(&[("172.18.0.102", Place::Remote(far))])),
        ]);
        let names = Names {
            objects: [(1, "first".to_owned())].into(),
            nodes: [(far.0, "node2".to_owned())].into(),
            pods: [1, 3].map(|last| (IpAddr::from([10, 244, 1, last]), "red/one".to_owned())).into(),
            ..Names::default()
        };
        let to = |net: &str, id| (net.parse().expect("a prefix"), Some(EgressId(id)));
        let class = ClassPolicies::new([to("0.0.0.0/0", 1), to("198.51.100.0/24", 2)].into());
        let pods = [PodState::Selected(EgressId(1)), PodState::ByDestination(PodClass(1)), PodState::Known];
        let pods = pods.into_iter().zip(1..).map(|(pod, last)| (IpAddr::from([10, 244, 1, last]), pod)).collect();
        let classes = [(PodClass(1), class.into())].into();
        let state = KernelState { pods, classes, policy: policies, ..KernelState::default() };
        let (objects, gateways) = concerning(&state, &names);
        let seen: Vec<_> = objects.iter().map(|one| (one.egress_id, one.pod_addresses, one.name.as_deref())).collect();
        assert_eq!(seen, [(1, 2, Some("first")), (2, 1, None)]);
        assert_eq!([objects[0].pods, objects[1].pods], [None, None], "an address has no name");
        let pods = [1, 2].map(|last| (IpAddr::from([10, 244, 1, last]), "red/one".to_owned())).into();
        let (objects, _) = concerning(&state, &Names { pods, ..names });
        assert_eq!([objects[0].pods, objects[1].pods], [Some(1), Some(1)], "a pod with two addresses is one");
        let places: Vec<_> = objects[0].egress_ips.iter().map(|one| one.at.as_str()).collect();
        assert_eq!(places, ["node2", "nowhere now"]);
        assert_eq!(objects[0].limit, Some(LimitReport { bits_per_second: 10_000_000, burst_ms: 200 }));
        let [gateway] = gateways.as_slice() else { panic!("{gateways:?}") };
        assert_eq!(
            (gateway.node.as_deref(), gateway.egress_ips),
            (Some("node2"), 1),
            "the third object's is not used here"
        );
    }
}
