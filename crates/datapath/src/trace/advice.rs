//! Advice for each verdict.

use egress_common::abi::Verdict;

/// One or two sentences; `None` if nothing is wrong. The verdict's own text explains its meaning.
pub const fn advice(verdict: Verdict) -> Option<&'static str> {
    Some(match verdict {
        Verdict::NotIp
        | Verdict::ToOwnNode
        | Verdict::InboundReply
        | Verdict::FamilyNotListed
        | Verdict::TtlExpired
        | Verdict::MarkedNode
        | Verdict::NodeSnat
        | Verdict::NodeSnatDone
        | Verdict::NodeReply
        | Verdict::NotOurs
        | Verdict::InboundRemembered
        | Verdict::SnatHere
        | Verdict::ToGateway
        | Verdict::SnatForNode
        | Verdict::ReplyHere
        | Verdict::ReplyToNode
        | Verdict::ReplyDelivered
        | Verdict::HandedOver
        | Verdict::ArpAnswered
        | Verdict::NeighbourAnswered
        | Verdict::MtuAnswered
        | Verdict::FragmentHeld
        | Verdict::FragmentsReleased => return None,

        Verdict::NotConfigured | Verdict::NotReady => {
            "The agent has not written its configuration: look at its log, and at `egress-agent status`."
        }
        Verdict::NotPod => "Was the address right? A pod of another node is traced on that node.",
        Verdict::ToCluster => {
            "Egress IPs are for the maps. Where this address is outside of the cluster, look at --cluster-subnets, \
             --service-cidrs and --excluded-cidrs, and at Services that list it."
        }
        Verdict::NotSelected => {
            "Should an object select it: compare the object's namespaceSelector and podSelector with the labels of the \
             namespace and the pod (`kubectl get pod --show-labels`)."
        }
        Verdict::UnknownPodPassed | Verdict::UnknownPod => {
            "The agent knows no pod with this address: is it one of this node, and does `egress-agent status` say that all \
             lists have come from the API server? --unknown-pods says what becomes of such packets."
        }
        Verdict::NodeAddress => {
            "No node can host any address of the object: label a node with k8s.ovn.org/egress-assignable whose network holds \
             one. `kubectl describe egressip` says why each was not assigned."
        }
        Verdict::InboundRefused => {
            "The map is full: raise --inbound-entries; with a change all maps of the node begin anew \
             (docs/install.md says what is lost)."
        }
        Verdict::AddressConflict => {
            "Another host of the network says that it has the egress IP: the event `EgressIPConflict` on its object names the \
             link address. Free the address there."
        }
        Verdict::HairpinAnswered | Verdict::Hairpin => {
            "Egress IPs are source addresses, and nothing listens there: call the service that was meant."
        }
        Verdict::CutAnswered | Verdict::AddressGone | Verdict::FlowCut => {
            "The connection had an address that its object, or its pod, no longer has. A new connection gets another one."
        }
        Verdict::NoPolicy => {
            "The agent has yet to write the object's addresses: look at `egress-agent status` and the agent's log."
        }
        Verdict::NoGateway => {
            "No node serves an address of the object now: `kubectl describe egressip` says why, for each address."
        }
        Verdict::NotGateway => {
            "This node is to serve the address and does not hold it yet: `egress-agent status` says what it waits for."
        }
        Verdict::ForeignPod | Verdict::ProgramBypassed => {
            "The packet came past the management port's program: is it attached (`egress-agent status`), and is --mgmt-port \
             the interface by which pods' packets enter the host?"
        }
        Verdict::ForgedTunnel | Verdict::ForgedOuter | Verdict::ForgedInner => {
            "Only nodes send overlay packets. Where a node is not taken for one, compare its addresses and pod subnets with its \
             annotations and its EgressNode object."
        }
        Verdict::NoNatEntry => "Nothing has been sent from there: egress IPs take no connections.",
        Verdict::PortsExhausted => {
            "Every port of the address towards this destination is in use (`egress-agent nat count --to ADDRESS:PORT`): give the object \
             another address, or the clients fewer connections."
        }
        Verdict::QuotaExceeded => {
            "`egress-agent nat count` on this node names the pods that hold most. Where that many flows are wanted, raise \
             --pod-quota, --policy-quota or --nat-entries."
        }
        Verdict::MapFull => {
            "Find who opens so many connections (`egress-agent nat list`), or raise --nat-entries: with a change all \
             maps of the node begin anew (docs/install.md says what is lost)."
        }
        Verdict::NoRoute => {
            "The node has no route to the destination by its uplink: `ip route get` says where it would go."
        }
        Verdict::NoNeighbour => "The next hop does not answer: `ip neigh` on the uplink.",
        Verdict::MtuExceeded | Verdict::OverlayTooNarrow => {
            "Compare the MTU of the pods with those of uplink and overlay (`egress-agent status`)."
        }
        Verdict::Malformed | Verdict::ChainTooLong | Verdict::SourceRouted => {
            "The sender makes packets that are refused."
        }
        Verdict::UnsupportedProtocol => "This cannot be translated: exclude the destination, or the pod.",
        Verdict::FragmentUnknown | Verdict::SctpFragment => "Send smaller packets.",
        Verdict::IcmpUnmatched => "It is about a flow that is not known here (any more).",
        Verdict::RewriteFailed | Verdict::EncapFailed | Verdict::BadState | Verdict::ClaimLost => {
            "Report it, with the output of `egress-agent status -o json`."
        }
        Verdict::NoNodeAddress => {
            "The uplink has no address of this family, or no port is left for NAT on it: see the agent's log."
        }
        Verdict::PortTaken => {
            "Another flow has the port by now, and the other end knows this one by no other: connect anew."
        }
        Verdict::ProtocolTaken => {
            "Such a protocol serves one pod towards each destination: give the object more addresses."
        }
        Verdict::InboundFull => {
            "Many connections from outside at once, perhaps a flood at one port. Where they are real: raise \
             --inbound-entries; with a change all maps of the node begin anew (docs/install.md says what is lost)."
        }
        Verdict::SpoofedEgressIp => {
            "A pod, or a rule of the host, has written an egress IP into a packet as its source. A CNI with anti-spoofing \
             stops the pod; the rule is the administrator's."
        }
        Verdict::LeaseExpired => {
            "Its agent is not running, or reaches neither the controller nor the API server: `egress-agent status`. Another \
             node serves the address meanwhile, where one can."
        }
        Verdict::V4Mapped => {
            "An application writes addresses such as `::ffff:192.0.2.1` into IPv6 packets by a raw socket: these are for programming \
             interfaces only (RFC 4291 section 2.5.5.2)."
        }
        Verdict::NotItsPod => "The pod was deselected, or its address is another pod's now: the connection has ended.",
    })
}

#[cfg(test)]
mod tests {
    use egress_common::abi::Class;

    use super::*;

    #[test]
    fn every_drop_has_advice() {
        for verdict in Verdict::ALL.iter().filter(|verdict| verdict.class() == Class::Drop) {
            let advice = advice(*verdict).unwrap_or_else(|| panic!("{verdict:?}"));
            assert!(advice.ends_with(['.', '?', ')']) && !advice.contains("  "), "{verdict:?}");
        }
    }
}
