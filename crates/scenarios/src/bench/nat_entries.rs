//! NAT entries written into a node's map from outside of the programs: of no policy and of no pod of the node, so that no
//! event cuts any.

use std::ops::Range;

use aya::Pod as Plain;
use aya::maps::{HashMap, Map, MapData};
use egress_common::abi::{Addr, Direction, MAX_EGRESS_ID, NatEntry, Origin, Tuple};
use egress_common::decide::phase;

use crate::prelude::*;

const TCP: u8 = 6;
const WORLD: Ipv4Addr = Ipv4Addr::new(203, 0, 0, 0);
/// In the cluster's pod network, beyond all nodes of a large cluster.
const PODS: Ipv4Addr = Ipv4Addr::new(10, 190, 0, 0);
const EGRESS_IP: Ipv4Addr = Ipv4Addr::new(172, 18, 255, 254);

/// The agent's own map, by its pin.
pub(super) fn open<K: Plain, V: Plain>(node: &LabNode, name: &str) -> Result<HashMap<MapData, K, V>> {
    let data =
        MapData::from_pin(AgentPins::of(node).map(name)?).with_context(|| format!("open the pinned map {name}"))?;
    Ok(HashMap::try_from(Map::HashMap(data))?)
}

/// Writes the NAT entries of these numbers, two keys each: TCP connections on which both sides have just spoken, so that
/// nothing of them expires soon, not even in a full map.
pub(super) fn fill(node: &LabNode, numbers: Range<u32>) -> Result<()> {
    let mut nat = open::<Tuple, NatEntry>(node, "nat")?;
    let now: Duration = nix::time::ClockId::CLOCK_MONOTONIC.now()?.into();
    let now = u64::try_from(now.as_nanos())?;
    for number in numbers {
        let (forward, reverse) = keys(number)?;
        for (key, other) in [(forward, reverse), (reverse, forward)] {
            let mut entry = NatEntry::new(other, Origin::Remote, Addr::UNSPECIFIED, MAX_EGRESS_ID, now);
            entry.state = phase::SPOKE;
            nat.insert(key, entry.sealed(&key), 0).context("fill the map nat")?;
        }
    }
    Ok(())
}

/// How many of the entries of these numbers are there.
pub(super) fn present(node: &LabNode, numbers: Range<u32>) -> Result<usize> {
    let nat = open::<Tuple, NatEntry>(node, "nat")?;
    let mut count = 0;
    for number in numbers {
        count += usize::from(nat.get(&keys(number)?.0, 0).is_ok());
    }
    Ok(count)
}

/// Forward and reverse key. Each pod has some hundreds, and each place in the world some ten thousands.
fn keys(number: u32) -> Result<(Tuple, Tuple)> {
    let address = |base: Ipv4Addr, number: u32| Addr::v4((base.to_bits() + number).to_be_bytes());
    let (pod, world) = (address(PODS, number / 500), address(WORLD, number / 50_000));
    let port = u16::try_from(1_024 + number % 60_000)?;
    let forward = Tuple::new(Direction::Egress, pod, world, port, 443, TCP);
    let reverse = Tuple::new(Direction::Ingress, world, address(EGRESS_IP, 0), 443, port, TCP);
    Ok((forward, reverse))
}
