//! What all commands that show something of this node have in common.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use egress_datapath::names::DEFAULT_BPFFS;

/// Where an agent answers.
pub(super) const DEFAULT_SOCKET: &str = "/run/egress-agent/agent.sock";

/// Where the answer comes from, and how it is shown.
#[derive(Args, Debug)]
pub(super) struct PageArgs {
    /// Socket on which the agent answers, which knows names
    #[arg(long, env = "EGRESS_AGENT_SOCKET", value_name = "PATH", default_value = DEFAULT_SOCKET)]
    pub(super) socket: PathBuf,
    /// Directory of pinned programs and maps, which are there without an agent too
    #[arg(long, env = "EGRESS_AGENT_BPFFS", value_name = "DIRECTORY", default_value = DEFAULT_BPFFS)]
    pub(super) bpffs: PathBuf,
    /// Form of the answer
    #[arg(short, long, env = "EGRESS_AGENT_OUTPUT", value_name = "FORM", default_value = "table")]
    pub(super) output: Output,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Output {
    /// For people
    Table,
    /// For programs: everything
    Json,
}
