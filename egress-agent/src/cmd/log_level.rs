//! `egress-agent log-level`: the log filter of a running agent, until it ends.

use std::path::PathBuf;

use clap::Args;

use crate::cmd::CliError;
use crate::cmd::page::DEFAULT_SOCKET;
use crate::debug::socket::{AskError, ask};
use crate::debug::{Answer, Request};

#[derive(Args, Debug)]
pub(super) struct LogLevelArgs {
    /// New filter, as --log-level of `run` (info, debug, egress_agent=debug,warn) [default: show the current filter]
    #[arg(value_name = "FILTER", env = "EGRESS_AGENT_LOG_FILTER")]
    filter: Option<String>,
    /// Socket of the agent
    #[arg(long, env = "EGRESS_AGENT_SOCKET", value_name = "PATH", default_value = DEFAULT_SOCKET)]
    socket: PathBuf,
}

pub(super) fn run(args: &LogLevelArgs) -> Result<(), CliError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let request = Request::LogLevel { set: args.filter.clone() };
    match runtime.block_on(ask(&args.socket, request))? {
        Answer::LogLevel(level) => println!("{level}"),
        _ => return Err(AskError::Answered("the agent sends an unexpected answer".to_owned()).into()),
    }
    Ok(())
}
