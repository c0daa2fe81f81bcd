//! The forwarding rate: 64-byte UDP packets written to the far end of the management port's cable as fast as it goes,
//! from one thread pinned to one core. The kernel forwards each on that core before the next one comes, so the rate is
//! what the whole path costs; what got through is counted after the outside NIC and dropped there.

use std::io::IoSlice;
use std::os::fd::AsRawFd;

use nix::sys::socket::{AddressFamily, LinkAddr, MsgFlags, MultiHeaders, SockFlag, SockType, bind, sendmmsg, socket};

use super::cpu::pin;
use super::peers::{DISCARD, NOBODY};
use crate::prelude::*;
use egress_lab::topology::netns::link_address;
use egress_lab::traffic::packet;

/// So many flows.
const FLOWS: u16 = 64;
/// As on the wire, without the checksum of the frame.
const FRAME: usize = 64;
const FIRST_PORT: u16 = 20_000;

/// From where into where.
pub(super) struct Flood<'a> {
    /// Namespace and name of the cable's far end.
    pub(super) router: &'a Netns,
    pub(super) device: &'a str,
    /// Link addresses of the two ends.
    pub(super) to: [u8; 6],
    pub(super) from: [u8; 6],
    pub(super) pod: Ipv4Addr,
    /// Where the packets are counted.
    pub(super) switch: &'a Netns,
    pub(super) exit: &'a str,
}

impl Flood<'_> {
    /// Packets per second that got through.
    pub(super) fn measure(&self, core: usize, time: Duration) -> Result<f64> {
        self.pour(core, time / 10)?;
        let before = counted(self.switch, self.exit)?;
        let (sent, took) = self.pour(core, time)?;
        let through = counted(self.switch, self.exit)? - before;
        ensure!(through > 0, "of {sent} packets none came through to {}", self.exit);
        if through * 100 < sent * 99 {
            eprintln!("{}: {through} of {sent} packets came through", self.exit);
        }
        #[expect(clippy::cast_precision_loss, reason = "a rate needs no more digits than a double has")]
        let count = through as f64;
        Ok(count / took.as_secs_f64())
    }

    /// How many were sent, and how long that took.
    fn pour(&self, core: usize, time: Duration) -> Result<(u64, Duration)> {
        let frames = (0..FLOWS).map(|flow| self.frame(FIRST_PORT + flow)).collect::<Result<Vec<_>>>()?;
        self.router.run(|| {
            pin(core)?;
            let socket = socket(AddressFamily::Packet, SockType::Raw, SockFlag::SOCK_CLOEXEC, None)?;
            bind(socket.as_raw_fd(), &link_address(self.device)?)?;
            let slices: Vec<[IoSlice<'_>; 1]> = frames.iter().map(|frame| [IoSlice::new(frame)]).collect();
            let nowhere = vec![None::<LinkAddr>; slices.len()];
            let mut headers = MultiHeaders::preallocate(slices.len(), None);
            let (begin, mut sent) = (Instant::now(), 0);
            while begin.elapsed() < time {
                let taken = sendmmsg(socket.as_raw_fd(), &mut headers, &slices, &nowhere, [], MsgFlags::empty())?;
                sent += taken.count() as u64;
            }
            Ok((sent, begin.elapsed()))
        })
    }

    fn frame(&self, port: u16) -> Result<Vec<u8>> {
        let (from, to) = (SocketAddr::new(self.pod.into(), port), SocketAddr::new(NOBODY.into(), DISCARD));
        let datagram = packet::udp(from, to, &[0; FRAME - 14 - 20 - 8])?;
        let packet = packet::ip(from.ip(), to.ip(), packet::UDP, &datagram)?;
        Ok([&self.to, &self.from, packet.as_slice()].concat())
    }
}

/// Packets dropped by the sink's rule on this port.
fn counted(switch: &Netns, port: &str) -> Result<u64> {
    let text = switch.exec("nft", &["-j", "list", "chain", "netdev", "bench", port])?;
    let listed: Value = serde_json::from_str(&text)?;
    let items = listed["nftables"].as_array().into_iter().flatten();
    let counters = items.flat_map(|item| item["rule"]["expr"].as_array().into_iter().flatten());
    let packets = counters.filter_map(|expression| expression["counter"]["packets"].as_u64()).sum();
    Ok(packets)
}
