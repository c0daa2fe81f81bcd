//! Fragments: replies that must be fragmented for their pod, and fragments that arrive before the first one.
//!
//! **Fragmentation.** A router would fragment an IPv4 reply that exceeds the pod's MTU; a redirect does not. The packet
//! is sent in two fragments: the rest is copied, the shortened packet leaves as a clone, then the rest replaces its
//! payload. Larger packets get an ICMP error. A partial checksum is completed first, since a device would complete it
//! for each fragment. Sending a clone runs programs on this CPU that use the same workspace, so values that are needed
//! later are copied before.
//!
//! **Reordering.** A later fragment without known ports is held until the first one arrives; see [`hold`].
#![expect(unsafe_code, reason = "map and packet access; see `maps` and `packet`")]

use core::ffi::c_void;
use core::intrinsics::AtomicOrdering::SeqCst;
use core::{intrinsics, ptr};

use aya_ebpf::bindings::BPF_NOEXIST;
use aya_ebpf::btf_maps::{Array, LruHashMap};
use aya_ebpf::helpers::generated::{bpf_get_smp_processor_id, bpf_loop};
use aya_ebpf::macros::btf_map;
use egress_common::abi::{Config, FragKey, Verdict};
use egress_common::decide::expiry::FRAGMENT_NS;
use egress_common::decide::{Tables, fragments};
use egress_common::wire::{Frame, L3, PROTO_TCP, PROTO_UDP, csum, ipv4, l4};

use crate::Outcome;
use crate::fib::{self, Route};
use crate::maps::{self, Maps, swap};
use crate::packet::{OFFSET_MASK, Packet};
use crate::verifier::{self, opaque};
use crate::workspace::{Run, Workspace};

/// Largest second fragment.
pub const REST: usize = 2048;

/// Buffer for the rest of a packet.
pub type Rest = [u8; REST];

/// Whether two fragments suffice.
#[inline(always)]
pub fn fits_in_two(run: &Run<'_>, mtu: u32) -> bool {
    let header = u32::from(run.headers.l4_offset) - L3 as u32;
    let first = mtu.saturating_sub(header) & !7;
    let rest = run.wire_length().saturating_sub(header + first);
    run.headers.may_be_fragmented()
        && run.packet.gso_size() == 0
        && first > 0
        && rest <= REST as u32
        && rest + header <= mtu
}

/// Sends the rewritten packet in two fragments; returns the program's return value.
#[inline(always)]
pub fn send_in_two(run: &Run<'_>, route: &Route, rest: &mut Rest) -> Result<i32, Verdict> {
    if !route.known {
        return Err(Verdict::NoNeighbour);
    }
    // Not nested in the sending: the sum of both stack frames is too large for Linux 6.1.
    complete(run, rest)?;
    send_pieces(run, route, rest)
}

#[inline(never)]
fn send_pieces(run: &Run<'_>, route: &Route, rest: &mut Rest) -> Result<i32, Verdict> {
    let (packet, ifindex) = (run.packet, route.ifindex);
    let payload_at = u32::from(run.headers.l4_offset);
    let header = payload_at - L3 as u32;
    let first = (route.mtu - header) & !7;
    packet.strip(run.config);
    cut(packet, payload_at, header, first, route, rest).ok_or(Verdict::RewriteFailed).and_then(|(length, bits)| {
        packet.send_clone(ifindex).ok_or(Verdict::NoNeighbour)?;
        put_rest(packet, payload_at, header, length, bits, rest).ok_or(Verdict::RewriteFailed)?;
        fib::redirect(ifindex)
    })
}

/// Completes a partial transport checksum.
#[inline(never)]
fn complete(run: &Run<'_>, space: &mut Rest) -> Result<(), Verdict> {
    try_complete(run, space).ok_or(Verdict::RewriteFailed)
}

/// A partial checksum is the sum of the pseudo header.
#[inline(always)]
fn try_complete(run: &Run<'_>, space: &mut Rest) -> Option<()> {
    let (packet, protocol) = (run.packet, run.headers.tuple.protocol);
    let at = match protocol {
        PROTO_TCP => l4::TCP_CHECKSUM,
        PROTO_UDP => l4::UDP_CHECKSUM,
        _ => return Some(()),
    };
    let payload_at = u32::from(run.headers.l4_offset);
    let at = (payload_at as usize & OFFSET_MASK) + at;
    let total = u32::from(u16::from_be_bytes(packet.load(L3 + ipv4::TOTAL_LEN)?));
    let length = (total + L3 as u32).checked_sub(payload_at)?;
    let addresses: [u8; 8] = packet.load(L3 + ipv4::SADDR)?;
    let pseudo = csum::sum(&addresses) + u64::from(u16::from(protocol).to_be()) + u64::from((length as u16).to_be());
    let field = u16::from_ne_bytes(packet.load(at)?);
    // Another offset belongs to another header, such as a tunnel's inner one.
    if csum::fold64(pseudo) != field || !packet.is_partial(at)? {
        return Some(());
    }
    let sum = u64::from(packet.sum(payload_at, length, space)?);
    let complete = match (protocol, !csum::fold64(sum)) {
        // In UDP zero means "none".
        (PROTO_UDP, 0) => 0xffff,
        (_, complete) => complete,
    };
    packet.forget_partial_checksum(space)?;
    packet.store(at, complete.to_ne_bytes())
}

/// Turns the packet into its first fragment; returns the length of the rest, and the fragment bits of the second one.
#[inline(always)]
fn cut(packet: Packet, payload_at: u32, header: u32, first: u32, route: &Route, rest: &mut Rest) -> Option<(u32, u16)> {
    let total = u32::from(u16::from_be_bytes(packet.load(L3 + ipv4::TOTAL_LEN)?));
    let bits = u16::from_be_bytes(packet.load(L3 + ipv4::FRAGMENT)?);
    let length = total.checked_sub(header + first)?;
    packet.load_tail(payload_at + first, length, rest)?;
    set_lengths(packet, header + first, bits | ipv4::MORE_FRAGMENTS)?;
    packet.set_macs(route.dmac, route.smac)?;
    packet.resize(payload_at + first)?;
    // The offset counts units of eight bytes.
    Some((length, bits | (first >> 3) as u16))
}

#[inline(always)]
fn put_rest(packet: Packet, payload_at: u32, header: u32, length: u32, bits: u16, rest: &Rest) -> Option<()> {
    packet.store_tail(payload_at, length, rest)?;
    packet.resize(payload_at + length)?;
    set_lengths(packet, header + length, bits)
}

#[inline(always)]
fn set_lengths(packet: Packet, total: u32, bits: u16) -> Option<()> {
    let old_total: [u8; 2] = packet.load(L3 + ipv4::TOTAL_LEN)?;
    let old_bits: [u8; 2] = packet.load(L3 + ipv4::FRAGMENT)?;
    let (total, bits) = ((total as u16).to_be_bytes(), bits.to_be_bytes());
    let sum = u16::from_ne_bytes(packet.load(L3 + ipv4::CHECKSUM)?);
    let sum = csum::replace_u16(sum, u16::from_ne_bytes(old_total), u16::from_ne_bytes(total));
    let sum = csum::replace_u16(sum, u16::from_ne_bytes(old_bits), u16::from_ne_bytes(bits));
    packet.store(L3 + ipv4::TOTAL_LEN, total)?;
    packet.store(L3 + ipv4::FRAGMENT, bits)?;
    packet.store(L3 + ipv4::CHECKSUM, sum.to_ne_bytes())
}

// Holding of later fragments.
//
// | fragment | what happens |
// |---|---|
// | later one, ports unknown | the frame goes into `held`, its place into `awaited`; the packet ends here |
// | first one | its ports go into `frags`; if others wait, a copy of it is reinjected, then each of them |
//
// Reinjection uses the device's own input queue, which keeps the order: later hooks and gateways see the first fragment
// first.
//
// Two CPUs may race. The holder writes the frame and then looks for the ports; the other writes the ports and then
// looks for frames. So at least one sees the other. If both do, compare-and-swap on the slot's state decides.
//
// A held fragment continues in the skb of the first one, and with its metadata. A partial checksum would be completed over
// unrelated bytes, but no stack leaves one in a fragment: Linux completes it before it fragments (`ip_do_fragment`,
// `ip6_fragment`).
//
// Holding is best effort: places are reused in turn whatever they hold, so that unwanted fragments block no others.

/// Fragments of one datagram that are kept: 64 KB in pieces of 1,280 bytes, as IPv6 senders may cut them, are 54.
const MOST: u32 = 64;

/// Places for fragments: 2 MB. At a time, twenty datagrams of 64 KB that come reversed find room.
const PLACES: u32 = 1024;

/// Longest frame that is kept: what a link of 1500 takes, with room for tags. One of larger frames cuts hardly anything.
const FRAME: usize = 1992;

/// CPUs begin so far from one another.
const STRIDE: u32 = 64;

#[btf_map(name = "held")]
static HELD: Array<HeldFragment, { PLACES as usize }> = Array::new();

/// Datagrams that wait for their first fragment; LRU.
#[btf_map(name = "awaited")]
static AWAITED: LruHashMap<FragKey, AwaitedFragments, 1024> = LruHashMap::new();

/// Value of `held`.
#[repr(C)]
pub struct HeldFragment {
    /// [`FREE`], [`BUSY`], or when it was stored (CLOCK_MONOTONIC, ns).
    state: u64,
    key: FragKey,
    length: u32,
    reserved: u32,
    frame: [u8; FRAME],
}

const FREE: u64 = 0;

/// A CPU reads or writes it.
const BUSY: u64 = 1;

/// Value of `awaited`: the slots of the fragments, in the order of arrival.
#[repr(C)]
pub struct AwaitedFragments {
    since_ns: u64,
    count: u32,
    reserved: u32,
    /// Index of each slot plus one; zero: not written yet.
    places: [u16; MOST as usize],
}

/// Per-CPU buffers, to save stack.
#[repr(C)]
pub struct HoldSpace {
    key: FragKey,
    /// A new entry; all fields except its time stay zero.
    fresh: AwaitedFragments,
    /// Number of fragments that this CPU has held.
    kept: u32,
    reserved: u32,
}

/// Whether later fragments of the datagram wait for its first one, whose ports the caller has just written.
#[inline(always)]
pub fn is_awaited(key: &FragKey) -> bool {
    // Each side writes and then reads the other side's write. Without the fence, a read could happen before the write
    // is visible. In `keep`, a compare-and-swap is in between.
    maps::fence();
    AWAITED.get_ptr(key).is_some()
}

/// Handles a fragment after a decision that holds or releases. Not nested in the decision: the sum of both stack frames
/// is too large for Linux 6.1.
#[inline(always)]
pub fn judge(outcome: Option<Outcome>, packet: Packet) -> Outcome {
    let outcome = match outcome.map(Outcome::verdict) {
        Some(Verdict::FragmentUnknown) => verifier::hold(packet),
        Some(Verdict::FragmentsReleased) => verifier::release(packet),
        _ => outcome,
    };
    outcome.unwrap_or_else(|| Outcome::unexpected(packet))
}

/// Holds a later fragment with unknown ports.
#[inline(always)]
pub fn hold(packet: Packet, _: &Config, workspace: &mut Workspace) -> Outcome {
    let Workspace { headers, hold: space, .. } = workspace;
    space.key = fragments::key(headers);
    let Some(awaited) = keep(packet, space) else {
        return Outcome::done(Verdict::FragmentUnknown);
    };
    // The first one may have arrived meanwhile without seeing this one.
    if fragments::known(&space.key, &Maps).is_some() {
        release_held(packet, &space.key, awaited);
    }
    Outcome::done(Verdict::FragmentHeld)
}

/// Reinjects the first fragment, then the held ones.
#[inline(always)]
pub fn release(packet: Packet, _: &Config, workspace: &mut Workspace) -> Outcome {
    let Workspace { headers, hold: space, .. } = workspace;
    space.key = fragments::key(headers);
    let awaited = AWAITED.get_ptr_mut(&space.key);
    if packet.reinject().is_none() {
        return Outcome::done(Verdict::RewriteFailed);
    }
    // Of several first fragments, one releases. The entry stays readable until this program ends.
    if let Some(awaited) = awaited
        && AWAITED.remove(&space.key).is_ok()
    {
        release_held(packet, &space.key, awaited);
    }
    Outcome::done(Verdict::FragmentsReleased)
}

/// Writes the fragment into a slot, and the slot into `awaited`.
#[inline(never)]
fn keep(packet: Packet, space: &mut HoldSpace) -> Option<*mut AwaitedFragments> {
    let length = packet.len() as u32;
    if packet.gso_size() != 0 || length as usize > FRAME {
        return None;
    }
    let now = Maps.now_ns();
    let awaited = awaited(space, now)?;
    // SAFETY: a pointer from a lookup; see `maps`.
    let number = unsafe { intrinsics::atomic_xadd::<u32, u32, { SeqCst }>(&raw mut (*awaited).count, 1) };
    if number >= MOST {
        return None;
    }
    // SAFETY: the helper takes nothing.
    let place = unsafe { bpf_get_smp_processor_id() }.wrapping_mul(STRIDE).wrapping_add(space.kept) & (PLACES - 1);
    space.kept = space.kept.wrapping_add(1);
    let held = HELD.get_ptr_mut(place)?;
    // SAFETY (both): pointers from lookups; see `maps`.
    let state = unsafe { &raw mut (*held).state };
    let before = unsafe { ptr::read_volatile(state) };
    if before == BUSY || swap(state, before, BUSY) != before {
        return None;
    }
    // SAFETY: from here to the next swap the place is this CPU's own.
    let stored = unsafe {
        (*held).key = space.key;
        (*held).length = length;
        packet.load_tail(0, length, &mut (*held).frame)
    };
    // After the comparison the compiler would omit the mask.
    let at = opaque(number.into()) as usize & (MOST as usize - 1);
    // SAFETY: see `maps`; the mask keeps the number within the array.
    unsafe { ptr::write_volatile(&raw mut (*awaited).places[at], place as u16 + 1) };
    swap(state, BUSY, if stored.is_some() { now } else { FREE });
    stored.map(|()| awaited)
}

/// The datagram's entry; a new one replaces an old one, because identifications are reused.
#[inline(always)]
fn awaited(space: &mut HoldSpace, now: u64) -> Option<*mut AwaitedFragments> {
    let known = AWAITED.get_ptr_mut(&space.key);
    let flags = match known {
        // SAFETY: a pointer from a lookup; see `maps`.
        Some(known) if now.wrapping_sub(unsafe { (*known).since_ns }) <= FRAGMENT_NS => return Some(known),
        Some(_) => 0,
        None => BPF_NOEXIST.into(),
    };
    space.fresh.since_ns = now;
    // Another CPU may have created it first.
    let _taken = AWAITED.insert(&space.key, &space.fresh, flags);
    AWAITED.get_ptr_mut(&space.key)
}

struct HeldWalk<'a> {
    packet: Packet,
    key: &'a FragKey,
    awaited: *mut AwaitedFragments,
    now: u64,
}

/// Reinjects all held fragments of a datagram in this packet, whose content is lost.
#[inline(never)]
fn release_held(packet: Packet, key: &FragKey, awaited: *mut AwaitedFragments) {
    let mut walk = HeldWalk { packet, key, awaited, now: Maps.now_ns() };
    // SAFETY: the callback has the signature that the helper asks for, and `walk` lives on this frame until the helper
    // returns.
    unsafe { bpf_loop(MOST, release_one as *mut c_void, (&raw mut walk).cast(), 0) };
}

/// Loop body: 0 continues, 1 ends the loop.
unsafe extern "C" fn release_one(number: u64, walk: *mut HeldWalk<'_>) -> u64 {
    // SAFETY: `bpf_loop` hands back the pointer that it was given, to a live frame.
    let walk = unsafe { &mut *walk };
    // SAFETY: a pointer from a lookup; see `maps`.
    let count = unsafe { ptr::read_volatile(&raw const (*walk.awaited).count) };
    if number as u32 >= count {
        return 1;
    }
    // SAFETY: as above; the mask keeps the number within the array.
    let place = unsafe { ptr::read_volatile(&raw const (*walk.awaited).places[number as usize & (MOST as usize - 1)]) };
    // Not written yet: its CPU finds the ports itself.
    if place == 0 {
        return 0;
    }
    let Some(held) = HELD.get_ptr_mut(u32::from(place).wrapping_sub(1) & (PLACES - 1)) else { return 0 };
    // SAFETY (both): as above.
    let state = unsafe { &raw mut (*held).state };
    let since = unsafe { ptr::read_volatile(state) };
    if since <= BUSY || swap(state, since, BUSY) != since {
        return 0;
    }
    // SAFETY: from here to the next swap the place is this CPU's own.
    let held = unsafe { &mut *held };
    if held.key != *walk.key {
        swap(state, BUSY, since);
        return 0;
    }
    if walk.now.saturating_sub(since) <= FRAGMENT_NS {
        // A fragment that cannot be sent is lost. The change of length invalidates a complete checksum, which belongs
        // to another fragment.
        let length = held.length;
        let _lost = walk
            .packet
            .resize(length.wrapping_sub(1))
            .and_then(|()| walk.packet.resize(length))
            .and_then(|()| walk.packet.store_tail(0, length, &held.frame))
            .and_then(|()| walk.packet.reinject());
    }
    swap(state, BUSY, FREE);
    0
}
