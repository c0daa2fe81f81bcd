//! `egress-agent drain`: a node's egress IPs go to other nodes, by plan, and it gets no others until that is taken back.
//!
//! It writes one annotation on the Node, which the controller obeys, and then watches what becomes of the addresses ([`watch`]).
//! It is typed with an administrator's kubeconfig, anywhere: the accounts of agents and controllers may change no Node.
//!
//! Everything that is read later is read once before the first write, so that missing rights show while nothing has changed.
//! Behind the write a request that fails is said and repeated, since the draining goes on.

pub mod watch;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Args;
use kube::Client;

use crate::cmd::CliError;
use crate::cmd::drain::watch::{Look, Seen, Watch};
use egress_core::keys::DRAIN;
use egress_kube::admin::{AdminClient, Patience, RequestError};
use egress_kube::client;

/// Between two looks.
const PACE: Duration = Duration::from_secs(1);
/// All nodes are listed with every so manieth look: there may be thousands.
const NODES_EVERY: usize = 2;
/// For each request before anything is written, and later.
const FIRST: Duration = Duration::from_secs(10);
const LATER: Duration = Duration::from_secs(5);

#[derive(Args, Debug)]
pub(super) struct DrainArgs {
    /// Node whose egress IPs are to go to others
    #[arg(value_name = "NODE", env = "EGRESS_AGENT_NODE_NAME")]
    node: String,
    /// Take it back: the node may get egress IPs again; what has gone stays where it is
    #[arg(long, env = "EGRESS_AGENT_DRAIN_UNDO")]
    undo: bool,
    /// Seconds to wait for all of them to be elsewhere, while the draining itself goes on; 0: for ever
    #[arg(long, env = "EGRESS_AGENT_DRAIN_TIMEOUT", default_value_t = 60, value_name = "SECONDS")]
    timeout: u64,
    /// Kubeconfig by which the API server is reached [default: as kubectl does, else as a pod of the cluster]
    #[arg(long, env = "EGRESS_AGENT_KUBECONFIG", value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
}

/// Why a node is not drained.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DrainError {
    #[error("there is no node {0}: kubectl get nodes")]
    UnknownNode(String),
    #[error(transparent)]
    Refused(#[from] RequestError),
    #[error("{source}; it may be marked all the same (annotation {DRAIN}): kubectl describe node {node}")]
    Unsure { node: String, source: RequestError },
    #[error("{0} has been deleted meanwhile, and the mark with it; a node that comes with that name is not drained")]
    Deleted(String),
    #[error(
        "somebody has taken the draining of {0} back meanwhile: it may get egress IPs; what has gone stays where it is"
    )]
    TakenBack(String),
    #[error("{node} is drained as far as can be; {}, and served", stay(*left))]
    Stays { node: String, left: usize },
    #[error(
        "{node} has no egress IPs any more, but its agent was not heard to let go of {addresses}: its programs may still answer. \
         Where the agent does not run, power the node off or run `egress-agent cleanup` there"
    )]
    Unsaid { node: String, addresses: String },
    #[error(
        "{node} is not drained within {seconds} s: {} not moved yet; it goes on behind this command. Does a controller lead (kubectl get \
         lease -A), and does the one of {node} run?",
        count(*left)
    )]
    Late { node: String, seconds: u64, left: usize },
    #[error(
        "{node} has no egress IPs, but {seconds} s were too short to see that it is done with its hand-overs: type it again"
    )]
    Short { node: String, seconds: u64 },
}

fn count(some: usize) -> String {
    if some == 1 { "1 egress IP".to_owned() } else { format!("{some} egress IPs") }
}

fn stay(left: usize) -> String {
    format!("{} {}", count(left), if left == 1 { "stays" } else { "stay" })
}

pub(super) fn run(args: &DrainArgs) -> Result<(), CliError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let client = client::connect_as_user(args.kubeconfig.as_deref()).await?;
        Ok(drain(client, args).await?)
    })
}

async fn drain(client: Client, args: &DrainArgs) -> Result<(), DrainError> {
    let DrainArgs { node, undo, timeout, .. } = args;
    let cluster = AdminClient::new(client);
    // What lies beyond the clock is for ever, too.
    let until = if *timeout == 0 { None } else { Instant::now().checked_add(Duration::from_secs(*timeout)) };
    let (first, later) = (Patience { each: FIRST, until }, Patience { each: LATER, until });
    if *undo {
        mark(&cluster, node, false, first).await?;
        println!("{node} may have egress IPs again; none of them comes back by itself");
        return Ok(());
    }
    let before = look(&cluster, node, true, first).await?;
    if before.node.is_none() {
        return Err(DrainError::UnknownNode(node.clone()));
    }
    mark(&cluster, node, true, later).await?;
    let (mut watch, said) = Watch::begin(node, &before.policies, Instant::now());
    println!("{said}");
    println!(
        "it is marked: it gives away what it has, behind this command too, until `egress-agent drain --undo {node}`"
    );
    let mut fails = false;
    for number in 0_usize.. {
        let lists = watch.has_any() && number.is_multiple_of(NODES_EVERY);
        let looked = look(&cluster, node, lists, later).await;
        let left = until.map_or(PACE, |until| until.saturating_duration_since(Instant::now()));
        match looked {
            Ok(look) => {
                fails = false;
                let Seen { said, end } = watch.see(&look, Instant::now());
                said.iter().for_each(|line| println!("{line}"));
                if let Some(end) = end {
                    return end.map(|drained| println!("{drained}"));
                }
            }
            Err(error) if !fails => {
                fails = true;
                eprintln!("{error}{}", if left.is_zero() { "" } else { "; it is asked again" });
            }
            Err(_) => {}
        }
        if left.is_zero() {
            break;
        }
        tokio::time::sleep(PACE.min(left)).await;
    }
    let (said, error) = watch.late(*timeout);
    said.iter().for_each(|line| println!("{line}"));
    Err(error)
}

async fn mark(cluster: &AdminClient, node: &str, drained: bool, patience: Patience) -> Result<(), DrainError> {
    match cluster.set_drained(node, drained, patience).await {
        Ok(true) => Ok(()),
        Ok(false) => Err(DrainError::UnknownNode(node.to_owned())),
        Err(source @ RequestError::Unanswered { .. }) => Err(DrainError::Unsure { node: node.to_owned(), source }),
        Err(source) => Err(source.into()),
    }
}

/// The node before the policies: what it says it has let go of may be gone a moment after the status is written.
async fn look(cluster: &AdminClient, node: &str, lists: bool, patience: Patience) -> Result<Look, RequestError> {
    let own = cluster.node(node, patience).await?;
    let nodes = if lists { Some(cluster.nodes(patience).await?) } else { None };
    Ok(Look { node: own, nodes, policies: cluster.policies(patience).await? })
}

#[cfg(test)]
mod tests;
