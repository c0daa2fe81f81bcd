//! What the cluster must know of this node, published on its Node object where no CNI does.
//!
//! The keys and formats are OVN-Kubernetes': `node-primary-ifaddr` (which addresses the node can host), `host-cidrs`
//! (whose addresses are a node's) and `node-subnets`. Where OVN-Kubernetes runs it writes them, and this does nothing.
//! Elsewhere nobody may be overwritten either: beside the keys stands what we wrote ([`keys::PUBLISHED`]), and a key that
//! says anything else is another's and stays. What only this agent can say, of the uplink ([`keys::UPLINK`]) and of where it
//! answers health checks ([`keys::HEALTH_ADDRESSES`]), it writes on every node.
//!
//! The address of this node that others send to is the published one, so the agent sends nothing to others before its
//! own Node object says it (`model::desired`).

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use ipnet::IpNet;
use k8s_openapi::api::core::v1::Node as KubeNode;
use kube::api::{Api, Patch, PatchParams};
use kube::{Client, Error};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::keys;
use super::outage::Outages;
use crate::dataplane::host::{Host, HostNetworks};
use crate::model::node::{Uplink, mac_text};
use crate::model::view::Node;

/// How often the node's own addresses are looked at.
const LOOK: Duration = Duration::from_secs(5);
/// How long one exchange with the API server may take.
const PATIENCE: Duration = Duration::from_secs(10);

type Annotations = BTreeMap<String, String>;

/// Where to publish.
pub struct Place<'a> {
    pub client: Client,
    pub node_name: &'a str,
    /// Networks whose addresses on this host are not the node's: those of pods and services.
    pub leave_out: &'a [IpNet],
}

#[derive(Debug, thiserror::Error)]
enum PublishError {
    #[error("cannot read this node's addresses: {0}")]
    Addresses(#[from] std::io::Error),
    #[error(transparent)]
    Api(#[from] Error),
    #[error("a request took too long")]
    Silence(#[from] tokio::time::error::Elapsed),
}

/// Keeps this node's keys as they should be, until told to stop.
pub async fn publish(
    place: Place<'_>,
    host: &Host,
    mut own: watch::Receiver<Option<Arc<Node>>>,
    outages: &Outages,
    stop: CancellationToken,
) {
    const WHAT: &str = "this node's networks on its Node object";
    // What is published, as far as one knows.
    let mut said: Option<HostNetworks> = None;
    loop {
        let outcome = publish_once(&place, host, said.as_ref()).await;
        let failing = outcome.is_err();
        said = match outcome {
            Ok(networks) => {
                outages.works(WHAT);
                Some(networks)
            }
            Err(error) => {
                match &error {
                    PublishError::Api(error) => outages.failed(WHAT, error),
                    PublishError::Silence(_) => outages.unanswered(WHAT, &error.to_string()),
                    PublishError::Addresses(_) => warn!(%error, "cannot publish {WHAT}; trying again"),
                }
                None
            }
        };
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(LOOK) => {}
            // Somebody may have changed what we wrote, or the node has just registered.
            alive = own.changed(), if !failing => match alive {
                Ok(()) => said = None,
                Err(_) => return,
            },
        }
    }
}

/// Asks the API server only where this node is not as it was said to be.
async fn publish_once(
    place: &Place<'_>,
    host: &Host,
    said: Option<&HostNetworks>,
) -> Result<HostNetworks, PublishError> {
    let networks = host.networks().await?;
    if said != Some(&networks) {
        tokio::time::timeout(PATIENCE, write(place, &networks)).await??;
    }
    Ok(networks)
}

async fn write(place: &Place<'_>, networks: &HostNetworks) -> Result<(), Error> {
    let (api, name): (Api<KubeNode>, _) = (Api::all(place.client.clone()), place.node_name);
    // A node registers itself when it likes; its object is on its way by the watch then.
    let Some(node) = api.get_opt(name).await? else { return Ok(()) };
    let Some(annotations) = changes(&node, networks, place.leave_out) else { return Ok(()) };
    let metadata = json!({"resourceVersion": node.metadata.resource_version, "annotations": annotations});
    match api.patch(name, &PatchParams::default(), &Patch::Merge(json!({"metadata": metadata}))).await {
        Ok(_) => info!(primary = ?networks.primary, "published this node's networks on its Node object"),
        // Somebody else wrote meanwhile: the newer object comes by the watch.
        Err(Error::Api(status)) if status.code == 409 => {}
        Err(error) => return Err(error),
    }
    Ok(())
}

/// The annotations to be merged; `None` when all is as it should be.
fn changes(node: &KubeNode, networks: &HostNetworks, leave_out: &[IpNet]) -> Option<BTreeMap<String, Value>> {
    let nothing = Annotations::new();
    let found = node.metadata.annotations.as_ref().unwrap_or(&nothing);
    let mut changes: BTreeMap<String, Value> = BTreeMap::new();
    let uplink = uplink(&networks.uplink);
    if found.get(keys::UPLINK) != uplink.as_ref() {
        changes.insert(keys::UPLINK.to_owned(), json!(uplink));
    }
    let health = health_addresses(networks);
    if found.get(keys::HEALTH_ADDRESSES) != health.as_ref() {
        changes.insert(keys::HEALTH_ADDRESSES.to_owned(), json!(health));
    }
    if keys::OF_OVN_KUBERNETES.iter().any(|key| found.contains_key(*key)) {
        return (!changes.is_empty()).then_some(changes);
    }
    let published: Annotations =
        found.get(keys::PUBLISHED).and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default();
    let is_ours = |key: &String| found.get(key).is_none_or(|value| published.get(key) == Some(value));
    let mut wanted = wanted(node, networks, leave_out);
    wanted.retain(|key, _| is_ours(key));
    for (key, value) in &wanted {
        if found.get(key) != Some(value) {
            changes.insert(key.clone(), value.clone().into());
        }
    }
    if wanted != published {
        changes.insert(keys::PUBLISHED.to_owned(), json!(wanted).to_string().into());
    }
    (!changes.is_empty()).then_some(changes)
}

/// `None` removes it.
fn uplink(uplink: &Uplink) -> Option<String> {
    Some(json!({"mac": mac_text(uplink.mac?), "nextHops": uplink.next_hops}).to_string())
}

/// Where health checks are answered: on the management port, so that the answers say that the pod network works; else, where
/// it has no address, on the node's own. One of each family; `None` while there is none.
fn health_addresses(networks: &HostNetworks) -> Option<String> {
    let management = networks.management.iter().copied().filter(|address| !is_of_this_host_alone(*address));
    let own = networks.primary.iter().map(IpNet::addr);
    let mut chosen: Vec<IpAddr> = Vec::new();
    for address in management.chain(own) {
        if chosen.iter().all(|other| other.is_ipv4() != address.is_ipv4()) {
            chosen.push(address);
        }
    }
    (!chosen.is_empty()).then(|| json!(chosen).to_string())
}

fn wanted(node: &KubeNode, networks: &HostNetworks, leave_out: &[IpNet]) -> Annotations {
    let mut wanted = Annotations::new();
    let of = |v4: bool| networks.primary.iter().find(|one| one.addr().is_ipv4() == v4).map(IpNet::to_string);
    if !networks.primary.is_empty() {
        let value = json!({"ipv4": of(true).unwrap_or_default(), "ipv6": of(false).unwrap_or_default()});
        wanted.insert(keys::PRIMARY_IFADDR.to_owned(), value.to_string());
    }
    let subnets = pod_subnets(node);
    let foreign = egress_ips(node);
    let is_the_nodes = |network: &&IpNet| {
        let address = network.addr();
        let in_a_network = |other: &IpNet| other.contains(&address);
        !is_of_this_host_alone(address)
            && !foreign.contains(&address)
            && !leave_out.iter().any(in_a_network)
            && !subnets.iter().filter_map(|subnet| subnet.parse().ok()).any(|subnet: IpNet| in_a_network(&subnet))
    };
    let cidrs: Vec<&IpNet> = networks.all.iter().filter(is_the_nodes).collect();
    if !cidrs.is_empty() {
        wanted.insert(keys::HOST_CIDRS.to_owned(), json!(cidrs).to_string());
    }
    if !subnets.is_empty() {
        wanted.insert(keys::NODE_SUBNETS.to_owned(), json!({"default": subnets}).to_string());
    }
    wanted
}

fn is_of_this_host_alone(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => address.is_loopback() || address.is_link_local(),
        IpAddr::V6(address) => address.is_loopback() || address.is_unicast_link_local(),
    }
}

fn pod_subnets(node: &KubeNode) -> Vec<String> {
    let Some(spec) = &node.spec else { return Vec::new() };
    match &spec.pod_cidrs {
        Some(cidrs) if !cidrs.is_empty() => cidrs.clone(),
        _ => spec.pod_cidr.clone().into_iter().collect(),
    }
}

/// Egress IPs that OVN-Kubernetes has left on interfaces of this node.
fn egress_ips(node: &KubeNode) -> BTreeSet<IpAddr> {
    let annotations = node.metadata.annotations.iter().flatten();
    let lists = annotations.filter(|(key, _)| keys::EGRESS_IPS_ON_INTERFACES.contains(&key.as_str()));
    lists.filter_map(|(_, text)| serde_json::from_str::<Vec<IpAddr>>(text).ok()).flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn networks() -> HostNetworks {
        let net = |text: &str| -> IpNet { text.parse().expect("a literal") };
        let all = ["172.18.0.2/16", "fd00::2/64", "10.10.10.2/24", "127.0.0.1/8", "10.244.1.1/24", "fe80::1/64"];
        HostNetworks {
            primary: vec![net("172.18.0.2/16"), net("fd00::2/64")],
            all: all.iter().map(|text| net(text)).collect(),
            management: ["10.244.1.1".parse().expect("a literal"), "fe80::1".parse().expect("a literal")].into(),
            uplink: Uplink {
                mac: Some([2, 0, 0xac, 18, 0, 2]),
                next_hops: ["172.18.0.1".parse().expect("a literal")].into(),
            },
        }
    }

    fn node(annotations: Value) -> KubeNode {
        let node =
            json!({"metadata": {"name": "a", "annotations": annotations}, "spec": {"podCIDRs": ["10.244.1.0/24"]}});
        serde_json::from_value(node).expect("a node")
    }

    /// The annotations after the merge.
    fn merged(node: &KubeNode, networks: &HostNetworks) -> Option<Value> {
        let changes = changes(node, networks, &[])?;
        let mut annotations = json!(node.metadata.annotations.clone().unwrap_or_default());
        for (key, value) in changes {
            annotations[key] = value;
        }
        Some(annotations)
    }

    #[test]
    fn a_bare_node_says_its_networks_once_and_in_the_formats_that_are_read() {
        let said = merged(&node(json!({})), &networks()).expect("there is something to say");
        assert_eq!(said[keys::PRIMARY_IFADDR], r#"{"ipv4":"172.18.0.2/16","ipv6":"fd00::2/64"}"#);
        assert_eq!(said[keys::HOST_CIDRS], r#"["10.10.10.2/24","172.18.0.2/16","fd00::2/64"]"#);
        assert_eq!(
            said[keys::HEALTH_ADDRESSES],
            r#"["10.244.1.1","fd00::2"]"#,
            "the node's own where the port has none"
        );
        assert_eq!(said[keys::NODE_SUBNETS], r#"{"default":["10.244.1.0/24"]}"#);
        let read = super::super::convert::node(&node(said.clone()));
        assert!(read.networks_known && read.problems.is_empty());
        assert_eq!(said[keys::UPLINK], r#"{"mac":"02:00:ac:12:00:02","nextHops":["172.18.0.1"]}"#);
        assert_eq!(read.uplink, networks().uplink);
        assert_eq!(merged(&node(said.clone()), &networks()), None, "nothing to write twice");

        let moved = HostNetworks { primary: vec!["172.18.0.9/16".parse().expect("a literal")], ..networks() };
        let again = merged(&node(said.clone()), &moved).expect("the address has changed");
        assert_eq!(again[keys::PRIMARY_IFADDR], r#"{"ipv4":"172.18.0.9/16","ipv6":""}"#);
        let gone = HostNetworks { uplink: Uplink::default(), ..networks() };
        let again = merged(&node(said), &gone).expect("the uplink has gone");
        assert_eq!(again[keys::UPLINK], Value::Null, "a merge removes it");
    }

    #[test]
    fn nobody_is_overwritten() {
        for key in keys::OF_OVN_KUBERNETES {
            let said = merged(&node(json!({key: "x"})), &networks()).expect("what only the agent can say");
            assert_eq!(said.as_object().map(|all| all.len()), Some(3), "{key}: {said}");
            assert_eq!(merged(&node(said), &networks()), None, "{key}");
        }
        let theirs = json!({keys::HOST_CIDRS: r#"["192.0.2.1/24"]"#, "team": "x"});
        let said = merged(&node(theirs), &networks()).expect("the other keys");
        assert_eq!((&said[keys::HOST_CIDRS], &said["team"]), (&json!(r#"["192.0.2.1/24"]"#), &json!("x")));
        let mut taken = merged(&node(json!({})), &networks()).expect("all keys");
        taken[keys::PRIMARY_IFADDR] = json!(r#"{"ipv4":"192.0.2.1/24"}"#);
        let after = merged(&node(taken), &networks()).expect("what is ours has shrunk");
        assert_eq!(after[keys::PRIMARY_IFADDR], r#"{"ipv4":"192.0.2.1/24"}"#, "another has written it by now");
        assert_eq!(merged(&node(after), &networks()), None);
    }

    #[test]
    fn addresses_that_are_not_the_nodes_stay_out() {
        let listed = json!({"k8s.ovn.org/secondary-host-egress-ips": r#"["10.10.10.2"]"#});
        let changes = changes(&node(listed), &networks(), &["fd00::/64".parse().expect("a literal")]).expect("changes");
        assert_eq!(changes[keys::HOST_CIDRS], r#"["172.18.0.2/16"]"#);
    }
}
