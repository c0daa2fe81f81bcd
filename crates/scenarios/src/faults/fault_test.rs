//! One fault played: a cluster of its own, traffic without pause, and a capture of all of it.

use std::time::SystemTime;

use super::judge::{self, Double, Gap, Stretch};
use crate::prelude::*;
use crate::soak::loaded_cluster::{ClusterShape, LoadedCluster};
use crate::soak::wire::Wire;
use egress_lab::capture::CapturedPacket;
use egress_lab::cut::NetworkCut;
use egress_lab::traffic::neighbour::NeighbourRequests;
use egress_lab::yield_to_signal;
use egress_toolchain::{Built, Progress};

const NODES: usize = 4;
/// Nodes without a controller; they get the addresses.
const GATEWAYS: [usize; 2] = [3, 4];
/// Of the datagrams of one flow from each pod, which the flow cache serves.
const TICK: Duration = Duration::from_millis(10);
const PAUSE: Duration = Duration::from_millis(50);
/// A cluster that is not at rest by then has not come back.
const PATIENCE: Duration = Duration::from_secs(60);
/// How far back one looks for who emits an address now.
const NOW: Duration = Duration::from_millis(500);
/// Longer than a sample waits for its answer.
const NO_LOSS: Duration = Duration::from_millis(1300);
/// After the cluster is at rest: late packets are seen too.
const PROOF: Duration = Duration::from_secs(2);

pub(super) struct FaultTest<'a> {
    pub(super) cluster: LoadedCluster,
    /// The node that has the first address before the fault.
    pub(super) gateway: NodeNumber,
    /// The node of the controller that leads before the fault.
    pub(super) leader: NodeNumber,
    pub(super) built: &'a Built,
    pub(super) logs: PathBuf,
    name: &'static str,
    progress: &'a Progress,
    asker: NeighbourRequests,
    flows: Vec<TrafficFlow>,
    wire: Wire,
    seen: Vec<CapturedPacket>,
    wrong: Vec<String>,
    /// When each caller has sent.
    sent: Vec<Vec<Instant>>,
    last_loss: Instant,
    before: Vec<Option<NodeNumber>>,
    begun: (Instant, SystemTime),
    /// Nodes whose pods reach nothing for a time.
    away: BTreeSet<NodeNumber>,
    pub(super) log: Vec<String>,
}

/// What was seen of one address.
pub(super) struct SeenAddress {
    pub(super) address: IpAddr,
    pub(super) doubles: Vec<Double>,
    /// Of all its pods together: no node emitted it.
    pub(super) gap: Gap,
    /// Of one pod alone, and its node.
    pub(super) of_a_pod: Option<(NodeNumber, Gap)>,
    pub(super) stretches: Vec<Stretch>,
    pub(super) before: Option<NodeNumber>,
    pub(super) after: Option<NodeNumber>,
}

impl SeenAddress {
    pub(super) fn moved(&self) -> bool {
        self.before != self.after
    }
}

/// What became of a fault.
pub(super) struct FaultOutcome {
    pub(super) begun: SystemTime,
    pub(super) addresses: Vec<SeenAddress>,
    /// Packets with a wrong source, the first few as text.
    pub(super) wrong: Vec<String>,
    pub(super) packets: usize,
    /// From the end of the fault until the cluster was at rest.
    pub(super) rest: Option<Duration>,
    pub(super) log: Vec<String>,
    /// The longest time between two samples of a pod.
    pub(super) stall: Duration,
    pub(super) took: Duration,
}

impl FaultOutcome {
    /// Of a fault that was not played to its end.
    pub(super) fn none() -> Self {
        let (addresses, wrong, log, zero) = (Vec::new(), Vec::new(), Vec::new(), Duration::ZERO);
        Self { begun: SystemTime::now(), addresses, wrong, packets: 0, rest: None, log, stall: zero, took: zero }
    }
}

impl<'a> FaultTest<'a> {
    pub(super) fn start(
        name: &'static str,
        arguments: &[&str],
        (built, logs, prefix): (&'a Built, PathBuf, Option<&str>),
        progress: &'a Progress,
    ) -> Result<Self> {
        let shape = ClusterShape { nodes: NODES, hosts: &GATEWAYS, arguments, second: false };
        let cluster = LoadedCluster::start(&shape, built, prefix, logs.clone())?;
        let addresses = cluster.subjects.iter().map(|subject| subject.address()).collect::<Result<Vec<_>>>()?;
        let asker = NeighbourRequests::start(&cluster.base.lab, &addresses)?;
        let flow = |(pod, caller): (&egress_lab::LabPod, &crate::soak::loaded_cluster::LoadCaller)| {
            TrafficFlow::udp(&pod.netns, SocketAddr::new(caller.server_address, ECHO_PORT), TICK)
        };
        let flows = cluster.base.lab.pods().iter().zip(&cluster.callers).map(flow).collect::<Result<_>>()?;
        let mut wire = Wire::new(cluster.nodes().into_iter().flat_map(|node| node.address().both()).collect());
        for caller in &cluster.callers {
            wire.set_right(caller.server_address, [addresses[caller.subject]].into());
        }
        let sent = vec![Vec::new(); cluster.callers.len()];
        let first = NodeNumber::new(GATEWAYS[0])?;
        let now = (Instant::now(), SystemTime::now());
        let mut test = Self {
            cluster,
            gateway: first,
            leader: first,
            built,
            logs,
            name,
            progress,
            asker,
            flows,
            wire,
            seen: Vec::new(),
            wrong: Vec::new(),
            sent,
            last_loss: Instant::now(),
            before: Vec::new(),
            begun: now,
            away: BTreeSet::new(),
            log: Vec::new(),
        };
        ensure!(test.settle()?.is_some(), "the cluster is not at rest before the fault");
        test.before = test.cluster.holders()?;
        test.gateway = test.before[0].context("the first address has no node")?;
        test.leader = test.cluster.base.leader()?.context("no controller leads")?.0;
        (test.seen, test.wrong) = (Vec::new(), Vec::new());
        test.sent.iter_mut().for_each(Vec::clear);
        test.begun = (Instant::now(), SystemTime::now());
        Ok(test)
    }

    /// Notes what happens, with its time.
    pub(super) fn say(&mut self, text: &str) {
        let line = format!("+{:.1} s: {text}", self.begun.0.elapsed().as_secs_f64());
        self.progress.step(&format!("{} {line}", self.name));
        self.log.push(line);
    }

    pub(super) fn agent(&mut self) -> &mut Agent {
        self.cluster.agent(self.gateway)
    }

    /// Lets time pass.
    pub(super) fn wait(&mut self, time: Duration) -> Result<()> {
        let end = Instant::now() + time;
        while Instant::now() < end {
            std::thread::sleep(PAUSE.min(end.saturating_duration_since(Instant::now())));
            self.pump()?;
        }
        Ok(())
    }

    /// Pods of these nodes reach nothing for a time: gaps of theirs say nothing.
    pub(super) fn are_away(&mut self, nodes: &[NodeNumber]) {
        self.away.extend(nodes);
    }

    pub(super) fn cut(&mut self, cut: &NetworkCut) -> Result<()> {
        self.cluster.base.lab.cut(cut)
    }

    pub(super) fn mend(&mut self, cut: &NetworkCut) -> Result<()> {
        self.cluster.base.lab.mend(cut)
    }

    /// Takes what was seen since the last time.
    pub(super) fn pump(&mut self) -> Result<()> {
        yield_to_signal();
        let (captured, missed) = self.cluster.take_captured();
        ensure!(missed == 0, "the capture missed {missed} frames, and proves nothing");
        self.wrong.extend(captured.iter().filter_map(|one| self.wire.wrong_source(one)).map(|found| found.message));
        self.seen.extend(captured);
        for (caller, sent) in self.cluster.callers.iter().zip(&mut self.sent) {
            let new = caller.sampler.take();
            if new.iter().any(|sample| sample.answered.is_none()) {
                self.last_loss = Instant::now();
            }
            sent.extend(new.iter().map(|sample| sample.sent));
        }
        Ok(())
    }

    /// Waits until status and wire agree, all agents serve and nothing is lost; for how long.
    fn settle(&mut self) -> Result<Option<Duration>> {
        let begin = Instant::now();
        let mut rested = None;
        while begin.elapsed() < PATIENCE {
            self.pump()?;
            if self.is_at_rest()? {
                let since = *rested.get_or_insert_with(Instant::now);
                if since.elapsed() > NOW {
                    return Ok(Some(since.duration_since(begin)));
                }
            } else {
                rested = None;
            }
            std::thread::sleep(PAUSE);
        }
        Ok(None)
    }

    fn is_at_rest(&mut self) -> Result<bool> {
        let since = SystemTime::now() - NOW;
        for (subject, holder) in self.cluster.subjects.iter().zip(self.cluster.holders()?) {
            let senders = judge::senders(&self.seen, subject.address()?, since);
            if holder.is_none_or(|holder| senders != [holder].into()) {
                return Ok(false);
            }
        }
        Ok(self.last_loss.elapsed() > NO_LOSS && self.cluster.agents_serve()?)
    }

    /// Waits for rest after the fault has ended, a moment longer, and judges.
    pub(super) fn finish(mut self) -> Result<FaultOutcome> {
        let rest = self.settle()?;
        self.wait(PROOF)?;
        let (begun, end) = (self.begun.1, SystemTime::now());
        let after = self.cluster.holders()?;
        let mut server_addresses: BTreeMap<usize, BTreeMap<IpAddr, NodeNumber>> = BTreeMap::new();
        for caller in self.cluster.callers.iter().filter(|caller| !self.away.contains(&caller.node)) {
            server_addresses.entry(caller.subject).or_default().insert(caller.server_address, caller.node);
        }
        let mut addresses = Vec::new();
        for (place, subject) in self.cluster.subjects.iter().enumerate() {
            let address = subject.address()?;
            let of = |server_addresses: BTreeSet<IpAddr>| {
                judge::longest_gap(&self.seen, address, &server_addresses, (begun, end))
            };
            let of_pods =
                server_addresses[&place].iter().map(|(server_address, node)| (*node, of([*server_address].into())));
            addresses.push(SeenAddress {
                address,
                doubles: judge::doubles(&self.seen, address),
                gap: of(server_addresses[&place].keys().copied().collect()),
                of_a_pod: of_pods.max_by_key(|(_, gap)| gap.lasts),
                stretches: judge::stretches(&self.seen, address),
                before: self.before[place],
                after: after[place],
            });
        }
        let stall = self.sent.iter_mut().map(|sent| longest(sent)).max().unwrap_or_default();
        let Self { cluster, asker, flows, wrong, seen, log, begun: (since, _), .. } = self;
        asker.finish()?;
        for flow in flows {
            flow.finish()?;
        }
        cluster.finish()?;
        let (packets, took) = (seen.len(), since.elapsed());
        Ok(FaultOutcome { begun, addresses, wrong, packets, rest, log, stall, took })
    }
}

/// The longest time between two samples of a caller. One that was lost becomes known later than those after it.
fn longest(sent: &mut [Instant]) -> Duration {
    sent.sort_unstable();
    sent.windows(2).map(|pair| pair[1].duration_since(pair[0])).max().unwrap_or_default()
}
