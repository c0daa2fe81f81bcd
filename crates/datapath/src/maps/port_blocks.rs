//! Port blocks of a node, from the pinned map.

use std::io;
use std::path::Path;
use std::time::Duration;

use aya::maps::MapData;
use egress_common::abi::{BlockOwner, PortBlock};

use crate::clock::now_ns;
use crate::error::map_io;
use crate::maps::handles::Hash;
use crate::names::{BLOCKS_MAP, Pins};

/// A block that belongs to a pod.
#[derive(Clone, Copy, Debug)]
pub struct GivenBlock {
    pub block: PortBlock,
    pub owner: BlockOwner,
    /// Since it was given.
    pub age: Duration,
}

/// All blocks, in any order; `None` without a map.
pub fn read(bpffs: &Path) -> io::Result<Option<Vec<GivenBlock>>> {
    let pins = Pins::new(bpffs);
    if !pins.map(BLOCKS_MAP).try_exists()? {
        return Ok(None);
    }
    let map = MapData::from_pin(pins.map(BLOCKS_MAP)).map_err(map_io)?;
    let (now, mut blocks) = (now_ns()?, Vec::new());
    Hash::<PortBlock, BlockOwner>::new(map).map_err(map_io)?.for_each(|block, owner| {
        let age = Duration::from_nanos(now.saturating_sub(owner.given_ns));
        blocks.push(GivenBlock { block: *block, owner: *owner, age });
    })?;
    Ok(Some(blocks))
}
