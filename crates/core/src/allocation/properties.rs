//! Properties of assignments in small random clusters, checked against all possible placements. The seeds are fixed.

use egress_common::random::Random;
use ipnet::IpNet;

use super::*;
use crate::allocation::samples::{node, policy};
use crate::model::node::{Capacity, CloudConfig};
use crate::model::policy::Item;
use crate::model::samples::interface;

const CASES: u64 = 3_000;

struct RandomCluster {
    nodes: Nodes,
    policies: Policies,
    unreachable: BTreeSet<String>,
}

impl RandomCluster {
    fn assign(&self) -> Assignment {
        let hand_overs = &BTreeMap::new();
        assign(&AssignmentInputs {
            policies: &self.policies,
            nodes: &self.nodes,
            unreachable: &self.unreachable,
            absent: &BTreeSet::new(),
            networks: &ClusterNetworks::default(),
            services: &Services::default(),
            hand_overs,
        })
    }

    /// The cluster after the status was written.
    fn settled(&self) -> Self {
        let assignment = self.assign();
        let written = |(key, policy): (&PolicyKey, &Arc<EgressPolicy>)| {
            let items = assignment.policies[key].items.clone();
            (key.clone(), Arc::new(policy.published_as(|published| published.items = items)))
        };
        Self {
            nodes: self.nodes.clone(),
            policies: self.policies.iter().map(written).collect(),
            unreachable: self.unreachable.clone(),
        }
    }
}

/// Three networks; a node has one or two of them on its primary interface, and sometimes one on another.
fn random(numbers: &mut Random) -> RandomCluster {
    let network = |i: usize, node: usize| -> IpNet { format!("10.{i}.0.{}/16", node + 1).parse().expect("a network") };
    let mut nodes = Nodes::new();
    for i in 0..1 + numbers.below(4) {
        let (name, plain) = node(&format!("n{i}"), "10.0.0.1/16");
        let first = numbers.below(3);
        let mut primary = vec![network(first, i)];
        if numbers.one_in(3) {
            primary.push(network((first + 1) % 3, i));
        }
        let mut made = Node { primary, ready: !numbers.one_in(6), ..(*plain).clone() };
        if numbers.one_in(4) {
            let total = Some(numbers.below(3));
            let capacity = Capacity { total, ..Capacity::default() };
            made.cloud = Some(CloudConfig { networks: made.primary.clone(), capacity });
        } else if numbers.one_in(4) {
            let mut uplink = interface("eth0", &[]);
            (uplink.is_uplink, uplink.networks) = (true, made.primary.iter().map(|own| (own.trunc(), None)).collect());
            let mut other = interface("eth1", &[]);
            other.networks = [(network(numbers.below(3), i).trunc(), None)].into();
            made.interfaces = vec![uplink, other];
        }
        nodes.insert(name, Arc::new(made));
    }
    let mut policies = Policies::new();
    let mut next = 100;
    for i in 0..1 + numbers.below(4) {
        let mut listed: Vec<String> = Vec::new();
        for _ in 0..1 + numbers.below(3) {
            let again = next > 100 && numbers.one_in(8);
            let last = if again { 100 + numbers.below(next - 100) } else { next };
            next += usize::from(!again);
            // The network follows from the number, so that one number is one address.
            listed.push(format!("10.{}.0.{last}", last * 7 / 3 % 3));
        }
        let texts: Vec<&str> = listed.iter().map(String::as_str).collect();
        let mut items: Vec<(String, &str)> = Vec::new();
        for text in &texts {
            if numbers.one_in(3) {
                items.push((format!("n{}", numbers.below(5)), text));
            }
        }
        let items: Vec<(&str, &str)> = items.iter().map(|(node, text)| (node.as_str(), *text)).collect();
        let created = i64::try_from(numbers.below(3)).expect("small");
        policies.extend([policy(&format!("o{i}"), created, &texts, &items)]);
    }
    let unreachable = nodes.keys().filter(|_| numbers.one_in(8)).cloned().collect();
    RandomCluster { nodes, policies, unreachable }
}

/// The score of a placement: how many addresses, how many for each policy by rank, then how even the loads are.
fn score(
    cluster: &RandomCluster,
    placed: &BTreeMap<PolicyKey, Vec<Item>>,
) -> (usize, Vec<usize>, std::cmp::Reverse<usize>) {
    let counts: Vec<usize> =
        by_rank(cluster.policies.values()).iter().map(|policy| placed[policy.key()].len()).collect();
    let mut loads: BTreeMap<&str, usize> = BTreeMap::new();
    placed.values().flatten().for_each(|item| *loads.entry(item.node.as_str()).or_default() += 1);
    (counts.iter().sum(), counts, std::cmp::Reverse(loads.values().map(|load| load * load).sum()))
}

/// The rules written independently and without optimisation: whether this node may take the address.
fn may_take(cluster: &RandomCluster, name: &str, address: IpAddr) -> bool {
    let takes_part = |name: &str| {
        let node = &cluster.nodes[name];
        node.assignable && node.ready && !cluster.unreachable.contains(name)
    };
    let in_primary =
        |name: &str| cluster.nodes[name].primary_networks().iter().any(|network| network.contains(&address));
    let in_other = |name: &str| {
        let mut networks = cluster.nodes[name].interfaces.iter().flat_map(|interface| interface.networks.keys());
        !in_primary(name) && networks.any(|network| network.contains(&address))
    };
    let others = cluster.nodes.keys().any(|name| takes_part(name) && in_other(name));
    takes_part(name) && if others { in_other(name) } else { in_primary(name) }
}

/// The best score of all placements that keep assigned addresses in place.
fn best(cluster: &RandomCluster, assignment: &Assignment) -> (usize, Vec<usize>, std::cmp::Reverse<usize>) {
    let mut placed: BTreeMap<PolicyKey, Vec<Item>> = BTreeMap::new();
    let mut pending = Vec::new();
    for (name, outcome) in &assignment.policies {
        let before = &cluster.policies[name].published.items;
        placed.insert(name.clone(), outcome.items.iter().filter(|item| before.contains(item)).cloned().collect());
        for (entry, status) in &outcome.entries {
            let stays = placed[name].iter().any(|item| item.egress_ip == *entry);
            if !stays
                && !matches!(status, EntryStatus::Taken { .. } | EntryStatus::Conflict { .. } | EntryStatus::Invalid)
            {
                pending.push((name.clone(), entry.clone()));
            }
        }
    }
    let mut best = score(cluster, &placed);
    try_all(cluster, &pending, &mut placed, &mut best);
    best
}

fn try_all(
    cluster: &RandomCluster,
    pending: &[(PolicyKey, String)],
    placed: &mut BTreeMap<PolicyKey, Vec<Item>>,
    best: &mut (usize, Vec<usize>, std::cmp::Reverse<usize>),
) {
    let Some(((policy, egress_ip), rest)) = pending.split_first() else {
        let score = score(cluster, placed);
        if score > *best {
            *best = score;
        }
        return;
    };
    try_all(cluster, rest, placed, best);
    let address = egress_ip.parse().expect("an address");
    for node in cluster.nodes.keys() {
        let load = placed.values().flatten().filter(|item| item.node == *node).count();
        let limit = cluster.nodes[node].cloud.as_ref().and_then(|cloud| cloud.capacity.total);
        let used = placed[policy].iter().any(|item| item.node == *node);
        if used || limit.is_some_and(|limit| load >= limit) || !may_take(cluster, node, address) {
            continue;
        }
        let item = Item { node: node.clone(), egress_ip: egress_ip.clone() };
        placed.get_mut(policy).expect("every object").push(item);
        try_all(cluster, rest, placed, best);
        placed.get_mut(policy).expect("every object").pop();
    }
}

fn check_rules(cluster: &RandomCluster, assignment: &Assignment) {
    let mut addresses = BTreeSet::new();
    for (name, outcome) in &assignment.policies {
        let nodes: BTreeSet<&str> = outcome.items.iter().map(|item| item.node.as_str()).collect();
        assert_eq!(nodes.len(), outcome.items.len(), "two addresses of {name} on one node");
        for item in &outcome.items {
            assert!(addresses.insert(item.egress_ip.clone()), "{} is assigned twice", item.egress_ip);
            let address = item.egress_ip.parse().expect("an address");
            assert!(cluster.policies[name].addresses().contains(&address));
            assert!(cluster.nodes[&item.node].hosts(address) && !cluster.unreachable.contains(&item.node));
        }
    }
}

#[test]
fn as_many_as_possible_older_first_and_as_evenly_as_possible() {
    let mut short = 0;
    for seed in 0..CASES {
        let cluster = random(&mut Random::new(seed));
        let assignment = cluster.assign();
        check_rules(&cluster, &assignment);
        let placed = assignment.policies.iter().map(|(name, outcome)| (name.clone(), outcome.items.clone())).collect();
        assert_eq!(score(&cluster, &placed), best(&cluster, &assignment), "seed {seed}");
        let waits = |outcome: &ObjectAssignment| {
            outcome
                .entries
                .iter()
                .any(|(_, status)| matches!(status, EntryStatus::NodesInUse | EntryStatus::NoCapacity))
        };
        short += u32::from(assignment.policies.values().any(waits));
    }
    assert!(short > 100, "only {short} clusters were too small for what was asked");
}

#[test]
fn a_settled_assignment_stays() {
    for seed in 0..CASES {
        let settled = random(&mut Random::new(seed)).settled();
        let again = settled.assign();
        assert_eq!(again.changed(&settled.policies).count(), 0, "seed {seed}");
    }
}

#[test]
fn a_change_moves_nothing_that_it_does_not_concern() {
    for seed in 0..CASES {
        let mut numbers = Random::new(seed);
        let mut cluster = random(&mut numbers).settled();
        let before = cluster.assign();
        match numbers.below(4) {
            // A new policy, a new node, a node that returns, a lost capacity.
            0 => cluster.policies.extend([policy("a", 0, &["10.0.0.250", "10.1.0.250"], &[])]),
            1 => cluster.nodes.extend([node("m", "10.0.9.9/16")]),
            2 => cluster.unreachable.clear(),
            _ => {
                let (name, node) = cluster.nodes.first_key_value().expect("a node");
                let capacity = Capacity { total: Some(0), ..Capacity::default() };
                let cloud = Some(CloudConfig { networks: node.primary.clone(), capacity });
                if node.interfaces.is_empty() {
                    let node = Node { cloud, ..(**node).clone() };
                    cluster.nodes.insert(name.clone(), Arc::new(node));
                }
            }
        }
        let after = cluster.assign();
        for (name, outcome) in &before.policies {
            let kept = outcome.items.iter().all(|item| after.policies[name].items.contains(item));
            assert!(
                kept,
                "seed {seed}: {name} {outcome:?} {:?} {:#?} {:#?}",
                after.policies[name], cluster.nodes, cluster.policies
            );
        }
    }
}

#[test]
fn limits_of_a_family_are_kept_also_where_objects_have_both() {
    for seed in 0..CASES {
        let mut numbers = Random::new(seed);
        let both = |i: usize| {
            let mut made = (*node(&format!("n{i}"), "10.0.0.1/16").1).clone();
            let networks = vec!["10.0.0.0/16".parse().expect("a network"), "fd00::/64".parse().expect("a network")];
            let limit = |numbers: &mut Random| (!numbers.one_in(3)).then(|| numbers.below(3));
            let capacity = Capacity { total: None, v4: limit(&mut numbers), v6: limit(&mut numbers) };
            made.cloud = Some(CloudConfig { networks, capacity });
            (made.name.clone(), Arc::new(made))
        };
        let nodes: Nodes = (0..3).map(both).collect();
        let policies: Policies = (0..4_i64)
            .map(|i| {
                policy(
                    &format!("o{i}"),
                    i,
                    &[&format!("10.0.1.{i}"), &format!("fd00::1:{i}"), &format!("10.0.2.{i}")],
                    &[],
                )
            })
            .collect();
        let cluster = RandomCluster { nodes, policies, unreachable: BTreeSet::new() };
        let assignment = cluster.assign();
        check_rules(&cluster, &assignment);
        for (name, node) in &cluster.nodes {
            let on_node =
                assignment.policies.values().flat_map(|outcome| &outcome.items).filter(|item| item.node == *name);
            let (v6, v4): (Vec<_>, Vec<_>) = on_node.partition(|item| item.egress_ip.contains(':'));
            let Capacity { v4: limit_v4, v6: limit_v6, .. } = node.cloud.as_ref().expect("a cloud").capacity;
            assert!(limit_v4.is_none_or(|limit| v4.len() <= limit) && limit_v6.is_none_or(|limit| v6.len() <= limit));
        }
    }
}
