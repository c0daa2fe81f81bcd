//! Against real sockets on loopback.

use std::sync::Mutex;

use tokio::net::{TcpListener, TcpSocket};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::transport::Server;
use tonic_health::pb::health_server::{Health, HealthServer};
use tonic_health::server::WatchStream;

use super::*;
use crate::controller::node_health::confirmation::OtherNodes;
use crate::health;
use crate::health::signature::tests::{answer_for_anyone, key, shared};
use crate::health::tls::tests::{Authority, NodeFiles};
use crate::metrics::meters::count_and_sum;
use crate::node::reconciler::Ready;
use egress_core::node_health::fitness::UplinkState;
use egress_kube::health_key::SharedKey;

const RULES: ProbeTiming =
    ProbeTiming { total: Duration::from_secs(1), interval: Duration::from_millis(250), grace: Duration::from_secs(30) };
const LOOPBACK: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);

/// The findings within this time, with their times erased.
async fn found(port: u16, within: Duration) -> Vec<Finding> {
    found_by(port, within, true).await
}

async fn found_by(port: u16, within: Duration, confirms: bool) -> Vec<Finding> {
    found_with(Dial::Plaintext, port, within, confirms).await
}

async fn found_with(dial: Dial, port: u16, within: Duration, confirms: bool) -> Vec<Finding> {
    let confirmation = Confirmation::for_other();
    confirmation.set_enabled(confirms);
    found_confirming(dial, port, within, confirmation).await
}

async fn found_confirming(dial: Dial, port: u16, within: Duration, confirmation: Confirmation) -> Vec<Finding> {
    found_metered((dial, Meters::default()), port, within, confirmation).await
}

async fn found_metered(
    (dial, meters): (Dial, Meters),
    port: u16,
    within: Duration,
    confirmation: Confirmation,
) -> Vec<Finding> {
    found_keyed((dial, meters, shared(1)), port, within, confirmation).await
}

async fn found_keyed(
    (dial, meters, key): (Dial, Meters, SharedKey),
    port: u16,
    within: Duration,
    confirmation: Confirmation,
) -> Vec<Finding> {
    let orders = watch::channel(Acknowledgements::new()).1;
    let asker = SessionInputs {
        term: 3,
        offset: Duration::ZERO,
        confirmation,
        orders,
        node: "n".into(),
        own_node: "leader".into(),
    };
    let path = ProbePath { address: LOOPBACK, tcp_probe_addresses: vec![] };
    let settings = ProbeSettings { rules: RULES, port, dial, key, meters, events: None, outages: None };
    let begin = Instant::now();
    let findings = Mutex::new(Vec::new());
    let report = |finding| {
        let finding = match finding {
            Finding::Signal(sign, _) => Finding::Signal(sign, begin),
            Finding::Confirmed(_) => Finding::Confirmed(begin),
            other => other,
        };
        let mut findings = findings.lock().expect("not poisoned");
        if findings.last() != Some(&finding) {
            findings.push(finding);
        }
        true
    };
    let _ends = timeout(within, probe_node(&settings, &path, &asker, report)).await;
    findings.into_inner().expect("not poisoned")
}

fn signs(findings: &[Finding]) -> Vec<Signal> {
    let signs = findings.iter().filter_map(|finding| match finding {
        Finding::Signal(sign, _) => Some(*sign),
        _ => None,
    });
    let mut signs: Vec<Signal> = signs.collect();
    signs.dedup();
    signs
}

/// Without TCP probes: on a busy machine one may fall between two answers.
fn answers(findings: &[Finding]) -> Vec<Signal> {
    let mut answers = signs(findings);
    answers.retain(|sign| matches!(sign, Signal::AgentAnswer(_)));
    answers.dedup();
    answers
}

async fn listener() -> (TcpListener, u16) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let port = listener.local_addr().expect("an address").port();
    (listener, port)
}

struct ProbedAgent {
    port: u16,
    uplink: watch::Sender<UplinkState>,
    confirmed: watch::Receiver<Option<Instant>>,
    stop: CancellationToken,
    _ready: watch::Sender<Ready>,
}

/// The health server of an agent.
async fn agent() -> ProbedAgent {
    agent_with(None).await
}

async fn agent_with(tls: Option<Tls>) -> ProbedAgent {
    agent_keyed(tls, shared(1)).await
}

async fn agent_keyed(tls: Option<Tls>, key: SharedKey) -> ProbedAgent {
    let (free, port) = listener().await;
    drop(free);
    let (ready, is_ready) = watch::channel(Ready { serving: true, addresses: vec![LOOPBACK], ..Ready::default() });
    let ((uplink, is_uplink), (heard, is_heard)) = (watch::channel(UplinkState::Works), watch::channel(None));
    let stop = CancellationToken::new();
    let released = watch::channel(Acknowledgements::new()).1;
    let overlay = watch::channel(None).1;
    let nodes = watch::channel(Arc::new([LOOPBACK].into())).1;
    let node_name = "n".to_owned();
    let facts = health::Inputs {
        bounded: watch::channel(None).1,
        next_hop: watch::channel(None).1,
        ready: is_ready,
        selected: watch::Sender::default().subscribe(),
        uplink: is_uplink,
        released,
        overlay,
        nodes,
        key,
        node_name,
    };
    let reports = health::Reports {
        confirmed: heard,
        total: watch::channel(None).0,
        orders: watch::channel(Acknowledgements::new()).0,
        leader: watch::channel(None).0,
        outages: ApiOutages::new("http://nowhere"),
        meters: Meters::default(),
    };
    let settings = health::HealthSettings { port, tls, total_timeout: Duration::from_secs(5) };
    tokio::spawn(health::serve(settings, facts, reports, stop.clone()));
    while TcpStream::connect((LOOPBACK, port)).await.is_err() {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    ProbedAgent { port, uplink, confirmed: is_heard, stop, _ready: ready }
}

#[tokio::test]
async fn the_agent_of_the_leaders_own_node_is_confirmed_as_long_as_others_answer() {
    let agent = agent().await;
    let others = Arc::new(OtherNodes::new(Instant::now()));
    others.set_exist(true);
    let heard_others = async {
        tokio::time::sleep(RULES.interval * 4).await;
        others.note_answer(Instant::now());
        Instant::now()
    };
    let probing =
        found_confirming(Dial::Plaintext, agent.port, RULES.interval * 10, Confirmation::for_own(others.clone()));
    let (findings, last) = tokio::join!(probing, heard_others);
    assert_eq!(answers(&findings), [Signal::AgentAnswer(AgentAnswer::Serving)], "it is probed all the time");
    let confirmed = agent.confirmed.borrow().expect("what came before another was heard counts");
    assert!(confirmed <= last && confirmed > last - RULES.interval * 2, "{:?}", last - confirmed);
}

#[tokio::test]
async fn answers_are_counted_by_what_they_say_and_timed() {
    let agent = agent().await;
    let meters = Meters::default();
    let probe =
        |port| found_metered((Dial::Plaintext, meters.clone()), port, RULES.interval * 2, Confirmation::for_other());
    probe(agent.port).await;
    let [serving, others @ ..] = meters.probes();
    assert!(serving > 0 && others == [0; 6], "{serving} {others:?}");
    assert_eq!(count_and_sum(&meters.probe()).0, serving);
    agent.uplink.send_replace(UplinkState::NextHopLost(vec![LOOPBACK]));
    probe(agent.port).await;
    let (free, unused) = listener().await;
    drop(free);
    probe(unused).await;
    let [_, not_serving, next_hop_lost, late, refused, unsigned, unreachable] = meters.probes();
    assert_eq!((not_serving, late, refused, unsigned), (0, 0, 0, 0));
    assert!(next_hop_lost > 0 && unreachable > 0, "{:?}", meters.probes());
    assert_eq!(count_and_sum(&meters.probe()).0, meters.probes()[0] + next_hop_lost, "only answers have a duration");
}

#[tokio::test]
async fn an_answer_of_an_agent_is_confirmed() {
    let agent = agent().await;
    let begin = Instant::now();
    let findings = found(agent.port, Duration::from_millis(1200)).await;
    assert_eq!(answers(&findings), [Signal::AgentAnswer(AgentAnswer::Serving)]);
    let report = Finding::AgentReport {
        timeout: Some(Duration::from_secs(5)),
        term: Some(3),
        overlay: None,
        bounded: None,
        next_hop: None,
    };
    assert!(findings.contains(&report), "{findings:?}");
    let confirmed = agent.confirmed.borrow().expect("the third probe confirms the second");
    assert!(confirmed >= begin + RULES.interval);

    let before = *agent.confirmed.borrow();
    let unconfirmed = found_by(agent.port, Duration::from_millis(1200), false).await;
    assert_eq!(answers(&unconfirmed), [Signal::AgentAnswer(AgentAnswer::Serving)]);
    assert!(!unconfirmed.iter().any(|finding| matches!(finding, Finding::Confirmed(_))));
    assert_eq!(*agent.confirmed.borrow(), before, "no confirmation");

    agent.uplink.send_replace(UplinkState::NextHopLost(vec![LOOPBACK]));
    let next_hop_lost = found(agent.port, Duration::from_millis(800)).await;
    assert_eq!(answers(&next_hop_lost), [Signal::AgentAnswer(AgentAnswer::NextHopLost)]);
    agent.uplink.send_replace(UplinkState::NoCarrier("eth0".into()));
    assert_eq!(
        answers(&found(agent.port, Duration::from_millis(800)).await),
        [Signal::AgentAnswer(AgentAnswer::NotServing)]
    );
}

#[tokio::test]
async fn tls_works_alike_and_problems_of_certificates_are_reported() {
    let (ca, another) = (Authority::new(), Authority::new());
    let (server, leader, foreign) = (NodeFiles::new(&ca), NodeFiles::new(&ca), NodeFiles::new(&another));
    let agent = agent_with(Some(server.read().0)).await;
    let within = Duration::from_millis(900);
    let findings = found_with(Dial::Tls(leader.read().0), agent.port, within, true).await;
    assert_eq!(signs(&findings), [Signal::AgentAnswer(AgentAnswer::Serving)]);
    let confirmed = *agent.confirmed.borrow();
    assert!(confirmed.is_some(), "the answer is confirmed");

    let no_answer = |findings: &[Finding], text: &str| {
        findings.iter().any(|finding| matches!(finding, Finding::NoAnswer(why) if why.contains(text)))
    };
    let findings = found_with(Dial::Tls(foreign.read().0), agent.port, within, true).await;
    assert_eq!(signs(&findings), [Signal::Kernel], "its node is there");
    assert!(no_answer(&findings, "the other side's certificate was not signed by the CA"), "{findings:?}");
    // It knows the CA; the agent does not know its own.
    foreign.put("ca", &ca.pem);
    let findings = found_with(Dial::Tls(foreign.read().0), agent.port, within, true).await;
    assert_eq!(signs(&findings), [Signal::Kernel]);
    assert!(no_answer(&findings, "UnknownCA: see the log of the other side"), "{findings:?}");
    let findings = found_with(Dial::Plaintext, agent.port, within, true).await;
    assert_eq!(signs(&findings), [Signal::Kernel]);
    assert_eq!(*agent.confirmed.borrow(), confirmed, "only the leader keeps its leases alive");
}

#[tokio::test]
async fn a_closed_connection_is_made_again() {
    let agent = agent().await;
    let (port, stop) = (agent.port, agent.stop.clone());
    let probing = tokio::spawn(async move { found(port, Duration::from_secs(3)).await });
    tokio::time::sleep(Duration::from_millis(600)).await;
    stop.cancel();
    // A refusal is an answer of the kernel.
    tokio::time::sleep(Duration::from_millis(900)).await;
    let (ready, is_ready) = watch::channel(Ready { serving: true, addresses: vec![LOOPBACK], ..Ready::default() });
    let (_uplink, is_uplink) = watch::channel(UplinkState::Works);
    let settings = health::HealthSettings { port, tls: None, total_timeout: Duration::from_secs(1) };
    let released = watch::channel(Acknowledgements::new()).1;
    let overlay = watch::channel(None).1;
    let nodes = watch::channel(Arc::new([LOOPBACK].into())).1;
    let node_name = "n".to_owned();
    let facts = health::Inputs {
        bounded: watch::channel(None).1,
        next_hop: watch::channel(None).1,
        ready: is_ready,
        selected: watch::Sender::default().subscribe(),
        uplink: is_uplink,
        released,
        overlay,
        nodes,
        key: shared(1),
        node_name,
    };
    let reports = health::Reports {
        confirmed: watch::channel(None).0,
        total: watch::channel(None).0,
        orders: watch::channel(Acknowledgements::new()).0,
        leader: watch::channel(None).0,
        outages: ApiOutages::new("http://nowhere"),
        meters: Meters::default(),
    };
    tokio::spawn(health::serve(settings, facts, reports, CancellationToken::new()));
    let findings = probing.await.expect("it ends");
    let serving = Signal::AgentAnswer(AgentAnswer::Serving);
    assert_eq!(answers(&findings), [serving]);
    let all = signs(&findings);
    let between = all.iter().position(|sign| *sign == Signal::Kernel);
    assert!(between.is_some_and(|at| all[at..].contains(&serving)), "{all:?}");
    drop(ready);
}

#[tokio::test]
async fn a_node_that_refuses_or_accepts_without_an_answer_is_reachable() {
    let (refusing, refused) = listener().await;
    drop(refusing);
    let findings = found(refused, Duration::from_millis(900)).await;
    assert_eq!(signs(&findings), [Signal::Kernel]);
    let named = |finding: &Finding| matches!(finding, Finding::NoAnswer(why) if why.starts_with("Connection refused"));
    assert!(findings.iter().any(named), "{findings:?}");

    // As of a process that is stopped.
    let (_never_accepts, stopped) = listener().await;
    let findings = found(stopped, Duration::from_millis(1900)).await;
    assert_eq!(signs(&findings), [Signal::Kernel]);
    assert!(findings.contains(&Finding::NoAnswer("no answer within 1000 ms".into())), "{findings:?}");
}

#[tokio::test]
async fn a_node_without_any_answer_is_silent() {
    // Its queue is full, so that it drops SYN packets.
    let socket = TcpSocket::new_v4().expect("a socket");
    socket.bind("127.0.0.1:0".parse().expect("a literal")).expect("a port");
    let full = socket.listen(0).expect("listens");
    let address = full.local_addr().expect("an address");
    let mut queue = Vec::new();
    while let Ok(Ok(connection)) = timeout(Duration::from_millis(200), TcpStream::connect(address)).await {
        queue.push(connection);
    }
    assert_eq!(signs(&found(address.port(), Duration::from_millis(1500)).await), []);
    assert!(!is_reachable(address, Duration::from_millis(300)).await);
}

/// Answers after this time.
struct Slow(Duration);

#[tonic::async_trait]
impl Health for Slow {
    async fn check(&self, request: Request<HealthCheckRequest>) -> Result<Response<HealthCheckResponse>, Status> {
        tokio::time::sleep(self.0).await;
        Ok(answer_for_anyone(&request))
    }

    type WatchStream = WatchStream;

    async fn watch(&self, _: Request<HealthCheckRequest>) -> Result<Response<WatchStream>, Status> {
        Err(Status::unimplemented("no watches"))
    }
}

#[tokio::test]
async fn a_slow_answer_is_an_answer_until_the_timeout() {
    for (delay, expected) in
        [(700, vec![Signal::Kernel, Signal::AgentAnswer(AgentAnswer::Serving)]), (1200, vec![Signal::Kernel])]
    {
        let (listener, port) = listener().await;
        let incoming = tonic::transport::server::TcpIncoming::from(listener);
        let service = HealthServer::new(Slow(Duration::from_millis(delay)));
        let server = tokio::spawn(Server::builder().add_service(service).serve_with_incoming(incoming));
        let mut signs_seen = signs(&found(port, Duration::from_millis(1600)).await);
        // After the first answer, TCP probes may fall between two answers.
        signs_seen.truncate(expected.len());
        assert_eq!(signs_seen, expected, "after {delay} ms");
        server.abort();
    }
}

#[tokio::test]
async fn another_server_is_no_agent() {
    let (listener, port) = listener().await;
    let incoming = tonic::transport::server::TcpIncoming::from(listener);
    let (reporter, service) = tonic_health::server::health_reporter();
    let server = tokio::spawn(Server::builder().add_service(service).serve_with_incoming(incoming));
    let meters = Meters::default();
    let unexpected = Finding::UnexpectedResponder(LOOPBACK, true);
    // First it knows no such service, which is an unsigned gRPC error; then it reports that it serves.
    for serves in [false, true] {
        if serves {
            reporter.set_service_status(SERVICE, tonic_health::ServingStatus::Serving).await;
        }
        let findings = found_metered(
            (Dial::Plaintext, meters.clone()),
            port,
            Duration::from_millis(900),
            Confirmation::for_other(),
        )
        .await;
        assert_eq!(signs(&findings), [Signal::Kernel], "{findings:?}");
        assert!(findings.contains(&unexpected), "{findings:?}");
        assert!(!findings.iter().any(|finding| matches!(finding, Finding::Confirmed(_))), "{findings:?}");
    }
    let [serving, _, _, _, refused, unsigned, _] = meters.probes();
    assert!(serving == 0 && refused > 0 && unsigned > 0, "{:?}", meters.probes());
    server.abort();
}

#[tokio::test]
async fn an_agent_with_another_key_is_not_trusted_and_trusts_no_leader() {
    let (one, holder) = SharedKey::new();
    let agent = agent_keyed(None, one).await;
    let within = Duration::from_millis(900);
    let found =
        || found_keyed((Dial::Plaintext, Meters::default(), shared(1)), agent.port, within, Confirmation::for_other());
    for key in [None, Some(key(2))] {
        holder.current.send_replace(key);
        let findings = found().await;
        assert_eq!(signs(&findings), [Signal::Kernel], "{findings:?}");
        assert!(agent.confirmed.borrow().is_none(), "a leader without its key confirms nothing");
    }
    timeout(within, holder.suspected()).await.expect("it checks whether its key was replaced");
    // A leader without a key probes, and trusts no answer.
    let findings = found_keyed(
        (Dial::Plaintext, Meters::default(), SharedKey::default()),
        agent.port,
        within,
        Confirmation::for_other(),
    );
    assert_eq!(signs(&findings.await), [Signal::Kernel]);
    assert!(agent.confirmed.borrow().is_none());
    holder.current.send_replace(Some(key(1)));
    assert_eq!(answers(&found().await), [Signal::AgentAnswer(AgentAnswer::Serving)]);
    assert!(agent.confirmed.borrow().is_some());
}

/// A man in the middle can replay messages of another connection, and nothing else.
#[tokio::test]
async fn an_answer_to_another_probe_is_not_accepted() {
    struct Replay(Mutex<Option<tonic::metadata::MetadataMap>>);

    #[tonic::async_trait]
    impl Health for Replay {
        async fn check(&self, request: Request<HealthCheckRequest>) -> Result<Response<HealthCheckResponse>, Status> {
            let mut answer = answer_for_anyone(&request);
            let mut first = self.0.lock().expect("not poisoned");
            *answer.metadata_mut() = first.get_or_insert_with(|| answer.metadata().clone()).clone();
            Ok(answer)
        }

        type WatchStream = WatchStream;

        async fn watch(&self, _: Request<HealthCheckRequest>) -> Result<Response<WatchStream>, Status> {
            Err(Status::unimplemented("no watches"))
        }
    }

    let (listener, port) = listener().await;
    let incoming = tonic::transport::server::TcpIncoming::from(listener);
    let service = HealthServer::new(Replay(Mutex::default()));
    let server = tokio::spawn(Server::builder().add_service(service).serve_with_incoming(incoming));
    let (meters, within) = (Meters::default(), Duration::from_millis(900));
    found_metered((Dial::Plaintext, meters.clone()), port, within, Confirmation::for_other()).await;
    let [serving, _, _, _, _, unsigned, _] = meters.probes();
    assert!(serving == 1 && unsigned > 0, "{:?}", meters.probes());
    server.abort();
}
