use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio_util::sync::DropGuard;

use super::*;
use crate::kube::outage::Outages;

async fn server() -> (SocketAddr, DropGuard) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("loopback has ports");
    let (address, stop) = (listener.local_addr().expect("bound"), CancellationToken::new());
    let station = Arc::new(Station::new(Outages::new("http://nowhere")));
    tokio::spawn(serve_on(listener, station, stop.clone()));
    (address, stop.drop_guard())
}

/// What comes back for these bytes, up to the end of the connection.
async fn say(address: SocketAddr, request: &str) -> String {
    let mut stream = TcpStream::connect(address).await.expect("it listens");
    stream.write_all(request.as_bytes()).await.expect("it takes that");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.expect("text");
    answer
}

async fn get(address: SocketAddr, path: &str) -> String {
    say(address, &format!("GET {path} HTTP/1.1\r\nHost: a\r\n\r\n")).await
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
    let post = say(address, "POST /metrics HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n").await;
    assert!(post.starts_with("HTTP/1.1 405 ") && post.contains("allow: GET, HEAD"), "{post}");
    let head = say(address, "HEAD /healthz HTTP/1.1\r\nHost: a\r\n\r\n").await;
    assert!(head.starts_with("HTTP/1.1 200 ") && head.ends_with("\r\n\r\n"), "{head}");
    assert!(say(address, "nonsense\r\n\r\n").await.starts_with("HTTP/1.1 400 "));
}

#[tokio::test]
async fn who_is_slow_is_hung_up_on_and_others_have_their_turn() {
    let (address, _stop) = server().await;
    // More than there are places, and none of them says a word.
    let mut silent = Vec::new();
    for _ in 0..CONNECTIONS + 4 {
        silent.push(TcpStream::connect(address).await.expect("the kernel takes it"));
    }
    let begun = std::time::Instant::now();
    assert!(get(address, "/healthz").await.starts_with("HTTP/1.1 200 "));
    assert!(begun.elapsed() < REQUEST * 2 + Duration::from_secs(4), "{:?}", begun.elapsed());
    assert!(begun.elapsed() > REQUEST / 2, "there were places, so nothing was shown: {:?}", begun.elapsed());
}

#[test]
fn where_to_listen_is_an_address_or_a_port() {
    let everywhere: Listen = ":9477".parse().expect("a port");
    assert_eq!(everywhere, Listen::Everywhere(9477));
    for text in ["127.0.0.1:9477", "[::1]:9477", ":9477"] {
        assert_eq!(text.parse::<Listen>().map(|listen| listen.to_string()).as_deref(), Ok(text));
    }
    for wrong in ["", ":", "9477", ":0", "127.0.0.1", "127.0.0.1:0", "localhost:9477", ":99999", "::1:9477:"] {
        assert!(wrong.parse::<Listen>().is_err(), "{wrong:?} was taken");
    }
}
