//! Our clsact filters among foreign ones, and their queueing disciplines.
//!
//! - A filter is **ours** when it has the hook's name, in this or a former layout, and its program is pinned below our
//!   directory, which happens before it becomes a filter. The kernel lists filters by program number; opening a program by
//!   number takes `CAP_SYS_ADMIN`, and a pin keeps the number from being reused. Other filters are untouched; if a foreign
//!   one has our handle, ours gets another.
//! - A discipline is ours when we created it and one of our filters is on it. A marker directory below the pins records the
//!   creation. The marker alone is not enough: other software may have replaced the discipline. An agent that is killed in
//!   between leaves an empty discipline.
//! - Filters that this run does not use (`--attach=tcx`, another `--uplink`) are removed. A discipline of ours is removed in
//!   one step with its last filter, unless others use it.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use aya::maps::MapInfo;
use aya::programs::tc::{self, TcError, TcHandle};
use aya::programs::{ProgramError, ProgramInfo, SchedClassifier, TcAttachType};
use nix::net::if_::if_indextoname;

use crate::attach::filters::{self, Filter};
use crate::error::map_io;
use crate::names::{CLSACT_HANDLE, CLSACT_MARKERS, CLSACT_PRIORITY, CLSACT_PROGRAMS, Hook};

/// A map that every program uses.
pub const COMMON_MAP: &str = "counters";

/// The programs that use the maps of one version directory.
#[derive(Clone, Debug)]
pub struct ProgramSet {
    /// The map that all of them use.
    counters: Option<u32>,
    /// Programs that are or were filters.
    filters: BTreeSet<u32>,
    /// Directory of their pins.
    pins: PathBuf,
    /// Directory of discipline markers.
    markers: PathBuf,
}

/// Result of a removal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Removed {
    Nothing,
    Filter,
    /// The filter and its discipline, of which it was the last one.
    All,
}

impl ProgramSet {
    /// From the pins below this version directory. Without pins the set is empty.
    pub fn of(version: &Path) -> io::Result<Self> {
        let counters = match MapInfo::from_pin(version.join("maps").join(COMMON_MAP)).map_err(map_io) {
            Ok(info) => Some(info.id()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(error),
        };
        let pins = version.join(CLSACT_PROGRAMS);
        Ok(Self { counters, filters: numbers_in(&pins)?, pins, markers: version.join(CLSACT_MARKERS) })
    }

    /// Pins a program before it becomes a filter.
    pub fn pin_program(&self, program: &mut SchedClassifier) -> Result<(), ProgramError> {
        let path = self.pins.join(program.info()?.id().to_string());
        fs::create_dir_all(&self.pins)?;
        if path.try_exists()? { Ok(()) } else { program.pin(path).map_err(|error| io::Error::other(error).into()) }
    }

    /// Unpins programs that are no longer filters. Programs attached by this process always stay pinned, because a filter
    /// is recognised by its pin.
    pub fn unpin_unused(&self, attached: BTreeSet<u32>) -> io::Result<()> {
        let mut used = attached;
        for ifindex in filters::devices()? {
            for direction in [TcAttachType::Ingress, TcAttachType::Egress] {
                used.extend(filters::list(ifindex, direction)?.iter().filter_map(|filter| filter.program));
            }
        }
        self.filters.difference(&used).try_for_each(|number| fs::remove_file(self.pins.join(number.to_string())))
    }

    /// Whether the program uses the maps of this set.
    pub fn has_program(&self, program: &ProgramInfo) -> Result<bool, ProgramError> {
        let maps = program.map_ids()?.unwrap_or_default();
        Ok(self.counters.is_some_and(|ours| maps.contains(&ours)))
    }

    /// Whether this is our filter of the hook.
    pub fn has(&self, hook: Hook, filter: &Filter) -> bool {
        hook.names().contains(&filter.name.as_str())
            && filter.program.is_some_and(|number| self.filters.contains(&number))
    }

    /// Our filters of the hook.
    fn ours(&self, hook: Hook, ifindex: u32) -> io::Result<Vec<Filter>> {
        let there = filters::list(ifindex, hook.direction())?;
        Ok(there.into_iter().filter(|filter| self.has(hook, filter)).collect())
    }

    /// Whether any filter of ours is on the device.
    fn is_on(&self, ifindex: u32) -> io::Result<bool> {
        for hook in Hook::ALL {
            if !self.ours(hook, ifindex)?.is_empty() {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn marker(&self, ifindex: u32) -> PathBuf {
        self.markers.join(ifindex.to_string())
    }

    /// Removes the marker if none of our filters is on the discipline, which may have been replaced.
    fn check_marker(&self, ifindex: u32) -> io::Result<()> {
        if !self.marker(ifindex).try_exists()? || self.is_on(ifindex)? { Ok(()) } else { self.drop_marker(ifindex) }
    }

    fn drop_marker(&self, ifindex: u32) -> io::Result<()> {
        match fs::remove_dir(self.marker(ifindex)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }
}

/// Entries whose names are numbers; none without the directory.
fn numbers_in(directory: &Path) -> io::Result<BTreeSet<u32>> {
    match fs::read_dir(directory) {
        Ok(entries) => {
            let names = entries.map(|entry| Ok(entry?.file_name())).collect::<io::Result<Vec<_>>>()?;
            Ok(names.iter().filter_map(|name| name.to_str()?.parse().ok()).collect())
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(BTreeSet::new()),
        Err(error) => Err(error),
    }
}

/// The handle of our filter, or a free one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FilterSlot {
    Ours(TcHandle),
    Free(TcHandle),
}

pub fn find_slot(set: &ProgramSet, hook: Hook, ifindex: u32) -> io::Result<FilterSlot> {
    let of_ours = |filter: &Filter| filter.priority() == CLSACT_PRIORITY;
    if let Some(ours) = set.ours(hook, ifindex)?.into_iter().find(of_ours) {
        return Ok(FilterSlot::Ours(ours.handle.into()));
    }
    let there = filters::list(ifindex, hook.direction())?;
    let is_taken = there.iter().any(|filter| of_ours(filter) && filter.handle == u32::from(CLSACT_HANDLE));
    // Any handle works: the next agent recognises our filters by their programs.
    Ok(FilterSlot::Free(if is_taken { TcHandle::AUTO_ASSIGN } else { CLSACT_HANDLE }))
}

/// Ensures that the device has a clsact discipline.
pub fn ensure(set: &ProgramSet, device: &str, ifindex: u32) -> Result<(), TcError> {
    match tc::qdisc_add_clsact(device) {
        Ok(()) => fs::create_dir_all(set.marker(ifindex)).map_err(TcError::IoError),
        Err(TcError::NetlinkError(error)) if error.raw_os_error() == Some(libc::EEXIST) => {
            set.check_marker(ifindex).map_err(TcError::IoError)
        }
        Err(error) => Err(error),
    }
}

/// Removes our filter of the hook, if any, and with the last one the discipline.
pub fn remove_filter(set: &ProgramSet, hook: Hook, ifindex: u32) -> io::Result<Removed> {
    let ours = set.ours(hook, ifindex)?;
    if ours.is_empty() {
        return Ok(Removed::Nothing);
    }
    if is_all(&ours, hook.direction(), ifindex)? && set.marker(ifindex).try_exists()? {
        filters::remove_clsact(ifindex)?;
        set.drop_marker(ifindex)?;
        return Ok(Removed::All);
    }
    for filter in &ours {
        filters::remove(ifindex, hook.direction(), filter)?;
    }
    Ok(Removed::Filter)
}

/// Whether the device has only these filters of one side.
fn is_all(filters: &[Filter], side: TcAttachType, ifindex: u32) -> io::Result<bool> {
    for direction in [TcAttachType::Ingress, TcAttachType::Egress] {
        let known = if direction == side { filters } else { &[] };
        let is_known = |there: &Filter| known.iter().any(|one| there.comes_with(one));
        if !filters::list(ifindex, direction)?.iter().all(is_known) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Removes our filters on other devices and hooks, and their disciplines. One line each.
pub fn remove_elsewhere(set: &ProgramSet, used: &[(Hook, u32)]) -> Vec<(String, io::Result<bool>)> {
    let devices = match filters::devices() {
        Ok(devices) => devices,
        Err(error) => return vec![("clsact filters".to_owned(), Err(error))],
    };
    let mut outcomes = Vec::new();
    // `from_pod` first, the programs of the uplink last.
    for hook in Hook::ALL.into_iter().rev() {
        for ifindex in devices.iter().copied().filter(|ifindex| !used.contains(&(hook, *ifindex))) {
            let device = name_of(ifindex);
            let taken = remove_filter(set, hook, ifindex);
            if matches!(taken, Ok(Removed::All)) {
                outcomes.push((format!("clsact on {device}"), Ok(true)));
            }
            let filter = format!("filter {} on {device}", hook.name());
            outcomes.push((filter, taken.map(|taken| taken != Removed::Nothing)));
        }
    }
    outcomes
}

/// Removes markers of disciplines that are no longer ours, except on devices in use. One line each.
pub fn drop_stale_markers(set: &ProgramSet, used: &[u32]) -> Vec<(String, io::Result<bool>)> {
    let noted = match numbers_in(&set.markers) {
        Ok(noted) => noted,
        Err(error) => return vec![(set.markers.display().to_string(), Err(error))],
    };
    let indices = noted.into_iter().filter(|ifindex| !used.contains(ifindex));
    let checked = |ifindex| (format!("clsact on {}", name_of(ifindex)), set.check_marker(ifindex).map(|()| false));
    indices.map(checked).collect()
}

/// For messages.
fn name_of(ifindex: u32) -> String {
    if_indextoname(ifindex).map_or_else(|_| format!("interface {ifindex}"), |name| name.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_attached_by_this_process_stay_pinned() {
        // Program numbers that do not exist.
        let (attached, left) = (u32::MAX, u32::MAX - 1);
        let pins = std::env::temp_dir().join(format!("egress-filters-{}", std::process::id()));
        fs::create_dir_all(&pins).expect("a folder");
        for number in [attached, left] {
            fs::write(pins.join(number.to_string()), "").expect("a file");
        }
        let filters = numbers_in(&pins).expect("numbers");
        let set = ProgramSet { counters: None, filters, pins: pins.clone(), markers: pins.join("none") };
        let outcome = set.unpin_unused(BTreeSet::from([attached]));
        let stay = numbers_in(&pins);
        fs::remove_dir_all(&pins).expect("it was there");
        outcome.expect("files that can be removed");
        assert_eq!(stay.expect("numbers"), BTreeSet::from([attached]));
    }
}
