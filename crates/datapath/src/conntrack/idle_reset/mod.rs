//! Idle reset: lets an idle pod learn that its connection was reset.
//!
//! The programs answer the pod's next packet with a reset, whose number comes from that packet. A pod that waits for data sends
//! none. So the agent sends it a bare ACK outside its window, which any TCP answers with an ACK (RFC 9293 section 3.10.7.4).
//! The segment goes to the pod by the management port, past the host's netfilter, to the kernel's next hop for the pod.
//!
//! The pod's window is unknown. It is at most a quarter of all numbers (RFC 7323 section 2.3), so of two numbers half of all
//! numbers apart at least one is outside: each round uses the other one. Connections that were reset or started again are
//! skipped. Failed sends and unresolved next hops are retried a few times. The first failure and the final number of losses are
//! logged; such a pod learns of the cut when it sends.

pub mod pod_link;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use egress_common::abi::{PodEntry, Tuple};
use egress_common::decide::phase::{self, Phase};
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::task::spawn_blocking;
use tokio::time::{Instant, sleep, sleep_until};
use tracing::{debug, info, warn};

use crate::announce::frames;
use crate::announce::socket::PacketSocket;
use crate::clock::now_ns;
use crate::conntrack::idle_reset::pod_link::{PodLinks, look};
use crate::node_state::shared::Shared;
use egress_supervise;

/// Segments per connection, and the time for the answer.
const ROUNDS: u32 = 4;
const PATIENCE: Duration = Duration::from_millis(700);
/// Segments per batch and the pause after it: 1,000 a second, as many as one pod gets answers (`decide::limit`).
const AT_ONCE: usize = 10;
const PAUSE: Duration = Duration::from_millis(10);
/// Longest time from the decision to send until the pod's answer arrives.
const ANSWERING_NS: u64 = 2_000_000_000;

/// Attempts for a connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tries {
    sent: u32,
    failed: u32,
}

impl Tries {
    const fn after(self, sent: bool) -> Self {
        if sent { Self { sent: self.sent + 1, ..self } } else { Self { failed: self.failed + 1, ..self } }
    }

    const fn is_over(self) -> bool {
        self.sent >= ROUNDS || self.failed >= ROUNDS
    }
}

pub type Batch = Vec<(Tuple, Tries)>;

/// Connections by due time. Each connection occurs once, so the size is bounded by `flows`.
#[derive(Default)]
struct DueResets {
    /// The number distinguishes entries with the same time.
    times: BTreeMap<(Instant, u64), Tuple>,
    tries: HashMap<Tuple, Tries>,
    number: u64,
}

impl DueResets {
    /// Adds a connection. A waiting one keeps its time and gets these tries.
    fn put(&mut self, at: Instant, connection: Tuple, tries: Tries) {
        if self.tries.insert(connection, tries).is_none() {
            self.number += 1;
            self.times.insert((at, self.number), connection);
        }
    }

    fn next(&self) -> Option<Instant> {
        self.times.first_key_value().map(|((at, _), _)| *at)
    }

    /// Pods of all connections that are due.
    fn pods(&self, now: Instant) -> BTreeSet<IpAddr> {
        let due = self.times.iter().take_while(|((at, _), _)| *at <= now);
        due.map(|(_, connection)| connection.saddr.to_ip()).collect()
    }

    /// Takes the first connections that are due.
    fn take(&mut self, now: Instant) -> Batch {
        let mut batch = Vec::new();
        while batch.len() < AT_ONCE
            && let Some(first) = self.times.first_entry()
            && first.key().0 <= now
        {
            let connection = first.remove();
            batch.extend(self.tries.remove_entry(&connection));
        }
        batch
    }
}

/// Runs until the data plane is dropped.
pub async fn run(shared: Arc<Shared>, mut requests: UnboundedReceiver<Vec<Tuple>>) {
    let (mut due, mut links, mut failure) = (DueResets::default(), None, RepeatedFailure::default());
    loop {
        let next = due.next();
        tokio::select! {
            cut = requests.recv() => {
                let Some(cut) = cut else { return };
                debug!(connections = cut.len(), "flushed: idle resets are queued for their pods");
                let now = Instant::now();
                cut.into_iter().for_each(|connection| due.put(now, connection, Tries::default()));
            }
            () = sleep_until(next.unwrap_or_else(Instant::now)), if next.is_some() => {
                let batch = due.take(Instant::now());
                let done = wake(&shared, &mut links, &due, batch).await;
                note(&mut failure, &done);
                let later = Instant::now() + PATIENCE;
                for (connection, tries) in done.batch.into_iter().filter(|(_, tries)| !tries.is_over()) {
                    due.put(later, connection, tries);
                }
                sleep(PAUSE).await;
            }
        }
        if due.next().is_none()
            && let Some(lost) = failure.end()
        {
            info!(connections = lost, "idle resets could not be sent: the pods get a reset with their next packet");
        }
    }
}

/// Result of a batch: connections that may need another attempt, and the first error.
struct Done {
    batch: Batch,
    error: Option<io::Error>,
}

impl Done {
    fn none_sent(batch: Batch, error: Option<io::Error>) -> Self {
        Self { batch: batch.into_iter().map(|(connection, tries)| (connection, tries.after(false))).collect(), error }
    }
}

/// A failure that repeats: logged when it begins, and once more at its end with the number of connections given up.
#[derive(Debug, Default)]
struct RepeatedFailure {
    is_logged: bool,
    lost: usize,
}

impl RepeatedFailure {
    /// Records a failure; true for the first of a series.
    fn begin(&mut self) -> bool {
        !std::mem::replace(&mut self.is_logged, true)
    }

    /// Counts connections that were given up.
    fn lose(&mut self, lost: usize) {
        self.lost += lost;
    }

    /// Ends the series; returns the number of connections given up, if any.
    fn end(&mut self) -> Option<usize> {
        let Self { is_logged, lost } = std::mem::take(self);
        (is_logged && lost > 0).then_some(lost)
    }
}

fn note(failure: &mut RepeatedFailure, done: &Done) {
    if let Some(error) = &done.error
        && failure.begin()
    {
        warn!(%error, "cannot tell idle pods of connections that were cut; trying again");
    }
    failure.lose(done.batch.iter().filter(|(_, tries)| tries.failed >= ROUNDS).count());
}

/// Sends to the pods that need it. A lookup of link addresses covers all due pods.
async fn wake(shared: &Arc<Shared>, links: &mut Option<PodLinks>, due: &DueResets, batch: Batch) -> Done {
    let (looking, asked) = (Arc::clone(shared), batch.clone());
    let idle = egress_supervise::joined(spawn_blocking(move || idle(&looking, asked)).await);
    let idle = match idle {
        Ok(idle) => idle,
        Err(error) => return Done::none_sent(batch, Some(error)),
    };
    // A missing port is logged elsewhere.
    let Some(port) = shared.state().facts().mgmt else { return Done::none_sent(idle, None) };
    if idle.is_empty() {
        return Done { batch: idle, error: None };
    }
    let now = Instant::now();
    if !links.as_ref().is_some_and(|links| links.cover(port, now, &idle)) {
        let mut pods = due.pods(now);
        pods.extend(idle.iter().map(|(connection, _)| connection.saddr.to_ip()));
        match look(&shared.netlink, port, pods).await {
            Ok(to) => *links = Some(PodLinks { port, until: now + PATIENCE, to }),
            Err(error) => return Done::none_sent(idle, Some(error)),
        }
    }
    let socket = match PacketSocket::sender(port.index) {
        Ok(socket) => socket,
        Err(error) => return Done::none_sent(idle, Some(error)),
    };
    let mut done = Done { batch: Vec::with_capacity(idle.len()), error: None };
    for (connection, tries) in idle {
        let mac_of_pod = links.as_ref().and_then(|links| links.to.get(&connection.saddr.to_ip()).copied().flatten());
        let frame =
            mac_of_pod.map(|mac| frames::segment(mac, port.mac, &connection, number_of(&connection, tries.sent)));
        let sent = frame.map_or(Ok(false), |frame| socket.send(&frame).map(|()| true));
        done.batch.push((connection, tries.after(*sent.as_ref().unwrap_or(&false))));
        done.error = done.error.or(sent.err());
    }
    done
}

/// Connections without a reset sent and without a new flow.
fn idle(shared: &Shared, batch: Batch) -> io::Result<Batch> {
    let now = now_ns()?;
    let mut answered = Batch::new();
    {
        let maps = shared.policy_maps();
        for (connection, tries) in batch {
            let pod = maps.pods.get(&connection.saddr)?;
            answered.extend(pod.filter(|pod| is_answered(pod, now)).map(|_| (connection, tries)));
        }
    }
    let maps = shared.flow_maps();
    let mut idle = Vec::new();
    for (connection, tries) in answered {
        let Some(flow) = maps.flows.get(&connection)? else { continue };
        let wanted = match phase::flow(&flow) {
            // The pod retries its SYN, which starts a new flow.
            Phase::Opening => false,
            Phase::Established => true,
            // Before the first round, a reset by the peer looks the same as ours.
            Phase::Closing => tries.sent == 0,
        };
        if wanted {
            idle.push((connection, tries));
        }
    }
    Ok(idle)
}

/// Whether the programs still reset or drop what the pod sends on a cut connection (`decide::from_pod`). Later its answer would
/// leave with the node's address.
fn is_answered(pod: &PodEntry, now_ns: u64) -> bool {
    pod.is_selected() || now_ns.saturating_add(ANSWERING_NS) < pod.cut_until_ns
}

/// Moves by half of all sequence numbers with each round.
fn number_of(connection: &Tuple, round: u32) -> u32 {
    thread_local!(static START: RandomState = RandomState::new());
    let [a, b, c, d, ..] = START.with(|start| start.hash_one(connection)).to_ne_bytes();
    u32::from_ne_bytes([a, b, c, d]).wrapping_add(round << 31)
}

#[cfg(test)]
mod tests {
    use egress_common::abi::{Addr, Direction};
    use egress_common::wire::PROTO_TCP;

    use super::*;
    use crate::devices::interfaces::Interface;

    fn connection(port: u16) -> Tuple {
        let (pod, world) = (Addr::v4([10, 244, 1, 10]), Addr::v4([198, 51, 100, 10]));
        Tuple::new(Direction::Egress, pod, world, port, 80, PROTO_TCP)
    }

    #[test]
    fn a_connection_that_is_flushed_twice_is_queued_once() {
        let (mut due, now) = (DueResets::default(), Instant::now());
        for _ in 0..3 {
            due.put(now, connection(1), Tries::default());
        }
        let (none, one) = (Tries::default(), Tries::default().after(true));
        due.put(now, connection(2), one);
        due.put(now + PATIENCE, connection(2), none);
        assert_eq!(due.take(now), [(connection(1), none), (connection(2), none)], "the second one from the start");
        assert!(due.next().is_none() && due.take(now + 2 * PATIENCE).is_empty());
        due.put(now + PATIENCE, connection(1), one);
        assert_eq!((due.next(), due.take(now).len()), (Some(now + PATIENCE), 0), "its time has not come");
        assert_eq!(due.take(now + PATIENCE), [(connection(1), one)]);
    }

    #[test]
    fn a_batch_is_small_and_in_order() {
        let (mut due, now) = (DueResets::default(), Instant::now());
        let ports = 0..2 * u16::try_from(AT_ONCE).expect("few") + 1;
        ports.clone().for_each(|port| due.put(now, connection(port), Tries::default()));
        let batches: Vec<_> = std::iter::from_fn(|| Some(due.take(now)).filter(|batch| !batch.is_empty())).collect();
        assert_eq!(batches.iter().map(Vec::len).collect::<Vec<_>>(), [AT_ONCE, AT_ONCE, 1]);
        assert!(batches.concat().iter().map(|(connection, _)| connection.sport()).eq(ports));
    }

    #[test]
    fn the_pods_of_a_round_are_looked_for_once() {
        let (mut due, mut links, now) = (DueResets::default(), None, Instant::now());
        let port = Interface { index: 3, mac: [3; 6], mtu: 1400 };
        for last in 0..3 * u8::try_from(AT_ONCE).expect("few") {
            let (pod, world) = (Addr::v4([10, 244, 1, last]), Addr::v4([198, 51, 100, 10]));
            let at = if last == 0 { now + PATIENCE } else { now };
            due.put(at, Tuple::new(Direction::Egress, pod, world, 1, 80, PROTO_TCP), Tries::default());
        }
        let mut looks = Vec::new();
        let batches = [now, now, now, now + PATIENCE].map(|when| (when, due.take(when), due.pods(when)));
        for (when, batch, rest) in batches {
            if !links.as_ref().is_some_and(|links: &PodLinks| links.cover(port, when, &batch)) {
                let pods = batch.iter().map(|(connection, _)| connection.saddr.to_ip()).chain(rest);
                links = Some(PodLinks { port, until: when + PATIENCE, to: pods.map(|pod| (pod, None)).collect() });
                looks.push(links.as_ref().map_or(0, |links| links.to.len()));
            }
        }
        assert_eq!(looks, [3 * AT_ONCE - 1, 1], "for those that are due, then for the one of the next round");
        let other = Interface { index: 4, ..port };
        assert!(!links.is_some_and(|links| links.cover(other, now, &Vec::new())), "the port was replaced");
    }

    #[test]
    fn a_failed_idle_reset_is_retried_with_the_same_number() {
        let mut tries = Tries::default().after(true);
        let number = number_of(&connection(1), tries.sent);
        for _ in 1..ROUNDS {
            tries = tries.after(false);
            assert_eq!((number_of(&connection(1), tries.sent), tries.is_over()), (number, false));
        }
        assert!(tries.after(false).is_over(), "as many failures as rounds");
        assert_ne!(number_of(&connection(1), tries.after(true).sent), number);
        let done = Done::none_sent(vec![(connection(1), tries), (connection(2), Tries::default())], None);
        let mut failure = RepeatedFailure::default();
        note(&mut failure, &done);
        assert_eq!(failure.end(), None, "no error was logged");
        note(&mut failure, &Done { error: Some(io::ErrorKind::Other.into()), ..done });
        assert_eq!(failure.end(), Some(1), "the other connection is retried");
    }

    #[test]
    fn a_pod_whose_answer_would_leave_gets_no_segment() {
        let now = 1_000 * ANSWERING_NS;
        let until = |until_ns| PodEntry::known().with_cut_until(until_ns);
        assert!(is_answered(&PodEntry::selected(7, 0), now), "it is reset, or has its address");
        assert!(is_answered(&until(now + ANSWERING_NS + 1), now));
        for over in [0, now, now + ANSWERING_NS] {
            assert!(!is_answered(&until(over), now), "{over}");
        }
    }

    #[test]
    fn a_repeated_failure_is_logged_once_and_its_losses_at_its_end() {
        let mut failure = RepeatedFailure::default();
        assert_eq!(failure.end(), None, "nothing was wrong");
        assert_eq!([failure.begin(), failure.begin()], [true, false]);
        for lost in [2, 0, 3] {
            failure.lose(lost);
        }
        assert_eq!([failure.end(), failure.end()], [Some(5), None]);
        assert_eq!((failure.begin(), failure.end()), (true, None), "nothing was lost by it");
        assert!(failure.begin(), "another one");
    }
}
