//! The VXLAN device in external mode, for packets that the programs do not encapsulate or decapsulate themselves.
//!
//! One device serves both families: in external mode the kernel opens an IPv4 and an IPv6 socket on the port, and every
//! packet brings its own tunnel metadata. IPv6 underlay packets may come without a UDP checksum (RFC 6935), as the
//! programs of a sender that encapsulates by itself write them.
//!
//! It is created down and brought up after its program is attached: without the program, the stack would forward
//! decapsulated packets with any source.
//!
//! The device carries no addresses and no routes: no link-local address, no learning, no source check of its own (a
//! packet that is left to the stack here, because its TTL ran out, came from another node's pod subnet).

pub mod endpoints;
pub mod probe;

use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket};

use rtnetlink::packet_core::{DefaultNla, Emitable};
use rtnetlink::packet_route::link::{
    AfSpecInet6, AfSpecUnspec, In6AddrGenMode, InfoData, InfoKind, InfoVxlan, LinkAttribute, LinkInfo, LinkMessage,
};
use rtnetlink::{Handle, LinkMessageBuilder, LinkUnspec, LinkVxlan};
use tracing::{info, warn};

use crate::devices::interfaces::{self, Interface};
use crate::error::{StartError, netlink_io};
use crate::names::{OVERLAY_DEVICE, OVERLAY_MAC};

/// Maximum MTU of VXLAN devices: the programs check the real path MTU.
const MTU: u32 = 65535;

/// Adopts the device if it has the right properties; otherwise replaces it, down. If the port is taken, the device is
/// unchanged.
pub async fn ensure(netlink: &Handle, port: u16) -> Result<Interface, StartError> {
    let wrap =
        |what: &'static str| move |error: io::Error| StartError::kernel(format!("{what} {OVERLAY_DEVICE}"), error);
    let found = interfaces::link(netlink, OVERLAY_DEVICE).await.map_err(wrap("look for"))?;
    if !found.as_ref().is_some_and(|link| has_shape(link, port)) {
        // The device's own socket is no conflict.
        if !found.as_ref().is_some_and(|link| has_port(link, port)) {
            require_free(port)?;
        }
        if let Some(link) = found {
            info!(device = OVERLAY_DEVICE, "replaced: it was of another shape");
            netlink.link().del(link.header.index).execute().await.map_err(netlink_io).map_err(wrap("delete"))?;
        }
        create(netlink, port).await?;
    }
    let made = interfaces::interface(netlink, OVERLAY_DEVICE).await.map_err(wrap("look for"))?;
    let interface = made.ok_or_else(|| wrap("look for")(io::Error::from_raw_os_error(libc::ENODEV)))?;
    configure(netlink, interface.index).await.map_err(wrap("set up"))?;
    Ok(interface)
}

/// Brings it up, after its program is attached.
pub async fn bring_up(netlink: &Handle, index: u32, port: u16) -> Result<(), StartError> {
    let up = LinkUnspec::new_with_index(index).up().build();
    let Err(error) = netlink.link().set(up).execute().await.map_err(netlink_io) else { return Ok(()) };
    let failed = |what: &str, error| StartError::kernel(format!("{what} {OVERLAY_DEVICE}"), error);
    if error.raw_os_error() != Some(libc::EADDRINUSE) {
        return Err(failed("bring up", error));
    }
    // The port was taken since the check.
    remove(netlink).await.map_err(|error| failed("delete", error))?;
    Err(StartError::TunnelPortTaken { port })
}

/// Checks the port first, because the device opens its sockets only when it is brought up, after its predecessor was
/// removed.
fn require_free(port: u16) -> Result<(), StartError> {
    // One family after the other: sockets of both at once would conflict.
    let any = [IpAddr::from(Ipv4Addr::UNSPECIFIED), Ipv6Addr::UNSPECIFIED.into()];
    let is_taken = |address: &IpAddr| {
        UdpSocket::bind((*address, port)).is_err_and(|error| error.raw_os_error() == Some(libc::EADDRINUSE))
    };
    if any.iter().any(is_taken) { Err(StartError::TunnelPortTaken { port }) } else { Ok(()) }
}

/// Deletes the device; `false` where there was none.
pub async fn remove(netlink: &Handle) -> io::Result<bool> {
    let Some(link) = interfaces::link(netlink, OVERLAY_DEVICE).await? else { return Ok(false) };
    if !is_vxlan(&link) {
        return Ok(false);
    }
    match netlink.link().del(link.header.index).execute().await.map_err(netlink_io) {
        Err(error) if error.raw_os_error() != Some(libc::ENODEV) => Err(error),
        _ => Ok(true),
    }
}

async fn create(netlink: &Handle, port: u16) -> Result<(), StartError> {
    let message = LinkMessageBuilder::<LinkVxlan>::new(OVERLAY_DEVICE)
        .append_info_data(InfoVxlan::CollectMetadata(true))
        .append_info_data(InfoVxlan::Learning(false))
        .append_info_data(InfoVxlan::UDPZeroCsumRX(true))
        .port(port)
        .address(OVERLAY_MAC.to_vec())
        .mtu(MTU)
        .build();
    netlink.link().add(message).execute().await.map_err(netlink_io).map_err(|error| match error.raw_os_error() {
        // Another device in external mode has the port.
        Some(libc::EEXIST | libc::EADDRINUSE) => StartError::TunnelPortTaken { port },
        Some(libc::EOPNOTSUPP) => {
            StartError::MissingFeatures { missing: "VXLAN devices (the module vxlan)".to_owned() }
        }
        _ => StartError::kernel(format!("make {OVERLAY_DEVICE}"), error),
    })
}

/// Also for an adopted device, which other software may have changed.
async fn configure(netlink: &Handle, index: u32) -> io::Result<()> {
    let no_address = AfSpecUnspec::Inet6(vec![AfSpecInet6::AddrGenMode(In6AddrGenMode::None)]);
    let quiet =
        LinkUnspec::new_with_index(index).append_extra_attribute(LinkAttribute::AfSpecUnspec(vec![no_address])).build();
    if let Err(error) = netlink.link().set(quiet).execute().await.map_err(netlink_io) {
        // A kernel without IPv6 creates no address either.
        warn!(%error, device = OVERLAY_DEVICE, "cannot keep the kernel from giving it a link-local address");
    }
    if let Err(error) = loosen_source_check(netlink, index).await {
        warn!(%error, device = OVERLAY_DEVICE, "cannot relax rp_filter");
    }
    let sized = LinkUnspec::new_with_index(index).mtu(MTU).build();
    netlink.link().set(sized).execute().await.map_err(netlink_io)
}

/// The kernel takes the larger of the device's value and that of `all`; 1 is strict, 2 is loose, 0 is off. By netlink: a
/// container has `/proc/sys` for reading.
async fn loosen_source_check(netlink: &Handle, index: u32) -> io::Result<()> {
    let all = fs::read_to_string("/proc/sys/net/ipv4/conf/all/rp_filter").unwrap_or_default();
    let value: u32 = if all.trim() == "0" { 0 } else { 2 };
    let setting = DefaultNla::new(RP_FILTER, value.to_ne_bytes().to_vec());
    let settings = DefaultNla::new(INET_CONF, emitted(&setting));
    let inet = DefaultNla::new(AF_INET, emitted(&settings));
    let attribute = LinkAttribute::Other(DefaultNla::new(AF_SPEC, emitted(&inet)));
    let message = LinkUnspec::new_with_index(index).append_extra_attribute(attribute).build();
    netlink.link().set(message).execute().await.map_err(netlink_io)
}

/// `IFLA_AF_SPEC` of `AF_INET` with one of `IFLA_INET_CONF`. Built by hand: the library has the form that the kernel
/// reports (one table), but the kernel accepts single settings (linux/if_link.h, linux/ip.h).
const AF_SPEC: u16 = 26;
const AF_INET: u16 = 2;
const INET_CONF: u16 = 1;
const RP_FILTER: u16 = 8;

fn emitted(attribute: &DefaultNla) -> Vec<u8> {
    let mut bytes = vec![0; attribute.buffer_len()];
    attribute.emit(&mut bytes);
    bytes
}

fn vxlan_info(link: &LinkMessage) -> Option<&[InfoVxlan]> {
    link.attributes.iter().find_map(|attribute| {
        let LinkAttribute::LinkInfo(infos) = attribute else { return None };
        infos.iter().find_map(|info| match info {
            LinkInfo::Data(InfoData::Vxlan(data)) => Some(data.as_slice()),
            _ => None,
        })
    })
}

fn is_vxlan(link: &LinkMessage) -> bool {
    link.attributes.iter().any(|attribute| match attribute {
        LinkAttribute::LinkInfo(infos) => infos.contains(&LinkInfo::Kind(InfoKind::Vxlan)),
        _ => false,
    })
}

fn has_port(link: &LinkMessage, port: u16) -> bool {
    vxlan_info(link).is_some_and(|data| data.contains(&InfoVxlan::Port(port)))
}

fn has_shape(link: &LinkMessage, port: u16) -> bool {
    let Some(data) = vxlan_info(link) else { return false };
    let mac = link.attributes.iter().any(|a| matches!(a, LinkAttribute::Address(mac) if mac.as_slice() == OVERLAY_MAC));
    let wanted = [
        InfoVxlan::CollectMetadata(true),
        InfoVxlan::Learning(false),
        InfoVxlan::UDPZeroCsumRX(true),
        InfoVxlan::Port(port),
    ];
    mac && wanted.iter().all(|attribute| data.contains(attribute))
}
