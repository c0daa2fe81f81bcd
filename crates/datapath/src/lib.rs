//! User space's side of the kernel on one node: it loads and attaches the programs, writes their maps and watches the node.
//!
//! [`Dataplane::start`](dataplane::Dataplane::start) loads or adopts everything; the `executor` then applies the plan's actions.
//! The process may end at any time: programs, links and maps are pinned, and the next start adopts them. [`cleanup()`]
//! removes them. [`names`] names every object that outlives the process. A row imports only rows above it:
//!
//! | folder or file | content |
//! |---|---|
//! | [`names`], [`settings`], [`error`], [`clock`], [`object`], [`netlink`], [`bpffs`] | kernel objects by name, user settings, start errors, the maps' clocks, the embedded eBPF object, blocking netlink requests, the BPF file system |
//! | [`maps`] | typed map handles, whole-map reads, conversion between entries and the model |
//! | [`devices`] | interfaces, addresses and networks of the node; ports for NAT on its own address |
//! | [`attach`] | TCX links and clsact filters; foreign programs; missing devices |
//! | [`announce`] | ARP and neighbour discovery: probe, announcement, conflict detection, next-hop probes |
//! | [`overlay`], [`nftables`] | the overlay device and its probe; our nftables table, the CNI's forward rules |
//! | [`loader`] | kernel features, instance lock, pins, programs, ABI migration, state before the API server answers |
//! | [`node_state`] | what the agent knows of the node, the value of map `config`, owned addresses, netlink watch, leak guard |
//! | [`conntrack`], [`events`] | expiry, flush and idle resets of flows; sampled drops and conflicts from the programs |
//! | [`dataplane`] | start, and the handle to the running tasks |
//! | [`executor`], [`meter`], [`survey`], [`trace`], [`cleanup`](mod@cleanup) | plan actions; metrics; status; a test packet through the programs; removal |

pub mod announce;
pub mod attach;
pub mod bpffs;
pub mod cleanup;
pub mod clock;
pub mod conntrack;
pub mod dataplane;
pub mod devices;
pub mod error;
pub mod events;
pub mod executor;
pub mod loader;
pub mod maps;
pub mod meter;
pub mod names;
pub mod netlink;
pub mod networks;
pub mod nftables;
pub mod node_state;
pub mod object;
pub mod overlay;
pub mod settings;
pub mod survey;
pub mod trace;

pub use crate::cleanup::{CleanupReport, cleanup};
pub use crate::clock::boot_ns;
pub use crate::dataplane::Dataplane;
pub use crate::devices::interfaces::Interface;
pub use crate::error::StartError;
pub use crate::loader::features::{Features, probe};
pub use crate::meter::{EgressIpCount, Reader};
pub use crate::names::Attachment;
pub use crate::settings::{Quotas, Settings};
