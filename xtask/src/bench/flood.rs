//! The forwarding rate: 64-byte UDP packets written to the far end of the management port's cable as fast as it goes,
//! from one thread pinned to one core. The kernel forwards each on that core before the next one comes, so the rate is
//! what the whole way costs; what got through is counted behind the outside NIC and dropped there.

use std::io::IoSlice;
use std::net::Ipv4Addr;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::ifaddrs::getifaddrs;
use nix::sys::socket::{AddressFamily, LinkAddr, MsgFlags, MultiHeaders, SockFlag, SockType, bind, sendmmsg, socket};
use serde_json::Value;

use super::core::pin;
use super::peers::{DISCARD, NOBODY};
use crate::lab::Netns;

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
        let frames: Vec<Vec<u8>> = (0..FLOWS).map(|flow| self.frame(FIRST_PORT + flow)).collect();
        self.router.run(|| {
            pin(core)?;
            let socket = socket(AddressFamily::Packet, SockType::Raw, SockFlag::SOCK_CLOEXEC, None)?;
            bind(socket.as_raw_fd(), &link(self.device)?)?;
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

    fn frame(&self, port: u16) -> Vec<u8> {
        let mut frame = [self.to, self.from].concat();
        frame.extend([0x08, 0x00]);
        let udp_length = u16::try_from(FRAME - 14 - 20).unwrap_or(0);
        let mut ip = vec![0x45, 0, 0, 0, 0, 0, 0x40, 0, 64, 17, 0, 0];
        ip[2..4].copy_from_slice(&(udp_length + 20).to_be_bytes());
        ip.extend(self.pod.octets());
        ip.extend(NOBODY.octets());
        let checksum = !sum(&ip);
        ip[10..12].copy_from_slice(&checksum.to_be_bytes());
        frame.extend(&ip);
        for word in [port, DISCARD, udp_length, 0] {
            frame.extend(word.to_be_bytes());
        }
        frame.resize(FRAME, 0);
        let mut pseudo = [self.pod.octets(), NOBODY.octets()].concat();
        pseudo.extend([0, 17]);
        pseudo.extend(udp_length.to_be_bytes());
        pseudo.extend(&frame[34..]);
        let checksum = !sum(&pseudo);
        frame[40..42].copy_from_slice(&checksum.to_be_bytes());
        frame
    }
}

/// The Internet's one's complement sum.
fn sum(bytes: &[u8]) -> u16 {
    let words = bytes.chunks(2).map(|pair| u32::from(pair[0]) << 8 | pair.get(1).map_or(0, |low| u32::from(*low)));
    let mut sum: u32 = words.sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    u16::try_from(sum).unwrap_or(u16::MAX)
}

/// The packet address of a device in this thread's namespace.
fn link(device: &str) -> Result<LinkAddr> {
    let found = getifaddrs()?
        .filter(|interface| interface.interface_name == device)
        .find_map(|interface| interface.address?.as_link_addr().copied());
    found.with_context(|| format!("no device {device}"))
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
