//! `egress-agent completion`: the script by which a shell completes commands and flags.

use std::io;

use clap::Args;
use egress_terminal::completion::{self, Shell};

use crate::cmd::{CliError, definition};

#[derive(Args, Debug)]
pub(super) struct CompletionArgs {
    /// Shell that reads the script
    #[arg(env = "EGRESS_AGENT_COMPLETION_SHELL", value_name = "SHELL")]
    shell: Shell,
}

pub(super) fn run(args: &CompletionArgs) -> Result<(), CliError> {
    match completion::write(definition(), args.shell, &mut io::stdout().lock()) {
        // The reader has closed the pipe.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        written => written.map_err(CliError::from),
    }
}
