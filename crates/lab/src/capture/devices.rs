//! A capture on all devices of the nodes: which of them carry a packet, in which direction, with which source, and how long it
//! is there. It shows the path that a packet takes inside of a node, which the capture on the nodes' network does not.
//!
//! A packet socket sees what a device receives before the programs at its ingress, and what it sends after those at its egress.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::net::IpAddr;
use std::sync::{Arc, Mutex};

use anyhow::{Result, ensure};

use super::dissect::{CapturedFrame, dissect};
use super::{Ports, lock, open, read_frames};
use crate::background::Background;
use crate::topology::lab::Lab;

/// The direction of a packet, seen from the node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum DeviceDirection {
    In,
    Out,
}

/// One line of the count: packets that are alike.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct DeviceKey {
    pub node: String,
    pub device: String,
    pub direction: DeviceDirection,
    pub source: IpAddr,
    pub destination: IpAddr,
    pub protocol: u8,
    /// Of TCP and UDP; type and code of ICMP.
    pub ports: (u16, u16),
}

/// Without the destination, which is what a test asks by.
impl fmt::Display for DeviceKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { node, device, direction, source, .. } = self;
        let direction = match direction {
            DeviceDirection::In => "in",
            DeviceDirection::Out => "out",
        };
        write!(f, "{node} {device} {direction} from {source}")
    }
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DeviceTally {
    pub packets: u64,
    /// The longest packet in bytes, without the header of Ethernet.
    pub longest: usize,
}

/// What the devices have carried.
#[derive(Debug, Clone, Default)]
pub struct DevicesSeen {
    pub tallies: BTreeMap<DeviceKey, DeviceTally>,
    missed: u32,
}

/// A capture that runs until it is finished.
pub struct DeviceCapture {
    seen: Arc<Mutex<DevicesSeen>>,
    readers: Vec<Background<()>>,
}

const ETHERNET: usize = 14;

impl DeviceCapture {
    /// Captures in the host's namespace of each node. When this returns, the capture runs.
    pub fn start(lab: &Lab) -> Result<Self> {
        let seen = Arc::<Mutex<DevicesSeen>>::default();
        let mut readers = Vec::new();
        for node in lab.nodes() {
            let socket = node.host.run(open)?;
            let ports = Ports { netns: node.host.clone(), names: HashMap::new() };
            let (into, name) = (Arc::clone(&seen), node.name());
            readers.push(Background::start("device capture", move |stop| {
                let mut missed_here = 0;
                read_frames(&socket, ports, stop, |missed, frame| {
                    let mut seen = lock(&into);
                    seen.missed += missed.saturating_sub(missed_here);
                    missed_here = missed_here.max(missed);
                    let Some(frame) = frame else { return };
                    let CapturedFrame::Ip(packet) = dissect(frame.bytes) else { return };
                    let key = DeviceKey {
                        node: name.clone(),
                        device: frame.device.to_owned(),
                        direction: if frame.entering { DeviceDirection::In } else { DeviceDirection::Out },
                        source: packet.source,
                        destination: packet.destination,
                        protocol: packet.protocol,
                        ports: (packet.source_port, packet.destination_port),
                    };
                    let tally = seen.tallies.entry(key).or_default();
                    tally.packets += 1;
                    tally.longest = tally.longest.max(frame.bytes.len().saturating_sub(ETHERNET));
                })
            })?);
        }
        Ok(Self { seen, readers })
    }

    /// Ends the capture and hands over the count.
    ///
    /// # Errors
    /// Frames were lost: what is not in the count may have been there.
    pub fn finish(self) -> Result<DevicesSeen> {
        Background::finish_all(self.readers)?;
        let seen = lock(&self.seen).clone();
        ensure!(seen.missed == 0, "the capture missed {} frames, and proves nothing", seen.missed);
        Ok(seen)
    }
}

impl DevicesSeen {
    /// The packets that a question is about, by where they were seen.
    pub fn sightings(&self, question: impl Fn(&DeviceKey) -> bool) -> BTreeMap<String, DeviceTally> {
        let mut sightings = BTreeMap::<String, DeviceTally>::new();
        for (key, tally) in self.tallies.iter().filter(|(key, _)| question(key)) {
            let sum = sightings.entry(key.to_string()).or_default();
            sum.packets += tally.packets;
            sum.longest = sum.longest.max(tally.longest);
        }
        sightings
    }
}
