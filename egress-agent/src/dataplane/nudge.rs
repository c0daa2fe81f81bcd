//! Telling idle pods that a connection of theirs was cut.
//!
//! The programs answer the pod's next packet with a reset, which has the right number from that packet. A pod that waits
//! for data sends none, so it is made to: it gets a bare ACK whose sequence number is none that it waits for, and answers
//! with an ACK of its own (RFC 9293 section 3.10.7.4), as any TCP does. The segment goes to the pod by the management port,
//! past the host's netfilter, by the next hop that the kernel has for the pod.
//!
//! Nobody here knows which number the pod waits for. A window is at most a quarter of all numbers (RFC 7323 section 2.3),
//! so of two numbers half of all numbers apart at least one is outside: each round takes the other one. What has been told
//! by then, or has begun anew, is left alone. This is a service on top: where no segment gets through, the pod learns of
//! the cut when it sends.

use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use egress_common::abi::{PodEntry, Tuple};
use egress_common::decide::phase::{self, Phase};
use futures::TryStreamExt;
use rtnetlink::packet_route::neighbour::{
    NeighbourAddress, NeighbourAttribute, NeighbourFlags, NeighbourMessage, NeighbourState,
};
use rtnetlink::packet_route::route::{RouteAddress, RouteAttribute};
use rtnetlink::{Handle, RouteMessageBuilder};
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::task::spawn_blocking;
use tokio::time::{Instant, sleep, sleep_until};
use tracing::{debug, warn};

use super::error::netlink_io;
use super::executor::now_ns;
use super::frames::{self, Mac};
use super::packet::PacketSocket;
use super::{Interface, Shared, cut};

/// How often a pod is asked at most, and how long it has to answer.
const ROUNDS: u32 = 4;
const PATIENCE: Duration = Duration::from_millis(700);
/// At most so many segments at once, and a pause behind them: 1,000 a second, which is as many as a CPU answers
/// (`decide::limit`).
const AT_ONCE: usize = 10;
const PAUSE: Duration = Duration::from_millis(10);
/// How long a neighbour has to answer the kernel.
const RESOLVING: Duration = Duration::from_millis(50);
/// How long at most from the decision to speak until the pod's answer is here.
const ANSWERING_NS: u64 = 2_000_000_000;

/// What is to be said when. A connection is in it once, however often it is cut: so there is never more than `flows` holds,
/// whoever selects and deselects a pod over and over.
#[derive(Default)]
struct Due {
    /// A number tells those of one time apart.
    times: BTreeMap<(Instant, u64), Tuple>,
    rounds: HashMap<Tuple, u32>,
    number: u64,
}

impl Due {
    /// One that waits already keeps its time, and begins with this round.
    fn put(&mut self, at: Instant, connection: Tuple, round: u32) {
        if self.rounds.insert(connection, round).is_none() {
            self.number += 1;
            self.times.insert((at, self.number), connection);
        }
    }

    fn next(&self) -> Option<Instant> {
        self.times.first_key_value().map(|((at, _), _)| *at)
    }

    /// The first few whose time has come.
    fn take(&mut self, now: Instant) -> Vec<(Tuple, u32)> {
        let mut batch = Vec::new();
        while batch.len() < AT_ONCE
            && let Some(first) = self.times.first_entry()
            && first.key().0 <= now
        {
            let connection = first.remove();
            batch.extend(self.rounds.remove_entry(&connection));
        }
        batch
    }
}

/// Tells, for as long as the data plane lives.
pub(super) async fn run(shared: Arc<Shared>, mut told: UnboundedReceiver<cut::Cut>) {
    let mut due = Due::default();
    loop {
        let next = due.next();
        tokio::select! {
            cut = told.recv() => {
                let Some(cut) = cut else { return };
                debug!(connections = cut.len(), "cut: their pods are told");
                let now = Instant::now();
                cut.into_iter().for_each(|connection| due.put(now, connection, 0));
            }
            () = sleep_until(next.unwrap_or_else(Instant::now)), if next.is_some() => {
                let batch = due.take(Instant::now());
                let asked = tell(&shared, batch).await.unwrap_or_else(|error| {
                    warn!(%error, "idle pods are not told of connections that were cut");
                    Vec::new()
                });
                let later = Instant::now() + PATIENCE;
                for (connection, round) in asked.into_iter().filter(|(_, round)| round + 1 < ROUNDS) {
                    due.put(later, connection, round + 1);
                }
                sleep(PAUSE).await;
            }
        }
    }
}

/// Sends to those that need it, and returns them.
async fn tell(shared: &Arc<Shared>, batch: Vec<(Tuple, u32)>) -> io::Result<Vec<(Tuple, u32)>> {
    let looking = Arc::clone(shared);
    let asleep = spawn_blocking(move || asleep(&looking, batch)).await.map_err(io::Error::other)??;
    let Some(port) = shared.state().facts().mgmt.filter(|_| !asleep.is_empty()) else { return Ok(asleep) };
    let ways = ways(&shared.netlink, port, &asleep).await?;
    let socket = PacketSocket::sender(port.index)?;
    for (connection, round) in &asleep {
        if let Some(mac) = ways.get(&connection.saddr.to_ip()) {
            socket.send(&frames::segment(*mac, port.mac, connection, number_of(connection, *round)))?;
        }
    }
    Ok(asleep)
}

/// Those whose pods do not know yet, as far as one can tell: a reset has gone to the others, or they have begun anew.
fn asleep(shared: &Shared, batch: Vec<(Tuple, u32)>) -> io::Result<Vec<(Tuple, u32)>> {
    let now = now_ns()?;
    let tables = shared.tables();
    let mut asleep = Vec::new();
    for (connection, round) in batch {
        let pod = tables.pods.get(&connection.saddr)?;
        if !pod.is_some_and(|pod| is_answered(&pod, now)) {
            continue;
        }
        let Some(flow) = tables.flows.get(&connection)? else { continue };
        let wanted = match phase::of_flow(flow.state) {
            // The pod goes on asking, and begins anew thereby.
            Phase::Opening => false,
            Phase::Established => true,
            // A stranger's reset looks the same as ours, before the first round.
            Phase::Closing => round == 0,
        };
        if wanted {
            asleep.push((connection, round));
        }
    }
    Ok(asleep)
}

/// Whether the programs still answer what the pod sends on a cut connection, or drop it (`decide::steer`). What an idle
/// pod is made to say later would leave, with the node's address.
fn is_answered(pod: &PodEntry, now_ns: u64) -> bool {
    pod.egress_id().is_some() || now_ns.saturating_add(ANSWERING_NS) < pod.cut_until_ns
}

/// Half of all numbers further with each round.
fn number_of(connection: &Tuple, round: u32) -> u32 {
    thread_local!(static START: RandomState = RandomState::new());
    let [a, b, c, d, ..] = START.with(|start| start.hash_one(connection)).to_ne_bytes();
    u32::from_ne_bytes([a, b, c, d]).wrapping_add(round << 31)
}

/// The link address that packets for each of the pods go to by the management port. A neighbour that the kernel does not
/// know is asked for, and known by the next round at the latest.
async fn ways(netlink: &Handle, port: Interface, to: &[(Tuple, u32)]) -> io::Result<BTreeMap<IpAddr, Mac>> {
    let mut hops = BTreeMap::new();
    for (connection, _) in to {
        let pod = connection.saddr.to_ip();
        if !hops.contains_key(&pod) {
            hops.extend(next_hop(netlink, port.index, pod).await?.map(|hop| (pod, hop)));
        }
    }
    let mut known = neighbours(netlink, port.index).await?;
    let unknown: Vec<IpAddr> = hops.values().filter(|hop| !known.contains_key(*hop)).copied().collect();
    if !unknown.is_empty() {
        for hop in unknown {
            let asked = netlink.neighbours().add(port.index, hop).state(NeighbourState::None).replace();
            asked.flags(NeighbourFlags::Use).execute().await.map_err(netlink_io)?;
        }
        sleep(RESOLVING).await;
        known = neighbours(netlink, port.index).await?;
    }
    Ok(hops.into_iter().filter_map(|(pod, hop)| known.get(&hop).map(|mac| (pod, *mac))).collect())
}

/// Who packets for the address are handed to; `None` where the host has no way by this port.
async fn next_hop(netlink: &Handle, ifindex: u32, to: IpAddr) -> io::Result<Option<IpAddr>> {
    let whole = if to.is_ipv4() { 32 } else { 128 };
    let message = RouteMessageBuilder::<IpAddr>::new()
        .destination_prefix(to, whole)
        .map_err(io::Error::other)?
        .output_interface(ifindex)
        .build();
    let found = match netlink.route().get(message).execute().try_next().await.map_err(netlink_io) {
        Ok(found) => found,
        // No route.
        Err(error) => {
            debug!(%error, %to, "no way to a pod");
            return Ok(None);
        }
    };
    let Some(route) = found else { return Ok(None) };
    let by_port =
        route.attributes.iter().any(|attribute| matches!(attribute, RouteAttribute::Oif(oif) if *oif == ifindex));
    let gateway = route.attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::Gateway(RouteAddress::Inet(gateway)) => Some(IpAddr::V4(*gateway)),
        RouteAttribute::Gateway(RouteAddress::Inet6(gateway)) => Some(IpAddr::V6(*gateway)),
        _ => None,
    });
    Ok(by_port.then(|| gateway.unwrap_or(to)))
}

/// Neighbours of the port whose link address the kernel has.
async fn neighbours(netlink: &Handle, ifindex: u32) -> io::Result<BTreeMap<IpAddr, Mac>> {
    let mut known = BTreeMap::new();
    let mut messages = netlink.neighbours().get().execute();
    while let Some(message) = messages.try_next().await.map_err(netlink_io)? {
        if message.header.ifindex == ifindex {
            known.extend(neighbour(&message));
        }
    }
    Ok(known)
}

fn neighbour(message: &NeighbourMessage) -> Option<(IpAddr, Mac)> {
    if matches!(message.header.state, NeighbourState::Failed | NeighbourState::Incomplete) {
        return None;
    }
    let (mut address, mut mac) = (None, None);
    for attribute in &message.attributes {
        match attribute {
            NeighbourAttribute::Destination(NeighbourAddress::Inet(v4)) => address = Some(IpAddr::V4(*v4)),
            NeighbourAttribute::Destination(NeighbourAddress::Inet6(v6)) => address = Some(IpAddr::V6(*v6)),
            NeighbourAttribute::LinkLayerAddress(bytes) => mac = Mac::try_from(bytes.as_slice()).ok(),
            _ => {}
        }
    }
    address.zip(mac)
}

#[cfg(test)]
mod tests {
    use egress_common::abi::{Addr, Direction};
    use egress_common::wire::PROTO_TCP;

    use super::*;

    fn connection(port: u16) -> Tuple {
        let (pod, world) = (Addr::v4([10, 244, 1, 10]), Addr::v4([198, 51, 100, 10]));
        Tuple::new(Direction::Egress, pod, world, port, 80, PROTO_TCP)
    }

    #[test]
    fn a_connection_that_is_cut_again_waits_once() {
        let (mut due, now) = (Due::default(), Instant::now());
        for _ in 0..3 {
            due.put(now, connection(1), 0);
        }
        due.put(now, connection(2), 2);
        due.put(now + PATIENCE, connection(2), 0);
        assert_eq!(due.take(now), [(connection(1), 0), (connection(2), 0)], "the second one from the first round on");
        assert!(due.next().is_none() && due.take(now + 2 * PATIENCE).is_empty());
        due.put(now + PATIENCE, connection(1), 1);
        assert_eq!((due.next(), due.take(now).len()), (Some(now + PATIENCE), 0), "its time has not come");
        assert_eq!(due.take(now + PATIENCE), [(connection(1), 1)]);
    }

    #[test]
    fn a_batch_is_small_and_in_order() {
        let (mut due, now) = (Due::default(), Instant::now());
        let ports = 0..2 * u16::try_from(AT_ONCE).expect("few") + 1;
        ports.clone().for_each(|port| due.put(now, connection(port), 0));
        let batches: Vec<_> = std::iter::from_fn(|| Some(due.take(now)).filter(|batch| !batch.is_empty())).collect();
        assert_eq!(batches.iter().map(Vec::len).collect::<Vec<_>>(), [AT_ONCE, AT_ONCE, 1]);
        assert!(batches.concat().iter().map(|(connection, _)| connection.sport()).eq(ports));
    }

    #[test]
    fn nobody_speaks_whose_answer_would_leave() {
        let now = 1_000 * ANSWERING_NS;
        let until = |until_ns| PodEntry::known().with_cut_until(until_ns);
        assert!(is_answered(&PodEntry::selected(7, 0), now), "it is reset, or has its address");
        assert!(is_answered(&until(now + ANSWERING_NS + 1), now));
        for over in [0, now, now + ANSWERING_NS] {
            assert!(!is_answered(&until(over), now), "{over}");
        }
    }
}
