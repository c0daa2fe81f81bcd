//! Map `lease`: until when this node may emit egress IPs.

use super::abi;

/// The only element of `lease`, which the agent's lease keeper maps into its memory.
///
/// Every path that emits or claims an egress IP checks it, so that programs without an agent stop. The clock is
/// CLOCK_BOOTTIME, which includes suspended time.
///
/// The deadline covers an agent that dies on a running node. A machine that was paused for the total timeout may have
/// lost its addresses before the deadline, and its programs resume before its agent. So the lease also has a heartbeat:
/// a gap in it ends the lease, and only the agent can renew it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Lease {
    /// The deadline (ns). Zero: never written, or expired for good.
    pub until_ns: u64,
    /// When the uplink received a frame last, or the agent renewed the deadline (ns).
    pub heartbeat_ns: u64,
    /// The longest allowed gap between two heartbeats (ns): three quarters of the total timeout.
    pub stall_ns: u64,
    /// When a program last checked the heartbeat (jiffies, a clock that is cheap to read).
    pub looked_jiffies: u64,
}
abi!(Lease, 32);

impl Lease {
    /// Nothing may be emitted.
    pub const EXPIRED: Self = Self { until_ns: 0, heartbeat_ns: 0, stall_ns: 0, looked_jiffies: 0 };
    /// No other node could host this node's addresses, so a gap in the heartbeat does not matter.
    pub const ENDLESS: Self = Self { until_ns: u64::MAX, ..Self::EXPIRED };

    /// Until then, and while no gap between two heartbeats exceeds `stall_ns`.
    #[inline(always)]
    pub const fn bounded(until_ns: u64, heartbeat_ns: u64, stall_ns: u64) -> Self {
        Self { until_ns, heartbeat_ns, stall_ns, looked_jiffies: 0 }
    }

    /// Whether it has a deadline, in the future or passed.
    #[inline(always)]
    pub const fn is_bounded(self) -> bool {
        self.until_ns != Self::EXPIRED.until_ns && self.until_ns != Self::ENDLESS.until_ns
    }

    /// Whether a gap in the heartbeat has ended it.
    #[inline(always)]
    pub const fn has_stalled(self, now_ns: u64) -> bool {
        self.is_bounded() && now_ns.saturating_sub(self.heartbeat_ns) > self.stall_ns
    }

    /// Remaining time (ns); zero after expiry.
    #[inline(always)]
    pub const fn left_ns(self, now_ns: u64) -> u64 {
        if self.has_stalled(now_ns) { 0 } else { self.until_ns.saturating_sub(now_ns) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    #[test]
    fn a_gap_in_the_heartbeat_ends_a_lease_that_has_an_end() {
        let lease = Lease::bounded(40 * SECOND, 10 * SECOND, SECOND);
        assert_eq!(lease.left_ns(11 * SECOND), 29 * SECOND);
        assert_eq!(lease.left_ns(11 * SECOND + 1), 0, "the machine stood still");
        assert_eq!(lease.left_ns(9 * SECOND), 31 * SECOND, "a heartbeat that another processor has just written");
        assert_eq!(Lease { heartbeat_ns: 12 * SECOND, ..lease }.left_ns(13 * SECOND), 27 * SECOND);
        assert_eq!(Lease { heartbeat_ns: 40 * SECOND, ..lease }.left_ns(40 * SECOND), 0, "the deadline");
    }

    #[test]
    fn a_lease_without_an_end_has_no_heartbeat() {
        assert_eq!(Lease::ENDLESS.left_ns(SECOND), u64::MAX - SECOND);
        assert!(!Lease::EXPIRED.has_stalled(SECOND) && Lease::EXPIRED.left_ns(SECOND) == 0);
    }
}
