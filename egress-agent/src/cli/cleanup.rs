//! `egress-agent cleanup`.

use clap::Args;

use super::{CliError, NodeArgs};
use crate::dataplane;

#[derive(Args, Debug)]
pub(super) struct CleanupArgs {
    #[command(flatten)]
    node: NodeArgs,
}

pub(super) fn run(args: &CleanupArgs) -> Result<(), CliError> {
    let settings = args.node.settings()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let report = runtime.block_on(dataplane::cleanup(&settings))?;
    for line in &report.removed {
        println!("removed {line}");
    }
    for line in &report.problems {
        eprintln!("left {line}");
    }
    if report.removed.is_empty() && report.problems.is_empty() {
        println!("nothing to remove");
    }
    if report.problems.is_empty() { Ok(()) } else { Err(CliError::NotClean(report.problems.len())) }
}
