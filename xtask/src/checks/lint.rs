//! `cargo xtask lint`: format, names of types, and clippy of all workspaces, warnings as errors.
//!
//! The eBPF crate is checked for its own target with clippy of the compiler that builds it, since code for the target
//! (its atomics, its assembly) does not exist on the host. Where that compiler came without clippy, this says so.

use anyhow::{Context, Result};
use clap::Args;

use super::type_names::check_type_names;
use egress_toolchain::{Paths, Progress, cargo, lint_object, run};

#[derive(Args, Debug)]
pub(crate) struct LintArgs {
    /// Install nothing: name what is missing and stop
    #[arg(long)]
    no_install: bool,
}

pub(crate) fn lint(args: &LintArgs) -> Result<()> {
    let progress = Progress::start();
    let paths = Paths::find()?;
    progress.step("format");
    run(cargo().args(["fmt", "--all", "--check"]).current_dir(&paths.root)).context("run `cargo fmt`")?;
    run(cargo().args(["fmt", "--check", "--manifest-path"]).arg(paths.ebpf_manifest()))
        .context("run `cargo fmt --manifest-path egress-ebpf/Cargo.toml`")?;
    run(cargo().args(["fmt", "--check", "--manifest-path"]).arg(paths.fuzz_manifest()))
        .context("run `cargo fmt --manifest-path fuzz/libfuzzer/Cargo.toml`")?;
    progress.step("names of types");
    check_type_names(&paths.root)?;
    progress.step("clippy of the host workspace");
    let mut clippy = cargo();
    clippy.args(["clippy", "--locked", "--workspace", "--all-targets", "--", "-D", "warnings"]);
    run(clippy.current_dir(&paths.root)).context("clippy")?;
    lint_object(&paths, !args.no_install, &progress)?;
    progress.step("format, names of types and clippy: nothing to complain about");
    Ok(())
}
