//! `kubectl egress`: what an administrator asks about egress IPs, answered over all nodes.
//!
//! `kubectl` runs this binary by its name. It reads the API server by the kube client, and runs commands of `egress-agent` in the
//! agents' pods by `kubectl exec` ([`exec`]): kubectl is there, since it started the plugin, and it handles proxies, terminals,
//! signals and exit codes. One module for each command; what is found is judged by pure functions.

mod agents;
mod arguments;
mod bundle;
mod check;
mod cluster;
mod drain;
mod drops;
mod error;
mod exec;
mod node_commands;
mod trace;
mod who;

use std::process::ExitCode;

use clap::Parser;

use crate::arguments::{Cli, PluginCommand};
use crate::cluster::ClusterApi;
use crate::error::PluginError;
use crate::exec::{KubectlExec, printable};

/// Wrong usage ends the process with code 2, any other failure with 1, and a command in an agent's pod with its own code.
fn main() -> ExitCode {
    let cli = Cli::parse();
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return failed(&PluginError::Runtime(error)),
    };
    runtime.block_on(run(&cli)).unwrap_or_else(|error| failed(&error))
}

fn failed(error: &PluginError) -> ExitCode {
    eprintln!("error: {}", printable(&error.to_string()));
    ExitCode::FAILURE
}

async fn run(cli: &Cli) -> Result<ExitCode, PluginError> {
    let cluster = ClusterApi::connect(&cli.connection).await?;
    let exec = KubectlExec::new(&cli.connection);
    match &cli.command {
        PluginCommand::Status(args) => node_commands::status(args, &cluster, &exec).await,
        PluginCommand::Nat(args) => node_commands::nat(args, &cluster, &exec).await,
        PluginCommand::Drops(args) => drops::run(args, &cluster, &exec).await,
        PluginCommand::Trace(args) => trace::run(args, &cluster, &exec).await,
        PluginCommand::Who(args) => who::run(args, &cluster, &exec).await,
        PluginCommand::Drain(args) => drain::run(args, &cluster).await,
        PluginCommand::Check(args) => check::run(args, &cluster).await,
        PluginCommand::Bundle(args) => bundle::run(args, &cluster, &exec).await,
    }
}
