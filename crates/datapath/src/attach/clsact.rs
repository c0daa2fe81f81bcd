//! Our clsact filters among those of others, and their queueing disciplines.
//!
//! - A filter is **ours** when it has the hook's name, in this or a former layout, and its program is pinned below our
//!   directory, which happens before it becomes a filter. The kernel lists filters by program number; opening a program by
//!   number takes `CAP_SYS_ADMIN`, and a pin keeps the number from being reused. Other filters are untouched; where one has our
//!   handle, ours takes another.
//! - A discipline is ours when we created it and one of our filters is on it. A directory below the pins notes the creation.
//!   The note alone proves nothing: other software may have replaced the discipline. An agent killed in between leaves an empty
//!   one.
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
use crate::names::{CLSACT_HANDLE, CLSACT_MARKS, CLSACT_PRIORITY, CLSACT_PROGRAMS, Hook};

/// Every program counts here, so it is a map of each.
pub const COMMON_MAP: &str = "counters";

/// The programs that work on the maps of one version below one directory.
#[derive(Clone, Debug)]
pub struct OurSet {
    /// The map that all of them have.
    counters: Option<u32>,
    /// Those that are, or were, filters.
    filters: BTreeSet<u32>,
    /// Directory of their pins.
    pins: PathBuf,
    /// Directory of the notes of disciplines.
    marks: PathBuf,
}

/// What was taken off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TakenOff {
    Nothing,
    Filter,
    /// The filter, and the discipline that it was the last one on.
    All,
}

impl OurSet {
    /// Of the pins below this directory of a version. Where nothing is pinned no program can be of the set.
    pub fn of(version: &Path) -> io::Result<Self> {
        let counters = match MapInfo::from_pin(version.join("maps").join(COMMON_MAP)).map_err(map_io) {
            Ok(info) => Some(info.id()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(error),
        };
        let pins = version.join(CLSACT_PROGRAMS);
        Ok(Self { counters, filters: numbers_in(&pins)?, pins, marks: version.join(CLSACT_MARKS) })
    }

    /// Pins a program that is about to become a filter. Others may be pinned as long as they are filters somewhere.
    pub fn pin_program(&self, program: &mut SchedClassifier) -> Result<(), ProgramError> {
        let path = self.pins.join(program.info()?.id().to_string());
        fs::create_dir_all(&self.pins)?;
        if path.try_exists()? { Ok(()) } else { program.pin(path).map_err(|error| io::Error::other(error).into()) }
    }

    /// Unpins programs that are no filters any more. Those attached by this process stay pinned in any case: without its pin a
    /// filter cannot be recognised as ours.
    pub fn unpin_unused(&self, attached: BTreeSet<u32>) -> io::Result<()> {
        let mut used = attached;
        for ifindex in filters::devices()? {
            for direction in [TcAttachType::Ingress, TcAttachType::Egress] {
                used.extend(filters::on(ifindex, direction)?.iter().filter_map(|filter| filter.program));
            }
        }
        self.filters.difference(&used).try_for_each(|number| fs::remove_file(self.pins.join(number.to_string())))
    }

    /// Whether the program works on the maps of this set.
    pub fn has_program(&self, program: &ProgramInfo) -> Result<bool, ProgramError> {
        let maps = program.map_ids()?.unwrap_or_default();
        Ok(self.counters.is_some_and(|ours| maps.contains(&ours)))
    }

    /// Whether the filter is of this hook, and one of ours.
    pub fn has(&self, hook: Hook, filter: &Filter) -> bool {
        hook.names().contains(&filter.name.as_str())
            && filter.program.is_some_and(|number| self.filters.contains(&number))
    }

    /// The filters of this hook that are ours.
    fn ours(&self, hook: Hook, ifindex: u32) -> io::Result<Vec<Filter>> {
        let there = filters::on(ifindex, hook.direction())?;
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

    fn mark(&self, ifindex: u32) -> PathBuf {
        self.marks.join(ifindex.to_string())
    }

    /// Without one of our filters the discipline may not be the one that we created.
    fn check_mark(&self, ifindex: u32) -> io::Result<()> {
        if !self.mark(ifindex).try_exists()? || self.is_on(ifindex)? { Ok(()) } else { self.forget(ifindex) }
    }

    fn forget(&self, ifindex: u32) -> io::Result<()> {
        match fs::remove_dir(self.mark(ifindex)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }
}

/// The names that are numbers; none where there is no such directory.
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

/// Where our filter is, or may go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FilterSlot {
    Ours(TcHandle),
    Free(TcHandle),
}

pub fn find_slot(set: &OurSet, hook: Hook, ifindex: u32) -> io::Result<FilterSlot> {
    let of_ours = |filter: &Filter| filter.priority() == CLSACT_PRIORITY;
    if let Some(ours) = set.ours(hook, ifindex)?.into_iter().find(of_ours) {
        return Ok(FilterSlot::Ours(ours.handle.into()));
    }
    let there = filters::on(ifindex, hook.direction())?;
    let is_taken = there.iter().any(|filter| of_ours(filter) && filter.handle == u32::from(CLSACT_HANDLE));
    // Any handle will do: the next agent knows ours by what they are.
    Ok(FilterSlot::Free(if is_taken { TcHandle::AUTO_ASSIGN } else { CLSACT_HANDLE }))
}

/// Makes sure that the device takes filters.
pub fn ensure(set: &OurSet, device: &str, ifindex: u32) -> Result<(), TcError> {
    match tc::qdisc_add_clsact(device) {
        Ok(()) => fs::create_dir_all(set.mark(ifindex)).map_err(TcError::IoError),
        Err(TcError::NetlinkError(error)) if error.raw_os_error() == Some(libc::EEXIST) => {
            set.check_mark(ifindex).map_err(TcError::IoError)
        }
        Err(error) => Err(error),
    }
}

/// Takes our filter of this hook off, if there is one, and the discipline with the last filter of ours.
pub fn take_off(set: &OurSet, hook: Hook, ifindex: u32) -> io::Result<TakenOff> {
    let ours = set.ours(hook, ifindex)?;
    if ours.is_empty() {
        return Ok(TakenOff::Nothing);
    }
    if is_all(&ours, hook.direction(), ifindex)? && set.mark(ifindex).try_exists()? {
        filters::remove_clsact(ifindex)?;
        set.forget(ifindex)?;
        return Ok(TakenOff::All);
    }
    for filter in &ours {
        filters::remove(ifindex, hook.direction(), filter)?;
    }
    Ok(TakenOff::Filter)
}

/// Whether these filters of one side are all that the device has on both.
fn is_all(filters: &[Filter], side: TcAttachType, ifindex: u32) -> io::Result<bool> {
    for direction in [TcAttachType::Ingress, TcAttachType::Egress] {
        let known = if direction == side { filters } else { &[] };
        let is_known = |there: &Filter| known.iter().any(|one| there.comes_with(one));
        if !filters::on(ifindex, direction)?.iter().all(is_known) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Our filters on other devices and hooks than these, and what was made for them, one line each.
pub fn take_off_elsewhere(set: &OurSet, used: &[(Hook, u32)]) -> Vec<(String, io::Result<bool>)> {
    let devices = match filters::devices() {
        Ok(devices) => devices,
        Err(error) => return vec![("clsact filters".to_owned(), Err(error))],
    };
    let mut outcomes = Vec::new();
    // `from_pod` first, the programs of the uplink last.
    for hook in Hook::ALL.into_iter().rev() {
        for ifindex in devices.iter().copied().filter(|ifindex| !used.contains(&(hook, *ifindex))) {
            let device = name_of(ifindex);
            let taken = take_off(set, hook, ifindex);
            if matches!(taken, Ok(TakenOff::All)) {
                outcomes.push((format!("clsact on {device}"), Ok(true)));
            }
            let filter = format!("filter {} on {device}", hook.name());
            outcomes.push((filter, taken.map(|taken| taken != TakenOff::Nothing)));
        }
    }
    outcomes
}

/// Forgets the disciplines that are not ours any more, but for those on devices in use. One line for each.
pub fn forget_elsewhere(set: &OurSet, used: &[u32]) -> Vec<(String, io::Result<bool>)> {
    let noted = match numbers_in(&set.marks) {
        Ok(noted) => noted,
        Err(error) => return vec![(set.marks.display().to_string(), Err(error))],
    };
    let indices = noted.into_iter().filter(|ifindex| !used.contains(ifindex));
    let checked = |ifindex| (format!("clsact on {}", name_of(ifindex)), set.check_mark(ifindex).map(|()| false));
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
        // Numbers that no program of this machine has reached.
        let (attached, left) = (u32::MAX, u32::MAX - 1);
        let pins = std::env::temp_dir().join(format!("egress-filters-{}", std::process::id()));
        fs::create_dir_all(&pins).expect("a folder");
        for number in [attached, left] {
            fs::write(pins.join(number.to_string()), "").expect("a file");
        }
        let filters = numbers_in(&pins).expect("numbers");
        let set = OurSet { counters: None, filters, pins: pins.clone(), marks: pins.join("none") };
        let outcome = set.unpin_unused(BTreeSet::from([attached]));
        let stay = numbers_in(&pins);
        fs::remove_dir_all(&pins).expect("it was there");
        outcome.expect("files that can be removed");
        assert_eq!(stay.expect("numbers"), BTreeSet::from([attached]));
    }
}
