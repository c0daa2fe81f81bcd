//! Nanoseconds per packet of single programs, and of whole paths: what the programs on the path of one packet take
//! together. Hot means 64 flows over and over, cold 100,000 in an order that no cache follows.
//!
//! Each sample is a pair: the rig with the program, the rig with nothing, right after one another; the difference is the
//! program's. Where the program changes the packet's length, the rig's undoing of that is measured by itself and taken
//! off as well. The verdicts are counted, so that the figures are those of the named path.

use std::net::{IpAddr, Ipv4Addr};
use std::process::{Command, Stdio};
use std::thread;

use anyhow::{Context, Result, anyhow, bail, ensure};
use egress_common::abi::{Config, Family, RIG_FRAME, Rig, Verdict};
use nix::sched::{CloneFlags, unshare};

use super::Effort;
use super::cpu::pin;
use super::prog_addresses::{NODE, OTHER_NODE, ProgAddresses, V4, V6, last_bits};
use super::prog_run::{Bench, BenchHook, DEVICES, MGMT, SECRET, TUNNEL_PORT, UPLINK};
use super::samples::{Results, median};
use egress_lab::traffic::packet;
use egress_toolchain::Paths;

/// A name, a number of flows, and the step from one to the next, which shares no factor with it.
type Heat = (&'static str, u32, u32);
const HEATS: [Heat; 2] = [("hot", 64, 1), ("cold", 100_000, 61_803)];
const PORT: u16 = 1024;
const UPLINK_MAC: [u8; 6] = [2, 0, 0, 0, 1, 2];
const MGMT_MAC: [u8; 6] = [2, 0, 0, 0, 2, 2];

/// One program and the packet that it meets.
struct ProgramCase {
    name: &'static str,
    path: &'static str,
    hook: BenchHook,
    plan: Rig,
    verdict: Verdict,
    /// What the program does to the packet's length.
    growth: Growth,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Growth {
    None,
    Grows,
    Shrinks,
}

/// The cases in the order in which packets of a path meet them: a reply needs its flow.
const PATHS: [(&str, &str, &[&str]); 4] = [
    ("path out", "local", &["from_pod", "to_netdev"]),
    ("path back", "local", &["from_netdev", "to_pod (reply)"]),
    ("path out", "remote", &["from_pod", "to_netdev (overlay)", "from_netdev (overlay)", "to_netdev (gateway)"]),
    (
        "path back",
        "remote",
        &["from_netdev (reply)", "to_netdev (overlay)", "from_netdev (overlay reply)", "to_pod (reply)"],
    ),
];

/// Measures everything on a thread in a namespace of its own.
pub(super) fn measure(
    paths: &Paths,
    core: usize,
    effort: &Effort,
    say: &dyn Fn(&str),
    results: &mut Results,
) -> Result<()> {
    let sizes: &[u32] = if effort.quick { &[1_000] } else { &[1_000, 10_000, 100_000] };
    let v4 = sizes.iter().map(|pods| (V4, *pods, HEATS.as_slice()));
    let others = [V4.with_destinations(), V4.with_limit()].map(|of| (of, 1_000, HEATS.as_slice()));
    let further = [(V4.on_further(), 1_000, HEATS.as_slice()), (V6.on_further(), 1_000, &HEATS[..1])];
    for (of, pods, heats) in v4.chain([(V6, 1_000, &HEATS[..1])]).chain(further).chain(others) {
        let on = match of.interface {
            UPLINK if of.by_destination => ", by destination",
            UPLINK if of.limited => ", with a limit",
            UPLINK => "",
            _ => ", further interface",
        };
        let family = format!("{on}{}", if of.family == Family::V6 { ", IPv6" } else { "" });
        say(&format!("programs with {pods} pods{family}"));
        let (object, rig, rounds, quick) = (paths.object(), paths.rig(), effort.rounds, effort.quick);
        let thread = thread::spawn(move || -> Result<Vec<Sampled>> {
            pin(core)?;
            unshare(CloneFlags::CLONE_NEWNET).context("make a network namespace")?;
            make_devices()?;
            let mut bench = Bench::load(&object, &rig, &of, pods)?;
            sample(&mut bench, &of, pods, heats, rounds, quick)
        });
        let sampled = thread.join().map_err(|_panic| anyhow!("the programs' thread panicked"))??;
        for one in sampled {
            let work = format!("{}{family}, {}, {} pods", one.name, one.heat, thousands(pods));
            for value in one.values {
                results.add(&work, one.path, "ours", "ns", value);
            }
            for hit_rate in one.hit_rates {
                results.add_hit_rate(&work, one.path, "ours", hit_rate);
            }
        }
    }
    Ok(())
}

fn thousands(number: u32) -> String {
    format!("{} k", number / 1000)
}

struct Sampled {
    name: String,
    path: &'static str,
    heat: &'static str,
    values: Vec<f64>,
    hit_rates: Vec<f64>,
}

fn sample(
    bench: &mut Bench,
    of: &ProgAddresses,
    pods: u32,
    heats: &[Heat],
    rounds: usize,
    quick: bool,
) -> Result<Vec<Sampled>> {
    let mut all = Vec::new();
    for (heat, flows, stride) in heats.iter().copied() {
        let runs = if quick { flows.max(1_000) } else { flows.max(50_000) };
        let cases = cases(of, pods, flows, stride);
        let grow = bench.run(&own("grow"), &cases[0].plan, 10_000)?;
        let nothing = bench.run(&own("nothing"), &cases[0].plan, 10_000)?;
        let mut shrinks = Vec::new();
        for _ in 0..9 {
            shrinks.push(bench.shrink()?);
        }
        let shrink = median(&shrinks);
        let restore = |growth| match growth {
            Growth::None => 0.0,
            Growth::Grows => shrink,
            Growth::Shrinks => (grow - nothing - shrink).max(0.0),
        };
        // Makes the flows, and the next hops that they keep.
        for case in &cases {
            check(bench, case, flows)?;
        }
        let mut sampled: Vec<Sampled> = cases
            .iter()
            .map(|case| Sampled {
                name: case.name.to_owned(),
                path: case.path,
                heat,
                values: Vec::new(),
                hit_rates: Vec::new(),
            })
            .collect();
        for _ in 0..rounds.max(5) {
            for (case, into) in cases.iter().zip(&mut sampled) {
                let before = bench.cache_use()?;
                let subject = bench.run(&case.hook, &case.plan, runs)?;
                into.hit_rates.extend((bench.cache_use()? - before).hit_rate());
                let nothing = bench.run(&BenchHook { program: "nothing", ..case.hook }, &case.plan, runs)?;
                into.values.push((subject - nothing - restore(case.growth)).max(0.0));
            }
        }
        all.extend(paths(&sampled, heat));
        all.extend(sampled);
    }
    Ok(all)
}

/// What the programs on a path take together, round by round.
fn paths(sampled: &[Sampled], heat: &'static str) -> Vec<Sampled> {
    let mut sums = Vec::new();
    for (name, path, steps) in PATHS {
        let found = steps.iter().map(|step| {
            let fits = |one: &&Sampled| one.name == *step && (one.path == path || one.path == "both");
            sampled.iter().find(fits).map(|one| one.values.as_slice())
        });
        let Some(found) = found.collect::<Option<Vec<_>>>() else { continue };
        let rounds = found.iter().map(|values| values.len()).min().unwrap_or(0);
        let values = (0..rounds).map(|round| found.iter().map(|values| values[round]).sum()).collect();
        sums.push(Sampled { name: name.to_owned(), path, heat, values, hit_rates: Vec::new() });
    }
    sums
}

/// Every run ends as the case says, from the second time on.
fn check(bench: &mut Bench, case: &ProgramCase, flows: u32) -> Result<()> {
    bench.run(&case.hook, &case.plan, flows)?;
    let before = bench.verdicts()?;
    bench.run(&case.hook, &case.plan, flows)?;
    let after = bench.verdicts()?;
    let moved: Vec<(Verdict, u64)> =
        after.iter().zip(&before).map(|(now, then)| (now.0, now.1 - then.1)).filter(|one| one.1 > 0).collect();
    let expected = [(case.verdict, u64::from(flows))];
    ensure!(moved == expected, "{} ({}): {moved:?}, not {expected:?}", case.name, case.path);
    Ok(())
}

fn make_devices() -> Result<()> {
    for setting in ["ipv4/ip_forward", "ipv6/conf/all/forwarding"] {
        std::fs::write(format!("/proc/sys/net/{setting}"), "1").context("forward packets")?;
    }
    let mut command = Command::new("ip");
    command.args(["-batch", "-"]).stdin(Stdio::piped());
    let mut child = command.spawn().context("start ip")?;
    let mut input = child.stdin.take().context("no input")?;
    std::io::Write::write_all(&mut input, DEVICES.as_bytes())?;
    drop(input);
    if child.wait()?.success() { Ok(()) } else { bail!("ip refused the devices") }
}

fn own(program: &'static str) -> BenchHook {
    BenchHook { program, ifindex: UPLINK, ingress_ifindex: 0 }
}

/// A UDP packet; the rig puts in what differs between flows.
struct BenchPacket {
    from: IpAddr,
    to: IpAddr,
    ports: (u16, u16),
}

const ETH: usize = 14;
const OUTER: usize = 50;

impl BenchPacket {
    fn bytes(&self, length: usize) -> Vec<u8> {
        let after_ip = length - ETH - if self.from.is_ipv4() { 20 } else { 40 };
        let ports = [self.ports.0, self.ports.1, u16::try_from(after_ip).unwrap_or(0), 0x1234];
        let mut datagram = ports.map(u16::to_be_bytes).concat();
        datagram.resize(after_ip, 0);
        let packet = packet::ip(self.from, self.to, packet::UDP, &datagram).unwrap_or_default();
        [&[2, 0, 0, 0, 1, 2, 2, 0, 0, 0, 9, 8], packet.as_slice()].concat()
    }

    fn frame(&self) -> [u8; RIG_FRAME] {
        self.bytes(RIG_FRAME).try_into().unwrap_or([0; RIG_FRAME])
    }
}

/// An overlay packet from one node to the other with a packet inside.
fn overlay(from: Ipv4Addr, to: Ipv4Addr, egress_id: u32, source: [u8; 6], inner: &BenchPacket) -> [u8; RIG_FRAME] {
    let mut bytes = BenchPacket { from: from.into(), to: to.into(), ports: (50_000, TUNNEL_PORT) }.bytes(RIG_FRAME);
    // No outer UDP checksum.
    bytes[40..42].copy_from_slice(&[0, 0]);
    bytes[42..46].copy_from_slice(&[8, 0, 0, 0]);
    bytes[46..50].copy_from_slice(&(egress_id << 8).to_be_bytes());
    let inner = inner.bytes(RIG_FRAME - OUTER);
    bytes[OUTER..].copy_from_slice(&inner);
    bytes[OUTER..OUTER + 6].copy_from_slice(&[0x02, 0xe6, 0x7e, 0x55, 0x00, 0x01]);
    bytes[OUTER + 6..OUTER + 12].copy_from_slice(&source);
    bytes.try_into().unwrap_or([0; RIG_FRAME])
}

pub(super) fn any_frame() -> [u8; RIG_FRAME] {
    BenchPacket { from: V4.node, to: V4.world, ports: (PORT, 80) }.frame()
}

/// Where a flow's port and addresses lie.
#[derive(Clone, Copy)]
enum FlowDirection {
    /// Pod to world: source port, source address, destination address.
    Out,
    /// World to egress IP: destination port; the source is the world's.
    Back,
    /// World to pod: likewise, and the destination is the pod.
    BackToPod,
    /// Nothing differs.
    Fixed,
}

/// How many packets of which flows.
#[derive(Clone, Copy)]
struct FlowCounts {
    pods: u32,
    flows: u32,
    stride: u32,
}

fn plan(
    of: &ProgAddresses,
    frame: [u8; RIG_FRAME],
    side: FlowDirection,
    at: u32,
    first_source: IpAddr,
    counts: FlowCounts,
) -> Rig {
    // Of the ends of both addresses, and of both ports.
    let (source, destination, sport, dport) = match of.family {
        Family::V4 => (at + 26, at + 30, at + 34, at + 36),
        Family::V6 => (at + 34, at + 50, at + 54, at + 56),
    };
    let (port_at, source_at, destination_at) = match side {
        FlowDirection::Out => (sport, source, destination),
        FlowDirection::Back => (dport, 0, source),
        FlowDirection::BackToPod => (dport, destination, source),
        FlowDirection::Fixed => (0, 0, 0),
    };
    let FlowCounts { pods, flows, stride } = counts;
    Rig {
        subject: 0,
        flows,
        stride: stride % flows,
        next: 0,
        sources: (pods / 2).min(flows),
        port_at,
        source_at,
        destination_at,
        first_port: PORT.into(),
        first_source: last_bits(first_source),
        first_destination: last_bits(of.world),
        mark: 0,
        priority: 0,
        frame,
    }
}

fn cases(of: &ProgAddresses, pods: u32, flows: u32, stride: u32) -> Vec<ProgramCase> {
    let hook = |program, ifindex, ingress_ifindex| BenchHook { program, ifindex, ingress_ifindex };
    let from_pod = hook("from_pod", MGMT, MGMT);
    let to_pod = hook("to_pod", MGMT, UPLINK);
    // The interface of the egress IPs, and the one that the overlay uses.
    let from_netdev = hook("from_netdev", of.interface, of.interface);
    let to_netdev = hook("to_netdev", of.interface, MGMT);
    let from_uplink = hook("from_netdev", UPLINK, UPLINK);
    let to_uplink = hook("to_netdev", UPLINK, MGMT);
    let inside = u32::try_from(OUTER).unwrap_or(0);
    let plan = |frame, side, at, first| plan(of, frame, side, at, first, FlowCounts { pods, flows, stride });
    let out = |from| BenchPacket { from, to: of.world, ports: (PORT, 80) };
    let back = |to| BenchPacket { from: of.world, to, ports: (80, PORT) };
    let case = |name, path, hook: BenchHook, mut plan: Rig, verdict, growth| {
        // For this host, by whichever device it comes.
        plan.frame[..6].copy_from_slice(if hook.ifindex == MGMT { &MGMT_MAC } else { &UPLINK_MAC });
        ProgramCase { name, path, hook, plan, verdict, growth }
    };
    let from_other = |id, inner: &BenchPacket| overlay(OTHER_NODE, NODE, id, [2, 9, 9, 9, 9, 9], inner);
    let own_overlay = overlay(NODE, OTHER_NODE, of.away.0, SECRET, &out(of.remote_pods));
    let leaving = |from| plan(out(from).frame(), FlowDirection::Out, 0, from);
    // What a program has redirected there: the sign of the configuration of `rig`.
    let redirected = |plan| Rig { priority: Config::EMPTY.redirected_priority(), ..plan };
    let translated = |address| redirected(Rig { source_at: 0, ..leaving(address) });
    let to_local_pod = plan(back(of.local_pods).frame(), FlowDirection::BackToPod, 0, of.local_pods);
    let plain = Growth::None;
    vec![
        case("from_pod", "local", from_pod, leaving(of.local_pods), Verdict::SnatHere, plain),
        case("to_netdev", "local", to_netdev, translated(of.local.1), Verdict::NotOurs, plain),
        case(
            "from_netdev",
            "local",
            from_netdev,
            plan(back(of.local.1).frame(), FlowDirection::Back, 0, of.local.1),
            Verdict::ReplyHere,
            plain,
        ),
        case("to_pod (reply)", "both", to_pod, redirected(to_local_pod), Verdict::NotOurs, plain),
        // From outside to a pod's own address, by the stack.
        case("to_pod", "both", to_pod, to_local_pod, Verdict::NotOurs, plain),
        case("from_pod", "remote", from_pod, leaving(of.remote_pods), Verdict::ToGateway, Growth::Grows),
        case(
            "to_netdev (overlay)",
            "remote",
            to_uplink,
            redirected(plan(own_overlay, FlowDirection::Out, inside, of.remote_pods)),
            Verdict::NotOurs,
            plain,
        ),
        case(
            "from_netdev (overlay)",
            "remote",
            from_uplink,
            plan(from_other(of.foreign.0, &out(of.foreign_pods)), FlowDirection::Out, inside, of.foreign_pods),
            Verdict::SnatForNode,
            Growth::Shrinks,
        ),
        case("to_netdev (gateway)", "remote", to_netdev, translated(of.foreign.1), Verdict::NotOurs, plain),
        case(
            "from_netdev (reply)",
            "remote",
            from_netdev,
            plan(back(of.foreign.1).frame(), FlowDirection::Back, 0, of.foreign.1),
            Verdict::ReplyToNode,
            Growth::Grows,
        ),
        case(
            "from_netdev (overlay reply)",
            "remote",
            from_uplink,
            plan(from_other(of.away.0, &back(of.remote_pods)), FlowDirection::BackToPod, inside, of.remote_pods),
            Verdict::ReplyDelivered,
            Growth::Shrinks,
        ),
        case(
            "from_netdev, not ours",
            "both",
            from_netdev,
            plan(back(of.node).frame(), FlowDirection::Fixed, 0, of.node),
            Verdict::NotOurs,
            plain,
        ),
        case(
            "to_netdev, not ours",
            "both",
            to_netdev,
            plan(out(of.node).frame(), FlowDirection::Fixed, 0, of.node),
            Verdict::NotOurs,
            plain,
        ),
    ]
}
