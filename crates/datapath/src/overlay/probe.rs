//! Probes other nodes through the overlay, and answers their probes.
//!
//! The management network does not show the path between nodes: a firewall may block only the tunnel port. This probe uses
//! that path:
//!
//! ```text
//! asker: UDP socket --> tunnel port of the node: VXLAN, network 0, an EtherType of our own
//!                       --> overlay device --> program passes non-IP frames --> packet socket: answerer
//! ```
//!
//! The answer uses the same path. The datagram has a UDP checksum, so the uplink's program leaves it to the overlay device
//! (see `overlay.rs` of the programs), whose program passes it where it comes from a node's tunnel endpoint. No policy has
//! network 0. Answers are no longer than questions and go only to tunnel endpoints of nodes. An answer counts if it has the
//! random 64-bit number of a waiting question.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, UdpSocket};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::{Buf, BufMut, Bytes, BytesMut};
use egress_common::wire::ethertype;
use nix::net::if_::if_nametoindex;
use tokio::io::unix::AsyncFd;
use tokio::sync::{mpsc, watch};
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;
use tracing::debug;

use crate::announce::frames::ETHERNET_LEN;
use crate::announce::socket::PacketSocket;
use crate::names::{OVERLAY_DEVICE, OVERLAY_MAC};

/// Source of the inner frame; a VXLAN device drops frames with its own address.
const SOURCE_MAC: [u8; 6] = [0x02, 0xe6, 0x7e, 0x55, 0x00, 0x02];
/// RFC 7348 section 5: the network identifier is valid. It is zero.
const VXLAN: [u8; 8] = [0x08, 0, 0, 0, 0, 0, 0, 0];
/// Magic number and version.
const MAGIC: u64 = u64::from_be_bytes(*b"eipecho1");
const QUESTION: u8 = 1;
const ANSWER: u8 = 2;
const BODY: usize = 8 + 1 + 8 + 16;
/// Interval of the check that the device is still the same.
const LOOK: Duration = Duration::from_secs(1);
/// A question without an answer is dropped after this time.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(10);

/// The node to ask.
#[derive(Clone, Debug)]
pub struct ProbeQuestion {
    pub node: Arc<str>,
    /// Its tunnel endpoint.
    pub to: IpAddr,
}

/// Nodes that answered, and when.
pub type Echo = (Arc<str>, Instant);

/// Input of the answering task of an agent.
pub struct Answerer {
    /// Of the overlay.
    pub port: u16,
    /// This node's tunnel endpoint.
    pub own: watch::Receiver<Option<IpAddr>>,
    /// The tunnel endpoints of all nodes: other senders get no answer.
    pub nodes: watch::Receiver<Arc<BTreeSet<IpAddr>>>,
    /// The port, while this node answers.
    pub answers: watch::Sender<Option<u16>>,
}

/// Input of the asking task of a controller, on the overlay device of its node. The agent of that node receives the answers
/// too, and ignores them.
pub struct Asker {
    /// Of the overlay.
    pub port: u16,
    /// The tunnel endpoint of the controller's node.
    pub own: watch::Receiver<Option<IpAddr>>,
    pub questions: mpsc::Receiver<ProbeQuestion>,
    pub echoes: mpsc::Sender<Echo>,
}

/// Answers until `stop`.
pub async fn answer(Answerer { port, own, nodes, answers }: Answerer, stop: CancellationToken) {
    let (mut sender, mut listener, mut look) = (MessageSender::default(), None, check_interval());
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            _ = look.tick() => {
                listener = Listener::follow(listener);
                sender.follow(*own.borrow());
                let now = listener.as_ref().map(|_| port);
                answers.send_if_modified(|known| std::mem::replace(known, now) != now);
            }
            heard = next_message(&mut listener) => {
                if let Some(message) = heard.filter(|message| message.kind == QUESTION)
                    && nodes.borrow().contains(&message.from)
                {
                    sender.send(SocketAddr::new(message.from, port), &ProbeMessage { kind: ANSWER, ..message }.datagram());
                }
                // A socket that always has data would block other tasks of this thread.
                tokio::task::consume_budget().await;
            }
        }
    }
}

/// Asks until `stop`.
pub async fn ask(Asker { port, own, mut questions, echoes }: Asker, stop: CancellationToken) {
    let (mut sender, mut listener, mut look) = (MessageSender::default(), None, check_interval());
    let (secret, mut number, mut waiting) = (RandomState::new(), 0_u64, BTreeMap::<u64, Echo>::new());
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            _ = look.tick() => {
                listener = Listener::follow(listener);
                sender.follow(*own.borrow());
                waiting.retain(|_, (_, asked)| asked.elapsed() < FORGOTTEN_AFTER);
            }
            Some(ProbeQuestion { node, to }) = questions.recv() => {
                let Some(from) = *own.borrow() else { continue };
                number += 1;
                let nonce = secret.hash_one(number);
                waiting.insert(nonce, (node, Instant::now()));
                sender.send(SocketAddr::new(to, port), &ProbeMessage { kind: QUESTION, nonce, from }.datagram());
            }
            heard = next_message(&mut listener) => {
                let answer = heard.filter(|message| message.kind == ANSWER);
                if let Some((node, _)) = answer.and_then(|message| waiting.remove(&message.nonce)) {
                    // If answers pile up, one is dropped; a newer one follows soon.
                    let _missed = echoes.try_send((node, Instant::now()));
                }
                tokio::task::consume_budget().await;
            }
        }
    }
}

fn check_interval() -> tokio::time::Interval {
    let mut look = tokio::time::interval(LOOK);
    look.set_missed_tick_behavior(MissedTickBehavior::Delay);
    look
}

/// Sends from this node's tunnel endpoint, the only source that is accepted. A failed send is a question without an answer.
#[derive(Default)]
struct MessageSender(Option<(IpAddr, UdpSocket)>);

impl MessageSender {
    /// The endpoint may have changed, or may not be on a device yet.
    fn follow(&mut self, own: Option<IpAddr>) {
        if self.0.as_ref().map(|(from, _)| *from) == own {
            return;
        }
        let open = |from| {
            let socket = UdpSocket::bind((from, 0))?;
            socket.set_nonblocking(true)?;
            Ok::<_, io::Error>((from, socket))
        };
        self.0 =
            own.and_then(|from| open(from).inspect_err(|error| debug!(%error, %from, "cannot ask from here")).ok());
    }

    fn send(&self, to: SocketAddr, datagram: &[u8]) {
        if let Some(Err(error)) = self.0.as_ref().map(|(_, socket)| socket.send_to(datagram, to)) {
            debug!(%error, %to, "cannot send through the overlay");
        }
    }
}

/// Receives frames of the overlay device.
struct Listener {
    ifindex: u32,
    socket: AsyncFd<PacketSocket>,
}

impl Listener {
    /// Replaces the socket if the device was replaced.
    fn follow(now: Option<Self>) -> Option<Self> {
        let ifindex = if_nametoindex(OVERLAY_DEVICE).ok()?;
        match now {
            Some(listener) if listener.ifindex == ifindex => Some(listener),
            _ => match PacketSocket::hearing(ifindex, ethertype::ECHO) {
                Ok(socket) => Some(Self { ifindex, socket }),
                Err(error) => {
                    debug!(%error, "cannot listen on the overlay");
                    None
                }
            },
        }
    }
}

/// The next message; pending without a listener. `None` for a foreign frame, and if the device is missing or down: the next
/// check looks for it again.
async fn next_message(listener: &mut Option<Listener>) -> Option<ProbeMessage> {
    let Some(Listener { socket, .. }) = listener else { return std::future::pending().await };
    match receive(socket).await {
        Ok(message) => message,
        Err(error) => {
            debug!(%error, "cannot receive from the overlay");
            *listener = None;
            None
        }
    }
}

async fn receive(socket: &AsyncFd<PacketSocket>) -> io::Result<Option<ProbeMessage>> {
    let mut frame = [0; 128];
    loop {
        let mut ready = socket.readable().await?;
        if let Ok(received) = ready.try_io(|socket| socket.get_ref().receive(&mut frame)) {
            return received.map(|length| ProbeMessage::read(frame.get(..length)?));
        }
    }
}

/// A question or its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ProbeMessage {
    kind: u8,
    nonce: u64,
    /// The asker's tunnel endpoint.
    from: IpAddr,
}

impl ProbeMessage {
    /// The UDP payload.
    fn datagram(&self) -> Bytes {
        let mut bytes = BytesMut::with_capacity(VXLAN.len() + ETHERNET_LEN + BODY);
        bytes.put_slice(&VXLAN);
        bytes.put_slice(&OVERLAY_MAC);
        bytes.put_slice(&SOURCE_MAC);
        bytes.put_u16(ethertype::ECHO);
        bytes.put_u64(MAGIC);
        bytes.put_u8(self.kind);
        bytes.put_u64(self.nonce);
        let from = match self.from {
            IpAddr::V4(from) => from.to_ipv6_mapped(),
            IpAddr::V6(from) => from,
        };
        bytes.put_slice(&from.octets());
        bytes.freeze()
    }

    /// From the inner frame.
    fn read(frame: &[u8]) -> Option<Self> {
        let mut body = frame.get(ETHERNET_LEN..ETHERNET_LEN + BODY)?;
        if body.get_u64() != MAGIC {
            return None;
        }
        let (kind, nonce) = (body.get_u8(), body.get_u64());
        let from = Ipv6Addr::from_bits(body.get_u128()).to_canonical();
        [QUESTION, ANSWER].contains(&kind).then_some(Self { kind, nonce, from })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_read_as_it_was_written() {
        for from in ["172.18.0.2", "fd00:172:18::2"] {
            let message =
                ProbeMessage { kind: QUESTION, nonce: 0x0102_0304_0506_0708, from: from.parse().expect("an address") };
            let datagram = message.datagram();
            assert_eq!(datagram[..8], VXLAN, "network 0, and nothing else is said");
            let frame = &datagram[VXLAN.len()..];
            assert_eq!(frame[..6], OVERLAY_MAC);
            assert_eq!(ProbeMessage::read(frame), Some(message));
            // A device may have padded it.
            assert_eq!(ProbeMessage::read(&[frame, &[0; 20]].concat()), Some(message));
        }
    }

    #[test]
    fn truncated_and_foreign_frames_are_ignored() {
        let message = ProbeMessage { kind: ANSWER, nonce: 7, from: IpAddr::from([127, 0, 0, 1]) };
        let datagram = message.datagram();
        let frame = &datagram[VXLAN.len()..];
        for length in 0..frame.len() {
            assert_eq!(ProbeMessage::read(&frame[..length]), None, "{length} bytes");
        }
        for (place, byte) in [(ETHERNET_LEN, 0), (ETHERNET_LEN + 8, 3)] {
            let mut other = frame.to_vec();
            other[place] = byte;
            assert_eq!(ProbeMessage::read(&other), None, "byte {place}");
        }
    }
}
