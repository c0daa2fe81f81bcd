//! Who emits an egress IP: what the nodes put on the wire, packets of its pods and answers to ARP, whatever agents say of it.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Result, anyhow, ensure};

use super::ground::{Ground, node};
use super::wait::until;
use crate::lab::addresses as plan;
use crate::lab::capture::{ARP, Capture, Sighting, turns};
use crate::lab::flows::Flow;
use crate::lab::server::ECHO_PORT;
use crate::lab::{EXT_LAN, Netns};

const TICK: Duration = Duration::from_millis(5);
/// How often a neighbour forgets who has the address, and asks all of them.
const FORGETS: Duration = Duration::from_millis(20);
/// Who emits an address that it has lost is seen within so long: a hundred times what lies between two packets.
const PROOF: Duration = Duration::from_secs(2);
/// Fewer answers of a node say nothing about it.
const FEWEST: usize = 20;

/// Watches an IPv4 address while pods send by it and a neighbour asks for it.
pub(super) struct Emitters {
    address: IpAddr,
    capture: Capture,
    flows: Vec<Flow>,
    stop: Arc<AtomicBool>,
    asker: Option<JoinHandle<Result<()>>>,
}

impl Emitters {
    pub(super) fn watch(ground: &Ground, address: &str, pods: &[&str]) -> Result<Self> {
        let address = address.parse()?;
        let capture = Capture::watching_owners(&ground.lab, BTreeSet::new())?;
        let to = SocketAddr::new(plan::SERVER.v4.into(), ECHO_PORT);
        let flows = pods.iter().map(|pod| Flow::udp(&ground.pod(pod)?.netns, to, TICK)).collect::<Result<_>>()?;
        let stop = Arc::new(AtomicBool::new(false));
        let (neighbour, until) = (ground.lab.ext().clone(), Arc::clone(&stop));
        let asker = thread::spawn(move || forget(&neighbour, address, &until));
        Ok(Self { address, capture, flows, stop, asker: Some(asker) })
    }

    /// Waits until a node has emitted the address often enough.
    pub(super) fn begins(&self, number: usize, patience: Duration) -> Result<()> {
        let node = node(number)?;
        until(&format!("node{number} emits {}", self.address), patience, || {
            let seen = self.capture.seen()?.sightings;
            let answers =
                seen.iter().filter(|one| one.node == node && one.source == self.address && one.protocol == ARP);
            Ok((answers.count() >= FEWEST).then_some(()))
        })
    }

    /// Goes on for a while, and fails unless these nodes have emitted the address, each when the one before had ended.
    pub(super) fn were(mut self, expected: &[usize]) -> Result<()> {
        thread::sleep(PROOF);
        self.stop.store(true, Ordering::Relaxed);
        if let Some(asker) = self.asker.take() {
            asker.join().map_err(|_panic| anyhow!("the neighbour panicked"))??;
        }
        for flow in std::mem::take(&mut self.flows) {
            flow.finish()?;
        }
        let sightings = self.capture.seen()?.sightings;
        let expected = expected.iter().map(|number| node(*number)).collect::<Result<Vec<_>>>()?;
        let of_it: Vec<&Sighting> = sightings.iter().filter(|one| one.source == self.address).collect();
        let mut of_pods = 0;
        for node in &expected {
            let (answers, packets): (Vec<&Sighting>, Vec<&Sighting>) =
                of_it.iter().copied().filter(|one| one.node == *node).partition(|one| one.protocol == ARP);
            println!("{} emitted {}: {} packets, {} ARP", node.name(), self.address, packets.len(), answers.len());
            ensure!(answers.len() >= FEWEST, "too few of {} to say anything", node.name());
            of_pods += packets.len();
        }
        ensure!(of_pods >= FEWEST, "too few packets of pods to say anything");
        let turns = turns(&sightings, self.address);
        ensure!(turns == expected, "{} was emitted by {turns:?} in turn, not by {expected:?}", self.address);
        Ok(())
    }
}

impl Drop for Emitters {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

fn forget(neighbour: &Netns, address: IpAddr, stop: &AtomicBool) -> Result<()> {
    const DISCARD: u16 = 9;
    let socket = neighbour.run(|| Ok(UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?))?;
    while !stop.load(Ordering::Relaxed) {
        // It may have forgotten by itself.
        neighbour.output("ip", &["neigh", "del", &address.to_string(), "dev", EXT_LAN])?;
        // Refused, or unreachable, is what became of an earlier one.
        socket.send_to(b"who has it?", (address, DISCARD)).ok();
        thread::sleep(FORGETS);
    }
    Ok(())
}
