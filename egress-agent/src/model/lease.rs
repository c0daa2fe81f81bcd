//! Until when this node's programs may emit egress IPs, as a word that both sides see.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use egress_common::abi::Lease;

/// The word: nanoseconds of CLOCK_BOOTTIME. In the kernel it is the map `lease`; in tests a number of their own.
///
/// One task writes it, the lease keeper (`crate::fence`).
#[derive(Clone)]
pub struct LeaseWord(Arc<dyn AsRef<AtomicU64> + Send + Sync>);

impl LeaseWord {
    pub const ENDLESS: u64 = Lease::ENDLESS.until_ns;
    pub const EXPIRED: u64 = Lease::EXPIRED.until_ns;

    pub fn new(word: impl AsRef<AtomicU64> + Send + Sync + 'static) -> Self {
        Self(Arc::new(word))
    }

    pub fn until_ns(&self) -> u64 {
        (*self.0).as_ref().load(Ordering::Relaxed)
    }

    /// One store of the whole word.
    pub fn set(&self, until_ns: u64) {
        (*self.0).as_ref().store(until_ns, Ordering::Relaxed);
    }

    /// Whether the programs may emit at this time of the same clock.
    pub fn covers(&self, now_ns: u64) -> bool {
        Lease { until_ns: self.until_ns() }.left_ns(now_ns) > 0
    }
}

/// Expired, and shared with no kernel.
impl Default for LeaseWord {
    fn default() -> Self {
        struct Own(AtomicU64);
        impl AsRef<AtomicU64> for Own {
            fn as_ref(&self) -> &AtomicU64 {
                &self.0
            }
        }
        Self::new(Own(AtomicU64::new(Self::EXPIRED)))
    }
}

impl fmt::Debug for LeaseWord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("LeaseWord").field(&self.until_ns()).finish()
    }
}
