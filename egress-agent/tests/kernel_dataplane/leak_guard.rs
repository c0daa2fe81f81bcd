//! The leak guard: an nftables table that drops packets of selected pods that from_pod has not seen.

use std::net::UdpSocket;
use std::time::Duration;

use egress_core::model::state::{Action, EgressId, OnUnknownPod, PodState, Prefix, PrefixKind};
use egress_core::plan::executor::Executor;
use egress_datapath::names::{Hook, NFT_TABLE};
use egress_datapath::{Attachment, Dataplane, Settings};

use crate::actions::addr;
use crate::node::{MGMT, TestNode, attachment, eventually, forward, ip, is_attached, on_node, output, start, within};

const SELECTED: &str = "10.244.1.10";
const PLAIN: &str = "10.244.1.11";
/// Destinations outside, and in a prefix of the cluster.
const WORLD: &str = "203.0.113.5";
const CLUSTER: &str = "203.0.114.5";

async fn apply(dataplane: &mut Dataplane, action: Action) {
    dataplane.apply(&action).await.unwrap_or_else(|error| panic!("{action:?}: {error}"));
}

fn table() -> String {
    output(&["nft", "list", "table", "inet", NFT_TABLE])
}

#[test]
fn the_table_names_the_selected_pods_and_no_others() {
    on_node(|node| async move {
        let mut dataplane = node.start().await;
        let selected = PodState::Selected(EgressId(1));
        let pods = [SELECTED, "10.244.1.12", "fd00:10:244:1::a"];
        for pod in pods {
            apply(&mut dataplane, Action::PutPod(addr(pod), selected)).await;
        }
        apply(&mut dataplane, Action::PutPod(addr(PLAIN), PodState::Known)).await;
        let is_named = |pod: &str| table().split([' ', ',', '\n']).any(|word| word == pod);
        assert_eq!([pods[0], pods[1], pods[2], PLAIN].map(is_named), [true, true, true, false], "{}", table());

        // Deselected, and removed.
        apply(&mut dataplane, Action::PutPod(addr(pods[1]), PodState::Known)).await;
        apply(&mut dataplane, Action::RemovePod(addr(pods[2]))).await;
        apply(&mut dataplane, Action::RemovePod(addr("10.244.1.99"))).await;
        assert_eq!(pods.map(is_named), [true, false, false], "{}", table());

        // The table follows the maps at the next start, and when it replaces a flushed one.
        drop(dataplane);
        let mut dataplane = node.start().await;
        assert_eq!(pods.map(is_named), [true, false, false], "{}", table());
        output(&["nft", "flush", "ruleset"]);
        apply(&mut dataplane, Action::PutPod(addr(pods[1]), selected)).await;
        let is_back = || output(&["nft", "list", "tables"]).contains(NFT_TABLE);
        // It is checked every ten seconds.
        within(Duration::from_secs(15), "the table is back", is_back).await;
        assert_eq!(pods.map(is_named), [true, true, false], "{}", table());
    });
}

#[test]
fn no_packet_of_a_selected_pod_passes_while_its_program_is_detached() {
    on_node(|node| async move {
        forward();
        // Another table counts what the host forwards, and must not see our priority.
        output(&[
            "nft",
            "add table inet other; \
             add chain inet other before { type filter hook prerouting priority mangle; }; \
             add rule inet other before iifname ovn-k8s-mp0 meta priority != 0 counter comment odd; \
             add chain inet other forward { type filter hook forward priority 0; }; \
             add rule inet other forward ip saddr 10.244.1.10 counter comment selected; \
             add rule inet other forward ip saddr 10.244.1.11 counter comment plain",
        ]);
        node.outside(|| {
            ip(&format!("addr add {SELECTED}/24 dev pods0\naddr add {PLAIN}/24 dev pods0\n"));
            ip(&format!("route add 203.0.0.0/16 via 10.244.1.2 dev {}\n", "pods0"));
        });
        let mut dataplane = node.start().await;
        apply(&mut dataplane, Action::SetUnknownPods(OnUnknownPod::Drop)).await;
        let prefix = |net: &str, kind| Action::PutPrefix(net.parse().expect("a prefix"), Prefix { kind, node: None });
        apply(&mut dataplane, prefix("203.0.114.0/24", PrefixKind::Excluded)).await;
        apply(&mut dataplane, Action::PutPod(addr(SELECTED), PodState::Selected(EgressId(1)))).await;
        apply(&mut dataplane, Action::PutPod(addr(PLAIN), PodState::Known)).await;

        send_until(&node, "from_pod passes packets of other pods", || forwarded("plain") > 0).await;
        assert_eq!((forwarded("selected"), dropped_by_guard()), (0, 0), "no gateway: dropped by the program");
        let to_cluster = || send(&node, SELECTED, CLUSTER);
        eventually("a selected pod reaches the cluster", || {
            to_cluster();
            forwarded("selected") > 0
        })
        .await;
        assert_eq!((dropped_by_guard(), counter("odd")), (0, 0));

        drop(dataplane);
        match attachment() {
            Attachment::Tcx => std::fs::remove_file(node.pin("links/from_pod")).expect("remove the pin"),
            Attachment::Clsact => drop(output(&["tc", "filter", "del", "dev", MGMT, "ingress"])),
        }
        eventually("the program is detached", || !is_attached(Hook::FromPod)).await;
        let (selected, plain) = (forwarded("selected"), forwarded("plain"));
        send_until(&node, "packets that bypass the program are dropped", || dropped_by_guard() > 0).await;
        send_until(&node, "packets of other pods pass", || forwarded("plain") > plain).await;
        assert_eq!(forwarded("selected"), selected);

        let mut dataplane = node.start().await;
        let (selected, dropped) = (forwarded("selected"), dropped_by_guard());
        eventually("the program is back", || {
            to_cluster();
            forwarded("selected") > selected
        })
        .await;
        assert!(dropped_by_guard() <= dropped, "of the new table: none");
        apply(&mut dataplane, Action::PutPod(addr(SELECTED), PodState::Known)).await;
    });
}

/// Packets that enter by a bridge port pass the table before the program.
#[test]
fn a_bridge_whose_ports_are_filtered_has_no_leak_guard() {
    on_node(|node| async move {
        ip("link add br0 type bridge nf_call_iptables 1\nlink set br0 up\n");
        let settings = Settings { mgmt_port: "br0".to_owned(), ..node.settings() };
        let mut dataplane = start(settings).await;
        apply(&mut dataplane, Action::PutPod(addr(SELECTED), PodState::Selected(EgressId(1)))).await;
        let drops = || table().matches(" drop").count();
        assert_eq!((drops(), node.config().seen), (0, 0), "{}", table());
        // The namespace's own setting is on by default, if the kernel has it.
        for setting in ["iptables", "ip6tables"].map(|name| format!("/proc/sys/net/bridge/bridge-nf-call-{name}")) {
            if std::fs::exists(&setting).expect("look for it") {
                std::fs::write(&setting, "0").expect("switch it off");
            }
        }
        ip("link set br0 type bridge nf_call_iptables 0\n");
        within(Duration::from_secs(25), "the leak guard exists", || drops() == 2).await;
        assert!(node.config().seen != 0 && table().contains(SELECTED));
        ip("link set br0 type bridge nf_call_iptables 1\n");
        within(Duration::from_secs(25), "it is removed", || drops() == 0 && node.config().seen == 0).await;
    });
}

async fn send_until(node: &TestNode, what: &str, happened: impl Fn() -> bool) {
    eventually(what, || {
        send(node, SELECTED, WORLD);
        send(node, PLAIN, WORLD);
        happened()
    })
    .await;
}

fn send(node: &TestNode, from: &str, to: &str) {
    node.outside(|| {
        let socket = UdpSocket::bind((from, 4000)).expect("a socket of the pod");
        socket.send_to(b"hello", (to, 9)).expect("send");
    });
}

fn forwarded(comment: &str) -> u64 {
    counter(comment)
}

/// Packets that a rule of the other table has counted.
fn counter(comment: &str) -> u64 {
    let rules = output(&["nft", "list", "table", "inet", "other"]);
    let line = rules.lines().find(|line| line.contains(&format!("comment \"{comment}\"")));
    packets(line.expect("the rule"))
}

/// Packets that the leak guard has dropped.
fn dropped_by_guard() -> u64 {
    table().lines().filter(|line| line.contains("counter packets")).map(packets).sum()
}

fn packets(line: &str) -> u64 {
    let count = line.split("counter packets ").nth(1).and_then(|rest| rest.split(' ').next());
    count.and_then(|count| count.parse().ok()).expect("a count")
}
