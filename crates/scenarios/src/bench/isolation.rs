//! What a pod that opens thousands of flows a second leaves to another pod of its node and of its egress IP.
//!
//! A resolver sends each query from another port, 5,000 a second, to servers outside that answer. Another pod opens 100 TCP
//! connections a second, each on a thread of its own, so that one that waits delays no other. The same without the resolver
//! comes first. Quotas give the resolver a part of the maps, so its later flows are dropped, and each drop has a reason.

use std::io::{Read, Write};
use std::net::UdpSocket;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use egress_lab::topology::POD_INTERFACE;
use egress_lab::topology::netns::link_address;
use egress_lab::traffic::packet;
use egress_toolchain::Built;
use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockType, bind, send, socket};

use super::bench_cluster::{NAMESPACE, link_address_of, with_pods_of_paths};
use super::cpu::{Cores, pin};
use super::drops;
use super::flood::counted;
use super::plan::{PacketPath, Work};
use super::requests::{self, CHURN_PORT};
use super::samples::{Results, percentile};
use crate::prelude::*;

/// Queries and connections of a second.
const QUERIES: u32 = 5_000;
const CONNECTIONS: u32 = 100;
const DNS: u16 = 53;
/// Addresses of servers; each has all ports of the resolver.
const SERVERS: u8 = 16;
const FIRST_SERVER: u8 = 128;
const FIRST_PORT: u32 = 1_024;
const PORTS: u32 = 64_000;
/// An answer that takes longer is none. The second retry of a SYN leaves after three seconds.
const PATIENCE: Duration = Duration::from_secs(3);
/// How long to measure, but for `--seconds`.
pub(super) const USUAL: Duration = Duration::from_secs(120);
/// The longest time without the resolver.
const ALONE: Duration = Duration::from_secs(30);

/// Each path has an egress IP of its own: the node of the pods is the first one's gateway, the other node the second one's.
const EGRESS_IPS_OF_PATHS: [(PacketPath, &str, usize); 2] =
    [(PacketPath::Local, "172.18.0.150", 1), (PacketPath::Remote, "172.18.0.151", 2)];

fn pod_name(role: &str, path: PacketPath) -> String {
    format!("{role}-{}", path.name())
}

pub(super) fn measure(
    built: &Built,
    prefix: &str,
    cores: Cores,
    time: Duration,
    say: &dyn Fn(&str),
    results: &mut Results,
) -> Result<()> {
    let names = |path| ["resolver", "neighbour"].map(|role| pod_name(role, path)).to_vec();
    let cluster = with_pods_of_paths(built, prefix, &names, &[])?;
    for (path, address, number) in EGRESS_IPS_OF_PATHS {
        cluster.assignable(number, true)?;
        let (namespaces, pods) = (labels("house", NAMESPACE), labels("path", path.name()));
        cluster.assign(&egress_ip(path.name(), &[address], &namespaces, &pods))?;
        for role in ["resolver", "neighbour"] {
            cluster.is_seen_as(&pod_name(role, path), Some(address), None)?;
        }
    }
    requests::serve(cluster.lab.outside(), cores)?;
    answer_queries(&cluster.lab, cores.first)?;
    for (path, _, _) in EGRESS_IPS_OF_PATHS {
        measure_path(&cluster, path, cores, time, say, results)?;
    }
    cluster.tear_down()
}

fn measure_path(
    cluster: &TestCluster,
    path: PacketPath,
    cores: Cores,
    time: Duration,
    say: &dyn Fn(&str),
    results: &mut Results,
) -> Result<()> {
    let neighbour = &cluster.pod(&pod_name("neighbour", path))?.netns;
    let resolver = cluster.pod(&pod_name("resolver", path))?;
    let core = cores.second.unwrap_or(cores.first);
    say(&format!("{}, {}: without the resolver", Work::Isolation.name(), path.name()));
    add(results, path, "alone", None, &connect_for(neighbour, core, time.min(ALONE))?);

    say(&format!("{}, {}: beside the resolver", Work::Isolation.name(), path.name()));
    // Nothing but the two pods sends anything.
    let before = drops::dropped(cluster.lab.nodes())?;
    let queries = Queries::start(cluster, resolver, cores.first)?;
    let connected = connect_for(neighbour, core, time)?;
    let sent = queries.finish()?;
    add(results, path, "beside the resolver", Some("alone"), &connected);
    let answered = counted(&resolver.netns, POD_INTERFACE)?;
    let mut row = |what: &str, unit, number: u64| {
        #[expect(clippy::cast_precision_loss, reason = "counts of packets are far below 2^52")]
        results.add(&format!("isolation, resolver: {what}"), path.name(), "ours", unit, number as f64);
    };
    row("flows opened", "flows", sent);
    row("answered", "flows", answered);
    for (reason, packets) in drops::since(&before, &drops::dropped(cluster.lab.nodes())?) {
        row(&format!("dropped, {reason}"), "packets", packets);
    }
    Ok(())
}

/// Connections of one time.
struct Connected {
    /// Milliseconds until each was connected.
    times: Vec<f64>,
    failed: usize,
}

fn add(results: &mut Results, path: PacketPath, when: &str, than: Option<&str>, connected: &Connected) {
    let name = |what: &str, when: &str| format!("isolation, connections {when}: {what}");
    let mut row = |what: &str, unit, value: f64| {
        results.add(&name(what, when), path.name(), "ours", unit, value);
        if let Some(than) = than {
            results.compare(&name(what, when), &name(what, than));
        }
    };
    #[expect(clippy::cast_precision_loss, reason = "counts of connections are far below 2^52")]
    let failed = connected.failed as f64;
    row("failed", "connections", failed);
    row("median", "ms", percentile(&connected.times, 50.0));
    row("99 %", "ms", percentile(&connected.times, 99.0));
    row("longest", "ms", percentile(&connected.times, 100.0));
}

/// Opens connections at a steady pace, whatever becomes of the ones before.
fn connect_for(pod: &Netns, core: usize, time: Duration) -> Result<Connected> {
    pod.run(|| {
        pin(core)?;
        let begin = Instant::now();
        let mut threads = Vec::new();
        for number in 0.. {
            let due = Duration::from_secs(1) / CONNECTIONS * number;
            if due >= time {
                break;
            }
            thread::sleep(due.saturating_sub(begin.elapsed()));
            // In the namespace, and on the core, of this thread.
            threads.push(thread::spawn(connect));
        }
        let mut connected = Connected { times: Vec::new(), failed: 0 };
        for thread in threads {
            match thread.join().ok().context("a thread that connects has panicked")? {
                Ok(took) => connected.times.push(took.as_secs_f64() * 1e3),
                Err(_) => connected.failed += 1,
            }
        }
        Ok(connected)
    })
}

/// One connection: opened, answered, closed. How long it took to open.
fn connect() -> std::io::Result<Duration> {
    let begin = Instant::now();
    let to = SocketAddr::new(plan::SERVER.v4.into(), CHURN_PORT);
    let mut stream = std::net::TcpStream::connect_timeout(&to, PATIENCE)?;
    let took = begin.elapsed();
    stream.set_read_timeout(Some(PATIENCE))?;
    let mut byte = [7];
    stream.write_all(&byte)?;
    stream.read_exact(&mut byte)?;
    Ok(took)
}

/// The resolver at work.
struct Queries {
    stop: Arc<AtomicBool>,
    thread: thread::JoinHandle<Result<u64>>,
}

impl Queries {
    /// Packets are written by hand, since no socket of the pod waits for an answer; a rule of the pod counts those.
    fn start(cluster: &TestCluster, pod: &LabPod, core: usize) -> Result<Self> {
        let rules = format!(
            "table netdev bench {{
  chain {POD_INTERFACE} {{
    type filter hook ingress device \"{POD_INTERFACE}\" priority 0; policy accept;
    udp sport {DNS} counter drop
  }}
}}
"
        );
        pod.netns.feed("nft", &["-f", "-"], &rules)?;
        let router = link_address_of(&cluster.lab.node(pod.node).router, "br0")?;
        let own = link_address_of(&pod.netns, POD_INTERFACE)?;
        let (stop, address) = (Arc::new(AtomicBool::new(false)), IpAddr::from(pod.addresses.v4));
        let is_over = Arc::clone(&stop);
        let thread = pod.netns.spawn(move || {
            pin(core)?;
            let socket = socket(AddressFamily::Packet, SockType::Raw, SockFlag::SOCK_CLOEXEC, None)?;
            bind(socket.as_raw_fd(), &link_address(POD_INTERFACE)?)?;
            let begin = Instant::now();
            let mut sent = 0;
            while !is_over.load(Ordering::Relaxed) {
                let due = begin.elapsed().as_secs_f64() * f64::from(QUERIES);
                while f64::from(sent) < due {
                    let query = [&router, &own, query(address, sent)?.as_slice()].concat();
                    send(socket.as_raw_fd(), &query, MsgFlags::empty()).context("send a query")?;
                    sent += 1;
                }
                thread::sleep(Duration::from_millis(1));
            }
            Ok(u64::from(sent))
        })?;
        Ok(Self { stop, thread })
    }

    /// How many were sent.
    fn finish(self) -> Result<u64> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().ok().context("the resolver's thread has panicked")?
    }
}

/// The n-th query, from a port and to a server that no other has together.
fn query(pod: IpAddr, number: u32) -> Result<Vec<u8>> {
    let (from, to) = ends(pod, number);
    let datagram = packet::udp(from, to, &[0; 32])?;
    packet::ip(from.ip(), to.ip(), packet::UDP, &datagram)
}

fn ends(pod: IpAddr, number: u32) -> (SocketAddr, SocketAddr) {
    let servers = u32::from(SERVERS);
    let port = FIRST_PORT + number / servers % PORTS;
    let from = SocketAddr::new(pod, u16::try_from(port).unwrap_or(u16::MAX));
    (from, SocketAddr::new(server(u8::try_from(number % servers).unwrap_or(0)), DNS))
}

fn server(number: u8) -> IpAddr {
    let [a, b, c, _] = plan::SERVER.v4.octets();
    Ipv4Addr::new(a, b, c, FIRST_SERVER + number).into()
}

/// Servers outside. Their threads wait and end with the process.
fn answer_queries(lab: &Lab, core: usize) -> Result<()> {
    for address in (0..SERVERS).map(server) {
        lab.outside().exec("ip", &["addr", "add", &format!("{address}/32"), "dev", POD_INTERFACE])?;
        let socket = lab.outside().run(|| Ok(UdpSocket::bind((address, DNS))?))?;
        thread::spawn(move || {
            pin(core)?;
            let mut bytes = [0; 512];
            loop {
                let (length, from) = socket.recv_from(&mut bytes)?;
                socket.send_to(&bytes[..length], from)?;
            }
            #[expect(unreachable_code, reason = "names the type of the closure's errors")]
            Ok::<(), anyhow::Error>(())
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_minutes_of_queries_have_as_many_flows() {
        let pod = IpAddr::from([10, 244, 1, 10]);
        let all: BTreeSet<_> = (0..120 * QUERIES).map(|number| ends(pod, number)).collect();
        assert_eq!(all.len(), 600_000);
    }
}
