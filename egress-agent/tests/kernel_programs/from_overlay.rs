//! `from_overlay`, by real packets: a test run cannot carry a tunnel header.
//!
//! A frame with a chosen outer header is sent into the far end of the uplink; the kernel removes the outer header and
//! the program runs on the overlay device. Its output is received at the far ends of the devices.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

use aya::programs::{SchedClassifier, TcAttachType, tc};
use egress_common::abi::Verdict;
use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, bind, recv, send, setsockopt, socket, sockopt,
};
use nix::sys::time::TimeVal;

use crate::cast::{FamilyAddresses, V4, V6, addr};
use crate::encapsulation::setup::settle;
use crate::frames::{ACK, Body, FrameSpec, RST, SYN, ip, octets, packet};
use crate::resets::reset_of;
use crate::slow_guest::patience;
use crate::stage::{FROM_POD, ROUTER_MAC, Stage, UPLINK_MAC, batch, on_stage};

/// The far end of a device.
pub(crate) struct FarEnd {
    socket: OwnedFd,
}

impl FarEnd {
    pub(crate) fn of(device: &str) -> Self {
        let flags = SockFlag::SOCK_CLOEXEC;
        let socket =
            socket(AddressFamily::Packet, SockType::Raw, flags, SockProtocol::EthAll).expect("a packet socket");
        let link = nix::ifaddrs::getifaddrs()
            .expect("the devices")
            .filter(|interface| interface.interface_name == device)
            .find_map(|interface| interface.address?.as_link_addr().copied())
            .expect("the device's link address");
        bind(socket.as_raw_fd(), &link).expect("bind to the device");
        setsockopt(&socket, sockopt::ReceiveTimeout, &TimeVal::new(0, 20_000)).expect("a timeout");
        Self { socket }
    }

    pub(crate) fn send(&self, frame: &[u8]) {
        assert_eq!(send(self.socket.as_raw_fd(), frame, MsgFlags::empty()), Ok(frame.len()));
    }

    /// The next frame from this address, if it comes soon.
    pub(crate) fn next_from(&self, address: &str) -> Option<Vec<u8>> {
        let (address, start) = (ip(address), Instant::now());
        let at = if address.is_ipv4() { 26 } else { 22 };
        let source = octets(address);
        let mut buffer = [0; 4096];
        while start.elapsed() < patience(Duration::from_secs(2)) {
            let Ok(length) = recv(self.socket.as_raw_fd(), &mut buffer, MsgFlags::empty()) else { continue };
            let frame = &buffer[..length];
            if frame.get(at..at + source.len()) == Some(&source) {
                return Some(frame.to_vec());
            }
        }
        None
    }
}

/// The inner packet in an overlay packet from a chosen address.
pub(crate) fn wrapped(from: &str, egress_id: u32, inner: &FrameSpec) -> Vec<u8> {
    wrapped_to(V4.node, from, egress_id, inner)
}

/// The same, to a chosen address.
fn wrapped_to(to: &str, from: &str, egress_id: u32, inner: &FrameSpec) -> Vec<u8> {
    // VXLAN: the flag "has an identifier", the identifier, and zeroes around.
    let content = [vec![8, 0, 0, 0], (egress_id << 8).to_be_bytes().to_vec(), inner.frame()].concat();
    // The stack requires a checksum over IPv6.
    let body = if ip(to).is_ipv4() { Body::UdpUnsummed } else { Body::Udp };
    let outer = packet(from, to, 50_000, 4794).macs(UPLINK_MAC, ROUTER_MAC).body(body);
    outer.with(|packet| packet.content = Some(content)).frame()
}

/// Sends it and waits for the one counter that moves.
pub(crate) fn arrives(stage: &Stage, wire: &FarEnd, frame: &[u8]) -> BTreeMap<&'static str, u64> {
    let (before, start) = (stage.counts(), Instant::now());
    wire.send(frame);
    loop {
        let moved = stage.moved(&before);
        if !moved.is_empty() || start.elapsed() > patience(Duration::from_secs(2)) {
            return moved.into_iter().map(|(label, (packets, _))| (label, packets)).collect();
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

pub(crate) fn is(verdict: Verdict) -> BTreeMap<&'static str, u64> {
    BTreeMap::from([(verdict.label(), 1)])
}

/// A program with its device and hook.
pub(crate) type HookPoint = (&'static str, &'static str, TcAttachType);

/// Runs a test body for both families with programs on devices. Both are removed before another test uses the stage: a
/// device may still get packets, and a starting process may hold a copy of a link.
pub(crate) fn on_devices(places: &'static [HookPoint], test: impl Fn(&mut Stage, &FamilyAddresses) + Send + 'static) {
    on_stage(move |stage| {
        let put = |(name, device, hook): &HookPoint| {
            if SchedClassifier::query_tcx(device, *hook).is_err() {
                // A kernel without links needs clsact. An earlier test may have created it.
                let _there = tc::qdisc_add_clsact(device);
            }
            (*name, stage.program_mut(name).attach(device, *hook).expect("attach"))
        };
        let links: Vec<_> = places.iter().map(put).collect();
        for cast in [V4, V6] {
            test(stage, &cast);
        }
        for (name, link) in links {
            stage.program_mut(name).detach(link).expect("detach");
        }
        let devices: BTreeSet<_> = places.iter().map(|(_, device, _)| device).collect();
        let removal: String = devices.iter().map(|device| format!("link del {device}\n")).collect();
        batch(&removal);
    });
}

fn on_the_device(test: impl Fn(&mut Stage, &FamilyAddresses) + Send + 'static) {
    on_devices(&[("from_overlay", "egress0", TcAttachType::Ingress)], test);
}

fn from_remote(cast: &FamilyAddresses) -> FrameSpec {
    packet(cast.remote_pod, cast.world, 4000, 80)
}

#[test]
fn another_nodes_pod_gets_its_egress_ip() {
    on_the_device(|stage, cast| {
        let wire = FarEnd::of("out0");
        for (port, body) in (4000..).zip([Body::Udp, Body::Tcp(SYN), Body::EchoRequest]) {
            let inner = from_remote(cast).body(body).with(|packet| packet.sport = port);
            let frame = wrapped(V4.other_node, cast.here, &inner);
            for _ in 0..2 {
                assert_eq!(arrives(stage, &wire, &frame), is(Verdict::SnatForNode), "{inner:?}");
                let left = wire.next_from(cast.egress).expect("it left by the uplink");
                // The pod's node has decremented the TTL.
                let expected = inner.snat(cast.egress, port).macs(ROUTER_MAC, UPLINK_MAC);
                assert_eq!(left, expected.frame());
            }
        }
        let made = stage.mappings().into_values();
        assert!(
            made.filter(|(key, _)| key.saddr == addr(cast.remote_pod))
                .all(|(_, mapping)| { mapping.source_node == addr(V4.other_node) })
        );
    });
}

#[test]
fn an_answer_from_a_gateway_reaches_its_pod() {
    on_the_device(|stage, cast| {
        let (wire, pods) = (FarEnd::of("out0"), FarEnd::of("pods0"));
        let inner = packet(cast.world, cast.pod, 80, 4000).tcp(SYN);
        let arrived = arrives(stage, &wire, &wrapped(V4.other_node, cast.here, &inner));
        assert_eq!(arrived, is(Verdict::ReplyDelivered));
        let delivered = pods.next_from(cast.world).expect("it went to the pods");
        assert_eq!(delivered[14..], inner.frame()[14..]);
    });
}

#[test]
fn forged_packets_are_dropped_with_their_reason() {
    on_the_device(|stage, cast| {
        let wire = FarEnd::of("out0");
        let inner = from_remote(cast);
        for (from, id, inner, verdict) in [
            ("172.18.0.77", cast.here, inner.clone(), Verdict::ForgedOuter),
            ("172.18.0.77", cast.here, packet(cast.world, cast.pod, 80, 4000), Verdict::ForgedOuter),
            (V4.other_node, cast.here, packet(cast.pod, cast.world, 1, 2), Verdict::ForgedInner),
            (V4.other_node, cast.here, packet(cast.world, cast.world, 1, 2), Verdict::ForgedInner),
            (V4.other_node, cast.here, packet(cast.node, cast.pod, 80, 4000), Verdict::ForgedInner),
            (V4.other_node, cast.here, packet(cast.remote_pod, cast.pod, 80, 4000), Verdict::ForgedInner),
            (V4.other_node, cast.here, packet(cast.service, cast.pod, 80, 4000), Verdict::ForgedInner),
            (V4.other_node, cast.away, packet(cast.world, cast.pod, 80, 4000), Verdict::NotItsPod),
            (V4.other_node, cast.away, inner.clone(), Verdict::NotGateway),
            (V4.other_node, 0, inner.clone(), Verdict::NotGateway),
            (V4.other_node, cast.here, inner.clone().body(Body::Unreachable), Verdict::IcmpUnmatched),
            (V4.other_node, cast.here, inner.clone().body(Body::Other(51)), Verdict::UnsupportedProtocol),
            (V4.other_node, cast.here, packet(cast.remote_pod, cast.nowhere, 1, 2), Verdict::NoRoute),
        ] {
            assert_eq!(arrives(stage, &wire, &wrapped(from, id, &inner)), is(verdict), "{from} {id} {inner:?}");
        }
        let mut no_ip = inner;
        no_ip.from = IpAddr::from([0, 0, 0, 0]);
        no_ip.to = no_ip.from;
        // Probes of agents, with the network that no policy has.
        for (from, id, verdict) in [
            (V4.other_node, cast.here, Verdict::Malformed),
            (V4.other_node, 0, Verdict::NotIp),
            ("172.18.0.77", 0, Verdict::ForgedOuter),
        ] {
            let mut frame = wrapped(from, id, &no_ip);
            let at = frame.len() - no_ip.frame().len() + 12;
            frame[at..at + 2].copy_from_slice(&[0x88, 0xb5]);
            assert_eq!(arrives(stage, &wire, &frame), is(verdict), "{from} {id}");
        }
    });
}

/// A node has more addresses than its tunnel endpoint, and the device accepts any of them.
#[test]
fn a_packet_to_another_address_of_this_node_is_forged() {
    for underlay in [V4, V6] {
        on_the_device(move |stage, cast| {
            settle(stage, &underlay);
            let wire = FarEnd::of("out0");
            let inner = [from_remote(cast), packet(cast.world, cast.pod, 80, 4000)];
            for (inner, verdict) in inner.iter().zip([Verdict::SnatForNode, Verdict::ReplyDelivered]) {
                // The simple one first, so that its flow is cached.
                for (to, verdict) in [
                    (underlay.node, verdict),
                    (underlay.node, verdict),
                    (underlay.mgmt, Verdict::ForgedOuter),
                    (underlay.node, verdict),
                ] {
                    let frame = wrapped_to(to, underlay.other_node, cast.here, inner);
                    assert_eq!(arrives(stage, &wire, &frame), is(verdict), "{to} {inner:?}");
                }
            }
        });
    }
}

#[test]
fn a_remote_pod_gets_packet_too_big_for_the_uplink() {
    on_the_device(|stage, cast| {
        let wire = FarEnd::of("out0");
        stage.set_mtu(cast.here, 1200);
        let large = from_remote(cast).with(|packet| packet.data = 1250);
        let arrived = arrives(stage, &wire, &wrapped(V4.other_node, cast.here, &large));
        assert_eq!(arrived, is(Verdict::MtuAnswered));
        let answer = wire.next_from(V4.node).expect("it goes back by the overlay");
        assert_eq!(answer[30..34], octets(ip(V4.other_node)));
        // Outer Ethernet, IPv4 and UDP; the identifier is the policy's.
        assert_eq!(answer[36..38], 4794_u16.to_be_bytes());
        assert_eq!(answer[46..49], cast.here.to_be_bytes()[1..]);
        stage.configure(|_| ());
    });
}

#[test]
fn a_remote_pod_whose_port_is_taken_gets_a_reset() {
    on_the_device(|stage, cast| {
        let wire = FarEnd::of("out0");
        let taken = packet(cast.pod, cast.world, 4000, 80).tcp(SYN);
        stage.run_frame(&FROM_POD, &taken.frame(), Verdict::SnatHere);
        let running = from_remote(cast).tcp(ACK);
        let arrived = arrives(stage, &wire, &wrapped(V4.other_node, cast.here, &running));
        assert_eq!(arrived, is(Verdict::CutAnswered));
        let answer = wire.next_from(V4.node).expect("it goes back by the overlay");
        assert_eq!(answer[30..34], octets(ip(V4.other_node)));
        assert_eq!(answer[46..49], cast.here.to_be_bytes()[1..]);
        // After the outer headers.
        assert_eq!(answer[50 + 14..], reset_of(&running)[14..]);
        let reset = from_remote(cast).tcp(RST);
        let arrived = arrives(stage, &wire, &wrapped(V4.other_node, cast.here, &reset));
        assert_eq!(arrived, is(Verdict::PortTaken), "never a reset for a reset");
    });
}

#[test]
fn without_a_configuration_nothing_enters() {
    on_the_device(|stage, cast| {
        let wire = FarEnd::of("out0");
        stage.configure(|config| config.generation = 0);
        let arrived = arrives(stage, &wire, &wrapped(V4.other_node, cast.here, &from_remote(cast)));
        assert_eq!(arrived, is(Verdict::NotReady));
        stage.configure(|_| ());
    });
}
