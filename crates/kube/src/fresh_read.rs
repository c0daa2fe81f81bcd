//! Reading the ledger and EgressIP objects anew: what the API server has now, whatever the watches have told so far.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::Duration;

use futures::StreamExt;
use kube::Client;
use kube::api::{Api, DynamicObject};

use crate::ledger::{self, LedgerStore};
use crate::{convert, watches};
use egress_core::model::ledger::Ledger;
use egress_core::model::view::parse_egress_ip;

/// How long each of the two may take, the ledger and then the objects. Who gets no answer asks again, so it is no less than a
/// slow server takes: whoever cuts it off gets no answer at all.
const PATIENCE: Duration = Duration::from_secs(2);
/// Requests at a time.
const PARALLEL: usize = 16;

/// Those of the addresses that their objects' status gives to this node, and that are not on their way to another. A read
/// without a version is answered from what has been written, not from a cache.
///
/// The ledger is read first: the leader may be about to write a status that it has decided on while this node was out of
/// touch. Then the hand-over is open still, and it is open until the status shows what came of it.
pub async fn still_given(
    (client, store): (Client, LedgerStore),
    node_name: String,
    mut questions: BTreeSet<(String, IpAddr)>,
) -> BTreeSet<IpAddr> {
    let Ok(Some(ledger)) = tokio::time::timeout(PATIENCE, read_ledger(&store)).await else { return BTreeSet::new() };
    questions.retain(|(_, address)| ledger.lets_hold(&node_name, address));
    let api: Api<DynamicObject> = Api::all_with(client, &watches::egressip_resource());
    let (api, node_name) = (&api, node_name.as_str());
    let read = |(name, address): (String, IpAddr)| async move {
        let object = convert::object(&api.get(&name).await.ok()?);
        let is_it = |item: &egress_core::model::view::Item| {
            item.node == node_name && parse_egress_ip(&item.egress_ip) == Some(address)
        };
        object.items.iter().any(is_it).then_some(address)
    };
    let answers = futures::stream::iter(questions).map(read).buffer_unordered(PARALLEL);
    let in_time = answers.take_until(tokio::time::sleep(PATIENCE));
    in_time.filter_map(std::future::ready).collect().await
}

/// `None` where it cannot be read, or is not there: what was open in it is still on its way, and the leader is about to
/// write it anew.
async fn read_ledger(store: &LedgerStore) -> Option<Ledger> {
    ledger::read(&store.read().await.ok()??).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stub::Server;

    #[tokio::test]
    async fn a_server_that_takes_a_second_and_a_half_for_each_answer_is_waited_for() {
        let server = Server::start().await;
        let (client, address) = (server.client().0, IpAddr::from([10, 0, 0, 1]));
        let store = LedgerStore::new(client.clone(), "slow");
        let ask = |node: &str| {
            let questions = BTreeSet::from([("slow".to_owned(), address)]);
            still_given((client.clone(), store.clone()), node.to_owned(), questions)
        };
        let answers = tokio::join!(ask("a"), ask("b"));
        assert_eq!(answers, (BTreeSet::from([address]), BTreeSet::new()));
    }

    #[tokio::test]
    async fn a_ledger_that_is_not_there_is_waited_for() {
        let server = Server::start().await;
        let store = |namespace| LedgerStore::new(server.client().0, namespace);
        assert!(read_ledger(&store("there")).await.is_some());
        assert_eq!(read_ledger(&store("absent")).await, None);
    }
}
