//! What the cluster must know of this node, in its EgressNode object: its uplink and where it answers health checks, which
//! only this agent can say, and its networks where no CNI annotates its Node with them.
//!
//! OVN-Kubernetes does (`node-primary-ifaddr`, `host-cidrs`, `node-subnets`), and such annotations count first, by any writer
//! (`crate::convert::joined`).
//!
//! The address of this node that others send to is the published one, so the agent sends nothing to others before the cluster
//! knows it (`model::desired`).

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
use crate::crd::{EgressNodeStatus, NodeNetworks, NodeUplink};
use crate::node_object::NodeObject;
use egress_core::keys;
use egress_core::model::node::{HostAddresses, HostNetworks};
use egress_core::model::node::{Uplink, mac_text};
use egress_core::model::view::Node;

/// How often the node's own addresses are looked at.
const LOOK: Duration = Duration::from_secs(5);
/// More than the object takes are not said.
const MOST_NETWORKS: usize = 1024;
/// How long one exchange with the API server may take.
const PATIENCE: Duration = Duration::from_secs(10);

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
    SilentHolder(#[from] tokio::time::error::Elapsed),
}

/// Keeps what is said of this node as it should be, until told to stop.
pub async fn publish(
    place: Place<'_>,
    host: &impl HostAddresses,
    mut own: watch::Receiver<Option<Arc<Node>>>,
    outages: &ApiOutages,
    stop: CancellationToken,
) {
    const WHAT: &str = "this node's networks in its EgressNode object";
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
                    PublishError::SilentHolder(_) => outages.unanswered(WHAT, &error.to_string()),
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
    host: &impl HostAddresses,
    said: Option<&HostNetworks>,
) -> Result<HostNetworks, PublishError> {
    let networks = host.networks().await?;
    if said != Some(&networks) {
        tokio::time::timeout(PATIENCE, write(place, &networks)).await??;
    }
    Ok(networks)
}

async fn write(place: &Place<'_>, networks: &HostNetworks) -> Result<(), Error> {
    let api: Api<KubeNode> = Api::all(place.client.clone());
    let object = NodeObject::new(place.client.clone(), place.node_name);
    // A node registers itself when it likes; its object is on its way by the watch then.
    let Some(node) = api.get_opt(place.node_name).await? else { return Ok(()) };
    let uid = node.metadata.uid.clone().unwrap_or_default();
    let said = object.read().await?.and_then(|object| object.status).unwrap_or_default();
    let Some(status) = changes(&node, &said, networks, place.leave_out) else { return Ok(()) };
    object.say(&uid, status).await?;
    info!(primary = ?networks.primary, "published this node's networks in its EgressNode object");
    Ok(())
}

/// What is to be merged into the status; `None` when all is as it should be.
fn changes(node: &KubeNode, said: &EgressNodeStatus, networks: &HostNetworks, leave_out: &[IpNet]) -> Option<Value> {
    let annotations = node.metadata.annotations.iter().flatten();
    let has_ovn = annotations.into_iter().any(|(key, _)| keys::OF_OVN_KUBERNETES.contains(&key.as_str()));
    let own = (!has_ovn).then(|| own_networks(node, networks, leave_out)).filter(|own| *own != NodeNetworks::default());
    let (uplink, health) = (uplink(&networks.uplink), health_addresses(networks));
    let uid = node.metadata.uid.clone().unwrap_or_default();
    let is_same =
        said.node_uid == uid && (&said.networks, &said.uplink, &said.health_addresses) == (&own, &uplink, &health);
    // Null removes what is not so any more.
    let mut status = json!({"networks": own, "uplink": uplink, "healthAddresses": health});
    if !said.node_uid.is_empty() && said.node_uid != uid {
        // Of a former Node of the name.
        ["released", "prepared", "boundedLease"].into_iter().for_each(|key| status[key] = Value::Null);
    }
    (!is_same).then_some(status)
}

fn uplink(uplink: &Uplink) -> Option<NodeUplink> {
    let next_hops = uplink.next_hops.iter().map(IpAddr::to_string).collect();
    Some(NodeUplink { mac: mac_text(uplink.mac?), next_hops })
}

/// Where health checks are answered: on the management port, so that the answers say that the pod network works; else, where
/// it has no address, on the node's own. One of each family; `None` while there is none.
fn health_addresses(networks: &HostNetworks) -> Option<Vec<String>> {
    let management = networks.management.iter().copied().filter(|address| !is_of_this_host_alone(*address));
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
    let all = networks.all.iter().filter(is_the_nodes).map(IpNet::to_string).take(MOST_NETWORKS).collect();
    NodeNetworks { primary: [of(true), of(false)].into_iter().flatten().collect(), all }
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
    use crate::crd::ReleasedAddress;

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
        let metadata = json!({"name": "a", "uid": "u", "annotations": annotations});
        serde_json::from_value(json!({"metadata": metadata, "spec": {"podCIDRs": ["10.244.1.0/24"]}})).expect("a node")
    }

    /// The status after the merge, as it is read.
    fn said(node: &KubeNode, before: &EgressNodeStatus, networks: &HostNetworks) -> Option<EgressNodeStatus> {
        let mut status = json!(before);
        status["nodeUID"] = json!("u");
        for (key, value) in changes(node, before, networks, &[])?.as_object().expect("fields") {
            status[key] = value.clone();
        }
        Some(serde_json::from_value(status).expect("a status"))
    }

    #[test]
    fn a_bare_node_says_its_networks_once() {
        let (bare, nothing) = (node(json!({})), EgressNodeStatus::default());
        let first = said(&bare, &nothing, &networks()).expect("there is something to say");
        let own = first.networks.clone().expect("its networks");
        assert_eq!(own.primary, ["172.18.0.2/16", "fd00::2/64"]);
        assert_eq!(own.all, ["10.10.10.2/24", "172.18.0.2/16", "fd00::2/64"]);
        let health = first.health_addresses.clone().expect("an address");
        assert_eq!(health, ["10.244.1.1", "fd00::2"], "the node's own where the port has none");
        let uplink = first.uplink.clone().expect("an uplink");
        assert_eq!((uplink.mac.as_str(), &uplink.next_hops[..]), ("02:00:ac:12:00:02", &["172.18.0.1".to_owned()][..]));
        assert_eq!(said(&bare, &first, &networks()), None, "nothing to write twice");
        let moved = HostNetworks { primary: vec!["172.18.0.9/16".parse().expect("a literal")], ..networks() };
        let again = said(&bare, &first, &moved).expect("the address has changed");
        assert_eq!(again.networks.expect("its networks").primary, ["172.18.0.9/16"]);
        let gone = HostNetworks { uplink: Uplink::default(), ..networks() };
        assert_eq!(said(&bare, &first, &gone).expect("the uplink has gone").uplink, None);
        let released = Some(vec![ReleasedAddress { address: "172.18.0.100".into(), hand_over: 7, to: None }]);
        let former = EgressNodeStatus { node_uid: "former".into(), released, ..first };
        let again = said(&bare, &former, &networks()).expect("the Node was made again");
        assert_eq!((again.node_uid.as_str(), again.released), ("u", None), "what the former one has acknowledged goes");
    }

    #[test]
    fn where_ovn_kubernetes_says_the_networks_the_agent_does_not() {
        for key in keys::OF_OVN_KUBERNETES {
            let node = node(json!({key: "x"}));
            let status = said(&node, &EgressNodeStatus::default(), &networks()).expect("what only the agent can say");
            assert!(status.networks.is_none() && status.uplink.is_some() && status.health_addresses.is_some(), "{key}");
            assert_eq!(said(&node, &status, &networks()), None, "{key}");
        }
    }

    #[test]
    fn addresses_that_are_not_the_nodes_stay_out() {
        let listed = node(json!({"k8s.ovn.org/secondary-host-egress-ips": r#"["10.10.10.2"]"#}));
        let own = own_networks(&listed, &networks(), &["fd00::/64".parse().expect("a literal")]);
        assert_eq!(own.all, ["172.18.0.2/16"]);
    }
}
