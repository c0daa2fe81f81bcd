//! egress-agent, with the eBPF object in it, egress-router, and the kubectl plugin.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use super::command::{Progress, cargo, run};

/// The packages, each with a binary of its name.
pub(super) const AGENT: &str = "egress-agent";
pub(super) const ROUTER: &str = "egress-router";
pub(super) const PLUGIN: &str = "kubectl-egress";

/// Builds the plugin, which runs where kubectl runs and is in no image.
pub(super) fn build_plugin(root: &Path, arguments: &[&str]) -> Result<()> {
    let mut command = cargo();
    command.args(["build", "--package", PLUGIN]).env_remove("CARGO_BUILD_TARGET");
    run(command.args(arguments).current_dir(root)).context("build kubectl-egress")
}

/// Builds these binaries with this cargo and these arguments; the folder is where it puts them then.
pub(super) fn build<const N: usize>(
    (mut command, names): (Command, [&str; N]),
    root: &Path,
    arguments: &[&str],
    folder: &Path,
    progress: &Progress,
) -> Result<[PathBuf; N]> {
    let (binaries, shown) = (names.map(|name| folder.join(name)), names.join(" and "));
    if !binaries.iter().all(|binary| binary.exists()) {
        progress.step(&format!("building {shown}; the first time takes some minutes"));
    }
    command.arg("build");
    // Whichever binaries: all packages, so that what these share is built once, with the same features.
    for package in [AGENT, ROUTER, PLUGIN] {
        command.args(["--package", package]);
    }
    for name in names {
        command.args(["--bin", name]);
    }
    run(command.args(arguments).current_dir(root)).with_context(|| format!("build {shown}"))?;
    if let Some(missing) = binaries.iter().find(|binary| !binary.exists()) {
        bail!("cargo built no {}: is another target set in a configuration file of cargo?", missing.display());
    }
    Ok(binaries)
}
