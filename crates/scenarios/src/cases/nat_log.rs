//! The log of NAT: a server outside has seen an address and a port, and the logs of two nodes name the pod, also after it has gone.

use jiff::Timestamp;

use crate::prelude::*;

const V4: &str = "172.18.0.110";
const V6: &str = "fd00:172:18::110";
const GATEWAYS: [usize; 2] = [1, 2];
/// Pods are looked at every five seconds.
const WRITTEN: Duration = Duration::from_secs(20);

/// What a firewall's log has of a connection.
struct SeenOutside {
    source: SocketAddr,
    at: Timestamp,
}

pub(super) fn names_the_pod(context: &LabContext) -> Result<()> {
    let pods = vec![pod("one", "red", 1, &[]), pod("two", "red", 2, &[])];
    let mut cluster = TestCluster::without_agents(context, pods)?;
    let folder = cluster.lab.folder().join("nat-log");
    std::fs::create_dir(&folder)?;
    for node in cluster.lab.nodes() {
        let file = file_of(&folder, node);
        let options = cluster.options(context).with(["--port-block-size=64".to_owned(), format!("--nat-log={file}")]);
        cluster.agents.push(Agent::start(&cluster.lab, node, &options)?);
    }
    cluster.agents_serve()?;
    // An address of an object on each, so that each is the gateway of one family.
    for number in GATEWAYS {
        cluster.assignable(number, true)?;
    }
    cluster.assign(&egress_ip("prod", &[V4, V6], &labels("house", "red"), &all()))?;
    let mut seen = Vec::new();
    for name in ["one", "two"] {
        cluster.is_seen_as(name, Some(V4), Some(V6))?;
        for to in plan::SERVER.both() {
            seen.push((name, connection(&cluster, name, to)?));
        }
    }
    let blocks: BTreeSet<(IpAddr, u16)> = seen.iter().map(|(_, one)| block_of(one)).collect();
    ensure!(blocks.len() == seen.len(), "each pod has a block of its own on each address: {blocks:?}");

    println!("while the pods run");
    for (name, one) in &seen {
        is_named(&cluster, &folder, name, one)?;
    }
    let (_, last) = seen.last().context("a connection")?;
    let port = last.source.port().to_string();
    let of_both = GATEWAYS.map(|number| -> Result<String> {
        let output = cluster.agent(number)?.ask(&["nat", "blocks", "--egress-ip", V6, "--port", &port])?;
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    });
    let printed = of_both.into_iter().collect::<Result<String>>()?;
    ensure!(printed.contains("prod") && printed.contains("node2"), "{printed}");

    println!("a pod has gone, and the agents are others");
    cluster.api.delete("/api/v1/namespaces/red/pods/two")?;
    until_logged(Path::new(&file_of(&folder, cluster.lab.node(node(2)?))), &["pod_had_no_more"], 2, WRITTEN)?;
    for number in [1, 2] {
        cluster.agent(number)?.restart()?;
        cluster.serves(number)?;
    }
    for (name, one) in &seen {
        is_named(&cluster, &folder, name, one)?;
    }
    Ok(())
}

fn file_of(folder: &Path, node: &LabNode) -> String {
    folder.join(format!("{}.log", node.name())).display().to_string()
}

/// The first port of the block, which says which one it is.
fn block_of(seen: &SeenOutside) -> (IpAddr, u16) {
    (seen.source.ip(), (seen.source.port() - 1024) / 64)
}

fn connection(cluster: &TestCluster, name: &str, to: IpAddr) -> Result<SeenOutside> {
    let log = cluster.access_log()?;
    let mark = log.mark();
    client::get(&cluster.pod(name)?.netns, SocketAddr::new(to, HTTP_PORT), "/", name)??;
    let entry = log.since(mark).into_iter().find(|entry| entry.user_agent == name).context("it arrived")?;
    Ok(SeenOutside { source: entry.client, at: entry.at })
}

/// As an administrator asks: the gateway for the block, and the pod's node for its name.
fn is_named(cluster: &TestCluster, folder: &Path, name: &str, seen: &SeenOutside) -> Result<()> {
    let at = seen.at.to_string();
    let (address, port) = (seen.source.ip().to_string(), seen.source.port().to_string());
    let pod = cluster.lab.pod(name)?;
    let block = until(&format!("the log has {}", seen.source), WRITTEN, || {
        let filters = ["--egress-ip", &address, "--port", &port, "--at", &at];
        let found = GATEWAYS.map(|number| asked(cluster, folder, number, &filters));
        let found: Vec<Value> = found.into_iter().collect::<Result<_>>()?;
        let blocks: Vec<Value> = found.iter().filter_map(|one| one["blocks"].as_array().cloned()).flatten().collect();
        Ok((!blocks.is_empty()).then_some(blocks))
    })
    .with_context(|| {
        let logs = cluster.lab.nodes().iter().map(|node| std::fs::read_to_string(file_of(folder, node)));
        format!("{at}: {:#?}", logs.collect::<Vec<_>>())
    })?;
    let [block] = &block[..] else { bail!("one pod had the port: {block:?}") };
    let pod_ip: IpAddr = serde_json::from_value(block["pod_ip"].clone())?;
    ensure!(pod.addresses.is(pod_ip) && block["object"] == "prod", "{block:#}");
    let place = cluster.lab.node(pod.node).name();
    ensure!(block["pod_node"] == place.as_str(), "{block:#}");
    let its_node = pod.node.index() + 1;
    // Some seconds after the pod has its address.
    let named = until(&format!("its node has the name of {pod_ip}"), WRITTEN, || {
        let found = asked(cluster, folder, its_node, &["--pod-ip", &pod_ip.to_string(), "--at", &at])?;
        Ok(found["pods"][0]["pod"].as_str().map(str::to_owned))
    })?;
    ensure!(named == format!("red/{name}"), "{named}");
    Ok(())
}

fn asked(cluster: &TestCluster, folder: &Path, number: usize, filters: &[&str]) -> Result<Value> {
    let file = file_of(folder, cluster.lab.node(node(number)?));
    let agent = cluster.agents.get(number - 1).context("an agent")?;
    let output = agent.ask(&[&["nat", "log", "-o", "json", "--file", &file], filters].concat())?;
    ensure!(output.status.success(), "{output:?}");
    Ok(serde_json::from_slice(&output.stdout)?)
}
