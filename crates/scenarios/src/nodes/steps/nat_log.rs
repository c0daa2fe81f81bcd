//! The log of NAT, switched on, asked and switched off as docs/operations/nat-log.md has it.

use super::*;
use egress_lab::topology::addresses::SERVER;

const OVERLAY: &str = "deploy/overlays/bridge-cni/kustomization.yaml";
const COMPONENT: &str = "\ncomponents:\n- ../../nat-log\n";
/// A pod of the object on the node that is not the gateway, which ends before it is asked for.
const GONE: &str = "maggie";
/// Pods are looked at every five seconds.
const WRITTEN: Duration = Duration::from_secs(20);

/// A connection that has ended, and whose pod is deleted, is named by the logs of both nodes. Leaves the agents without a log.
pub(super) fn names_the_pod(test: &mut NodeTest) -> Result<()> {
    let (gateway, other) = test.gateway_and_other()?;
    let overlay = test.cluster.shell.folder.join(OVERLAY);
    let before = fs::read_to_string(&overlay)?;
    fs::write(&overlay, before.clone() + COMPONENT)?;
    apply(test)?;
    test.all_are_right()?;
    test.is_served_by(&gateway, EFFECT)?;
    let asked = connection_of_a_pod_that_goes(test, other).and_then(|seen| is_named(test, &seen, &gateway, other));
    fs::write(&overlay, before)?;
    asked?;
    apply(test)?;
    test.all_are_right()
}

fn apply(test: &NodeTest) -> Result<()> {
    test.cluster.shell.types("kubectl apply -k deploy/overlays/OVERLAY", &[("OVERLAY", "bridge-cni")])?;
    all_rolled_out(&test.cluster)
}

/// What a firewall's log has: source and time.
struct EndedConnection {
    source: String,
    at: String,
}

fn connection_of_a_pod_that_goes(test: &NodeTest, node: &str) -> Result<EndedConnection> {
    let cluster = &test.cluster;
    cluster.add_pods(SELECTED, &[(GONE.to_owned(), node, None)])?;
    let pod = cluster.pod(SELECTED, GONE)?;
    cluster.is_seen_as(&pod, EGRESS_IP)?;
    let mark = cluster.server.log().mark();
    client::get(&pod.netns, SocketAddr::new(SERVER.v4.into(), HTTP_PORT), "/", GONE)??;
    let seen = cluster.server.log().since(mark);
    let seen = seen.iter().find(|one| one.user_agent == GONE).context("no entry")?;
    let seen = EndedConnection { source: seen.client.to_string(), at: seen.at.to_string() };
    // As soon as the node has written the pod's name, which it does some seconds after the pod begins.
    let log = cluster.node(node)?.path("/var/log/egress-agent/nat.log");
    let name = format!("{SELECTED}/{GONE}");
    until_logged(&log, &["pod_has", &name], 1, WRITTEN)?;
    cluster.types(&format!("kubectl -n {SELECTED} delete pod {GONE}"))?;
    until_logged(&log, &["pod_had_no_more", &name], 1, WRITTEN)?;
    Ok(seen)
}

fn is_named(test: &NodeTest, seen: &EndedConnection, gateway: &str, node: &str) -> Result<()> {
    let values = [("ADDRESS:PORT", seen.source.as_str()), ("TIME", &seen.at)];
    let printed = test.cluster.shell.types("kubectl egress who ADDRESS:PORT --at TIME", &values)?;
    for part in [format!("{SELECTED}/{GONE} ("), format!(" on {node}, by {OBJECT}"), format!(" on gateway {gateway} ")]
    {
        ensure!(printed.contains(&part), "it does not show `{part}`");
    }
    ensure!(printed.lines().count() == 2, "it names others, or nodes without a log");
    Ok(())
}
