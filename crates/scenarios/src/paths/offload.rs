//! Checksums that a pod leaves to devices: a packet socket lets it name the place that a device writes into, after all
//! hooks. A pod names its addresses and ports instead of the checksum, with a payload by which the sum becomes what it
//! wants: an egress IP as the source, or the overlay's port as the destination.

use std::os::fd::AsRawFd;

use crate::prelude::*;
use egress_common::abi::Verdict;
use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockType, bind, send, setsockopt, socket};
use nix::{setsockopt_impl, sockopt_impl};

use super::findings::Findings;
use super::maps::VerdictCounts;
use egress_lab::test_cluster::placement::{FIRST_V4, FIRST_V6, PATIENCE};
use egress_lab::topology::netns::link_address;
use egress_lab::traffic::packet;
use egress_lab::{POD_INTERFACE, UPLINK};

sockopt_impl!(
    /// Each packet has a header of virtio before it.
    VirtioHeader,
    SetOnly,
    libc::SOL_PACKET,
    libc::PACKET_VNET_HDR,
    bool
);

pub(super) fn tests() -> Vec<LabTest> {
    let timeout = Duration::from_secs(120);
    vec![
        LabTest::new("paths_checksums_left_to_devices_change_no_header", timeout, elsewhere)
            .not_on_ovn("Open vSwitch in user space takes no unfinished checksum from the test's packet socket"),
    ]
}

/// The port outside.
const MARKER: u16 = 4244;
const COUNT: u64 = 10;
const ROUTER_MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];
const UDP_CHECKSUM: u16 = 6;

fn elsewhere(context: &LabContext) -> Result<()> {
    let cluster = TestCluster::for_placement(context, |_| HostConfig::default())?;
    cluster.place(&[(FIRST_V4, 1), (FIRST_V6, 2)])?;
    let node = cluster.node(1)?;
    // A NIC that computes no checksums: the kernel does, after the uplink's program.
    node.host.exec("ethtool", &["-K", UPLINK, "tx", "off"])?;
    let mut findings = Findings::default();
    let capture = Capture::start(&cluster.lab)?;
    let outside = |port: u16| -> Result<u64> {
        Ok(capture.seen()?.packets(|key| key.protocol == packet::UDP && key.to_port == port))
    };
    for (what, pod) in [("plain", cluster.plain(1)?), ("selected", cluster.chosen(1)?)] {
        for to in plan::SERVER.both() {
            // The last two bytes of each address, and the start of the UDP header.
            let (from_at, to_at, l4) = if to.is_ipv4() { (28, 32, 34) } else { (36, 52, 54) };
            let before = outside(MARKER)?;
            send_all(pod, to, (l4, UDP_CHECKSUM))?;
            let arrived = time_until("they leave", PATIENCE / 10, || Ok(outside(MARKER)? == before + COUNT));
            findings.note(arrived.is_ok(), &format!("{what} pod to {to}: the right place leaves"));
            let fields = [
                (20, from_at - 20, "source"),
                (20, to_at - 20, "destination"),
                (l4, 0, "source port"),
                (l4, 2, "port"),
            ];
            for (start, offset, field) in fields {
                let before = VerdictCounts::of(node)?;
                send_all(pod, to, (start, offset))?;
                let dropped =
                    || Ok(VerdictCounts::of(node)?.since(&before).get(Verdict::Malformed.label()) == Some(&COUNT));
                let all = time_until("they are dropped", PATIENCE / 10, dropped);
                findings.note(all.is_ok(), &format!("{what} pod to {to}: a checksum into the {field} is malformed"));
            }
        }
    }
    findings.conclude()
}

/// Datagrams whose sum begins at `start`, and is to be written `offset` behind that.
fn send_all(pod: &LabPod, to: IpAddr, (start, offset): (u16, u16)) -> Result<()> {
    let (from, to) = (SocketAddr::new(pod.addresses.towards(to), 5555), SocketAddr::new(to, MARKER));
    let bytes = packet::ip(from.ip(), to.ip(), packet::UDP, &packet::udp(from, to, b"not what it seems")?)?;
    const NEEDS_CHECKSUM: u8 = 1;
    let ([a, b], [c, d]) = (start.to_le_bytes(), offset.to_le_bytes());
    let header = [NEEDS_CHECKSUM, 0, 0, 0, 0, 0, a, b, c, d];
    pod.netns.run(|| {
        let socket = socket(AddressFamily::Packet, SockType::Raw, SockFlag::SOCK_CLOEXEC, None)?;
        setsockopt(&socket, VirtioHeader, &true)?;
        let own = link_address(POD_INTERFACE)?;
        bind(socket.as_raw_fd(), &own)?;
        let own_mac = own.addr().context("no link address")?;
        let frame = [header.as_slice(), &ROUTER_MAC, &own_mac, &bytes].concat();
        for _ in 0..COUNT {
            send(socket.as_raw_fd(), &frame, MsgFlags::empty())?;
        }
        Ok(())
    })
}
