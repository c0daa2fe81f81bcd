//! Next hops: FIB lookup, its cache, and redirects.
//!
//! A next hop comes from `bpf_fib_lookup`, and on a further egress interface from the agent's map `routes`, since the helper
//! does not keep to an interface (ADR 19). A NAT entry keeps it for ten seconds and one route generation; the map
//! `next_hops` keeps those of other nodes and pods for a second, since the path MTU to another node may drop without a
//! change of routes. The packet that looked it up leaves by `bpf_redirect_neigh`, which resolves the neighbour; for
//! later ones the program writes the link addresses and redirects to the device.
//!
//! The lookup returns one MTU for two causes: a locked route MTU, and a path MTU from an ICMP error. Such an error may
//! be forged, and Linux forwards by the first cause only (`ip_forward_use_pmtu`). So that MTU is ignored for pods, and
//! below [`LEAST_MTU`] for other destinations.
#![expect(unsafe_code, reason = "map and packet access; see `maps` and `packet`")]

use core::mem;

use aya_ebpf::bindings::{
    BPF_FIB_LKUP_RET_NO_NEIGH, BPF_FIB_LKUP_RET_SUCCESS, BPF_FIB_LOOKUP_OUTPUT, bpf_fib_lookup as FibParams,
    bpf_redir_neigh as Neighbour,
};
use aya_ebpf::btf_maps::PerCpuArray;
use aya_ebpf::helpers::generated::{bpf_fib_lookup, bpf_redirect, bpf_redirect_neigh};
use aya_ebpf::macros::btf_map;
use egress_common::abi::{Addr, Config, Family, NeighbourKey, NextHop, RouteDestination, Verdict};
use egress_common::decide::{Tables, routes};

use crate::maps::{self, Maps, route_generation, run_ns};
use crate::packet::Packet;
use crate::workspace::Run;

const AF_INET: u8 = 2;

const AF_INET6: u8 = 10;

/// The next hop of a NAT entry is looked up again after this time, or after a change of routes or neighbours, for which the
/// agent raises the route generation.
const NAT_HOP_LIFE_NS: u64 = 10_000_000_000;

/// The same for one in `next_hops`. Many flows share it, so another lookup costs little; and no generation shows a
/// learned path MTU.
const CPU_HOP_LIFE_NS: u64 = 1_000_000_000;

/// A smaller path MTU is ignored: every IPv6 link takes this much, and QUIC needs it (RFC 8200 section 5, RFC 9000
/// section 14).
const LEAST_MTU: u32 = 1280;

/// Return value of a successful redirect helper.
pub const TC_ACT_REDIRECT: i32 = 7;

/// A next hop: ready for use, or one that the kernel resolves for this packet. A struct instead of an enum: the
/// verifier refuses to copy undefined fields of another variant.
#[repr(C)]
pub struct Route {
    /// The kernel resolves it for this packet.
    pub resolve: bool,
    /// The link addresses below are known.
    pub known: bool,
    pub mtu: u32,
    pub ifindex: u32,
    pub dmac: [u8; 6],
    pub smac: [u8; 6],
    /// As it is cached.
    made: NextHop,
    neighbour: Neighbour,
    /// Buffers of the lookup.
    params: FibParams,
}

impl Route {
    /// The next hop as it is cached; built in place to save stack.
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

/// The routes that count.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum RouteChoice {
    /// Those through the device.
    Through,
    /// The host's. Fails if the route uses another device (such as one that encrypts).
    HostsThrough,
    /// The host's, by the uplink or a further egress interface, for a packet that came in by the device. So the host's
    /// rules (`ip rule`) count.
    Hosts,
}

/// Addresses of the outgoing packet, and its device.
pub struct Lookup<'a> {
    pub saddr: &'a Addr,
    pub daddr: &'a Addr,
    pub ifindex: u32,
    pub routes: RouteChoice,
    /// MTU of the device, for routes without one.
    pub device_mtu: u32,
    /// The cached next hop: of the packet's NAT entry, or of `next_hops` for `daddr`.
    pub kept: &'a NextHop,
    /// Whether a new one is cached in the NAT entry; otherwise in `next_hops`.
    pub by_nat_entry: bool,
    /// Seal of that NAT entry.
    pub seal: u32,
}

/// Takes the cached next hop, if that is valid.
#[inline(always)]
fn take_cached(lookup: &Lookup<'_>, generation: u32, now: u64, route: &mut Route) -> bool {
    let hop = lookup.kept;
    let is_here = lookup.routes == RouteChoice::Hosts || hop.ifindex == lookup.ifindex;
    let is_known = hop.generation == generation && is_here;
    // Another CPU may be writing the one of a NAT entry; a per-CPU one is complete.
    let is_valid = is_known && now < hop.valid_until_ns && (!lookup.by_nat_entry || hop.is_of(lookup.seal));
    if is_valid {
        route.resolve = false;
        route.known = true;
        route.ifindex = hop.ifindex;
        route.mtu = hop.mtu;
        route.dmac = hop.dmac;
        route.smac = hop.smac;
    }
    is_valid
}

/// Finds the route by a further egress interface, for a packet with a NAT entry. `smac` is the interface's own.
#[inline(never)]
pub fn resolve_further_route(
    run: &Run<'_>,
    lookup: &Lookup<'_>,
    smac: [u8; 6],
    route: &mut Route,
) -> Result<(), Verdict> {
    // Read before the lookup: routes may change after it.
    let (generation, now) = (route_generation(run.config), run_ns());
    if take_cached(lookup, generation, now, route) {
        return Ok(());
    }
    let entry = maps::route(RouteDestination { ifindex: lookup.ifindex, to: *lookup.daddr }).ok_or(Verdict::NoRoute)?;
    let hop = routes::next_hop(entry, &run.headers.tuple).ok_or(Verdict::NoRoute)?;
    let key = NeighbourKey { ifindex: lookup.ifindex, address: *hop };
    route.mtu = if entry.mtu == 0 { lookup.device_mtu } else { entry.mtu.min(lookup.device_mtu) };
    route.ifindex = lookup.ifindex;
    route.smac = smac;
    route.resolve = true;
    set_hop(route, &key.address);
    let mac = maps::neighbour(&key);
    route.known = mac.is_some();
    if let Some(mac) = mac {
        route.dmac = mac;
        Maps.set_hop(&run.headers.tuple, route.kept(generation, now + NAT_HOP_LIFE_NS, lookup.seal));
    }
    Ok(())
}

#[inline(always)]
fn set_hop(route: &mut Route, hop: &Addr) {
    let words = hop.words();
    match hop.family() {
        Family::V4 => {
            route.neighbour.nh_family = u32::from(AF_INET);
            route.neighbour.__bindgen_anon_1.ipv4_nh = words[3];
        }
        Family::V6 => {
            route.neighbour.nh_family = u32::from(AF_INET6);
            route.neighbour.__bindgen_anon_1.ipv6_nh = words;
        }
    }
}

/// Finds the route, from the cached next hop if that is valid.
#[inline(never)]
pub fn resolve_route(run: &Run<'_>, lookup: &Lookup<'_>, route: &mut Route) -> Result<(), Verdict> {
    // Read before the lookup: routes may change after it.
    let (generation, now) = (route_generation(run.config), run_ns());
    if take_cached(lookup, generation, now, route) {
        return Ok(());
    }
    let settled = look_up(run, lookup, &mut route.params)?;
    route.resolve = true;
    route.known = settled;
    route.dmac = route.params.dmac;
    route.smac = route.params.smac;
    route.ifindex = route.params.ifindex;
    let is_to_pod = route.ifindex == run.config.mgmt_ifindex;
    route.mtu = if settled && !is_to_pod { route_mtu(&route.params, lookup) } else { lookup.device_mtu };
    set_neighbour(route);
    if settled {
        let life = if lookup.by_nat_entry { NAT_HOP_LIFE_NS } else { CPU_HOP_LIFE_NS };
        let hop = route.kept(generation, now + life, lookup.seal);
        if lookup.by_nat_entry {
            Maps.set_hop(&run.headers.tuple, hop);
        } else {
            cache_hop(lookup.daddr, hop);
        }
    }
    Ok(())
}

/// FIB lookup. True if the neighbour is known too.
#[inline(always)]
fn look_up(run: &Run<'_>, lookup: &Lookup<'_>, params: &mut FibParams) -> Result<bool, Verdict> {
    // SAFETY: all fields are integers, for which zero is a value.
    *params = unsafe { mem::zeroed() };
    params.ifindex = lookup.ifindex;
    // With a length set, the helper returns the route's MTU.
    params.__bindgen_anon_1.tot_len = 1;
    let (saddr, daddr) = (lookup.saddr.words(), lookup.daddr.words());
    match lookup.daddr.family() {
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
    // Without the flag, this is the input device, and the route may use another one.
    let flags = if lookup.routes == RouteChoice::Through { BPF_FIB_LOOKUP_OUTPUT } else { 0 };
    // SAFETY: the context is the program's own, `params` outlives the call and its true size is given.
    let result = unsafe { bpf_fib_lookup(run.packet.skb().cast(), params, size_of::<FibParams>() as i32, flags) };
    // For IPv6 the device is only a preference, even with the flag.
    let counts = match lookup.routes {
        RouteChoice::Through | RouteChoice::HostsThrough => params.ifindex == lookup.ifindex,
        // Others have no programs, so replies would not be translated.
        RouteChoice::Hosts => params.ifindex == run.config.uplink_ifindex || Maps.interface(params.ifindex).is_some(),
    };
    if !counts {
        return Err(Verdict::NoRoute);
    }
    match result as u32 {
        BPF_FIB_LKUP_RET_SUCCESS => Ok(true),
        BPF_FIB_LKUP_RET_NO_NEIGH => Ok(false),
        _ => Err(Verdict::NoRoute),
    }
}

#[inline(always)]
fn route_mtu(params: &FibParams, lookup: &Lookup<'_>) -> u32 {
    // SAFETY: both members of the union are u16.
    let mtu = u32::from(unsafe { params.__bindgen_anon_1.mtu_result });
    match lookup.routes {
        _ if mtu <= 1 => lookup.device_mtu,
        // The kernel limits it to the MTU of the route's device, whichever that is.
        RouteChoice::Hosts => mtu.max(LEAST_MTU),
        RouteChoice::Through | RouteChoice::HostsThrough => mtu.max(LEAST_MTU).min(lookup.device_mtu),
    }
}

#[inline(always)]
fn set_neighbour(route: &mut Route) {
    route.neighbour.nh_family = u32::from(route.params.family);
    // SAFETY (both): the members of the unions are integers; the family says which one was written.
    if route.params.family == AF_INET {
        route.neighbour.__bindgen_anon_1.ipv4_nh = unsafe { route.params.__bindgen_anon_4.ipv4_dst };
    } else {
        route.neighbour.__bindgen_anon_1.ipv6_nh = unsafe { route.params.__bindgen_anon_4.ipv6_dst };
    }
}

/// Sends the packet by its route; returns the program's return value.
#[inline(always)]
pub fn send(run: &Run<'_>, route: &mut Route) -> Result<i32, Verdict> {
    let Run { packet, config, .. } = *run;
    packet.strip(config);
    let result = if route.resolve {
        // SAFETY: the neighbour outlives the call and its true size is given.
        unsafe { bpf_redirect_neigh(route.ifindex, &raw mut route.neighbour, size_of::<Neighbour>() as i32, 0) }
    } else {
        packet.set_macs(route.dmac, route.smac).ok_or(Verdict::RewriteFailed)?;
        return redirect(route.ifindex);
    };
    redirected(result)
}

/// Sends the packet, with its link addresses written, by a device.
#[inline(always)]
pub fn redirect(ifindex: u32) -> Result<i32, Verdict> {
    // SAFETY: the helper takes numbers only.
    redirected(unsafe { bpf_redirect(ifindex, 0) })
}

#[inline(always)]
fn redirected(result: i64) -> Result<i32, Verdict> {
    if result as i32 == TC_ACT_REDIRECT { Ok(TC_ACT_REDIRECT) } else { Err(Verdict::NoNeighbour) }
}

/// Sends the packet back by the device that it came from.
#[inline(always)]
pub fn send_back(packet: Packet, config: &Config) -> Result<i32, Verdict> {
    packet.strip(config);
    redirect(packet.ifindex())
}

#[inline(always)]
pub fn lookup_to_pod<'a>(run: &Run<'a>, pod: &'a Addr, kept: &'a NextHop, nat_entry: Option<u32>) -> Lookup<'a> {
    Lookup {
        saddr: &run.headers.tuple.saddr,
        daddr: pod,
        ifindex: run.config.mgmt_ifindex,
        routes: RouteChoice::Through,
        device_mtu: run.config.pod_mtu,
        kept,
        by_nat_entry: nat_entry.is_some(),
        seal: nat_entry.unwrap_or(0),
    }
}

/// Next hops to other nodes and pods, by the last bits of their address. Addresses with the same index replace each
/// other. Per CPU; not pinned.
#[btf_map(name = "next_hops")]
static NEXT_HOPS: PerCpuArray<CachedHop, NEXT_HOP_PLACES> = PerCpuArray::new();

const NEXT_HOP_PLACES: usize = 512;

/// Value of `next_hops`.
#[repr(C)]
pub struct CachedHop {
    to: Addr,
    hop: NextHop,
}

#[inline(always)]
fn cached(to: &Addr) -> Option<*mut CachedHop> {
    let end = u32::from_be(to.words()[3]);
    NEXT_HOPS.get_ptr_mut((end ^ end >> 9) & (NEXT_HOP_PLACES as u32 - 1))
}

/// The cached next hop to an address; an invalid one if there is none.
#[inline(always)]
pub fn cached_hop(to: &Addr) -> &'static NextHop {
    static NONE: NextHop = NextHop::NONE;
    let Some(kept) = cached(to) else { return &NONE };
    // SAFETY: the element is this CPU's own, and TC programs do not interrupt one another.
    let kept = unsafe { &mut *kept };
    if kept.to != *to {
        kept.to = *to;
        kept.hop.valid_until_ns = 0;
    }
    &kept.hop
}

/// Caches it. [`cached_hop`] was called for this address right before.
#[inline(always)]
pub fn cache_hop(to: &Addr, hop: &NextHop) {
    if let Some(kept) = cached(to) {
        // SAFETY: as in `cached_hop`.
        unsafe { (*kept).hop = *hop };
    }
}
