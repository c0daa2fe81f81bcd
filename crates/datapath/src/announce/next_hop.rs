//! Uplink health: presence, carrier and reachable next hops.
//!
//! Checked four times a second while this node may host egress IPs. A next hop is the gateway of the default route on the
//! uplink, per address family. It gets a solicitation by unicast, or by broadcast after a miss. Any claim of its address
//! counts as an answer. After three misses in a row it counts as lost.
//!
//! The gateways of further egress interfaces are asked in the same way. Such an interface cannot send while no gateway of a
//! family answers, and for a second after that, so that a flapping gateway moves its egress IPs once.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::IpAddr;
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
use crate::devices::interfaces::{self, FurtherNextHops, Interface, InterfaceGateways};
use crate::devices::records;
use egress_core::model::node::Mac;
use egress_core::node_health::fitness::UplinkState;

const INTERVAL: Duration = Duration::from_millis(250);
const MISSES: u32 = 3;
/// How long a further interface cannot send after the last loss of its next hop.
const DAMPING: Duration = Duration::from_secs(1);
/// Number of checks between two route lookups.
const ROUTES_EVERY: u32 = 4;

/// Checks until `stop`; publishes the uplink's state and the time of the last answer.
pub async fn watch_uplink(
    host: &Host,
    is_egress_node: watch::Receiver<bool>,
    (seen, answered): (watch::Sender<UplinkState>, watch::Sender<Option<std::time::Instant>>),
    stop: CancellationToken,
) {
    let mut hops = Hops::default();
    let mut look = Instant::now();
    while !stop.is_cancelled() {
        look += INTERVAL;
        let may_host = *is_egress_node.borrow();
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

/// Checks the gateways of further interfaces until `stop`.
pub async fn watch_further(further: &FurtherNextHops, is_egress_node: watch::Receiver<bool>, stop: CancellationToken) {
    let mut interfaces = BTreeMap::<u32, FurtherHops>::new();
    let mut look = Instant::now();
    while !stop.is_cancelled() {
        look += INTERVAL;
        let may_host = *is_egress_node.borrow();
        let asked = if may_host { further.asked.borrow().clone() } else { Vec::new() };
        interfaces.retain(|index, _| asked.iter().any(|one| one.index == *index));
        for one in &asked {
            interfaces.entry(one.index).or_default().follow(one);
        }
        let of_all = interfaces.values_mut().flat_map(|one| one.hops.iter_mut().map(|hop| hop.ask(one.mac, look)));
        futures::future::join_all(of_all).await;
        let lost = interfaces.iter_mut().filter_map(|(index, one)| one.is_lost().then_some(*index));
        let lost: BTreeSet<u32> = lost.collect();
        further.lost.send_if_modified(|known| std::mem::replace(known, lost.clone()) != lost);
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep_until(look) => {}
        }
        look = look.max(Instant::now());
    }
}

/// The gateways of a further interface.
#[derive(Default)]
struct FurtherHops {
    mac: Mac,
    hops: Vec<Hop>,
    lost: Option<Instant>,
}

impl FurtherHops {
    /// Keeps the state of unchanged gateways.
    fn follow(&mut self, asked: &InterfaceGateways) {
        let (mac, index) = (asked.mac, asked.index);
        if std::mem::replace(&mut self.mac, mac) != mac {
            self.hops.clear();
        }
        self.hops.retain(|hop| asked.asked.contains(&(hop.address, hop.own)));
        for (address, own) in &asked.asked {
            if self.hops.iter().any(|hop| (hop.address, hop.own) == (*address, *own)) {
                continue;
            }
            match Hop::new(index, *address, *own) {
                Ok(hop) => self.hops.push(hop),
                Err(error) => debug!(%error, gateway = %address, "cannot ask the gateway"),
            }
        }
    }

    /// Whether no gateway of a family answers, or did not until a moment ago.
    fn is_lost(&mut self) -> bool {
        let is_lost = |v4: bool| {
            let mut of_family = self.hops.iter().filter(|hop| hop.address.is_ipv4() == v4).peekable();
            of_family.peek().is_some() && of_family.all(|hop| hop.unanswered >= MISSES)
        };
        if is_lost(true) || is_lost(false) {
            self.lost = Some(Instant::now());
        }
        self.lost.is_some_and(|lost| lost.elapsed() < DAMPING)
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
                None => Hop::new(interface.index, address, own)?,
            });
        }
        self.hops = hops;
        Ok(())
    }
}

impl Hop {
    fn new(ifindex: u32, address: IpAddr, own: IpAddr) -> io::Result<Self> {
        let socket = PacketSocket::listener_of(ifindex, address)?;
        Ok(Self { address, own, mac: None, socket, unanswered: 0, answered: None })
    }

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
