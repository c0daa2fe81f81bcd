//! A paused machine, as a virtual machine that its host pauses: processes are stopped, links keep their carrier, and what is sent
//! to it waits in its host's queue.
//!
//! ```text
//! switch br0 --- hold-node3 ~ held-node3: packet socket, the queue      node3, off the bridge --- the node
//! resume: queue --> node3, SIGCONT, node3 on the bridge again
//! ```
//!
//! What has waited reaches the node's programs before its processes run. The clocks are the lab machine's and show the time that
//! has passed. The node's pods are unplugged in the meantime.

use std::os::fd::{AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, LinkAddr, MsgFlags, SockFlag, SockProtocol, SockType, bind, recvfrom, send, setsockopt, socket,
    sockopt,
};

use crate::agents::Agent;
use crate::topology;
use crate::topology::lab::Lab;
use crate::topology::netns::{Netns, link_address};
use crate::topology::script;

/// Room for what arrives while the machine stands still.
const ROOM: usize = 64 << 20;
/// The longest frame, and a tag.
const LONGEST: usize = 2048;

/// A machine that stands still. Dropping it leaves it so: it goes with the lab.
pub struct StoppedMachine {
    queues: Vec<Queue>,
    since: Instant,
}

/// What came in in the meantime.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Resumed {
    /// How long it stood still.
    pub after: Duration,
    /// Frames that had waited.
    pub frames: usize,
}

impl StoppedMachine {
    /// Stops the machine of this agent.
    pub fn stop(lab: &Lab, agent: &mut Agent) -> Result<Self> {
        let node = agent.node().clone();
        let (port, since) = (topology::port_of(node.number), Instant::now());
        agent.pause_node()?;
        let queues = lab.hubs_of(&node).into_iter().map(|hub| Queue::open(hub, &port)).collect::<Result<_>>()?;
        lab.set_pods(&node, false)?;
        Ok(Self { queues, since })
    }

    /// Runs it again.
    pub fn resume(self, lab: &Lab, agent: &mut Agent) -> Result<Resumed> {
        let after = self.since.elapsed();
        let mut frames = 0;
        for queue in &self.queues {
            frames += queue.release()?;
        }
        agent.resume_node()?;
        for queue in self.queues {
            frames += queue.close()?;
        }
        lab.set_pods(&agent.node().clone(), true)?;
        Ok(Resumed { after, frames })
    }
}

/// The queue in the place of a node's port of a switch.
struct Queue {
    hub: Netns,
    port: String,
    hold: String,
    waiting: OwnedFd,
    out: OwnedFd,
}

impl Queue {
    fn open(hub: &Netns, port: &str) -> Result<Self> {
        let (hold, held) = (format!("hold-{port}"), format!("held-{port}"));
        let made = format!("link add {hold} type veth peer name {held}");
        script::ip(hub, &[made, format!("link set {held} up promisc on")])?;
        // What waits is complete: no checksum is left to a device, and nothing is longer than a frame.
        hub.exec("ethtool", &["-K", &hold, "tx", "off", "tso", "off", "gso", "off"])?;
        let (waiting, out) = hub.run(|| Ok((packets(&held, Some(SockProtocol::EthAll))?, packets(port, None)?)))?;
        let swapped = [format!("link set {port} nomaster"), format!("link set {hold} master br0 up")];
        script::ip(hub, &swapped)?;
        Ok(Self { hub: hub.clone(), port: port.to_owned(), hold, waiting, out })
    }

    /// Hands over what has waited so far.
    fn release(&self) -> Result<usize> {
        let (mut frame, mut count) = ([0; LONGEST], 0);
        loop {
            match recvfrom::<LinkAddr>(self.waiting.as_raw_fd(), &mut frame) {
                Ok((length, _)) => {
                    send(self.out.as_raw_fd(), &frame[..length], MsgFlags::empty()).context("hand over a frame")?;
                    count += 1;
                }
                Err(Errno::EAGAIN) => return Ok(count),
                Err(errno) => return Err(errno).context("read what has waited"),
            }
        }
    }

    /// The node's port is a port of the switch again.
    fn close(self) -> Result<usize> {
        let late = self.release()?;
        script::ip(
            &self.hub,
            &[format!("link set {} nomaster", self.hold), format!("link set {} master br0", self.port)],
        )?;
        let last = self.release()?;
        script::ip(&self.hub, &[format!("link del {}", self.hold)])?;
        Ok(late + last)
    }
}

fn packets(device: &str, protocol: Option<SockProtocol>) -> Result<OwnedFd> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let socket =
        socket(AddressFamily::Packet, SockType::Raw, flags, protocol).context("cannot open a packet socket")?;
    setsockopt(&socket, sockopt::RcvBufForce, &ROOM)?;
    setsockopt(&socket, sockopt::SndBufForce, &ROOM)?;
    bind(socket.as_raw_fd(), &link_address(device)?).with_context(|| format!("cannot bind to {device}"))?;
    Ok(socket)
}
