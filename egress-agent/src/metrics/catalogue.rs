//! Every metric, defined once: scrapes, `docs/metrics.md` and the check of alerts and dashboard are generated from here.
//!
//! Names follow Prometheus' conventions: base units at the end of the name, `_total` for counters. Labels are few, and each
//! has a bounded set of values ([`MetricLabels`]).

/// How a metric behaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetricKind {
    /// Grows until its maps are recreated or its process restarts.
    Counter,
    Gauge,
    Histogram,
}

impl MetricKind {
    pub const fn name(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram => "histogram",
        }
    }
}

/// Which process exposes a metric.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Process {
    Both,
    #[default]
    Agent,
    /// A standby omits the state of the cluster and keeps its counters, so the sum over both controllers is the cluster's.
    Controller,
}

impl Process {
    /// Whether this process exposes a metric of `process`.
    pub fn exposes(self, process: Self) -> bool {
        process == Self::Both || process == self
    }
}

/// Which series a metric has, and what bounds their number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetricLabels {
    None,
    /// One for each verdict, always all of them.
    Verdict,
    /// One for each egress IP that the node serves at the moment, [`MOST_EGRESS_IPS`] at most.
    EgressIp,
    /// The same in both directions.
    EgressIpDirection,
    /// The same with its interface.
    EgressIpInterface,
    /// One for each of the maps that fill with traffic or with the cluster.
    Map,
    /// One for each hook.
    Hook,
    /// One for each result of a probe.
    Answer,
    /// Two: assigned and unassigned.
    State,
    /// One for each reason of the condition `Assigned`.
    Reason,
    /// One for each egress node, [`MOST_NODES`] at most.
    Node,
    /// Two: this node is the old owner, or the new one.
    Role,
    Version,
}

/// Egress IPs of one node with their own series; a gauge counts the rest.
pub const MOST_EGRESS_IPS: usize = 1_000;
/// Egress nodes with their own series. If there are more, reachable ones are omitted first.
pub const MOST_NODES: usize = 2_000;

impl MetricLabels {
    pub const fn names(self) -> &'static [&'static str] {
        match self {
            Self::None => &[],
            Self::Verdict => &["class", "verdict"],
            Self::EgressIp => &["egress_ip", "egressip"],
            Self::EgressIpDirection => &["egress_ip", "egressip", "direction"],
            Self::EgressIpInterface => &["egress_ip", "egressip", "interface"],
            Self::Map => &["map"],
            Self::Hook => &["hook"],
            Self::Answer => &["answer"],
            Self::State => &["state"],
            Self::Reason => &["reason"],
            Self::Node => &["node", "state"],
            Self::Role => &["role"],
            Self::Version => &["version"],
        }
    }

    /// The number of series, for the documentation.
    pub const fn bound(self) -> &'static str {
        match self {
            Self::None => "one",
            Self::Verdict => "one for each verdict of [datapath.md](datapath.md), always all",
            Self::EgressIp | Self::EgressIpInterface => "one for each egress IP that this node serves, 1000 at most",
            Self::EgressIpDirection => "two for each egress IP that this node serves, 1000 at most",
            Self::Map => "one for each map",
            Self::Hook => "five",
            Self::Answer => "seven",
            Self::State => "two",
            Self::Reason => "one for each reason of the condition `Assigned`",
            Self::Node => "one for each egress node, 2000 at most, unreachable ones first",
            Self::Role => "two",
            Self::Version => "one",
        }
    }
}

#[derive(Debug, PartialEq, Eq)]
pub struct Metric {
    pub id: Id,
    /// Without `_total`.
    pub name: &'static str,
    pub kind: MetricKind,
    pub labels: MetricLabels,
    pub process: Process,
    /// One sentence, also in the scrape.
    pub help: &'static str,
    /// What a bad value means and what to do; empty if no value is bad.
    pub bad: &'static str,
}

impl Metric {
    /// The name that queries use. A histogram's series have a further suffix.
    pub fn series(&self) -> String {
        match self.kind {
            MetricKind::Counter => format!("{}_total", self.name),
            MetricKind::Gauge | MetricKind::Histogram => self.name.to_owned(),
        }
    }
}

macro_rules! metrics {
    ($($id:ident = $name:literal, $kind:ident, $labels:ident, $process:ident, $help:literal, $bad:literal;)+) => {
        /// Identifies a metric in code.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Id {
            $($id,)+
        }

        /// In the order in which they are shown.
        pub const ALL: &[Metric] = &[$(Metric {
            id: Id::$id, name: $name, kind: MetricKind::$kind, labels: MetricLabels::$labels, process: Process::$process,
            help: $help, bad: $bad,
        },)+];
    };
}

metrics! {
    BuildInfo = "egress_agent_build_info", Gauge, Version, Both,
        "The version that runs, as a label; always 1",
        "Two versions for longer than a rolling update takes: look at the DaemonSet and the Deployment.";
    StartTime = "egress_agent_start_time_seconds", Gauge, None, Both,
        "When the process was started, in seconds since 1970",
        "It changes repeatedly: the process keeps restarting; its log has the cause.";
    Ready = "egress_agent_ready", Gauge, None, Both,
        "1 if `/readyz` answers with 200",
        "`/readyz` names what is missing; see also `egress-agent status` on the node.";
    Serving = "egress_agent_serving", Gauge, None, Agent,
        "1 if the node can carry egress traffic, as its health service answers the controller's probes",
        "`egress-agent status` names the reason: the kernel is not in the desired state, the uplink is down, or its next hop does not answer.";
    LeaseExpired = "egress_agent_lease_expired", Gauge, None, Agent,
        "1 if the node's lease has expired and it serves none of its egress IPs: it reaches neither the controller nor the API server",
        "The management network between this node and the others, or all of the node's network, is cut.";
    Lease = "egress_agent_lease_seconds", Gauge, None, Agent,
        "Seconds for which the programs may emit egress IPs if the agent ends now; 0 once the lease has expired",
        "0 on an egress node: the agent reaches neither controller nor API server, or has just started. `+Inf`: no other node could host its addresses.";
    Leader = "egress_agent_leader", Gauge, None, Controller,
        "1 if this controller leads",
        "The sum over both controllers is 0 for longer than some seconds: nothing is assigned. Look at the Lease and at the API server.";

    Packets = "egress_agent_packets", Counter, Verdict, Agent,
        "Packets by verdict; the class `drop` has one verdict for each reason",
        "Of the class `drop`: the table of verdicts in [datapath.md](datapath.md) explains each; `egress-agent drops --reason REASON` on the node shows a sample of them.";
    Bytes = "egress_agent_bytes", Counter, Verdict, Agent,
        "Bytes by the verdict of their packets",
        "As for packets.";

    EipInfo = "egress_agent_egress_ip_info", Gauge, EgressIpInterface, Agent,
        "The interface that an egress IP of this node is on, as a label; always 1",
        "";
    EipPackets = "egress_agent_egress_ip_packets", Counter, EgressIpDirection, Agent,
        "Packets of an egress IP on its gateway: `egress` to the world, `ingress` replies",
        "Packets go out and none come in: the network outside does not route the address back, or a firewall drops the replies.";
    EipBytes = "egress_agent_egress_ip_bytes", Counter, EgressIpDirection, Agent,
        "Bytes of an egress IP on its gateway",
        "";
    EipCreated = "egress_agent_egress_ip_mappings_created", Counter, EgressIp, Agent,
        "NAT mappings created for an egress IP",
        "A rate far above the usual: a pod opens connections in a loop.";
    EipRefusals = "egress_agent_egress_ip_refusals", Counter, EgressIp, Agent,
        "Packets of new flows without a mapping: no port was free, a map was full, or the flow cannot have one",
        "See port use and map fill; the drop reasons of this node show the cause.";
    EipLimited = "egress_agent_egress_ip_limited_packets", Counter, EgressIp, Agent,
        "Packets beyond the bandwidth limit of an egress IP, which were dropped",
        "Its pods send more than they may: raise the limit, or give the uplink the queueing discipline fq, by which packets wait.";
    EipMappings = "egress_agent_egress_ip_mappings", Gauge, EgressIp, Agent,
        "NAT mappings of an egress IP as of the latest count",
        "";
    EipPortUse = "egress_agent_egress_ip_port_use_ratio", Gauge, EgressIp, Agent,
        "Share of the 64512 ports in use towards the busiest destination (address, port and protocol)",
        "Above 0.8: give the object another address, spread the load over more destinations, or let connections live longer; at 1 new ones are dropped (`ports_exhausted`).";
    EipBlockUse = "egress_agent_egress_ip_port_block_use_ratio", Gauge, EgressIp, Agent,
        "Share of the port blocks of an egress IP that pods have, with `--port-block-size`",
        "Above 0.8: divide the pods over more objects, or use smaller blocks; at 1 a pod without a block gets none (`ports_exhausted`).";
    EgressIpsUnshown = "egress_agent_egress_ips_unshown", Gauge, None, Agent,
        "Egress IPs of this node without their own series, since there are more than 1000",
        "";
    NodePortUse = "egress_agent_node_address_port_use_ratio", Gauge, None, Agent,
        "The same for pods' traffic to other nodes, which has this node's address and fewer ports",
        "Above 0.8: a pod opens very many connections to one node.";

    MapEntries = "egress_agent_map_entries", Gauge, Map, Agent,
        "Entries of a map: of `nat` two for each mapping",
        "Near its capacity: see `egress_agent_map_capacity_entries`.";
    MapCapacity = "egress_agent_map_capacity_entries", Gauge, Map, Agent,
        "Capacity of a map",
        "`--nat-entries` and `--inbound-entries` raise those of `nat` and `inbound`; all maps are then recreated. A full map refuses new entries (`map_full`).";
    EntriesRefused = "egress_agent_entries_refused", Counter, Map, Agent,
        "Attempts to write an entry that the kernel refused: the map is full, or the kernel has no memory",
        "It grows: the event `EntryRefused` on the EgressIP, or on the Node, names the entry. Everything else is served.";
    EntriesLeftOut = "egress_agent_entries_left_out", Gauge, Map, Agent,
        "Desired entries that the kernel refuses; they are retried within 30 s",
        "Above zero for longer than a minute: see `egress_agent_entries_refused_total`.";
    HookAttached = "egress_agent_program_attached", Gauge, Hook, Agent,
        "1 if the hook's program is attached to its device",
        "The device is missing or was recreated, or other software detached the program; the agent attaches it again, and logs why if it cannot.";
    HookRuns = "egress_agent_program_runs", Counter, Hook, Agent,
        "Runs of a hook's program; only while the sysctl `kernel.bpf_stats_enabled` is 1",
        "";
    HookSeconds = "egress_agent_program_run_seconds", Counter, Hook, Agent,
        "Run time of a hook's program; only while the sysctl `kernel.bpf_stats_enabled` is 1",
        "";

    Reconcile = "egress_agent_reconcile_duration_seconds", Histogram, None, Agent,
        "Time from the arrival of a cluster change at the agent to the last map write for it",
        "Above a second: the node is short of CPU, an address is claimed slowly, or the kernel refuses something; see the log.";
    ReconcileFailures = "egress_agent_reconcile_failures", Counter, None, Agent,
        "Failed attempts to bring the kernel to the desired state; they are repeated",
        "It keeps growing: the log names the failing action. `egress_agent_serving` becomes 0 after five seconds.";
    HealthRefused = "egress_agent_health_connections_refused", Counter, None, Agent,
        "Connections to the health port that were closed because no slot was free",
        "It grows: a client opens many connections to the management address; nodes have reserved slots, so probes still work.";
    AddressConflicts = "egress_agent_address_conflicts", Counter, None, Agent,
        "Claims of other hosts to egress IPs of this node that the agent answered with an announcement, at most one in ten seconds for an address",
        "It grows: two hosts have an address. The event `EgressIPConflict` on its object names the other one.";
    ApiOutages = "egress_agent_api_outages", Counter, None, Both,
        "API outages: how often the API server stopped answering",
        "Check the API server and the network to it. Traffic continues.";
    Unanswered = "egress_agent_api_unanswered_seconds", Gauge, None, Both,
        "Duration of the current API outage; 0 without one",
        "For minutes: new pods and changed objects are not served until the API server answers.";
    HandOvers = "egress_agent_hand_overs", Gauge, Role, Agent,
        "Hand-overs in progress `from` this node or `to` it",
        "One that lasts for minutes: the old owner has not released the address, and its lease has not expired; `egress-agent status` names both nodes.";
    Standby = "egress_agent_standby_pods", Gauge, None, Agent,
        "Pods of this node that an object selects while an older one serves them",
        "Not 0: two objects select one pod; `egress-agent status` names them.";
    Unclaimed = "egress_agent_unclaimed_egress_ips", Gauge, None, Agent,
        "Egress IPs that are assigned to this node and not served",
        "For longer than some seconds: another host answers for the address, or the kernel refuses the claim; see the events of its object.";

    EgressIps = "egress_agent_egress_ips", Gauge, State, Controller,
        "Addresses that the cluster's EgressIP objects list: `assigned` to a node, or `unassigned`",
        "Unassigned: the condition `Assigned` of the object has the cause (`kubectl describe egressip`).";
    Objects = "egress_agent_egressip_objects", Gauge, Reason, Controller,
        "EgressIP objects by the reason of their condition `Assigned`",
        "Any reason but `Assigned` and `NoPodServed` for long: `kubectl get egressip` and the object's condition name the cause.";
    NodeState = "egress_agent_egress_node_state", Gauge, Node, Controller,
        "1 for each egress node and its state: `answers`, `agent_away` (keeps what it has), or `unreachable` (loses it)",
        "The node or its agent does not answer the leader's probes; look at the node, its network, and its agent's log.";
    Probes = "egress_agent_probes", Counter, Answer, Controller,
        "Results of the leader's probes: `serving`, `not_serving`, `next_hop_lost`, `late`, `refused`, `unsigned`, `unreachable`",
        "Anything but `serving`: the log of the leader and `egress_agent_egress_node_state` name the node.";
    ProbeSeconds = "egress_agent_probe_duration_seconds", Histogram, None, Controller,
        "Response time of the leader's probes",
        "Near the total timeout: slow nodes will count as unreachable; give them CPU, or raise `--egressip-reachability-total-timeout`.";
    Failover = "egress_agent_failover_duration_seconds", Histogram, None, Controller,
        "For each egress IP that left an unreachable node: time from that node's last good answer to the status that names another node",
        "Above some seconds: the API server is slow, or no other node had capacity. The new gateway's claim is not included.";
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn names_follow_the_conventions() {
        let names: BTreeSet<&str> = ALL.iter().map(|metric| metric.name).collect();
        assert_eq!(names.len(), ALL.len(), "each name once");
        for metric in ALL {
            let name = metric.name;
            assert!(name.starts_with("egress_agent_"), "{name}");
            assert!(name.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_'), "{name}");
            assert!(!name.ends_with("_total"), "{name}: the exposition adds it");
            assert!(!name.ends_with("_count") && !name.ends_with("_sum") && !name.ends_with("_bucket"), "{name}");
            for scaled in ["_ms", "_millis", "_us", "_ns", "_percent", "_kb", "_kilobytes"] {
                assert!(!name.ends_with(scaled), "{name} has no base unit");
            }
            if metric.kind == MetricKind::Histogram {
                assert!(name.ends_with("_seconds"), "{name}");
            }
            assert!(!metric.help.ends_with('.') && !metric.help.contains(['\n', '|']), "{name}");
            assert!(!metric.bad.contains(['\n', '|']), "{name}");
        }
    }
}
