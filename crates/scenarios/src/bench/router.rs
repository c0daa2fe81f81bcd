//! The egress router, in namespaces of its own: the rate at which packets pass a router pod, and the time of ADD and DEL.
//!
//! ```text
//! client eth0 ---- eth0 pod net1 (macvlan) -- eno1 node ---- lan0 server
//! ```
//!
//! | peer | in the pod |
//! |---|---|
//! | `plain` | forwarding alone; for ADD and DEL the distribution's plugin `macvlan`, which adds no rules |
//! | `netfilter` | the two rules of the published plugin: DNAT where packets come in, SNAT where they leave |
//! | `ours` | what `egress-router` sets up |

use std::io::ErrorKind;
use std::net::UdpSocket;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use egress_toolchain::Built;

use super::Effort;
use super::bench_cluster::link_address_of;
use super::cpu::Cores;
use super::flood::{self, Ends, Flood};
use super::plan::{Peer, Work};
use super::samples::Results;
use crate::prelude::*;
use egress_lab::cni_runtime::attach;

const PEERS: [Peer; 3] = [Peer::Plain, Peer::Netfilter, Peer::Ours];
const NAMESPACES: [&str; 4] = ["client", "pod", "node", "server"];
const CLIENT: &str = "10.128.6.48";
const POD: &str = "10.128.6.47";
const ROUTER: &str = "192.168.12.99";
const GATEWAY: &str = "192.168.12.1";
const SERVER: &str = "203.0.113.26";
/// What is redirected, and where it goes.
const REDIRECTED: u16 = 5_000;
const SERVED: u16 = 80;
const FIRST_PORT: u16 = 20_000;
/// Numbers of connections.
const FLOWS: [u16; 2] = [64, 4_096];
/// Of one burst to the server.
const AT_ONCE: usize = 64;
const ATTEMPTS: usize = 5;
const PATIENCE: Duration = Duration::from_secs(1);
/// How often ADD and DEL are called in a round.
const CALLS: usize = 8;

pub(super) fn measure(
    built: &Built,
    prefix: &str,
    cores: Cores,
    effort: &Effort,
    say: &dyn Fn(&str),
    results: &mut Results,
) -> Result<()> {
    let worlds: Vec<(Peer, RouterBench)> = PEERS
        .into_iter()
        .map(|peer| Ok((peer, RouterBench::forwarding(built, prefix, peer)?)))
        .collect::<Result<_>>()?;
    for (peer, world) in &worlds {
        say(&format!("{}, {}: {}", Work::EgressRouter.name(), peer.name(), world.description()?));
    }
    for round in 0..effort.rounds {
        say(&format!("round {} of {}: {}", round + 1, effort.rounds, Work::EgressRouter.name()));
        for flows in FLOWS {
            let mut order: Vec<&(Peer, RouterBench)> = worlds.iter().collect();
            order.rotate_left(round % PEERS.len());
            for (peer, world) in order {
                world.rates(*peer, flows, cores.first, effort.cell, results)?;
            }
        }
        setups(built, prefix, round, results)?;
    }
    Ok(())
}

/// ADD and DEL, in a new namespace each time, in turn with the plugin `macvlan`.
fn setups(built: &Built, prefix: &str, round: usize, results: &mut Results) -> Result<()> {
    let router = built.router.clone();
    let macvlan = ["/usr/lib/cni", "/opt/cni/bin"].map(|folder| Path::new(folder).join("macvlan"));
    let macvlan = macvlan.into_iter().find(|path| path.exists());
    let mut plugins = vec![(Peer::Ours, router, router_config())];
    plugins.extend(macvlan.map(|path| (Peer::Plain, path, macvlan_config())));
    let count = plugins.len();
    plugins.rotate_left(round % count);
    let mut pair = [Vec::new(), Vec::new()];
    for call in 0..CALLS {
        for (peer, plugin, config) in &plugins {
            let world = RouterBench::new(prefix, &format!("{}{call}", peer.name()))?;
            for (command, times) in ["ADD", "DEL"].into_iter().zip(&mut pair) {
                let begin = Instant::now();
                world.call(plugin, command, config)?;
                times.push((*peer, begin.elapsed()));
            }
        }
    }
    for (command, times) in ["ADD", "DEL"].into_iter().zip(pair) {
        let work = format!("{}, {command}", Work::EgressRouter.name());
        for (peer, time) in times {
            results.add(&work, "-", peer.name(), "ms", time.as_secs_f64() * 1_000.0);
        }
    }
    Ok(())
}

fn router_config() -> Value {
    json!({
        "cniVersion": "1.0.0", "name": "bench", "type": "egress-router", "clusterNetworks": ["10.128.0.0/14"],
        "ip": {
            "addresses": [format!("{ROUTER}/24")], "gateway": GATEWAY,
            "redirect": [format!("{REDIRECTED} udp {SERVER} {SERVED}")],
        },
    })
}

fn macvlan_config() -> Value {
    let routes = json!([{"dst": "0.0.0.0/0"}]);
    let addresses = json!([{"address": format!("{ROUTER}/24"), "gateway": GATEWAY}]);
    json!({
        "cniVersion": "1.0.0", "name": "bench", "type": "macvlan", "master": "eno1", "mode": "bridge",
        "ipam": {"type": "static", "addresses": addresses, "routes": routes},
    })
}

/// The four namespaces, which go with this.
struct RouterBench {
    prefix: String,
    tag: String,
}

impl RouterBench {
    fn new(prefix: &str, tag: &str) -> Result<Self> {
        let world = Self { prefix: prefix.to_owned(), tag: tag.to_owned() };
        for name in NAMESPACES {
            let netns = world.netns(name);
            let ip = |verb: &str| Command::new("ip").args(["netns", verb, netns.name()]).output();
            // Left by a run that was killed.
            let _none = ip("del")?;
            let made = ip("add")?;
            ensure!(made.status.success(), "{}: {}", netns.name(), String::from_utf8_lossy(&made.stderr));
            world.ip(name, "link set lo up")?;
        }
        let [client, pod, node, server] = NAMESPACES;
        let far = |name| world.netns(name).name().to_owned();
        world.ip(client, &format!("link add eth0 type veth peer name eth0 netns {}", far(pod)))?;
        world.ip(node, &format!("link add eno1 type veth peer name lan0 netns {}", far(server)))?;
        for (name, device, net) in [
            (client, "eth0", format!("{CLIENT}/24")),
            (pod, "eth0", format!("{POD}/24")),
            (node, "eno1", "192.168.12.2/24".to_owned()),
            (server, "lan0", format!("{GATEWAY}/24")),
            (server, "lo", format!("{SERVER}/32")),
        ] {
            world.ip(name, &format!("addr add {net} dev {device}"))?;
            world.ip(name, &format!("link set {device} up"))?;
        }
        world.ip(node, &format!("route add default via {GATEWAY}"))?;
        world.ip(pod, &format!("route add default via {CLIENT}"))?;
        Ok(world)
    }

    /// With a router pod.
    fn forwarding(built: &Built, prefix: &str, peer: Peer) -> Result<Self> {
        let world = Self::new(prefix, peer.name())?;
        if peer == Peer::Ours {
            world.call(&built.router, "ADD", &router_config())?;
            return Ok(world);
        }
        let pod = world.netns("pod");
        world.ip("node", &format!("link add net1 link eno1 netns {} type macvlan mode bridge", pod.name()))?;
        world.ip("pod", &format!("addr add {ROUTER}/24 dev net1"))?;
        world.ip("pod", "link set net1 up")?;
        world.ip("pod", &format!("route replace default via {GATEWAY}"))?;
        world.ip("server", &format!("route add {CLIENT} via {ROUTER}"))?;
        pod.sysctl(&[("ipv4/ip_forward".to_owned(), "1".to_owned())])?;
        if peer == Peer::Netfilter {
            let rules = format!(
                "table ip egress_cni {{
  chain prerouting {{
    type nat hook prerouting priority dstnat;
    iif eth0 udp dport {REDIRECTED} dnat to {SERVER}:{SERVED}
  }}
  chain postrouting {{
    type nat hook postrouting priority srcnat;
    oif net1 snat to {ROUTER}
  }}
}}
"
            );
            pod.feed("nft", &["-f", "-"], &rules)?;
        }
        Ok(world)
    }

    /// Whether established connections pass the rules once.
    fn description(&self) -> Result<String> {
        let rules = self.netns("pod").exec("nft", &["list", "ruleset"])?;
        let chains = rules.matches("type ").count();
        let table = if rules.contains("flowtable") { ", with a flow table" } else { "" };
        Ok(format!("{chains} chains and sets{table}"))
    }

    fn netns(&self, name: &str) -> Netns {
        Netns::new(&self.prefix, &format!("{}-{name}", self.tag))
    }

    fn ip(&self, name: &str, line: &str) -> Result<()> {
        let arguments: Vec<&str> = line.split_whitespace().collect();
        self.netns(name).exec("ip", &arguments).map(drop)
    }

    fn call(&self, plugin: &Path, command: &str, config: &Value) -> Result<()> {
        attach(&self.netns("node"), &self.netns("pod"), plugin, command, config).map(drop)
    }

    /// Packets per second to the server and back, of connections that are established.
    fn rates(&self, peer: Peer, count: u16, core: usize, time: Duration, results: &mut Results) -> Result<()> {
        let address = |text: &str, port: u16| -> Result<SocketAddr> { Ok(SocketAddr::new(text.parse()?, port)) };
        let (target, source) = match peer {
            Peer::Plain => (address(SERVER, SERVED)?, CLIENT),
            _ => (address(POD, REDIRECTED)?, ROUTER),
        };
        let mut flows = Vec::new();
        let mut answers = Vec::new();
        for port in FIRST_PORT..FIRST_PORT + count {
            flows.push(Ends { from: address(CLIENT, port)?, to: target });
            answers.push(Ends { from: address(SERVER, SERVED)?, to: address(source, port)? });
        }
        let [client, pod, server] = ["client", "pod", "server"].map(|name| self.netns(name));
        let frames = |(to, into): (&Netns, &str), (from, device): (&Netns, &str), flows: &[Ends]| {
            flood::frames(link_address_of(to, into)?, link_address_of(from, device)?, flows)
        };
        let out = Flood {
            into: &client,
            device: "eth0".to_owned(),
            counted_in: &server,
            exit: "lan0".to_owned(),
            frames: frames((&pod, "eth0"), (&client, "eth0"), &flows)?,
        };
        let back = Flood {
            into: &server,
            device: "lan0".to_owned(),
            counted_in: &client,
            exit: "eth0".to_owned(),
            frames: frames((&pod, "net1"), (&server, "lan0"), &answers)?,
        };
        sink(&client, "eth0", &format!("udp sport {}", target.port()))?;
        self.establish(&out, core)?;
        sink(&server, "lan0", &format!("udp dport {SERVED}"))?;
        for (path, flood) in [("out", &out), ("back", &back)] {
            let work = format!("{}, {count} connections", Work::EgressRouter.name());
            results.add(&work, path, peer.name(), "packets/s", flood.rate(&[core], time)?);
        }
        Ok(())
    }

    /// A packet of each connection is answered. A few at once, for which the server's socket has room.
    fn establish(&self, out: &Flood<'_>, core: usize) -> Result<()> {
        let (client, server) = (out.into, out.counted_in);
        let _none = server.output("nft", &["delete table netdev bench"])?;
        let echo = UdpEcho::start(server)?;
        for frames in out.frames.chunks(AT_ONCE) {
            let some = Flood { frames: frames.to_vec(), device: out.device.clone(), exit: out.exit.clone(), ..*out };
            let mut attempts = 0..ATTEMPTS;
            loop {
                let missing = missing(&some, client, core)?;
                if missing == 0 {
                    break;
                }
                if attempts.next().is_none() {
                    echo.stop()?;
                    bail!("{}: of {} packets {missing} are not answered", self.tag, frames.len());
                }
            }
        }
        echo.stop()
    }
}

/// How many answers are missing to as many packets as there are connections. On a busy machine some get lost.
fn missing(some: &Flood<'_>, client: &Netns, core: usize) -> Result<u64> {
    let all = flood::counted(client, "eth0")? + some.frames.len() as u64;
    some.open(core)?;
    let begin = Instant::now();
    loop {
        let missing = all.saturating_sub(flood::counted(client, "eth0")?);
        if missing == 0 || begin.elapsed() >= PATIENCE {
            return Ok(missing);
        }
        thread::sleep(Duration::from_millis(1));
    }
}

impl Drop for RouterBench {
    fn drop(&mut self) {
        for name in NAMESPACES {
            let _gone = Command::new("ip").args(["netns", "del", self.netns(name).name()]).output();
        }
    }
}

/// Counts and drops packets as they come in by a device.
fn sink(netns: &Netns, device: &str, selected: &str) -> Result<()> {
    let rules = format!(
        "table netdev bench
delete table netdev bench
table netdev bench {{
  chain {device} {{
    type filter hook ingress device {device} priority 0;
    {selected} counter drop
  }}
}}
"
    );
    netns.feed("nft", &["-f", "-"], &rules)
}

/// A server that sends back what it gets.
struct UdpEcho {
    stop: Arc<AtomicBool>,
    thread: thread::JoinHandle<Result<()>>,
}

impl UdpEcho {
    fn start(server: &Netns) -> Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let is_over = Arc::clone(&stop);
        let socket = server.run(|| Ok(UdpSocket::bind((SERVER, SERVED))?))?;
        socket.set_read_timeout(Some(Duration::from_millis(50)))?;
        let thread = thread::spawn(move || {
            let mut bytes = [0; 64];
            while !is_over.load(Ordering::Relaxed) {
                match socket.recv_from(&mut bytes) {
                    Ok((length, from)) => socket.send_to(&bytes[..length], from).map(drop)?,
                    // The time is over, or a program that was started has ended.
                    Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
                    Err(error) => return Err(error.into()),
                }
            }
            Ok(())
        });
        Ok(Self { stop, thread })
    }

    fn stop(self) -> Result<()> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().ok().context("the thread that answers has panicked")?
    }
}
