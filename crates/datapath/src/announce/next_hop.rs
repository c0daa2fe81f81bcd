//! Uplink health: presence, carrier and reachable next hops.
//!
//! Checked four times a second while this node may host egress IPs. A next hop is the gateway of the default route on the
//! uplink, per address family. It gets a solicitation by unicast, or by broadcast after a miss. Any claim of its address
//! counts as an answer. After three misses in a row it counts as lost.

use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use rtnetlink::Handle;
use tokio::io::unix::AsyncFd;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::debug;

use crate::announce::ProbeAnswers;
use crate::announce::frames;
use crate::announce::socket::PacketSocket;
use crate::devices::host::{Host, next_hop};
use crate::devices::interfaces::{self, Interface};
use crate::devices::records;
use egress_core::model::node::{Mac, Node};
use egress_core::node_health::fitness::UplinkState;

const INTERVAL: Duration = Duration::from_millis(250);
const MISSES: u32 = 3;
/// Number of checks between two route lookups.
const ROUTES_EVERY: u32 = 4;

/// Checks until `stop`; publishes the uplink's state and the time of the last answer.
pub async fn watch_uplink(
    host: &Host,
    own_node: watch::Receiver<Option<Arc<Node>>>,
    (seen, answered): (watch::Sender<UplinkState>, watch::Sender<Option<std::time::Instant>>),
    stop: CancellationToken,
) {
    let mut hops = Hops::default();
    let mut look = Instant::now();
    while !stop.is_cancelled() {
        look += INTERVAL;
        let may_host = own_node.borrow().as_ref().is_some_and(|node| node.assignable);
        if !may_host {
            hops = Hops::default();
        }
        let now = if may_host { hops.look(host, look).await } else { Ok(UplinkState::Works) };
        let now = now.unwrap_or_else(|error| {
            // A failed check does not count as a fault.
            debug!(%error, "cannot look at the uplink");
            UplinkState::Works
        });
        let latest = hops.hops.iter().filter_map(|hop| hop.answered).max();
        answered.send_if_modified(|known| std::mem::replace(known, latest) != latest);
        seen.send_if_modified(|known| {
            let is_news = *known != now;
            *known = now;
            is_news
        });
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep_until(look) => {}
        }
        // No burst after a pause: each check leaves time for the answer.
        look = look.max(Instant::now());
    }
}

/// The checked next hops.
#[derive(Default)]
struct Hops {
    hops: Vec<Hop>,
    interface: Option<Interface>,
    looks: u32,
}

struct Hop {
    address: IpAddr,
    /// This node's own address, the source of solicitations.
    own: IpAddr,
    mac: Option<Mac>,
    socket: AsyncFd<PacketSocket>,
    unanswered: u32,
    answered: Option<std::time::Instant>,
}

impl Hops {
    /// One check until the deadline.
    async fn look(&mut self, host: &Host, end: Instant) -> io::Result<UplinkState> {
        let Some(link) = interfaces::link(&host.netlink, &host.uplink).await? else {
            *self = Self::default();
            return Ok(UplinkState::Missing(host.uplink.clone()));
        };
        if !interfaces::has_carrier(&link) {
            *self = Self::default();
            return Ok(UplinkState::NoCarrier(host.uplink.clone()));
        }
        let interface = interfaces::from_message(&link);
        if self.looks.is_multiple_of(ROUTES_EVERY) || self.interface != Some(interface) {
            self.follow(&host.netlink, interface).await?;
        }
        self.looks = self.looks.wrapping_add(1);
        futures::future::join_all(self.hops.iter_mut().map(|hop| hop.ask(interface.mac, end))).await;
        let lost: Vec<IpAddr> =
            self.hops.iter().filter(|hop| hop.unanswered >= MISSES).map(|hop| hop.address).collect();
        Ok(if lost.is_empty() { UplinkState::Works } else { UplinkState::NextHopLost(lost) })
    }

    /// Keeps the state of unchanged next hops.
    async fn follow(&mut self, netlink: &Handle, interface: Interface) -> io::Result<()> {
        if self.interface.replace(interface) != Some(interface) {
            self.hops.clear();
        }
        let addresses = records::addresses(netlink).await?;
        let (v4, v6) = interfaces::primary_addresses(&addresses, interface.index);
        let mut hops = Vec::new();
        for own in v4.map(IpAddr::V4).into_iter().chain(v6.map(IpAddr::V6)) {
            let Some(address) = next_hop(netlink, interface.index, own).await else { continue };
            let known = self.hops.iter().position(|hop| (hop.address, hop.own) == (address, own));
            hops.push(match known {
                Some(place) => self.hops.swap_remove(place),
                None => {
                    let socket = PacketSocket::listener_of(interface.index, address)?;
                    Hop { address, own, mac: None, socket, unanswered: 0, answered: None }
                }
            });
        }
        self.hops = hops;
        Ok(())
    }
}

impl Hop {
    /// Solicits, and reads answers until the deadline.
    async fn ask(&mut self, mac: Mac, end: Instant) {
        let to = self.mac.filter(|_| self.unanswered == 0);
        if let Err(error) = self.socket.get_ref().send(&frames::solicitation(mac, self.own, self.address, to)) {
            debug!(%error, hop = %self.address, "cannot ask the next hop");
        }
        self.unanswered = self.unanswered.saturating_add(1);
        let mut answers = ProbeAnswers::until(end, &self.socket);
        while let Some(Ok((frame, length))) = answers.next().await {
            let answer = frames::claimant(frame.get(..length).unwrap_or_default(), mac);
            if let Some(answer) = answer.filter(|answer| answer.address == self.address) {
                (self.mac, self.unanswered) = (Some(answer.mac), 0);
                self.answered = Some(std::time::Instant::now());
            }
        }
    }
}
