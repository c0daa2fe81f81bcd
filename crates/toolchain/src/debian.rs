//! A compiler from the distribution's packages, unpacked below the target folder (`debs`).
//!
//! Debian builds Rust for its browsers as `rustc-web`, with a ready-made `core` for eBPF (`libstd-rust-web-dev-bpf`).
//!
//! The unpacked compiler finds its own files, but not its shared libraries: small wrapper scripts point it to them.
//! The scripts find themselves, so the folder may be copied or moved.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::command::Progress;
use super::compiler::llvm_folder;
use super::debs::PackageLists;
use super::{Paths, debs};

/// What is asked for; the rest follows from the packages' dependencies.
const PACKAGES: [&str; 3] = ["rustc-web", "libstd-rust-web-dev-bpf", "rust-web-clippy"];

/// Packages that belong to the compiler: fetched even where the system has them, so that the folder is complete.
const OWN: [&str; 4] = ["rustc-web", "rust-web-", "libstd-rust-web-", "libllvm"];

/// The compiler in the folder.
pub(super) struct Unpacked {
    pub(super) rustc: PathBuf,
    pub(super) clippy: Option<PathBuf>,
    pub(super) llvm_folder: PathBuf,
}

/// Fetches and unpacks the packages, once.
pub(super) fn ensure(paths: &Paths, progress: &Progress) -> Result<Unpacked> {
    let folder = paths.toolchain().join("debian");
    if !folder.join("rustc").exists() {
        let choose = || PackageLists::OfMachine.closure(&PACKAGES, &OWN);
        debs::fetch((&folder, "the eBPF compiler"), &PackageLists::OfMachine, progress, choose, write_wrappers)?;
    }
    let clippy = Some(folder.join("clippy-driver")).filter(|path| path.exists());
    let llvm_folder = llvm_folder(&debs::root(&folder).join("usr"))
        .with_context(|| format!("{} has no libLLVM; remove the folder and try again", folder.display()))?;
    Ok(Unpacked { rustc: folder.join("rustc"), clippy, llvm_folder })
}

fn write_wrappers(parts: &Path) -> Result<()> {
    let root = debs::root(parts);
    let llvm = llvm_folder(&root.join("usr")).context("the packages bring no libLLVM")?;
    let libraries = llvm.strip_prefix(parts).context("libLLVM is outside the folder")?;
    for program in ["clippy-driver", "rustc"] {
        if root.join("usr/bin").join(program).exists() {
            write_wrapper(parts, program, libraries)?;
        }
    }
    Ok(())
}

fn write_wrapper(parts: &Path, program: &str, libraries: &Path) -> Result<()> {
    let text = format!(
        "#!/bin/sh\n# Points the unpacked {program} to its shared libraries.\nhere=${{0%/*}}\n\
         LD_LIBRARY_PATH=\"$here/{}\" exec \"$here/root/usr/bin/{program}\" \"$@\"\n",
        libraries.display()
    );
    let path = parts.join(program);
    fs::write(&path, text).with_context(|| format!("write {}", path.display()))?;
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).with_context(|| format!("chmod {}", path.display()))
}
