//! How long a packet waits for what else a node does: pings at an interval of a millisecond from selected pods of one node,
//! one on the CPU where the agent runs and one on another.
//!
//! Server, node and pod answer and forward a ping on the CPU that sends it, so a ping shows what keeps this CPU from
//! forwarding. Time runs from when a ping was due: what could not be sent has waited too. The threads have real-time
//! priority, so that other processes delay no ping; what runs in the kernel and cannot be preempted does.
//!
//! Cases: nothing beside; a flood of SYNs to a NodePort whose backend is selected (map `inbound`); a million keys in `nat`;
//! the same map nine tenths full, which agents sweep more often.

use std::os::fd::AsRawFd;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use egress_lab::UPLINK;
use egress_lab::kube_api::ApiChoice;
use egress_lab::topology::EXT_LAN;
use egress_lab::topology::netns::link_address;
use egress_lab::traffic::packet;
use egress_toolchain::Built;
use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, SockaddrIn, bind, recv, send, sendto, setsockopt,
    socket, sockopt,
};

use super::bench_cluster::{bare, link_address_of};
use super::cpu::{Cores, pin};
use super::nat_entries;
use super::plan::Work;
use super::samples::{Results, percentile};
use crate::prelude::*;

const NAMESPACE: &str = "bench";
const EGRESS_IP: &str = "172.18.0.150";
const INTERVAL: Duration = Duration::from_millis(1);
/// Between two looks for an answer.
const POLL_INTERVAL: Duration = Duration::from_micros(50);
/// A ping that takes longer is lost.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long each case is measured, but for `--seconds`: two sweeps of a minute.
pub(super) const USUAL: Duration = Duration::from_secs(130);
/// Until the entries of the flood have expired.
const SETTLED: Duration = Duration::from_secs(20);
/// A second.
const SYNS: u32 = 10_000;
/// Where they seem to come from; nobody answers.
const SPOOFED: &str = "198.18.0.0/15";
const FIRST_SPOOFED: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 0);

/// NAT entries, of two keys each: room in the map, those at rest, and those of a map under pressure, which begins at seven
/// eighths.
struct FillLevels {
    room: u32,
    at_rest: u32,
    pressed: u32,
}

impl FillLevels {
    const fn new(quick: bool) -> Self {
        match quick {
            true => Self { room: 20_000, at_rest: 16_000, pressed: 18_000 },
            false => Self { room: 600_000, at_rest: 500_000, pressed: 540_000 },
        }
    }
}

const BASELINE: &str = "nothing beside";

/// The lab, and where its pings run.
struct Stalls<'a> {
    cluster: TestCluster,
    /// A pod, the CPU that its pings run on, and what that CPU is called.
    pingers: Vec<(String, usize, &'static str)>,
    time: Duration,
    say: &'a dyn Fn(&str),
}

pub(super) fn measure(
    built: &Built,
    prefix: &str,
    cores: Cores,
    quick: bool,
    time: Option<Duration>,
    say: &dyn Fn(&str),
    results: &mut Results,
) -> Result<()> {
    // The agent and all else run on one CPU: a sweep runs there, wherever its thread is.
    pin(cores.agents)?;
    let entries = FillLevels::new(quick);
    let mut pingers = vec![("pinger-0".to_owned(), cores.agents, "the agent's CPU")];
    if cores.first != cores.agents {
        pingers.push(("pinger-1".to_owned(), cores.first, "another CPU"));
    }
    let cluster = start(built, prefix, &pingers, &entries)?;
    let _backend = Server::in_pod(&cluster.lab, cluster.pod("backend")?)?;
    let stalls = Stalls { cluster, pingers, time: time.unwrap_or(USUAL), say };
    stalls.case(BASELINE, results)?;

    let flood = Syns::start(&stalls.cluster, cores.first)?;
    stalls.case("a SYN flood on a NodePort", results)?;
    let sent = flood.finish()?;
    say(&format!("{sent} SYNs were sent"));
    if !quick {
        thread::sleep(SETTLED);
    }

    let node = stalls.node()?;
    say(&format!("{} NAT entries", entries.at_rest));
    nat_entries::fill(node, 0..entries.at_rest)?;
    stalls.case("a million keys in nat", results)?;
    say(&format!("{} NAT entries", entries.pressed));
    nat_entries::fill(node, entries.at_rest..entries.pressed)?;
    stalls.case("nat nine tenths full", results)?;
    let left = nat_entries::present(node, 0..1_000)?;
    ensure!(left == 1_000, "of the first 1,000 NAT entries only {left} are left: the cases were not as named");
    stalls.cluster.tear_down()
}

/// One node with a service proxy; its pods are selected, and it has their egress IP.
fn start(built: &Built, prefix: &str, pingers: &[(String, usize, &str)], entries: &FillLevels) -> Result<TestCluster> {
    let proxied = |node| HostConfig { service_proxy: true, ..bare(node) };
    // The NodePort leads to the first pod.
    let mut builder = LabBuilder::default().readable_prefix(prefix).nodes(1).host_config(proxied);
    let names = std::iter::once("backend").chain(pingers.iter().map(|(name, ..)| name.as_str()));
    for name in names {
        builder = builder.pod(pod(name, NAMESPACE, 1, &[("role", name)]));
    }
    let mut cluster = TestCluster::bring_up(builder, Some(0), &ApiChoice::InMemory)?;
    let room = format!("--nat-entries={}", entries.room);
    let options = AgentOptions::new(&built.agent, &cluster.api).with([room]);
    cluster.start_agents(&options)?;
    cluster.agents_serve()?;
    cluster.api.create(
        &format!("/api/v1/namespaces/{NAMESPACE}/services"),
        &json!({
            "apiVersion": "v1", "kind": "Service", "metadata": {"name": "backend", "namespace": NAMESPACE},
            "spec": {
                "type": "NodePort", "externalTrafficPolicy": "Local", "selector": {"role": "backend"},
                "ports": [{"port": 80, "targetPort": HTTP_PORT, "nodePort": plan::NODE_PORT, "protocol": "TCP"}],
            },
        }),
    )?;
    cluster.assignable(1, true)?;
    cluster.assign(&egress_ip("bench", &[EGRESS_IP], &labels("house", NAMESPACE), &all()))?;
    for pod in cluster.lab.pods() {
        cluster.is_seen_as(&pod.name, Some(EGRESS_IP), None)?;
    }
    Ok(cluster)
}

impl Stalls<'_> {
    fn node(&self) -> Result<&LabNode> {
        self.cluster.lab.nodes().first().context("a lab without nodes")
    }

    /// Both pings at the same time.
    fn case(&self, case: &str, results: &mut Results) -> Result<()> {
        (self.say)(&format!("{}: {case}, {} s", Work::Stalls.name(), self.time.as_secs()));
        let started = self.pingers.iter().zip(1..).map(|((pod, core, path), id)| {
            let (core, time) = (*core, self.time);
            let thread = self.cluster.pod(pod)?.netns.spawn(move || ping(id, core, time))?;
            Ok((*path, thread))
        });
        for (path, thread) in started.collect::<Result<Vec<_>>>()? {
            let pings = thread.join().ok().context("a thread that pings has panicked")??;
            let name = |case: &str, what: &str| format!("stalls, {case}: {what}");
            let mut row = |what: &str, unit, value: f64| {
                results.add(&name(case, what), path, "ours", unit, value);
                if case != BASELINE {
                    results.compare(&name(case, what), &name(BASELINE, what));
                }
            };
            row("99.9 %", "ms", percentile(&pings.waited, 99.9));
            row("longest", "ms", percentile(&pings.waited, 100.0));
            #[expect(clippy::cast_precision_loss, reason = "counts of packets are far below 2^52")]
            row("lost", "packets", pings.lost as f64);
        }
        Ok(())
    }
}

/// Milliseconds from when each was due to its answer.
struct Pings {
    waited: Vec<f64>,
    lost: usize,
}

/// Called on a thread in the pod's namespace.
fn ping(id: u16, core: usize, time: Duration) -> Result<Pings> {
    pin(core)?;
    let thread = nix::unistd::gettid().to_string();
    let set = Command::new("chrt").args(["--fifo", "--pid", "50", &thread]).status().context("start chrt")?;
    ensure!(set.success(), "chrt gives no real-time priority");
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let socket = socket(AddressFamily::Inet, SockType::Raw, flags, SockProtocol::Icmp)?;
    // Answers of a long stall come at once.
    setsockopt(&socket, sockopt::RcvBufForce, &(8 << 20))?;
    let to = SockaddrIn::from(std::net::SocketAddrV4::new(plan::SERVER.v4, 0));
    let count = u32::try_from(time.as_millis() / INTERVAL.as_millis())?;
    let mut waited: Vec<Option<f64>> = vec![None; count as usize];
    let (begin, mut next, mut answered) = (Instant::now(), 0, 0);
    while answered < count && begin.elapsed() < time + PATIENCE {
        // One at a time, so that a burst after a stall finds room in every queue.
        if next < count && begin.elapsed() >= INTERVAL * next {
            sendto(socket.as_raw_fd(), &echo_request(id, next), &to, MsgFlags::empty()).context("send a ping")?;
            next += 1;
        }
        let mut bytes = [0; 128];
        while let Some(number) = received(socket.as_raw_fd(), &mut bytes, id)? {
            let due = INTERVAL * number;
            if let Some(waited) = waited.get_mut(number as usize).filter(|waited| waited.is_none()) {
                *waited = Some((begin.elapsed().saturating_sub(due)).as_secs_f64() * 1e3);
                answered += 1;
            }
        }
        let due = (INTERVAL * next).saturating_sub(begin.elapsed());
        thread::sleep(if answered < next || next == count { POLL_INTERVAL.min(due) } else { due });
    }
    let waited: Vec<f64> = waited.into_iter().flatten().collect();
    Ok(Pings { lost: count as usize - waited.len(), waited })
}

/// The number is in the data: sequence numbers have 16 bits.
fn echo_request(id: u16, number: u32) -> Vec<u8> {
    let ([a, b], [c, d, e, f]) = (id.to_be_bytes(), number.to_be_bytes());
    let unspecified = IpAddr::from(Ipv4Addr::UNSPECIFIED);
    packet::summed(unspecified, unspecified, packet::ICMP, vec![8, 0, 0, 0, a, b, e, f, c, d, e, f], 2)
}

/// The number of the next answer to one of our pings; `None` when nothing waits.
fn received(socket: i32, bytes: &mut [u8], id: u16) -> Result<Option<u32>> {
    loop {
        match recv(socket, bytes, MsgFlags::empty()) {
            Ok(length) => {
                if let Some(number) = answer(&bytes[..length], id) {
                    return Ok(Some(number));
                }
            }
            Err(nix::errno::Errno::EAGAIN) => return Ok(None),
            Err(errno) => return Err(errno).context("receive a ping"),
        }
    }
}

/// The number in an echo reply with this identifier, by the packet from its IP header on.
fn answer(packet: &[u8], id: u16) -> Option<u32> {
    let icmp = packet.get(usize::from(packet.first()? & 0xf) * 4..)?;
    let [0, 0, _, _, a, b, _, _, number @ ..] = icmp else { return None };
    (u16::from_be_bytes([*a, *b]) == id).then_some(())?;
    Some(u32::from_be_bytes(number.get(..4)?.try_into().ok()?))
}

/// A flood of first SYNs, written to the switch's end of the node's uplink.
struct Syns {
    stop: Arc<AtomicBool>,
    thread: thread::JoinHandle<Result<u32>>,
}

impl Syns {
    fn start(cluster: &TestCluster, core: usize) -> Result<Self> {
        let node = cluster.lab.nodes().first().context("a lab without nodes")?;
        cluster.lab.ext().exec("ip", &["route", "add", "blackhole", SPOOFED])?;
        // A full table of the host's connection tracking is not what is measured.
        let timeouts = ["syn_sent", "syn_recv"].map(|state| format!("netfilter/nf_conntrack_tcp_timeout_{state}"));
        node.host.sysctl(&timeouts.map(|path| (path, "10".to_owned())))?;
        let (to, from) = (link_address_of(&node.host, UPLINK)?, link_address_of(cluster.lab.ext(), EXT_LAN)?);
        let (device, address) = (node.name(), node.number.address().v4);
        let stop = Arc::new(AtomicBool::new(false));
        let is_over = Arc::clone(&stop);
        let thread = cluster.lab.lan().spawn(move || {
            pin(core)?;
            let socket = socket(AddressFamily::Packet, SockType::Raw, SockFlag::SOCK_CLOEXEC, None)?;
            bind(socket.as_raw_fd(), &link_address(&device)?)?;
            let begin = Instant::now();
            let mut sent = 0;
            while !is_over.load(Ordering::Relaxed) {
                let due = begin.elapsed().as_secs_f64() * f64::from(SYNS);
                while f64::from(sent) < due {
                    let syn = [&to, &from, syn(address, sent)?.as_slice()].concat();
                    send(socket.as_raw_fd(), &syn, MsgFlags::empty()).context("send a SYN")?;
                    sent += 1;
                }
                thread::sleep(INTERVAL);
            }
            Ok(sent)
        })?;
        Ok(Self { stop, thread })
    }

    /// How many were sent.
    fn finish(self) -> Result<u32> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().ok().context("the thread that floods has panicked")?
    }
}

/// The n-th, from an address and a port that no other has together.
fn syn(to: Ipv4Addr, number: u32) -> Result<Vec<u8>> {
    let from = Ipv4Addr::from_bits(FIRST_SPOOFED.to_bits() + number % (1 << 17));
    let port = u16::try_from(1_024 + (number >> 17) % 60_000)?;
    packet::syn(SocketAddr::new(from.into(), port), SocketAddr::new(to.into(), plan::NODE_PORT), number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_has_the_number_of_its_ping() {
        let mut icmp = echo_request(7, 100_000);
        icmp[0] = 0;
        let reply = [&[0x45; 1][..], &[0; 19], &icmp].concat();
        assert_eq!(answer(&reply, 7), Some(100_000));
        assert_eq!(answer(&reply, 8), None, "of another thread");
        assert_eq!(answer(&[&[0x45; 1][..], &[0; 19], &echo_request(7, 1)].concat(), 7), None, "a request");
    }

    #[test]
    fn a_map_at_rest_is_not_under_pressure_and_one_under_pressure_is() {
        for FillLevels { room, at_rest, pressed } in [FillLevels::new(true), FillLevels::new(false)] {
            assert!(at_rest < room - room / 8 && pressed > room - room / 8 && pressed < room);
        }
    }
}
