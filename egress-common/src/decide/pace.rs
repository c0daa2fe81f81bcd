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

/// The departure of the next packet, by the state of the limit.
#[inline(always)]
pub const fn departure(limit: &BandwidthLimit, sent_ns: u64, now_ns: u64, is_shaped: bool) -> PacketDeparture {
    let ahead = sent_ns.saturating_sub(now_ns);
    let Some(late) = ahead.checked_sub(limit.burst_ns()) else { return PacketDeparture::Now };
    match late {
        0 => PacketDeparture::Now,
        _ if is_shaped && late <= HORIZON_NS => PacketDeparture::At(now_ns + late),
        _ => PacketDeparture::Never,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: u64 = 5_000_000_000;

    /// What a policy that always has another packet sends in this time (ns), with steps between its attempts.
    fn sent(limit: &BandwidthLimit, is_shaped: bool, bytes: u32, time: u64, step: u64) -> u64 {
        let (mut state, mut sent) = (0, 0);
        for now in (START..START + time).step_by(usize::try_from(step).expect("a step")) {
            let at = match departure(limit, state, now, is_shaped) {
                PacketDeparture::Now => now,
                PacketDeparture::At(at) => at,
                PacketDeparture::Never => continue,
            };
            assert!(at >= now && at <= now + HORIZON_NS);
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
                for is_shaped in [false, true] {
                    let found = sent(&limit, is_shaped, bytes, second, step);
                    let slack = expected / 100 + u64::from(bytes);
                    assert!(found.abs_diff(expected) <= slack, "{rate} {burst} {bytes} {is_shaped}: {found}");
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
        while departure(&limit, state, later, false) == PacketDeparture::Now {
            state = state.max(later) + limit.time_ns(1_000);
            passed += 1;
        }
        assert_eq!(passed, 11, "10,000 bytes, and the packet that is judged before it is counted");
    }

    #[test]
    fn a_shaped_packet_waits_until_the_horizon() {
        let limit = BandwidthLimit::new(8_000_000, 8_000);
        let burst = limit.burst_ns();
        assert_eq!(departure(&limit, START + burst, START, true), PacketDeparture::Now);
        assert_eq!(departure(&limit, START + burst + 5, START, true), PacketDeparture::At(START + 5));
        assert_eq!(departure(&limit, START + burst + 5, START, false), PacketDeparture::Never);
        assert_eq!(departure(&limit, START + burst + HORIZON_NS, START, true), PacketDeparture::At(START + HORIZON_NS));
        assert_eq!(departure(&limit, START + burst + HORIZON_NS + 1, START, true), PacketDeparture::Never);
    }
}
