//! One round: a cluster at rest, a fault, its end, and the cluster at rest again. What nodes put on the wire is judged all
//! the while.

use std::time::SystemTime;

use super::fault::{Effect, Fault, RoundPlan};
use super::figures::{FaultTable, SoakRow, interruption};
use super::inject::{self, FaultTarget};
use super::loaded_cluster::LoadedCluster;
use super::outage_cost::OutageCost;
use super::sampler::ConnectionSample;
use super::streams::StreamSnapshot;
use super::wire::{Violation, Wire};
use crate::prelude::*;
use egress_lab::yield_to_signal;

/// After this time of quiet, status and data path say the same.
const QUIET: Duration = Duration::from_secs(5);
/// No round is followed by the next sooner.
const REST: Duration = Duration::from_millis(3500);
/// A cluster that is not at rest by then has broken a promise too.
const PATIENCE: Duration = Duration::from_secs(60);
/// How far back one looks for who emits an address now.
const NOW: Duration = Duration::from_millis(500);
/// No loss has become known for so long: longer than a sample waits.
const NO_LOSS: Duration = Duration::from_millis(1300);
const PAUSE: Duration = Duration::from_millis(100);
/// A machine that lets a pod wait for so long between two samples may keep a node from answering for a second, too.
const STALL_MS: f64 = 400.0;

/// A violation and the round in which it was seen.
#[derive(Debug, Clone)]
pub(super) struct ReportedViolation {
    pub(super) plan: RoundPlan,
    pub(super) message: String,
    kind: String,
    /// How often it was seen in this round, first and last.
    count: u64,
    first: SystemTime,
    last: SystemTime,
}

impl ReportedViolation {
    pub(super) fn extent(&self) -> String {
        let time = self.last.duration_since(self.first).unwrap_or_default();
        format!("{} times within {} ms", self.count, time.as_millis())
    }
}

/// The run so far.
pub(super) struct Soak {
    pub(super) cluster: LoadedCluster,
    wire: Wire,
    /// Of this round, by caller.
    samples: Vec<Vec<ConnectionSample>>,
    last_loss: Instant,
    pub(super) violations: Vec<ReportedViolation>,
    pub(super) table: FaultTable,
    /// Frames that the capture could not read in time.
    pub(super) missed: u32,
    /// How many watches agents have together at rest.
    watches: usize,
    /// What the cluster has been waited for last.
    last_unrest: String,
    /// The longest times between two samples of a pod, in milliseconds, one for each round: the machine's pace.
    pub(super) stalls_ms: Vec<f64>,
}

impl Soak {
    pub(super) fn new(cluster: LoadedCluster) -> Result<Self> {
        let own = |node: NodeNumber| [node.address().both(), node.second_address().both()].concat();
        let hosts = cluster.nodes().into_iter().flat_map(own).collect();
        let samples = cluster.callers.iter().map(|_| Vec::new()).collect();
        let mut soak = Self {
            cluster,
            wire: Wire::new(hosts),
            samples,
            last_loss: Instant::now(),
            violations: Vec::new(),
            table: FaultTable::new(),
            missed: 0,
            watches: 0,
            last_unrest: String::new(),
            stalls_ms: Vec::new(),
        };
        soak.be_strict()?;
        Ok(soak)
    }

    /// The cluster is at rest before the first round.
    pub(super) fn begin(&mut self, plan: &RoundPlan) -> Result<()> {
        self.settle(plan, Instant::now())?;
        self.watches = self.cluster.watches();
        Ok(())
    }

    /// Plays a round; one line about it.
    pub(super) fn play(&mut self, plan: &RoundPlan) -> Result<String> {
        let before = self.cluster.holders()?;
        let gateway = before.get(plan.subject).copied().flatten().context("the address has no node")?;
        let (leader, _) = self.cluster.base.leader()?.context("no controller leads")?;
        let target = FaultTarget { gateway, leader, subject: plan.subject };
        self.pump(plan);
        self.samples.iter_mut().for_each(Vec::clear);
        let snapshots: Vec<StreamSnapshot> =
            self.cluster.callers.iter().map(|caller| caller.streams.snapshot()).collect();
        self.be_lenient(plan)?;

        let cost =
            (plan.fault == Fault::ApiServer).then(|| OutageCost::of(&mut self.cluster.base.agents)).transpose()?;
        let begun = Instant::now();
        inject::begin(&mut self.cluster, plan.fault, target)?;
        let mut again = plan.again();
        while begun.elapsed() < plan.lasts {
            std::thread::sleep(PAUSE.min(plan.lasts.saturating_sub(begun.elapsed())));
            self.pump(plan);
            if again.is_some_and(|time| begun.elapsed() >= time) {
                inject::begin(&mut self.cluster, plan.fault, target)?;
                again = plan.again().map(|time| begun.elapsed() + time);
            }
        }
        let paid = cost
            .map(|before| Ok::<_, anyhow::Error>((OutageCost::of(&mut self.cluster.base.agents)?, before)))
            .transpose()?;
        inject::end(&mut self.cluster, plan.fault, target)?;
        let ended = Instant::now();
        let rest = self.settle(plan, ended)?;
        self.be_strict()?;
        let after = self.cluster.holders()?;
        let line = self.account(plan, target, (&before, &after), &snapshots, (begun, ended, rest));
        Ok(match paid {
            Some((now, before)) => format!("{line}; {}", self.charge(plan, &now, &before)),
            None => line,
        })
    }

    /// What a fault has cost the agents, as text. After a pause of the machine they warn about each other.
    fn charge(&mut self, plan: &RoundPlan, now: &OutageCost, before: &OutageCost) -> String {
        let stood_still = self.stalls_ms.last().is_some_and(|stall| *stall >= STALL_MS);
        if let Some(message) = now.excess(before).filter(|_| !stood_still) {
            self.tell(plan, Violation { kind: "toll".to_owned(), message, at: SystemTime::now() });
        }
        now.since(before)
    }

    /// A fault that leaves the path whole moves nothing, and nothing is lost. A machine that stood still proves nothing.
    fn judge_whole(&mut self, plan: &RoundPlan, row: &SoakRow, stall_ms: f64) {
        let lost = match plan.fault.effect() {
            // Only the addresses of this interface move.
            Effect::FailsOver if plan.fault.is_of_further_interface() => row.others_lost,
            Effect::Nothing => row.lost,
            Effect::Interrupts => row.others_lost,
            Effect::FailsOver | Effect::HandsOver | Effect::Changes => return,
        };
        let moved = if plan.fault.is_of_further_interface() { 0 } else { row.moved };
        if stall_ms >= STALL_MS || (moved, lost) == (0, 0) {
            return;
        }
        let moved = if moved > 0 { "an address has moved, and " } else { "" };
        let message = format!("{moved}{lost} samples are lost");
        self.tell(plan, Violation { kind: "not whole".to_owned(), message, at: SystemTime::now() });
    }

    /// Takes what has been seen, and judges it.
    fn pump(&mut self, plan: &RoundPlan) {
        let (captured, missed) = self.cluster.take_captured();
        self.missed = self.missed.max(missed);
        let found = self.wire.judge(&captured, is_egress);
        for violation in found {
            self.tell(plan, violation);
        }
        for (caller, samples) in self.cluster.callers.iter().zip(&mut self.samples) {
            let new = caller.sampler.take();
            if new.iter().any(|sample| sample.answered.is_none()) {
                self.last_loss = Instant::now();
            }
            samples.extend(new);
        }
    }

    fn tell(&mut self, plan: &RoundPlan, violation: Violation) {
        // A lab that is being taken down keeps no promise.
        yield_to_signal();
        let Violation { kind, message, at } = violation;
        let known = self.violations.iter_mut().find(|found| found.plan.round == plan.round && found.kind == kind);
        if let Some(found) = known {
            found.count += 1;
            found.last = found.last.max(at);
            return;
        }
        println!("VIOLATION in round {} ({}): {message}", plan.round, plan.fault.name());
        self.violations.push(ReportedViolation { plan: *plan, message, kind, count: 1, first: at, last: at });
    }

    /// What is right at the addresses of callers when nothing changes.
    fn be_strict(&mut self) -> Result<()> {
        let egress = self.cluster.egress()?;
        for caller in &self.cluster.callers {
            self.wire.set_right(caller.server_address, [egress[&caller.subject]].into());
        }
        Ok(())
    }

    /// While an object changes, its callers may show what was right before, and what is right without it.
    fn be_lenient(&mut self, plan: &RoundPlan) -> Result<()> {
        if plan.fault.effect() != Effect::Changes {
            return Ok(());
        }
        let egress = self.cluster.egress()?;
        // Callers of one server may show what is right for any of them.
        let mut right: BTreeMap<IpAddr, BTreeSet<IpAddr>> = BTreeMap::new();
        for caller in self.cluster.callers.iter().filter(|caller| caller.subject == plan.subject) {
            let sources = right.entry(caller.server_address).or_default();
            sources.insert(egress[&caller.subject]);
            if plan.fault == Fault::Recreate {
                sources.extend(caller.own.iter().copied());
            } else {
                sources.extend(self.cluster.other_address(caller.subject)?);
            }
        }
        for (server_address, sources) in right {
            self.wire.set_right(server_address, sources);
        }
        Ok(())
    }

    /// Waits until the cluster is at rest; how long that took.
    fn settle(&mut self, plan: &RoundPlan, ended: Instant) -> Result<Duration> {
        let first_lease = self.cluster.base.leader()?.map(|(_, renewed)| renewed);
        let mut holders = self.cluster.holders()?;
        let mut quiet_since: Option<Instant> = None;
        let (mut differs_since, mut rested): (Option<Instant>, _) = (None, None);
        loop {
            self.pump(plan);
            let now = self.cluster.holders()?;
            let changed = now != holders;
            holders = now;
            let serves = self.cluster.agents_serve()?;
            if changed || !serves {
                quiet_since = None;
            } else if quiet_since.is_none() {
                quiet_since = Some(Instant::now());
            }
            let disagreement = self.disagreement(&holders);
            match &disagreement {
                Some(_) => drop(differs_since.get_or_insert_with(Instant::now)),
                None => differs_since = None,
            }
            let leads = self.cluster.base.leader()?.map(|(_, renewed)| renewed) != first_lease;
            let unrest = disagreement.clone().or_else(|| self.unrest(serves, leads));
            match (&unrest, rested) {
                (None, None) => rested = Some(ended.elapsed()),
                (Some(message), _) => {
                    rested = None;
                    self.last_unrest.clone_from(message);
                }
                (None, Some(_)) => {}
            }
            // All the time since it is quiet: a machine that is busy may show late what was right long ago.
            let long = |since: Option<Instant>| since.is_some_and(|since| since.elapsed() > QUIET);
            if let Some(message) = disagreement.filter(|_| long(quiet_since) && long(differs_since)) {
                let message = format!("{} s of quiet, and {message}", QUIET.as_secs());
                let kind = "disagreement".to_owned();
                self.tell(plan, Violation { kind, message, at: SystemTime::now() });
            }
            if let Some(rested) = rested.filter(|_| ended.elapsed() >= REST) {
                return Ok(rested);
            }
            if let Some(message) = unrest.filter(|_| ended.elapsed() > PATIENCE) {
                let message = format!("no rest after {} s: {message}", PATIENCE.as_secs());
                self.tell(plan, Violation { kind: "no rest".to_owned(), message, at: SystemTime::now() });
                return Ok(ended.elapsed());
            }
            std::thread::sleep(PAUSE);
        }
    }

    /// Where status and data path differ.
    fn disagreement(&self, holders: &[Option<NodeNumber>]) -> Option<String> {
        let since = SystemTime::now() - NOW;
        for (subject, holder) in self.cluster.subjects.iter().zip(holders) {
            let Ok(address) = subject.address() else { continue };
            let Some(holder) = holder else { return Some(format!("{address} has no node")) };
            let senders = self.wire.senders(address, since);
            if senders != [*holder].into() {
                let seen = self.wire.history(address, SystemTime::now());
                return Some(format!("{address} is on {} by its status, and was sent by {seen}", holder.name()));
            }
        }
        None
    }

    /// What else is not as it is at rest.
    fn unrest(&self, serves: bool, leads: bool) -> Option<String> {
        if !serves {
            return Some("an agent does not serve yet".to_owned());
        }
        if !leads {
            return Some("the lease was not renewed".to_owned());
        }
        let watches = self.cluster.watches();
        if watches < self.watches {
            return Some(format!("{watches} of {} watches are there", self.watches));
        }
        (self.last_loss.elapsed() < NO_LOSS).then(|| "connections fail".to_owned())
    }

    /// Enters a round into the table; a line about it.
    fn account(
        &mut self,
        plan: &RoundPlan,
        target: FaultTarget,
        (before, after): (&[Option<NodeNumber>], &[Option<NodeNumber>]),
        snapshots: &[StreamSnapshot],
        (begun, ended, rest): (Instant, Instant, Duration),
    ) -> String {
        let fails_over = plan.fault.effect() == Effect::FailsOver;
        let on_leader = fails_over && target.gateway == target.leader;
        let name = plan.fault.name().to_owned() + if on_leader { ", of the leader" } else { "" };
        let mut row = SoakRow { rounds: 1, moved: u64::from(before != after), ..SoakRow::default() };
        row.rest_ms = rest.as_secs_f64() * 1000.0;
        let mut stall = 0.0_f64;
        for ((caller, samples), snapshot) in self.cluster.callers.iter().zip(&self.samples).zip(snapshots) {
            stall = stall.max(longest_gap(samples));
            // Pods on a node that is cut off are cut off with it.
            if fails_over && !plan.fault.is_of_further_interface() && caller.node == target.gateway {
                row.back_ms.push(back(samples, ended));
                continue;
            }
            let interruption = interruption(samples, begun);
            let concerned = match plan.fault.effect() {
                Effect::Nothing => true,
                Effect::Changes => caller.subject == plan.subject,
                _ if plan.fault.is_of_further_interface() => caller.subject == plan.subject,
                Effect::FailsOver | Effect::HandsOver | Effect::Interrupts => {
                    before[caller.subject] == Some(target.gateway)
                }
            };
            if !concerned {
                row.others_lost += interruption.lost;
                continue;
            }
            row.add(interruption);
            let (lived, live) = caller.streams.survivors(snapshot, ended);
            row.streams += lived;
            row.survived += live;
        }
        self.stalls_ms.push(stall);
        self.judge_whole(plan, &row, stall);
        let line = format!("{} ({})", line(plan, target, &row), self.last_unrest);
        self.table.entry(name).or_default().merge(row);
        line
    }
}

fn line(plan: &RoundPlan, target: FaultTarget, row: &SoakRow) -> String {
    let at = target.node(plan.fault).map(|node| format!(" {}", node.name())).unwrap_or_default();
    let led = if target.gateway == target.leader && !at.is_empty() { " (leads)" } else { "" };
    let times: Vec<String> = row.again_ms.iter().map(|time| format!("{time:.0}")).collect();
    let times = if times.is_empty() { String::new() } else { format!(", again after {} ms", times.join(", ")) };
    format!(
        "round {}: {}{at}{led} for {:.1} s: {} of {} lost{times}; {} of {} streams live; {} lost by others; at rest \
         after {:.1} s",
        plan.round,
        plan.fault.name(),
        plan.lasts.as_secs_f64(),
        row.lost,
        row.asked,
        row.survived,
        row.streams,
        row.others_lost,
        row.rest_ms / 1000.0
    )
}

/// Addresses of the lab's networks that are neither a node's nor the router's: those that objects have.
fn is_egress(source: IpAddr) -> bool {
    match source {
        IpAddr::V4(v4) => {
            let [a, b, c, d] = v4.octets();
            [[172, 18, 0], [10, 10, 10]].contains(&[a, b, c]) && (100..200).contains(&d)
        }
        IpAddr::V6(v6) => v6.segments()[..4] == [0xfd00, 0x172, 0x18, 0] && v6.segments()[7] >= 0x100,
    }
}

/// From the end of a fault until the last loss, in milliseconds.
fn back(samples: &[ConnectionSample], ended: Instant) -> f64 {
    let lost = samples.iter().filter(|sample| sample.answered.is_none()).map(|sample| sample.sent).max();
    lost.map_or(0.0, |last| last.saturating_duration_since(ended).as_secs_f64() * 1000.0)
}

/// The longest time between two samples, in milliseconds.
fn longest_gap(samples: &[ConnectionSample]) -> f64 {
    let mut times: Vec<Instant> = samples.iter().map(|sample| sample.sent).collect();
    times.sort_unstable();
    let gaps = times.windows(2).map(|pair| pair[1].duration_since(pair[0]).as_secs_f64() * 1000.0);
    gaps.fold(0.0, f64::max)
}
