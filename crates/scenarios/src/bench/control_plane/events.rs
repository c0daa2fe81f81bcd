//! Pod events at a steady pace, and when each is in the kernel's map.
//!
//! A pod of the real node loses the label by which an object selects it, or gets it back. Pods take turns, so that a pod's
//! event has long arrived when its next one comes; one that has not by then is an error.

use crate::prelude::*;
use axum::http::Method;
use egress_common::abi::{Addr, PodEntry};

use super::super::nat_entries::open;
use super::large_cluster::{self, Scale};
use super::{ControlPlaneEffort, ScaleCluster};

/// 100 a second.
const PACE: Duration = Duration::from_millis(10);
/// Between two looks into the map.
const POLL_INTERVAL: Duration = Duration::from_micros(200);
const PATIENCE: Duration = Duration::from_secs(5);

/// What was changed, and is not in the map yet.
struct PendingEvent {
    pod: Addr,
    is_selected: bool,
    at: Instant,
}

/// Milliseconds from each event to the map.
pub(super) fn play(cluster: &ScaleCluster, effort: &ControlPlaneEffort, events: usize) -> Result<Vec<f64>> {
    let pods = open::<Addr, PodEntry>(cluster.node()?, "pods")?;
    let mut under_way: Vec<PendingEvent> = Vec::new();
    let mut arrivals = Vec::with_capacity(events);
    let start = Instant::now();
    let mut next = 0;
    while next < events || !under_way.is_empty() {
        if next < events && start.elapsed() >= PACE * u32::try_from(next)? {
            under_way.push(send(cluster, &effort.scale, next)?);
            next += 1;
        }
        let mut waiting = Vec::with_capacity(under_way.len());
        for sent in under_way {
            // Another error than that it is not there would show as an event that never arrives.
            let is_selected = pods.get(&sent.pod, 0).is_ok_and(|entry| entry.egress_id().is_some());
            if is_selected == sent.is_selected {
                arrivals.push(sent.at.elapsed().as_secs_f64() * 1e3);
            } else {
                ensure!(sent.at.elapsed() < PATIENCE, "an event of pod {:?} has not arrived", sent.pod);
                waiting.push(sent);
            }
        }
        under_way = waiting;
        std::thread::sleep(POLL_INTERVAL);
    }
    Ok(arrivals)
}

/// The n-th event: first each pod loses its label, then each gets it back, and so on.
fn send(cluster: &ScaleCluster, scale: &Scale, number: usize) -> Result<PendingEvent> {
    let place = number % scale.own_pods;
    let is_selected = (number / scale.own_pods) % 2 == 1;
    let app = if is_selected { large_cluster::app(place) } else { "none".to_owned() };
    let (namespace, name) = large_cluster::own_pod(place);
    let path = format!("/api/v1/namespaces/{namespace}/pods/{name}");
    let patch = json!({"metadata": {"labels": {"app": app}}});
    let pod = Addr::v4(large_cluster::pod_address(1, place)?.octets());
    // The watch carries it from the moment when the server has stored it.
    let at = Instant::now();
    cluster.server()?.request(&Method::PATCH, &path, "application/merge-patch+json", &patch)?;
    Ok(PendingEvent { pod, is_selected, at })
}
