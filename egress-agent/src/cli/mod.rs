//! What users type. Every flag has an environment variable; a flag beats it.

mod cleanup;
mod codegen;
mod interfaces;
mod logging;
mod run;
mod timeouts;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};

use crate::dataplane::names::DEFAULT_BPFFS;
use crate::dataplane::{self, StartError};
use crate::kube::client::ClientError;

#[derive(Parser)]
#[command(name = "egress-agent", version, about = "Gives Kubernetes pods a stable source address")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Serve this node, and lead the cluster's assignment when elected
    Run(Box<run::RunArgs>),
    /// Remove every trace of the agent from this node's kernel
    Cleanup(cleanup::CleanupArgs),
    /// Print a file that is generated from code
    #[command(hide = true)]
    Codegen(codegen::CodegenArgs),
}

/// Where on this node.
#[derive(Args, Debug)]
struct NodeArgs {
    /// Interface towards the outside [default: breth0, else br-ex, else that of the default route]
    #[arg(long, env = "EGRESS_AGENT_UPLINK")]
    uplink: Option<String>,
    /// Interface by which pod traffic enters the host
    #[arg(long, env = "EGRESS_AGENT_MGMT_PORT", default_value = "ovn-k8s-mp0")]
    mgmt_port: String,
    /// Directory of pinned programs and maps, on a BPF file system
    #[arg(long, env = "EGRESS_AGENT_BPFFS", default_value = DEFAULT_BPFFS)]
    bpffs: PathBuf,
}

impl NodeArgs {
    fn settings(&self) -> Result<dataplane::Settings, CliError> {
        let uplink = match &self.uplink {
            Some(uplink) => uplink.clone(),
            None => interfaces::detect_uplink().ok_or(CliError::NoUplink)?,
        };
        let mut settings = dataplane::Settings::new(uplink, self.mgmt_port.clone());
        settings.bpffs.clone_from(&self.bpffs);
        Ok(settings)
    }
}

/// Why a command ended badly: one line that says what to do.
#[derive(Debug, thiserror::Error)]
enum CliError {
    #[error("no interface breth0 or br-ex and no default route: name the interface towards the outside with --uplink")]
    NoUplink,
    #[error(transparent)]
    Client(#[from] ClientError),
    #[error(transparent)]
    Start(#[from] StartError),
    #[error("--log-level {level:?} is not understood: {source}; try info, debug, or egress_agent=debug,warn")]
    LogLevel { level: String, source: tracing_subscriber::filter::ParseError },
    #[error("cannot print the CRD: {0}")]
    Manifest(#[from] serde_yaml::Error),
    #[error("cannot start: {0}")]
    Runtime(#[from] std::io::Error),
    #[error("{0} things could not be removed, see above; run it again when they are free")]
    NotClean(usize),
}

/// Runs what the command line says. Wrong usage ends the process with code 2, everything else that fails with 1.
pub fn main() -> ExitCode {
    let outcome = match Cli::parse().command {
        Command::Run(args) => run::run(&args),
        Command::Cleanup(args) => cleanup::run(&args),
        Command::Codegen(args) => codegen::run(&args),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn every_flag_has_an_environment_variable_and_a_description() {
        let command = Cli::command();
        command.clone().debug_assert();
        for subcommand in command.get_subcommands().filter(|sub| !sub.is_hide_set()) {
            for argument in subcommand.get_arguments().filter(|argument| argument.get_id() != "help") {
                assert!(argument.get_env().is_some(), "{} has no variable", argument.get_id());
                assert!(argument.get_help().is_some(), "{} has no description", argument.get_id());
            }
        }
    }
}
