//! VLAN devices on the uplink, for networks of pools of addresses (`spec.subnetInfo` of an ExternalIPPool).
//!
//! - Name and alias say that a device is ours, and the alias what it is for: the gateways, with the length of their networks. So
//!   a start knows both without the API server, and `cleanup` finds it. The name alone may be that of an administrator's VLAN of
//!   an interface `egress`.
//! - It has no address of the node. Egress IPs in its networks are hosted as on any further interface, and leave by the gateway.
//!   The host's own traffic has no route by it.
//! - Devices of others are left alone. One of the same VLAN hosts the egress IPs if the node has an address of the network there.

use std::collections::{BTreeMap, BTreeSet};
use std::io;

use ipnet::IpNet;
use rtnetlink::packet_route::link::{InfoData, InfoKind, InfoVlan, LinkAttribute, LinkInfo, LinkMessage};
use rtnetlink::{Handle, LinkUnspec, LinkVlan};
use tracing::info;

use crate::devices::interfaces;
use crate::error::netlink_io;
use crate::names::VLAN_DEVICE;
use crate::netlink;
use egress_core::vlans::Vlans;

/// Why VLANs have no device.
pub type VlanProblems = BTreeMap<u16, String>;

/// The number of a VLAN device.
pub fn number(link: &LinkMessage) -> Option<u16> {
    let info = interfaces::link_info(link);
    if !info.contains(&LinkInfo::Kind(InfoKind::Vlan)) {
        return None;
    }
    info.iter().find_map(|info| match info {
        LinkInfo::Data(InfoData::Vlan(data)) => data.iter().find_map(|data| match data {
            InfoVlan::Id(number) => Some(*number),
            _ => None,
        }),
        _ => None,
    })
}

/// What aliases of our devices begin with.
const ALIAS: &str = "egress-agent";

/// The number of a VLAN device of ours.
fn own_number(link: &LinkMessage) -> Option<u16> {
    let is_ours = alias(link).is_some_and(|alias| alias.split(' ').next() == Some(ALIAS));
    number(link).filter(|number| is_ours && interfaces::name(link) == Some(&name(*number)))
}

/// The gateways of a VLAN device of ours, with the length of their networks; of other devices none.
pub fn gateways(link: &LinkMessage) -> BTreeSet<IpNet> {
    let alias = own_number(link).and_then(|_| alias(link));
    alias.unwrap_or_default().split(' ').skip(1).filter_map(|gateway| gateway.parse().ok()).collect()
}

fn name(vlan: u16) -> String {
    format!("{VLAN_DEVICE}{vlan}")
}

fn alias(link: &LinkMessage) -> Option<&str> {
    link.attributes.iter().find_map(|attribute| match attribute {
        LinkAttribute::IfAlias(alias) => Some(alias.as_str()),
        _ => None,
    })
}

fn listed(networks: &BTreeSet<IpNet>) -> String {
    networks.iter().map(IpNet::to_string).collect::<Vec<_>>().join(" ")
}

fn alias_of(gateways: &BTreeSet<IpNet>) -> String {
    format!("{ALIAS} {}", listed(gateways))
}

fn parent(link: &LinkMessage) -> Option<u32> {
    link.attributes.iter().find_map(|attribute| match attribute {
        LinkAttribute::Link(parent) => Some(*parent),
        _ => None,
    })
}

/// Makes these devices on the uplink, and removes those of ours that are not wanted, unless they are in use. Returns what could
/// not be done for a VLAN.
pub async fn ensure(
    netlink: &Handle,
    (uplink, wanted): (u32, &Vlans),
    in_use: &BTreeSet<u32>,
) -> io::Result<VlanProblems> {
    let links = netlink::dump(|| netlink.link().get().execute()).await?;
    let mut problems = VlanProblems::new();
    let mut there = BTreeMap::new();
    for link in &links {
        let Some(vlan) = own_number(link) else { continue };
        let index = link.header.index;
        if parent(link) == Some(uplink) && (wanted.contains_key(&vlan) || in_use.contains(&index)) {
            there.insert(vlan, link);
            continue;
        }
        match remove(netlink, index).await {
            Ok(()) => info!(device = name(vlan), "removed: no pool needs the VLAN on this node"),
            Err(error) => drop(problems.insert(vlan, format!("cannot remove {}: {error}", name(vlan)))),
        }
    }
    for (vlan, gateways) in wanted {
        let ensured = match there.get(vlan) {
            Some(link) => configure(netlink, link, gateways).await,
            None => make(netlink, uplink, (*vlan, gateways)).await,
        };
        if let Err(error) = ensured {
            let of_others = links.iter().find(|link| number(link) == Some(*vlan) && parent(link) == Some(uplink));
            problems.insert(*vlan, problem(&error, of_others.and_then(interfaces::name), gateways));
        }
    }
    Ok(problems)
}

fn problem(error: &io::Error, of_others: Option<&str>, gateways: &BTreeSet<IpNet>) -> String {
    match (error.raw_os_error(), of_others) {
        (Some(libc::EOPNOTSUPP), _) => "this kernel has no VLAN devices (the module 8021q)".to_owned(),
        (Some(libc::EEXIST), Some(device)) => {
            let networks = gateways.iter().map(IpNet::trunc).collect();
            format!(
                "{device} has it: it can host egress IPs once the node has an address there in {}",
                listed(&networks)
            )
        }
        _ => error.to_string(),
    }
}

/// Down, until it says what it is for. One without an alias that is down is of a run that ended in between.
async fn make(netlink: &Handle, uplink: u32, (vlan, gateways): (u16, &BTreeSet<IpNet>)) -> io::Result<()> {
    let message = LinkVlan::new(&name(vlan), uplink, vlan).build();
    let made = netlink.link().add(message).execute().await.map_err(netlink_io);
    let found = interfaces::link(netlink, &name(vlan)).await?;
    let is_unfinished = |link: &LinkMessage| {
        number(link) == Some(vlan) && parent(link) == Some(uplink) && alias(link).is_none() && !interfaces::is_up(link)
    };
    match (made, found) {
        (Ok(()), Some(link)) => configure(netlink, &link, gateways).await?,
        (Err(error), Some(link)) if error.raw_os_error() == Some(libc::EEXIST) && is_unfinished(&link) => {
            configure(netlink, &link, gateways).await?;
        }
        (Ok(()), None) => return Err(io::Error::from_raw_os_error(libc::ENODEV)),
        (Err(error), _) => return Err(error),
    }
    info!(device = name(vlan), gateways = listed(gateways), "made for addresses of pools");
    Ok(())
}

async fn configure(netlink: &Handle, link: &LinkMessage, gateways: &BTreeSet<IpNet>) -> io::Result<()> {
    let wanted = alias_of(gateways);
    if alias(link) == Some(&wanted) && interfaces::is_up(link) {
        return Ok(());
    }
    let named = LinkUnspec::new_with_index(link.header.index).append_extra_attribute(LinkAttribute::IfAlias(wanted));
    netlink.link().set(named.build()).execute().await.map_err(netlink_io)?;
    let up = LinkUnspec::new_with_index(link.header.index).up().build();
    match netlink.link().set(up).execute().await.map_err(netlink_io) {
        // The kernel brings it up with the uplink.
        Err(error) if error.raw_os_error() == Some(libc::ENETDOWN) => Ok(()),
        outcome => outcome,
    }
}

async fn remove(netlink: &Handle, index: u32) -> io::Result<()> {
    match netlink.link().del(index).execute().await.map_err(netlink_io) {
        Err(error) if error.raw_os_error() != Some(libc::ENODEV) => Err(error),
        _ => Ok(()),
    }
}

/// Removes all of them. Returns whether there was one.
pub async fn remove_all(netlink: &Handle) -> io::Result<bool> {
    let links = netlink::dump(|| netlink.link().get().execute()).await?;
    let ours: Vec<u32> = links.iter().filter(|link| own_number(link).is_some()).map(|link| link.header.index).collect();
    for index in &ours {
        remove(netlink, *index).await?;
    }
    Ok(!ours.is_empty())
}
