//! Static binaries for an architecture: the standard library of the target, and a C compiler for what is written in C (aws-lc).
//!
//! For this machine's architecture that is `musl-gcc`. For another one it is Debian's cross compiler, which knows the headers of
//! glibc: it gets those of musl, from the other architecture's package, instead. The linker is Rust's own, which knows every
//! architecture; start files and libc come with the target.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, bail};

use super::arch::Arch;
use super::command::{Progress, output, run};
use super::debs::{self, PackageLists};
use super::packages::{self, Purpose};
use super::{Paths, cargo};

/// Sets up what compiles for this architecture; cargo with its environment.
pub fn cargo_for(paths: &Paths, arch: Arch, install: bool, progress: &Progress) -> Result<Command> {
    ensure_target(arch.target(), install)?;
    let mut command = cargo();
    // One place for the binaries, also where a configuration file names a target.
    command.env_remove("CARGO_BUILD_TARGET");
    if arch == Arch::own() {
        packages::ensure(Purpose::Image, install)?;
        return Ok(command);
    }
    packages::ensure(Purpose::Cross(arch), install)?;
    let tool = |name: &str| format!("{}-{name}", arch.multiarch());
    let gcc = output(Command::new(tool("gcc")).arg("-print-file-name=include"))?;
    let headers = musl(paths, arch, progress)?;
    // Without what needs functions of glibc or libgcc.
    let flags = format!(
        "-nostdinc -isystem {} -isystem {} -U_FORTIFY_SOURCE{}",
        headers.display(),
        gcc.trim(),
        if arch == Arch::Arm64 { " -mno-outline-atomics" } else { "" }
    );
    let target = arch.target().replace('-', "_");
    command
        .env(format!("CC_{target}"), tool("gcc"))
        .env(format!("AR_{target}"), tool("ar"))
        .env(format!("CFLAGS_{target}"), flags)
        .env(format!("CARGO_TARGET_{}_LINKER", target.to_uppercase()), "rust-lld");
    Ok(command)
}

/// The folder of musl's headers.
fn musl(paths: &Paths, arch: Arch, progress: &Progress) -> Result<PathBuf> {
    let folder = paths.packages(arch.name()).join("musl-dev");
    if !folder.exists() {
        let foreign = PackageLists::of_architecture(arch, paths);
        debs::fetch((&folder, "musl's headers"), &foreign, progress, || Ok(vec!["musl-dev".to_owned()]), |_| Ok(()))?;
    }
    Ok(debs::root(&folder).join("usr/include").join(arch.musl()))
}

fn ensure_target(target: &str, install: bool) -> Result<()> {
    let installed = output(Command::new("rustup").args(["target", "list", "--installed"]));
    let installed = installed.context("targets come by rustup")?;
    if installed.lines().any(|line| line == target) {
        return Ok(());
    }
    if !install {
        bail!("missing: the target {target}; `rustup target add {target}`, or leave out --no-install");
    }
    println!("installing a toolchain component: the target {target}");
    run(Command::new("rustup").args(["target", "add", target]))
}
