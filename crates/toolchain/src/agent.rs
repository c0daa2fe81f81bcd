//! egress-agent, with the eBPF object in it.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};

use super::Paths;
use super::command::{Progress, cargo, run};

/// Where cargo puts it.
pub(super) fn binary(paths: &Paths, release: bool) -> PathBuf {
    let profile = if release { "release" } else { "debug" };
    paths.target.join(profile).join("egress-agent")
}

pub(super) fn build(paths: &Paths, release: bool, progress: &Progress) -> Result<PathBuf> {
    let binary = binary(paths, release);
    if !binary.exists() {
        progress.step("building egress-agent; the first time takes some minutes");
    }
    let mut command = cargo();
    command.args(["build", "--package", "egress-agent", "--bin", "egress-agent"]);
    if release {
        command.arg("--release");
    }
    // One place for the binary, also where a configuration file names a target.
    command.env_remove("CARGO_BUILD_TARGET").current_dir(&paths.root);
    run(&mut command).context("build egress-agent")?;
    if !binary.exists() {
        bail!("cargo built no {}: is another target set in a configuration file of cargo?", binary.display());
    }
    Ok(binary)
}
