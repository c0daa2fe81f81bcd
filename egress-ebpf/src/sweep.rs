//! Expiry: walks the maps of flows and removes what is idle.
//!
//! A packet may meet an entry between the look at its time and its removal. That entry had been idle for its whole
//! timeout, and the flow's next packet makes it anew, with the pod's own port where that is free.
#![expect(unsafe_code, reason = "map access by callback")]

use core::ffi::c_void;

use aya_ebpf::btf_maps::HashMap;
use aya_ebpf::helpers::generated::bpf_for_each_map_elem;
use egress_common::abi::{Direction, Flow, Inbound, Mapping, Tuple};
use egress_common::decide::{Tables, expiry};

use crate::maps::{FLOWS, INBOUND, Maps, NAT};

/// What the callbacks share.
struct Sweep {
    now_ns: u64,
    removed: i32,
}

/// Signature of a callback of `bpf_for_each_map_elem`; zero goes on.
type Callback<V> = unsafe extern "C" fn(*mut c_void, *const Tuple, *const V, *mut Sweep) -> i64;

pub fn sweep() -> i32 {
    let mut sweep = Sweep { now_ns: Maps.now_ns(), removed: 0 };
    walk(&NAT, mapping, &mut sweep);
    walk(&FLOWS, flow, &mut sweep);
    walk(&INBOUND, inbound, &mut sweep);
    sweep.removed
}

#[inline(always)]
fn walk<V, const N: usize, const F: usize>(map: &HashMap<Tuple, V, N, F>, each: Callback<V>, sweep: &mut Sweep) {
    // SAFETY: the map is one of ours, the callback has the signature that the helper asks for with this map's key and
    // value, and `sweep` lives on the caller's frame until the helper returns.
    unsafe {
        bpf_for_each_map_elem(
            core::ptr::from_ref(map).cast_mut().cast(),
            each as *mut c_void,
            (&raw mut *sweep).cast(),
            0,
        )
    };
}

unsafe extern "C" fn mapping(_map: *mut c_void, key: *const Tuple, value: *const Mapping, sweep: *mut Sweep) -> i64 {
    // SAFETY: the helper hands in an element of the map and the pointer that it was given.
    let (key, forward, sweep) = unsafe { (&*key, &*value, &mut *sweep) };
    // Each mapping is met at both keys and judged at the forward one. A key whose other one does not name it is left from
    // a claim that never settled: at the forward key it would lose all answers, so it goes at once; at the reverse key it
    // may be a claim that is just being made, so it has its time.
    let other = Maps.nat_peek(&forward.other).filter(|other| other.other == *key);
    if key.direction() == Direction::Ingress {
        if other.is_none() && expiry::is_mapping_idle(forward, None, sweep.now_ns) {
            Maps.forget_nat(key);
            sweep.removed += 1;
        }
    } else if other.is_none() || expiry::is_mapping_idle(forward, other, sweep.now_ns) {
        if other.is_some() {
            Maps.forget_nat(&forward.other);
        }
        Maps.forget_nat(key);
        sweep.removed += 1;
    }
    0
}

unsafe extern "C" fn flow(_map: *mut c_void, key: *const Tuple, value: *const Flow, sweep: *mut Sweep) -> i64 {
    // SAFETY: as in `mapping`.
    let (key, flow, sweep) = unsafe { (&*key, &*value, &mut *sweep) };
    if expiry::is_flow_idle(flow, key.protocol, sweep.now_ns) {
        let _gone = FLOWS.remove(key);
        sweep.removed += 1;
    }
    0
}

unsafe extern "C" fn inbound(_map: *mut c_void, key: *const Tuple, value: *const Inbound, sweep: *mut Sweep) -> i64 {
    // SAFETY: as in `mapping`.
    let (key, inbound, sweep) = unsafe { (&*key, &*value, &mut *sweep) };
    if expiry::is_inbound_idle(inbound.last_seen_ns, key.protocol, sweep.now_ns) {
        let _gone = INBOUND.remove(key);
        sweep.removed += 1;
    }
    0
}
