//! Neighbour states of the kernel (linux/neighbour.h).

use std::collections::BTreeMap;
use std::io;
use std::net::IpAddr;

use rtnetlink::packet_core::{NLM_F_DUMP, Parseable};
use rtnetlink::packet_route::RouteNetlinkMessage;
use rtnetlink::packet_route::neighbour::{NeighbourAddress, NeighbourAttribute, NeighbourMessage, NeighbourState};

use crate::netlink::{self, NETLINK_ROUTE};

/// By address; of an address on several devices, any one of them.
pub(super) fn all() -> io::Result<BTreeMap<IpAddr, &'static str>> {
    let all = RouteNetlinkMessage::GetNeighbour(NeighbourMessage::default());
    let listed = netlink::request(NETLINK_ROUTE, NLM_F_DUMP, all)?;
    Ok(listed.iter().filter_map(|content| neighbour(&NeighbourMessage::parse(content).ok()?)).collect())
}

fn neighbour(message: &NeighbourMessage) -> Option<(IpAddr, &'static str)> {
    let address = message.attributes.iter().find_map(|attribute| match attribute {
        NeighbourAttribute::Destination(NeighbourAddress::Inet(v4)) => Some(IpAddr::V4(*v4)),
        NeighbourAttribute::Destination(NeighbourAddress::Inet6(v6)) => Some(IpAddr::V6(*v6)),
        _ => None,
    })?;
    Some((address, shown(message.header.state)?))
}

/// `None` for states that do not tell whether the neighbour answers.
const fn shown(state: NeighbourState) -> Option<&'static str> {
    Some(match state {
        NeighbourState::Incomplete => "not answering yet",
        NeighbourState::Reachable => "reachable",
        NeighbourState::Stale => "stale",
        NeighbourState::Delay | NeighbourState::Probe => "being asked",
        NeighbourState::Failed => "failed",
        NeighbourState::Permanent => "permanent",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_neighbour_has_an_address_and_a_state() {
        let message = |state| {
            let mut message = NeighbourMessage::default();
            message.header.state = state;
            message.attributes.push(NeighbourAttribute::Destination(NeighbourAddress::Inet([172, 18, 0, 3].into())));
            message
        };
        let address = IpAddr::from([172, 18, 0, 3]);
        assert_eq!(neighbour(&message(NeighbourState::Reachable)), Some((address, "reachable")));
        assert_eq!(neighbour(&message(NeighbourState::Failed)), Some((address, "failed")));
        assert_eq!(neighbour(&message(NeighbourState::Noarp)), None);
        assert_eq!(neighbour(&NeighbourMessage::default()), None);
    }
}
