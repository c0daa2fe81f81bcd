//! Foreign programs: a second installation on our devices, whose maps are not pinned below this `--bpffs`.
//!
//! Programs outlive their agent. An agent with another directory would load its own maps and attach its programs beside the
//! former ones, which continue to translate by outdated state. Filters are recognised by our hooks' names; they have no pin
//! here. For links the kernel gives program numbers only: with `CAP_SYS_ADMIN` the program's map `counters` is compared with
//! ours; without it, as in the DaemonSet, directories with links on the same BPF file system are searched.
//!
//! The configured devices and the further egress interfaces are searched, for both TCX links and clsact filters.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use aya::programs::links::{FdLink, PinnedLink};
use aya::programs::{ProgramError, ProgramInfo, SchedClassifier};
use aya::sys::SyscallError;
use nix::net::if_::if_nametoindex;

use crate::attach::clsact::{self, ProgramSet};
use crate::attach::filters;
use crate::bpffs::is_on_bpffs;
use crate::error::StartError;
use crate::maps::access::tcx_programs;
use crate::names::{Hook, LINKS, Pins};
use crate::settings::Settings;
use egress_core::model::interface::EgressInterface;

/// Search depth for another agent's directory below a BPF file system's root.
const DEPTH: u32 = 4;

/// Fails if one of our hooks has a program of another set.
pub fn refuse(
    (settings, interfaces): (&Settings, &[EgressInterface]),
    pins: &Pins,
    others: &[PathBuf],
) -> Result<(), StartError> {
    let cannot_tell = |error| StartError::kernel("look for programs of another set", error);
    let versions = std::iter::once(pins.version()).chain(others.iter().cloned());
    let ours = versions.map(|version| ProgramSet::of(&version)).collect::<io::Result<Vec<_>>>().map_err(cannot_tell)?;
    let own = Hook::ALL.into_iter().map(|hook| (hook, settings.device(hook.device())));
    let further = interfaces.iter().filter(|one| !one.is_uplink);
    let further = further.flat_map(|one| Hook::NETDEV.map(|hook| (hook, one.name.as_str())));
    for (hook, device) in own.chain(further) {
        let has_link = has_other_link(&ours, pins, hook, device).map_err(cannot_tell)?;
        let has_filter = has_other_filter(&ours, hook, device)
            .map_err(|error| StartError::kernel(format!("look for filters on {device}"), error))?;
        if has_filter || has_link {
            let device = device.to_owned();
            let directory = elsewhere(pins).map_or("its directory".to_owned(), |path| path.display().to_string());
            return Err(StartError::ForeignPrograms { program: hook.name(), device, directory });
        }
    }
    Ok(())
}

/// A kernel without TCX, or a missing device, has none.
fn has_other_link(ours: &[ProgramSet], pins: &Pins, hook: Hook, device: &str) -> io::Result<bool> {
    match SchedClassifier::query_tcx(device, hook.direction()) {
        Ok((_, programs)) => has_other_program(ours, hook, &programs),
        Err(ProgramError::SyscallError(SyscallError { io_error, .. }))
            if io_error.kind() == io::ErrorKind::PermissionDenied =>
        {
            let there = tcx_programs(if_nametoindex(device)?, hook.direction())?;
            Ok(directories(pins).iter().flat_map(|other| linked(other, hook)).any(|one| there.contains(&one)))
        }
        Err(_) => Ok(false),
    }
}

fn has_other_program(ours: &[ProgramSet], hook: Hook, programs: &[ProgramInfo]) -> io::Result<bool> {
    for program in programs.iter().filter(|program| is_named(program.name(), hook)) {
        let known = ours.iter().map(|set| set.has_program(program)).collect::<Result<Vec<_>, _>>();
        if !known.map_err(io::Error::other)?.contains(&true) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// The programs of this hook's links that are pinned below that directory, by number.
fn linked(directory: &Path, hook: Hook) -> Vec<u32> {
    let versions = fs::read_dir(directory).into_iter().flatten().flatten();
    let links = versions.flat_map(|version| fs::read_dir(version.path().join(LINKS)).into_iter().flatten().flatten());
    let is_hooks = |path: &PathBuf| {
        let name = path.file_name().and_then(|name| name.to_str());
        name.and_then(Hook::of_link).is_some_and(|(of, _)| of == hook)
    };
    let links = links.map(|entry| entry.path()).filter(is_hooks);
    let opened = links.filter_map(|link| Some(FdLink::from(PinnedLink::from_pin(link).ok()?)));
    opened.filter_map(|link| Some(link.info().ok()?.program_id())).collect()
}

/// The kernel truncates a program's name to 15 bytes.
fn is_named(name: &[u8], hook: Hook) -> bool {
    let whole = hook.name().as_bytes();
    name == whole.get(..15).unwrap_or(whole)
}

/// The same for filters, whose names are not truncated.
fn has_other_filter(ours: &[ProgramSet], hook: Hook, device: &str) -> io::Result<bool> {
    let Ok(ifindex) = if_nametoindex(device) else { return Ok(false) };
    for filter in filters::list(ifindex, hook.direction())? {
        if filter.name == hook.name() && filter.program.is_some() && !ours.iter().any(|set| set.has(hook, &filter)) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Another directory of pins on the same BPF file system, for the message; `None` if none is found.
fn elsewhere(pins: &Pins) -> Option<PathBuf> {
    directories(pins).into_iter().next()
}

fn directories(pins: &Pins) -> Vec<PathBuf> {
    let is_bpffs = |path: &Path| is_on_bpffs(path).is_ok_and(|is_bpffs| is_bpffs);
    let mut found = Vec::new();
    if let Some(top) = pins.root().ancestors().take_while(|path| is_bpffs(path)).last() {
        find(top, pins.root(), DEPTH, &mut found);
    }
    found
}

/// Directories with pinned maps of ours: `<directory>/v<N>/maps/<map>`.
fn find(directory: &Path, except: &Path, depth: u32, found: &mut Vec<PathBuf>) {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let below: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    let has_pins = |version: &PathBuf| version.join("maps").join(clsact::COMMON_MAP).exists();
    if directory != except && below.iter().any(has_pins) {
        found.push(directory.to_path_buf());
    } else if let Some(depth) = depth.checked_sub(1) {
        below.iter().filter(|path| path.is_dir()).for_each(|path| find(path, except, depth, found));
    }
}
