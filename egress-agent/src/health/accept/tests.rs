//! Many connections on loopback: each address of 127.0.0.0/8 stands for a host.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Instant;

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use tokio::net::TcpSocket;
use tonic_health::pb::health_check_response::ServingStatus as Answer;

use super::*;
use crate::health::SERVICE;
use crate::health::tests::{FIRST, TestServer, ask};

/// Not a node's address.
const POD: [u8; 4] = [127, 9, 9, 9];

/// A connection from this address; `None` if it is refused.
async fn connect(from: [u8; 4], port: u16) -> Option<TcpStream> {
    let socket = TcpSocket::new_v4().expect("a socket");
    socket.bind(SocketAddr::from((from, 0))).expect("an address of loopback");
    let connection = socket.connect(SocketAddr::from((FIRST, port))).await.ok()?;
    Some(connection.into_std().expect("a socket"))
}

/// HTTP/2: the preface, settings, and `count` checks whose bodies never end.
fn unfinished_checks(count: u32) -> Vec<u8> {
    let mut bytes = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0".to_vec();
    // From HPACK's static table: POST, http. The path and the content type are literals.
    let mut block = vec![0x83, 0x86];
    for (name, value) in [(0x04, "/grpc.health.v1.Health/Check"), (0x0f, "application/grpc")] {
        block.push(name);
        // The index of content-type (31) does not fit into four bits.
        block.extend((name == 0x0f).then_some(31 - 15));
        block.push(u8::try_from(value.len()).expect("short"));
        block.extend(value.as_bytes());
    }
    for stream in (0..count).map(|number| 2 * number + 1) {
        let length = u32::try_from(block.len()).expect("short").to_be_bytes();
        bytes.extend(&length[1..]);
        // HEADERS, END_HEADERS.
        bytes.extend([1, 4]);
        bytes.extend(stream.to_be_bytes());
        bytes.extend(&block);
    }
    bytes
}

fn resident_kib() -> u64 {
    let text = std::fs::read_to_string("/proc/self/status").expect("procfs");
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("a line");
    line.trim().trim_end_matches(" kB").parse().expect("a number")
}

/// Whether the other end has not closed the connection.
fn is_open(connection: &mut TcpStream) -> bool {
    let mut some = [0; 4096];
    loop {
        match connection.read(&mut some) {
            Ok(0) => return false,
            Ok(_) => {}
            Err(error) => return error.kind() == std::io::ErrorKind::WouldBlock,
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_idle_connections_and_slow_streams_are_bounded_and_do_not_delay_nodes() {
    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE).expect("a limit");
    setrlimit(Resource::RLIMIT_NOFILE, most, most).expect("up to the hard limit");
    let server = TestServer::start();
    let mut client = server.client(FIRST).await;
    let port = server.port;
    let before = resident_kib();
    let slow = unfinished_checks(100);
    let connections = tokio::spawn(async move {
        let mut connections = Vec::new();
        for _ in 0..5000 {
            connections.extend(connect(POD, port).await);
        }
        for pod in 0..500_u16 {
            let [high, low] = pod.to_be_bytes();
            let Some(mut connection) = connect([127, 8, high, low], port).await else { continue };
            // A closed connection does not matter here.
            drop(connection.write_all(&slow));
            connections.push(connection);
        }
        connections
    });
    // An existing session, and new ones.
    let mut took = Vec::new();
    while !connections.is_finished() || took.len() < 8 {
        let begin = Instant::now();
        let answer = client.check(ask(SERVICE)).await.expect("an answer").into_inner();
        assert_eq!(answer.status, i32::from(Answer::Serving));
        server.client(FIRST).await.check(ask(SERVICE)).await.expect("an answer to another connection");
        took.push(begin.elapsed());
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let mut connections = connections.await.expect("it ends");
    // Connections that wait to be accepted look open.
    tokio::time::sleep(Duration::from_secs(1)).await;
    let grown = resident_kib().saturating_sub(before);
    let open = connections.iter_mut().filter_map(|connection| is_open(connection).then_some(())).count();
    // Not the longest: this machine may be busy.
    took.sort_unstable();
    let median = took[took.len() / 2];
    println!(
        "of {} connections {open} stay; {grown} KiB more; a probe by two connections took {median:?}",
        connections.len()
    );
    assert!(open <= OTHER_SLOTS, "{open} connections stay");
    assert!(grown < 32 * 1024, "{grown} KiB");
    assert!(median < Duration::from_millis(500), "{median:?}");
    tokio::time::sleep(HANDSHAKE + Duration::from_secs(1)).await;
    let open = connections.iter_mut().filter_map(|connection| is_open(connection).then_some(())).count();
    assert!(open <= OTHER_SLOTS - SLOTS_PER_ADDRESS, "silent connections are closed: {open}");
    server.stop.cancel();
}

#[test]
fn nodes_have_reserved_slots_and_each_address_has_a_limit() {
    let node: IpAddr = [10, 0, 0, 1].into();
    let (node_addresses, nodes) = watch::channel(Arc::new(BTreeSet::from([node])));
    let acceptor = Acceptor::new(nodes, Meters::default());
    let pod = |number: u8| IpAddr::from([10, 9, 0, number]);
    let mut slots: Vec<ConnectionSlot> = (0..=255).filter_map(|number| acceptor.take_slot(pod(number / 2))).collect();
    assert_eq!(slots.len(), OTHER_SLOTS);
    assert!(acceptor.take_slot(pod(200)).is_none(), "no slot is left for other addresses");
    let of_node: Vec<ConnectionSlot> = (0..100).filter_map(|_| acceptor.take_slot(node)).collect();
    assert_eq!(of_node.len(), SLOTS_PER_ADDRESS);
    slots.pop();
    let mapped = IpAddr::V6(std::net::Ipv4Addr::new(10, 9, 0, 200).to_ipv6_mapped());
    let last = acceptor.take_slot(mapped);
    assert!(last.is_some() && acceptor.take_slot(pod(201)).is_none(), "a freed slot is used again");
    // An address that is no longer a node's keeps its slot.
    node_addresses.send_replace(Arc::default());
    drop((slots, of_node, last));
    let open = lock(&acceptor.open);
    assert_eq!((open.of_others, open.by_address.len()), (0, 0));
}

#[tokio::test]
async fn connections_of_other_hosts_are_read_at_a_limited_rate() {
    let server = TestServer::start();
    server.client(FIRST).await;
    let address = SocketAddr::from((FIRST, server.port));
    let endpoint = tonic::transport::Endpoint::try_from(format!("http://{address}")).expect("an address");
    let channel = endpoint.local_address(Some(POD.into())).connect().await.expect("a slot");
    let mut client = tonic_health::pb::health_client::HealthClient::new(channel);
    let (begin, mut answered) = (Instant::now(), 0);
    while begin.elapsed() < Duration::from_millis(2500) {
        client.check(ask(SERVICE)).await.expect("an answer");
        answered += 1;
    }
    println!("{answered} checks in 2.5 s");
    assert!((10..1000).contains(&answered), "{answered}");
    server.stop.cancel();
}
