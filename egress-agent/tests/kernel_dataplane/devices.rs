//! The node's devices: the overlay device, recreated devices, and the programs' configuration.

use std::time::Duration;

use egress_common::abi::{Addr, Owned, OwnedAddr};
use egress_core::model::state::{Action, EgressId, LostFlows, NodeAddress, OnUnknownPod, TunnelEndpoint};
use egress_core::plan::executor::Executor;
use egress_datapath::attach::pod_interfaces::UnservedCni;
use egress_datapath::names::{DEFAULT_TUNNEL_PORT, Hook, OVERLAY_DEVICE, OVERLAY_MAC};
use egress_datapath::{Attachment, Settings, StartError};

use crate::node::{
    self, MGMT, UPLINK, attachment, device, eventually, ip, is_attached, mac_text, on_node, output, patience, start,
};
use crate::skips::skipped;

#[test]
fn the_overlay_device_has_its_shape() {
    on_node(|node| async move {
        let _dataplane = node.start().await;
        let link = output(&["ip", "-o", "-d", "link", "show", OVERLAY_DEVICE]);
        let port = format!("dstport {DEFAULT_TUNNEL_PORT}");
        for part in ["external", "nolearning", "udp6zerocsumrx", "addrgenmode none", "mtu 65535", "UP", port.as_str()] {
            assert!(link.contains(part), "{part} in {link}");
        }
        assert_eq!(output(&["ip", "-o", "addr", "show", OVERLAY_DEVICE]), "", "no address of its own");
        let sockets = output(&["ss", "-lunH"]);
        // Without the kernel's diag module, `ss` does not know that the second is for IPv6 only.
        for shown in [&["0.0.0.0"][..], &["[::]", "*"]] {
            let is_open = shown.iter().any(|address| sockets.contains(&format!(" {address}:{DEFAULT_TUNNEL_PORT}")));
            assert!(is_open, "{sockets}");
        }
    });
}

#[test]
fn the_overlay_is_not_tracked() {
    on_node(|node| async move {
        // Another application's rule makes the kernel track connections.
        output(&[
            "nft",
            "add table inet other; add chain inet other c { type filter hook input priority 0; }; \
                  add rule inet other c ct state invalid drop",
        ]);
        drop(node.start().await);
        let _dataplane = node.start().await;
        let rules = output(&["nft", "list", "table", "inet", "egress-agent"]);
        assert_eq!(rules.matches(&format!("udp dport {DEFAULT_TUNNEL_PORT} notrack")).count(), 2, "{rules}");
        let send = |port| {
            let socket = std::net::UdpSocket::bind("172.18.0.1:0").expect("a socket");
            socket.send_to(b"not VXLAN", ("172.18.0.2", port)).expect("send");
        };
        node.outside(|| [DEFAULT_TUNNEL_PORT, 9999].map(send));
        let tracked = || std::fs::read_to_string("/proc/thread-self/net/nf_conntrack").unwrap_or_default();
        if !std::fs::exists("/proc/thread-self/net/nf_conntrack").expect("look for it") {
            return println!("this kernel does not show its connections: only the rules were checked");
        }
        eventually("another port is tracked", || tracked().contains("dport=9999")).await;
        assert!(!tracked().contains(&format!("dport={DEFAULT_TUNNEL_PORT}")), "{}", tracked());
    });
}

#[test]
fn an_overlay_device_of_another_shape_is_replaced() {
    on_node(|node| async move {
        ip(&format!("link add {OVERLAY_DEVICE} type vxlan id 5 dstport 4789 dev {UPLINK}\n"));
        let dataplane = node.start().await;
        assert!(is_attached(Hook::FromOverlay));
        let (index, mac) = device(OVERLAY_DEVICE);
        assert_eq!(mac, OVERLAY_MAC);
        drop(dataplane);
        let _again = node.start().await;
        assert_eq!(device(OVERLAY_DEVICE).0, index, "one of the right shape is kept");
    });
}

#[test]
fn another_tunnel_port_moves_the_device() {
    on_node(|node| async move {
        drop(node.start().await);
        let settings = Settings { tunnel_port: 4795, ..node.settings() };
        let _dataplane = start(settings).await;
        assert!(output(&["ip", "-d", "link", "show", OVERLAY_DEVICE]).contains("dstport 4795"));
        assert!(is_attached(Hook::FromOverlay), "the severed link was recreated");
        assert_eq!(node.config().tunnel_port, 4795);
    });
}

#[test]
fn another_tunnel_port_in_use_changes_nothing() {
    on_node(|node| async move {
        drop(node.start().await);
        let before = (device(OVERLAY_DEVICE).0, Hook::ALL.map(node::programs));
        for taken in ["0.0.0.0:4795", "[::]:4795", "172.18.0.2:4795"] {
            let socket = std::net::UdpSocket::bind(taken).expect("take the port");
            let settings = Settings { tunnel_port: 4795, ..node.settings() };
            let refused = node::refused(settings).await;
            assert!(matches!(refused, StartError::TunnelPortTaken { port: 4795 }), "{taken}: {refused:?}");
            assert_eq!((device(OVERLAY_DEVICE).0, Hook::ALL.map(node::programs)), before);
            assert!(is_overlay_up());
            assert!(output(&["ip", "-d", "link", "show", OVERLAY_DEVICE]).contains("dstport 4794"));
            assert_eq!(node.config().tunnel_port, 4794);
            drop(socket);
        }
    });
}

#[test]
fn programs_have_the_configuration_of_the_node() {
    on_node(|node| async move {
        let mut dataplane = node.start().await;
        let config = node.config();
        assert_eq!(config.generation, 0, "the reconciler has written nothing");
        assert_eq!((config.uplink_ifindex, config.uplink_mac), device(UPLINK));
        assert_eq!((config.mgmt_ifindex, config.mgmt_mac), device(MGMT));
        assert_eq!(config.overlay_ifindex, device(OVERLAY_DEVICE).0);
        assert_eq!((config.pod_mtu, config.uplink_mtu, config.overlay_mtu), (1400, 1500, 1450));
        assert_eq!(config.node_v4, Addr::v4([172, 18, 0, 2]));
        assert_eq!(config.node_v6.to_ip(), "fd00:172:18::2".parse::<std::net::IpAddr>().expect("a literal"));
        // Above the ephemeral ports of a new network namespace.
        assert_eq!((config.node_ports.first, config.node_ports.last), (61000, 65535));

        dataplane.apply(&Action::SetUnknownPods(OnUnknownPod::Pass)).await.expect("apply");
        let config = node.config();
        assert_eq!(config.on_unknown_pod(), OnUnknownPod::Pass);
        assert_ne!(config.generation, 0);
        let v6 = TunnelEndpoint("fd00:172:18::2".parse().expect("a literal"));
        let own = NodeAddress { own: true, node: v6 };
        dataplane.apply(&Action::PutNode(v6.0, own)).await.expect("apply");
        assert_eq!(node.config().overlay_mtu, 1430, "an IPv6 underlay needs twenty more bytes");
    });
}

/// With `PassWhileFollowed`, unknown pods pass for three seconds after each sign that the agent follows the pods.
#[test]
fn unknown_pods_pass_while_an_agent_follows_the_pods() {
    on_node(|node| async move {
        let mut dataplane = node.start().await;
        let passes = |seconds: u64| {
            let now = nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC).expect("the clock");
            let now = u64::try_from(now.tv_sec()).expect("it counts up") + seconds;
            node.config().passes_unknown_pods(now * 1_000_000_000)
        };
        dataplane.apply(&Action::SetUnknownPods(OnUnknownPod::PassWhileFollowed)).await.expect("apply");
        assert_eq!((passes(1), passes(4)), (true, false));
        dataplane.follows(false);
        assert!(!passes(0), "the agent ends");
        dataplane.follows(true);
        assert!(passes(1));
        dataplane.apply(&Action::SetUnknownPods(OnUnknownPod::Drop)).await.expect("apply");
        dataplane.follows(true);
        assert!(!passes(1));
        dataplane.apply(&Action::SetUnknownPods(OnUnknownPod::Pass)).await.expect("apply");
        assert!(passes(4), "no object selects anything");
    });
}

#[test]
fn a_recreated_device_gets_its_programs_at_once() {
    on_node(|node| async move {
        let mut dataplane = node.start().await;
        dataplane.apply(&Action::SetUnknownPods(OnUnknownPod::Drop)).await.expect("apply");
        ip(&format!("link del {MGMT}\n"));
        eventually("the management port's absence is noticed", || node.config().mgmt_ifindex == 0).await;
        node.make_mgmt();
        let took = eventually("from_pod is back", || is_attached(Hook::FromPod)).await;
        println!("from_pod: {took:?} after the management port appeared");
        eventually("both programs are back", || is_attached(Hook::ToPod)).await;
        eventually("the configuration follows", || {
            let config = node.config();
            (config.mgmt_ifindex, config.mgmt_mac) == device(MGMT)
        })
        .await;
        assert_eq!(node.config().on_unknown_pod(), OnUnknownPod::Drop);

        // The overlay device is ours: it is created again.
        ip(&format!("link del {OVERLAY_DEVICE}\n"));
        eventually("the overlay device is back", || is_attached(Hook::FromOverlay)).await;
        eventually("the configuration follows", || node.config().overlay_ifindex == device(OVERLAY_DEVICE).0).await;
        eventually("and it is up", is_overlay_up).await;
        // Another application sets it down.
        ip(&format!("link set {OVERLAY_DEVICE} down\n"));
        eventually("it is up again", is_overlay_up).await;
    });
}

fn is_overlay_up() -> bool {
    output(&["ip", "-o", "link", "show", OVERLAY_DEVICE]).contains(",UP")
}

/// Without its program, packets of the overlay would enter the host's stack.
#[test]
fn the_overlay_device_is_not_up_before_its_program_is_attached() {
    on_node(|node| async move {
        if attachment() == Attachment::Clsact {
            return skipped("the kernel refuses a link here");
        }
        let monitor = LinkMonitor::start();
        // The kernel refuses the program's link, because a map is pinned in its place.
        drop(node.start().await);
        ip(&format!("link del {OVERLAY_DEVICE}\n"));
        std::fs::remove_file(node.pin("links/from_overlay")).expect("remove the pin");
        let map: aya::maps::HashMap<aya::maps::MapData, u32, u32> =
            aya::maps::HashMap::create(1, 0).expect("make a map");
        map.pin(node.pin("links/from_overlay")).expect("pin a map");
        let refused = node::refused(node.settings()).await;
        assert!(matches!(refused, StartError::Attach { .. }), "the program cannot be attached: {refused:?}");
        assert!(!is_overlay_up(), "it is down without its program");
        let seen = monitor.until_marked();
        let made_last = seen.iter().rev().take_while(|line| !line.contains("Deleted"));
        let ours: Vec<_> = made_last.filter(|line| line.contains(OVERLAY_DEVICE)).collect();
        assert!(!ours.is_empty() && ours.iter().all(|line| !line.contains(",UP")), "never up: {ours:?}");
    });
}

/// Every change of a link of this thread's namespace, in order.
struct LinkMonitor {
    process: std::process::Child,
    lines: std::sync::mpsc::Receiver<String>,
}

impl LinkMonitor {
    /// Starts the monitor and waits until it reports a new device.
    fn start() -> Self {
        let mut process = std::process::Command::new("ip")
            .args(["-o", "monitor", "link"])
            .stdout(std::process::Stdio::piped())
            .spawn()
            .expect("watch the links");
        let output = std::io::BufReader::new(process.stdout.take().expect("a pipe"));
        let (sender, lines) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let lines = std::io::BufRead::lines(output).map_while(Result::ok);
            lines.take_while(|line| sender.send(line.clone()).is_ok()).for_each(drop);
        });
        let monitor = Self { process, lines };
        let reports = (0..100).any(|_| {
            ip("link add mark0 type veth peer name mark1\n");
            ip("link del mark0\n");
            // Changes before it listens are not reported, so a later device may be the first.
            let line = monitor.lines.recv_timeout(Duration::from_millis(100));
            line.is_ok_and(|line| line.contains("mark0") || line.contains("mark1"))
        });
        assert!(reports, "the monitor of links reports nothing");
        monitor
    }

    /// The reports so far.
    fn until_marked(&self) -> Vec<String> {
        ip("link add last0 type veth peer name last1\n");
        let next =
            || self.lines.recv_timeout(patience(Duration::from_secs(20))).expect("the monitor reports every link");
        std::iter::repeat_with(next).take_while(|line| !line.contains("last0")).collect()
    }
}

impl Drop for LinkMonitor {
    fn drop(&mut self) {
        // It may have ended by itself; its thread ends with it.
        let _ended = self.process.kill().and_then(|()| self.process.wait());
    }
}

#[test]
fn a_walk_of_the_mappings_does_not_delay_devices() {
    on_node(|node| async move {
        let mut dataplane = node.start().await;
        crate::actions::make_flow(&node, "10.244.1.10", 1, "172.18.0.100", 1001);
        let (started, is_started) = std::sync::mpsc::channel();
        let (continue_walk, may_continue) = std::sync::mpsc::channel::<()>();
        let walker = dataplane.reader();
        let walk = std::thread::spawn(move || {
            let mut released = Vec::new();
            let walked = walker.mappings(|_, _| {
                started.send(()).expect("the test waits");
                // Long after the device should be back, so that a failure ends too.
                released.push(may_continue.recv_timeout(patience(Duration::from_secs(20))).is_ok());
            });
            walked.expect("walk");
            released
        });
        is_started.recv().expect("the walk has begun");
        // A cut waits for it, and delays nothing either.
        let pod = [10, 244, 1, 10].into();
        let actions = [Action::CutPodFlows(pod, LostFlows::of_policy(EgressId(1)))];
        let cut = async { dataplane.apply(&actions[0]).await.expect("cut") };
        let follow = async {
            ip(&format!("link del {MGMT}\n"));
            eventually("the management port's absence is noticed", || node.config().mgmt_ifindex == 0).await;
            node.make_mgmt();
            eventually("its programs are back", || is_attached(Hook::FromPod) && is_attached(Hook::ToPod)).await;
            assert!(!walk.is_finished(), "while the maps are being walked");
            // Both keys of the mapping.
            continue_walk.send(()).and_then(|()| continue_walk.send(())).expect("the walk waits");
        };
        futures::join!(cut, follow);
        assert_eq!(walk.join().expect("the walk"), [true; 2]);
    });
}

#[test]
fn owned_addresses_follow_the_uplink() {
    on_node(|node| async move {
        let mut dataplane = node.start().await;
        let address: std::net::IpAddr = "fd00:172:18::1:100".parse().expect("a literal");
        dataplane.apply(&Action::Own(EgressId(9), address)).await.expect("own");
        let entry = || node.map::<Addr, OwnedAddr>("owned_addr").get(&address.into(), 0).expect("its entry");
        let before = device(UPLINK);
        assert_eq!((entry().ifindex, entry().mac), before);

        ip(&format!("link del {UPLINK}\n"));
        node.make_uplink();
        eventually("the uplink's programs are back", || is_attached(Hook::FromNetdev) && is_attached(Hook::ToNetdev))
            .await;
        eventually("the entry follows", || (entry().ifindex, entry().mac) == device(UPLINK)).await;
        assert_ne!(device(UPLINK), before);
        eventually("the group is joined again", || {
            output(&["ip", "maddr", "show", "dev", UPLINK]).contains("33:33:ff:01:01:00")
        })
        .await;

        // A new link address alone is followed too, and cached decisions are invalidated after it.
        let mac = [0x02, 0, 0, 0, 0, 0x77];
        let decisions = node.config().decisions;
        ip(&format!("link set {UPLINK} address {}\n", mac_text(mac)));
        eventually("decisions are new", || node.config().decisions != decisions).await;
        assert_eq!(entry().mac, mac, "the entry has followed the link address by then");
        eventually("the configuration follows", || node.config().uplink_mac == mac).await;

        // A new MTU likewise.
        let owned = || node.map::<u32, Owned>("owned").get(&9, 0).expect("its entry");
        assert_eq!((owned().ifindex, owned().mtu), (device(UPLINK).0, 1500));
        let decisions = node.config().decisions;
        ip(&format!("link set {UPLINK} mtu 1400\n"));
        eventually("decisions are new", || node.config().decisions != decisions).await;
        assert_eq!((owned().mtu, node.config().uplink_mtu), (1400, 1400), "the entry has followed by then");
    });
}

#[test]
fn a_detached_program_is_attached_again_at_restart() {
    on_node(|node| async move {
        drop(node.start().await);
        match attachment() {
            Attachment::Tcx => std::fs::remove_file(node.pin("links/from_pod")).expect("remove the pin"),
            Attachment::Clsact => drop(output(&["tc", "filter", "del", "dev", MGMT, "ingress"])),
        }
        eventually("the program is detached", || !is_attached(Hook::FromPod)).await;
        let _dataplane = node.start().await;
        assert!(is_attached(Hook::FromPod));
    });
}

#[test]
fn another_uplink_takes_the_programs_along() {
    on_node(|node| async move {
        drop(node.start().await);
        // The former uplink hosts no egress IP.
        ip(&format!("link add eth7 type veth peer name eth8\nlink set eth7 up\naddr flush dev {UPLINK}\n"));
        let settings = Settings { uplink: "eth7".to_owned(), ..node.settings() };
        let _dataplane = start(settings).await;
        eventually("the programs are gone from the old uplink", || {
            !is_attached(Hook::FromNetdev) && !is_attached(Hook::ToNetdev)
        })
        .await;
        assert_eq!(node.config().uplink_ifindex, device("eth7").0);
        assert_eq!(node.config().node_v4, Addr::UNSPECIFIED);
    });
}

#[test]
fn changed_routes_and_neighbours_are_looked_up_again() {
    on_node(|node| async move {
        let _dataplane = node.start().await;
        let changes = [
            "route add 198.51.100.0/24 via 172.18.0.1",
            "route del 198.51.100.0/24",
            "route add 2001:db8::/32 via fd00:172:18::1",
            "addr add 172.18.0.3/16 dev breth0",
            "neigh replace 172.18.0.9 lladdr 02:00:00:00:00:09 dev breth0",
            "neigh replace 172.18.0.9 lladdr 02:00:00:00:00:0a dev breth0",
            "rule add from 192.0.2.1 lookup 100 priority 5000",
            "-6 rule add from 2001:db8::1 lookup 100 priority 5000",
            "rule del from 192.0.2.1 lookup 100 priority 5000",
        ];
        for change in changes {
            // Wait until earlier changes no longer raise the generation.
            let mut before = node.config().route_generation;
            loop {
                tokio::time::sleep(Duration::from_millis(150)).await;
                let now = node.config().route_generation;
                if now == before {
                    break;
                }
                before = now;
            }
            let words: Vec<&str> = std::iter::once("ip").chain(change.split(' ')).collect();
            output(&words);
            eventually(change, || node.config().route_generation != before).await;
        }
    });
}

/// Each pod has an interface of its own, and the management port never comes.
#[test]
fn a_cni_whose_pods_have_interfaces_of_their_own_is_refused() {
    on_node(|node| async move {
        ip(&format!("link del {MGMT}\n"));
        let refused = |refused: StartError| match refused {
            StartError::UnservedCni { pod, .. } => (pod.name, pod.cni),
            other => panic!("{other}"),
        };
        // An early start: a bridge with a pod's interface in it is of a CNI that is served.
        ip(&format!("link add veth1 type veth peer name eth0 netns {}\nlink set veth1 up\n", node.outside_path()));
        node.outside(|| ip("link set eth0 up\n"));
        ip("route add 10.244.1.7/32 dev veth1\nlink add cni1 type bridge\nlink set veth1 master cni1\n");
        drop(node.start().await);
        assert_eq!(node::clean(&node.settings()).await, [] as [&str; 0]);

        ip("link set veth1 nomaster\n");
        let as_kindnet = refused(node::refused(node.settings()).await);
        assert_eq!(as_kindnet, ("veth1".to_owned(), UnservedCni::Routed));
        assert!(!node.pin("maps").exists(), "a refused start has left pins");
        drop(start(Settings { skip_cni_check: true, ..node.settings() }).await);
        assert_eq!(node::clean(&node.settings()).await, [] as [&str; 0]);

        ip("link set veth1 name cali0123456789a\n");
        assert_eq!(refused(node::refused(node.settings()).await).1, UnservedCni::Calico);
        // With its management port the node is served, whatever else is on it.
        node.make_mgmt();
        let _dataplane = node.start().await;
        assert!(is_attached(Hook::FromPod));
    });
}
