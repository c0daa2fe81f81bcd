//! A compiler from the distribution's packages, unpacked below the target folder.
//!
//! Debian builds Rust for its browsers as `rustc-web`, with a ready-made `core` for eBPF (`libstd-rust-web-dev-bpf`).
//! `apt-get download` and `dpkg-deb -x` need neither root nor a place in the system, and leave a compiler that someone
//! else installed alone. What root is needed for is only `apt-get update`, where the package lists are missing or old.
//!
//! The unpacked compiler finds its own files, but not its shared libraries: small wrapper scripts point it to them.
//! The scripts find themselves, so the folder may be copied or moved.

use std::collections::HashSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use super::command::{Progress, is_root, output, run};
use super::compiler::llvm_folder;
use super::{Paths, packages};

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
        fetch(&folder, progress)?;
    }
    let clippy = Some(folder.join("clippy-driver")).filter(|path| path.exists());
    let llvm_folder = llvm_folder(&folder.join("root/usr"))
        .with_context(|| format!("{} has no libLLVM; remove the folder and try again", folder.display()))?;
    Ok(Unpacked { rustc: folder.join("rustc"), clippy, llvm_folder })
}

fn fetch(folder: &Path, progress: &Progress) -> Result<()> {
    for tool in ["apt-get", "dpkg-deb"] {
        if packages::find(tool).is_none() {
            bail!("{tool} is not here, so Debian's packages of the eBPF compiler cannot be used");
        }
    }
    let parts = folder.with_extension("new");
    let names = with_fresh_lists(progress, || {
        let names = closure()?;
        progress.step(&format!("downloading the eBPF compiler: {}", names.join(" ")));
        remove(&parts)?;
        download(&parts.join("debs"), &names)?;
        Ok(names)
    })?;
    progress.step(&format!("unpacking {} packages into {}", names.len(), folder.display()));
    unpack(&parts)?;
    remove(folder)?;
    fs::rename(&parts, folder).with_context(|| format!("rename {} to {}", parts.display(), folder.display()))
}

/// Tries; where that fails and we may, brings the package lists up to date and tries again.
fn with_fresh_lists<T>(progress: &Progress, attempt: impl Fn() -> Result<T>) -> Result<T> {
    if is_root() && packages::lists_are_empty() {
        progress.step("there are no package lists yet: running apt-get update");
        packages::update_lists();
    }
    let first = match attempt() {
        Ok(value) => return Ok(value),
        Err(error) => error,
    };
    if !is_root() {
        bail!("{first:#} (the package lists may be missing or old: run `apt-get update` as root)");
    }
    progress.step(&format!("{first:#}: running apt-get update"));
    packages::update_lists();
    attempt()
}

/// The packages to fetch: the compiler's own, and those libraries of theirs that the system lacks.
///
/// apt works the dependencies out as if nothing were installed, so that no conflict with an installed package counts.
fn closure() -> Result<Vec<String>> {
    let plan = output(
        Command::new("apt-get")
            .args(["--simulate", "-o", "Dir::State::status=/dev/null", "install", "--no-install-recommends"])
            .args(PACKAGES)
            .env("LC_ALL", "C"),
    )
    .context("the package lists do not have rustc-web for eBPF")?;
    let installed = installed()?;
    let wanted = |name: &&str| {
        let own = OWN.iter().any(|prefix| name.starts_with(prefix));
        let library = name.starts_with("lib") && !name.ends_with("-dev") && !installed.contains(*name);
        own || library
    };
    let names: Vec<String> = planned(&plan).filter(wanted).map(str::to_owned).collect();
    if !names.iter().any(|name| name == PACKAGES[0]) {
        bail!("apt-get does not plan to install {}", PACKAGES[0]);
    }
    Ok(names)
}

/// The names in the lines `Inst NAME (VERSION ...)`.
fn planned(simulation: &str) -> impl Iterator<Item = &str> {
    simulation.lines().filter_map(|line| line.strip_prefix("Inst ")).filter_map(|rest| rest.split_whitespace().next())
}

fn installed() -> Result<HashSet<String>> {
    let text = output(Command::new("dpkg-query").args(["-W", "-f", "${db:Status-Status} ${Package}\n"]))?;
    Ok(text.lines().filter_map(|line| line.strip_prefix("installed ")).map(str::to_owned).collect())
}

fn download(folder: &Path, names: &[String]) -> Result<()> {
    fs::create_dir_all(folder).with_context(|| format!("create {}", folder.display()))?;
    // As root, apt would rather be another user, who often cannot read our folder: say so beforehand, not in a warning.
    let mut command = Command::new("apt-get");
    command.args(["-qq", "-o", "APT::Sandbox::User=root", "download"]).args(names);
    run(command.current_dir(folder)).context("download the eBPF compiler")
}

/// Unpacks what `download` fetched, and writes the wrapper scripts.
fn unpack(parts: &Path) -> Result<()> {
    let debs = parts.join("debs");
    let root = parts.join("root");
    for entry in fs::read_dir(&debs).with_context(|| format!("read {}", debs.display()))? {
        let deb = entry.with_context(|| format!("read {}", debs.display()))?.path();
        run(Command::new("dpkg-deb").arg("-x").arg(&deb).arg(&root))?;
    }
    remove(&debs)?;
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

/// Removes a folder that may be absent.
fn remove(folder: &Path) -> Result<()> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("remove {}", folder.display()))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_plan_of_apt_is_read() {
        let text = "Reading state information...\nInst libllvm22 (1:22.1.8-1 Debian:12 [amd64])\nInst rustc-web (1.96)\nConf rustc-web (1.96)\n";
        assert_eq!(planned(text).collect::<Vec<_>>(), ["libllvm22", "rustc-web"]);
    }
}
