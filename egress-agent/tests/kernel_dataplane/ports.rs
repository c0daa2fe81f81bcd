//! NAT on the node's own address beside the host's own sockets: they never share a port, and both work at the same time.
//!
//! The pod is an address on the node's loopback whose sockets bear mark 1008: what they send leaves by the uplink as a pod's
//! packet to another node does, and the outside is that node. It answers each packet and connection with the port that it
//! came from.

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

use crate::node::{Node, ip, on_node};

const NODE: [u8; 4] = [172, 18, 0, 2];
const OUTSIDE: [u8; 4] = [172, 18, 0, 1];
const POD: [u8; 4] = [10, 244, 1, 10];
const SERVICE: u16 = 7777;
const EPHEMERAL: &str = "60000 60063";

fn set(name: &str, value: &str) {
    std::fs::write(format!("/proc/sys/net/ipv4/{name}"), value).expect("set the host's ports");
}

/// A node whose pod can talk to the outside as to another node.
async fn start(node: &Node) -> Dataplane {
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

/// Answers by UDP and TCP with the port that somebody comes from, until told to stop.
fn serve(udp: &UdpSocket, tcp: &TcpListener, stop: &AtomicBool) {
    udp.set_read_timeout(Some(Duration::from_millis(1))).expect("a timeout");
    tcp.set_nonblocking(true).expect("do not wait");
    let mut open = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        if let Ok((mut stream, from)) = tcp.accept() {
            stream.write_all(&from.port().to_be_bytes()).expect("answer");
            // Kept, so that no port is free again.
            open.push(stream);
        }
        let mut question = [0; 16];
        if let Ok((_, from)) = udp.recv_from(&mut question) {
            udp.send_to(&from.port().to_be_bytes(), from).expect("answer");
        }
    }
}

/// Runs the test while the outside serves.
fn while_served(node: &Node, test: impl FnOnce() + Send) {
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

/// The port that the outside has seen, and the socket.
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

/// All ports that the host gives by itself.
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
        assert_eq!((range.first, range.last), (61002, 65535), "the highest that nobody else takes");
        while_served(&node, || {
            for kind in [SockType::Datagram, SockType::Stream] {
                // Every port that the host gives by itself, and the edges of those that it keeps for others.
                let host = take_ephemeral(kind);
                assert!(host.len() >= 32, "TCP gives half of them by itself, {} are taken", host.len());
                let edges = [30000, 32767, 60064, 60100, 61000, 61001, 1024, 32768, 59999];
                let bound: Vec<_> = edges.map(|port| ask(kind, NODE, port).expect("bind an edge")).into();
                let hosts: BTreeSet<u16> = host.iter().chain(&bound).map(|(port, _)| *port).collect();
                assert_eq!(hosts.len(), host.len() + bound.len(), "as they are bound, so they are seen");
                assert!(hosts.iter().all(|port| !holds(range, *port)), "a port of NAT's: {hosts:?}");
                // The pod comes with the host's own ports, with those of NAT, and with any others.
                let own = hosts.iter().copied().chain([61002, 65535, 62000]).chain(20000..20150);
                let pods: Vec<_> = own.map(|port| ask(kind, POD, port).expect("the pod is answered")).collect();
                let shown: BTreeSet<u16> = pods.iter().map(|(port, _)| *port).collect();
                assert_eq!(shown.len(), pods.len(), "two flows show one port");
                assert!(shown.iter().all(|port| holds(range, *port)), "not one of NAT's: {shown:?}");
                assert!(shown.is_superset(&[61002, 65535, 62000].into()), "its own where that is one of them");
                assert!(shown.is_disjoint(&hosts));
                // And the host's sockets are still answered, each with its own.
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
fn nat_leaves_the_ports_that_the_host_takes_while_it_runs() {
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
            // The running flow of datagrams goes on from a port that is NAT's now.
            let socket = UdpSocket::from(fd);
            socket.send(b"?").expect("ask");
            let mut seen = [0; 2];
            socket.recv(&mut seen).expect("answered");
            assert!(holds(range, u16::from_be_bytes(seen)), "{seen:?}");
            // The host may have the old one.
            let (hosts, _fd) = ask(SockType::Datagram, NODE, before).expect("the host takes the old port");
            assert_eq!(hosts, before);
        });
    });
}

/// What the host is known to use must not become NAT's by a read that fails.
#[test]
fn nat_keeps_its_ports_while_those_of_the_host_cannot_be_read() {
    on_node(|node| async move {
        set("ip_local_port_range", "50000 65535");
        set("ip_local_reserved_ports", "32768-40000");
        let dataplane = start(&node).await;
        let known = PortRange { first: 40001, last: 49999 };
        assert_eq!(node.config().node_ports, known);
        // Covered in this test's own mounts: there is nothing to be read.
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

fn packets(node: &Node, verdict: Verdict) -> u64 {
    let data = MapData::from_pin(node.pin("maps/counters")).expect("open the counters");
    let counters: PerCpuArray<MapData, Count> = PerCpuArray::try_from(Map::PerCpuArray(data)).expect("counters");
    counters.get(&verdict.index(), 0).expect("a counter").iter().map(|count| count.packets).sum()
}

#[test]
fn where_the_host_takes_every_port_nothing_of_a_pod_leaves() {
    on_node(|node| async move {
        let dataplane = start(&node).await;
        while_served(&node, || {
            set("ip_local_port_range", "1024 65535");
            dataplane.sweep().expect("sweep");
            assert_eq!(node.config().node_ports, PortRange { first: 0, last: 0 });
            let before = packets(&node, Verdict::NoNodeAddress);
            assert!(ask(SockType::Datagram, POD, 20000).is_err(), "nobody has seen it");
            assert!(packets(&node, Verdict::NoNodeAddress) > before, "and it says why");
            assert!(ask(SockType::Datagram, NODE, 0).is_ok(), "the host goes on");
            set("ip_local_port_range", "32768 60999");
            dataplane.sweep().expect("sweep");
            let (port, _fd) = ask(SockType::Datagram, POD, 20000).expect("as before");
            assert!(port >= 61000);
        });
    });
}

/// Nothing keeps a process from a port that it names. Its own traffic and the pods' go on side by side, as long as no pod's
/// flow has that very port towards the same end.
#[test]
fn a_socket_on_a_port_of_nats_keeps_its_own_traffic() {
    on_node(|node| async move {
        let _dataplane = start(&node).await;
        while_served(&node, || {
            let (taken, fd) = ask(SockType::Datagram, NODE, 62000).expect("the host may");
            assert_eq!(taken, 62000);
            // They keep their own ports, which are NAT's too.
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
