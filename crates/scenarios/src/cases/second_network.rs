//! The lab's second network, tested by itself and without agents: what a NIC can be and what can happen to it has its effect in
//! packets, for `eth1` of each kind, and a packet on the wrong network is seen by its source.

use std::net::UdpSocket;

use crate::prelude::*;
use egress_lab::cut::NetworkCut;
use egress_lab::kube_api::ApiChoice;
use egress_lab::topology::addresses::Dual;
use egress_lab::topology::second::SECOND_BRIDGE;
use egress_lab::{NicKind, ReversePath, SECOND_UPLINK, SecondNic};

/// The tests of the second network, for the list of all tests on the lab.
pub(super) fn tests() -> Vec<LabTest> {
    let test = |name, run| LabTest::new(name, Duration::from_secs(90), run);
    vec![
        test("lab_nic_of_each_kind_reaches_its_network", kinds),
        test("lab_nic_mtu_is_the_longest_packet", mtu),
        test("lab_nic_loses_carrier_port_and_power", losses),
        test("lab_nic_can_be_removed_and_made", removed),
        test("lab_nic_can_be_renamed_renumbered_and_enslaved", changed),
        test("lab_nic_forwarding_and_reverse_path_filter", filters),
        test("lab_nic_captures_are_of_their_network", captures),
        test("lab_nic_has_two_next_hops", next_hops),
    ]
}

/// As of a node whose power is back: neighbours that did not answer are asked again by the kernel's timer.
const RETURNS: Duration = Duration::from_secs(10);
const KINDS: [NicKind; 3] = [NicKind::Veth, NicKind::Macvlan, NicKind::Bridge];
/// To where no server listens.
const PORT: u16 = 9999;

fn start(context: &LabContext, nodes: usize, config: impl Fn(usize) -> HostConfig + 'static) -> Result<TestCluster> {
    let lab = LabBuilder::default().nodes(nodes).pods_per_node(1).host_config(config).keep_logs(context.logs.clone());
    TestCluster::bring_up(lab, Some(0), &ApiChoice::new(None))
}

/// A node of each kind, then nodes without `eth1`.
fn each_kind(index: usize) -> HostConfig {
    let second = KINDS.get(index).map(|kind| SecondNic { kind: *kind, ..SecondNic::default() });
    HostConfig { second, ..HostConfig::mixed(index) }
}

fn pod_on(node: &LabNode) -> String {
    format!("pod{}-1", node.number.index() + 1)
}

/// Waits until a server sees the namespace by this address, in both families.
fn is_seen(from: &Netns, server: Dual, expected: Dual) -> Result<()> {
    server.both().into_iter().try_for_each(|to| {
        let wanted = Observed::Source(expected.towards(to));
        until_true(&format!("{} -> {to}: {wanted}", from.name()), RETURNS, || Ok(observe(from, to)? == wanted))
    })
}

fn is_not_answered(from: &Netns, server: Dual) -> Result<()> {
    for to in server.both() {
        let seen = observe(from, to)?;
        ensure!(seen == Observed::Nothing, "{} -> {to}: {seen}, and it should get no answer", from.name());
    }
    Ok(())
}

fn link(node: &LabNode, device: &str) -> Result<String> {
    node.host.exec("ip", &["-d", "link", "show", "dev", device])
}

fn has_link(node: &LabNode, device: &str) -> Result<bool> {
    Ok(node.host.output("ip", &["link", "show", "dev", device])?.status.success())
}

/// The number before the first colon of its line.
fn index(node: &LabNode, device: &str) -> Result<u32> {
    let shown = link(node, device)?;
    Ok(shown.split(':').next().unwrap_or_default().parse()?)
}

fn kinds(context: &LabContext) -> Result<()> {
    let cluster = start(context, 4, each_kind)?;
    for (node, kind) in cluster.lab.nodes().iter().zip(["veth", "macvlan mode private", "bridge forward_delay"]) {
        let shown = link(node, SECOND_UPLINK)?;
        ensure!(shown.contains(kind), "{} of {} is no {kind}: {shown}", SECOND_UPLINK, node.name());
        is_seen(&node.host, plan::SERVER2, node.number.second_address())?;
        is_seen(&node.host, plan::SERVER, node.number.address())?;
        cluster.is_seen_at(plan::SERVER2, &pod_on(node), None, None)?;
        cluster.is_seen_as(&pod_on(node), None, None)?;
    }
    let (first, last) = (&cluster.lab.nodes()[0], &cluster.lab.nodes()[3]);
    ensure!(!has_link(last, SECOND_UPLINK)?, "{} has an {SECOND_UPLINK}", last.name());
    is_seen(&cluster.pod(&pod_on(last))?.netns, plan::SERVER2, last.number.address())?;
    for (network, via) in [plan::BEHIND_V4, plan::BEHIND_V6].into_iter().zip(plan::EXT2.both()) {
        first.host.exec("ip", &["route", "add", network, "via", &via.to_string()])?;
    }
    is_seen(&first.host, plan::SERVER, first.number.second_address())
}

fn mtu(context: &LabContext) -> Result<()> {
    const MTU: [u32; 3] = [1400, 9000, 9000];
    let cluster = start(context, 3, |index| HostConfig {
        second: Some(SecondNic { kind: KINDS[index], mtu: MTU[index], ..SecondNic::default() }),
        ..HostConfig::default()
    })?;
    let [narrow, wide, bridge] = cluster.lab.nodes() else { bail!("the lab has three nodes") };
    longest(narrow, plan::SERVER2, 1400)?;
    longest(wide, bridge.number.second_address(), 9000)?;
    longest(bridge, wide.number.second_address(), 9000)?;
    longest(wide, plan::SERVER2, 1500)
}

/// Packets of this size arrive whole, and longer ones do not.
fn longest(node: &LabNode, peer: Dual, mtu: u32) -> Result<()> {
    for to in peer.both() {
        let headers = if to.is_ipv4() { 28 } else { 48 };
        for (size, expected) in [(mtu - headers, 1), (mtu - headers + 1, 0)] {
            let pong = client::ping(&node.host, to, Ping { size, whole: true, ..Ping::default() })?;
            let what = format!("{} -> {to}, {} bytes", node.name(), size + headers);
            ensure!(pong.received == expected, "{what}: {} of {expected} arrived: {}", pong.received, pong.text);
        }
    }
    Ok(())
}

fn losses(context: &LabContext) -> Result<()> {
    let cluster = start(context, 3, each_kind)?;
    let lab = &cluster.lab;
    for node in lab.nodes() {
        let (first, second) = (node.number.address(), node.number.second_address());
        let has_carrier = || Ok(link(node, SECOND_UPLINK)?.contains("LOWER_UP"));
        is_seen(&node.host, plan::SERVER2, second)?;

        lab.set_second_carrier(node, false)?;
        until_true("the carrier is lost", RETURNS, || has_carrier().map(|has| !has))?;
        is_not_answered(&node.host, plan::SERVER2)?;
        is_seen(&node.host, plan::SERVER, first)?;
        lab.set_second_carrier(node, true)?;
        is_seen(&node.host, plan::SERVER2, second)?;

        lab.set_second_port(node, false)?;
        is_not_answered(&node.host, plan::SERVER2)?;
        ensure!(has_carrier()?, "{} has lost its carrier with the switch's port", node.name());
        is_seen(&node.host, plan::SERVER, first)?;
        lab.set_second_port(node, true)?;
        is_seen(&node.host, plan::SERVER2, second)?;

        lab.set_power(node, false)?;
        [plan::SERVER, plan::SERVER2].into_iter().try_for_each(|server| is_not_answered(&node.host, server))?;
        lab.set_power(node, true)?;
        is_seen(&node.host, plan::SERVER, first)?;
        is_seen(&node.host, plan::SERVER2, second)?;

        let cut = NetworkCut::Everything(node.number);
        lab.cut(&cut)?;
        [plan::SERVER, plan::SERVER2].into_iter().try_for_each(|server| is_not_answered(&node.host, server))?;
        lab.mend(&cut)?;
        is_seen(&node.host, plan::SERVER2, second)?;
    }
    Ok(())
}

fn removed(context: &LabContext) -> Result<()> {
    let cluster = start(context, 3, each_kind)?;
    for node in cluster.lab.nodes() {
        let pod = cluster.pod(&pod_on(node))?;
        let before = index(node, SECOND_UPLINK)?;
        cluster.lab.remove_second(node)?;
        ensure!(!has_link(node, SECOND_UPLINK)?, "{} still has an {SECOND_UPLINK}", node.name());
        is_seen(&node.host, plan::SERVER2, node.number.address())?;
        is_seen(&pod.netns, plan::SERVER2, node.number.address())?;
        cluster.lab.make_second(node)?;
        ensure!(index(node, SECOND_UPLINK)? != before, "{} has the {SECOND_UPLINK} of before", node.name());
        is_seen(&node.host, plan::SERVER2, node.number.second_address())?;
        is_seen(&pod.netns, plan::SERVER2, node.number.second_address())?;
    }
    Ok(())
}

fn changed(context: &LabContext) -> Result<()> {
    const RENAMED: &str = "eth9";
    let cluster = start(context, 3, each_kind)?;
    let router = &cluster.lab.second()?.world.ext;
    for (node, kind) in cluster.lab.nodes().iter().zip(KINDS) {
        let (pod, own) = (cluster.pod(&pod_on(node))?, node.number.second_address());
        let before = index(node, SECOND_UPLINK)?;
        cluster.lab.rename_second(node, RENAMED)?;
        ensure!(!has_link(node, SECOND_UPLINK)?, "{} still has an {SECOND_UPLINK}", node.name());
        ensure!(index(node, RENAMED)? == before, "{RENAMED} is not the interface that was renamed");
        is_seen(&pod.netns, plan::SERVER2, own)?;
        node.host.exec("ip", &["link", "set", RENAMED, "name", SECOND_UPLINK])?;

        cluster.lab.renumber_second(node)?;
        is_seen(&pod.netns, plan::SERVER2, node.number.renumbered_address())?;
        for (address, expected) in [(own, 0), (node.number.renumbered_address(), 1)] {
            for to in address.both() {
                let pong = client::ping(router, to, Ping::default())?;
                ensure!(pong.received == expected, "the router gets {} answers of {to}", pong.received);
            }
        }

        // A bridge is no port of a bridge.
        if kind != NicKind::Bridge {
            cluster.lab.remove_second(node)?;
            cluster.lab.make_second(node)?;
            cluster.lab.enslave_second(node)?;
            ensure!(link(node, SECOND_UPLINK)?.contains(&format!("master {SECOND_BRIDGE}")), "it is no port");
            let left = node.host.exec("ip", &["addr", "show", "dev", SECOND_UPLINK, "scope", "global"])?;
            ensure!(!left.contains("inet"), "the port still has addresses: {left}");
            is_seen(&pod.netns, plan::SERVER2, own)?;
            node.host.exec("ip", &["link", "set", SECOND_BRIDGE, "down"])?;
            is_seen(&pod.netns, plan::SERVER2, node.number.address())?;
        }
    }
    Ok(())
}

fn filters(context: &LabContext) -> Result<()> {
    /// Of the network behind the nodes' own router.
    const FOREIGN: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 200);
    let cluster = start(context, 2, |index| HostConfig {
        second: Some(SecondNic { forwards: index == 0, ..SecondNic::default() }),
        reverse_path: if index == 0 { ReversePath::Loose } else { ReversePath::Strict },
        ..HostConfig::default()
    })?;
    let world = &cluster.lab.second()?.world;
    world.ext.exec("ip", &["addr", "add", &format!("{FOREIGN}/32"), "dev", "lo"])?;
    for (node, does) in cluster.lab.nodes().iter().zip([true, false]) {
        let (own, pod) = (node.number.second_address(), cluster.pod(&pod_on(node))?);
        let via = own.v4.to_string();
        world.ext.exec("ip", &["route", "add", &node.number.pod_subnet_v4(), "via", &via])?;
        let pong = client::ping(&world.server, pod.addresses.v4.into(), Ping::default())?;
        ensure!((pong.received == 1) == does, "{}: {} pings were forwarded", node.name(), pong.received);
        let of_v6 = node.host.exec("cat", &[&format!("/proc/sys/net/ipv6/conf/{SECOND_UPLINK}/forwarding")])?;
        ensure!(of_v6.trim() == if does { "1" } else { "0" }, "{}: IPv6 forwarding is {of_v6}", node.name());

        ensure!(arrives(&world.ext, plan::EXT2.v4, node)?, "{} hears nothing of its router", node.name());
        let is_taken = arrives(&world.ext, FOREIGN, node)?;
        ensure!(is_taken == does, "{} with {:?}: taken {is_taken}", node.name(), node.config.reverse_path);
    }
    Ok(())
}

/// Whether a datagram from this source reaches a socket on the node's second address.
fn arrives(from: &Netns, source: Ipv4Addr, node: &LabNode) -> Result<bool> {
    let to = SocketAddr::new(node.number.second_address().v4.into(), PORT);
    let socket = node.host.run(|| Ok(UdpSocket::bind(to)?))?;
    socket.set_read_timeout(Some(Duration::from_millis(500)))?;
    from.run(|| Ok(UdpSocket::bind((source, 0))?.send_to(b"?", to)?))?;
    Ok(socket.recv_from(&mut [0]).is_ok_and(|(_, sender)| sender.ip() == source))
}

fn captures(context: &LabContext) -> Result<()> {
    let cluster = start(context, 3, each_kind)?;
    let node = &cluster.lab.nodes()[0];
    let (first, second) = (Capture::start(&cluster.lab)?, Capture::on_second(&cluster.lab)?);
    cluster.is_seen_as(&pod_on(node), None, None)?;
    cluster.is_seen_at(plan::SERVER2, &pod_on(node), None, None)?;
    for (address, server) in plan::second_egress_ip(0).both().into_iter().zip(plan::SERVER2.both()) {
        let length = if address.is_ipv4() { 32 } else { 128 };
        node.host.exec("ip", &["addr", "add", &format!("{address}/{length}"), "dev", SECOND_UPLINK, "nodad"])?;
        // The kernel joins the group that the address is asked for in some time later.
        node.host.exec("ping", &["-n", "-c1", "-W3", "-I", &address.to_string(), &server.to_string()])?;
    }
    let (first, own) = (first.finish_clean()?, second.seen()?);
    own.check()?;
    ensure!(own.to_the_world(AddressKind::Pod) == 0, "a pod's address went out");
    let to = |seen: &egress_lab::capture::Seen, server: Dual, kind| {
        seen.packets(|key| server.is(key.destination) && seen.class(key.source) == kind)
    };
    let counts = [
        ("on the nodes' network, of nodes to its server", to(&first, plan::SERVER, AddressKind::Node), true),
        ("on the nodes' network, of nodes to the other server", to(&first, plan::SERVER2, AddressKind::Node), false),
        ("on the second network, of nodes to its server", to(&own, plan::SERVER2, AddressKind::Node), true),
        ("on the second network, of nodes to the other server", to(&own, plan::SERVER, AddressKind::Node), false),
        ("on the second network, of egress IPs", to(&own, plan::SERVER2, AddressKind::Egress), true),
        ("on the nodes' network, of egress IPs", first.to_the_world(AddressKind::Egress), false),
    ];
    for (what, count, is_some) in counts {
        ensure!((count > 0) == is_some, "{count} packets {what}");
    }
    // A leak, which the capture has to see.
    node.host.exec("nft", &["delete", "table", "inet", "cni2"])?;
    client::ping(&cluster.pod(&pod_on(node))?.netns, plan::SERVER2.v4.into(), Ping::default())?;
    let leaked = second.finish()?.to_the_world(AddressKind::Pod);
    ensure!(leaked > 0, "the capture does not see a pod's address");
    Ok(())
}

fn next_hops(context: &LabContext) -> Result<()> {
    let cluster = start(context, 1, each_kind)?;
    let node = &cluster.lab.nodes()[0];
    let route_by = |router: Dual| {
        [plan::BEHIND2_V4, plan::BEHIND2_V6].into_iter().zip(router.both()).try_for_each(|(network, via)| {
            node.host.exec("ip", &["route", "replace", network, "via", &via.to_string()]).map(drop)
        })
    };
    for router in [plan::EXT2, plan::EXT2B] {
        route_by(router)?;
        for (to, via) in plan::SERVER2.both().into_iter().zip(router.both()) {
            let pong = client::ping(&node.host, to, Ping { ttl: Some(1), ..Ping::default() })?;
            ensure!(pong.text.contains(&format!("From {via} ")), "{via} is not the first hop to {to}: {}", pong.text);
        }
        is_seen(&node.host, plan::SERVER2, node.number.second_address())?;
    }
    // The answers come back by the router that asked, too.
    let switch = &cluster.lab.second()?.world.lan;
    switch.exec("ip", &["link", "set", "ext", "nomaster"])?;
    is_seen(&node.host, plan::SERVER2, node.number.second_address())?;
    route_by(plan::EXT2)?;
    is_not_answered(&node.host, plan::SERVER2)?;
    switch.exec("ip", &["link", "set", "ext", "master", "br0"])?;
    is_seen(&node.host, plan::SERVER2, node.number.second_address())
}
