//! Attacks on the health port: a pod that opens many connections, another server in an agent's place, and a key that is replaced.

use std::io::Write;
use std::net::TcpStream;

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use tonic::transport::Server;
use tonic_health::ServingStatus;

use super::leader::leader;
use crate::prelude::*;

const PORT: u16 = 9107;
const SECRET: &str = "/api/v1/namespaces/kube-system/secrets/egress-agent-key";
const PATIENCE: Duration = Duration::from_secs(30);
const IDLE: usize = 5000;
const SLOW: usize = 500;
/// What an agent may take for all of them.
const MEMORY_KIB: u64 = 32 * 1024;

fn start(context: &LabContext) -> Result<TestCluster> {
    let mut cluster = TestCluster::start(context, vec![pod("caller", "red", 1, &[])])?;
    for number in 1..=3 {
        cluster.assignable(number, true)?;
        agent_logs(&mut cluster, number, &["the key that agents sign health checks with is known"], 1)?;
    }
    cluster.assign(&egress_ip("first", &["172.18.0.110"], &labels("house", "red"), &all()))?;
    cluster.is_seen_as("caller", Some("172.18.0.110"), None)?;
    Ok(cluster)
}

/// Waits until the agent has logged so many lines with all of these texts.
pub(super) fn agent_logs(cluster: &mut TestCluster, number: usize, texts: &[&str], count: usize) -> Result<()> {
    until_logged(cluster.agent(number)?.log(), texts, count, PATIENCE)
}

/// The same of the controller.
pub(super) fn controller_logs(cluster: &mut TestCluster, number: usize, texts: &[&str], count: usize) -> Result<()> {
    until_logged(cluster.controller(number)?.log(), texts, count, PATIENCE)
}

pub(super) fn crowd_of_a_pod_keeps_no_leader_waiting(context: &LabContext) -> Result<()> {
    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE)?;
    setrlimit(Resource::RLIMIT_NOFILE, most, most)?;
    let mut cluster = start(context)?;
    let other = leader(&cluster)? % 3 + 1;
    let before = cluster.agent(other)?.resident_kib()?;
    let to = SocketAddr::new(cluster.lab.node(node(other)?).management().both()[0], PORT);
    // The preface, settings, and a hundred requests that begin and never end.
    let mut slow = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0".to_vec();
    for stream in (0..100_u32).map(|number| 2 * number + 1) {
        slow.extend(b"\0\0\x20\x01\x04");
        slow.extend(stream.to_be_bytes());
        slow.extend(b"\x83\x86\x04\x1c/grpc.health.v1.Health/Check");
    }
    let connections = cluster.pod("caller")?.netns.spawn(move || {
        let mut connections = Vec::new();
        for number in 0..IDLE + SLOW {
            let Ok(mut connection) = TcpStream::connect_timeout(&to, Duration::from_secs(2)) else { continue };
            if number >= IDLE {
                drop(connection.write_all(&slow));
            }
            connections.push(connection);
        }
        std::thread::sleep(Duration::from_secs(3));
        Ok(connections.len())
    })?;
    let mut greatest = before;
    while !connections.is_finished() {
        greatest = greatest.max(cluster.agent(other)?.resident_kib()?);
        std::thread::sleep(Duration::from_millis(100));
    }
    let made = connections.join().map_err(|_panic| anyhow::anyhow!("the crowd panicked"))??;
    println!("{made} of {} connections were made; the agent grew by {} KiB", IDLE + SLOW, greatest - before);
    ensure!(greatest - before < MEMORY_KIB, "the agent grew by {} KiB", greatest - before);
    let leader = leader(&cluster)?;
    let log = std::fs::read_to_string(cluster.controller(leader)?.log())?;
    ensure!(!log.contains("does not answer health checks"), "probes did not continue:\n{log}");
    for number in 1..=3 {
        cluster.agent(number)?.ensure_alive()?;
    }
    cluster.is_seen_as("caller", Some("172.18.0.110"), None)
}

/// As a pod that a CNI gives the management address: six lines of gRPC.
pub(super) fn something_else_at_a_health_address_is_not_believed(context: &LabContext) -> Result<()> {
    let mut cluster = start(context)?;
    let leader = leader(&cluster)?;
    let other = leader % 3 + 1;
    let name = format!("node{other}");
    controller_logs(&mut cluster, leader, &["the node serves", &name], 1)?;
    cluster.agent(other)?.kill()?;
    let (host, stop) = (cluster.agent(other)?.node().host.clone(), tokio_util::sync::CancellationToken::new());
    let (addresses, ended) = (cluster.lab.node(node(other)?).management().both(), stop.clone());
    let other_server = host.spawn(move || {
        tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
            let (reporter, service) = tonic_health::server::health_reporter();
            reporter.set_service_status("Service_Egress_IP", ServingStatus::Serving).await;
            let serve = |address| {
                let server = Server::builder().add_service(service.clone());
                server.serve_with_shutdown(SocketAddr::new(address, PORT), ended.clone().cancelled_owned())
            };
            tokio::select! {
                both = async { tokio::try_join!(serve(addresses[0]), serve(addresses[1])) } => drop(both?),
                // Sessions that are kept do not keep it.
                () = async { ended.cancelled().await; tokio::time::sleep(Duration::from_millis(200)).await } => {}
            }
            Ok(())
        })
    })?;
    controller_logs(&mut cluster, leader, &["something else than its agent answers", &name], 1)?;
    controller_logs(
        &mut cluster,
        leader,
        &["its agent does not answer health checks", &name, "something else answers at"],
        1,
    )?;
    until_true("an event on the Node", PATIENCE, || {
        let events = cluster.api.get("/apis/events.k8s.io/v1/namespaces/default/events")?;
        let items = events.as_ref().and_then(|list| list["items"].as_array().cloned()).unwrap_or_default();
        let is_told = |event: &serde_json::Value| {
            event["reason"] == "HealthAnswerNotSigned" && event["regarding"]["name"] == name.as_str()
        };
        Ok(items.iter().any(is_told))
    })?;
    let text = std::fs::read_to_string(cluster.controller(leader)?.log())?;
    let served = text.lines().filter(|line| line.contains("the node serves") && line.contains(&name)).count();
    ensure!(served == 1, "the other server was believed:\n{text}");
    stop.cancel();
    other_server.join().map_err(|_panic| anyhow::anyhow!("the other server panicked"))??;
    cluster.agent(other)?.restart()?;
    cluster.serves(other)?;
    controller_logs(&mut cluster, leader, &["the node serves", &name], 2)?;
    cluster.is_seen_as("caller", Some("172.18.0.110"), None)
}

pub(super) fn a_key_is_replaced_while_all_serve(context: &LabContext) -> Result<()> {
    let mut cluster = start(context)?;
    let first = leader(&cluster)?;
    let key = |cluster: &TestCluster| Ok(cluster.api.get(SECRET)?.map(|secret| secret["data"]["key"].to_string()));
    let former = key(&cluster)?.context("there is no key")?;
    cluster.api.delete(SECRET)?;
    // As `kubectl rollout restart deployment` does it.
    for number in [first % 2 + 1, first] {
        cluster.controller(number)?.terminate(Duration::from_secs(5))?;
        cluster.controller(number)?.restart()?;
    }
    for number in 1..=3 {
        agent_logs(&mut cluster, number, &["sign health checks with is known", "is_another=true"], 1)?;
    }
    let current = until("another key", PATIENCE, || key(&cluster))?;
    ensure!(current != former, "the same key again");
    // A node that is not heard would be logged within seconds.
    std::thread::sleep(Duration::from_secs(3));
    let mut logs = cluster.agents.iter().map(|agent| agent.log().to_owned()).collect::<Vec<_>>();
    logs.extend(Agent::controllers(&mut cluster.agents).map(|controller| controller.log().to_owned()));
    for file in logs {
        let (log, name) = (std::fs::read_to_string(&file)?, file.display());
        let lost = ["unreachable", "has released an egress IP", "something else than"]
            .iter()
            .find(|word| log.contains(**word));
        ensure!(lost.is_none(), "{lost:?} in {name}:\n{log}");
        for text in [&former, &current] {
            ensure!(!log.contains(text.trim_matches('"')), "{name} shows the key");
        }
    }
    cluster.is_seen_as("caller", Some("172.18.0.110"), None)
}
