//! The faults, one function each.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use crate::prelude::*;

use super::fault_test::FaultTest;
use super::probes;
use egress_lab::cut::NetworkCut;
use egress_lab::machine::StoppedMachine;

/// What must become of the addresses of the node that is hit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ExpectedMove {
    Moves,
    Stays,
    /// Both are right.
    Either,
}

/// What may be chosen for a run.
pub(super) struct FaultOptions {
    /// How long the API server is away.
    pub(super) outage: Duration,
    /// How old the backup is that is put back.
    pub(super) backup_age: Duration,
}

pub(super) struct FaultCase {
    pub(super) name: &'static str,
    pub(super) what: &'static str,
    /// Of agents and controllers, beside the lab's.
    pub(super) arguments: &'static [&'static str],
    pub(super) expected: ExpectedMove,
    /// Puts the fault on and takes it off again.
    pub(super) play: fn(&mut FaultTest<'_>, &FaultOptions) -> Result<()>,
}

/// Saves time where the grace is no matter: a dead agent's addresses move after some 8 s instead of 34.
const SHORT_GRACE: &[&str] = &["--egressip-reachability-grace=4"];
/// Longer than the addresses of a dead agent take to move with that: 2 T + G + 1.75 T.
const PAST_GRACE: Duration = Duration::from_secs(20);
const PATIENCE: Duration = Duration::from_secs(20);
const BETWEEN_MOVES: Duration = Duration::from_secs(5);
const POLL_INTERVAL: Duration = Duration::from_millis(2);

pub(super) const CASES: &[FaultCase] = &[
    FaultCase {
        name: "agent-killed",
        what: "agent of a gateway killed and kept from starting for 120 s, its node runs on",
        arguments: &[],
        expected: ExpectedMove::Moves,
        play: |test, _| agent_killed(test),
    },
    FaultCase {
        name: "crash-at-start",
        what: "agent of a gateway in a crash loop: ended as soon as it runs",
        arguments: SHORT_GRACE,
        expected: ExpectedMove::Either,
        play: |test, _| crash_loop(test, Point::Started),
    },
    FaultCase {
        name: "crash-at-maps",
        what: "the same, ended when it has opened its maps",
        arguments: SHORT_GRACE,
        expected: ExpectedMove::Either,
        play: |test, _| crash_loop(test, Point::Maps),
    },
    FaultCase {
        name: "crash-at-programs",
        what: "the same, ended when it has loaded some of its programs",
        arguments: SHORT_GRACE,
        expected: ExpectedMove::Either,
        play: |test, _| crash_loop(test, Point::Programs),
    },
    FaultCase {
        name: "crash-at-attached",
        what: "the same, ended when its programs are attached",
        arguments: SHORT_GRACE,
        expected: ExpectedMove::Either,
        play: |test, _| crash_loop(test, Point::Attached),
    },
    FaultCase {
        name: "crash-at-lease",
        what: "the same, ended when it has renewed its lease for the first time",
        arguments: SHORT_GRACE,
        expected: ExpectedMove::Either,
        play: |test, _| crash_loop(test, Point::Lease),
    },
    FaultCase {
        name: "bad-rollout",
        what: "agents of half of the nodes, both gateways among them, replaced by a program that ends with an error for 20 s",
        arguments: SHORT_GRACE,
        expected: ExpectedMove::Moves,
        play: |test, _| bad_rollout(test),
    },
    FaultCase {
        name: "cut-everything",
        what: "a gateway cut from everything for 20 s, its agent restarted meanwhile",
        arguments: SHORT_GRACE,
        expected: ExpectedMove::Moves,
        play: |test, _| cut_gateway(test, &NetworkCut::Everything(test.gateway)),
    },
    FaultCase {
        name: "cut-api-server",
        what: "a gateway cut from the API server alone for 20 s, its agent restarted meanwhile",
        arguments: SHORT_GRACE,
        expected: ExpectedMove::Either,
        play: |test, _| cut_gateway(test, &NetworkCut::ApiServer(test.gateway)),
    },
    FaultCase {
        name: "cut-nodes",
        what: "a gateway cut from all other nodes for 20 s, its agent restarted meanwhile",
        arguments: SHORT_GRACE,
        expected: ExpectedMove::Moves,
        play: |test, _| cut_gateway(test, &NetworkCut::Nodes(test.gateway)),
    },
    FaultCase {
        name: "cut-controllers",
        what: "the nodes of both controllers and a gateway cut from all else for 20 s",
        arguments: &[],
        expected: ExpectedMove::Either,
        play: |test, _| cut_controllers(test),
    },
    FaultCase {
        name: "api-server-away",
        what: "API server away, a gateway's machine stopped for 5 s in the middle",
        arguments: &[],
        expected: ExpectedMove::Either,
        play: api_server_away,
    },
    FaultCase {
        name: "etcd-restored",
        what: "API server set back to a backup, since which the addresses have moved to and fro",
        arguments: &[],
        expected: ExpectedMove::Either,
        play: etcd_restored,
    },
    FaultCase {
        name: "machine-stopped",
        what: "a gateway's machine stopped for 3 s; what was sent to it meanwhile comes when it runs again",
        arguments: &[],
        expected: ExpectedMove::Moves,
        play: |test, _| machine_stopped(test, Duration::from_secs(3)),
    },
    FaultCase {
        name: "machine-stopped-longer",
        what: "the same for 8 s",
        arguments: &[],
        expected: ExpectedMove::Moves,
        play: |test, _| machine_stopped(test, Duration::from_secs(8)),
    },
    FaultCase {
        name: "forged-probes",
        what: "health probes from a pod to a gateway: not signed, wrongly signed, replayed, malformed, many",
        arguments: &[],
        expected: ExpectedMove::Stays,
        play: |test, _| probes::play(test),
    },
    FaultCase {
        name: "node-deleted",
        what: "Node object of a gateway deleted while its agent runs, created again after 10 s",
        arguments: &[],
        expected: ExpectedMove::Moves,
        play: |test, _| node_deleted(test),
    },
];

fn agent_killed(test: &mut FaultTest<'_>) -> Result<()> {
    test.say("the agent is killed");
    test.agent().kill()?;
    test.wait(Duration::from_secs(120))?;
    test.say("the agent starts");
    test.agent().restart()?;
    test.cluster.wait_for_agents()
}

/// Where an agent is in its start, as its process shows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Point {
    /// The program runs.
    Started,
    /// It holds a map.
    Maps,
    /// It holds programs; those of its former run are still attached.
    Programs,
    /// It has logged that its programs are attached.
    Attached,
    /// The lease in the kernel ends later than before.
    Lease,
}

fn crash_loop(test: &mut FaultTest<'_>, point: Point) -> Result<()> {
    let node = test.cluster.base.lab.node(test.gateway).clone();
    let (end, mut starts, mut reached) = (Instant::now() + PAST_GRACE, 0, 0);
    test.say("the crash loop begins");
    while Instant::now() < end {
        let lease = AgentPins::of(&node).lease_end()?;
        test.agent().restart()?;
        starts += 1;
        let patience = Instant::now() + PATIENCE;
        while Instant::now() < patience {
            if is_at(test, &node, point, lease)? {
                reached += 1;
                break;
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        test.agent().kill()?;
        test.wait(Duration::from_millis(100))?;
    }
    ensure!(reached > 0, "the agent did not get to the point where it is ended");
    test.say(&format!("the crash loop ends: {starts} starts, ended at that point {reached} times"));
    test.agent().restart()?;
    test.cluster.wait_for_agents()
}

fn is_at(test: &mut FaultTest<'_>, node: &LabNode, point: Point, lease: Duration) -> Result<bool> {
    let binary = test.built.agent.clone();
    let agent = test.agent();
    let pid = agent.pid()?.with_context(|| format!("the agent has ended by itself:\n{}", agent.log_tails()))?;
    let folder = PathBuf::from(format!("/proc/{pid}"));
    let holds = |kind: &str| {
        let files = fs::read_dir(folder.join("fd")).into_iter().flatten().flatten();
        files
            .filter(|file| fs::read_link(file.path()).is_ok_and(|target| target.to_string_lossy().contains(kind)))
            .count()
    };
    match point {
        Point::Started => Ok(fs::read_link(folder.join("exe")).is_ok_and(|program| program == binary)),
        Point::Maps => Ok(holds("bpf-map") > 0),
        Point::Programs => Ok(holds("bpf-prog") > 1),
        Point::Attached => agent.has_loaded(),
        Point::Lease => Ok(AgentPins::of(node).lease_end()? > lease),
    }
}

fn bad_rollout(test: &mut FaultTest<'_>) -> Result<()> {
    let bad = test.logs.join("agent-that-ends");
    fs::write(&bad, "#!/bin/sh\necho 'error: a bad rollout'\nexit 1\n")?;
    fs::set_permissions(&bad, fs::Permissions::from_mode(0o700))?;
    let half = [3, 4].map(NodeNumber::new).into_iter().collect::<Result<Vec<_>>>()?;
    test.say("the rollout: agents of node3 and node4 end with an error");
    for node in &half {
        test.cluster.agent(*node).roll_out(&bad);
    }
    let end = Instant::now() + PAST_GRACE;
    while Instant::now() < end {
        for node in &half {
            test.cluster.agent(*node).restart()?;
        }
        test.wait(Duration::from_secs(1))?;
    }
    let good = test.built.agent.clone();
    for node in &half {
        let agent = test.cluster.agent(*node);
        agent.roll_out(&good);
        agent.restart()?;
    }
    test.say("the rollout is corrected");
    test.cluster.wait_for_agents()
}

fn cut_gateway(test: &mut FaultTest<'_>, cut: &NetworkCut) -> Result<()> {
    // Pods reach the API server as little as they did.
    if !matches!(cut, NetworkCut::ApiServer(_)) {
        test.are_away(&[test.gateway]);
    }
    test.say("the cut");
    test.cut(cut)?;
    test.wait(Duration::from_secs(5))?;
    test.say("the agent is restarted");
    test.agent().restart()?;
    test.wait(PAST_GRACE - Duration::from_secs(5))?;
    test.say("the cut is mended");
    test.mend(cut)?;
    test.cluster.wait_for_agents()
}

fn cut_controllers(test: &mut FaultTest<'_>) -> Result<()> {
    let mut group = vec![NodeNumber::new(1)?, NodeNumber::new(2)?, test.gateway];
    group.sort_unstable();
    test.are_away(&group);
    let cut = NetworkCut::Group(group);
    test.say("the cut");
    test.cut(&cut)?;
    test.wait(Duration::from_secs(20))?;
    test.say("the cut is mended");
    test.mend(&cut)?;
    test.cluster.wait_for_agents()
}

fn api_server_away(test: &mut FaultTest<'_>, options: &FaultOptions) -> Result<()> {
    let half = options.outage.saturating_sub(Duration::from_secs(5)) / 2;
    test.say("the API server is away");
    test.cluster.base.set_outage(true)?;
    test.wait(half)?;
    stop_machine(test, Duration::from_secs(5))?;
    test.wait(half)?;
    test.cluster.base.set_outage(false)?;
    test.say("the API server is back");
    test.cluster.wait_for_agents()
}

fn etcd_restored(test: &mut FaultTest<'_>, options: &FaultOptions) -> Result<()> {
    let gateway = test.gateway;
    let server = test.cluster.base.api.in_memory().context("the lab's own API server")?;
    let (backup, saved) = (server.save(), Instant::now());
    test.say("the backup is made; then gateways lose their labels and get them back, and all addresses move by plan");
    let mut moves = 0;
    loop {
        let from: BTreeSet<NodeNumber> = test.cluster.holders()?.into_iter().flatten().collect();
        from.iter().try_for_each(|node| test.cluster.assignable(*node, false))?;
        let end = Instant::now() + PATIENCE;
        while test.cluster.holders()?.iter().any(|holder| holder.is_none_or(|holder| from.contains(&holder))) {
            ensure!(Instant::now() < end, "the addresses do not move");
            test.wait(Duration::from_millis(100))?;
        }
        moves += 1;
        test.wait(BETWEEN_MOVES)?;
        if from.contains(&gateway) && saved.elapsed() >= options.backup_age {
            break;
        }
        from.iter().try_for_each(|node| test.cluster.assignable(*node, true))?;
        test.wait(BETWEEN_MOVES)?;
    }
    let holder = test.cluster.holders()?[0].map(NodeNumber::name).unwrap_or_default();
    let server = test.cluster.base.api.in_memory().context("the lab's own API server")?;
    let lost = server.go_back(&backup);
    let age = saved.elapsed().as_secs_f64();
    test.say(&format!(
        "all addresses have moved {moves} times, the first one is on {holder}; the backup is put back: {lost} versions and \
         {age:.0} s old, it names {}",
        gateway.name()
    ));
    test.wait(Duration::from_secs(5))?;
    test.cluster.wait_for_agents()
}

fn machine_stopped(test: &mut FaultTest<'_>, time: Duration) -> Result<()> {
    stop_machine(test, time)?;
    test.cluster.wait_for_agents()
}

fn stop_machine(test: &mut FaultTest<'_>, time: Duration) -> Result<()> {
    test.are_away(&[test.gateway]);
    test.say("the machine stands still");
    let agent = &mut test.cluster.base.agents[test.gateway.index()];
    let machine = StoppedMachine::stop(&test.cluster.base.lab, agent)?;
    test.wait(time)?;
    let agent = &mut test.cluster.base.agents[test.gateway.index()];
    let resumed = machine.resume(&test.cluster.base.lab, agent)?;
    let (frames, after) = (resumed.frames, resumed.after.as_secs_f64());
    test.say(&format!("it runs again after {after:.1} s, with {frames} frames that have waited"));
    Ok(())
}

fn node_deleted(test: &mut FaultTest<'_>) -> Result<()> {
    let gateway = test.gateway;
    test.say("the Node is deleted");
    test.cluster.delete_node(gateway)?;
    test.wait(Duration::from_secs(10))?;
    test.say("the Node is created again");
    test.cluster.create_node(gateway)?;
    test.cluster.wait_for_agents()
}
