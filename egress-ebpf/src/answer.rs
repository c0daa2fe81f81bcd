//! What the programs say themselves: ARP and neighbour advertisements for owned egress IPs, ICMP errors and resets, drop
//! events.

use egress_common::abi::{Addr, Config, ConflictEvent, DropEvent, HandoverStage, OwnedAddr, Verdict};
use egress_common::decide::from_overlay::Outer;
use egress_common::decide::{Tables, from_netdev, limit};
use egress_common::wire::icmp::{Answer, v6 as icmp_v6};
use egress_common::wire::nd::{self, ADVERTISEMENT_LEN, Solicitation};
use egress_common::wire::{
    ETH_LEN, Frame, Headers, L3, Segment, arp as wire_arp, ethertype, ipv4, ipv6, reset as wire_reset, tcp,
};

use crate::Outcome;
use crate::icmp::{self, Buffer};
use crate::maps::{EVENTS, Maps};
use crate::packet::Packet;
use crate::run::Run;
use crate::way::{self, Journey, Way};
use crate::workspace::{ANSWERS, WORKSPACE, Workspace, workspace};
use crate::{apart, overlay, reset, ways};

/// ARP on the uplink: answered where the target is an owned egress IP, and told of where another host says to have one.
#[inline(never)]
pub fn arp(packet: Packet, config: &Config) -> Outcome {
    let Some(message) = wire_arp::Message::parse(&packet) else {
        return Outcome::done(Verdict::NotOurs);
    };
    let contested = is_contested(&message.sender(), &message.sender_mac);
    let otherwise = Outcome::done(if contested { Verdict::AddressConflict } else { Verdict::NotOurs });
    if !message.is_request() {
        return otherwise;
    }
    let Some(owned) = held(&message.target()) else {
        return otherwise;
    };
    if packet.store(0, message.answer(owned.mac)).is_none() {
        return Outcome::done(Verdict::RewriteFailed);
    }
    Outcome::redirected(Verdict::ArpAnswered, way::turn_round(packet, config))
}

/// Whether it is an owned egress IP that has another link address here; if so, user space hears of it.
#[inline(never)]
fn is_contested(address: &Addr, mac: &[u8; 6]) -> bool {
    let is_anothers = held(address).is_some_and(|owned| owned.mac != *mac);
    if is_anothers {
        let now = Maps.now_ns();
        if may_report::<CONFLICTS>(now) {
            let event = ConflictEvent { time_ns: now, address: *address, mac: *mac, reserved: [0; 2] };
            // A full ring buffer loses the event; the counter has it.
            let _full = EVENTS.output_untyped::<ConflictEvent>(event, 0);
        }
    }
    is_anothers
}

/// An address that has been handed over is answered for by its new node, though replies for it are still taken here. Its
/// object may have another address on this node by then. Without a lease nothing is answered for: another node may have the
/// address.
#[inline(never)]
fn held(target: &Addr) -> Option<&'static OwnedAddr> {
    // Asked first. Behind the looks `is_contested` is never true on Linux 6.1 (the tests of neighbour discovery notice it there).
    // Why is not known; its verifier, which cuts out branches that it takes for dead, is the suspect.
    if !Maps.has_lease() {
        return None;
    }
    let owned = Maps.owned_addr(target)?;
    let held = Maps.owned(owned.egress_id)?;
    (held.address == *target).then_some(owned)
}

/// Neighbour discovery on the uplink, likewise; `None` where it is anything else, or may not be believed.
#[inline(never)]
pub fn neighbour(packet: Packet, config: &Config, heads: &Headers, frame: &mut Buffer) -> Option<Outcome> {
    let sender = &heads.tuple.saddr;
    let (kind, target) = nd::about(&packet)?;
    let owned = held(&target)?;
    packet.pull_long_heads();
    let message = apart::believed(packet)?;
    // A host that detects duplicates is about to have the address.
    let claims = message.overrides() || *sender == Addr::UNSPECIFIED;
    let contested = claims && is_contested(&target, &message.link(&packet)?);
    if kind != icmp_v6::NEIGHBOUR_SOLICITATION {
        return contested.then_some(Outcome::done(Verdict::AddressConflict));
    }
    let solicitation = Solicitation { sender_mac: packet.load(6)?, sender, target };
    solicitation.answer(owned.mac, frame);
    let result = packet
        .resize(ADVERTISEMENT_LEN as u32)
        .and_then(|()| packet.store_summed(ETH_LEN, &frame[ETH_LEN..]))
        .and_then(|()| packet.set_macs(solicitation.answer_mac(), owned.mac));
    if result.is_none() {
        return Some(Outcome::done(Verdict::RewriteFailed));
    }
    Some(Outcome::redirected(Verdict::NeighbourAnswered, way::turn_round(packet, config)))
}

/// Tells the pod that sent the packet by the management port, from this node's address.
#[inline(always)]
pub fn to_pod(run: &Run<'_>, buffer: &mut Buffer, answer: Answer, otherwise: Verdict) -> Outcome {
    let from = from_netdev::node_address(run.config, run.heads.family);
    if !become_error(run, buffer, answer, &from) {
        return Outcome::done(otherwise);
    }
    let verdict = match answer {
        Answer::TooBig(_) => Verdict::MtuAnswered,
        Answer::Prohibited => Verdict::HairpinAnswered,
    };
    Outcome::redirected(verdict, way::turn_round(run.packet, run.config))
}

/// Tells a pod of another node, through the overlay by which its packet came.
#[inline(always)]
pub fn to_remote_pod(run: &Run<'_>, buffer: &mut Buffer, outer: &Outer, mtu: u32) -> Outcome {
    let from = from_netdev::node_address(run.config, run.heads.family);
    if !become_error(run, buffer, Answer::TooBig(mtu), &from) {
        return Outcome::done(Verdict::MtuExceeded);
    }
    let result = overlay::sent(overlay::by_device(run, &outer.source, outer.egress_id));
    Outcome::redirected(Verdict::MtuAnswered, result)
}

/// Tells a sender outside, from the egress IP and quoting the packet as it came.
#[inline(always)]
pub fn to_world(run: &Run<'_>, buffer: &mut Buffer, mtu: u32) -> Outcome {
    if !Maps.has_lease() {
        return Outcome::done(Verdict::LeaseExpired);
    }
    if !become_error(run, buffer, Answer::TooBig(mtu), &run.heads.tuple.daddr) {
        return Outcome::done(Verdict::MtuExceeded);
    }
    Outcome::redirected(Verdict::MtuAnswered, way::turn_round(run.packet, run.config))
}

/// Tells the pod that sent the packet by the management port that its connection has ended.
#[inline(always)]
pub fn reset_pod(run: &Run<'_>, buffer: &mut Buffer, otherwise: Verdict) -> Outcome {
    if !become_reset(run, buffer) {
        return Outcome::done(otherwise);
    }
    // What `to_pod` would note of it, for pods that are no longer selected too: the agent need not tell it again.
    Maps.flow_answered(&run.heads.tuple, Segment { flags: tcp::RST, number: run.heads.tcp_ack });
    Outcome::redirected(Verdict::CutAnswered, way::turn_round(run.packet, run.config))
}

/// Likewise a pod of this node whose packet is about to leave by the uplink: by the management port, past the stack.
#[inline(never)]
pub fn reset_pod_from_uplink(run: &Run<'_>, buffer: &mut Buffer, way: &mut Way, otherwise: Verdict) -> Outcome {
    if !become_reset(run, buffer) {
        return Outcome::done(otherwise);
    }
    let (pod, from) = (&run.heads.tuple.saddr, &run.heads.tuple.daddr);
    let journey = Journey {
        saddr: from,
        daddr: pod,
        ifindex: run.config.mgmt_ifindex,
        as_routed: false,
        device_mtu: run.config.pod_mtu,
        kept: ways::kept_hop(pod),
        by_mapping: false,
        seal: 0,
    };
    match way::settle(run, &journey, way) {
        Some(verdict) => Outcome::done(verdict),
        None => Outcome::redirected(Verdict::CutAnswered, way::go(run, way)),
    }
}

/// Likewise a pod of another node, through the overlay by which its packet came.
#[inline(always)]
pub fn reset_remote_pod(run: &Run<'_>, buffer: &mut Buffer, outer: &Outer, otherwise: Verdict) -> Outcome {
    if !become_reset(run, buffer) {
        return Outcome::done(otherwise);
    }
    let result = overlay::sent(overlay::by_device(run, &outer.source, outer.egress_id));
    Outcome::redirected(Verdict::CutAnswered, result)
}

/// A packet that a program of this node has redirected with an egress IP as its source, and that may have waited for its
/// neighbour since: for as long as the uplink had no carrier, say, and the address may be another node's by now.
#[inline(never)]
pub fn waited(packet: Packet, egress_id: u32) -> Outcome {
    let source = match packet.load(ETH_LEN - 2).map(u16::from_be_bytes) {
        Some(ethertype::IPV4) => packet.load(L3 + ipv4::SADDR).map(Addr::v4),
        Some(ethertype::IPV6) => packet.load_addr(L3 + ipv6::SADDR),
        _ => None,
    };
    let Some(source) = source else { return Outcome::done(Verdict::Malformed) };
    Outcome::done(match (Maps.has_lease(), may_emit(egress_id, &source)) {
        (true, true) => Verdict::NotOurs,
        (true, false) => Verdict::NotGateway,
        (false, _) => Verdict::LeaseExpired,
    })
}

/// Whether this node owns the address of the object, or takes it over.
#[inline(always)]
fn may_emit(egress_id: u32, address: &Addr) -> bool {
    if Maps.owned(egress_id).is_some_and(|owned| owned.address == *address) {
        return true;
    }
    let handover = Maps.handover(egress_id).filter(|handover| handover.owned.address == *address);
    handover.is_some_and(|handover| matches!(handover.stage(), Some(HandoverStage::Arriving | HandoverStage::Open)))
}

// The limit is asked behind what may be answered at all, which takes nothing from others.

/// Makes the packet an ICMP error to its sender, where it may and can be.
#[inline(always)]
fn become_error(run: &Run<'_>, buffer: &mut Buffer, answer: Answer, from: &Addr) -> bool {
    let head = answer.head(run.heads.family);
    icmp::answers(run.heads, from) && may_answer() && icmp::error(run, head, from, buffer).is_some()
}

/// Makes the packet a reset to its sender, likewise.
#[inline(always)]
fn become_reset(run: &Run<'_>, buffer: &mut Buffer) -> bool {
    wire_reset::answers(run.heads) && may_answer() && reset::reset(run.packet, run.heads, buffer).is_some()
}

/// Whether this CPU may answer once more; see `decide::limit`.
#[inline(always)]
#[expect(unsafe_code, reason = "map access is one of the three places for it")]
fn may_answer() -> bool {
    let Some(full_at_ns) = ANSWERS.get_ptr_mut(0) else { return false };
    // SAFETY: the element is this CPU's own, and nothing else refers to it.
    limit::take(unsafe { &mut *full_at_ns }, Maps.now_ns())
}

/// At most so many events of a kind: one per CPU and this time.
const REPORT_STEP_NS: u64 = 10_000_000;
/// The kinds.
const DROPS: usize = 0;
const CONFLICTS: usize = 1;

/// Whether this CPU may report one of these now; if so, the next one waits.
#[inline(always)]
#[expect(unsafe_code, reason = "map access is one of the three places for it")]
fn may_report<const KIND: usize>(now: u64) -> bool {
    let Some(workspace) = WORKSPACE.get_ptr_mut(0) else { return false };
    // SAFETY: the element is this CPU's own, and nothing else refers to this field.
    let next = unsafe { &mut (*workspace).next_report_ns[KIND] };
    if now < *next {
        return false;
    }
    *next = now + REPORT_STEP_NS;
    true
}

/// Reports a drop to user space, at most every few milliseconds per CPU.
#[inline(never)]
pub fn report(packet: Packet, verdict: Verdict, length: u32) {
    let now = Maps.now_ns();
    if may_report::<DROPS>(now)
        && let Some(Workspace { heads, .. }) = workspace()
    {
        let event = DropEvent {
            time_ns: now,
            verdict: verdict.index(),
            ifindex: packet.ifindex(),
            // Zero where the source is no selected pod of this node.
            egress_id: Maps.pod(&heads.tuple.saddr).and_then(|pod| pod.egress_id()).unwrap_or(0),
            length,
            tuple: heads.tuple,
        };
        // A full ring buffer loses the event; the counter has it.
        let _full = EVENTS.output(event, 0);
    }
}
