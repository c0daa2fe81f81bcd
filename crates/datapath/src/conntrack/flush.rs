//! Flush: removes flows that an edit no longer permits.
//!
//! A flow of a pod is an entry of `flows` on its node; its NAT entry is two entries of `nat` on the gateway node, which are
//! removed together. Flows are found by a walk of the maps; one walk serves any number of flushes.
//!
//! A TCP connection keeps its entry of `flows`: the pod's next packet is answered with a reset, since the policy has lost
//! the address or no policy selects the pod (`decide::slots`, `decide::from_pod`). For idle pods see `idle_reset`. All
//! other entries are removed, and begin again with the next packet.
//!
//! Each change of a plan is followed by its flushes. If an agent ends in between, the next one flushes all flows that the
//! maps do not permit ([`orphans`]).

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::IpAddr;

use egress_common::abi::{Addr, Direction, Flow, NatEntry, Origin, SweepMode, SweptMap, Tuple};
use egress_common::wire::PROTO_TCP;

use crate::maps::handles::{FlowMaps, Hash};
use crate::node_state::reset_history::Cut;
use egress_core::model::state::{Action, EgressId, KernelState, LostFlows};

/// Flushes for one walk.
#[derive(Debug, Default)]
pub struct Due {
    /// Flows of a policy with this address.
    shown: BTreeSet<(u32, u128)>,
    /// Flows of these pods.
    of_pods: BTreeMap<u128, LostOfPod>,
    /// All entries of these pods' addresses: flows, NAT entries, inbound connections, datagrams. The pods were removed, so
    /// no reset is needed.
    gone: BTreeSet<u128>,
}

/// Flows of one pod that several changes have ended.
type LostOfPod = Vec<LostFlows>;

/// Faster to compare than octets.
fn number(address: Addr) -> u128 {
    u128::from_be_bytes(address.octets())
}

impl Due {
    pub fn of(cuts: &[Action]) -> Self {
        let mut due = Self::default();
        let of = |address: &IpAddr| number(Addr::from(*address));
        for cut in cuts {
            match cut {
                Action::CutFlows(id, addresses) => {
                    due.shown.extend(addresses.iter().map(|address| (id.0, of(address))))
                }
                Action::CutPodFlows(pod, lost) => due.of_pods.entry(of(pod)).or_default().push(lost.clone()),
                Action::CutPod(pod) => drop(due.gone.insert(of(pod))),
                other => debug_assert!(!other.is_cut(), "{other:?}"),
            }
        }
        due
    }

    fn is_gone(&self, pod: Addr) -> bool {
        !self.gone.is_empty() && self.gone.contains(&number(pod))
    }

    /// Whether a flow or NAT entry with these properties is to be flushed; `forward` is the pod's tuple.
    fn has(&self, id: u32, forward: &Tuple, shown: Addr) -> bool {
        let is_lost = |lost: &LostFlows| lost.contains(EgressId(id), forward.daddr.to_ip());
        let of_pod = self.of_pods.get(&number(forward.saddr));
        of_pod.is_some_and(|all| all.iter().any(is_lost)) || self.shown.contains(&(id, number(shown)))
    }
}

/// Flushes everything that is due.
pub fn all(maps: &mut FlowMaps, due: &Due) -> io::Result<Cut> {
    let done = cut(
        maps,
        |tuple, flow| match (due.is_gone(tuple.saddr), due.has(flow.egress_id, tuple, flow.address)) {
            (true, _) => FlushAction::Forgotten,
            (false, true) => FlushAction::Cut,
            (false, false) => FlushAction::Stays,
        },
        // The answer is sent to the address that the flow shows.
        |forward, mapping, reverse| due.is_gone(forward.saddr) || due.has(mapping.egress_id, forward, reverse.daddr),
    )?;
    if !due.gone.is_empty() {
        let inbound = keys_of(&maps.inbound, |tuple| due.is_gone(tuple.saddr))?;
        maps.sweeper.remove(SweptMap::Inbound, SweepMode::All, &inbound)?;
        for tuple in keys_of(&maps.datagrams, |tuple| due.is_gone(tuple.saddr))? {
            maps.datagrams.remove(&tuple)?;
        }
    }
    Ok(done.0)
}

/// Flushes flows and NAT entries that this state does not permit; returns the number of removed entries. NAT entries for
/// other nodes (mark 1008) belong to no policy, and those of another version are left to the sweep.
pub fn orphans(maps: &mut FlowMaps, state: &KernelState) -> io::Result<(Cut, usize)> {
    let permits = |forward: Option<&Tuple>, id, address: Addr| {
        let pod = forward.map(|forward| (forward.saddr.to_ip(), forward.daddr.to_ip()));
        state.permits(pod, EgressId(id), address.to_ip())
    };
    cut(
        maps,
        |tuple, flow| match permits(Some(tuple), flow.egress_id, flow.address) {
            true => FlushAction::Stays,
            false => FlushAction::Cut,
        },
        |forward, mapping, reverse| match mapping.origin() {
            Some(Origin::Here) => !permits(Some(forward), mapping.egress_id, reverse.daddr),
            Some(Origin::Remote) => !permits(None, mapping.egress_id, reverse.daddr),
            Some(Origin::Stack) | None => false,
        },
    )
}

/// Treatment of a flow.
enum FlushAction {
    Stays,
    /// Keep the entry of a TCP connection, whose pod gets a reset; remove all others.
    Cut,
    Forgotten,
}

/// Connections whose pods need a reset, and the number of removed entries.
fn cut(
    maps: &mut FlowMaps,
    fate: impl Fn(&Tuple, &Flow) -> FlushAction,
    is_cut: impl Fn(&Tuple, &NatEntry, &Tuple) -> bool,
) -> io::Result<(Cut, usize)> {
    let (mut connections, mut others) = (Cut::new(), Vec::new());
    maps.flows.for_each(|tuple: &Tuple, flow| match fate(tuple, flow) {
        FlushAction::Stays => {}
        FlushAction::Cut if tuple.protocol == PROTO_TCP => connections.push((*tuple, EgressId(flow.egress_id))),
        FlushAction::Cut | FlushAction::Forgotten => others.push(*tuple),
    })?;
    // The flow first: with it, the pod's next packet would create the NAT entry again.
    let flows = maps.sweeper.remove(SweptMap::Flows, SweepMode::All, &others)?;
    let nat_entries = cut_nat_entries(maps, is_cut)?;
    Ok((connections, flows as usize + nat_entries))
}

/// `goes` gets the forward tuple, the NAT entry and the reverse tuple, for either key. Returns the number of removed
/// entries.
fn cut_nat_entries(maps: &mut FlowMaps, goes: impl Fn(&Tuple, &NatEntry, &Tuple) -> bool) -> io::Result<usize> {
    // The walk visits both keys; the entry is removed at the reverse one.
    let mut keys = Vec::new();
    maps.nat.for_each(|key: &Tuple, mapping: &NatEntry| {
        if key.direction() == Direction::Ingress && goes(&mapping.other, mapping, key) {
            keys.push(*key);
        }
    })?;
    // Two keys each.
    Ok(maps.sweeper.remove(SweptMap::Nat, SweepMode::All, &keys)? as usize / 2)
}

fn keys_of<V: aya::Pod>(map: &Hash<Tuple, V>, wanted: impl Fn(&Tuple) -> bool) -> io::Result<Vec<Tuple>> {
    let mut keys = Vec::new();
    map.for_each(|key: &Tuple, _| {
        if wanted(key) {
            keys.push(*key);
        }
    })?;
    Ok(keys)
}
