//! The bandwidth limit of an egress policy, part of the map `policy`; and the map `pacing`, its state on this node.

use super::abi;

/// A bandwidth limit. Zero is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(C)]
pub struct BandwidthLimit {
    /// Thousands of bits per second, of frames with their link headers.
    kilobits_per_second: u32,
    /// How long (µs) the policy may send faster after a pause, in time at the rate: the burst divided by the rate.
    burst_us: u32,
}
abi!(BandwidthLimit, 8);

impl BandwidthLimit {
    pub const NONE: Self = Self { kilobits_per_second: 0, burst_us: 0 };

    /// A limit in bits per second, which is rounded down to thousands but never to none, and bits of a burst. Both are limited
    /// to what the fields take: 4 Tbit/s, and 71 minutes at the rate.
    pub fn new(bits_per_second: u64, burst_bits: u64) -> Self {
        let rate = (bits_per_second / 1_000).clamp(1, u32::MAX.into());
        let burst = u128::from(burst_bits) * 1_000 / u128::from(rate);
        let number = |value: u128| u32::try_from(value).unwrap_or(u32::MAX);
        Self { kilobits_per_second: number(rate.into()), burst_us: number(burst) }
    }

    #[inline(always)]
    pub const fn is_none(&self) -> bool {
        self.kilobits_per_second == 0
    }

    pub const fn kilobits_per_second(&self) -> u32 {
        self.kilobits_per_second
    }

    pub const fn burst_us(&self) -> u32 {
        self.burst_us
    }

    /// How long (ns) the rate takes to send these bytes; nothing without a limit.
    #[inline(always)]
    pub const fn time_ns(&self, bytes: u32) -> u64 {
        match (bytes as u64 * 8_000_000).checked_div(self.kilobits_per_second as u64) {
            Some(time) => time,
            None => 0,
        }
    }

    #[inline(always)]
    pub const fn burst_ns(&self) -> u64 {
        self.burst_us as u64 * 1_000
    }
}

/// Value of `pacing`; the key is the egress ID.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Pacing {
    /// CLOCK_MONOTONIC (ns) at which the rate would have sent all packets so far; the past for a policy that has paused.
    pub sent_ns: u64,
}
abi!(Pacing, 8);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_is_never_rounded_to_none() {
        assert!(BandwidthLimit::NONE.is_none());
        for (bits, expected) in [(0, 1), (999, 1), (1_999, 1), (10_000_000, 10_000), (u64::MAX, u32::MAX)] {
            let limit = BandwidthLimit::new(bits, 0);
            assert!(!limit.is_none(), "{bits}");
            assert_eq!(limit.kilobits_per_second(), expected, "{bits}");
        }
    }

    #[test]
    fn a_burst_is_time_at_the_rate() {
        assert_eq!(BandwidthLimit::new(10_000_000, 1_000_000).burst_us(), 100_000);
        assert_eq!(BandwidthLimit::new(10_000_000_000, 1_000_000).burst_us(), 100);
        assert_eq!(BandwidthLimit::new(1, u64::MAX).burst_us(), u32::MAX);
    }

    #[test]
    fn bytes_take_their_time() {
        let cases = [(10_000_000, 1_250, 1_000_000), (1_000_000_000, 1_500, 12_000), (10_000_000_000, 65_536, 52_428)];
        for (rate, bytes, expected) in cases {
            assert_eq!(BandwidthLimit::new(rate, 0).time_ns(bytes), expected, "{bytes} bytes at {rate} bit/s");
        }
        assert_eq!(BandwidthLimit::NONE.time_ns(1_500), 0);
    }
}
