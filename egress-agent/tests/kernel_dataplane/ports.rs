//! NAT on the node's own address next to the host's own sockets: they never share a port, and both work at the same time.
//!
//! The pod is an address on the node's loopback whose sockets have mark 1008, so its packets leave by the uplink like a pod's
//! packets to another node. The outside is that node. It answers each packet and connection with its source port.

use std::collections::BTreeSet;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use aya::maps::{Map, MapData, PerCpuArray};
use egress_common::abi::{Count, NODE_MARK, PortRange, Verdict};
use egress_core::model::state::{
    Action, EgressId, NodeAddress, OnUnknownPod, PodState, Prefix, PrefixKind, TunnelEndpoint,
};
use egress_core::plan::executor::Executor as _;
use egress_datapath::Dataplane;
use nix::mount::{MsFlags, mount, umount};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, SockaddrIn, bind, connect, setsockopt, socket, sockopt};

use crate::node::{TestNode, ip, on_node};

const NODE: [u8; 4] = [172, 18, 0, 2];
const OUTSIDE: [u8; 4] = [172, 18, 0, 1];
const POD: [u8; 4] = [10, 244, 1, 10];
const SERVICE: u16 = 7777;
const EPHEMERAL: &str = "60000 60063";

fn set(name: &str, value: &str) {
    std::fs::write(format!("/proc/sys/net/ipv4/{name}"), value).expect("set the host's ports");
}

/// A node whose pod can talk to the outside as to another node.
async fn start(node: &TestNode) -> Dataplane {
    ip(&format!("addr add {}/32 dev lo\n", std::net::Ipv4Addr::from(POD)));
    let mut dataplane = node.start().await;
    let node_at = |own, ip: [u8; 4]| NodeAddress { own, node: TunnelEndpoint(ip.into()) };
    let subnet = Prefix { kind: PrefixKind::PodSubnet, node: Some(TunnelEndpoint(NODE.into())) };
    for action in [
        Action::PutNode(NODE.into(), node_at(true, NODE)),
        Action::PutNode(OUTSIDE.into(), node_at(false, OUTSIDE)),
        Action::PutPrefix("10.244.1.0/24".parse().expect("a prefix"), subnet),
        Action::PutPod(POD.into(), PodState::Selected(EgressId(7))),
        Action::SetUnknownPods(OnUnknownPod::Drop),
    ] {
        dataplane.apply(&action).await.expect("apply");
    }
    dataplane
}

/// Answers by UDP and TCP with the source port, until `stop`.
fn serve(udp: &UdpSocket, tcp: &TcpListener, stop: &AtomicBool) {
    udp.set_read_timeout(Some(Duration::from_millis(1))).expect("a timeout");
    tcp.set_nonblocking(true).expect("do not wait");
    let mut open = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        if let Ok((mut stream, from)) = tcp.accept() {
            stream.write_all(&from.port().to_be_bytes()).expect("answer");
            // Kept, so that no port becomes free.
            open.push(stream);
        }
        let mut question = [0; 16];
        if let Ok((_, from)) = udp.recv_from(&mut question) {
            udp.send_to(&from.port().to_be_bytes(), from).expect("answer");
        }
    }
}

/// Runs the test while the outside serves.
fn while_served(node: &TestNode, test: impl FnOnce() + Send) {
    let at = SocketAddr::from((OUTSIDE, SERVICE));
    let sockets = || (UdpSocket::bind(at).expect("bind"), TcpListener::bind(at).expect("listen"));
    let (stop, (udp, tcp)) = (AtomicBool::new(false), node.outside(sockets));
    std::thread::scope(|scope| {
        scope.spawn(|| serve(&udp, &tcp, &stop));
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(test));
        stop.store(true, Ordering::Relaxed);
        if let Err(panic) = result {
            std::panic::resume_unwind(panic);
        }
    });
}

/// A socket towards the service, from this address and port; the pod's are marked.
fn open(kind: SockType, from: [u8; 4], port: u16) -> std::io::Result<OwnedFd> {
    let fd = socket(AddressFamily::Inet, kind, SockFlag::SOCK_CLOEXEC, None)?;
    if from == POD {
        setsockopt(&fd, sockopt::Mark, &NODE_MARK)?;
    }
    let wait = nix::sys::time::TimeVal::new(if kind == SockType::Datagram { 1 } else { 5 }, 0);
    setsockopt(&fd, sockopt::ReceiveTimeout, &wait)?;
    setsockopt(&fd, sockopt::SendTimeout, &wait)?;
    let [a, b, c, d] = from;
    bind(std::os::fd::AsRawFd::as_raw_fd(&fd), &SockaddrIn::new(a, b, c, d, port))?;
    let [a, b, c, d] = OUTSIDE;
    connect(std::os::fd::AsRawFd::as_raw_fd(&fd), &SockaddrIn::new(a, b, c, d, SERVICE))?;
    let _still_there = fd.as_fd();
    Ok(fd)
}

/// The source port that the outside sees, and the socket.
fn ask(kind: SockType, from: [u8; 4], port: u16) -> std::io::Result<(u16, OwnedFd)> {
    let fd = open(kind, from, port)?;
    let mut seen = [0; 2];
    if kind == SockType::Datagram {
        let socket = UdpSocket::from(fd.try_clone()?);
        // A first datagram may be lost to the neighbour's resolution.
        for attempt in 0.. {
            socket.send(b"?")?;
            match socket.recv(&mut seen) {
                Ok(_) => break,
                Err(_) if attempt < 3 => {}
                Err(error) => return Err(error),
            }
        }
    } else {
        TcpStream::from(fd.try_clone()?).read_exact(&mut seen)?;
    }
    Ok((u16::from_be_bytes(seen), fd))
}

fn holds(range: PortRange, port: u16) -> bool {
    (range.first..=range.last).contains(&port)
}

/// All ephemeral ports of the host.
fn take_ephemeral(kind: SockType) -> Vec<(u16, OwnedFd)> {
    let mut taken = Vec::new();
    loop {
        match ask(kind, NODE, 0) {
            Ok(one) => taken.push(one),
            Err(error) if matches!(error.kind(), ErrorKind::AddrInUse | ErrorKind::AddrNotAvailable) => return taken,
            Err(error) => panic!("after {} sockets: {error}", taken.len()),
        }
        assert!(taken.len() <= 64, "there are 64");
    }
}

#[test]
fn the_host_and_nat_never_share_a_port() {
    on_node(|node| async move {
        set("ip_local_port_range", EPHEMERAL);
        set("ip_local_reserved_ports", "60064-60100,61000-61001");
        let dataplane = start(&node).await;
        let range = node.config().node_ports;
        assert_eq!((range.first, range.last), (61002, 65535), "the highest free range");
        while_served(&node, || {
            for kind in [SockType::Datagram, SockType::Stream] {
                // Every ephemeral port of the host, and the edges of its reserved ports.
                let host = take_ephemeral(kind);
                assert!(host.len() >= 32, "TCP uses half of them as ephemeral ports, {} are in use", host.len());
                let edges = [30000, 32767, 60064, 60100, 61000, 61001, 1024, 32768, 59999];
                let bound: Vec<_> = edges.map(|port| ask(kind, NODE, port).expect("bind an edge")).into();
                let hosts: BTreeSet<u16> = host.iter().chain(&bound).map(|(port, _)| *port).collect();
                assert_eq!(hosts.len(), host.len() + bound.len(), "the outside sees the bound ports");
                assert!(hosts.iter().all(|port| !holds(range, *port)), "a port of NAT's: {hosts:?}");
                // The pod uses ports of the host, of NAT, and others.
                let own = hosts.iter().copied().chain([61002, 65535, 62000]).chain(20000..20150);
                let pods: Vec<_> = own.map(|port| ask(kind, POD, port).expect("the pod is answered")).collect();
                let shown: BTreeSet<u16> = pods.iter().map(|(port, _)| *port).collect();
                assert_eq!(shown.len(), pods.len(), "two flows show one port");
                assert!(shown.iter().all(|port| holds(range, *port)), "not one of NAT's: {shown:?}");
                assert!(
                    shown.is_superset(&[61002, 65535, 62000].into()),
                    "it keeps its own port if that is one of NAT's"
                );
                assert!(shown.is_disjoint(&hosts));
                // The host's sockets still get answers.
                for (port, fd) in host.iter().chain(&bound).filter(|_| kind == SockType::Datagram) {
                    let socket = UdpSocket::from(fd.try_clone().expect("the socket"));
                    socket.send(b"?").expect("ask again");
                    let mut seen = [0; 2];
                    socket.recv(&mut seen).expect("still answered");
                    assert_eq!(u16::from_be_bytes(seen), *port);
                }
            }
        });
        drop(dataplane);
    });
}

#[test]
fn nat_leaves_ports_that_the_host_reserves_while_it_runs() {
    on_node(|node| async move {
        let dataplane = start(&node).await;
        assert_eq!(node.config().node_ports, PortRange { first: 61000, last: 65535 });
        while_served(&node, || {
            let (before, fd) = ask(SockType::Datagram, POD, 20000).expect("answered");
            assert!(before >= 61000);
            set("ip_local_port_range", "50000 65535");
            dataplane.sweep().expect("sweep");
            let range = node.config().node_ports;
            assert_eq!(range, PortRange { first: 32768, last: 49999 });
            // The running flow of datagrams continues from a port of NAT's new range.
            let socket = UdpSocket::from(fd);
            socket.send(b"?").expect("ask");
            let mut seen = [0; 2];
            socket.recv(&mut seen).expect("answered");
            assert!(holds(range, u16::from_be_bytes(seen)), "{seen:?}");
            // The host may use the old port.
            let (hosts, _fd) = ask(SockType::Datagram, NODE, before).expect("the host uses the old port");
            assert_eq!(hosts, before);
        });
    });
}

/// A failed read must not give known ports of the host to NAT.
#[test]
fn nat_keeps_its_ports_while_those_of_the_host_cannot_be_read() {
    on_node(|node| async move {
        set("ip_local_port_range", "50000 65535");
        set("ip_local_reserved_ports", "32768-40000");
        let dataplane = start(&node).await;
        let known = PortRange { first: 40001, last: 49999 };
        assert_eq!(node.config().node_ports, known);
        // Hidden by a mount of this test: the file is empty.
        let setting = "/proc/sys/net/ipv4/ip_local_port_range";
        mount(Some("/dev/null"), setting, None::<&str>, MsFlags::MS_BIND, None::<&str>).expect("cover the setting");
        assert_eq!(std::fs::read_to_string(setting).expect("nothing"), "");
        for _ in 0..2 {
            dataplane.sweep().expect("sweep");
            assert_eq!(node.config().node_ports, known);
        }
        umount(setting).expect("uncover the setting");
        set("ip_local_port_range", "50000 60999");
        dataplane.sweep().expect("sweep");
        assert_eq!(node.config().node_ports, PortRange { first: 61000, last: 65535 }, "and follows it again");
    });
}

fn packets(node: &TestNode, verdict: Verdict) -> u64 {
    let data = MapData::from_pin(node.pin("maps/counters")).expect("open the counters");
    let counters: PerCpuArray<MapData, Count> = PerCpuArray::try_from(Map::PerCpuArray(data)).expect("counters");
    counters.get(&verdict.index(), 0).expect("a counter").iter().map(|count| count.packets).sum()
}

#[test]
fn no_packet_of_a_pod_leaves_if_the_host_reserves_every_port() {
    on_node(|node| async move {
        let dataplane = start(&node).await;
        while_served(&node, || {
            set("ip_local_port_range", "1024 65535");
            dataplane.sweep().expect("sweep");
            assert_eq!(node.config().node_ports, PortRange { first: 0, last: 0 });
            let before = packets(&node, Verdict::NoNodeAddress);
            assert!(ask(SockType::Datagram, POD, 20000).is_err(), "no packet leaves");
            assert!(packets(&node, Verdict::NoNodeAddress) > before, "the drop reason is counted");
            assert!(ask(SockType::Datagram, NODE, 0).is_ok(), "the host's sockets work");
            set("ip_local_port_range", "32768 60999");
            dataplane.sweep().expect("sweep");
            let (port, _fd) = ask(SockType::Datagram, POD, 20000).expect("as before");
            assert!(port >= 61000);
        });
    });
}

/// A process may bind any port. Its traffic and the pods' traffic both work, as long as no pod's flow has the same port
/// towards the same destination.
#[test]
fn a_socket_on_a_port_of_nats_keeps_its_own_traffic() {
    on_node(|node| async move {
        let _dataplane = start(&node).await;
        while_served(&node, || {
            let (taken, fd) = ask(SockType::Datagram, NODE, 62000).expect("the host may");
            assert_eq!(taken, 62000);
            // Pods keep their own ports, which are NAT's too.
            for port in 61100..61150 {
                assert_eq!(ask(SockType::Datagram, POD, port).expect("answered").0, port);
            }
            let own = UdpSocket::from(fd);
            own.send(b"?").expect("ask");
            let mut seen = [0; 2];
            own.recv(&mut seen).expect("still answered");
            assert_eq!(u16::from_be_bytes(seen), 62000);
        });
    });
}
