//! The same agents with a slow server: answers take 300 to 700 ms, and each sixteenth takes 1.5 s.
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

/// 2.5 times the slowest answer: without a health port, leases are renewed by reads that are answered within 0.4 of the total
/// timeout.
const SLOW_RULES: ProbeTiming =
    ProbeTiming { total: Duration::from_secs(4), interval: Duration::from_secs(1), grace: Duration::from_secs(1) };
/// Time for a dozen answers in sequence.
const MOVES: Duration = Duration::from_secs(15);
/// Many times the duration of a lease.
const HOLDS: Duration = Duration::from_secs(12);

fn owners(cluster: &Cluster) -> Vec<&'static str> {
    let owners = cluster.kernels.iter().filter(|(_, kernel)| !kernel.now().owned.is_empty());
    owners.map(|(name, _)| *name).collect()
}

async fn moved(cluster: &Cluster, from: Option<&str>) -> &'static str {
    within(MOVES, "one node has the address", || async {
        matches!(owners(cluster)[..], [owner] if Some(owner) != from)
    })
    .await;
    owners(cluster)[0]
}

/// Two nodes can always host the address, so the owner's lease has an end.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_agents_assign_and_move_with_a_slow_api_server() {
    let Some(kubeconfig) = std::env::var_os("EGRESS_TEST_SLOW_KUBECONFIG") else {
        skipped("EGRESS_TEST_SLOW_KUBECONFIG names no API server");
        return;
    };
    let (client, outages) = connect(Some(kubeconfig.as_ref())).await.expect("a kubeconfig");
    install_crd(&client, true).await;
    set_up(&client).await;
    let (kernels, lan, stop) = (BTreeMap::new(), Lan::default(), CancellationToken::new());
    let mut cluster = Cluster { rules: SLOW_RULES, client, outages, kernels, lan, stop };
    let agents = cluster.start();
    let mut other = "t-node3";
    for node in NODES.into_iter().filter(|node| *node != other) {
        cluster.label(node, true).await;
    }
    put(&cluster.objects(), eip("t-eip", &["172.18.0.100"])).await;
    let mut owner = moved(&cluster, None).await;
    let led = lease(&cluster).await;
    for _ in 0..3 {
        cluster.label(other, true).await;
        cluster.label(owner, false).await;
        let begin = Instant::now();
        let new = moved(&cluster, Some(owner)).await;
        println!("{owner} to {new}: {:.1} s", begin.elapsed().as_secs_f64());
        (other, owner) = (owner, new);
    }
    let begin = Instant::now();
    while begin.elapsed() < HOLDS {
        assert_eq!(owners(&cluster), [owner], "{:?} after the last move", begin.elapsed());
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(lease(&cluster).await, led, "the leader has changed");
    cluster.stop.cancel();
    agents.join_all().await;
    assert_eq!(cluster.lan.clashes(), Vec::<String>::new(), "two nodes held one address");
}
