//! Nodes that are cut off and return, edited policies, leaders that die between two writes, slow nodes.

use egress_common::random::Random;

use super::*;

/// The state of a node's agent.
#[derive(Default)]
struct StoryAgent {
    cut: bool,
    in_touch: Duration,
    holds: BTreeSet<IpAddr>,
    /// Ready to take over, by the number of the hand-over.
    taken: BTreeMap<IpAddr, u64>,
    /// Handed over, by number, and to which node.
    gave: BTreeMap<IpAddr, (u64, String)>,
}

struct Story {
    stage: HandOverCluster,
    agents: BTreeMap<String, StoryAgent>,
    time: Duration,
    numbers: Random,
    /// Whether nodes wait for one another, and hand over.
    new_owners: bool,
}

const ADDRESSES: [&str; 3] = [A, "172.18.0.102", "172.18.0.103"];

pub(super) fn tell(seed: u64, new_owners: bool) {
    let numbers = Random::new(seed);
    let two = [policy("a", 1, &[A, ADDRESSES[1]], &[]), policy("b", 2, &[A, ADDRESSES[2]], &[])];
    // Addresses that move between policies are not handed over.
    let policies = if new_owners { Policies::from([policy("a", 1, &ADDRESSES, &[])]) } else { Policies::from(two) };
    let stage = HandOverCluster::new(policies);
    let agents = stage.nodes.keys().map(|name| (name.clone(), StoryAgent::default())).collect();
    let mut story = Story { stage, agents, time: Duration::ZERO, numbers, new_owners };
    for _ in 0..120 {
        story.second(seed, true);
    }
    story.agents.values_mut().for_each(|agent| agent.cut = false);
    for _ in 0..10 {
        story.second(seed, false);
    }
    assert_eq!(story.stage.records.open, BTreeMap::new(), "seed {seed}: all is done when all is quiet");
    let again = story.stage.plan(story.now());
    assert_eq!(again, HandoverPlan::default(), "seed {seed}");
    let placed: usize = story.stage.policies.values().map(|policy| policy.published.items.len()).sum();
    let held: usize = story.agents.values().map(|agent| agent.holds.len()).sum();
    assert_eq!(placed, held, "seed {seed}");
}

impl Story {
    fn now(&self) -> Instant {
        self.stage.start + self.time
    }

    fn second(&mut self, seed: u64, eventful: bool) {
        self.time += Duration::from_secs(1);
        if eventful {
            self.happen();
        }
        for (name, agent) in &mut self.agents {
            if agent.cut {
                if self.time >= agent.in_touch + LEASE {
                    agent.holds.clear();
                    agent.taken.clear();
                    agent.gave.clear();
                }
            } else {
                agent.in_touch = self.time;
                self.stage.confirmed.insert(name.clone(), self.stage.start + self.time);
            }
        }
        self.stage.unreachable =
            self.agents.iter().filter(|(_, agent)| agent.cut).map(|(name, _)| name.clone()).collect();
        let plan = self.stage.plan(self.now());
        let writes = plan.record_changes.len() + plan.items.len();
        let crash = (eventful && self.numbers.one_in(6)).then(|| self.numbers.below(1 + writes));
        let (before, after): (Vec<_>, Vec<_>) =
            plan.record_changes.iter().cloned().partition(|step| matches!(step, RecordChange::Record(..)));
        let losing_first = |items: &(PolicyKey, Vec<Item>)| {
            let old = &self.stage.policies[&items.0].published.items;
            old.iter().all(|item| items.1.iter().any(|new| new.egress_ip == item.egress_ip))
        };
        let mut items: Vec<_> = plan.items.into_iter().collect();
        items.sort_by_key(losing_first);
        let writes = before.into_iter().map(Ok).chain(items.into_iter().map(Err)).chain(after.into_iter().map(Ok));
        for (done, write) in writes.enumerate() {
            if crash == Some(done) {
                self.stage.planner = HandoverPlanner::default();
                self.stage.since = self.now();
                break;
            }
            match write {
                Ok(step) => self.stage.record(&step),
                Err((name, items)) => self.stage.write(&name, items),
            }
            self.act(eventful, false);
            self.check(seed);
        }
        self.act(eventful, true);
        self.check(seed);
    }

    fn happen(&mut self) {
        match self.numbers.below(6) {
            0 => {
                let name = format!("n{}", 1 + self.numbers.below(3));
                let agent = self.agents.get_mut(&name).expect("an agent");
                agent.cut = !agent.cut;
            }
            1 => {
                let name = if self.new_owners { "a" } else { ["a", "b"][usize::from(self.numbers.one_in(2))] };
                let listed = ADDRESSES.iter().filter(|_| self.numbers.one_in(2));
                let listed = listed.map(|text| (*text).to_owned()).collect();
                let policy = self.stage.policies.get_mut(&name.into()).expect("the policy");
                *policy = Arc::new(EgressPolicy { listed, ..(**policy).clone() });
            }
            _ => {}
        }
    }

    /// Some nodes look at what is written; in quiet times all do. No node hands over between two writes of the leader:
    /// `crate::ownership::kernel_handovers` describes that case.
    fn act(&mut self, eventful: bool, hands_over: bool) {
        let (stage, new_owners) = (&mut self.stage, self.new_owners);
        for (name, agent) in self.agents.iter_mut().filter(|(_, agent)| !agent.cut) {
            if eventful && self.numbers.one_in(2) {
                continue;
            }
            let open = &stage.records.open;
            let is_ours = |address: &IpAddr, number: u64| {
                open.get(address).is_some_and(|r| r.number == number && r.to.as_ref() == Some(name))
            };
            agent.taken.retain(|address, number| is_ours(address, *number));
            agent.gave.retain(|address, (number, _)| {
                open.get(address).is_some_and(|record| record.number == *number && record.from == *name)
            });
            for ((address, number), all) in &mut stage.prepared {
                if agent.taken.get(address) != Some(number) {
                    all.remove(name);
                }
            }
            let shown =
                stage.policies.values().flat_map(|policy| &policy.published.items).filter(|item| item.node == *name);
            let shown: BTreeSet<IpAddr> = shown.filter_map(|item| item.egress_ip.parse().ok()).collect();
            let mut holds: BTreeSet<IpAddr> = shown
                .into_iter()
                .filter(|address| open.get(address).is_none_or(|record| record.to.as_ref() == Some(name)))
                .collect();
            for (address, record) in open {
                let key = (*address, record.number);
                let arrives = new_owners && record.to.as_ref() == Some(name) && record.from != *name;
                if arrives && !agent.taken.contains_key(address) {
                    agent.taken.insert(*address, record.number);
                    stage.prepared.entry(key).or_default().insert(name.clone());
                }
                if record.from != *name {
                    continue;
                }
                if new_owners && agent.holds.contains(address) {
                    let ready = |to: &&String| stage.prepared.get(&key).is_some_and(|all| all.contains(*to));
                    match record.to.as_ref().filter(ready) {
                        Some(to) if hands_over => {
                            agent.gave.insert(*address, (record.number, to.clone()));
                        }
                        // It may already be ready.
                        _ if !hands_over || (eventful && self.numbers.one_in(2)) => {
                            holds.insert(*address);
                            continue;
                        }
                        _ => {}
                    }
                }
                stage.released.insert(key);
                let to = agent.gave.get(address).map(|(_, to)| to.clone());
                // Acknowledgements are not withdrawn.
                let given = stage.given.entry(key).or_default();
                *given = to.or(given.take());
            }
            agent.holds = holds;
        }
    }

    fn check(&self, seed: u64) {
        let mut gateways = BTreeMap::new();
        for (name, agent) in &self.agents {
            let is_open = |(address, number): &(&IpAddr, &u64)| {
                let given = self.stage.given.get(&(**address, **number)).and_then(Option::as_ref);
                let passed = self.agents.values().filter_map(|other| other.gave.get(*address));
                given == Some(name) || passed.into_iter().any(|(of, to)| of == *number && to == name)
            };
            let open = agent.taken.iter().filter(is_open).map(|(address, _)| address);
            for address in agent.holds.iter().chain(open).collect::<BTreeSet<_>>() {
                if let Some(other) = gateways.insert(address, name) {
                    panic!("seed {seed}, second {}: {address} is held by {name} and {other}", self.time.as_secs());
                }
            }
        }
    }
}
