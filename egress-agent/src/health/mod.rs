//! The gRPC health service (`grpc.health.v1`) on the addresses that this node has published: whether the node can carry
//! egress traffic ([`ServingObstacle`]). Service names are `""` and `Service_Egress_IP`, that of OVN-Kubernetes' probes.
//! There is no server before every watch has synced and the kernel is in the desired state, so a starting agent is silent.
//!
//! - [`accept`] bounds connections; [`tls`] is optional.
//! - [`signature`] authenticates the leader's probes. Other requests are plain health checks and change nothing.
//! - [`leader_contact`]: until when the leader has certainly heard this agent, by its probes.
//! - [`handover`]: releases that the leader orders, and those that are done. [`unserved`]: assigned addresses that the node
//!   does not serve. [`pod_counts`]: how many pods each object serves here.

pub mod accept;
pub mod handover;
pub mod leader_contact;
pub mod pod_counts;
pub mod service;
pub mod signature;
pub mod tls;
pub mod unserved;

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use futures::future::Either;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::time::timeout;
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::transport::Server;
use tracing::{info, warn};

use crate::health::accept::Acceptor;
pub use crate::health::accept::NodeAddresses;
use crate::health::service::HealthService;
use crate::health::tls::Tls;
use crate::metrics::Meters;
use egress_core::model::ledger::Acknowledgements;
use egress_core::model::state::SelectedPods;
use egress_core::node_health::fitness::{Ready, ServingObstacle, UplinkState};
use egress_kube::api_outage::ApiOutages;
use egress_kube::health_key::SharedKey;
use egress_supervise::{self, Task};

/// The service name in OVN-Kubernetes.
pub const SERVICE: &str = "Service_Egress_IP";
/// In an answer: why the node does not serve.
pub const REASON: &str = "egress-agent-reason";
const RETRY: Duration = Duration::from_secs(2);
/// How long the start waits for the key, without which the leader does not believe the agent.
const KEY_TIMEOUT: Duration = Duration::from_secs(2);
/// How long open connections may last after the server ends.
const CLOSE_TIMEOUT: Duration = Duration::from_millis(100);
/// Concurrent requests of one connection. A leader has eight probes in flight at most.
const STREAMS: u32 = 16;
/// Timeout of a request with its answer.
const REQUEST: Duration = Duration::from_secs(5);
/// A request's headers, as HTTP/2 counts them. Those of a leader take up to five kilobytes.
const HEADERS: u32 = 16 * 1024;
/// A request has only the name of a service.
const MESSAGE: usize = 1024;
/// HTTP/2 windows of a stream and of a connection; the second is the smallest that HTTP/2 allows.
const WINDOW: (u32, u32) = (4096, 65_535);
/// Interval of pings on a silent connection, and the timeout of each.
const PING: Duration = Duration::from_secs(10);

#[derive(Clone, Debug)]
pub struct HealthSettings {
    pub port: u16,
    /// `None` is plaintext.
    pub tls: Option<Tls>,
    /// The total timeout of this agent, which should be the leader's too.
    pub total_timeout: Duration,
}

/// The state that answers are made from.
pub struct Inputs {
    pub ready: watch::Receiver<Ready>,
    /// How many pods each object serves here.
    pub selected: watch::Receiver<SelectedPods>,
    pub uplink: watch::Receiver<UplinkState>,
    /// The hand-overs for which this node has released its address.
    pub released: watch::Receiver<Acknowledgements>,
    /// The overlay's port, while probes through the overlay are answered.
    pub overlay: watch::Receiver<Option<u16>>,
    /// The number of the latest end of an endless lease that the programs have obeyed.
    pub bounded: watch::Receiver<Option<u64>>,
    /// When a next hop of this node answered last.
    pub next_hop: watch::Receiver<Option<Instant>>,
    pub nodes: NodeAddresses,
    /// The key and the node name that a leader's probes are signed for.
    pub key: SharedKey,
    pub node_name: String,
}

/// What the leader's probes report.
pub struct Reports {
    /// The latest time after which the leader has certainly heard this agent.
    pub confirmed: watch::Sender<Option<Instant>>,
    /// The leader's total timeout.
    pub total: watch::Sender<Option<Duration>>,
    /// The hand-overs for which this node must release its address.
    pub orders: watch::Sender<Acknowledgements>,
    /// The API outages of this agent. Probes report a rollback of the API server, which controllers check often.
    pub outages: ApiOutages,
    /// The node of the probing controller.
    pub leader: watch::Sender<Option<String>>,
    /// Counts refused connections.
    pub meters: Meters,
}

/// Serves until `stop`.
pub async fn serve(settings: HealthSettings, inputs: Inputs, reports: Reports, stop: CancellationToken) {
    let Inputs { mut ready, selected, mut uplink, released, overlay, bounded, next_hop, nodes, key, node_name } =
        inputs;
    let acceptor = Acceptor::new(nodes, reports.meters.clone());
    let has_key = key.clone();
    let sources = service::AnswerSources { released, overlay, bounded, next_hop, selected };
    let service = HealthService::new(settings.total_timeout, (key, node_name), sources, reports).await;
    let mut servers: BTreeMap<IpAddr, DropGuard> = BTreeMap::new();
    let mut logged = None;
    let _known = timeout(KEY_TIMEOUT, stop.run_until_cancelled(has_key.known())).await;
    loop {
        let now = ready.borrow_and_update().clone();
        let obstacle = ServingObstacle::of(now.serving, &uplink.borrow_and_update());
        if logged.as_ref() != Some(&obstacle) && !now.addresses.is_empty() {
            match &obstacle {
                Some(obstacle) => {
                    warn!(condition = "serving", "this node cannot carry egress traffic: {obstacle}");
                }
                None => info!(condition = "serving", "this node can carry egress traffic"),
            }
            logged = Some(obstacle.clone());
        }
        service.set(obstacle, now.unserved).await;
        servers.retain(|address, _| now.addresses.contains(address));
        for address in &now.addresses {
            servers.entry(*address).or_insert_with(|| {
                let token = stop.child_token();
                let address = SocketAddr::new(*address, settings.port);
                let serve = serve_on(address, (settings.tls.clone(), acceptor.clone()), service.clone(), token.clone());
                tokio::spawn(egress_supervise::until(token.clone(), Task::HealthServer, serve));
                token.drop_guard()
            });
        }
        tokio::select! {
            () = stop.cancelled() => break,
            changed = ready.changed() => if changed.is_err() { break },
            Ok(()) = uplink.changed() => {}
        }
    }
    drop(servers);
}

/// A server with the limits of one connection.
fn limited_server() -> Server {
    let (of_stream, of_connection) = WINDOW;
    Server::builder()
        .max_concurrent_streams(STREAMS)
        .http2_max_pending_accept_reset_streams(Some(STREAMS as usize))
        .http2_max_local_error_reset_streams(Some(STREAMS as usize))
        .http2_max_header_list_size(HEADERS)
        .initial_stream_window_size(of_stream)
        .initial_connection_window_size(of_connection)
        .http2_keepalive_interval(Some(PING))
        .http2_keepalive_timeout(Some(PING))
        .timeout(REQUEST)
}

async fn serve_on(
    address: SocketAddr,
    (tls, acceptor): (Option<Tls>, Acceptor),
    service: HealthService,
    stop: CancellationToken,
) {
    let (mut failing, condition) = (false, format!("health-server/{address}"));
    loop {
        match TcpListener::bind(address).await {
            Ok(listener) => {
                info!(%address, tls = tls.is_some(), condition, "answering health checks");
                let ended = stop.clone().cancelled_owned();
                let server = limited_server().add_service(service.clone().into_server());
                let plain = acceptor.clone().admitted(listener);
                let served = match &tls {
                    Some(tls) => Either::Left(server.serve_with_incoming_shutdown(tls.incoming(plain), ended)),
                    None => Either::Right(server.serve_with_incoming_shutdown(plain, ended)),
                };
                tokio::select! {
                    served = served => {
                        if let Err(error) = served {
                            warn!(%address, %error, condition, "the health server has failed; trying again");
                        }
                    }
                    // `Watch` calls never end by themselves.
                    () = async { stop.cancelled().await; tokio::time::sleep(CLOSE_TIMEOUT).await } => {}
                }
                failing = false;
            }
            // The management port may not have the address yet.
            Err(error) if !failing => {
                warn!(%address, %error, condition, "cannot answer health checks; trying again");
                failing = true;
            }
            Err(_) => {}
        }
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(RETRY) => {}
        }
    }
}

#[cfg(test)]
mod tests;
