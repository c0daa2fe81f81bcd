//! Pins of another layout of the maps: an earlier version's, or a later one's before a rollback. Their programs work on maps
//! that this version cannot read, and two sets on one node would translate every packet twice. Maps of this layout whose sizes
//! are not those that are asked for are set aside (`pins`), and are another layout from then on.
//!
//! What does not depend on the layout is taken over: links, programs that are filters, and the notes of disciplines move below
//! this version's directory, so that each program is replaced in one step. The maps begin anew, and the node holds nothing
//! until the model has filled them. Meanwhile nothing gets a wrong source:
//!
//! - The programs are configured from their first packet on: a gateway that owns nothing drops what comes for it.
//! - The nftables table of before stays as it is. It knows the selected pods of before, and lets nothing of theirs pass that
//!   the former `from_pod` has not seen ([`crate::node_state::leak_guard`]).
//!
//! It is not begun before the API server answers ([`is_due`]): until then the former programs go on.
//!
//! When the kernel holds what the cluster wants the table is made anew, and the former maps go. A directory that is still
//! there says that this has not come about: an agent that is killed meanwhile has its successor begin where it was.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use tracing::{info, warn};

use crate::error::StartError;
use crate::loader::pins::{self, Fit};
use crate::names::{CLSACT_MARKS, CLSACT_PROGRAMS, Hook, LINKS, Pins};
use crate::settings::Settings;

/// Whether a start with these settings would take over from another layout, or from maps of other sizes: not to be done while
/// nobody can tell it what to serve.
pub fn is_due(settings: &Settings) -> bool {
    let pins = Pins::new(&settings.bpffs);
    let is_resized = || matches!(pins::check(&pins, settings), Ok(Fit::Resized));
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
    /// What else is below the directory of pins than this version's: nobody knows what that is.
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

    /// Whether the maps of before still stand for what this node did.
    pub fn is_open(&self) -> bool {
        !self.is_over.load(Ordering::Relaxed)
    }

    /// Takes over what is on hooks. Behind everything that can be refused, and right before programs are attached.
    pub fn take_over(&self, pins: &Pins) -> Result<(), StartError> {
        for other in &self.others {
            info!(former = %other.display(), "another layout of the maps: flows and mappings begin anew");
            for directory in [LINKS, CLSACT_PROGRAMS, CLSACT_MARKS] {
                let from = other.join(directory);
                // A link takes the name that its hook has now. One of no hook of this version goes with what is left.
                let new_name = |name: &OsStr| match directory {
                    LINKS => name.to_str().and_then(Hook::of_name).map(|hook| hook.name().into()),
                    _ => Some(name.to_owned()),
                };
                move_entries(&from, &pins.version().join(directory), new_name)
                    .map_err(|error| StartError::kernel(format!("take over {}", from.display()), error))?;
            }
        }
        Ok(())
    }

    /// The kernel holds what the cluster wants. Whether that ends it.
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

/// Moves each entry to the name that it gets, if any. One that is there already was taken over before.
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
