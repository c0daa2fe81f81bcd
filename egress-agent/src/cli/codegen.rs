//! `egress-agent codegen`: what `cargo xtask codegen` writes into the repository.

use clap::{Arg, Args, CommandFactory, ValueEnum};

use super::{Cli, CliError};
use crate::kube::crd;
use crate::metrics::page;

#[derive(Args, Debug)]
pub(super) struct CodegenArgs {
    what: What,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum What {
    /// The CustomResourceDefinition
    Crd,
    /// The table of the flags of `run`
    Flags,
    /// The tables of metrics
    Metrics,
}

pub(super) fn run(args: &CodegenArgs) -> Result<(), CliError> {
    match args.what {
        What::Crd => print!("{}", crd::manifest()?),
        What::Flags => print!("{}", flags()),
        What::Metrics => print!("{}", page::tables()),
    }
    Ok(())
}

/// As a table in Markdown, from the same definitions that the command line is read by.
fn flags() -> String {
    let mut table = String::from("| flag | variable | default | what it says |\n|---|---|---|---|\n");
    let command = Cli::command();
    let arguments = command.find_subcommand("run").into_iter().flat_map(clap::Command::get_arguments);
    for argument in arguments.filter(|argument| argument.get_id() != "help") {
        let flag = argument.get_long().unwrap_or_default();
        let variable = argument.get_env().unwrap_or_default().to_string_lossy();
        let help = argument.get_help().map(ToString::to_string).unwrap_or_default();
        table += &format!("| `--{flag}` | `{variable}` | {} | {help}{} |\n", default(argument), values(argument));
    }
    table
}

fn default(argument: &Arg) -> String {
    let defaults: Vec<String> =
        argument.get_default_values().iter().map(|value| format!("`{}`", value.to_string_lossy())).collect();
    match defaults.join(", ") {
        none if none.is_empty() && argument.is_required_set() => "required".to_owned(),
        some => some,
    }
}

/// The possible values and what each means, where there is a closed list of them.
fn values(argument: &Arg) -> String {
    if !argument.get_action().takes_values() {
        return String::new();
    }
    let possible = argument.get_possible_values();
    let each = possible.iter().map(|value| match value.get_help() {
        Some(help) => format!("`{}` ({help})", value.get_name()),
        None => format!("`{}`", value.get_name()),
    });
    let list = each.collect::<Vec<_>>().join(", ");
    if list.is_empty() { list } else { format!(": {list}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_are_rows_with_variable_and_default() {
        let table = flags();
        assert!(table.contains("| `--node-name` | `EGRESS_AGENT_NODE_NAME` | required | "), "{table}");
        assert!(table.contains("| `--tunnel-port` | `EGRESS_AGENT_TUNNEL_PORT` | `4794` | "), "{table}");
        assert!(table.contains("`drop`"), "{table}");
        assert!(table.lines().all(|line| line.matches('|').count() == 5), "{table}");
    }
}
