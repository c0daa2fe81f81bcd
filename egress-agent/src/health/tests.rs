use std::sync::Arc;

use futures::StreamExt;
use tonic::metadata::MetadataMap;
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Response};
use tonic_health::pb::health_check_response::ServingStatus as Answer;
use tonic_health::pb::health_client::HealthClient;
use tonic_health::pb::{HealthCheckRequest, HealthCheckResponse};

use super::*;
use crate::health::leader_contact::Probe;
use crate::health::signature::Challenge;
use crate::health::signature::MessageAuth;
use crate::health::signature::tests::{key, shared};

/// A server on loopback, and what probes report to it.
pub(super) struct TestServer {
    pub(super) port: u16,
    ready: watch::Sender<Ready>,
    uplink: watch::Sender<UplinkState>,
    confirmed: watch::Receiver<Option<Instant>>,
    orders: watch::Receiver<Acknowledgements>,
    pub(super) stop: CancellationToken,
    task: tokio::task::JoinHandle<()>,
}

const NAME: &str = "n";
pub(super) const FIRST: [u8; 4] = [127, 0, 0, 1];
const SECOND: [u8; 4] = [127, 0, 0, 2];

fn ready(addresses: &[[u8; 4]]) -> Ready {
    Ready {
        serving: true,
        addresses: addresses.iter().map(|address| IpAddr::from(*address)).collect(),
        ..Ready::default()
    }
}

impl TestServer {
    pub(super) fn start() -> Self {
        let port = std::net::TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).expect("a free port").port();
        let (ready, is_ready) = watch::channel(ready(&[FIRST]));
        let (uplink, is_uplink) = watch::channel(UplinkState::Works);
        let (confirmed, is_confirmed) = watch::channel(None);
        let stop = CancellationToken::new();
        let settings = HealthSettings { port, tls: None, total_timeout: Duration::from_secs(1) };
        let (orders, is_ordered) = watch::channel(Acknowledgements::new());
        let (total, leader) = (watch::channel(None).0, watch::channel(None).0);
        let outages = ApiOutages::new("http://nowhere");
        let reports = Reports { confirmed, total, orders, leader, outages, meters: Meters::default() };
        let released = watch::channel(Acknowledgements::new()).1;
        let overlay = watch::channel(None).1;
        let nodes = watch::channel(Arc::new([FIRST, SECOND].map(IpAddr::from).into())).1;
        let (key, node_name) = (shared(1), NAME.to_owned());
        let inputs = Inputs {
            ready: is_ready,
            selected: watch::channel(SelectedPods::new()).1,
            bounded: watch::channel(None).1,
            next_hop: watch::channel(None).1,
            uplink: is_uplink,
            released,
            overlay,
            nodes,
            key,
            node_name,
        };
        let task = tokio::spawn(serve(settings, inputs, reports, stop.clone()));
        Self { port, ready, uplink, confirmed: is_confirmed, orders: is_ordered, stop, task }
    }

    pub(super) async fn client(&self, address: [u8; 4]) -> HealthClient<Channel> {
        let address = SocketAddr::from((address, self.port));
        let endpoint = Endpoint::try_from(format!("http://{address}")).expect("an address");
        loop {
            match endpoint.connect().await {
                Ok(channel) => return HealthClient::new(channel),
                Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
            }
        }
    }
}

pub(super) fn ask(service: &str) -> HealthCheckRequest {
    HealthCheckRequest { service: service.into() }
}

#[tokio::test]
async fn only_the_two_service_names_are_known() {
    let server = TestServer::start();
    let mut client = server.client(FIRST).await;
    for service in ["", SERVICE] {
        let answer = client.check(ask(service)).await.expect("a known service").into_inner();
        assert_eq!(answer.status, i32::from(Answer::Serving));
    }
    assert!(client.check(ask("other")).await.is_err());
    server.stop.cancel();
    server.task.await.expect("it ends");
}

#[tokio::test]
async fn a_watch_gets_each_change_on_one_connection_and_does_not_delay_the_end() {
    let server = TestServer::start();
    let mut client = server.client(FIRST).await;
    let mut watched = client.watch(ask(SERVICE)).await.expect("a stream").into_inner();
    let mut next = async || watched.next().await.expect("the stream lasts").expect("an answer").status;
    assert_eq!(next().await, i32::from(Answer::Serving));
    server.uplink.send_replace(UplinkState::NoCarrier("eth0".into()));
    assert_eq!(next().await, i32::from(Answer::NotServing));
    let refused = client.check(ask(SERVICE)).await.expect("an answer");
    assert_eq!(refused.get_ref().status, i32::from(Answer::NotServing));
    assert_eq!(refused.metadata().get(REASON).expect("a reason"), "no-carrier");
    // A watch gets no update for another obstacle, and does not end with another address.
    server.uplink.send_replace(UplinkState::NextHopLost(vec![]));
    server.ready.send_replace(ready(&[FIRST, SECOND]));
    let mut other = server.client(SECOND).await;
    let refused = other.check(ask(SERVICE)).await.expect("an answer");
    assert_eq!(refused.metadata().get(REASON).expect("a reason"), "next-hop");
    server.uplink.send_replace(UplinkState::Works);
    assert_eq!(next().await, i32::from(Answer::Serving));
    // A removed address has no server.
    server.ready.send_replace(ready(&[FIRST]));
    let gone = SocketAddr::from((SECOND, server.port));
    while tokio::net::TcpStream::connect(gone).await.is_ok() {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert!(client.check(ask(SERVICE)).await.is_ok());
    server.stop.cancel();
    server.task.await.expect("it ends despite the watch");
}

/// Signs as a leader does, with the latest challenge.
struct Leader {
    client: HealthClient<Channel>,
    number: u64,
    challenge: Option<Challenge>,
}

impl Leader {
    /// With a first challenge.
    async fn of(server: &TestServer) -> Self {
        let mut leader = Self { client: server.client(FIRST).await, number: 0, challenge: None };
        leader.probe(0, 0, |_| {}).await;
        leader
    }

    fn request(
        &mut self,
        confirmed: u64,
        term: u64,
        set: impl FnOnce(&mut MetadataMap),
    ) -> Request<HealthCheckRequest> {
        self.number += 1;
        let mut request = Request::new(ask(SERVICE));
        let metadata = request.metadata_mut();
        Probe { session: 7, number: self.number, confirmed, term }.write(metadata);
        self.challenge.iter().for_each(|challenge| challenge.write(metadata));
        set(metadata);
        key(1).sign_request(metadata, SERVICE, "leader", NAME);
        request
    }

    async fn send(&mut self, request: Request<HealthCheckRequest>) -> Response<HealthCheckResponse> {
        let metadata = request.metadata().clone();
        let answer = self.client.check(request).await.expect("an answer");
        let of_request = key(1).verify_request(&metadata, SERVICE, NAME);
        if let Some(of_request) = of_request {
            let status = answer.get_ref().status;
            assert!(key(1).has_signed_answer(answer.metadata(), status, NAME, &of_request), "{answer:?}");
            self.challenge = Challenge::read(answer.metadata());
        }
        answer
    }

    async fn probe(
        &mut self,
        confirmed: u64,
        term: u64,
        set: impl FnOnce(&mut MetadataMap),
    ) -> Response<HealthCheckResponse> {
        let request = self.request(confirmed, term, set);
        self.send(request).await
    }
}

#[tokio::test]
async fn an_answered_probe_confirms_the_one_before() {
    let mut server = TestServer::start();
    let mut leader = Leader::of(&server).await;
    let mut probe = async |confirmed| {
        let answer =
            leader.probe(confirmed, 3, |metadata| leader_contact::set_timeout(metadata, Duration::from_secs(5))).await;
        assert_eq!(leader_contact::term(answer.metadata()), Some(3));
        assert_eq!(leader_contact::timeout(answer.metadata()), Some(Duration::from_secs(1)));
        leader.number
    };
    let before = Instant::now();
    let first = probe(0).await;
    let between = Instant::now();
    assert!(!server.confirmed.has_changed().expect("it lives"));
    probe(first).await;
    let confirmed = server.confirmed.borrow_and_update().expect("confirmed");
    assert!((before..between).contains(&confirmed));
    server.stop.cancel();
}

#[tokio::test]
async fn orders_of_a_former_leader_are_ignored_once_a_newer_one_has_probed() {
    let server = TestServer::start();
    let mut leader = Leader::of(&server).await;
    let orders = |number| Acknowledgements::from([([172, 18, 0, 100].into(), number)]);
    let mut order = async |term, number| {
        leader.probe(0, term, |metadata| handover::set_orders(metadata, &orders(number))).await;
        server.orders.borrow().clone()
    };
    assert_eq!(order(3, 7).await, orders(7));
    assert_eq!(order(4, 8).await, orders(8));
    assert_eq!(order(3, 9).await, orders(8));
    server.stop.cancel();
}

/// All metadata that a leader can set.
fn everything(metadata: &mut MetadataMap) {
    leader_contact::set_timeout(metadata, Duration::from_secs(1));
    handover::set_orders(metadata, &Acknowledgements::from([([172, 18, 0, 100].into(), 7)]));
}

#[tokio::test]
async fn without_the_key_a_request_gets_only_the_health_and_changes_nothing() {
    let server = TestServer::start();
    let mut client = server.client(FIRST).await;
    let mut leader = Leader::of(&server).await;
    let probe = Probe { session: 9, number: 1, confirmed: 0, term: u64::MAX };
    type Sign = fn(&mut MetadataMap);
    let signs: [(&str, Sign); 4] = [
        ("nothing", |_| {}),
        ("another key", |metadata| {
            key(2).sign_request(metadata, SERVICE, "leader", NAME);
        }),
        ("for another node", |metadata| {
            key(1).sign_request(metadata, SERVICE, "leader", "another");
        }),
        ("changed after the signature", |metadata| {
            key(1).sign_request(metadata, SERVICE, "leader", NAME);
            leader_contact::set_timeout(metadata, Duration::from_secs(2));
        }),
    ];
    for (what, sign) in signs {
        for number in 1..4 {
            let mut request = Request::new(ask(SERVICE));
            let metadata = request.metadata_mut();
            Probe { number, confirmed: number - 1, ..probe }.write(metadata);
            leader.challenge.iter().for_each(|challenge| challenge.write(metadata));
            everything(metadata);
            sign(metadata);
            let answer = client.check(request).await.expect("an answer");
            assert_eq!(answer.get_ref().status, i32::from(Answer::Serving));
            let ours = answer.metadata().keys().filter(|key| format!("{key:?}").contains("egress-agent")).count();
            assert_eq!(ours, 0, "{what}: {:?}", answer.metadata());
        }
    }
    assert_eq!((*server.confirmed.borrow(), server.orders.borrow().len()), (None, 0));
    let answer = leader.probe(0, 3, everything).await;
    assert_eq!(leader_contact::term(answer.metadata()), Some(3), "no unsigned probe has set a term");
    assert_eq!(server.orders.borrow().len(), 1);
    server.stop.cancel();
}

#[tokio::test]
async fn pod_counts_need_the_key_and_are_not_in_answers_to_probes() {
    let server = TestServer::start();
    let mut client = server.client(FIRST).await;
    for (signed_with, is_sent) in [(None, false), (Some(key(2)), false), (Some(key(1)), true)] {
        let mut request = Request::new(ask(SERVICE));
        if let Some(key) = &signed_with {
            key.sign_request(request.metadata_mut(), SERVICE, "leader", NAME);
        }
        let answer = client.check(request).await.expect("an answer");
        assert_eq!(pod_counts::read(answer.metadata()).is_some(), is_sent, "{:?}", answer.metadata());
    }
    let answer = Leader::of(&server).await.probe(0, 3, |_| {}).await;
    assert_eq!(pod_counts::read(answer.metadata()), None);
    server.stop.cancel();
}

/// By an attacker who reads the traffic between nodes.
#[tokio::test]
async fn a_replayed_probe_changes_nothing() {
    let mut server = TestServer::start();
    let mut leader = Leader::of(&server).await;
    let first = leader.request(0, 3, everything);
    let copy = |request: &Request<HealthCheckRequest>| {
        let mut copy = Request::new(ask(SERVICE));
        *copy.metadata_mut() = request.metadata().clone();
        copy
    };
    let replayed = [copy(&first), copy(&first)];
    leader.send(first).await;
    assert_eq!(server.orders.borrow().len(), 1);
    let number = leader.number;
    leader.probe(number, 3, |metadata| leader_contact::set_timeout(metadata, Duration::from_secs(1))).await;
    assert_eq!(server.orders.borrow().len(), 0, "the order has ended");
    let confirmed = server.confirmed.borrow_and_update().expect("confirmed");
    let (mut other, [at_once, elsewhere]) = (server.client(FIRST).await, replayed);
    let answer = other.check(at_once).await.expect("an answer");
    assert!(Challenge::read(answer.metadata()).is_some(), "a signed request gets a challenge");
    assert_eq!((server.orders.borrow().len(), *server.confirmed.borrow()), (0, Some(confirmed)));
    // Another process of the same node has its own challenges.
    let next = TestServer::start();
    let mut client = next.client(FIRST).await;
    client.check(elsewhere).await.expect("an answer");
    assert_eq!((next.orders.borrow().len(), *next.confirmed.borrow()), (0, None));
    server.stop.cancel();
    next.stop.cancel();
}
