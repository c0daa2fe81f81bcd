//! The values of scrapes: counters of the kernel, ports in use, attached programs.

use std::net::UdpSocket;
use std::path::Path;

use aya::maps::{Map, MapData, PerCpuHashMap};
use aya::util::nr_cpus;
use egress_common::abi::{Addr, Direction, EipCount, NatEntry, Origin, Tuple, Usage, Verdict};
use egress_common::wire::PROTO_TCP;
use egress_core::model::state::{Action, EgressId, Family, OnUnknownPod, Policy, WhenEmpty};
use egress_core::plan::executor::Executor;
use egress_datapath::Dataplane;
use egress_datapath::maps::facts::Use;
use egress_datapath::names::{DEFAULT_INBOUND_ENTRIES, DEFAULT_NAT_ENTRIES};
use egress_datapath::nftables::forward_policy;

use crate::actions::now_ns;
use crate::node::{MGMT, TestNode, eventually, on_node, output};
use crate::skips::skipped;

const OBJECT: EgressId = EgressId(7);

/// A mapping of a pod of this node, with its own port.
fn map(node: &TestNode, port: u16, destination: [u8; 4]) {
    let (to, egress) = (Addr::v4(destination), Addr::v4([172, 18, 0, 100]));
    let out = Tuple::new(Direction::Egress, Addr::v4([10, 244, 1, 10]), to, port, 443, PROTO_TCP);
    let back = Tuple::new(Direction::Ingress, to, egress, 443, port, PROTO_TCP);
    let mut nat = node.map::<Tuple, NatEntry>("nat");
    for (key, other) in [(out, back), (back, out)] {
        let mapping = NatEntry::new(other, Origin::Here, Addr::UNSPECIFIED, OBJECT.0, now_ns()).sealed(&key);
        nat.insert(key, mapping, 0).expect("a key of a mapping");
    }
}

/// The same count on each CPU.
fn count(node: &TestNode, count: EipCount) {
    let data = MapData::from_pin(node.pin("maps/eip_counters")).expect("a pinned map");
    let mut map = PerCpuHashMap::<_, u32, EipCount>::try_from(Map::PerCpuHashMap(data)).expect("of these types");
    let values = vec![count; nr_cpus().expect("CPUs")];
    map.insert(OBJECT.0, values.try_into().expect("one for each"), 0).expect("an entry");
}

#[test]
fn policy_in_forward_is_recognised_by_its_chain() {
    on_node(|_node| async move {
        assert_eq!(forward_policy::policy().expect("chains are listed"), None);
        output(&["nft", "add table ip filter"]);
        output(&["nft", "add chain ip filter FORWARD { type filter hook forward priority 0; }"]);
        assert_eq!(forward_policy::policy().expect("chains are listed"), None);
        output(&["nft", "add chain ip filter cali-FORWARD"]);
        assert_eq!(forward_policy::policy().expect("chains are listed"), Some("Calico"));
    });
}

/// `iptables-legacy`, whose chains nf_tables does not list. Reading must not create a table.
#[test]
fn policy_in_forward_is_recognised_in_legacy_tables_too() {
    if !["/usr/sbin", "/sbin"].iter().any(|folder| Path::new(folder).join("iptables-legacy").exists()) {
        return skipped("iptables-legacy is not installed");
    }
    for (program, names) in [("iptables-legacy", "ip_tables_names"), ("ip6tables-legacy", "ip6_tables_names")] {
        on_node(move |_node| async move {
            let names = Path::new("/proc/thread-self/net").join(names);
            let Ok(before) = std::fs::read_to_string(&names) else {
                return skipped("this kernel has no such tables");
            };
            assert_eq!(forward_policy::policy().expect("tables are read"), None);
            assert_eq!(std::fs::read_to_string(&names).expect("a list"), before, "reading has created a table");
            for chain in ["KUBE-FORWARD", "cali-FORWARD-not"] {
                output(&[program, "-N", chain]);
            }
            output(&[
                program,
                "-A",
                "FORWARD",
                "-p",
                "tcp",
                "-m",
                "comment",
                "--comment",
                "cali-FORWARD",
                "-j",
                "ACCEPT",
            ]);
            assert!(std::fs::read_to_string(&names).expect("a list").contains("filter"), "it is the older one");
            assert_eq!(forward_policy::policy().expect("tables are read"), None);
            output(&[program, "-N", "cali-FORWARD"]);
            output(&[program, "-A", "FORWARD", "-j", "cali-FORWARD"]);
            assert_eq!(forward_policy::policy().expect("tables are read"), Some("Calico"));
            output(&[program, "-F"]);
            output(&[program, "-X"]);
            assert_eq!(forward_policy::policy().expect("tables are read"), None);
        });
    }
}

#[test]
fn a_scrape_reads_the_counters_of_the_programs() {
    on_node(|node| async move {
        let mut dataplane = node.start().await;
        let meter = dataplane.meter().expect("the pins are there");
        let before = meter.read(std::iter::once(OBJECT)).expect("readable");
        assert_eq!(before.verdicts, dataplane.counters().expect("readable"));
        assert_eq!(before.verdicts.len(), Verdict::ALL.len());
        assert!(before.egress_ips.is_empty() && before.ports.is_none(), "nothing has passed, nothing was counted");
        assert_eq!(
            (before.limits["nat"], before.limits["inbound"]),
            (2 * DEFAULT_NAT_ENTRIES, DEFAULT_INBOUND_ENTRIES)
        );
        assert_eq!(before.hooks.len(), 5);
        assert!(before.hooks.values().all(|hook| hook.attached), "{:?}", before.hooks);

        // An ARP request for an owned address is answered by a program, and counted.
        for action in [Action::SetUnknownPods(OnUnknownPod::Drop), Action::Own(OBJECT, [172, 18, 0, 100].into())] {
            dataplane.apply(&action).await.expect("applied");
        }
        node.outside(|| {
            let socket = UdpSocket::bind("0.0.0.0:0").expect("a socket");
            socket.send_to(b"who has it?", "172.18.0.100:9").expect("a neighbour to ask for");
        });
        let answered = || meter.read(std::iter::empty()).expect("readable").verdicts[&Verdict::ArpAnswered];
        eventually("the answer is counted", || answered().packets > before.verdicts[&Verdict::ArpAnswered].packets)
            .await;
        assert!(answered().bytes >= 28, "{:?}", answered());

        count(&node, EipCount { egress_packets: 3, egress_bytes: 300, nat_entries: 1, ..EipCount::default() });
        let seen = meter.read(std::iter::once(OBJECT)).expect("readable").egress_ips[&OBJECT];
        let cpus = u64::try_from(nr_cpus().expect("CPUs")).expect("not that many");
        assert_eq!((seen.egress_packets, seen.egress_bytes, seen.nat_entries), (3 * cpus, 300 * cpus, cpus));

        for port in 2000..2040 {
            map(&node, port, [198, 51, 100, 10]);
        }
        map(&node, 2000, [198, 51, 100, 11]);
        let pause = meter.count_ports().expect("a walk");
        assert!(pause >= std::time::Duration::from_secs(10));
        let ports = meter.read(std::iter::once(OBJECT)).expect("readable").ports.expect("it was counted");
        assert_eq!(ports.egress_ips[&OBJECT], Use { mappings: 41, busiest: 40, ports: 64_512, ..Use::default() });
        assert!(ports.node.ports > 1_000, "{ports:?}");
        // Programs count, and these were written by the test.
        let mut usage = node.array::<Usage>("usage");
        usage.set(0, Usage { nat: 82, flows: -1, ..Usage::default() }, 0).expect("write");
        let entries = meter.read(std::iter::empty()).expect("readable").entries;
        assert_eq!((entries["nat"], entries["flows"]), (82, 0));
        assert_eq!(meter.read(std::iter::empty()).expect("readable").egress_ips, Default::default());

        output(&["ip", "link", "del", MGMT]);
        eventually("its programs are missed", || {
            let hooks = meter.hooks();
            !hooks["from_pod"].attached && !hooks["to_pod"].attached && hooks["to_netdev"].attached
        })
        .await;
    });
}

#[test]
fn counters_of_an_object_are_removed_with_its_last_policy_and_claim() {
    on_node(|node| async move {
        let mut dataplane = node.start().await;
        let none = || Policy::new(Vec::new(), Vec::new(), WhenEmpty::Drop);
        for family in [Family::V4, Family::V6] {
            dataplane.apply(&Action::PutPolicy(OBJECT, family, none())).await.expect("applied");
        }
        count(&node, EipCount { egress_packets: 3, ..EipCount::default() });
        let counted = |dataplane: &Dataplane| dataplane.egress_ip_counters().expect("readable").contains_key(&OBJECT);
        dataplane.apply(&Action::RemovePolicy(OBJECT, Family::V4)).await.expect("applied");
        assert!(counted(&dataplane), "it still has addresses");
        dataplane.apply(&Action::RemovePolicy(OBJECT, Family::V6)).await.expect("applied");
        assert!(!counted(&dataplane));
        // One of its packets was in flight.
        count(&node, EipCount { egress_packets: 1, ..EipCount::default() });
        dataplane.apply(&Action::CutOrphans).await.expect("applied");
        assert!(!counted(&dataplane));

        // As in a plan: while the claim exists, packets of other nodes count.
        let address = [172, 18, 0, 100].into();
        for action in [Action::PutPolicy(OBJECT, Family::V4, none()), Action::Own(OBJECT, address)] {
            dataplane.apply(&action).await.expect("applied");
        }
        dataplane.apply(&Action::RemovePolicy(OBJECT, Family::V4)).await.expect("applied");
        count(&node, EipCount { egress_packets: 1, ..EipCount::default() });
        dataplane.sweep().expect("a sweep");
        assert!(counted(&dataplane), "its claim exists");
        dataplane.apply(&Action::Disown(OBJECT, address)).await.expect("applied");
        assert!(!counted(&dataplane));
        // A packet of a node that does not know the change yet.
        count(&node, EipCount { refusals: 1, ..EipCount::default() });
        dataplane.sweep().expect("a sweep");
        assert!(!counted(&dataplane), "until the next start");
    });
}
