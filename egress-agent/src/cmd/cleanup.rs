//! `egress-agent cleanup`.

use std::path::PathBuf;

use clap::Args;
use tokio::signal::unix::{SignalKind, signal};

use crate::cmd::interfaces::detect_uplink;
use crate::cmd::{CliError, NodeArgs, cni};
use egress_datapath;

#[derive(Args, Debug)]
pub(super) struct CleanupArgs {
    #[command(flatten)]
    node: NodeArgs,
    /// Directory of the CNI configurations, to remove the plugin from the chain [default: leave the chain alone]
    #[arg(long, env = "EGRESS_AGENT_CNI_CONF_DIR", value_name = "DIRECTORY", requires = "cni_bin_dir")]
    cni_conf_dir: Option<PathBuf>,
    /// Directory of the CNI binaries, from which the plugin is removed
    #[arg(long, env = "EGRESS_AGENT_CNI_BIN_DIR", value_name = "DIRECTORY", requires = "cni_conf_dir")]
    cni_bin_dir: Option<PathBuf>,
    /// Wait for a signal after the removal: pods of a DaemonSet must not end
    #[arg(long, env = "EGRESS_AGENT_STAY")]
    stay: bool,
}

pub(super) fn run(args: &CleanupArgs) -> Result<(), CliError> {
    let settings = args.node.settings_for_removal(detect_uplink());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        // Before any output: a container's first process ignores signals that it does not handle.
        let stopped = args.stay.then(stopped).transpose()?;
        clean_up(&settings, args).await?;
        if let Some(stopped) = stopped {
            stopped.await;
        }
        Ok(())
    })
}

async fn clean_up(settings: &egress_datapath::Settings, args: &CleanupArgs) -> Result<(), CliError> {
    let mut report = egress_datapath::cleanup(settings).await?;
    if let (Some(conf_dir), Some(bin_dir)) = (&args.cni_conf_dir, &args.cni_bin_dir) {
        match cni::remove(conf_dir, bin_dir) {
            Ok(paths) => report.removed.extend(paths.iter().map(|path| format!("the plugin of {}", path.display()))),
            Err(error) => report.problems.push(format!("the plugin of the CNI's chain: {error}")),
        }
    }
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
