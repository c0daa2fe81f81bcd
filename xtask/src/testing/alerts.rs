//! `cargo xtask alerts`: the alert rules of deploy/monitoring before made series, by Prometheus' own `promtool`. The tests leave it
//! to `.ci/run`; that the rules name metrics which exist is a test of the agent's.

use std::process::{Command, ExitCode};

use anyhow::Result;

use egress_toolchain::{Paths, Progress, prometheus, run};

const PROGRAM: &str = "promtool";

pub(crate) fn alerts() -> Result<ExitCode> {
    let progress = Progress::start();
    let paths = Paths::find()?;
    let promtool = prometheus::program(PROGRAM, &paths, &progress)?;
    let folder = paths.root.join("deploy/monitoring");
    for arguments in [["check", "rules", "alerts.yaml"], ["test", "rules", "alerts_test.yaml"]] {
        progress.step(&format!("{PROGRAM} {}", arguments.join(" ")));
        run(Command::new(&promtool).args(arguments).current_dir(&folder))?;
    }
    progress.step("each alert comes when it should, and not before");
    Ok(ExitCode::SUCCESS)
}
