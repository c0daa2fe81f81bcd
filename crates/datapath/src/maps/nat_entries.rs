//! NAT entries of a node, from the pinned map. Read in batches without storing them: entries that change during the walk
//! may be missed or seen twice.

use std::io;
use std::net::IpAddr;
use std::path::Path;
use std::time::Duration;

use aya::maps::{Array, Map, MapData};
use egress_common::abi::{Config, Direction, Holder, NatEntry, Origin, Share, Timeouts, Tuple};
use egress_common::decide::expiry;
use egress_common::decide::phase::{self, Phase};
use egress_common::wire::PROTO_TCP;

use crate::clock::now_ns;
use crate::error::map_io;
use crate::maps::handles::Hash;
use crate::names::{NAT_MAP, Pins, SHARES_MAP};

/// A NAT entry with both keys.
#[derive(Clone, Copy, Debug)]
pub struct Entry {
    /// The original tuple, from the pod.
    pub egress: Tuple,
    /// The reverse tuple, of the answer.
    pub ingress: Tuple,
    pub origin: Option<Origin>,
    /// Tunnel endpoint of the pod's node, if it is another node.
    pub source_node: Option<IpAddr>,
    /// Zero if it belongs to no policy: pods' traffic to other nodes.
    pub egress_id: u32,
    /// Of TCP.
    pub phase: Option<Phase>,
    pub age: Duration,
    /// Idle time of each direction.
    pub egress_idle: Duration,
    pub ingress_idle: Duration,
    /// Its timeout.
    pub timeout: Duration,
}

impl Entry {
    /// `there` is the value at the other key, if written yet.
    fn of(key: &Tuple, mapping: &NatEntry, there: Option<&NatEntry>, timeouts: &Timeouts, now_ns: u64) -> Self {
        let since = |then_ns: u64| Duration::from_nanos(now_ns.saturating_sub(then_ns));
        let phase = phase::nat_entry(mapping, there);
        let timeout = expiry::timeout_ns(timeouts, key.protocol, phase);
        let is_remote = mapping.origin() == Some(Origin::Remote);
        Self {
            egress: *key,
            ingress: mapping.other,
            origin: mapping.origin(),
            source_node: is_remote.then(|| mapping.source_node.to_ip()),
            egress_id: mapping.egress_id,
            phase: (key.protocol == PROTO_TCP).then_some(phase),
            age: since(mapping.created_ns),
            egress_idle: since(mapping.last_seen_ns),
            ingress_idle: since(there.map_or(mapping.created_ns, |there| there.last_seen_ns)),
            timeout: Duration::from_nanos(timeout),
        }
    }

    pub fn idle(&self) -> Duration {
        self.egress_idle.min(self.ingress_idle)
    }
}

/// Visits every NAT entry that is `wanted` by its forward key and value; returns the capacity of the map in NAT entries, or
/// `None` without a map. An error of `visit` ends the walk.
pub fn walk(
    bpffs: &Path,
    wanted: impl Fn(&Tuple, &NatEntry) -> bool,
    mut visit: impl FnMut(&Entry) -> io::Result<()>,
) -> io::Result<Option<u32>> {
    let pins = Pins::new(bpffs);
    if !pins.map(NAT_MAP).try_exists()? {
        return Ok(None);
    }
    let config = MapData::from_pin(pins.map("config")).map_err(map_io)?;
    let config: Array<MapData, Config> = Array::try_from(Map::Array(config)).map_err(map_io)?;
    let timeouts = config.get(&0, 0).map_err(map_io)?.timeouts;
    let nat = Hash::<Tuple, NatEntry>::new(MapData::from_pin(pins.map(NAT_MAP)).map_err(map_io)?).map_err(map_io)?;
    let now = now_ns()?;
    let mut outcome = Ok(());
    nat.for_each(|key, mapping| {
        if outcome.is_ok() && key.direction() == Direction::Egress && wanted(key, mapping) {
            outcome = nat.get(&mapping.other).and_then(|there| {
                let there = there.filter(|there| there.other == *key);
                visit(&Entry::of(key, mapping, there.as_ref(), &timeouts, now))
            });
        }
    })?;
    outcome.map(|()| Some(nat.limit() / 2))
}

/// Shares of `flows` and `nat` per holder.
pub struct Shares {
    /// Quotas of one pod address and of one egress policy; `None`: the size of the maps.
    pub pod_quota: Option<u32>,
    pub policy_quota: Option<u32>,
    pub pods: Vec<(IpAddr, Share)>,
    pub policies: Vec<(u32, Share)>,
}

/// Holders with entries; `None` without maps.
pub fn shares(bpffs: &Path) -> io::Result<Option<Shares>> {
    let pins = Pins::new(bpffs);
    if !pins.map(SHARES_MAP).try_exists()? {
        return Ok(None);
    }
    let config = MapData::from_pin(pins.map("config")).map_err(map_io)?;
    let config: Array<MapData, Config> = Array::try_from(Map::Array(config)).map_err(map_io)?;
    let config = config.get(&0, 0).map_err(map_io)?;
    let quota = |entries| (entries != u32::MAX).then_some(entries);
    let map = MapData::from_pin(pins.map(SHARES_MAP)).map_err(map_io)?;
    let map = Hash::<Holder, Share>::new(map).map_err(map_io)?;
    let (mut pods, mut policies) = (Vec::new(), Vec::new());
    map.for_each(|holder, share| match holder.egress_id {
        0 => pods.push((holder.pod.to_ip(), *share)),
        id => policies.push((id, *share)),
    })?;
    Ok(Some(Shares { pod_quota: quota(config.pod_quota), policy_quota: quota(config.policy_quota), pods, policies }))
}

#[cfg(test)]
mod tests {
    use egress_common::abi::Addr;

    use super::*;

    const SECOND: u64 = 1_000_000_000;

    #[test]
    fn an_entry_has_the_times_of_both_directions() {
        let (pod, world, egress) =
            (Addr::v4([10, 244, 1, 10]), Addr::v4([198, 51, 100, 10]), Addr::v4([172, 18, 0, 100]));
        let forward = Tuple::new(Direction::Egress, pod, world, 4000, 80, PROTO_TCP);
        let reverse = Tuple::new(Direction::Ingress, world, egress, 80, 4001, PROTO_TCP);
        let mut out = NatEntry::new(reverse, Origin::Here, Addr::UNSPECIFIED, 7, 100 * SECOND);
        let mut back = NatEntry::new(forward, Origin::Here, Addr::UNSPECIFIED, 7, 100 * SECOND);
        (out.last_seen_ns, back.last_seen_ns) = (130 * SECOND, 120 * SECOND);
        let timeouts = Timeouts::DEFAULT;
        let opening = Entry::of(&forward, &out, Some(&back), &timeouts, 140 * SECOND);
        assert_eq!((opening.phase, opening.timeout.as_secs()), (Some(Phase::Opening), 240));
        let seconds =
            [opening.age, opening.egress_idle, opening.ingress_idle, opening.idle()].map(|time| time.as_secs());
        assert_eq!(seconds, [40, 10, 20, 10]);
        (out.state, back.state) = (phase::SPOKE, phase::SPOKE);
        let open = Entry::of(&forward, &out, Some(&back), &timeouts, 140 * SECOND);
        assert_eq!((open.phase, open.timeout.as_secs()), (Some(Phase::Established), 7_440));
        assert_eq!(Entry::of(&forward, &out, None, &timeouts, 140 * SECOND).phase, Some(Phase::Opening), "half of one");
        assert_eq!(open.source_node, None);
    }
}
