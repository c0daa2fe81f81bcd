//! `kubectl egress drain`: as `egress-agent drain`, by the administrator's rights.

use std::process::ExitCode;

use egress_kube::drain::{DrainLine, DrainRequest, drain};

use crate::arguments::DrainCommandArgs;
use crate::cluster::ClusterApi;
use crate::error::PluginError;

pub(crate) async fn run(args: &DrainCommandArgs, cluster: &ClusterApi) -> Result<ExitCode, PluginError> {
    let DrainCommandArgs { node, undo, timeout } = args;
    let undo_command = format!("kubectl egress drain {node} --undo");
    let request = DrainRequest { node: node.clone(), undo: *undo, timeout: *timeout, undo_command };
    drain(cluster.client.clone(), &request, |line: DrainLine| line.print()).await?;
    Ok(ExitCode::SUCCESS)
}
