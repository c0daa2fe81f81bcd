//! Crowds on loopback: each address of 127.0.0.0/8 is a host of its own.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Instant;

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use tokio::net::TcpSocket;
use tonic_health::pb::health_check_response::ServingStatus as Answer;

use super::*;
use crate::health::SERVICE;
use crate::health::tests::{FIRST, Ground, ask};

/// Not a node's address.
const POD: [u8; 4] = [127, 9, 9, 9];

/// A connection from there; `None` where it is refused.
async fn connect(from: [u8; 4], port: u16) -> Option<TcpStream> {
    let socket = TcpSocket::new_v4().expect("a socket");
    socket.bind(SocketAddr::from((from, 0))).expect("an address of loopback");
    let connection = socket.connect(SocketAddr::from((FIRST, port))).await.ok()?;
    Some(connection.into_std().expect("a socket"))
}

/// HTTP/2: the preface, settings, and as many checks as said whose bodies never end.
fn unfinished_checks(count: u32) -> Vec<u8> {
    let mut bytes = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0".to_vec();
    // Of HPACK's static table: POST, http; the path and the content type as literals.
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

/// Whether the other end has not hung up.
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
async fn a_crowd_of_idle_connections_and_slow_streams_keeps_no_node_waiting_and_is_bounded() {
    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE).expect("a limit");
    setrlimit(Resource::RLIMIT_NOFILE, most, most).expect("up to the hard limit");
    let ground = Ground::start();
    let mut client = ground.client(FIRST).await;
    let port = ground.port;
    let before = resident_kib();
    let slow = unfinished_checks(100);
    let crowd = tokio::spawn(async move {
        let mut crowd = Vec::new();
        for _ in 0..5000 {
            crowd.extend(connect(POD, port).await);
        }
        for pod in 0..500_u16 {
            let [high, low] = pod.to_be_bytes();
            let Some(mut connection) = connect([127, 8, high, low], port).await else { continue };
            // One that was closed is no matter here.
            drop(connection.write_all(&slow));
            crowd.push(connection);
        }
        crowd
    });
    // A session that is there, and new ones.
    let mut took = Vec::new();
    while !crowd.is_finished() || took.len() < 8 {
        let begin = Instant::now();
        let answer = client.check(ask(SERVICE)).await.expect("an answer").into_inner();
        assert_eq!(answer.status, i32::from(Answer::Serving));
        ground.client(FIRST).await.check(ask(SERVICE)).await.expect("an answer to another connection");
        took.push(begin.elapsed());
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let mut crowd = crowd.await.expect("it ends");
    // Those that wait to be accepted look open.
    tokio::time::sleep(Duration::from_secs(1)).await;
    let grown = resident_kib().saturating_sub(before);
    let open = crowd.iter_mut().filter_map(|connection| is_open(connection).then_some(())).count();
    // Not the longest: this machine may have others at work.
    took.sort_unstable();
    let usual = took[took.len() / 2];
    println!("of {} connections {open} stay; {grown} KiB more; a probe by two connections took {usual:?}", crowd.len());
    assert!(open <= OTHERS, "{open} connections stay");
    assert!(grown < 32 * 1024, "{grown} KiB");
    assert!(usual < Duration::from_millis(500), "{usual:?}");
    tokio::time::sleep(HANDSHAKE + Duration::from_secs(1)).await;
    let open = crowd.iter_mut().filter_map(|connection| is_open(connection).then_some(())).count();
    assert!(open <= OTHERS - OF_ONE, "one that says nothing is hung up on: {open}");
    ground.stop.cancel();
}

#[test]
fn nodes_have_places_that_no_other_takes_and_no_address_has_more_than_its_own() {
    let node: IpAddr = [10, 0, 0, 1].into();
    let (tell, nodes) = watch::channel(Arc::new(BTreeSet::from([node])));
    let door = Acceptor::new(nodes, Meters::default());
    let pod = |number: u8| IpAddr::from([10, 9, 0, number]);
    let mut inside: Vec<Place> = (0..=255).filter_map(|number| door.enter(pod(number / 2))).collect();
    assert_eq!(inside.len(), OTHERS);
    assert!(door.enter(pod(200)).is_none(), "there is no room for others");
    let of_node: Vec<Place> = (0..100).filter_map(|_| door.enter(node)).collect();
    assert_eq!(of_node.len(), OF_ONE);
    inside.pop();
    let mapped = IpAddr::V6(std::net::Ipv4Addr::new(10, 9, 0, 200).to_ipv6_mapped());
    let last = door.enter(mapped);
    assert!(last.is_some() && door.enter(pod(201)).is_none(), "a place that is left is another's");
    // One that is no node any more keeps the place that it has, and no other's.
    tell.send_replace(Arc::default());
    drop((inside, of_node, last));
    let inside = lock(&door.inside);
    assert_eq!((inside.others, inside.by_address.len()), (0, 0));
}

#[tokio::test]
async fn who_is_no_node_is_read_at_a_pace() {
    let ground = Ground::start();
    ground.client(FIRST).await;
    let address = SocketAddr::from((FIRST, ground.port));
    let endpoint = tonic::transport::Endpoint::try_from(format!("http://{address}")).expect("an address");
    let channel = endpoint.local_address(Some(POD.into())).connect().await.expect("a place");
    let mut client = tonic_health::pb::health_client::HealthClient::new(channel);
    let (begin, mut asked) = (Instant::now(), 0);
    while begin.elapsed() < Duration::from_millis(2500) {
        client.check(ask(SERVICE)).await.expect("an answer");
        asked += 1;
    }
    println!("{asked} checks in 2.5 s");
    assert!((10..1000).contains(&asked), "{asked}");
    ground.stop.cancel();
}
