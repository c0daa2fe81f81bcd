//! Fragments in every order: the datagram arrives whole at the socket that it is for, and nothing outside bears a wrong
//! source in the meantime.
//!
//! Families × UDP, echo, TCP × from the pod, to the pod × gateway here, elsewhere × orders of [`Order`]. The ends are real
//! sockets; only the pieces are made by hand. Of TCP a connection is made as ever, and then one more segment, which its
//! sender's kernel knows nothing of.

use std::io::Read;
use std::net::{TcpListener, TcpStream, UdpSocket};

use nix::sys::socket::{AddressFamily, SockFlag, SockProtocol, SockType, socket};

use super::findings::Findings;
use super::maps::VerdictCounts;
use crate::prelude::*;
use egress_lab::POD_INTERFACE;
use egress_lab::test_cluster::placement::{FIRST_V4, FIRST_V6};
use egress_lab::traffic::flows::{allow_echo_sockets, echo_request, echo_socket};
use egress_lab::traffic::fragments::{self, DATA, IpPayload, Order};

pub(super) fn tests() -> Vec<LabTest> {
    let timeout = Duration::from_secs(150);
    vec![LabTest::new("paths_fragments_arrive_in_every_order", timeout, every_order)]
}

/// Where the server listens for pieces.
const PORT: u16 = 8095;
const PATIENCE: Duration = Duration::from_secs(1);

fn every_order(context: &LabContext) -> Result<()> {
    let cluster = TestCluster::for_placement_on(context, LabBuilder::default(), &[], |_| Ok(()))?;
    cluster.place(&[(FIRST_V4, 1), (FIRST_V6, 2)])?;
    // The server's kernel answers echo requests in fragments that fit the pods' path.
    let mtu = plan::POD_MTU.to_string();
    cluster.lab.outside().exec("ip", &["link", "set", POD_INTERFACE, "mtu", &mtu])?;
    let capture = Capture::start(&cluster.lab)?;
    let mut findings = Findings::default();
    let mut number = 1000;
    for node in 1..=2 {
        for (to, egress) in plan::SERVER.both().into_iter().zip([FIRST_V4, FIRST_V6]) {
            let gateway = if to.is_ipv4() { 1 } else { 2 };
            let pod = cluster.chosen(node)?;
            let path = if node == gateway { "local" } else { "remote" };
            for order in Order::ALL {
                number += 16;
                let talk = FragmentTalk { pod, outside: cluster.lab.outside(), to, egress, order, number };
                talk.all(path, &cluster, &mut findings)?;
            }
        }
    }
    let seen = capture.finish()?;
    findings.equal("packets outside with a pod's or a node's address", &0, &{
        seen.to_the_world(AddressKind::Pod) + seen.to_the_world(AddressKind::Node)
    });
    println!("       packets outside with an egress IP: {}", seen.to_the_world(AddressKind::Egress));
    findings.conclude()
}

/// One pod, one server, one order; numbers of datagrams are used once.
pub(super) struct FragmentTalk<'a> {
    pub(super) pod: &'a LabPod,
    pub(super) outside: &'a Netns,
    pub(super) to: IpAddr,
    pub(super) egress: IpAddr,
    pub(super) order: Order,
    pub(super) number: u16,
}

impl FragmentTalk<'_> {
    pub(super) fn all(&self, path: &str, cluster: &TestCluster, findings: &mut Findings) -> Result<()> {
        type Protocol<'t> = fn(&FragmentTalk<'t>) -> Result<()>;
        let protocols: [(&str, Protocol<'_>); 4] = [
            ("UDP", Self::udp),
            ("echo", Self::echo),
            ("TCP to the world", Self::tcp_out),
            ("TCP to the pod", Self::tcp_in),
        ];
        for (name, protocol) in protocols {
            let before: Vec<VerdictCounts> =
                cluster.lab.nodes().iter().map(VerdictCounts::of).collect::<Result<_>>()?;
            let outcome = protocol(self);
            let mut held = Vec::new();
            for (node, before) in cluster.lab.nodes().iter().zip(&before) {
                let mut grown = VerdictCounts::of(node)?.since(before);
                grown.retain(|label, _| label.starts_with("fragment"));
                held.push(grown);
            }
            let what = format!("{} and {}, {path} gateway, {name}, {:?}: {held:?}", self.pod.name, self.to, self.order);
            findings.right(&what, &outcome);
        }
        Ok(())
    }

    fn own(&self) -> IpAddr {
        self.pod.addresses.towards(self.to)
    }

    /// Different data for each datagram of a sending.
    fn data(&self) -> Vec<Vec<u8>> {
        let first = self.number.to_be_bytes()[1];
        (0..self.order.datagrams())
            .map(|number| (0..DATA).map(|at| u8::try_from((at + number) % 251).unwrap_or(0) ^ first).collect())
            .collect()
    }

    fn send(&self, from: &Netns, offset: u16, datagrams: &[IpPayload]) -> Result<()> {
        fragments::send(from, datagrams, self.order, self.number + offset)
    }

    fn udp(&self) -> Result<()> {
        let at = SocketAddr::new(self.to, PORT);
        let server = bound(self.outside, at)?;
        let pod = bound(&self.pod.netns, SocketAddr::new(self.own(), 0))?;
        let (local, data) = (pod.local_addr()?, self.data());
        let out = data.iter().map(|data| IpPayload::udp(local, at, data)).collect::<Result<Vec<_>>>()?;
        self.send(&self.pod.netns, 0, &out)?;
        let (seen, from) = received(&server, data.len()).context("at the server")?;
        ensure!(from.ip() == self.egress, "seen as {from}");
        ensure!(same(&seen, &data), "other data");
        let back = data.iter().map(|data| IpPayload::udp(at, from, data)).collect::<Result<Vec<_>>>()?;
        self.send(self.outside, 4, &back)?;
        let (seen, from) = received(&pod, data.len()).context("at the pod")?;
        ensure!(from == at && same(&seen, &data), "other data, or from {from}");
        Ok(())
    }

    /// The server's kernel answers what has arrived whole.
    fn echo(&self) -> Result<()> {
        const HEAD: usize = 8;
        allow_echo_sockets(&self.pod.netns)?;
        let pod = self.pod.netns.run(|| {
            // The kernel gives identifiers one after the other; system ports among them are not kept.
            let mut socket = echo_socket(self.to)?;
            while socket.local_addr()?.port() < 1024 {
                socket = echo_socket(self.to)?;
            }
            socket.set_read_timeout(Some(PATIENCE))?;
            Ok(socket)
        })?;
        let (identifier, data) = (pod.local_addr()?.port(), self.data());
        let echo = |from, to, is_request| -> Vec<IpPayload> {
            data.iter().map(|data| IpPayload::echo(from, to, is_request, identifier, data)).collect()
        };
        let bodies = |seen: Vec<Vec<u8>>| seen.iter().map(|one| one[HEAD..].to_vec()).collect::<Vec<_>>();
        self.send(&self.pod.netns, 8, &echo(self.own(), self.to, true))?;
        let (seen, _) = received(&pod, data.len()).context("no reply of the server")?;
        ensure!(same(&bodies(seen), &data), "other data");
        // Again by hand, in this order; the identifier is free on the egress IP, so it is the pod's own.
        ensure!(echo_request(self.to).len() == HEAD);
        self.send(self.outside, 10, &echo(self.to, self.egress, false))?;
        let (seen, _) = received(&pod, data.len()).context("no reply made by hand")?;
        ensure!(same(&bodies(seen), &data), "other data");
        Ok(())
    }

    fn tcp_out(&self) -> Result<()> {
        let TcpConnection { pod, mut server, from_pod, .. } = self.connect()?;
        let (local, at) = (pod.local_addr()?, SocketAddr::new(self.to, PORT));
        let data = self.data();
        let segments = segments(local, at, from_pod, &data);
        self.send(&self.pod.netns, 12, &segments)?;
        ensure!(server.peer_addr()?.ip() == self.egress, "seen as {}", server.peer_addr()?);
        read_whole(&mut server, &data).context("at the server")
    }

    fn tcp_in(&self) -> Result<()> {
        let TcpConnection { mut pod, server, from_server, .. } = self.connect()?;
        let (at, seen) = (SocketAddr::new(self.to, PORT), server.peer_addr()?);
        let data = self.data();
        let segments = segments(at, seen, from_server, &data);
        self.send(self.outside, 14, &segments)?;
        read_whole(&mut pod, &data).context("at the pod")
    }

    /// A connection, and what comes next on it as its packets say.
    fn connect(&self) -> Result<TcpConnection> {
        let at = SocketAddr::new(self.to, PORT);
        let listener = self.outside.run(|| Ok(TcpListener::bind(at)?))?;
        let ear = self.pod.netns.run(|| listen(self.to))?;
        let pod = self.pod.netns.run(|| Ok(TcpStream::connect_timeout(&at, PATIENCE)?))?;
        let (server, _) = listener.accept()?;
        for stream in [&pod, &server] {
            stream.set_read_timeout(Some(PATIENCE))?;
        }
        let (sequence, acknowledged) = syn_ack(&ear, pod.local_addr()?.port())?;
        let next = sequence.wrapping_add(1);
        Ok(TcpConnection { pod, server, from_pod: (acknowledged, next), from_server: (next, acknowledged) })
    }
}

struct TcpConnection {
    pod: TcpStream,
    server: TcpStream,
    /// Sequence and acknowledgement number of the next segment.
    from_pod: (u32, u32),
    from_server: (u32, u32),
}

fn segments(
    from: SocketAddr,
    to: SocketAddr,
    (sequence, acknowledged): (u32, u32),
    data: &[Vec<u8>],
) -> Vec<IpPayload> {
    let mut at = sequence;
    let segment = |data: &Vec<u8>| {
        let segment = IpPayload::tcp(from, to, at, acknowledged, data);
        at = at.wrapping_add(u32::try_from(data.len()).unwrap_or(0));
        segment
    };
    data.iter().map(segment).collect()
}

fn read_whole(stream: &mut TcpStream, data: &[Vec<u8>]) -> Result<()> {
    let expected = data.concat();
    let mut seen = vec![0; expected.len()];
    stream.read_exact(&mut seen)?;
    ensure!(seen == expected, "other data");
    Ok(())
}

fn bound(netns: &Netns, at: SocketAddr) -> Result<UdpSocket> {
    netns.run(|| {
        let socket = UdpSocket::bind(at)?;
        socket.set_read_timeout(Some(PATIENCE))?;
        Ok(socket)
    })
}

/// So many datagrams, and who sent the last one.
fn received(socket: &UdpSocket, count: usize) -> Result<(Vec<Vec<u8>>, SocketAddr)> {
    let mut buffer = vec![0; 65536];
    let (mut seen, mut from) = (Vec::new(), None);
    while seen.len() < count {
        let (length, sender) = socket.recv_from(&mut buffer)?;
        seen.push(buffer[..length].to_vec());
        from = Some(sender);
    }
    Ok((seen, from.context("nothing was asked for")?))
}

/// The same, in whichever order.
fn same(seen: &[Vec<u8>], sent: &[Vec<u8>]) -> bool {
    let sorted = |all: &[Vec<u8>]| {
        let mut all = all.to_vec();
        all.sort();
        all
    };
    sorted(seen) == sorted(sent)
}

/// Hears the TCP packets of a namespace, beside the sockets that they are for.
fn listen(to: IpAddr) -> Result<UdpSocket> {
    let family = if to.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    let socket = UdpSocket::from(socket(family, SockType::Raw, SockFlag::SOCK_CLOEXEC, SockProtocol::Tcp)?);
    socket.set_read_timeout(Some(PATIENCE))?;
    Ok(socket)
}

/// Sequence and acknowledgement number of the SYN+ACK to this port.
fn syn_ack(ear: &UdpSocket, port: u16) -> Result<(u32, u32)> {
    const SYN_ACK: u8 = 0x12;
    let mut buffer = [0; 2048];
    loop {
        let length = ear.recv(&mut buffer).context("no SYN+ACK was heard")?;
        // Of IPv4 the header is heard too.
        let at = if buffer[0] >> 4 == 4 && buffer[9] == 6 { usize::from(buffer[0] & 0x0f) * 4 } else { 0 };
        let Some(head) = buffer[..length].get(at..at + 20) else { continue };
        let number =
            |place: usize| u32::from_be_bytes([head[place], head[place + 1], head[place + 2], head[place + 3]]);
        if head[2..4] == port.to_be_bytes() && head[13] & 0x3f == SYN_ACK {
            return Ok((number(4), number(8)));
        }
    }
}
