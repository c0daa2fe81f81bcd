//! `egress-agent drain`: a node's egress IPs go to other nodes, by plan, and it gets no others until that is taken back.
//!
//! It writes one annotation on the Node, which the leader obeys, and then watches what becomes of the addresses. It needs
//! no agent on the machine where it is typed: an administrator's kubeconfig will do, or an agent's pod.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Args;
use kube::Client;

use super::CliError;
use crate::controller::draining::{held, stays};
use crate::kube::administration::{Administration, Cluster, Refused};
use crate::kube::client;
use crate::model::view::parse_egress_ip;

/// Between two looks.
const PACE: Duration = Duration::from_millis(300);
/// What nobody else can take is said to stay when it has stayed for so long: the leader may know of a node since a moment.
const SETTLE: Duration = Duration::from_secs(2);
/// How long a node that has nothing more may go on passing on what comes late.
const FAREWELL: Duration = Duration::from_secs(6);

#[derive(Args, Debug)]
pub(super) struct DrainArgs {
    /// Node whose egress IPs are to go to others; in an agent's pod its own
    #[arg(value_name = "NODE", env = "EGRESS_AGENT_NODE_NAME")]
    node: String,
    /// Take it back: the node may get egress IPs again; what has gone stays where it is
    #[arg(long, env = "EGRESS_AGENT_DRAIN_UNDO")]
    undo: bool,
    /// Seconds to wait for all of them to be elsewhere; 0: for ever
    #[arg(long, env = "EGRESS_AGENT_DRAIN_TIMEOUT", default_value_t = 60, value_name = "SECONDS")]
    timeout: u64,
    /// How to reach the API server [default: as kubectl does, else as a pod of the cluster]
    #[arg(long, env = "EGRESS_AGENT_KUBECONFIG")]
    kubeconfig: Option<PathBuf>,
}

/// Why a node is not drained.
#[derive(Debug, thiserror::Error)]
pub(super) enum DrainError {
    #[error("there is no node {0}: kubectl get nodes")]
    UnknownNode(String),
    #[error(transparent)]
    Refused(#[from] Refused),
    #[error("{node} is drained as far as can be; {}, and served", stay(*left))]
    Stays { node: String, left: usize },
    #[error(
        "{node} is not drained within {seconds} s: {} there so far; it goes on behind this command. Does an agent lead (kubectl get \
         lease -A), and does the one of {node} run?",
        stay(*left)
    )]
    Late { node: String, seconds: u64, left: usize },
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
    let cluster = Administration::new(client);
    if !cluster.set_drained(node, !undo).await? {
        return Err(DrainError::UnknownNode(node.clone()));
    }
    if *undo {
        println!("{node} may have egress IPs again; none of them comes back by itself");
        return Ok(());
    }
    let begin = Instant::now();
    let mut watch = Watch::begin(node, &cluster.look().await?);
    loop {
        if watch.is_done(&cluster.look().await?, begin) {
            println!(
                "{node} is drained: no egress IP is served there, and none comes until `egress-agent drain --undo {node}`"
            );
            return Ok(());
        }
        if let Some(left) = watch.all_stay() {
            return Err(DrainError::Stays { node: node.clone(), left });
        }
        if *timeout != 0 && begin.elapsed() >= Duration::from_secs(*timeout) {
            watch.name_the_rest();
            return Err(DrainError::Late { node: node.clone(), seconds: *timeout, left: watch.held.len() });
        }
        tokio::time::sleep(PACE).await;
    }
}

/// What has been seen, and said.
struct Watch<'a> {
    node: &'a str,
    held: BTreeMap<IpAddr, String>,
    /// What cannot go, why, and since when that is so.
    stays: BTreeMap<IpAddr, String>,
    since: Instant,
    /// Since when nothing is held.
    empty: Option<Instant>,
}

impl<'a> Watch<'a> {
    fn begin(node: &'a str, cluster: &Cluster) -> Self {
        let held = held(&cluster.objects, node);
        match held.len() {
            0 => println!("{node} has no egress IPs"),
            some => println!("{node} has {}", count(some)),
        }
        Self { node, held, stays: BTreeMap::new(), since: Instant::now(), empty: None }
    }

    /// Takes a look in, and says what is new.
    fn is_done(&mut self, cluster: &Cluster, begin: Instant) -> bool {
        let now = held(&cluster.objects, self.node);
        for (address, object) in &self.held {
            if !now.contains_key(address) {
                println!(
                    "{address} ({object}): {}, after {:.1} s",
                    whereto(cluster, *address),
                    begin.elapsed().as_secs_f64()
                );
            }
        }
        for (address, object) in now.iter().filter(|(address, _)| !self.held.contains_key(address)) {
            println!("{address} ({object}) has come to {}", self.node);
        }
        self.held = now;
        let stays = stays(&cluster.objects, &cluster.nodes, self.node);
        if stays != self.stays {
            (self.stays, self.since) = (stays, Instant::now());
        }
        if !self.held.is_empty() {
            self.empty = None;
            return false;
        }
        let since = *self.empty.get_or_insert_with(Instant::now);
        // Its agent passes on what comes late for as long as it has something to say.
        let says_nothing = cluster.nodes.get(self.node).is_none_or(|node| node.released.is_empty());
        says_nothing || since.elapsed() > FAREWELL
    }

    /// How many are left, where none of them can go.
    fn all_stay(&self) -> Option<usize> {
        let (held, stay): (BTreeSet<_>, BTreeSet<_>) = (self.held.keys().collect(), self.stays.keys().collect());
        let settled = !held.is_empty() && held.is_subset(&stay) && self.since.elapsed() >= SETTLE;
        if settled {
            self.name_the_rest();
        }
        settled.then_some(held.len())
    }

    fn name_the_rest(&self) {
        for (address, object) in &self.held {
            let why = self.stays.get(address).map_or("another node could take it", String::as_str);
            println!("{address} ({object}) stays: {why}");
        }
    }
}

fn whereto(cluster: &Cluster, address: IpAddr) -> String {
    let items = cluster.objects.values().flat_map(|object| &object.items);
    let mut there = items.filter(|item| parse_egress_ip(&item.egress_ip) == Some(address));
    there
        .next()
        .map_or_else(|| "no object has it assigned any more".to_owned(), |item| format!("moved to {}", item.node))
}
