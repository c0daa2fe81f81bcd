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
mod completion;
mod drain;
mod drops;
mod error;
mod exec;
mod node_commands;
mod trace;
mod who;

use std::io;
use std::process::ExitCode;

use clap::{Command, CommandFactory, Parser};

use crate::arguments::{Cli, PluginCommand};
use crate::cluster::ClusterApi;
use crate::completion::Completion;
use crate::error::PluginError;
use crate::exec::{KubectlExec, printable};

/// Wrong usage ends the process with code 2, any other failure with 1, and a command in an agent's pod with its own code.
pub fn main() -> ExitCode {
    let mut words = std::env::args_os();
    if words.next().is_some_and(|program| completion::is_asked_for(&program)) {
        return complete(words.map(|word| word.to_string_lossy().into_owned()).collect());
    }
    let cli = Cli::parse();
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return failed(&PluginError::Runtime(error)),
    };
    runtime.block_on(run(&cli)).unwrap_or_else(|error| failed(&error))
}

/// The command line by the plugin's file name, which manual pages have and `man` looks for.
pub fn definition() -> Command {
    Cli::command().name("kubectl-egress")
}

/// What cannot be printed is not completed.
fn complete(words: Vec<String>) -> ExitCode {
    let mut definition = Cli::command();
    definition.build();
    let written = Completion::of(&definition, &words).write(&mut io::stdout().lock());
    if written.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
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

#[cfg(test)]
mod tests {
    use super::*;

    /// As `cargo xtask man` writes them, with the line that a user types.
    #[test]
    fn every_command_has_a_manual_page() {
        let folder = std::env::temp_dir().join(format!("kubectl-egress-man-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        clap_mangen::generate_to(definition(), &folder).expect("pages");
        let page = |name: &str| {
            let file = folder.join(name);
            std::fs::read_to_string(&file).unwrap_or_else(|error| panic!("{}: {error}", file.display()))
        };
        assert!(page("kubectl-egress.1").contains("kubectl\\-egress\\-who(1)"));
        for command in Cli::command().get_subcommands() {
            let page = page(&format!("kubectl-egress-{}.1", command.get_name()));
            assert!(page.contains(&format!("\\fBkubectl egress {}\\fR", command.get_name())), "{page}");
            for argument in command.get_arguments() {
                let long = argument.get_long().unwrap_or_default().replace('-', "\\-");
                assert!(page.contains(&long), "{} in {page}", argument.get_id());
            }
        }
        std::fs::remove_dir_all(&folder).expect("it exists");
    }
}
