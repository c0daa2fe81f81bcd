//! What passes of a pod whose Egress has a bandwidth limit: of one TCP connection, and of datagrams without an end.
//!
//! The first moments are not counted: the burst, and the slow start of TCP.

use egress_lab::api_objects::NODES;
use egress_toolchain::Built;

use super::bench_cluster::with_pods_of_paths;
use super::cpu::Cores;
use super::plan::{PacketPath, Work};
use super::samples::Results;
use crate::prelude::*;
use crate::received::{LoadSender, Received};

/// Not counted.
const SETTLES: Duration = Duration::from_secs(2);
const EGRESSES: &str = "/apis/crd.antrea.io/v1beta1/egresses";
const POOLS: &str = "/apis/crd.antrea.io/v1beta1/externalippools";
/// How long each limit is measured, but for `--seconds`.
pub(super) const USUAL: Duration = Duration::from_secs(4);
/// Megabits per second.
const RATES: [u64; 4] = [10, 100, 1_000, 10_000];
/// A sender of single datagrams is not much faster.
const FASTEST_DATAGRAMS: u64 = 100;
/// Bursts: what the rate sends in this time (ms). TCP waits 200 ms at least after it has lost all that was on the way.
const BURSTS: [u64; 3] = [100, 250, 1_000];
/// A longer burst is not used up before the measurement, at the speed of this path.
const FASTEST_LONG_BURST: u64 = 1_000;
/// Each path has an egress IP of its own: the node of the pods is the first one's gateway, the other node the second one's.
const PLACES: [(PacketPath, &str, usize); 2] =
    [(PacketPath::Local, "172.18.0.160", 1), (PacketPath::Remote, "172.18.0.161", 2)];

pub(super) fn measure(
    built: &Built,
    prefix: &str,
    cores: Cores,
    time: Duration,
    say: &dyn Fn(&str),
    results: &mut Results,
) -> Result<()> {
    let mut cluster = with_pods_of_paths(built, prefix, &|path| vec![path.name().to_owned()], &["--antrea"])?;
    for (path, address, number) in PLACES {
        cluster.label(&format!("{NODES}/node{number}"), path.name(), &json!("yes"))?;
        let pool = json!({
            "apiVersion": "crd.antrea.io/v1beta1", "kind": "ExternalIPPool", "metadata": {"name": path.name()},
            "spec": {"ipRanges": [{"start": address, "end": address}], "nodeSelector": labels(path.name(), "yes")},
        });
        cluster.api.create(POOLS, &pool)?;
        let egress = json!({
            "apiVersion": "crd.antrea.io/v1beta1", "kind": "Egress", "metadata": {"name": path.name()},
            "spec": {"appliedTo": {"podSelector": labels("path", path.name())}, "externalIPPool": path.name()},
        });
        cluster.api.create(EGRESSES, &egress)?;
        cluster.is_seen_as(path.name(), Some(address), None)?;
    }
    let received = Received::serve(cluster.lab.outside(), Some(cores.first))?;
    let core = cores.second.unwrap_or(cores.first);
    for ((path, _, gateway), rate) in PLACES.into_iter().flat_map(|place| RATES.map(|rate| (place, rate))) {
        for burst in BURSTS.into_iter().filter(|burst| *burst < 1_000 || rate <= FASTEST_LONG_BURST) {
            limit(&mut cluster, path, gateway, rate, burst)?;
            let netns = &cluster.pod(path.name())?.netns;
            say(&format!("{}, {}: {rate} Mbit/s, burst {burst} ms", Work::Limits.name(), path.name()));
            let mut row = |what: &str, megabits: f64| {
                let name = format!("{}, {rate} Mbit/s, burst {burst} ms: {what}", Work::Limits.name());
                results.add(&name, path.name(), "ours", "%", share(megabits, rate));
            };
            row("TCP, without headers", measured(&received, time, received.stream(netns, Some(core))?)?);
            let datagrams = match rate <= FASTEST_DATAGRAMS {
                true => received.datagrams(netns, Some(core))?,
                false => received.datagrams_together(netns, Some(core))?,
            };
            row("datagrams, with headers", measured(&received, time, datagrams)?);
        }
    }
    cluster.tear_down()
}

/// Sets the limit, and waits until its gateway has it.
fn limit(cluster: &mut TestCluster, path: PacketPath, gateway: usize, rate: u64, burst: u64) -> Result<()> {
    let bandwidth = json!({"rate": format!("{rate}M"), "burst": format!("{}k", rate * burst)});
    cluster.api.merge(&format!("{EGRESSES}/{}", path.name()), &json!({"spec": {"bandwidth": bandwidth}}))?;
    until_true(&format!("node{gateway} has the limit"), EFFECT, || {
        let status = cluster.agent(gateway)?.status(&["-o", "json"])?;
        let status: Value = serde_json::from_slice(&status.stdout)?;
        let objects = status["objects"].as_array().into_iter().flatten();
        let mut limits = objects.filter(|one| one["name"].as_str().is_some_and(|name| name.contains(path.name())));
        Ok(limits.any(|one| one["limit"] == json!({"bits_per_second": rate * 1_000_000, "burst_ms": burst})))
    })
}

/// Megabits per second of a sender, once the burst is used up.
fn measured(received: &Received, time: Duration, sender: LoadSender) -> Result<f64> {
    thread::sleep(SETTLES);
    let bits = received.bits_per_second(time);
    sender.stop()?;
    Ok(bits / 1e6)
}

#[expect(clippy::cast_precision_loss, reason = "a rate needs no more digits than a double has")]
fn share(megabits: f64, rate: u64) -> f64 {
    megabits * 100.0 / rate as f64
}
