//! `egress-agent codegen`: what `cargo xtask codegen` writes into the repository.

mod configuration;
mod reasons;

use clap::{Args, CommandFactory, ValueEnum};

use super::{Cli, CliError};
use crate::kube::crd;
use crate::metrics::page;

#[derive(Args, Debug)]
pub(super) struct CodegenArgs {
    what: What,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum What {
    /// The CustomResourceDefinition of EgressIP
    Crd,
    /// The one of EgressNode
    EgressNodes,
    /// The tables of flags, variables and keys
    Configuration,
    /// The tables of metrics
    Metrics,
    /// The tables of verdicts that somebody may have to do something about
    Reasons,
}

pub(super) fn run(args: &CodegenArgs) -> Result<(), CliError> {
    match args.what {
        What::Crd => print!("{}", crd::manifest()?),
        What::EgressNodes => print!("{}", crd::node_manifest()?),
        What::Configuration => print!("{}", configuration::sections(&Cli::command())),
        What::Metrics => print!("{}", page::tables()),
        What::Reasons => print!("{}", reasons::tables()),
    }
    Ok(())
}
