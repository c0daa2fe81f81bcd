//! Holding an egress IP on the network: probe before the first claim, hear solicitations, announce.
//!
//! The program on the uplink answers for an address from the moment its map entry is there. Around that:
//!
//! 1. **Probe** ([`probe`]): three probes within 300 ms. RFC 5227 asks for up to seven seconds, which is made for hosts
//!    that come up together; here one controller hands out addresses, and an outage lasts as long as the probe. Somebody
//!    who answers later is met by the announcements.
//! 2. **Join** (IPv6): membership of the solicited-node group, and its link address in the device's filter. A NIC or
//!    macvlan that filters multicast would otherwise never show the solicitation to the program. The membership ends
//!    with this process, the filter does not.
//! 3. The map entries, by the executor.
//! 4. **Announce**: at once and after 1, 2, 4 and 8 seconds, so that one lost frame does not leave a neighbour behind.
//! 5. **Defend**: somebody who answers for the address after that, such as a node whose agent is dead (see `contest`), is
//!    told of, and met by another announcement every ten seconds (RFC 5227 2.4), until it is silent.
//!
//! Giving up goes the other way round.

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, Ipv6Addr, UdpSocket};
use std::time::Duration;

use nix::net::if_::if_indextoname;
use tokio::sync::mpsc::UnboundedSender;
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep, timeout_at};
use tracing::{debug, warn};

use super::frames::{self, Mac, multicast_mac, solicited_node};
use super::interfaces::Interface;
use super::packet::{self, PacketSocket};

const PROBES: u32 = 3;
const PROBE_INTERVAL: Duration = Duration::from_millis(100);
/// Seconds between announcements: at 0, 1, 2, 4 and 8 seconds.
const ANNOUNCE_PAUSES: [u64; 5] = [0, 1, 1, 2, 4];
/// RFC 5227's `DEFEND_INTERVAL`.
const DEFEND_INTERVAL: Duration = Duration::from_secs(10);
/// Longer than any message that we look at.
const FRAME: usize = 128;

/// Asks the network whether somebody has the address; the link address of one who does.
pub(super) async fn probe(uplink: Interface, address: IpAddr) -> io::Result<Option<Mac>> {
    probe_for(uplink, address, |_| true).await
}

/// Likewise, but listens on until one answers who is meant.
pub(super) async fn probe_for(
    uplink: Interface,
    address: IpAddr,
    is_meant: impl Fn(Mac) -> bool,
) -> io::Result<Option<Mac>> {
    // To hear others who probe for it too. A device without IPv6 has none of them.
    let _membership = match address {
        IpAddr::V6(address) => packet::join(solicited_node(address), uplink.index).ok(),
        IpAddr::V4(_) => None,
    };
    let socket = PacketSocket::listener(uplink.index, address)?;
    let frame = frames::probe(uplink.mac, address);
    for _ in 0..PROBES {
        socket.get_ref().send(&frame)?;
        let until = Instant::now() + PROBE_INTERVAL;
        while let Ok(heard) = timeout_at(until, receive(&socket)).await {
            let (buffer, length) = heard?;
            let claimant = frames::claimant(buffer.get(..length).unwrap_or_default(), address, uplink.mac);
            if claimant.is_some_and(&is_meant) {
                return Ok(claimant);
            }
        }
    }
    Ok(None)
}

pub(super) async fn receive(socket: &tokio::io::unix::AsyncFd<PacketSocket>) -> io::Result<([u8; FRAME], usize)> {
    loop {
        let mut ready = socket.readable().await?;
        let mut buffer = [0; FRAME];
        match ready.try_io(|socket| socket.get_ref().receive(&mut buffer)) {
            Ok(received) => return received.map(|length| (buffer, length)),
            Err(_would_block) => {}
        }
    }
}

/// The addresses that this agent holds. What it keeps for each ends when it is dropped.
#[derive(Debug, Default)]
pub(super) struct Claims {
    held: BTreeMap<IpAddr, Held>,
    heard: Option<UnboundedSender<Claimant>>,
}

/// Somebody else who answers for an address that is held.
pub(super) type Claimant = (IpAddr, Mac);

#[derive(Debug, Default)]
struct Held {
    _membership: Option<UdpSocket>,
    announcing: Option<AbortHandle>,
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Some(task) = &self.announcing {
            task.abort();
        }
    }
}

impl Claims {
    /// Who is told of others that answer.
    pub(super) fn report_to(&mut self, heard: UnboundedSender<Claimant>) {
        self.heard = Some(heard);
    }

    /// Hears solicitations for the address from now on. Again for an address that is held: on a device made anew.
    pub(super) fn join(&mut self, uplink_name: &str, uplink: Interface, address: IpAddr) {
        let held = self.held.entry(address).or_default();
        let IpAddr::V6(address) = address else { return };
        let group = solicited_node(address);
        // A device that is down takes no members; the filter is what matters then, and it comes up with an event.
        held._membership = match packet::join(group, uplink.index) {
            Ok(socket) => Some(socket),
            Err(error) => {
                warn!(%error, %group, "cannot join the group of an egress IP");
                None
            }
        };
        if let Err(error) = packet::add_filter(uplink_name, multicast_mac(group)) {
            warn!(%error, %group, "cannot add the group of an egress IP to the uplink's filter");
        }
    }

    /// Announces everything that is held: the uplink has a carrier again, perhaps on another switch.
    pub(super) fn announce_all(&mut self, uplink: Interface) {
        let addresses: Vec<_> = self.held.keys().copied().collect();
        addresses.into_iter().for_each(|address| self.announce(uplink, address));
    }

    /// Announces the address, starting now. Must be called in a runtime.
    pub(super) fn announce(&mut self, uplink: Interface, address: IpAddr) {
        let held = self.held.entry(address).or_default();
        if let Some(task) = held.announcing.take() {
            task.abort();
        }
        held.announcing = Some(tokio::spawn(announce(uplink, address, self.heard.clone())).abort_handle());
    }

    pub(super) fn leave(&mut self, uplink_name: &str, address: IpAddr) {
        self.held.remove(&address);
        if let IpAddr::V6(address) = address {
            // Two addresses with the same last three bytes share a group.
            let group = solicited_node(address);
            if !self.v6().any(|other| solicited_node(other) == group) {
                remove_filter(uplink_name, group);
            }
        }
    }

    fn v6(&self) -> impl Iterator<Item = Ipv6Addr> {
        self.held.keys().filter_map(|address| match address {
            IpAddr::V6(address) => Some(*address),
            IpAddr::V4(_) => None,
        })
    }
}

/// Takes the group's link address out of the device's filter.
pub(super) fn remove_filter(device: &str, group: Ipv6Addr) {
    if let Err(error) = packet::remove_filter(device, multicast_mac(group)) {
        warn!(%error, %group, "cannot remove the group of an egress IP from the filter of {device}");
    }
}

/// Likewise, for an address that was announced on another device than now; a device that is gone has no filter.
pub(super) fn remove_filter_at(ifindex: u32, address: IpAddr) {
    if let (IpAddr::V6(address), Ok(device)) = (address, if_indextoname(ifindex)) {
        remove_filter(&device.to_string_lossy(), solicited_node(address));
    }
}

async fn announce(uplink: Interface, address: IpAddr, heard: Option<UnboundedSender<Claimant>>) {
    let frame = frames::announcement(uplink.mac, address);
    // A new socket each time: the device may have been away.
    let send = || {
        let sent = PacketSocket::sender(uplink.index).and_then(|socket| socket.send(&frame));
        if let Err(error) = sent {
            debug!(%error, %address, "cannot announce an egress IP");
        }
    };
    for pause in ANNOUNCE_PAUSES {
        sleep(Duration::from_secs(pause)).await;
        send();
    }
    while let Ok(Some(mac)) = probe(uplink, address).await {
        debug!(%address, mac = ?mac, "somebody else answers for an egress IP of this node: announced again");
        // Refused only when the data plane is being dropped.
        let _ends = heard.as_ref().map(|heard| heard.send((address, mac)));
        send();
        sleep(DEFEND_INTERVAL).await;
    }
}
