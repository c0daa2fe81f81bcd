//! Our filters among those of others, and the queueing disciplines that they need.
//!
//! - A filter is **ours** when it has the hook's name and its program counts in our map `counters`. Any other one stays
//!   what it is and where it is; where it has our handle, ours takes another.
//! - A discipline is ours when we had to make it and a filter of ours is on it: filters end with their discipline. That we
//!   made it is noted by a directory below the pins, since the kernel does not; the note alone says nothing, since the
//!   discipline that it was about may have gone, with its device or without, and another hand may have made the next one
//!   there. An agent that is killed before the first filter is there leaves an empty discipline, and none ever takes
//!   another's.
//! - What we leave (`--attach=tcx`, another `--uplink`) is taken off. A discipline of ours goes in one step with the last of
//!   its filters; where others use it by then it is theirs.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use aya::maps::MapInfo;
use aya::programs::tc::{self, TcError, TcHandle};
use aya::programs::{ProgramError, ProgramInfo, TcAttachType, loaded_programs};
use aya::sys::SyscallError;
use nix::net::if_::if_indextoname;

use super::error::map_io;
use super::filters::{self, Filter};
use super::names::{CLSACT_HANDLE, CLSACT_MARKS, CLSACT_PRIORITY, Hook};

/// Every program counts here, so it is a map of each.
pub(super) const COMMON_MAP: &str = "counters";

/// The programs that work on the maps of one version below one directory, by the number of the map that all of them have.
#[derive(Clone, Debug)]
pub(super) struct OurSet {
    counters: Option<u32>,
    /// Directory of the notes of disciplines.
    marks: PathBuf,
}

/// What was taken off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TakenOff {
    Nothing,
    Filter,
    /// The filter, and the discipline that it was the last one on.
    All,
}

impl OurSet {
    /// Of the pins below this directory of a version. Where nothing is pinned no program can be of the set.
    pub(super) fn of(version: &Path) -> io::Result<Self> {
        let counters = match MapInfo::from_pin(version.join("maps").join(COMMON_MAP)).map_err(map_io) {
            Ok(info) => Some(info.id()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(error),
        };
        Ok(Self { counters, marks: version.join(CLSACT_MARKS) })
    }

    pub(super) fn is_known(&self) -> bool {
        self.counters.is_some()
    }

    /// Whether the program works on the maps of this set.
    pub(super) fn has_program(&self, program: &ProgramInfo) -> Result<bool, ProgramError> {
        let maps = program.map_ids()?.unwrap_or_default();
        Ok(self.counters.is_some_and(|ours| maps.contains(&ours)))
    }

    /// Whether the filter is of this hook, and one of ours.
    pub(super) fn has(&self, hook: Hook, filter: &Filter) -> io::Result<bool> {
        let Some(number) = filter.program.filter(|_| self.is_known() && filter.name == hook.name()) else {
            return Ok(false);
        };
        let found = program(number).and_then(|program| program.map_or(Ok(false), |program| self.has_program(&program)));
        found.map_err(|error| io::Error::other(format!("cannot tell whose program {number} is: {error}")))
    }

    /// The filters of this hook that are ours.
    fn ours(&self, hook: Hook, ifindex: u32) -> io::Result<Vec<Filter>> {
        let there = filters::on(ifindex, hook.direction())?;
        let judged = there.into_iter().map(|filter| Ok((self.has(hook, &filter)?, filter)));
        let judged: io::Result<Vec<_>> = judged.collect();
        Ok(judged?.into_iter().filter_map(|(is_ours, filter)| is_ours.then_some(filter)).collect())
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

    /// Without a filter of ours the discipline is not the one that we had made, or nobody can say so any more.
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

/// `None` where it has ended meanwhile.
fn program(number: u32) -> Result<Option<ProgramInfo>, ProgramError> {
    for program in loaded_programs() {
        match program {
            Ok(program) if program.id() == number => return Ok(Some(program)),
            Ok(_) => {}
            Err(ProgramError::SyscallError(SyscallError { io_error, .. }))
                if io_error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    Ok(None)
}

/// Where our filter is, or may go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Seat {
    Ours(TcHandle),
    Free(TcHandle),
}

pub(super) fn seat(set: &OurSet, hook: Hook, ifindex: u32) -> io::Result<Seat> {
    let of_ours = |filter: &Filter| filter.priority() == CLSACT_PRIORITY;
    if let Some(ours) = set.ours(hook, ifindex)?.into_iter().find(of_ours) {
        return Ok(Seat::Ours(ours.handle.into()));
    }
    let there = filters::on(ifindex, hook.direction())?;
    let is_taken = there.iter().any(|filter| of_ours(filter) && filter.handle == u32::from(CLSACT_HANDLE));
    // Any handle will do: the next agent knows ours by what they are.
    Ok(Seat::Free(if is_taken { TcHandle::AUTO_ASSIGN } else { CLSACT_HANDLE }))
}

/// Makes sure that the device takes filters.
pub(super) fn ensure(set: &OurSet, device: &str, ifindex: u32) -> Result<(), TcError> {
    match tc::qdisc_add_clsact(device) {
        Ok(()) => fs::create_dir_all(set.mark(ifindex)).map_err(TcError::IoError),
        Err(TcError::NetlinkError(error)) if error.raw_os_error() == Some(libc::EEXIST) => {
            set.check_mark(ifindex).map_err(TcError::IoError)
        }
        Err(error) => Err(error),
    }
}

/// Takes our filter of this hook off, if there is one, and the discipline with the last filter of ours.
pub(super) fn take_off(set: &OurSet, hook: Hook, ifindex: u32) -> io::Result<TakenOff> {
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
pub(super) fn take_off_elsewhere(set: &OurSet, used: &[(Hook, u32)]) -> Vec<(String, io::Result<bool>)> {
    let devices = match filters::devices() {
        Ok(devices) => devices,
        Err(error) => return vec![("clsact filters".to_owned(), Err(error))],
    };
    let mut outcomes = Vec::new();
    // Steering goes first, the guard of the uplink last.
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
pub(super) fn forget_elsewhere(set: &OurSet, used: &[u32]) -> Vec<(String, io::Result<bool>)> {
    let noted = match fs::read_dir(&set.marks) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Vec::new(),
        Err(error) => return vec![(set.marks.display().to_string(), Err(error))],
    };
    let names = noted.filter_map(|entry| Some(entry.ok()?.file_name().to_str()?.to_owned()));
    let indices = names.filter_map(|name| name.parse().ok()).filter(|ifindex| !used.contains(ifindex));
    let checked = |ifindex| (format!("clsact on {}", name_of(ifindex)), set.check_mark(ifindex).map(|()| false));
    indices.map(checked).collect()
}

/// For messages.
fn name_of(ifindex: u32) -> String {
    if_indextoname(ifindex).map_or_else(|_| format!("interface {ifindex}"), |name| name.to_string_lossy().into_owned())
}
