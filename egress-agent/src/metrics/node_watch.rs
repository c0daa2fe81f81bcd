//! The loop around [`crate::metrics::warnings`]: checks the node at an interval and reports new warnings.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::watch;
use tokio::task::spawn_blocking;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use crate::metrics::health_page::HealthPage;
use crate::metrics::warnings::{Subject, Warning, Warnings};
use egress_core::model::node::Node;
use egress_core::notes::Notes;
use egress_datapath::nftables::forward_policy;
use egress_kube::events::{Events, Regarding};

const INTERVAL: Duration = Duration::from_secs(10);
/// A host may have very many chains.
const CHAINS_INTERVAL: Duration = Duration::from_secs(300);
const NOTES: &str = "node";

pub async fn run(
    health_page: &HealthPage,
    mut own_node: watch::Receiver<Option<Arc<Node>>>,
    (events, notes): (Events, Option<Notes>),
    stop: CancellationToken,
) {
    let mut warnings = Warnings::default();
    let (mut reported, mut policy) = (Vec::new(), None);
    let mut next_chains = Instant::now();
    while !stop.is_cancelled() {
        let node = own_node.borrow_and_update().clone();
        if health_page.is_attached() && Instant::now() >= next_chains {
            next_chains = Instant::now() + CHAINS_INTERVAL;
            // A list that failed says nothing about the last one.
            policy = forward_policy().await.unwrap_or(policy);
        }
        let snapshot = health_page.snapshot(usize::MAX).await;
        for warning in warnings.update(&snapshot, (node.as_deref(), policy), Instant::now()) {
            report(&events, &warning);
        }
        for ended in warnings.take_ended() {
            info!(reason = ended.reason, condition = ended.condition(), "a warning about this node is resolved");
        }
        let lines = warnings.lines();
        if lines != reported {
            notes.iter().for_each(|notes| notes.set(NOTES, lines.clone()));
            reported = lines;
        }
        tokio::select! {
            () = stop.cancelled() => return,
            Ok(()) = own_node.changed() => {}
            () = tokio::time::sleep(INTERVAL) => {}
        }
    }
}

/// The CNI that enforces network policy in the host's FORWARD chain.
async fn forward_policy() -> Option<Option<&'static str>> {
    let owner = spawn_blocking(forward_policy::policy).await.map_err(std::io::Error::other).flatten();
    owner.inspect_err(|error| debug!(%error, "cannot list the host's chains")).ok()
}

fn report(events: &Events, warning: &Warning) {
    let (Warning { subject, reason, message, .. }, condition) = (warning, warning.condition());
    match subject {
        Subject::Policy { policy, uid } => {
            warn!(%policy, reason, condition, "{message}");
            events.warn(Regarding::policy(policy, uid), reason, message);
        }
        Subject::Node => {
            warn!(reason, condition, "{message}");
            events.warn_of_node(reason, message);
        }
    }
}
