//! Expiry: the agent reads `nat`, `flows` and `inbound` in batches, and passes the keys of possibly idle entries to the
//! program `sweep`, which checks each of them again and removes it. At rest one pass takes a minute, so that no call into the
//! kernel takes long.
//!
//! Packets ignore an idle entry whether or not it was swept, so passes free space only. Without an agent full maps refuse new
//! flows with their own drop reason.
//!
//! Beside the passes, the agent reads the host's port ranges, which NAT on the node's own address avoids, and drops counters of
//! removed policies.

use std::collections::HashSet;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use egress_common::abi::{Flow, Holder, Inbound, NatEntry, Share, SweepMode, SweptMap, Timeouts, Tuple};
use egress_common::decide::expiry;
use tokio::task::spawn_blocking;
use tokio::time::{MissedTickBehavior, interval, sleep};
use tracing::{debug, info, warn};

use crate::clock::now_ns;
use crate::error::map_io;
use crate::maps::access::Batches;
use crate::maps::handles::FlowMaps;
use crate::names::{FLOWS_MAP, INBOUND_MAP, NAT_MAP};
use crate::node_state::config;
use crate::node_state::shared::Shared;
use crate::settings::{Quotas, Settings};
use egress_supervise;

/// Interval of reading the host's port ranges.
const INTERVAL: Duration = Duration::from_secs(10);
/// Duration of a pass.
const PASS: Duration = Duration::from_secs(60);
/// The same while idle entries may cost new connections: a pod or an egress policy is near its quota, or `inbound` is
/// a quarter full, of which a port may have half.
const HURRIED_PASS: Duration = Duration::from_secs(5);
/// The same while a map is nearly full.
const PRESSED_PASS: Duration = Duration::from_secs(2);
/// How often the pause is adapted.
const LOOK: Duration = Duration::from_secs(1);
/// Entries of a batch, for the planned duration of a pass.
const BATCH: u64 = 1024;

/// Sweeps at once and then repeatedly, until the data plane is dropped.
pub async fn run(shared: Arc<Shared>) {
    tokio::join!(follow(Arc::clone(&shared)), passes(shared));
}

async fn follow(shared: Arc<Shared>) {
    let mut ticks = interval(INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        if let Err(error) = in_background(&shared, Shared::follow_ports).await {
            warn!(%error, "cannot follow the host's port ranges");
        }
        if let Err(error) = in_background(&shared, Shared::forget_all_counts).await {
            warn!(%error, "cannot drop the counters of removed policies");
        }
    }
}

async fn passes(shared: Arc<Shared>) {
    let mut was_pressed = false;
    loop {
        match pass(&shared).await {
            Ok(full) => {
                if !full.is_empty() && !was_pressed {
                    warn!(maps = full.join(", "), "nearly full: unanswered connections expire early");
                }
                was_pressed = !full.is_empty();
            }
            Err(error) => {
                warn!(%error, "cannot remove idle entries: the maps fill");
                sleep(INTERVAL).await;
            }
        }
    }
}

/// One pass over the maps, spread over time. Returns the names of the nearly full maps.
async fn pass(shared: &Arc<Shared>) -> io::Result<Vec<&'static str>> {
    let mut pass = in_background(shared, |shared| Pass::begin(&mut shared.flow_maps())).await?;
    let mut removed = 0;
    let mut pause = in_background(shared, |shared| shared.flow_maps().sweep_pause(&shared.settings)).await?;
    let mut looked = Instant::now();
    loop {
        let work = move |shared: &Shared| {
            let step = pass.step(&mut shared.flow_maps(), &shared.settings.timeouts)?;
            Ok((pass, step))
        };
        let (returned, step) = in_background(shared, work).await?;
        pass = returned;
        removed += step.removed;
        // Also after the last batch: a pass takes its time with empty maps too.
        let mut waited = Duration::ZERO;
        loop {
            if looked.elapsed() >= LOOK {
                pause = in_background(shared, |shared| shared.flow_maps().sweep_pause(&shared.settings)).await?;
                looked = Instant::now();
            }
            let left = pause.saturating_sub(waited).min(LOOK);
            if left.is_zero() {
                break;
            }
            sleep(left).await;
            waited += left;
        }
        if step.is_last {
            if removed > 0 {
                debug!(removed, "idle entries removed");
            }
            return Ok(step.full);
        }
    }
}

/// Map access blocks, and waits for walks of other tasks, while this thread watches the node's devices.
async fn in_background<T: Send + 'static>(
    shared: &Arc<Shared>,
    work: impl FnOnce(&Shared) -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    let shared = Arc::clone(shared);
    egress_supervise::joined(spawn_blocking(move || work(&shared)).await)
}

/// A pass over the maps.
struct Pass {
    nat: Batches<Tuple, NatEntry>,
    flows: Batches<Tuple, Flow>,
    inbound: Batches<Tuple, Inbound>,
    map: SweptMap,
    candidates: Vec<Tuple>,
    marked: Vec<Tuple>,
}

/// Result of a batch.
struct PassStep {
    removed: u32,
    is_last: bool,
    /// The maps that are nearly full.
    full: Vec<&'static str>,
}

impl Pass {
    fn begin(maps: &mut FlowMaps) -> io::Result<Self> {
        if let Err(error) = maps.blocks.begin_pass() {
            warn!(%error, "cannot read the port blocks: none is taken back");
        }
        Ok(Self {
            nat: maps.nat.batches()?,
            flows: maps.flows.batches()?,
            inbound: maps.inbound.batches()?,
            map: SweptMap::Nat,
            candidates: Vec::new(),
            marked: Vec::new(),
        })
    }

    /// Handles one batch.
    fn step(&mut self, maps: &mut FlowMaps, timeouts: &Timeouts) -> io::Result<PassStep> {
        let full = maps.nearly_full()?;
        let map = self.map;
        let name = match map {
            SweptMap::Nat => NAT_MAP,
            SweptMap::Flows => FLOWS_MAP,
            SweptMap::Inbound => INBOUND_MAP,
        };
        let (mode, timeouts) = match full.contains(&name) {
            false => (SweepMode::Idle, *timeouts),
            true => (SweepMode::Pressed, expiry::pressed(*timeouts)),
        };
        let now = now_ns()?;
        let (candidates, marked, blocks) = (&mut self.candidates, &mut self.marked, &mut maps.blocks);
        candidates.clear();
        marked.clear();
        // A mark that is seen here, and by the program again, is one whose owner could not remove the entry: the kernel may
        // refuse (EBUSY).
        let mut collect = |tuple: &Tuple, seen: u64, is_idle: bool| {
            if seen == expiry::GONE {
                marked.push(*tuple);
            } else if is_idle {
                candidates.push(*tuple);
            }
        };
        let has_more = match map {
            SweptMap::Nat => self.nat.next(|key, nat_entry| {
                let seen = nat_entry.last_seen_ns;
                blocks.see(key, nat_entry);
                collect(key, seen, expiry::may_nat_entry_be_idle(&timeouts, key.protocol, seen, now));
            })?,
            SweptMap::Flows => self.flows.next(|key, flow| {
                let seen = flow.last_seen_ns;
                collect(key, seen, expiry::is_flow_idle(&timeouts, flow, seen, key.protocol, now));
            })?,
            SweptMap::Inbound => self.inbound.next(|key, inbound| {
                let (is_pressed, seen) = (mode == SweepMode::Pressed, inbound.last_seen_ns);
                let is_idle = expiry::is_inbound_idle(&timeouts, is_pressed, inbound, seen, key.protocol, now);
                collect(key, seen, is_idle);
            })?,
        };
        let removed = maps.sweeper.remove(map, mode, &self.candidates)?
            + maps.sweeper.remove(map, SweepMode::Marked, &self.marked)?;
        if !has_more && map == SweptMap::Nat {
            match maps.blocks.end_pass() {
                Ok(0) => {}
                Ok(taken_back) => debug!(taken_back, "port blocks without entries"),
                Err(error) => warn!(%error, "cannot take port blocks back"),
            }
        }
        let next = match (has_more, map) {
            (true, _) => Some(map),
            (false, SweptMap::Nat) => Some(SweptMap::Flows),
            (false, SweptMap::Flows) => Some(SweptMap::Inbound),
            (false, SweptMap::Inbound) => None,
        };
        if let Some(next) = next {
            self.map = next;
        } else {
            maps.forget_empty_shares()?;
        }
        Ok(PassStep { removed, is_last: next.is_none(), full })
    }
}

impl Shared {
    /// Reads the host's ephemeral and reserved ports: the kernel sends no event for a change.
    pub(crate) fn follow_ports(&self) -> io::Result<()> {
        let seen = config::host_ports();
        let news = self.state().follow_ports(&self.settings, seen)?;
        if let Some(ports) = news {
            info!(first = ports.first, last = ports.last, "other ports for pods' traffic to other nodes");
            config::warn_of_few(ports);
        }
        Ok(())
    }

    /// A whole pass without pauses; returns the number of removed keys.
    pub(crate) fn sweep(&self) -> io::Result<u32> {
        self.forget_all_counts()?;
        self.flow_maps().sweep(&self.settings.timeouts)
    }
}

impl FlowMaps {
    /// A whole pass without pauses; returns the number of removed keys.
    pub(crate) fn sweep(&mut self, timeouts: &Timeouts) -> io::Result<u32> {
        let mut pass = Pass::begin(self)?;
        let mut removed = 0;
        loop {
            let step = pass.step(self, timeouts)?;
            removed += step.removed;
            if step.is_last {
                return Ok(removed);
            }
        }
    }

    /// Names of the maps that are seven eighths full or more.
    fn nearly_full(&self) -> io::Result<Vec<&'static str>> {
        let usage = self.usage.get(&0, 0).map_err(map_io)?;
        let maps = [
            (NAT_MAP, usage.nat, self.nat.limit()),
            (FLOWS_MAP, usage.flows, self.flows.limit()),
            (INBOUND_MAP, usage.inbound, self.inbound.limit()),
        ];
        let is_full = |used: i32, limit: u32| positive(used) >= u64::from(limit - limit / 8);
        Ok(maps.into_iter().filter(|(_, used, limit)| is_full(*used, *limit)).map(|(name, ..)| name).collect())
    }

    /// The time between two batches, by the present state and number of entries.
    fn sweep_pause(&self, settings: &Settings) -> io::Result<Duration> {
        let usage = self.usage.get(&0, 0).map_err(map_io)?;
        let batches = |used: i32| positive(used).div_ceil(BATCH).max(1);
        let batches = batches(usage.nat) + batches(usage.flows) + batches(usage.inbound);
        let pass = match () {
            () if !self.nearly_full()?.is_empty() => PRESSED_PASS,
            () if positive(usage.inbound) >= u64::from(self.inbound.limit() / 4) => HURRIED_PASS,
            () if self.is_near_quota(settings)? => HURRIED_PASS,
            () => PASS,
        };
        Ok(pass / u32::try_from(batches).unwrap_or(u32::MAX))
    }

    /// Whether a pod or an egress policy holds seven eighths of its quota or more.
    fn is_near_quota(&self, settings: &Settings) -> io::Result<bool> {
        let entries = |percent| Quotas::entries(percent, settings.nat_entries);
        let (pod_quota, policy_quota) = (entries(settings.quotas.pod), entries(settings.quotas.policy));
        let mut is_near = false;
        let near = |held: i32, quota: u32| positive(held) >= u64::from(quota - quota / 8);
        self.shares.for_each(|holder: &Holder, share: &Share| {
            let quota = if holder.egress_id == 0 { pod_quota } else { policy_quota };
            is_near |= near(share.flows, quota) || near(share.nat_entries, quota);
        })?;
        Ok(is_near)
    }

    /// Removes holders that have had no entries since the last pass.
    fn forget_empty_shares(&mut self) -> io::Result<()> {
        let empty = |share: &Share| (share.flows, share.nat_entries) == (0, 0);
        let mut now_empty = HashSet::new();
        self.shares.for_each(|holder, share| {
            if empty(share) {
                now_empty.insert(*holder);
            }
        })?;
        for holder in now_empty.intersection(&self.empty_shares) {
            // Once more, so that a claim is lost only between these two calls: the holder then has one entry more.
            if self.shares.get(holder)?.is_some_and(|share| empty(&share)) {
                self.shares.remove(holder)?;
            }
        }
        self.empty_shares = now_empty;
        Ok(())
    }
}

fn positive(number: i32) -> u64 {
    u64::try_from(number).unwrap_or_default()
}
