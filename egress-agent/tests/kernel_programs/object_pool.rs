//! Objects that are kept for the next test: what takes a test's time is the verifier, above all where the processor is
//! translated. A test that ends well gives its object back with every map emptied (`emptied`); one that fails takes it
//! along, and the next one loads anew. Devices, routes and neighbours are each test's own and never kept.
//!
//! Kept means: in this process's memory, an object for each of the threads that run tests at once. Where each test has a
//! process of its own (`cargo xtask test --kernel`), it is pinned in the folder that a variable names, which belongs to one
//! row of such processes; who takes it takes the pins away, so a process that dies leaves nothing to the next.

use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use aya::Ebpf;
use aya::maps::{Map, MapData};
use aya::programs::SchedClassifier;

use crate::stage::{Stage, info};

/// A folder on a BPF file system. Set by xtask (testing/kernels/suite.rs) and nowhere else.
const FOLDER: &str = "EGRESS_TEST_KEPT";

static KEPT: Mutex<Vec<Stage>> = Mutex::new(Vec::new());

/// What a stage has its programs and maps from.
pub(crate) enum Object {
    /// Each program is loaded at its first use.
    Own(Ebpf),
    /// Another process has loaded all of them.
    Pinned { maps: BTreeMap<String, Map>, programs: BTreeMap<String, SchedClassifier> },
}

impl Object {
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

/// An object that a test before has given back.
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
    // A process that dies meanwhile leaves a folder of another name, in which there may be no dot.
    let mut unfinished = folder.as_os_str().to_owned();
    unfinished.push("-unfinished");
    let unfinished = PathBuf::from(unfinished);
    remove(&unfinished);
    for part in [maps(&unfinished), programs(&unfinished)] {
        fs::create_dir_all(&part).expect("a folder for pins");
    }
    // The object's constants, which the programs hold, have a name that cannot be pinned.
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

/// What is pinned, and no longer is; nothing where no test before has ended well.
fn unpinned(folder: &Path) -> Option<Stage> {
    let map = |path| Map::from_map_data(MapData::from_pin(path).expect("a pinned map")).expect("of a known type");
    let program = |path| SchedClassifier::from_pin(path).expect("a pinned program");
    let maps: BTreeMap<_, _> = files(&maps(folder))?.into_iter().map(|(name, path)| (name, map(path))).collect();
    let programs = files(&programs(folder))?.into_iter().map(|(name, path)| (name, program(path))).collect();
    remove(folder);
    let facts: Vec<_> = maps.iter().map(|(name, map)| (name.clone(), info(map))).collect();
    Some(Stage::of(Object::Pinned { maps, programs }, &facts))
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
