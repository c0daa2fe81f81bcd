//! `egress-agent codegen`: what `cargo xtask codegen` writes into the repository.

use clap::{Args, ValueEnum};

use super::CliError;
use crate::kube::crd;

#[derive(Args, Debug)]
pub(super) struct CodegenArgs {
    what: What,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum What {
    /// The CustomResourceDefinition
    Crd,
}

pub(super) fn run(args: &CodegenArgs) -> Result<(), CliError> {
    match args.what {
        What::Crd => print!("{}", crd::manifest()?),
    }
    Ok(())
}
