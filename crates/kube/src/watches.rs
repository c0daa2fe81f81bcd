//! Eight watches of an agent, six of a controller, each as one stream of changes; those for EgressServices are in
//! [`crate::egress_service`].
//!
//! kube's watcher lists, watches, and lists again when it must. Its errors are reported to [`ApiOutages`], and [`crate::backoff`]
//! paces retries. A list arrives as a whole (`Replaced`), so that objects that were deleted during an outage disappear. Objects
//! are converted as they arrive, and nothing else of them is stored.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::sync::Arc;

use futures::{Stream, StreamExt, stream};
use ipnet::IpNet;
use k8s_openapi::api::core::v1::{ConfigMap, Namespace, Node, Pod, Service};
use kube::api::{Api, DynamicObject};
use kube::core::PartialObjectMeta;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Client, Resource, ResourceExt};
use serde::de::DeserializeOwned;
use tokio::sync::watch;
use tracing::{debug, warn};

use crate::api_outage::{ApiOutages, is_outage_code};
use crate::backoff::{random_delay, with_backoff};
use crate::convert;
use crate::convert::AgentFacts;
use crate::crd::egress_node_resource;
use crate::error_text::ErrorText;
use crate::ledger::{self, UnreadableLedger};
use crate::policy;
use egress_core::model::ledger::Ledger;
use egress_core::model::node;
use egress_core::model::policy::{Conditions, EgressPolicy, Policies, PolicyKey, PolicyKind};
use egress_core::model::view::{Change, Update};

/// Seconds until a watch is resumed where it was, which bounds the time to notice that the server is silently gone.
const WATCH_SECONDS: u32 = 60;

/// Everything that a node's agent needs of the cluster.
pub fn for_agent(
    client: &Client,
    (namespace, node_name): (&str, &str),
    service_networks: &[IpNet],
    outages: &ApiOutages,
) -> impl Stream<Item = Change> + Send + use<> {
    let namespaces: Api<PartialObjectMeta<Namespace>> = Api::all(client.clone());
    let pods: Api<Pod> = Api::all(client.clone());
    let own_pods = config().fields(&format!("spec.nodeName={node_name}"));
    let namespaces =
        updates(("namespaces", outages.clone()), namespaces, config(), ResourceExt::name_any, |namespace| {
            namespace.metadata.labels.clone().unwrap_or_default()
        });
    let pods = updates(("pods", outages.clone()), pods, own_pods, convert::pod_key, convert::pod);
    stream::select_all([
        for_both(client, (namespace, Some(node_name)), service_networks, outages).boxed(),
        namespaces.map(Change::Namespaces).boxed(),
        pods.map(Change::Pods).boxed(),
    ])
}

/// Everything that a controller needs: no pods and no namespaces.
pub fn for_controller(
    client: &Client,
    namespace: &str,
    service_networks: &[IpNet],
    outages: &ApiOutages,
) -> impl Stream<Item = Change> + Send + use<> {
    for_both(client, (namespace, None), service_networks, outages)
}

/// Only the own node of an agent has labels: they are half of a Node, agents are many, and they ask for no others. Nor do they
/// for the conditions of policies, which are most of a status.
fn for_both(
    client: &Client,
    (namespace, own_node): (&str, Option<&str>),
    service_networks: &[IpNet],
    outages: &ApiOutages,
) -> impl Stream<Item = Change> + Send + use<> {
    let services: Api<Service> = Api::all(client.clone());
    let service_networks = service_networks.to_vec();
    let ledgers: Api<ConfigMap> = Api::namespaced(client.clone(), namespace);
    let ledger = config().fields(&format!("metadata.name={}", ledger::LEDGER_NAME));
    stream::select_all([
        policies(client, outages, own_node.is_none()).map(Change::Policies).boxed(),
        updates(("services", outages.clone()), services, config(), convert::service_key, move |service| {
            convert::service(service, &service_networks)
        })
        .map(Change::Services)
        .boxed(),
        nodes(client, own_node, outages).map(Change::Nodes).boxed(),
        updates(("the hand-overs", outages.clone()), ledgers, ledger, ResourceExt::name_any, ledger::read)
            .scan(Arc::default(), |last, update| {
                *last = Arc::new(ledger_after(last, update));
                std::future::ready(Some(Change::Ledger(Arc::clone(last))))
            })
            .boxed(),
    ])
}

/// The policies of all APIs: nothing before each has listed.
fn policies(
    client: &Client,
    outages: &ApiOutages,
    with_conditions: bool,
) -> impl Stream<Item = Update<PolicyKey, Arc<EgressPolicy>>> + Send + use<> {
    let of_kind = |kind| {
        let api = policy::api_of(kind);
        let key = move |object: &DynamicObject| PolicyKey { kind, name: object.name_any() };
        let read = move |object: &DynamicObject| {
            let mut policy = api.read(object);
            if !with_conditions {
                policy.published.conditions = Conditions::default();
            }
            Arc::new(policy)
        };
        let objects = policy::requests(client, kind);
        updates((api.objects(), outages.clone()), objects, config(), key, read).map(move |update| (kind, update))
    };
    let all = stream::select_all(PolicyKind::ALL.map(|kind| of_kind(kind).boxed()));
    all.scan(AllKinds::default(), |kinds, (kind, update)| std::future::ready(Some(kinds.apply(kind, update))))
        .flat_map(stream::iter)
}

/// Joins the watches of all APIs: nothing before each has listed, then a list of all whenever one lists, else the change of one
/// policy.
#[derive(Default)]
struct AllKinds {
    listed: BTreeSet<PolicyKind>,
    policies: Policies,
}

impl AllKinds {
    fn apply(
        &mut self,
        kind: PolicyKind,
        update: Update<PolicyKey, Arc<EgressPolicy>>,
    ) -> Option<Update<PolicyKey, Arc<EgressPolicy>>> {
        let change = match update {
            Update::Replaced(all) => {
                self.listed.insert(kind);
                self.policies.retain(|key, _| key.kind != kind);
                self.policies.extend(all);
                Update::Replaced(self.policies.clone())
            }
            Update::Changed(key, policy) => {
                self.policies.insert(key.clone(), Arc::clone(&policy));
                Update::Changed(key, policy)
            }
            Update::Removed(key) => {
                self.policies.remove(&key);
                Update::Removed(key)
            }
        };
        (self.listed.len() == PolicyKind::ALL.len()).then_some(change)
    }
}

/// Node objects, each joined with the facts in its EgressNode object.
fn nodes(
    client: &Client,
    own_node: Option<&str>,
    outages: &ApiOutages,
) -> impl Stream<Item = Update<String, Arc<node::Node>>> + Send + use<> {
    let own_node = own_node.map(str::to_owned);
    let read = move |object: &Node| {
        let read = convert::node(object);
        let is_other = own_node.as_ref().is_some_and(|own| *own != read.name);
        node::Node { labels: if is_other { Arc::default() } else { read.labels }, ..read }
    };
    let nodes: Api<Node> = Api::all(client.clone());
    let facts: Api<DynamicObject> = Api::all_with(client.clone(), &egress_node_resource());
    let nodes = updates(("nodes", outages.clone()), nodes, config(), ResourceExt::name_any, read)
        .map(|update| Half::Node(Box::new(update)));
    let facts =
        updates(("EgressNode objects", outages.clone()), facts, config(), ResourceExt::name_any, convert::agent_facts);
    let both = stream::select_all([nodes.boxed(), facts.map(|update| Half::Agent(Box::new(update))).boxed()]);
    both.scan(Join::default(), |join, half| std::future::ready(Some(join.apply(half)))).flat_map(stream::iter)
}

/// An update of one of the two watches.
enum Half {
    Node(Box<Update<String, node::Node>>),
    Agent(Box<Update<String, AgentFacts>>),
}

/// Joins two watches: nothing before both have listed, a list if one lists, else the change of one node.
#[derive(Default)]
struct Join {
    nodes: Option<BTreeMap<String, node::Node>>,
    facts: Option<BTreeMap<String, AgentFacts>>,
}

impl Join {
    fn apply(&mut self, half: Half) -> Option<Update<String, Arc<node::Node>>> {
        let name = match half {
            Half::Node(update) => apply_half(&mut self.nodes, *update),
            Half::Agent(update) => apply_half(&mut self.facts, *update),
        };
        let (nodes, facts) = (self.nodes.as_ref()?, self.facts.as_ref()?);
        let join =
            |(name, node): (&String, &node::Node)| (name.clone(), Arc::new(convert::joined(node, facts.get(name))));
        Some(match name {
            None => Update::Replaced(nodes.iter().map(join).collect()),
            Some(name) => match nodes.get_key_value(&name).map(join) {
                Some((name, node)) => Update::Changed(name, node),
                None => Update::Removed(name),
            },
        })
    }
}

/// Applies the update. Returns the changed name, or `None` for all.
fn apply_half<V>(known: &mut Option<BTreeMap<String, V>>, update: Update<String, V>) -> Option<String> {
    match update {
        Update::Replaced(all) => {
            *known = Some(all);
            None
        }
        Update::Changed(name, value) => {
            known.get_or_insert_default().insert(name.clone(), value);
            Some(name)
        }
        Update::Removed(name) => {
            known.get_or_insert_default().remove(&name);
            Some(name)
        }
    }
}

pub(crate) fn config() -> watcher::Config {
    watcher::Config::default().timeout(WATCH_SECONDS)
}

/// The ledger after an update. One that cannot be read or was deleted stays as it was, because an agent must not take back a
/// released address. It is marked as unsigned, so that the leader writes it again.
fn ledger_after(last: &Ledger, update: Update<String, Result<Ledger, UnreadableLedger>>) -> Ledger {
    let read = match update {
        Update::Replaced(all) => all.into_values().next(),
        Update::Changed(_, read) => Some(read),
        Update::Removed(_) => None,
    };
    match read {
        Some(Ok(ledger)) => ledger,
        Some(Err(UnreadableLedger { version, why })) => {
            warn!(why, "the ConfigMap {} cannot be read; what was read last holds", ledger::LEDGER_NAME);
            Ledger { version, leader: String::new(), ..last.clone() }
        }
        None => Ledger { version: String::new(), leader: String::new(), ..last.clone() },
    }
}

/// The changes of one kind of objects.
pub(crate) fn updates<T, K, V>(
    (what, outages): (&'static str, ApiOutages),
    api: Api<T>,
    config: watcher::Config,
    key: impl Fn(&T) -> K + Send,
    value: impl Fn(&T) -> V + Send,
) -> impl Stream<Item = Update<K, V>> + Send
where
    T: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
    K: Ord + Send,
    V: Send,
{
    let mut listed = BTreeMap::new();
    outages.register_watch(api.resource_url(), what);
    let rollbacks = outages.rollbacks();
    let begin = move || {
        let (api, config) = (api.clone(), config.clone());
        watcher(api, config)
    };
    with_backoff(with_relists(begin, rollbacks).boxed(), &outages).filter_map(move |event| {
        std::future::ready(match event {
            Ok(event) => {
                // A list that begins may still fail.
                if !matches!(event, Event::Init) {
                    outages.answered(what);
                }
                apply_event(&mut listed, event, &key, &value)
            }
            Err(error) => {
                report(what, &outages, &error);
                None
            }
        })
    })
}

/// A watch that lists again if the server was rolled back: its resource version has no meaning there.
fn with_relists<S>(begin: impl Fn() -> S + Send, rollbacks: watch::Receiver<()>) -> impl Stream<Item = S::Item> + Send
where
    S: Stream + Send,
    S::Item: Send,
{
    let first = Box::pin(begin());
    stream::unfold((first, begin, rollbacks), |(mut watch, begin, mut rollbacks)| async move {
        loop {
            tokio::select! {
                event = watch.next() => return Some((event?, (watch, begin, rollbacks))),
                Ok(()) = rollbacks.changed() => {
                    tokio::time::sleep(random_delay()).await;
                    watch = Box::pin(begin());
                }
            }
        }
    })
}

fn report(what: &'static str, outages: &ApiOutages, error: &watcher::Error) {
    match error {
        watcher::Error::InitialListFailed(error)
        | watcher::Error::WatchStartFailed(error)
        | watcher::Error::WatchFailed(error) => outages.failed(what, error),
        // The server no longer has this version (compaction): the watcher lists again.
        watcher::Error::WatchError(status) if status.code == 410 => debug!(what, "listing again"),
        watcher::Error::WatchError(status) if is_outage_code(status.code) => {
            outages.unanswered(what, &ErrorText(error).to_string());
        }
        watcher::Error::WatchError(_) | watcher::Error::NoResourceVersion => {
            outages.refused(what, &ErrorText(error).to_string());
        }
    }
}

/// Handles one event of a watch. A list is collected until it is complete.
fn apply_event<T, K: Ord, V>(
    listed: &mut BTreeMap<K, V>,
    event: Event<T>,
    key: impl Fn(&T) -> K,
    value: impl Fn(&T) -> V,
) -> Option<Update<K, V>> {
    match event {
        Event::Init => {
            listed.clear();
            None
        }
        Event::InitApply(object) => {
            listed.insert(key(&object), value(&object));
            None
        }
        Event::InitDone => Some(Update::Replaced(std::mem::take(listed))),
        Event::Apply(object) => Some(Update::Changed(key(&object), value(&object))),
        Event::Delete(object) => Some(Update::Removed(key(&object))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_broken_or_deleted_ledger_stays_and_is_to_be_written_again() {
        let known = Ledger { version: "7".into(), leader: "a".into(), ..Ledger::default() };
        let unsigned = |version: &str| Ledger { version: version.into(), leader: String::new(), ..known.clone() };
        let broken = UnreadableLedger { version: "8".into(), why: "records: ...".into() };
        assert_eq!(ledger_after(&known, Update::Changed("x".into(), Err(broken))), unsigned("8"));
        assert_eq!(ledger_after(&known, Update::Removed("x".into())), unsigned(""));
        assert_eq!(ledger_after(&known, Update::Replaced(BTreeMap::new())), unsigned(""));
        assert_eq!(ledger_after(&Ledger::default(), Update::Changed("x".into(), Ok(known.clone()))), known);
    }

    #[test]
    fn policies_are_published_after_each_api_has_listed() {
        let kind = PolicyKind::EgressIp;
        let policy = |name: &str| {
            let object = serde_json::json!({"metadata": {"name": name}, "spec": {}});
            let object = serde_json::from_value(object).expect("an object");
            (PolicyKey::egress_ip(name), Arc::new(policy::api_of(kind).read(&object)))
        };
        let (key, early) = policy("a");
        let mut all = AllKinds::default();
        assert!(all.apply(kind, Update::Changed(key, early)).is_none(), "before the list");
        let of_services = Update::Replaced(Policies::new());
        assert!(all.apply(PolicyKind::Assignment, of_services).is_none(), "one of two kinds");
        let listed = all.apply(kind, Update::Replaced(Policies::from([policy("b")])));
        assert!(matches!(listed, Some(Update::Replaced(all)) if all.keys().eq([&PolicyKey::egress_ip("b")])));
        let (key, changed) = policy("c");
        assert!(matches!(all.apply(kind, Update::Changed(key, changed)), Some(Update::Changed(..))));
        assert!(matches!(all.apply(kind, Update::Removed(PolicyKey::egress_ip("b"))), Some(Update::Removed(_))));
        assert!(all.policies.keys().eq([&PolicyKey::egress_ip("c")]));
    }

    #[test]
    fn nodes_are_published_after_both_lists_and_then_one_by_one() {
        let node = |name: &str| node::Node { name: name.into(), uid: "u".into(), ..node::Node::default() };
        let with_mac = |mac: &str| {
            let status = serde_json::json!({"nodeUID": "u", "uplink": {"mac": mac, "nextHops": []}});
            let mut object = DynamicObject::new("a", &egress_node_resource());
            object.data["status"] = status;
            convert::agent_facts(&object)
        };
        let mut join = Join::default();
        let both = BTreeMap::from([("a".to_owned(), node("a")), ("b".to_owned(), node("b"))]);
        assert!(join.apply(Half::Node(Box::new(Update::Replaced(both)))).is_none(), "facts of agents are not known");
        let facts = BTreeMap::from([("a".to_owned(), with_mac("02:00:00:00:00:01"))]);
        let Some(Update::Replaced(all)) = join.apply(Half::Agent(Box::new(Update::Replaced(facts)))) else {
            panic!("a list")
        };
        assert_eq!(all["a"].uplink.mac, Some([2, 0, 0, 0, 0, 1]));
        assert_eq!((all.len(), all["b"].uplink.mac), (2, None));
        let changed = join.apply(Half::Agent(Box::new(Update::Changed("b".into(), with_mac("02:00:00:00:00:02")))));
        assert!(matches!(changed, Some(Update::Changed(_, b)) if b.uplink.mac == Some([2, 0, 0, 0, 0, 2])));
        let gone = join.apply(Half::Agent(Box::new(Update::Removed("b".into()))));
        assert!(matches!(gone, Some(Update::Changed(_, b)) if b.uplink.mac.is_none()));
        let gone = join.apply(Half::Node(Box::new(Update::Removed("b".into()))));
        assert!(matches!(gone, Some(Update::Removed(name)) if name == "b"));
        let stray = join.apply(Half::Agent(Box::new(Update::Changed("c".into(), with_mac("02:00:00:00:00:03")))));
        assert!(matches!(stray, Some(Update::Removed(name)) if name == "c"), "of no Node");
    }

    #[tokio::test]
    async fn a_server_that_was_rolled_back_is_listed_again() {
        let outages = ApiOutages::new("here");
        let mut begun = 0;
        let begin = || {
            begun += 1;
            stream::iter([begun]).chain(stream::pending())
        };
        let begin = std::sync::Mutex::new(begin);
        let watch = with_relists(move || (begin.lock().expect("not poisoned"))(), outages.rollbacks());
        let mut watch = std::pin::pin!(watch);
        assert_eq!(watch.next().await, Some(1));
        let soon = std::time::Duration::from_millis(50);
        assert!(tokio::time::timeout(soon, watch.next()).await.is_err(), "nothing happens");
        outages.rolled_back(7, 9);
        let again = tokio::time::timeout(std::time::Duration::from_secs(5), watch.next()).await;
        assert_eq!(again, Ok(Some(2)));
    }
}
