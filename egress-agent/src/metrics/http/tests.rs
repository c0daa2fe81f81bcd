use nix::sys::socket::getsockopt;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpSocket;
use tokio_util::sync::DropGuard;
use tracing_subscriber::layer::SubscriberExt;

use super::*;
use crate::debug::log::RecentWarnings;
use crate::metrics::catalogue::Process;
use egress_kube::api_outage::ApiOutages;

fn acceptor() -> Arc<MetricsServer> {
    acceptor_with(None)
}

fn acceptor_with(token: Option<Arc<Path>>) -> Arc<MetricsServer> {
    let page = Arc::new(HealthPage::new(Process::Agent, ApiOutages::new("http://nowhere")));
    // One address of loopback is this host, the others stand for other hosts.
    Arc::new(MetricsServer::new(page, token, |peer| peer == Ipv4Addr::LOCALHOST))
}

async fn serving(acceptor: Arc<MetricsServer>) -> (SocketAddr, DropGuard) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("loopback has ports");
    let (address, stop) = (listener.local_addr().expect("bound"), CancellationToken::new());
    let stopped = stop.clone();
    tokio::spawn(async move { serve_on(listener, acceptor, &stopped).await });
    (address, stop.drop_guard())
}

async fn server() -> (SocketAddr, DropGuard) {
    serving(acceptor()).await
}

/// Connects as another host.
async fn connect_from_elsewhere(address: SocketAddr) -> TcpStream {
    connect_from("127.0.0.2:0", address).await
}

async fn connect_from(host: &str, address: SocketAddr) -> TcpStream {
    let socket = TcpSocket::new_v4().expect("a socket");
    socket.bind(host.parse().expect("a literal")).expect("loopback has more addresses");
    socket.connect(address).await.expect("the kernel accepts")
}

/// The answer to these bytes, up to the end of the connection.
async fn send(address: SocketAddr, request: &str) -> String {
    let mut stream = TcpStream::connect(address).await.expect("it listens");
    stream.write_all(request.as_bytes()).await.expect("it reads");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.expect("text");
    answer
}

async fn get(address: SocketAddr, path: &str) -> String {
    send(address, &format!("GET {path} HTTP/1.1\r\nHost: a\r\n\r\n")).await
}

#[tokio::test]
async fn three_pages_are_served_and_no_other() {
    let (address, _stop) = server().await;
    let metrics = get(address, "/metrics").await;
    assert!(metrics.starts_with("HTTP/1.1 200 "), "{metrics}");
    assert!(metrics.contains("content-type: application/openmetrics-text; version=1.0.0; charset=utf-8"), "{metrics}");
    assert!(metrics.contains("egress_agent_build_info{version=") && metrics.ends_with("# EOF\n"), "{metrics}");
    assert!(get(address, "/metrics?x=1").await.starts_with("HTTP/1.1 200 "));
    assert!(get(address, "/healthz").await.starts_with("HTTP/1.1 200 "));
    let ready = get(address, "/readyz").await;
    assert!(ready.starts_with("HTTP/1.1 503 ") && ready.ends_with("the programs are being loaded\n"), "{ready}");
    for path in ["/", "/metric", "/metrics/", "/healthz/x", "/debug"] {
        assert!(get(address, path).await.starts_with("HTTP/1.1 404 "), "{path}");
    }
    let post = send(address, "POST /metrics HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n").await;
    assert!(post.starts_with("HTTP/1.1 405 ") && post.contains("allow: GET,HEAD"), "{post}");
    let head = send(address, "HEAD /healthz HTTP/1.1\r\nHost: a\r\n\r\n").await;
    assert!(head.starts_with("HTTP/1.1 200 ") && head.ends_with("\r\n\r\n"), "{head}");
    assert!(send(address, "nonsense\r\n\r\n").await.starts_with("HTTP/1.1 400 "));
}

/// The answer to another host that sends this header.
async fn get_from_elsewhere(address: SocketAddr, path: &str, header: &str) -> String {
    let mut stream = connect_from_elsewhere(address).await;
    let request = format!("GET {path} HTTP/1.1\r\nHost: a\r\n{header}\r\n");
    stream.write_all(request.as_bytes()).await.expect("it reads");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.expect("text");
    answer
}

#[tokio::test]
async fn other_hosts_need_the_token_and_probes_do_not() {
    let file = std::env::temp_dir().join(format!("egress-agent-metrics-token-{}", std::process::id()));
    let (address, _stop) = serving(acceptor_with(Some(Arc::from(file.as_path())))).await;
    let status = |answer: String| answer.split(' ').nth(1).map(str::to_owned);
    let elsewhere = async |path: &str, header: &str| status(get_from_elsewhere(address, path, header).await);
    let right = "Authorization: Bearer d0h\r\n";
    let refused = Some("401".to_owned());
    // Without the file, and with an empty one, nothing is right.
    for contents in [None, Some(""), Some("\n")] {
        if let Some(contents) = contents {
            std::fs::write(&file, contents).expect("a temporary file");
        }
        for header in ["", right, "Authorization: Bearer \r\n"] {
            assert_eq!(elsewhere("/metrics", header).await, refused, "{contents:?}, {header:?}");
        }
        assert_eq!(status(get(address, "/healthz").await).as_deref(), Some("200"), "{contents:?}");
    }
    // It is read for each request.
    std::fs::write(&file, "d0h\n").expect("a temporary file");
    assert_eq!(elsewhere("/metrics", right).await.as_deref(), Some("200"));
    assert_eq!(elsewhere("/healthz", right).await.as_deref(), Some("200"));
    assert_eq!(elsewhere("/other", right).await.as_deref(), Some("404"));
    for header in [
        "",
        "Authorization: d0h\r\n",
        "Authorization: Basic d0h\r\n",
        "Authorization: Bearer d0\r\n",
        "Authorization: Bearer d0hh\r\n",
    ] {
        for path in ["/metrics", "/healthz", "/readyz", "/other"] {
            assert_eq!(elsewhere(path, header).await, refused, "{path}, {header:?}");
        }
    }
    let answer = get_from_elsewhere(address, "/metrics", "").await;
    assert!(answer.contains("www-authenticate: Bearer") && !answer.contains("egress_agent_"), "{answer}");
    assert_eq!(status(get(address, "/metrics").await).as_deref(), Some("200"), "this host");
    std::fs::remove_file(&file).expect("it was written");
}

async fn is_refused(stream: &mut TcpStream) -> bool {
    matches!(timeout(REQUEST / 2, stream.read(&mut [0])).await, Ok(Ok(0) | Err(_)))
}

/// Also where the host's setting keeps the families apart, as the socket says then.
#[tokio::test]
async fn everywhere_is_both_families() {
    let listener = bind_both_families(0).expect("a port");
    assert!(!getsockopt(&listener, Ipv6V6Only).expect("the option"));
    let port = listener.local_addr().expect("bound").port();
    for address in [IpAddr::from(Ipv4Addr::LOCALHOST), IpAddr::from(Ipv6Addr::LOCALHOST)] {
        TcpStream::connect((address, port)).await.unwrap_or_else(|error| panic!("{address}: {error}"));
    }
}

#[tokio::test]
async fn other_hosts_do_not_use_up_the_slots_of_this_host() {
    let (address, _stop) = server().await;
    let mut silent = Vec::new();
    for number in 0..OTHER_CONNECTIONS {
        let host = 2 + number / CONNECTIONS_PER_ADDRESS;
        silent.push(connect_from(&format!("127.0.0.{host}:0"), address).await);
    }
    let start = std::time::Instant::now();
    assert!(get(address, "/healthz").await.starts_with("HTTP/1.1 200 "));
    assert!(start.elapsed() < REQUEST / 2, "it waited for other hosts: {:?}", start.elapsed());
    let mut one_more = connect_from("127.0.0.200:0", address).await;
    assert!(is_refused(&mut one_more).await, "a slot was free, so the test shows nothing");
}

/// A pod with idle connections does not keep the scraper out.
#[tokio::test]
async fn one_address_does_not_use_up_the_slots_of_other_hosts() {
    let (address, _stop) = server().await;
    let mut silent = Vec::new();
    for _ in 0..CONNECTIONS_PER_ADDRESS {
        silent.push(connect_from_elsewhere(address).await);
    }
    let mut one_more = connect_from_elsewhere(address).await;
    assert!(is_refused(&mut one_more).await, "one address has more slots than it should");
    let mut scraper = connect_from("127.0.0.3:0", address).await;
    scraper.write_all(b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n").await.expect("it reads");
    let mut answer = String::new();
    scraper.read_to_string(&mut answer).await.expect("text");
    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    // An ended connection frees its slot.
    let hosts = OtherHosts::default();
    let peer = IpAddr::from([192, 0, 2, 1]);
    let mut held: Vec<_> = (0..CONNECTIONS_PER_ADDRESS).filter_map(|_| hosts.slot(peer)).collect();
    assert_eq!((held.len(), hosts.slot(peer).is_none()), (CONNECTIONS_PER_ADDRESS, true));
    held.pop();
    assert!(hosts.slot(peer).is_some());
    drop(held);
    assert!(hosts.open().is_empty(), "nothing is kept of it");
}

/// The line comes once while it lasts, and one with the same condition says that it is over.
#[tokio::test]
async fn a_missing_token_is_a_condition() {
    const INTERVAL: Duration = Duration::from_millis(5);
    let file = std::env::temp_dir().join(format!("egress-agent-missing-token-{}", std::process::id()));
    let warnings = RecentWarnings::default();
    let subscriber = tracing_subscriber::registry().with(warnings.clone());
    let _subscribed = tracing::subscriber::set_default(subscriber);
    let stop = CancellationToken::new();
    let list = || warnings.list(std::time::SystemTime::now());
    let until = async |wanted: usize| {
        let there = async {
            while list().len() != wanted {
                tokio::time::sleep(INTERVAL).await;
            }
        };
        timeout(Duration::from_secs(20), there).await.expect("the file is looked at")
    };
    let play = async {
        until(1).await;
        let line = list().remove(0);
        assert!(line.line.contains("egress-agent-metrics with the key `token`"), "{line:?}");
        assert_eq!(line.condition.as_deref(), Some("metrics-token"));
        // Empty is as missing, and no new warning.
        std::fs::write(&file, "\n").expect("a temporary file");
        tokio::time::sleep(10 * INTERVAL).await;
        assert_eq!(list(), [line]);
        std::fs::write(&file, "d0h").expect("a temporary file");
        until(0).await;
        std::fs::remove_file(&file).expect("it was written");
        until(1).await;
        stop.cancel();
    };
    tokio::join!(watch_token(&file, INTERVAL, &stop), play);
}

#[tokio::test]
async fn slow_clients_are_disconnected_and_their_slots_are_free_again() {
    let (address, _stop) = server().await;
    let mut silent = Vec::new();
    for _ in 0..OWN_CONNECTIONS {
        silent.push(TcpStream::connect(address).await.expect("the kernel accepts"));
    }
    // All slots are in use until the slow clients are disconnected.
    let mut refused = TcpStream::connect(address).await.expect("the kernel accepts");
    assert!(matches!(refused.read(&mut [0]).await, Ok(0) | Err(_)));
    for mut stream in silent {
        let mut answer = Vec::new();
        let read = timeout(REQUEST + Duration::from_secs(4), stream.read_to_end(&mut answer)).await;
        drop(read.expect("it was not disconnected"));
    }
    assert!(get(address, "/healthz").await.starts_with("HTTP/1.1 200 "));
}

#[tokio::test]
async fn a_scrape_that_waits_too_long_fails_and_health_pages_do_not_wait() {
    let acceptor = acceptor();
    let (address, _stop) = serving(Arc::clone(&acceptor)).await;
    let busy = acceptor.scrapes.lock().await;
    let scrape = tokio::spawn(get(address, "/metrics"));
    let start = std::time::Instant::now();
    assert!(get(address, "/healthz").await.starts_with("HTTP/1.1 200 "));
    assert!(start.elapsed() < SCRAPE_WAIT / 2, "it waited for a scrape: {:?}", start.elapsed());
    let scrape = scrape.await.expect("no panic");
    assert!(scrape.starts_with("HTTP/1.1 503 ") && scrape.ends_with("another scrape is in progress\n"), "{scrape}");
    drop(busy);
    assert!(get(address, "/metrics").await.starts_with("HTTP/1.1 200 "));
}

#[tokio::test]
async fn probes_are_answered_whatever_address_is_configured() {
    for (listen, own) in [
        (":9477", None),
        ("0.0.0.0:9477", None),
        ("[::]:9477", None),
        ("127.0.0.1:9477", None),
        ("192.0.2.1:9477", Some("127.0.0.1:9477")),
        ("[::1]:9477", Some("127.0.0.1:9477")),
    ] {
        let listen: Listen = listen.parse().expect("an address");
        assert_eq!(listen.for_probes().map(|own| own.to_string()).as_deref(), own, "{listen}");
    }
    // An address that no host has cannot be bound: probes are still answered.
    let free = TcpListener::bind("127.0.0.1:0").await.and_then(|one| one.local_addr()).expect("a port");
    let (listen, stop) = (Listen::At((Ipv4Addr::new(192, 0, 2, 1), free.port()).into()), CancellationToken::new());
    let page = Arc::new(HealthPage::new(Process::Agent, ApiOutages::new("http://nowhere")));
    let serving = tokio::spawn(serve(listen, None, page, stop.clone()));
    let answered = timeout(RETRY, async {
        while TcpStream::connect(free).await.is_err() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        get(free, "/healthz").await
    });
    assert!(answered.await.expect("it listens").starts_with("HTTP/1.1 200 "));
    stop.cancel();
    serving.await.expect("no panic");
}

#[test]
fn loopback_is_this_host() {
    for (peer, is) in [
        ("127.0.0.1", true),
        ("::1", true),
        ("::ffff:127.0.0.1", true),
        ("172.18.0.2", false),
        ("::ffff:172.18.0.2", false),
    ] {
        assert_eq!(is_of_this_host(peer.parse().expect("a literal")), is, "{peer}");
    }
}

#[test]
fn the_listen_address_is_an_address_or_a_port() {
    let everywhere: Listen = ":9477".parse().expect("a port");
    assert_eq!(everywhere, Listen::Everywhere(9477));
    for text in ["127.0.0.1:9477", "[::1]:9477", ":9477"] {
        assert_eq!(text.parse::<Listen>().map(|listen| listen.to_string()).as_deref(), Ok(text));
    }
    for wrong in ["", ":", "9477", ":0", "127.0.0.1", "127.0.0.1:0", "localhost:9477", ":99999", "::1:9477:"] {
        assert!(wrong.parse::<Listen>().is_err(), "{wrong:?} was taken");
    }
}
