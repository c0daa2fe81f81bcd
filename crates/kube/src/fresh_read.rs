//! Fresh reads of the ledger and of egress policies: the current state of the API server, past the watches.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::Duration;

use futures::StreamExt;
use kube::Client;

use crate::ledger::{self, LedgerStore};
use crate::policy;
use egress_core::model::ledger::Ledger;
use egress_core::model::policy::{Item, PolicyKey, parse_egress_ip};

/// Timeout of each of the two reads, the ledger and then the objects. The caller retries, so it must exceed the latency of a slow
/// server: a shorter one would never get an answer.
const TIMEOUT: Duration = Duration::from_secs(2);
/// Concurrent requests.
const PARALLEL: usize = 16;

/// The addresses among `candidates` that the policies' status assigns to this node and that no open hand-over moves to another. A
/// read without a resource version is a quorum read.
///
/// The ledger is read first: the leader may be about to write a status that it computed while this node was
/// unreachable. Its hand-over is open until that status is written.
pub async fn still_assigned(
    (client, store): (Client, LedgerStore),
    node_name: String,
    mut candidates: BTreeSet<(PolicyKey, IpAddr)>,
) -> BTreeSet<IpAddr> {
    let Ok(Some(ledger)) = tokio::time::timeout(TIMEOUT, read_ledger(&store)).await else { return BTreeSet::new() };
    candidates.retain(|(_, address)| ledger.lets_hold(&node_name, address));
    let (client, node_name) = (&client, node_name.as_str());
    let read = |(PolicyKey { kind, name }, address): (PolicyKey, IpAddr)| async move {
        let api = policy::requests(client, kind);
        let object = api.get(&name).await.ok()?;
        let policy = policy::api_of(kind).read(&object);
        let is_assigned = |item: &Item| item.node == node_name && parse_egress_ip(&item.egress_ip) == Some(address);
        policy.published.items.iter().any(is_assigned).then_some(address)
    };
    let answers = futures::stream::iter(candidates).map(read).buffer_unordered(PARALLEL);
    let in_time = answers.take_until(tokio::time::sleep(TIMEOUT));
    in_time.filter_map(std::future::ready).collect().await
}

/// `None` if it cannot be read or does not exist: its hand-overs are still open, and the leader is about to write it again.
async fn read_ledger(store: &LedgerStore) -> Option<Ledger> {
    ledger::read(&store.read().await.ok()??).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stub::StubServer;

    #[tokio::test]
    async fn a_server_that_takes_a_second_and_a_half_per_answer_is_waited_for() {
        let server = StubServer::start().await;
        let (client, address) = (server.client().0, IpAddr::from([10, 0, 0, 1]));
        let store = LedgerStore::new(client.clone(), "slow");
        let read_for = |node: &str| {
            let candidates = BTreeSet::from([(PolicyKey::egress_ip("slow"), address)]);
            still_assigned((client.clone(), store.clone()), node.to_owned(), candidates)
        };
        let answers = tokio::join!(read_for("a"), read_for("b"));
        assert_eq!(answers, (BTreeSet::from([address]), BTreeSet::new()));
    }

    #[tokio::test]
    async fn a_missing_ledger_gives_no_answer() {
        let server = StubServer::start().await;
        let store = |namespace| LedgerStore::new(server.client().0, namespace);
        assert!(read_ledger(&store("there")).await.is_some());
        assert_eq!(read_ledger(&store("absent")).await, None);
    }
}
