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

/// A server on loopback, and what it is told.
pub(super) struct Ground {
    pub(super) port: u16,
    ready: watch::Sender<Ready>,
    uplink: watch::Sender<UplinkState>,
    heard: watch::Receiver<Option<Instant>>,
    orders: watch::Receiver<Acknowledgements>,
    pub(super) stop: CancellationToken,
    server: tokio::task::JoinHandle<()>,
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

impl Ground {
    pub(super) fn start() -> Self {
        let port = std::net::TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).expect("a free port").port();
        let (ready, is_ready) = watch::channel(ready(&[FIRST]));
        let (uplink, is_uplink) = watch::channel(UplinkState::Works);
        let (heard, is_heard) = watch::channel(None);
        let stop = CancellationToken::new();
        let settings = Settings { port, tls: None, total_timeout: Duration::from_secs(1) };
        let (orders, is_ordered) = watch::channel(Acknowledgements::new());
        let (total, leader) = (watch::channel(None).0, watch::channel(None).0);
        let outages = ApiOutages::new("http://nowhere");
        let told = Reports { heard, total, orders, leader, outages, meters: Meters::default() };
        let released = watch::channel(Acknowledgements::new()).1;
        let overlay = watch::channel(None).1;
        let nodes = watch::channel(Arc::new([FIRST, SECOND].map(IpAddr::from).into())).1;
        let (key, node_name) = (shared(1), NAME.to_owned());
        let facts = Facts {
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
        let server = tokio::spawn(serve(settings, facts, told, stop.clone()));
        Self { port, ready, uplink, heard: is_heard, orders: is_ordered, stop, server }
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
async fn both_services_are_answered_for_and_no_other() {
    let ground = Ground::start();
    let mut client = ground.client(FIRST).await;
    for service in ["", SERVICE] {
        let answer = client.check(ask(service)).await.expect("a known service").into_inner();
        assert_eq!(answer.status, i32::from(Answer::Serving));
    }
    assert!(client.check(ask("other")).await.is_err());
    ground.stop.cancel();
    ground.server.await.expect("it ends");
}

#[tokio::test]
async fn who_watches_is_told_of_each_change_on_one_connection_and_does_not_keep_the_server() {
    let ground = Ground::start();
    let mut client = ground.client(FIRST).await;
    let mut watched = client.watch(ask(SERVICE)).await.expect("a stream").into_inner();
    let mut next = async || watched.next().await.expect("it goes on").expect("an answer").status;
    assert_eq!(next().await, i32::from(Answer::Serving));
    ground.uplink.send_replace(UplinkState::NoCarrier("eth0".into()));
    assert_eq!(next().await, i32::from(Answer::NotServing));
    let refused = client.check(ask(SERVICE)).await.expect("an answer");
    assert_eq!(refused.get_ref().status, i32::from(Answer::NotServing));
    assert_eq!(refused.metadata().get(REASON).expect("a reason"), "no-carrier");
    // Another obstacle is no news to who watches, another address is no end.
    ground.uplink.send_replace(UplinkState::NextHopLost(vec![]));
    ground.ready.send_replace(ready(&[FIRST, SECOND]));
    let mut other = ground.client(SECOND).await;
    let refused = other.check(ask(SERVICE)).await.expect("an answer");
    assert_eq!(refused.metadata().get(REASON).expect("a reason"), "next-hop");
    ground.uplink.send_replace(UplinkState::Works);
    assert_eq!(next().await, i32::from(Answer::Serving));
    // An address that is gone is not answered on.
    ground.ready.send_replace(ready(&[FIRST]));
    let gone = SocketAddr::from((SECOND, ground.port));
    while tokio::net::TcpStream::connect(gone).await.is_ok() {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert!(client.check(ask(SERVICE)).await.is_ok());
    ground.stop.cancel();
    ground.server.await.expect("it ends though somebody watches");
}

/// Signs as a leader does, with the challenge that it was given.
struct Leader {
    client: HealthClient<Channel>,
    number: u64,
    challenge: Option<Challenge>,
}

impl Leader {
    /// One that has been given its first challenge.
    async fn of(ground: &Ground) -> Self {
        let mut leader = Self { client: ground.client(FIRST).await, number: 0, challenge: None };
        leader.probe(0, 0, |_| {}).await;
        leader
    }

    fn request(
        &mut self,
        confirmed: u64,
        term: u64,
        say: impl FnOnce(&mut MetadataMap),
    ) -> Request<HealthCheckRequest> {
        self.number += 1;
        let mut request = Request::new(ask(SERVICE));
        let metadata = request.metadata_mut();
        Probe { session: 7, number: self.number, confirmed, term }.write(metadata);
        self.challenge.iter().for_each(|challenge| challenge.write(metadata));
        say(metadata);
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
        say: impl FnOnce(&mut MetadataMap),
    ) -> Response<HealthCheckResponse> {
        let request = self.request(confirmed, term, say);
        self.send(request).await
    }
}

#[tokio::test]
async fn the_agent_knows_when_the_leader_has_heard_it() {
    let mut ground = Ground::start();
    let mut leader = Leader::of(&ground).await;
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
    assert!(!ground.heard.has_changed().expect("it lives"));
    probe(first).await;
    let heard = ground.heard.borrow_and_update().expect("confirmed");
    assert!((before..between).contains(&heard));
    ground.stop.cancel();
}

#[tokio::test]
async fn a_former_leaders_orders_are_nothing_to_who_knows_of_a_newer() {
    let ground = Ground::start();
    let mut leader = Leader::of(&ground).await;
    let words = |number| Acknowledgements::from([([172, 18, 0, 100].into(), number)]);
    let mut order = async |term, number| {
        leader.probe(0, term, |metadata| handover::set_orders(metadata, &words(number))).await;
        ground.orders.borrow().clone()
    };
    assert_eq!(order(3, 7).await, words(7));
    assert_eq!(order(4, 8).await, words(8));
    assert_eq!(order(3, 9).await, words(8));
    ground.stop.cancel();
}

/// Everything that a leader can say.
fn everything(metadata: &mut MetadataMap) {
    leader_contact::set_timeout(metadata, Duration::from_secs(1));
    handover::set_orders(metadata, &Acknowledgements::from([([172, 18, 0, 100].into(), 7)]));
}

#[tokio::test]
async fn who_has_not_the_key_is_told_the_health_and_nothing_else_and_changes_nothing() {
    let ground = Ground::start();
    let mut client = ground.client(FIRST).await;
    let mut leader = Leader::of(&ground).await;
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
        ("changed behind the signature", |metadata| {
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
    assert_eq!((*ground.heard.borrow(), ground.orders.borrow().len()), (None, 0));
    let answer = leader.probe(0, 3, everything).await;
    assert_eq!(leader_contact::term(answer.metadata()), Some(3), "no stranger has named a term");
    assert_eq!(ground.orders.borrow().len(), 1);
    ground.stop.cancel();
}

#[tokio::test]
async fn pods_are_counted_for_who_has_the_key_and_not_with_each_probe() {
    let ground = Ground::start();
    let mut client = ground.client(FIRST).await;
    for (signed_with, is_told) in [(None, false), (Some(key(2)), false), (Some(key(1)), true)] {
        let mut request = Request::new(ask(SERVICE));
        if let Some(key) = &signed_with {
            key.sign_request(request.metadata_mut(), SERVICE, "leader", NAME);
        }
        let answer = client.check(request).await.expect("an answer");
        assert_eq!(pod_counts::read(answer.metadata()).is_some(), is_told, "{:?}", answer.metadata());
    }
    let answer = Leader::of(&ground).await.probe(0, 3, |_| {}).await;
    assert_eq!(pod_counts::read(answer.metadata()), None);
    ground.stop.cancel();
}

/// By whoever reads what passes between nodes.
#[tokio::test]
async fn a_leaders_probe_that_comes_again_changes_nothing() {
    let mut ground = Ground::start();
    let mut leader = Leader::of(&ground).await;
    let first = leader.request(0, 3, everything);
    let copy = |request: &Request<HealthCheckRequest>| {
        let mut copy = Request::new(ask(SERVICE));
        *copy.metadata_mut() = request.metadata().clone();
        copy
    };
    let replayed = [copy(&first), copy(&first)];
    leader.send(first).await;
    assert_eq!(ground.orders.borrow().len(), 1);
    let number = leader.number;
    leader.probe(number, 3, |metadata| leader_contact::set_timeout(metadata, Duration::from_secs(1))).await;
    assert_eq!(ground.orders.borrow().len(), 0, "it is over");
    let heard = ground.heard.borrow_and_update().expect("confirmed");
    let (mut other, [at_once, elsewhere]) = (ground.client(FIRST).await, replayed);
    let answer = other.check(at_once).await.expect("an answer");
    assert!(Challenge::read(answer.metadata()).is_some(), "whoever has the key is told what to name");
    assert_eq!((ground.orders.borrow().len(), *ground.heard.borrow()), (0, Some(heard)));
    // Another process of the same node gives challenges of its own.
    let next = Ground::start();
    let mut client = next.client(FIRST).await;
    client.check(elsewhere).await.expect("an answer");
    assert_eq!((next.orders.borrow().len(), *next.heard.borrow()), (0, None));
    ground.stop.cancel();
    next.stop.cancel();
}
