use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use egress_common::abi::Count;

use super::*;
use crate::metrics::catalogue::Who;
use crate::metrics::facts::{AgentFacts, Held, NodeFacts, Served};
use crate::metrics::meters::{Cluster, Meters, NodeState};
use egress_datapath::maps::facts::{HookFacts, KernelFacts, PortUse};

fn served(address: [u8; 4], object: &str) -> Served {
    Served { address: address.into(), policy: Some((object.into(), "u".into())) }
}

/// With a value for everything.
fn everything(who: Who) -> Facts {
    let meters = Meters::default();
    meters.reconciled(Duration::from_millis(3));
    meters.reconcile_failed();
    meters.probed(Probed::Serving, Some(Duration::from_millis(1)));
    meters.probed(Probed::Late, None);
    meters.failed_over(Duration::from_millis(1700));
    meters.set_cluster(Some(Cluster {
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
    };
    let dropped = (Verdict::NoGateway, Count { packets: 5, bytes: 300 });
    let busy = Use { mappings: 4, busiest: 48_384, ports: 64_512 };
    Facts {
        who,
        version: "1.2.3",
        started: Duration::from_millis(1_700_000_000_250),
        ready: true,
        agent: Some(AgentFacts { serving: true, fenced: false }),
        leads: Some(true),
        node: Some(NodeFacts {
            held: Some(Held {
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

fn text(facts: Facts) -> String {
    page(facts).expect("text")
}

/// Names of the families that the text has.
fn families(text: &str) -> BTreeSet<&str> {
    text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next()).collect()
}

#[test]
fn every_metric_of_the_catalogue_is_shown_once_and_no_other() {
    for (who, other) in [(Who::Agent, Who::Controller), (Who::Controller, Who::Agent)] {
        let text = text(everything(who));
        let shown = || ALL.iter().filter(|metric| metric.who != other);
        assert_eq!(families(&text), shown().map(|metric| metric.name).collect(), "{text}");
        assert_eq!(text.matches("# TYPE ").count(), shown().count());
        assert!(text.ends_with("# EOF\n"));
    }
}

#[test]
fn a_scrape_has_the_labels_and_values_of_what_was_read() {
    let text = text(everything(Who::Agent)) + &text(everything(Who::Controller));
    let lines: BTreeSet<&str> = text.lines().collect();
    for expected in [
        r#"egress_agent_build_info{version="1.2.3"} 1"#,
        "egress_agent_ready 1",
        "egress_agent_leader 1",
        "egress_agent_fenced 0",
        r#"egress_agent_packets_total{class="drop",verdict="no_gateway"} 5"#,
        r#"egress_agent_packets_total{class="redirect",verdict="snat_here"} 0"#,
        r#"egress_agent_bytes_total{class="drop",verdict="no_gateway"} 300"#,
        r#"egress_agent_egress_ip_packets_total{egress_ip="172.18.0.101",egressip="quiet",direction="egress"} 0"#,
        r#"egress_agent_egress_ip_packets_total{egress_ip="172.18.0.100",egressip="one\"\\\ntwo",direction="egress"} 10"#,
        r#"egress_agent_egress_ip_bytes_total{egress_ip="172.18.0.100",egressip="one\"\\\ntwo",direction="ingress"} 900"#,
        r#"egress_agent_egress_ip_refusals_total{egress_ip="172.18.0.100",egressip="one\"\\\ntwo"} 2"#,
        r#"egress_agent_egress_ip_port_use_ratio{egress_ip="172.18.0.100",egressip="one\"\\\ntwo"} 0.75"#,
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
    assert!(!text.contains(r#"runs_total{hook="to_netdev"}"#), "nothing is known of it");
    assert_eq!(lines.iter().filter(|line| line.starts_with("egress_agent_packets_total{")).count(), Verdict::ALL.len());
}

#[test]
fn what_is_not_known_is_left_out_and_who_does_not_lead_speaks_for_nobody() {
    let text = text(Facts { version: "1", ..Facts::default() });
    for absent in ["egress_agent_packets", "egress_agent_leader", "egress_agent_egress_ips", "egress_agent_map"] {
        assert!(!text.contains(absent), "{text}");
    }
    assert!(text.contains("egress_agent_ready 0"), "{text}");
}

#[test]
fn very_many_egress_ips_are_a_bounded_number_of_series() {
    let address = |n: u32| (EgressId(n), served((0x0a00_0000 + n).to_be_bytes(), &format!("o{n}")));
    let mut facts = everything(Who::Agent);
    if let Some(held) = facts.node.as_mut().and_then(|node| node.held.as_mut()) {
        held.served = (1..=1_200).map(address).collect();
    }
    let text = text(facts);
    let series = |name: &str| text.lines().filter(|line| line.starts_with(&format!("{name}{{"))).count();
    assert_eq!(series("egress_agent_egress_ip_mappings"), MOST_EGRESS_IPS);
    assert_eq!(series("egress_agent_egress_ip_packets_total"), 2 * MOST_EGRESS_IPS);
    assert!(text.contains("egress_agent_egress_ips_unshown 200\n"));
}

#[test]
fn of_very_many_nodes_those_that_do_not_answer_are_shown() {
    let facts = everything(Who::Controller);
    let mut nodes: BTreeMap<String, NodeState> =
        (0..MOST_NODES + 9).map(|number| (format!("a{number}"), NodeState::Answers)).collect();
    nodes.extend([("y".to_owned(), NodeState::AgentAway), ("z".to_owned(), NodeState::Unreachable)]);
    facts.meters.set_cluster(Some(Cluster { nodes, ..Cluster::default() }));
    let text = text(facts);
    let shown: Vec<_> = text.lines().filter(|line| line.starts_with("egress_agent_egress_node_state{")).collect();
    assert_eq!(shown.len(), MOST_NODES);
    for (node, state) in [("y", "agent_away"), ("z", "unreachable")] {
        let line = format!("egress_agent_egress_node_state{{node=\"{node}\",state=\"{state}\"}} 1");
        assert!(shown.contains(&line.as_str()), "{line}");
    }
}
