//! The bandwidth limit of an egress policy on its gateway: shaped by departure time where the uplink's queueing discipline
//! keeps it (`fq`), policed elsewhere.
//!
//! The state of a limit is one number: the time at which the rate would have sent all packets so far (GCRA, ITU-T I.371
//! annex A, virtual scheduling). A packet is judged before its own time is added, so a packet that is longer than the whole
//! burst passes too, and the next ones pay for it: GSO packets of 64 KiB pass at any rate.

use crate::abi::BandwidthLimit;

/// A shaped packet waits this long at most; as long as the horizon of Cilium's bandwidth manager.
pub const HORIZON_NS: u64 = 2_000_000_000;

/// When a packet leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PacketDeparture {
    Now,
    /// CLOCK_MONOTONIC (ns).
    At(u64),
    Never,
}

/// The departure of the next packet, by the state of the limit. A packet may wait for `longest_wait_ns`: zero where it is
/// policed, elsewhere no longer than [`HORIZON_NS`], nor than the node may emit its address.
#[inline(always)]
pub const fn departure(limit: &BandwidthLimit, sent_ns: u64, now_ns: u64, longest_wait_ns: u64) -> PacketDeparture {
    let ahead = sent_ns.saturating_sub(now_ns);
    match ahead.saturating_sub(limit.burst_ns()) {
        0 => PacketDeparture::Now,
        wait if wait <= longest_wait_ns => PacketDeparture::At(now_ns + wait),
        _ => PacketDeparture::Never,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: u64 = 5_000_000_000;

    /// What a policy that always has another packet sends in this time (ns), with steps between its attempts.
    fn sent(limit: &BandwidthLimit, longest_wait: u64, bytes: u32, time: u64, step: u64) -> u64 {
        let (mut state, mut sent) = (0, 0);
        for now in (START..START + time).step_by(usize::try_from(step).expect("a step")) {
            let at = match departure(limit, state, now, longest_wait) {
                PacketDeparture::Now => now,
                PacketDeparture::At(at) => at,
                PacketDeparture::Never => continue,
            };
            assert!(at >= now && at <= now + longest_wait);
            state = state.max(now) + limit.time_ns(bytes);
            if at < START + time {
                sent += u64::from(bytes);
            }
        }
        sent
    }

    #[test]
    fn the_rate_holds_over_time_whatever_the_packets() {
        for rate in [10_000_000, 1_000_000_000, 10_000_000_000] {
            for (burst, bytes) in [(0, 1_514), (100_000, 1_514), (1_000_000, 65_226)] {
                let limit = BandwidthLimit::new(rate, burst);
                let second = 1_000_000_000;
                let step = limit.time_ns(bytes) / 3 + 1;
                let expected = rate / 8 + burst / 8;
                for longest_wait in [0, 100_000_000, HORIZON_NS] {
                    let found = sent(&limit, longest_wait, bytes, second, step);
                    let slack = expected / 100 + u64::from(bytes);
                    assert!(found.abs_diff(expected) <= slack, "{rate} {burst} {bytes} {longest_wait}: {found}");
                }
            }
        }
    }

    #[test]
    fn a_pause_saves_no_more_than_the_burst() {
        let limit = BandwidthLimit::new(8_000_000, 80_000);
        let mut state = START;
        let later = START + 60_000_000_000;
        let mut passed = 0;
        while departure(&limit, state, later, 0) == PacketDeparture::Now {
            state = state.max(later) + limit.time_ns(1_000);
            passed += 1;
        }
        assert_eq!(passed, 11, "10,000 bytes, and the packet that is judged before it is counted");
    }

    #[test]
    fn a_packet_waits_no_longer_than_it_may() {
        let limit = BandwidthLimit::new(8_000_000, 8_000);
        let burst = limit.burst_ns();
        let departure = |late, longest_wait| departure(&limit, START + burst + late, START, longest_wait);
        for longest_wait in [0, 5, HORIZON_NS] {
            assert_eq!(departure(0, longest_wait), PacketDeparture::Now);
            assert_eq!(departure(longest_wait + 1, longest_wait), PacketDeparture::Never);
        }
        for longest_wait in [5, HORIZON_NS] {
            assert_eq!(departure(5, longest_wait), PacketDeparture::At(START + 5));
            assert_eq!(departure(longest_wait, longest_wait), PacketDeparture::At(START + longest_wait));
        }
    }
}
