//! Networks of EgressServices: rules of the host's routing, and the nftables table that marks packets for them.

use std::collections::BTreeMap;
use std::time::Duration;

use egress_core::networks::{NetworkUse, RoutedNetworks, RoutingTables};
use egress_core::plan::executor::Executor;
use egress_datapath::Dataplane;
use egress_datapath::names::NFT_NETWORKS;

use crate::actions::addr;
use crate::node::{clean, on_node, output, within};

const BALANCERS: [&str; 2] = ["192.0.2.1", "2001:db8:2::1"];
const POD: &str = "10.244.1.10";

fn used(addresses: &[&str], pods: &[&str]) -> NetworkUse {
    let all = |texts: &[&str]| texts.iter().map(|text| addr(text)).collect();
    NetworkUse { addresses: all(addresses), pods: all(pods) }
}

fn networks(tables: &[(&str, NetworkUse)]) -> RoutedNetworks {
    let cluster = ["10.244.0.0/16", "172.18.0.2/32", "fd00:10:244::/48"].map(|net| net.parse().expect("a literal"));
    let tables: RoutingTables = tables.iter().map(|(table, used)| ((*table).to_owned(), used.clone())).collect();
    RoutedNetworks { tables, cluster: cluster.into(), ..RoutedNetworks::default() }
}

async fn route(dataplane: &mut Dataplane, networks: &RoutedNetworks) {
    assert_eq!(dataplane.route(networks).await, BTreeMap::new());
}

/// The rules between the local and the main table, without priorities.
fn rules() -> Vec<String> {
    let both = ["-4", "-6"].map(|family| output(&["ip", "-N", family, "rule", "show"]));
    let all = both.iter().flat_map(|text| text.lines()).filter_map(|line| line.strip_prefix("5000:"));
    all.map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect()
}

fn has_table() -> bool {
    output(&["nft", "list", "tables"]).contains(NFT_NETWORKS)
}

#[test]
fn rules_and_marks_follow_the_networks() {
    on_node(|node| async move {
        let mut dataplane = node.start().await;
        let foreign = "from 192.0.2.1 lookup 100".split(' ').chain(["priority", "5000"]);
        output(&["ip", "rule", "add"].into_iter().chain(foreign).collect::<Vec<_>>());
        route(&mut dataplane, &RoutedNetworks::default()).await;
        assert!(!has_table());

        let both = networks(&[("100", used(&BALANCERS, &[])), ("main", used(&[], &[POD]))]);
        route(&mut dataplane, &both).await;
        let mut found = rules();
        found.sort();
        let expected = [
            "from 192.0.2.1 lookup 100",
            "from 192.0.2.1 lookup 100 proto 101",
            "from 2001:db8:2::1 lookup 100 proto 101",
            "from all fwmark 0x3f000064 lookup 100 proto 101",
            "from all fwmark 0x3f000064 lookup 100 proto 101",
            "from all fwmark 0x3f0000fe lookup 254 proto 101",
        ];
        assert_eq!(found, expected);
        let table = output(&["nft", "-n", "list", "table", "inet", NFT_NETWORKS]);
        for line in [
            "ct direction 1 ct original ip daddr @balancers4-100 meta mark set 0x3f000064 accept",
            "ct direction 1 ct original ip6 daddr @balancers6-100 meta mark set 0x3f000064 accept",
            "ip daddr @cluster4 accept",
            "ip6 daddr @cluster6 accept",
            "ip saddr @pods4-254 meta mark set 0x3f0000fe accept",
            "elements = { 10.244.0.0/16, 172.18.0.2 }",
        ] {
            assert!(table.contains(line), "{line} is not in\n{table}");
        }

        route(&mut dataplane, &networks(&[("100", used(&BALANCERS[..1], &[]))])).await;
        let mut found = rules();
        found.sort();
        assert_eq!(found, [expected[0], expected[1], expected[3]]);
        assert!(!output(&["nft", "list", "table", "inet", NFT_NETWORKS]).contains("pods4"));
        route(&mut dataplane, &RoutedNetworks::default()).await;
        assert_eq!((rules(), has_table()), (vec![expected[0].to_owned()], false), "another program's rule stays");
    });
}

#[test]
fn a_former_agents_rules_go_and_removed_ones_come_back() {
    on_node(|node| async move {
        let mut dataplane = node.start().await;
        let both = networks(&[("100", used(&BALANCERS, &[POD]))]);
        route(&mut dataplane, &both).await;
        let whole = rules();
        drop(dataplane);
        assert_eq!((rules(), has_table()), (whole.clone(), true), "they outlive the agent");

        let mut dataplane = node.start().await;
        let other = networks(&[("101", used(&BALANCERS[..1], &[]))]);
        route(&mut dataplane, &other).await;
        assert!(rules().iter().all(|rule| rule.contains("lookup 101")), "{:?}", rules());
        route(&mut dataplane, &both).await;
        assert_eq!(rules(), whole);
        for removes in [&["ip", "rule", "flush"][..], &["nft", "flush", "ruleset"]] {
            output(removes);
            // They are looked for every ten seconds.
            within(Duration::from_secs(15), "they are back", || rules() == whole && has_table()).await;
        }
        drop(dataplane);
        assert_eq!(clean(&node.settings()).await, Vec::<String>::new());
        assert_eq!((rules(), has_table()), (vec![], false));
    });
}

/// The others are not affected.
#[test]
fn a_table_that_the_node_does_not_have_is_named() {
    on_node(|node| async move {
        let mut dataplane = node.start().await;
        let both = networks(&[("100", used(&BALANCERS, &[])), ("blue", used(&["192.0.2.2"], &[POD]))]);
        let unrouted = dataplane.route(&both).await;
        assert_eq!(unrouted.keys().collect::<Vec<_>>(), ["blue"]);
        assert!(unrouted["blue"].contains("no routing table \"blue\""), "{unrouted:?}");
        assert!(rules().contains(&"from 192.0.2.1 lookup 100 proto 101".to_owned()));
        assert!(!rules().iter().any(|rule| rule.contains("192.0.2.2")));
        let table = output(&["nft", "-n", "list", "table", "inet", NFT_NETWORKS]);
        for line in [
            "ct direction 1 ct original ip daddr @balancers4-none counter packets 0 bytes 0 drop",
            "ip saddr @pods4-none counter packets 0 bytes 0 drop",
            "ct original ip daddr @balancers4-100 meta mark set 0x3f000064 accept",
        ] {
            assert!(table.contains(line), "{line} is not in\n{table}");
        }
    });
}
