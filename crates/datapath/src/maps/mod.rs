//! The maps: typed handles, reads of whole maps, and the conversion between map entries and the model.

pub mod access;
pub mod convert;
pub mod facts;
pub mod handles;
pub mod lease;
pub mod nat_entries;
pub mod port_blocks;
pub mod port_use;
pub mod prefix_sets;
pub mod sweeper;
