//! Nodes whose leases have no end. Pure.
//!
//! A lease ends so that another node can take the addresses. If no other node could host any address of a node, the end
//! would cost its egress traffic and help no other node: a cluster with one gateway would lose it whenever its agent is
//! down for longer than the grace. So the ledger states that the lease has no end, and from then on no address of that
//! node moves unless its agent releases it or its Node is deleted.
//!
//! When another node could host one, the ledger states that the lease is to end, and the agent acknowledges it in its
//! answers to probes when its programs have a deadline again. Until then the lease counts as endless.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use crate::allocation::Nodes;
use crate::model::ledger::Ledger;
use crate::model::policy::{EligibleNodes, Policies, parse_egress_ip};

/// The nodes with addresses that no other egress node could host. Whether others answer does not matter: they may
/// answer the next moment.
fn sole_hosts<'a>(policies: &'a Policies, nodes: &Nodes, ledger: &'a Ledger) -> BTreeSet<&'a str> {
    let mut hosted: BTreeMap<&str, BTreeMap<IpAddr, &EligibleNodes>> = BTreeMap::new();
    for (policy, item) in policies.values().flat_map(|one| one.published.items.iter().map(move |item| (one, item))) {
        let address = parse_egress_ip(&item.egress_ip);
        hosted.entry(&item.node).or_default().extend(address.map(|address| (address, &policy.eligible_nodes)));
    }
    for (address, record) in &ledger.records.open {
        hosted.entry(&record.from).or_default().entry(*address).or_insert(&EligibleNodes::Labelled);
    }
    let could_host = |name: &str, (address, eligible): (&IpAddr, &&EligibleNodes)| {
        nodes.values().any(|node| node.name != name && eligible.might_host(node, *address))
    };
    let is_alone = |(name, addresses): &(&str, BTreeMap<IpAddr, &EligibleNodes>)| {
        nodes.contains_key(*name) && !addresses.iter().any(|hosted| could_host(name, hosted))
    };
    hosted.into_iter().filter(is_alone).map(|(name, _)| name).collect()
}

/// A node must be alone for so long: nodes get their labels one after the other, and only an agent's acknowledgement
/// ends an endless lease.
const SOLE_HOST_DELAY: Duration = Duration::from_secs(10);

/// Since when nodes are the only ones that could host their addresses.
#[derive(Debug, Default)]
pub struct SoleHosts(BTreeMap<String, Instant>);

impl SoleHosts {
    /// Writes endless and ending leases into the draft of a ledger. `bounded` are the acknowledged numbers of ending
    /// leases. Returns when there may be another change.
    pub fn update_draft(
        &mut self,
        draft: &mut Ledger,
        (policies, nodes): (&Policies, &Nodes),
        bounded: &BTreeMap<String, u64>,
        now: Instant,
    ) -> Option<Instant> {
        let sole: BTreeSet<String> = sole_hosts(policies, nodes, draft).into_iter().map(str::to_owned).collect();
        self.0.retain(|name, _| sole.contains(name));
        // A deleted node is not waited for: its deletion means that it counts as gone.
        draft.endless.retain(|name, _| nodes.contains_key(name));
        draft.ending.retain(|name, number| {
            nodes.contains_key(name) && bounded.get(name).is_none_or(|obeyed| *obeyed < *number)
        });
        let ended: Vec<String> = draft.endless.keys().filter(|name| !sole.contains(*name)).cloned().collect();
        for name in ended {
            draft.endless.remove(&name);
            draft.records.last += 1;
            draft.ending.insert(name, draft.records.last);
        }
        let mut next = None;
        for name in sole.into_iter().filter(|name| !draft.endless.contains_key(name)).collect::<Vec<_>>() {
            let declared_at = *self.0.entry(name.clone()).or_insert(now) + SOLE_HOST_DELAY;
            if now < declared_at {
                next = Some(next.map_or(declared_at, |next: Instant| next.min(declared_at)));
                continue;
            }
            draft.records.last += 1;
            draft.ending.remove(&name);
            draft.endless.insert(name, draft.records.last);
        }
        next
    }
}

/// The nodes whose programs may emit without an end.
pub fn endless_nodes(ledger: &Ledger) -> impl Iterator<Item = &String> {
    ledger.endless.keys().chain(ledger.ending.keys())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::allocation::samples::{node, policy};

    fn nodes(all: &[(&str, &str)]) -> Nodes {
        all.iter().map(|(name, network)| node(name, network)).collect()
    }

    fn is_endless(ledger: &Ledger, node: &str) -> bool {
        endless_nodes(ledger).any(|name| name == node)
    }

    /// The node has an address, and is alone, not alone, or deleted.
    #[test]
    fn a_lease_has_no_end_while_no_other_node_could_host_the_addresses() {
        let policies = Policies::from([policy("a", 1, &["172.18.0.101"], &[("n1", "172.18.0.101")])]);
        let none = BTreeMap::new();
        let (only, far) = (nodes(&[("n1", "172.18.0.2/16")]), nodes(&[("n1", "172.18.0.2/16"), ("n2", "10.9.0.2/16")]));
        let near = nodes(&[("n1", "172.18.0.2/16"), ("n2", "172.18.0.3/16")]);
        let (mut draft, mut sole, start) = (Ledger::default(), SoleHosts::default(), Instant::now());
        let mut now = start;
        let mut follow = |draft: &mut Ledger, policies: &Policies, nodes: &Nodes, bounded: &BTreeMap<String, u64>| {
            now += SOLE_HOST_DELAY / 2;
            sole.update_draft(draft, (policies, nodes), bounded, now).map(|next| next - start)
        };
        assert_eq!(follow(&mut draft, &Policies::new(), &only, &none), None, "it has nothing");
        assert_eq!(follow(&mut draft, &policies, &near, &none), None, "another could host it");
        assert_eq!(follow(&mut draft, &policies, &far, &none), Some(SOLE_HOST_DELAY * 5 / 2), "since now");
        assert!(!is_endless(&draft, "n1"));
        assert_eq!(follow(&mut draft, &policies, &only, &none), Some(SOLE_HOST_DELAY * 5 / 2));
        assert_eq!(follow(&mut draft, &policies, &only, &none), None);
        let begun = draft.endless["n1"];
        follow(&mut draft, &policies, &only, &none);
        assert_eq!(draft.endless["n1"], begun, "it stays");
        follow(&mut draft, &policies, &near, &none);
        let ending = draft.ending["n1"];
        assert!(ending > begun && draft.endless.is_empty() && is_endless(&draft, "n1"));
        follow(&mut draft, &policies, &near, &BTreeMap::from([("n1".to_owned(), begun)]));
        assert!(is_endless(&draft, "n1"), "its agent has obeyed an earlier end");
        for _ in 0..3 {
            follow(&mut draft, &policies, &only, &none);
        }
        assert!(
            draft.endless["n1"] > ending && draft.ending.is_empty(),
            "it is alone again before its agent has read it"
        );
        follow(&mut draft, &policies, &near, &none);
        let obeyed = BTreeMap::from([("n1".to_owned(), draft.ending["n1"])]);
        follow(&mut draft, &policies, &near, &obeyed);
        assert!(!is_endless(&draft, "n1"));
        for _ in 0..3 {
            follow(&mut draft, &policies, &only, &none);
        }
        assert!(is_endless(&draft, "n1"));
        follow(&mut draft, &policies, &Nodes::new(), &none);
        assert!(!is_endless(&draft, "n1"), "its Node is deleted");
    }

    /// The labels and networks of others count, not whether they answer; an address being handed over still belongs to
    /// the old node.
    #[test]
    fn an_egress_node_whose_networks_may_contain_an_address_could_host_it() {
        let policies = Policies::from([policy("a", 1, &["172.18.0.101"], &[("n1", "172.18.0.101")])]);
        let mut all = nodes(&[("n1", "172.18.0.2/16"), ("n2", "172.18.0.3/16")]);
        std::sync::Arc::make_mut(all.get_mut("n2").expect("a node")).assignable = false;
        assert_eq!(sole_hosts(&policies, &all, &Ledger::default()), BTreeSet::from(["n1"]));
        let other = std::sync::Arc::make_mut(all.get_mut("n2").expect("a node"));
        (other.assignable, other.networks_known) = (true, false);
        assert!(sole_hosts(&policies, &all, &Ledger::default()).is_empty(), "no addresses are known");
    }
}
