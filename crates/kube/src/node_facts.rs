//! Publishes this node's facts in its EgressNode object: the uplink, the egress interfaces and the health addresses, which only
//! its agent knows, and the networks if no CNI annotates the Node with them.
//!
//! OVN-Kubernetes does (`node-primary-ifaddr`, `host-cidrs`, `node-subnets`); such annotations take precedence, whatever wrote
//! them (`crate::convert::joined`). Other nodes send to the published address, so the agent sends nothing to them before it is
//! published (`egress_core::plan::desired`).

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use ipnet::IpNet;
use k8s_openapi::api::core::v1::Node as KubeNode;
use kube::api::Api;
use kube::{Client, Error};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::api_outage::ApiOutages;
use crate::convert::interface;
use crate::crd::{EgressNodeStatus, NodeInterface, NodeNetworks, NodeUplink};
use crate::node_object::NodeObject;
use egress_core::keys;
use egress_core::model::interface::EgressInterface;
use egress_core::model::node::{HostAddresses, HostNetworks, Node, Uplink, mac_text};

/// How often the node's own addresses are read.
const READ_INTERVAL: Duration = Duration::from_secs(5);
/// The maximum of the object's schema.
const MOST_NETWORKS: usize = 1024;
/// Timeout of one exchange with the API server.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Where to publish, and what to leave out.
pub struct NodeFactsTarget<'a> {
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
    Timeout(#[from] tokio::time::error::Elapsed),
}

/// Keeps the published facts current until stopped. A change of `interfaces`, which the host's networks contain, is published
/// at once.
pub async fn publish(
    place: NodeFactsTarget<'_>,
    host: &impl HostAddresses,
    (mut own, mut interfaces): (watch::Receiver<Option<Arc<Node>>>, watch::Receiver<Vec<EgressInterface>>),
    outages: &ApiOutages,
    stop: CancellationToken,
) {
    const WHAT: &str = "this node's networks in its EgressNode object";
    // The published facts, if known.
    let mut published: Option<HostNetworks> = None;
    let mut follows_interfaces = true;
    loop {
        interfaces.mark_unchanged();
        let outcome = publish_once(&place, host, published.as_ref()).await;
        let failing = outcome.is_err();
        published = match outcome {
            Ok(networks) => {
                outages.answered(WHAT);
                Some(networks)
            }
            Err(error) => {
                match &error {
                    PublishError::Api(error) => outages.failed(WHAT, error),
                    PublishError::Timeout(_) => outages.unanswered(WHAT, &error.to_string()),
                    PublishError::Addresses(_) => warn!(%error, "cannot publish {WHAT}; trying again"),
                }
                None
            }
        };
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(READ_INTERVAL) => {}
            // Egress IPs wait for them.
            alive = interfaces.changed(), if !failing && follows_interfaces => follows_interfaces = alive.is_ok(),
            // Another writer may have changed the object, or the node has just registered.
            alive = own.changed(), if !failing => match alive {
                Ok(()) => published = None,
                Err(_) => return,
            },
        }
    }
}

/// Calls the API server only if the facts differ from the published ones.
async fn publish_once(
    place: &NodeFactsTarget<'_>,
    host: &impl HostAddresses,
    published: Option<&HostNetworks>,
) -> Result<HostNetworks, PublishError> {
    let networks = host.networks().await?;
    if published != Some(&networks) {
        tokio::time::timeout(TIMEOUT, write(place, &networks)).await??;
    }
    Ok(networks)
}

async fn write(place: &NodeFactsTarget<'_>, networks: &HostNetworks) -> Result<(), Error> {
    let api: Api<KubeNode> = Api::all(place.client.clone());
    let object = NodeObject::new(place.client.clone(), place.node_name);
    // The kubelet may register the Node later; the watch brings it then.
    let Some(node) = api.get_opt(place.node_name).await? else { return Ok(()) };
    let uid = node.metadata.uid.clone().unwrap_or_default();
    let published = object.read().await?.and_then(|object| object.status).unwrap_or_default();
    let Some(status) = changes(&node, &published, networks, place.leave_out) else { return Ok(()) };
    object.publish(&uid, status).await?;
    info!(primary = ?networks.primary, "published this node's networks in its EgressNode object");
    Ok(())
}

/// The fields to merge into the status. `None` if it is current.
fn changes(
    node: &KubeNode,
    published: &EgressNodeStatus,
    networks: &HostNetworks,
    leave_out: &[IpNet],
) -> Option<Value> {
    let annotations = node.metadata.annotations.iter().flatten();
    let has_ovn = annotations.into_iter().any(|(key, _)| keys::OF_OVN_KUBERNETES.contains(&key.as_str()));
    let own = (!has_ovn).then(|| own_networks(node, networks, leave_out)).filter(|own| *own != NodeNetworks::default());
    let (uplink, health) = (uplink(&networks.uplink), health_addresses(networks));
    let interfaces = Some(interfaces(networks, &others_networks(node, leave_out)));
    let uid = node.metadata.uid.clone().unwrap_or_default();
    let is_same = published.node_uid == uid
        && (&published.networks, &published.uplink, &published.health_addresses) == (&own, &uplink, &health)
        && published.interfaces == interfaces;
    // Null removes a field.
    let mut status = json!({"networks": own, "uplink": uplink, "interfaces": interfaces, "healthAddresses": health});
    if !published.node_uid.is_empty() && published.node_uid != uid {
        // They belong to a former Node of this name.
        ["released", "prepared", "boundedLease"].into_iter().for_each(|key| status[key] = Value::Null);
    }
    (!is_same).then_some(status)
}

fn uplink(uplink: &Uplink) -> Option<NodeUplink> {
    let next_hops = uplink.next_hops.iter().map(IpAddr::to_string).collect();
    Some(NodeUplink { mac: mac_text(uplink.mac?), next_hops })
}

/// Where the agent answers health checks: on the management port, so that an answer proves that the pod network works; without an
/// address there, on the node's own. One address of each family; `None` while there is none.
fn health_addresses(networks: &HostNetworks) -> Option<Vec<String>> {
    let management = networks.management.iter().copied().filter(|address| !is_host_local(*address));
    let own = networks.primary.iter().map(IpNet::addr);
    let mut chosen: Vec<IpAddr> = Vec::new();
    for address in management.chain(own) {
        if chosen.iter().all(|other| other.is_ipv4() != address.is_ipv4()) {
            chosen.push(address);
        }
    }
    (!chosen.is_empty()).then(|| chosen.iter().map(IpAddr::to_string).collect())
}

fn own_networks(node: &KubeNode, networks: &HostNetworks, leave_out: &[IpNet]) -> NodeNetworks {
    let of = |v4: bool| networks.primary.iter().find(|one| one.addr().is_ipv4() == v4).map(IpNet::to_string);
    let (others, egress_ips) = (others_networks(node, leave_out), egress_ips(node));
    let is_the_nodes = |network: &&IpNet| {
        let address = network.addr();
        !is_host_local(address)
            && !egress_ips.contains(&address)
            && !others.iter().any(|other| other.contains(&address))
    };
    let all = networks.all.iter().filter(is_the_nodes).map(IpNet::to_string).take(MOST_NETWORKS).collect();
    NodeNetworks { primary: [of(true), of(false)].into_iter().flatten().collect(), all }
}

/// The records without networks of pods and services, which have no egress IP, and of the host alone.
fn interfaces(networks: &HostNetworks, others: &[IpNet]) -> Vec<NodeInterface> {
    let is_the_nodes =
        |network: &IpNet| !is_host_local(network.addr()) && !others.iter().any(|other| other.contains(network));
    let published = |record: &EgressInterface| {
        let mut record = record.clone();
        record.networks.retain(|network, _| is_the_nodes(network));
        record.addresses.retain(|address| is_the_nodes(&IpNet::from(*address)));
        (record.is_uplink || !record.networks.is_empty()).then(|| interface::published(&record))
    };
    networks.interfaces.iter().filter_map(published).collect()
}

/// Networks of pods and services.
fn others_networks(node: &KubeNode, leave_out: &[IpNet]) -> Vec<IpNet> {
    let subnets = pod_subnets(node);
    leave_out.iter().copied().chain(subnets.iter().filter_map(|subnet| subnet.parse().ok())).collect()
}

fn is_host_local(address: IpAddr) -> bool {
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

/// Egress IPs that OVN-Kubernetes has put on interfaces of this node.
fn egress_ips(node: &KubeNode) -> BTreeSet<IpAddr> {
    let annotations = node.metadata.annotations.iter().flatten();
    let lists = annotations.filter(|(key, _)| keys::EGRESS_IPS_ON_INTERFACES.contains(&key.as_str()));
    lists.filter_map(|(_, text)| serde_json::from_str::<Vec<IpAddr>>(text).ok()).flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::crd::ReleasedAddress;
    use egress_core::model::interface::{InterfaceReason, InterfaceState};
    use egress_core::model::samples;

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
            interfaces: vec![
                EgressInterface { is_uplink: true, ..samples::interface("eth0", &["169.254.0.0/17"]) },
                samples::interface("eth1", &["10.10.10.0/24", "10.244.0.0/14"]),
                samples::interface("br3", &["10.244.1.0/25"]),
            ],
        }
    }

    fn node(annotations: Value) -> KubeNode {
        let metadata = json!({"name": "a", "uid": "u", "annotations": annotations});
        serde_json::from_value(json!({"metadata": metadata, "spec": {"podCIDRs": ["10.244.1.0/24"]}})).expect("a node")
    }

    /// The status after the merge, as it is read.
    fn published(node: &KubeNode, before: &EgressNodeStatus, networks: &HostNetworks) -> Option<EgressNodeStatus> {
        let mut status = json!(before);
        status["nodeUID"] = json!("u");
        for (key, value) in changes(node, before, networks, &[])?.as_object().expect("fields") {
            status[key] = value.clone();
        }
        Some(serde_json::from_value(status).expect("a status"))
    }

    #[test]
    fn a_node_without_annotations_publishes_its_networks_once() {
        let (bare, nothing) = (node(json!({})), EgressNodeStatus::default());
        let first = published(&bare, &nothing, &networks()).expect("something to publish");
        let own = first.networks.clone().expect("its networks");
        assert_eq!(own.primary, ["172.18.0.2/16", "fd00::2/64"]);
        assert_eq!(own.all, ["10.10.10.2/24", "172.18.0.2/16", "fd00::2/64"]);
        let health = first.health_addresses.clone().expect("an address");
        assert_eq!(health, ["10.244.1.1", "fd00::2"], "the node's own address if the port has none");
        let uplink = first.uplink.clone().expect("an uplink");
        assert_eq!((uplink.mac.as_str(), &uplink.next_hops[..]), ("02:00:ac:12:00:02", &["172.18.0.1".to_owned()][..]));
        assert_eq!(published(&bare, &first, &networks()), None, "nothing to write twice");
        let shown = first.interfaces.iter().flatten().map(|one| {
            let networks = one.networks.iter().map(|network| network.network.as_str());
            (one.name.as_str(), networks.collect::<Vec<_>>())
        });
        let expected = [("eth0", vec![]), ("eth1", vec!["10.10.10.0/24", "10.244.0.0/14"])];
        assert_eq!(shown.collect::<Vec<_>>(), expected, "networks of pods alone, and of the host, are left out");
        let mut down = networks();
        down.interfaces[0].state = InterfaceState::Attached(InterfaceReason::Down);
        let again = published(&bare, &first, &down).expect("the state has changed");
        assert_eq!(again.interfaces.expect("a list")[0].reason.as_deref(), Some("Down"));
        let moved = HostNetworks { primary: vec!["172.18.0.9/16".parse().expect("a literal")], ..networks() };
        let again = published(&bare, &first, &moved).expect("the address has changed");
        assert_eq!(again.networks.expect("its networks").primary, ["172.18.0.9/16"]);
        let gone = HostNetworks { uplink: Uplink::default(), ..networks() };
        assert_eq!(published(&bare, &first, &gone).expect("the uplink has gone").uplink, None);
        let released = Some(vec![ReleasedAddress { address: "172.18.0.100".into(), hand_over: 7, to: None }]);
        let former = EgressNodeStatus { node_uid: "former".into(), released, ..first };
        let again = published(&bare, &former, &networks()).expect("the Node was made again");
        assert_eq!(
            (again.node_uid.as_str(), again.released),
            ("u", None),
            "acknowledgements of the former Node are removed"
        );
    }

    #[test]
    fn networks_that_ovn_kubernetes_publishes_are_not_published_twice() {
        for key in keys::OF_OVN_KUBERNETES {
            let node = node(json!({key: "x"}));
            let status =
                published(&node, &EgressNodeStatus::default(), &networks()).expect("what only the agent can say");
            assert!(status.networks.is_none() && status.uplink.is_some() && status.health_addresses.is_some(), "{key}");
            assert_eq!(status.interfaces.as_ref().map(Vec::len), Some(2), "{key}");
            assert_eq!(published(&node, &status, &networks()), None, "{key}");
        }
    }

    #[test]
    fn addresses_that_are_not_the_nodes_are_left_out() {
        let listed = node(json!({"k8s.ovn.org/secondary-host-egress-ips": r#"["10.10.10.2"]"#}));
        let own = own_networks(&listed, &networks(), &["fd00::/64".parse().expect("a literal")]);
        assert_eq!(own.all, ["172.18.0.2/16"]);
    }
}
