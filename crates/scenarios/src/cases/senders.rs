//! Which nodes send from an egress IP, by captured packets: packets of its pods and answers to ARP, whatever agents report.

use crate::prelude::*;
use egress_lab::capture::{ARP, CapturedPacket, turns};
use egress_lab::traffic::neighbour::NeighbourRequests;

const TICK: Duration = Duration::from_millis(5);
/// Who emits an address that it has lost is seen within so long: a hundred times what lies between two packets.
const PROOF: Duration = Duration::from_secs(2);
/// Fewer answers of a node say nothing about it.
const FEWEST: usize = 20;

/// Watches an IPv4 address while pods send by it and a neighbour asks for it.
pub(super) struct Senders {
    address: IpAddr,
    capture: Capture,
    flows: Vec<TrafficFlow>,
    asker: NeighbourRequests,
}

impl Senders {
    pub(super) fn watch(cluster: &TestCluster, address: &str, pods: &[&str]) -> Result<Self> {
        let address = address.parse()?;
        let capture = Capture::watching_owners(&cluster.lab, BTreeSet::new())?;
        let to = SocketAddr::new(plan::SERVER.v4.into(), ECHO_PORT);
        let flows =
            pods.iter().map(|pod| TrafficFlow::udp(&cluster.pod(pod)?.netns, to, TICK)).collect::<Result<_>>()?;
        let asker = NeighbourRequests::start(&cluster.lab, &[address])?;
        Ok(Self { address, capture, flows, asker })
    }

    /// Waits until a node has emitted the address often enough.
    pub(super) fn begins(&self, number: usize, patience: Duration) -> Result<()> {
        let node = node(number)?;
        until_true(&format!("node{number} emits {}", self.address), patience, || {
            let seen = self.capture.seen()?.captured;
            let answers =
                seen.iter().filter(|one| one.node == node && one.source == self.address && one.protocol == ARP);
            Ok(answers.count() >= FEWEST)
        })
    }

    /// Goes on for a while, and fails unless these nodes have emitted the address, each when the one before had ended.
    pub(super) fn were(self, expected: &[usize]) -> Result<()> {
        thread::sleep(PROOF);
        self.asker.finish()?;
        for flow in self.flows {
            flow.finish()?;
        }
        let captured = self.capture.seen()?.captured;
        let expected = expected.iter().map(|number| node(*number)).collect::<Result<Vec<_>>>()?;
        let of_it: Vec<&CapturedPacket> = captured.iter().filter(|one| one.source == self.address).collect();
        let mut of_pods = 0;
        for node in &expected {
            let (answers, packets): (Vec<&CapturedPacket>, Vec<&CapturedPacket>) =
                of_it.iter().copied().filter(|one| one.node == *node).partition(|one| one.protocol == ARP);
            println!("{} emitted {}: {} packets, {} ARP", node.name(), self.address, packets.len(), answers.len());
            ensure!(answers.len() >= FEWEST, "too few of {} to say anything", node.name());
            of_pods += packets.len();
        }
        ensure!(of_pods >= FEWEST, "too few packets of pods to say anything");
        let turns = turns(&captured, self.address);
        ensure!(turns == expected, "{} was emitted by {turns:?} in turn, not by {expected:?}", self.address);
        Ok(())
    }
}
