//! The closed list of what can become of a packet: counters, metrics, events and documentation all come from here.

/// What the edge does with a packet, by group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// Continues as it came (perhaps with its mark set or its 1008 translation done or undone).
    Pass,
    /// Leaves by another device, rewritten where the verdict says so.
    Redirect,
    /// Answered by the program itself.
    Answer,
    /// Held; it comes by the same hook again, and gets another verdict then.
    Hold,
    Drop,
}

macro_rules! verdicts {
    ($($(#[doc = $doc:literal])+ $name:ident = $index:literal, $class:ident, $label:literal;)+) => {
        /// One per cause; the number is the index in `counters`.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(u32)]
        pub enum Verdict {
            $($(#[doc = $doc])+ $name = $index,)+
        }

        impl Verdict {
            pub const ALL: &'static [Self] = &[$(Self::$name,)+];

            #[inline(always)]
            pub const fn class(self) -> Class {
                match self { $(Self::$name => Class::$class,)+ }
            }

            /// Name in metrics, events and tables.
            pub const fn label(self) -> &'static str {
                match self { $(Self::$name => $label,)+ }
            }

            /// One sentence for people.
            pub const fn describe(self) -> &'static str {
                match self { $(Self::$name => concat!($($doc,)+),)+ }
            }

            /// `None` for a number that this version does not know.
            pub const fn from_index(index: u32) -> Option<Self> {
                match index { $($index => Some(Self::$name),)+ _ => None }
            }
        }
    };
}

verdicts! {
    /// The agent has not written the configuration yet.
    NotConfigured = 0, Pass, "not_configured";
    /// Neither IPv4 nor IPv6.
    NotIp = 1, Pass, "not_ip";
    /// Not the address of a pod of this node.
    NotPod = 2, Pass, "not_pod";
    /// From a pod to an address of its own node.
    ToOwnNode = 3, Pass, "to_own_node";
    /// To the pod network, a service, a join subnet, link-local, multicast or an excluded range.
    ToCluster = 4, Pass, "to_cluster";
    /// Answers a connection that came in from outside.
    InboundReply = 5, Pass, "inbound_reply";
    /// The pod is known and no object selects it.
    NotSelected = 6, Pass, "not_selected";
    /// The pod is not known and such pods pass (--unknown-pods).
    UnknownPodPassed = 7, Pass, "unknown_pod_passed";
    /// The object lists no address of this family.
    FamilyNotListed = 8, Pass, "family_not_listed";
    /// No node can host any address of the object: the node's own address serves.
    NodeAddress = 9, Pass, "node_address";
    /// TTL or hop limit is used up: the host's stack answers.
    TtlExpired = 10, Pass, "ttl_expired";
    /// From a selected pod to another node: marked 1008.
    MarkedNode = 11, Pass, "marked_node";
    /// Translated to the node's address: marked 1008, or no node can host an address of the object and the stack had not translated it.
    NodeSnat = 12, Pass, "node_snat";
    /// Marked 1008, had the node's address already.
    NodeSnatDone = 13, Pass, "node_snat_done";
    /// Answer to a packet marked 1008: translated back.
    NodeReply = 14, Pass, "node_reply";
    /// Nothing of ours on this hook, or a VLAN of another network.
    NotOurs = 15, Pass, "not_ours";
    /// A new connection from outside: remembered.
    InboundRemembered = 16, Pass, "inbound_remembered";
    /// A new connection from outside to a pod that nothing selects, which could not be remembered: `inbound` has no room for it.
    InboundRefused = 17, Pass, "inbound_refused";
    /// ARP or a neighbour advertisement by which another host claims an owned egress IP.
    AddressConflict = 18, Pass, "address_conflict";

    /// From a selected pod, given its egress IP here.
    SnatHere = 20, Redirect, "snat_here";
    /// From a selected pod, sent to its gateway through the overlay.
    ToGateway = 21, Redirect, "to_gateway";
    /// From the overlay, given its egress IP here.
    SnatForNode = 22, Redirect, "snat_for_node";
    /// Reply for an egress IP, to a pod of this node.
    ReplyHere = 23, Redirect, "reply_here";
    /// Reply for an egress IP, sent to the pod's node through the overlay.
    ReplyToNode = 24, Redirect, "reply_to_node";
    /// Reply from a gateway, to a pod of this node.
    ReplyDelivered = 25, Redirect, "reply_delivered";
    /// Of an egress IP that is being handed over: sent on to the other node of the hand-over through the overlay.
    HandedOver = 26, Redirect, "handed_over";

    /// ARP request for an owned egress IP.
    ArpAnswered = 30, Answer, "arp_answered";
    /// Neighbour solicitation for an owned egress IP.
    NeighbourAnswered = 31, Answer, "neighbour_answered";
    /// Larger than the MTU of its route: answered by ICMP.
    MtuAnswered = 32, Answer, "mtu_answered";
    /// From a pod to an egress IP of the cluster: answered by ICMP.
    HairpinAnswered = 33, Answer, "hairpin_answered";
    /// Of a TCP connection that cannot continue: answered by a reset.
    CutAnswered = 34, Answer, "cut_answered";

    /// A later fragment that came before its first one: kept until that comes.
    FragmentHeld = 36, Hold, "fragment_held";
    /// A first fragment that others were waiting for: all of them are reinjected, this one first.
    FragmentsReleased = 37, Hold, "fragments_released";

    /// From a pod that the agent does not know.
    UnknownPod = 40, Drop, "unknown_pod";
    /// The pod is selected and its object's policy is not written yet.
    NoPolicy = 41, Drop, "no_policy";
    /// The pod is selected and no address of the object is assigned.
    NoGateway = 42, Drop, "no_gateway";
    /// From a pod to an egress IP of the cluster.
    Hairpin = 43, Drop, "hairpin";
    /// For an egress IP that this node does not own, from the overlay, a pod or the world.
    NotGateway = 44, Drop, "not_gateway";
    /// A pod's address was about to leave without its egress IP.
    ForeignPod = 45, Drop, "foreign_pod";
    /// A pod's packet to the tunnel port.
    ForgedTunnel = 46, Drop, "forged_tunnel";
    /// Overlay packet that is not from another node's tunnel endpoint to this node's.
    ForgedOuter = 47, Drop, "forged_outer";
    /// Overlay packet whose inner source is not a pod of the node that sent it; of a reply, one of the cluster.
    ForgedInner = 48, Drop, "forged_inner";
    /// Arrived for an egress IP and belongs to no flow.
    NoNatEntry = 49, Drop, "no_nat_entry";
    /// No port is free towards this destination; with port blocks, none of the pod's, and it gets no further block.
    PortsExhausted = 50, Drop, "ports_exhausted";
    /// The map `nat`, `flows` or `blocks` is full.
    MapFull = 51, Drop, "map_full";
    /// No route to the destination by the interface of the egress IP, or by that of any address of the object.
    NoRoute = 52, Drop, "no_route";
    /// The neighbour does not answer.
    NoNeighbour = 53, Drop, "no_neighbour";
    /// Larger than the MTU of its route, and no ICMP answer could be made.
    MtuExceeded = 54, Drop, "mtu_exceeded";
    /// Header cut short or impossible, stacked VLAN tags, or a checksum that would go into a header field.
    Malformed = 55, Drop, "malformed";
    /// What cannot be translated: ICMP that is neither query, answer nor error (redirects above all), AH, mobility headers, DCCP, UDP-Lite.
    UnsupportedProtocol = 56, Drop, "unsupported_protocol";
    /// A later fragment whose first one has not been seen, and that cannot be kept until it comes.
    FragmentUnknown = 57, Drop, "fragment_unknown";
    /// An ICMP error that quotes no flow of ours.
    IcmpUnmatched = 58, Drop, "icmp_unmatched";
    /// The kernel refused to write to the packet.
    RewriteFailed = 59, Drop, "rewrite_failed";
    /// The kernel refused to encapsulate.
    EncapFailed = 60, Drop, "encap_failed";
    /// A selected pod's packet on the uplink that never passed the management port's program.
    ProgramBypassed = 61, Drop, "program_bypassed";
    /// Two CPUs claimed the same flow and neither saw the other's claim settle.
    ClaimLost = 62, Drop, "claim_lost";
    /// The flow's address was taken from the object.
    AddressGone = 63, Drop, "address_gone";
    /// The map holds what another version wrote.
    BadState = 64, Drop, "bad_state";
    /// To be given the node's address, and this node has none of that family.
    NoNodeAddress = 65, Drop, "no_node_address";
    /// A TCP or SCTP flow came in mid-stream, and its port belongs to another flow by now, or no longer to NAT; or a masquerade
    /// has given a pod's packet a port that NAT has given to another flow.
    PortTaken = 66, Drop, "port_taken";
    /// Came through the overlay before the agent has written the configuration.
    NotReady = 67, Drop, "not_ready";
    /// Of a TCP connection of a pod that is no longer selected, and no answer could be made.
    FlowCut = 69, Drop, "flow_cut";
    /// First fragment of an SCTP message, in a flow that has another port outside: its checksum is over all of the message.
    SctpFragment = 70, Drop, "sctp_fragment";
    /// A protocol without ports serves one pod towards each destination, and the address serves another one, or the host.
    ProtocolTaken = 71, Drop, "protocol_taken";
    /// IPv6 extension headers that are cut short, or more than are read.
    ChainTooLong = 72, Drop, "chain_too_long";
    /// A source route, or IPv4 options that cannot be read.
    SourceRouted = 73, Drop, "source_routed";
    /// Within the IPv6 minimum MTU (1280 bytes), and too large for the IPv6 overlay: the uplink's MTU is below 1350.
    OverlayTooNarrow = 74, Drop, "overlay_too_narrow";
    /// Reply from a gateway to a pod that the object does not select: it was deselected, or its address was another pod's.
    NotItsPod = 75, Drop, "not_its_pod";
    /// About to leave with an egress IP as its source that NAT did not write.
    SpoofedEgressIp = 76, Drop, "spoofed_egress_ip";
    /// A new connection from outside to a selected pod, which could not be remembered: its answer would leave with the egress IP.
    InboundFull = 77, Drop, "inbound_full";
    /// A new flow of a pod, or of an egress policy, that holds its quota of `flows` or `nat` already.
    QuotaExceeded = 78, Drop, "quota_exceeded";
    /// IPv6 with an IPv4-mapped address, which no host sends or takes.
    V4Mapped = 80, Drop, "v4_mapped";
    /// For an egress IP of this node, whose lease has expired: its agent is away, or out of touch with the controller and the API server.
    LeaseExpired = 81, Drop, "lease_expired";
    /// To an egress IP of this node, or from it, by another interface than the one that the address is on.
    WrongInterface = 82, Drop, "wrong_interface";
    /// Beyond the bandwidth limit of the egress policy, on its gateway.
    RateLimited = 83, Drop, "rate_limited";
}

impl Verdict {
    /// Size of `counters`: one more than the largest index, rounded up for growth without a new layout.
    pub const SLOTS: usize = 128;

    #[inline(always)]
    pub const fn index(self) -> u32 {
        self as u32
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn labels_and_indices_are_unique_and_fit() {
        let labels: HashSet<_> = Verdict::ALL.iter().map(|v| v.label()).collect();
        assert_eq!(labels.len(), Verdict::ALL.len());
        for verdict in Verdict::ALL {
            assert!((verdict.index() as usize) < Verdict::SLOTS);
            assert_eq!(Verdict::from_index(verdict.index()), Some(*verdict));
            assert!(verdict.describe().trim().ends_with('.'));
        }
    }
}
