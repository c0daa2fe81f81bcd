//! An egress policy: which pods leave with which addresses, whatever API it was written in. `egress_kube` converts.
//!
//! **Unreadable parts keep their last value.** The meaning of an unreadable selector, list of addresses or status is
//! unknown, and a guess would give some pod a wrong source address: if it counted as empty, pods would be deselected
//! and leave with their node's address. So such a part is taken from the last reading ([`Reading::filled_from`]), for
//! single changes and for lists. Without an earlier reading, the policy selects only the pods that the kernel knew as
//! its own (`selection`), lists the addresses that are assigned to it, and drops traffic that has no address.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use crate::model::interface::VlanNetwork;
use crate::model::node::Node;
use crate::model::selector::Selector;
use crate::model::state::{BandwidthLimit, EgressIds, Family, SharedWith, family_of};
use crate::model::view::{CreationTimestamp, Reading, Update};
use crate::rendezvous;

/// One entry of `status.items`, as written.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Item {
    pub node: String,
    pub egress_ip: String,
}

/// A condition of the status.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Condition {
    pub status: bool,
    pub reason: String,
    pub message: String,
    pub observed_generation: Option<i64>,
    pub last_transition: String,
}

/// Conditions with their places in the status: foreign ones stay where they are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Conditions {
    /// The status has a list of conditions.
    pub listed: bool,
    /// The first of each of the agent's own types, with its place. They are few, and all objects of a large cluster
    /// have them, so a list takes a tenth of the space of a tree. A status may contain thousands of foreign ones.
    found: Box<[(String, usize, Condition)]>,
}

impl Conditions {
    /// Reads the list of a status; `own` are the agent's types.
    pub fn of(own: &[&str], list: impl IntoIterator<Item = (String, Condition)>) -> Self {
        let mut found: Vec<(String, usize, Condition)> = Vec::new();
        for (place, (kind, condition)) in list.into_iter().enumerate() {
            if own.contains(&kind.as_str()) && !found.iter().any(|(known, ..)| *known == kind) {
                found.push((kind, place, condition));
            }
        }
        Self { listed: true, found: found.into() }
    }

    /// The first condition of the type, and its place in the list.
    pub fn get(&self, kind: &str) -> Option<(usize, &Condition)> {
        self.found.iter().find(|(known, ..)| known == kind).map(|(_, place, condition)| (*place, condition))
    }
}

/// The kind of object that a policy was read from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum PolicyKind {
    /// `egress-agent.io/v1alpha1` EgressAssignment: what the controller has made of objects of other kinds.
    Assignment,
    /// `k8s.ovn.org/v1` EgressIP.
    EgressIp,
}

impl PolicyKind {
    /// In the order of the variants.
    pub const ALL: [Self; 2] = [Self::Assignment, Self::EgressIp];

    /// The kind as in Kubernetes objects.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Assignment => "EgressAssignment",
            Self::EgressIp => "EgressIP",
        }
    }
}

/// The kinds of objects that users write. The order is the precedence between them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum SourceKind {
    /// `k8s.ovn.org/v1` EgressService.
    EgressService,
    /// `k8s.ovn.org/v1` EgressIP.
    #[serde(rename = "EgressIP")]
    EgressIp,
    /// `crd.antrea.io/v1beta1` Egress.
    Egress,
    /// `cilium.io/v2` CiliumEgressGatewayPolicy.
    CiliumEgressGatewayPolicy,
}

impl SourceKind {
    pub const ALL: [Self; 4] = [Self::EgressService, Self::EgressIp, Self::Egress, Self::CiliumEgressGatewayPolicy];

    /// The kind as in Kubernetes objects.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::EgressService => "EgressService",
            Self::EgressIp => "EgressIP",
            Self::Egress => "Egress",
            Self::CiliumEgressGatewayPolicy => "CiliumEgressGatewayPolicy",
        }
    }
}

/// The object that a user wrote a rule in. The order is the precedence of rules, the same on every node: by kind, then age,
/// then name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct RuleSource {
    pub kind: SourceKind,
    pub created: CreationTimestamp,
    /// Empty for a cluster-scoped kind.
    pub namespace: String,
    pub name: String,
    pub uid: String,
}

impl RuleSource {
    /// `name`, or `namespace/name`.
    pub fn full_name(&self) -> String {
        let Self { namespace, name, .. } = self;
        if namespace.is_empty() { name.clone() } else { format!("{namespace}/{name}") }
    }
}

impl fmt::Display for RuleSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.kind.as_str(), self.full_name())
    }
}

/// Which pods leave with the addresses of a policy, and for which destinations. Objects that share an address become rules
/// of one policy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PolicyRule {
    pub source: RuleSource,
    /// A pod is selected by any of them.
    pub selects: Vec<Selects>,
    pub destinations: Destinations,
    /// The rule is for some of these pods.
    pub share: Option<PodShare>,
}

/// The pods of a rule that leave with one of several addresses. Each pod has one of them, by rendezvous hashing of its UID, so an
/// address that comes or goes moves no pods but its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodShare {
    pub address: IpAddr,
    /// All of them.
    pub among: BTreeSet<IpAddr>,
}

impl PodShare {
    /// Whether the pod leaves with the address.
    pub fn has(&self, uid: &str) -> bool {
        let pod = rendezvous::hash(uid.as_bytes());
        let weight = |address: &IpAddr| (rendezvous::weight(pod, rendezvous::hash_of_address(*address)), *address);
        self.among.iter().copied().max_by_key(weight) == Some(self.address)
    }
}

/// What else a policy's addresses are used for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AddressUse {
    #[default]
    EgressOnly,
    /// They are addresses of a Service too: see [`KernelState::shared`](crate::model::state::KernelState::shared).
    OfService,
    /// They are addresses that nodes have themselves, likewise.
    OfHost,
}

impl AddressUse {
    pub const fn shared_with(self) -> Option<SharedWith> {
        match self {
            Self::EgressOnly => None,
            Self::OfService => Some(SharedWith::Service),
            Self::OfHost => Some(SharedWith::Host),
        }
    }
}

// Arrays with a value of each kind are indexed by the kind.
const _: () = {
    let mut index = 0;
    while index < PolicyKind::ALL.len() {
        assert!(PolicyKind::ALL[index] as usize == index);
        index += 1;
    }
};

/// Names one policy of the cluster. All kinds so far are cluster-scoped.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PolicyKey {
    pub kind: PolicyKind,
    pub name: String,
}

impl PolicyKey {
    pub fn egress_ip(name: impl Into<String>) -> Self {
        Self { kind: PolicyKind::EgressIp, name: name.into() }
    }
}

impl fmt::Display for PolicyKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.kind.as_str(), self.name)
    }
}

/// The object that a policy was read from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PolicyOrigin {
    pub key: PolicyKey,
    pub uid: String,
    pub resource_version: String,
    pub generation: Option<i64>,
    pub created: CreationTimestamp,
}

/// Selects pods. The default selects all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Selects {
    pub namespaces: Selector,
    pub pods: Selector,
    /// By the node that the pod runs on.
    pub nodes: Selector,
}

/// The outside destinations that a policy applies to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Destinations {
    #[default]
    All,
    Prefixes(Arc<DestinationPrefixes>),
}

impl Destinations {
    /// Whether some destination of this family is among them.
    pub fn has_family(&self, family: Family) -> bool {
        match self {
            Self::All => true,
            Self::Prefixes(prefixes) => {
                prefixes.entries().any(|(net, applies)| *applies && family_of(net.addr()) == family)
            }
        }
    }
}

/// Prefixes that a policy applies to, and excluded ones. Of a destination the longest counts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DestinationPrefixes(BTreeMap<IpNet, bool>);

impl DestinationPrefixes {
    /// A prefix that is both is excluded.
    pub fn new(included: impl IntoIterator<Item = IpNet>, excluded: impl IntoIterator<Item = IpNet>) -> Self {
        let included = included.into_iter().map(|net| (net.trunc(), true));
        Self(included.chain(excluded.into_iter().map(|net| (net.trunc(), false))).collect())
    }

    /// Each with whether the policy applies to it.
    pub fn entries(&self) -> impl Iterator<Item = (&IpNet, &bool)> {
        self.0.iter()
    }
}

/// A routing table of the nodes that packets follow (`spec.network` of an EgressService).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PolicyNetwork {
    /// Its number, or its name on the node.
    pub table: String,
    /// The addresses of the Service's load balancer. Answers to its clients follow the table.
    pub addresses: Vec<IpAddr>,
    /// The pods that leave by their own nodes, without an egress IP, and follow the table there. `None`: what leaves with
    /// the addresses follows it.
    pub pods: Option<Selects>,
}

/// The nodes that may host the addresses of a policy.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum EligibleNodes {
    /// Every node with the label [`crate::keys::ASSIGNABLE`] and a network that contains the address. Each address has
    /// a node of its own.
    #[default]
    Labelled,
    /// One of these nodes, or of all, for all addresses together: whatever their networks are, since something else
    /// makes the addresses lead to the node.
    One(Option<BTreeSet<String>>),
    /// Any of these nodes with a network that contains the address, whether or not they have the label. Each address has
    /// a node of its own.
    Selected(Box<SelectedNodes>),
    /// A node that has the address itself. Each address has a node of its own. Nodes that match one of these selectors could serve
    /// the policy's pods with other addresses, so the controller must know whether they answer.
    Having { candidates: BTreeSet<Selector> },
}

/// Selects the nodes that match all of them; without one, all nodes.
pub type NodeSelectors = BTreeSet<Selector>;

/// Nodes by their labels, with the VLANs that the addresses lie in.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct SelectedNodes {
    pub selectors: NodeSelectors,
    /// An address in one of these networks is hosted in its VLAN alone.
    pub vlans: BTreeSet<VlanNetwork>,
}

impl SelectedNodes {
    /// Whether the node's interface for the address, if it has one, is in the address's VLAN.
    fn is_in_vlan(&self, node: &Node, address: IpAddr) -> bool {
        let vlan = self.vlans.iter().find(|one| one.gateway.contains(&address));
        vlan.is_none_or(|one| node.other_interface(address).is_some_and(|interface| interface.vlan == Some(one.vlan)))
    }
}

impl From<NodeSelectors> for Box<SelectedNodes> {
    fn from(selectors: NodeSelectors) -> Self {
        Self::new(SelectedNodes { selectors, vlans: BTreeSet::new() })
    }
}

impl EligibleNodes {
    /// Whether all addresses of the policy share one node.
    pub const fn is_one(&self) -> bool {
        matches!(self, Self::One(_))
    }

    /// Whether the node is among them, apart from its networks and addresses.
    pub fn has(&self, node: &Node) -> bool {
        match self {
            Self::Labelled => node.assignable,
            Self::One(names) => names.as_ref().is_none_or(|names| names.contains(&node.name)),
            Self::Selected(nodes) => select(&nodes.selectors, node),
            Self::Having { .. } => true,
        }
    }

    /// Whether the node can host the address.
    pub fn can_host(&self, node: &Node, address: IpAddr) -> bool {
        self.has(node)
            && match self {
                Self::One(_) => true,
                Self::Having { .. } => node.has(address),
                Self::Labelled => node.hosts(address),
                Self::Selected(nodes) => node.hosts(address) && nodes.is_in_vlan(node, address),
            }
    }

    /// As [`Self::can_host`], where a node with unknown networks might.
    pub fn might_host(&self, node: &Node, address: IpAddr) -> bool {
        self.has(node)
            && match self {
                Self::One(_) => true,
                Self::Having { .. } => node.has(address),
                Self::Labelled => node.may_host(address),
                Self::Selected(nodes) => {
                    !node.networks_known || (node.hosts(address) && nodes.is_in_vlan(node, address))
                }
            }
    }
}

fn select(selectors: &NodeSelectors, node: &Node) -> bool {
    selectors.iter().all(|selector| selector.matches(&node.labels))
}

/// Which nodes take part in serving egress policies.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EgressNodes {
    /// A policy allows every node.
    all: bool,
    /// The nodes that policies name.
    named: BTreeSet<String>,
    /// By which policies select nodes: many policies have the same.
    selected: BTreeSet<NodeSelectors>,
    /// The addresses by which policies use nodes that have them.
    having: BTreeSet<IpAddr>,
}

impl EgressNodes {
    pub fn of<'a>(policies: impl IntoIterator<Item = &'a EgressPolicy>) -> Self {
        let mut nodes = Self::default();
        policies.into_iter().for_each(|policy| nodes.add(policy));
        nodes
    }

    fn add(&mut self, policy: &EgressPolicy) {
        match &policy.eligible_nodes {
            EligibleNodes::Labelled => {}
            EligibleNodes::One(None) => self.all = true,
            EligibleNodes::One(Some(names)) => self.named.extend(names.iter().cloned()),
            EligibleNodes::Selected(selected) => {
                if !self.selected.contains(&selected.selectors) {
                    self.selected.insert(selected.selectors.clone());
                }
            }
            EligibleNodes::Having { candidates } => {
                self.having.extend(policy.addresses());
                self.selected.extend(candidates.iter().map(|one| NodeSelectors::from([one.clone()])));
            }
        }
    }

    /// Whether the node has the label, or is among those of a policy.
    pub fn has(&self, node: &Node) -> bool {
        let is_selected = || self.selected.iter().any(|selectors| select(selectors, node));
        let has_one = || node.own_addresses().any(|own| self.having.contains(&own));
        node.assignable || self.all || self.named.contains(&node.name) || is_selected() || has_one()
    }
}

/// Which nodes take part, by the changes of all policies.
#[derive(Debug, Default)]
pub struct NamingPolicies {
    /// Those that allow other nodes than labelled ones.
    policies: Policies,
    nodes: EgressNodes,
}

impl NamingPolicies {
    /// Takes a change. Returns whether other nodes may take part now. Most changes are of what is assigned, and they are many.
    pub fn apply(&mut self, update: Update<PolicyKey, Arc<EgressPolicy>>) -> bool {
        let names_nodes = |policy: &EgressPolicy| policy.eligible_nodes != EligibleNodes::Labelled;
        match update {
            Update::Replaced(all) => {
                self.policies = all.into_iter().filter(|(_, policy)| names_nodes(policy)).collect();
            }
            Update::Changed(key, policy) if names_nodes(&policy) => {
                match self.policies.insert(key, Arc::clone(&policy)) {
                    None => {
                        self.nodes.add(&policy);
                        return true;
                    }
                    Some(former) => {
                        if former.eligible_nodes == policy.eligible_nodes && former.listed == policy.listed {
                            return false;
                        }
                    }
                }
            }
            Update::Changed(key, _) | Update::Removed(key) => {
                if self.policies.remove(&key).is_none() {
                    return false;
                }
            }
        }
        self.nodes = EgressNodes::of(self.policies.values().map(|policy| &**policy));
        true
    }

    pub fn egress_nodes(&self) -> &EgressNodes {
        &self.nodes
    }
}

/// What the controller has written to the object of a policy.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Published {
    pub ids: EgressIds,
    /// The addresses for which no node can host any of them.
    pub no_eligible_node: Option<BTreeSet<IpAddr>>,
    /// The node of each assigned address.
    pub items: Vec<Item>,
    /// The number of selected pods.
    pub selected_pods: Option<u32>,
    pub conditions: Conditions,
    pub has_annotations: bool,
    pub has_status: bool,
    /// The status has a list of items, possibly empty.
    pub has_items: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EgressPolicy {
    pub origin: PolicyOrigin,
    /// `None` if a selector is unreadable and no earlier reading is known: then no new pods are selected.
    pub rules: Option<Vec<PolicyRule>>,
    /// The addresses as typed.
    pub listed: Vec<String>,
    pub address_use: AddressUse,
    pub eligible_nodes: EligibleNodes,
    pub network: Option<PolicyNetwork>,
    /// Of each gateway.
    pub limit: BandwidthLimit,
    /// Packets without an address are dropped, where the operator's default would be the node's address.
    pub drop_unassigned: bool,
    pub published: Published,
    /// The parts of the current object that are unreadable.
    pub unreadable: Vec<Unreadable>,
}

/// All egress policies of the cluster.
pub type Policies = BTreeMap<PolicyKey, Arc<EgressPolicy>>;

/// A part of a policy that can be unreadable by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum PolicyPart {
    /// The listed addresses. An entry that is no address does not make them unreadable.
    Addresses,
    /// The selectors of namespaces or pods.
    Selectors,
    /// The published assignment.
    Items,
}

/// An unreadable part, and why, in a line for users.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Unreadable {
    pub part: PolicyPart,
    pub why: String,
    /// The part has its last value; otherwise nothing is known of it.
    pub is_known: bool,
}

impl Reading for EgressPolicy {
    fn is_whole(&self) -> bool {
        self.unreadable.is_empty()
    }

    fn filled_from(mut self, known: &Self) -> Self {
        if known.origin.uid != self.origin.uid {
            return self;
        }
        for unreadable in &mut self.unreadable {
            unreadable.is_known = !known.is_unknown(unreadable.part);
            match unreadable.part {
                PolicyPart::Addresses => self.listed.clone_from(&known.listed),
                PolicyPart::Selectors => self.rules.clone_from(&known.rules),
                PolicyPart::Items => self.published.items.clone_from(&known.published.items),
            }
        }
        self
    }
}

impl EgressPolicy {
    /// Whether its pods leave by their own nodes, so that it has no address to assign ([`PolicyNetwork::pods`]).
    pub fn is_by_own_nodes(&self) -> bool {
        self.network.as_ref().is_some_and(|network| network.pods.is_some())
    }

    /// Whether no node has an address for it, so that none is listed. Its packets are dropped.
    pub fn has_no_gateway(&self) -> bool {
        self.address_use == AddressUse::OfHost && self.listed.is_empty() && !self.is_unknown(PolicyPart::Addresses)
    }

    /// A policy that selects nothing, lists nothing, and has no status.
    pub fn new(origin: PolicyOrigin) -> Self {
        Self {
            origin,
            rules: None,
            listed: Vec::new(),
            address_use: AddressUse::EgressOnly,
            eligible_nodes: EligibleNodes::Labelled,
            network: None,
            limit: BandwidthLimit::NONE,
            drop_unassigned: false,
            published: Published::default(),
            unreadable: Vec::new(),
        }
    }

    /// Unreadable now and never read before.
    pub fn is_unknown(&self, part: PolicyPart) -> bool {
        self.unreadable.iter().any(|unreadable| unreadable.part == part && !unreadable.is_known)
    }

    pub fn key(&self) -> &PolicyKey {
        &self.origin.key
    }

    pub fn name(&self) -> &str {
        &self.origin.key.name
    }

    /// What users wrote, for tables: the name of an EgressIP object, else kind and name of the first object that has these
    /// addresses, and how many more have them.
    pub fn written_as(&self) -> String {
        match self.rules.as_deref() {
            Some([first, others @ ..]) if self.key().kind == PolicyKind::Assignment => match others.len() {
                0 => first.source.to_string(),
                more => format!("{} and {more} more", first.source),
            },
            _ => self.name().to_owned(),
        }
    }

    /// The precedence of policies, the same on every node: that of the first rule. An assignment without readable rules comes
    /// last.
    pub fn rank(&self) -> (SourceKind, CreationTimestamp, &str) {
        let first = self.rules.iter().flatten().map(|rule| &rule.source).min();
        let unknown = match self.origin.key.kind {
            PolicyKind::EgressIp => SourceKind::EgressIp,
            PolicyKind::Assignment => SourceKind::Egress,
        };
        match first {
            Some(source) => (source.kind, source.created, self.name()),
            None => (unknown, self.origin.created, self.name()),
        }
    }

    /// The rule of an EgressIP object, which has one.
    pub fn own_rule(origin: &PolicyOrigin, selects: Selects) -> PolicyRule {
        let source = RuleSource {
            kind: SourceKind::EgressIp,
            created: origin.created,
            namespace: String::new(),
            name: origin.key.name.clone(),
            uid: origin.uid.clone(),
        };
        PolicyRule { source, selects: vec![selects], destinations: Destinations::All, share: None }
    }

    /// Whether a listed address has a node in the status.
    pub fn has_assigned(&self) -> bool {
        let listed = self.addresses();
        let mut assigned = self.published.items.iter().filter_map(|item| parse_egress_ip(&item.egress_ip));
        assigned.any(|address| listed.contains(&address))
    }

    /// The valid listed addresses, canonical and unique.
    pub fn addresses(&self) -> BTreeSet<IpAddr> {
        self.listed.iter().filter_map(|text| parse_egress_ip(text)).collect()
    }
}

/// Parses an egress IP: an address without a prefix length; `::ffff:a.b.c.d` is IPv4.
pub fn parse_egress_ip(text: &str) -> Option<IpAddr> {
    // Most have no spaces, and all addresses of the cluster are parsed often.
    let read = text.parse::<IpAddr>().or_else(|_| text.trim().parse());
    read.ok().map(|address| address.to_canonical())
}

/// The family of an entry, guessed if it is invalid: a typing error must not turn a drop into a leak.
pub fn listed_family(text: &str) -> Family {
    match parse_egress_ip(text) {
        Some(address) => family_of(address),
        None if text.contains(':') => Family::V6,
        None => Family::V4,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::samples::origin;

    #[test]
    fn tables_name_what_users_wrote() {
        let own = EgressPolicy::new(origin("web", 1));
        assert_eq!(own.written_as(), "web");
        let service = own.of_service(1).with_rules(|rule| rule.source.namespace = "shop".into());
        assert_eq!(service.written_as(), "EgressService shop/web");
        let mut shared = service.clone();
        let rules = service.rules.expect("rules");
        shared.rules = Some([rules.clone(), rules.clone(), rules].concat());
        assert_eq!(shared.written_as(), "EgressService shop/web and 2 more");
    }

    #[test]
    fn pods_are_divided_and_an_address_that_goes_moves_no_pods_but_its_own() {
        let [a, b, c] =
            ["172.18.0.2", "172.18.0.3", "172.18.0.4"].map(|text| parse_egress_ip(text).expect("a literal"));
        let of = |uid: &str, among: &[IpAddr]| {
            let among: BTreeSet<IpAddr> = among.iter().copied().collect();
            let has = |address: &&IpAddr| PodShare { address: **address, among: among.clone() }.has(uid);
            let mut found = among.iter().filter(has);
            let one = *found.next().expect("every pod has an address");
            assert_eq!(found.next(), None, "and one alone");
            one
        };
        let mut counts = BTreeMap::<IpAddr, u32>::new();
        for number in 0..3000 {
            let uid = format!("5c0ffee5-0000-4000-8000-{number:012}");
            let (three, two) = (of(&uid, &[a, b, c]), of(&uid, &[a, b]));
            *counts.entry(three).or_default() += 1;
            assert!(three == c || three == two, "{uid}");
        }
        assert!(counts.len() == 3 && counts.values().all(|count| (850..1150).contains(count)), "{counts:?}");
    }

    #[test]
    fn egress_ips_are_parsed_strictly_and_made_canonical() {
        let ip = |text: &str| parse_egress_ip(text).map(|a| a.to_string());
        assert_eq!(ip("172.18.0.100").as_deref(), Some("172.18.0.100"));
        assert_eq!(ip("FD00:0172:18::0100").as_deref(), Some("fd00:172:18::100"));
        assert_eq!(ip("::ffff:172.18.0.100").as_deref(), Some("172.18.0.100"));
        for bad in ["172.18.0.100/32", "172.18.0.1000", "172.018.0.100", "", "eip"] {
            assert_eq!(ip(bad), None, "{bad}");
        }
    }
}
