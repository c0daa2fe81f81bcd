//! Reuses loaded objects, because the verifier takes most of a test's time, above all on an emulated CPU. A successful
//! test returns its object with empty maps (`clean_maps`); a failed test discards it, and the next one loads again.
//! Each test has its own devices, routes and neighbours.
//!
//! Objects are kept in this process's memory, one for each test thread. If each test has its own process (`cargo xtask
//! test --kernel`), an object is pinned in the folder that a variable names. Taking an object removes its pins, so that
//! a process that dies leaves nothing behind.

use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use aya::Ebpf;
use aya::maps::{Map, MapData};
use aya::programs::SchedClassifier;

use crate::stage::{Stage, info};

/// A folder on a BPF file system. Set only by xtask (testing/kernels/suite.rs).
const FOLDER: &str = "EGRESS_TEST_KEPT";

static KEPT: Mutex<Vec<Stage>> = Mutex::new(Vec::new());

/// Source of a stage's programs and maps.
pub(crate) enum LoadedObject {
    /// Each program is loaded at its first use.
    Own(Ebpf),
    /// Another process has loaded all of them.
    Pinned { maps: BTreeMap<String, Map>, programs: BTreeMap<String, SchedClassifier> },
}

impl LoadedObject {
    pub(crate) fn take_map(&mut self, name: &str) -> Option<Map> {
        match self {
            Self::Own(ebpf) => ebpf.take_map(name),
            Self::Pinned { maps, .. } => maps.remove(name),
        }
    }

    pub(crate) fn get(&self, name: &str) -> &SchedClassifier {
        match self {
            Self::Own(ebpf) => ebpf.program(name).and_then(|program| program.try_into().ok()),
            Self::Pinned { programs, .. } => programs.get(name),
        }
        .expect("a classifier of this name")
    }

    pub(crate) fn get_mut(&mut self, name: &str) -> &mut SchedClassifier {
        let ebpf = match self {
            Self::Own(ebpf) => ebpf,
            Self::Pinned { programs, .. } => return programs.get_mut(name).expect("a program of this name"),
        };
        let program = ebpf.program_mut(name).expect("a program of this name");
        let program: &mut SchedClassifier = program.try_into().expect("a classifier");
        if program.fd().is_err() {
            program.load().unwrap_or_else(|error| panic!("{name}: {error}"));
        }
        program
    }

    fn programs(&self) -> Vec<String> {
        match self {
            Self::Own(ebpf) => ebpf.programs().map(|(name, _)| name.to_owned()).collect(),
            Self::Pinned { programs, .. } => programs.keys().cloned().collect(),
        }
    }
}

/// An object that an earlier test has returned.
pub(crate) fn take() -> Option<Stage> {
    match folder() {
        None => KEPT.lock().unwrap_or_else(PoisonError::into_inner).pop(),
        Some(folder) => unpinned(&folder),
    }
}

/// Keeps an object whose maps are empty.
pub(crate) fn give_back(stage: Stage) {
    match folder() {
        None => KEPT.lock().unwrap_or_else(PoisonError::into_inner).push(stage),
        Some(folder) => pin(&folder, stage),
    }
}

/// Whether an object is kept, by the number of one of its maps.
pub(crate) fn has(nat: u32) -> bool {
    match folder() {
        None => KEPT.lock().unwrap_or_else(PoisonError::into_inner).iter().any(|stage| stage.ids["nat"] == nat),
        Some(folder) => {
            let pinned = MapData::from_pin(maps(&folder).join("nat"));
            pinned.is_ok_and(|map| map.info().expect("its information").id() == nat)
        }
    }
}

fn folder() -> Option<PathBuf> {
    std::env::var_os(FOLDER).map(PathBuf::from)
}

fn maps(folder: &Path) -> PathBuf {
    folder.join("maps")
}

fn programs(folder: &Path) -> PathBuf {
    folder.join("programs")
}

fn pin(folder: &Path, mut stage: Stage) {
    // Pinned under another name first, so that a process that dies leaves no incomplete folder. The name must not
    // contain a dot.
    let mut unfinished = folder.as_os_str().to_owned();
    unfinished.push("-unfinished");
    let unfinished = PathBuf::from(unfinished);
    remove(&unfinished);
    for part in [maps(&unfinished), programs(&unfinished)] {
        fs::create_dir_all(&part).expect("a folder for pins");
    }
    // The object's constants have a name that cannot be pinned.
    for (name, id) in stage.ids.iter().filter(|(name, _)| !name.starts_with('.')) {
        let map = MapData::from_id(*id).expect("a map of the stage");
        map.pin(maps(&unfinished).join(name)).expect("pin a map");
    }
    for name in stage.object.programs() {
        let program = stage.object.get_mut(&name);
        program.pin(programs(&unfinished).join(&name)).expect("pin a program");
    }
    fs::rename(&unfinished, folder).expect("all is pinned");
}

/// Takes the pinned object and removes its pins; `None` without one.
fn unpinned(folder: &Path) -> Option<Stage> {
    let map = |path| Map::from_map_data(MapData::from_pin(path).expect("a pinned map")).expect("of a known type");
    let program = |path| SchedClassifier::from_pin(path).expect("a pinned program");
    let maps: BTreeMap<_, _> = files(&maps(folder))?.into_iter().map(|(name, path)| (name, map(path))).collect();
    let programs = files(&programs(folder))?.into_iter().map(|(name, path)| (name, program(path))).collect();
    remove(folder);
    let facts: Vec<_> = maps.iter().map(|(name, map)| (name.clone(), info(map))).collect();
    Some(Stage::of(LoadedObject::Pinned { maps, programs }, &facts))
}

fn files(folder: &Path) -> Option<Vec<(String, PathBuf)>> {
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == ErrorKind::NotFound => return None,
        entries => entries.expect("a folder of pins"),
    };
    let named = |path: PathBuf| (path.file_name().expect("a name").to_string_lossy().into_owned(), path);
    Some(entries.map(|entry| named(entry.expect("a pin").path())).collect())
}

fn remove(folder: &Path) {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != ErrorKind::NotFound => panic!("{}: {error}", folder.display()),
        _ => {}
    }
}
