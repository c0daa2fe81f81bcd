//! `egress-agent cleanup`.

use clap::Args;
use tokio::signal::unix::{SignalKind, signal};

use super::interfaces::detect_uplink;
use super::{CliError, NodeArgs};
use crate::dataplane;

#[derive(Args, Debug)]
pub(super) struct CleanupArgs {
    #[command(flatten)]
    node: NodeArgs,
    /// Stay when all is removed, until told to stop by a signal: the pods of a DaemonSet must not end
    #[arg(long, env = "EGRESS_AGENT_STAY")]
    stay: bool,
}

pub(super) fn run(args: &CleanupArgs) -> Result<(), CliError> {
    let settings = args.node.settings_for_removal(detect_uplink());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        // Before anything is said: the first process of a container does not end by a signal that it does not wait for.
        let stopped = args.stay.then(stopped).transpose()?;
        clean_up(&settings).await?;
        if let Some(stopped) = stopped {
            stopped.await;
        }
        Ok(())
    })
}

async fn clean_up(settings: &dataplane::Settings) -> Result<(), CliError> {
    let report = dataplane::cleanup(settings).await?;
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

fn stopped() -> std::io::Result<impl Future<Output = ()>> {
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    })
}
