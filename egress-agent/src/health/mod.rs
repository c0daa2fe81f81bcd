//! `grpc.health.v1` at the addresses that this node has published: is this node fit to carry egress traffic?
//!
//! Service names `""` and `Service_Egress_IP`, the one that OVN-Kubernetes' probes ask for. Nobody is answered before every
//! watch has synced and the kernel does what the cluster wants: to whoever probes, an agent that starts is an agent that
//! starts again. From then on
//!
//! - [`fitness`] says whether the node can carry egress traffic. It changes the answers; who watches is told, and no
//!   connection ends by it.
//! - [`door`]: who gets in, and how much of the agent one connection can take. [`tls`], where it is given certificates.
//! - [`release`]: what the leader wants to be let go of, and what has been.
//! - [`unserved`]: what the node has been assigned and does not serve. [`selected`]: how many pods each object serves here.
//! - [`touch`] notes what probes of the leader confirm: until when it has surely heard this agent.
//! - [`signature`]: which probes are a leader's. All others are plain health checks: they are told [`fitness`] and change
//!   nothing.
//!
//! A server for each of these addresses; they come and go with these.

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

/// What OVN-Kubernetes calls it.
pub const SERVICE: &str = "Service_Egress_IP";
/// Of an answer: why the node does not serve.
pub const REASON: &str = "egress-agent-reason";
const RETRY: Duration = Duration::from_secs(2);
/// How long an agent that starts waits for the key: without it, it would be a stranger to its leader.
const KEY: Duration = Duration::from_secs(2);
/// How long connections have to end with the server.
const FAREWELL: Duration = Duration::from_millis(100);
/// Requests of one connection at a time. A leader has eight probes on their way at most.
const STREAMS: u32 = 16;
/// Until a request must be there, and answered.
const REQUEST: Duration = Duration::from_secs(5);
/// A request's headers, as HTTP/2 counts them. What a leader says takes up to five kilobytes.
const HEADERS: u32 = 16 * 1024;
/// A request names a service, and nothing else.
const MESSAGE: usize = 1024;
/// What may be on its way of one request, and of all of a connection: HTTP/2 has nothing smaller.
const WINDOW: (u32, u32) = (4096, 65_535);
/// Between two pings of a connection that says nothing, and until each is answered.
const PING: Duration = Duration::from_secs(10);

/// How to serve.
#[derive(Clone, Debug)]
pub struct Settings {
    pub port: u16,
    /// Plaintext without it.
    pub tls: Option<Tls>,
    /// The total timeout of this agent, which should be the leader's too.
    pub total_timeout: Duration,
}

/// What the answers are made from.
pub struct Facts {
    pub ready: watch::Receiver<Ready>,
    /// How many pods each object serves here.
    pub selected: watch::Receiver<SelectedPods>,
    pub uplink: watch::Receiver<UplinkState>,
    /// The hand-overs that this node has obeyed.
    pub released: watch::Receiver<Acknowledgements>,
    /// The overlay's port, while questions that come through it are answered.
    pub overlay: watch::Receiver<Option<u16>>,
    /// The number of the latest end of an endless lease that the programs have obeyed.
    pub bounded: watch::Receiver<Option<u64>>,
    /// When a next hop of this node answered last.
    pub next_hop: watch::Receiver<Option<Instant>>,
    pub nodes: NodeAddresses,
    /// What probes are signed with that are believed, and the name that they are to be for.
    pub key: SharedKey,
    pub node_name: String,
}

/// What probes tell.
pub struct Reports {
    /// As of when the leader has surely heard this agent.
    pub heard: watch::Sender<Option<Instant>>,
    /// The leader's total timeout.
    pub total: watch::Sender<Option<Duration>>,
    /// The hand-overs that this node is to obey.
    pub orders: watch::Sender<Acknowledgements>,
    /// Of this agent's API server: whether it has gone back is asked by controllers often, and told with their probes.
    pub outages: ApiOutages,
    /// The node of the controller that asks.
    pub leader: watch::Sender<Option<String>>,
    /// Where connections that are refused are counted.
    pub meters: Meters,
}

/// Serves until told to stop.
pub async fn serve(settings: Settings, facts: Facts, told: Reports, stop: CancellationToken) {
    let Facts { mut ready, selected, mut uplink, released, overlay, bounded, next_hop, nodes, key, node_name } = facts;
    let door = Acceptor::new(nodes, told.meters.clone());
    let has_key = key.clone();
    let known = service::Known { released, overlay, bounded, next_hop, selected };
    let service = HealthService::new(settings.total_timeout, (key, node_name), known, told).await;
    let mut servers: BTreeMap<IpAddr, DropGuard> = BTreeMap::new();
    let mut said = None;
    let _known = timeout(KEY, stop.run_until_cancelled(has_key.known())).await;
    loop {
        let now = ready.borrow_and_update().clone();
        let obstacle = ServingObstacle::of(now.serving, &uplink.borrow_and_update());
        if said.as_ref() != Some(&obstacle) && !now.addresses.is_empty() {
            match &obstacle {
                Some(obstacle) => warn!("this node cannot carry egress traffic: {obstacle}"),
                None => info!("this node can carry egress traffic"),
            }
            said = Some(obstacle.clone());
        }
        service.set(obstacle, now.unserved).await;
        servers.retain(|address, _| now.addresses.contains(address));
        for address in &now.addresses {
            servers.entry(*address).or_insert_with(|| {
                let token = stop.child_token();
                let address = SocketAddr::new(*address, settings.port);
                let serve = serve_on(address, (settings.tls.clone(), door.clone()), service.clone(), token.clone());
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

/// What one connection can have of the agent.
fn bounded() -> Server {
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
    (tls, door): (Option<Tls>, Acceptor),
    service: HealthService,
    stop: CancellationToken,
) {
    let mut failing = false;
    loop {
        match TcpListener::bind(address).await {
            Ok(listener) => {
                info!(%address, tls = tls.is_some(), "answering health checks");
                let ended = stop.clone().cancelled_owned();
                let server = bounded().add_service(service.clone().into_server());
                let plain = door.clone().guests(listener);
                let served = match &tls {
                    Some(tls) => Either::Left(server.serve_with_incoming_shutdown(tls.incoming(plain), ended)),
                    None => Either::Right(server.serve_with_incoming_shutdown(plain, ended)),
                };
                tokio::select! {
                    served = served => {
                        if let Err(error) = served {
                            warn!(%address, %error, "health checks are not answered any more; trying again");
                        }
                    }
                    // Whoever watches stays connected for ever.
                    () = async { stop.cancelled().await; tokio::time::sleep(FAREWELL).await } => {}
                }
                failing = false;
            }
            // The address may not be on the management port yet.
            Err(error) if !failing => {
                warn!(%address, %error, "cannot answer health checks; trying again");
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
