//! The map `lease` from user space: until when this node's programs may emit egress IPs.
//!
//! Only the agent's lease keeper writes it (`egress_core::ownership::lease`); announcements, `status` and the metrics read
//! it.

use std::io;
use std::os::fd::AsFd;
use std::time::Duration;

use aya::Ebpf;
use aya::maps::Map;
use egress_common::abi::Lease;

use crate::clock::boot_ns;
use crate::error::StartError;
use crate::maps::access::MappedLease;
use crate::maps::handles;
use egress_core::model::lease::{LeaseCell, SharedLease};

/// The map, in memory.
pub fn take(ebpf: &mut Ebpf) -> Result<SharedLease, StartError> {
    let Map::Array(data) = handles::take(ebpf, "lease")? else {
        return Err(StartError::Object("map lease is no array".to_owned()));
    };
    let lease = MappedLease::of(data.fd().as_fd());
    let lease = lease.map_err(|error| StartError::kernel("map the map lease into memory", error))?;
    Ok(SharedLease::new(lease))
}

impl AsRef<LeaseCell> for MappedLease {
    fn as_ref(&self) -> &LeaseCell {
        self.get()
    }
}

/// Whether the programs may emit now; false if the clock cannot be read.
pub fn is_held(lease: &SharedLease) -> bool {
    boot_ns().is_ok_and(|now| lease.covers(now))
}

/// Remaining time of the lease; `None` without an end.
pub fn left(lease: Lease) -> io::Result<Option<Duration>> {
    let left = lease.left_ns(boot_ns()?);
    Ok((lease.until_ns != Lease::ENDLESS.until_ns).then(|| Duration::from_nanos(left)))
}
