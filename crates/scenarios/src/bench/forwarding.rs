//! Forwarding rates: which flows are sent through which path, from the pods to the world and back.

use super::bench_cluster::{BenchCluster, FAR_END, link_address_of};
use super::cpu::Cores;
use super::flood::{Ends, Flood};
use super::peers::{self, DISCARD, NOBODY};
use super::plan::{PacketPath, Peer};
use super::samples::Results;
use crate::prelude::*;
use egress_lab::topology::EXT_LAN;
use egress_lab::{MANAGEMENT, UPLINK};

/// So many flows, where their number is not what is measured.
const FLOWS: u32 = 64;
const FIRST_PORT: u16 = 20_000;
/// Ports of one destination.
const PORTS: u32 = 40_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Out,
    Back,
}

/// The cases of [`super::plan::Work::Cores`]. With many pods each core has its own half of them; with one pod each core has
/// half of its flows.
const CASES: [(&str, Way); 3] =
    [("many pods, out", Way::Out), ("many pods, back", Way::Back), ("one pod, out", Way::Out)];

impl BenchCluster {
    pub(super) fn forwarding(&self, peer: Peer, path: PacketPath, core: usize, time: Duration) -> Result<f64> {
        let pod = self.pod(peer, path)?.addresses.v4;
        self.outward(peer, path, flows(&[pod.into()], FLOWS))?.measure(&[core], time)
    }

    /// Rates on one core and on two, and how they compare.
    pub(super) fn cores(&self, cores: Cores, round: usize, time: Duration, results: &mut Results) -> Result<()> {
        let Some(second) = cores.second else {
            eprintln!("this machine has one CPU: no rates on two");
            return Ok(());
        };
        for path in PacketPath::ALL {
            for (case, way) in CASES {
                let mut order = [Peer::Plain, Peer::Ours];
                order.rotate_left(round % 2);
                for peer in order {
                    let pods = match case {
                        "one pod, out" => vec![self.pod(peer, path)?.addresses.v4],
                        _ => peers::many_pods(NodeNumber::new(peer.source_node())?, path),
                    };
                    let pods: Vec<IpAddr> = pods.into_iter().map(IpAddr::V4).collect();
                    let out = self.outward(peer, path, flows(&pods, FLOWS))?;
                    let flood = match way {
                        Way::Out => out,
                        Way::Back => {
                            out.open(cores.first)?;
                            self.backward(peer, path, &out.flows)?
                        }
                    };
                    let one = flood.measure(&[cores.first], time)?;
                    let two = flood.measure(&[cores.first, second], time)?;
                    let mut add = |what: &str, unit, sample| {
                        results.add(&format!("forwarding, {case}, {what}"), path.name(), peer.name(), unit, sample);
                    };
                    add("one core", "packets/s", one);
                    add("two cores", "packets/s", two);
                    add("two cores to one", "times", two / one);
                }
            }
        }
        Ok(())
    }

    /// From the pods' end of the management port to the switch outside.
    fn outward(&self, peer: Peer, path: PacketPath, flows: Vec<Ends>) -> Result<Flood<'_>> {
        let node = self.node(peer.source_node())?;
        Ok(Flood {
            into: &node.router,
            device: FAR_END.to_owned(),
            to: link_address_of(&node.host, MANAGEMENT)?,
            from: link_address_of(&node.router, "br0")?,
            counted_in: self.lan(),
            exit: self.node(peers::exit_of(peer, path))?.name(),
            flows,
        })
    }

    /// The answers to these flows, from the switch outside to the pods' end of the management port.
    fn backward(&self, peer: Peer, path: PacketPath, flows: &[Ends]) -> Result<Flood<'_>> {
        let exit = self.node(peers::exit_of(peer, path))?;
        let answer = |flow: &Ends| -> Result<Ends> {
            let seen = self.seen_as(peer, path, flow.from.ip())?;
            Ok(Ends { from: flow.to, to: SocketAddr::new(seen, flow.from.port()) })
        };
        Ok(Flood {
            into: self.lan(),
            device: exit.name(),
            to: link_address_of(&exit.host, UPLINK)?,
            from: link_address_of(self.ext(), EXT_LAN)?,
            counted_in: &self.node(peer.source_node())?.router,
            exit: FAR_END.to_owned(),
            flows: flows.iter().map(answer).collect::<Result<_>>()?,
        })
    }
}

/// So many flows, the same number of each pod, pod after pod. No two have the same port and destination: NAT keeps the port.
fn flows(pods: &[IpAddr], count: u32) -> Vec<Ends> {
    let share = (count as usize).div_ceil(pods.len());
    let pods = pods.iter().flat_map(|pod| std::iter::repeat_n(*pod, share));
    let flow = |(number, pod): (u32, IpAddr)| {
        let port = FIRST_PORT + u16::try_from(number % PORTS).unwrap_or(0);
        Ends { from: SocketAddr::new(pod, port), to: SocketAddr::new(nobody(pod, number / PORTS), DISCARD) }
    };
    (0..count).zip(pods).map(flow).collect()
}

/// An unused address beyond the router outside.
fn nobody(_pod: IpAddr, number: u32) -> IpAddr {
    Ipv4Addr::from_bits(NOBODY.to_bits() + number).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_flow_keeps_its_port_and_pods_share_them() {
        let pods: Vec<IpAddr> = (1..=4).map(|end| IpAddr::from([10, 244, 1, end])).collect();
        let flows = flows(&pods, 100_000);
        let translated: BTreeSet<(SocketAddr, u16)> = flows.iter().map(|flow| (flow.to, flow.from.port())).collect();
        assert_eq!(translated.len(), 100_000);
        for pod in &pods {
            assert_eq!(flows.iter().filter(|flow| flow.from.ip() == *pod).count(), 25_000);
        }
        assert!(flows[..50_000].iter().all(|flow| flow.from.ip() <= pods[1]), "each half has its own pods");
    }
}
