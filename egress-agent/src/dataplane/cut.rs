//! Cutting flows: what an edit must not let live on.
//!
//! A flow of a pod is an entry of `flows` on its own node; its mapping is two entries of `nat` on the gateway, which live
//! and die together. Here they are found by walking the maps, which a cut may cost and a packet may not.
//!
//! A TCP connection keeps its entry of `flows`, by which the programs know it: the pod's next packet is answered by a
//! reset, since the policy no longer has its address or nothing selects the pod any more (`decide::slots`, `decide::steer`).
//! Idle pods are made to send that packet (`nudge`). Everything else is forgotten, and begins anew with its next packet.
//!
//! Each change of a plan is followed by the cut that it asks for. An agent that ends in between leaves no note of what was
//! due, and needs none: the maps say which flows may go on, so the next one cuts what they do not permit ([`orphans`]).

use std::collections::BTreeSet;
use std::io;
use std::net::IpAddr;

use egress_common::abi::{Addr, Direction, Flow, Mapping, Origin, Tuple};
use egress_common::wire::PROTO_TCP;

use super::tables::{Hash, Tables};
use crate::model::state::{EgressId, KernelState};

/// Connections whose pods are to be told, as the pods send them, and the objects whose addresses they show.
pub(super) type Cut = Vec<(Tuple, EgressId)>;

/// Flows and mappings of the object that show one of these addresses.
pub(super) fn flows_of_addresses(tables: &mut Tables, id: EgressId, addresses: &BTreeSet<IpAddr>) -> io::Result<Cut> {
    let shows = |address: Addr| addresses.contains(&address.to_ip());
    let done = cut(
        tables,
        |_, flow| flow.egress_id == id.0 && shows(flow.address),
        // The answer is sent to the address that the flow shows.
        |_, mapping, reverse| mapping.egress_id == id.0 && shows(reverse.daddr),
    );
    Ok(done?.0)
}

/// Flows and mappings of the pod that belong to the object.
pub(super) fn flows_of_pod(tables: &mut Tables, pod: IpAddr, id: EgressId) -> io::Result<Cut> {
    let pod = Addr::from(pod);
    let done = cut(
        tables,
        |tuple, flow| flow.egress_id == id.0 && tuple.saddr == pod,
        |forward, mapping, _| mapping.egress_id == id.0 && forward.saddr == pod,
    );
    Ok(done?.0)
}

/// Flows and mappings that this state does not permit, and how many entries went. Mappings towards other nodes (mark 1008)
/// are no object's, and those of another version are the sweep's.
pub(super) fn orphans(tables: &mut Tables, state: &KernelState) -> io::Result<(Cut, usize)> {
    let permits =
        |pod: Option<Addr>, id, address: Addr| state.permits(pod.map(|pod| pod.to_ip()), EgressId(id), address.to_ip());
    cut(
        tables,
        |tuple, flow| !permits(Some(tuple.saddr), flow.egress_id, flow.address),
        |forward, mapping, reverse| match mapping.origin() {
            Some(Origin::Here) => !permits(Some(forward.saddr), mapping.egress_id, reverse.daddr),
            Some(Origin::Remote) => !permits(None, mapping.egress_id, reverse.daddr),
            Some(Origin::Stack) | None => false,
        },
    )
}

/// Everything that is known of a pod's address: flows, mappings, connections from outside, datagrams. The pod is gone, so
/// there is nobody to tell.
pub(super) fn pod(tables: &mut Tables, pod: IpAddr) -> io::Result<()> {
    let pod = Addr::from(pod);
    remove_those(&mut tables.flows, |tuple| tuple.saddr == pod)?;
    cut_mappings(tables, |forward, _, _| forward.saddr == pod)?;
    remove_those(&mut tables.inbound, |tuple| tuple.saddr == pod)?;
    remove_those(&mut tables.datagrams, |tuple| tuple.saddr == pod)
}

/// The connections whose pods are to be told, and how many entries went.
fn cut(
    tables: &mut Tables,
    flow_goes: impl Fn(&Tuple, &Flow) -> bool,
    mapping_goes: impl Fn(&Tuple, &Mapping, &Tuple) -> bool,
) -> io::Result<(Cut, usize)> {
    let (mut connections, mut others) = (Cut::new(), Vec::new());
    tables.flows.for_each(|tuple: &Tuple, flow| {
        if flow_goes(tuple, flow) {
            if tuple.protocol == PROTO_TCP {
                connections.push((*tuple, EgressId(flow.egress_id)));
            } else {
                others.push(*tuple);
            }
        }
    })?;
    // The flow first: as long as it is there, the pod's next packet would make the mapping again.
    for tuple in &others {
        tables.flows.remove(tuple)?;
    }
    let mappings = cut_mappings(tables, mapping_goes)?;
    Ok((connections, others.len() + mappings))
}

/// `goes` sees the forward tuple, the mapping and the reverse tuple, whichever of the two keys was found. How many went.
fn cut_mappings(tables: &mut Tables, goes: impl Fn(&Tuple, &Mapping, &Tuple) -> bool) -> io::Result<usize> {
    // Each mapping is met at both of its keys; at the reverse one it is taken. A forward key that is alone has no answers,
    // and goes with the next sweep.
    let mut keys = Vec::new();
    tables.nat.for_each(|key: &Tuple, mapping: &Mapping| {
        if key.direction() == Direction::Ingress && goes(&mapping.other, mapping, key) {
            keys.push((*key, mapping.other));
        }
    })?;
    for (reverse, forward) in &keys {
        // Who removes the reverse key removes the forward key too, and nobody else: the programs do the same, and by then
        // it may be a new mapping's.
        if tables.nat.remove(reverse)? {
            tables.nat.remove(forward)?;
        }
    }
    Ok(keys.len())
}

/// Those that have gone by themselves are no error.
fn remove_those<V: aya::Pod>(map: &mut Hash<Tuple, V>, goes: impl Fn(&Tuple) -> bool) -> io::Result<()> {
    let mut keys = Vec::new();
    map.for_each(|key: &Tuple, _| {
        if goes(key) {
            keys.push(*key);
        }
    })?;
    for key in keys {
        map.remove(&key)?;
    }
    Ok(())
}
