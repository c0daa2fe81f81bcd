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
        Verdict::NotPod => "Check the address. A pod of another node is traced on that node.",
        Verdict::ToCluster => {
            "Egress IPs apply to destinations outside of the cluster. If this address is outside, look at --cluster-subnets, \
             --service-cidrs and --excluded-cidrs, and at Services that list it."
        }
        Verdict::NotSelected => {
            "If a policy should select it: compare the namespaceSelector and podSelector with the labels of the \
             namespace and the pod (`kubectl get pod --show-labels`)."
        }
        Verdict::UnknownPodPassed | Verdict::UnknownPod => {
            "The agent knows no pod with this address. Check that it is on this node, and that `egress-agent status` shows \
             all lists from the API server as read. --unknown-pods decides about such packets."
        }
        Verdict::NodeAddress => {
            "No node can host any address of the object: label a node with k8s.ovn.org/egress-assignable whose network contains \
             one. `kubectl describe egressip` shows why each was not assigned."
        }
        Verdict::InboundRefused => {
            "The map is full: raise --inbound-entries; a change replaces all maps of the node \
             (docs/install.md lists what is lost)."
        }
        Verdict::AddressConflict => {
            "Another host claims the egress IP: the event `EgressIPConflict` of the policy names its \
             link address. Remove the address there."
        }
        Verdict::HairpinAnswered | Verdict::Hairpin => {
            "Egress IPs are source addresses only, and accept no connections: use the address of the service."
        }
        Verdict::CutAnswered | Verdict::AddressGone | Verdict::FlowCut => {
            "The policy, or the pod, no longer has the address of the connection. A new connection gets another one."
        }
        Verdict::NoPolicy => {
            "The agent has not written the policy's addresses yet: look at `egress-agent status` and the agent's log."
        }
        Verdict::NoGateway => {
            "No node serves an address of the policy now: `kubectl describe egressip` shows why, for each address."
        }
        Verdict::NotGateway => {
            "This node is the gateway and does not own the address yet: `egress-agent status` shows what it waits for."
        }
        Verdict::ForeignPod | Verdict::ProgramBypassed => {
            "The packet bypassed the management port's program. Check that it is attached (`egress-agent status`), and that \
             --mgmt-port is the interface by which pods' packets enter the host."
        }
        Verdict::ForgedTunnel | Verdict::ForgedOuter | Verdict::ForgedInner => {
            "Only nodes send overlay packets. If a node is not recognised, compare its addresses and pod subnets with its \
             annotations and its EgressNode object."
        }
        Verdict::NoNatEntry => "No flow matches: egress IPs accept no connections.",
        Verdict::PortsExhausted => {
            "Every port of the address towards this destination is in use (`egress-agent nat count --to ADDRESS:PORT`): give the policy \
             another address, or use fewer connections. With --port-block-size, every port of the pod's own blocks, or the address has \
             no free block (`egress-agent nat blocks`): use larger or smaller blocks, or more objects."
        }
        Verdict::QuotaExceeded => {
            "`egress-agent nat count` on this node names the pods with most entries. If that many flows are expected, raise \
             --pod-quota, --policy-quota or --nat-entries."
        }
        Verdict::RateLimited => {
            "The pods of the object send more than its bandwidth limit: raise `bandwidth`, or give the uplink the queueing discipline fq, \
             by which packets wait instead."
        }
        Verdict::MapFull => {
            "Find the pods with most connections (`egress-agent nat list`), or raise --nat-entries: a change replaces all \
             maps of the node (docs/install.md lists what is lost)."
        }
        Verdict::NoRoute => {
            "No route leads to the destination by the interface of the egress IP: `ip route show dev` on its node lists \
             them. Of an object with addresses in several networks none may lead there: see `destinations` in `kubectl \
             get egn NODE -o yaml`."
        }
        Verdict::NoNeighbour => "The next hop does not answer: see `ip neigh` on the uplink.",
        Verdict::MtuExceeded | Verdict::OverlayTooNarrow => {
            "Compare the MTU of the pods with those of uplink and overlay (`egress-agent status`)."
        }
        Verdict::Malformed | Verdict::ChainTooLong | Verdict::SourceRouted => "The sender creates invalid packets.",
        Verdict::UnsupportedProtocol => "This cannot be translated: exclude the destination, or the pod.",
        Verdict::FragmentUnknown | Verdict::SctpFragment => "Send smaller packets.",
        Verdict::IcmpUnmatched => "The quoted flow is unknown or expired.",
        Verdict::RewriteFailed | Verdict::EncapFailed | Verdict::BadState | Verdict::ClaimLost => {
            "Report it, with the output of `egress-agent status -o json`."
        }
        Verdict::NoNodeAddress => {
            "The uplink has no address of this family, or no port is left for NAT: see the agent's log."
        }
        Verdict::PortTaken => {
            "Another flow uses the port by now, and a running connection cannot change it: reconnect."
        }
        Verdict::ProtocolTaken => {
            "Such a protocol supports one pod per destination and address: give the policy more addresses."
        }
        Verdict::InboundFull => {
            "Many inbound connections at once, perhaps a flood at one port. If they are legitimate, raise \
             --inbound-entries; a change replaces all maps of the node (docs/install.md lists what is lost)."
        }
        Verdict::SpoofedEgressIp => {
            "A pod, or a rule of the host, has written an egress IP into a packet as its source. A CNI with anti-spoofing \
             prevents it for pods; check the host's rules."
        }
        Verdict::WrongInterface => {
            "The egress IP is on another interface of this node, and works there alone. If it is the host that sends by it: \
             `ip route get DESTINATION from ADDRESS` shows the interface that the host's routes and rules choose."
        }
        Verdict::LeaseExpired => {
            "Its agent is not running, or reaches neither the controller nor the API server: `egress-agent status`. Another \
             node takes over the address, if one can host it."
        }
        Verdict::V4Mapped => {
            "An application writes addresses such as `::ffff:192.0.2.1` into IPv6 packets by a raw socket: these are valid in programming \
             interfaces only (RFC 4291 section 2.5.5.2)."
        }
        Verdict::NotItsPod => "The pod was deselected, or another pod has its address now: the connection has ended.",
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
