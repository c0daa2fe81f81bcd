//! `/metrics`, `/healthz` and `/readyz` of real agents: what passes and what is dropped shows, and who is ready says so.

use std::io::ErrorKind;
use std::net::UdpSocket;

use crate::prelude::*;
use egress_lab::agents::{CONTROLLER_PAGES, CONTROLLERS};
use egress_lab::traffic::client::Reply;

/// In each node's own network namespace.
const AT: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 9477);

const CONTROLLER_AT: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), CONTROLLER_PAGES);

/// What OVN-Kubernetes says of a node.
const GATEWAY: &str = "k8s.ovn.org/l3-gateway-config";

/// Series with their labels, and their values.
type MetricValues = BTreeMap<String, f64>;

/// Three nodes whose agents serve their pages, which say that they are not ready until they are. The programs of node 2 are
/// filters.
pub fn start(context: &LabContext, pods: Vec<PodSpec>) -> Result<TestCluster> {
    let mut cluster = TestCluster::without_agents(context, pods)?;
    let mut options = cluster.options(context);
    options.extra = vec![format!("--metrics-bind-address={AT}")];
    let mut by_filters = options.clone();
    by_filters.extra.push("--attach=clsact".to_owned());
    let start = |node: &LabNode| {
        Agent::start(&cluster.lab, node, if node.number.index() == 1 { &by_filters } else { &options })
    };
    cluster.agents = cluster.lab.nodes().iter().map(start).collect::<Result<_>>()?;
    gets_ready(&cluster, 1)?;
    cluster.agents_serve()?;
    Ok(cluster)
}

/// No answer, then the cause that it is not ready, then ready.
fn gets_ready(cluster: &TestCluster, number: usize) -> Result<()> {
    let mut printed = BTreeSet::new();
    until(&format!("node{number} is ready"), egress_lab::test_cluster::LOADED, || {
        let Some(page) = page(cluster, number, "/readyz")? else { return Ok(None) };
        printed.insert((page.status, String::from_utf8_lossy(&page.body).into_owned()));
        Ok((page.status == 200).then_some(()))
    })?;
    let not_yet = (503, "the programs are being loaded\n".to_owned());
    ensure!(printed.contains(&not_yet) && printed.contains(&(200, "ok\n".to_owned())), "it said {printed:?}");
    Ok(())
}

/// `None` without a listener.
fn page(cluster: &TestCluster, number: usize, path: &str) -> Result<Option<Reply>> {
    page_at(cluster, (number, AT), path)
}

fn page_at(cluster: &TestCluster, (number, at): (usize, SocketAddr), path: &str) -> Result<Option<Reply>> {
    match client::get(&cluster.lab.node(node(number)?).host, at, path, "scraper")? {
        Ok(reply) => Ok(Some(reply)),
        Err(error) if error.kind() == ErrorKind::ConnectionRefused => Ok(None),
        Err(error) => Err(error).context("a page of an agent"),
    }
}

fn scrape(cluster: &TestCluster, number: usize) -> Result<MetricValues> {
    scrape_at(cluster, (number, AT))
}

fn scrape_at(cluster: &TestCluster, (number, at): (usize, SocketAddr)) -> Result<MetricValues> {
    let reply = page_at(cluster, (number, at), "/metrics")?;
    let reply = reply.with_context(|| format!("node{number} serves no metrics at {at}"))?;
    ensure!(reply.status == 200, "a scrape is answered with {}", reply.status);
    let text = String::from_utf8(reply.body)?;
    ensure!(text.ends_with("# EOF\n"), "a scrape is not whole:\n{text}");
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    lines.map(|line| line.rsplit_once(' ').with_context(|| format!("no sample: {line}"))).try_fold(
        MetricValues::new(),
        |mut all, line| {
            let (series, value) = line?;
            all.insert(series.to_owned(), value.parse().with_context(|| format!("the value of {series}"))?);
            Ok(all)
        },
    )
}

fn value(scrape: &MetricValues, series: &str) -> Result<f64> {
    scrape.get(series).copied().with_context(|| format!("there is no {series} among\n{:#?}", scrape.keys()))
}

/// As many datagrams of a hundred bytes.
fn send(from: &Netns, to: IpAddr, count: usize) -> Result<()> {
    from.run(|| {
        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
        for _ in 0..count {
            match socket.send_to(&[0; 100], (to, 9999)) {
                // The other end's word about an earlier one; this one was not sent.
                Err(error) if error.kind() == ErrorKind::ConnectionRefused => {
                    socket.send_to(&[0; 100], (to, 9999))?;
                }
                sent => drop(sent?),
            }
        }
        Ok(())
    })
}

/// Waits until as much is counted; it must never be more.
fn grows(cluster: &TestCluster, before: &MetricValues, by: &[(&str, f64)]) -> Result<()> {
    until_true("what was sent is counted", EFFECT, || {
        let after = scrape(cluster, 1)?;
        let mut is_all = true;
        for (series, by) in by {
            let grown = value(&after, series)? - value(before, series)?;
            ensure!(grown <= *by, "{series} has grown by {grown}, and {by} were sent");
            is_all &= (grown - by).abs() < 0.5;
        }
        Ok(is_all)
    })
}

/// The pod `one` of node 1 has this address, which node 1 serves for the object `first`; `late` has another one.
pub(super) fn are_seen(cluster: &TestCluster, address: &str) -> Result<()> {
    println!("two scrapes differ by what was sent");
    let labels = format!("egress_ip=\"{address}\",egressip=\"first\"");
    let packets = format!("egress_agent_egress_ip_packets_total{{{labels},direction=\"egress\"}}");
    let bytes = format!("egress_agent_egress_ip_bytes_total{{{labels},direction=\"egress\"}}");
    let mappings = format!("egress_agent_egress_ip_mappings_created_total{{{labels}}}");
    let translated = "egress_agent_packets_total{class=\"redirect\",verdict=\"snat_here\"}";
    let before = scrape(cluster, 1)?;
    send(&cluster.pod("one")?.netns, plan::SERVER.v4.into(), 20)?;
    grows(cluster, &before, &[(&packets, 20.0), (&bytes, 20.0 * 142.0), (&mappings, 1.0), (translated, 20.0)])?;

    println!("a drop shows under its reason");
    let dropped = "egress_agent_packets_total{class=\"drop\",verdict=\"no_nat_entry\"}";
    let before = scrape(cluster, 1)?;
    send(cluster.lab.ext(), address.parse()?, 7)?;
    grows(cluster, &before, &[(dropped, 7.0)])?;

    println!("the controller that leads says what it knows of the cluster");
    let all: Vec<MetricValues> = (1..=3).map(|number| scrape(cluster, number)).collect::<Result<_>>()?;
    let of_controller = |number| scrape_at(cluster, (number, CONTROLLER_AT));
    let controllers: Vec<MetricValues> = (1..=CONTROLLERS).map(of_controller).collect::<Result<_>>()?;
    let leads = |scrape: &&MetricValues| scrape.get("egress_agent_leader") == Some(&1.0);
    let [leader] = &controllers.iter().filter(leads).collect::<Vec<_>>()[..] else {
        anyhow::bail!("not one leader: {controllers:?}")
    };
    ensure!((value(leader, "egress_agent_egress_ips{state=\"assigned\"}")? - 2.0).abs() < 0.5, "{leader:#?}");
    ensure!((value(leader, "egress_agent_egressip_objects{reason=\"Assigned\"}")? - 2.0).abs() < 0.5, "{leader:#?}");
    value(leader, "egress_agent_egress_node_state{node=\"node1\",state=\"answers\"}")?;
    ensure!(value(leader, "egress_agent_probes_total{answer=\"serving\"}")? > 0.0, "no node was probed");
    let of_cluster =
        |scrape: &&MetricValues| scrape.keys().any(|series| series.starts_with("egress_agent_egress_ips{"));
    ensure!(all.iter().chain(&controllers).filter(of_cluster).count() == 1, "others speak for the cluster too");
    for (index, scrape) in all.iter().enumerate() {
        ensure!(value(scrape, "egress_agent_reconcile_duration_seconds_count")? > 0.0, "node{} is idle", index + 1);
        for hook in ["from_pod", "to_pod", "from_netdev", "to_netdev", "from_overlay"] {
            let attached = value(scrape, &format!("egress_agent_program_attached{{hook=\"{hook}\"}}"))?;
            ensure!(attached > 0.5, "node{}: {hook} is not attached", index + 1);
        }
    }
    let status = |path| Ok::<_, anyhow::Error>(page(cluster, 1, path)?.map(|page| page.status));
    ensure!((status("/healthz")?, status("/readyz")?, status("/nothing")?) == (Some(200), Some(200), Some(404)));
    Ok(())
}

/// OVN-Kubernetes says of node 2 that pods' traffic does not pass the host: one event on the Node, and a line of its status.
pub(super) fn shared_gateway_is_reported(cluster: &mut TestCluster) -> Result<()> {
    println!("a node in shared gateway mode");
    let annotate = |value: Option<&str>| json!({"metadata": {"annotations": {GATEWAY: value}}});
    let words = "OVN-Kubernetes runs in shared gateway mode";
    cluster.api.merge("/api/v1/nodes/node2", &annotate(Some(r#"{"default":{"mode":"shared"}}"#)))?;
    let message = cluster.event("node2", "SharedGatewayMode")?;
    ensure!(message.starts_with(words), "{message}");
    // As what lasts; what was logged stays among the last errors.
    let line = format!("! node: {words}");
    let has_line = |cluster: &mut TestCluster| -> Result<bool> {
        let output = cluster.agent(2)?.status(&[])?;
        Ok(String::from_utf8_lossy(&output.stdout).lines().any(|printed| printed.starts_with(&line)))
    };
    until_true("its status says so", EFFECT, || has_line(cluster))?;
    cluster.api.merge("/api/v1/nodes/node2", &annotate(None))?;
    until_true("its status says so no more", EFFECT, || Ok(!has_line(cluster)?))
}
