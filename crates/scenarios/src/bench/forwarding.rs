//! Forwarding rates: which flows are sent through which path, from the pods to the world and back.

use std::net::Ipv6Addr;

use super::bench_cluster::{BenchCluster, FAR_END, link_address_of};
use super::closes::{self, Closes};
use super::cpu::Cores;
use super::drops;
use super::flood::{self, Ends, Flood};
use super::peers::{self, DISCARD, UNANSWERED};
use super::plan::{PacketPath, Peer, Work, of_family};
use super::samples::Results;
use crate::prelude::*;
use egress_common::abi::Family;
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

/// Numbers of flows of [`super::plan::Work::Churn`].
const CHURN: [u32; 3] = [1_000, 10_000, 100_000];

impl BenchCluster {
    pub(super) fn forwarding(
        &self,
        work: Work,
        peer: Peer,
        path: PacketPath,
        core: usize,
        time: Duration,
        results: &mut Results,
    ) -> Result<()> {
        let pod = of_family(self.pod(peer, path, work.family())?.addresses, work.family());
        let flood = self.outward(peer, path, &flows(&[pod], FLOWS))?;
        flood.open(core)?;
        self.sample(&flood, peer, path, work.name(), &[core], time, results).map(drop)
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
                        "one pod, out" => vec![self.pod(peer, path, Family::V4)?.addresses.v4.into()],
                        _ => self.many_pods(peer, path)?,
                    };
                    let flows = flows(&pods, FLOWS);
                    let out = self.outward(peer, path, &flows)?;
                    out.open(cores.first)?;
                    let flood = match way {
                        Way::Out => out,
                        Way::Back => self.backward(peer, path, &flows)?,
                    };
                    let mut rate = |what: &str, on: &[usize]| {
                        let work = format!("{}, {case}: {what}", Work::Cores.name());
                        self.sample(&flood, peer, path, &work, on, time, results)
                    };
                    let one = rate("one core", &[cores.first])?;
                    let two = rate("two cores", &[cores.first, second])?;
                    let work = format!("{}, {case}: two cores to one", Work::Cores.name());
                    results.add(&work, path.name(), peer.name(), "times", two / one);
                }
            }
        }
        Ok(())
    }

    /// Rates of many flows, without closes and with closes on the other core.
    pub(super) fn churn(
        &self,
        cores: Cores,
        round: usize,
        time: Duration,
        quick: bool,
        results: &mut Results,
    ) -> Result<()> {
        let counts = if quick { &CHURN[..1] } else { &CHURN };
        for path in PacketPath::ALL {
            for count in counts.iter().copied() {
                let mut order = [Peer::Plain, Peer::Netfilter, Peer::Ours];
                order.rotate_left(round % 3);
                for peer in order {
                    let flood = self.outward(peer, path, &flows(&self.many_pods(peer, path)?, count))?;
                    flood.open(cores.first)?;
                    let work = format!("{}, {} k flows", Work::Churn.name(), count / 1_000);
                    self.sample(&flood, peer, path, &work, &[cores.first], time, results)?;
                    let pod = &self.pod(peer, path, Family::V4)?.netns;
                    let closes = Closes::start(pod, peers::SERVER.v4.into(), cores.second.unwrap_or(cores.first))?;
                    let work = format!("{work}, {} closes/s", closes::RATE);
                    self.sample(&flood, peer, path, &work, &[cores.first], time, results)?;
                    let reached = closes.finish()?;
                    if reached < 0.9 * f64::from(closes::RATE) {
                        eprintln!("{work}, {}, {}: only {reached:.0} closes a second", path.name(), peer.name());
                    }
                }
            }
        }
        Ok(())
    }

    fn many_pods(&self, peer: Peer, path: PacketPath) -> Result<Vec<IpAddr>> {
        let node = self.node(peer.source_node())?.number;
        Ok(peers::many_pods(node, path).into_iter().map(IpAddr::V4).collect())
    }

    /// One rate, and what the flow caches on the path of ours served in that time.
    #[expect(clippy::too_many_arguments, reason = "what is sent, where, and the name of the result")]
    fn sample(
        &self,
        flood: &Flood<'_>,
        peer: Peer,
        path: PacketPath,
        work: &str,
        cores: &[usize],
        time: Duration,
        results: &mut Results,
    ) -> Result<f64> {
        let before = self.cache_use(peer, path)?;
        let drops = drops::dropped(self.own_nodes(peer, path)?)?;
        let rate = match flood.rate(cores, time) {
            Ok(rate) => rate,
            Err(error) => {
                let drops = drops::since(&drops, &drops::dropped(self.own_nodes(peer, path)?)?);
                return Err(error.context(format!("{work}, {}, {}: dropped {drops:?}", path.name(), peer.name())));
            }
        };
        results.add(work, path.name(), peer.name(), "packets/s", rate);
        if let Some(hit_rate) = (self.cache_use(peer, path)? - before).hit_rate() {
            results.add_hit_rate(work, path.name(), peer.name(), hit_rate);
        }
        Ok(rate)
    }

    /// From the pods' end of the management port to the switch outside.
    fn outward(&self, peer: Peer, path: PacketPath, flows: &[Ends]) -> Result<Flood<'_>> {
        let node = self.node(peer.source_node())?;
        let (to, from) = (link_address_of(&node.host, MANAGEMENT)?, link_address_of(&node.router, "br0")?);
        Ok(Flood {
            into: &node.router,
            device: FAR_END.to_owned(),
            counted_in: self.lan(),
            exit: self.node(peers::exit_of(peer, path))?.name(),
            frames: flood::frames(to, from, flows)?,
        })
    }

    /// The answers to these flows, from the switch outside to the pods' end of the management port.
    fn backward(&self, peer: Peer, path: PacketPath, flows: &[Ends]) -> Result<Flood<'_>> {
        let exit = self.node(peers::exit_of(peer, path))?;
        let answer = |flow: &Ends| -> Result<Ends> {
            let seen = self.seen_as(peer, path, flow.from.ip())?;
            Ok(Ends { from: flow.to, to: SocketAddr::new(seen, flow.from.port()) })
        };
        let answers = flows.iter().map(answer).collect::<Result<Vec<_>>>()?;
        let (to, from) = (link_address_of(&exit.host, UPLINK)?, link_address_of(self.ext(), EXT_LAN)?);
        Ok(Flood {
            into: self.lan(),
            device: exit.name(),
            counted_in: &self.node(peer.source_node())?.router,
            exit: FAR_END.to_owned(),
            frames: flood::frames(to, from, &answers)?,
        })
    }
}

/// So many flows, the same number of each pod, pod after pod. No two have the same port and destination: NAT keeps the port.
fn flows(pods: &[IpAddr], count: u32) -> Vec<Ends> {
    let share = (count as usize).div_ceil(pods.len());
    let pods = pods.iter().flat_map(|pod| std::iter::repeat_n(*pod, share));
    let flow = |(number, pod): (u32, IpAddr)| {
        let port = FIRST_PORT + u16::try_from(number % PORTS).unwrap_or(0);
        Ends { from: SocketAddr::new(pod, port), to: SocketAddr::new(unanswered(pod, number / PORTS), DISCARD) }
    };
    (0..count).zip(pods).map(flow).collect()
}

/// An unused address beyond the router outside.
fn unanswered(pod: IpAddr, number: u32) -> IpAddr {
    match pod {
        IpAddr::V4(_) => Ipv4Addr::from_bits(UNANSWERED.v4.to_bits() + number).into(),
        IpAddr::V6(_) => Ipv6Addr::from_bits(UNANSWERED.v6.to_bits() + u128::from(number)).into(),
    }
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
