//! Flags of the commands that show this node's state.

use std::io;
use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use egress_terminal::page::{Severity, complain};
use tokio::sync::oneshot;

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

/// Ends with standard input, or never. `kubectl exec --stdin` closes it when its connection is gone, and ends the command in no other
/// way. A thread reads it, since a file cannot be polled; the end of the process ends the thread.
pub(super) async fn end_of_input(is_awaited: bool) {
    if !is_awaited {
        return std::future::pending().await;
    }
    let (ended, end) = oneshot::channel();
    std::thread::spawn(move || {
        // An error is the end too.
        let _read = io::copy(&mut io::stdin().lock(), &mut io::sink());
        // Fails if the command has ended.
        let _waits = ended.send(());
    });
    // The thread sends before it ends.
    let _ended = end.await;
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
