use tokio::sync::watch;

use super::*;
use crate::controller::leadership::leadership;

struct Agent {
    station: Station,
    questions: mpsc::Receiver<Question>,
    ready: watch::Sender<Ready>,
    fence: Beat,
}

/// One that runs and has no kernel.
fn agent() -> Agent {
    let station = Station::new(Outages::new("http://nowhere"));
    let (node, questions) = mpsc::channel(16);
    let (ready, is_ready) = watch::channel(Ready::default());
    let fence = Beat::default();
    station.runs(Running {
        node,
        ready: is_ready,
        uplink: watch::channel(Uplink::Works).1,
        standing: watch::channel(Standing::Holds).1,
        leadership: leadership().1,
        fence: fence.clone(),
    });
    Agent { station, questions, ready, fence }
}

/// Answers as the node's half does, for as long as it is not aborted.
fn answering(mut questions: mpsc::Receiver<Question>, missing: Option<&str>) -> tokio::task::JoinHandle<()> {
    let missing = missing.map(str::to_owned);
    tokio::spawn(async move {
        while let Some(question) = questions.recv().await {
            if let Question::Facts(asker) = question {
                drop(asker.send(NodeFacts { missing: missing.clone(), standby: 3, ..NodeFacts::default() }));
            }
        }
    })
}

#[tokio::test]
async fn an_agent_that_starts_lives_and_is_not_ready() {
    let station = Station::new(Outages::new("http://nowhere"));
    assert_eq!(station.live().await, Ok(()));
    assert_eq!(station.ready().await, Err("the programs are being loaded".to_owned()));
    let slow = Station { limits: Limits { starts: Duration::ZERO, ..LIMITS }, ..station };
    let dead = slow.live().await.expect_err("it hangs");
    assert!(dead.contains("not loaded"), "{dead}");
}

#[tokio::test]
async fn it_is_ready_when_the_kernel_is_in_step_and_says_what_is_missing_before() {
    let Agent { station, questions, ready, fence: _fence } = agent();
    let half = answering(questions, Some("waiting for pods"));
    assert_eq!(station.ready().await, Err("waiting for pods".to_owned()));
    assert!(!station.facts().await.ready);
    ready.send_replace(Ready { serving: true, management: Vec::new() });
    assert_eq!(station.ready().await, Ok(()));
    assert!(station.facts().await.ready);
    ready.send_replace(Ready { serving: false, management: Vec::new() });
    assert!(station.ready().await.is_err(), "out of step again");
    half.abort();
}

#[tokio::test]
async fn a_nodes_half_that_hangs_is_dead_after_its_time_and_lives_again_with_an_answer() {
    let Agent { station, mut questions, ready: _ready, fence: _fence } = agent();
    assert_eq!(station.live().await, Ok(()), "it may be busy");
    let station = Station { limits: Limits { answers: Duration::ZERO, ..LIMITS }, ..station };
    let dead = station.live().await.expect_err("it hangs");
    assert!(dead.contains("node's half"), "{dead}");
    // It goes on; what was asked before is answered to nobody.
    while questions.try_recv().is_ok() {}
    let half = answering(questions, None);
    assert_eq!(station.live().await, Ok(()));
    half.abort();
}

#[tokio::test]
async fn a_fence_that_does_not_look_is_dead_however_well_the_rest_is() {
    let Agent { station, questions, ready: _ready, fence: _fence } = agent();
    let half = answering(questions, None);
    assert_eq!(station.live().await, Ok(()));
    let station = Station { limits: Limits { beats: Duration::ZERO, ..LIMITS }, ..station };
    let dead = station.live().await.expect_err("it hangs");
    assert!(dead.contains("fence"), "{dead}");
    half.abort();
}

#[tokio::test]
async fn a_scrape_does_not_wait_for_a_busy_half_and_shows_what_it_said_before() {
    let Agent { station, questions, ready: _ready, fence: _fence } = agent();
    let half = answering(questions, None);
    assert_eq!(station.facts().await.node.map(|node| node.standby), Some(3));
    half.abort();
    let begun = Instant::now();
    assert_eq!(station.facts().await.node.map(|node| node.standby), Some(3));
    assert!(begun.elapsed() < PATIENCE * 4, "{:?}", begun.elapsed());
}
