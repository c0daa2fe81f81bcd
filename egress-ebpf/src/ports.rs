//! Claims of the keys of a mapping, one by one or the first free one of a range.
#![expect(unsafe_code, reason = "map access is one of the three places for it")]

use core::ffi::c_void;

use aya_ebpf::bindings::BPF_NOEXIST;
use aya_ebpf::helpers::generated::bpf_loop;
use egress_common::abi::{Addr, NatEntry, Tuple};
use egress_common::decide::snat::{self, PortSearch};
use egress_common::decide::{Claim, Owner, PortClaim};

use crate::maps::{NAT, claimed};
use crate::workspace::WORKSPACE;

/// Insert-if-absent of one key of a mapping, built in this CPU's workspace.
#[inline(always)]
pub fn claim_nat(now: u64, key: &Tuple, other: &Tuple, owner: &Owner) -> Claim {
    let Some(workspace) = WORKSPACE.get_ptr_mut(0) else { return Claim::Full };
    // SAFETY: the element is this CPU's own, and no other reference to this field is alive.
    let mapping = unsafe { &mut (*workspace).mapping };
    *mapping = NatEntry::new(*other, owner.origin, owner.source_node, owner.egress_id, now);
    mapping.seal(key);
    // Lent, not copied: the stack has no room for it.
    let made: &NatEntry = mapping;
    claimed(NAT.insert(key, made, BPF_NOEXIST.into()))
}

struct PortWalk<'a> {
    forward: &'a Tuple,
    owner: &'a Owner,
    search: &'a PortSearch,
    now: u64,
    found: PortClaim,
}

/// One step of the search: 0 goes on, 1 ends it.
unsafe extern "C" fn try_port(index: u64, walk: *mut PortWalk<'_>) -> u64 {
    // SAFETY: `bpf_loop` hands back the pointer that it was given, to a live frame.
    let walk = unsafe { &mut *walk };
    let port = walk.search.at(index as u32);
    let Some(workspace) = WORKSPACE.get_ptr_mut(0) else { return 1 };
    // SAFETY: as in `claim_nat`.
    let reverse = unsafe { &mut (*workspace).key };
    snat::set_reverse_port(reverse, walk.forward, port);
    match claim_nat(walk.now, reverse, walk.forward, walk.owner) {
        Claim::Claimed => {
            walk.found = PortClaim::Claimed(port);
            1
        }
        Claim::Taken => 0,
        Claim::Full => {
            walk.found = PortClaim::Full;
            1
        }
    }
}

/// Lays the key that is searched for into the workspace, because the steps are at the end of the longest chain of calls.
/// All but its port stays.
#[inline(never)]
fn prepare(forward: &Tuple, address: &Addr) {
    if let Some(workspace) = WORKSPACE.get_ptr_mut(0) {
        // SAFETY: as in `claim_nat`.
        unsafe { (*workspace).key = snat::reverse_key(forward, address, 0) };
    }
}

/// Claims the first free port of the search.
#[inline(always)]
pub fn claim_any(now: u64, forward: &Tuple, address: &Addr, owner: &Owner, search: &PortSearch) -> PortClaim {
    prepare(forward, address);
    let mut walk = PortWalk { forward, owner, search, now, found: PortClaim::NoneFree };
    // SAFETY: the callback has the signature that the helper asks for, and `walk` lives on this frame until the helper
    // returns.
    unsafe { bpf_loop(search.span, try_port as *mut c_void, (&raw mut walk).cast(), 0) };
    walk.found
}
