//! Flags of the commands that show this node's state.

use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use egress_terminal::page::{Severity, complain};

use crate::debug::socket::names;
use egress_core::display_names::Names;
use egress_datapath::names::DEFAULT_BPFFS;

/// The agent's socket.
pub(super) const DEFAULT_SOCKET: &str = "/run/egress-agent/agent.sock";

/// The agent's names, for a command that works without an agent too: a warning says that they are missing.
pub(super) async fn names_or_warning(socket: &Path) -> Names {
    names(socket).await.unwrap_or_else(|error| {
        complain(Severity::Warning, &format!("warning: {error}; names of pods, objects and nodes are missing"));
        Names::default()
    })
}

/// The sources of the answer, and its format.
#[derive(Args, Debug)]
pub(super) struct PageArgs {
    /// Socket of the agent, which knows names
    #[arg(long, env = "EGRESS_AGENT_SOCKET", value_name = "PATH", default_value = DEFAULT_SOCKET)]
    pub(super) socket: PathBuf,
    /// Directory of pinned programs and maps, which exist without an agent too
    #[arg(long, env = "EGRESS_AGENT_BPFFS", value_name = "DIRECTORY", default_value = DEFAULT_BPFFS)]
    pub(super) bpffs: PathBuf,
    /// Format of the output
    #[arg(short, long, env = "EGRESS_AGENT_OUTPUT", value_name = "FORMAT", default_value = "table")]
    pub(super) output: Output,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Output {
    /// For people
    Table,
    /// For programs: everything
    Json,
}
