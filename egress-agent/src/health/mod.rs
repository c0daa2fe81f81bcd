//! `grpc.health.v1` on this node's management addresses: is this node fit to carry egress traffic?
//!
//! Service names `""` and `Service_Egress_IP`, the one that OVN-Kubernetes' probes ask for. NOT_SERVING until every watch
//! has synced and the kernel does what the cluster wants. The server moves when the management addresses change.

use std::net::SocketAddr;

use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tonic::transport::Server;
use tonic_health::ServingStatus;
use tonic_health::server::HealthReporter;
use tracing::{info, warn};

use crate::reconcile::Ready;

/// What OVN-Kubernetes calls it.
pub const SERVICE: &str = "Service_Egress_IP";
const RETRY: std::time::Duration = std::time::Duration::from_secs(2);

/// Serves until told to stop.
pub async fn serve(port: u16, mut ready: watch::Receiver<Ready>, stop: CancellationToken) {
    loop {
        let now = ready.borrow_and_update().clone();
        let mut servers = JoinSet::new();
        for address in &now.management {
            servers.spawn(serve_on(SocketAddr::new(*address, port), now.serving, stop.clone()));
        }
        tokio::select! {
            () = stop.cancelled() => return,
            changed = ready.changed() => {
                if changed.is_err() {
                    return;
                }
            }
        }
        servers.shutdown().await;
    }
}

async fn serve_on(address: SocketAddr, serving: bool, stop: CancellationToken) {
    let (reporter, service) = tonic_health::server::health_reporter();
    report(&reporter, serving).await;
    let mut failing = false;
    loop {
        let server = Server::builder().add_service(service.clone());
        if !failing {
            info!(%address, "answering health checks");
        }
        match server.serve_with_shutdown(address, stop.clone().cancelled_owned()).await {
            Ok(()) => return,
            // The address may not be on the management port yet.
            Err(error) if !failing => warn!(%address, %error, "cannot answer health checks; trying again"),
            Err(_) => {}
        }
        failing = true;
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(RETRY) => {}
        }
    }
}

async fn report(reporter: &HealthReporter, serving: bool) {
    let status = if serving { ServingStatus::Serving } else { ServingStatus::NotServing };
    for service in ["", SERVICE] {
        reporter.set_service_status(service, status).await;
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use tonic_health::pb::HealthCheckRequest;
    use tonic_health::pb::health_check_response::ServingStatus as Answer;
    use tonic_health::pb::health_client::HealthClient;

    use super::*;

    #[tokio::test]
    async fn both_services_are_answered_for_on_the_management_address() {
        let free = std::net::TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).expect("a free port").port();
        let ready = Ready { serving: true, management: vec![IpAddr::from([127, 0, 0, 1])] };
        let (_keep, receiver) = watch::channel(ready);
        let stop = CancellationToken::new();
        let server = tokio::spawn(serve(free, receiver, stop.clone()));
        let endpoint = tonic::transport::Endpoint::try_from(format!("http://127.0.0.1:{free}")).expect("an address");
        let mut client = loop {
            match endpoint.connect().await {
                Ok(channel) => break HealthClient::new(channel),
                Err(_) => tokio::time::sleep(std::time::Duration::from_millis(10)).await,
            }
        };
        for service in ["", SERVICE] {
            let request = HealthCheckRequest { service: service.into() };
            let answer = client.check(request).await.expect("a known service").into_inner();
            assert_eq!(answer.status, i32::from(Answer::Serving));
        }
        assert!(client.check(HealthCheckRequest { service: "other".into() }).await.is_err());
        stop.cancel();
        server.await.expect("it ends");
    }
}
