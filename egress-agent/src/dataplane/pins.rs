//! The pinned maps of an earlier run: reused when they have the shape that the object asks for, refused otherwise.
//!
//! The loader reuses whatever it finds at a pin, so the shapes are compared before it runs. Nothing is replaced: a map
//! of another shape may carry running traffic, and its programs go on working without us.

use std::fmt;
use std::fs;
use std::io;
use std::path::Path;

use aya::maps::MapInfo;
use aya::sys::SyscallError;
use aya_obj::Object;

use super::Settings;
use super::error::StartError;
use super::names::{PINNED_MAPS, Pins, READ_MAPS};

/// What two maps must share so that one can stand in for the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Shape {
    /// The kernel's number of the map type.
    kind: u32,
    key_size: u32,
    value_size: u32,
    max_entries: u32,
    flags: u32,
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, key_size, value_size, max_entries, flags } = self;
        write!(f, "type {kind}, key {key_size} B, value {value_size} B, {max_entries} entries, flags {flags:#x}")
    }
}

/// Makes the directories of this layout.
pub(super) fn make(pins: &Pins) -> Result<(), StartError> {
    for directory in [pins.maps(), pins.links()] {
        fs::create_dir_all(&directory)
            .map_err(|error| StartError::kernel(format!("make {}", directory.display()), error))?;
    }
    Ok(())
}

/// Compares what is pinned with what the object defines and the settings ask for. Other layouts: see `succession`.
pub(super) fn check(pins: &Pins, settings: &Settings) -> Result<(), StartError> {
    let object = parse(&settings.object)?;
    for name in PINNED_MAPS {
        compare(pins, &object, name, settings.map_size(name))?;
    }
    Ok(())
}

/// Likewise for maps that are only read, all of which must be there: the loader would make those that are not.
pub(super) fn check_read(pins: &Pins, object: &[u8]) -> Result<(), StartError> {
    let object = parse(object)?;
    for name in READ_MAPS {
        if !compare(pins, &object, name, None)? {
            let (path, found) = (pins.map(name), "nothing".to_owned());
            return Err(StartError::ForeignMap { path, found, wanted: "a map".to_owned() });
        }
    }
    Ok(())
}

fn parse(object: &[u8]) -> Result<Object, StartError> {
    Object::parse(object).map_err(|error| StartError::Object(error.to_string()))
}

/// Whether there is such a pin. `size` where that is not what the object says.
fn compare(pins: &Pins, object: &Object, name: &'static str, size: Option<u32>) -> Result<bool, StartError> {
    let map = object.maps.get(name).ok_or(StartError::NotInObject { what: "map", name })?;
    let wanted = Shape {
        kind: map.map_type(),
        key_size: map.key_size(),
        value_size: map.value_size(),
        max_entries: size.unwrap_or_else(|| map.max_entries()),
        flags: map.map_flags(),
    };
    let path = pins.map(name);
    match pinned_shape(&path)? {
        None => Ok(false),
        Some(found) if found == wanted => Ok(true),
        Some(found) => Err(StartError::ForeignMap { path, found: found.to_string(), wanted: wanted.to_string() }),
    }
}

/// `None` where nothing is pinned.
fn pinned_shape(path: &Path) -> Result<Option<Shape>, StartError> {
    let refuse =
        |reason: String| StartError::ForeignMap { path: path.to_path_buf(), found: reason, wanted: "a map".to_owned() };
    let info = match MapInfo::from_pin(path) {
        Ok(info) => info,
        Err(aya::maps::MapError::SyscallError(SyscallError { io_error, .. }))
            if io_error.kind() == io::ErrorKind::NotFound =>
        {
            return Ok(None);
        }
        Err(error) => return Err(refuse(error.to_string())),
    };
    let kind = info.map_type().map_err(|error| refuse(error.to_string()))?;
    Ok(Some(Shape {
        kind: kind as u32,
        key_size: info.key_size(),
        value_size: info.value_size(),
        max_entries: info.max_entries(),
        flags: info.map_flags(),
    }))
}
