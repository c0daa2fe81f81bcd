//! Puts the eBPF object into the agent.
//!
//! The object is built by `cargo xtask build`, not from here: it takes another compiler and a linker of its own. So that
//! `cargo build`, clippy and editors work in a fresh clone, an object that is not there yet is no error: the agent then
//! says at run time what to do. Where the object is looked for:
//!
//! 1. `EGRESS_EBPF_OBJECT`, a path; it must exist;
//! 2. `<target>/bpf/egress-ebpf.o`, which `cargo xtask build` writes. An empty file there stands for "not built yet":
//!    cargo watches the file, and would run this script at every build if it did not exist.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

const VARIABLE: &str = "EGRESS_EBPF_OBJECT";

fn main() -> Result<(), String> {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-env-changed={VARIABLE}");
    let out = folder("OUT_DIR")?;
    let object = match std::env::var_os(VARIABLE) {
        Some(path) => PathBuf::from(path),
        None => in_target(&out)?,
    };
    println!("cargo:rerun-if-changed={}", watched(&object)?.display());
    let embedded = out.join("egress-ebpf.o");
    fs::copy(&object, &embedded)
        .map_err(|error| format!("{VARIABLE}: copy {} to {}: {error}", object.display(), embedded.display()))?;
    Ok(())
}

/// The object by its place beside this package, so that a target folder that was copied along with its clone looks at
/// its own object, not at the one that it was copied from.
fn watched(object: &Path) -> Result<PathBuf, String> {
    let package = folder("CARGO_MANIFEST_DIR")?;
    let below = package.ancestors().nth(2).and_then(|clone| object.strip_prefix(clone).ok());
    Ok(below.map_or_else(|| object.to_path_buf(), |below| Path::new("../..").join(below)))
}

fn folder(variable: &str) -> Result<PathBuf, String> {
    std::env::var_os(variable).map(PathBuf::from).ok_or_else(|| format!("{variable} is not set"))
}

/// The object in the target folder, made empty where it is missing.
fn in_target(out: &Path) -> Result<PathBuf, String> {
    let target = target_folder(out).ok_or_else(|| {
        format!("{} is not in a target folder: set {VARIABLE} to the path of the eBPF object", out.display())
    })?;
    let object = target.join("bpf").join("egress-ebpf.o");
    if !object.exists() {
        // Dated long ago: a file younger than this run would make cargo run the script once more.
        fs::create_dir_all(target.join("bpf"))
            .and_then(|()| fs::File::create(&object))
            .and_then(|file| file.set_modified(SystemTime::UNIX_EPOCH))
            .map_err(|error| format!("write {}: {error}", object.display()))?;
    }
    Ok(object)
}

/// `<target>/[<triple>/]<profile>/build/...` is where a build script writes; up from there.
fn target_folder(out: &Path) -> Option<PathBuf> {
    let build = out.ancestors().find(|folder| folder.file_name().is_some_and(|name| name == "build"))?;
    let above = build.parent()?.parent()?;
    let triple = std::env::var_os("TARGET")?;
    let target = if above.file_name() == Some(&triple) { above.parent()? } else { above };
    Some(target.to_path_buf())
}
