//! `from_netdev`: uplink and further egress interfaces, TC ingress. Packets from outside to this node.
//!
//! Replies to an egress IP go to the pod, here or on another node. ARP and neighbour discovery for owned egress IPs are
//! answered, and other hosts that claim one are reported, except for those that are shared with a Service. Simple overlay
//! packets from the uplink are decapsulated.

use egress_common::abi::{Addr, Config, ConflictEvent, Direction, NatEntry, OwnedAddr, Verdict};
use egress_common::decide::Tables;
use egress_common::decide::from_netdev::{self, FromNetdev};
use egress_common::decide::mtu::{self, Fit};
use egress_common::wire::icmp::v6 as icmp_v6;
use egress_common::wire::nd::{self, ADVERTISEMENT_LEN, Solicitation};
use egress_common::wire::{ETH_LEN, Frame, Headers, PROTO_ICMPV6, Plain, Quote, arp as wire_arp, ethertype};

use crate::counters::{self, may_report};
use crate::fib::{self, Route, lookup_to_pod};
use crate::flow_cache::{self, at};
use crate::fragment::{self, Rest};
use crate::from_overlay::{never_passed, take_inner};
use crate::icmp::{self, Buffer};
use crate::maps::{EVENTS, Maps};
use crate::overlay::{self, pass_on};
use crate::packet::Packet;
use crate::rewrite::restore;
use crate::workspace::{Run, Workspace, is_inner, parse, quoted};
use crate::{FastCheck, Outcome, from_overlay, lease, verifier};

/// Records a frame of the uplink for the lease.
#[inline(always)]
pub fn note_heartbeat(packet: Packet, config: &Config) {
    if is_uplink(packet, config) {
        lease::heartbeat();
    }
}

#[inline(always)]
fn is_uplink(packet: Packet, config: &Config) -> bool {
    packet.ifindex() == config.uplink_ifindex
}

/// A plain packet of the node itself, or of the overlay. Out of line, so that its frame is released.
#[inline(never)]
pub fn fast_check(packet: Packet, config: &Config) -> FastCheck {
    match Plain::read(&packet) {
        Some(plain) if is_uplink(packet, config) && overlay::is_for_us(&plain, config) => FastCheck::Overlay,
        Some(plain) if from_netdev::is_left_alone(&plain, packet.ifindex(), config) => FastCheck::LeftAlone,
        _ => FastCheck::Undecided,
    }
}

pub fn begin(packet: Packet, config: &Config, workspace: &mut Workspace, checked: FastCheck) -> Option<Outcome> {
    if packet.is_tagged() || packet.is_for_another_host() {
        return Some(Outcome::done(Verdict::NotOurs));
    }
    let Workspace { headers, outer, is_inner, .. } = workspace;
    *is_inner = checked == FastCheck::Overlay && overlay::decapsulate(packet, config, outer);
    if *is_inner {
        return take_inner(packet, config, workspace).map(never_passed);
    }
    if packet.load(12).map(u16::from_be_bytes) == Some(ethertype::ARP) {
        *headers = Headers::NONE;
        return Some(answer_arp(packet, config));
    }
    if let Err(verdict) = parse(packet, headers, Direction::Ingress) {
        return Some(Outcome::done(verdict));
    }
    flow_cache::serve::<{ at::FROM_NETDEV }>(packet, config, workspace)
}

#[inline(always)]
pub fn finish(packet: Packet) -> Outcome {
    if is_inner() {
        return never_passed(from_overlay::finish(packet));
    }
    match verifier::neighbour(packet) {
        Some(outcome) => outcome,
        None => fragment::judge(verifier::from_netdev(packet), packet),
    }
}

/// ARP: requests for an owned egress IP are answered, and other hosts that claim one are reported.
#[inline(never)]
pub fn answer_arp(packet: Packet, config: &Config) -> Outcome {
    let Some(message) = wire_arp::ArpMessage::parse(&packet) else {
        return Outcome::done(Verdict::NotOurs);
    };
    let contested = is_contested(packet, &message.sender(), &message.sender_mac);
    let otherwise = Outcome::done(if contested { Verdict::AddressConflict } else { Verdict::NotOurs });
    if !message.is_request() {
        return otherwise;
    }
    let Some(owned) = held(&message.target()) else {
        return otherwise;
    };
    // Not left to the stack, which may answer for the other interface (`proxy_arp`).
    if owned.ifindex != packet.ifindex() {
        return Outcome::done(Verdict::WrongInterface);
    }
    if packet.store(0, message.answer(owned.mac)).is_none() {
        return Outcome::done(Verdict::RewriteFailed);
    }
    Outcome::redirected(Verdict::ArpAnswered, fib::send_back(packet, config))
}

/// Neighbour discovery about an owned egress IP; `None` for any other packet. A separate call, because the stack frames
/// of [`uncached`] leave no space for it.
#[inline(always)]
pub fn neighbour_discovery(packet: Packet, config: &Config, workspace: &mut Workspace) -> Option<Outcome> {
    let Workspace { headers, buffer, .. } = workspace;
    if headers.tuple.protocol != PROTO_ICMPV6 {
        return None;
    }
    answer_neighbour(packet, config, headers, buffer)
}

/// Neighbour discovery, likewise. `None` for any other packet, and for invalid messages.
#[inline(never)]
pub fn answer_neighbour(packet: Packet, config: &Config, headers: &Headers, frame: &mut Buffer) -> Option<Outcome> {
    let sender = &headers.tuple.saddr;
    let (kind, target) = nd::about(&packet)?;
    let owned = held(&target)?;
    packet.pull_long_headers();
    let message = verifier::believed(packet)?;
    if owned.ifindex != packet.ifindex() {
        return (kind == icmp_v6::NEIGHBOUR_SOLICITATION).then_some(Outcome::done(Verdict::WrongInterface));
    }
    // A host in duplicate address detection is about to use the address.
    let claims = message.overrides() || *sender == Addr::UNSPECIFIED;
    let contested = claims && is_contested(packet, &target, &message.link(&packet)?);
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
    Some(Outcome::redirected(Verdict::NeighbourAnswered, fib::send_back(packet, config)))
}

/// Whether another host claims an owned egress IP in the network of its interface, by another link address; if so, user
/// space gets an event.
#[inline(never)]
fn is_contested(packet: Packet, address: &Addr, mac: &[u8; 6]) -> bool {
    let is_anothers = held(address).is_some_and(|owned| owned.ifindex == packet.ifindex() && owned.mac != *mac);
    if is_anothers {
        let now = Maps.now_ns();
        if may_report::<{ counters::CONFLICTS }>(now) {
            let event = ConflictEvent { time_ns: now, address: *address, mac: *mac, reserved: [0; 2] };
            // A full ring buffer loses the event; the counter has it.
            let _full = EVENTS.output_untyped::<ConflictEvent>(event, 0);
        }
    }
    is_anothers
}

/// The owned egress IP, if this node answers for it, on its interface alone. The new owner answers for a handed-over
/// address, although this node still accepts replies. Without a lease this node answers for none, because another node
/// may own the address. For an address that is shared with a Service, the Service's provider answers.
#[inline(never)]
fn held(target: &Addr) -> Option<&'static OwnedAddr> {
    // Checked first: after the lookups, `is_contested` is never true on Linux 6.1 (the tests of neighbour discovery
    // fail). The cause is unknown; its verifier's dead code elimination is suspected.
    if !Maps.has_lease() {
        return None;
    }
    let owned = Maps.owned_addr(target)?;
    let held = Maps.owned(owned.egress_id)?;
    (held.address == *target && !held.is_shared()).then_some(owned)
}

/// The decision, for a packet that the flow cache does not serve.
#[inline(always)]
pub fn uncached(packet: Packet, config: &Config, workspace: &mut Workspace) -> Outcome {
    let Workspace { headers, quote, .. } = workspace;
    let quote = quoted(packet, headers, quote);
    let decision = from_netdev::decide(headers, quote, packet.ifindex(), &Maps, config);
    let outcome = apply(packet, config, workspace, decision);
    match outcome.mtu_exceeded() {
        Some(mtu) => {
            let Workspace { headers, buffer, .. } = workspace;
            icmp::error_to_world(&Run { packet, config, headers }, buffer, mtu)
        }
        None => outcome,
    }
}

/// Handles a packet for an address of this node.
#[inline(always)]
pub fn apply(packet: Packet, config: &Config, workspace: &mut Workspace, decision: FromNetdev<'_>) -> Outcome {
    let Workspace { headers, quote, route, rest, .. } = workspace;
    let run = &Run { packet, config, headers };
    match decision {
        FromNetdev::Done(verdict) => Outcome::done(verdict),
        FromNetdev::ReplyHere { nat_entry } => reply_here(run, quote, route, rest, nat_entry),
        FromNetdev::ReplyRemote { nat_entry } => reply_remote(run, quote, route, nat_entry),
        FromNetdev::NodeReply { nat_entry } => match restore(run, quote, nat_entry) {
            Ok(()) => Outcome::done(Verdict::NodeReply),
            Err(verdict) => Outcome::done(verdict),
        },
        FromNetdev::PassOn { egress_id } => pass_on(run, route, egress_id),
    }
}

#[inline(always)]
fn reply_here(run: &Run<'_>, quote: &Quote, route: &mut Route, rest: &mut Rest, nat_entry: &NatEntry) -> Outcome {
    let Run { packet, headers, .. } = *run;
    counters::count_reply(nat_entry.egress_id, packet.len() as u32);
    let lookup = lookup_to_pod(run, &nat_entry.other.saddr, &nat_entry.hop, Some(nat_entry.seal));
    if let Err(verdict) = fib::resolve_route(run, &lookup, route) {
        return Outcome::done(verdict);
    }
    let oversize = run.wire_length() > route.mtu;
    if oversize && !fragment::fits_in_two(run, route.mtu) {
        return Outcome::too_big(route.mtu);
    }
    let result = packet
        .decrement_ttl(headers)
        .and_then(|()| restore(run, quote, nat_entry))
        .and_then(|()| if oversize { fragment::send_in_two(run, route, rest) } else { fib::send(run, route) });
    let outcome = Outcome::redirected(Verdict::ReplyHere, result);
    flow_cache::store_translated(run, outcome, route);
    outcome
}

#[inline(always)]
fn reply_remote(run: &Run<'_>, quote: &Quote, route: &mut Route, nat_entry: &NatEntry) -> Outcome {
    let Run { packet, config, headers } = *run;
    counters::count_reply(nat_entry.egress_id, packet.len() as u32);
    let length = run.wire_length();
    // If allowed, the packet is fragmented: as an outer packet of the overlay, or by the pod's node.
    let whole = match mtu::fit(length, config.overlay_mtu, headers, &nat_entry.source_node) {
        Fit::Tell(limit) => return Outcome::too_big(limit.min(config.pod_mtu)),
        Fit::Lost => return Outcome::done(Verdict::OverlayTooNarrow),
        _ if length > config.pod_mtu && !headers.may_be_fragmented() => return Outcome::too_big(config.pod_mtu),
        Fit::Cut => false,
        Fit::Whole => true,
    };
    let result = packet
        .decrement_ttl(headers)
        .and_then(|()| restore(run, quote, nat_entry))
        .and_then(|()| overlay::encapsulate(run, &nat_entry.source_node, nat_entry.egress_id, whole, route));
    if result.is_ok() {
        flow_cache::store_reply_to_node(run, nat_entry, route);
    }
    Outcome::redirected(Verdict::ReplyToNode, result)
}
