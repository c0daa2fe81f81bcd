//! Traffic of the pods while something happens to the cluster.

use super::*;
use egress_lab::capture::{Seen, turns};

const TICK: Duration = Duration::from_millis(10);

impl NodeTest {
    /// Pods of both nodes send a datagram every 10 ms, and have a connection each.
    pub(super) fn traffic(&self) -> Result<Traffic> {
        self.traffic_of(|_| true)
    }

    /// The same of the pods on one node.
    pub(super) fn traffic_on(&self, node: &str) -> Result<Traffic> {
        let address = self.cluster.node(node)?.lab.number.address().v4;
        self.traffic_of(|pod| pod.node == address)
    }

    fn traffic_of(&self, is_sender: impl Fn(&RealPod) -> bool) -> Result<Traffic> {
        let pods = self.selected.iter().chain(&self.others).filter(|pod| is_sender(pod));
        let server_addresses = (FLOWS..).map(|number| IpAddr::from(plan::server_address(number).v4));
        let senders: Vec<_> = pods.zip(server_addresses).collect();
        let watched = senders.iter().map(|(_, server_address)| *server_address).collect();
        let capture = Capture::watching_owners(&self.cluster.lab, watched)?;
        let mut flows = Vec::new();
        for (pod, server_address) in senders {
            let to = SocketAddr::new(server_address, ECHO_PORT);
            let source = if pod.house == SELECTED { EGRESS_IP } else { pod.node };
            let datagrams = TrafficFlow::udp(&pod.netns, to, TICK)?;
            let connection = TrafficFlow::tcp(&pod.netns, to, TICK * 10, Duration::from_secs(20))?;
            flows.push(PodFlows { name: pod.name.clone(), server_address, source, datagrams, connection });
        }
        Ok(Traffic { capture, flows })
    }
}

struct PodFlows {
    name: String,
    server_address: IpAddr,
    source: IpAddr,
    datagrams: TrafficFlow,
    connection: TrafficFlow,
}

pub(super) struct Traffic {
    capture: Capture,
    flows: Vec<PodFlows>,
}

/// What became of the datagrams of a pod.
pub(super) struct Lost {
    pub(super) name: String,
    lost: u64,
    pub(super) longest_gap: Duration,
}

impl Traffic {
    /// Ends it; no packet may have had a wrong source, nor a connection ended.
    pub(super) fn finish(self) -> Result<(Vec<Lost>, Seen)> {
        let mut all = Vec::new();
        let mut sources = Vec::new();
        for flow in self.flows {
            let (datagrams, connection) = (flow.datagrams.finish()?, flow.connection.finish()?);
            let (sent, lost, longest_gap) = (datagrams.sent, datagrams.lost(), datagrams.longest_gap);
            println!("{}: {lost} of {sent} datagrams lost, at most {longest_gap:?} between two answers", flow.name);
            ensure!(sent > 100, "{} has sent {sent} datagrams only", flow.name);
            ensure!(connection.broken.is_none(), "the connection of {} has ended: {connection:?}", flow.name);
            all.push(Lost { name: flow.name, lost, longest_gap });
            sources.push((flow.server_address, flow.source));
        }
        let seen = self.capture.finish()?;
        seen.check()?;
        for (server_address, source) in sources {
            let to_door = seen.captured.iter().filter(|one| one.destination == server_address);
            let wrong = to_door.clone().filter(|one| one.source != source).count();
            ensure!(
                to_door.count() > 0 && wrong == 0,
                "{wrong} packets to {server_address} have another source than {source}"
            );
        }
        let pods = seen.to_the_world(AddressKind::Pod);
        ensure!(pods == 0, "{pods} packets left with a pod's address");
        Ok((all, seen))
    }

    pub(super) fn finish_without_loss(self) -> Result<Seen> {
        let (all, seen) = self.finish()?;
        all.iter().try_for_each(|one| {
            ensure!(one.lost == 0, "{} has lost {} datagrams", one.name, one.lost);
            Ok(())
        })?;
        Ok(seen)
    }
}

/// The nodes that emitted the address, in turn.
pub(super) fn turns_of(seen: &Seen) -> Vec<String> {
    turns(&seen.captured, EGRESS_IP).iter().map(|node| node.name()).collect()
}

/// The address is emitted by one node, then by the other, but for what is in flight when the other begins. A node whose link is
/// back sends nothing of what has waited for its next hop: the programs ask the lease of such packets too.
pub(super) fn emitted_in_turn(seen: &Seen, from: &str, to: &str) -> Result<()> {
    let turns = turns_of(seen);
    ensure!(turns == [from, to], "{EGRESS_IP} was emitted by {turns:?}");
    Ok(())
}
