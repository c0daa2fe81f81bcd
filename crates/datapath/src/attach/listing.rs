//! Lists what is attached to our hooks, without `CAP_SYS_ADMIN`: a link by its pin, a filter by its device.

use std::fs;
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::time::SystemTime;

use aya::maps::{Array, Map, MapData};
use egress_common::abi::Config;

use crate::attach::clsact::ProgramSet;
use crate::attach::filters::{self, Filter};
use crate::error::map_io;
use crate::maps::access;
use crate::names::Attachment;
use crate::names::{AttachPoint, Device, Hook, LINKS, Pins};

/// A program on its hook.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AttachedProgram {
    pub attachment: Attachment,
    pub ifindex: u32,
    pub program: u32,
    /// The kernel's hash of the program's instructions.
    pub tag: Option<u64>,
    /// Since when the hook has had our program; unknown for filters.
    pub since: Option<SystemTime>,
}

/// `None` if none of our programs runs on the hook.
pub fn attached(pins: &Pins, config: &Config, hook: Hook) -> io::Result<Option<AttachedProgram>> {
    match by_link(&pins.link(hook))? {
        None => by_filter(config, hook),
        some => Ok(some),
    }
}

/// The device of the hook.
pub const fn ifindex(config: &Config, hook: Hook) -> u32 {
    match hook.device() {
        Device::Mgmt => config.mgmt_ifindex,
        Device::Uplink => config.uplink_ifindex,
        Device::Overlay => config.overlay_ifindex,
    }
}

/// What is attached to further egress interfaces.
pub fn on_further(pins: &Pins, config: &Config) -> io::Result<Vec<(Hook, AttachedProgram)>> {
    let mut found = Vec::new();
    for place in further_links(pins)? {
        found.extend(by_link(&pins.link_of(place))?.map(|attached| (place.hook, attached)));
    }
    let set = ProgramSet::of(&pins.version())?;
    for ifindex in filters::devices()?.into_iter().filter(|ifindex| *ifindex != config.uplink_ifindex) {
        for hook in Hook::NETDEV {
            let there = filters::list(ifindex, hook.direction())?;
            let ours = there.iter().find(|filter| set.has(hook, filter));
            found.extend(ours.and_then(|filter| Some((hook, of_filter(ifindex, filter)?))));
        }
    }
    Ok(found)
}

/// The places of the pinned links on further egress interfaces.
pub fn further_links(pins: &Pins) -> io::Result<Vec<AttachPoint>> {
    let mut places = Vec::new();
    for entry in fs::read_dir(pins.links())? {
        let name = entry?.file_name();
        if let Some((hook, Some(ifindex))) = name.to_str().and_then(Hook::of_link) {
            places.push(AttachPoint { hook, ifindex, is_further: true });
        }
    }
    places.sort();
    Ok(places)
}

/// The device of a pinned link; `None` without a link, or if its device was removed.
pub fn linked(path: &Path) -> io::Result<Option<u32>> {
    Ok(by_link(path)?.map(|linked| linked.ifindex))
}

/// The hook's own device at which a program of this version directory runs, of any layout.
pub fn device_of(version: &Path, hook: Hook) -> io::Result<Option<u32>> {
    for name in hook.names() {
        if let Some(ifindex) = linked(&version.join(LINKS).join(name))? {
            return Ok(Some(ifindex));
        }
    }
    let set = ProgramSet::of(version)?;
    // This layout has the same filters on further egress interfaces.
    let devices = match current_config(version)? {
        Some(config) => vec![ifindex(&config, hook)],
        None => filters::devices()?,
    };
    for ifindex in devices {
        if filters::list(ifindex, hook.direction())?.iter().any(|filter| set.has(hook, filter)) {
            return Ok(Some(ifindex));
        }
    }
    Ok(None)
}

/// The configuration of the programs, if the directory is of this layout.
fn current_config(version: &Path) -> io::Result<Option<Config>> {
    let (path, name) = (version.join("maps/config"), version.file_name().and_then(|name| name.to_str()));
    let is_current = name.and_then(|name| name.split('-').next()) == Some(Pins::version_name().as_str());
    if !is_current || !path.try_exists()? {
        return Ok(None);
    }
    let config = Array::<MapData, Config>::try_from(Map::Array(MapData::from_pin(path).map_err(map_io)?));
    config.map_err(map_io)?.get(&0, 0).map_err(map_io).map(Some)
}

fn by_link(path: &Path) -> io::Result<Option<AttachedProgram>> {
    if !path.try_exists()? {
        return Ok(None);
    }
    let since = fs::metadata(path)?.modified().ok();
    let link = access::open_pin(path)?;
    let text = fs::read_to_string(format!("/proc/self/fdinfo/{}", link.as_raw_fd()))?;
    Ok(parse(&text).map(|(ifindex, program, tag)| AttachedProgram {
        attachment: Attachment::Tcx,
        ifindex,
        program,
        tag,
        since,
    }))
}

/// Parses the kernel's information about a link: device, program and tag. `None` if the device was removed.
fn parse(text: &str) -> Option<(u32, u32, Option<u64>)> {
    let field = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        line.map(str::trim)
    };
    let ifindex = field("ifindex")?.parse().ok().filter(|index| *index != 0)?;
    let program = field("prog_id")?.parse().ok()?;
    Some((ifindex, program, field("prog_tag").and_then(|tag| u64::from_str_radix(tag, 16).ok())))
}

fn by_filter(config: &Config, hook: Hook) -> io::Result<Option<AttachedProgram>> {
    let ifindex = ifindex(config, hook);
    let found = filters::list(ifindex, hook.direction())?;
    let ours = found.into_iter().find(|filter| filter.name == hook.name() && filter.program.is_some());
    Ok(ours.and_then(|filter| of_filter(ifindex, &filter)))
}

fn of_filter(ifindex: u32, filter: &Filter) -> Option<AttachedProgram> {
    Some(AttachedProgram {
        attachment: Attachment::Clsact,
        ifindex,
        program: filter.program?,
        tag: filter.tag,
        since: None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_link_information_of_the_kernel_is_parsed() {
        let text = "pos:\t0\nflags:\t02000002\nlink_type:\ttcx\nlink_id:\t7\nprog_tag:\t00ff5a0cc3d8d6b1\nprog_id:\t42\n\
                    ifindex:\t12\nattach_type:\t46 (tcx_ingress)\n";
        assert_eq!(parse(text), Some((12, 42, Some(0x00ff_5a0c_c3d8_d6b1))));
        assert_eq!(parse(&text.replace("ifindex:\t12", "ifindex:\t0")), None, "its device is gone");
        assert_eq!(parse("pos:\t0\n"), None);
    }
}
