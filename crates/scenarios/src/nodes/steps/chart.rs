//! The chart, installed, updated and removed by Helm as docs/install.md has it.

use super::packets::new_pods;
use super::*;
use egress_lab::test::Skip;

/// Leaves the nodes as they were.
pub(super) fn chart(test: &mut NodeTest) -> Result<()> {
    if !test.cluster.shell.has("helm") {
        return Err(Skip("helm is not here").into());
    }
    install::ensure_uninstalled(test)?;
    let cluster = &test.cluster;
    cluster.types("kubectl create namespace egress-agent")?;
    cluster.types("kubectl label namespace egress-agent pod-security.kubernetes.io/enforce=privileged")?;
    cluster.types("helm install egress-agent deploy/helm/egress-agent --namespace egress-agent --values deploy/helm/egress-agent/clusters/bridge-cni.yaml")?;
    cluster.types("kubectl -n egress-agent rollout status daemonset/egress-agent")?;
    cluster.types("kubectl -n egress-agent rollout status deployment/egress-agent-controller")?;
    cluster.nodes().iter().try_for_each(install::has_its_rights_alone)?;
    test.nothing_is_selected()?;
    install::serve(test)?;
    without_plugin(test)?;
    with_plugin_again(test)?;
    one_node_out(test)?;
    stopped_everywhere(test)?;
    removed(test)
}

/// docs/install.md, "A bridge CNI": the line stays in the chain, and the program in it finds no agent. First packets may be lost, and
/// none leaves with a wrong address. What runs loses nothing.
fn without_plugin(test: &NodeTest) -> Result<()> {
    let traffic = test.traffic()?;
    test.cluster.types("helm upgrade egress-agent deploy/helm/egress-agent --namespace egress-agent --reuse-values --set cniPlugin.enabled=false")?;
    all_rolled_out(&test.cluster)?;
    traffic.finish_without_loss()?;
    for node in test.cluster.nodes() {
        ensure!(install::is_in_chain(node)?, "the plugin is not in the chain of {} any more", node.lab.name());
        ensure!(node.agents("cni-install")?.is_empty(), "{} still installs the plugin", node.lab.name());
    }
    let pods = new_pods(test)?;
    let lost: Vec<_> = pods.iter().filter(|pod| pod.echoes == 0).map(|pod| pod.name.as_str()).collect();
    println!("without the plugin {} of {} pods lost their first packet: {}", lost.len(), pods.len(), lost.join(" "));
    let strange: Vec<_> = pods.iter().filter(|pod| pod.strange > 0 || pod.asked != [pod.source]).collect();
    ensure!(strange.is_empty(), "wrong addresses: {strange:?}");
    ensure!(!lost.is_empty(), "the plugin makes no difference");
    Ok(())
}

/// docs/install.md, "Upgrade", and back.
fn with_plugin_again(test: &NodeTest) -> Result<()> {
    let traffic = test.traffic()?;
    test.cluster.types("helm rollback egress-agent --namespace egress-agent")?;
    all_rolled_out(&test.cluster)?;
    traffic.finish_without_loss()?;
    let lost: Vec<_> = new_pods(test)?.into_iter().filter(|pod| pod.echoes != 1).collect();
    ensure!(lost.is_empty(), "with the plugin: {lost:?}");
    Ok(())
}

/// docs/operations/break-glass-chart.md, "Take one node out", and back.
fn one_node_out(test: &NodeTest) -> Result<()> {
    let (_, out) = test.gateway_and_other()?;
    let (cluster, node) = (&test.cluster, [("NODE", out)]);
    cluster.types("kubectl label nodes --all egress-agent-here=yes")?;
    cluster.shell.types("kubectl label node NODE egress-agent-here-", &node)?;
    cluster.types("helm upgrade egress-agent deploy/helm/egress-agent --namespace egress-agent --reuse-values --set agent.nodeSelector.egress-agent-here=yes")?;
    cluster.types("kubectl -n egress-agent rollout status daemonset/egress-agent")?;
    let runs = || -> Result<bool> { Ok(!cluster.node(out)?.agents("run")?.is_empty()) };
    until_true(&format!("no agent runs on {out}"), KUBERNETES, || Ok(!runs()?))?;
    // Its programs continue.
    test.all_are_right()?;
    cluster.types("helm rollback egress-agent --namespace egress-agent")?;
    cluster.types("kubectl label nodes --all egress-agent-here-")?;
    until_true(&format!("an agent runs on {out}"), KUBERNETES, runs)?;
    all_rolled_out(cluster)?;
    test.all_are_right()
}

/// docs/operations/break-glass-chart.md, "Stop everywhere", and back.
fn stopped_everywhere(test: &NodeTest) -> Result<()> {
    let cluster = &test.cluster;
    cluster.types("helm upgrade egress-agent deploy/helm/egress-agent --namespace egress-agent --reuse-values --set cleanup.enabled=true")?;
    cluster.types("kubectl -n egress-agent rollout status daemonset/egress-agent-cleanup")?;
    cluster.types("kubectl -n egress-agent scale deployment egress-agent-controller --replicas=0")?;
    test.nothing_is_selected()?;
    cluster.types("helm upgrade egress-agent deploy/helm/egress-agent --namespace egress-agent --reuse-values --set cleanup.enabled=false")?;
    cluster.types("kubectl -n egress-agent scale deployment egress-agent-controller --replicas=2")?;
    cluster.types("kubectl -n egress-agent rollout status daemonset/egress-agent")?;
    all_rolled_out(cluster)?;
    test.all_are_right()
}

fn removed(test: &NodeTest) -> Result<()> {
    let cluster = &test.cluster;
    test.agents_have_left_traces()?;
    cluster.types("kubectl delete egressip --all")?;
    cluster.types("helm upgrade egress-agent deploy/helm/egress-agent --namespace egress-agent --reuse-values --set cleanup.enabled=true")?;
    cluster.types("kubectl -n egress-agent rollout status daemonset/egress-agent-cleanup")?;
    cluster.types("helm uninstall egress-agent --namespace egress-agent")?;
    cluster.types("kubectl delete crd --selector app.kubernetes.io/part-of=egress-agent")?;
    cluster.types("kubectl delete namespace egress-agent")?;
    let kinds = "clusterroles,clusterrolebindings,validatingadmissionpolicies,validatingadmissionpolicybindings,flowschemas,crds";
    let left = cluster.types(&format!("kubectl get {kinds} -o name | grep egress || true"))?;
    ensure!(left.is_empty(), "the cluster still has {left}");
    test.nothing_is_left()
}
