//! ABI migration: this agent takes over from an agent with another layout of the maps.

use std::collections::BTreeSet;
use std::fs;
use std::net::UdpSocket;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use aya::programs::links::{FdLink, PinnedLink};
use egress_common::abi::{ABI_VERSION, Verdict};
use egress_core::model::state::{Action, EgressId, OnUnknownPod, PodState, Prefix, PrefixKind, TunnelEndpoint};
use egress_core::plan::executor::Executor;
use egress_datapath::names::{Hook, NFT_TABLE};
use egress_datapath::settings::InitialState;
use egress_datapath::{Dataplane, Settings, StartError};

use crate::actions::addr;
use crate::node::{self, TestNode, clean, eventually, forward, ip, is_attached, on_node, output};

const POD: &str = "10.244.1.10";
const WORLD: &str = "203.0.113.5";

/// Names of hooks in this layout, and up to layout 6.
const FORMER_NAMES: [(&str, &str); 5] = [
    ("from_pod", "mgmt_ingress"),
    ("to_pod", "mgmt_egress"),
    ("from_overlay", "overlay_ingress"),
    ("from_netdev", "uplink_ingress"),
    ("to_netdev", "uplink_egress"),
];

/// A selected pod whose object has no policy yet: its packets to the world are dropped.
async fn fill(dataplane: &mut Dataplane) {
    let subnet = Prefix { kind: PrefixKind::PodSubnet, node: Some(TunnelEndpoint([172, 18, 0, 2].into())) };
    let net = "10.244.1.0/24".parse().expect("a literal");
    let own = Action::Own(EgressId(7), [172, 18, 0, 100].into());
    let pod = Action::PutPod(addr(POD), PodState::Selected(EgressId(7)));
    for action in [Action::SetUnknownPods(OnUnknownPod::Pass), Action::PutPrefix(net, subnet), pod, own] {
        dataplane.apply(&action).await.expect("apply an action");
    }
}

/// Leaves the pins unchanged: the sizes in the settings change.
fn resize(node: &TestNode) -> PathBuf {
    node.bpffs.join(format!("v{ABI_VERSION}-1"))
}

/// Turns the node's pins into those of another layout, whose maps have nothing in common with ours.
fn make_other(node: &TestNode) -> PathBuf {
    let other = node.bpffs.join(format!("v{}", ABI_VERSION - 1));
    fs::rename(node.pin(""), &other).expect("rename the directory");
    for (name, former) in FORMER_NAMES {
        let link = |name: &str| other.join("links").join(name);
        if link(name).exists() {
            fs::rename(link(name), link(former)).expect("rename a link");
        }
    }
    for map in ["pods", "nat", "config"] {
        fs::remove_file(other.join("maps").join(map)).expect("take a map away");
    }
    other
}

/// Counts the pod's packets that the host forwards, in another table.
fn count_forwarded() {
    forward();
    output(&[
        "nft",
        "add table inet other; \
         add chain inet other forward { type filter hook forward priority 0; }; \
         add rule inet other forward ip saddr 10.244.1.10 counter",
    ]);
}

fn forwarded() -> u64 {
    let text = output(&["nft", "list", "table", "inet", "other"]);
    let mut words = text.split_whitespace().skip_while(|word| *word != "packets");
    words.nth(1).and_then(|count| count.parse().ok()).expect("a counter")
}

fn guards_the_pod() -> bool {
    output(&["nft", "list", "table", "inet", NFT_TABLE]).contains(POD)
}

/// Sends as the pod until `stop`, and returns the number of packets.
fn send_until(stop: &AtomicBool) -> u64 {
    let socket = UdpSocket::bind((POD, 5000)).expect("the pod's address");
    let mut sent = 0;
    while !stop.load(Ordering::Relaxed) {
        socket.send_to(b"may not leave", (WORLD, 9)).expect("send");
        sent += 1;
        std::thread::sleep(Duration::from_micros(500));
    }
    sent
}

fn links(node: &TestNode) -> Vec<u32> {
    let linked = |hook: Hook| PinnedLink::from_pin(node.pin("links").join(hook.name())).ok();
    let number = |link| FdLink::from(link).info().expect("its information").id();
    Hook::ALL.into_iter().filter_map(linked).map(number).collect()
}

/// No packet of a selected pod passes while the maps are recreated, also if an agent is killed in between.
#[test]
fn a_migration_from_another_layout_lets_nothing_pass() {
    let settings = Settings::clone;
    on_node(move |node| migrates(node, make_other, settings));
}

#[test]
fn a_migration_to_maps_of_another_size_lets_nothing_pass() {
    let settings = |settings: &Settings| Settings { nat_entries: 4096, ..settings.clone() };
    on_node(move |node| migrates(node, resize, settings));
}

async fn migrates(node: TestNode, make_other: fn(&TestNode) -> PathBuf, settings: fn(&Settings) -> Settings) {
    let settings = settings(&node.settings());
    {
        count_forwarded();
        node.outside(|| ip(&format!("addr add {POD}/24 dev pods0\nroute add 203.0.113.0/24 via 10.244.1.2\n")));
        let mut first = node.start().await;
        fill(&mut first).await;
        let (programs, linked) = (Hook::ALL.map(node::programs), links(&node));
        drop(first);
        let other = make_other(&node);
        let stop = AtomicBool::new(false);
        let sent = std::thread::scope(|scope| {
            let sender = scope.spawn(|| node.outside(|| send_until(&stop)));
            let steps = scope.spawn(|| {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
                runtime.expect("make a runtime").block_on(async {
                    for _ in 0..2 {
                        let mut dataplane = node::start(settings.clone()).await;
                        let seen = dataplane.observe().await.expect("observe");
                        assert!(seen.owned.is_empty() && seen.pods.is_empty(), "{seen:?}");
                        assert_eq!(seen.on_unknown_pod, Some(OnUnknownPod::Drop), "the programs are configured");
                        assert!(other.join("maps").exists() && guards_the_pod());
                        tokio::time::sleep(Duration::from_millis(20)).await;
                    }
                    let mut last = node::start(settings.clone()).await;
                    fill(&mut last).await;
                    last.confirm();
                    tokio::time::sleep(Duration::from_millis(20)).await;
                    drop(last);
                });
            });
            let steps = steps.join();
            stop.store(true, Ordering::Relaxed);
            steps.expect("the steps");
            sender.join().expect("the sender")
        });
        assert!(sent > 100, "{sent}");
        assert_eq!(forwarded(), 0, "of {sent}");
        assert!(!other.exists() && guards_the_pod());
        for (hook, before) in Hook::ALL.into_iter().zip(programs) {
            let after = node::programs(hook);
            assert!(is_attached(hook) && after.len() == 1 && after[0].1 > before[0].1, "{hook:?}: {after:?}");
        }
        assert_eq!(links(&node), linked, "links are adopted, not recreated");
        assert_eq!(clean(&node.settings()).await, [] as [&str; 0]);
        eventually("the programs are gone", || Hook::ALL.map(node::programs).iter().all(Vec::is_empty)).await;
        assert!(
            !output(&["tc", "qdisc", "show"]).contains("clsact"),
            "a discipline of an earlier version is removed too"
        );
    }
}

/// Also if another layout, or another size, would migrate.
#[test]
fn a_refused_start_changes_no_pin() {
    on_node(|node: TestNode| async move {
        drop(node.start().await);
        let taken = UdpSocket::bind(("0.0.0.0", 4999)).expect("take a port");
        for make in [resize, make_other] {
            make(&node);
            let (before, attached) = (pins(&node.bpffs), Hook::ALL.map(node::programs));
            let usual = Settings { nat_entries: 4096, ..node.settings() };
            let wrong_name = Settings { uplink: "nosuch0".to_owned(), ..usual.clone() };
            let port_in_use = Settings { tunnel_port: 4999, ..usual };
            for (what, settings) in [("a wrong name", wrong_name), ("a port in use", port_in_use)] {
                let error = node::refused(settings).await;
                assert!(matches!(error, StartError::Elsewhere { .. } | StartError::TunnelPortTaken { .. }), "{error}");
                assert_eq!(pins(&node.bpffs), before, "{what}");
                assert_eq!(Hook::ALL.map(node::programs), attached, "{what}");
            }
        }
        drop(taken);
    });
}

/// All paths below a directory.
fn pins(folder: &Path) -> BTreeSet<PathBuf> {
    let below = fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry").path());
    below.flat_map(|path| if path.is_dir() { &pins(&path) | &BTreeSet::from([path]) } else { [path].into() }).collect()
}

/// After a boot: nothing is pinned, and no list has arrived.
#[test]
fn unknown_pods_are_dropped_from_the_first_packet_on() {
    on_node(|node: TestNode| async move {
        count_forwarded();
        node.outside(|| ip(&format!("addr add {POD}/24 dev pods0\nroute add 203.0.113.0/24 via 10.244.1.2\n")));
        let send = |times: u32| {
            node.outside(|| {
                let socket = UdpSocket::bind((POD, 5000)).expect("the pod's address");
                for _ in 0..times {
                    socket.send_to(b"to the world", (WORLD, 9)).expect("send");
                }
            });
        };
        let dropping = Settings { initial_state: Some(InitialState::new()), ..node.settings() };
        let dataplane = node::start(dropping.clone()).await;
        let counted = |dataplane: &Dataplane| dataplane.counters().expect("counters")[&Verdict::UnknownPod].packets;
        send(7);
        assert_eq!((forwarded(), counted(&dataplane)), (0, 7));
        // The node's own addresses are known: a kubelet's checks are answered.
        node.outside(|| output(&["ping", "-c", "1", "-W", "2", "-I", POD, "172.18.0.2"]));
        // A device that appears later lets no packet pass either.
        ip("link del ovn-k8s-mp0\n");
        node.make_mgmt();
        eventually("its programs are attached", || Hook::ALL.into_iter().all(is_attached)).await;
        node.outside(|| ip(&format!("addr add {POD}/24 dev pods0\nroute add 203.0.113.0/24 via 10.244.1.2\n")));
        send(7);
        assert_eq!((forwarded(), counted(&dataplane)), (0, 14));
        drop(dataplane);
        // An agent that restarts before any list has arrived.
        let mut dataplane = node::start(dropping).await;
        send(7);
        assert_eq!((forwarded(), counted(&dataplane)), (0, 21));
        assert_eq!(dataplane.observe().await.expect("observe").on_unknown_pod, Some(OnUnknownPod::Drop));
        drop(dataplane);
        assert_eq!(clean(&node.settings()).await, [] as [&str; 0]);
        // Without the flag all packets pass until then.
        let _dataplane = node.start().await;
        send(7);
        assert_eq!(forwarded(), 7);
    });
}

#[test]
fn cleanup_removes_other_layouts() {
    on_node(|node| async move {
        let mut first = node.start().await;
        fill(&mut first).await;
        drop(first);
        make_other(&node);
        assert_eq!(clean(&node.settings()).await, [] as [&str; 0]);
        eventually("the programs are gone", || Hook::ALL.map(node::programs).iter().all(Vec::is_empty)).await;
        assert!(!node.bpffs.exists());
    });
}

#[test]
fn an_unknown_directory_is_refused() {
    on_node(|node: TestNode| async move {
        drop(node.start().await);
        for name in ["version4", "v", "v4x", "maps"] {
            let foreign = node.bpffs.join(name);
            fs::create_dir(&foreign).expect("make a directory");
            let error = node::refused(node.settings()).await;
            assert!(matches!(error, StartError::NotPins { .. }), "{error}");
            assert!(Hook::ALL.into_iter().all(is_attached), "running traffic is left alone");
            fs::remove_dir(foreign).expect("take it away");
        }
        drop(node.start().await);
    });
}
