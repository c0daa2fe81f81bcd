use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use egress_common::abi::Count;

use super::*;
use crate::metrics::catalogue::Process;
use crate::metrics::meters::{ClusterMetrics, Meters, NodeState};
use crate::metrics::snapshot::{AgentSnapshot, InKernel, ReconcilerSnapshot, ServedAddress};
use egress_datapath::maps::facts::{HookFacts, KernelFacts, PortUse};

fn served(address: [u8; 4], object: &str) -> ServedAddress {
    ServedAddress { address: address.into(), policy: Some((object.into(), "u".into())) }
}

/// With a value for every metric.
fn everything(process: Process) -> Snapshot {
    let meters = Meters::default();
    meters.reconciled(Duration::from_millis(3));
    meters.reconcile_failed();
    meters.probed(Probed::Serving, Some(Duration::from_millis(1)));
    meters.probed(Probed::Late, None);
    meters.failed_over(Duration::from_millis(1700));
    meters.set_cluster(Some(ClusterMetrics {
        assigned: 3,
        unassigned: 1,
        objects: BTreeMap::from([("Assigned", 2), ("NoCapacity", 1)]),
        nodes: BTreeMap::from([("n1".into(), NodeState::Answers), ("n2".into(), NodeState::Unreachable)]),
    }));
    let (id, quiet) = (EgressId(7), EgressId(8));
    let one = EipCount {
        egress_packets: 10,
        egress_bytes: 1000,
        ingress_packets: 9,
        ingress_bytes: 900,
        nat_entries: 4,
        refusals: 2,
        limited: 3,
    };
    let dropped = (Verdict::NoGateway, Count { packets: 5, bytes: 300 });
    let busy = Use { mappings: 4, busiest: 48_384, ports: 64_512, blocks: 252, most_blocks: Some(1_008) };
    Snapshot {
        process,
        version: "1.2.3",
        started: Duration::from_millis(1_700_000_000_250),
        ready: true,
        agent: Some(AgentSnapshot { serving: true, lease_expired: false }),
        leads: Some(true),
        reconciler: Some(ReconcilerSnapshot {
            in_kernel: Some(InKernel {
                entries: BTreeMap::from([("pods", 12)]),
                left_out: BTreeMap::from([("cluster", 3)]),
                served: BTreeMap::from([
                    (id, served([172, 18, 0, 100], "one\"\\\ntwo")),
                    (quiet, served([172, 18, 0, 101], "quiet")),
                ]),
                unclaimed: 1,
            }),
            missing: None,
            standby: 2,
            from: 1,
            to: 0,
        }),
        kernel: Some(KernelFacts {
            lease_seconds: 30.5,
            verdicts: BTreeMap::from([dropped]),
            egress_ips: BTreeMap::from([(id, one), (EgressId(99), one)]),
            interfaces: BTreeMap::from([(id, "eth1".to_owned())]),
            entries: BTreeMap::from([("nat", 8)]),
            limits: BTreeMap::from([("nat", 524_288), ("pods", 65_536)]),
            hooks: BTreeMap::from([
                ("from_pod", HookFacts { attached: true, awaits: None, runs: Some((100, Duration::from_micros(25))) }),
                ("to_netdev", HookFacts::default()),
            ]),
            ports: Some(PortUse { egress_ips: BTreeMap::from([(id, busy)]), node: Use::default() }),
        }),
        outages: 2,
        unanswered: Duration::from_secs(3),
        meters,
    }
}

fn text(snapshot: Snapshot) -> String {
    page(snapshot).expect("text")
}

/// Names of the families that the text has.
fn families(text: &str) -> BTreeSet<&str> {
    text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next()).collect()
}

#[test]
fn every_metric_of_the_catalogue_is_shown_once_and_no_other() {
    for (process, other) in [(Process::Agent, Process::Controller), (Process::Controller, Process::Agent)] {
        let text = text(everything(process));
        let shown = || ALL.iter().filter(|metric| metric.process != other);
        assert_eq!(families(&text), shown().map(|metric| metric.name).collect(), "{text}");
        assert_eq!(text.matches("# TYPE ").count(), shown().count());
        assert!(text.ends_with("# EOF\n"));
    }
}

#[test]
fn a_scrape_has_the_labels_and_values_of_the_snapshot() {
    let text = text(everything(Process::Agent)) + &text(everything(Process::Controller));
    let lines: BTreeSet<&str> = text.lines().collect();
    for expected in [
        r#"egress_agent_build_info{version="1.2.3"} 1"#,
        "egress_agent_ready 1",
        "egress_agent_leader 1",
        "egress_agent_lease_expired 0",
        r#"egress_agent_packets_total{class="drop",verdict="no_gateway"} 5"#,
        r#"egress_agent_packets_total{class="redirect",verdict="snat_here"} 0"#,
        r#"egress_agent_bytes_total{class="drop",verdict="no_gateway"} 300"#,
        r#"egress_agent_egress_ip_packets_total{egress_ip="172.18.0.101",egressip="quiet",direction="egress"} 0"#,
        r#"egress_agent_egress_ip_packets_total{egress_ip="172.18.0.100",egressip="one\"\\\ntwo",direction="egress"} 10"#,
        r#"egress_agent_egress_ip_bytes_total{egress_ip="172.18.0.100",egressip="one\"\\\ntwo",direction="ingress"} 900"#,
        r#"egress_agent_egress_ip_refusals_total{egress_ip="172.18.0.100",egressip="one\"\\\ntwo"} 2"#,
        r#"egress_agent_egress_ip_limited_packets_total{egress_ip="172.18.0.100",egressip="one\"\\\ntwo"} 3"#,
        r#"egress_agent_egress_ip_port_use_ratio{egress_ip="172.18.0.100",egressip="one\"\\\ntwo"} 0.75"#,
        r#"egress_agent_egress_ip_port_block_use_ratio{egress_ip="172.18.0.100",egressip="one\"\\\ntwo"} 0.25"#,
        r#"egress_agent_egress_ip_info{egress_ip="172.18.0.100",egressip="one\"\\\ntwo",interface="eth1"} 1"#,
        r#"egress_agent_map_entries{map="nat"} 8"#,
        r#"egress_agent_map_entries{map="pods"} 12"#,
        r#"egress_agent_entries_left_out{map="cluster"} 3"#,
        r#"egress_agent_entries_left_out{map="pods"} 0"#,
        r#"egress_agent_entries_refused_total{map="pods"} 0"#,
        r#"egress_agent_map_capacity_entries{map="pods"} 65536"#,
        r#"egress_agent_program_attached{hook="to_netdev"} 0"#,
        r#"egress_agent_program_runs_total{hook="from_pod"} 100"#,
        r#"egress_agent_program_run_seconds_total{hook="from_pod"} 0.000025"#,
        r#"egress_agent_reconcile_duration_seconds_bucket{le="0.004"} 1"#,
        "egress_agent_reconcile_duration_seconds_count 1",
        "egress_agent_api_outages_total 2",
        r#"egress_agent_hand_overs{role="from"} 1"#,
        r#"egress_agent_egress_ips{state="unassigned"} 1"#,
        r#"egress_agent_egressip_objects{reason="NoCapacity"} 1"#,
        r#"egress_agent_egress_node_state{node="n2",state="unreachable"} 1"#,
        r#"egress_agent_probes_total{answer="late"} 1"#,
        r#"egress_agent_failover_duration_seconds_bucket{le="2.0"} 1"#,
    ] {
        assert!(lines.contains(expected), "{expected} is not in\n{text}");
    }
    assert!(!text.contains(r#"runs_total{hook="to_netdev"}"#), "its runs are not known");
    assert_eq!(lines.iter().filter(|line| line.starts_with("egress_agent_packets_total{")).count(), Verdict::ALL.len());
}

#[test]
fn unknown_values_are_omitted_and_a_standby_shows_no_cluster_state() {
    let text = text(Snapshot { version: "1", ..Snapshot::default() });
    for absent in ["egress_agent_packets", "egress_agent_leader", "egress_agent_egress_ips", "egress_agent_map"] {
        assert!(!text.contains(absent), "{text}");
    }
    assert!(text.contains("egress_agent_ready 0"), "{text}");
}

#[test]
fn the_number_of_series_is_bounded_with_very_many_egress_ips() {
    let address = |n: u32| (EgressId(n), served((0x0a00_0000 + n).to_be_bytes(), &format!("o{n}")));
    let mut snapshot = everything(Process::Agent);
    if let Some(in_kernel) = snapshot.reconciler.as_mut().and_then(|of| of.in_kernel.as_mut()) {
        in_kernel.served = (1..=1_200).map(address).collect();
    }
    let text = text(snapshot);
    let series = |name: &str| text.lines().filter(|line| line.starts_with(&format!("{name}{{"))).count();
    assert_eq!(series("egress_agent_egress_ip_mappings"), MOST_EGRESS_IPS);
    assert_eq!(series("egress_agent_egress_ip_packets_total"), 2 * MOST_EGRESS_IPS);
    assert!(text.contains("egress_agent_egress_ips_unshown 200\n"));
}

#[test]
fn with_very_many_nodes_the_unreachable_ones_are_shown() {
    let snapshot = everything(Process::Controller);
    let mut nodes: BTreeMap<String, NodeState> =
        (0..MOST_NODES + 9).map(|number| (format!("a{number}"), NodeState::Answers)).collect();
    nodes.extend([("y".to_owned(), NodeState::AgentAway), ("z".to_owned(), NodeState::Unreachable)]);
    snapshot.meters.set_cluster(Some(ClusterMetrics { nodes, ..ClusterMetrics::default() }));
    let text = text(snapshot);
    let shown: Vec<_> = text.lines().filter(|line| line.starts_with("egress_agent_egress_node_state{")).collect();
    assert_eq!(shown.len(), MOST_NODES);
    for (node, state) in [("y", "agent_away"), ("z", "unreachable")] {
        let line = format!("egress_agent_egress_node_state{{node=\"{node}\",state=\"{state}\"}} 1");
        assert!(shown.contains(&line.as_str()), "{line}");
    }
}
