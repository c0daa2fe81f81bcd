//! Nodes: they process what their watches have delivered, obey, acknowledge and read.

use super::*;

impl SimulatedCluster {
    pub(super) fn act(&mut self, index: usize) {
        let (now, name) = (self.now, NODES[index]);
        let reaches = !self.is_away() && !self.cut.contains(&(API, name));
        let (ledgers, policies) = (self.api.ledgers.len() - 1, self.api.policies.len() - 1);
        let lag = |seen: usize, all: usize, random: &mut Random| match reaches && random.below(50) == 0 {
            true => seen + random.below(1 + all - seen),
            false => seen,
        };
        let node = &mut self.nodes[index];
        if now < node.dead.1 {
            node.is_new = true;
            return;
        }
        if std::mem::take(&mut node.is_new) {
            node.restart(now);
        }
        if reaches && !std::mem::replace(&mut node.has_listed, true) {
            (node.ledger_seen, node.objects_seen) = (ledgers, policies);
        }
        if node.asking.is_none() {
            node.ledger_seen = lag(node.ledger_seen, ledgers, &mut self.random);
            node.objects_seen = lag(node.objects_seen, policies, &mut self.random);
        }
        if now < node.acts_at {
            return;
        }
        node.acts_at = now + milliseconds(&mut self.random, 120);
        let ledger = Arc::clone(&self.api.ledgers[node.ledger_seen]);
        let view = objects_of(&self.api, node.objects_seen);
        let wants = !given(&view, name).is_empty() || node.ownership.arriving().next().is_some();
        let (terms, obeyed) = (LeaseTerms::of(&ledger, name), node.obeyed);
        node.lease.set_demand(LeaseDemand { has_addresses: wants, terms, acknowledged_expiry: obeyed });
        let asks = node.lease.next_read_at().is_some_and(|time| time <= now);
        if asks {
            node.lease.note_read_started(now);
        }
        let state = node.lease.state(now, now >= node.deadline);
        match node.lease.deadline(state) {
            Deadline::Unchanged => {}
            Deadline::At(time) => node.deadline = time,
            Deadline::Passed | Deadline::Never => node.deadline = now,
        }
        let expired = matches!(state, LeaseState::Expired(_));
        node.ownership.set_lease_expired(expired, &node.held);
        // A node that has read it in the ledger uses the ledger.
        let unknown_orders = node.orders.iter().filter(|(_, number)| **number > ledger.records.last);
        node.ownership.set_orders(&unknown_orders.map(|(address, number)| (*address, *number)).collect());
        let mut ask = None;
        if expired {
            node.asking = None;
            node.ownership.observe_ledger(ledger);
            node.apply(&view);
            if let LeaseState::Expired(fall) = state {
                node.obeyed = fall;
            }
        } else if node.has_listed && node.asking.is_none_or(|(_, until)| now > until) {
            node.ownership.observe_ledger(ledger);
            let doubtful = node.apply(&view);
            if !doubtful.is_empty() {
                self.sent += 1;
                ask = Some(self.sent);
                node.asking = Some((self.sent, now + Duration::from_secs(1)));
            }
        }
        let acknowledgements = node.ownership.released(&node.held, &BTreeMap::new());
        let sends = acknowledgements != node.sent || self.random.below(50) == 0;
        node.sent.clone_from(&acknowledgements);
        if asks {
            self.send(name, API, SimulatedMessage::ReadLedger { node: index, began: now });
        }
        if let Some(ask) = ask {
            self.send(name, API, SimulatedMessage::ReadObjects { node: index, ask });
        }
        if sends {
            self.send(name, API, SimulatedMessage::Acknowledge { node: index, acknowledgements });
        }
    }
}

impl SimulatedNode {
    pub(super) fn ownership_name(&self) -> &str {
        self.ownership.node_name()
    }

    /// Another process, which knows of the former one only what the kernel holds.
    fn restart(&mut self, now: Instant) {
        self.lease = LeaseHolder::new(Duration::from_secs(5), now, false);
        self.ownership = NodeOwnership::new(self.ownership.node_name().to_owned());
        (self.orders, self.sent, self.obeyed) = (Acknowledgements::new(), Acknowledgements::new(), 0);
        self.probes.clear();
        (self.term, self.asking, self.acts_at, self.has_listed) = (0, None, now, false);
    }

    /// Holds what it may of what the status assigns, except for addresses that wait for a fresh read.
    pub(super) fn apply(&mut self, policies: &Policies) -> AddressByPolicy {
        let desired = given(policies, self.ownership.node_name());
        let barred = self.ownership.withheld(&desired, &self.held);
        self.held = desired.into_iter().filter(|(id, _)| !barred.all.contains_key(id)).collect();
        self.ownership.note_settled(&self.held);
        barred.unconfirmed
    }
}

pub(super) fn objects_of(api: &Api, seen: usize) -> Arc<Policies> {
    Arc::clone(&api.policies[seen])
}

/// The addresses that a status assigns to a node, the older policy's first.
pub(super) fn given(policies: &Policies, node: &str) -> AddressByPolicy {
    let mut all = BTreeMap::new();
    let mut ids = (1..).map(EgressId);
    for policy in policies.values() {
        let id = ids.next().expect("numbers do not end");
        for item in &policy.published.items {
            let address = parse_egress_ip(&item.egress_ip).expect("an address");
            all.entry(address).or_insert((id, item.node.clone()));
        }
    }
    all.into_iter().filter(|(_, (_, at))| at == node).map(|(address, (id, _))| (id, address)).collect()
}
