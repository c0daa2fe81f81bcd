//! Cutting flows: what an edit must not let live on.
//!
//! A flow of a pod is an entry of `flows` on its own node; its mapping is two entries of `nat` on the gateway, which live
//! and die together. Here they are found by walking the maps, which a cut may cost and a packet may not.
//!
//! The tuples that were cut are returned: telling both ends by RST or ICMP starts from them.

use std::collections::BTreeSet;
use std::io;
use std::net::IpAddr;

use egress_common::abi::{Addr, Direction, Flow, Mapping, Tuple};

use super::tables::{Hash, Tables};
use crate::model::state::EgressId;

/// Tuples as the pods send them.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Cut {
    pub(super) flows: Vec<Tuple>,
    pub(super) mappings: Vec<Tuple>,
}

/// Flows and mappings of the object that show one of these addresses.
pub(super) fn flows_of_addresses(tables: &mut Tables, id: EgressId, addresses: &BTreeSet<IpAddr>) -> io::Result<Cut> {
    let shows = |address: Addr| addresses.contains(&address.to_ip());
    cut(
        tables,
        |_, flow| flow.egress_id == id.0 && shows(flow.address),
        // The answer is sent to the address that the flow shows.
        |_, mapping, reverse| mapping.egress_id == id.0 && shows(reverse.daddr),
    )
}

/// Flows and mappings of the pod that belong to the object.
pub(super) fn flows_of_pod(tables: &mut Tables, pod: IpAddr, id: EgressId) -> io::Result<Cut> {
    let pod = Addr::from(pod);
    cut(
        tables,
        |tuple, flow| flow.egress_id == id.0 && tuple.saddr == pod,
        |forward, mapping, _| mapping.egress_id == id.0 && forward.saddr == pod,
    )
}

/// `mapping_goes` sees the forward tuple, the mapping and the reverse tuple, whichever of the two keys was found.
fn cut(
    tables: &mut Tables,
    flow_goes: impl Fn(&Tuple, &Flow) -> bool,
    mapping_goes: impl Fn(&Tuple, &Mapping, &Tuple) -> bool,
) -> io::Result<Cut> {
    let mut cut = Cut::default();
    tables.flows.for_each(|tuple: &Tuple, flow| {
        if flow_goes(tuple, flow) {
            cut.flows.push(*tuple);
        }
    })?;
    let mut keys = Vec::new();
    tables.nat.for_each(|key: &Tuple, mapping: &Mapping| {
        let (forward, reverse) = match key.direction() {
            Direction::Egress => (*key, mapping.other),
            Direction::Ingress => (mapping.other, *key),
        };
        if mapping_goes(&forward, mapping, &reverse) {
            keys.push(*key);
            keys.push(mapping.other);
            cut.mappings.push(forward);
        }
    })?;
    // The flow first: as long as it is there, the pod's next packet would make the mapping again.
    remove_all(&mut tables.flows, &cut.flows)?;
    remove_all(&mut tables.nat, &keys)?;
    // Each mapping was met at both of its keys.
    cut.mappings.sort_by_key(|tuple| (tuple.saddr.octets(), tuple.daddr.octets(), tuple.sport(), tuple.dport()));
    cut.mappings.dedup();
    Ok(cut)
}

/// Those that have gone by themselves are no error.
fn remove_all<K: aya::Pod, V: aya::Pod>(map: &mut Hash<K, V>, keys: &[K]) -> io::Result<()> {
    for key in keys {
        map.remove(key)?;
    }
    Ok(())
}
