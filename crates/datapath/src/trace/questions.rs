//! Text form of the decision's map lookups and their results.

use egress_common::abi::{
    Addr, ClusterPrefix, Flow, MOST_BLOCKS, NatEntry, NodeEntry, NodePlace, PolicyEntry, PolicySlot, PrefixKind,
    SlotPlace, Tuple, WhenEmpty,
};
use egress_common::decide::{ClaimOutcome, PortClaim, QuotaKind};
use ipnet::IpNet;
use serde::Serialize;

use crate::names::{BLOCKS_MAP, POD_BLOCKS_MAP};
use crate::trace::recorder::RecordedLookup;
use egress_core::display_names::Names;

/// A lookup.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LookupLine {
    pub question: String,
    pub answer: String,
    /// The map.
    pub map: &'static str,
    /// The found entry.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub entry: Option<String>,
}

/// All lookups for a packet with this tuple, in order, without those of entries that the packet itself created.
pub fn questions(asked: &[RecordedLookup], tuple: &Tuple, names: &Names) -> Vec<LookupLine> {
    let is_made = |before: &[RecordedLookup], key: &Tuple| {
        before.iter().any(|one| matches!(one, RecordedLookup::Key(made, _, ClaimOutcome::Claimed) if made == key))
    };
    let is_given = |one: &RecordedLookup| matches!(one, RecordedLookup::Block(PortClaim::Claimed(_)));
    let mut questions = Vec::new();
    for (place, one) in asked.iter().enumerate() {
        match one {
            RecordedLookup::NatEntry(key, _) if is_made(&asked[..place], key) => {}
            RecordedLookup::HeldBlocks(..) if asked[..place].iter().any(is_given) => {}
            one => questions.push(question(one, tuple, names)),
        }
    }
    questions
}

fn question(asked: &RecordedLookup, packet: &Tuple, names: &Names) -> LookupLine {
    let (question, answer, map, entry) = match asked {
        RecordedLookup::Pod(addr, found) => {
            let answer = match found.map(|pod| (pod.class(), pod.egress_id())) {
                None => "no".to_owned(),
                Some((Some(_), _)) => "yes, selected by objects that have destinations".to_owned(),
                Some((None, None)) => "yes, and no object selects it".to_owned(),
                Some((None, Some(id))) => format!("yes, selected by {}", names.object(id)),
            };
            let address = addr.to_ip();
            (format!("is {} a pod of this node?", names.pod(address)), answer, "pods", found.map(|_| text(addr)))
        }
        RecordedLookup::Node(addr, found) => {
            let question = format!("is {} an address of a node?", text(addr));
            (question, node(found.as_ref(), names), "nodes", found.map(|_| text(addr)))
        }
        RecordedLookup::Prefix(addr, found) => {
            let question = match *addr == packet.saddr {
                true => format!("is {} in this node's pod subnet?", text(addr)),
                false => format!("is {} an address of the cluster?", text(addr)),
            };
            let entry = found.map(|(net, _)| net.to_string());
            (question, prefix(found.as_ref(), names), "cluster", entry)
        }
        RecordedLookup::Inbound(tuple, known) => {
            let answer = if *known { "yes" } else { "no" };
            let entry = known.then(|| line(tuple));
            ("does it answer a connection from outside?".to_owned(), answer.to_owned(), "inbound", entry)
        }
        RecordedLookup::ClassPolicy(class, to, found) => {
            let answer = match found.map(|policy| policy.egress_id()) {
                None => "unknown".to_owned(),
                Some(None) => "none".to_owned(),
                Some(Some(id)) => names.object(id),
            };
            let entry = found.map(|_| format!("{class} {}", text(to)));
            (format!("which of them applies to {}?", text(to)), answer, "classes", entry)
        }
        RecordedLookup::Policy(key, found) => {
            let question = format!("which addresses has {}?", names.object(key.egress_id));
            let family = key.family().map_or(0, |family| family as u32);
            let entry = found.as_ref().map(|_| format!("{} IPv{family}", key.egress_id));
            (question, policy(found.as_deref(), names), "policy", entry)
        }
        RecordedLookup::Candidates(to, found) => {
            let answer = match found.map(|found| (found.count(), found.all().count())) {
                None => "none".to_owned(),
                Some((0, _)) => "some, and no node serves them now".to_owned(),
                Some((1, _)) => "1 of those that are served".to_owned(),
                Some((count, _)) => format!("{count} of those that are served"),
            };
            let question = format!("which of them have the most specific route to {}?", text(to));
            (question, answer, "destinations", None)
        }
        RecordedLookup::Flow(tuple, found) => {
            ("has the flow an address already?".to_owned(), flow(found.as_ref()), "flows", found.map(|_| line(tuple)))
        }
        RecordedLookup::Begun(flow, claim) => {
            let answer = match claim {
                ClaimOutcome::Full => "none: the map is full".to_owned(),
                ClaimOutcome::Claimed | ClaimOutcome::Taken => format!("{}, by its hash", flow.address.to_ip()),
            };
            ("which address does a new flow get?".to_owned(), answer, "flows", None)
        }
        RecordedLookup::Owned(id, found) => {
            let answer = match found {
                None => "no".to_owned(),
                Some(owned) => format!("yes, {}", owned.address.to_ip()),
            };
            let question = format!("does this node hold an address of {}?", names.object(*id));
            (question, answer, "owned", found.map(|_| id.to_string()))
        }
        RecordedLookup::Handover(id, found) => {
            let answer = match found {
                None => "no".to_owned(),
                Some(moving) => {
                    format!("yes: {}, the other node is {}", moving.owned.address.to_ip(), at(&moving.peer, names))
                }
            };
            ("is its address being handed over?".to_owned(), answer, "handovers", found.map(|_| id.to_string()))
        }
        RecordedLookup::Lease(has) => {
            let answer = if *has { "yes" } else { "no, its lease has expired" };
            ("may this node emit its egress IPs?".to_owned(), answer.to_owned(), "lease", None)
        }
        RecordedLookup::NatEntry(key, found) => {
            (whose(key, packet), mapping(found.as_deref()), "nat", found.as_ref().map(|_| line(key)))
        }
        RecordedLookup::Key(key, _, claim) => {
            let answer = match claim {
                ClaimOutcome::Claimed => "yes",
                ClaimOutcome::Taken => "no, another flow has it",
                ClaimOutcome::Full => "no, the map is full",
            };
            let question = match key == packet {
                true => "can the mapping be made?".to_owned(),
                false => format!("is port {} of {} free towards there?", key.dport(), text(&key.daddr)),
            };
            (question, answer.to_owned(), "nat", Some(line(key)))
        }
        RecordedLookup::NoQuota(held) => {
            let question = match held {
                QuotaKind::Flows => "may the pod and its egress policy have one more flow?",
                QuotaKind::NatEntries => "may the pod and its egress policy have one more mapping here?",
            };
            (question.to_owned(), "no, one of them holds its quota".to_owned(), "shares", None)
        }
        RecordedLookup::AnyPort(claim) => {
            let answer = match claim {
                PortClaim::Claimed(_) => "yes, one by chance",
                PortClaim::NoneFree => "no",
                PortClaim::Full => "no, the map is full",
            };
            ("is another port free?".to_owned(), answer.to_owned(), "nat", None)
        }
        RecordedLookup::HeldBlocks(holder, held) => {
            let first: Vec<String> =
                (0..MOST_BLOCKS).filter_map(|place| held.at(place)).map(|first| first.to_string()).collect();
            let answer = match first.as_slice() {
                [] => "none yet".to_owned(),
                _ => format!("those that begin with port {}", first.join(", ")),
            };
            let question = format!("which port blocks of {} has the pod?", text(&holder.address));
            (question, answer, POD_BLOCKS_MAP, Some(text(&holder.pod)))
        }
        RecordedLookup::Block(claim) => {
            let answer = match claim {
                PortClaim::Claimed(first) => format!("yes, the one that begins with port {first}"),
                PortClaim::NoneFree => "no".to_owned(),
                PortClaim::Full => "no, the map is full".to_owned(),
            };
            ("is a port block free for it?".to_owned(), answer, BLOCKS_MAP, None)
        }
    };
    LookupLine { question, answer, map, entry }
}

fn text(addr: &Addr) -> String {
    addr.to_ip().to_string()
}

fn at(endpoint: &Addr, names: &Names) -> String {
    names.node(endpoint.to_ip())
}

/// A tuple, as `nat list` writes it.
pub fn line(tuple: &Tuple) -> String {
    let end = |addr: &Addr, port: u16| match addr.to_ip() {
        std::net::IpAddr::V4(ip) => format!("{ip}:{port}"),
        std::net::IpAddr::V6(ip) => format!("[{ip}]:{port}"),
    };
    let (from, to) = (end(&tuple.saddr, tuple.sport()), end(&tuple.daddr, tuple.dport()));
    format!("{} {from} -> {to}", protocol(tuple.protocol))
}

/// Its common name, if any.
pub fn protocol(number: u8) -> String {
    match number {
        1 => "icmp".to_owned(),
        6 => "tcp".to_owned(),
        17 => "udp".to_owned(),
        58 => "icmpv6".to_owned(),
        132 => "sctp".to_owned(),
        other => other.to_string(),
    }
}

fn node(found: Option<&NodeEntry>, names: &Names) -> String {
    match found.map(|node| (node.place(), node)) {
        None => "no".to_owned(),
        Some((NodePlace::Own, _)) => "yes, of this node".to_owned(),
        Some((NodePlace::Other, node)) => format!("yes, of {}", at(&node.node, names)),
    }
}

fn prefix(found: Option<&(IpNet, ClusterPrefix)>, names: &Names) -> String {
    let Some((_, prefix)) = found else { return "no".to_owned() };
    match prefix.kind() {
        Some(PrefixKind::PodSubnet) => format!("yes, in the pod subnet of {}", at(&prefix.node, names)),
        Some(PrefixKind::Service) => "yes, a service's".to_owned(),
        Some(PrefixKind::Join) => "yes, in a join subnet".to_owned(),
        Some(PrefixKind::LinkLocal) => "yes, link-local".to_owned(),
        Some(PrefixKind::Multicast) => "yes, multicast".to_owned(),
        Some(PrefixKind::Excluded) => "yes, excluded by --excluded-cidrs".to_owned(),
        Some(PrefixKind::EgressIp) => "an egress IP".to_owned(),
        Some(PrefixKind::PodNetwork) => "yes, in the pod network".to_owned(),
        None => "yes, of a kind that this version does not know".to_owned(),
    }
}

fn policy(found: Option<&PolicyEntry>, names: &Names) -> String {
    let Some(policy) = found else { return "not written yet".to_owned() };
    let place = |slot: &PolicySlot| match slot.place() {
        SlotPlace::Here => format!("{} here", text(&slot.address)),
        SlotPlace::Remote => format!("{} at {}", text(&slot.address), at(&slot.endpoint, names)),
    };
    let (count, pending) = (policy.count() as usize, policy.pending() as usize);
    let served = policy.slots.iter().take(count).map(place);
    let waiting =
        policy.slots.iter().skip(count).take(pending).map(|slot| format!("{} nowhere now", text(&slot.address)));
    let all: Vec<String> = served.chain(waiting).collect();
    match (all.is_empty(), policy.when_empty()) {
        (false, _) => all.join(", "),
        (true, WhenEmpty::Drop) => "none is served".to_owned(),
        (true, WhenEmpty::NodeAddress) => "none, and no node can host one: the node's address serves".to_owned(),
        (true, WhenEmpty::NotListed) => "it lists none of this family".to_owned(),
    }
}

fn flow(found: Option<&Flow>) -> String {
    found.map_or_else(|| "no".to_owned(), |flow| format!("yes, {}", text(&flow.address)))
}

fn whose(key: &Tuple, packet: &Tuple) -> String {
    match key == packet {
        true => "has the flow a mapping?".to_owned(),
        false => format!("whose is port {} of {}?", key.dport(), text(&key.daddr)),
    }
}

fn mapping(found: Option<&NatEntry>) -> String {
    match found {
        None => "no".to_owned(),
        Some(mapping) => format!("{} (the other key)", line(&mapping.other)),
    }
}
