use futures::FutureExt;
use tokio::sync::{mpsc, watch};

use super::*;
use crate::metrics::facts::Served;
use egress_kube::leader_election::leadership;

struct Agent {
    station: HealthPage,
    questions: mpsc::Receiver<oneshot::Sender<NodeFacts>>,
    ready: watch::Sender<Ready>,
    beats: (Heartbeat, Heartbeat),
}

/// One that runs and has no kernel.
fn agent() -> Agent {
    let station = HealthPage::new(Who::Agent, ApiOutages::new("http://nowhere"));
    let (node, questions) = mpsc::channel(16);
    let (ready, is_ready) = watch::channel(Ready::default());
    let beats = (Heartbeat::default(), Heartbeat::default());
    station.runs(Running::Agent(AgentSources {
        node: Arc::new(move |answer| {
            let node = node.clone();
            async move { node.send(answer).await.is_ok() }.boxed()
        }),
        ready: is_ready,
        uplink: watch::channel(UplinkState::Works).1,
        lease_state: watch::channel(LeaseState::Holds).1,
        demand: watch::channel(LeaseDemand::default()).1,
        beats: beats.clone(),
    }));
    Agent { station, questions, ready, beats }
}

/// Answers as the node's half does, for as long as it is not aborted.
fn answering(
    mut questions: mpsc::Receiver<oneshot::Sender<NodeFacts>>,
    missing: Option<&str>,
) -> tokio::task::JoinHandle<()> {
    let missing = missing.map(str::to_owned);
    tokio::spawn(async move {
        while let Some(asker) = questions.recv().await {
            drop(asker.send(NodeFacts { missing: missing.clone(), standby: 3, ..NodeFacts::default() }));
        }
    })
}

#[tokio::test]
async fn an_agent_that_starts_lives_and_is_not_ready() {
    let station = HealthPage::new(Who::Agent, ApiOutages::new("http://nowhere"));
    assert_eq!(station.live(), Ok(()));
    assert_eq!(station.ready().await, Err("the programs are being loaded".to_owned()));
    let slow = HealthPage { limits: Limits { starts: Duration::ZERO, ..LIMITS }, ..station };
    let dead = slow.live().expect_err("it hangs");
    assert!(dead.contains("not loaded"), "{dead}");
}

#[tokio::test]
async fn an_agent_that_waits_for_an_uplink_lives_for_as_long_as_it_takes_and_says_what_it_waits_for() {
    let station = HealthPage::new(Who::Agent, ApiOutages::new("http://nowhere"));
    let station = HealthPage { limits: Limits { starts: Duration::from_secs(1), ..LIMITS }, ..station };
    let awaited = station.awaited();
    awaited.set(Some("waiting for an uplink".to_owned()));
    tokio::time::sleep(station.limits.starts).await;
    assert_eq!((station.live(), station.ready().await), (Ok(()), Err("waiting for an uplink".to_owned())));
    awaited.set(None);
    let loads = Err("the programs are being loaded".to_owned());
    assert_eq!((station.live(), station.ready().await), (Ok(()), loads), "loading has its own time");
    tokio::time::sleep(station.limits.starts).await;
    assert!(station.live().is_err(), "it hangs");
}

#[tokio::test]
async fn it_is_ready_when_the_kernel_is_in_step_and_says_what_is_missing_before() {
    let Agent { station, questions, ready, beats: _beats } = agent();
    let half = answering(questions, Some("waiting for pods"));
    assert_eq!(station.ready().await, Err("waiting for pods".to_owned()));
    assert!(!station.facts(usize::MAX).await.ready);
    ready.send_replace(Ready { serving: true, addresses: Vec::new(), ..Ready::default() });
    assert_eq!(station.ready().await, Ok(()));
    assert!(station.facts(usize::MAX).await.ready);
    ready.send_replace(Ready { serving: false, addresses: Vec::new(), ..Ready::default() });
    assert!(station.ready().await.is_err(), "out of step again");
    half.abort();
}

#[tokio::test]
async fn a_nodes_half_that_does_not_move_is_dead_and_one_that_answers_late_lives() {
    let Agent { station, mut questions, ready: _ready, beats: (node, _fence) } = agent();
    assert_eq!(station.facts(usize::MAX).await.node, None, "it is busy");
    assert!(questions.len() <= 1, "and is not asked again and again");
    let station = HealthPage { limits: Limits { moves: Duration::from_millis(200), ..LIMITS }, ..station };
    let dead = station.live().expect_err("it hangs");
    assert!(dead.contains("node's half"), "{dead}");
    node.note();
    assert_eq!(station.live(), Ok(()), "it moves, and has answered nothing yet");
    let asker = questions.recv().await.expect("a question");
    drop(asker.send(NodeFacts { standby: 7, ..NodeFacts::default() }));
    // Nobody waited for that any more.
    tokio::time::sleep(Duration::from_millis(20)).await;
    assert_eq!(station.facts(usize::MAX).await.node.map(|node| node.standby), Some(7));
}

#[tokio::test]
async fn a_fence_that_does_not_look_is_dead_however_well_the_rest_is() {
    let Agent { station, questions, ready: _ready, beats: _beats } = agent();
    let half = answering(questions, None);
    assert_eq!(station.live(), Ok(()));
    let station = HealthPage { limits: Limits { beats: Duration::ZERO, ..LIMITS }, ..station };
    let dead = station.live().expect_err("it hangs");
    assert!(dead.contains("fence"), "{dead}");
    half.abort();
}

#[tokio::test]
async fn a_scrape_does_not_wait_for_a_busy_half_and_shows_what_it_said_before() {
    let Agent { station, questions, ready: _ready, beats: _beats } = agent();
    let half = answering(questions, None);
    assert_eq!(station.facts(usize::MAX).await.node.map(|node| node.standby), Some(3));
    half.abort();
    let begun = Instant::now();
    assert_eq!(station.facts(usize::MAX).await.node.map(|node| node.standby), Some(3));
    assert!(begun.elapsed() < PATIENCE * 4, "{:?}", begun.elapsed());
}

#[tokio::test]
async fn a_readiness_probe_of_a_node_that_serves_asks_nothing_of_it() {
    let Agent { station, mut questions, ready, beats: _beats } = agent();
    ready.send_replace(Ready { serving: true, addresses: Vec::new(), ..Ready::default() });
    assert_eq!(station.ready().await, Ok(()));
    assert!(questions.try_recv().is_err(), "it is busy enough");
}

#[test]
fn a_page_that_shows_a_thousand_reads_no_more() {
    let of = |n: u8| Served { address: [172, 18, 0, n].into(), policy: Some(("a".into(), "u".into())) };
    let served = (1..=9).map(|n| (EgressId(n.into()), of(n))).collect();
    let held = Held { served, ..Held::default() };
    assert_eq!(asked_of(&held, 2), [EgressId(1), EgressId(2)]);
    assert_eq!(asked_of(&held, usize::MAX).len(), 9);
}

#[test]
fn a_node_without_egress_ips_is_not_shown_as_fenced() {
    let shown = |wants| {
        let running = AgentSources {
            node: Arc::new(|_| std::future::ready(false).boxed()),
            ready: watch::channel(Ready::default()).1,
            uplink: watch::channel(UplinkState::Works).1,
            lease_state: watch::channel(LeaseState::Expired(1)).1,
            demand: watch::channel(LeaseDemand { wants, ..LeaseDemand::default() }).1,
            beats: (Heartbeat::default(), Heartbeat::default()),
        };
        facts_of(&running).fenced
    };
    assert_eq!([shown(true), shown(false)], [true, false]);
}

#[tokio::test]
async fn a_controller_is_ready_when_it_could_lead_and_lives_while_it_looks_at_the_lease() {
    let station = HealthPage::new(Who::Controller, ApiOutages::new("http://nowhere"));
    let (synced, is_synced) = watch::channel(false);
    let (leadership, beat) = (leadership().1, Heartbeat::default());
    station.runs(Running::Controller(RunningController { leadership, synced: is_synced, beat }));
    let waits = station.ready().await.expect_err("nothing is listed");
    assert!(waits.contains("lists of EgressIP objects and nodes"), "{waits}");
    synced.send_replace(true);
    assert_eq!((station.ready().await, station.live()), (Ok(()), Ok(())));
    let facts = station.facts(usize::MAX).await;
    assert_eq!((facts.leads, facts.agent.is_none(), facts.ready), (Some(false), true, true));
    let stuck = HealthPage { limits: Limits { election: Duration::ZERO, ..LIMITS }, ..station };
    assert!(stuck.live().is_err());
}
