//! Idle resets: a segment makes an idle pod learn that its connection was cut, also if the pod is unreachable at first.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::os::fd::{AsRawFd, OwnedFd};

use egress_common::abi::{Addr, Direction, Flow, Tuple};
use egress_common::decide::phase;
use egress_common::wire::PROTO_TCP;
use egress_core::model::state::{Action, EgressId, LostFlows, PodState};
use egress_core::plan::executor::Executor;
use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, recv, socket};

use crate::actions::now_ns;
use crate::node::{MGMT, TestNode, eventually, ip, on_node, output};

const OBJECT: EgressId = EgressId(7);

/// More connections than one round of segments serves, of a few pods.
const PORTS: std::ops::Range<u16> = 1000..1030;

fn pod(port: u16) -> [u8; 4] {
    [10, 244, 1, 10 + u8::try_from(port % 3).expect("one of three")]
}

/// A socket that receives the pods' packets.
fn listen(node: &TestNode) -> OwnedFd {
    node.outside(|| {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        socket(AddressFamily::Packet, SockType::Raw, flags, SockProtocol::EthAll).expect("a packet socket")
    })
}

/// Ports of the pods' TCP segments since the last call, one for each segment.
fn received(socket: &OwnedFd) -> Vec<u16> {
    let mut ports = Vec::new();
    let mut frame = [0; 2048];
    while let Ok(length) = recv(socket.as_raw_fd(), &mut frame, MsgFlags::empty()) {
        let is_tcp = frame[12..14] == [8, 0] && frame[23] == PROTO_TCP && frame[30..33] == [10, 244, 1];
        if is_tcp && length >= 54 {
            ports.push(u16::from_be_bytes([frame[36], frame[37]]));
        }
    }
    ports
}

/// An established connection of the pod.
fn connect(node: &TestNode, port: u16) {
    let out = Tuple::new(Direction::Egress, Addr::v4(pod(port)), Addr::v4([198, 51, 100, 10]), port, 80, PROTO_TCP);
    let flow = Flow::new(Addr::v4([172, 18, 0, 100]), OBJECT.0, 0, phase::SPOKE, now_ns()).sealed(&out);
    node.map::<Tuple, Flow>("flows").insert(out, flow, 0).expect("a flow");
}

/// Adds a neighbour entry of the pod.
fn make_reachable(pod: &IpAddr) {
    ip(&format!("neigh replace {pod} lladdr 02:00:00:00:00:10 dev {MGMT} nud permanent\n"));
}

/// Number of packets that the queue has dropped.
fn refused() -> u32 {
    let shown = output(&["tc", "-s", "qdisc", "show", "dev", MGMT, "root"]);
    let dropped = shown.split_once("dropped ").and_then(|(_, rest)| rest.split_once(','));
    dropped.and_then(|(dropped, _)| dropped.parse().ok()).expect("a count")
}

#[test]
fn an_unreachable_pod_gets_its_segments_later() {
    on_node(|node| async move {
        let mut dataplane = node.start().await;
        let socket = listen(&node);
        for port in PORTS {
            connect(&node, port);
            dataplane.apply(&Action::PutPod(pod(port).into(), PodState::Selected(OBJECT))).await.expect("apply");
        }
        let pods: BTreeSet<IpAddr> = PORTS.map(|port| pod(port).into()).collect();
        pods.iter().for_each(make_reachable);
        // A queue of length zero: the sender gets an error.
        output(&["tc", "qdisc", "add", "dev", MGMT, "root", "pfifo", "limit", "0"]);
        for pod in &pods {
            dataplane.apply(&Action::PutPod(*pod, PodState::Known)).await.expect("apply");
            dataplane.apply(&Action::CutPodFlows(*pod, LostFlows::of_policy(OBJECT))).await.expect("cut");
        }
        // Most of the first round; the node itself sends fewer.
        eventually("segments are refused", || refused() >= 20).await;
        assert_eq!(received(&socket), [0_u16; 0]);
        output(&["tc", "qdisc", "del", "dev", MGMT, "root"]);
        let mut reached = BTreeSet::new();
        eventually("all pods get their segments", || {
            reached.extend(received(&socket));
            reached.iter().copied().eq(PORTS)
        })
        .await;
    });
}

/// A failing plan is retried, and each attempt begins with the same cut.
#[test]
fn a_repeated_cut_sends_no_more_segments() {
    on_node(|node| async move {
        let mut dataplane = node.start().await;
        let socket = listen(&node);
        let [first, second] = [1000, 1001];
        for port in [first, second] {
            make_reachable(&pod(port).into());
            connect(&node, port);
            dataplane.apply(&Action::PutPod(pod(port).into(), PodState::Selected(OBJECT))).await.expect("apply");
        }
        let deselect = |port| Action::PutPod(pod(port).into(), PodState::Known);
        let cut_of = |port| Action::CutPodFlows(pod(port).into(), LostFlows::of_policy(OBJECT));
        for action in [deselect(first), cut_of(first)] {
            dataplane.apply(&action).await.expect("apply");
        }
        let mut reached = Vec::new();
        eventually("all rounds have ended", || {
            reached.extend(received(&socket));
            reached == [first; 4]
        })
        .await;
        for action in [Action::CutOrphans, Action::CutOrphans, deselect(second), cut_of(second)] {
            dataplane.apply(&action).await.expect("apply");
        }
        let mut reached = Vec::new();
        eventually("the second pod gets its segment", || {
            reached.extend(received(&socket));
            reached.contains(&second)
        })
        .await;
        assert!(!reached.contains(&first), "nothing has changed for the first pod");
        for action in
            [Action::PutPod(pod(first).into(), PodState::Selected(OBJECT)), deselect(first), Action::CutOrphans]
        {
            dataplane.apply(&action).await.expect("apply");
        }
        eventually("a change sends segments again", || received(&socket).contains(&first)).await;
    });
}
