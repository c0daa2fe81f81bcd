//! `cargo xtask lint`: format and clippy of all workspaces, warnings as errors.
//!
//! The eBPF crate is checked for its own target with clippy of the compiler that builds it, since code for the target
//! (its atomics, its assembly) does not exist on the host. Where that compiler came without clippy, this says so.

use anyhow::{Context, Result};
use clap::Args;

use super::command::{Progress, cargo, run};
use super::{Paths, compiler, lock, object};

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
    progress.step("clippy of the host workspace");
    let mut clippy = cargo();
    clippy.args(["clippy", "--locked", "--workspace", "--all-targets", "--", "-D", "warnings"]);
    run(clippy.current_dir(&paths.root)).context("clippy")?;
    lint_ebpf(&paths, !args.no_install, &progress)?;
    progress.step("format and clippy: nothing to complain about");
    Ok(())
}

fn lint_ebpf(paths: &Paths, install: bool, progress: &Progress) -> Result<()> {
    let _lock = lock(paths, progress)?;
    let compiler = compiler::choose(paths, install, progress)?;
    let Some(clippy) = &compiler.clippy else {
        progress.step(&format!("clippy of egress-ebpf skipped: {} came without clippy-driver", compiler.name));
        return Ok(());
    };
    progress.step(&format!("clippy of egress-ebpf with {}", compiler.version.full));
    let mut command = object::check_command(paths, &compiler);
    // What `cargo clippy` does itself; but it would take the host's clippy, which has another compiler inside.
    command.env("RUSTC_WORKSPACE_WRAPPER", clippy).env("CLIPPY_ARGS", "-Dwarnings__CLIPPY_HACKERY__");
    run(&mut command).context("clippy of egress-ebpf")
}
