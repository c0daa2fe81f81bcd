//! The same agents and a server that answers late: by 300 to 700 ms, and each sixteenth time by 1.5 s.
//!
//! `EGRESS_TEST_SLOW_KUBECONFIG` names it (`cargo xtask apiserver --slow --kubeconfig FILE` starts one).

use std::time::Instant;

use super::*;
use crate::skips::skipped;

async fn lease(cluster: &Cluster) -> (Option<String>, Option<i32>) {
    let leases: Api<Lease> = Api::namespaced(cluster.client.clone(), "kube-system");
    let spec = leases.get("egress-agent-leader").await.expect("a Lease").spec.unwrap_or_default();
    (spec.holder_identity, spec.lease_transitions)
}

/// Without a health port, where a node reads ledger and object before it takes an address: three times what was measured.
const MOVES: Duration = Duration::from_secs(45);

async fn owned_by(cluster: &Cluster, node: &str) {
    within(MOVES, "the address is where it should be", || async {
        let owners = cluster.kernels.iter().filter(|(_, kernel)| !kernel.now().owned.is_empty());
        owners.map(|(name, _)| *name).collect::<Vec<_>>() == [node]
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_agents_lead_assign_and_follow_by_a_slow_api_server() {
    let Some(kubeconfig) = std::env::var_os("EGRESS_TEST_SLOW_KUBECONFIG") else {
        skipped("EGRESS_TEST_SLOW_KUBECONFIG names no API server");
        return;
    };
    let (client, outages) = connect(Some(kubeconfig.as_ref())).await.expect("a kubeconfig");
    install_crd(&client, true).await;
    set_up(&client).await;
    let (kernels, lan, stop) = (BTreeMap::new(), Lan::default(), CancellationToken::new());
    let mut cluster = Cluster { client, outages, kernels, lan, stop };
    let agents = cluster.start();
    cluster.label("t-node2", true).await;
    put(&cluster.objects(), eip("t-eip", &["172.18.0.100"])).await;
    owned_by(&cluster, "t-node2").await;
    let led = lease(&cluster).await;
    for (from, to) in [("t-node2", "t-node3"), ("t-node3", "t-node1"), ("t-node1", "t-node2")] {
        cluster.label(to, true).await;
        cluster.label(from, false).await;
        let begin = Instant::now();
        owned_by(&cluster, to).await;
        println!("{from} to {to}: {:.1} s", begin.elapsed().as_secs_f64());
    }
    assert_eq!(lease(&cluster).await, led, "another agent leads");
    cluster.stop.cancel();
    agents.join_all().await;
    assert_eq!(cluster.lan.clashes(), Vec::<String>::new(), "two nodes held one address");
}
