//! One agent: watches, the node's half and the controller's half, from start to clean stop.
//!
//! ```text
//! kube::watch ─┬─> reconcile: compiler -> plan -> executor ──> ready ──> health
//!              └─> controller::leader (writes while controller::leadership says so)
//! ```
//!
//! Generic over the executor, so that everything but the kernel runs in a test.

use futures::{Stream, StreamExt};
use kube::Client;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use crate::controller::leader::Leader;
use crate::controller::leadership::{campaign, leadership};
use crate::health;
use crate::kube::events::Events;
use crate::kube::status::StatusWriter;
use crate::kube::watch::changes;
use crate::model::desired::Settings;
use crate::model::executor::Executor;
use crate::model::view::Change;
use crate::reconcile::{Ready, Reconciler};

#[derive(Clone, Debug)]
pub struct AgentSettings {
    pub model: Settings,
    /// Where the leader's Lease is.
    pub namespace: String,
    /// Zero for no health server.
    pub health_port: u16,
}

/// Runs until told to stop. What the executor did stays done.
pub async fn run<E: Executor + Send>(client: Client, settings: AgentSettings, executor: E, stop: CancellationToken) {
    let AgentSettings { model, namespace, health_port } = settings;
    let node_name = model.node_name.clone();
    let events = Events::new(client.clone(), &node_name);
    let (ready, is_ready) = watch::channel(Ready::default());
    let (published, leads) = leadership();
    let (to_node, for_node) = mpsc::unbounded_channel();
    let (to_leader, for_leader) = mpsc::unbounded_channel();

    let reconciler = Reconciler::new(model, executor, Some(events.clone()), ready);
    let leader = Leader::new(StatusWriter::new(client.clone()), events, leads);
    let health = async {
        if health_port != 0 {
            health::serve(health_port, is_ready, stop.clone()).await;
        }
    };
    tokio::join!(
        fan_out(changes(&client, &node_name), to_node, to_leader, stop.clone()),
        reconciler.run(for_node, stop.clone()),
        leader.run(for_leader, stop.clone()),
        campaign(client.clone(), &namespace, &node_name, published, stop.clone()),
        health,
    );
}

/// Every change goes to both halves. Neither waits for the other: a slow API server must not hold up the kernel.
async fn fan_out(
    changes: impl Stream<Item = Change>,
    node: mpsc::UnboundedSender<Change>,
    leader: mpsc::UnboundedSender<Change>,
    stop: CancellationToken,
) {
    let mut changes = std::pin::pin!(changes.take_until(stop.cancelled_owned()));
    while let Some(change) = changes.next().await {
        // A half that has ended was told to stop.
        let both = (leader.send(change.clone()), node.send(change));
        if both.0.is_err() && both.1.is_err() {
            return;
        }
    }
}
