//! Classes of pods: what the policies of a pod apply to, where they have destinations.
//!
//! Of several policies with a destination, the one with the longest prefix that contains it applies, then the first by
//! rank ([`super`]). An excluded prefix of a policy takes its destinations from that policy alone.
//!
//! The result is one table of prefixes for each set of policies, not for each pod: a class.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use crate::model::policy::Destinations;
use crate::model::state::{ClassPolicies, EgressId, Family, KernelState, NOT_NUMBERED, PodClass};

/// The destinations of a policy that selects a pod, and its egress ID.
#[derive(Clone, Copy, Debug)]
pub(super) struct Candidate<'a> {
    pub destinations: &'a Destinations,
    pub id: Option<EgressId>,
}

/// The table of some candidates.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ClassTable {
    pub policies: ClassPolicies,
    /// Candidates of which no prefix applies, or not one that another candidate has too; with that other one. By their
    /// indices.
    pub beaten: BTreeMap<usize, usize>,
}

/// Which candidate applies to which destinations of the family; of equal prefixes the first candidate's.
pub(super) fn table(candidates: &[Candidate<'_>], family: Family) -> ClassTable {
    let all = default_prefix(family);
    // By address, then length: a prefix follows those that contain it. True is a destination, false an exclusion.
    let mut changes: BTreeMap<IpNet, Vec<(usize, bool)>> = BTreeMap::from([(all, Vec::new())]);
    for (index, candidate) in candidates.iter().enumerate() {
        match candidate.destinations {
            Destinations::All => changes.entry(all).or_default().push((index, true)),
            Destinations::Prefixes(prefixes) => {
                for (net, applies) in prefixes.entries().filter(|(net, _)| net.addr().is_ipv4() == all.addr().is_ipv4())
                {
                    changes.entry(*net).or_default().push((index, *applies));
                }
            }
        }
    }
    let mut table = BTreeMap::new();
    let (mut winners, mut ties, mut others) = (BTreeSet::new(), BTreeMap::new(), BTreeMap::new());
    let mut path: Vec<TriePath> = Vec::new();
    for (net, changed) in changes {
        while path.last().is_some_and(|place| !place.net.contains(&net)) {
            path.pop();
        }
        let around = path.last();
        let mut lengths = around.map_or_else(|| vec![None; candidates.len()], |place| place.lengths.clone());
        for (index, applies) in &changed {
            lengths[*index] = applies.then_some(net.prefix_len());
        }
        let applying = lengths.iter().enumerate().filter_map(|(index, length)| Some((index, (*length)?)));
        let winner = applying.max_by_key(|(index, length)| (*length, std::cmp::Reverse(*index)));
        if let Some((winner, length)) = winner {
            winners.insert(winner);
            for (index, _) in changed.iter().filter(|(index, applies)| *applies && *index != winner) {
                let beaten = if length == net.prefix_len() { &mut ties } else { &mut others };
                beaten.entry(*index).or_insert(winner);
            }
        }
        let id = winner.map(|(index, _)| candidates[index].id.unwrap_or(NOT_NUMBERED));
        if around.is_none_or(|place| place.id != id) {
            table.insert(net, id);
        }
        path.push(TriePath { net, lengths, id });
    }
    others.retain(|index, _| !winners.contains(index));
    let mut beaten = others;
    beaten.extend(ties);
    ClassTable { policies: ClassPolicies::new(table), beaten }
}

/// A prefix, the length of the longest destination of each candidate that contains it, and the policy that applies.
struct TriePath {
    net: IpNet,
    lengths: Vec<Option<u8>>,
    id: Option<EgressId>,
}

/// All destinations of the family.
pub(super) fn default_prefix(family: Family) -> IpNet {
    match family {
        Family::V4 => Ipv4Net::default().into(),
        Family::V6 => Ipv6Net::default().into(),
    }
}

/// The numbers of classes. One is given once, and a class keeps it while it is in use.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClassNumbers {
    numbers: BTreeMap<Arc<ClassPolicies>, PodClass>,
    last: u32,
}

impl ClassNumbers {
    /// Those of the kernel, at the start of an agent.
    pub fn of(kernel: &KernelState) -> Self {
        let numbers = kernel.classes.iter().map(|(class, policies)| (Arc::clone(policies), *class)).collect();
        Self { numbers, last: kernel.classes.last_key_value().map_or(0, |(last, _)| last.0) }
    }

    /// The number of these policies.
    pub(super) fn number(&mut self, policies: Arc<ClassPolicies>) -> PodClass {
        let last = &mut self.last;
        *self.numbers.entry(policies).or_insert_with(|| {
            *last = last.wrapping_add(1).max(1);
            PodClass(*last)
        })
    }

    /// Forgets classes that the state does not have.
    pub fn retain(&mut self, state: &KernelState) {
        self.numbers.retain(|_, class| state.classes.contains_key(class));
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use egress_common::random::Random;

    use super::*;
    use crate::model::policy::DestinationPrefixes;
    use crate::model::samples::{ip, net};
    use crate::model::state::PodPolicies;

    fn to(included: &[&str], excluded: &[&str]) -> Destinations {
        let nets = |texts: &[&str]| texts.iter().map(|text| net(text)).collect::<Vec<_>>();
        Destinations::Prefixes(Arc::new(DestinationPrefixes::new(nets(included), nets(excluded))))
    }

    /// Candidates with the IDs 1, 2 and so on.
    fn found(all: &[Destinations], family: Family) -> ClassTable {
        let number = |index: usize| Some(EgressId(u32::try_from(index).expect("few") + 1));
        let candidates = all.iter().enumerate().map(|(index, one)| Candidate { destinations: one, id: number(index) });
        table(&candidates.collect::<Vec<_>>(), family)
    }

    fn entries(table: &ClassTable) -> Vec<(String, u32)> {
        table.policies.entries().map(|(net, id)| (net.to_string(), id.map_or(0, |id| id.0))).collect()
    }

    fn expected(all: &[(&str, u32)]) -> Vec<(String, u32)> {
        all.iter().map(|(net, id)| ((*net).to_owned(), *id)).collect()
    }

    #[test]
    fn the_longest_prefix_applies_and_of_equal_ones_the_first() {
        let all = [
            Destinations::All,
            to(&["198.51.100.0/24", "2001:db8::/32"], &[]),
            to(&["0.0.0.0/0", "198.51.100.0/24", "198.51.100.128/25"], &[]),
        ];
        let v4 = found(&all, Family::V4);
        assert_eq!(entries(&v4), expected(&[("0.0.0.0/0", 1), ("198.51.100.0/24", 2), ("198.51.100.128/25", 3)]));
        assert_eq!(v4.beaten, [(2, 0)].into(), "by the first one, at the default prefix");
        let v6 = found(&all, Family::V6);
        assert_eq!(entries(&v6), expected(&[("::/0", 1), ("2001:db8::/32", 2)]));
        assert_eq!(v6.beaten, BTreeMap::new());
    }

    #[test]
    fn an_exclusion_concerns_its_own_policy_and_a_longer_destination_includes_again() {
        let one = to(&["0.0.0.0/0", "10.1.2.0/24"], &["10.0.0.0/8"]);
        let alone = found(std::slice::from_ref(&one), Family::V4);
        assert_eq!(entries(&alone), expected(&[("0.0.0.0/0", 1), ("10.0.0.0/8", 0), ("10.1.2.0/24", 1)]));
        let both = found(&[one, to(&["10.0.0.0/9"], &[])], Family::V4);
        let with_another = [("0.0.0.0/0", 1), ("10.0.0.0/8", 0), ("10.0.0.0/9", 2), ("10.1.2.0/24", 1)];
        assert_eq!(entries(&both), expected(&with_another));
        // A prefix that is both is excluded, and an exclusion of nothing changes nothing.
        assert_eq!(entries(&found(&[to(&["10.0.0.0/8"], &["10.0.0.0/8"])], Family::V4)), expected(&[("0.0.0.0/0", 0)]));
        let nothing = found(&[to(&["10.0.0.0/8"], &["11.0.0.0/8"])], Family::V4);
        assert_eq!(entries(&nothing), expected(&[("0.0.0.0/0", 0), ("10.0.0.0/8", 1)]));
    }

    #[test]
    fn entries_that_change_nothing_are_left_out() {
        let all = [to(&["10.0.0.0/8", "10.1.0.0/16"], &[]), to(&["10.0.0.0/9"], &[])];
        let both = found(&all, Family::V4);
        assert_eq!(
            entries(&both),
            expected(&[("0.0.0.0/0", 0), ("10.0.0.0/8", 1), ("10.0.0.0/9", 2), ("10.1.0.0/16", 1)])
        );
        assert_eq!(found(&[Destinations::All], Family::V4).policies.sole(), Some(Some(EgressId(1))));
        let within = found(&[to(&["0.0.0.0/0"], &["10.0.0.0/8"]), to(&["10.0.0.0/8"], &[])], Family::V4);
        assert_eq!(within.beaten, BTreeMap::new());
    }

    /// The rule itself, for one destination.
    fn applies(all: &[Destinations], to: IpAddr) -> Option<EgressId> {
        let length = |one: &Destinations| match one {
            Destinations::All => Some(0),
            Destinations::Prefixes(prefixes) => {
                let around = prefixes.entries().filter(|(net, _)| net.contains(&to));
                around
                    .max_by_key(|(net, _)| net.prefix_len())
                    .filter(|(_, applies)| **applies)
                    .map(|(net, _)| net.prefix_len())
            }
        };
        let longest = all.iter().filter_map(length).max()?;
        let first = all.iter().position(|one| length(one) == Some(longest))?;
        Some(EgressId(u32::try_from(first).expect("few") + 1))
    }

    #[test]
    fn a_table_is_the_rule_for_every_destination() {
        const NETS: [&str; 8] = [
            "0.0.0.0/0",
            "10.0.0.0/8",
            "10.0.0.0/9",
            "10.64.0.0/10",
            "10.64.1.0/24",
            "10.64.1.7/32",
            "11.0.0.0/8",
            "2001:db8::/32",
        ];
        const HOSTS: [&str; 7] =
            ["192.0.2.1", "10.200.0.1", "10.1.0.1", "10.64.2.1", "10.64.1.1", "10.64.1.7", "11.1.1.1"];
        for seed in 1..=2_000 {
            let mut random = Random::new(seed);
            let mut some =
                |one_in: usize| -> Vec<&str> { NETS.into_iter().filter(|_| random.below(one_in) == 0).collect() };
            let mut policy = || if some(4).is_empty() { Destinations::All } else { to(&some(2), &some(4)) };
            let all = [policy(), policy(), policy()];
            let table = PodPolicies::ByDestination(Arc::new(found(&all, Family::V4).policies));
            for host in HOSTS.map(ip) {
                assert_eq!(table.of(host), applies(&all, host), "seed {seed}: {host} of {all:?}");
            }
        }
    }

    #[test]
    fn a_class_keeps_its_number_and_no_number_returns() {
        let policies = |id| Arc::new(ClassPolicies::new([(default_prefix(Family::V4), Some(EgressId(id)))].into()));
        let mut numbers = ClassNumbers::default();
        assert_eq!([1, 2, 1].map(|id| numbers.number(policies(id)).0), [1, 2, 1]);
        let kernel = KernelState { classes: [(PodClass(2), policies(2))].into(), ..KernelState::default() };
        numbers.retain(&kernel);
        assert_eq!([1, 2].map(|id| numbers.number(policies(id)).0), [3, 2]);
        let mut started = ClassNumbers::of(&kernel);
        assert_eq!([1, 2].map(|id| started.number(policies(id)).0), [3, 2], "of a new agent");
    }

    /// By every destination, and the prefixes themselves.
    #[test]
    fn lost_flows_are_those_whose_destination_has_another_policy() {
        let class = |all: &[Destinations]| PodPolicies::ByDestination(Arc::new(found(all, Family::V4).policies));
        let (first, second) = (EgressId(1), EgressId(2));
        let states = [
            PodPolicies::None,
            PodPolicies::One(first),
            PodPolicies::One(second),
            class(&[to(&["10.0.0.0/8"], &[])]),
            class(&[to(&["10.0.0.0/9"], &[])]),
            class(&[to(&["10.0.0.0/8"], &["10.64.0.0/10"])]),
            class(&[Destinations::All, to(&["10.0.0.0/8"], &[])]),
            class(&[to(&["10.0.0.0/8"], &[]), Destinations::All]),
            class(&[to(&["10.0.0.0/8"], &[]), to(&["10.64.0.0/10"], &[])]),
        ];
        let hosts = ["192.0.2.1", "10.200.0.1", "10.1.0.1", "10.64.2.1", "0.0.0.0", "10.0.0.0", "10.64.0.0"].map(ip);
        for (had, has) in states.iter().flat_map(|had| states.iter().map(move |has| (had, has))) {
            let lost = had.lost_with(has);
            for host in hosts {
                let id = had.of(host);
                let is_lost = id.is_some_and(|id| has.of(host) != Some(id));
                assert_eq!(id.is_some_and(|id| lost.contains(id, host)), is_lost, "{host}: {had:?} then {has:?}");
            }
        }
    }
}
