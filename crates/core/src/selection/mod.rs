//! Which policy serves which pod.
//!
//! Of several policies that select a pod, the one with the longest prefix of the destination serves it; of equal ones, as
//! of those that apply to every destination, the first by rank: by kind, age, name. The others are standby, and an event
//! reports that. Among equal prefixes, a policy without an assigned address takes no pod from one that has some, unless it already
//! serves the pod: so an older policy with a typing error costs younger ones nothing, and one whose node is away keeps
//! its pods, whose connections continue when the node returns.
//!
//! A pod has addresses of both families, and a policy an egress ID of each, so the question is asked for each family.

pub mod classes;
pub mod pod_addresses;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;

use crate::model::node::Node;
use crate::model::policy::{
    Destinations, EgressPolicy, Policies, PolicyKey, PolicyRule, RuleSource, Selects, SourceKind,
};
use crate::model::state::{ClassPolicies, EgressId, EgressIds, Family, KernelState, NOT_NUMBERED, PodState, family_of};
use crate::model::view::{ClusterView, CreationTimestamp, Labels, Pod, PodKey, Remembered};
use crate::selection::classes::{Candidate, ClassNumbers, ClassTable};
use crate::selection::pod_addresses::PodAddressSpace;

/// The oldest standby policies reported for one pod. Authors of policies decide how many select it.
pub const MOST_STANDBY: usize = 16;

/// Sets of policies whose common destinations are kept.
const MOST_TABLES: usize = 1024;

/// A rule that selects a pod which one of another policy serves.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Standby {
    pub rule: RuleSource,
    pub pod: PodKey,
    pub served_by: RuleSource,
}

/// A rule that selects a pod.
#[derive(Clone, Debug)]
struct SelectingRule {
    policy: Arc<EgressPolicy>,
    /// Its index; zero also where the rules are unreadable.
    index: usize,
}

impl SelectingRule {
    fn rule(&self) -> Option<&PolicyRule> {
        self.policy.rules.as_ref()?.get(self.index)
    }

    fn source(&self) -> Option<&RuleSource> {
        self.rule().map(|rule| &rule.source)
    }

    fn destinations(&self) -> &Destinations {
        self.rule().map_or(&Destinations::All, |rule| &rule.destinations)
    }

    fn rank(&self) -> (SourceKind, CreationTimestamp, &str, &str) {
        match self.source() {
            Some(source) => (source.kind, source.created, &source.namespace, &source.name),
            None => {
                let (kind, created, name) = self.policy.rank();
                (kind, created, "", name)
            }
        }
    }
}

/// The egress IDs of all policies that have one. If two policies carry the same ID, the older keeps it and the other
/// counts as not numbered.
pub fn egress_ids(policies: &Policies) -> BTreeMap<PolicyKey, EgressIds> {
    let mut taken = BTreeSet::new();
    let mut own = |policy: &EgressPolicy| policy.published.ids.retained(|id| taken.insert(id));
    let all = by_rank(policies.values()).into_iter().map(|policy| (policy.key().clone(), own(policy)));
    all.filter(|(_, ids)| *ids != EgressIds::NONE).collect()
}

/// By kind, oldest first, then by name.
pub fn by_rank<'a>(policies: impl IntoIterator<Item = &'a Arc<EgressPolicy>>) -> Vec<&'a Arc<EgressPolicy>> {
    let mut policies: Vec<_> = policies.into_iter().collect();
    policies.sort_by(|a, b| a.rank().cmp(&b.rank()));
    policies
}

/// Which policies select a pod, cached between pod events: valid until a policy or a namespace changes.
#[derive(Debug, Default)]
pub struct Selection {
    network: PodAddressSpace,
    /// Of this node.
    node: Arc<Labels>,
    ids: BTreeMap<PolicyKey, EgressIds>,
    /// The rules that select a namespace, by rank; only namespaces that have pods here.
    by_namespace: BTreeMap<String, Vec<SelectingRule>>,
    /// What the rules of a pod come to, in their order, where one of them has destinations.
    tables: BTreeMap<(Family, RuleKeys), Arc<SelectedClass>>,
    numbers: ClassNumbers,
}

/// Policies, each with the index of a rule.
type RuleKeys = Vec<(PolicyKey, usize)>;

/// The state of pods with these policies, the class if it is one, and the policies that do not apply.
#[derive(Debug)]
struct SelectedClass {
    state: PodState,
    policies: Arc<ClassPolicies>,
    /// By their indices among the policies; each with the one that applies instead.
    beaten: BTreeMap<usize, usize>,
}

impl Selection {
    /// Of the pods of this node.
    pub fn new(view: &ClusterView, own: &Node, service_cidrs: &[IpNet]) -> Self {
        let (by_namespace, tables) = (BTreeMap::new(), BTreeMap::new());
        let (network, node) = (PodAddressSpace::new(own, service_cidrs), Arc::clone(&own.labels));
        Self { network, node, ids: egress_ids(&view.policies), by_namespace, tables, numbers: view.classes.clone() }
    }

    /// Forgets the numbers of classes that the state does not have.
    pub fn forget_classes(&mut self, state: &KernelState) {
        self.numbers.retain(state);
        self.tables.clear();
    }

    /// The same, if there are many: the authors of pods decide how many different sets of policies select one.
    pub fn forget_surplus_classes(&mut self, state: &KernelState) {
        if self.tables.len() > MOST_TABLES {
            self.forget_classes(state);
        }
    }

    /// The numbers of classes so far.
    pub fn class_numbers(&self) -> &ClassNumbers {
        &self.numbers
    }

    pub fn network(&self) -> &PodAddressSpace {
        &self.network
    }

    pub fn ids(&self, policy: &PolicyKey) -> EgressIds {
        self.ids.get(policy).copied().unwrap_or_default()
    }

    fn id(&self, policy: &PolicyKey, family: Family) -> Option<EgressId> {
        self.ids(policy).of(family)
    }

    /// The entry of a pod's address of this family, with the class if it names one. `None` while the pod's namespace is
    /// unknown: an unknown pod.
    pub fn pod_state(
        &mut self,
        view: &ClusterView,
        (key, pod): (&PodKey, &Pod),
        family: Family,
    ) -> Option<(PodState, Option<Arc<ClassPolicies>>)> {
        let selecting = self.selecting(view, (key, pod), family)?;
        if let Some(class) = self.class_of(&selecting, family) {
            let policies = matches!(class.state, PodState::ByDestination(_)).then(|| Arc::clone(&class.policies));
            return Some((class.state, policies));
        }
        let state = match selecting.first() {
            None => PodState::Known,
            Some(first) => PodState::Selected(self.id(first.policy.key(), family).unwrap_or(NOT_NUMBERED)),
        };
        Some((state, None))
    }

    /// What these rules come to together. `None` if they apply to every destination: the first serves the pod.
    fn class_of(&mut self, selecting: &[SelectingRule], family: Family) -> Option<Arc<SelectedClass>> {
        if selecting.iter().all(|one| *one.destinations() == Destinations::All) {
            return None;
        }
        let keys: Vec<_> = selecting.iter().map(|one| (one.policy.key().clone(), one.index)).collect();
        let (ids, numbers) = (&self.ids, &mut self.numbers);
        let class = self.tables.entry((family, keys)).or_insert_with(|| {
            let id = |policy: &EgressPolicy| ids.get(policy.key()).and_then(|ids| ids.of(family));
            let candidates = selecting.iter();
            let candidates = candidates.map(|one| Candidate { destinations: one.destinations(), id: id(&one.policy) });
            let candidates: Vec<Candidate<'_>> = candidates.collect();
            let ClassTable { policies, beaten } = classes::table(&candidates, family);
            let policies = Arc::new(policies);
            let state = match policies.sole() {
                Some(None) => PodState::Known,
                Some(Some(id)) => PodState::Selected(id),
                None => PodState::ByDestination(numbers.number(Arc::clone(&policies))),
            };
            Arc::new(SelectedClass { state, policies, beaten })
        });
        Some(Arc::clone(class))
    }

    /// The rules that select these pods and do not serve them.
    pub fn standby<'a>(&mut self, view: &ClusterView, pods: impl IntoIterator<Item = &'a PodKey>) -> BTreeSet<Standby> {
        let mut standby = BTreeSet::new();
        let pods = pods.into_iter().filter_map(|key| view.pods.get_key_value(key));
        for (key, pod) in pods {
            let families: BTreeSet<Family> = self.network.claimed_by(pod).map(family_of).collect();
            for family in families {
                let selecting = self.selecting(view, (key, pod), family).unwrap_or_default();
                let beaten = match self.class_of(&selecting, family) {
                    Some(class) => class.beaten.clone(),
                    None => (1..selecting.len()).map(|index| (index, 0)).collect(),
                };
                let pairs = beaten.into_iter().map(|(index, by)| (&selecting[index], &selecting[by]));
                // Rules of one policy give the same addresses.
                let others = pairs.filter(|(one, by)| one.policy.key() != by.policy.key());
                let reported = others.filter_map(|(one, by)| {
                    let (rule, served_by) = (one.source()?.clone(), by.source()?.clone());
                    Some(Standby { rule, pod: key.clone(), served_by })
                });
                standby.extend(reported.take(MOST_STANDBY));
            }
        }
        standby
    }

    /// Whether a pod is starting here that a policy selects, or could select, so that its packets may come from an
    /// unknown address. A pod whose namespace is unknown counts too, since its entry waits for that.
    pub fn awaits_addresses(&mut self, view: &ClusterView) -> bool {
        let is_alive = |(_, pod): &(&PodKey, &Pod)| pod.is_endpoint() && !pod.terminating;
        // Asked for each event of a pod, and few pods are starting.
        let is_unknown = |key: &PodKey| !view.namespaces.contains_key(&key.namespace);
        let is_starting = |pod: &Pod| pod.starting && pod.attached.is_empty();
        let mut awaits = |holder: (&PodKey, &Pod), family| match self.selecting(view, holder, family) {
            None => true,
            // A policy with unreadable selectors might select it.
            Some(selecting) => !selecting.is_empty() || view.policies.values().any(|policy| policy.rules.is_none()),
        };
        let mut pods = view.pods.iter().filter(is_alive).filter(|(key, pod)| is_unknown(key) || is_starting(pod));
        pods.any(|holder| [Family::V4, Family::V6].into_iter().any(|family| awaits(holder, family)))
    }

    /// The rules that select a pod in this family, by rank, those that can serve it first. `None` while the namespace is
    /// unknown.
    fn selecting(
        &mut self,
        view: &ClusterView,
        (key, pod): (&PodKey, &Pod),
        family: Family,
    ) -> Option<Vec<SelectingRule>> {
        let labels = view.namespaces.get(&key.namespace)?;
        let candidates = self.by_namespace.entry(key.namespace.clone()).or_insert_with(|| {
            let is_selected = |one: &Selects| one.nodes.matches(&self.node) && one.namespaces.matches(labels);
            let selected = |rule: &PolicyRule| rule.selects.iter().any(is_selected);
            let of_policy = |policy: &Arc<EgressPolicy>| -> Vec<SelectingRule> {
                let one = |index| SelectingRule { policy: Arc::clone(policy), index };
                match &policy.rules {
                    None => vec![one(0)],
                    Some(rules) => (0..rules.len()).filter(|index| selected(&rules[*index])).map(one).collect(),
                }
            };
            let mut rules: Vec<SelectingRule> = view.policies.values().flat_map(of_policy).collect();
            rules.sort_by(|a, b| a.rank().cmp(&b.rank()));
            rules
        });
        let remembered = view.remembered.get(&(pod.uid.clone(), family));
        let known = |policy: &EgressPolicy| {
            let id = self.ids.get(policy.key()).and_then(|ids| ids.of(family))?;
            remembered?.get(&id).copied()
        };
        let is_selected = |one: &Selects| {
            one.nodes.matches(&self.node) && one.namespaces.matches(labels) && one.pods.matches(&pod.labels)
        };
        let has_share = |rule: &PolicyRule| rule.share.as_ref().is_none_or(|share| share.has(&pod.uid));
        let selected = |one: &&SelectingRule| match one.rule() {
            Some(rule) => {
                rule.destinations.has_family(family) && rule.selects.iter().any(is_selected) && has_share(rule)
            }
            // With unreadable selectors, the policy selects the pods that it selected before.
            None => known(&one.policy).is_some(),
        };
        let mut selecting: Vec<_> = candidates.iter().filter(selected).cloned().collect();
        let may_serve = |policy: &EgressPolicy| policy.has_assigned() || known(policy) == Some(true);
        // Stable: by rank among each.
        selecting.sort_by_key(|one| !may_serve(&one.policy));
        Some(selecting)
    }
}

impl ClusterView {
    /// Records the pods that the kernel had selected. UIDs are kept, since a later pod with the same address is another
    /// pod. Whether their policies had an address then is unknown: one that lists none had none. An address that no pod
    /// has is that of a pod that was deleted earlier, or while no agent ran.
    pub fn recall(&mut self, network: &PodAddressSpace, kernel: &KernelState) {
        self.classes = ClassNumbers::of(kernel);
        let mut departed = Vec::new();
        for (address, _) in kernel.pods.iter().filter(|(_, state)| state.is_selected()) {
            match network.holder(self, *address) {
                Some((_, pod)) => {
                    let pod = (pod.uid.clone(), family_of(*address));
                    let lists = |id| {
                        let mut policies = self.policies.values().filter(|policy| policy.published.ids.contains(id));
                        policies.any(|policy| !policy.addresses().is_empty())
                    };
                    let ids = kernel.policies_of(*address).ids().into_iter();
                    let known: Remembered = ids.map(|id| (id, lists(id))).collect();
                    self.remembered.insert(pod, known);
                }
                None => departed.push(*address),
            }
        }
        // The caller compiles everything next.
        self.depart(departed, &mut BTreeSet::new());
    }

    /// Records the selected pods of the whole view.
    pub fn remember(&mut self, network: &PodAddressSpace, state: &KernelState) {
        let alive: BTreeSet<String> = self.pods.values().map(|pod| pod.uid.clone()).collect();
        self.remembered.retain(|(uid, _), _| alive.contains(uid));
        let policies = self.policies.values().filter(|policy| policy.has_assigned());
        let can_serve: BTreeSet<EgressId> = policies.flat_map(|policy| policy.published.ids.all()).collect();
        for address in state.pods.keys() {
            self.note_state(network, *address, state, |_, id| can_serve.contains(&id));
        }
    }

    /// Records the current state of one address.
    pub fn remember_one(&mut self, network: &PodAddressSpace, address: IpAddr, state: &KernelState) {
        self.note_state(network, address, state, |view, id| {
            view.policies.values().any(|policy| policy.published.ids.contains(id) && policy.has_assigned())
        });
    }

    fn note_state(
        &mut self,
        network: &PodAddressSpace,
        address: IpAddr,
        state: &KernelState,
        can_serve: impl Fn(&Self, EgressId) -> bool,
    ) {
        let Some((_, pod)) = network.holder(self, address) else { return };
        let pod = (pod.uid.clone(), family_of(address));
        match state.pods.get(&address) {
            None => {}
            Some(PodState::Known) => drop(self.remembered.remove(&pod)),
            Some(PodState::Selected(_) | PodState::ByDestination(_)) => {
                let before = self.remembered.get(&pod);
                let had = |id: &EgressId| before.is_some_and(|known| known.get(id) == Some(&true));
                let ids = state.policies_of(address).ids().into_iter();
                let known: Remembered = ids.map(|id| (id, had(&id) || can_serve(self, id))).collect();
                // A policy without an ID could not be recognised later.
                if !known.is_empty() {
                    self.remembered.insert(pod, known);
                }
            }
        }
    }
}
