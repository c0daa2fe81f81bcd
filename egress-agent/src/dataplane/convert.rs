//! Between the model's words and the bytes of the maps. Pure.
//!
//! Reading back yields what was written, so that observe after apply shows no difference. An entry that this version
//! cannot read (its kind is unknown) is left out: the difference then writes it anew where it is wanted.

use std::net::IpAddr;

use aya::maps::lpm_trie::Key;
use egress_common::abi;
use ipnet::IpNet;

use crate::model::state::{
    EgressId, NodeAddress, Place, PodOwner, PodState, Policy, Prefix, Slot, TunnelEndpoint, WhenEmpty,
};

/// Bits before an IPv4 address in a v4-mapped one.
const MAPPED_BITS: u8 = 96;

pub(super) fn pod_entry(state: PodState, since_ns: u64, owner: Option<PodOwner>) -> abi::PodEntry {
    let entry = match state {
        PodState::Known => abi::PodEntry::known(),
        PodState::Selected(id) => abi::PodEntry::selected(id.0, since_ns),
    };
    entry.with_owner(owner.map_or(0, |owner| owner.0))
}

pub(super) fn pod_owner(entry: &abi::PodEntry) -> Option<PodOwner> {
    (entry.owner != 0).then_some(PodOwner(entry.owner))
}

pub(super) fn pod_state(entry: &abi::PodEntry) -> PodState {
    entry.egress_id().map_or(PodState::Known, |id| PodState::Selected(EgressId(id)))
}

/// `None` when there are more slots than a value holds.
pub(super) fn policy_value(policy: &Policy) -> Option<abi::Policy> {
    let slots: Vec<_> = policy
        .slots
        .iter()
        .map(|slot| match slot.place {
            Place::Here => abi::Slot::here(slot.address.into()),
            Place::Remote(node) => abi::Slot::remote(slot.address.into(), node.0.into()),
        })
        .collect();
    let when_empty = match policy.when_empty {
        WhenEmpty::Drop => abi::WhenEmpty::Drop,
        WhenEmpty::NodeAddress => abi::WhenEmpty::NodeAddress,
        WhenEmpty::NotListed => abi::WhenEmpty::NotListed,
    };
    abi::Policy::with_slots(when_empty, &slots)
}

pub(super) fn policy(value: &abi::Policy) -> Policy {
    let slots = value.slots.iter().take(value.count() as usize).map(|slot| Slot {
        address: slot.address.to_ip(),
        place: match slot.place() {
            abi::SlotPlace::Here => Place::Here,
            abi::SlotPlace::Remote => Place::Remote(TunnelEndpoint(slot.endpoint.to_ip())),
        },
    });
    let when_empty = match value.when_empty() {
        abi::WhenEmpty::Drop => WhenEmpty::Drop,
        abi::WhenEmpty::NodeAddress => WhenEmpty::NodeAddress,
        abi::WhenEmpty::NotListed => WhenEmpty::NotListed,
    };
    Policy { slots: slots.collect(), when_empty }
}

pub(super) fn node_entry(node: NodeAddress) -> abi::NodeEntry {
    let place = if node.own { abi::NodePlace::Own } else { abi::NodePlace::Other };
    abi::NodeEntry::new(place, node.node.0.into())
}

pub(super) fn node(entry: &abi::NodeEntry) -> NodeAddress {
    NodeAddress { own: entry.place() == abi::NodePlace::Own, node: TunnelEndpoint(entry.node.to_ip()) }
}

pub(super) fn cluster_key(net: &IpNet) -> Key<abi::Addr> {
    let net = net.trunc();
    let shift = if net.addr().is_ipv4() { MAPPED_BITS } else { 0 };
    Key::new(u32::from(net.prefix_len() + shift), net.addr().into())
}

/// `None` for a key that this version would not write.
pub(super) fn cluster_net(key: &Key<abi::Addr>) -> Option<IpNet> {
    let ip = key.data().to_ip();
    let bits = u8::try_from(key.prefix_len()).ok()?;
    let bits = if ip.is_ipv4() { bits.checked_sub(MAPPED_BITS)? } else { bits };
    IpNet::new(ip, bits).ok()
}

pub(super) fn prefix_value(prefix: Prefix) -> abi::ClusterPrefix {
    abi::ClusterPrefix::new(prefix.kind, prefix.node.map_or(abi::Addr::UNSPECIFIED, |node| node.0.into()))
}

/// `None` for a kind that this version does not know.
pub(super) fn prefix(value: &abi::ClusterPrefix) -> Option<Prefix> {
    let node = (value.node != abi::Addr::UNSPECIFIED).then(|| TunnelEndpoint(value.node.to_ip()));
    Some(Prefix { kind: value.kind()?, node })
}

/// Whether addresses of the prefix are pods'.
pub(super) fn holds_pods(prefix: Prefix) -> bool {
    matches!(prefix.kind, abi::PrefixKind::PodSubnet | abi::PrefixKind::PodNetwork)
}

/// What an owned entry says beside the address: where it is announced.
pub(super) fn owned_pair(id: EgressId, address: IpAddr, ifindex: u32, mac: [u8; 6]) -> (abi::Owned, abi::OwnedAddr) {
    (
        abi::Owned::new(id.0, address.into(), ifindex, mac),
        abi::OwnedAddr { egress_id: id.0, ifindex, mac, reserved: [0; 2] },
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn endpoint(text: &str) -> TunnelEndpoint {
        TunnelEndpoint(text.parse().expect("a literal"))
    }

    #[test]
    fn what_is_written_is_read_back() {
        for state in [PodState::Known, PodState::Selected(EgressId(7))] {
            for owner in [None, Some(PodOwner::of("a pod"))] {
                let entry = pod_entry(state, 5, owner);
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
                let wanted = Policy { slots, when_empty };
                assert_eq!(policy(&policy_value(&wanted).expect("two slots fit")), wanted);
            }
        }
    }

    #[test]
    fn too_many_slots_are_refused() {
        let slot = Slot { address: "172.18.0.100".parse().expect("a literal"), place: Place::Here };
        let wanted = Policy { slots: vec![slot; abi::MAX_SLOTS + 1], when_empty: WhenEmpty::Drop };
        assert!(policy_value(&wanted).is_none());
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
