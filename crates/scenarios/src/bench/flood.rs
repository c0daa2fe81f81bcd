//! The forwarding rate: 64-byte UDP packets written to the far end of a cable as fast as it goes, by one thread per core,
//! pinned to it. The kernel forwards each packet on the core that wrote it, before the next one comes, so the rate is what
//! the whole path costs. Packets are counted where they leave the path, and dropped there.

use std::io::IoSlice;
use std::os::fd::AsRawFd;
use std::sync::Barrier;

use nix::sys::socket::{AddressFamily, LinkAddr, MsgFlags, MultiHeaders, SockFlag, SockType, bind, sendmmsg, socket};

use super::cpu::pin;
use crate::prelude::*;
use egress_lab::topology::netns::link_address;
use egress_lab::traffic::packet;

/// As on the wire, without the checksum of the frame.
const FRAME: usize = 64;
/// Packets of one system call.
const BATCH: usize = 64;

/// Source and destination of a flow's packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ends {
    pub(super) from: SocketAddr,
    pub(super) to: SocketAddr,
}

/// Where packets enter and where they are counted.
pub(super) struct Flood<'a> {
    /// Namespace and name of the device that they are written to.
    pub(super) into: &'a Netns,
    pub(super) device: String,
    /// Namespace and device of the rule that counts and drops.
    pub(super) counted_in: &'a Netns,
    pub(super) exit: String,
    /// Written in turn, one of each flow. Several cores get consecutive parts of them.
    pub(super) frames: Vec<Vec<u8>>,
}

/// What was written.
#[derive(Clone, Copy, Default)]
struct Poured {
    packets: u64,
    time: Duration,
}

impl Flood<'_> {
    /// Sends a packet of each flow: the flows exist then.
    pub(super) fn open(&self, core: usize) -> Result<()> {
        self.pour(&[core], Duration::ZERO, 1).map(drop)
    }

    /// Packets per second that got through.
    pub(super) fn rate(&self, cores: &[usize], time: Duration) -> Result<f64> {
        self.pour(cores, time / 10, 0)?;
        let before = counted(self.counted_in, &self.exit)?;
        let poured = self.pour(cores, time, 0)?;
        let through = counted(self.counted_in, &self.exit)? - before;
        let sent = poured.packets;
        ensure!(through > 0, "of {sent} packets none came through to {}", self.exit);
        if through * 100 < sent * 99 {
            eprintln!("{}: {through} of {sent} packets came through", self.exit);
        }
        #[expect(clippy::cast_precision_loss, reason = "a rate needs no more digits than a double has")]
        let count = through as f64;
        Ok(count / poured.time.as_secs_f64())
    }

    /// Writes for so long, and at least so many packets of each flow.
    fn pour(&self, cores: &[usize], time: Duration, turns: u64) -> Result<Poured> {
        let share = self.frames.len().div_ceil(cores.len());
        let (together, device) = (Barrier::new(cores.len()), self.device.as_str());
        self.into.run(|| {
            // Threads are in the namespace of the thread that starts them.
            thread::scope(|scope| {
                let parts = cores.iter().zip(self.frames.chunks(share));
                let threads: Vec<_> = parts
                    .map(|(core, part)| {
                        let together = &together;
                        scope.spawn(move || pour_part(device, *core, part, time, turns, together))
                    })
                    .collect();
                let mut all = Poured::default();
                for thread in threads {
                    let poured = thread.join().ok().context("a thread that sends has panicked")??;
                    all.packets += poured.packets;
                    all.time = all.time.max(poured.time);
                }
                Ok(all)
            })
        })
    }
}

/// A packet of each flow, for a cable with these link addresses.
pub(super) fn frames(to: [u8; 6], from: [u8; 6], flows: &[Ends]) -> Result<Vec<Vec<u8>>> {
    let frame = |flow: &Ends| {
        let headers = if flow.from.is_ipv4() { 14 + 20 + 8 } else { 14 + 40 + 8 };
        let datagram = packet::udp(flow.from, flow.to, &[0; FRAME][headers..])?;
        let packet = packet::ip(flow.from.ip(), flow.to.ip(), packet::UDP, &datagram)?;
        Ok([&to, &from, packet.as_slice()].concat())
    };
    flows.iter().map(frame).collect()
}

fn pour_part(
    device: &str,
    core: usize,
    frames: &[Vec<u8>],
    time: Duration,
    turns: u64,
    together: &Barrier,
) -> Result<Poured> {
    let prepared = pin(core).and_then(|()| {
        let socket = socket(AddressFamily::Packet, SockType::Raw, SockFlag::SOCK_CLOEXEC, None)?;
        bind(socket.as_raw_fd(), &link_address(device)?)?;
        Ok(socket)
    });
    // All wait here, also after a failure, or the others would wait for ever.
    together.wait();
    let socket = prepared?;
    let slices: Vec<[IoSlice<'_>; 1]> = frames.iter().map(|frame| [IoSlice::new(frame)]).collect();
    let nowhere = [None::<LinkAddr>; BATCH];
    let mut headers = MultiHeaders::preallocate(BATCH, None);
    let (begin, least) = (Instant::now(), turns * frames.len() as u64);
    let mut packets = 0;
    for batch in slices.chunks(BATCH).cycle() {
        if begin.elapsed() >= time && packets >= least {
            break;
        }
        let sent = sendmmsg(socket.as_raw_fd(), &mut headers, batch, &nowhere[..batch.len()], [], MsgFlags::empty())?;
        packets += sent.count() as u64;
    }
    Ok(Poured { packets, time: begin.elapsed() })
}

/// Packets dropped by the sink's rule on this device.
pub(super) fn counted(netns: &Netns, device: &str) -> Result<u64> {
    let text = netns.exec("nft", &["-j", "list", "chain", "netdev", "bench", device])?;
    let listed: Value = serde_json::from_str(&text)?;
    let items = listed["nftables"].as_array().into_iter().flatten();
    let counters = items.flat_map(|item| item["rule"]["expr"].as_array().into_iter().flatten());
    let packets = counters.filter_map(|expression| expression["counter"]["packets"].as_u64()).sum();
    Ok(packets)
}
