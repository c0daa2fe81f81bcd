//! Converts between the model and map entries. Pure.
//!
//! Reading back yields what was written, so that observe after apply shows no difference. An entry of unknown kind is left
//! out, so that the plan writes it again if needed.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use aya::maps::lpm_trie::Key;
use egress_common::abi;
use ipnet::IpNet;

use egress_core::model::state::{
    ClassPolicies, EgressId, HandoverState, NodeAddress, Place, PodClass, PodOwner, PodPort, PodState, Policy, Prefix,
    SharedWith, Slot, TunnelEndpoint,
};

use crate::devices::interfaces::Interface;

/// Bits before an IPv4 address in a v4-mapped one.
const MAPPED_BITS: u8 = 96;

/// Entry of a pod after `before`. A pod already selected by this policy keeps its selection time; a deselected pod is sent
/// resets for its connections until `cut_until_ns`.
pub fn pod_entry(state: PodState, before: Option<&abi::PodEntry>, now_ns: u64, cut_until_ns: u64) -> abi::PodEntry {
    let entry = match state {
        PodState::Known => {
            let cut_until_ns = match before {
                Some(before) if before.is_selected() => cut_until_ns,
                Some(before) => before.cut_until_ns,
                None => 0,
            };
            abi::PodEntry::known().with_cut_until(cut_until_ns)
        }
        PodState::Selected(id) => {
            let same = before.filter(|before| before.class().is_none() && before.egress_id() == Some(id.0));
            abi::PodEntry::selected(id.0, same.map_or(now_ns, |before| before.selected_since_ns))
        }
        PodState::ByDestination(class) => {
            let same = before.filter(|before| before.class() == Some(class.0));
            abi::PodEntry::by_destination(class.0, same.map_or(now_ns, |before| before.selected_since_ns))
        }
    };
    entry.with_owner(before.map_or(0, |before| before.owner))
}

pub fn pod_owner(entry: &abi::PodEntry) -> Option<PodOwner> {
    (entry.owner != 0).then_some(PodOwner(entry.owner))
}

pub fn pod_state(entry: &abi::PodEntry) -> PodState {
    match (entry.class(), entry.egress_id()) {
        (Some(class), _) => PodState::ByDestination(PodClass(class)),
        (None, Some(id)) => PodState::Selected(EgressId(id)),
        (None, None) => PodState::Known,
    }
}

/// The entries of `classes` for a class.
pub fn class_entries(policies: &ClassPolicies) -> BTreeMap<IpNet, abi::ClassPolicy> {
    let value = |id: &Option<EgressId>| id.map_or(abi::ClassPolicy::NONE, |id| abi::ClassPolicy::new(id.0));
    policies.entries().map(|(net, id)| (*net, value(id))).collect()
}

/// All classes, by the entries of `classes`.
pub fn classes(sets: BTreeMap<u32, BTreeMap<IpNet, abi::ClassPolicy>>) -> BTreeMap<PodClass, Arc<ClassPolicies>> {
    let policies = |entries: BTreeMap<IpNet, abi::ClassPolicy>| {
        ClassPolicies::new(entries.into_iter().map(|(net, value)| (net, value.egress_id().map(EgressId))).collect())
    };
    sets.into_iter().map(|(class, entries)| (PodClass(class), Arc::new(policies(entries)))).collect()
}

/// `None` when there are more slots than a value holds.
pub fn policy_value(policy: &Policy) -> Option<abi::PolicyEntry> {
    let slots: Vec<_> = policy
        .slots
        .iter()
        .map(|slot| match slot.place {
            Place::Here => abi::PolicySlot::here(slot.address.into()),
            Place::Remote(node) => abi::PolicySlot::remote(slot.address.into(), node.0.into()),
        })
        .collect();
    let pending: Vec<_> = policy.pending.iter().copied().map(abi::Addr::from).collect();
    let entry = abi::PolicyEntry::with_slots(policy.when_empty, &slots)?.with_pending(&pending)?;
    Some(entry.with_limit(policy.limit))
}

/// The entries of `destinations` for a policy; `None` when there are more slots than a value holds.
pub fn candidates(policy: &Policy) -> Option<BTreeMap<IpNet, abi::Candidates>> {
    let index = |number: usize| u8::try_from(number).ok();
    let served = policy.slots.len();
    let entry = |(net, addresses): (&IpNet, &BTreeSet<IpAddr>)| {
        let (mut here, mut waiting) = (Vec::new(), Vec::new());
        for (number, _) in policy.addresses().enumerate().filter(|(_, address)| addresses.contains(address)) {
            if number < served { here.push(index(number)?) } else { waiting.push(index(number)?) }
        }
        Some((*net, abi::Candidates::new(&here, &waiting)?))
    };
    policy.destinations.iter().map(entry).collect()
}

/// The policy with the destinations of its set.
pub fn with_candidates(policy: Policy, candidates: &BTreeMap<IpNet, abi::Candidates>) -> Policy {
    let all: Vec<IpAddr> = policy.addresses().collect();
    let address = |index: u8| all.get(usize::from(index)).copied();
    let entry = |(net, one): (&IpNet, &abi::Candidates)| (*net, one.all().filter_map(address).collect());
    let destinations = candidates.iter().map(entry).collect();
    Policy { destinations, ..policy }
}

/// Without its destinations.
pub fn policy(value: &abi::PolicyEntry) -> Policy {
    let slots = value.slots.iter().take(value.count() as usize).map(|slot| Slot {
        address: slot.address.to_ip(),
        place: match slot.place() {
            abi::SlotPlace::Here => Place::Here,
            abi::SlotPlace::Remote => Place::Remote(TunnelEndpoint(slot.endpoint.to_ip())),
        },
    });
    let pending = value.slots.iter().skip(value.count() as usize).take(value.pending() as usize);
    let pending = pending.map(|slot| slot.address.to_ip()).collect();
    Policy { limit: value.limit, ..Policy::new(slots.collect(), pending, value.when_empty()) }
}

pub fn exposed_port(address: IpAddr, port: PodPort) -> abi::ExposedPort {
    abi::ExposedPort::new(address.into(), port.protocol, port.number)
}

pub fn node_entry(node: NodeAddress) -> abi::NodeEntry {
    let place = if node.own { abi::NodePlace::Own } else { abi::NodePlace::Other };
    abi::NodeEntry::new(place, node.node.0.into())
}

pub fn node(entry: &abi::NodeEntry) -> NodeAddress {
    NodeAddress { own: entry.place() == abi::NodePlace::Own, node: TunnelEndpoint(entry.node.to_ip()) }
}

pub fn cluster_key(net: &IpNet) -> Key<abi::Addr> {
    let net = net.trunc();
    let shift = if net.addr().is_ipv4() { MAPPED_BITS } else { 0 };
    Key::new(u32::from(net.prefix_len() + shift), net.addr().into())
}

/// Key of `routes`.
pub fn route_key(ifindex: u32, net: &IpNet) -> Key<abi::RouteDestination> {
    let key = cluster_key(net);
    Key::new(key.prefix_len() + u32::BITS, abi::RouteDestination { ifindex, to: key.data() })
}

/// Key of `destinations` and `classes`.
pub fn destination_key(set: u32, net: &IpNet) -> Key<abi::PolicyDestination> {
    let key = cluster_key(net);
    Key::new(key.prefix_len() + u32::BITS, abi::PolicyDestination { set, to: key.data() })
}

/// `None` for a key that this version would not write.
pub fn destination_net(key: &Key<abi::PolicyDestination>) -> Option<IpNet> {
    cluster_net(&Key::new(key.prefix_len().checked_sub(u32::BITS)?, key.data().to))
}

/// `None` for a key that this version would not write.
pub fn cluster_net(key: &Key<abi::Addr>) -> Option<IpNet> {
    let ip = key.data().to_ip();
    let bits = u8::try_from(key.prefix_len()).ok()?;
    let bits = if ip.is_ipv4() { bits.checked_sub(MAPPED_BITS)? } else { bits };
    IpNet::new(ip, bits).ok()
}

pub fn prefix_value(prefix: Prefix) -> abi::ClusterPrefix {
    abi::ClusterPrefix::new(prefix.kind, prefix.node.map_or(abi::Addr::UNSPECIFIED, |node| node.0.into()))
}

/// `None` for a kind that this version does not know.
pub fn prefix(value: &abi::ClusterPrefix) -> Option<Prefix> {
    let node = (value.node != abi::Addr::UNSPECIFIED).then(|| TunnelEndpoint(value.node.to_ip()));
    Some(Prefix { kind: value.kind()?, node })
}

/// Whether addresses of the prefix are pods'.
pub fn holds_pods(prefix: Prefix) -> bool {
    matches!(prefix.kind, abi::PrefixKind::PodSubnet | abi::PrefixKind::PodNetwork)
}

/// The entry of an owned address on this interface; `shared_with` as in `KernelState::shared`.
pub fn owned(id: EgressId, address: IpAddr, interface: Interface, shared_with: Option<SharedWith>) -> abi::Owned {
    let Interface { index, mac, mtu } = interface;
    let owned = abi::Owned::new(id.0, address.into(), index, mac, mtu);
    match shared_with {
        None => owned,
        Some(SharedWith::Service) => owned.shared(id.0),
        Some(SharedWith::Host) => owned.hosts(id.0),
    }
}

/// What else an owned address is used for.
pub const fn shared_with(entry: &abi::Owned) -> Option<SharedWith> {
    match (entry.is_shared(), entry.is_hosts()) {
        (_, true) => Some(SharedWith::Host),
        (true, false) => Some(SharedWith::Service),
        (false, false) => None,
    }
}

/// The interface of an owned address, as it was when the entry was written.
pub const fn interface_of(entry: &abi::Owned) -> Interface {
    Interface { index: entry.ifindex, mac: entry.mac, mtu: entry.mtu }
}

/// `None` for a stage that this version does not know.
pub fn handover(entry: &abi::HandoverEntry) -> Option<HandoverState> {
    let peer = TunnelEndpoint(entry.peer.to_ip());
    let (address, shared_with) = (entry.owned.address.to_ip(), shared_with(&entry.owned));
    Some(HandoverState { stage: entry.stage()?, address, peer, shared_with })
}

#[cfg(test)]
mod tests {
    use super::*;
    use egress_core::model::state::WhenEmpty;

    fn endpoint(text: &str) -> TunnelEndpoint {
        TunnelEndpoint(text.parse().expect("a literal"))
    }

    #[test]
    fn what_is_written_is_read_back() {
        for state in [PodState::Known, PodState::Selected(EgressId(7))] {
            for owner in [None, Some(PodOwner::of("a pod"))] {
                let before = abi::PodEntry::known().with_owner(owner.map_or(0, |owner| owner.0));
                let entry = pod_entry(state, Some(&before), 5, 9);
                assert_eq!((pod_state(&entry), pod_owner(&entry)), (state, owner));
            }
        }
        for own in [true, false] {
            let address = NodeAddress { own, node: endpoint("fd00::1") };
            assert_eq!(node(&node_entry(address)), address);
        }
        let slots = vec![
            Slot { address: "172.18.0.100".parse().expect("a literal"), place: Place::Here },
            Slot { address: "172.18.0.101".parse().expect("a literal"), place: Place::Remote(endpoint("172.18.0.2")) },
        ];
        for when_empty in [WhenEmpty::Drop, WhenEmpty::NodeAddress, WhenEmpty::NotListed] {
            for slots in [vec![], slots.clone()] {
                for pending in [vec![], vec!["172.18.0.9".parse().expect("a literal")]] {
                    for limit in [abi::BandwidthLimit::NONE, abi::BandwidthLimit::new(10_000_000, 1_000_000)] {
                        let wanted = Policy { limit, ..Policy::new(slots.clone(), pending.clone(), when_empty) };
                        assert_eq!(policy(&policy_value(&wanted).expect("three slots fit")), wanted);
                    }
                }
            }
        }
    }

    #[test]
    fn destinations_round_trip() {
        let ip = |text: &str| text.parse::<IpAddr>().expect("a literal");
        let net = |text: &str| text.parse::<IpNet>().expect("a literal");
        let slots = ["172.18.0.100", "10.10.10.100"].map(|one| Slot { address: ip(one), place: Place::Here });
        let [a, b, c] = ["172.18.0.100", "10.10.10.100", "10.10.10.101"].map(ip);
        let destinations = [
            (net("0.0.0.0/0"), [a].into()),
            (net("10.10.10.0/24"), [b, c].into()),
            (net("10.20.0.0/16"), [c].into()),
            (net("10.30.0.0/16"), BTreeSet::new()),
        ];
        let mixed = Policy { destinations: destinations.into(), ..Policy::new(slots.into(), vec![c], WhenEmpty::Drop) };
        let entries = candidates(&mixed).expect("few");
        let counts: Vec<_> = entries.values().map(|entry| (entry.count(), entry.all().collect::<Vec<_>>())).collect();
        assert_eq!(counts, [(1, vec![0]), (1, vec![1, 2]), (0, vec![2]), (0, vec![])]);
        assert_eq!(with_candidates(policy(&policy_value(&mixed).expect("few")), &entries), mixed);
        for net in mixed.destinations.keys() {
            assert_eq!(destination_net(&destination_key(7, net)), Some(*net));
        }
    }

    #[test]
    fn too_many_slots_are_refused() {
        let slot = Slot { address: "172.18.0.100".parse().expect("a literal"), place: Place::Here };
        let with = |slots, pending| Policy::new(vec![slot; slots], vec![slot.address; pending], WhenEmpty::Drop);
        assert!(policy_value(&with(abi::MAX_SLOTS, 0)).is_some());
        for (slots, pending) in [(abi::MAX_SLOTS + 1, 0), (abi::MAX_SLOTS, 1), (0, abi::MAX_SLOTS + 1)] {
            assert!(policy_value(&with(slots, pending)).is_none(), "{slots} {pending}");
        }
    }

    #[test]
    fn a_deselected_pod_is_reset_until_its_connections_expire() {
        let (now, until) = (1_000, 5_000);
        let (known, selected) = (PodState::Known, PodState::Selected(EgressId(7)));
        let fresh = pod_entry(known, None, now, until);
        assert_eq!(fresh.cut_until_ns, 0, "it has no connections of ours");
        let chosen = pod_entry(selected, Some(&fresh), now, until);
        assert_eq!((chosen.cut_until_ns, chosen.selected_since_ns), (0, now));
        assert_eq!(pod_entry(selected, Some(&chosen), now + 1, until).selected_since_ns, now);
        let other = pod_entry(PodState::Selected(EgressId(8)), Some(&chosen), now + 1, until);
        assert_eq!(other.selected_since_ns, now + 1);
        let left = pod_entry(known, Some(&chosen), now, until);
        assert_eq!(left.cut_until_ns, until);
        assert_eq!(pod_entry(known, Some(&left), now, until + 99).cut_until_ns, until, "written again");
        assert_eq!(pod_entry(selected, Some(&left), now, until).cut_until_ns, 0);
    }

    #[test]
    fn prefixes_of_both_families_round_trip() {
        for text in ["10.244.0.0/16", "0.0.0.0/0", "172.18.0.2/32", "fd00:10::/64", "::/0", "fd98::1/128"] {
            let net: IpNet = text.parse().expect("a literal");
            assert_eq!(cluster_net(&cluster_key(&net)), Some(net), "{text}");
        }
        for node in [None, Some(endpoint("172.18.0.3"))] {
            let wanted = Prefix { kind: abi::PrefixKind::PodSubnet, node };
            assert_eq!(prefix(&prefix_value(wanted)), Some(wanted));
        }
    }

    #[test]
    fn host_bits_of_a_prefix_do_not_reach_the_map() {
        let sloppy: IpNet = "10.244.1.7/24".parse().expect("a literal");
        assert_eq!(cluster_net(&cluster_key(&sloppy)), Some(sloppy.trunc()));
    }
}
