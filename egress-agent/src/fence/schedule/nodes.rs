//! What a node does: it sees what its watches have told it so far, obeys, speaks, and asks.

use super::*;

impl World {
    pub(super) fn act(&mut self, index: usize) {
        let (now, name) = (self.now, NODES[index]);
        let is_there = self.quiet || now >= self.away_until;
        let reaches = is_there && !self.cut.contains(&(API, name));
        let (ledgers, objects) = (self.api.ledgers.len() - 1, self.api.objects.len() - 1);
        let lag = |seen: usize, all: usize, random: &mut Random| match reaches && random.below(50) == 0 {
            true => seen + random.below(1 + all - seen),
            false => seen,
        };
        let node = &mut self.nodes[index];
        if node.asking.is_none() {
            node.ledger_seen = lag(node.ledger_seen, ledgers, &mut self.random);
            node.objects_seen = lag(node.objects_seen, objects, &mut self.random);
        }
        if now < node.acts_at {
            return;
        }
        node.acts_at = now + self.random.milliseconds(120);
        let ledger = Arc::clone(&self.api.ledgers[node.ledger_seen]);
        let view = objects_of(&self.api, node.objects_seen);
        let wants = !given(&view, name).is_empty();
        node.fence.set_stake(Stake { wants, leases: Some(ledger.leases), total: ledger.total }, now);
        let asks = node.fence.ask_at().is_some_and(|time| time <= now);
        if asks {
            node.fence.note_asked(now);
        }
        let fenced = node.fence.standing(now) == Standing::Fenced;
        node.tenure.set_fenced(fenced, &node.held);
        // Whoever has heard of it in the ledger goes by that.
        let unheard = node.orders.iter().filter(|(_, number)| **number > ledger.records.last);
        node.tenure.order(&unheard.map(|(address, number)| (*address, *number)).collect());
        node.fence.note_given(node.regain.given().borrow().clone());
        let back = node.fence.regained(now).map(|(addresses, _)| addresses.clone()).unwrap_or_default();
        // Nothing of that waits for an answer.
        if back != node.back {
            node.asking = None;
        }
        node.back.clone_from(&back);
        node.tenure.set_regained(back);
        let (mut ask, before) = (None, node.held.clone());
        if fenced {
            node.asking = None;
            node.tenure.follow(ledger);
            node.apply(&view, now);
        } else if node.asking.is_none_or(|(_, until)| now > until) {
            node.tenure.follow(ledger);
            let doubtful = node.apply(&view, now);
            if !doubtful.is_empty() {
                self.sent += 1;
                ask = Some(self.sent);
                node.asking = Some((self.sent, now + Duration::from_secs(1)));
            }
        }
        let had_back =
            node.held.values().filter(|one| node.back.contains(*one) && !before.values().any(|had| had == *one));
        self.regained += u64::try_from(had_back.count()).expect("few");
        let words = node.tenure.released(&node.held, &BTreeMap::new());
        let says = words != node.said || self.random.below(50) == 0;
        node.said.clone_from(&words);
        if asks {
            self.send(name, API, Message::ReadLedger { node: index, began: now });
        }
        if let Some(ask) = ask {
            self.send(name, API, Message::ReadObjects { node: index, ask });
        }
        if says {
            self.send(name, API, Message::Word { node: index, words });
        }
    }
}

impl Node {
    pub(super) fn tenure_name(&self) -> &str {
        self.tenure.node_name()
    }

    /// Holds what it may of what the status gives it. What waits for being read anew.
    pub(super) fn apply(&mut self, objects: &Objects, now: Instant) -> Owned {
        let desired = given(objects, self.tenure.node_name());
        let barred = self.tenure.barred(&desired, &self.held);
        let mut held: Owned =
            desired.iter().filter(|(id, _)| !barred.all.contains_key(id)).map(|(id, one)| (*id, *one)).collect();
        let is_new = |id: &EgressId, one: &IpAddr| self.held.get(id) != Some(one);
        let new: Vec<IpAddr> = held.iter().filter(|(id, one)| is_new(id, one)).map(|(_, one)| *one).collect();
        let promised = self.regain.take(new.into_iter(), now);
        held.retain(|id, one| !(is_new(id, one) && promised.contains(one)));
        self.held = held;
        self.tenure.settle(&self.held);
        self.regain.settle(self.held.values().copied().collect());
        self.regain.want(self.tenure.wanted_back(&desired));
        barred.doubtful
    }
}

pub(super) fn objects_of(api: &Api, seen: usize) -> Arc<Objects> {
    Arc::clone(&api.objects[seen])
}

/// What a status gives to a node, the older object's first.
pub(super) fn given(objects: &Objects, node: &str) -> Owned {
    let mut all = BTreeMap::new();
    let mut ids = (1..).map(EgressId);
    for object in objects.values() {
        let id = ids.next().expect("numbers do not end");
        for item in &object.items {
            let address = parse_egress_ip(&item.egress_ip).expect("an address");
            all.entry(address).or_insert((id, item.node.clone()));
        }
    }
    all.into_iter().filter(|(_, (_, at))| at == node).map(|(address, (id, _))| (id, address)).collect()
}
