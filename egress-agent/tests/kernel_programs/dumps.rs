//! `bpftool map dump` shows named fields of every map, keys and values.

use std::collections::BTreeSet;
use std::process::Command;

use egress_common::abi::{BandwidthLimit, Candidates, ClassPolicy, HandoverStage, NODE_MARK, RouteEntry, RouteKind};
use serde_json::Value;

use crate::cast::{V4, V6, addr};
use crate::frames::{SYN, packet};
use crate::stage::{FROM_NETDEV, FROM_POD, FURTHER, OWNED_MAC, Stage, TO_NETDEV, TO_POD, TestRun, on_stage, test_run};

/// Field names in the key and value of each map; empty for plain numbers.
const FIELDS: [(&str, &[&str], &[&str]); 39] = [
    ("config", &[], &["generation", "tunnel_port", "overlay_mtu", "node_v4", "uplink_mac"]),
    ("lease", &[], &["until_ns"]),
    ("pods", &["bytes"], &["selection", "egress_id", "selected_since_ns", "cut_until_ns", "class"]),
    ("classes", &["prefix_len", "data"], &["selection", "egress_id"]),
    ("policy", &["egress_id", "family"], &["when_empty", "count", "pending", "destinations", "slots"]),
    ("destinations", &["prefix_len", "data"], &["count", "pending", "slots"]),
    ("owned", &[], &["address", "ifindex", "mtu", "mac"]),
    ("owned_addr", &["bytes"], &["egress_id", "ifindex", "mac"]),
    ("interfaces", &[], &["v4", "v6"]),
    ("routes", &["prefix_len", "data"], &["kind", "count", "mtu", "hops"]),
    ("neighbours", &["ifindex", "address"], &["mac"]),
    ("handovers", &[], &["stage", "peer", "owned"]),
    ("cluster", &["prefix_len", "data"], &["kind", "node"]),
    ("nodes", &["bytes"], &["place", "node"]),
    ("flows", &["saddr", "daddr", "sport", "dport", "protocol"], &["address", "egress_id", "slot", "last_seen_ns"]),
    ("inbound", &["saddr", "daddr", "sport", "dport", "protocol"], &["last_seen_ns", "state"]),
    ("exposed", &["address", "port", "protocol"], &["inbound"]),
    ("datagrams", &["saddr", "daddr", "sport", "dport", "protocol"], &["last_seen_ns"]),
    ("nat", &["saddr", "daddr", "sport", "dport", "direction"], &["other", "source_node", "origin", "hop"]),
    ("exhausted", &["saddr", "daddr", "sport", "dport", "protocol"], &["last_seen_ns"]),
    ("blocks", &["address", "first"], &["pod", "source_node", "given_ns", "egress_id", "size", "closed"]),
    ("pod_blocks", &["address", "pod"], &[]),
    ("frags", &["saddr", "daddr", "id", "protocol"], &["sport", "dport", "seen_ns"]),
    ("held", &[], &["state", "key", "length"]),
    ("awaited", &["saddr", "daddr", "id", "protocol"], &["since_ns", "count", "places"]),
    ("shares", &["pod", "egress_id"], &["flows", "nat_entries"]),
    ("pacing", &[], &["sent_ns"]),
    ("usage", &[], &["nat", "flows", "inbound"]),
    ("counters", &[], &["packets", "bytes"]),
    ("eip_counters", &[], &["egress_packets", "ingress_bytes", "nat_entries", "refusals", "limited"]),
    ("next_hops", &[], &["to", "hop"]),
    ("flow_cache", &[], &["key", "rewrite", "verdict"]),
    ("answers", &["endpoint", "kind"], &[]),
    ("answer_totals", &[], &[]),
    ("workspace", &[], &["headers", "route"]),
    ("epochs", &[], &[]),
    ("candidates", &[], &["saddr"]),
    ("flow_cache_use", &[], &["hits", "misses"]),
    ("sweep_scratch", &[], &["here", "other", "key"]),
];

/// The first entry of a map as bpftool reads it.
fn first_entry(stage: &Stage, name: &str) -> Value {
    let id = stage.ids.get(name).unwrap_or_else(|| panic!("no map {name}")).to_string();
    let output = Command::new("bpftool").args(["-j", "map", "dump", "id", &id]).output().expect("run bpftool");
    assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
    let entries: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let formatted = entries.get(0).and_then(|entry| entry.get("formatted"));
    formatted.unwrap_or_else(|| panic!("{name} has an entry and BTF: {entries}")).clone()
}

fn names(value: &Value) -> BTreeSet<&str> {
    value.as_object().into_iter().flatten().map(|(name, _)| name.as_str()).collect()
}

/// Packets that leave an entry in every map.
pub(crate) fn use_every_map(stage: &mut Stage) {
    stage.hand_over(&V4, HandoverStage::Arriving);
    stage.expose(V4.pod, 17, 53);
    stage.limit(&V4, BandwidthLimit::new(1_000_000, 0));
    stage.put_interface(FURTHER, V4.mgmt, V6.mgmt);
    stage.put_class(1, V4.world, None, ClassPolicy::new(V4.here));
    stage.put_candidates(1, V4.world, None, Candidates::new(&[0], &[]).expect("one"));
    stage.put_route(FURTHER, V4.world, None, RouteEntry::new(RouteKind::OnLink, 0));
    stage.neighbour(FURTHER, addr(V4.world), OWNED_MAC);
    let fragment = packet(V4.pod, V4.world, 4000, 80).with(|packet| packet.fragment = (0, true));
    let from_outside = packet(V4.world, V4.pod, 80, 5000).tcp(SYN);
    let datagram = packet(V4.known_pod, V4.world, 4000, 80);
    let hairpin = packet(V4.pod, V4.egress, 4000, 80);
    let early = fragment.clone().with(|packet| (packet.fragment, packet.number) = ((9, false), 1));
    let from_pods = [fragment, early, datagram, hairpin].map(|packet| (FROM_POD, packet));
    for (run, packet) in from_pods.into_iter().chain([(TO_POD, from_outside)]) {
        test_run(stage.program(run.program), &run, &packet.frame());
    }
    stage.configure(|config| config.port_block = 64);
    test_run(stage.program(FROM_POD.program), &FROM_POD, &packet(V4.pod, V4.world, 4001, 80).frame());
    // Two flows and one port.
    stage.configure(|config| (config.node_ports.first, config.node_ports.last) = (61000, 61000));
    for port in [4000, 4001] {
        let marked = TestRun { mark: NODE_MARK, ..TO_NETDEV };
        test_run(stage.program(TO_NETDEV.program), &marked, &packet(V4.pod, V4.other_node, port, 80).frame());
    }
}

#[test]
fn every_map_shows_named_fields() {
    on_stage(|stage| {
        use_every_map(stage);
        stage.program(FROM_NETDEV.program);
        for (name, key, value) in FIELDS {
            let entry = first_entry(stage, name);
            let shown = names(&entry["key"]);
            assert!(key.iter().all(|field| shown.contains(field)), "{name}: {key:?} in {entry}");
            // Maps per CPU show one value for each.
            let value_shown = entry.get("value").unwrap_or(&entry["values"][0]["value"]);
            let shown = names(value_shown);
            assert!(value.iter().all(|field| shown.contains(field)), "{name}: {value:?} in {entry}");
        }
        let known: BTreeSet<_> = FIELDS.iter().map(|(name, ..)| *name).chain(["events"]).collect();
        // Names with a leading dot are the object's constants.
        let all: BTreeSet<_> = stage.ids.keys().map(String::as_str).filter(|name| !name.starts_with('.')).collect();
        assert_eq!(all, known, "every map but the ring buffer, which cannot be dumped");
    });
}
