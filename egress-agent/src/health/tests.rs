use futures::StreamExt;
use tonic::Request;
use tonic::transport::{Channel, Endpoint};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus as Answer;
use tonic_health::pb::health_client::HealthClient;

use super::touch::Probe;
use super::*;

/// A server on loopback, and what it is told.
struct Ground {
    port: u16,
    ready: watch::Sender<Ready>,
    uplink: watch::Sender<Uplink>,
    heard: watch::Receiver<Option<Instant>>,
    orders: watch::Receiver<Words>,
    regain: Regain,
    ledger: watch::Sender<Arc<Ledger>>,
    stop: CancellationToken,
    server: tokio::task::JoinHandle<()>,
}

const FIRST: [u8; 4] = [127, 0, 0, 1];
const SECOND: [u8; 4] = [127, 0, 0, 2];

fn ready(addresses: &[[u8; 4]]) -> Ready {
    Ready { serving: true, management: addresses.iter().map(|address| IpAddr::from(*address)).collect() }
}

impl Ground {
    fn start() -> Self {
        let port = std::net::TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).expect("a free port").port();
        let (ready, is_ready) = watch::channel(ready(&[FIRST]));
        let (uplink, is_uplink) = watch::channel(Uplink::Works);
        let (heard, is_heard) = watch::channel(None);
        let stop = CancellationToken::new();
        let settings = Settings { port, tls: None, total_timeout: Duration::from_secs(1) };
        let (orders, is_ordered) = watch::channel(Words::new());
        let (regain, (ledger, is_ledger)) = (Regain::default(), watch::channel(Arc::<Ledger>::default()));
        let (told, released) = (
            Told { heard, total: watch::channel(None).0, orders, regain: regain.clone() },
            watch::channel(Words::new()).1,
        );
        let overlay = watch::channel(None).1;
        let facts = Facts { ready: is_ready, uplink: is_uplink, released, overlay, ledger: is_ledger };
        let server = tokio::spawn(serve(settings, facts, told, stop.clone()));
        Self { port, ready, uplink, heard: is_heard, orders: is_ordered, regain, ledger, stop, server }
    }

    async fn client(&self, address: [u8; 4]) -> HealthClient<Channel> {
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

fn ask(service: &str) -> HealthCheckRequest {
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
    ground.uplink.send_replace(Uplink::NoCarrier("eth0".into()));
    assert_eq!(next().await, i32::from(Answer::NotServing));
    let refused = client.check(ask(SERVICE)).await.expect("an answer");
    assert_eq!(refused.get_ref().status, i32::from(Answer::NotServing));
    assert_eq!(refused.metadata().get(REASON).expect("a reason"), "no-carrier");
    // Another obstacle is no news to who watches, another address is no end.
    ground.uplink.send_replace(Uplink::NextHopLost(vec![]));
    ground.ready.send_replace(ready(&[FIRST, SECOND]));
    let mut other = ground.client(SECOND).await;
    let refused = other.check(ask(SERVICE)).await.expect("an answer");
    assert_eq!(refused.metadata().get(REASON).expect("a reason"), "next-hop");
    ground.uplink.send_replace(Uplink::Works);
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

#[tokio::test]
async fn the_agent_knows_when_the_leader_has_heard_it() {
    let mut ground = Ground::start();
    let mut client = ground.client(FIRST).await;
    let mut probe = async |number, confirmed| {
        let mut request = Request::new(ask(SERVICE));
        Probe { session: 7, number, confirmed, term: 3 }.write(request.metadata_mut());
        touch::set_timeout(request.metadata_mut(), Duration::from_secs(5));
        let answer = client.check(request).await.expect("an answer");
        assert_eq!(touch::term(answer.metadata()), Some(3));
        assert_eq!(touch::timeout(answer.metadata()), Some(Duration::from_secs(1)));
    };
    let before = Instant::now();
    probe(1, 0).await;
    let between = Instant::now();
    assert!(!ground.heard.has_changed().expect("it lives"));
    probe(2, 1).await;
    let heard = ground.heard.borrow_and_update().expect("confirmed");
    assert!((before..between).contains(&heard));
    ground.stop.cancel();
}

#[tokio::test]
async fn a_former_leaders_orders_are_nothing_to_who_knows_of_a_newer() {
    let ground = Ground::start();
    let mut client = ground.client(FIRST).await;
    let words = |number| Words::from([([172, 18, 0, 100].into(), number)]);
    let mut order = async |term, number| {
        let mut request = Request::new(ask(SERVICE));
        Probe { session: term, number: 1, confirmed: 0, term }.write(request.metadata_mut());
        release::set_orders(request.metadata_mut(), &words(number));
        client.check(request).await.expect("an answer");
        ground.orders.borrow().clone()
    };
    assert_eq!(order(3, 7).await, words(7));
    assert_eq!(order(4, 8).await, words(8));
    assert_eq!(order(3, 9).await, words(8));
    ground.stop.cancel();
}

/// Nobody needs to be a leader to send a probe.
#[tokio::test]
async fn nothing_is_given_back_or_promised_for_longer_than_flag_and_ledger_know() {
    let ground = Ground::start();
    let mut client = ground.client(FIRST).await;
    let (back, promised) = ([IpAddr::from([172, 18, 0, 100])].into(), [IpAddr::from([172, 18, 0, 101])].into());
    ground.regain.settle([].into());
    let mut number = 0;
    let mut ask_for = async |milliseconds: u64| {
        number += 1;
        let mut request = Request::new(ask(SERVICE));
        let metadata = request.metadata_mut();
        Probe { session: 7, number, confirmed: 0, term: 3 }.write(metadata);
        touch::set_timeout(metadata, Duration::from_millis(milliseconds));
        regain::set_given(metadata, number, &back);
        regain::set_to_promise(metadata, &promised);
        let answer = client.check(request).await.expect("an answer");
        let given = ground.regain.given().borrow().clone();
        (given.until.is_some(), regain::promised(answer.metadata()) == promised)
    };
    for milliseconds in [0, 999, 1001, 3_600_000, 3_600_001, u64::MAX] {
        assert_eq!(ask_for(milliseconds).await, (false, false), "{milliseconds}");
    }
    assert_eq!(ask_for(1000).await, (true, true), "this node's own");
    for (total, former, longest) in [(Some(2), None, 2000), (Some(2), Some(4), 4000), (None, None, 1000)] {
        let [total, former_total] = [total, former].map(|seconds| seconds.map(Duration::from_secs));
        ground.ledger.send_replace(Arc::new(Ledger { total, former_total, ..Ledger::default() }));
        assert_eq!((ask_for(longest).await.1, ask_for(longest + 1).await.1), (true, false), "{longest}");
    }
    ground.stop.cancel();
}
