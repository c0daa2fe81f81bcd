//! Reading an EgressIP object anew: what the API server has now, whatever the watches have told so far.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::Duration;

use futures::StreamExt;
use kube::Client;
use kube::api::{Api, DynamicObject};

use super::{convert, watch};
use crate::model::view::parse_egress_ip;

/// How long all of it may take. Who gets no answer asks again.
const PATIENCE: Duration = Duration::from_secs(1);
/// Requests at a time.
const PARALLEL: usize = 16;

/// Those of the addresses that their objects' status gives to this node. A read without a version is answered from what
/// has been written, not from a cache.
pub async fn still_given(client: Client, node_name: String, questions: BTreeSet<(String, IpAddr)>) -> BTreeSet<IpAddr> {
    let api: Api<DynamicObject> = Api::all_with(client, &watch::egressip_resource());
    let (api, node_name) = (&api, node_name.as_str());
    let read = |(name, address): (String, IpAddr)| async move {
        let object = convert::object(&api.get(&name).await.ok()?);
        let is_it = |item: &crate::model::view::Item| {
            item.node == node_name && parse_egress_ip(&item.egress_ip) == Some(address)
        };
        object.items.iter().any(is_it).then_some(address)
    };
    let answers = futures::stream::iter(questions).map(read).buffer_unordered(PARALLEL);
    let in_time = answers.take_until(tokio::time::sleep(PATIENCE));
    in_time.filter_map(std::future::ready).collect().await
}
