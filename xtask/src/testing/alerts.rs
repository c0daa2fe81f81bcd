//! `cargo xtask alerts`: the alert rules of deploy/monitoring before made series, by Prometheus' own `promtool`.
//!
//! Where it is not installed, the distribution's package is unpacked below the target folder. It is large, and says nothing
//! of the code, so the tests leave it to `.ci/run`; that the rules name metrics which exist is a test of the agent's.

use std::path::PathBuf;
use std::process::{Command, ExitCode};

use anyhow::Result;

use egress_toolchain::debs::PackageLists;
use egress_toolchain::{Paths, Progress, debs, packages, run};

const PROGRAM: &str = "promtool";
/// That it comes in.
const PACKAGE: &str = "prometheus";

pub(crate) fn alerts() -> Result<ExitCode> {
    let progress = Progress::start();
    let paths = Paths::find()?;
    let promtool = promtool(&paths, &progress)?;
    let folder = paths.root.join("deploy/monitoring");
    for arguments in [["check", "rules", "alerts.yaml"], ["test", "rules", "alerts_test.yaml"]] {
        progress.step(&format!("{PROGRAM} {}", arguments.join(" ")));
        run(Command::new(&promtool).args(arguments).current_dir(&folder))?;
    }
    progress.step("each alert comes when it should, and not before");
    Ok(ExitCode::SUCCESS)
}

fn promtool(paths: &Paths, progress: &Progress) -> Result<PathBuf> {
    if let Some(installed) = packages::find(PROGRAM) {
        return Ok(installed);
    }
    let folder = paths.target.join(PACKAGE);
    if !folder.exists() {
        let choose = || Ok(vec![PACKAGE.to_owned()]);
        debs::fetch((&folder, PROGRAM), &PackageLists::OfMachine, progress, choose, |_| Ok(()))?;
    }
    Ok(debs::root(&folder).join("usr/bin").join(PROGRAM))
}
