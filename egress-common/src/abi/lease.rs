//! Map `lease`: until when this node may emit egress IPs.

use super::abi;

/// The only element of `lease`, which the agent's lease keeper maps into its memory and renews by one atomic store.
///
/// Every path that emits or claims an egress IP asks it, so programs whose agent is gone fall silent by themselves. The clock is
/// CLOCK_BOOTTIME, which counts the time that the machine was suspended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Lease {
    /// CLOCK_BOOTTIME (ns). Zero: never written, or expired and not to revive by itself.
    pub until_ns: u64,
}
abi!(Lease, 8);

impl Lease {
    /// Nothing may be emitted.
    pub const EXPIRED: Self = Self { until_ns: 0 };
    /// No other node could host the addresses of this one.
    pub const ENDLESS: Self = Self { until_ns: u64::MAX };

    /// How long it lasts from now on (ns); zero once it has expired.
    #[inline(always)]
    pub const fn left_ns(self, now_ns: u64) -> u64 {
        self.until_ns.saturating_sub(now_ns)
    }
}
