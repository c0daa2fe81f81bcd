//! Comparison of programs and model.

use std::collections::BTreeMap;
use std::fmt::Debug;

use aya::Pod;
use aya::maps::{HashMap as KernelMap, MapData};
use egress_common::abi::{Direction, Exposure, Flow, Holder, Tuple, Verdict};
use egress_common::decide::memory_maps::MemoryMaps;
use egress_common::decide::phase;
use egress_common::wire::PROTO_TCP;
use egress_fuzz::node::PacketOutcome;

use super::derived_frames::unwrapped;
use crate::stage::{NEXT, REDIRECT, Ran, SHOT, Stage, WAITING};

/// Compares verdict and output; returns the output without outer headers.
pub(super) fn packet(ran: &Ran, outcome: &PacketOutcome) -> Result<Option<Vec<u8>>, String> {
    let (action, frame, mark, from) = match outcome {
        PacketOutcome::Passed(_, frame, mark) => (NEXT, Some(frame), *mark, 0),
        // Link addresses belong to the next hop, or are written later.
        PacketOutcome::Sent(_, frame) => (REDIRECT, Some(frame), 0, 12),
        PacketOutcome::Split(_) => (REDIRECT, None, 0, 0),
        PacketOutcome::Answered(_, frame) => (REDIRECT, Some(frame), 0, 0),
        PacketOutcome::Dropped(_) => (SHOT, None, ran.mark, 0),
    };
    // The egress ID, for the uplink's egress hook.
    let left = if ran.priority == WAITING { 0 } else { ran.mark };
    if (ran.action, left) != (action, mark) {
        return Err(format!("action {} and mark {left:#x}, not {action} and {mark:#x}", ran.action));
    }
    let Some(frame) = frame else { return Ok(None) };
    let in_overlay = matches!(outcome.verdict(), Verdict::ToGateway | Verdict::ReplyToNode | Verdict::HandedOver);
    let out = if in_overlay { unwrapped(&ran.frame)? } else { ran.frame.clone() };
    if out[from..] != frame[from..] {
        let first = out.iter().zip(frame).skip(from).position(|(one, other)| one != other);
        return Err(format!(
            "bytes differ, first at {:?}; {} and {} long",
            first.map(|at| at + from),
            out.len(),
            frame.len()
        ));
    }
    Ok(Some(out))
}

/// A flow that replaced another one gets its first answer from the flow cache, perhaps, which notes the next one after its
/// entry's life of 134 ms: until then the model knows of no answer either. Not for TCP, where the pod confirms the answer.
pub(super) fn note_late_answers(stage: &Stage, maps: &MemoryMaps) {
    let is_late = |(key, flow): &(Tuple, Flow)| {
        let there = stage.flows.get(key, 0);
        key.protocol != PROTO_TCP && there.is_ok_and(|there| there.state | phase::SPOKE == flow.state)
    };
    for (key, _) in maps.flows.all().iter().filter(|entry| is_late(entry)) {
        maps.flows.change(key, |flow| flow.state = stage.flows.get(key, 0).expect("a flow").state);
    }
}

/// Compares the maps, except link addresses and times.
pub(super) fn maps(stage: &Stage, maps: &MemoryMaps) -> Result<(), String> {
    compare("nat", &stage.nat, maps.nat.all(), |mapping| {
        (mapping.other, mapping.source_node, mapping.egress_id, mapping.origin(), mapping.state)
    })?;
    compare("flows", &stage.flows, maps.flows.all(), |flow| {
        (flow.address, flow.egress_id, flow.slot, flow.state, flow.decided, flow.settled, flow.end)
    })?;
    compare("inbound", &stage.inbound, maps.inbound.all(), |inbound| (inbound.state, inbound.end))?;
    let exposed = maps.exposed.borrow();
    let exposed = exposed
        .iter()
        .map(|(port, inbound)| (*port, Exposure { inbound: i32::try_from(*inbound).expect("a count"), reserved: 0 }));
    compare("exposed", &stage.exposed, exposed.collect(), |exposure| exposure.inbound)?;
    counts(stage)?;
    let frags = maps.frags.borrow().iter().map(|(key, ports)| (*key, *ports)).collect();
    compare("frags", &stage.frags, frags, |ports| (ports.sport, ports.dport, ports.protocol))?;
    let count = |awaited: &[u8; 144]| u32::from_ne_bytes([awaited[8], awaited[9], awaited[10], awaited[11]]);
    let awaited = maps.awaited.borrow();
    let kept = awaited.iter().map(|(key, (_, count))| {
        let mut value = [0; 144];
        value[8..12].copy_from_slice(&count.to_ne_bytes());
        (*key, value)
    });
    compare("awaited", &stage.awaited, kept.collect(), count)?;
    let datagrams: Vec<_> = maps.datagrams.borrow().iter().copied().collect();
    let expected: BTreeMap<_, _> = datagrams.iter().map(|key| (format!("{key:?}"), ())).collect();
    let there = stage.datagrams.keys().map(|key| (format!("{:?}", key.expect("a key")), ())).collect();
    differ("datagrams", &there, &expected)
}

/// The programs count their entries exactly.
fn counts(stage: &Stage) -> Result<(), String> {
    let (mut nat, mut flows, mut shares) = (0, 0, BTreeMap::<String, (i32, i32)>::new());
    let mut hold = |pod, egress_id, flows, nat_entries| {
        for holder in [Holder::pod(pod), Holder::policy(egress_id)] {
            if holder != Holder::policy(0) {
                let share = shares.entry(format!("{holder:?}")).or_default();
                *share = (share.0 + flows, share.1 + nat_entries);
            }
        }
    };
    for (key, mapping) in stage.nat.iter().map(|entry| entry.expect("an entry")) {
        if key.direction() == Direction::Egress {
            nat += 2;
            hold(key.saddr, mapping.egress_id, 0, 1);
        }
    }
    for (key, flow) in stage.flows.iter().map(|entry| entry.expect("an entry")) {
        flows += 1;
        hold(key.saddr, flow.egress_id, 1, 0);
    }
    let counted = stage.shares.iter().map(|entry| entry.expect("an entry"));
    let counted = counted.map(|(holder, share)| (format!("{holder:?}"), (share.flows, share.nat_entries)));
    differ("shares", &counted.filter(|(_, share)| *share != (0, 0)).collect(), &shares)?;
    let inbound = i32::try_from(stage.inbound.keys().count()).expect("a count");
    let usage = stage.usage.get(&0, 0).expect("the usage");
    if (usage.nat, usage.flows, usage.inbound) == (nat, flows, inbound) {
        Ok(())
    } else {
        Err(format!("{usage:?}, not {nat} in nat, {flows} in flows, {inbound} in inbound"))
    }
}

fn compare<K: Pod + Debug, V: Pod, S: Debug + PartialEq>(
    name: &str,
    kernel: &KernelMap<MapData, K, V>,
    model: Vec<(K, V)>,
    shown: impl Fn(&V) -> S,
) -> Result<(), String> {
    let entries = kernel.iter().map(|entry| entry.expect("an entry"));
    let there = entries.map(|(key, value)| (format!("{key:?}"), shown(&value))).collect();
    let expected = model.iter().map(|(key, value)| (format!("{key:?}"), shown(value))).collect();
    differ(name, &there, &expected)
}

fn differ<S: Debug + PartialEq>(
    name: &str,
    there: &BTreeMap<String, S>,
    expected: &BTreeMap<String, S>,
) -> Result<(), String> {
    let keys = there.keys().chain(expected.keys());
    let differing: Vec<String> = keys
        .filter(|key| there.get(*key) != expected.get(*key))
        .map(|key| format!("{key}: {:?}, not {:?}", there.get(key), expected.get(key)))
        .collect();
    if differing.is_empty() { Ok(()) } else { Err(format!("map {name}:\n{}", differing.join("\n"))) }
}
