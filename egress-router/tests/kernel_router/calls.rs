//! Calls as runtimes make them: versions, codes, what DEL and CHECK do, and many at once.

use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use egress_lab::topology::netns::link_address;
use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockType, bind, send, socket};
use serde_json::{Value, json};

use crate::world::{World, address, config, usual};

#[test]
fn del_leaves_the_namespace_as_it_was() {
    let world = World::new();
    let before = world.snapshot("router");
    let node = world.snapshot("node");
    let config = usual().to_string();
    for _ in 0..2 {
        world.added(&usual());
        assert!(world.call("DEL", &config, &[]).is_success);
        world.assert_as_before("router", &before);
    }
    // Again, without a namespace, with one that has gone, and with a configuration that ADD would refuse.
    for variables in [&[][..], &[("CNI_NETNS", "")], &[("CNI_NETNS", "/run/netns/gone")]] {
        assert!(world.call("DEL", &config, variables).is_success, "{variables:?}");
    }
    assert!(world.call("DEL", r#"{"cniVersion": "0.4.0", "name": "r", "ip": 7}"#, &[]).is_success);
    world.assert_as_before("node", &node);
}

#[test]
fn del_after_the_interface_is_gone_brings_the_routes_back() {
    let world = World::new();
    let routes = || {
        let list = |arguments: &[&str]| world.netns("router").exec("ip", arguments).expect("a list");
        [list(&["route"]), list(&["-6", "route"]), list(&["rule"]), list(&["-6", "rule"])]
    };
    let before = routes();
    world.added(&usual());
    // As with its master.
    world.ip("router", "link del net1");
    assert!(world.call("DEL", &usual().to_string(), &[]).is_success);
    assert_eq!(routes(), before);
    let tables = world.netns("router").exec("nft", &["list", "tables"]).expect("a list");
    assert_eq!(tables, "");
}

#[test]
fn an_interface_of_another_kind_is_left_alone() {
    let world = World::new();
    let answer = world.call("ADD", &usual().to_string(), &[("CNI_IFNAME", "eth0")]);
    assert_eq!(answer.json["code"], json!(100), "{}", answer.json);
    let before = world.snapshot("router");
    assert!(world.call("DEL", &usual().to_string(), &[("CNI_IFNAME", "eth0")]).is_success);
    world.assert_as_before("router", &before);
}

#[test]
fn a_forged_alias_changes_nothing_of_the_node() {
    let world = World::new();
    world.added(&usual());
    // It stands for any setting of the node, whose path begins with that of the settings of a namespace, but does no harm.
    let read = || {
        let setting =
            world.netns("router").run(|| Ok(std::fs::read_to_string("/proc/sys/net/ipv4/conf/all/arp_ignore")?));
        setting.expect("a setting")
    };
    let before = read();
    let forged = ["link", "set", "net1", "alias", "egress-router ../net/ipv4/conf/all/arp_ignore=1"];
    world.netns("router").exec("ip", &forged).expect("a pod with the right to");
    assert!(world.call("DEL", &usual().to_string(), &[]).is_success);
    assert_eq!(read(), before);
}

#[test]
fn a_second_add_changes_nothing() {
    let world = World::new();
    world.added(&usual());
    world.until_up("router");
    let before = world.snapshot("router");
    let answer = world.call("ADD", &usual().to_string(), &[]);
    assert!(!answer.is_success && answer.json["code"] == json!(100), "{}", answer.json);
    world.assert_as_before("router", &before);
}

#[test]
fn results_are_in_every_version() {
    let world = World::new();
    for version in ["0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"] {
        let mut config = usual();
        config["cniVersion"] = json!(version);
        let result = world.added(&config);
        assert_eq!(result["cniVersion"], json!(version));
        assert_eq!(result["ips"][0].get("version").is_some(), version.starts_with("0."), "{result}");
        assert_eq!(result["routes"][0], json!({"dst": "0.0.0.0/0", "gw": "192.168.12.1"}));
        assert!(world.call("DEL", &config.to_string(), &[]).is_success);
    }
    let versions = world.call("VERSION", "", &[]);
    assert_eq!(versions.json["supportedVersions"].as_array().map(Vec::len), Some(5));
}

#[test]
fn what_the_runtime_gets_wrong_has_the_codes_of_the_specification() {
    let world = World::new();
    let before = world.snapshot("router");
    let node = world.path("node");
    let usual = usual().to_string();
    type Case<'a> = (&'a str, &'a str, &'a [(&'a str, &'a str)], u32);
    let cases: [Case<'_>; 11] = [
        ("MAKE", "", &[], 4),
        ("ADD", &usual, &[("CNI_IFNAME", "")], 4),
        ("ADD", &usual, &[("CNI_IFNAME", "nineteen-characters")], 4),
        ("ADD", &usual, &[("CNI_CONTAINERID", "-bad/")], 4),
        ("ADD", "{", &[], 6),
        ("ADD", r#"{"cniVersion": "1.0.0", "name": ""}"#, &[], 7),
        ("ADD", r#"{"cniVersion": "2.0.0", "name": "r"}"#, &[], 1),
        ("ADD", r#"{"cniVersion": "1.0.0", "name": "r"}"#, &[], 7),
        ("ADD", &usual, &[("CNI_NETNS", "/run/netns/gone")], 3),
        ("ADD", &usual, &[("CNI_NETNS", &node)], 8),
        ("CHECK", &usual, &[], 7),
    ];
    for (command, config, variables, code) in cases {
        let answer = world.call(command, config, variables);
        assert!(
            !answer.is_success && answer.json["code"] == json!(code),
            "{command} {variables:?} {config}: {}",
            answer.json
        );
    }
    world.assert_as_before("router", &before);
}

#[test]
fn what_does_not_fit_the_node_is_refused_before_anything_changes() {
    let world = World::new();
    let before = world.snapshot("router");
    let with = |field: &str, value: Value| {
        let mut config = config(&["192.168.12.99/24"], json!({}));
        config[field] = value;
        config
    };
    for (config, says) in [
        (with("interfaceArgs", json!({"master": "nope0"})), "no interface \"nope0\", but eno1, eno2, cni0"),
        (with("interfaceArgs", json!({"mtu": "9000"})), "above 1500"),
        (config(&["192.168.12.2/24"], json!({})), "an address of the node itself"),
        (config(&["198.51.100.9"], json!({})), "has no prefix length"),
        (config(&["192.168.13.99/24"], json!({})), "the node has no default route of that family by eno2"),
        (config(&["192.168.12.99/24", "192.168.13.99/24"], json!({})), "eno1, eno2 of the node"),
        (config(&["192.168.12.1/24"], json!({})), "is an address of the router itself"),
        (config(&["192.168.12.99/24"], json!({"redirect": ["80 tcp 10.128.9.9"]})), "in a network of the cluster"),
    ] {
        let answer = world.call("ADD", &config.to_string(), &[]);
        let said = answer.json["msg"].as_str().unwrap_or_default();
        assert!(answer.json["code"] == json!(7) && said.contains(says), "{config}: {}", answer.json);
    }
    world.assert_as_before("router", &before);
}

#[test]
fn master_prefix_and_gateway_are_inferred() {
    let world = World::new();
    let result = world.added(&config(&["192.168.12.99"], json!({})));
    assert_eq!(result["ips"][0]["address"], json!("192.168.12.99/24"));
    assert_eq!(result["ips"][0]["gateway"], json!("192.168.12.1"));
    assert!(world.call("DEL", &usual().to_string(), &[]).is_success);
    // Of the wire that the address belongs to, not of that with the default route.
    world.added(&config(&["192.168.13.99/24"], json!({"gateway": "192.168.13.1"})));
    let _server = world.serve("other", "0.0.0.0:80");
    assert!(world.connect("router", "203.0.113.26:80").is_ok());
}

#[test]
fn a_gateway_outside_of_the_network_is_reached_on_the_link() {
    let world = World::new();
    world.ip("server", "route add 198.51.100.9 dev lan0");
    world.added(&config(&["198.51.100.9/32"], json!({"gateway": "192.168.12.1"})));
    let _server = world.serve("server", "0.0.0.0:80");
    assert_eq!(world.connect("router", "203.0.113.26:80").expect("on the link").to_string(), "198.51.100.9");
}

#[test]
fn every_mode_of_macvlan_is_made() {
    let world = World::new();
    for mode in ["Bridge", "private", "vepa", "passthru"] {
        let mut config = usual();
        config["interfaceArgs"] = json!({"mode": mode, "mtu": 1300});
        world.added(&config);
        let link = world.netns("router").exec("ip", &["-details", "link", "show", "net1"]).expect("a link");
        assert!(link.contains(&format!("macvlan mode {}", mode.to_lowercase())) && link.contains("mtu 1300"), "{link}");
        assert!(world.call("DEL", &config.to_string(), &[]).is_success);
    }
}

#[test]
fn check_finds_what_has_changed() {
    let world = World::new();
    let mut config = usual();
    config["prevResult"] = world.added(&config);
    let check = || world.call("CHECK", &config.to_string(), &[]);
    let differs = |says: &str| {
        let answer = check();
        let said = format!("{}\n{}", answer.json["msg"], answer.json["details"]);
        assert!(!answer.is_success && said.contains(says), "{says}: {}", answer.json);
    };
    assert!(check().is_success, "{}", check().json);
    let changes = [
        (
            "addr del 192.168.12.99/24 dev net1",
            "addr add 192.168.12.99/24 dev net1",
            "address 192.168.12.99/24 is gone",
        ),
        ("link set net1 mtu 1300", "link set net1 mtu 1500", "its MTU is 1300 instead of 1500"),
        (
            "rule del priority 28101 from 10.128.6.47",
            "rule add priority 28101 from 10.128.6.47 lookup 1701969920 proto 102",
            "from 10.128.6.47",
        ),
        // One that the rules do not know.
        ("route add 172.20.0.0/24 dev eth0", "route del 172.20.0.0/24 dev eth0", "set inside4 lacks 2 elements"),
    ];
    // The default route goes with the address.
    for (change, back, says) in &changes[1..] {
        world.ip("router", change);
        differs(says);
        world.ip("router", back);
        assert!(check().is_success, "{}", check().json);
    }
    world.nft("router", "add element inet egress-router-net1 redirect4 { tcp . 99 : 203.0.113.9 . 5 }");
    differs("set redirect4 lacks 0 elements and has 1 others");
    world.nft("router", "delete element inet egress-router-net1 redirect4 { tcp . 99 : 203.0.113.9 . 5 }");
    world.nft("router", "insert rule inet egress-router-net1 forward accept");
    differs("chain forward");
    let (change, _, says) = changes[0];
    world.ip("router", change);
    differs(says);
    world.ip("router", "link del net1");
    differs("the interface net1 is gone");
}

#[test]
fn a_duplicate_address_is_found_before_it_is_used() {
    let world = World::new();
    let before = world.snapshot("router");
    for address in ["192.168.12.1", "2001:db8:12::1"] {
        let prefix = if address.contains(':') { 64 } else { 24 };
        let gateway = if address.contains(':') { "2001:db8:12::7" } else { "192.168.12.7" };
        let config = config(&[&format!("{address}/{prefix}")], json!({"gateway": gateway}));
        let answer = world.call("ADD", &config.to_string(), &[]);
        let said = answer.json["msg"].as_str().unwrap_or_default();
        assert!(
            answer.json["code"] == json!(11) && said.contains("is in use by the host with MAC address"),
            "{}",
            answer.json
        );
        world.assert_as_before("router", &before);
    }
}

#[test]
fn a_file_may_say_what_its_overrides_allow() {
    let world = World::new();
    let folder = std::env::temp_dir().join(format!("egress-router-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    let (file, place) = (folder.join("routers"), folder.display().to_string());
    let here = [("EGRESS_ROUTER_CONFIG_DIR", place.as_str())];
    let ip = json!({"addresses": ["192.168.12.99/24"], "redirect": ["8080 tcp 203.0.113.26 80", "8081 tcp 203.0.113.26 81"]});
    std::fs::write(&file, json!({"ip": ip}).to_string()).expect("a file");
    let mut config = usual();
    config.as_object_mut().expect("an object").remove("ip");
    config["ipConfig"] =
        json!({"file": file, "overrides": {"gateway": "192.168.12.1", "redirect": ["8080 tcp 203.0.113.26 80"]}});
    // Elsewhere than the node's configurations are, it could be any file of the node.
    let answer = world.call("ADD", &config.to_string(), &[("EGRESS_ROUTER_CONFIG_DIR", "/run")]);
    assert!(answer.json["code"] == json!(5), "{}", answer.json);
    let answer = world.call("ADD", &config.to_string(), &here);
    assert!(answer.is_success, "{}", answer.json);
    assert!(answer.log.contains("the overrides do not allow port 8081 tcp"), "{}", answer.log);
    let _server = world.serve("server", "0.0.0.0:80");
    assert!(world.connect("client", "10.128.6.47:8080").is_ok());
    assert!(world.connect("client", "10.128.6.47:8081").is_err());
    assert!(world.call("DEL", &config.to_string(), &[]).is_success);
    config["ipConfig"]["overrides"] = json!({"addresses": ["192.168.12.98/24"]});
    let answer = world.call("ADD", &config.to_string(), &here);
    assert!(
        answer.json["code"] == json!(7) && answer.json["msg"].as_str().unwrap_or_default().contains("do not allow")
    );
    std::fs::remove_dir_all(&folder).expect("it was there");
}

#[test]
fn many_pods_are_attached_at_once() {
    const PODS: [&str; 8] = ["p0", "p1", "p2", "p3", "p4", "p5", "p6", "p7"];
    let mut world = World::new();
    for (at, pod) in (0_u8..).zip(PODS) {
        world.pod(pod, 100 + at);
    }
    let world = &world;
    std::thread::scope(|scope| {
        for (at, pod) in PODS.iter().enumerate() {
            scope.spawn(move || {
                let config = config(&[&format!("192.168.12.{}/24", 100 + at)], json!({})).to_string();
                let path = world.path(pod);
                let answer = world.call("ADD", &config, &[("CNI_NETNS", &path), ("CNI_CONTAINERID", pod)]);
                assert!(answer.is_success, "{}", answer.json);
            });
        }
    });
    let _server = world.serve("server", "0.0.0.0:80");
    for (at, pod) in PODS.iter().enumerate() {
        let seen = world.connect(pod, "203.0.113.26:80").expect("by its router");
        assert_eq!(seen.to_string(), format!("192.168.12.{}", 100 + at));
    }
}

#[test]
fn status_says_whether_the_master_is_up() {
    let world = World::new();
    let mut config = usual();
    assert!(world.call("STATUS", &config.to_string(), &[]).is_success);
    assert!(world.call("GC", &config.to_string(), &[]).is_success);
    config["interfaceArgs"] = json!({"master": "eno2"});
    assert!(world.call("STATUS", &config.to_string(), &[]).is_success);
    world.ip("node", "link set eno2 down");
    let answer = world.call("STATUS", &config.to_string(), &[]);
    assert!(answer.json["code"] == json!(50), "{}", answer.json);
    config["interfaceArgs"] = json!({"master": "eno9"});
    assert_eq!(world.call("STATUS", &config.to_string(), &[]).json["code"], json!(50));
}

#[test]
fn a_changed_configuration_replaces_the_rules_and_nothing_else() {
    let world = World::new();
    world.added(&usual());
    let _servers = [world.serve("server", "0.0.0.0:80"), world.echo("server", "0.0.0.0:7")];
    let path = world.path("router");
    let reconcile = |config: &serde_json::Value| world.command(&["reconcile", "--netns", &path], &config.to_string());
    let (ended_well, said) = reconcile(&usual());
    assert!(ended_well && said.contains("as the configuration says"), "{said}");
    let mut changed = usual();
    changed["ip"]["redirect"] = json!(["8081 tcp 203.0.113.26 80", "8007 tcp 203.0.113.26 7"]);
    let (ended_well, said) = reconcile(&changed);
    assert!(ended_well && said.contains("set redirect4"), "{said}");
    assert!(world.connect("client", "10.128.6.47:8080").is_err(), "the former redirect");
    assert_eq!(world.connect("client", "10.128.6.47:8081").expect("the new one"), address("192.168.12.99"));
    world.turns("client", "10.128.6.47:8007", 10);
    changed["ip"]["addresses"] = json!(["192.168.12.98/24", "2001:db8:12::99/64"]);
    let (ended_well, said) = reconcile(&changed);
    assert!(!ended_well && said.contains("192.168.12.98/24") && said.contains("takes a new pod"), "{said}");
    assert_eq!(world.connect("client", "10.128.6.47:8081").expect("as before"), address("192.168.12.99"));
    let (ended_well, said) = world.command(&["reconcile", "--netns", &world.path("client")], &usual().to_string());
    assert!(!ended_well && said.contains("the interface net1 is gone"), "{said}");
    // The server has forgotten the router.
    world.ip("server", "neigh flush all");
    world.ip("server", "neigh add 192.168.12.99 lladdr 02:00:00:00:00:01 dev lan0 nud stale");
    let (ended_well, said) = world.command(&["announce", "--netns", &path], "");
    assert!(ended_well && said.contains("announced 192.168.12.99/24") && said.contains("2001:db8:12::99/64"), "{said}");
    let link = world.netns("router").exec("ip", &["-brief", "link", "show", "net1"]).expect("a line");
    let mac = link.split_whitespace().nth(2).expect("a MAC address");
    let neighbour = world.netns("server").exec("ip", &["neigh", "show", "192.168.12.99"]).expect("a list");
    assert!(mac.len() == 17 && neighbour.contains(mac), "{neighbour} and {mac}");
    let (ended_well, said) = world.command(&["announce", "--netns", &path, "--interface", "eth0"], "");
    assert!(!ended_well && said.contains("no interface of a router"), "{said}");
}

/// Multus removes the default routes of an interface and makes its own, by the same gateway.
#[test]
fn a_default_route_that_multus_has_replaced_is_no_difference() {
    let world = World::new();
    let before = world.snapshot("router");
    let mut config = usual();
    config["prevResult"] = world.added(&config);
    world.ip("router", "route del default via 192.168.12.1 dev net1");
    world.ip("router", "route add default via 192.168.12.1 dev net1");
    let check = world.call("CHECK", &config.to_string(), &[]);
    assert!(check.is_success, "{}", check.json);
    assert!(world.call("DEL", &config.to_string(), &[]).is_success);
    world.assert_as_before("router", &before);
}

#[test]
fn several_default_routes_of_the_pod_and_of_the_node_are_served() {
    let world = World::new();
    world.ip("router", "route add default via 10.128.6.2 metric 200");
    world.ip(
        "node",
        "route replace default metric 0 nexthop via 192.168.12.1 dev eno1 nexthop via 192.168.13.1 dev eno2",
    );
    let before = world.snapshot("router");
    // The address says which interface, and the gateway is given: a route by several has none of its own.
    let with_gateway =
        config(&["192.168.12.99/24"], json!({"gateway": "192.168.12.1", "redirect": ["8080 tcp 203.0.113.26 80"]}));
    world.added(&with_gateway);
    let _server = world.serve("server", "0.0.0.0:80");
    assert_eq!(world.connect("client", "10.128.6.47:8080").expect("redirected"), address("192.168.12.99"));
    // The node's own address is reached by the cluster's network.
    let _on_node = world.serve("node", "0.0.0.0:9000");
    assert_eq!(world.connect("router", "192.168.12.2:9000").expect("the node"), address("10.128.6.47"));
    assert!(world.call("DEL", &with_gateway.to_string(), &[]).is_success);
    world.assert_as_before("router", &before);
}

#[test]
fn a_neighbour_that_floods_does_not_hold_up_the_question_for_duplicates() {
    const FLOOD: Duration = Duration::from_secs(4);
    let world = World::new();
    let flood = world.netns("server").spawn(|| {
        let socket = socket(AddressFamily::Packet, SockType::Raw, SockFlag::SOCK_CLOEXEC, None)?;
        bind(socket.as_raw_fd(), &link_address("lan0")?)?;
        // A question for another host's address, to everyone.
        let mut frame = [0_u8; 42];
        frame[..6].fill(0xff);
        frame[6..12].copy_from_slice(&[2, 0, 0, 0, 0, 9]);
        frame[12..22].copy_from_slice(&[8, 6, 0, 1, 8, 0, 6, 4, 0, 1]);
        frame[22..28].copy_from_slice(&[2, 0, 0, 0, 0, 9]);
        frame[28..32].copy_from_slice(&[192, 168, 12, 9]);
        frame[38..42].copy_from_slice(&[192, 168, 12, 10]);
        let (begin, mut sent) = (Instant::now(), 0_u64);
        while begin.elapsed() < FLOOD {
            // A full queue is no matter.
            sent += u64::from(send(socket.as_raw_fd(), &frame, MsgFlags::empty()).is_ok());
        }
        Ok(sent)
    });
    let flood = flood.expect("a thread");
    std::thread::sleep(Duration::from_millis(100));
    let begin = Instant::now();
    world.added(&usual());
    let took = begin.elapsed();
    let sent = flood.join().expect("it does not panic").expect("it sends");
    println!("ADD took {} ms beside {sent} frames", took.as_millis());
    // It would end with the flood.
    assert!(took < FLOOD - Duration::from_secs(1) && sent > 1_000, "{took:?}, {sent} frames");
}
