//! A load balancer for Services of type `LoadBalancer`, as MetalLB in layer 2 mode with kube-proxy:
//!
//! ```text
//! API server -> per Service: the node with its label answers ARP and neighbour discovery for its addresses (`status.loadBalancer`)
//!            -> on every node: nftables translate these addresses to ready endpoints
//! ```
//!
//! The label is the one that EgressService's controller sets, `egress-service.k8s.ovn.org/<namespace>-<name>`; of several nodes
//! with it the first by name announces. A Service with the annotation [`ANNOUNCED_BY`] is announced by the node that it names. No address is put on an interface: a thread with a packet socket answers, and announces
//! an address that its node has just got. With `externalTrafficPolicy: Local` a node leads to its own endpoints only and keeps the
//! client's address; else to all, with the node's address on the pod network.
//!
//! It stands outside of the nodes: a node that is cut off from the API server still obeys. While the API server is away it changes
//! nothing.

mod frames;

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::{Node, Service, ServicePort, ServiceSpec};
use k8s_openapi::api::discovery::v1::{Endpoint, EndpointPort, EndpointSlice};
use kube::api::{Api, ListParams};
use kube::{Client, ResourceExt};
use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, SockProtocol, recv, send, setsockopt, sockopt};
use nix::sys::time::{TimeVal, TimeValLike};
use tokio::runtime;

use crate::api_objects::egress_service_label;
use crate::background::Background;
use crate::kube_api::KubeApi;
use crate::topology::UPLINK;
use crate::topology::firewall::LoadBalancerPort;
use crate::topology::lab::{Lab, LabNode};
use crate::topology::netns::packet_socket;

/// Of a Service: the node that announces its addresses, whatever the labels.
pub const ANNOUNCED_BY: &str = "lab.egress-agent.io/announced-by";
/// How often the API server is asked.
const EVERY: Duration = Duration::from_millis(50);
/// How often, and at which intervals, a new address is announced: MetalLB does for five seconds.
const ANNOUNCEMENTS: usize = 5;
const BETWEEN_ANNOUNCEMENTS: Duration = Duration::from_millis(1100);
/// The longest question is a neighbour solicitation with options; of other frames only the beginning counts.
const LONGEST: usize = 256;

/// A load balancer that runs until it is finished or dropped.
pub struct LoadBalancer {
    /// The first tells the others.
    threads: Vec<Background<()>>,
}

impl LoadBalancer {
    /// Begins to serve the Services of the lab's API server.
    pub fn start(lab: &Lab, api: &KubeApi) -> Result<Self> {
        let (mut nodes, mut announcers) = (Vec::new(), Vec::new());
        for node in lab.nodes() {
            let announced = Announced::default();
            nodes.push(BalancedNode {
                node: node.clone(),
                announced: announced.clone(),
                state: BalancerState::default(),
            });
            let (socket, mac) = packet_socket(&node.host, UPLINK, Some(SockProtocol::EthAll))?;
            // The thread looks up this often whether it shall stop, and what it has to announce.
            setsockopt(&socket, sockopt::ReceiveTimeout, &TimeVal::milliseconds(50))?;
            let name = format!("lb-{}", node.name());
            announcers.push(Background::start(&name, move |stop| announce(&socket, mac, &announced, stop))?);
        }
        let kubeconfig = api.kubeconfig().to_owned();
        let follow = Background::start("load-balancer", move |stop| follow(kubeconfig, nodes, stop))?;
        Ok(Self { threads: std::iter::once(follow).chain(announcers).collect() })
    }

    /// Ends it; its last translations stay.
    ///
    /// # Errors
    /// It had ended by itself.
    pub fn finish(self) -> Result<()> {
        Background::finish_all(self.threads)
    }
}

/// The addresses that a node answers for.
type Announced = Arc<Mutex<BTreeSet<IpAddr>>>;

/// A node, and what was made of it so far.
struct BalancedNode {
    node: LabNode,
    announced: Announced,
    state: BalancerState,
}

/// What a node does.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct BalancerState {
    announced: BTreeSet<IpAddr>,
    ports: Vec<LoadBalancerPort>,
}

/// The objects that decide.
#[derive(Debug, Clone, Default)]
struct BalancerObjects {
    services: Vec<Service>,
    slices: Vec<EndpointSlice>,
    nodes: Vec<Node>,
}

fn follow(kubeconfig: PathBuf, mut nodes: Vec<BalancedNode>, stop: &AtomicBool) -> Result<()> {
    // Of its own, so that it does not matter which ends first, it or the lab's API server.
    let runtime = runtime::Builder::new_current_thread().enable_all().build()?;
    let client = runtime.block_on(crate::kube_api::client(&kubeconfig))?;
    while !stop.load(Ordering::Relaxed) {
        match runtime.block_on(read(&client)) {
            Ok(objects) => nodes.iter_mut().try_for_each(|node| node.become_as(&objects))?,
            Err(error) => tracing::debug!(%error, "the load balancer cannot read its objects"),
        }
        thread::sleep(EVERY);
    }
    Ok(())
}

async fn read(client: &Client) -> kube::Result<BalancerObjects> {
    let all = ListParams::default();
    let services = Api::<Service>::all(client.clone()).list(&all).await?.items;
    let slices = Api::<EndpointSlice>::all(client.clone()).list(&all).await?.items;
    let nodes = Api::<Node>::all(client.clone()).list(&all).await?.items;
    Ok(BalancerObjects { services, slices, nodes })
}

impl BalancedNode {
    fn become_as(&mut self, objects: &BalancerObjects) -> Result<()> {
        let wanted = BalancerState::of(&self.node.name(), objects);
        if wanted.ports != self.state.ports {
            self.node.set_load_balancer(&wanted.ports)?;
        }
        let (new, old) = (&wanted.announced, &self.state.announced);
        for (change, addresses) in [("add", new - old), ("del", old - new)] {
            for group in addresses.into_iter().filter_map(frames::solicited_group) {
                self.node.host.exec("ip", &["maddr", change, &group, "dev", UPLINK])?;
            }
        }
        self.announced.lock().unwrap_or_else(PoisonError::into_inner).clone_from(new);
        self.state = wanted;
        Ok(())
    }
}

impl BalancerState {
    fn of(node: &str, objects: &BalancerObjects) -> Self {
        let mut state = Self::default();
        for service in &objects.services {
            let addresses = ingress(service);
            let label = egress_service_label(&service.namespace().unwrap_or_default(), &service.name_any());
            let labelled = objects.nodes.iter().filter(|node| node.labels().contains_key(&label));
            let named = service.annotations().get(ANNOUNCED_BY).cloned();
            if named.or_else(|| labelled.map(ResourceExt::name_any).min()).as_deref() == Some(node) {
                state.announced.extend(&addresses);
            }
            let Some(spec) = &service.spec else { continue };
            for (address, port) in
                addresses.iter().flat_map(|address| spec.ports.iter().flatten().map(move |port| (address, port)))
            {
                state.ports.extend(translation(node, service, spec, (*address, port), &objects.slices));
            }
        }
        state
    }
}

/// The addresses of a Service that is a load balancer.
fn ingress(service: &Service) -> BTreeSet<IpAddr> {
    if service.spec.as_ref().and_then(|spec| spec.type_.as_deref()) != Some("LoadBalancer") {
        return BTreeSet::new();
    }
    let balancer = service.status.as_ref().and_then(|status| status.load_balancer.as_ref());
    let ingress = balancer.and_then(|balancer| balancer.ingress.as_deref()).unwrap_or_default();
    ingress.iter().filter_map(|one| one.ip.as_deref()?.parse().ok()).collect()
}

/// Where an address's port leads on this node; `None` without an endpoint.
fn translation(
    node: &str,
    service: &Service,
    spec: &ServiceSpec,
    (address, port): (IpAddr, &ServicePort),
    slices: &[EndpointSlice],
) -> Option<LoadBalancerPort> {
    let is_local = spec.external_traffic_policy.as_deref() == Some("Local");
    let mut backends = BTreeSet::new();
    for slice in slices.iter().filter(|slice| is_of(slice, service)) {
        let named =
            |one: &&EndpointPort| one.name.as_deref().unwrap_or_default() == port.name.as_deref().unwrap_or_default();
        let Some(target) = slice.ports.iter().flatten().find(named).and_then(|port| u16::try_from(port.port?).ok())
        else {
            continue;
        };
        let is_ready =
            |endpoint: &&Endpoint| endpoint.conditions.as_ref().and_then(|conditions| conditions.ready) != Some(false);
        for endpoint in slice.endpoints.iter().flatten().filter(is_ready) {
            let is_here = endpoint.node_name.as_deref() == Some(node);
            let addresses = endpoint.addresses.iter().filter_map(|text| text.parse::<IpAddr>().ok());
            let usable = addresses.filter(|one| one.is_ipv4() == address.is_ipv4() && (is_here || !is_local));
            backends.extend(usable.map(|one| SocketAddr::new(one, target)));
        }
    }
    let protocol = port.protocol.as_deref().unwrap_or("TCP").to_lowercase();
    let front = SocketAddr::new(address, u16::try_from(port.port).ok()?);
    let backends: Vec<SocketAddr> = backends.into_iter().collect();
    (!backends.is_empty()).then_some(LoadBalancerPort { front, protocol, backends, keeps_client: is_local })
}

fn is_of(slice: &EndpointSlice, service: &Service) -> bool {
    slice.namespace() == service.namespace()
        && slice.labels().get("kubernetes.io/service-name").is_some_and(|name| *name == service.name_any())
}

/// Answers for a node's addresses, and announces those that are new.
fn announce(socket: &OwnedFd, mac: [u8; 6], announced: &Announced, stop: &AtomicBool) -> Result<()> {
    // When each is announced next, and how often still.
    let mut schedule: BTreeMap<IpAddr, (Instant, usize)> = BTreeMap::new();
    let mut frame = [0; LONGEST];
    let transmit = |frame: &[u8]| match send(socket.as_raw_fd(), frame, MsgFlags::empty()) {
        // The uplink is down.
        Ok(_) | Err(Errno::ENETDOWN) => Ok(()),
        Err(errno) => Err(errno).context("the load balancer cannot send"),
    };
    while !stop.load(Ordering::Relaxed) {
        let own = announced.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let now = Instant::now();
        schedule.retain(|address, _| own.contains(address));
        for address in &own {
            let (next, left) = schedule.entry(*address).or_insert((now, ANNOUNCEMENTS));
            if *left > 0 && *next <= now {
                transmit(&frames::announcement(mac, *address)?)?;
                (*next, *left) = (now + BETWEEN_ANNOUNCEMENTS, *left - 1);
            }
        }
        match recv(socket.as_raw_fd(), &mut frame, MsgFlags::empty()) {
            Ok(length) => {
                if let Some(answer) = frames::answer(&frame[..length], mac, &own)? {
                    transmit(&answer)?;
                }
            }
            Err(Errno::EAGAIN | Errno::EINTR | Errno::ENETDOWN) => {}
            Err(errno) => return Err(errno).context("the load balancer cannot read"),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kube_api::objects::{self, LabLoadBalancer};
    use serde_json::{Value, json};

    fn objects(change: impl FnOnce(&mut Value, &mut Value)) -> BalancerObjects {
        let balancer = LabLoadBalancer::new("prod", "web", 1);
        let mut service = objects::load_balancer(&balancer);
        service["status"] = objects::load_balancer_status(&balancer)["status"].clone();
        let endpoints = [("10.244.1.10", "node1"), ("10.244.2.10", "node2")]
            .map(|(address, node)| json!({"addresses": [address], "nodeName": node, "conditions": {"ready": true}}));
        let mut slice = json!({
            "metadata": {"name": "web-4", "namespace": "prod", "labels": {"kubernetes.io/service-name": "web"}},
            "addressType": "IPv4", "endpoints": endpoints, "ports": [{"name": "http", "port": 8080}],
        });
        change(&mut service, &mut slice);
        let node = |name: &str, labels: Value| {
            serde_json::from_value(json!({"metadata": {"name": name, "labels": labels}})).expect("a node")
        };
        BalancerObjects {
            services: vec![serde_json::from_value(service).expect("a service")],
            slices: vec![serde_json::from_value(slice).expect("a slice")],
            nodes: vec![
                node("node1", json!({"egress-service.k8s.ovn.org/prod-other": ""})),
                node("node2", json!({"egress-service.k8s.ovn.org/prod-web": ""})),
            ],
        }
    }

    fn backends(node: &str, objects: &BalancerObjects) -> Vec<String> {
        let ports = BalancerState::of(node, objects).ports;
        ports.iter().flat_map(|port| &port.backends).map(ToString::to_string).collect()
    }

    #[test]
    fn the_node_with_the_label_announces() {
        let objects = objects(|_, _| {});
        assert_eq!(BalancerState::of("node1", &objects).announced, BTreeSet::new());
        let announced = BalancerState::of("node2", &objects).announced;
        assert_eq!(announced, BTreeSet::from(LabLoadBalancer::new("prod", "web", 1).ingress.both()));
        let named = self::objects(|service, _| service["metadata"]["annotations"] = json!({ANNOUNCED_BY: "node1"}));
        assert_eq!(BalancerState::of("node1", &named).announced, announced);
        assert_eq!(BalancerState::of("node2", &named).announced, BTreeSet::new());
    }

    #[test]
    fn every_node_leads_to_all_endpoints_or_to_its_own() {
        let cluster = objects(|_, _| {});
        assert_eq!(backends("node1", &cluster), ["10.244.1.10:8080", "10.244.2.10:8080"]);
        assert!(!BalancerState::of("node1", &cluster).ports[0].keeps_client);
        let local = objects(|service, _| service["spec"]["externalTrafficPolicy"] = json!("Local"));
        assert_eq!(backends("node2", &local), ["10.244.2.10:8080"]);
        assert!(BalancerState::of("node2", &local).ports[0].keeps_client);
        assert_eq!(BalancerState::of("node3", &local).ports, []);
    }

    #[test]
    fn what_is_not_ready_not_its_own_or_no_load_balancer_gets_nothing() {
        let unready = objects(|_, slice| slice["endpoints"][0]["conditions"]["ready"] = json!(false));
        assert_eq!(backends("node1", &unready), ["10.244.2.10:8080"]);
        let others = objects(|_, slice| slice["metadata"]["namespace"] = json!("test"));
        assert_eq!(backends("node1", &others), Vec::<String>::new());
        let inside = objects(|service, _| service["spec"]["type"] = json!("ClusterIP"));
        assert_eq!(BalancerState::of("node2", &inside), BalancerState::default());
    }
}
