//! Looks at the node now and then, and tells of what is new ([`crate::metrics::troubles`]).

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::watch;
use tokio::task::spawn_blocking;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use crate::metrics::health_page::HealthPage;
use crate::metrics::troubles::{Subject, Trouble, Troubles};
use egress_core::model::node::Node;
use egress_core::notes::Notes;
use egress_datapath::nftables::forward_policy;
use egress_kube::events::{About, Events};

const INTERVAL: Duration = Duration::from_secs(10);
/// A host may have very many chains.
const CHAINS_INTERVAL: Duration = Duration::from_secs(300);
const NOTES: &str = "node";

/// Until told to stop.
pub async fn follow(
    station: &HealthPage,
    mut own_node: watch::Receiver<Option<Arc<Node>>>,
    (events, notes): (Events, Option<Notes>),
    stop: CancellationToken,
) {
    let mut troubles = Troubles::default();
    let (mut said, mut policy) = (Vec::new(), None);
    let mut look_at_chains = Instant::now();
    while !stop.is_cancelled() {
        let node = own_node.borrow_and_update().clone();
        // Not where there is no kernel to speak of.
        if station.is_attached() && Instant::now() >= look_at_chains {
            look_at_chains = Instant::now() + CHAINS_INTERVAL;
            policy = whose_policy().await;
        }
        for trouble in troubles.look(&station.facts(usize::MAX).await, (node.as_deref(), policy), Instant::now()) {
            tell(&events, &trouble);
        }
        let lines = troubles.lines();
        if lines != said {
            if lines.is_empty() {
                info!("nothing troubles this node any more");
            }
            notes.iter().for_each(|notes| notes.set(NOTES, lines.clone()));
            said = lines;
        }
        tokio::select! {
            () = stop.cancelled() => return,
            Ok(()) = own_node.changed() => {}
            () = tokio::time::sleep(INTERVAL) => {}
        }
    }
}

async fn whose_policy() -> Option<&'static str> {
    let asked = spawn_blocking(forward_policy::policy).await.map_err(std::io::Error::other).flatten();
    asked.inspect_err(|error| debug!(%error, "cannot list the host's chains")).ok().flatten()
}

fn tell(events: &Events, Trouble { subject, reason, message }: &Trouble) {
    match subject {
        Subject::Policy { policy, uid } => {
            warn!(%policy, reason, "{message}");
            events.warn(About { policy, uid, pod: None }, reason, message);
        }
        Subject::Node => {
            warn!(reason, "{message}");
            events.warn_of_node(reason, message);
        }
    }
}
