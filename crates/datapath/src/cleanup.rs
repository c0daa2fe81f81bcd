//! Removes all kernel objects of the data plane from this node.
//!
//! It refuses to run beside an agent, which would restore them. Errors are collected and the removal continues. `from_pod`
//! is removed first, the guard of the uplink last, so that no selected pod's packet leaves with the pod's address in
//! between.
//!
//! The pins show which agent owns a filter. They stay until their filter is removed.

use std::fs;
use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use aya::maps::MapData;
use egress_common::abi::{Addr, OwnedAddr};
use nix::net::if_::if_nametoindex;
use tokio::task::JoinSet;

use crate::attach::clsact::{self, ProgramSet};
use crate::attach::filters;
use crate::devices::vlans;
use crate::error::{StartError, map_io};
use crate::loader::lock::InstanceLock;
use crate::maps::handles::Hash;
use crate::names::{CLSACT_PROGRAMS, Hook, LINKS, NFT_NETWORKS, NFT_TABLE, OVERLAY_DEVICE, Pins, VLAN_DEVICE};
use crate::networks;
use crate::nftables::Nft;
use crate::settings::Settings;
use crate::{announce, overlay};

/// Removed objects and failures, one line each.
#[derive(Debug, Default)]
pub struct CleanupReport {
    pub removed: Vec<String>,
    pub problems: Vec<String>,
}

impl CleanupReport {
    fn note(&mut self, what: &str, outcome: io::Result<bool>) {
        match outcome {
            Ok(true) => self.removed.push(what.to_owned()),
            Ok(false) => {}
            Err(error) => self.problems.push(format!("{what}: {error}")),
        }
    }
}

/// Removes links, pins, filters, the overlay device, its rules, and multicast filters. An error only if an agent is
/// running.
pub async fn cleanup(settings: &Settings) -> Result<CleanupReport, StartError> {
    let pins = Pins::new(&settings.bpffs);
    let mut report = CleanupReport::default();
    // Taking the lock creates the directory, so a new one gets no line.
    let was_there = pins.root().exists();
    let lock = match InstanceLock::take(&pins) {
        Ok(lock) => Some(lock),
        Err(busy @ StartError::Busy { .. }) => return Err(busy),
        // Without the file system there are no pins, but perhaps other objects.
        Err(StartError::NotBpffs { .. }) => None,
        Err(error) => {
            report.problems.push(error.to_string());
            None
        }
    };
    let owned = owned_addresses(&pins).unwrap_or_else(|error| {
        report.problems.push(format!("multicast filters of owned addresses: {error}"));
        Vec::new()
    });
    let mut tasks = JoinSet::new();
    let connected = rtnetlink::new_connection();
    let (connection, netlink, _) = connected.map_err(|error| StartError::kernel("open a netlink socket", error))?;
    // Ends with the cleanup.
    tasks.spawn(connection);
    let needed = remove_filters(settings, &pins, &mut report);
    if lock.is_some() {
        remove_pins(&pins, was_there, &needed, &mut report);
    }
    for (ifindex, address) in owned {
        announce::remove_filter_at(ifindex, address);
    }
    report.note(&format!("device {OVERLAY_DEVICE}"), overlay::remove(&netlink).await);
    report.note(&format!("VLAN devices {VLAN_DEVICE}NUMBER"), vlans::remove_all(&netlink).await);
    report.note(&format!("nftables table {NFT_TABLE}"), Nft::default().remove());
    report.note(&format!("nftables table {NFT_NETWORKS}, and rules of routing"), networks::remove());
    Ok(report)
}

/// Egress IPs of this node that it answers for, and their devices, for the multicast filters.
fn owned_addresses(pins: &Pins) -> io::Result<Vec<(u32, IpAddr)>> {
    let path = pins.map("owned_addr");
    let mut addresses = Vec::new();
    if path.exists() {
        let data = MapData::from_pin(path).map_err(map_io)?;
        let owned = Hash::<Addr, OwnedAddr>::new(data).map_err(map_io)?;
        owned.for_each(|address, entry| {
            addresses.extend((!entry.is_shared()).then_some((entry.ifindex, address.to_ip())));
        })?;
    }
    Ok(addresses)
}

/// Removes links of every layout version, then everything else below the directory except versions that are still needed,
/// then the directory.
fn remove_pins(pins: &Pins, was_there: bool, needed: &[PathBuf], report: &mut CleanupReport) {
    let versions = match children(pins.root()) {
        Ok(versions) => versions,
        Err(error) => return report.problems.push(format!("{}: {error}", pins.root().display())),
    };
    for version in versions {
        for link in links(&version) {
            report.note(&format!("link {}", link.display()), absent_is_false(fs::remove_file(&link)));
        }
        if !needed.contains(&version) {
            remove_tree(&version, report);
        }
    }
    if needed.is_empty() {
        let removed = absent_is_false(fs::remove_dir(pins.root())).map(|removed| removed && was_there);
        report.note(&format!("directory {}", pins.root().display()), removed);
    }
}

/// The links of a version, in the order of their removal.
fn links(version: &Path) -> Vec<PathBuf> {
    // A directory that cannot be read is reported with the tree.
    let entries = children(&version.join(LINKS)).unwrap_or_default();
    let hook_of = |path: &PathBuf| path.file_name().and_then(|name| name.to_str()).and_then(Hook::of_link);
    let mut links: Vec<_> = entries.into_iter().filter_map(|path| Some((hook_of(&path)?, path))).collect();
    // `from_pod` first, the guard of the uplink last.
    let place = |hook: Hook| Hook::ALL.into_iter().position(|other| other == hook);
    links.sort_by_key(|((hook, ifindex), _)| (std::cmp::Reverse(place(*hook)), ifindex.is_none(), *ifindex));
    links.into_iter().map(|(_, path)| path).collect()
}

fn remove_tree(path: &Path, report: &mut CleanupReport) {
    let shown = path.display().to_string();
    if !path.is_dir() {
        return report.note(&format!("pin {shown}"), absent_is_false(fs::remove_file(path)));
    }
    match children(path) {
        Ok(children) => children.iter().for_each(|child| remove_tree(child, report)),
        Err(error) => report.problems.push(format!("{shown}: {error}")),
    }
    report.note(&format!("directory {shown}"), absent_is_false(fs::remove_dir(path)));
}

fn children(path: &Path) -> io::Result<Vec<PathBuf>> {
    fs::read_dir(path)?.map(|entry| Ok(entry?.path())).collect()
}

fn absent_is_false(outcome: io::Result<()>) -> io::Result<bool> {
    match outcome {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// Removes our filters on all devices, and their disciplines. Returns the versions whose pins still identify filters.
/// Without identifying pins, removes filters with our names on this node's devices.
fn remove_filters(settings: &Settings, pins: &Pins, report: &mut CleanupReport) -> Vec<PathBuf> {
    let versions = children(pins.root()).unwrap_or_default();
    let mut needed = Vec::new();
    let mut are_identified = false;
    for version in versions.into_iter().filter(|version| version.is_dir()) {
        let before = report.problems.len();
        are_identified |= identifies_filters(&version);
        match ProgramSet::of(&version) {
            Ok(set) => {
                for (what, outcome) in clsact::remove_elsewhere(&set, &[]) {
                    report.note(&what, outcome);
                }
            }
            Err(error) => report.problems.push(format!("filters of {}: {error}", version.display())),
        }
        if report.problems.len() > before {
            needed.push(version);
        }
    }
    if !are_identified {
        remove_named(settings, report);
    }
    needed
}

/// Whether a version has pins that identify its filters. A version with maps only comes from an early agent that did not
/// pin filter programs, or one that attached nothing.
fn identifies_filters(version: &Path) -> bool {
    // An unreadable directory may have some.
    let is_empty = |name: &str| match fs::read_dir(version.join(name)) {
        Ok(mut entries) => entries.next().is_none(),
        Err(error) => error.kind() == io::ErrorKind::NotFound,
    };
    !is_empty(CLSACT_PROGRAMS) || !is_empty(LINKS)
}

fn remove_named(settings: &Settings, report: &mut CleanupReport) {
    for hook in Hook::ALL.into_iter().rev() {
        let device = settings.device(hook.device());
        let Ok(ifindex) = if_nametoindex(device) else { continue };
        let named = filters::list(ifindex, hook.direction()).map(|mut there| {
            there.retain(|filter| hook.names().contains(&filter.name.as_str()));
            there
        });
        let removed = named.and_then(|named| {
            named.iter().try_fold(false, |any, filter| Ok(filters::remove(ifindex, hook.direction(), filter)? || any))
        });
        report.note(&format!("filter {} on {device}", hook.name()), removed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A directory with the layout of pins, on any file system.
    fn laid_out(name: &str, files: &[&str]) -> PathBuf {
        let root = std::env::temp_dir().join(format!("egress-cleanup-{name}-{}", std::process::id()));
        for file in files.iter().map(|file| root.join(file)) {
            fs::create_dir_all(file.parent().expect("a folder")).expect("a folder");
            fs::write(file, "").expect("a file");
        }
        root
    }

    #[test]
    fn pins_that_identify_a_filter_stay_while_the_filter_exists() {
        let root = laid_out("needed", &["v5/maps/counters", "v5/filters/7", "v5/links/from_pod", "v3/maps/counters"]);
        let (pins, mut report) = (Pins::new(&root), CleanupReport::default());
        remove_pins(&pins, true, &[root.join("v5")], &mut report);
        assert_eq!(report.problems, Vec::<String>::new(), "what is kept is no problem of its own");
        for (file, stays) in
            [("v5/maps/counters", true), ("v5/filters/7", true), ("v5/links/from_pod", false), ("v3", false)]
        {
            assert_eq!(root.join(file).exists(), stays, "{file}");
        }
        remove_pins(&pins, true, &[], &mut report);
        assert!(report.problems.is_empty() && !root.exists(), "{report:?}");
    }

    #[test]
    fn maps_alone_do_not_identify_filters() {
        for (file, wanted) in [("maps/counters", false), ("filters/7", true), ("links/from_pod", true)] {
            let root = laid_out("identifies_filters", &[file]);
            let identified = identifies_filters(&root);
            fs::remove_dir_all(&root).expect("it was there");
            assert_eq!(identified, wanted, "{file}");
        }
    }
}
