//! The lease of this node's programs: until when they may emit egress IPs, in memory shared with the kernel.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use egress_common::abi::Lease;

/// [`Lease`] as atomic words: the agent's lease keeper writes them, and programs record heartbeats and end a lease.
#[derive(Debug, Default)]
#[repr(C)]
pub struct LeaseCell {
    until_ns: AtomicU64,
    heartbeat_ns: AtomicU64,
    stall_ns: AtomicU64,
    looked_jiffies: AtomicU64,
}

// The value of the map element is mapped as this type.
const _: () = assert!(size_of::<LeaseCell>() == size_of::<Lease>());

/// The element of the map `lease` in the kernel; in tests a private one.
///
/// In user space only the lease keeper writes it (`crate::ownership::lease`).
#[derive(Clone)]
pub struct SharedLease(Arc<dyn AsRef<LeaseCell> + Send + Sync>);

impl SharedLease {
    pub fn new(cell: impl AsRef<LeaseCell> + Send + Sync + 'static) -> Self {
        Self(Arc::new(cell))
    }

    fn cell(&self) -> &LeaseCell {
        (*self.0).as_ref()
    }

    /// The deadline is read first because it is written last.
    pub fn read(&self) -> Lease {
        let cell = self.cell();
        let until_ns = cell.until_ns.load(Ordering::Acquire);
        let looked_jiffies = cell.looked_jiffies.load(Ordering::Relaxed);
        let (heartbeat_ns, stall_ns) = (&cell.heartbeat_ns, &cell.stall_ns);
        Lease {
            until_ns,
            heartbeat_ns: heartbeat_ns.load(Ordering::Relaxed),
            stall_ns: stall_ns.load(Ordering::Relaxed),
            looked_jiffies,
        }
    }

    /// Writes another lease; the store of the deadline comes last. Returns false if a program has ended the lease
    /// `found` since.
    pub fn renew(&self, found: Lease, lease: Lease) -> bool {
        let cell = self.cell();
        // A lease without an end needs neither field, and the lease `found` needs both until it is replaced.
        if lease.is_bounded() {
            // The heartbeat first: with the old one a shorter stall would count as a gap. A program may have recorded a
            // later one.
            cell.heartbeat_ns.fetch_max(lease.heartbeat_ns, Ordering::Release);
            cell.stall_ns.store(lease.stall_ns, Ordering::Release);
        }
        let (from, to) = (found.until_ns, lease.until_ns);
        cell.until_ns.compare_exchange(from, to, Ordering::Release, Ordering::Relaxed).is_ok()
    }

    /// Ends the lease: nothing may be emitted from now on.
    pub fn expire(&self) {
        self.cell().until_ns.store(Lease::EXPIRED.until_ns, Ordering::Release);
    }

    /// Whether the programs may emit at this time of the same clock.
    pub fn covers(&self, now_ns: u64) -> bool {
        self.read().left_ns(now_ns) > 0
    }
}

/// Expired, and not shared with a kernel.
impl Default for SharedLease {
    fn default() -> Self {
        struct Own(LeaseCell);
        impl AsRef<LeaseCell> for Own {
            fn as_ref(&self) -> &LeaseCell {
                &self.0
            }
        }
        Self::new(Own(LeaseCell::default()))
    }
}

impl fmt::Debug for SharedLease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("SharedLease").field(&self.read()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_that_a_program_has_ended_is_not_renewed() {
        let shared = SharedLease::default();
        assert!(shared.renew(shared.read(), Lease::bounded(100, 10, 20)) && shared.covers(30) && !shared.covers(31));
        let found = shared.read();
        shared.expire();
        assert!(!shared.renew(found, Lease::bounded(200, 40, 20)) && !shared.covers(40));
        assert!(shared.renew(shared.read(), Lease::bounded(200, 40, 20)) && shared.covers(60));
    }

    #[test]
    fn a_lease_without_an_end_leaves_the_heartbeat_of_the_one_before() {
        let shared = SharedLease::default();
        shared.renew(shared.read(), Lease::bounded(100, 50, 20));
        let found = shared.read();
        shared.expire();
        assert!(!shared.renew(found, Lease::ENDLESS));
        assert_eq!((shared.read().heartbeat_ns, shared.read().stall_ns), (50, 20));
    }

    #[test]
    fn a_heartbeat_does_not_go_back() {
        let shared = SharedLease::default();
        shared.renew(shared.read(), Lease::bounded(100, 50, 20));
        shared.renew(shared.read(), Lease::bounded(100, 40, 20));
        assert_eq!(shared.read().heartbeat_ns, 50);
    }
}
