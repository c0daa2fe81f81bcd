//! No wrong source address, whatever happens: callers of every fate call all the while, the cluster changes at random,
//! and a capture at the nodes' ports of the switch sees every packet that leaves them. And since a check that cannot
//! fail proves nothing: the same judge on the same capture says no when the programs and what stands behind them are taken
//! off, and when one caller's packets are taken for another's.
//!
//! `callers`: who calls. `chaos`: what happens. `traffic`: how they call. `judge`: who may show which address when.
//! `devices`: what leaves while devices are recreated.

mod callers;
mod chaos;
pub(super) mod devices;
mod judge;
mod traffic;

use crate::prelude::*;
use callers::{CallerKind, LeakCaller, SERVER_ADDRESSES, judge_as};
use chaos::{Chaos, pause};
use egress_lab::capture::{CaptureKey, Seen};
use egress_lab::pins::bpftool;
use egress_lab::random::SplitMix64;
use judge::Judgement;
use traffic::CallerTraffic;

/// How long the cluster changes.
const CHAOS: Duration = Duration::from_secs(60);
/// The seed, unless the environment names another.
const SEED: u64 = 7;
const SEED_VARIABLE: &str = "EGRESS_LEAK_SEED";

fn begin(context: &LabContext) -> Result<(Chaos, Capture, Vec<CallerTraffic>)> {
    let seed = std::env::var(SEED_VARIABLE).ok().and_then(|text| text.parse().ok()).unwrap_or(SEED);
    println!("seed {seed} ({SEED_VARIABLE} names another)");
    let cluster = TestCluster::with_crd(context, callers::pods(), SERVER_ADDRESSES, |_| {})?;
    let mut chaos = Chaos::new(cluster, SplitMix64::new(seed))?;
    chaos.settle()?;
    let server_addresses: BTreeSet<IpAddr> =
        chaos.callers.iter().flat_map(|caller| caller.server_address.both()).collect();
    let capture = Capture::watching(&chaos.cluster.lab, server_addresses)?;
    let start = |caller: &LeakCaller| CallerTraffic::start(chaos.cluster.pod(caller.name)?, caller.server_address);
    let chatter = chaos.callers.iter().map(start).collect::<Result<Vec<_>>>()?;
    Ok((chaos, capture, chatter))
}

pub(super) fn nothing_leaks(context: &LabContext) -> Result<()> {
    let (mut chaos, capture, chatter) = begin(context)?;
    let witness = chaos.cluster.pod("never1")?.netns.clone();
    let flows =
        plan::SERVER.both().map(|to| TrafficFlow::udp(&witness, (to, ECHO_PORT).into(), Duration::from_millis(20)));
    let outcome = play(&mut chaos);
    if outcome.is_err() {
        println!("{}", chaos.cluster.log_tails());
    }
    for flow in flows {
        let report = flow?.finish()?;
        println!("never1: {} datagrams, {} lost", report.sent, report.lost());
        ensure!(report.lost() == 0, "an unselected pod has lost packets: {report:?}");
    }
    chatter.into_iter().try_for_each(CallerTraffic::finish)?;
    let seen = capture.finish()?;
    let judgements = rule(&chaos.callers, &seen);
    println!("{}{} frames captured", callers::table(&judgements, &seen), seen.frames);
    for caller in &chaos.callers {
        callers::show_wrong(caller, &caller.judge(&seen));
    }
    outcome?;
    seen.check()?;
    let elsewhere = |key: &CaptureKey| {
        !plan::is_lan(key.destination) && !chaos.callers.iter().any(|c| c.server_address.is(key.destination))
    };
    let strays = seen.packets(|key| elsewhere(key) && seen.class(key.source) == AddressKind::Pod);
    ensure!(strays == 0, "{strays} packets with a pod's address have left the nodes");
    for (kind, judgement) in &judgements {
        if let Some(first) = judgement.wrong.first() {
            anyhow::bail!(
                "{} packets of {kind:?} callers have a wrong source; the first: {first:?}",
                judgement.wrong.len()
            );
        }
        ensure!(
            (judgement.packets() > 500) == (*kind != CallerKind::Silent),
            "{kind:?} callers sent {}",
            judgement.packets()
        );
    }
    ensure!(judgements[&CallerKind::Silent].packets() == 0, "what shall be dropped is not");
    Ok(())
}

fn play(chaos: &mut Chaos) -> Result<()> {
    let begin = Instant::now();
    let mut random = SplitMix64::new(1);
    while begin.elapsed() < CHAOS {
        let what = chaos.step()?;
        println!("{:>6.1} s: {what}", begin.elapsed().as_secs_f32());
        std::thread::sleep(pause(&mut random));
    }
    chaos.settle()
}

fn rule(callers: &[LeakCaller], seen: &Seen) -> BTreeMap<CallerKind, Judgement> {
    let mut judgements: BTreeMap<CallerKind, Judgement> = BTreeMap::new();
    for caller in callers {
        judgements.entry(caller.kind).or_default().add(caller.judge(seen));
    }
    judgements
}

/// What the test above would say of a product that leaks.
pub(super) fn judge_can_say_no(context: &LabContext) -> Result<()> {
    let (mut chaos, capture, chatter) = begin(context)?;
    let caller = |name: &str| chaos.callers.iter().find(|caller| caller.name == name).cloned();
    let (Some(always), Some(never)) = (caller("always1"), caller("never1")) else { anyhow::bail!("no callers") };
    until_true("both have called", EFFECT, || {
        let seen = capture.seen()?;
        Ok(always.judge(&seen).packets() > 50 && never.judge(&seen).packets() > 50)
    })?;
    let seen = capture.seen()?;
    ensure!(
        rule(&chaos.callers, &seen).values().all(|judgement| judgement.wrong.is_empty()),
        "a leak before there is one"
    );
    for (history, server_address) in [(&always, &never), (&never, &always)] {
        let judgement = judge_as(&history.history, server_address.server_address, &seen);
        println!("{}'s packets taken for {}'s: {} wrong", server_address.name, history.name, judgement.wrong.len());
        ensure!(
            judgement.wrong.len() as u64 == judgement.packets() && judgement.packets() > 0,
            "the judge takes one for another"
        );
    }
    // Its agent would put the program and the table back.
    chaos.cluster.agent(1)?.pause()?;
    let first = chaos.cluster.lab.node(node(1)?);
    let link = AgentPins::of(first).link_path("from_pod")?;
    bpftool(&["link", "detach", "pinned", &link.to_string_lossy()])?;
    until_true("the leak guard drops what no program handles", EFFECT, || Ok(held(first)? > 20))?;
    ensure!(always.judge(&capture.seen()?).wrong.is_empty(), "the second line lets packets pass");
    first.host.exec("nft", &["delete", "table", "inet", "egress-agent"])?;
    let wrong = until("the judge sees the leak", EFFECT, || {
        let judgement = always.judge(&capture.seen()?);
        Ok((judgement.wrong.len() > 20).then_some(judgement.wrong))
    })?;
    let of_the_node = wrong.iter().filter(|packet| always.node.is(packet.source)).count();
    println!(
        "steering and second line taken off: {} packets wrong, {of_the_node} with the node's address",
        wrong.len()
    );
    ensure!(of_the_node == wrong.len(), "what leaks has another address than the node's");
    ensure!(never.judge(&capture.seen()?).wrong.is_empty(), "a caller that is not selected is judged to leak");
    chaos.cluster.agent(1)?.resume()?;
    chatter.into_iter().try_for_each(CallerTraffic::finish)
}

/// Packets that the table behind the programs has dropped.
fn held(node: &LabNode) -> Result<u64> {
    let rules = node.host.exec("nft", &["list", "table", "inet", "egress-agent"])?;
    let counts = rules.split("counter packets ").skip(1).filter_map(|rest| rest.split(' ').next());
    Ok(counts.map(str::parse::<u64>).sum::<Result<_, _>>()?)
}
