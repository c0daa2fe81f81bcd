//! Announce: holds an egress IP on the network by probe, announcement and conflict detection.
//!
//! 1. **Probe** ([`probe`]): three probes within 300 ms instead of the seven seconds of RFC 5227, because an outage lasts
//!    as long as the probe.
//! 2. **Join** (IPv6): the solicited-node group and its link address in the device's filter, which outlives this process.
//!    The executor then writes the map entries.
//! 3. **Announce**: after 0, 1, 2, 4 and 8 seconds, against lost frames, and one more probe for hosts that never announce.
//! 4. **Defend**: an announcement answers the first claim of another host within ten seconds (`events`), and a probe
//!    follows; one more announcement answers further claims. The address is never given up (RFC 5227 section 2.4 (c)).

pub mod frames;
pub mod next_hop;
pub mod socket;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::{IpAddr, Ipv6Addr, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::io::unix::AsyncFd;
use tokio::sync::mpsc::UnboundedSender;
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep, timeout_at};
use tracing::{debug, warn};

use crate::announce::frames::{multicast_mac, solicited_node};
use crate::announce::socket::PacketSocket;
use crate::devices::interfaces::Interface;
use crate::maps::lease;
use egress_core::model::lease::SharedLease;
use egress_core::model::node::{Mac, mac_text};
use egress_core::plan::executor::AddressClaim;
use egress_supervise::blocking;

const PROBES: u32 = 3;
const PROBE_INTERVAL: Duration = Duration::from_millis(100);
/// Broadcasts per batch.
const PROBED_AT_ONCE: usize = 256;
/// Seconds between announcements: at 0, 1, 2, 4 and 8 seconds.
const ANNOUNCE_PAUSES: [u64; 5] = [0, 1, 1, 2, 4];
/// RFC 5227's `DEFEND_INTERVAL`.
const DEFEND_INTERVAL: Duration = Duration::from_secs(10);
/// From the last announcement to the probe.
const ANSWERS_TAKE: Duration = Duration::from_secs(1);
/// Longer than any valid message.
const FRAME: usize = 256;
/// Frames that are still read after the deadline: the capacity of a socket buffer.
const MOST_LATE: usize = 4096;

/// Probes for these addresses; returns those that another host has, with its link address.
///
/// With one socket per family for any number of addresses: with one socket per address, each of them would receive the
/// probes of all nodes.
pub async fn probe(interface: Interface, addresses: &[IpAddr]) -> io::Result<BTreeMap<IpAddr, Mac>> {
    let mut claimed = BTreeMap::new();
    for some in addresses.chunks(PROBED_AT_ONCE) {
        let (v4, v6) = some.iter().partition::<BTreeSet<IpAddr>, _>(|address| address.is_ipv4());
        let (v4, v6) = futures::try_join!(probe_family(interface, v4), probe_family(interface, v6))?;
        claimed.extend(v4.into_iter().chain(v6));
    }
    Ok(claimed)
}

/// The same for one family.
async fn probe_family(interface: Interface, mut unclaimed: BTreeSet<IpAddr>) -> io::Result<BTreeMap<IpAddr, Mac>> {
    let mut claimed = BTreeMap::new();
    let Some(first) = unclaimed.first() else { return Ok(claimed) };
    let is_ipv4 = first.is_ipv4();
    // To receive probes of other hosts too. A device without IPv6 has no such groups.
    let join = |address: &IpAddr| match address {
        IpAddr::V6(address) => socket::join(solicited_node(*address), interface.index).ok(),
        IpAddr::V4(_) => None,
    };
    let memberships: Vec<UdpSocket> = blocking(|| unclaimed.iter().filter_map(join).collect());
    let socket = PacketSocket::listener(interface.index, is_ipv4)?;
    for _ in 0..PROBES {
        for address in &unclaimed {
            socket.get_ref().send(&frames::probe(interface.mac, *address))?;
        }
        let until = Instant::now() + PROBE_INTERVAL;
        let mut heard = ProbeAnswers::until(until, &socket);
        while !unclaimed.is_empty()
            && let Some(frame) = heard.next().await
        {
            let (buffer, length) = frame?;
            let claimant = frames::claimant(buffer.get(..length).unwrap_or_default(), interface.mac);
            if let Some(AddressClaim { address, mac }) = claimant
                && unclaimed.remove(&address)
            {
                claimed.insert(address, mac);
            }
        }
    }
    blocking(|| drop((socket, memberships)));
    Ok(claimed)
}

/// The start of a frame, and its length.
pub type AnnouncementFrame = ([u8; FRAME], usize);

/// Frames until a deadline. A plain timeout checks its clock only when there is nothing to read, and a socket that always
/// has data would block other tasks of this thread.
pub struct ProbeAnswers<'a> {
    socket: &'a AsyncFd<PacketSocket>,
    until: Instant,
    late: usize,
}

impl<'a> ProbeAnswers<'a> {
    pub const fn until(until: Instant, socket: &'a AsyncFd<PacketSocket>) -> Self {
        Self { socket, until, late: 0 }
    }

    pub async fn next(&mut self) -> Option<io::Result<AnnouncementFrame>> {
        // Frames in the buffer at the deadline have arrived in time.
        if Instant::now() >= self.until {
            self.late += 1;
        }
        if self.late > MOST_LATE {
            return None;
        }
        tokio::task::consume_budget().await;
        timeout_at(self.until, receive(self.socket)).await.ok()
    }
}

async fn receive(socket: &AsyncFd<PacketSocket>) -> io::Result<AnnouncementFrame> {
    loop {
        let mut ready = socket.readable().await?;
        let mut buffer = [0; FRAME];
        match ready.try_io(|socket| socket.get_ref().receive(&mut buffer)) {
            Ok(received) => return received.map(|length| (buffer, length)),
            Err(_would_block) => {}
        }
    }
}

/// The addresses that this agent holds. Drop ends their announcements.
#[derive(Debug, Default)]
pub struct Claims {
    held: BTreeMap<IpAddr, Held>,
    heard: Option<UnboundedSender<AddressClaim>>,
    announcer: Announcer,
}

/// Inputs of announcements.
#[derive(Clone, Debug, Default)]
struct Announcer {
    sender: Sender,
    /// Without a lease nothing is announced, because another node may own the address.
    lease: SharedLease,
}

#[derive(Debug)]
struct Held {
    interface: Interface,
    /// Earlier claims do not count.
    since: Instant,
    _membership: Option<UdpSocket>,
    announcing: Option<AbortHandle>,
    defended: Option<Defence>,
}

/// The last claim of another host that was answered.
#[derive(Debug)]
struct Defence {
    at: Instant,
    /// Whether there was a claim since.
    again: Arc<AtomicBool>,
    task: AbortHandle,
}

impl Held {
    fn on(interface: Interface) -> Self {
        Self { interface, since: Instant::now(), _membership: None, announcing: None, defended: None }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let defending = self.defended.iter().map(|defence| &defence.task);
        self.announcing.iter().chain(defending).for_each(AbortHandle::abort);
    }
}

impl Claims {
    /// Announces nothing without the lease.
    pub fn under(lease: SharedLease) -> Self {
        Self { announcer: Announcer { lease, ..Announcer::default() }, ..Self::default() }
    }

    /// Sets the receiver of conflicts.
    pub fn report_to(&mut self, heard: UnboundedSender<AddressClaim>) {
        self.heard = Some(heard);
    }

    /// Receives solicitations for the address on its interface. Called again for a held address whose interface has changed.
    pub fn join(&mut self, interface: Interface, address: IpAddr) {
        let held = self.held.entry(address).or_insert_with(|| Held::on(interface));
        held.interface = interface;
        let IpAddr::V6(address) = address else { return };
        let group = solicited_node(address);
        // A device that is down accepts no members; the filter is enough until its event.
        held._membership = match socket::join(group, interface.index) {
            Ok(socket) => Some(socket),
            Err(error) => {
                warn!(%error, %group, "cannot join the group of an egress IP");
                None
            }
        };
        if let Err(error) = socket::add_filter(interface.index, multicast_mac(group)) {
            warn!(%error, %group, "cannot add the group of an egress IP to its interface's filter");
        }
    }

    /// Announces all held addresses.
    pub fn announce_all(&mut self) {
        let all: Vec<IpAddr> = self.held.keys().copied().collect();
        all.into_iter().for_each(|address| self.announce(address));
    }

    /// Announces the held addresses of these interfaces, which have a carrier again or another path to their network.
    pub fn announce_on(&mut self, interfaces: &BTreeSet<u32>) {
        let on_them = self.held.iter().filter(|(_, held)| interfaces.contains(&held.interface.index));
        let some: Vec<IpAddr> = on_them.map(|(address, _)| *address).collect();
        some.into_iter().for_each(|address| self.announce(address));
    }

    /// Announces a held address, starting now. Must be called in a runtime.
    pub fn announce(&mut self, address: IpAddr) {
        let Some(held) = self.held.get_mut(&address) else { return };
        if let Some(task) = held.announcing.take() {
            task.abort();
        }
        // Short-lived: some announcements, over within seconds.
        let task = announce(self.announcer.clone(), held.interface, address);
        held.announcing = Some(tokio::spawn(task).abort_handle());
    }

    /// Forgets interfaces that are gone.
    pub fn retain_interfaces(&self, interfaces: &BTreeSet<u32>) {
        self.announcer.sender.retain(interfaces);
    }

    /// Handles another host's claim of the given age. Must be called in a runtime.
    pub fn defend(&mut self, claimant: AddressClaim, ago: Duration) {
        let now = Instant::now();
        let Some(held) = self.held.get_mut(&claimant.address) else { return };
        let is_late = now.duration_since(held.since) < ago;
        if is_late {
            return;
        }
        let last = held.defended.as_ref().filter(|last| now.duration_since(last.at) < DEFEND_INTERVAL);
        if let Some(last) = last {
            last.again.store(true, Ordering::Relaxed);
            return;
        }
        debug!(address = %claimant.address, mac = mac_text(claimant.mac), "another host claims an egress IP: announced again");
        let again = Arc::new(AtomicBool::new(false));
        // Short-lived: two or three frames, over within seconds.
        let task = tokio::spawn(defend(self.announcer.clone(), held.interface, claimant.address, Arc::clone(&again)));
        if let Some(former) = held.defended.replace(Defence { at: now, again, task: task.abort_handle() }) {
            former.task.abort();
        }
        // Refused only when the data plane is being dropped.
        let _ends = self.heard.as_ref().map(|heard| heard.send(claimant));
    }

    /// Ends the announcements of an address, and receives no solicitations for it on its interface, if that still exists.
    pub fn leave(&mut self, ifindex: u32, address: IpAddr) {
        self.held.remove(&address);
        if let IpAddr::V6(address) = address {
            // Two addresses with the same last three bytes share a group.
            let group = solicited_node(address);
            if !self.v6_on(ifindex).any(|other| solicited_node(other) == group) {
                remove_filter(ifindex, group);
            }
        }
    }

    fn v6_on(&self, ifindex: u32) -> impl Iterator<Item = Ipv6Addr> {
        self.held.iter().filter_map(move |(address, held)| match address {
            IpAddr::V6(address) if held.interface.index == ifindex => Some(*address),
            _ => None,
        })
    }
}

/// Removes the group's link address from the interface's filter.
fn remove_filter(ifindex: u32, group: Ipv6Addr) {
    if let Err(error) = socket::remove_filter(ifindex, multicast_mac(group)) {
        warn!(%error, %group, ifindex, "cannot remove the group of an egress IP from its interface's filter");
    }
}

/// The same for an address that another process has announced, or that was announced on another interface.
pub fn remove_filter_at(ifindex: u32, address: IpAddr) {
    if let IpAddr::V6(address) = address {
        remove_filter(ifindex, solicited_node(address));
    }
}

impl Announcer {
    fn announce(&self, interface: Interface, address: IpAddr) {
        if lease::is_held(&self.lease) {
            self.sender.send(interface, address, &frames::announcement(interface.mac, address));
        }
    }

    fn probe(&self, interface: Interface, address: IpAddr) {
        self.sender.send(interface, address, &frames::probe(interface.mac, address));
    }
}

async fn announce(announcer: Announcer, interface: Interface, address: IpAddr) {
    for pause in ANNOUNCE_PAUSES {
        sleep(Duration::from_secs(pause)).await;
        announcer.announce(interface, address);
    }
    sleep(ANSWERS_TAKE).await;
    announcer.probe(interface, address);
}

async fn defend(announcer: Announcer, interface: Interface, address: IpAddr, again: Arc<AtomicBool>) {
    announcer.announce(interface, address);
    sleep(DEFEND_INTERVAL).await;
    // Neighbours keep the last claim, and its sender may not send again.
    if again.load(Ordering::Relaxed) {
        announcer.announce(interface, address);
    }
    announcer.probe(interface, address);
}

/// Sends with one shared socket per interface. After an absence of the device the socket returns an error once and is
/// replaced; a new device has another index.
#[derive(Clone, Debug, Default)]
struct Sender(Arc<Mutex<BTreeMap<u32, PacketSocket>>>);

impl Sender {
    fn send(&self, interface: Interface, address: IpAddr, frame: &[u8]) {
        let mut sockets = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if sockets.get(&interface.index).is_some_and(|socket| socket.send(frame).is_ok()) {
            return;
        }
        let sent = PacketSocket::sender(interface.index).and_then(|socket| {
            socket.send(frame)?;
            Ok(socket)
        });
        let former = match sent {
            Ok(socket) => sockets.insert(interface.index, socket),
            Err(error) => {
                debug!(%error, %address, "cannot announce an egress IP");
                sockets.remove(&interface.index)
            }
        };
        drop(sockets);
        blocking(|| drop(former));
    }

    /// Closes the sockets of all other interfaces.
    fn retain(&self, interfaces: &BTreeSet<u32>) {
        let mut sockets = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        blocking(|| sockets.retain(|index, _| interfaces.contains(index)));
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::thread;

    use super::*;

    /// A sender that is faster than the reader does not delay the deadline.
    #[test]
    fn a_listener_stops_at_its_deadline_however_many_frames_arrive() {
        let (done, ended) = std::sync::mpsc::channel();
        // A closed peer is always readable.
        let (reads, _) = UnixStream::pair().expect("a pair");
        thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
            runtime.block_on(async {
                reads.set_nonblocking(true).expect("a flag");
                let socket = PacketSocket::of(reads.into()).expect("a socket");
                let until = Instant::now() + PROBE_INTERVAL;
                let mut heard = ProbeAnswers::until(until, &socket);
                while heard.next().await.is_some() {}
            });
            done.send(()).expect("the test waits");
        });
        assert_eq!(ended.recv_timeout(PROBE_INTERVAL * 20), Ok(()));
    }
}
