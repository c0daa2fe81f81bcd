//! Packets beyond a bandwidth limit wait in the uplink's queueing discipline, where that is `fq`. The guests of
//! `cargo xtask test --kernel` have it.

use std::net::{IpAddr, UdpSocket};
use std::os::fd::AsRawFd;
use std::process::Command;
use std::time::{Duration, Instant};

use egress_common::abi::Verdict;
use egress_core::model::state::{
    Action, BandwidthLimit, EgressId, Family, OnUnknownPod, Place, PodState, Policy, Prefix, PrefixKind, Slot,
    TunnelEndpoint, WhenEmpty,
};
use egress_core::plan::executor::Executor;
use nix::errno::Errno;
use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, recv, socket};

use crate::actions::addr;
use crate::node::{TestNode, UPLINK, forward, ip, on_node, output, within};
use crate::skips::skipped;

const POD: &str = "10.244.1.10";
const EGRESS: &str = "172.18.0.200";
const WORLD: &str = "198.51.100.10";
const PACKETS: u32 = 40;
/// Of a frame.
const BYTES: usize = 1_000;
const HEADERS: usize = 42;
/// Eight milliseconds for each frame.
const BITS_PER_SECOND: u64 = 1_000_000;

/// Whether the kernel has the discipline.
fn uses_fq() -> bool {
    let done = Command::new("tc").args(["qdisc", "replace", "dev", UPLINK, "root", "fq"]).output().expect("run tc");
    if !done.status.success() {
        skipped(&format!("no fq: {}", String::from_utf8_lossy(&done.stderr).trim()));
    }
    done.status.success()
}

/// Sends the packets, and returns when those with the egress IP left the node.
fn departures(node: &TestNode) -> Vec<Instant> {
    node.outside(|| {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let listener = socket(AddressFamily::Packet, SockType::Raw, flags, SockProtocol::EthAll).expect("a socket");
        let pod = UdpSocket::bind((POD, 5000)).expect("the pod's address");
        for _ in 0..PACKETS {
            pod.send_to(&[7; BYTES - HEADERS], (WORLD, 9)).expect("send");
        }
        let source: IpAddr = addr(EGRESS);
        let (mut left, begun) = (Vec::new(), Instant::now());
        let mut frame = [0; 2 * BYTES];
        while begun.elapsed() < Duration::from_secs(3) {
            match recv(listener.as_raw_fd(), &mut frame, MsgFlags::empty()) {
                Ok(length)
                    if length == BYTES && IpAddr::from([frame[26], frame[27], frame[28], frame[29]]) == source =>
                {
                    left.push(Instant::now());
                }
                Ok(_) => {}
                Err(Errno::EAGAIN) => std::thread::sleep(Duration::from_millis(1)),
                Err(error) => panic!("receive: {error}"),
            }
        }
        left
    })
}

#[test]
fn limited_packets_wait_in_fq() {
    on_node(|node| async move {
        if !uses_fq() {
            return;
        }
        node.outside(|| ip(&format!("addr add {POD}/24 dev pods0\nroute add 198.51.100.0/24 via 10.244.1.2\n")));
        forward();
        let mut dataplane = node.start().await;
        assert_eq!(node.config().paced_uplink, 1);
        let subnet = Prefix { kind: PrefixKind::PodSubnet, node: Some(TunnelEndpoint(addr("172.18.0.2"))) };
        let slot = Slot { address: addr(EGRESS), place: Place::Here };
        let limit = BandwidthLimit::new(BITS_PER_SECOND, 0);
        let policy = Policy { limit, ..Policy::new(vec![slot], vec![], WhenEmpty::Drop) };
        for action in [
            Action::SetUnknownPods(OnUnknownPod::Pass),
            Action::PutPrefix("10.244.1.0/24".parse().expect("a literal"), subnet),
            Action::Own(EgressId(1), addr(EGRESS)),
            Action::PutPolicy(EgressId(1), Family::V4, policy),
            Action::PutPod(addr(POD), PodState::Selected(EgressId(1))),
        ] {
            dataplane.apply(&action).await.expect("apply an action");
        }
        let left = departures(&node);
        let dropped = || dataplane.counters().expect("counters")[&Verdict::RateLimited].packets;
        let counted = dataplane.counters().expect("counters");
        let counted: Vec<_> = counted.iter().filter(|(_, count)| count.packets > 0).collect();
        println!("{counted:?}\n{}", output(&["tc", "-s", "qdisc", "show", "dev", UPLINK]));
        assert_eq!((left.len(), dropped()), (usize::try_from(PACKETS).expect("a number"), 0));
        let expected = Duration::from_nanos(limit.time_ns(u32::try_from(BYTES).expect("a number"))) * (PACKETS - 1);
        let took = left[left.len() - 1] - left[0];
        println!("{took:?}, by the limit {expected:?}");
        // The first packets may be read late.
        assert!(took > expected * 9 / 10, "{took:?}, not {expected:?}");

        output(&["tc", "qdisc", "del", "dev", UPLINK, "root"]);
        within(Duration::from_secs(25), "it is looked for", || node.config().paced_uplink == 0).await;
        let left = departures(&node);
        let all = u64::try_from(left.len()).expect("a number") + dropped();
        assert!(dropped() > 0 && all == u64::from(PACKETS), "{} left, {} dropped", left.len(), dropped());
    });
}
