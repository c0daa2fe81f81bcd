//! Leaders: they probe, and make their passes with one request after the other.

use super::*;
use crate::model::reserved::ClusterNetworks;
use crate::model::services::Services;

impl SimulatedCluster {
    pub(super) fn lead(&mut self) {
        let (now, api) = (self.now, self.api.ledgers.len() - 1);
        let is_there = !self.is_away();
        for ((index, leader), name) in self.leaders.iter_mut().enumerate().zip(LEADERS) {
            if is_there && !self.cut.contains(&(API, name)) && self.random.below(6) == 0 {
                let signed_by = |seen: usize| self.api.ledgers[seen].leader.as_str();
                let is_overwritten = signed_by(leader.ledger_seen) == name && signed_by(api) != name;
                leader.is_replaced |= is_overwritten && now >= leader.alone_until;
                leader.ledger_seen = api;
                leader.suspicions.observe(&self.api.ledgers[api], now);
                leader.note_terms(&self.api.ledgers[api], index, now);
            }
        }
        for index in 0..self.leaders.len() {
            self.probe(index);
            if now < self.leaders[index].leads_until {
                self.work(index);
            }
        }
    }

    /// Of a process that leads, or still believes so.
    fn work(&mut self, index: usize) {
        let now = self.now;
        if self.leaders[index].waits_until.is_some_and(|until| now < until) {
            return;
        }
        if self.leaders[index].waits_until.take().is_some() {
            self.leaders[index].queue.clear();
        }
        if self.leaders[index].queue.is_empty() {
            self.leaders[index].pass += 1;
            if self.leaders[index].pass.is_multiple_of(5) {
                self.plan(index);
            }
        }
        let leader = &mut self.leaders[index];
        if leader.queue.is_empty() {
            return;
        }
        if leader.is_replaced && matches!(leader.queue[0], LeaderStep::Ledger(_)) {
            // And of the following requests.
            return leader.queue.clear();
        }
        leader.waits_until = Some(now + Duration::from_secs(1));
        let message = match leader.queue.remove(0) {
            LeaderStep::Ledger(ledger) => {
                SimulatedMessage::WriteLedger { leader: index, base: leader.ledger_seen, ledger }
            }
            LeaderStep::Object(base, policy) => SimulatedMessage::WriteObject { leader: index, base, policy },
        };
        self.send(LEADERS[index], API, message);
    }

    /// Also of a process that no longer leads.
    fn probe(&mut self, index: usize) {
        let now = self.now;
        if self.leaders[index].probes_at.is_some_and(|time| now < time) {
            return;
        }
        self.leaders[index].probes_at = Some(now + PROBE);
        self.leaders[index].number += 1;
        self.leaders[index].confirm_own(index);
        for (node, name) in NODES.iter().enumerate() {
            let leader = &self.leaders[index];
            let may_confirm = now < leader.confirms_until;
            let confirmed = leader.confirmed_probe.get(&node).copied().filter(|_| may_confirm).unwrap_or_default();
            let (number, term) = (leader.number, leader.term);
            let orders = self.api.ledgers[leader.ledger_seen].leaving(name);
            let probe = SimulatedMessage::Probe { leader: index, node, number, confirmed, term, orders };
            self.send(LEADERS[index], name, probe);
        }
    }

    /// One pass of the leader.
    fn plan(&mut self, index: usize) {
        let (now, own) = (self.now, TOTALS[index]);
        // Policies are current: a stale write is refused.
        let policies = self.policies();
        let leader = &mut self.leaders[index];
        let since = leader.since;
        let ledger = Arc::clone(&self.api.ledgers[leader.ledger_seen]);
        let asked_since = |name: &str| match &leader.former {
            Some(former) if former.node == name => former.silent_since,
            _ => since,
        };
        let last_confirmed = |name: &str| {
            leader
                .last_confirmed
                .get(name)
                .map_or(asked_since(name), |last_confirmed| asked_since(name).max(*last_confirmed))
        };
        let alive =
            |name: &str| leader.alive.get(name).map_or(last_confirmed(name), |alive| last_confirmed(name).max(*alive));
        // The agent alone, for the configured time.
        let is_gone = |name: &str| now >= last_confirmed(name) + own * 2 + GRACES[index];
        let those = |is: &dyn Fn(&str) -> bool| -> BTreeSet<String> {
            NODES.iter().filter(|name| is(name)).map(|name| (*name).to_owned()).collect()
        };
        let unreachable = those(&|name| now >= alive(name) + own || is_gone(name));
        let suspects_now = those(&|name| now >= alive(name) + own / 2 || is_gone(name));
        let silent = those(&|name| now >= alive(name) + own && alive(name) < last_confirmed(name) + own);
        let (absent, last_confirmed) =
            (those(&|name| now >= last_confirmed(name) + own), leader.last_confirmed.clone());
        let followed = leader.followed.clone();
        let node_health = NodeHealth {
            suspects: suspects_now,
            silent,
            last_confirmed,
            first_confirmed: followed,
            lease: own,
            ..NodeHealth::default()
        };
        let times = terms(index);
        let mut draft = Ledger {
            leader: LEADERS[index].to_owned(),
            total: Some(own),
            former_total: leader.longest_lease.to_write(own, now),
            programs: Some(times.programs),
            former_programs: leader.longest_programs.to_write(times.programs, now),
            ..Ledger::clone(&ledger)
        };
        let (suspected, _) = suspects(&node_health, &ledger, since, now);
        draft.suspects.retain(|node, _| suspected.contains(node));
        for node in suspected {
            if !draft.suspects.contains_key(&node) {
                draft.records.last += 1;
                draft.suspects.insert(node, draft.records.last);
            }
        }
        let pair = |(address, number): (&IpAddr, &u64)| (*address, *number);
        let acknowledgements = self.api.acknowledgements.values().chain(leader.released.values());
        let released: BTreeSet<_> = acknowledgements.flatten().map(pair).collect();
        let times = LeaseDurations {
            lease: leader.longest_lease.effective(own, now),
            programs: leader.longest_programs.effective(times.programs, now),
        };
        let others = NODES.into_iter().filter(|name| *name != NODES[index]).collect();
        let term_start = TermStart { since, former: leader.former.as_ref(), others: &others };
        let lease_expiries = leader.suspicions.lease_expiries(&node_health, times, term_start);
        let (departed, records) = (BTreeMap::new(), draft.records.clone());
        let (given, prepared) = (BTreeMap::new(), BTreeMap::new());
        let evidence = Evidence {
            released: &released,
            new_owners: &given,
            prepared: &prepared,
            lease_expiries: &lease_expiries,
            deleted_objects_gateways: &departed,
        };
        let (nodes, hand_overs) = (&self.labels, &records.open);
        let (networks, services) = (&ClusterNetworks::default(), &Services::default());
        let (unreachable, absent) = (&unreachable, &absent);
        let facts =
            AssignmentInputs { policies: &policies, nodes, unreachable, absent, networks, services, hand_overs };
        let mut plan = leader.planner.plan(&policies, &assign(&facts), &records, &evidence, now);
        if leader.former.as_ref().is_some_and(|former| now < former.until) {
            plan.items.clear();
            plan.record_changes.retain(|step| step.is_new_to(&records));
        }
        for step in &plan.record_changes {
            if let RecordChange::Record(address, hand_over) = step {
                draft.records.last = draft.records.last.max(hand_over.number);
                draft.records.open.insert(*address, hand_over.clone());
            }
        }
        if draft != *ledger {
            leader.queue.push(LeaderStep::Ledger(draft.clone()));
        }
        let mut items: Vec<_> = plan.items.into_iter().collect();
        items.sort_by_key(|(name, items)| {
            let kept = |address: &str| items.iter().any(|item| item.egress_ip == address);
            policies[name].published.items.iter().all(|item| kept(&item.egress_ip))
        });
        for (name, items) in items {
            let base = Arc::clone(&policies[&name]);
            leader
                .queue
                .push(LeaderStep::Object(Arc::clone(&base), base.published_as(|published| published.items = items)));
        }
        let mut closed = draft;
        for step in &plan.record_changes {
            if let RecordChange::Remove(address) = step {
                closed.records.open.remove(address);
            }
        }
        if plan.record_changes.iter().any(|step| matches!(step, RecordChange::Remove(_))) {
            leader.queue.push(LeaderStep::Ledger(closed));
        }
    }
}
