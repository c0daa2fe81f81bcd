//! Reads the ring buffer of the programs. Sampled drops go to the followers ([`drops`]) and, at debug level and at most ten a
//! second, to the log. Claims of other hosts on addresses of this node go to `announce`.

pub mod drops;
pub mod packet_log;

use std::io;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use aya::maps::{MapData, RingBuf};
use egress_common::abi::{Addr, ConflictEvent, DropEvent, Tuple, Verdict};
use tokio::time::Instant;
use tracing::{debug, warn};

use crate::clock::now_ns;
use crate::events::drops::{Drops, Sample};
use crate::maps::access;
use crate::node_state::shared::Shared;
use egress_core::plan::executor::AddressClaim;

const WINDOW: Duration = Duration::from_secs(1);
const LINES_PER_WINDOW: u32 = 10;

/// Field by field in the layout of [`DropEvent`], whose integers are in host order and whose tuple is 40 bytes.
const TIME: usize = 0;
const VERDICT: usize = 8;
const IFINDEX: usize = 12;
const EGRESS_ID: usize = 16;
const LENGTH: usize = 20;
const TUPLE: usize = 24;
/// The same for [`ConflictEvent`].
const CLAIMED: usize = 8;
const CLAIMANT: usize = 24;

/// Runs until dropped.
pub async fn run(ring: RingBuf<MapData>, drops: Drops, shared: Arc<Shared>) {
    let mut ring = match access::await_ring(ring) {
        Ok(ring) => ring,
        Err(error) => {
            warn!(%error, "cannot wait for drop events: none will be logged");
            return std::future::pending().await;
        }
    };
    let mut budget = LogBudget { since: Instant::now(), lines: 0, held_back: 0 };
    loop {
        match ring.readable_mut().await {
            Ok(mut ready) => {
                let now = Now::read();
                while let Some(item) = ready.get_inner_mut().next() {
                    if let Some((claimant, ago)) = conflict(&item, &now) {
                        meet(&shared, claimant, ago);
                        continue;
                    }
                    match decode(&item, &now) {
                        Some(sample) => {
                            budget.log(&sample);
                            drops.publish(sample);
                        }
                        None => debug!(bytes = item.len(), "an event of another version"),
                    }
                }
                ready.clear_ready();
            }
            Err(error) => return warn!(%error, "drop events have ended"),
        }
    }
}

fn meet(shared: &Shared, claimant: AddressClaim, ago: Duration) {
    shared.state().claims.defend(claimant, ago);
}

/// Field by field in the layout of [`ConflictEvent`]; with its age.
fn conflict(item: &[u8], now: &Now) -> Option<(AddressClaim, Duration)> {
    if item.len() != size_of::<ConflictEvent>() {
        return None;
    }
    let time_ns = u64::from_ne_bytes(item.get(TIME..TIME + 8)?.try_into().ok()?);
    let address = Addr::v6(item.get(CLAIMED..CLAIMED + 16)?.try_into().ok()?).to_ip();
    let mac = item.get(CLAIMANT..CLAIMANT + 6)?.try_into().ok()?;
    Some((AddressClaim { address, mac }, Duration::from_nanos(now.monotonic_ns.saturating_sub(time_ns))))
}

/// The programs' clock and the wall clock.
struct Now {
    monotonic_ns: u64,
    wall: SystemTime,
}

impl Now {
    fn read() -> Self {
        let monotonic_ns = now_ns().unwrap_or_else(|error: io::Error| {
            debug!(%error, "no clock for drop events");
            0
        });
        Self { monotonic_ns, wall: SystemTime::now() }
    }

    fn wall_of(&self, then_ns: u64) -> SystemTime {
        let ago = Duration::from_nanos(self.monotonic_ns.saturating_sub(then_ns));
        self.wall.checked_sub(ago).unwrap_or(self.wall)
    }
}

/// Lines left in this window.
struct LogBudget {
    since: Instant,
    lines: u32,
    held_back: u64,
}

impl LogBudget {
    fn log(&mut self, sample: &Sample) {
        if self.since.elapsed() >= WINDOW {
            if self.held_back > 0 {
                debug!(count = self.held_back, "more drops were sampled");
            }
            *self = Self { since: Instant::now(), lines: 0, held_back: 0 };
        }
        if self.lines >= LINES_PER_WINDOW {
            self.held_back += 1;
            return;
        }
        self.lines += 1;
        let Sample { reason, ifindex, egress_id, length, source, destination, protocol, .. } = sample;
        let reason: &str = reason;
        debug!(%source, %destination, protocol, reason, egress_id, ifindex, length, "packet dropped");
    }
}

fn decode(item: &[u8], now: &Now) -> Option<Sample> {
    if item.len() != size_of::<DropEvent>() {
        return None;
    }
    let word = |at: usize| Some(u32::from_ne_bytes(item.get(at..at + 4)?.try_into().ok()?));
    let address = |at: usize| Some(egress_common::abi::Addr::v6(item.get(at..at + 16)?.try_into().ok()?).to_ip());
    let port = |at: usize| Some(u16::from_be_bytes(item.get(at..at + 2)?.try_into().ok()?));
    let time_ns = u64::from_ne_bytes(item.get(TIME..TIME + 8)?.try_into().ok()?);
    Some(Sample {
        at: now.wall_of(time_ns),
        reason: Verdict::from_index(word(VERDICT)?)?.label().into(),
        ifindex: word(IFINDEX)?,
        egress_id: word(EGRESS_ID)?,
        length: word(LENGTH)?,
        source: (address(TUPLE)?, port(TUPLE + 32)?).into(),
        destination: (address(TUPLE + 16)?, port(TUPLE + 34)?).into(),
        protocol: *item.get(TUPLE + 36)?,
    })
}

const _: () = {
    assert!(std::mem::offset_of!(DropEvent, time_ns) == TIME);
    assert!(std::mem::offset_of!(DropEvent, verdict) == VERDICT);
    assert!(std::mem::offset_of!(DropEvent, ifindex) == IFINDEX);
    assert!(std::mem::offset_of!(DropEvent, egress_id) == EGRESS_ID);
    assert!(std::mem::offset_of!(DropEvent, length) == LENGTH);
    assert!(std::mem::offset_of!(DropEvent, tuple) == TUPLE);
    assert!(size_of::<Tuple>() == 40);
    assert!(std::mem::offset_of!(ConflictEvent, time_ns) == TIME);
    assert!(std::mem::offset_of!(ConflictEvent, address) == CLAIMED);
    assert!(std::mem::offset_of!(ConflictEvent, mac) == CLAIMANT);
    assert!(size_of::<ConflictEvent>() != size_of::<DropEvent>());
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_decoded_by_its_layout() {
        let mut item = [0_u8; 64];
        item[8..12].copy_from_slice(&Verdict::NoGateway.index().to_ne_bytes());
        item[12..16].copy_from_slice(&7_u32.to_ne_bytes());
        item[16..20].copy_from_slice(&9_u32.to_ne_bytes());
        item[20..24].copy_from_slice(&60_u32.to_ne_bytes());
        item[24..40].copy_from_slice(&egress_common::abi::Addr::v4([10, 244, 1, 10]).octets());
        item[40..56].copy_from_slice(&egress_common::abi::Addr::v4([198, 51, 100, 10]).octets());
        item[56..60].copy_from_slice(&[0x30, 0x39, 0, 80]);
        item[60] = 6;
        item[..8].copy_from_slice(&9_000_000_000_u64.to_ne_bytes());
        let now = Now { monotonic_ns: 10_000_000_000, wall: SystemTime::UNIX_EPOCH + Duration::from_secs(100) };
        let sample = decode(&item, &now).expect("of the right size");
        assert_eq!(sample.at, SystemTime::UNIX_EPOCH + Duration::from_secs(99));
        assert_eq!(sample.reason, "no_gateway");
        assert_eq!((sample.ifindex, sample.egress_id, sample.length, sample.protocol), (7, 9, 60, 6));
        assert_eq!(sample.source, "10.244.1.10:12345".parse().expect("a literal"));
        assert_eq!(sample.destination, "198.51.100.10:80".parse().expect("a literal"));
        assert_eq!(decode(&item[..63], &now), None);
    }

    #[test]
    fn a_conflict_is_told_from_a_drop_by_its_length() {
        let mut item = [0_u8; 32];
        item[..8].copy_from_slice(&9_000_000_000_u64.to_ne_bytes());
        item[8..24].copy_from_slice(&Addr::v4([172, 18, 0, 100]).octets());
        item[24..30].copy_from_slice(&[2, 0, 0, 0, 0, 9]);
        let now = Now { monotonic_ns: 10_000_000_000, wall: SystemTime::UNIX_EPOCH };
        let claimant = AddressClaim { address: [172, 18, 0, 100].into(), mac: [2, 0, 0, 0, 0, 9] };
        assert_eq!(conflict(&item, &now), Some((claimant, Duration::from_secs(1))));
        assert_eq!((decode(&item, &now), conflict(&[0; 64], &now)), (None, None));
    }
}
