//! Start, restart after a kill, and cleanup.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader};
use std::net::UdpSocket;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};

use aya::programs::links::{FdLink, PinnedLink};
use egress_common::abi::Verdict;
use egress_core::model::state::{Action, EgressId, OnUnknownPod, PodState, Prefix, PrefixKind, TunnelEndpoint};
use egress_core::plan::executor::Executor;
use egress_datapath::names::{Hook, PINNED_MAPS};
use egress_datapath::{Attachment, Settings, cleanup};

use crate::node::{self, MGMT, TestNode, UPLINK, clean, ip, is_attached, on_node, output, start};
use crate::skips::skipped;

/// Makes the test binary an agent with its pins in this directory.
const AGENT: &str = "EGRESS_TEST_AGENT_BPFFS";
const READY: &str = "the agent is up";

/// Not a test: the body of the agent process that `start_agent_process` starts and kills.
#[test]
#[ignore = "helper process"]
fn agent_process() {
    let bpffs = std::env::var_os(AGENT).expect("a folder, from the test that starts this");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("make a runtime");
    runtime.block_on(async {
        let mut dataplane = start(node::settings(bpffs.into())).await;
        for action in [pod(), Action::Own(EgressId(7), address()), Action::Own(EgressId(8), address_v6())] {
            dataplane.apply(&action).await.expect("apply an action");
        }
        println!("\n{READY}");
        std::future::pending::<()>().await;
    });
}

fn pod() -> Action {
    Action::PutPod([10, 244, 1, 10].into(), PodState::Selected(EgressId(7)))
}

fn address() -> std::net::IpAddr {
    [172, 18, 0, 100].into()
}

fn address_v6() -> std::net::IpAddr {
    "fd00:172:18::1:100".parse().expect("a literal")
}

fn start_agent_process(node: &TestNode) -> Child {
    let me = std::env::current_exe().expect("this binary's path");
    let mut child = Command::new(me)
        .args(["--exact", "lifecycle::agent_process", "--ignored", "--nocapture"])
        .env(AGENT, &node.bpffs)
        .stdout(Stdio::piped())
        .spawn()
        .expect("start the agent process");
    let lines = BufReader::new(child.stdout.take().expect("a pipe")).lines();
    let up = lines.map_while(Result::ok).any(|line| line == READY);
    assert!(up, "the agent process ended early");
    child
}

/// Numbers of the pinned maps and links.
fn pinned_ids(node: &TestNode) -> BTreeMap<PathBuf, u32> {
    let mut ids = BTreeMap::new();
    for path in files(&node.pin("maps")) {
        let info = aya::maps::MapInfo::from_pin(&path).expect("a pinned map");
        ids.insert(path, info.id());
    }
    for path in files(&node.pin("links")) {
        let link = FdLink::from(PinnedLink::from_pin(&path).expect("a pinned link"));
        ids.insert(path, link.info().expect("its information").id());
    }
    ids
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    entries.map(|entry| entry.expect("an entry").path()).collect()
}

#[test]
fn every_program_is_attached_first_and_pinned() {
    on_node(|node| async move {
        let dataplane = node.start().await;
        assert_eq!(dataplane.features().attachment, node::attachment());
        for hook in Hook::ALL {
            assert!(is_attached(hook), "{hook:?}: {:?}", node::programs(hook));
        }
        let links = if node::attachment() == Attachment::Tcx { Hook::ALL.len() } else { 0 };
        assert_eq!(pinned_ids(&node).len(), PINNED_MAPS.len() + links);
        let counters = dataplane.counters().expect("read the counters");
        assert_eq!(counters.len(), Verdict::ALL.len());
        assert!(dataplane.egress_ip_counters().expect("read the counters").is_empty());
    });
}

#[test]
fn maps_have_the_configured_sizes() {
    on_node(|node| async move {
        let settings = Settings { inbound_entries: 2048, nat_entries: 4096, ..node.settings() };
        drop(start(settings.clone()).await);
        let entries = |map: &str| {
            let info = aya::maps::MapInfo::from_pin(node.pin("maps").join(map)).expect("a pinned map");
            info.max_entries()
        };
        assert_eq!((entries("inbound"), entries("nat"), entries("flows")), (2048, 2 * 4096, 4096));
        let config = node.config();
        assert_eq!((config.inbound_size, config.pod_quota, config.policy_quota), (2048, 1024, 3072));
        // Another size needs another map, by a migration as from another layout.
        let another = Settings { inbound_entries: 1024, ..settings };
        drop(start(another.clone()).await);
        assert_eq!((entries("inbound"), entries("nat")), (1024, 2 * 4096));
        assert!(
            node.bpffs.join(format!("v{}-1", egress_common::abi::ABI_VERSION)).exists(),
            "until the model has looked"
        );
        let mut last = start(another).await;
        last.observe().await.expect("observe");
        last.confirm();
        assert_eq!(fs::read_dir(&node.bpffs).expect("the pins").count(), 1, "the former maps are removed");
        assert!(Hook::ALL.into_iter().all(is_attached));
    });
}

#[test]
fn our_program_runs_before_an_existing_one() {
    on_node(|node| async move {
        if node::attachment() == Attachment::Clsact {
            return skipped("the order is that of links");
        }
        // Another application's program for the kernel: another name.
        let mut other = aya::Ebpf::load(&node.settings().object).expect("load the object");
        let program: &mut aya::programs::SchedClassifier =
            other.program_mut("sweep").and_then(|program| program.try_into().ok()).expect("a classifier");
        program.load().expect("load the program");
        let hooks = Hook::ALL.into_iter().filter(|hook| *hook != Hook::FromOverlay);
        for (device, direction) in hooks.clone().map(node::place) {
            program.attach(device, direction).expect("attach the other program");
        }
        let _dataplane = node.start().await;
        for hook in hooks {
            let programs = node::programs(hook);
            assert_eq!(programs.len(), 2, "{hook:?}");
            assert!(programs[0].1 > programs[1].1, "{hook:?}: the later program is first");
        }
    });
}

#[test]
fn a_restart_after_a_kill_has_no_gap() {
    on_node(|node| async move {
        let mut agent = start_agent_process(&node);
        let pins = pinned_ids(&node);
        let programs = Hook::ALL.map(node::programs);
        agent.kill().expect("kill the agent");
        agent.wait().expect("wait for the agent");
        assert_eq!(Hook::ALL.map(node::programs), programs, "nothing ends with the agent");

        let mut dataplane = node.start().await;
        assert_eq!(pinned_ids(&node), pins, "the same maps and the same links");
        for (hook, before) in Hook::ALL.into_iter().zip(programs) {
            let after = node::programs(hook);
            assert_eq!(after.len(), 1, "{hook:?}");
            assert!(after[0].1 > before[0].1, "{hook:?} has the new program");
        }
        let seen = dataplane.observe().await.expect("observe");
        assert_eq!(seen.owned.get(&EgressId(7)), Some(&address()));
        assert_eq!(seen.pods.len(), 1);
        // A held address is not probed again.
        let start = std::time::Instant::now();
        dataplane.apply(&Action::Own(EgressId(7), address())).await.expect("own again");
        assert!(start.elapsed() < node::patience(std::time::Duration::from_millis(100)));
        assert!(output(&["ip", "maddr", "show", "dev", UPLINK]).contains("33:33:ff:01:01:00"));
    });
}

/// A selected pod whose object has no policy yet: the program must drop each of its packets.
#[test]
fn no_packet_passes_while_agents_restart() {
    on_node(|node| async move {
        let mut dataplane = node.start().await;
        let subnet = Prefix { kind: PrefixKind::PodSubnet, node: Some(TunnelEndpoint([172, 18, 0, 2].into())) };
        let net = "10.244.1.0/24".parse().expect("a literal");
        for action in [Action::SetUnknownPods(OnUnknownPod::Pass), Action::PutPrefix(net, subnet), pod()] {
            dataplane.apply(&action).await.expect("apply an action");
        }
        node.outside(|| ip("addr add 10.244.1.10/24 dev pods0\nroute add 198.51.100.0/24 via 10.244.1.2\n"));
        let stop = AtomicBool::new(false);
        let (sent, last) = std::thread::scope(|scope| {
            let sender = scope.spawn(|| node.outside(|| send_until(&stop)));
            let restarts = scope.spawn(|| {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
                runtime.expect("make a runtime").block_on(async {
                    let mut dataplane = Some(dataplane);
                    for _ in 0..5 {
                        drop(dataplane.take());
                        dataplane = Some(node.start().await);
                    }
                    dataplane.expect("the last one")
                })
            });
            let last = restarts.join().expect("the restarts");
            stop.store(true, Ordering::Relaxed);
            (sender.join().expect("the sender"), last)
        });
        let counted = || last.counters().expect("read the counters")[&Verdict::NoPolicy].packets;
        println!("{sent} packets over five restarts");
        assert!(sent > 100, "{sent}");
        node::eventually("every packet was dropped and counted", || counted() == sent).await;
    });
}

/// Sends datagrams of the pod to the outside, some thousand a second, and returns their number.
fn send_until(stop: &AtomicBool) -> u64 {
    let socket = UdpSocket::bind("10.244.1.10:5000").expect("the pod's address");
    let mut sent = 0;
    while !stop.load(Ordering::Relaxed) {
        socket.send_to(b"may not leave", "198.51.100.10:9").expect("send");
        sent += 1;
        std::thread::sleep(std::time::Duration::from_micros(200));
    }
    sent
}

#[test]
fn filters_replace_links() {
    on_node(|node| async move {
        let settings = Settings { attachment: Some(Attachment::Clsact), ..node.settings() };
        let filters = || {
            let show = |device, direction| output(&["tc", "filter", "show", "dev", device, direction]);
            let shown = [
                show(UPLINK, "ingress"),
                show(UPLINK, "egress"),
                show(MGMT, "ingress"),
                show(MGMT, "egress"),
                show("egress0", "ingress"),
            ];
            shown.map(|text| text.matches("direct-action").count())
        };
        drop(start(settings.clone()).await);
        assert_eq!(filters(), [1; 5], "they outlive the agent");
        let before = output(&["tc", "filter", "show", "dev", MGMT, "ingress"]);
        let dataplane = start(settings.clone()).await;
        assert_eq!(filters(), [1; 5], "they are replaced, not added to");
        assert_ne!(output(&["tc", "filter", "show", "dev", MGMT, "ingress"]), before);

        node::ip(&format!("link del {MGMT}\n"));
        node.make_mgmt();
        node::eventually("the filters are back", || filters() == [1; 5]).await;
        drop(dataplane);
        assert_eq!(clean(&settings).await, [] as [&str; 0]);
        assert!(!output(&["tc", "qdisc", "show"]).contains("clsact"));
    });
}

/// Links and filters at once would count every packet twice.
#[test]
fn another_attachment_replaces_the_first() {
    on_node(|node| async move {
        if node::links(Hook::FromPod).is_none() {
            return skipped("this kernel has no links");
        }
        let shown = |hooks: fn(Hook) -> usize| Hook::ALL.map(hooks);
        let links = || shown(|hook| node::links(hook).map_or(0, |links| links.len()));
        let filters = || shown(|hook| node::filters(hook).len());
        for (attachment, counts) in [
            (Attachment::Tcx, [1, 0]),
            (Attachment::Clsact, [0, 1]),
            (Attachment::Clsact, [0, 1]),
            (Attachment::Tcx, [1, 0]),
        ] {
            let settings = Settings { attachment: Some(attachment), ..node.settings() };
            let dataplane = start(settings.clone()).await;
            // A link ends once the kernel sees that nothing holds it.
            node::eventually("one program on each hook", || [links(), filters()] == counts.map(|count| [count; 5]))
                .await;
            let pins = if attachment == Attachment::Tcx { 5 } else { 0 };
            assert_eq!(files(&node.pin("links")).len(), pins, "{attachment:?}");
            drop(dataplane);
        }
    });
}

/// All state of this node that the data plane could change.
fn snapshot(node: &TestNode) -> Vec<String> {
    let mut shown: Vec<_> = [
        &["ip", "-o", "-d", "link", "show"][..],
        &["ip", "maddr", "show"],
        &["ip", "addr", "show"],
        &["ip", "route", "show", "table", "all"],
        &["ip", "rule", "show"],
        &["tc", "qdisc", "show"],
        &["ss", "-lunH"],
        &["nft", "list", "ruleset"],
    ]
    .iter()
    .map(|command| output(command))
    .collect();
    shown.extend(Hook::ALL.map(|hook| format!("{:?}", node::programs(hook))));
    let root = node.bpffs.parent().expect("the mount point");
    shown.push(format!("{:?}", files(root)));
    shown
}

#[test]
fn cleanup_leaves_nothing() {
    on_node(|node| async move {
        node::eventually("addresses have settled", || !output(&["ip", "addr"]).contains("tentative")).await;
        let before = snapshot(&node);
        let mut agent = start_agent_process(&node);
        let refusal = cleanup(&node.settings()).await.expect_err("an agent is running");
        assert!(refusal.to_string().contains("another egress-agent runs"), "{refusal}");
        assert!(Hook::ALL.into_iter().all(is_attached));
        agent.kill().expect("kill the agent");
        agent.wait().expect("wait for the agent");
        assert_ne!(snapshot(&node), before);

        assert_eq!(clean(&node.settings()).await, [] as [&str; 0]);
        // A link ends once the kernel sees that nothing holds it.
        node::eventually("the programs are gone", || Hook::ALL.map(node::programs).iter().all(Vec::is_empty)).await;
        assert_eq!(snapshot(&node), before);
        assert_eq!(clean(&node.settings()).await, [] as [&str; 0]);
        assert_eq!(snapshot(&node), before);
    });
}
