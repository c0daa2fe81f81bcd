//! A capture on the nodes' network, or on the second one: every frame that a node sends, seen at its port of the switch (so
//! nothing that leaves a node can hide, who it is for), counted by source and judged by its checksum.
//!
//! A packet socket in the switch's namespace sees a frame twice, entering by one port and leaving by another; only
//! the entering one counts. Whether the kernel dropped frames because the reader was slow is counted too: a capture
//! that has lost frames proves nothing.

pub mod devices;
pub mod dissect;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::io::IoSliceMut;
use std::net::IpAddr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result, ensure};
use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, ControlMessageOwned, LinkAddr, MsgFlags, SockFlag, SockProtocol, SockType, recvmsg, setsockopt,
    socket, sockopt,
};
use nix::sys::time::{TimeVal, TimeValLike};

use crate::background::Background;
use crate::topology::addresses::{self as plan, Dual, NodeNumber};
use crate::topology::lab::{Lab, LabNode};
use crate::topology::netns::Netns;
use dissect::{CapturedFrame, Checksum, IpPacket, TcpSegment, dissect};

/// Whose address a packet bears.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum AddressKind {
    Pod,
    /// Of a node, on either network.
    Node,
    /// Of the nodes' network or the second one, and no node's and no router's: an egress IP.
    Egress,
    Other,
}

/// One line of the count: packets of a node's port that are alike.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CaptureKey {
    /// The node that sent it.
    pub port: String,
    pub source: IpAddr,
    pub destination: IpAddr,
    pub protocol: u8,
    /// The destination port, or the type of ICMP.
    pub to_port: u16,
}

impl fmt::Display for CaptureKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { port, source, destination, protocol, to_port } = self;
        write!(f, "{port} {source} -> {destination} (protocol {protocol}, {to_port})")
    }
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tally {
    pub packets: u64,
    pub complete: u64,
    pub partial: u64,
    pub wrong: u64,
}

/// Stands for ARP among the protocols of captured packets; no IP packet has it.
pub const ARP: u8 = 255;

/// One packet to a watched destination, or of a watched source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CapturedPacket {
    /// The kernel's time, not the reader's.
    pub at: SystemTime,
    /// Whose port it came in by.
    pub node: NodeNumber,
    pub source: IpAddr,
    pub destination: IpAddr,
    pub protocol: u8,
    /// Source and destination port, or type and code of ICMP.
    pub ports: (u16, u16),
    /// Of TCP.
    pub segment: Option<TcpSegment>,
}

impl fmt::Display for CapturedPacket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { source, destination, protocol, ports, .. } = self;
        write!(f, "{source} -> {destination} by {}, protocol {protocol} {ports:?}", self.node.name())?;
        self.segment.map_or(Ok(()), |segment| write!(f, " {segment}"))
    }
}

impl CapturedPacket {
    /// The line of the count that it is in.
    pub fn key(&self) -> CaptureKey {
        let Self { source, destination, protocol, ports, .. } = *self;
        let to_port = match protocol {
            crate::capture::dissect::ICMP | crate::capture::dissect::ICMPV6 => ports.0,
            _ => ports.1,
        };
        CaptureKey { port: self.node.name(), source, destination, protocol, to_port }
    }

    /// "Host unreachable" and "time exceeded" are sent by routers, never by endpoints.
    pub fn is_a_routers(&self) -> bool {
        match self.protocol {
            crate::capture::dissect::ICMP => matches!(self.ports, (3, 1) | (11, 0)),
            crate::capture::dissect::ICMPV6 => matches!(self.ports, (1, 3) | (3, 0)),
            _ => false,
        }
    }
}

/// How long packets may still leave a node after the release: the kernel's queues between program and switch.
pub const IN_FLIGHT: Duration = Duration::from_millis(20);

/// The nodes that emitted an address, in turn. A node that emits it again when another has begun to is in it again, unless that was
/// in flight ([`IN_FLIGHT`]): two nodes that emit an address at once take turns without end.
pub fn turns(captured: &[CapturedPacket], address: IpAddr) -> Vec<NodeNumber> {
    let mut turns: Vec<(NodeNumber, SystemTime)> = Vec::new();
    for CapturedPacket { at, node, .. } in captured.iter().filter(|packet| packet.source == address) {
        let was_on_its_way = match turns.as_slice() {
            [.., (former, _), (_, since)] => former == node && *at <= *since + IN_FLIGHT,
            _ => false,
        };
        if turns.last().is_none_or(|(current, _)| current != node) && !was_on_its_way {
            turns.push((*node, *at));
        }
    }
    turns.into_iter().map(|(node, _)| node).collect()
}

/// What was seen so far.
#[derive(Debug, Clone, Default)]
pub struct Seen {
    pub tallies: BTreeMap<CaptureKey, Tally>,
    /// ARP packets by (node's port, claimed address): answers and announcements.
    pub claims: BTreeMap<(String, IpAddr), u64>,
    pub frames: u64,
    /// Frames that the kernel could not hand over in time.
    pub missed: u32,
    /// Every packet to one of the watched destinations, in the order in which the kernel saw them.
    pub captured: Vec<CapturedPacket>,
    watched: BTreeSet<IpAddr>,
    /// Whether all that egress IPs emit is watched too, ARP answers and announcements included.
    watches_owners: bool,
    nodes: Vec<Dual>,
    /// Whether it is the second network.
    is_second: bool,
    /// Ports where a checksum must be complete.
    strict: BTreeSet<String>,
}

/// A capture that runs until it is finished.
pub struct Capture {
    seen: Arc<Mutex<Seen>>,
    reader: Background<()>,
}

/// No router forwards what goes there (RFC 4291 2.5.6 and 2.7, RFC 5771 4).
fn is_of_the_link(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(v4) => v4.is_link_local() || v4.octets()[..3] == [224, 0, 0],
        IpAddr::V6(v6) => v6.is_unicast_link_local() || v6.segments()[0] == 0xff02,
    }
}

impl Capture {
    /// Captures on the switch of the nodes' network. When this returns, the capture runs.
    pub fn start(lab: &Lab) -> Result<Self> {
        Self::watching(lab, BTreeSet::new())
    }

    /// The same, and each packet to these destinations is noted with its time.
    pub fn watching(lab: &Lab, watched: BTreeSet<IpAddr>) -> Result<Self> {
        Self::begin(lab, Seen { watched, ..Seen::default() })
    }

    /// The same, and so is whatever bears an egress IP as its source, and who claims one by ARP ([`ARP`]).
    pub fn watching_owners(lab: &Lab, watched: BTreeSet<IpAddr>) -> Result<Self> {
        Self::begin(lab, Seen { watched, watches_owners: true, ..Seen::default() })
    }

    /// The same on the switch of the second network.
    pub fn watching_owners_on_second(lab: &Lab, watched: BTreeSet<IpAddr>) -> Result<Self> {
        Self::begin(lab, Seen { watched, watches_owners: true, is_second: true, ..Seen::default() })
    }

    /// Captures on the switch of the second network.
    pub fn on_second(lab: &Lab) -> Result<Self> {
        Self::begin(lab, Seen { is_second: true, ..Seen::default() })
    }

    fn begin(lab: &Lab, mut seen: Seen) -> Result<Self> {
        let lan = if seen.is_second { &lab.second()?.world.lan } else { lab.lan() };
        seen.strict = lab.nodes().iter().filter(|node| !node.config.checksum_offload).map(LabNode::name).collect();
        let numbers = lab.nodes().iter().map(|node| node.number);
        seen.nodes = numbers.flat_map(|number| [number.address(), number.second_address()]).collect();
        let seen = Arc::new(Mutex::new(seen));
        let socket = lan.run(open)?;
        let ports = Ports { netns: lan.clone(), names: HashMap::new() };
        let into = Arc::clone(&seen);
        // Outside the namespace, so that the reader never keeps it alive.
        let reader = Background::start("capture", move |stop| {
            read_frames(&socket, ports, stop, |missed, frame| {
                let mut seen = lock(&into);
                seen.missed = seen.missed.max(missed);
                if let Some(frame) = frame.filter(|frame| frame.entering && frame.device.starts_with("node")) {
                    seen.note(frame.device, &dissect(frame.bytes), frame.at);
                }
            })
        })?;
        Ok(Self { seen, reader })
    }

    /// A copy of the count so far.
    ///
    /// # Errors
    /// Frames were lost: what is not in the count may have been there.
    pub fn seen(&self) -> Result<Seen> {
        complete(&self.seen)
    }

    /// What was sighted since the last call, and how many frames were missed so far: for a capture that runs long.
    pub fn take_captured(&self) -> (Vec<CapturedPacket>, u32) {
        let mut seen = lock(&self.seen);
        (std::mem::take(&mut seen.captured), seen.missed)
    }

    /// Ends the capture and hands over the count.
    ///
    /// # Errors
    /// As of [`Self::seen`].
    pub fn finish(self) -> Result<Seen> {
        self.reader.finish()?;
        complete(&self.seen)
    }

    /// The same; all checksums are right, and no pod's address went out.
    pub fn finish_clean(self) -> Result<Seen> {
        let seen = self.finish()?;
        seen.check()?;
        ensure!(seen.to_the_world(AddressKind::Pod) == 0, "a pod's address went out");
        Ok(seen)
    }
}

fn complete(seen: &Mutex<Seen>) -> Result<Seen> {
    let seen = lock(seen).clone();
    ensure!(seen.missed == 0, "the capture missed {} frames, and proves nothing", seen.missed);
    Ok(seen)
}

impl Seen {
    pub fn class(&self, address: IpAddr) -> AddressKind {
        if plan::is_pod_network(address) {
            AddressKind::Pod
        } else if self.nodes.iter().any(|node| node.is(address)) {
            AddressKind::Node
        } else if [plan::EXT, plan::EXT2, plan::EXT2B].iter().any(|router| router.is(address)) {
            AddressKind::Other
        } else if plan::is_lan(address) || plan::is_second_lan(address) {
            AddressKind::Egress
        } else {
            AddressKind::Other
        }
    }

    /// The packets that a question is about.
    pub fn packets(&self, question: impl Fn(&CaptureKey) -> bool) -> u64 {
        self.tallies.iter().filter(|(key, _)| question(key)).map(|(_, tally)| tally.packets).sum()
    }

    /// Packets whose source is of this class, to addresses outside the network of the capture.
    pub fn to_the_world(&self, class: AddressKind) -> u64 {
        self.packets(|key| self.is_to_the_world(key, class))
    }

    /// What a node asks of its neighbours, as its agent does of the next hop, stays on the link. With a bridge CNI the nodes'
    /// network also leads to other nodes' bridges, where their agents are asked.
    pub fn is_to_the_world(&self, key: &CaptureKey, class: AddressKind) -> bool {
        let asks = class == AddressKind::Node && plan::is_pod_network(key.destination);
        let to_neighbours = asks || class == AddressKind::Node && is_of_the_link(key.destination);
        let is_near: fn(IpAddr) -> bool = if self.is_second { plan::is_second_lan } else { plan::is_lan };
        !is_near(key.destination) && !to_neighbours && self.class(key.source) == class
    }

    /// The same without what a node itself has under way by its management port: where that port is gone, or has an address and
    /// not yet its routes, such packets take the default route.
    pub fn of_pods_to_the_world(&self) -> BTreeMap<String, u64> {
        let is_a_nodes = |key: &CaptureKey| [key.source, key.destination].into_iter().any(plan::is_management_port);
        let is_leaked = |key: &CaptureKey| self.is_to_the_world(key, AddressKind::Pod) && !is_a_nodes(key);
        let leaked = self.tallies.iter().filter(|(key, _)| is_leaked(key));
        leaked.map(|(key, tally)| (key.to_string(), tally.packets)).collect()
    }

    /// Fails when the capture has seen a checksum that is not right.
    pub fn check(&self) -> Result<()> {
        for (key, tally) in &self.tallies {
            let strict = self.strict.contains(&key.port);
            let bad = tally.wrong + if strict { tally.partial } else { 0 };
            ensure!(bad == 0, "{bad} of {} packets have a wrong checksum: {key:?}", tally.packets);
        }
        Ok(())
    }

    fn note(&mut self, port: &str, frame: &CapturedFrame, at: SystemTime) {
        self.frames += 1;
        match frame {
            CapturedFrame::Ip(packet) => {
                let IpPacket { source, destination, protocol, source_port, destination_port, segment, .. } = *packet;
                let owner = self.watches_owners && self.class(source) == AddressKind::Egress;
                if owner || self.watched.contains(&destination) {
                    let ports = (source_port, destination_port);
                    self.record(port, |node| CapturedPacket {
                        at,
                        node,
                        source,
                        destination,
                        protocol,
                        ports,
                        segment,
                    });
                }
                self.note_packet(port, packet);
            }
            CapturedFrame::Arp { request, sender, target, .. } if !request || sender == target => {
                let (source, destination) = (IpAddr::V4(*sender), IpAddr::V4(*target));
                if self.watches_owners && self.class(source) == AddressKind::Egress {
                    let (protocol, ports, segment) = (ARP, (0, 0), None);
                    self.record(port, |node| CapturedPacket {
                        at,
                        node,
                        source,
                        destination,
                        protocol,
                        ports,
                        segment,
                    });
                }
                *self.claims.entry((port.to_owned(), IpAddr::V4(*sender))).or_default() += 1;
            }
            CapturedFrame::Arp { .. } | CapturedFrame::Other => {}
        }
    }

    fn record(&mut self, port: &str, by: impl FnOnce(NodeNumber) -> CapturedPacket) {
        // Only nodes' ports are noted, and those are called like their nodes.
        let number = port.strip_prefix("node").and_then(|number| number.parse().ok());
        let Some(Ok(node)) = number.map(NodeNumber::new) else { return };
        self.captured.push(by(node));
    }

    fn note_packet(&mut self, port: &str, packet: &IpPacket) {
        let to_port = match packet.protocol {
            crate::capture::dissect::ICMP | crate::capture::dissect::ICMPV6 => packet.source_port,
            _ => packet.destination_port,
        };
        let key = CaptureKey {
            port: port.to_owned(),
            source: packet.source,
            destination: packet.destination,
            protocol: packet.protocol,
            to_port,
        };
        let tally = self.tallies.entry(key).or_default();
        tally.packets += 1;
        match packet.checksum {
            Checksum::Complete => tally.complete += 1,
            Checksum::Partial => tally.partial += 1,
            Checksum::Wrong => tally.wrong += 1,
            Checksum::None => {}
        }
    }
}

fn lock<T>(seen: &Mutex<T>) -> MutexGuard<'_, T> {
    seen.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Room for what arrives while the reader is busy.
const BUFFER: usize = 64 << 20;
/// The longest frame: a segment that the hardware would cut, and its headers.
const LONGEST: usize = 1 << 17;

fn open() -> Result<OwnedFd> {
    let protocol = SockProtocol::EthAll;
    let socket = socket(AddressFamily::Packet, SockType::Raw, SockFlag::SOCK_CLOEXEC, protocol)
        .context("cannot open a packet socket")?;
    setsockopt(&socket, sockopt::RcvBufForce, &BUFFER)?;
    setsockopt(&socket, sockopt::RxqOvfl, &1)?;
    setsockopt(&socket, sockopt::ReceiveTimestampns, &true)?;
    // The reader looks up this often whether it shall stop.
    setsockopt(&socket, sockopt::ReceiveTimeout, &TimeVal::milliseconds(50))?;
    Ok(socket)
}

/// The names of the switch's ports by interface index; a port that is plugged in later is looked up when it speaks.
struct Ports {
    netns: Netns,
    names: HashMap<usize, String>,
}

impl Ports {
    fn name(&mut self, index: usize) -> Result<Option<&str>> {
        if !self.names.contains_key(&index) {
            let found = self.netns.run(|| {
                let interfaces = nix::net::if_::if_nameindex()?;
                let named = interfaces.iter().map(|one| (one.index(), one.name().to_string_lossy().into_owned()));
                Ok(named.collect::<Vec<_>>())
            })?;
            for (index, name) in found {
                self.names.insert(usize::try_from(index)?, name);
            }
        }
        Ok(self.names.get(&index).map(String::as_str))
    }
}

/// How long a stopped capture still reads what was sent before, when the network is never idle.
const REMAINDER: Duration = Duration::from_millis(300);

/// A frame as a packet socket sees it.
struct SeenFrame<'a> {
    device: &'a str,
    /// Or the device sends it.
    entering: bool,
    bytes: &'a [u8],
    at: SystemTime,
}

/// Hands each frame to `note`, with the number of those that were missed so far.
fn read_frames(
    socket: &OwnedFd,
    mut ports: Ports,
    stop: &AtomicBool,
    mut note: impl FnMut(u32, Option<SeenFrame<'_>>),
) -> Result<()> {
    let mut buffer = vec![0; LONGEST];
    let mut ancillary = nix::cmsg_space!(u32, nix::sys::time::TimeSpec);
    let mut end = None;
    loop {
        if end.is_none() && stop.load(Ordering::Relaxed) {
            end = Some(Instant::now() + REMAINDER);
        }
        if end.is_some_and(|end| Instant::now() > end) {
            return Ok(());
        }
        let (length, address, (missed, at)) = {
            let mut parts = [IoSliceMut::new(&mut buffer)];
            let got = recvmsg::<LinkAddr>(socket.as_raw_fd(), &mut parts, Some(&mut ancillary), MsgFlags::empty());
            match got {
                Ok(message) => (message.bytes, message.address, circumstances(message.cmsgs()?)),
                // Idle: everything that was sent before the stop has been read.
                Err(Errno::EAGAIN) if stop.load(Ordering::Relaxed) => return Ok(()),
                // A port that goes down or away is news on the socket, not its end.
                Err(Errno::EAGAIN | Errno::EINTR | Errno::ENETDOWN) => continue,
                Err(errno) => return Err(errno).context("the capture cannot read"),
            }
        };
        let Some(address) = address else {
            note(missed, None);
            continue;
        };
        let entering = address.pkttype() != libc::PACKET_OUTGOING;
        let bytes = &buffer[..length];
        let device = ports.name(address.ifindex())?;
        note(missed, device.map(|device| SeenFrame { device, entering, bytes, at }));
    }
}

/// How many frames were missed so far, and when the kernel saw this one.
fn circumstances(messages: impl Iterator<Item = ControlMessageOwned>) -> (u32, SystemTime) {
    let (mut missed, mut at) = (0, None);
    for message in messages {
        match message {
            ControlMessageOwned::RxqOvfl(count) => missed = count,
            ControlMessageOwned::ScmTimestampns(time) => at = Some(SystemTime::UNIX_EPOCH + Duration::from(time)),
            _ => {}
        }
    }
    (missed, at.unwrap_or_else(SystemTime::now))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_emit_an_address_in_turn_or_they_do_not() {
        let address = IpAddr::from([172, 18, 0, 110]);
        let turns_of = |seen: &[(u64, usize)]| -> Vec<String> {
            let captured = seen.iter().map(|&(millis, node)| CapturedPacket {
                at: SystemTime::UNIX_EPOCH + Duration::from_millis(millis),
                node: NodeNumber::new(node).expect("a node"),
                source: address,
                destination: address,
                protocol: ARP,
                ports: (0, 0),
                segment: None,
            });
            turns(&captured.collect::<Vec<_>>(), address).into_iter().map(NodeNumber::name).collect()
        };
        assert_eq!(turns_of(&[(0, 1), (5, 1), (100, 2), (105, 2)]), ["node1", "node2"]);
        // The last packet of the old owner was in flight.
        assert_eq!(turns_of(&[(0, 1), (100, 2), (119, 1), (130, 2)]), ["node1", "node2"]);
        assert_eq!(turns_of(&[(0, 1), (100, 2), (121, 1), (122, 2)]), ["node1", "node2", "node1"]);
        assert_eq!(turns_of(&[(0, 1), (100, 2), (300, 3), (301, 1)]), ["node1", "node2", "node3", "node1"]);
    }
}
