//! Drain: moves a node's egress IPs to other nodes by hand-over, and assigns it none until it is undone. `egress-agent drain`
//! and `kubectl egress drain` are this.
//!
//! The command sets an annotation on the Node, which the controller obeys, and then watches the addresses ([`watch`]). It
//! needs an administrator's kubeconfig: the accounts of agents and controllers may change no Node.
//!
//! Everything that is read later is read once before the write, so that missing rights show while nothing has changed. After
//! the write a failed request is reported and repeated, since the drain continues.

pub mod watch;

use std::time::{Duration, Instant};

use kube::Client;

use crate::admin::{AdminClient, RequestError, RequestTimeouts};
use crate::drain::watch::{DrainProgress, DrainSnapshot, DrainWatch};
use egress_core::keys::DRAIN;

/// Between two reads.
const INTERVAL: Duration = Duration::from_secs(1);
/// All nodes, of which there may be thousands, are listed with every second read.
const NODES_EVERY: usize = 2;
/// Timeout of each request before the write, and after it.
const TIMEOUT_BEFORE: Duration = Duration::from_secs(10);
const TIMEOUT_AFTER: Duration = Duration::from_secs(5);

#[derive(Clone, Debug)]
pub struct DrainRequest {
    /// Node whose egress IPs move to other nodes.
    pub node: String,
    /// The node may get egress IPs again.
    pub undo: bool,
    /// Seconds to wait; 0: no limit.
    pub timeout: u64,
    /// What the user types to undo it.
    pub undo_command: String,
}

/// A line of the progress.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DrainLine {
    Progress(String),
    /// A request failed, and is repeated.
    Trouble(String),
}

impl DrainLine {
    /// Prints it: trouble on standard error.
    pub fn print(&self) {
        match self {
            Self::Progress(line) => println!("{line}"),
            Self::Trouble(line) => eprintln!("{line}"),
        }
    }
}

/// Why the command ends without a drained node.
#[derive(Debug, thiserror::Error)]
pub enum DrainError {
    #[error("there is no node {0}: kubectl get nodes")]
    UnknownNode(String),
    #[error(transparent)]
    Refused(#[from] RequestError),
    #[error("{source}; the node may be marked nevertheless (annotation {DRAIN}): kubectl describe node {node}")]
    Unsure { node: String, source: RequestError },
    #[error("{0} was deleted, and the mark with it; a new node of that name is not drained")]
    Deleted(String),
    #[error("the drain of {0} was undone: it may get egress IPs; moved addresses stay where they are")]
    Undone(String),
    #[error("{node} is drained as far as possible; {} served", staying(*left))]
    Stays { node: String, left: usize },
    #[error(
        "{node} has no egress IPs, but its agent has not confirmed the release of {addresses}: its programs may still answer. \
         If the agent does not run, power the node off or run `egress-agent cleanup` there"
    )]
    Unconfirmed { node: String, addresses: String },
    #[error(
        "{node} is not drained within {seconds} s: {} not moved yet; the drain continues. Does a controller lead (kubectl get lease \
         -A), and does the agent of {node} run?",
        count(*left)
    )]
    Late { node: String, seconds: u64, left: usize },
    #[error(
        "{node} has no egress IPs, but {seconds} s were too short to confirm that its hand-overs are done: run the command again"
    )]
    Short { node: String, seconds: u64 },
}

fn count(some: usize) -> String {
    if some == 1 { "1 egress IP".to_owned() } else { format!("{some} egress IPs") }
}

fn staying(left: usize) -> String {
    format!("{} {}", count(left), if left == 1 { "stays and is" } else { "stay and are" })
}

/// Reports each line as soon as it is known.
pub async fn drain(client: Client, args: &DrainRequest, report: impl Fn(DrainLine)) -> Result<(), DrainError> {
    let DrainRequest { node, undo, timeout, undo_command } = args;
    let say = |line: String| report(DrainLine::Progress(line));
    let cluster = AdminClient::new(client);
    // A time that the clock cannot represent is no limit either.
    let until = if *timeout == 0 { None } else { Instant::now().checked_add(Duration::from_secs(*timeout)) };
    let (first, later) =
        (RequestTimeouts { each: TIMEOUT_BEFORE, until }, RequestTimeouts { each: TIMEOUT_AFTER, until });
    if *undo {
        mark(&cluster, node, false, first).await?;
        say(format!("{node} may get egress IPs again; nothing moves back by itself"));
        return Ok(());
    }
    let before = read(&cluster, node, true, first).await?;
    if before.node.is_none() {
        return Err(DrainError::UnknownNode(node.clone()));
    }
    mark(&cluster, node, true, later).await?;
    let (mut watch, line) = DrainWatch::start(node, &before.policies, Instant::now());
    say(line);
    say(format!("it is marked: its egress IPs move away, also after this command ends, until `{undo_command}`"));
    let mut fails = false;
    for number in 0_usize.. {
        let lists = watch.has_any() && number.is_multiple_of(NODES_EVERY);
        let state = read(&cluster, node, lists, later).await;
        let left = until.map_or(INTERVAL, |until| until.saturating_duration_since(Instant::now()));
        match state {
            Ok(state) => {
                fails = false;
                let DrainProgress { lines, end } = watch.update(&state, Instant::now());
                lines.into_iter().for_each(say);
                if let Some(end) = end {
                    return end.map(|drained| say(format!("{drained}, and it gets none until `{undo_command}`")));
                }
            }
            Err(error) if !fails => {
                fails = true;
                report(DrainLine::Trouble(format!("{error}{}", if left.is_zero() { "" } else { "; trying again" })));
            }
            Err(_) => {}
        }
        if left.is_zero() {
            break;
        }
        tokio::time::sleep(INTERVAL.min(left)).await;
    }
    let (lines, error) = watch.timed_out(*timeout);
    lines.into_iter().for_each(say);
    Err(error)
}

async fn mark(cluster: &AdminClient, node: &str, drained: bool, patience: RequestTimeouts) -> Result<(), DrainError> {
    match cluster.set_drained(node, drained, patience).await {
        Ok(true) => Ok(()),
        Ok(false) => Err(DrainError::UnknownNode(node.to_owned())),
        Err(source @ RequestError::Unanswered { .. }) => Err(DrainError::Unsure { node: node.to_owned(), source }),
        Err(source) => Err(source.into()),
    }
}

/// Reads the node before the policies: the agent may withdraw an acknowledgement soon after the status is written.
async fn read(
    cluster: &AdminClient,
    node: &str,
    lists: bool,
    patience: RequestTimeouts,
) -> Result<DrainSnapshot, RequestError> {
    let own = cluster.node(node, patience).await?;
    let nodes = if lists { Some(cluster.nodes(patience).await?) } else { None };
    Ok(DrainSnapshot { node: own, nodes, policies: cluster.policies(patience).await? })
}

#[cfg(test)]
mod tests;
