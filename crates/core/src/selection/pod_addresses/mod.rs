//! Which pod of this node has which address.
//!
//! The author of a pod can write any address into its annotations. So a claim counts by its source and by its place:
//!
//! 1. The CNI plugin `egress-agent cni` reports what the CNI gave a pod, as root and before the pod sends anything. It
//!    is the best source: it counts alone, and against reports for other pods.
//! 2. The kubelet reports `status.podIPs`, which authors of pods may not write. With them, no announcement counts.
//! 3. OVN-Kubernetes announces addresses in an annotation before the pod starts. That counts only for a scheduled pod
//!    on a node that OVN-Kubernetes manages, inside the node's pod subnets, and never against a reported address. Two
//!    pods that announce one address get none until the kubelet reports it.
//! 4. Of reported claims, a pod that is not terminating wins (CNIs reuse an address while the old pod still has its
//!    object), then the older, then the first by name: the same result after every restart.
//! 5. No claim counts for an address of the node, of a service network, of an egress IP, or outside the node's pod
//!    subnets. Addresses of Services are not examined, since their authors would decide which pods count; a pod subnet
//!    has precedence over them anyway ([`crate::plan::desired`]).
//!
//! A refused claim is an event on the pod.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::IpAddr;

use ipnet::IpNet;

use crate::model::node::Node;
use crate::model::state::{NodeAddress, Prefix, PrefixKind};
use crate::model::view::{ClusterView, Pod, PodKey};

/// The source of a claim; better sources are lesser values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Source {
    Attached,
    Reported,
    Announced,
}

/// Where pods of this node may have addresses.
#[derive(Debug, Default)]
pub struct PodAddressSpace {
    /// OVN-Kubernetes manages the node, and announces addresses.
    announced: bool,
    subnets: Vec<IpNet>,
    own: BTreeSet<IpAddr>,
    services: Vec<IpNet>,
}

/// A refused claim.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Refusal {
    pub pod: PodKey,
    pub uid: String,
    pub why: Refused,
}

/// Why a claim is refused.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Refused {
    OwnNode(IpAddr),
    Node(IpAddr),
    Service(IpAddr),
    EgressIp(IpAddr),
    Outside(IpAddr),
    /// The network, broadcast or router address of the node's pod subnet.
    Subnet(IpAddr),
    /// Another pod has it.
    Taken(IpAddr),
    /// Another pod announces it too, and the kubelet has reported it for neither.
    Contested(IpAddr),
    /// This many addresses more than one of each family.
    TooMany(usize),
}

impl Refused {
    /// Whether two pods claim the same address.
    pub fn is_conflict(&self) -> bool {
        matches!(self, Self::Taken(_) | Self::Contested(_))
    }
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OwnNode(address) => write!(f, "{address} is an address of the pod's node"),
            Self::Node(address) => write!(f, "{address} is an address of a node"),
            Self::Service(address) => write!(f, "{address} is in a service network"),
            Self::EgressIp(address) => write!(f, "{address} is an egress IP"),
            Self::Outside(address) => write!(f, "{address} is not in the pod subnets of the pod's node"),
            Self::Subnet(address) => {
                write!(f, "{address} is the network, broadcast or router address of the node's pod subnet")
            }
            Self::Taken(address) => write!(f, "{address} is the address of another pod"),
            Self::Contested(address) => {
                write!(f, "another pod announces {address} too, and the kubelet has reported it of neither")
            }
            Self::TooMany(more) => write!(f, "the pod lists {more} addresses more than one of each family"),
        }
    }
}

impl PodAddressSpace {
    pub fn new(own: &Node, services: &[IpNet]) -> Self {
        let addresses = own.addresses();
        Self {
            announced: own.announces_pods,
            subnets: own.pod_subnets.clone(),
            own: addresses,
            services: services.to_vec(),
        }
    }

    /// The best source for the pod, and its addresses.
    fn addresses_by_source<'a>(&self, pod: &'a Pod) -> (Source, &'a BTreeSet<IpAddr>) {
        if !pod.attached.is_empty() {
            (Source::Attached, &pod.attached)
        } else if !pod.reported.is_empty() {
            (Source::Reported, &pod.reported)
        } else {
            (Source::Announced, &pod.announced)
        }
    }

    /// The source by which the pod has the address; `None` without a valid one.
    fn source(&self, pod: &Pod, address: IpAddr) -> Option<Source> {
        if !pod.is_endpoint() {
            return None;
        }
        let (source, listed) = self.addresses_by_source(pod);
        (listed.contains(&address) && (source != Source::Announced || self.announced)).then_some(source)
    }

    /// The addresses that the pod has if no other has them and none is refused.
    pub fn claimed_by<'a>(&self, pod: &'a Pod) -> impl Iterator<Item = IpAddr> + use<'a> {
        let (source, listed) = self.addresses_by_source(pod);
        let is_claimed = pod.is_endpoint() && (source != Source::Announced || self.announced);
        listed.iter().copied().filter(move |_| is_claimed)
    }

    /// Why no pod of this node may have the address.
    fn refuses(
        &self,
        (source, address): (Source, IpAddr),
        nodes: &BTreeMap<IpAddr, NodeAddress>,
        cluster: &BTreeMap<IpNet, Prefix>,
    ) -> Option<Refused> {
        let is_in = |networks: &[IpNet]| networks.iter().any(|network| network.contains(&address));
        // Without a pod subnet of this family the place cannot be judged. Reports of the kubelet count then, so that
        // the pod's traffic follows its policy instead of passing as unknown.
        let is_known = self.subnets.iter().any(|subnet| subnet.addr().is_ipv4() == address.is_ipv4());
        let is_egress_ip = cluster.get(&IpNet::from(address)).is_some_and(|prefix| prefix.kind == PrefixKind::EgressIp);
        if self.own.contains(&address) {
            Some(Refused::OwnNode(address))
        } else if is_in(&self.services) {
            Some(Refused::Service(address))
        } else if is_egress_ip {
            Some(Refused::EgressIp(address))
        } else if !is_in(&self.subnets) && (is_known || source == Source::Announced) {
            Some(Refused::Outside(address))
        } else if self.is_subnets_own(address) {
            Some(Refused::Subnet(address))
        } else if !is_known && nodes.contains_key(&address) {
            Some(Refused::Node(address))
        } else {
            None
        }
    }

    /// The first address of an OVN-Kubernetes subnet is its router's; a bridge that has it is the node's own.
    fn is_subnets_own(&self, address: IpAddr) -> bool {
        let is_own_of = |subnet: &IpNet| {
            let is_broadcast = address.is_ipv4() && address == subnet.broadcast();
            // For IPv6 the iterator begins with the network address, the anycast address of routers (RFC 4291 2.6.1).
            let router = subnet.hosts().nth(usize::from(address.is_ipv6()));
            let has_hosts = subnet.max_prefix_len() - subnet.prefix_len() > 1;
            has_hosts && (is_broadcast || address == subnet.network() || self.announced && router == Some(address))
        };
        self.subnets.iter().filter(|subnet| subnet.contains(&address)).any(is_own_of)
    }

    /// Claims on the address, the best first.
    fn claims<'a>(&self, view: &'a ClusterView, address: IpAddr) -> Vec<(Source, &'a PodKey, &'a Pod)> {
        let claim = |(key, pod): (&'a PodKey, &'a Pod)| Some((self.source(pod, address)?, key, pod));
        let mut claims: Vec<_> = view.pods.iter().filter_map(claim).collect();
        claims.sort_by_key(|(source, key, pod)| (*source, pod.terminating, pod.created, *key));
        claims
    }

    /// The pod that has the address, before its place is judged, and the claims of others.
    fn settle<'a>(&self, view: &'a ClusterView, address: IpAddr) -> Settled<'a> {
        let mut claims = self.claims(view, address).into_iter();
        let Some(first) = claims.next() else { return Settled::default() };
        let others: Vec<_> = claims.collect();
        match first.0 {
            Source::Announced if !others.is_empty() => {
                let contested = std::iter::once(first).chain(others).map(|(_, key, pod)| (key, pod));
                Settled { holder: None, others: contested.collect(), is_contested: true }
            }
            _ => {
                let others = others.into_iter().map(|(_, key, pod)| (key, pod)).collect();
                Settled { holder: Some(first), others, is_contested: false }
            }
        }
    }

    /// The pod that has the address.
    pub fn holder<'a>(&self, view: &'a ClusterView, address: IpAddr) -> Option<(&'a PodKey, &'a Pod)> {
        self.settle(view, address).holder.map(|(_, key, pod)| (key, pod))
    }

    /// The pod that gets the address, and the refused claims.
    pub fn judge<'a>(
        &self,
        view: &'a ClusterView,
        (nodes, cluster): (&BTreeMap<IpAddr, NodeAddress>, &BTreeMap<IpNet, Prefix>),
        address: IpAddr,
    ) -> (Option<(&'a PodKey, &'a Pod)>, Vec<Refusal>) {
        let Settled { holder, others, is_contested } = self.settle(view, address);
        let refused = |(key, pod): (&PodKey, &Pod), why| Refusal { pod: key.clone(), uid: pod.uid.clone(), why };
        let why = if is_contested { Refused::Contested(address) } else { Refused::Taken(address) };
        // A terminating pod has lost its address in the usual way.
        let losers = others.into_iter().filter(|(_, pod)| !pod.terminating);
        let mut refusals: Vec<Refusal> = losers.map(|loser| refused(loser, why.clone())).collect();
        let holder = holder.and_then(|(source, key, pod)| {
            let why = self.refuses((source, address), nodes, cluster);
            refusals.extend(why.iter().map(|why| refused((key, pod), why.clone())));
            why.is_none().then_some((key, pod))
        });
        (holder, refusals)
    }

    /// Pods that list more addresses than count.
    pub fn surplus<'a>(&'a self, view: &'a ClusterView) -> impl Iterator<Item = Refusal> + 'a {
        let pods = view.pods.iter().filter(|(_, pod)| self.announced && pod.is_endpoint() && pod.surplus > 0);
        pods.map(|(key, pod)| Refusal { pod: key.clone(), uid: pod.uid.clone(), why: Refused::TooMany(pod.surplus) })
    }
}

#[derive(Default)]
struct Settled<'a> {
    holder: Option<(Source, &'a PodKey, &'a Pod)>,
    others: Vec<(&'a PodKey, &'a Pod)>,
    is_contested: bool,
}

#[cfg(test)]
mod tests;
