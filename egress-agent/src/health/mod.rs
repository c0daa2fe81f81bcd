//! `grpc.health.v1` on this node's management addresses: is this node fit to carry egress traffic?
//!
//! Service names `""` and `Service_Egress_IP`, the one that OVN-Kubernetes' probes ask for. Nobody is answered before every
//! watch has synced and the kernel does what the cluster wants: to whoever probes, an agent that starts is an agent that
//! starts again. From then on
//!
//! - [`fitness`] says whether the node can carry egress traffic. It changes the answers; who watches is told, and no
//!   connection ends by it.
//! - [`tls`], where it is given certificates.
//! - [`release`]: what the leader wants to be let go of, and what has been. [`regain`]: what a node would have back.
//! - [`touch`] notes what probes of the leader confirm: until when it has surely heard this agent.
//!
//! A server for each management address; they come and go with these.

pub mod fitness;
pub mod regain;
pub mod release;
mod service;
pub mod tls;
pub mod touch;

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::future::Either;
use tokio::sync::watch;
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;
use tracing::{info, warn};

use crate::fence::regain::Regain;
use crate::model::ledger::{Ledger, Words};
use crate::reconcile::Ready;
use fitness::{Obstacle, Uplink};
use service::HealthService;
use tls::Tls;

/// What OVN-Kubernetes calls it.
pub const SERVICE: &str = "Service_Egress_IP";
/// Of an answer: why the node does not serve.
pub const REASON: &str = "egress-agent-reason";
const RETRY: Duration = Duration::from_secs(2);
/// How long connections have to end with the server.
const FAREWELL: Duration = Duration::from_millis(100);

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
    pub uplink: watch::Receiver<Uplink>,
    /// The hand-overs that this node has obeyed.
    pub released: watch::Receiver<Words>,
    /// The overlay's port, while questions that come through it are answered.
    pub overlay: watch::Receiver<Option<u16>>,
    /// As it was last heard of.
    pub ledger: watch::Receiver<Arc<Ledger>>,
}

/// What probes tell.
pub struct Told {
    /// As of when the leader has surely heard this agent.
    pub heard: watch::Sender<Option<Instant>>,
    /// The leader's total timeout.
    pub total: watch::Sender<Option<Duration>>,
    /// The hand-overs that this node is to obey.
    pub orders: watch::Sender<Words>,
    /// What it would have back, and what others would.
    pub regain: Regain,
}

/// Serves until told to stop.
pub async fn serve(settings: Settings, facts: Facts, told: Told, stop: CancellationToken) {
    let Facts { mut ready, mut uplink, released, overlay, ledger } = facts;
    let service = HealthService::new(settings.total_timeout, (released, overlay), ledger, told).await;
    let mut servers: BTreeMap<IpAddr, DropGuard> = BTreeMap::new();
    let mut said = None;
    loop {
        let now = ready.borrow_and_update().clone();
        let obstacle = Obstacle::of(now.serving, &uplink.borrow_and_update());
        if said.as_ref() != Some(&obstacle) && !now.management.is_empty() {
            match &obstacle {
                Some(obstacle) => warn!("this node cannot carry egress traffic: {obstacle}"),
                None => info!("this node can carry egress traffic"),
            }
            said = Some(obstacle.clone());
        }
        service.set(obstacle).await;
        servers.retain(|address, _| now.management.contains(address));
        for address in &now.management {
            servers.entry(*address).or_insert_with(|| {
                let token = stop.child_token();
                let address = SocketAddr::new(*address, settings.port);
                tokio::spawn(serve_on(address, settings.tls.clone(), service.clone(), token.clone()));
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

async fn serve_on(address: SocketAddr, tls: Option<Tls>, service: HealthService, stop: CancellationToken) {
    let mut failing = false;
    loop {
        match TcpIncoming::bind(address) {
            Ok(incoming) => {
                info!(%address, tls = tls.is_some(), "answering health checks");
                let ended = stop.clone().cancelled_owned();
                let server = Server::builder().add_service(service.clone().into_server());
                let plain = incoming.with_nodelay(Some(true));
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
