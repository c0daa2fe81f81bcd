//! The way out: next hops and redirects.
//!
//! A next hop is settled once (`bpf_fib_lookup`) and kept in the mapping, with the agent's route generation and ten seconds
//! of life, or by the CPU, for a second: what the path to another node takes may become less without a change of routes. The
//! packet that settles it goes by `bpf_redirect_neigh`, which resolves the neighbour if need be and keeps its entry fresh;
//! the others get the link addresses written and go straight to the device.
//!
//! The lookup tells in one field the size of a route that has a locked one, and what an ICMP error has had the kernel believe
//! of the path. Anybody can send such an error, about an echo that nobody has sent, and Linux forwards by the first alone
//! (`ip_forward_use_pmtu`). So the field says nothing about pods, and never less than [`LEAST_MTU`] about the rest.
#![expect(unsafe_code, reason = "helper calls on the packet's context")]

use core::mem;

use aya_ebpf::bindings::{
    BPF_FIB_LKUP_RET_NO_NEIGH, BPF_FIB_LKUP_RET_SUCCESS, BPF_FIB_LOOKUP_OUTPUT, bpf_fib_lookup as FibParams,
    bpf_redir_neigh as Neighbour,
};
use aya_ebpf::helpers::generated::{bpf_fib_lookup, bpf_redirect, bpf_redirect_neigh};
use egress_common::abi::{Addr, Config, Family, NextHop, Verdict};

use crate::maps::{Maps, run_ns};
use crate::numbers::route_generation;
use crate::packet::Packet;
use crate::run::Run;
use crate::ways;

const AF_INET: u8 = 2;
const AF_INET6: u8 = 10;
/// Without a change of routes or neighbours, which the agent tells of, the next hop of a mapping is looked up again after
/// this time.
const MAPPING_HOP_LIFE_NS: u64 = 10_000_000_000;
/// Likewise one that the CPU keeps. Many flows share it, so that it costs little; and nobody tells of a path MTU that the
/// kernel has learned.
const CPU_HOP_LIFE_NS: u64 = 1_000_000_000;
/// Less than every IPv6 link takes, and than QUIC needs, is believed of no path (RFC 8200 section 5, RFC 9000 section 14).
const LEAST_MTU: u32 = 1280;
/// What a redirect helper returns when it will happen.
pub const TC_ACT_REDIRECT: i32 = 7;

/// A next hop: ready for use, or one that the kernel still has to resolve for this packet. A struct, not an enum: fields
/// of a variant that is not there would be undefined, and the verifier refuses to see them copied.
#[repr(C)]
pub struct Way {
    /// To be resolved by the kernel, for this packet.
    pub resolve: bool,
    /// The link addresses below are known.
    pub known: bool,
    pub mtu: u32,
    pub ifindex: u32,
    pub dmac: [u8; 6],
    pub smac: [u8; 6],
    /// As it is kept.
    made: NextHop,
    neighbour: Neighbour,
    /// Working space of the lookup.
    params: FibParams,
}

impl Way {
    /// As it is kept from now on; built in place, since the stack has little room.
    #[inline(always)]
    fn kept(&mut self, generation: u32, until: u64, seal: u32) -> &NextHop {
        let hop = &mut self.made;
        hop.ifindex = self.ifindex;
        hop.generation = generation;
        hop.valid_until_ns = until;
        hop.mtu = self.mtu;
        hop.dmac = self.dmac;
        hop.smac = self.smac;
        hop.seal(seal);
        hop
    }
}

/// Ends of the packet as it will leave, and the device that it must leave by.
pub struct Journey<'a> {
    pub saddr: &'a Addr,
    pub daddr: &'a Addr,
    pub ifindex: u32,
    /// Whether the host's routes must lead there by themselves: they may have another device for the same address, such as
    /// one that encrypts. Else only routes by this device are looked at.
    pub as_routed: bool,
    /// What the device takes where the route says nothing.
    pub device_mtu: u32,
    /// The next hop that is kept: by the packet's mapping, or by the CPU for `daddr`.
    pub kept: &'a NextHop,
    /// Whether the mapping of the packet's tuple is to keep a new one; else the CPU does.
    pub by_mapping: bool,
    /// Of that mapping.
    pub seal: u32,
}

/// Settles the way; `None` when it is settled, else why there is none.
#[inline(never)]
pub fn settle(run: &Run<'_>, journey: &Journey<'_>, way: &mut Way) -> Option<Verdict> {
    // Before the routes are asked: they may change behind that.
    let (generation, now) = (route_generation(run.config), run_ns());
    let hop = journey.kept;
    let is_known = hop.generation == generation && hop.ifindex == journey.ifindex;
    // Another CPU may just be writing the one of a mapping; this CPU's own is whole.
    if is_known && now < hop.valid_until_ns && (!journey.by_mapping || hop.is_of(journey.seal)) {
        way.resolve = false;
        way.known = true;
        way.ifindex = hop.ifindex;
        way.mtu = hop.mtu;
        way.dmac = hop.dmac;
        way.smac = hop.smac;
        return None;
    }
    let settled = match look_up(run, journey, &mut way.params) {
        Ok(settled) => settled,
        Err(verdict) => return Some(verdict),
    };
    way.resolve = true;
    way.known = settled;
    way.dmac = way.params.dmac;
    way.smac = way.params.smac;
    way.ifindex = way.params.ifindex;
    let asks_route = settled && journey.ifindex != run.config.mgmt_ifindex;
    way.mtu = if asks_route { route_mtu(&way.params, journey.device_mtu) } else { journey.device_mtu };
    set_neighbour(way);
    if settled {
        let life = if journey.by_mapping { MAPPING_HOP_LIFE_NS } else { CPU_HOP_LIFE_NS };
        let hop = way.kept(generation, now + life, journey.seal);
        if journey.by_mapping {
            Maps.set_hop(&run.heads.tuple, hop);
        } else {
            ways::keep_hop(journey.daddr, hop);
        }
    }
    None
}

/// Asks the routing table; a way by another device than the given one is none. True when the neighbour is known too.
#[inline(always)]
fn look_up(run: &Run<'_>, journey: &Journey<'_>, params: &mut FibParams) -> Result<bool, Verdict> {
    // SAFETY: all fields are integers, for which zero is a value.
    *params = unsafe { mem::zeroed() };
    params.ifindex = journey.ifindex;
    // Any length asks for the route's MTU in return.
    params.__bindgen_anon_1.tot_len = 1;
    let (saddr, daddr) = (journey.saddr.words(), journey.daddr.words());
    match journey.daddr.family() {
        Family::V4 => {
            params.family = AF_INET;
            params.__bindgen_anon_3.ipv4_src = saddr[3];
            params.__bindgen_anon_4.ipv4_dst = daddr[3];
        }
        Family::V6 => {
            params.family = AF_INET6;
            params.__bindgen_anon_3.ipv6_src = saddr;
            params.__bindgen_anon_4.ipv6_dst = daddr;
        }
    }
    // Without the flag the device is the one that the packet would have come by, and leaves the choice of the way free.
    let flags = if journey.as_routed { 0 } else { BPF_FIB_LOOKUP_OUTPUT };
    // SAFETY: the context is the program's own, `params` outlives the call and its true size is given.
    let result = unsafe { bpf_fib_lookup(run.packet.skb().cast(), params, size_of::<FibParams>() as i32, flags) };
    // For IPv6 the kernel takes the device as a wish only, even with the flag.
    if params.ifindex != journey.ifindex {
        return Err(Verdict::NoRoute);
    }
    match result as u32 {
        BPF_FIB_LKUP_RET_SUCCESS => Ok(true),
        BPF_FIB_LKUP_RET_NO_NEIGH => Ok(false),
        _ => Err(Verdict::NoRoute),
    }
}

#[inline(always)]
fn route_mtu(params: &FibParams, device_mtu: u32) -> u32 {
    // SAFETY: both members of the union are u16.
    let mtu = u32::from(unsafe { params.__bindgen_anon_1.mtu_result });
    if mtu > 1 { mtu.max(LEAST_MTU).min(device_mtu) } else { device_mtu }
}

#[inline(always)]
fn set_neighbour(way: &mut Way) {
    way.neighbour.nh_family = u32::from(way.params.family);
    // SAFETY (both): the members of the unions are integers; the family says which one was written.
    if way.params.family == AF_INET {
        way.neighbour.__bindgen_anon_1.ipv4_nh = unsafe { way.params.__bindgen_anon_4.ipv4_dst };
    } else {
        way.neighbour.__bindgen_anon_1.ipv6_nh = unsafe { way.params.__bindgen_anon_4.ipv6_dst };
    }
}

/// Sends the packet on its way; the value is what the program returns.
#[inline(always)]
pub fn go(run: &Run<'_>, way: &mut Way) -> Result<i32, Verdict> {
    let Run { packet, config, .. } = *run;
    packet.strip(config);
    let result = if way.resolve {
        // SAFETY: the neighbour outlives the call and its true size is given.
        unsafe { bpf_redirect_neigh(way.ifindex, &raw mut way.neighbour, size_of::<Neighbour>() as i32, 0) }
    } else {
        packet.set_macs(way.dmac, way.smac).ok_or(Verdict::RewriteFailed)?;
        return redirect(way.ifindex);
    };
    redirected(result)
}

/// Sends the packet, complete with link addresses, by a device.
#[inline(always)]
pub fn redirect(ifindex: u32) -> Result<i32, Verdict> {
    // SAFETY: the helper takes numbers only.
    redirected(unsafe { bpf_redirect(ifindex, 0) })
}

#[inline(always)]
fn redirected(result: i64) -> Result<i32, Verdict> {
    if result as i32 == TC_ACT_REDIRECT { Ok(TC_ACT_REDIRECT) } else { Err(Verdict::NoNeighbour) }
}

/// Turns the packet round on the device that it came from.
#[inline(always)]
pub fn turn_round(packet: Packet, config: &Config) -> Result<i32, Verdict> {
    packet.strip(config);
    redirect(packet.ifindex())
}
