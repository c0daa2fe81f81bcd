//! What passes a router and what does not.

use std::io::ErrorKind;

use serde_json::json;

use crate::skips::skipped;
use crate::world::{Bound, World, address, config, usual};

#[test]
fn a_client_reaches_a_server_with_the_address_of_the_router() {
    let world = World::new();
    let result = world.added(&usual());
    let _servers = [world.serve("server", "0.0.0.0:80"), world.serve("server", "[2001:db8:113::26]:80")];
    assert_eq!(world.connect("client", "10.128.6.47:8080").expect("redirected"), address("192.168.12.99"));
    assert_eq!(world.connect("client", "[fd01::47]:8080").expect("redirected"), address("2001:db8:12::99"));
    // So does the pod itself.
    assert_eq!(world.connect("router", "203.0.113.26:80").expect("by its own interface"), address("192.168.12.99"));
    assert_eq!(result["ips"].as_array().map(Vec::len), Some(2));
    // A client of another network, whose answers leave by the interface that it came by, although no route leads there.
    world.ip("client", "addr add 172.20.0.9/32 dev eth0");
    world.ip("client", "route replace 10.128.6.47 dev eth0 src 172.20.0.9");
    world.ip("node", "route add 172.20.0.9 dev cni0");
    assert_eq!(world.connect("client", "10.128.6.47:8080").expect("answered"), address("192.168.12.99"));
}

#[test]
fn other_ports_are_refused_at_once_and_local_ones_reach_the_pod() {
    let world = World::new();
    let mut with_fallback = config(&["192.168.12.99/24"], json!({"redirect": ["203.0.113.26"]}));
    with_fallback["localPorts"] = json!([9090]);
    world.added(&with_fallback);
    let _servers = [world.serve("server", "0.0.0.0:80"), world.serve("router", "0.0.0.0:9090")];
    assert_eq!(world.connect("client", "10.128.6.47:80").expect("the fallback"), address("192.168.12.99"));
    assert_eq!(world.connect("client", "10.128.6.47:9090").expect("a probe"), address("10.128.6.48"));
    let world = World::new();
    world.added(&usual());
    let refused = world.connect("client", "10.128.6.47:81").expect_err("not redirected");
    assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
}

#[test]
fn hosts_outside_reach_nothing_through_the_router_or_on_it() {
    let world = World::new();
    world.added(&usual());
    let _servers = [world.serve("client", "0.0.0.0:7000"), world.serve("router", "0.0.0.0:7001")];
    // Inside the cluster both answer.
    assert!(world.connect("router", "10.128.6.48:7000").is_ok());
    assert!(world.connect("client", "10.128.6.47:7001").is_ok());
    world.ip("server", "route add 10.128.6.0/23 via 192.168.12.99");
    for to in ["10.128.6.48:7000", "10.128.6.47:7001", "192.168.12.99:7001"] {
        let error = world.connect("server", to).expect_err("the reverse door is shut");
        assert_eq!(error.kind(), ErrorKind::TimedOut, "{to}");
    }
    // Nor does it answer for addresses of the cluster.
    world.ip("server", "route replace 10.128.6.0/23 dev lan0");
    let error = world.connect("server", "10.128.6.48:7000").expect_err("no ARP answer");
    assert!(matches!(error.kind(), ErrorKind::HostUnreachable | ErrorKind::TimedOut), "{error}");
    let neighbours = world.netns("server").exec("ip", &["neigh", "show", "10.128.6.48"]).expect("a list");
    assert!(!neighbours.contains("lladdr"), "{neighbours}");
}

#[test]
fn the_pod_is_no_router_within_the_cluster() {
    let mut world = World::new();
    world.pod("third", 49);
    world.ip("client", "route add 10.128.6.49 via 10.128.6.47");
    let _server = world.serve("third", "0.0.0.0:7000");
    let before = world.connect("client", "10.128.6.49:7000").expect_err("it does not forward");
    assert_eq!(before.kind(), ErrorKind::TimedOut);
    world.added(&usual());
    let after = world.connect("client", "10.128.6.49:7000").expect_err("it forwards to the outside alone");
    assert_eq!(after.kind(), ErrorKind::TimedOut);
}

#[test]
fn what_is_not_allowed_is_refused() {
    let world = World::new();
    world.added(&config(&["192.168.12.99/24"], json!({"allow": ["203.0.113.26 tcp 80", "198.51.100.0/24"]})));
    let _servers = [world.serve("server", "0.0.0.0:80"), world.serve("server", "0.0.0.0:81")];
    assert_eq!(world.connect("router", "203.0.113.26:80").expect("allowed"), address("192.168.12.99"));
    for to in ["203.0.113.26:81", "192.168.12.1:80"] {
        let error = world.connect("router", to).expect_err("not allowed");
        assert_eq!(error.kind(), ErrorKind::ConnectionRefused, "{to}");
    }
    // The same for a client that sends by the router, with no redirect.
    world.ip("client", "route add 203.0.113.26 via 10.128.6.47");
    assert_eq!(world.connect("client", "203.0.113.26:80").expect("allowed"), address("192.168.12.99"));
    let error = world.connect("client", "203.0.113.26:81").expect_err("not allowed");
    assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
}

#[test]
fn the_other_family_does_not_leave_past_the_router() {
    let world = World::new();
    let _servers = [world.serve("server", "[2001:db8:113::26]:80"), world.serve("client", "[::]:7000")];
    world.ip("server", "route add fd01::/64 via 2001:db8:12::2");
    world.ip("node", "route add 2001:db8:113::26 via 2001:db8:12::1");
    assert_eq!(world.connect("router", "[2001:db8:113::26]:80").expect("before"), address("fd01::47"));
    world.added(&config(&["192.168.12.99/24"], json!({})));
    let error = world.connect("router", "[2001:db8:113::26]:80").expect_err("no router of IPv6");
    assert!(matches!(error.kind(), ErrorKind::HostUnreachable | ErrorKind::NetworkUnreachable), "{error}");
    assert_eq!(world.connect("router", "[fd01::48]:7000").expect("within the cluster"), address("fd01::47"));
}

#[test]
fn a_process_that_chooses_the_first_interface_does_not_get_past_the_router() {
    let world = World::new();
    let _servers = [
        world.serve("server", "0.0.0.0:80"),
        world.serve("server", "[2001:db8:113::26]:80"),
        world.serve("client", "0.0.0.0:7000"),
        world.serve("client", "[fd01::48]:7000"),
        world.serve("router", "0.0.0.0:9090"),
    ];
    world.ip("server", "route add 10.128.6.0/23 via 192.168.12.2");
    world.ip("server", "route add fd01::/64 via 2001:db8:12::2");
    // A part of the cluster's network that only a route of the CNI plugin names.
    world.ip("client", "addr add 172.20.0.9/32 dev lo");
    world.ip("node", "route add 172.20.0.9 via 10.128.6.48");
    world.ip("router", "route add 172.20.0.0/24 via 10.128.6.1");
    let outside = [
        (Bound::Address("10.128.6.47"), "203.0.113.26:80"),
        (Bound::Device("eth0"), "203.0.113.26:80"),
        (Bound::Address("fd01::47"), "[2001:db8:113::26]:80"),
        (Bound::Device("eth0"), "[2001:db8:113::26]:80"),
    ];
    for (bound, to) in outside {
        assert!(world.connect_bound("router", bound, to).is_ok(), "{bound:?}: before");
    }
    // With a router of one family, the other one has no way past it either.
    world.added(&config(&["192.168.12.99/24"], json!({"allow": ["198.51.100.0/24"]})));
    for (bound, to) in outside {
        let error = world.connect_bound("router", bound, to).expect_err("only by the router, which does not allow it");
        let is_refused = matches!(
            error.kind(),
            ErrorKind::ConnectionRefused | ErrorKind::NetworkUnreachable | ErrorKind::HostUnreachable
        );
        assert!(is_refused, "{bound:?} {to}: {error}");
    }
    for (bound, to) in [
        (Bound::Address("10.128.6.47"), "10.128.6.48:7000"),
        (Bound::Device("eth0"), "172.20.0.9:7000"),
        (Bound::Address("fd01::47"), "[fd01::48]:7000"),
    ] {
        let source = if to.starts_with('[') { "fd01::47" } else { "10.128.6.47" };
        assert_eq!(world.connect_bound("router", bound, to).expect("inside"), address(source), "{bound:?}");
    }
    // A client of a network that no route names is answered.
    world.ip("client", "addr add 172.21.0.9/32 dev lo");
    world.ip("node", "route add 172.21.0.9 via 10.128.6.48");
    let answered = world.connect_bound("client", Bound::Address("172.21.0.9"), "10.128.6.47:9090");
    assert_eq!(answered.expect("an answer"), address("172.21.0.9"));
}

#[test]
fn a_pod_has_routers_on_several_networks() {
    let world = World::new();
    let before = world.snapshot("router");
    world.added(&usual());
    let second =
        config(&["192.168.13.99/24"], json!({"gateway": "192.168.13.1", "redirect": ["8081 tcp 203.0.113.26 80"]}));
    let second = second.to_string();
    let net2 = [("CNI_IFNAME", "net2")];
    let answer = world.call("ADD", &second, &net2);
    assert!(answer.is_success, "{}", answer.json);
    // Only the first one is the default route.
    assert!(answer.json.get("routes").is_none(), "{}", answer.json);
    let _servers = [world.serve("server", "0.0.0.0:80"), world.serve("other", "0.0.0.0:80")];
    for _ in 0..3 {
        assert_eq!(world.connect("client", "10.128.6.47:8080").expect("by the first"), address("192.168.12.99"));
        assert_eq!(world.connect("client", "10.128.6.47:8081").expect("by the second"), address("192.168.13.99"));
    }
    assert!(world.call("DEL", &usual().to_string(), &[]).is_success);
    assert_eq!(world.connect("client", "10.128.6.47:8081").expect("it stays"), address("192.168.13.99"));
    assert!(world.call("DEL", &second, &net2).is_success);
    world.assert_as_before("router", &before);
}

#[test]
fn an_ipvlan_serves_as_a_macvlan_does() {
    let world = World::new();
    let mut config = usual();
    config["interfaceType"] = json!("ipvlan");
    let answer = world.call("ADD", &config.to_string(), &[]);
    if answer.json["msg"].as_str().is_some_and(|said| said.contains("Operation not supported")) {
        return skipped("no ipvlan");
    }
    assert!(answer.is_success, "{}", answer.json);
    let _servers = [world.serve("server", "0.0.0.0:80"), world.serve("server", "[2001:db8:113::26]:80")];
    assert_eq!(world.connect("client", "10.128.6.47:8080").expect("redirected"), address("192.168.12.99"));
    assert_eq!(world.connect("client", "[fd01::47]:8080").expect("redirected"), address("2001:db8:12::99"));
    let mut with_result = config.clone();
    with_result["prevResult"] = answer.json;
    let check = world.call("CHECK", &with_result.to_string(), &[]);
    assert!(check.is_success, "{}", check.json);
    assert!(world.call("DEL", &config.to_string(), &[]).is_success);
}

#[test]
fn established_connections_pass_the_chains_once() {
    const TURNS: u32 = 300;
    let world = World::new();
    let mut config = usual();
    config["prevResult"] = world.added(&config);
    let rules = world.netns("router").exec("nft", &["list", "ruleset"]).expect("a list");
    if !rules.contains("flowtable fast") {
        return skipped("no flow tables");
    }
    world.nft("router", "insert rule inet egress-router-net1 forward counter");
    let _server = world.echo("server", "0.0.0.0:80");
    world.turns("client", "10.128.6.47:8080", TURNS);
    let rules = world.netns("router").exec("nft", &["list", "chain", "inet", "egress-router-net1", "forward"]);
    let rules = rules.expect("a list");
    let packets = rules.split("counter packets ").nth(1).and_then(|rest| rest.split(' ').next()?.parse::<u32>().ok());
    let packets = packets.unwrap_or_else(|| panic!("no counter in {rules}"));
    assert!((1..TURNS / 10).contains(&packets), "{packets} of {} packets and more", 2 * TURNS);
}

#[test]
fn the_world_sees_the_first_address_unless_a_process_takes_another_one() {
    let world = World::new();
    let addresses = ["192.168.12.99/24", "192.168.12.98/24"];
    world.added(&config(&addresses, json!({"redirect": ["8080 tcp 203.0.113.26 80"]})));
    let _server = world.serve("server", "0.0.0.0:80");
    assert_eq!(world.connect("client", "10.128.6.47:8080").expect("redirected"), address("192.168.12.99"));
    assert_eq!(world.connect("router", "203.0.113.26:80").expect("its own"), address("192.168.12.99"));
    let other = world.connect_bound("router", Bound::Address("192.168.12.98"), "203.0.113.26:80");
    assert_eq!(other.expect("the other address"), address("192.168.12.98"));
}

#[test]
fn the_interface_of_clients_has_any_name_and_the_node_needs_no_default_route() {
    let world = World::new();
    for line in
        ["link set eth0 down", "link set eth0 name ens5", "link set ens5 up", "route add default via 10.128.6.1"]
    {
        world.ip("router", line);
    }
    world.until_up("router");
    world.ip("node", "route del default via 192.168.12.1");
    world.ip("node", "route del default via 2001:db8:12::1");
    let given = json!({"gateway": "192.168.12.1", "redirect": ["8080 tcp 203.0.113.26 80"]});
    world.added(&config(&["192.168.12.99/24"], given));
    let _server = world.serve("server", "0.0.0.0:80");
    assert_eq!(world.connect("client", "10.128.6.47:8080").expect("redirected"), address("192.168.12.99"));
}

#[test]
fn a_port_is_redirected_for_its_protocol_alone() {
    let world = World::new();
    world
        .added(&config(&["192.168.12.99/24"], json!({"redirect": ["53 udp 203.0.113.26", "443 tcp 203.0.113.26 80"]})));
    let _server = world.serve("server", "0.0.0.0:80");
    assert_eq!(world.connect("client", "10.128.6.47:443").expect("redirected"), address("192.168.12.99"));
    for port in [53, 80] {
        let refused = world.connect("client", &format!("10.128.6.47:{port}")).expect_err("not redirected");
        assert_eq!(refused.kind(), ErrorKind::ConnectionRefused, "{port}");
    }
    assert_eq!(
        world.ask("client", "10.128.6.47:53", ("server", "203.0.113.26:53")).expect("an answer"),
        address("192.168.12.99")
    );
    let refused = world.ask("client", "10.128.6.47:443", ("server", "203.0.113.26:443")).expect_err("not redirected");
    assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
}
