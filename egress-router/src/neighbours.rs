//! Whether another host of the network has an address of the router, and announcing them: RFC 5227 for IPv4, RFC 4861 and
//! RFC 4862 for IPv6, by frames of our own, because the kernel's detection is in IPv6 only and takes a second.

use std::io;
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use egress_core::model::node::{Mac, mac_text};
use egress_datapath::announce::frames::{
    ETHERTYPE_ARP, ETHERTYPE_IPV6, announcement, claimant, multicast_mac, probe, solicited_node,
};
use egress_datapath::announce::socket::{self, PacketSocket};
use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use tracing::warn;

/// A frame of ARP or neighbour discovery, with room for options.
const FRAME: usize = 512;
/// When announcements are repeated: a switch may miss the first one.
const REPEATS: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(2)];
/// The subcommand that repeats them.
pub const REPEAT: &str = "repeat-announcements";

/// The addresses of an interface, asked for and announced.
pub struct Probe {
    index: u32,
    mac: Mac,
    addresses: Vec<IpAddr>,
    sockets: Vec<PacketSocket>,
}

impl Probe {
    pub fn begin(index: u32, mac: Mac, addresses: impl Iterator<Item = IpAddr>) -> io::Result<Self> {
        let mut probe = Self { index, mac, addresses: addresses.collect(), sockets: Vec::new() };
        for (is_ipv4, ethertype) in [(true, ETHERTYPE_ARP), (false, ETHERTYPE_IPV6)] {
            if probe.addresses.iter().any(|address| address.is_ipv4() == is_ipv4) {
                probe.sockets.push(PacketSocket::bound(index, ethertype)?);
            }
        }
        Ok(probe)
    }

    fn send(&self, frame: impl Fn(IpAddr) -> Vec<u8>) -> io::Result<()> {
        let Some(socket) = self.sockets.first() else { return Ok(()) };
        self.addresses.iter().try_for_each(|address| socket.send(&frame(*address)))
    }

    /// Asks for each address, and waits for answers. Returns who has which, in words.
    pub fn wait(&mut self, wait: Duration) -> io::Result<Option<String>> {
        if wait.is_zero() {
            return Ok(None);
        }
        for address in &self.addresses {
            if let IpAddr::V6(address) = address {
                // Other hosts' probes for it are sent to this group.
                socket::add_filter(self.index, multicast_mac(solicited_node(*address)))?;
            }
        }
        self.send(|address| probe(self.mac, address).to_vec())?;
        let deadline = Instant::now() + wait;
        let mut frame = [0; FRAME];
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            // One more: the time is cut to milliseconds.
            let left = u16::try_from(left.as_millis() + 1).unwrap_or(u16::MAX);
            let mut ready: Vec<PollFd<'_>> =
                self.sockets.iter().map(|one| PollFd::new(one.as_fd(), PollFlags::POLLIN)).collect();
            poll(&mut ready, PollTimeout::from(left))?;
            for socket in &self.sockets {
                // A neighbour may send without an end.
                while Instant::now() < deadline {
                    let Some(length) = received(socket, &mut frame)? else { break };
                    let heard = frame.get(..length).unwrap_or_default();
                    let claim = claimant(heard, self.mac).filter(|claim| self.addresses.contains(&claim.address));
                    if let Some(claim) = claim {
                        let by = mac_text(claim.mac);
                        return Ok(Some(format!("{} is in use by the host with MAC address {by}", claim.address)));
                    }
                }
            }
        }
    }

    /// Tells the network where the addresses are, now and by a process that outlives this one. It gets the sockets too: closing
    /// one waits until no CPU uses it, and the pod would wait for that.
    pub fn announce(self) -> io::Result<()> {
        self.send(|address| announcement(self.mac, address).to_vec())?;
        let mac = mac_text(self.mac);
        for socket in &self.sockets {
            fcntl(socket.as_fd(), FcntlArg::F_SETFD(FdFlag::empty()))?;
        }
        let mut command = Command::new("/proc/self/exe");
        command.args([REPEAT.to_owned(), self.index.to_string(), mac]);
        command.args(self.addresses.iter().map(IpAddr::to_string));
        command.env_clear().current_dir("/").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        if let Err(error) = command.spawn() {
            warn!(%error, "announcements are not repeated");
        }
        Ok(())
    }
}

fn received(socket: &PacketSocket, frame: &mut [u8]) -> io::Result<Option<usize>> {
    match socket.receive(frame) {
        Ok(length) => Ok(Some(length)),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
        Err(error) => Err(error),
    }
}

/// The process that repeats the announcements of an interface in its own namespace, until they are done or the interface is gone.
pub fn repeat(index: u32, mac: Mac, addresses: &[IpAddr]) -> io::Result<()> {
    let began = Instant::now();
    for at in REPEATS {
        sleep(at.saturating_sub(began.elapsed()));
        announce_once(index, mac, addresses)?;
    }
    Ok(())
}

/// Announces addresses by an interface of the calling thread's namespace.
pub fn announce_once(index: u32, mac: Mac, addresses: &[IpAddr]) -> io::Result<()> {
    let socket = PacketSocket::sender(index)?;
    addresses.iter().try_for_each(|address| socket.send(&announcement(mac, *address)))
}
