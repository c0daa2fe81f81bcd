//! Text form of a trace.

use std::fmt::{self, Write as _};
use std::net::IpAddr;

use egress_common::abi::{Addr, Class, NatEntry, SlotPlace, Verdict};
use serde::Serialize;

use crate::trace::Traced;
use crate::trace::advice::advice;
use crate::trace::arrival::TracedArrival;
use crate::trace::questions::{LookupLine, line, questions};
use egress_core::display_names::Names;

/// Output of `trace -o json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TraceReport {
    /// The test packet.
    pub packet: String,
    pub pod: String,
    pub questions: Vec<LookupLine>,
    /// The programs' verdict.
    pub verdict: &'static str,
    pub class: &'static str,
    pub meaning: &'static str,
    /// What becomes of a packet to an egress IP.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub to_egress_ip: Option<ToEgressIp>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gateway: Option<TracedGateway>,
    /// The packet's source as seen from outside.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub source: Option<TracedSource>,
    /// Advice.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub advice: Option<&'static str>,
    /// Whether the decision on the host agrees with the programs.
    pub agrees: bool,
    /// The decision's possible verdicts.
    pub foreseen: Vec<&'static str>,
    /// The kernel's hash of the program that was run, and of the one on its hook.
    pub program: String,
    /// Differences from a real packet.
    pub warnings: Vec<String>,
}

/// The destination of a packet that reaches nothing, because it is an egress IP.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ToEgressIp {
    pub address: IpAddr,
    /// The object, if the agent knows it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub object: Option<String>,
    pub fate: &'static str,
}

impl ToEgressIp {
    /// `None` if the packet's verdict does not depend on it.
    fn of(verdict: Verdict, address: IpAddr, names: &Names) -> Option<Self> {
        let fate = match verdict {
            Verdict::NotSelected | Verdict::UnknownPodPassed => {
                "the host sends the packet on as to any other address, and it reaches nothing: if another node holds the egress IP, \
                 that one drops the packet (no_nat_entry); if this one does, its host finds no next hop"
            }
            Verdict::HairpinAnswered | Verdict::Hairpin => "a packet of a selected pod is refused here",
            _ => return None,
        };
        let object = names.egress_ips.get(&address).map(|id| names.object(*id));
        Some(Self { address, object, fate })
    }
}

impl fmt::Display for ToEgressIp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { address, object, fate } = self;
        let object = object.as_deref().unwrap_or("the cluster");
        write!(f, "{address}, an egress IP of {object}: {fate}")
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TracedGateway {
    pub here: bool,
    pub node: String,
    pub egress_ip: IpAddr,
    pub egress_id: u32,
    pub why: &'static str,
    /// Translation there or before.
    pub does: String,
    /// The hop to the gateway, if the packet takes it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub overlay: Option<OverlayHop>,
}

/// What `trace --from-node` on the gateway needs to know.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct OverlayHop {
    /// Tunnel endpoints of this node and of the gateway.
    pub from: IpAddr,
    pub to: IpAddr,
    /// The Node object of the gateway, if the agent knows it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// The address and the port of the packet, which the overlay does not change.
    pub source: IpAddr,
    pub source_port: u16,
}

/// Output of `trace --from-node -o json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ArrivalReport {
    pub packet: String,
    /// The sending node and the object, from the tunnel header.
    pub from_node: String,
    pub object: String,
    pub questions: Vec<LookupLine>,
    /// The decision's verdict, and all that are possible.
    pub verdict: &'static str,
    pub class: &'static str,
    pub meaning: &'static str,
    pub foreseen: Vec<&'static str>,
    /// The new node of an address that is being handed over.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub passed_to: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub source: Option<TracedSource>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub advice: Option<&'static str>,
    pub warnings: Vec<String>,
}

/// What this trace leaves out.
const NOT_RUN: &str = "the decision alone: the programs are not run, and neither route nor next hop is looked up";

impl ArrivalReport {
    pub fn of(traced: &TracedArrival, names: &Names) -> Self {
        let TracedArrival { outer, headers, decided, is_known, is_attached } = traced;
        // The decision always returns one.
        let verdict = decided.verdicts.first().copied().unwrap_or(Verdict::BadState);
        let mut warnings = vec![NOT_RUN.to_owned()];
        if !is_attached {
            warnings.push(
                "the program that receives packets of the overlay is not on its hook: see `egress-agent status`"
                    .to_owned(),
            );
        }
        let whose = if *is_known { "the egress IP, by the mapping" } else { "the egress IP, by a new mapping" };
        let source = decided.mapping.filter(|_| verdict == Verdict::SnatForNode).map(|mapping| TracedSource {
            address: mapping.other.daddr.to_ip(),
            port: Some(mapping.other.dport()).filter(|port| *port != 0),
            whose,
        });
        Self {
            packet: line(&headers.tuple),
            from_node: names.node(outer.source.to_ip()),
            object: names.object(outer.egress_id),
            questions: questions(&decided.asked, &headers.tuple, names),
            verdict: verdict.label(),
            class: class(verdict),
            meaning: verdict.describe().trim(),
            foreseen: labels(&decided.verdicts),
            passed_to: decided.passed_to.map(|peer| names.node(peer.to_ip())),
            source,
            advice: advice(verdict),
            warnings,
        }
    }

    /// Text output.
    pub fn text(&self) -> String {
        let mut text = format!(
            "packet    {}\nfrom      {}, for {}\n\n{}",
            self.packet,
            self.from_node,
            self.object,
            lookups(&self.questions)
        );
        let _written = writeln!(text, "\nverdict   {} ({}): {}", self.verdict, self.class, self.meaning);
        if let Some(node) = &self.passed_to {
            let _written = writeln!(text, "passed on to {node}, which takes the address over");
        }
        if let Some(TracedSource { address, port, whose }) = &self.source {
            let port = port.map_or_else(String::new, |port| format!(" port {port}"));
            let _written = writeln!(text, "world     sees {address}{port}, {whose}");
        }
        if let Some(advice) = self.advice {
            let _written = writeln!(text, "to do     {advice}");
        }
        for warning in &self.warnings {
            let _written = writeln!(text, "! {warning}");
        }
        text
    }
}

/// The lines of the questions to the maps.
fn lookups(questions: &[LookupLine]) -> String {
    let mut text = String::new();
    for (number, one) in questions.iter().enumerate() {
        let entry = one.entry.as_ref().map_or_else(String::new, |entry| format!(": {entry}"));
        // Writing to a string does not fail.
        let _written = writeln!(text, "{:>2}. {} {}   [{}{entry}]", number + 1, one.question, one.answer, one.map);
    }
    text
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TracedSource {
    pub address: IpAddr,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub port: Option<u16>,
    pub whose: &'static str,
}

impl TraceReport {
    pub fn of(traced: &Traced, names: &Names) -> Self {
        let Traced { verdict, predicted, headers, .. } = traced;
        let node = match headers.tuple.saddr.to_ip() {
            IpAddr::V4(_) => traced.config.node_v4,
            IpAddr::V6(_) => traced.config.node_v6,
        };
        let mut warnings = Vec::new();
        if !traced.agrees() {
            let predicted = labels(&predicted.verdicts).join(" or ");
            warnings.push(format!(
                "THE PROGRAMS AND THE DECISION DIFFER: {} and {predicted}. This is a defect, unless the maps are changing at \
                 this very moment: report it, with this output",
                verdict.label()
            ));
        }
        match &traced.attached {
            None => warnings.push(
                "no program of ours is on the management port: packets of pods do NOT go this way now, see \
                 `egress-agent status`"
                    .to_owned(),
            ),
            Some(attached) if attached.tag.is_none() => warnings.push(
                "the kernel does not tell the tag of the program on the management port: it may be of another build"
                    .to_owned(),
            ),
            Some(_) => {}
        }
        let to_egress_ip =
            traced.to_egress_ip.then(|| ToEgressIp::of(*verdict, headers.tuple.daddr.to_ip(), names)).flatten();
        let seen = source(*verdict, traced.mapping.as_ref(), traced.predicted.slot.map(|(_, slot)| slot.address), node);
        Self {
            packet: line(&headers.tuple),
            pod: names.pod(headers.tuple.saddr.to_ip()),
            questions: questions(&predicted.asked, &headers.tuple, names),
            verdict: verdict.label(),
            class: class(*verdict),
            meaning: verdict.describe().trim(),
            gateway: gateway(traced, names),
            source: seen.filter(|_| to_egress_ip.is_none()),
            advice: advice(if to_egress_ip.is_some() { Verdict::Hairpin } else { *verdict }),
            to_egress_ip,
            agrees: traced.agrees(),
            foreseen: labels(&predicted.verdicts),
            program: format!("{:016x}", traced.tag),
            warnings,
        }
    }

    /// Text output.
    pub fn text(&self) -> String {
        let mut text = format!("packet    {}\npod       {}\n\n{}", self.packet, self.pod, lookups(&self.questions));
        let _written = writeln!(text, "\nverdict   {} ({}): {}", self.verdict, self.class, self.meaning);
        if let Some(to) = &self.to_egress_ip {
            let _written = writeln!(text, "to        {to}");
        }
        if let Some(TracedGateway { node, egress_ip, why, does, .. }) = &self.gateway {
            let _written = writeln!(text, "egress IP {egress_ip}, {why}\ngateway   {node}: {does}");
        }
        if let Some(TracedSource { address, port, whose }) = &self.source {
            let port = port.map_or_else(String::new, |port| format!(" port {port}"));
            let _written = writeln!(text, "world     sees {address}{port}, {whose}");
        }
        if let Some(advice) = self.advice {
            let _written = writeln!(text, "to do     {advice}");
        }
        for warning in &self.warnings {
            let _written = writeln!(text, "! {warning}");
        }
        text
    }
}

fn labels(verdicts: &[Verdict]) -> Vec<&'static str> {
    verdicts.iter().map(|verdict| verdict.label()).collect()
}

const fn class(verdict: Verdict) -> &'static str {
    match verdict.class() {
        Class::Pass => "goes on to the host's stack",
        Class::Redirect => "redirected",
        Class::Answer => "answered",
        Class::Hold => "kept",
        Class::Drop => "dropped",
    }
}

fn gateway(traced: &Traced, names: &Names) -> Option<TracedGateway> {
    let (egress_id, slot) = traced.predicted.slot?;
    let egress_ip = slot.address.to_ip();
    let why = match traced.is_known {
        true => "which the flow has had since it began",
        false => "one of its object's, by the flow's hash",
    };
    let own = names.node.as_ref().map_or_else(|| "this node".to_owned(), |name| format!("{name}, this node"));
    let (here, node, does) = match slot.place() {
        SlotPlace::Here => (true, own, here(traced)),
        SlotPlace::Remote => {
            let does = match traced.verdict {
                Verdict::ToGateway => format!(
                    "the packet goes there through the overlay (VNI {egress_id}), and is translated there if that node holds \
                     {egress_ip} of {}",
                    names.object(egress_id)
                ),
                _ => "the packet does not get there".to_owned(),
            };
            (false, names.node(slot.endpoint.to_ip()), does)
        }
    };
    let hop = || OverlayHop {
        from: traced.config.self_node.to_ip(),
        to: slot.endpoint.to_ip(),
        node: names.nodes.get(&slot.endpoint.to_ip()).cloned(),
        source: traced.headers.tuple.saddr.to_ip(),
        source_port: traced.headers.tuple.sport(),
    };
    let overlay = (traced.verdict == Verdict::ToGateway && !here).then(hop);
    Some(TracedGateway { here, node, egress_ip, egress_id, why, does, overlay })
}

fn here(traced: &Traced) -> String {
    match (traced.verdict, &traced.mapping) {
        (Verdict::SnatHere, Some(mapping)) => {
            let how = if traced.is_known { "by the mapping" } else { "by a new mapping" };
            let hop = &mapping.hop;
            let [a, b, c, d, e, f] = hop.dmac;
            let next = format!("{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{f:02x}");
            match &traced.device {
                None => format!("translated {how}, out by the uplink"),
                Some(device) => format!("translated {how}, out by {device}, next hop {next}, MTU {}", hop.mtu),
            }
        }
        (Verdict::HandedOver, _) => "the address is being handed over: the packet goes on to its new node".to_owned(),
        _ => "the packet does not leave".to_owned(),
    }
}

/// Ownership of the address is unknown here.
const GATEWAYS: &str = "the egress IP, if the gateway holds it: `egress-agent status` there says so";
/// Done by the CNI.
const NODES: &str =
    "the node's address, if the host or the CNI masquerades as usual; egress-agent leaves the packet alone";

fn source(verdict: Verdict, mapping: Option<&NatEntry>, gateways: Option<Addr>, node: Addr) -> Option<TracedSource> {
    let egress = |mapping: &NatEntry| TracedSource {
        address: mapping.other.daddr.to_ip(),
        port: Some(mapping.other.dport()).filter(|port| *port != 0),
        whose: "the egress IP",
    };
    match verdict {
        Verdict::SnatHere => mapping.map(egress),
        Verdict::ToGateway | Verdict::HandedOver => {
            gateways.map(|address| TracedSource { address: address.to_ip(), port: None, whose: GATEWAYS })
        }
        Verdict::MarkedNode | Verdict::NodeAddress => {
            Some(TracedSource { address: node.to_ip(), port: None, whose: "the node's address, given at the uplink" })
        }
        Verdict::NotSelected | Verdict::UnknownPodPassed if node != Addr::UNSPECIFIED => {
            Some(TracedSource { address: node.to_ip(), port: None, whose: NODES })
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_visible_source_is_shown_with_its_conditions() {
        let (node, egress) = (Addr::v4([172, 18, 0, 2]), Addr::v4([172, 18, 0, 100]));
        let seen = |verdict, node| source(verdict, None, Some(egress), node).map(|of| (of.address, of.whose));
        for verdict in [Verdict::NotSelected, Verdict::UnknownPodPassed] {
            let (address, whose) = seen(verdict, node).expect("it leaves");
            assert_eq!(address, node.to_ip());
            assert!(whose.contains("masquerades"), "{whose}");
            assert_eq!(seen(verdict, Addr::UNSPECIFIED), None, "a family that the node has not");
        }
        let (address, whose) = seen(Verdict::ToGateway, node).expect("it is sent on");
        assert_eq!(address, egress.to_ip());
        assert!(whose.contains("if the gateway holds it"), "{whose}");
        assert_eq!(seen(Verdict::NoGateway, node), None);
    }

    #[test]
    fn a_destination_that_is_an_egress_ip_is_named_with_its_object() {
        let egress = IpAddr::from([172, 18, 0, 100]);
        let names =
            Names { objects: [(3, "first".to_owned())].into(), egress_ips: [(egress, 3)].into(), ..Names::default() };
        let said = |verdict, names: &Names| ToEgressIp::of(verdict, egress, names).map(|to| to.to_string());
        for verdict in [Verdict::NotSelected, Verdict::UnknownPodPassed] {
            let text = said(verdict, &names).expect("it reaches nothing");
            assert!(text.starts_with("172.18.0.100, an egress IP of first (egress ID 3): the host sends"), "{text}");
            assert!(text.contains("that one drops the packet (no_nat_entry)"), "{text}");
        }
        let text = said(Verdict::HairpinAnswered, &Names::default()).expect("it is refused");
        assert_eq!(text, "172.18.0.100, an egress IP of the cluster: a packet of a selected pod is refused here");
        assert_eq!(said(Verdict::InboundReply, &names), None);
    }
}
