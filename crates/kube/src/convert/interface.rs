//! Egress interfaces: from the agent's records to its EgressNode object, and back.

use std::net::IpAddr;

use egress_core::model::interface::{
    EgressInterface, InterfaceReason, InterfaceState, MOST_DESTINATIONS, MOST_INTERFACE_NETWORKS,
};
use egress_core::model::node::mac_text;
use ipnet::IpNet;

use crate::convert::node::{link_address, one};
use crate::crd::{InterfaceNetwork, NodeInterface};

/// One of each family.
const MOST_FIRST_ADDRESSES: usize = 2;

const ABSENT: &str = "Absent";
const ATTACHED: &str = "Attached";
const USABLE: &str = "Usable";

/// A record as it is published.
pub fn published(record: &EgressInterface) -> NodeInterface {
    let (state, reason) = match &record.state {
        InterfaceState::Absent(reason) => (ABSENT, Some(reason)),
        InterfaceState::Attached(reason) => (ATTACHED, Some(reason)),
        InterfaceState::Usable => (USABLE, None),
    };
    let word = |reason: &InterfaceReason| reason.code().to_owned();
    let networks = record.networks.iter().map(|(network, excluded)| InterfaceNetwork {
        network: network.to_string(),
        excluded: excluded.as_ref().map(word),
    });
    NodeInterface {
        name: record.name.clone(),
        index: record.index,
        mac: mac_text(record.mac),
        mtu: record.mtu,
        uplink: record.is_uplink,
        vlan: record.vlan,
        addresses: record.addresses.iter().map(IpAddr::to_string).collect(),
        networks: networks.collect(),
        destinations: record.destinations.iter().map(IpNet::to_string).collect(),
        state: state.to_owned(),
        reason: reason.map(word),
    }
}

/// The record of a published interface; `None` if its state or link address is unreadable. Unreadable networks are left out.
pub(super) fn record(published: NodeInterface, problems: &mut Vec<String>) -> Option<EgressInterface> {
    let NodeInterface { name, index, mac, mtu, uplink, vlan, addresses, networks, destinations, state, reason } =
        published;
    let reason = InterfaceReason::from(reason.as_deref().unwrap_or_default());
    let state = match state.as_str() {
        ABSENT => InterfaceState::Absent(reason),
        ATTACHED => InterfaceState::Attached(reason),
        USABLE => InterfaceState::Usable,
        other => {
            problems.push(format!("EgressNode: interface {name:?}: {other:?} is no state"));
            return None;
        }
    };
    let mac = link_address(&mac, problems)?;
    let network = |InterfaceNetwork { network, excluded }: InterfaceNetwork| {
        let network: IpNet = one(&network, problems)?;
        Some((network.trunc(), excluded.as_deref().map(InterfaceReason::from)))
    };
    let networks = networks.into_iter().take(MOST_INTERFACE_NETWORKS).filter_map(network).collect();
    let destinations = destinations.iter().take(MOST_DESTINATIONS);
    let destinations = destinations.filter_map(|text| one::<IpNet>(text, problems)).map(|net| net.trunc()).collect();
    let addresses = addresses.iter().take(MOST_FIRST_ADDRESSES).filter_map(|text| one(text, problems)).collect();
    Some(EgressInterface { index, name, mac, mtu, is_uplink: uplink, vlan, addresses, networks, destinations, state })
}

#[cfg(test)]
mod tests {
    use super::*;
    use egress_core::model::samples::{interface, ip, net};

    #[test]
    fn a_record_is_read_as_it_is_published() {
        let networks = [(net("10.10.10.0/24"), None), (net("fd00:10::/64"), Some(InterfaceReason::Temporary))].into();
        let destinations = [net("10.20.0.0/16"), net("::/0")].into();
        let addresses = vec![ip("10.10.10.2"), ip("fd00:10::2")];
        let one = EgressInterface { addresses, networks, destinations, ..interface("eth1", &[]) };
        let newer = InterfaceReason::Other("OfANewerAgent".into());
        for state in [
            InterfaceState::Absent(InterfaceReason::NotAttached),
            InterfaceState::Attached(newer),
            InterfaceState::Usable,
        ] {
            for is_uplink in [true, false] {
                let vlan = (!is_uplink).then_some(7);
                let one = EgressInterface { state: state.clone(), is_uplink, vlan, ..one.clone() };
                let mut problems = Vec::new();
                assert_eq!(record(published(&one), &mut problems), Some(one));
                assert_eq!(problems, [""; 0]);
            }
        }
    }

    #[test]
    fn what_cannot_be_read_is_a_problem_and_left_out() {
        let good = published(&interface("eth1", &["10.10.10.0/24", "fd00:10::/64"]));
        let read = |change: &dyn Fn(&mut NodeInterface)| {
            let (mut broken, mut problems) = (good.clone(), Vec::new());
            change(&mut broken);
            (record(broken, &mut problems), problems.len())
        };
        assert_eq!(read(&|one| one.state = "usable".into()), (None, 1));
        assert_eq!(read(&|one| one.mac = "02:00".into()), (None, 1));
        let other = read(&|one| one.networks[0].network = "10.10.10.0/33".into());
        assert_eq!(other, (Some(interface("eth1", &["fd00:10::/64"])), 1));
    }
}
