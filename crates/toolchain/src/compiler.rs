//! The compiler for the eBPF object: a rustup toolchain with `rust-src` builds `core` itself (`-Zbuild-std=core`), and Debian's
//! `rustc-web` has a ready-made `core`. The first of these that works:
//!
//! 1. `EGRESS_EBPF_TOOLCHAIN`, the name of a rustup toolchain or its sysroot;
//! 2. the toolchain in use, then rustup's `stable` and `nightly`;
//! 3. the system's compiler, if it has the target;
//! 4. Debian's packages, unpacked below the target folder;
//! 5. `rustup component add rust-src` for the toolchain in use.
//!
//! The sources of `core` must have exactly the compiler's version.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use super::command::{Progress, cargo_at, output, run};
use super::{Paths, debian};

/// The compilation target: little-endian eBPF, as on every machine that the agent runs on.
pub(super) const TARGET: &str = "bpfel-unknown-none";

/// The variable that names the toolchain.
const VARIABLE: &str = "EGRESS_EBPF_TOOLCHAIN";

/// The oldest compiler that aya-ebpf builds with.
const OLDEST_MINOR: u32 = 87;

/// What to do when there is no compiler, in every message that says so.
pub(super) const ADVICE: &str = "run `rustup component add rust-src`";

/// A compiler that can build for the target.
#[derive(Clone, Debug)]
pub(super) struct BpfCompiler {
    /// What it is, for messages.
    pub(super) name: String,
    pub(super) rustc: PathBuf,
    /// clippy-driver of the same build, where there is one.
    pub(super) clippy: Option<PathBuf>,
    cargo: OsString,
    /// Whether `core` has to be built from source.
    build_std: bool,
    /// The folder with the libLLVM that the compiler uses.
    pub(super) llvm_folder: PathBuf,
    pub(super) version: Version,
}

/// What `rustc -vV` says, as far as it matters here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Version {
    /// The first line; unlike the number it differs between distributors.
    pub(super) full: String,
    minor: u32,
    pub(super) llvm_major: u32,
}

impl BpfCompiler {
    /// Cargo set up for the eBPF workspace with this compiler, up to the linker.
    pub(super) fn cargo(&self, paths: &Paths, subcommand: &str) -> Command {
        let mut command = cargo_at(&self.cargo);
        command.arg(subcommand);
        command.arg("--manifest-path").arg(paths.ebpf_manifest());
        command.arg("--target-dir").arg(paths.ebpf_target());
        command.args(["--release", "--target", TARGET]);
        if self.build_std {
            command.arg("-Zbuild-std=core");
        }
        // aya-ebpf uses inline assembly of the target, which is not stable yet: the variable permits it.
        command.env("RUSTC", &self.rustc).env("RUSTC_BOOTSTRAP", "1");
        // The flags of the host's build are not for this target.
        for name in ["RUSTFLAGS", "CARGO_ENCODED_RUSTFLAGS", "RUSTC_WRAPPER", "RUSTC_WORKSPACE_WRAPPER"] {
            command.env_remove(name);
        }
        command.env_remove("CARGO_BUILD_TARGET").env_remove("CARGO_BUILD_RUSTFLAGS");
        command
    }
}

/// Finds a compiler, or fetches one.
pub(super) fn choose(paths: &Paths, install: bool, progress: &Progress) -> Result<BpfCompiler> {
    if let Some(wanted) = std::env::var_os(VARIABLE).filter(|value| !value.is_empty()) {
        return named(&wanted);
    }
    if let Some(compiler) = present() {
        return Ok(compiler);
    }
    match debian::ensure(paths, progress) {
        Ok(found) => {
            let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
            describe("Debian's rustc-web", found.rustc, found.clippy, cargo, found.llvm_folder, false)
        }
        Err(reason) => add_source(&reason, install, progress),
    }
}

/// The toolchain that the user asked for: anything but exactly this one would be a surprise.
fn named(wanted: &OsString) -> Result<BpfCompiler> {
    let folder = PathBuf::from(wanted);
    let name = wanted.to_string_lossy().into_owned();
    let sysroot = if folder.is_absolute() {
        folder
    } else {
        rustup_toolchains()
            .into_iter()
            .find(|toolchain| toolchain.is_called(&name))
            .map(|toolchain| toolchain.sysroot)
            .with_context(|| format!("{VARIABLE} is {name}, which `rustup toolchain list` does not have"))?
    };
    at_sysroot(&name, &sysroot)?.with_context(|| {
        format!(
            "{VARIABLE} is {name}, which has no sources of core: `rustup component add rust-src --toolchain {name}`"
        )
    })
}

/// The first of the toolchains on this machine that has what is needed. One that is too old is passed over.
fn present() -> Option<BpfCompiler> {
    let toolchains = rustup_toolchains();
    let in_use = toolchains.iter().filter(|toolchain| toolchain.active);
    let channels = ["stable", "nightly"];
    let others = channels.iter().flat_map(|name| toolchains.iter().filter(|toolchain| toolchain.is_called(name)));
    let from_rustup = in_use.chain(others).map(|toolchain| (toolchain.name.clone(), toolchain.sysroot.clone()));
    let system = [("the system's rustc".to_owned(), PathBuf::from("/usr"))];
    from_rustup.chain(system).find_map(|(name, sysroot)| at_sysroot(&name, &sysroot).ok().flatten())
}

/// The compiler of this sysroot, if it can build for the target.
fn at_sysroot(name: &str, sysroot: &Path) -> Result<Option<BpfCompiler>> {
    let library = sysroot.join("lib/rustlib");
    let has_source = library.join("src/rust/library/Cargo.lock").exists();
    let has_core = library.join(TARGET).join("lib").exists();
    let rustc = sysroot.join("bin/rustc");
    if !rustc.exists() || !(has_source || has_core) {
        return Ok(None);
    }
    let own_cargo = sysroot.join("bin/cargo");
    let cargo = if own_cargo.exists() {
        own_cargo.into_os_string()
    } else {
        std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into())
    };
    let clippy = Some(sysroot.join("bin/clippy-driver")).filter(|path| path.exists());
    let llvm_folder = llvm_folder(sysroot).with_context(|| format!("{name} has no libLLVM of its own"))?;
    describe(name, rustc, clippy, cargo, llvm_folder, !has_core).map(Some)
}

fn describe(
    name: &str,
    rustc: PathBuf,
    clippy: Option<PathBuf>,
    cargo: OsString,
    llvm_folder: PathBuf,
    build_std: bool,
) -> Result<BpfCompiler> {
    let version = parse_version(&output(Command::new(&rustc).arg("-vV"))?)?;
    if version.minor < OLDEST_MINOR {
        bail!("{name} is {}, the eBPF build needs 1.{OLDEST_MINOR} or newer", version.full);
    }
    Ok(BpfCompiler { name: name.to_owned(), rustc, clippy, cargo, build_std, llvm_folder, version })
}

/// rustup keeps libLLVM in `lib`, Debian in `lib/<machine>-linux-gnu`.
pub(super) fn llvm_folder(sysroot: &Path) -> Option<PathBuf> {
    let library = sysroot.join("lib");
    let machine = library.join(format!("{}-linux-gnu", std::env::consts::ARCH));
    [machine, library].into_iter().find(|folder| super::linker::library_in(folder).is_some())
}

fn parse_version(text: &str) -> Result<Version> {
    let field = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
    let full = text.lines().next().unwrap_or_default().trim().to_owned();
    let release = field("release:").context("rustc -vV names no release")?;
    let minor = release.split('.').nth(1).and_then(|minor| minor.parse().ok());
    let llvm = field("LLVM version:").context("rustc -vV names no LLVM version")?;
    let llvm_major = llvm.split('.').next().and_then(|major| major.parse().ok());
    Ok(Version {
        full,
        minor: minor.with_context(|| format!("unreadable release {release}"))?,
        llvm_major: llvm_major.with_context(|| format!("unreadable LLVM version {llvm}"))?,
    })
}

/// One line of `rustup toolchain list -v`.
#[derive(Debug, PartialEq, Eq)]
struct Toolchain {
    name: String,
    active: bool,
    sysroot: PathBuf,
}

impl Toolchain {
    /// `stable` is short for `stable-x86_64-unknown-linux-gnu`.
    fn is_called(&self, name: &str) -> bool {
        self.name == name || self.name.strip_prefix(name).is_some_and(|rest| rest.starts_with('-'))
    }
}

/// Without rustup there are none.
fn rustup_toolchains() -> Vec<Toolchain> {
    output(Command::new("rustup").args(["toolchain", "list", "-v"]))
        .map(|text| text.lines().filter_map(parse_toolchain).collect())
        .unwrap_or_default()
}

fn parse_toolchain(line: &str) -> Option<Toolchain> {
    let (name, rest) = line.split_once(char::is_whitespace)?;
    let sysroot = rest.get(rest.find('/')?..)?;
    // Older versions of rustup only mark the default.
    let marks = rest.get(..rest.find('/')?)?;
    let active = marks.contains("active") || marks.contains("default");
    Some(Toolchain { name: name.to_owned(), active, sysroot: PathBuf::from(sysroot.trim()) })
}

/// The last option: the sources of the compiler in use. rustup fetches them from where the toolchain came from.
fn add_source(reason: &anyhow::Error, install: bool, progress: &Progress) -> Result<BpfCompiler> {
    let Some(toolchain) = rustup_toolchains().into_iter().find(|toolchain| toolchain.active) else {
        bail!("no compiler for {TARGET}: {reason:#}; and there is no rustup. Install rustup, then {ADVICE}");
    };
    if !install {
        bail!("no compiler for {TARGET}: {reason:#}. {ADVICE}, or leave out --no-install");
    }
    progress.step(&format!("{reason:#}; adding rust-src to {} instead", toolchain.name));
    run(Command::new("rustup").args(["component", "add", "rust-src", "--toolchain", &toolchain.name]))
        .with_context(|| format!("no compiler for {TARGET}: {reason:#}; and rust-src could not be added"))?;
    at_sysroot(&toolchain.name, &toolchain.sysroot)?
        .with_context(|| format!("{} has no sources of core even after adding rust-src", toolchain.name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_is_read_from_what_rustc_prints() {
        let text = "rustc 1.96.0 (ac68faa20 2026-05-25) (built from a source tarball)\nbinary: rustc\nrelease: 1.96.0\nLLVM version: 22.1.8\n";
        let version = parse_version(text).expect("a version");
        assert_eq!((version.minor, version.llvm_major), (96, 22));
        assert!(version.full.ends_with("(built from a source tarball)"));
        assert!(parse_version("rustc 1.96.0").is_err());
    }

    #[test]
    fn a_nightly_release_has_a_minor_number_too() {
        let text = "rustc 1.97.0-nightly\nrelease: 1.97.0-nightly\nLLVM version: 22.1.4\n";
        assert_eq!(parse_version(text).expect("a version").minor, 97);
    }

    #[test]
    fn toolchains_are_read_with_their_marks() {
        let line = "stable-x86_64-unknown-linux-gnu (active, default) /root/.rustup/toolchains/stable";
        let toolchain = parse_toolchain(line).expect("a toolchain");
        assert!(toolchain.active && toolchain.is_called("stable") && !toolchain.is_called("stab"));
        assert_eq!(toolchain.sysroot, PathBuf::from("/root/.rustup/toolchains/stable"));
        let other = parse_toolchain("nightly-x86_64-unknown-linux-gnu\t/opt/night ly").expect("a toolchain");
        assert!(!other.active);
        assert_eq!(other.sysroot, PathBuf::from("/opt/night ly"));
        assert_eq!(parse_toolchain("no installed toolchains"), None);
    }
}
