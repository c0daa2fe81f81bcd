//! Our filters among those of others, and the queueing disciplines that they need.
//!
//! - A filter is **ours** when it has the hook's name and its program counts in our map `counters`. Any other one stays
//!   what it is and where it is; where it has our handle, ours takes another.
//! - A discipline is ours when we had to make it: a directory below the pins notes that, since the kernel does not. It is
//!   made behind the discipline, so that an agent that is killed in between leaves an empty one and never takes another's.
//! - What we leave (`--attach=tcx`, another `--uplink`) is taken off, and a discipline of ours is removed when nobody's
//!   filter is on it; where others use it by then it is theirs.

use std::fs;
use std::io;
use std::path::Path;

use aya::maps::MapInfo;
use aya::programs::tc::{self, TcError, TcHandle};
use aya::programs::{TcAttachType, loaded_programs};
use nix::net::if_::if_indextoname;

use super::filters::{self, Filter};
use super::names::{CLSACT_HANDLE, CLSACT_PRIORITY, Hook, Pins};

/// Every program counts here, so it is a map of each.
pub(super) const COMMON_MAP: &str = "counters";

/// The programs that work on the maps below one directory, by the number of the map that all of them have.
#[derive(Clone, Copy, Debug)]
pub(super) struct OurSet {
    counters: Option<u32>,
}

impl OurSet {
    /// Nothing pinned: no program can be of this set.
    pub(super) fn of(pins: &Pins) -> Self {
        Self { counters: MapInfo::from_pin(pins.map(COMMON_MAP)).ok().map(|info| info.id()) }
    }

    pub(super) fn is_known(self) -> bool {
        self.counters.is_some()
    }

    pub(super) fn has_maps(self, maps: &[u32]) -> bool {
        self.counters.is_some_and(|ours| maps.contains(&ours))
    }

    /// The filter of this hook, if it is one of ours.
    pub(super) fn has(self, hook: Hook, filter: &Filter) -> bool {
        let Some(number) = filter.program.filter(|_| self.is_known() && filter.name == hook.name()) else {
            return false;
        };
        let program = loaded_programs().filter_map(Result::ok).find(|program| program.id() == number);
        let maps = program.and_then(|program| program.map_ids().ok().flatten());
        maps.is_some_and(|maps| self.has_maps(&maps))
    }
}

/// Where our filter is, or may go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Seat {
    Ours(TcHandle),
    Free(TcHandle),
}

pub(super) fn seat(set: OurSet, hook: Hook, ifindex: u32) -> io::Result<Seat> {
    let mut there = filters::on(ifindex, hook.direction())?;
    there.retain(|filter| filter.priority() == CLSACT_PRIORITY);
    if let Some(ours) = there.iter().find(|filter| set.has(hook, filter)) {
        return Ok(Seat::Ours(ours.handle.into()));
    }
    let is_taken = there.iter().any(|filter| filter.handle == u32::from(CLSACT_HANDLE));
    // Any handle will do: the next agent knows ours by what they are.
    Ok(Seat::Free(if is_taken { TcHandle::AUTO_ASSIGN } else { CLSACT_HANDLE }))
}

/// Makes sure that the device takes filters.
pub(super) fn ensure(pins: &Pins, device: &str, ifindex: u32) -> Result<(), TcError> {
    match tc::qdisc_add_clsact(device) {
        Ok(()) => fs::create_dir_all(pins.clsact(ifindex)).map_err(TcError::IoError),
        Err(TcError::NetlinkError(error)) if error.raw_os_error() == Some(libc::EEXIST) => Ok(()),
        Err(error) => Err(error),
    }
}

/// Takes our filter of this hook off, if there is one.
pub(super) fn take_off(set: OurSet, hook: Hook, ifindex: u32) -> io::Result<bool> {
    let mut removed = false;
    for filter in filters::on(ifindex, hook.direction())?.iter().filter(|filter| set.has(hook, filter)) {
        removed |= filters::remove(ifindex, hook.direction(), filter)?;
    }
    Ok(removed)
}

/// Our filters on other devices and hooks than these, one line each.
pub(super) fn take_off_elsewhere(set: OurSet, used: &[(Hook, u32)]) -> Vec<(String, io::Result<bool>)> {
    let devices = match filters::devices() {
        Ok(devices) => devices,
        Err(error) => return vec![("clsact filters".to_owned(), Err(error))],
    };
    let mut outcomes = Vec::new();
    // Steering goes first, the guard of the uplink last.
    for hook in Hook::ALL.into_iter().rev() {
        for ifindex in devices.iter().filter(|ifindex| !used.contains(&(hook, **ifindex))) {
            let what = format!("filter {} on {}", hook.name(), name_of(*ifindex));
            outcomes.push((what, take_off(set, hook, *ifindex)));
        }
    }
    outcomes
}

/// Removes the disciplines that we have made and that are used no more, but for those on devices in use; one line each.
pub(super) fn retire(marks: &Path, used: &[u32]) -> Vec<(String, io::Result<bool>)> {
    let made = match fs::read_dir(marks) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Vec::new(),
        Err(error) => return vec![(marks.display().to_string(), Err(error))],
    };
    let names = made.filter_map(|entry| Some(entry.ok()?.file_name().to_str()?.to_owned()));
    let indices = names.filter_map(|name| name.parse().ok()).filter(|ifindex| !used.contains(ifindex));
    indices.map(|ifindex| (format!("clsact on {}", name_of(ifindex)), retire_one(marks, ifindex))).collect()
}

fn retire_one(marks: &Path, ifindex: u32) -> io::Result<bool> {
    let mut is_idle = true;
    for direction in [TcAttachType::Ingress, TcAttachType::Egress] {
        is_idle &= filters::on(ifindex, direction)?.is_empty();
    }
    let removed = if is_idle { filters::remove_clsact(ifindex)? } else { false };
    fs::remove_dir(marks.join(ifindex.to_string()))?;
    Ok(removed)
}

/// For messages.
fn name_of(ifindex: u32) -> String {
    if_indextoname(ifindex).map_or_else(|_| format!("interface {ifindex}"), |name| name.to_string_lossy().into_owned())
}
