//! The tables of `docs/limits.md`: the maps as the eBPF object has them, and the constants that bound everything else.

use aya_obj::Object;
use aya_obj::generated::bpf_map_type;
use egress_common::abi::{MAX_EGRESS_ID, MAX_NEXT_HOPS, MAX_SLOTS, MOST_BLOCKS};
use egress_common::decide::snat::EGRESS_PORTS;
use egress_core::model::exposed::{MOST_LABELS, MOST_PORTS};
use egress_core::model::interface::{MOST_DESTINATIONS, MOST_INTERFACE_NETWORKS, MOST_INTERFACES, MOST_VLANS};
use egress_core::networks::{MOST_ADDRESSES, MOST_TABLES};
use egress_core::ownership::handover::MAX_OPEN;
use egress_core::plan::capacity::{MOST_EGRESS_IPS, MOST_OF_SERVICE, MOST_OF_SERVICES};
use egress_core::selection::MOST_STANDBY;
use egress_datapath::devices::routes::MOST_ROUTES;
use egress_datapath::object;

use crate::metrics::catalogue;

/// Why the table of maps cannot be printed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LimitsError {
    #[error("{}", object::NOT_EMBEDDED)]
    NotEmbedded,
    #[error("the eBPF object cannot be read: {0}")]
    Object(#[from] aya_obj::ParseError),
    #[error("the eBPF object has no map {0}")]
    NoMap(&'static str),
}

/// The maps that can be full, what their entries are for, and what happens to the next one.
const FULL: [(&str, &str, Beyond); 26] = [
    ("answers", "budgets of generated answers", Beyond::Evicts),
    ("awaited", "datagrams whose first fragment is still to come", Beyond::Evicts),
    ("blocks", "port blocks of pods", Beyond::Dropped("`map_full`")),
    ("classes", "destinations of policies by class of pods", Beyond::LeftOut),
    ("cluster", "prefixes of the cluster, addresses of Services, egress IPs", Beyond::LeftOut),
    ("datagrams", "datagrams of pods that may get an answer", Beyond::Evicts),
    ("destinations", "prefixes by which an object chooses among its addresses", Beyond::LeftOut),
    ("eip_counters", "objects with an egress IP of the node", Beyond::Other("its packets are not counted")),
    ("exhausted", "destinations without a free port", Beyond::Evicts),
    ("exposed", "ports of pods and Services", Beyond::LeftOut),
    ("flows", "flows of the node's selected pods", Beyond::Dropped("`map_full`, `--nat-entries`")),
    ("frags", "fragmented datagrams in progress", Beyond::Evicts),
    ("handovers", "egress IPs that move from or to the node", Beyond::LeftOut),
    ("inbound", "connections from outside to pods", Beyond::Dropped("`inbound_full`, `--inbound-entries`")),
    ("interfaces", "further egress interfaces", Beyond::LeftOut),
    ("nat", "NAT mappings, two entries each", Beyond::Dropped("`map_full`, `--nat-entries`")),
    ("neighbours", "neighbours on further egress interfaces", Beyond::LeftOut),
    ("nodes", "addresses of all nodes", Beyond::LeftOut),
    ("owned", "egress IPs of the node, by object", Beyond::LeftOut),
    ("owned_addr", "egress IPs of the node, by address", Beyond::LeftOut),
    ("pacing", "objects with a bandwidth limit", Beyond::Evicts),
    (
        "pod_blocks",
        "pods with port blocks, at each egress IP",
        Beyond::Other("the pod gets no block; its packets are dropped: `ports_exhausted`"),
    ),
    (
        "pods",
        "addresses of the node's pods",
        Beyond::Other("left out and retried; event `EntryRefused`; the pod counts as unknown (`--unknown-pods`)"),
    ),
    ("policy", "objects that concern the node, one entry for each family", Beyond::LeftOut),
    ("routes", "routes of further egress interfaces", Beyond::LeftOut),
    ("shares", "pods and objects with flows or mappings", Beyond::Other("it has no quota")),
];

enum Beyond {
    /// The agent retries it.
    LeftOut,
    Evicts,
    Dropped(&'static str),
    Other(&'static str),
}

impl Beyond {
    fn text(&self) -> String {
        match self {
            Self::LeftOut => "left out and retried; event `EntryRefused`".to_owned(),
            Self::Evicts => "the least recently used entry goes".to_owned(),
            Self::Dropped(reason) => format!("its packets are dropped: {reason}"),
            Self::Other(text) => (*text).to_owned(),
        }
    }
}

pub(super) fn maps() -> Result<String, LimitsError> {
    let object = Object::parse(object::embedded().ok_or(LimitsError::NotEmbedded)?)?;
    let mut table = String::from(
        "| map | an entry for each of | entries | key and value | memory of an entry | one more |\n|---|---|---|---|---|---|\n",
    );
    for (name, what, beyond) in FULL {
        let map = object.maps.get(name).ok_or(LimitsError::NoMap(name))?;
        let (key, value) = (map.key_size(), map.value_size());
        let memory = match map.map_type() {
            kind if kind == bpf_map_type::BPF_MAP_TYPE_HASH as u32 => format!("{} B", element(key + value)),
            _ => String::new(),
        };
        let (entries, beyond) = (map.max_entries(), beyond.text());
        table += &format!("| `{name}` | {what} | {entries} | {key} + {value} B | {memory} | {beyond} |\n");
    }
    Ok(table)
}

/// Memory of an element of a hash map that is allocated on demand: the kernel's caches have these sizes.
fn element(bytes: u32) -> u32 {
    const OWN: u32 = 48;
    let needed = bytes + OWN;
    [64, 96, 128, 192, 256].into_iter().find(|size| needed <= *size).unwrap_or(needed.next_power_of_two())
}

pub(super) fn constants() -> String {
    let rows: [(&str, usize, &str, &str); 21] = [
        (
            "addresses of an EgressIP, of each family",
            MAX_SLOTS,
            "refused by the API server (64 of both families); with OVN-Kubernetes' own CRD the surplus gets no node",
            "[pods.rs](../egress-common/src/abi/pods.rs)",
        ),
        (
            "objects of the cluster at once",
            MAX_EGRESS_ID as usize,
            "numbers are used again",
            "[abi](../egress-common/src/abi/mod.rs)",
        ),
        (
            "assigned egress IPs of the cluster",
            MOST_EGRESS_IPS,
            "those of younger objects work, but pods of other objects that call them are not refused; event `EgressIPsLeftOut`",
            "[capacity.rs](../crates/core/src/plan/capacity.rs)",
        ),
        ("hand-overs at once", MAX_OPEN, "the others wait", "[handover](../crates/core/src/ownership/handover/mod.rs)"),
        (
            "standby objects that are shown of one pod",
            MOST_STANDBY,
            "the younger ones are not shown",
            "[selection](../crates/core/src/selection/mod.rs)",
        ),
        (
            "addresses of Services outside the service networks, of the cluster",
            MOST_OF_SERVICES,
            "selected pods reach the others with their egress IP; event `ServiceAddressesLeftOut`",
            "[capacity.rs](../crates/core/src/plan/capacity.rs)",
        ),
        ("the same, of one Service", MOST_OF_SERVICE, "as above", "[capacity.rs](../crates/core/src/plan/capacity.rs)"),
        (
            "ports of one pod by which Services reach it, and of one Service at an egress IP",
            MOST_PORTS,
            "the higher ones have no entry in `exposed`",
            "[exposed.rs](../crates/core/src/model/exposed.rs)",
        ),
        (
            "labels by which a Service selects",
            MOST_LABELS,
            "a Service with more exposes no port",
            "[exposed.rs](../crates/core/src/model/exposed.rs)",
        ),
        (
            "egress interfaces of a node, VLAN devices among them",
            MOST_INTERFACES,
            "others host nothing",
            "[interface.rs](../crates/core/src/model/interface.rs)",
        ),
        (
            "networks of an interface",
            MOST_INTERFACE_NETWORKS,
            "addresses in others are not hosted there",
            "[interface.rs](../crates/core/src/model/interface.rs)",
        ),
        (
            "VLANs of pools on a node",
            MOST_VLANS,
            "those of younger objects are left out",
            "[vlans.rs](../crates/core/src/vlans.rs)",
        ),
        (
            "routes of a further interface",
            MOST_ROUTES,
            "none is used; the interface has the reason `TooManyRoutes`, and its egress IPs move",
            "[routes.rs](../crates/datapath/src/devices/routes.rs)",
        ),
        (
            "destinations that an interface publishes",
            MOST_DESTINATIONS,
            "the shortest prefixes count",
            "[interface.rs](../crates/core/src/model/interface.rs)",
        ),
        (
            "next hops of a route",
            MAX_NEXT_HOPS,
            "further ones are not used",
            "[routes.rs](../egress-common/src/abi/routes.rs)",
        ),
        (
            "networks of EgressServices that a node routes by",
            MOST_TABLES,
            "traffic of the younger ones is dropped",
            "[networks.rs](../crates/core/src/networks.rs)",
        ),
        (
            "addresses of load balancers in them",
            MOST_ADDRESSES,
            "the same",
            "[networks.rs](../crates/core/src/networks.rs)",
        ),
        (
            "ports of an egress IP towards one destination",
            usize::from(EGRESS_PORTS.last - EGRESS_PORTS.first) + 1,
            "a new flow is dropped: `ports_exhausted`",
            "[metrics](metrics.md#agents)",
        ),
        (
            "port blocks of a pod at an egress IP, with `--port-block-size`",
            MOST_BLOCKS,
            "as above, of this pod",
            "[blocks.rs](../egress-common/src/abi/blocks.rs)",
        ),
        (
            "egress IPs of a node with series of their own",
            catalogue::MOST_EGRESS_IPS,
            "counted by `egress_agent_egress_ips_unshown`",
            "[catalogue.rs](../egress-agent/src/metrics/catalogue.rs)",
        ),
        (
            "egress nodes with series of their own",
            catalogue::MOST_NODES,
            "unreachable ones are shown first",
            "[catalogue.rs](../egress-agent/src/metrics/catalogue.rs)",
        ),
    ];
    let mut table = String::from("| what | at most | beyond | in |\n|---|---|---|---|\n");
    for (what, most, beyond, place) in rows {
        table += &format!("| {what} | {most} | {beyond} | {place} |\n");
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_map_that_can_be_full_has_a_row() {
        let Some(bytes) = object::embedded() else { return };
        let object = Object::parse(bytes).expect("an object");
        let full = [
            bpf_map_type::BPF_MAP_TYPE_HASH,
            bpf_map_type::BPF_MAP_TYPE_LRU_HASH,
            bpf_map_type::BPF_MAP_TYPE_PERCPU_HASH,
            bpf_map_type::BPF_MAP_TYPE_LPM_TRIE,
        ]
        .map(|kind| kind as u32);
        let maps = object.maps.iter().filter(|(_, map)| full.contains(&map.map_type()));
        let mut names: Vec<&str> = maps.map(|(name, _)| name.as_str()).collect();
        names.sort_unstable();
        assert_eq!(names, FULL.map(|(name, ..)| name));
    }

    #[test]
    fn an_evicting_map_is_one_of_least_recently_used_entries() {
        let Some(bytes) = object::embedded() else { return };
        let object = Object::parse(bytes).expect("an object");
        for (name, _, beyond) in FULL {
            let is_lru = object.maps[name].map_type() == bpf_map_type::BPF_MAP_TYPE_LRU_HASH as u32;
            assert_eq!(matches!(beyond, Beyond::Evicts), is_lru, "{name}");
        }
    }

    #[test]
    fn an_element_has_the_size_of_a_cache_of_the_kernel() {
        assert_eq!([16, 17, 40 + 96, 40 + 136, 208, 209].map(element), [64, 96, 192, 256, 256, 512]);
    }
}
