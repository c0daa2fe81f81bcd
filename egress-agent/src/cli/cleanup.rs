//! `egress-agent cleanup`.

use clap::Args;
use tokio::signal::unix::{SignalKind, signal};

use super::{CliError, NodeArgs};
use crate::dataplane;

#[derive(Args, Debug)]
pub(super) struct CleanupArgs {
    #[command(flatten)]
    node: NodeArgs,
    /// Stay when all is removed, until told to stop: the pods of a DaemonSet must not end
    #[arg(long, env = "EGRESS_AGENT_STAY")]
    stay: bool,
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
    if !report.problems.is_empty() {
        return Err(CliError::NotClean(report.problems.len()));
    }
    if args.stay {
        runtime.block_on(stopped())?;
    }
    Ok(())
}

/// As the first process of a container it would not end by a signal that it does not wait for.
async fn stopped() -> std::io::Result<()> {
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    Ok(())
}
