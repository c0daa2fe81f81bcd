//! ABI migration: takes over the pins of another map layout, from an earlier version or a later one before a rollback. Its
//! programs work on maps that this version cannot read, and two sets of programs on one node would translate packets twice.
//! Maps of this layout with other sizes are set aside (`pins`) and count as another layout.
//!
//! Links, filter programs and notes of disciplines do not depend on the layout: they move below this version's directory, so
//! that each program is replaced in one step. The maps start empty. Until the first plan no packet gets a wrong source: the
//! programs are configured from the first packet on, and the former nftables table stays ([`crate::node_state::leak_guard`]).
//!
//! It starts when the API server answers ([`is_due`]). When the kernel holds the desired state the table is replaced and the
//! former maps are removed; a remaining directory shows an unfinished migration, which the next agent continues.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use tracing::{info, warn};

use crate::error::StartError;
use crate::loader::pins::{self, MapFit};
use crate::names::{CLSACT_MARKERS, CLSACT_PROGRAMS, Hook, LINKS, Pins};
use crate::settings::Settings;

/// Whether a start with these settings is a migration, which must wait for the API server.
pub fn is_due(settings: &Settings) -> bool {
    let pins = Pins::new(&settings.bpffs);
    let is_resized = || matches!(pins::check(&pins, settings), Ok(MapFit::Resized));
    has_others(&settings.bpffs) || is_resized()
}

/// Whether there are pins of another layout.
pub fn has_others(bpffs: &Path) -> bool {
    AbiMigration::look(&Pins::new(bpffs)).is_ok_and(|abi_migration| abi_migration.is_open())
}

/// The directories of other layouts.
#[derive(Debug, Default)]
pub struct AbiMigration {
    others: Vec<PathBuf>,
    is_over: AtomicBool,
}

impl AbiMigration {
    /// Finds the other layouts. An error for an unknown entry below the directory of pins.
    pub fn look(pins: &Pins) -> Result<Self, StartError> {
        let wrap = |error| StartError::kernel(format!("list {}", pins.root().display()), error);
        let mut others = Vec::new();
        for entry in fs::read_dir(pins.root()).map_err(wrap)? {
            let entry = entry.map_err(wrap)?;
            let name = entry.file_name();
            if name == Pins::version_name().as_str() {
                continue;
            }
            if !name.to_str().is_some_and(Pins::is_version) {
                return Err(StartError::NotPins { path: entry.path() });
            }
            others.push(entry.path());
        }
        Ok(Self { is_over: others.is_empty().into(), others })
    }

    pub fn others(&self) -> &[PathBuf] {
        &self.others
    }

    /// Whether the migration is unfinished.
    pub fn is_open(&self) -> bool {
        !self.is_over.load(Ordering::Relaxed)
    }

    /// Moves links, filter programs and notes. After everything that can be refused, right before programs are attached.
    pub fn take_over(&self, pins: &Pins) -> Result<(), StartError> {
        for other in &self.others {
            info!(former = %other.display(), "another layout of the maps: flows and NAT entries start empty");
            for directory in [LINKS, CLSACT_PROGRAMS, CLSACT_MARKERS] {
                let from = other.join(directory);
                // A link gets the hook's current name. A link of an unknown hook is removed with the former directory.
                let new_name = |name: &OsStr| match directory {
                    LINKS => name.to_str().and_then(Hook::of_link).and_then(|(hook, ifindex)| {
                        let path = ifindex.map_or(pins.link(hook), |ifindex| pins.further_link(hook, ifindex));
                        path.file_name().map(OsStr::to_owned)
                    }),
                    _ => Some(name.to_owned()),
                };
                move_entries(&from, &pins.version().join(directory), new_name)
                    .map_err(|error| StartError::kernel(format!("take over {}", from.display()), error))?;
            }
        }
        Ok(())
    }

    /// Ends the migration: the kernel holds the desired state. True for the call that ended it.
    pub fn finish(&self) -> bool {
        if self.is_over.swap(true, Ordering::Relaxed) {
            return false;
        }
        for other in &self.others {
            match fs::remove_dir_all(other) {
                Ok(()) => info!(former = %other.display(), "the maps of another layout are gone"),
                Err(error) => warn!(%error, former = %other.display(), "cannot remove the maps of another layout"),
            }
        }
        true
    }
}

/// Moves each entry to its new name, if any. Entries that exist there were moved before.
fn move_entries(from: &Path, to: &Path, new_name: impl Fn(&OsStr) -> Option<OsString>) -> io::Result<()> {
    let entries = match fs::read_dir(from) {
        Ok(entries) => entries.collect::<io::Result<Vec<_>>>()?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    fs::create_dir_all(to)?;
    for entry in entries {
        let Some(to) = new_name(&entry.file_name()).map(|name| to.join(name)) else { continue };
        if !to.try_exists()? {
            fs::rename(entry.path(), to)?;
        }
    }
    Ok(())
}
