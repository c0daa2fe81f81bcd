//! Idle pods are made to speak when a connection of theirs is cut, also where the way to them is closed at first.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::os::fd::{AsRawFd, OwnedFd};

use egress_agent::model::executor::Executor;
use egress_agent::model::state::{Action, EgressId, PodState};
use egress_common::abi::{Addr, Direction, Flow, Tuple};
use egress_common::decide::phase;
use egress_common::wire::PROTO_TCP;
use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, recv, socket};

use crate::actions::now_ns;
use crate::node::{MGMT, Node, eventually, ip, on_node, output};

const OBJECT: EgressId = EgressId(7);

/// More than are told at once, of some pods.
const PORTS: std::ops::Range<u16> = 1000..1030;

fn pod(port: u16) -> [u8; 4] {
    [10, 244, 1, 10 + u8::try_from(port % 3).expect("one of three")]
}

/// Hears what comes to the pods.
fn listen(node: &Node) -> OwnedFd {
    node.outside(|| {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        socket(AddressFamily::Packet, SockType::Raw, flags, SockProtocol::EthAll).expect("a packet socket")
    })
}

/// Ports of the pods that TCP segments have come to since last asked.
fn heard(socket: &OwnedFd) -> BTreeSet<u16> {
    let mut ports = BTreeSet::new();
    let mut frame = [0; 2048];
    while let Ok(length) = recv(socket.as_raw_fd(), &mut frame, MsgFlags::empty()) {
        let is_tcp = frame[12..14] == [8, 0] && frame[23] == PROTO_TCP && frame[30..33] == [10, 244, 1];
        if is_tcp && length >= 54 {
            ports.insert(u16::from_be_bytes([frame[36], frame[37]]));
        }
    }
    ports
}

/// How many packets the queue has refused.
fn refused() -> u32 {
    let shown = output(&["tc", "-s", "qdisc", "show", "dev", MGMT, "root"]);
    let dropped = shown.split_once("dropped ").and_then(|(_, rest)| rest.split_once(','));
    dropped.and_then(|(dropped, _)| dropped.parse().ok()).expect("a count")
}

#[test]
fn a_pod_that_cannot_be_reached_at_first_is_told_later() {
    on_node(|node| async move {
        let mut dataplane = node.start().await;
        let socket = listen(&node);
        let mut flows = node.map::<Tuple, Flow>("flows");
        for port in PORTS {
            let address = IpAddr::from(pod(port));
            let out = Tuple::new(Direction::Egress, address.into(), Addr::v4([198, 51, 100, 10]), port, 80, PROTO_TCP);
            let flow = Flow::new(Addr::v4([172, 18, 0, 100]), OBJECT.0, 0, phase::SPOKE, now_ns()).sealed(&out);
            flows.insert(out, flow, 0).expect("a flow");
            dataplane.apply(&Action::PutPod(address, PodState::Selected(OBJECT))).await.expect("apply");
        }
        let pods: BTreeSet<IpAddr> = PORTS.map(|port| pod(port).into()).collect();
        for pod in &pods {
            ip(&format!("neigh replace {pod} lladdr 02:00:00:00:00:10 dev {MGMT} nud permanent\n"));
        }
        // A queue that takes nothing: whoever sends is told so.
        output(&["tc", "qdisc", "add", "dev", MGMT, "root", "pfifo", "limit", "0"]);
        for pod in &pods {
            dataplane.apply(&Action::PutPod(*pod, PodState::Known)).await.expect("apply");
            dataplane.apply(&Action::CutPodFlows(*pod, OBJECT)).await.expect("cut");
        }
        // Most of the first round; of the node's own there are fewer.
        eventually("segments are refused", || refused() >= 20).await;
        assert_eq!(heard(&socket), BTreeSet::new());
        output(&["tc", "qdisc", "del", "dev", MGMT, "root"]);
        let mut told = BTreeSet::new();
        eventually("all are told", || {
            told.extend(heard(&socket));
            told.iter().copied().eq(PORTS)
        })
        .await;
    });
}
