use futures::FutureExt;
use tokio::sync::{mpsc, watch};

use super::*;
use crate::metrics::snapshot::ServedAddress;
use egress_kube::leader_election::leadership;

struct AgentPage {
    page: HealthPage,
    requests: mpsc::Receiver<oneshot::Sender<ReconcilerSnapshot>>,
    ready: watch::Sender<Ready>,
    heartbeats: (Heartbeat, Heartbeat),
}

/// A running agent without a kernel.
fn agent() -> AgentPage {
    let page = HealthPage::new(Process::Agent, ApiOutages::new("http://nowhere"));
    let (sender, requests) = mpsc::channel(16);
    let (ready, is_ready) = watch::channel(Ready::default());
    let heartbeats = (Heartbeat::default(), Heartbeat::default());
    page.set_running(Running::Agent(AgentSources {
        reconciler: Arc::new(move |answer| {
            let sender = sender.clone();
            async move { sender.send(answer).await.is_ok() }.boxed()
        }),
        ready: is_ready,
        uplink: watch::channel(UplinkState::Works).1,
        lease_state: watch::channel(LeaseState::Holds).1,
        demand: watch::channel(LeaseDemand::default()).1,
        heartbeats: heartbeats.clone(),
    }));
    AgentPage { page, requests, ready, heartbeats }
}

/// Answers as the reconciler does, until it is aborted.
fn answering(
    mut requests: mpsc::Receiver<oneshot::Sender<ReconcilerSnapshot>>,
    missing: Option<&str>,
) -> tokio::task::JoinHandle<()> {
    let missing = missing.map(str::to_owned);
    tokio::spawn(async move {
        while let Some(sender) = requests.recv().await {
            drop(sender.send(ReconcilerSnapshot {
                missing: missing.clone(),
                standby: 3,
                ..ReconcilerSnapshot::default()
            }));
        }
    })
}

#[tokio::test]
async fn a_starting_agent_is_live_and_not_ready() {
    let page = HealthPage::new(Process::Agent, ApiOutages::new("http://nowhere"));
    assert_eq!(page.check_live(), Ok(()));
    assert_eq!(page.check_ready().await, Err("the programs are being loaded".to_owned()));
    let slow = HealthPage { limits: HeartbeatLimits { startup: Duration::ZERO, ..LIMITS }, ..page };
    let dead = slow.check_live().expect_err("it hangs");
    assert!(dead.contains("not loaded"), "{dead}");
}

#[tokio::test]
async fn an_agent_that_waits_for_an_uplink_stays_live_and_says_what_it_waits_for() {
    let page = HealthPage::new(Process::Agent, ApiOutages::new("http://nowhere"));
    let page = HealthPage { limits: HeartbeatLimits { startup: Duration::from_secs(1), ..LIMITS }, ..page };
    let startup_wait = page.startup_wait();
    startup_wait.set(Some("waiting for an uplink".to_owned()));
    tokio::time::sleep(page.limits.startup).await;
    assert_eq!((page.check_live(), page.check_ready().await), (Ok(()), Err("waiting for an uplink".to_owned())));
    startup_wait.set(None);
    let loads = Err("the programs are being loaded".to_owned());
    assert_eq!((page.check_live(), page.check_ready().await), (Ok(()), loads), "loading has its own limit");
    tokio::time::sleep(page.limits.startup).await;
    assert!(page.check_live().is_err(), "it hangs");
}

#[tokio::test]
async fn readiness_names_what_is_missing_until_the_kernel_is_in_the_desired_state() {
    let AgentPage { page, requests, ready, heartbeats: _heartbeats } = agent();
    let answers = answering(requests, Some("waiting for pods"));
    assert_eq!(page.check_ready().await, Err("waiting for pods".to_owned()));
    assert!(!page.snapshot(usize::MAX).await.ready);
    ready.send_replace(Ready { serving: true, addresses: Vec::new(), ..Ready::default() });
    assert_eq!(page.check_ready().await, Ok(()));
    assert!(page.snapshot(usize::MAX).await.ready);
    ready.send_replace(Ready { serving: false, addresses: Vec::new(), ..Ready::default() });
    assert!(page.check_ready().await.is_err(), "no longer in the desired state");
    answers.abort();
}

#[tokio::test]
async fn a_stalled_reconciler_is_not_live_and_one_that_answers_late_is() {
    let AgentPage { page, mut requests, ready: _ready, heartbeats: (reconciler, _lease_keeper) } = agent();
    assert_eq!(page.snapshot(usize::MAX).await.reconciler, None, "it is busy");
    assert!(requests.len() <= 1, "one request at a time");
    let page = HealthPage { limits: HeartbeatLimits { reconciler: Duration::from_millis(200), ..LIMITS }, ..page };
    let dead = page.check_live().expect_err("it hangs");
    assert!(dead.contains("reconciler"), "{dead}");
    reconciler.note();
    assert_eq!(page.check_live(), Ok(()), "it makes progress and has not answered yet");
    let sender = requests.recv().await.expect("a request");
    drop(sender.send(ReconcilerSnapshot { standby: 7, ..ReconcilerSnapshot::default() }));
    // The call that asked has returned.
    tokio::time::sleep(Duration::from_millis(20)).await;
    assert_eq!(page.snapshot(usize::MAX).await.reconciler.map(|of| of.standby), Some(7));
}

#[tokio::test]
async fn a_stalled_lease_keeper_is_not_live() {
    let AgentPage { page, requests, ready: _ready, heartbeats: _heartbeats } = agent();
    let answers = answering(requests, None);
    assert_eq!(page.check_live(), Ok(()));
    let page = HealthPage { limits: HeartbeatLimits { lease_keeper: Duration::ZERO, ..LIMITS }, ..page };
    let dead = page.check_live().expect_err("it hangs");
    assert!(dead.contains("lease keeper"), "{dead}");
    answers.abort();
}

#[tokio::test]
async fn a_scrape_does_not_wait_for_a_busy_reconciler_and_shows_its_previous_answer() {
    let AgentPage { page, requests, ready: _ready, heartbeats: _heartbeats } = agent();
    let answers = answering(requests, None);
    assert_eq!(page.snapshot(usize::MAX).await.reconciler.map(|of| of.standby), Some(3));
    answers.abort();
    let start = Instant::now();
    assert_eq!(page.snapshot(usize::MAX).await.reconciler.map(|of| of.standby), Some(3));
    assert!(start.elapsed() < ANSWER_TIMEOUT * 4, "{:?}", start.elapsed());
}

#[tokio::test]
async fn a_readiness_probe_of_a_serving_node_sends_no_request() {
    let AgentPage { page, mut requests, ready, heartbeats: _heartbeats } = agent();
    ready.send_replace(Ready { serving: true, addresses: Vec::new(), ..Ready::default() });
    assert_eq!(page.check_ready().await, Ok(()));
    assert!(requests.try_recv().is_err(), "no request");
}

#[test]
fn a_page_reads_no_more_egress_ips_than_it_shows() {
    let of = |n: u8| ServedAddress { address: [172, 18, 0, n].into(), policy: Some(("a".into(), "u".into())) };
    let served = (1..=9).map(|n| (EgressId(n.into()), of(n))).collect();
    let in_kernel = InKernel { served, ..InKernel::default() };
    assert_eq!(shown_ids(&in_kernel, 2), [EgressId(1), EgressId(2)]);
    assert_eq!(shown_ids(&in_kernel, usize::MAX).len(), 9);
}

#[test]
fn the_lease_of_a_node_without_egress_ips_is_not_shown_as_expired() {
    let shown = |wants| {
        let running = AgentSources {
            reconciler: Arc::new(|_| std::future::ready(false).boxed()),
            ready: watch::channel(Ready::default()).1,
            uplink: watch::channel(UplinkState::Works).1,
            lease_state: watch::channel(LeaseState::Expired(1)).1,
            demand: watch::channel(LeaseDemand { has_addresses: wants, ..LeaseDemand::default() }).1,
            heartbeats: (Heartbeat::default(), Heartbeat::default()),
        };
        agent_snapshot(&running).lease_expired
    };
    assert_eq!([shown(true), shown(false)], [true, false]);
}

#[tokio::test]
async fn a_controller_is_ready_when_it_could_lead_and_live_while_it_checks_the_lease() {
    let page = HealthPage::new(Process::Controller, ApiOutages::new("http://nowhere"));
    let (synced, is_synced) = watch::channel(false);
    let (leadership, heartbeat) = (leadership().1, Heartbeat::default());
    page.set_running(Running::Controller(RunningController { leadership, synced: is_synced, heartbeat }));
    let waits = page.check_ready().await.expect_err("nothing is listed");
    assert!(waits.contains("lists of EgressIP objects and nodes"), "{waits}");
    synced.send_replace(true);
    assert_eq!((page.check_ready().await, page.check_live()), (Ok(()), Ok(())));
    let snapshot = page.snapshot(usize::MAX).await;
    assert_eq!((snapshot.leads, snapshot.agent.is_none(), snapshot.ready), (Some(false), true, true));
    let stuck = HealthPage { limits: HeartbeatLimits { leader_election: Duration::ZERO, ..LIMITS }, ..page };
    assert!(stuck.check_live().is_err());
}
