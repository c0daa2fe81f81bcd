//! What an administrator does to a cluster that works: updates, evictions, drains, reboots.

use super::*;
use crate::connections::Callers;
use egress_lab::topology::addresses::SERVER;

/// Connections that each selected pod keeps; more than a thousand of both.
const KEPT: usize = 505;
/// New ones of each pod; a hundred a second of both.
const EVERY: Duration = Duration::from_millis(20);
/// As the overlay names the image.
const IMAGE: &str = "localhost/egress-agent";
const TAG: &str = "0.1.0";
const NEXT: &str = "0.1.0-next";

/// docs/install.md, "Upgrade": another image, and the former one again, for agents and controllers at once; and a restart of
/// agents alone.
pub(super) fn update(test: &mut NodeTest) -> Result<()> {
    let cluster = &test.cluster;
    for node in cluster.nodes() {
        let [former, next] = [TAG, NEXT].map(|tag| format!("{IMAGE}:{tag}"));
        node.exec(&["ctr", "--namespace", "k8s.io", "images", "tag", "--force", &former, &next])?;
    }
    let pods = test.selected.iter().map(|pod| pod.netns.clone()).collect();
    let connections = Callers::gather(pods, KEPT, EVERY, &[SERVER.v4.into()], &[EGRESS_IP])?;
    let during = |what: &str, update: &dyn Fn() -> Result<()>| -> Result<()> {
        let sent_again = connections.sent_again()?;
        connections.begin();
        update()?;
        all_rolled_out(cluster)?;
        let report = connections.settled();
        let sent_again = connections.sent_again()? - sent_again;
        println!("{what}: {report:?}, {sent_again} segments sent again");
        report.ensure_nothing_lost(sent_again).context(what.to_owned())
    };
    during("a restart", &|| cluster.types("kubectl -n egress-agent rollout restart daemonset/egress-agent").map(drop))?;
    for (from, to) in [(TAG, NEXT), (NEXT, TAG)] {
        during(&format!("the image {to}"), &|| {
            cluster.shell.edit("deploy/overlays/bridge-cni/kustomization.yaml", from, to)?;
            cluster.types("kubectl apply -k deploy/overlays/bridge-cni").map(drop)
        })?;
        for node in ["node1", "node2"] {
            let pod = cluster.agent_pod(node)?;
            let image = &pod["spec"]["containers"][0]["image"];
            ensure!(*image == format!("{IMAGE}:{to}"), "the agent of {node} runs {image}");
        }
    }
    connections.finish()?;
    test.all_are_right()
}

/// By the API, as a descheduler or `kubectl drain` without `--ignore-daemonsets` would. Neither a budget nor a class prevents it.
pub(super) fn eviction(test: &mut NodeTest) -> Result<()> {
    let cluster = &test.cluster;
    let traffic = test.traffic()?;
    for node in ["node1", "node2"] {
        let pod = cluster.agent_pod(node)?;
        let name = name_of(&pod);
        let metadata = json!({"name": name, "namespace": "egress-agent"});
        let eviction = json!({"apiVersion": "policy/v1", "kind": "Eviction", "metadata": metadata});
        fs::write(cluster.shell.folder.join("eviction.json"), eviction.to_string())?;
        let path = format!("/api/v1/namespaces/egress-agent/pods/{name}/eviction");
        cluster.types(&format!("kubectl create --raw {path} -f eviction.json"))?;
        test.agent_is_replaced(node, &pod)?;
    }
    test.all_are_right()?;
    traffic.finish_without_loss().map(drop)
}

/// The kubelet evicts pods when its node is short of memory, and never those of the classes `system-node-critical` and
/// `system-cluster-critical`. Here it takes the node for short of memory at once. The pods on it are replaced afterwards.
pub(super) fn memory_pressure(test: &mut NodeTest) -> Result<()> {
    const NODE: &str = "node2";
    install::ensure_installed(test)?;
    let cluster = &test.cluster;
    // A hard threshold would be taken off what the node may promise to pods.
    let short = json!({
        "evictionSoft": {"memory.available": "98%"}, "evictionSoftGracePeriod": {"memory.available": "1s"},
    });
    let before = product_on(cluster, NODE)?;
    cluster.node(NODE)?.restart_kubelet(&short)?;
    let outcome = others_alone_are_evicted(cluster, NODE, &before);
    cluster.node(NODE)?.restart_kubelet(&json!({}))?;
    outcome?;
    until_true(&format!("{NODE} has memory"), KUBERNETES, || {
        Ok(condition(&cluster.get(&["node", NODE])?, "MemoryPressure") == Some("False"))
    })?;
    test.replace_pods()?;
    test.all_are_right()
}

fn pods_on(cluster: &RealCluster, node: &str) -> Result<Vec<Value>> {
    cluster.list(&["pods", "--all-namespaces", "--field-selector", &format!("spec.nodeName={node}")])
}

fn is_product(pod: &Value) -> bool {
    pod["metadata"]["namespace"] == "egress-agent"
}

/// The UIDs of the agent's and the controller's pod, which are Ready.
fn product_on(cluster: &RealCluster, node: &str) -> Result<BTreeSet<String>> {
    let pods: Vec<_> = pods_on(cluster, node)?.into_iter().filter(is_product).collect();
    let ready = pods.iter().filter(|pod| condition(pod, "Ready") == Some("True"));
    let uids: BTreeSet<_> = ready.map(|pod| pod["metadata"]["uid"].to_string()).collect();
    ensure!(uids.len() == 2 && pods.len() == 2, "{node} has not an agent and a controller that are Ready: {pods:?}");
    Ok(uids)
}

fn others_alone_are_evicted(cluster: &RealCluster, node: &str, before: &BTreeSet<String>) -> Result<()> {
    until_true("all other pods are evicted", KUBERNETES, || {
        let evicted = |pod: &Value| pod["status"]["phase"] == "Failed" && pod["status"]["reason"] == "Evicted";
        Ok(pods_on(cluster, node)?.iter().filter(|pod| !is_product(pod)).all(evicted))
    })?;
    let log = cluster.lab.logs().join(node).join("kubelet.log");
    until_logged(&log, &["cannot evict a critical pod", "egress-agent"], 1, KUBERNETES)?;
    ensure!(product_on(cluster, node)? == *before, "pods of the product were replaced");
    Ok(())
}

/// docs/operations/drain-and-upgrade.md, "Taking a node out of service".
pub(super) fn drain(test: &mut NodeTest) -> Result<()> {
    let (from, to) = test.gateway_and_other()?;
    let cluster = &test.cluster;
    let traffic = test.traffic()?;
    cluster.types(&format!("egress-agent drain {from}"))?;
    test.is_served_by(to, EFFECT)?;
    cluster.types(&format!("egress-agent drain {from} --undo"))?;
    let node = cluster.get(&["node", &from])?;
    ensure!(node["metadata"]["annotations"]["k8s.ovn.org/egress-drain"].is_null(), "the mark is still there");
    test.all_are_right()?;
    let seen = traffic.finish_without_loss()?;
    let turns = turns_of(&seen);
    ensure!(turns == [from.as_str(), to], "{EGRESS_IP} was emitted by {turns:?}");
    Ok(())
}

/// The same, and then the node is emptied, switched off and on, and takes pods again. Pods of the other node lose nothing.
pub(super) fn out_of_service(test: &mut NodeTest) -> Result<()> {
    install::ensure_installed(test)?;
    let (from, to) = test.gateway_and_other()?;
    let node = [("NODE", from.as_str())];
    let traffic = test.traffic_on(to)?;
    let cluster = &test.cluster;
    cluster.shell.types("kubectl egress drain NODE", &node)?;
    test.is_served_by(to, EFFECT)?;
    cluster.shell.types("kubectl drain NODE --ignore-daemonsets --delete-emptydir-data --force", &node)?;
    let left = cluster.list(&["pods", "-A", "--field-selector", &format!("spec.nodeName={from}")])?;
    let left: Vec<_> = left.iter().map(name_of).collect();
    ensure!(left.len() == 1, "pods are left on {from}: {left:?}");
    test.cluster.set_power(&from, false)?;
    test.boots_empty(&from)?;
    let cluster = &test.cluster;
    cluster.shell.types("kubectl uncordon NODE", &node)?;
    cluster.shell.types("kubectl egress drain NODE --undo", &node)?;
    test.place_pods()?;
    test.agent_is_ready(&from)?;
    rolled_out(&test.cluster, "deployment/egress-agent-controller")?;
    test.all_are_right()?;
    traffic.finish_without_loss().map(drop)
}
