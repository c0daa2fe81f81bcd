//! Four watches, one stream of changes.
//!
//! kube's watcher lists, watches and lists again when it must; its errors are retried with backoff and named in one line
//! each. A list arrives as a whole (`Replaced`), so that what went away while nobody watched is known to be gone. Objects
//! are converted as they arrive and nothing else of them is kept.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::Arc;

use futures::{Stream, StreamExt, stream};
use k8s_openapi::api::core::v1::{Namespace, Node, Pod};
use kube::api::{Api, ApiResource, DynamicObject};
use kube::core::PartialObjectMeta;
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Client, Resource, ResourceExt};
use serde::de::DeserializeOwned;
use tracing::{info, warn};

use super::{convert, crd};
use crate::kube::causes::Causes;
use crate::model::view::{Change, EgressObject, Update};

/// Seconds until a watch is begun anew where it was: also what it takes to notice that the server is silently gone.
const WATCH_SECONDS: u32 = 60;

/// The kind EgressIP, untyped.
pub fn egressip_resource() -> ApiResource {
    ApiResource::erase::<crd::EgressIP>(&())
}

/// All that this node's agent must know of the cluster, for ever.
pub fn changes(client: &Client, node_name: &str) -> impl Stream<Item = Change> + Send + use<> {
    let objects: Api<DynamicObject> = Api::all_with(client.clone(), &egressip_resource());
    let namespaces: Api<PartialObjectMeta<Namespace>> = Api::all(client.clone());
    let nodes: Api<Node> = Api::all(client.clone());
    let pods: Api<Pod> = Api::all(client.clone());
    let config = watcher::Config::default().timeout(WATCH_SECONDS);
    let own_pods = config.clone().fields(&format!("spec.nodeName={node_name}"));

    stream::select_all([
        updates("EgressIP objects", objects, config.clone(), ResourceExt::name_any, object)
            .map(Change::Objects)
            .boxed(),
        updates("namespaces", namespaces, config.clone(), ResourceExt::name_any, |namespace| {
            Some(namespace.metadata.labels.clone().unwrap_or_default())
        })
        .map(Change::Namespaces)
        .boxed(),
        updates("nodes", nodes, config, ResourceExt::name_any, |node| Some(Arc::new(convert::node(node))))
            .map(Change::Nodes)
            .boxed(),
        updates("pods", pods, own_pods, convert::pod_key, |pod| Some(convert::pod(pod))).map(Change::Pods).boxed(),
    ])
}

fn object(object: &DynamicObject) -> Option<Arc<EgressObject>> {
    match convert::object(object) {
        Ok(value) => Some(Arc::new(value)),
        Err(error) => {
            warn!(egressip = object.name_any(), %error, "this object cannot be read; what was known of it stays");
            None
        }
    }
}

fn updates<T, K, V>(
    what: &'static str,
    api: Api<T>,
    config: watcher::Config,
    key: impl Fn(&T) -> K + Send,
    value: impl Fn(&T) -> Option<V> + Send,
) -> impl Stream<Item = Update<K, V>> + Send
where
    T: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
    K: Ord + Send,
    V: Send,
{
    let mut listed = BTreeMap::new();
    let mut failing = false;
    watcher(api, config).default_backoff().filter_map(move |event| {
        std::future::ready(match event {
            Ok(event) => {
                // A list that begins may still fail.
                if !matches!(event, Event::Init) && std::mem::take(&mut failing) {
                    info!("{what} can be watched again");
                }
                enter(&mut listed, event, &key, &value)
            }
            Err(error) => {
                // Once per outage.
                if !std::mem::replace(&mut failing, true) {
                    warn!(error = %Causes(&error), "cannot watch {what}; trying again");
                }
                None
            }
        })
    })
}

/// One event of a watch; a list is collected until it is complete.
fn enter<T, K: Ord, V>(
    listed: &mut BTreeMap<K, V>,
    event: Event<T>,
    key: impl Fn(&T) -> K,
    value: impl Fn(&T) -> Option<V>,
) -> Option<Update<K, V>> {
    match event {
        Event::Init => {
            listed.clear();
            None
        }
        Event::InitApply(object) => {
            listed.extend(value(&object).map(|value| (key(&object), value)));
            None
        }
        Event::InitDone => Some(Update::Replaced(std::mem::take(listed))),
        Event::Apply(object) => value(&object).map(|value| Update::Changed(key(&object), value)),
        Event::Delete(object) => Some(Update::Removed(key(&object))),
    }
}
