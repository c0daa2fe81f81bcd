//! A second set of programs: ours by name, with maps that are not pinned below this `--bpffs`.
//!
//! Programs outlive their agent. An agent that was then given another directory would load maps of its own and put its
//! programs beside those of the first, which go on translating by a state that nobody keeps. What tells the two apart is
//! the programs' maps: all of them count in `counters`, and theirs is not the one that is pinned here.
//!
//! Looked for on the devices that this agent is going to use, as TCX links and as clsact filters, whichever of the two
//! this agent uses itself.

use std::io;
use std::path::{Path, PathBuf};

use aya::maps::MapInfo;
use aya::programs::{ProgramInfo, SchedClassifier, TcAttachType, loaded_programs};
use futures::TryStreamExt;
use nix::sys::statfs::{BPF_FS_MAGIC, statfs};
use rtnetlink::Handle;
use rtnetlink::packet_route::tc::{TcAttribute, TcFilterBpfOption, TcOption};

use super::Settings;
use super::error::{StartError, netlink_io};
use super::interfaces;
use super::names::{Hook, Pins};

/// Every program counts here, so it is a map of each.
const COMMON_MAP: &str = "counters";
/// How deep below a BPF file system's root another agent's directory is looked for.
const DEPTH: u32 = 4;

/// An error where a hook of ours has a program of another set.
pub(super) async fn refuse(netlink: &Handle, settings: &Settings, pins: &Pins) -> Result<(), StartError> {
    // Nothing pinned: no program can be of this set.
    let ours = MapInfo::from_pin(pins.map(COMMON_MAP)).ok().map(|info| info.id());
    for hook in Hook::ALL {
        let device = settings.device(hook.device());
        let filters = filters(netlink, hook, device)
            .await
            .map_err(|error| StartError::kernel(format!("look for filters on {device}"), error))?;
        for program in links(hook, device).into_iter().chain(filters) {
            let maps = program.map_ids().ok().flatten().unwrap_or_default();
            if !ours.is_some_and(|ours| maps.contains(&ours)) {
                let device = device.to_owned();
                let directory = elsewhere(pins).map_or("its directory".to_owned(), |path| path.display().to_string());
                return Err(StartError::ForeignPrograms { program: hook.name(), device, directory });
            }
        }
    }
    Ok(())
}

/// Programs of the hook's name that run there by TCX. A kernel without TCX, or a device that is away, has none.
fn links(hook: Hook, device: &str) -> Vec<ProgramInfo> {
    let Ok((_, programs)) = SchedClassifier::query_tcx(device, hook.direction()) else { return Vec::new() };
    programs.into_iter().filter(|program| is_named(program.name(), hook)).collect()
}

/// The kernel cuts a program's name to 15 bytes.
fn is_named(name: &[u8], hook: Hook) -> bool {
    let whole = hook.name().as_bytes();
    name == whole.get(..15).unwrap_or(whole)
}

/// Likewise by filters, whose names are not cut.
async fn filters(netlink: &Handle, hook: Hook, device: &str) -> io::Result<Vec<ProgramInfo>> {
    let Some(interface) = interfaces::interface(netlink, device).await? else { return Ok(Vec::new()) };
    let index = i32::try_from(interface.index).map_err(io::Error::other)?;
    let request = netlink.traffic_filter(index).get();
    let request = match hook.direction() {
        TcAttachType::Egress => request.egress(),
        TcAttachType::Ingress | TcAttachType::Custom(_) => request.ingress(),
    };
    let found: Vec<_> = match request.execute().try_collect().await.map_err(netlink_io) {
        // No clsact there.
        Err(error) if matches!(error.raw_os_error(), Some(libc::EINVAL | libc::ENOENT | libc::EOPNOTSUPP)) => {
            return Ok(Vec::new());
        }
        other => other?,
    };
    let ids: Vec<u32> = found.iter().filter_map(|message| program_id(&message.attributes, hook)).collect();
    if ids.is_empty() {
        return Ok(Vec::new());
    }
    // One that has gone meanwhile is no error.
    Ok(loaded_programs().filter_map(Result::ok).filter(|program| ids.contains(&program.id())).collect())
}

/// Number of the filter's program, where the filter has the hook's name.
fn program_id(attributes: &[TcAttribute], hook: Hook) -> Option<u32> {
    let options = attributes.iter().find_map(|attribute| match attribute {
        TcAttribute::Options(options) => Some(options),
        _ => None,
    })?;
    let (mut id, mut named) = (None, false);
    for option in options {
        match option {
            TcOption::Bpf(TcFilterBpfOption::ProgId(number)) => id = Some(*number),
            TcOption::Bpf(TcFilterBpfOption::ProgName(name)) => named = name == hook.name(),
            _ => {}
        }
    }
    id.filter(|_| named)
}

/// Another directory of pins on the same BPF file system, for the user's sake; `None` where none is in sight.
fn elsewhere(pins: &Pins) -> Option<PathBuf> {
    let is_bpffs = |path: &Path| statfs(path).is_ok_and(|status| status.filesystem_type() == BPF_FS_MAGIC);
    let top = pins.root().ancestors().take_while(|path| is_bpffs(path)).last()?;
    find(top, pins.root(), DEPTH)
}

/// A directory with pinned maps of ours: `<directory>/v<N>/maps/<map>`.
fn find(directory: &Path, except: &Path, depth: u32) -> Option<PathBuf> {
    let below: Vec<PathBuf> = std::fs::read_dir(directory).ok()?.filter_map(|entry| Some(entry.ok()?.path())).collect();
    let has_pins = |version: &PathBuf| version.join("maps").join(COMMON_MAP).exists();
    if directory != except && below.iter().any(has_pins) {
        return Some(directory.to_path_buf());
    }
    let depth = depth.checked_sub(1)?;
    below.iter().filter(|path| path.is_dir()).find_map(|path| find(path, except, depth))
}
