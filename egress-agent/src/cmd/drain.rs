//! `egress-agent drain`: moves a node's egress IPs to other nodes by hand-over ([`egress_kube::drain`]).

use std::path::PathBuf;

use clap::Args;

use crate::cmd::CliError;
use egress_kube::client;
use egress_kube::drain::{DrainLine, DrainRequest, drain};

#[derive(Args, Debug)]
pub(super) struct DrainArgs {
    /// Node whose egress IPs move to other nodes
    #[arg(value_name = "NODE", env = "EGRESS_AGENT_NODE_NAME")]
    node: String,
    /// Undo the drain: the node may get egress IPs again; moved addresses stay where they are
    #[arg(long, env = "EGRESS_AGENT_DRAIN_UNDO")]
    undo: bool,
    /// Seconds to wait until all addresses have moved; the drain continues after that; 0: no limit
    #[arg(long, env = "EGRESS_AGENT_DRAIN_TIMEOUT", default_value_t = 60, value_name = "SECONDS")]
    timeout: u64,
    /// Kubeconfig for the API server [default: kubectl's rules, else that of a pod of the cluster]
    #[arg(long, env = "EGRESS_AGENT_KUBECONFIG", value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
}

pub(super) fn run(args: &DrainArgs) -> Result<(), CliError> {
    let DrainArgs { node, undo, timeout, .. } = args;
    let undo_command = format!("egress-agent drain --undo {node}");
    let request = DrainRequest { node: node.clone(), undo: *undo, timeout: *timeout, undo_command };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let client = client::connect_as_user(args.kubeconfig.as_deref()).await?;
        Ok(drain(client, &request, |line: DrainLine| line.print()).await?)
    })
}
