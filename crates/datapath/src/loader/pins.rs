//! The pinned maps of an earlier run: reused when they have the shape that the object asks for.
//!
//! The library reuses any map at a pin, so the shapes are compared first. Where only a user-defined size differs the directory
//! is set aside and migrated like another layout (`abi_migration`). Any other shape is refused: its owner is unknown.

use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use aya::maps::MapInfo;
use aya::sys::SyscallError;
use aya_obj::Object;
use tracing::{error, info};

use crate::error::StartError;
use crate::names::{PINNED_MAPS, Pins, READ_MAPS};
use crate::settings::Settings;

/// Properties that two maps must share for reuse.
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

/// How the pinned maps fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MapFit {
    /// They are reused, as far as there are any.
    Same,
    /// Some have another size than the settings ask for.
    Resized,
}

/// The directories of this layout, where a start created them. Without `keep`, drop removes them and restores what was set
/// aside: a refused or abandoned start changes no pin.
pub struct Made {
    version: PathBuf,
    aside: Option<PathBuf>,
    is_new: bool,
}

impl Made {
    pub fn keep(mut self) {
        (self.is_new, self.aside) = (false, None);
    }
}

impl Drop for Made {
    fn drop(&mut self) {
        let restored = match (self.is_new, self.aside.take()) {
            (false, _) => return,
            (true, aside) => fs::remove_dir_all(&self.version)
                .and_then(|()| aside.map_or(Ok(()), |aside| fs::rename(aside, &self.version))),
        };
        if let Err(error) = restored {
            error!(%error, path = %self.version.display(), "cannot undo what a start has made that has failed");
        }
    }
}

/// Creates the directories of this layout. Sets the existing one aside where its maps have other sizes.
pub fn make(pins: &Pins, fit: MapFit) -> Result<Made, StartError> {
    let version = pins.version();
    let wrap = |path: &Path| {
        let what = format!("make {}", path.display());
        move |error| StartError::kernel(what, error)
    };
    let mut made = Made { is_new: !version.exists(), version, aside: None };
    if fit == MapFit::Resized {
        let aside = pins.aside();
        fs::rename(&made.version, &aside).map_err(wrap(&aside))?;
        info!(former = %aside.display(), "other map sizes are configured: all maps start empty");
        (made.aside, made.is_new) = (Some(aside), true);
    }
    for directory in [pins.maps(), pins.links()] {
        fs::create_dir_all(&directory).map_err(wrap(&directory))?;
    }
    Ok(made)
}

/// Compares what is pinned with what the object defines and the settings ask for. Other layouts: see `abi_migration`.
pub fn check(pins: &Pins, settings: &Settings) -> Result<MapFit, StartError> {
    let object = parse(&settings.object)?;
    let mut fit = MapFit::Same;
    for name in PINNED_MAPS {
        if compare(pins, &object, name, settings.map_size(name))? == Some(MapFit::Resized) {
            fit = MapFit::Resized;
        }
    }
    Ok(fit)
}

/// The same for maps that are only read. All of them must exist, because the loader would create missing ones.
pub fn check_read(pins: &Pins, object: &[u8]) -> Result<(), StartError> {
    let object = parse(object)?;
    for name in READ_MAPS {
        if compare(pins, &object, name, None)?.is_none() {
            let (path, found) = (pins.map(name), "nothing".to_owned());
            return Err(StartError::ForeignMap { path, found, wanted: "a map".to_owned() });
        }
    }
    Ok(())
}

fn parse(object: &[u8]) -> Result<Object, StartError> {
    Object::parse(object).map_err(|error| StartError::Object(error.to_string()))
}

/// `None` without such a pin. `size` overrides that of the object.
fn compare(pins: &Pins, object: &Object, name: &'static str, size: Option<u32>) -> Result<Option<MapFit>, StartError> {
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
        None => Ok(None),
        Some(found) if found == wanted => Ok(Some(MapFit::Same)),
        Some(found) if size.is_some() && (Shape { max_entries: wanted.max_entries, ..found }) == wanted => {
            Ok(Some(MapFit::Resized))
        }
        Some(found) => Err(StartError::ForeignMap { path, found: found.to_string(), wanted: wanted.to_string() }),
    }
}

/// `None` if nothing is pinned.
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
