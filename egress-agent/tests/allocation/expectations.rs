//! Compares the outcome with the vector's expectations.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use crate::cluster::VectorCluster;
use crate::vector::{Expect, Vector, VectorStatusItem};

pub(crate) fn check(vector: &Vector, cluster: &VectorCluster<'_>) -> Result<(), String> {
    let items = cluster.items();
    let mut owners = BTreeMap::new();
    for (name, items) in &items {
        for item in items {
            let address: IpAddr = item.egress_ip.parse().map_err(|_| format!("{} is no address", item.egress_ip))?;
            if address.to_string() != item.egress_ip {
                return Err(format!("{} is not canonical", item.egress_ip));
            }
            if let Some(other) = owners.insert(address, name) {
                return Err(format!("{address} is assigned to {name} and {other}"));
            }
        }
    }
    if !vector.strict {
        return Ok(());
    }
    for (name, expect) in &vector.expect {
        let items = items.get(name).ok_or_else(|| format!("there is no object {name}"))?;
        check_object(expect, items).map_err(|problem| format!("{name}: {problem}, got {items:?}"))?;
    }
    for balance in &vector.expect_balance {
        let load = |node: &String| items.values().flatten().filter(|item| item.node == *node).count();
        let loads: Vec<usize> = balance.nodes.iter().map(load).collect();
        let spread = loads.iter().max().zip(loads.iter().min()).map_or(0, |(most, least)| most - least);
        if spread > balance.max_spread {
            return Err(format!("the loads of {:?} are {loads:?}", balance.nodes));
        }
    }
    let missing: Vec<_> = vector.events.iter().filter(|event| !cluster.events.contains(event.as_str())).collect();
    if !missing.is_empty() {
        return Err(format!("no event {missing:?}, only {:?}", cluster.events));
    }
    Ok(())
}

fn check_object(expect: &Expect, items: &[VectorStatusItem]) -> Result<(), String> {
    if items.len() != expect.count {
        return Err(format!("{} addresses expected", expect.count));
    }
    // Vectors write addresses as users do.
    let canonical = |text: &String| {
        text.parse::<IpAddr>().map_or_else(|_| text.clone(), |address| address.to_canonical().to_string())
    };
    let allowed: BTreeMap<String, &Vec<String>> =
        expect.allowed_nodes_per_ip.iter().map(|(text, nodes)| (canonical(text), nodes)).collect();
    for item in items {
        let nodes = allowed.get(&item.egress_ip).ok_or_else(|| format!("{} is not expected", item.egress_ip))?;
        if !nodes.contains(&item.node) {
            return Err(format!("{} may be on {nodes:?} only", item.egress_ip));
        }
    }
    let nodes: BTreeSet<&str> = items.iter().map(|item| item.node.as_str()).collect();
    if expect.must_be_on_distinct_nodes && nodes.len() < items.len() {
        return Err("two addresses are on one node".to_owned());
    }
    let moved = expect.kept.iter().find(|kept| {
        let kept = VectorStatusItem { node: kept.node.clone(), egress_ip: canonical(&kept.egress_ip) };
        !items.contains(&kept)
    });
    moved.map_or(Ok(()), |moved| Err(format!("{moved:?} should have stayed")))
}
