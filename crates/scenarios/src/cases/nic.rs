//! Egress IPs on a further interface of the nodes (`eth1`), of each kind that it can be.
//!
//! The servers are behind routers of one network each, and print the address that they see. A packet on the wrong network is
//! seen there by its source.

use std::collections::HashSet;

use egress_lab::api_objects::EGRESS_NODES;
use egress_lab::kube_api::ApiChoice;
use egress_lab::topology::addresses::Dual;
use egress_lab::topology::second::SECOND_BRIDGE;
use egress_lab::{NicKind, SECOND_UPLINK, SecondNic};

use crate::prelude::*;

/// The tests of egress IPs on a further interface, for the list of all tests on the lab.
pub(super) fn tests() -> Vec<LabTest> {
    let test = |name, run| LabTest::new(name, Duration::from_secs(120), run);
    vec![
        test("nic_egress_ips_leave_by_their_network", leave_by_their_network),
        test("nic_of_one_node_serves_several_objects", several_objects),
        test("nic_no_packet_leaves_with_the_address_of_a_pod", no_pod_address_leaves),
        test("nic_mixed_objects_use_the_network_of_the_destination", mixed_objects),
        test("nic_that_cannot_send_moves_its_addresses_alone", moves_alone),
        test("nic_that_changes_keeps_or_moves_its_address", changes),
        test("nic_needs_neither_forwarding_nor_the_best_route", routes_of_its_own),
    ]
}

const KINDS: [NicKind; 3] = [NicKind::Veth, NicKind::Macvlan, NicKind::Bridge];
const NAMES: [&str; 3] = ["one", "two", "three"];
/// Its labels select it in no object.
const PLAIN: &str = "plain";
/// In so many requests by two addresses that are equally likely, each occurs, but once in a million runs.
const REQUESTS: usize = 21;
/// From the loss of an interface on: it is published, the addresses are released and claimed.
const MOVES: Duration = Duration::from_secs(5);

/// Three nodes with an `eth1` of each kind, and agents that serve.
fn start(context: &LabContext) -> Result<TestCluster> {
    start_with(context, SecondNic::default())
}

fn start_with(context: &LabContext, second: SecondNic) -> Result<TestCluster> {
    let config = move |index: usize| HostConfig {
        second: Some(SecondNic { kind: KINDS[index], ..second.clone() }),
        ..HostConfig::mixed(index)
    };
    let lab = LabBuilder::default().nodes(3).host_config(config).keep_logs(context.logs.clone());
    let lab = NAMES.iter().zip(1..).fold(lab, |lab, (name, number)| lab.pod(pod(name, "red", number, &[])));
    let lab = lab.pod(pod(PLAIN, "blue", 1, &[]));
    let mut cluster = TestCluster::bring_up(lab, Some(0), &ApiChoice::new(None))?;
    cluster.start_agents(&cluster.options(context))?;
    cluster.agents_serve()?;
    (1..=3).try_for_each(|number| usable(&cluster, number))?;
    Ok(cluster)
}

fn usable(cluster: &TestCluster, number: usize) -> Result<()> {
    until_true(&format!("{SECOND_UPLINK} of node{number} can host egress IPs"), EFFECT, || {
        let object = cluster.api.get(&format!("{EGRESS_NODES}/node{number}"))?.unwrap_or_default();
        let interfaces = object["status"]["interfaces"].as_array().cloned().unwrap_or_default();
        Ok(interfaces.iter().any(|one| one["name"] == SECOND_UPLINK && one["state"] == "Usable"))
    })
}

/// The addresses by which a server has seen a pod in many requests.
fn seen(cluster: &TestCluster, name: &str, server: IpAddr) -> Result<HashSet<String>> {
    let netns = &cluster.pod(name)?.netns;
    (0..REQUESTS).map(|_| Ok(observe(netns, server)?.to_string())).collect()
}

fn of_source(addresses: &[IpAddr]) -> HashSet<String> {
    addresses.iter().map(|address| Observed::Source(*address).to_string()).collect()
}

/// Two addresses of one network on two nodes, for each family, and what is left when nodes lose their label.
fn leave_by_their_network(context: &LabContext) -> Result<()> {
    let cluster = start(context)?;
    let captures = (Capture::start(&cluster.lab)?, Capture::on_second(&cluster.lab)?);
    cluster.assignable(1, true)?;
    cluster.assignable(2, true)?;
    let families: [fn(Dual) -> IpAddr; 2] = [|address| address.v4.into(), |address| address.v6.into()];
    for (family, name) in families.into_iter().zip(["v4", "v6"]) {
        let addresses = [1, 2].map(|number| family(plan::second_egress_ip(number)));
        let texts = addresses.map(|address| address.to_string());
        let object = egress_ip(name, &texts.each_ref().map(String::as_str), &labels("house", "red"), &all());
        let assigned = cluster.assign(&object)?;
        let nodes: BTreeSet<_> = assigned.iter().map(|(_, node)| node.clone()).collect();
        ensure!(nodes.len() == 2, "the addresses are on {assigned:?}");
        let (server, other) = (family(plan::SERVER2), family(plan::SERVER));
        for pod in NAMES {
            until_true(&format!("{pod} is seen as both addresses"), EFFECT, || {
                Ok(seen(&cluster, pod, server)? == of_source(&addresses))
            })?;
            // No route of the further interface leads there.
            cluster.becomes(&cluster.pod(pod)?.netns, other, Observed::Nothing)?;
        }
        let node = cluster.lab.node(node(1)?);
        for (server, own) in [(plan::SERVER2, node.number.second_address()), (plan::SERVER, node.number.address())] {
            cluster.becomes(&cluster.pod(PLAIN)?.netns, family(server), Observed::Source(family(own)))?;
        }

        println!("node1 loses its label, then node2");
        cluster.assignable(1, false)?;
        let left = until(&format!("{name} has one address left"), EFFECT, || {
            let object = cluster.api.egress_ip(name)?.unwrap_or_default();
            let left = assigned_addresses(&object);
            Ok((left.len() == 1).then(|| left[0]))
        })?;
        for pod in NAMES {
            until_true(&format!("{pod} is seen as {left} alone"), EFFECT, || {
                Ok(seen(&cluster, pod, server)? == of_source(&[left]))
            })?;
        }
        cluster.assignable(2, false)?;
        for pod in NAMES {
            let own = cluster.lab.node(cluster.pod(pod)?.node).number.second_address();
            cluster.becomes(&cluster.pod(pod)?.netns, server, Observed::Source(family(own)))?;
        }
        cluster.remove(name)?;
        cluster.assignable(1, true)?;
        cluster.assignable(2, true)?;
    }
    let (first, second) = (captures.0.finish_clean()?, captures.1.finish_clean()?);
    let is_of_second = |address: IpAddr| plan::is_second_lan(address);
    let strays = first.packets(|key| is_of_second(key.source));
    ensure!(strays == 0, "{strays} packets with an address of the second network were on the first one");
    ensure!(second.to_the_world(AddressKind::Egress) > 0, "the capture of the second network has no egress IP");
    cluster.tear_down()
}

/// Two objects by one interface of one node. A neighbour that believes announcements knows both addresses before it sends.
fn several_objects(context: &LabContext) -> Result<()> {
    let cluster = start(context)?;
    cluster.assignable(1, true)?;
    let router = &cluster.lab.second()?.world.ext;
    let switches =
        ["ipv4/conf/all/arp_accept", "ipv6/conf/lan0/accept_untracked_na", "ipv6/conf/all/accept_untracked_na"];
    router.sysctl(&switches.map(|name| (name.to_owned(), "1".to_owned())))?;
    let shown = link_address(cluster.lab.node(node(1)?))?;
    let families: [fn(Dual) -> IpAddr; 2] = [|address| address.v4.into(), |address| address.v6.into()];
    for family in families {
        let addresses = [1, 2].map(|number| family(plan::second_egress_ip(number)));
        for (name, address) in ["red", "blue"].into_iter().zip(addresses) {
            router.exec("ip", &["neigh", "flush", "to", &address.to_string()])?;
            cluster.assign(&egress_ip(name, &[&address.to_string()], &labels("house", name), &all()))?;
            until_true(&format!("the router knows who has {address}"), Duration::from_secs(30), || {
                Ok(router.exec("ip", &["neigh", "show", &address.to_string()])?.contains(&shown))
            })?;
        }
        let server = family(plan::SERVER2);
        let netns = |name: &str| Ok::<_, anyhow::Error>(&cluster.pod(name)?.netns);
        cluster.becomes(netns(NAMES[1])?, server, Observed::Source(addresses[0]))?;
        cluster.becomes(netns(PLAIN)?, server, Observed::Source(addresses[1]))?;
        cluster.remove("red")?;
        let own = family(node(2)?.second_address());
        cluster.becomes(netns(NAMES[1])?, server, Observed::Source(own))?;
        ensure!(seen(&cluster, PLAIN, server)? == of_source(&[addresses[1]]), "the other object is affected");
        cluster.remove("blue")?;
    }
    cluster.tear_down()
}

/// Of the further interface, as `ip` prints it.
fn link_address(node: &LabNode) -> Result<String> {
    let shown = node.host.exec("ip", &["link", "show", "dev", SECOND_UPLINK])?;
    let after = shown.split("link/ether ").nth(1).context("it has a link address")?;
    Ok(after.split(' ').next().unwrap_or_default().to_owned())
}

/// The uplink has the better default route of both families, and the kernel forwards nothing that comes by `eth1`.
fn routes_of_its_own(context: &LabContext) -> Result<()> {
    let cluster = start_with(context, SecondNic { forwards: false, ..SecondNic::default() })?;
    cluster.assignable(1, true)?;
    cluster.assignable(2, true)?;
    let Dual { v4, v6 } = plan::second_egress_ip(1);
    let texts = [v4.to_string(), v6.to_string()];
    cluster.put(&egress_ip("both", &texts.each_ref().map(String::as_str), &labels("house", "red"), &all()))?;
    let are_seen_as = |egress: [Observed; 2]| -> Result<()> {
        for pod in NAMES {
            for (server, egress) in plan::SERVER2.both().into_iter().zip(egress) {
                cluster.becomes(&cluster.pod(pod)?.netns, server, egress)?;
            }
        }
        Ok(())
    };
    let egress = [v4.into(), v6.into()].map(Observed::Source);
    are_seen_as(egress)?;
    println!("the only routes to the server are the default routes");
    for node in cluster.lab.nodes() {
        for (network, via) in [plan::BEHIND2_V4, plan::BEHIND2_V6].into_iter().zip(plan::EXT2.both()) {
            let via = via.to_string();
            node.host.exec("ip", &["route", "del", network, "dev", SECOND_UPLINK])?;
            let default = if network.contains(':') { "::/0" } else { "0.0.0.0/0" };
            node.host.exec("ip", &["route", "add", default, "via", &via, "dev", SECOND_UPLINK, "metric", "9999"])?;
        }
    }
    are_seen_as(egress)?;
    println!("the servers' network is refused, and then not");
    for node in cluster.lab.nodes() {
        for network in [plan::BEHIND2_V4, plan::BEHIND2_V6] {
            node.host.exec("ip", &["route", "add", "blackhole", network])?;
        }
    }
    are_seen_as([Observed::Nothing; 2])?;
    for node in cluster.lab.nodes() {
        for network in [plan::BEHIND2_V4, plan::BEHIND2_V6] {
            node.host.exec("ip", &["route", "del", "blackhole", network])?;
        }
    }
    are_seen_as(egress)?;
    cluster.tear_down()
}

/// Each family: an address on the nodes' first network and one on the second. Each destination gets the address of its network,
/// also while the other one is served alone.
fn mixed_objects(context: &LabContext) -> Result<()> {
    let cluster = start(context)?;
    let captures = (Capture::start(&cluster.lab)?, Capture::on_second(&cluster.lab)?);
    let families: [fn(Dual) -> IpAddr; 2] = [|address| address.v4.into(), |address| address.v6.into()];
    for ((family, name), first) in families.into_iter().zip(["v4", "v6"]).zip(["172.18.0.110", "fd00:172:18::110"]) {
        cluster.assignable(1, true)?;
        cluster.assignable(2, true)?;
        let (first, second): (IpAddr, _) = (first.parse()?, family(plan::second_egress_ip(1)));
        let texts = [first, second].map(|address| address.to_string());
        let object = egress_ip(name, &texts.each_ref().map(String::as_str), &labels("house", "red"), &all());
        let assigned = cluster.assign(&object)?;
        let holder = |address: &str| {
            let found = assigned.iter().find(|(held, _)| held == address).context("both are assigned")?;
            found.1.trim_start_matches("node").parse::<usize>().context("a node of the lab")
        };
        let servers = [(family(plan::SERVER), first), (family(plan::SERVER2), second)];
        let both_serve = || {
            NAMES.iter().try_for_each(|pod| {
                servers.iter().try_for_each(|(server, address)| {
                    until_true(&format!("{server} sees {pod} as {address} in every request"), EFFECT, || {
                        Ok(seen(&cluster, pod, *server)? == of_source(&[*address]))
                    })
                })
            })
        };
        both_serve()?;
        for (lost, kept) in [(1, 0), (0, 1)] {
            let number = holder(&texts[lost])?;
            println!("{} loses its node, node{number}, while {} is served", texts[lost], texts[kept]);
            cluster.assignable(number, false)?;
            for pod in NAMES {
                let netns = &cluster.pod(pod)?.netns;
                cluster.becomes(netns, servers[lost].0, Observed::Nothing)?;
                ensure!(seen(&cluster, pod, servers[kept].0)? == of_source(&[servers[kept].1]), "{pod}: the other one");
            }
            // Each request without an answer takes a second.
            for _ in 0..4 {
                let by = observe(&cluster.pod(NAMES[2])?.netns, servers[lost].0)?;
                ensure!(by == Observed::Nothing, "{} has seen {by}", servers[lost].0);
            }
            cluster.assignable(number, true)?;
            both_serve()?;
        }
        cluster.remove(name)?;
    }
    let (one, two) = (captures.0.finish_clean()?, captures.1.finish_clean()?);
    let strays = one.packets(|key| plan::is_second_lan(key.source))
        + two.packets(|key| key.source == IpAddr::from([172, 18, 0, 110]));
    ensure!(strays == 0, "{strays} packets were on the wrong network");
    cluster.tear_down()
}

/// Power off, cable out, router gone, device gone: each moves what the interface hosts, and nothing of the uplink.
fn moves_alone(context: &LabContext) -> Result<()> {
    let cluster = start(context)?;
    let Dual { v4, .. } = plan::second_egress_ip(1);
    let (of_eth1, of_uplink) = (v4.to_string(), "172.18.0.110");
    cluster.assignable(1, true)?;
    cluster.assign(&egress_ip("further", &[&of_eth1], &labels("house", "red"), &all()))?;
    cluster.assign(&egress_ip("first", &[of_uplink], &labels("house", "blue"), &all()))?;
    cluster.assignable(2, true)?;
    let is_on = |object: &str, number: usize, limit: Duration| {
        let what = format!("the address of {object} is on node{number}");
        until_true(&what, limit, || Ok(cluster.holder(object)? == format!("node{number}")))
    };
    let served = |server: Dual, pod: &str, address: &str| {
        let seen = Observed::Source(address.parse()?);
        cluster.becomes(&cluster.pod(pod)?.netns, server.v4.into(), seen)
    };
    let [one, two, _] = cluster.lab.nodes() else { bail!("the lab has three nodes") };
    type Change = fn(&Lab, &LabNode) -> Result<()>;
    let causes: [(&str, Change, Change); 4] = [
        // Set up again it has no routes; the kernel has removed them.
        (
            "set down",
            |_, node| set_down(node),
            |lab, node| {
                lab.remove_second(node)?;
                lab.make_second(node)
            },
        ),
        (
            "without a carrier",
            |lab, node| lab.set_second_carrier(node, false),
            |lab, node| lab.set_second_carrier(node, true),
        ),
        (
            "without a next hop",
            |_, node| route_via(node, "10.10.10.77"),
            |_, node| route_via(node, &plan::EXT2.v4.to_string()),
        ),
        ("removed", |lab, node| lab.remove_second(node), |lab, node| lab.make_second(node)),
    ];
    // The macvlan of node2 has its cable's carrier.
    let (mut holder, mut other) = (one, two);
    for (what, lose, restore) in causes {
        let numbers = [holder, other].map(|node| node.number.index() + 1);
        println!("{SECOND_UPLINK} of node{} is {what}", numbers[0]);
        is_on("further", numbers[0], EFFECT)?;
        lose(&cluster.lab, holder)?;
        is_on("further", numbers[1], MOVES)?;
        served(plan::SERVER2, "three", &of_eth1)?;
        ensure!(cluster.holder("first")? == "node1", "the address of the uplink has moved");
        served(plan::SERVER, PLAIN, of_uplink)?;
        restore(&cluster.lab, holder)?;
        usable(&cluster, numbers[0])?;
        ensure!(cluster.holder("further")? == format!("node{}", numbers[1]), "it has moved back");
        std::mem::swap(&mut holder, &mut other);
    }
    cluster.tear_down()
}

/// Another name, off the switch, a port of a bridge, other numbers.
fn changes(context: &LabContext) -> Result<()> {
    let cluster = start(context)?;
    let captures = (Capture::start(&cluster.lab)?, Capture::on_second(&cluster.lab)?);
    let Dual { v4, .. } = plan::second_egress_ip(1);
    let [one, two, _] = cluster.lab.nodes() else { bail!("the lab has three nodes") };
    cluster.assignable(1, true)?;
    cluster.assign(&egress_ip("further", &[&v4.to_string()], &labels("house", "red"), &all()))?;
    let served_by = |number: usize, interface: &str, limit: Duration| {
        let node = format!("node{number}");
        until_true(&format!("{node} serves the address on {interface}"), limit, || {
            let object = cluster.api.get(&format!("{EGRESS_NODES}/{node}"))?.unwrap_or_default();
            let interfaces = object["status"]["interfaces"].as_array().cloned().unwrap_or_default();
            let is_usable = interfaces.iter().any(|record| record["name"] == interface && record["state"] == "Usable");
            Ok(is_usable && cluster.holder("further")? == node)
        })?;
        let pods = NAMES.iter().map(|pod| cluster.pod(pod));
        pods.into_iter()
            .try_for_each(|pod| cluster.becomes(&pod?.netns, plan::SERVER2.v4.into(), Observed::Source(v4.into())))
    };
    served_by(1, SECOND_UPLINK, EFFECT)?;

    println!("another name");
    cluster.lab.rename_second(one, "nic9")?;
    let by_name = seen(&cluster, NAMES[2], plan::SERVER2.v4.into())?;
    ensure!(by_name == of_source(&[v4.into()]), "while it is renamed, the server sees {by_name:?}");
    served_by(1, "nic9", EFFECT)?;
    one.host.exec("ip", &["link", "set", "nic9", "name", SECOND_UPLINK])?;
    served_by(1, SECOND_UPLINK, EFFECT)?;

    println!("off the switch: it has its carrier, and no gateway answers");
    cluster.assignable(2, true)?;
    cluster.lab.set_second_port(one, false)?;
    served_by(2, SECOND_UPLINK, MOVES)?;
    cluster.lab.set_second_port(one, true)?;
    usable(&cluster, 1)?;
    served_by(2, SECOND_UPLINK, EFFECT)?;

    println!("a port of a bridge, which has its addresses now");
    cluster.lab.enslave_second(one)?;
    let bridge = SECOND_BRIDGE.to_owned();
    one.host.exec("ip", &["link", "set", &bridge, "up"])?;
    cluster.assignable(2, false)?;
    served_by(1, SECOND_BRIDGE, EFFECT)?;

    println!("other numbers: it is in the address's network no more");
    cluster.assignable(2, true)?;
    cluster.assignable(1, false)?;
    served_by(2, SECOND_UPLINK, EFFECT)?;
    cluster.assignable(1, true)?;
    cluster.lab.renumber_second(two)?;
    served_by(1, SECOND_BRIDGE, MOVES)?;
    captures.0.finish_clean()?;
    captures.1.finish_clean()?;
    cluster.tear_down()
}

/// To the server's network, by this gateway.
fn route_via(node: &LabNode, gateway: &str) -> Result<()> {
    let route = ["route", "replace", plan::BEHIND2_V4, "via", gateway, "dev", SECOND_UPLINK];
    node.host.exec("ip", &route).map(drop)
}

fn set_down(node: &LabNode) -> Result<()> {
    node.host.exec("ip", &["link", "set", SECOND_UPLINK, "down"]).map(drop)
}

fn assigned_addresses(object: &Value) -> Vec<IpAddr> {
    assigned(object).iter().filter_map(|(address, _)| address.parse().ok()).collect()
}

/// Pods send all the time while their object is made and removed.
fn no_pod_address_leaves(context: &LabContext) -> Result<()> {
    let cluster = start(context)?;
    let captures = (Capture::start(&cluster.lab)?, Capture::on_second(&cluster.lab)?);
    let Dual { v4, v6 } = plan::second_egress_ip(1);
    let texts = [v4.to_string(), v6.to_string()];
    // An object has one address on a node.
    cluster.assignable(1, true)?;
    cluster.assignable(2, true)?;
    let ask = || -> Result<()> {
        for pod in NAMES {
            for server in plan::SERVER2.both() {
                observe(&cluster.pod(pod)?.netns, server)?;
            }
        }
        Ok(())
    };
    ask()?;
    cluster.put(&egress_ip("both", &texts.each_ref().map(String::as_str), &labels("house", "red"), &all()))?;
    for pod in NAMES {
        for (server, egress) in plan::SERVER2.both().into_iter().zip([IpAddr::from(v4), v6.into()]) {
            cluster.becomes(&cluster.pod(pod)?.netns, server, Observed::Source(egress))?;
        }
    }
    cluster.remove("both")?;
    for _ in 0..REQUESTS {
        ask()?;
    }
    captures.0.finish_clean()?;
    captures.1.finish_clean()?;
    cluster.tear_down()
}
