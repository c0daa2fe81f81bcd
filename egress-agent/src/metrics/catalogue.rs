//! Every metric of the agent, defined once: what a scrape says of itself, `docs/metrics.md`, and the names that alerts and
//! dashboard may use all come from here.
//!
//! Names follow Prometheus' conventions: base units at the end of the name, `_total` on what only grows. Labels are few,
//! and each has a bounded set of values ([`Labels`]).

/// How a metric behaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Only grows, until its maps or its process begin anew.
    Counter,
    Gauge,
    Histogram,
}

impl Kind {
    pub const fn word(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram => "histogram",
        }
    }
}

/// Which process says it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Who {
    Both,
    #[default]
    Agent,
    /// The standby leaves the state of the cluster out, and counts on where it stopped when it led: a sum over both
    /// controllers is the cluster's.
    Controller,
}

impl Who {
    /// Whether this process says what is said by `who`.
    pub fn says(self, who: Self) -> bool {
        who == Self::Both || who == self
    }
}

/// Which series a metric has, and what bounds their number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Labels {
    None,
    /// One for each verdict, always all of them.
    Verdict,
    /// One for each egress IP that the node serves at the moment, [`MOST_EGRESS_IPS`] at most.
    EgressIp,
    /// The same in both directions.
    EgressIpDirection,
    /// One for each of the maps that fill with traffic or with the cluster.
    Map,
    /// One for each hook.
    Hook,
    /// One for each answer that a probe may have.
    Answer,
    /// Two: what the cluster's egress IPs may be.
    State,
    /// One for each reason of the condition `Assigned`.
    Reason,
    /// One for each egress node, [`MOST_NODES`] at most.
    Node,
    /// Two: this node gives an address, or gets one.
    Role,
    Version,
}

/// Egress IPs of one node with metrics of their own; how many others there are is counted.
pub const MOST_EGRESS_IPS: usize = 1_000;
/// Egress nodes with a series of their own. Where there are more, those that answer are left out.
pub const MOST_NODES: usize = 2_000;

impl Labels {
    pub const fn names(self) -> &'static [&'static str] {
        match self {
            Self::None => &[],
            Self::Verdict => &["class", "verdict"],
            Self::EgressIp => &["egress_ip", "egressip"],
            Self::EgressIpDirection => &["egress_ip", "egressip", "direction"],
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

    /// How many series there may be, in words.
    pub const fn bound(self) -> &'static str {
        match self {
            Self::None => "one",
            Self::Verdict => "one for each verdict of [datapath.md](datapath.md), always all",
            Self::EgressIp => "one for each egress IP that this node serves, 1000 at most",
            Self::EgressIpDirection => "two for each egress IP that this node serves, 1000 at most",
            Self::Map => "one for each map",
            Self::Hook => "five",
            Self::Answer => "seven",
            Self::State => "two",
            Self::Reason => "one for each reason of the condition `Assigned`",
            Self::Node => "one for each egress node, 2000 at most, those that do not answer first",
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
    pub kind: Kind,
    pub labels: Labels,
    pub who: Who,
    /// One sentence for people, also in the scrape.
    pub help: &'static str,
    /// What to do when it is bad; empty where no value is.
    pub bad: &'static str,
}

impl Metric {
    /// The name that queries use. A histogram's have more behind it.
    pub fn series(&self) -> String {
        match self.kind {
            Kind::Counter => format!("{}_total", self.name),
            Kind::Gauge | Kind::Histogram => self.name.to_owned(),
        }
    }
}

macro_rules! metrics {
    ($($id:ident = $name:literal, $kind:ident, $labels:ident, $who:ident, $help:literal, $bad:literal;)+) => {
        /// Which one.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Id {
            $($id,)+
        }

        /// In the order in which they are shown.
        pub const ALL: &[Metric] = &[$(Metric {
            id: Id::$id, name: $name, kind: Kind::$kind, labels: Labels::$labels, who: Who::$who, help: $help, bad: $bad,
        },)+];
    };
}

metrics! {
    BuildInfo = "egress_agent_build_info", Gauge, Version, Both,
        "The version that runs, as a label; always 1",
        "Two versions for longer than a rolling update takes: look at the DaemonSet and the Deployment.";
    StartTime = "egress_agent_start_time_seconds", Gauge, None, Both,
        "When the process was started, in seconds since 1970",
        "It changes again and again: the process ends and is started again; its log says why.";
    Ready = "egress_agent_ready", Gauge, None, Both,
        "1 where `/readyz` answers with 200",
        "`/readyz` says what is missing; see also `egress-agent status` on the node.";
    Serving = "egress_agent_serving", Gauge, None, Agent,
        "1 where the node can carry egress traffic, as its health service says to the controller's probes",
        "`egress-agent status` names the reason: the kernel is not in step, the uplink is away, or its next hop is silent.";
    Fenced = "egress_agent_fenced", Gauge, None, Agent,
        "1 where the node has egress IPs that it may not hold, since it is out of touch with controller and API server",
        "The management network between this node and the others, or all of the node's network, is cut.";
    Lease = "egress_agent_lease_seconds", Gauge, None, Agent,
        "Seconds for which the programs may go on emitting egress IPs if the agent ends now; 0 once the lease has expired",
        "0 on an egress node: it is out of touch, or has just started. `+Inf`: no other node could host its addresses.";
    Leader = "egress_agent_leader", Gauge, None, Controller,
        "1 where this controller leads",
        "The sum over both controllers is 0 for longer than some seconds: nothing is assigned. Look at the Lease and at the API server.";

    Packets = "egress_agent_packets", Counter, Verdict, Agent,
        "Packets by what became of them; the class `drop` has one verdict for each reason",
        "Of the class `drop`: the table of verdicts in [datapath.md](datapath.md) says what each means; `egress-agent drops --reason REASON` on the node shows a sample of them.";
    Bytes = "egress_agent_bytes", Counter, Verdict, Agent,
        "Bytes by what became of their packets",
        "As for packets.";

    EipPackets = "egress_agent_egress_ip_packets", Counter, EgressIpDirection, Agent,
        "Packets of an egress IP on its gateway: `egress` to the world, `ingress` answers",
        "Packets go out and none come in: the world does not route the address back, or a firewall outside drops it.";
    EipBytes = "egress_agent_egress_ip_bytes", Counter, EgressIpDirection, Agent,
        "Bytes of an egress IP on its gateway",
        "";
    EipCreated = "egress_agent_egress_ip_mappings_created", Counter, EgressIp, Agent,
        "NAT mappings that were made for an egress IP",
        "A rate far above the usual: a pod opens connections without an end.";
    EipRefusals = "egress_agent_egress_ip_refusals", Counter, EgressIp, Agent,
        "Packets of new flows that got no mapping: no port was free, a map was full, or the flow could not be given one",
        "See port use and map fill; the drop reasons of this node say which of them it is.";
    EipMappings = "egress_agent_egress_ip_mappings", Gauge, EgressIp, Agent,
        "NAT mappings of an egress IP, as the latest count found them",
        "";
    EipPortUse = "egress_agent_egress_ip_port_use_ratio", Gauge, EgressIp, Agent,
        "Part of the 64512 ports that is in use towards the one destination (address, port and protocol) that has most",
        "Above 0.8: give the object another address, spread the load over more destinations, or let connections live longer; at 1 new ones are dropped (`ports_exhausted`).";
    EgressIpsUnshown = "egress_agent_egress_ips_unshown", Gauge, None, Agent,
        "Egress IPs of this node that have no metrics of their own, since there are more than 1000",
        "";
    NodePortUse = "egress_agent_node_address_port_use_ratio", Gauge, None, Agent,
        "The same for pods' traffic to other nodes, which bears this node's address and has fewer ports",
        "Above 0.8: a pod opens very many connections to one node.";

    MapEntries = "egress_agent_map_entries", Gauge, Map, Agent,
        "Entries of a map: of `nat` (two for each mapping), `flows` and `inbound` as the latest sweep counted them",
        "Near its capacity: see there.";
    MapCapacity = "egress_agent_map_capacity_entries", Gauge, Map, Agent,
        "Entries that a map may have",
        "`nat` and `inbound` grow by `--nat-entries` and `--inbound-entries`, with which all maps begin anew; a full map refuses what is new (`map_full`).";
    EntriesRefused = "egress_agent_entries_refused", Counter, Map, Agent,
        "Entries of the agent's own that the kernel has refused, each try counted: the map is full, or the kernel has no memory",
        "It grows: the event `EntryRefused` on the EgressIP, or on the Node, says which. Everything else is served.";
    EntriesLeftOut = "egress_agent_entries_left_out", Gauge, Map, Agent,
        "Entries that are wanted and not in the map, since the kernel refuses them; they are tried again within 30 s",
        "Above zero for longer than a minute: see `egress_agent_entries_refused_total`.";
    HookAttached = "egress_agent_program_attached", Gauge, Hook, Agent,
        "1 where the hook's program is on its device",
        "The device is away or made anew, or another hand takes the program off; the agent puts it back and says why it cannot.";
    HookRuns = "egress_agent_program_runs", Counter, Hook, Agent,
        "How often a hook's program has run; only while the sysctl `kernel.bpf_stats_enabled` is 1",
        "";
    HookSeconds = "egress_agent_program_run_seconds", Counter, Hook, Agent,
        "Time that a hook's program has run; only while the sysctl `kernel.bpf_stats_enabled` is 1",
        "";

    Reconcile = "egress_agent_reconcile_duration_seconds", Histogram, None, Agent,
        "From the moment when a change of the cluster arrives at the agent to the last write into the maps that it asks for",
        "Above a second: the node is short of CPU, an address is claimed slowly, or the kernel refuses something; see the log.";
    ReconcileFailures = "egress_agent_reconcile_failures", Counter, None, Agent,
        "Attempts to bring the kernel to what the cluster wants that failed, and were made again",
        "It grows on: the log names what the kernel refuses. `serving` becomes 0 after five seconds of it.";
    HealthRefused = "egress_agent_health_connections_refused", Counter, None, Agent,
        "Connections to the health port that were closed at once for want of a place",
        "It grows: something opens connections to the management address; nodes have places of their own, so probes go on.";
    AddressConflicts = "egress_agent_address_conflicts", Counter, None, Agent,
        "Claims of other hosts on egress IPs of this node that were met by an announcement, one in ten seconds for an address",
        "It grows: two hosts have an address. The event `EgressIPConflict` on its object names the other one.";
    ApiOutages = "egress_agent_api_outages", Counter, None, Both,
        "Times that the API server began not to answer",
        "Look at the API server and the network to it. Traffic goes on.";
    Unanswered = "egress_agent_api_unanswered_seconds", Gauge, None, Both,
        "For how long the API server has not answered; 0 while it does",
        "For minutes: new pods and changed objects are not served until it is back.";
    HandOvers = "egress_agent_hand_overs", Gauge, Role, Agent,
        "Hand-overs under way that concern this node: `from` it, or `to` it",
        "One that stays for minutes: the old node does not let go and nothing shows that it is gone; `egress-agent status` names both.";
    Standby = "egress_agent_standby_pods", Gauge, None, Agent,
        "Pods of this node that an object selects in vain, since an older one serves them",
        "Not 0: two objects select one pod; `egress-agent status` names them.";
    Unclaimed = "egress_agent_unclaimed_egress_ips", Gauge, None, Agent,
        "Egress IPs that are assigned to this node and that it does not serve",
        "For longer than some seconds: somebody else answers for the address, or the kernel refuses the claim; see the events of its object.";

    EgressIps = "egress_agent_egress_ips", Gauge, State, Controller,
        "Addresses that the cluster's EgressIP objects list: `assigned` to a node, or `unassigned`",
        "Unassigned: the condition `Assigned` of the object says why (`kubectl describe egressip`).";
    Objects = "egress_agent_egressip_objects", Gauge, Reason, Controller,
        "EgressIP objects by the reason of their condition `Assigned`",
        "Any reason but `Assigned` for long: `kubectl get egressip` and the object's condition say what is missing.";
    NodeState = "egress_agent_egress_node_state", Gauge, Node, Controller,
        "1 for each egress node and its state: `answers`, `agent_away` (keeps what it has), or `unreachable` (loses it)",
        "The node or its agent does not answer the leader's probes; look at the node, its network, and its agent's log.";
    Probes = "egress_agent_probes", Counter, Answer, Controller,
        "What came of the leader's probes: `serving`, `not_serving`, `next_hop_lost`, `late`, `refused`, `unsigned`, `unreachable`",
        "Anything but `serving`: the log of the leader and `egress_agent_egress_node_state` name the node.";
    ProbeSeconds = "egress_agent_probe_duration_seconds", Histogram, None, Controller,
        "How long the answers to the leader's probes took",
        "Near the total timeout: nodes will be taken for gone that are only slow; give them CPU, or raise `--egressip-reachability-total-timeout`.";
    Failover = "egress_agent_failover_duration_seconds", Histogram, None, Controller,
        "For each egress IP that left a node which counts as gone: from when that node was known to be well last to the status that names another",
        "Above some seconds: the API server is slow, or no other node has room; the gateway's claim comes on top.";
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn names_keep_to_the_conventions() {
        let names: BTreeSet<&str> = ALL.iter().map(|metric| metric.name).collect();
        assert_eq!(names.len(), ALL.len(), "each name once");
        for metric in ALL {
            let name = metric.name;
            assert!(name.starts_with("egress_agent_"), "{name}");
            assert!(name.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_'), "{name}");
            assert!(!name.ends_with("_total"), "{name}: a counter gets it where it is shown");
            assert!(!name.ends_with("_count") && !name.ends_with("_sum") && !name.ends_with("_bucket"), "{name}");
            for scaled in ["_ms", "_millis", "_us", "_ns", "_percent", "_kb", "_kilobytes"] {
                assert!(!name.ends_with(scaled), "{name} has no base unit");
            }
            if metric.kind == Kind::Histogram {
                assert!(name.ends_with("_seconds"), "{name}");
            }
            assert!(!metric.help.ends_with('.') && !metric.help.contains(['\n', '|']), "{name}");
            assert!(!metric.bad.contains(['\n', '|']), "{name}");
        }
    }
}
