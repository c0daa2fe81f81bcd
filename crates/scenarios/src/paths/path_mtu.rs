//! A hop behind the uplink that takes less than any device of the nodes: only the router there knows, and its ICMP errors
//! must reach the pod, and the server outside, through every gateway.
//!
//! The router's routes take [`HOP`] in both directions while its links take more. Then the overlay becomes narrower still
//! ([`UPLINK`]), so that a pod whose gateway is elsewhere has something else to learn, from its own node.
//!
//! And what nodes learn of paths from a host that is not on them: one ICMP error about an echo that was never sent is enough
//! for the kernel, and no pod may be held up by it.

use super::datagrams::{self, Answers};
use super::findings::Findings;
use super::oversize;
use super::underlay;
use crate::prelude::*;
use egress_lab::test_cluster::placement::{FIRST_V4, FIRST_V6};
use egress_lab::traffic::fragments;
use egress_lab::traffic::packet;

pub(super) fn tests() -> Vec<LabTest> {
    let timeout = Duration::from_secs(150);
    vec![
        LabTest::new("paths_a_narrow_hop_on_the_way_is_learnt_of", timeout, narrow_hop),
        LabTest::new("paths_a_forged_icmp_error_holds_up_no_pod", timeout, forged),
        LabTest::new("paths_a_forged_icmp_error_over_ipv6", timeout, forged_over_ipv6),
    ]
}

/// The MTU between the router and either side; pods and uplinks have a larger one.
const HOP: u32 = 1300;
/// What uplinks take in the second half, and what is left of it inside of the overlay.
const UPLINK: u32 = 1340;
const OVERLAY: u32 = UPLINK - 50;
const ANSWERS: u16 = 8090;

fn narrow_hop(context: &LabContext) -> Result<()> {
    let config =
        |index| HostConfig { checksum_offload: index == 1, segmentation_offload: index != 2, ..HostConfig::default() };
    let cluster = TestCluster::for_placement_on(context, LabBuilder::default().host_config(config), &[], |_| Ok(()))?;
    cluster.place(&[(FIRST_V4, 1), (FIRST_V6, 2)])?;
    for to in ["198.51.100.0/24 dev srv0", "172.18.0.0/16 dev lan0"] {
        route(&cluster, "-4", to)?;
    }
    for to in ["2001:db8:100::/64 dev srv0", "fd00:172:18::/64 dev lan0"] {
        route(&cluster, "-6", to)?;
    }
    let at = plan::SERVER.both().map(|at| SocketAddr::new(at, ANSWERS));
    let answers = at.map(|at| Answers::start(cluster.lab.outside(), at)).into_iter().collect::<Result<Vec<_>>>()?;
    let capture = Capture::start(&cluster.lab)?;
    let mut findings = Findings::default();
    for node in 1..=3 {
        learns(&cluster, node, [HOP, HOP], &mut findings)?;
    }
    oversize::narrow(&cluster, UPLINK)?;
    for node in 1..=3 {
        learns(&cluster, node, [HOP, OVERLAY], &mut findings)?;
    }
    drop(answers);
    findings.conclude_with(capture)
}

/// Gives a route of the router this MTU, in place of the one that came with the address.
fn route(cluster: &TestCluster, family: &str, to: &str) -> Result<()> {
    let hop = HOP.to_string();
    // For IPv6 a lower metric goes before the kernel's own route.
    let rest = if family == "-4" { ["mtu", "lock", &hop].to_vec() } else { vec!["metric", "128", "mtu", &hop] };
    let words: Vec<&str> = [family, "route", "replace"].into_iter().chain(to.split(' ')).chain(rest).collect();
    cluster.lab.ext().exec("ip", &words).map(drop)
}

/// What a pod learns by datagrams that may not be cut, by its gateway here and elsewhere; and whether streams arrive.
fn learns(cluster: &TestCluster, node: usize, [here, elsewhere]: [u32; 2], findings: &mut Findings) -> Result<()> {
    let pod = cluster.chosen(node)?;
    for (to, gateway) in plan::SERVER.both().into_iter().zip([1, 2]) {
        let (path, expected) = if node == gateway { ("local", here) } else { ("remote", elsewhere) };
        datagrams(cluster, pod, to, (path, expected), findings)?;
        for netns in [&pod.netns, cluster.lab.outside()] {
            datagrams::forget_paths(netns)?;
        }
        oversize::transfers(cluster, pod, to, "between the router and both sides", findings)?;
    }
    Ok(())
}

fn datagrams(
    cluster: &TestCluster,
    pod: &LabPod,
    to: IpAddr,
    (path, expected): (&str, u32),
    findings: &mut Findings,
) -> Result<()> {
    /// With its headers more than the hop takes, and the overlay, and no more than the uplinks.
    const LONG: usize = 1290;
    for netns in [&pod.netns, cluster.lab.outside()] {
        datagrams::forbid_fragments(netns, true)?;
        datagrams::forget_paths(netns)?;
    }
    // The question is too long; then the answer is.
    let out = datagrams::ask(&pod.netns, SocketAddr::new(to, ANSWERS), LONG, 100)?;
    let reported = datagrams::path_mtu(&pod.netns, to)?;
    let name = format!("{} -> {to} ({path} gateway), {LONG} bytes", pod.name);
    let right = reported == Some(expected) && out.reported >= 1 && out.errors.is_empty();
    findings.note(right, &format!("{name}: {out:?}, path MTU {reported:?} of {expected}"));
    let back = datagrams::ask(&pod.netns, SocketAddr::new(to, ANSWERS), 100, u32::try_from(LONG)?)?;
    let egress = if to.is_ipv4() { FIRST_V4 } else { FIRST_V6 };
    let reported = datagrams::path_mtu(cluster.lab.outside(), egress)?;
    let name = format!("{} <- {to} ({path} gateway), {LONG} bytes", pod.name);
    let right = reported.is_some_and(|mtu| mtu <= HOP) && back.errors.is_empty();
    findings.note(right && back.answered_at.is_some(), &format!("{name}: {back:?}, server's path MTU {reported:?}"));
    Ok(())
}

fn forged(context: &LabContext) -> Result<()> {
    forged_in(
        &TestCluster::for_placement_on(context, LabBuilder::default(), &[], |_| Ok(()))?,
        &[(FIRST_V4, 1), (FIRST_V6, 2)],
        &[plan::SERVER],
    )
}

fn forged_over_ipv6(context: &LabContext) -> Result<()> {
    // Not of the path to the server: the gateway would tell a pod of another node. That needs a shorter packet, which the
    // kernel refuses of one whose sender has encapsulated it (`skb->encapsulation`), a sign that a veth pair leaves on.
    forged_in(
        &TestCluster::for_placement_on(context, LabBuilder::default(), &[], underlay::known_by_ipv6)?,
        &[(FIRST_V6, 2)],
        &[],
    )
}

/// The server outside reports narrow paths to every node: to the other nodes, to its pods and beyond.
fn forged_in(cluster: &TestCluster, placed: &[(IpAddr, usize)], beyond: &[plan::Dual]) -> Result<()> {
    cluster.place(placed)?;
    let of_family = |to: &IpAddr| placed.iter().any(|(address, _)| address.is_ipv4() == to.is_ipv4());
    let mut findings = Findings::default();
    for number in 1..=3 {
        let node = cluster.node(number)?;
        let others = (1..=3).filter(|other| *other != number);
        let others = others.map(|other| cluster.node(other).map(|other| other.number.address()));
        let mut paths = others.collect::<Result<Vec<_>>>()?;
        paths.push(cluster.chosen(number)?.addresses);
        paths.extend(beyond);
        for to in paths.into_iter().flat_map(plan::Dual::both).filter(of_family) {
            let reported = tell(cluster, node.number.address().towards(to), to)?;
            let known = datagrams::path_mtu(&node.host, to)?;
            findings.equal(&format!("what node{number} believes of the path to {to}"), &Some(reported), &known);
        }
    }
    // The programs look a path's MTU up once in ten seconds.
    thread::sleep(Duration::from_secs(11));
    for number in 1..=3 {
        for to in plan::SERVER.both().into_iter().filter(of_family) {
            oversize::transfers(cluster, cluster.chosen(number)?, to, "as forged", &mut findings)?;
        }
    }
    findings.conclude()
}

/// Tells a node that the path to an address takes no more than what comes back, about an echo reply that it has not sent.
fn tell(cluster: &TestCluster, node: IpAddr, to: IpAddr) -> Result<u32> {
    /// The least that Linux believes (`min_pmtu`, RFC 8200).
    const LEAST: [u32; 2] = [552, 1280];
    let from = plan::SERVER.towards(node);
    let (protocol, least, echo, error) = match to {
        IpAddr::V4(_) => (packet::ICMP, LEAST[0], 0, [3, 4, 0, 0]),
        IpAddr::V6(_) => (packet::ICMPV6, LEAST[1], 129, [2, 0, 0, 0]),
    };
    let reply = packet::summed(node, to, protocol, vec![echo, 0, 0, 0, 0, 7, 0, 1], 2);
    let quote = packet::ip(node, to, protocol, &reply)?;
    let message = [&error[..], &least.to_be_bytes(), &quote[2..]].concat();
    let reported = packet::ip(from, node, protocol, &packet::summed(from, node, protocol, message, 2))?;
    cluster.lab.outside().run(|| Ok(fragments::raw(node)?.send_to(&reported[2..], SocketAddr::new(node, 0))?))?;
    thread::sleep(Duration::from_millis(20));
    Ok(least)
}
